"""The same sweep on a Ray cluster: one started here, and a running one by its address whose workers get killed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from test_sweep_kills import WORK, fork, lines, patiently, trials, wait_for, worker_at_work
from trial_work import completions, log_of

from flatscope.errors import InputError
from flatscope.training.sweeps.engines import run_units
from flatscope.training.sweeps.store import Store
from flatscope.training.sweeps.unit_queue import SweepFailed

pytestmark = [
    pytest.mark.long,
    # Looked for, not imported: Ray reads its settings when it is imported, which is up to each driver.
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks the system about processes as Linux answers"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def own_token() -> Iterator[None]:
    """Clusters of these tests have a password of their own; Ray would else make one and keep it for the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        yield


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a small cluster on this machine; it ends with the process that started it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=2"]
    words += ["--object-store-memory=100000000", "--include-dashboard=false", "--disable-usage-stats"]
    words += [f"--temp-dir={tmp_path_factory.mktemp('r')}"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(sys.executable).with_name("ray")
    told = tmp_path_factory.mktemp("log") / "ray"
    with told.open("w") as log:
        head = subprocess.Popen([script, *words], stdout=log, stderr=log, env=env)
    try:
        patiently(lambda: "will now block" in told.read_text() or head.poll() is not None)
        yield f"127.0.0.1:{port}"
    finally:
        family = descendants(head.pid)
        head.kill()  # asked politely it would take its time
        head.wait()
        for process in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def descendants(process: int) -> list[int]:
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [process]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def test_running_cluster_whose_worker_and_driver_are_killed(cluster: str, tmp_path: Path) -> None:
    units = trials(14, 0.3)
    store, calm = Store(tmp_path / "store"), Store(tmp_path / "calm")
    log_of(store).touch()

    def sweep() -> None:
        run_units(units, WORK, store, engine="ray", address=cluster)

    driver = fork(sweep)
    victim = patiently(lambda: worker_at_work(store), driver)
    os.kill(victim, signal.SIGKILL)
    before = len(lines(store))
    patiently(lambda: len(lines(store)) > before, driver)  # the cluster goes on
    os.kill(driver, signal.SIGKILL)
    assert wait_for(driver) == -signal.SIGKILL
    assert len(store.frame()) < 14
    assert wait_for(fork(sweep)) == 0

    frame = run_units(units, WORK, store, engine="ray", address=cluster)  # nothing left: does not even connect
    pd.testing.assert_frame_equal(frame, run_units(units, WORK, calm, workers=0))
    assert store.failures() == {}
    done = completions(store)
    assert len(done) == len(set(done))
    assert 14 - 3 <= len(done) <= 14  # a kill may fall between the write and the line in the log
    assert len([words for words in lines(store) if words[0] == "began"]) > len(done)


def test_cluster_started_for_the_sweep(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    log_of(store).touch()

    def sweep() -> None:
        with pytest.raises(SweepFailed, match="two is not allowed"):
            run_units([[{"x": x}] for x in range(4)], "trial_work:square_or_raise", store, engine="ray", workers=1)

    assert wait_for(fork(sweep)) == 0
    assert sorted(store.frame()["x"]) == [0, 1, 3]
    assert list(store.failures()) == [store.key({"x": 2})]


def test_what_ray_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="workers can see"):
        run_units([[{"x": 1}]], WORK, Store(f"memory://{tmp_path}"), engine="ray")

    with pytest.raises(InputError, match="cluster that answers"):
        run_units([[{"x": 1}]], WORK, Store(tmp_path), engine="ray", address="127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match="pip install ray"):
        run_units([[{"x": 1}]], WORK, Store(tmp_path), engine="ray")
