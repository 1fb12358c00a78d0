"""The page of measures and symmetries: its files are what it says, and give the numbers that it shows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from flatscope.network.interception import FunctionChangedError
from flatscope.registry import SYMMETRIES, declarations

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "generate"))

import symmetry_matrix as matrix  # noqa: E402

CELLS = json.loads(matrix.FOUND.read_text(encoding="utf-8"))["cells"]
QUICK = ["gradient_norm", "hessian_trace", "rho_sum", "rho_unit", "fisher_rao_norm", "l2_norm", "margin"]
QUICK += ["l1_path_norm", "fan_in_l1", "distance_from_initialization"]


def test_every_measure_has_a_cell_under_every_symmetry() -> None:
    """`make symmetries` after a measure is added; `python docs/generate/symmetry_matrix.py NAME` for it alone."""
    assert list(CELLS) == list(SYMMETRIES) == list(matrix.PAIRS)
    for symmetry, cells in CELLS.items():
        assert list(cells) == list(declarations()), symmetry
        for name, cell in cells.items():
            assert cell["declared"] == (symmetry in declarations()[name].invariant_under), (symmetry, name)
            assert cell["verdict"] != "not tested" or cell["reason"], (symmetry, name)


def test_nothing_moves_that_is_declared_to_stand_still() -> None:
    wrong = [
        (s, n) for s, cells in CELLS.items() for n, c in cells.items() if c["declared"] and c["verdict"] == "moved"
    ]
    assert wrong == []


@pytest.mark.parametrize("symmetry", matrix.PAIRS)
def test_the_file_gives_the_numbers_of_the_page(symmetry: str) -> None:
    entries = [declarations()[name] for name in QUICK]
    for name, cell in matrix.compared(symmetry, entries).items():
        kept = CELLS[symmetry][name]
        assert (cell["verdict"], cell["reason"]) == (kept["verdict"], kept["reason"]), name
        if cell["verdict"] != "moved" and declarations()[name].per != "network":
            continue  # of values that all stand still the one that moved most is a matter of rounding
        for key in ("before", "after"):
            assert cell[key] == (None if kept[key] is None else pytest.approx(kept[key], rel=1e-6)), name


def test_another_function_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = matrix.stored("attention_scaling/after")
    other = {name: value * (1.01 if "in_proj_weight" in name else 1.0) for name, value in weights.items()}
    model = matrix.built("transformer")
    model.load_state_dict(other)
    before = matrix.problem("attention_scaling", "before")
    after = before.with_model(model)
    monkeypatch.setattr(matrix, "problem", lambda symmetry, when: before if when == "before" else after)
    with pytest.raises(FunctionChangedError):
        matrix.refuse_other_functions("attention_scaling")


def test_the_file_is_small_and_of_the_networks_that_the_page_writes() -> None:
    assert sum(path.stat().st_size for path in matrix.FOLDER.iterdir()) < 300_000
    for symmetry, (name, _) in matrix.PAIRS.items():
        model = matrix.built(name)
        for when in ("before", "after"):
            model.load_state_dict(matrix.stored(f"{symmetry}/{when}"))
        assert sum(value.numel() for value in model.parameters()) < 2000


def test_the_snippet_prints_what_the_page_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(matrix.FOLDER)
    exec(matrix.snippet(), {})
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    symmetry, measure = matrix.SHOWN
    for when, value in printed.items():
        assert float(value) == pytest.approx(CELLS[symmetry][measure][when], rel=1e-9)
    assert printed["before"] != printed["after"]


def test_the_page_shows_every_measure_and_leads_to_the_file() -> None:
    text = matrix.page(matrix.known())
    for name in declarations():
        assert f"| [`{name}`](measures/{name}.md) |" in text
    assert f"symmetries/{matrix.FILE.name}" in text
    assert "| ? |" not in text
