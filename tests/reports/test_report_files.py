"""`flatscope report`: what it reads from files, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest
from networks import mlp
from test_report import Page, bounds_table, figure, history, table
from test_report_landscape import bowl
from test_report_population import NETWORK_WIDE, population

from flatscope.auditing import audit
from flatscope.cli.app import main
from flatscope.errors import InputError
from flatscope.files import figure_bytes
from flatscope.reports.items import read_item
from flatscope.reports.page import page_text
from flatscope.training.populations.population_frame import PopulationFrame
from flatscope_papers.claims import Answer, Claim, Finding
from flatscope_papers.study_result import StudyResult


def run(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """The command line in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["flatscope", *map(str, words)])
    with pytest.raises(SystemExit) as leaving:
        main()
    return int(leaving.value.code or 0)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """One file of every kind, as their classes write them."""
    table().save(tmp_path / "small.parquet")
    table(2.0).save(tmp_path / "large.json")
    bounds_table().save(tmp_path / "small-bounds.parquet")
    bowl().save(tmp_path / "small-weights.npz")
    bowl("psi").save(tmp_path / "small-psi.parquet")
    population(12).to_parquet(tmp_path / "many.parquet")
    population(12).to_csv(tmp_path / "more.csv", index=False)
    (tmp_path / "small").mkdir()
    history().to_csv(tmp_path / "small" / "history.csv", index=False)
    return tmp_path


def test_one_page_of_everything(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    audit(mlp().problem(), ["rho_sum"], by=("layer",), trials=1).save(saved / "small-audit.json")
    names = ["small.parquet", "large.json", "small-bounds.parquet", "small-weights.npz", "small-psi.parquet",
             "many.parquet", "small", "small-audit.json"]  # fmt: skip
    out = saved / "out" / "page.html"
    assert run(monkeypatch, "report", *[saved / name for name in names], "--out", out, "--title", "All") == 0
    text = out.read_text(encoding="utf-8")
    for anchor in ("measures", "bounds", "audit", "landscape", "population", "training"):
        assert f'<section id="{anchor}"' in text
    assert "<h1>All</h1>" in text
    assert text.count('<span class="network">') == 2  # small and large: names join what belongs together
    assert 'id="measure-table"' in text
    assert "flatscope report" in text  # the command, with the provenance
    assert "report written to" in capsys.readouterr().err


def test_figures_of_the_same_data(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["--figures", saved / "figures", "--format", "pdf, svg"]
    assert run(monkeypatch, "report", saved / "small-psi.parquet", "--out", saved / "r.html", *wanted) == 0
    assert sorted(path.name for path in (saved / "figures").iterdir()) == [
        "landscape-small-psi.pdf", "landscape-small-psi.svg", "relief-small-psi.pdf", "relief-small-psi.svg",
    ]  # fmt: skip


def test_names_and_kinds(saved: Path) -> None:
    assert read_item(str(saved / "small-bounds.parquet"))[0][0] == "small"
    assert read_item(str(saved / "small-psi.parquet"))[0][0] == "small"
    assert read_item(f"mine={saved / 'large.json'}")[0][0] == "mine"
    assert read_item(f"mine={saved / 'small'}")[0][0] == "mine"
    for name in ("many.parquet", "more.csv"):
        item = read_item(str(saved / name))[0][1]
        assert isinstance(item, PopulationFrame)
        assert list(item.measures) == NETWORK_WIDE[:5]
    table().save(saved / "small" / "measured.parquet")
    bowl().save(saved / "small" / "plane.npz")
    assert [type(item).__name__ for _, item in read_item(str(saved / "small"))] == ["DataFrame", "Table", "Surface"]


def test_other_columns_can_be_named(tmp_path: Path) -> None:
    frame = population(12).rename(columns={"generalization_gap": "delta", NETWORK_WIDE[0]: "mine"})
    frame.to_csv(tmp_path / "odd.csv", index=False)
    with pytest.raises(InputError, match="--target"):
        read_item(str(tmp_path / "odd.csv"))
    item = read_item(str(tmp_path / "odd.csv"), "delta", ["mine"])[0][1]
    assert (item.target, list(item.measures)) == ("delta", ["mine"])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.parquet", None, "nothing there"),
        ("weights.safetensors", b"x", "got a .safetensors"),
        ("damaged.parquet", b"PAR1 no", "a Parquet file that can be read"),
        ("other.json", b'{"a": 1}', "JSON of another kind"),
        ("broken.json", b"{", "a JSON file that can be read"),
        ("other.csv", b"a,b\n1,2\n", "columns a, b"),
        ("empty.csv", b"", "a CSV file that can be read"),
        ("other.npz", b"PK", "an .npz file that can be read"),
        ("torn.npz", b"PK\x03\x04 torn", "an .npz file that can be read"),
    ],
)
def test_unknown_files_are_named(
    name: str, content: bytes | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert run(monkeypatch, "report", tmp_path / name, "--out", tmp_path / "r.html") == 2
    said = capsys.readouterr().err
    assert words in said
    assert name in said
    assert not (tmp_path / "r.html").exists()


def test_wrong_usage_is_refused_first(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "report", saved / "small.parquet", "--out", saved / "r.pdf") == 2
    assert run(monkeypatch, "report", saved / "small.parquet", "--out", saved / "r.html", "--format", "gif") == 2
    assert run(monkeypatch, "report", saved.parent, "--out", saved / "r.html") == 2
    assert not (saved / "r.html").exists()


def test_a_study_has_its_claims(tmp_path: Path) -> None:
    claims = [Claim(f"c{n}", "Figure 1", f"claim number {n}", "correlation", "0.9", (0.5, 1.0)) for n in range(2)]
    findings = (
        Finding(claims[0], Answer(0.8, 0.7, 0.9, 5, "as said"), "holds"),
        Finding(claims[1], Answer(0.1, 0.0, 0.2, 5, ""), "contradicted"),
    )
    drawn = figure()
    result = StudyResult(
        "some-study", "Does it hold?", "yi2019", "Figure 1", "small", table().to_frame(), findings,
        figure_bytes(drawn, "svg").decode(), figure_bytes(drawn, "png"), ("fewer epochs",), ("it was quick",),
        {"seconds": 3.0, "device": "a CPU", "date": "2026-01-01"},
    )  # fmt: skip
    items = read_item(str(result.save(tmp_path / "some-study")))
    page = Page(page_text(items))
    words = page.text()
    assert "Does it hold? (small scale): holds 1, contradicted 1." in words
    assert "Do the claims hold?" in words
    assert "claim number 1" in words
    assert "0.8 [0.7, 0.9]" in words
    assert "fewer epochs" in words
    assert str(page.all("img")[0]["alt"]).startswith("Figure of the study")
    assert "small scale, 3 s on a CPU, 2026-01-01" in words
    assert "flatscope study run some-study --scale small" in words


def test_a_sweep_from_its_file_to_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, store = Path(__file__).parents[2] / "examples" / "sweep.toml", tmp_path / "store"
    assert run(monkeypatch, "sweep", "run", file, "--store", store, "--workers", 0) == 0
    for ending in ("csv", "parquet"):
        many, page = tmp_path / f"many.{ending}", tmp_path / f"{ending}.html"
        assert run(monkeypatch, "sweep", "export", many, "--store", store) == 0
        assert run(monkeypatch, "report", many, "--out", page) == 0
        assert '<section id="population"' in page.read_text(encoding="utf-8")
    frame = pd.read_csv(tmp_path / "many.csv")
    assert frame["error_gap"].tolist() == pytest.approx((frame["test_error"] - frame["train_error"]).tolist())
    assert frame["loss_gap"].tolist() == pytest.approx((frame["test_loss"] - frame["train_loss"]).tolist())
    ((_, item),) = read_item(str(tmp_path / "many.csv"))
    assert item.target == "error_gap"
    frame.drop(columns=list(item.measures)).to_csv(tmp_path / "trained.csv")
    with pytest.raises(InputError, match="no column of a measure"):
        read_item(str(tmp_path / "trained.csv"))
    assert set(item.measures) == {"kappa_trace_sum", "hessian_trace", "l2_path_norm"}
    assert set(item.parameters) == {"train.lr", "train.batch_size", "train.seed"}
