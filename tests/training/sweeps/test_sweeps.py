"""Sweeps on the local engine: each trial once, failures recorded, lost workers replaced, nothing run twice."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from trial_work import completions, log_of

from flatscope.errors import InputError
from flatscope.training.sweeps import engines, unit_queue
from flatscope.training.sweeps.engines import run_units
from flatscope.training.sweeps.store import Store
from flatscope.training.sweeps.unit_queue import SweepFailed

pytestmark = pytest.mark.long


def configs(n: int, **extra: Any) -> list[dict[str, Any]]:
    return [{"x": x, "of": {"n": n}, **extra} for x in range(n)]


def alone(trials: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [[trial] for trial in trials]


def test_in_this_process(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    trials = configs(6)
    units = [trials[4:], trials[2:4], trials[:2], [trials[5]]]  # the last one is there already
    frame = run_units(units, "trial_work:square", store, workers=0)
    assert frame["x"].tolist() == [4, 5, 2, 3, 0, 1]
    assert frame["square"].tolist() == [16, 25, 4, 9, 0, 1]
    assert list(frame.columns) == ["x", "of.n", "square", "third", "note", "key"]
    assert sorted(completions(store)) == sorted(map(store.key, trials))
    log = log_of(store).read_text()
    pd.testing.assert_frame_equal(run_units(units, "trial_work:square", store), frame)  # and starts no worker for it
    assert log_of(store).read_text() == log
    assert run_units(alone(trials[:2]), "trial_work:square", store)["x"].tolist() == [0, 1]


def test_in_memory(tmp_path: Path) -> None:
    store = Store(f"memory://{tmp_path}")
    frame = run_units(alone([{"a": 1}]), "test_sweeps:write_in_memory", store, workers=0)
    assert frame["b"].tolist() == [2]
    with pytest.raises(InputError, match="worker processes can see"):
        run_units(alone([{"a": 2}]), "test_sweeps:write_in_memory", store, workers=1)


def write_in_memory(trials: list[dict[str, Any]], store: Store, report: Any) -> None:
    for config in trials:
        store.write(config, {"b": 2 * config["a"]})


def test_workers_replace_the_lost_and_give_the_same_frame(tmp_path: Path) -> None:
    calm, rough = Store(tmp_path / "calm"), Store(tmp_path / "rough")
    trials = configs(8)
    units = [trials[:3], *alone(trials[3:])]
    log_of(rough).touch()
    expected = run_units(units, "trial_work:square", calm, workers=0)
    frame = run_units(units, "trial_work:die_once", rough, workers=2)
    pd.testing.assert_frame_equal(frame, expected)
    log = [line.split() for line in log_of(rough).read_text().splitlines()]
    processes = {line[2] for line in log if line[0] == "completed"} | {line[1] for line in log if line[0] == "dying"}
    assert str(os.getpid()) not in processes
    assert 2 <= len(processes) <= 3
    assert len(completions(rough)) == len(set(completions(rough))) == 8


def test_failures_are_recorded_and_stop_nobody_else(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    trials = configs(5)
    units = [trials[:4], [trials[4]]]  # x = 2 fails; 0 and 1 before it are kept, 3 after it is not reached
    with pytest.raises(SweepFailed, match=r"2 that failed.*two is not allowed") as failed:
        run_units(units, "trial_work:square_or_raise", store, workers=0)
    lost = {store.key(trials[2]), store.key(trials[3])}
    assert failed.value.errors.keys() == store.failures().keys() == lost
    assert "Traceback" in store.failures()[store.key(trials[2])]
    assert sorted(store.frame()["x"]) == [0, 1, 4]
    assert len(run_units(units, "trial_work:square", store, workers=0)) == 5
    assert store.failures() == {}
    with pytest.raises(SweepFailed, match="without a result for 1 of 1"):
        run_units([[{"x": 9}]], "trial_work:forget", store, workers=0)


def test_failures_in_the_same_words_are_told_once() -> None:
    errors = {f"{number:08}xyz": "no data" for number in range(3)} | {
        f"{number:08}": f"other {number}" for number in range(3, 9)
    }
    told = str(SweepFailed(errors, 9))
    assert told.count("no data") == 1
    assert "00000000 and 2 more: no data; 00000003: other 3" in told
    assert "and 2 more)" in told
    assert "other 7" not in told
    assert "None is stored" in told
    assert "The others are stored" in str(SweepFailed(errors, 10))


def test_a_unit_that_kills_every_worker_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_queue, "MAX_LOST", 2)  # each start of a worker costs seconds
    store = Store(tmp_path / "store")
    log_of(store).touch()
    with pytest.raises(SweepFailed, match=r"died 2 times, last by signal SIGKILL \(out of memory\)"):
        run_units(alone(configs(4)), "trial_work:die_always", store, workers=1)
    assert log_of(store).read_text().count("dying") == 2
    assert sorted(store.frame()["x"]) == [0, 1, 3]


def test_workers_have_threads_of_their_own_and_pass_on_warnings(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with pytest.warns(UserWarning, match="look out"):
        frame = run_units(alone(configs(2)), "trial_work:tell_threads", store, workers=1, cpus=2)
    assert frame["threads"].tolist() == [2, 2]
    assert frame["omp"].tolist() == ["2", "2"]
    assert os.getpid() not in frame["process"].tolist()


def test_gpus_are_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert engines._gpus_of_workers(0) == []
    assert engines._gpus_of_workers(1) == ["0", "1", "2"]
    assert engines._gpus_of_workers(0.5) == ["0", "0", "1", "1", "2", "2"]
    assert engines._gpus_of_workers(2) == ["0,1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert engines._gpus_of_workers(0.4) == ["4", "4", "6", "6", "7", "7"]
    with pytest.raises(InputError, match="4 GPUs for each worker"):
        engines._gpus_of_workers(4)


def test_what_others_are_at_is_waited_for(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    trials = configs(3)
    begun = threading.Event()

    def other() -> None:
        with store.claim(trials[1]) as mine:
            assert mine
            begun.set()
            threading.Event().wait(0.7)
            store.write(trials[1], {"square": -1})

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait()
    frame = run_units([trials], "trial_work:square", store, workers=0)
    thread.join()
    assert frame["square"].tolist() == [0, -1, 4]
    assert sorted(completions(store)) == sorted([store.key(trials[0]), store.key(trials[2])])


def test_bad_calls(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    for message, units, work, settings in (
        ("engine", [[{"x": 1}]], "trial_work:square", {"engine": "locl"}),
        ("number of workers", [[{"x": 1}]], "trial_work:square", {"workers": -1}),
        ("GPUs", [[{"x": 1}]], "trial_work:square", {"gpus": 64.0}),
        ("more than 0 cores", [[{"x": 1}]], "trial_work:square", {"cpus": 0}),
        ("lists of configurations", [{"x": 1}], "trial_work:square", {}),
        ("can be imported", [[{"x": 1}]], "no_such_module:square", {}),
        ("function in trial_work", [[{"x": 1}]], "trial_work:sqare", {}),
    ):
        with pytest.raises(InputError, match=message):
            run_units(units, work, store, **settings)
    assert run_units([], "trial_work:square", store).empty
