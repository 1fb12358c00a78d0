"""Kills at random moments cost time and nothing else: the same frame as undisturbed, no trial completed twice."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import networks
import numpy as np
import pandas as pd
import pytest
import test_benchmarking
import test_loop
import torch
from trial_work import completions, log_of

import flatscope as fs
from flatscope.errors import Interrupted
from flatscope.training.benchmarking import release
from flatscope.training.loop import train
from flatscope.training.sweeps import trial_files
from flatscope.training.sweeps.engines import run_units
from flatscope.training.sweeps.store import Store
from flatscope_papers.study_runs import study

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks the system about processes as Linux answers"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
WORK = "trial_work:square"
PATIENCE_SECONDS = 120


def trials(n: int, seconds: float) -> list[list[dict[str, Any]]]:
    """Units of one, two and three trials."""
    made = [{"x": x, "seconds": seconds} for x in range(n)]
    units = []
    while made:
        size = len(units) % 3 + 1
        units.append(made[:size])
        made = made[size:]
    return units


def fork(function: Callable[[], object]) -> int:
    """Start it in a child, which ends with code 0 if the function comes back. Drivers only: workers are not forked."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            code = 0
        except Interrupted:
            code = 130
        finally:
            os._exit(code)
    return child


def patiently(look: Callable[[], Any], driver: int | None = None) -> Any:
    """What `look` gives once it gives something; fails if it takes too long or the driver has ended."""
    begun = time.monotonic()
    while not (found := look()):
        assert driver is None or not has_ended(driver), "the driver has ended"
        assert time.monotonic() - begun < PATIENCE_SECONDS
        time.sleep(0.02)
    return found


def wait_for(child: int) -> int:
    """Exit code of a child, negative for a signal."""
    try:
        patiently(lambda: has_ended(child))
    except AssertionError:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def has_ended(child: int) -> bool:
    """Without taking its exit code from whoever asks for it."""
    return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def lines(store: Store) -> list[list[str]]:
    return [line.split() for line in log_of(store).read_text().splitlines()]


def worker_at_work(store: Store) -> int | None:
    """A worker that has begun a trial and not completed it, if there is one alive."""
    last = {int(words[2]): words[0] for words in lines(store)}
    alive = [process for process, word in last.items() if word == "began" and Path(f"/proc/{process}").exists()]
    return alive[-1] if alive else None


def ordeal(folder: Path, n: int, seconds: float, kills: list[str], seed: int) -> dict[str, int]:
    """Run a sweep while killing its driver and workers in the given order, at random moments; check what comes out."""
    chance = random.Random(seed)
    units = trials(n, seconds)
    store, calm = Store(folder / "store"), Store(folder / "calm")
    log_of(store).touch()
    drivers = [fork(lambda: run_units(units, WORK, store, workers=2))]
    done_before = hits = 0
    for victim in kills:
        seen = len(lines(store))
        if not has_ended(drivers[-1]):
            patiently(lambda seen=seen: len(lines(store)) > seen or has_ended(drivers[-1]))  # its workers have started
        time.sleep(chance.uniform(0, 3 * seconds))
        process = drivers[-1] if victim == "driver" else worker_at_work(store)
        if process is None:
            continue
        os.kill(process, signal.SIGKILL)
        hits += 1
        if victim == "driver":
            assert wait_for(drivers[-1]) == -signal.SIGKILL
            done_before = len(store.frame())
            drivers.append(fork(lambda: run_units(units, WORK, store, workers=2)))  # its orphans may be alive
    assert wait_for(drivers[-1]) == 0
    frame = run_units(units, WORK, store)  # has nothing left to run
    pd.testing.assert_frame_equal(frame, run_units(units, WORK, calm, workers=0))
    assert len(frame) == n
    assert store.failures() == {}
    assert store.running() == set()
    assert [*(folder / "store" / ".partial").iterdir(), *(folder / "store" / ".claims").iterdir()] == []
    done = completions(store)
    assert len(done) == len(set(done)), "a trial was completed twice"
    # A kill may fall between the write and the line in the log.
    assert n - len(kills) <= len(done) <= n
    begun = [words[1] for words in lines(store) if words[0] == "began"]
    assert len(begun) <= n + 2 * len(kills)  # at most what was in flight was begun again
    return {
        "kills": hits,
        "begun": len(begun),
        "completed": len(done),
        "drivers": len(drivers),
        "done before the last": done_before,
    }


def test_driver_and_workers_are_killed(tmp_path: Path) -> None:
    found = ordeal(tmp_path, n=12, seconds=0.2, kills=["worker", "driver"], seed=1)
    assert found["drivers"] == 2
    assert found["done before the last"] < 12
    assert found["begun"] > found["completed"]  # a kill did hit something


def test_two_drivers_share_a_store(tmp_path: Path) -> None:
    units = trials(12, 0.15)
    store = Store(tmp_path / "store")
    log_of(store).touch()
    # Without workers, which take so long to start that the first driver might be done before the second begins.
    drivers = [fork(lambda: run_units(units, WORK, store, workers=0)) for _ in range(2)]
    assert [wait_for(driver) for driver in drivers] == [0, 0]
    assert sorted(completions(store)) == sorted(store.key(config) for unit in units for config in unit)
    assert len(lines(store)) == 24  # nothing was begun twice either
    assert len({words[2] for words in lines(store)}) == 2, "one of the two did nothing"
    assert run_units(units, WORK, store)["x"].tolist() == list(range(12))


def test_two_machines_whose_clocks_are_apart_come_to_the_same_table(tmp_path: Path) -> None:
    """Each takes the other's leases for ended: work is done twice, and nothing else happens."""
    store, calm, units = Store(tmp_path / "store"), Store(tmp_path / "calm"), trials(6, 0.2)

    def on(machine: str, ahead: float) -> None:
        now = time.time
        time.time = lambda: now() + ahead
        trial_files.this_machine = lambda: machine  # type: ignore[assignment]
        run_units(units, WORK, store, workers=0)

    for each in (store, calm):
        log_of(each).touch()
    drivers = [
        fork(lambda machine=machine, ahead=ahead: on(12 * machine, ahead))
        for machine, ahead in (("a", 0.0), ("b", 300.0))
    ]
    assert [wait_for(driver) for driver in drivers] == [0, 0]
    pd.testing.assert_frame_equal(run_units(units, WORK, store), run_units(units, WORK, calm, workers=0))
    assert store.running() == set()
    assert [*(tmp_path / "store" / ".partial").iterdir()] == []


def test_interrupted_sweep_goes_on(tmp_path: Path) -> None:
    units = trials(5, 0.3)
    store = Store(tmp_path / "store")
    log_of(store).touch()
    driver = fork(lambda: run_units(units, WORK, store, workers=1))
    patiently(lambda: completions(store), driver)
    os.kill(driver, signal.SIGINT)
    assert wait_for(driver) == 130
    assert worker_at_work(store) is None  # the driver took its workers along
    assert 1 <= len(store.frame()) < 5
    run_units(units, WORK, store, workers=0)
    assert len(completions(store)) == len(set(completions(store))) == 5


@pytest.mark.parametrize("at_work", [False, True])
def test_workers_end_with_their_driver(tmp_path: Path, at_work: bool) -> None:
    """Also where nothing reads the end of their input: while they load packages."""
    store = Store(tmp_path / "store")
    log_of(store).touch()
    driver = fork(lambda: run_units(trials(2, 60.0), WORK, store, workers=1))
    children = Path(f"/proc/{driver}/task/{driver}/children")
    patiently(lambda: worker_at_work(store) if at_work else children.read_text())
    workers = children.read_text().split()
    os.kill(driver, signal.SIGKILL)
    assert wait_for(driver) == -signal.SIGKILL
    begun = time.monotonic()
    patiently(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    assert time.monotonic() - begun < 5


def test_interrupt_says_where_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trial_work

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trial_work, "square", interrupt)
    with pytest.raises(Interrupted, match=r"0 of 5 trials in .*; the same call goes on"):
        run_units(trials(5, 0), WORK, Store(tmp_path), workers=0)
    assert Store(tmp_path).running() == set()


def train_once(folder: Path) -> None:
    """A network with dropout and BatchNorm, trained; its weights in a file once it is done."""
    data = test_loop.blobs(shape=(1, 6, 6)), test_loop.blobs(shape=(1, 6, 6), seed=1)
    config = replace(test_loop.CONFIG, epochs=40)
    found = train(test_loop.noisy(), data, config, checkpoint=folder / "run")
    np.save(folder / "done.npy", torch.cat([value.double().flatten() for value in found.model.state_dict().values()]))


def walk_once(folder: Path) -> None:
    """A landscape of 25 rows; its losses in a file once it is done."""
    found = fs.landscape(networks.mlp().problem(), grid=25, checkpoint=folder / "rows")
    np.save(folder / "done.npy", found.loss)


def study_once(folder: Path) -> None:
    """A study at its smallest scale; every number of its table in a file once it is done."""
    found = study("petzka2019-ridge", "smoke", workers=0, store=str(folder / "store"))
    found.save(folder / "results")
    np.save(folder / "done.npy", found.table.select_dtypes("number").to_numpy(dtype="float64"))


def benchmark_once(folder: Path) -> None:
    """A benchmark of eight small networks, rebuilt; every number of its table in a file once it is done."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        test_benchmarking.of_few_epochs(monkeypatch)
        release.rebuild_release(folder / "release", str(folder / "store"), workers=0)
        file = folder / "release" / release.POPULATION_FILE
        found, _ = release.from_parquet_bytes(file.read_bytes(), release.POPULATION_KEY)
    assert len(found) == 16  # eight networks at two stops
    np.save(folder / "done.npy", found.select_dtypes("number").to_numpy(dtype="float64"))


JOBS = (train_once, walk_once, study_once, benchmark_once)


def killed_and_taken_up(job: Callable[[Path], None], folder: Path, kills: int, seed: int) -> int:
    """Kill a job at random moments, starting it again each time, and compare its end with that of one left alone."""
    chance, begun = random.Random(seed), time.monotonic()
    calm, disturbed = folder / "calm", folder / "disturbed"
    calm.mkdir()
    disturbed.mkdir()
    assert wait_for(fork(lambda: job(calm))) == 0
    lasted, hits = time.monotonic() - begun, 0
    for _ in range(kills):
        child = fork(lambda: job(disturbed))
        time.sleep(chance.uniform(0.1, 0.5) * lasted)
        if not has_ended(child):
            os.kill(child, signal.SIGKILL)
            hits += 1
        assert wait_for(child) in (0, -signal.SIGKILL)
    assert wait_for(fork(lambda: job(disturbed))) == 0
    # Rows of a landscape that are computed in another group differ by rounding, weights by nothing.
    ends = [np.load(place / "done.npy") for place in (calm, disturbed)]
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-12 if job is walk_once else 0, atol=0)
    return hits


@pytest.mark.parametrize("job", JOBS)
def test_what_is_killed_again_and_again_comes_to_the_same_end(job: Callable[[Path], None], tmp_path: Path) -> None:
    assert killed_and_taken_up(job, tmp_path, kills=3, seed=0) > 0


def main() -> None:
    """`make kill`: sweeps and what is in `JOBS`, at other moments, until that many processes were killed."""
    wanted, hits, seed = int(sys.argv[1]) if len(sys.argv) > 1 else 100, 0, 0
    while hits < wanted:
        with tempfile.TemporaryDirectory() as folder:
            kills = random.Random(seed).choices(["worker", "driver"], weights=[2, 1], k=6)
            hits += ordeal(Path(folder), n=30, seconds=0.15, kills=kills, seed=seed)["kills"]
        for job in JOBS:
            with tempfile.TemporaryDirectory() as folder:
                hits += killed_and_taken_up(job, Path(folder), kills=6, seed=seed)
        seed += 1
        print(
            f"{hits} kills in {seed} rounds of sweeps, trainings, landscapes, studies, benchmarks: "
            "each came to its undisturbed end",
            flush=True,
        )


if __name__ == "__main__":
    main()
