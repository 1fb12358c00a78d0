"""The documentation does what it says: every block of code runs, every measure has its page."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
from architectures import timm

import flatscope as fs
from flatscope import registry
from flatscope.registry import declarations
from flatscope.reports import items, kinds
from flatscope.training.benchmarking.release import released_leaderboard
from flatscope.training.benchmarking.scores import score_number

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "generate"))

import measure_pages  # noqa: E402
import reference_pages  # noqa: E402
import run_pages  # noqa: E402

PAGES = [page for page in run_pages.pages() if list(run_pages.blocks(page.read_text(encoding="utf-8")))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_of_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in run_pages.needs(page):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
        if package == "timm":
            timm()  # without torchvision, which its models do not need
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    declarations()  # all are loaded before the list is copied: a page declares a measure of its own
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    added = dict(kinds.ADDED_KINDS)
    monkeypatch.setattr(kinds, "ADDED_KINDS", added)  # a page registers a section of its own
    monkeypatch.setattr(items, "ADDED_KINDS", added)
    with warnings.catch_warnings():
        if "lightning" in run_pages.needs(page):
            warnings.simplefilter("ignore")  # its own, on workers and log intervals
        run_pages.run(page)


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run_and_were_saved_with_what_they_show(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "notebook"}
    for cell in cells:
        exec(compile("".join(cell["source"]), path.name, "exec"), namespace)


def test_a_page_about_a_measure_has_all_that_its_declaration_says() -> None:
    entry = declarations("measure")["sharpness"]
    rows = "\n".join(measure_pages._options(entry, measure_pages._docstring(entry)[1]))
    for name, default in entry.options.items():
        assert re.search(rf"\| `{name}` \| `{re.escape(repr(default))}` \| \S", rows)
    facts = measure_pages._facts(entry)
    assert entry.equation in facts["Paper"]
    assert "lower bound" in facts["Exact"]
    board, few = released_leaderboard(), released_leaderboard(few=True)
    for name, entry in declarations().items():
        found = measure_pages._facts(entry)["Found on small networks"]
        asked = few if math.isnan(board.mean(name, "psi")) else board
        score = asked.mean(name, "psi")
        if entry.direction == "none" or math.isnan(score):
            assert found == ""
            continue
        rows = [row for place in asked.populations if (row := asked.row(name, *place, "psi")) is not None]
        assert f"Ψ = {score_number(score)} on [{asked.meta['networks']:,} networks]" in found
        assert found.startswith("as expected") == all(row["low"] > 0 for row in rows)
        assert found.startswith("the other way round") == all(row["high"] < 0 for row in rows)


def test_the_reference_has_a_page_for_every_public_name_and_says_what_each_is() -> None:
    pages = dict(reference_pages.pages())
    assert len({path.lower() for path in pages}) == len(pages)  # on any file system
    paths = [match["path"] for match in reference_pages.DIRECTIVE.finditer(reference_pages.LIST.read_text())]
    public = {f"flatscope.{name}" for name in fs.__all__ if not name.startswith("__")}
    assert public - set(paths) <= {"flatscope.stats", "flatscope.study"}  # of which the parts, and a page, are listed
    overview = reference_pages.overview(reference_pages.LIST.read_text())
    assert ":::" not in overview
    assert all(f"({path})" in overview for path in pages)
    assert "- [`fs.measure`](reference/measure.md): Measure a trained network.\n" in overview


def test_what_pages_say_about_generalization_is_what_the_leaderboard_has() -> None:
    """Words of docs/choose.md and docs/tutorial.md that would have to change with the population."""
    board = released_leaderboard()
    best = [name for name in board.names if name != "oracle"]
    assert best[0] == "l2_path_norm"
    assert "local_linear_margin" in best[:6]
    score = {name: board.mean(name, "psi") for name in best}
    assert score["l2_path_norm"] > score["rho_sum"] > 0.1
    assert 0.35 < score["rho_sum"] / score["l2_path_norm"] < 0.65
    assert score["margin"] < 0.05
    rows = [board.row("psi_trace", *place, "psi") for place in board.populations]
    assert all(row is not None and row["high"] < 0 for row in rows)


def test_the_readme_is_short_and_has_pictures() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 150
    assert re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)


def test_the_repository_has_one_address_and_the_version_one_number() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    home, cited = project["urls"]["Repository"], (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    for name in ("pyproject.toml", "README.md", "CITATION.cff", "mkdocs.yml"):
        addresses = re.findall(r"https://github\.com/[\w-]+/[\w-]+", (ROOT / name).read_text(encoding="utf-8"))
        assert set(addresses) <= {home}, name
    (version,) = re.findall(r"^version: (.+)$", cited, re.MULTILINE)
    (released,) = re.findall(r"^date-released: (.+)$", cited, re.MULTILINE)
    assert version == fs.__version__
    assert f"## {version} ({released})" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
