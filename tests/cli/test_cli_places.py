"""Where results are to go is tried before the work whose results they are, and nothing is left there by trying."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import flatscope.cli.run_demo as demonstration
from flatscope.cli.app import app
from flatscope.cli.output import check_output_file, check_output_folder
from flatscope.errors import InputError

DIGITS = ["--model", "mlp", "--model-option", "widths=64,4,10", "--data", "digits", "--flatten"]
# Its modes permit root to write there, and the file system does not do it.
PROC = Path("/proc")


def test_trying_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("kept")
    check_output_file(tmp_path / "old.json", (".json",))
    check_output_file(tmp_path / "new" / "deeper" / "t.json", (".json",))
    check_output_folder(tmp_path)
    check_output_folder(tmp_path / "another" / "one")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old.json", "kept")]


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "t.json").mkdir()
    for place, words in (
        (tmp_path / "t.json", "a folder of that name"),
        (tmp_path / "file" / "t.json", "is not a folder"),
        (tmp_path / "file" / "a" / "t.json", "is not a folder"),
        (tmp_path / ("n" * 300) / "t.json", "too long"),
    ):
        with pytest.raises(InputError, match=words) as caught:
            check_output_file(place, (".json",))
        assert str(place) in str(caught.value)
    with pytest.raises(InputError, match="is not a folder"):
        check_output_folder(tmp_path / "file")


def test_no_folder_is_made_in_the_root() -> None:
    for place in (Path("/flatscope-slip/t.json"), Path("/flatscope-slip/deeper/t.json")):
        with pytest.raises(InputError, match="in / itself"):
            check_output_file(place, (".json",))


def test_a_study_without_its_data_says_so_before_any_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATSCOPE_DATA", str(tmp_path / "empty"))
    monkeypatch.setattr("flatscope.training.sweeps.engines.run_units", lambda *_, **__: pytest.fail("work began first"))
    words = ["study", "run", "petzka2019-fig1", "--scale", "paper", "--store", str(tmp_path), "--out", str(tmp_path)]
    with pytest.raises(InputError, match="flatscope data fetch") as caught:
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert "petzka2019-fig1" in str(caught.value)


@pytest.mark.skipif(not PROC.is_dir(), reason="needs /proc, where nothing can be made")
@pytest.mark.parametrize(
    "words",
    [
        ["measure", *DIGITS, "--out", "/proc/t.json"],
        ["measure", *DIGITS, "--report", "/proc/nope/r.html"],
        ["audit", *DIGITS, "--out", "/proc/t.json"],
        ["compare", "a.pt", "b.pt", *DIGITS, "--out", "/proc/t.json"],
        ["landscape", *DIGITS, "--out", "/proc/s.npz"],
        ["landscape", *DIGITS, "--checkpoint", "/proc/rows"],
        ["train", *DIGITS, "--out", "/proc/nope"],
        ["train", "--population", "examples/population.toml", "--out", "/proc/nope"],
        ["demo", "--out", "/proc/nope"],
        ["study", "run", "petzka2019-ridge", "--scale", "smoke", "--workers", "0", "--out", "/proc/nope"],
        ["study", "export", "/proc/page.md"],
        ["sweep", "export", "/proc/t.csv", "--store", "nowhere"],
        ["report", "nothing.json", "--out", "/proc/r.html"],
        ["report", "nothing.json", "--figures", "/proc/figures"],
    ],
    ids=lambda words: " ".join([words[0], *words[-2:]]),
)
def test_every_command_tries_the_place_before_its_work(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "flatscope.cli.sources.load",
        "flatscope.inputs.loading.load",
        "flatscope_papers.study_runs.study",
    ):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("work began first"))
    monkeypatch.setattr(demonstration, "load", lambda *_, **__: pytest.fail("work began first"))
    with pytest.raises(InputError, match=r"/proc.* may not be written to"):
        CliRunner().invoke(app, words, catch_exceptions=False)
