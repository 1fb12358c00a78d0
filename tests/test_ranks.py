"""One measurement over several processes: the table of one process, whatever the number of ranks."""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from checks import search_of, tolerance_of
from measured_by_ranks import N, frames, sampled_frames, spectra
from networks import mlp
from test_sweep_kills import fork, has_ended, wait_for
from typer.testing import CliRunner

import flatscope as fs
from flatscope.cli.app import app
from flatscope.context import Context
from flatscope.inputs.weight_files import save_weights
from flatscope.ranks import ALONE, Ranks, launched, present_ranks, process_group
from flatscope.registry import declarations
from flatscope.training.models import build

pytestmark = pytest.mark.long

KEYS = ["measure", "options", "layer", "unit", "sample"]


SCRIPT = str(Path(__file__).parent / "helpers" / "measured_by_ranks.py")


def started(number: int, *what: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*launcher, *what], capture_output=True, text=True, env=env, timeout=600, check=False)


def by_ranks(number: int, what: str, folder: Path) -> None:
    done = started(number, SCRIPT, what, str(folder))
    assert done.returncode == 0, done.stderr


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def in_this_process(*words: str) -> None:
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output


@pytest.fixture(scope="module")
def of_three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What three ranks of unequal shares measured, one of them neither the first nor the last."""
    folder = tmp_path_factory.mktemp("ranks")
    by_ranks(3, "measured", folder)
    return folder


def test_what_is_sampled_is_that_of_one_process(of_three: Path) -> None:
    entries, wrong = declarations(), []
    for name, expected in sampled_frames().items():
        assert (expected["stderr"] > 0).any(), f"{name}: nothing was estimated"
        for rank in range(3):
            found = pd.read_parquet(of_three / f"{name} {rank}.parquet")
            for measure, rows in expected.groupby("measure", sort=False):
                wrong += _differences(entries[str(measure)], rows, found.loc[rows.index], f"{name}, rank {rank}")
    assert wrong == []
    expected = spectra()
    for rank in range(3):
        found = json.loads((of_three / f"spectra {rank}.json").read_text())
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=1e-6, abs=1e-8), (name, rank)


def test_every_measure_and_bound_is_that_of_one_process(of_three: Path) -> None:
    number = 3
    entries = declarations() | declarations("bound")
    wrong = []
    for name, expected in frames().items():
        for rank in range(number):
            found = pd.read_parquet(of_three / f"{name} {rank}.parquet")
            assert len(found) == len(expected), name
            for key in KEYS:
                assert found[key].astype(str).tolist() == expected[key].astype(str).tolist(), f"{name}: {key}"
            for measure, rows in expected.groupby("measure", sort=False):
                wrong += _differences(entries[str(measure)], rows, found.loc[rows.index], f"{name}, rank {rank}")
    assert wrong == []
    assert sum(json.loads((of_three / f"refusals {rank}.json").read_text())["share"] for rank in range(number)) == N
    for rank in range(number):
        said = json.loads((of_three / f"refusals {rank}.json").read_text())
        assert f"at least as many samples as ranks ({number}), got 1" in said["few"]
        assert "order" in said["shuffled"]
        assert "set or order of samples" in said["other data"]
        assert "set of weights" in said["other weights"]
        assert said["alone"] == 1
        assert said["share"] in (N // number, N // number + 1)
        assert said["flatscope"] == fs.__file__
        assert said["groups left"] == 0, "a group that lives on has threads, which can abort a process that is ending"


def _differences(entry, expected: pd.DataFrame, found: pd.DataFrame, where: str) -> list[str]:  # type: ignore[no-untyped-def]
    """Columns of one measure that differ by more than its rounding, or its search, allows."""
    tolerance = max(tolerance_of(entry), search_of(entry))
    wrong = []
    for column in ("value", "stderr", "data_stderr", "passes"):
        one, other = (frame[column].to_numpy(dtype=np.float64) for frame in (expected, found))
        largest = np.nanmax(np.abs(one[np.isfinite(one)]), initial=0.0)
        if not np.allclose(one, other, rtol=tolerance, atol=tolerance * largest, equal_nan=True):
            wrong.append(f"{where}: {entry.name} {column}: {one} against {other}")
    one, other = (frame["reason"].str.replace(r"[0-9.e+-]+", "#", regex=True).tolist() for frame in (expected, found))
    if one != other:
        wrong.append(f"{where}: {entry.name}: {one} against {other}")
    return wrong


MLP = ["--model", "mlp", "--model-option", "widths=64,16,10", "--data", "digits", "--flatten", "--train-size", "101"]
AUDITED = ["hessian_trace", "rho_sum", "l2_path_norm", "expected_flatness"]


@dataclass
class Shared:
    """A command that two ranks ran and one process: what the ranks said together, and the two files."""

    codes: list[int]
    out: str
    err: str
    one: dict[str, Any]
    two: dict[str, Any]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Shared]:
    """All commands below, by two ranks that are started once."""
    folder = tmp_path_factory.mktemp("commands")
    for seed in (0, 1):
        save_weights(build("mlp", seed=seed, widths=(64, 16, 10)), folder / f"net{seed}.safetensors")
    places = [str(folder / f"net{seed}.safetensors") for seed in (0, 1)]
    words = {
        "table": ["measure", *MLP, "-m", "hessian_trace", "-m", "margin", "--dtype", "float64"],
        "audit": ["audit", *MLP, *(word for name in AUDITED for word in ("-m", name)), "--trials", "2"],
        "comparison": ["compare", *places, *MLP, "-m", "rho_sum", "-m", "margin"],
        "training": ["train", *MLP, "--epochs", "1"],
    }
    commands = {name: [free_port(), *given, "--out", str(folder / f"{name}.two.json")] for name, given in words.items()}
    (folder / "commands.json").write_text(json.dumps(commands))
    by_ranks(2, "typed", folder)
    found = {}
    for name, given in words.items():
        said = [json.loads((folder / f"{name} {rank}.json").read_text()) for rank in range(2)]
        files: list[dict[str, Any]] = [{}, {}]
        if name != "training":
            in_this_process(*given, "--out", str(folder / f"{name}.one.json"))
            files = [json.loads((folder / f"{name}.{number}.json").read_text()) for number in ("one", "two")]
        codes, (out, err) = (
            [each["code"] for each in said],
            ("".join(each[key] for each in said) for key in ("out", "err")),
        )
        found[name] = Shared(codes, out, err, *files)
    assert not (folder / "training.two.json").exists()
    return found


def test_torchrun_prints_one_table(shared: dict[str, Shared]) -> None:
    found = shared["table"]
    assert found.codes == [0, 0], found.err
    assert sum(line.split()[:1] == ["hessian_trace"] for line in found.out.splitlines()) == 1, found.out
    assert found.err.count("training samples") == 1, found.err
    one, two = ([row["value"] for row in table["rows"]] for table in (found.one, found.two))
    assert one == pytest.approx(two, rel=1e-9)


def test_torchrun_prints_one_audit(shared: dict[str, Shared]) -> None:
    found = shared["audit"]
    assert found.codes == [0, 0], found.err
    assert found.out.count("hessian_trace") == 1, found.out
    assert found.err.count("no --weights were given") == 1, found.err
    for column in ("measure", "symmetry", "verdict", "reason", "declared"):
        assert [row[column] for row in found.one["rows"]] == [row[column] for row in found.two["rows"]]
    for column in ("before", "after"):
        values = [[row[column] for row in audit["rows"]] for audit in (found.one, found.two)]
        assert values[0] == pytest.approx(values[1], rel=1e-9)
    assert {row["verdict"] for row in found.two["rows"]} == {"invariant", "moved"}


def test_torchrun_prints_one_comparison(shared: dict[str, Shared]) -> None:
    found = shared["comparison"]
    assert found.codes == [0, 0], found.err
    assert found.out.count("best first: > better") == 1, found.out  # the table is printed by one of them
    assert [one["meta"]["n_train"] for one in (found.one, found.two)] == [101, 101]
    for name in found.one["tables"]:
        values = [[row["value"] for row in one["tables"][name]["rows"]] for one in (found.one, found.two)]
        assert values[0] == pytest.approx(values[1], rel=1e-4)  # float32, summed in another order


def test_what_cannot_be_shared_is_refused(shared: dict[str, Shared]) -> None:
    assert 0 not in shared["training"].codes
    assert "expected one process, got 2" in shared["training"].err


@pytest.mark.parametrize("n", [1, 2, 7, N, 1000])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_shares_cover_every_sample_once_and_evenly(n: int, size: int) -> None:
    shares = [Ranks(rank, size).share(n) for rank in range(size)]
    assert [i for start, stop in shares for i in range(start, stop)] == list(range(n))
    lengths = [stop - start for start, stop in shares]
    assert max(lengths) - min(lengths) <= 1


def test_a_process_alone_reduces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.arange(3.0)
    assert ALONE.joined(rows) is rows
    assert ALONE.summed([rows])[0] is rows
    assert ALONE.anywhere(True)
    assert not ALONE.anywhere(False)
    assert ALONE.agree(b"x")
    assert present_ranks() is ALONE
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not launched()
    with process_group("cpu") as device:
        assert device == "cpu"
        assert not torch.distributed.is_initialized()


def test_a_measure_that_breaks_ends_a_shared_run(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = mlp().problem()
    problem.ranks = Ranks(0, 2)  # the other one never comes, so nothing here may wait for it

    def broken(ctx: Context) -> None:
        raise ZeroDivisionError

    entry = replace(declarations()["parameter_count"], function=broken)
    monkeypatch.setattr("flatscope.measuring.select", lambda names, kind: [entry])
    with pytest.raises(ZeroDivisionError):
        fs.measure(problem, "parameter_count")
    problem.ranks = ALONE
    with pytest.warns(RuntimeWarning, match="ZeroDivisionError"):
        assert len(fs.measure(problem, "parameter_count").to_frame()) == 1


LOST = """
import inspect, os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
import flatscope as fs

class Lost(nn.Flatten):
    def forward(self, x):
        if os.environ["RANK"] == "1" and any(f.filename.endswith("sharpness.py") for f in inspect.stack(0)):
            if os.environ["LOST_BY"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)
        return super().forward(x)

def build():
    return nn.Sequential(Lost(), nn.Linear(64, 10))

if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    torch.manual_seed(0)
    problem = fs.Problem(build().eval(), train=(torch.randn(20, 64), torch.arange(20) % 10))
    begun = time.monotonic()
    try:
        fs.measure(problem, "sharpness")
    except fs.FlatscopeError as problem:
        print(f"after {time.monotonic() - begun:.1f} s: {problem}", flush=True)
        raise SystemExit(1)
"""


def lost_rank(folder: Path, rank: int, port: str) -> None:
    """One rank of two, in a process that has loaded torch already; what it says goes to a file."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": str(rank)}
    os.environ.update(place, LOST_BY="hang")
    with (folder / f"said {rank}").open("w") as said, redirect_stdout(said):
        runpy.run_path(str(folder / "lost.py"), run_name="__main__")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("how", ["kill", "hang"])
def test_the_others_end_with_the_cause_where_a_rank_is_lost(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "lost.py"
    script.write_text(LOST)
    monkeypatch.setenv("LOST_BY", how)
    begun = time.monotonic()
    if how == "kill":
        chosen = ["--model", f"{script}:build", "--data", "digits", "--train-size", "40", "-m", "sharpness"]
        done = started(2, "-m", "flatscope", "measure", *chosen)
        code, said = done.returncode, done.stdout + done.stderr
    else:
        port = free_port()
        lost, other = (fork(partial(lost_rank, tmp_path, rank, port)) for rank in (1, 0))
        code, said = wait_for(other), (tmp_path / "said 0").read_text()
        assert not has_ended(lost)
        os.kill(lost, signal.SIGKILL)
        wait_for(lost)
    assert code != 0
    assert time.monotonic() - begun < 120  # most of it for starting
    assert "every rank to stay" in said or "another rank has ended" in said, said
