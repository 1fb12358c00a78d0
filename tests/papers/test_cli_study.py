"""`flatscope study`: list, run, show, export; a killed study goes on where it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner, Result

from flatscope.cli.app import app
from flatscope.errors import InputError, UnknownNameError
from flatscope.training.sweeps.store import Store
from flatscope_papers import studies, study_commands
from flatscope_papers.claims import COUNTED
from flatscope_papers.study_result import StudyResult

RUNNER = CliRunner()
STUDY = "petzka2019-ridge"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("studies")
    options = ["--scale", "small", "--workers", "0", "--store", str(folder / "store"), "--out", str(folder / "results")]
    done = RUNNER.invoke(app, ["study", "run", STUDY, *options], catch_exceptions=False)
    assert done.exit_code == 0
    assert "holds" in done.output
    return folder / "results"


def test_list_names_every_study_and_its_verdicts(results: Path) -> None:
    shown = RUNNER.invoke(app, ["study", "list", "--results", str(results)], env={"COLUMNS": "300"}).output
    for name in studies():
        assert name in shown
    assert "holds" in shown
    assert "not run" in shown


def test_show_with_and_without_a_result(results: Path, tmp_path: Path) -> None:
    shown = RUNNER.invoke(app, ["study", "show", STUDY, "--results", str(results)], env={"COLUMNS": "300"}).output
    for claim in studies()[STUDY].claims:
        assert claim.statement in shown
    assert "ridge penalty" in RUNNER.invoke(app, ["study", "show", STUDY, "--results", str(tmp_path)]).output


def test_export(results: Path, tmp_path: Path) -> None:
    for name in ("page.md", "claims.csv", "claims.parquet", "page.html"):
        done = RUNNER.invoke(app, ["study", "export", str(tmp_path / name), "--results", str(results)])
        assert done.exit_code == 0, done.output
    claims = sum(len(entry.claims) for entry in studies().values())
    assert len(pd.read_csv(tmp_path / "claims.csv")) == len(pd.read_parquet(tmp_path / "claims.parquet")) == claims
    assert "✓ holds" in (tmp_path / "page.md").read_text()
    assert "✓&nbsp;holds" in (tmp_path / "papers" / "petzka2019.md").read_text()
    assert (tmp_path / "papers" / "images" / f"{STUDY}.png").is_file()
    assert "ridge penalty" in (tmp_path / "page.html").read_text()


def test_an_unknown_name_is_refused_with_advice() -> None:
    with pytest.raises(UnknownNameError, match="petzka2019-fig1"):
        RUNNER.invoke(app, ["study", "run", "petzka2019-fig01"], catch_exceptions=False)


def words(store: Path, out: Path) -> list[str]:
    return ["run", "zhang2017-fig6", "--scale", "smoke", "--store", str(store), "--out", str(out)]


@pytest.mark.long
def test_killed_and_run_again_it_trains_only_what_was_missing(tmp_path: Path) -> None:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    invoke(*words(tmp_path / "a", tmp_path / "whole"), "--workers", "0")
    command = [
        sys.executable,
        "-m",
        "flatscope",
        "study",
        *words(tmp_path / "b", tmp_path / "killed"),
        "--workers",
        "1",
    ]
    driver = subprocess.Popen(command, env=environment, start_new_session=True, **quiet)
    until = time.monotonic() + 120
    while not list((tmp_path / "b").glob("[0-9a-f]*/metrics.json")) and driver.poll() is None:
        assert time.monotonic() < until, "no trial was finished"
        time.sleep(0.02)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "b").glob("[0-9a-f]*/metrics.json")}
    assert kept
    invoke(*words(tmp_path / "b", tmp_path / "again"), "--workers", "0")
    assert {path: path.stat().st_mtime_ns for path in kept} == kept  # what was there has not been done again
    one, other = (next(folder.rglob("table.csv")).read_text() for folder in (tmp_path / "whole", tmp_path / "again"))
    assert one == other


SMOKE = ["study", "run", STUDY, "--scale", "smoke", "--workers", "0"]


@pytest.mark.parametrize("where", ["--out", "--store"])
def test_places_that_cannot_be_written_to_are_refused_before_any_work(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    places = {"--out": str(tmp_path / "out"), "--store": str(tmp_path / "store"), where: str(tmp_path / "file" / "x")}
    with pytest.raises(InputError, match="file"):
        RUNNER.invoke(app, [*SMOKE, *(word for pair in places.items() for word in pair)], catch_exceptions=False)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_unknown_scale_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="scale"):
        RUNNER.invoke(app, ["study", "run", STUDY, "--scale", "papers"], catch_exceptions=False)


def test_paper_scale_without_a_gpu_is_told_with_its_cost(tmp_path: Path) -> None:
    places = ["--out", str(tmp_path / "out"), "--store", str(tmp_path / "store"), "--workers", "0", "--device", "cpu"]
    done = RUNNER.invoke(app, ["study", "run", STUDY, "--scale", "paper", *places], catch_exceptions=False)
    assert done.exit_code == 0
    assert "none is used here" in done.stderr
    assert studies()[STUDY].words.at_paper_scale in done.stderr
    small = RUNNER.invoke(app, [*SMOKE, *places], catch_exceptions=False)
    assert "none is used here" not in small.stderr


def test_missing_data_are_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLATSCOPE_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    places = ["--out", str(tmp_path / "out"), "--store", str(tmp_path / "store"), "--workers", "0"]
    done = RUNNER.invoke(app, ["study", "run", "zhang2017-fig1", *places], catch_exceptions=False)
    assert done.exit_code == 1
    assert done.stderr.count("data fetch cifar10") == 1


def test_verdicts_are_counted_in_the_list(results: Path) -> None:
    shown = RUNNER.invoke(app, ["study", "list", "--results", str(results)], env={"COLUMNS": "300"})
    line = next(line for line in shown.stdout.splitlines() if STUDY in line)
    own = StudyResult.load(results / STUDY / "small")
    total = sum(claim.kind in COUNTED for entry in studies().values() for claim in entry.claims)
    assert own.counts in line
    assert f"{own.counts}, not run {total - sum(finding.counts for finding in own.findings)}" in shown.stderr


def test_show_tells_what_other_scales_found(results: Path, tmp_path: Path) -> None:
    small = StudyResult.load(results / STUDY / "small")
    small.save(tmp_path / STUDY / "small")
    replace(small, scale="paper").save(tmp_path / STUDY / "paper")
    shown = RUNNER.invoke(app, ["study", "show", STUDY, "--results", str(tmp_path)]).stdout
    assert f"{STUDY}, paper scale" in shown
    assert f"small ({small.counts}): --scale small" in shown


def test_without_a_name_the_papers_are_shown_and_by_a_key_one_of_them(results: Path) -> None:
    everything, one = (invoke("show", *words, "--results", results).stdout for words in ((), ("petzka2019",)))
    for shown in (everything, one):
        assert "Petzka et al. 2019" in shown
        assert STUDY in shown
    assert "Yi et al. 2019" in everything
    assert "Yi et al. 2019" not in one


def test_a_store_without_weights_is_analysed_again_and_says_so(tmp_path: Path) -> None:
    places = ["--scale", "smoke", "--workers", "0", "--store", str(tmp_path / "store"), "--out", str(tmp_path / "out")]
    invoke("run", STUDY, *places)
    first = StudyResult.load(tmp_path / "out" / STUDY / "smoke")
    other = Store(tmp_path / "other")
    for trial in Store(tmp_path / "store").stored():
        frames = {name: trial.frame(name) for name in trial.frames}
        other.write(trial.config, trial.metrics, weights={"w": torch.ones(2)}, frames=frames)
    for weights in (tmp_path / "other").glob("*/weights.safetensors"):
        weights.unlink()
    places[places.index(str(tmp_path / "store"))] = str(tmp_path / "other")
    invoke("run", STUDY, *places)
    again = StudyResult.load(tmp_path / "out" / STUDY / "smoke")
    pd.testing.assert_frame_equal(again.table, first.table)
    assert again.provenance["weights"] == "not kept"
    assert "without their weights" in again.how
    assert again.provenance["first run"]["seconds"] == first.provenance["seconds"]  # what it took is not forgotten


def test_show_says_how_it_was_run_and_what_the_paper_scale_takes(results: Path) -> None:
    shown = RUNNER.invoke(app, ["study", "show", STUDY, "--results", str(results)]).stdout
    counts = StudyResult.load(results / STUDY / "small").counts
    for words in (counts, "Run\n", f"study run {STUDY} --scale small", studies()[STUDY].words.at_paper_scale):
        assert words in shown


def invoke(*words: str | Path) -> Result:
    return RUNNER.invoke(app, ["study", *map(str, words)], env={"COLUMNS": "300"}, catch_exceptions=False)


def line_of(shown: Result, name: str) -> str:
    return next(line for line in shown.stdout.splitlines() if f" {name} " in line)


def test_a_scale_that_has_not_been_run_comes_with_the_command_that_runs_it(results: Path) -> None:
    with pytest.raises(InputError, match=f"study run {STUDY} --scale paper --out {results}") as caught:
        invoke("show", STUDY, "--results", results, "--scale", "paper")
    assert "at small scale only" in str(caught.value)
    with pytest.raises(UnknownNameError, match="Did you mean small"):
        invoke("show", STUDY, "--results", results, "--scale", "smal")


def test_a_named_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, got in ((tmp_path / "nothere", "nothing there"), (tmp_path / "file", "got a file")):
        for words in (["list"], ["show", STUDY], ["export", tmp_path / "x.md"]):
            with pytest.raises(InputError, match=f"--results {place}: expected a folder of saved results, .*{got}"):
                invoke(*words, "--results", place)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_before_anything_was_run_there_is_a_list_and_nothing_to_export(
    tmp_path: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(study_commands, "SHIPPED", tmp_path / "none")  # a package without results
    assert "not run" in line_of(invoke("list"), STUDY)
    for name in ("x.md", "x.csv", "x.parquet", "x.html"):
        with pytest.raises(InputError, match="nothing has been run"):
            invoke("export", name)
    small = StudyResult.load(results / STUDY / "small")
    replace(small, scale="smoke").save(tmp_path / "results" / STUDY / "smoke")
    with pytest.raises(InputError, match="never judged"):
        invoke("export", "x.md")
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
    assert "smoke, never judged" in line_of(invoke("list"), STUDY)


def test_one_damaged_result_does_not_hide_the_others(results: Path, tmp_path: Path) -> None:
    small, other = StudyResult.load(results / STUDY / "small"), "petzka2019-fig1"
    small.save(tmp_path / STUDY / "small")
    (tmp_path / other / "small").mkdir(parents=True)
    (tmp_path / other / "small" / "verdicts.json").write_text('{"name": ')
    shown = invoke("list", "--results", tmp_path)
    assert shown.exit_code == 0
    assert small.counts in line_of(shown, STUDY)
    assert "unreadable" in line_of(shown, other)
    assert f"{sum(claim.kind in COUNTED for claim in studies()[other].claims)} unreadable" in shown.stderr
    advice = f"flatscope study run {other} --scale small"
    assert advice in shown.stderr
    assert small.counts in invoke("show", STUDY, "--results", tmp_path).stdout
    for words in (["export", tmp_path / "x.md"], ["show", other], ["show", other, "--scale", "small"]):
        with pytest.raises(InputError, match=advice):
            invoke(*words, "--results", tmp_path)
    (tmp_path / STUDY / "paper").mkdir()
    (tmp_path / STUDY / "paper" / "verdicts.json").write_text("")
    shown = invoke("list", "--results", tmp_path)
    assert f"{small.counts} (paper" in line_of(shown, STUDY)
    assert "unreadable)" in shown.stdout
    beside = invoke("show", STUDY, "--results", tmp_path)
    assert f"flatscope study run {STUDY} --scale paper" in beside.stderr
