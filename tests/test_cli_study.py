"""`flatscope study`: list, run, show, export; a killed study goes on where it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from flatscope.cli.app import app
from flatscope.errors import UnknownNameError
from flatscope.studies import studies

RUNNER = CliRunner()
STUDY = "petzka2019-ridge"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("studies")
    options = ["--scale", "small", "--workers", "0", "--store", str(folder / "store"), "--out", str(folder / "results")]
    done = RUNNER.invoke(app, ["study", "run", STUDY, *options], catch_exceptions=False)
    assert done.exit_code == 0
    assert "reproduced" in done.output
    return folder / "results"


def test_list_names_every_study_and_its_verdicts(results: Path) -> None:
    shown = RUNNER.invoke(app, ["study", "list", "--results", str(results)], env={"COLUMNS": "300"}).output
    for name in studies():
        assert name in shown
    assert "reproduced" in shown
    assert "not run" in shown


def test_show_with_and_without_a_result(results: Path, tmp_path: Path) -> None:
    assert "exact" in RUNNER.invoke(app, ["study", "show", STUDY, "--results", str(results)]).output
    assert "ridge penalty" in RUNNER.invoke(app, ["study", "show", STUDY, "--results", str(tmp_path)]).output


def test_export(results: Path, tmp_path: Path) -> None:
    for name in ("page.md", "claims.csv", "claims.parquet", "page.html"):
        done = RUNNER.invoke(app, ["study", "export", str(tmp_path / name), "--results", str(results)])
        assert done.exit_code == 0, done.output
    claims = sum(len(entry.claims) for entry in studies().values())
    assert len(pd.read_csv(tmp_path / "claims.csv")) == len(pd.read_parquet(tmp_path / "claims.parquet")) == claims
    assert "✓&nbsp;reproduced" in (tmp_path / "page.md").read_text()
    assert "ridge penalty" in (tmp_path / "page.html").read_text()


def test_an_unknown_name_is_refused_with_advice() -> None:
    with pytest.raises(UnknownNameError, match="petzka2019-fig1"):
        RUNNER.invoke(app, ["study", "run", "petzka2019-fig01"], catch_exceptions=False)


def command(store: Path, out: Path) -> list[str]:
    study = ["study", "run", "petzka2019-feature-robustness", "--scale", "smoke", "--workers", "1"]
    return [sys.executable, "-m", "flatscope", *study, "--store", str(store), "--out", str(out)]


@pytest.mark.slow
def test_killed_and_run_again_it_trains_only_what_was_missing(tmp_path: Path) -> None:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command(tmp_path / "a", tmp_path / "whole"), check=True, env=environment, **quiet)
    driver = subprocess.Popen(
        command(tmp_path / "b", tmp_path / "killed"), env=environment, start_new_session=True, **quiet
    )
    until = time.monotonic() + 120
    while not list((tmp_path / "b").glob("[0-9a-f]*/metrics.json")) and driver.poll() is None:
        assert time.monotonic() < until, "no trial was finished"
        time.sleep(0.02)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "b").glob("[0-9a-f]*/metrics.json")}
    assert kept
    subprocess.run(command(tmp_path / "b", tmp_path / "again"), check=True, env=environment, **quiet)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept  # what was there has not been done again
    one, other = (next(folder.rglob("table.csv")).read_text() for folder in (tmp_path / "whole", tmp_path / "again"))
    assert one == other
