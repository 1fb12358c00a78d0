"""Studies leave finished networks whenever they are broken off, drop weights when asked, and stores are joined."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from flatscope.cli.app import app
from flatscope.errors import InputError
from flatscope.training import key_of
from flatscope.training.sweeps.store import Store
from flatscope_papers import find_study, load_result, study
from flatscope_papers.declaration import Stage
from flatscope_papers.one_by_one import portions_of_stages, stages_that_read_trials_of

NAME = "zhang2017-table1"
RUNNER = CliRunner()


def network(number: int) -> dict[str, Any]:
    return {"train": {"seed": number}}


def staged() -> list[Stage]:
    """Four networks, looks at each, and one look at two of them; a stage of its own that looks at nothing."""
    looks = [[{"look": kind, "network": network(i)} for kind in "ab"] for i in range(4)]
    pairs = [[{"pair": [network(0), network(2)]}]]
    return [Stage([[network(i)] for i in range(4)]), Stage([[{"remark": 1}]]), Stage(looks), Stage(pairs)]


def test_a_network_is_looked_at_before_the_next_is_trained() -> None:
    order = [config for step in portions_of_stages(staged(), 1) for config in step.stage.configs]
    place = {str(config): number for number, config in enumerate(order)}
    assert len(order) == len(place) == 4 + 1 + 8 + 1
    for i in range(4):
        assert place[str({"look": "b", "network": network(i)})] == place[str(network(i))] + 2
    assert place[str({"pair": [network(0), network(2)]})] == place[str({"look": "b", "network": network(2)})] + 1
    whole = portions_of_stages(staged(), None)
    assert [len(step.stage.configs) for step in whole] == [4, 8, 1, 1]


def test_a_trial_is_finished_where_nothing_looks_at_it_any_more() -> None:
    finished = {
        str(config): number for number, step in enumerate(portions_of_stages(staged(), 1)) for config in step.finished
    }
    order = [[str(config) for config in step.stage.configs] for step in portions_of_stages(staged(), 1)]
    last = next(number for number, configs in enumerate(order) if any("pair" in config for config in configs))
    assert finished[str(network(0))] == finished[str(network(2))] == last
    assert finished[str(network(1))] < finished[str(network(3))]
    assert len(finished) == 14


def test_looks_of_later_studies_come_right_after_the_networks_that_they_share() -> None:
    own = staged()[:1]
    later = [
        Stage([[network(i)] for i in (1, 5)]),
        Stage([[{"deep": 1, "network": network(i)}] for i in (1, 5)]),
        Stage([[{"deeper": {"deep": 1, "network": network(1)}}], [{"both": [network(2), network(5)]}]]),
    ]
    looks, needed = stages_that_read_trials_of(own, later)
    assert [list(stage.configs) for stage in looks] == [[{"deep": 1, "network": network(1)}], [later[2].configs[0]]]
    assert {key_of(network(i)) for i in range(9)} & needed == {key_of(network(2)), key_of(network(5))}
    order = [config for step in portions_of_stages([*own, *looks], 1) for config in step.stage.configs]
    assert order.index(looks[1].configs[0]) == order.index(network(1)) + 2 < order.index(network(2))


@pytest.mark.long
def test_studies_of_the_same_networks_leave_no_weights_between_them(tmp_path: Path) -> None:
    names, store = ["neyshabur2017-fig1", "neyshabur2017-fig2"], tmp_path / "store"
    options = ["--scale", "smoke", "--device", "cpu", "--workers", "0", "--drop-weights", "--store", str(store)]
    done = RUNNER.invoke(app, ["study", "run", *names, *options, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.stderr
    saved = [load_result(tmp_path / "out" / name / "smoke") for name in names]
    assert [result.provenance["of which run now"] > 0 for result in saved] == [True, False]
    assert not list(store.glob("*/weights.safetensors"))


@pytest.mark.parametrize(
    "name", [NAME, "zhang2017-fig12", "neyshabur2017-fig3", "yi2019-balance", "zhang2017-conjecture1"]
)
def test_every_trial_of_a_study_is_run_once_and_after_what_it_looks_at(name: str) -> None:
    stages = find_study(name).stages("paper")
    order = [config for step in portions_of_stages(stages, 1) for config in step.stage.configs]
    whole = [config for stage in stages for config in stage.configs]
    assert sorted(map(repr, order)) == sorted(map(repr, whole))
    place = {repr(config): number for number, config in enumerate(order)}
    for number, config in enumerate(order):
        for seen in [config.get("network"), *(config.get("networks") or [])]:
            assert seen is None or place.get(repr(seen), -1) < number


KILLED = """
import os, signal, sys
from flatscope.training import key_of
from flatscope.training.sweeps.store import Store
write, left = Store.write, [int(sys.argv[2])]

def writing(self, *args, **given):
    write(self, *args, **given)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)

Store.write = writing
from flatscope_papers import study
study("{name}", "smoke", workers=0, store=sys.argv[1], device="cpu", drop_weights=len(sys.argv) > 3)
"""


def killed_after(store: Path, trials: int, *more: str) -> None:
    command = [sys.executable, "-c", KILLED.replace("{name}", NAME), str(store), str(trials), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


@pytest.mark.long
def test_a_run_that_is_killed_leaves_networks_that_were_measured(tmp_path: Path) -> None:
    whole = study(NAME, "smoke", workers=0, store=tmp_path / "whole", device="cpu")
    [first, *_] = find_study(NAME).stages("smoke")[0].units
    looks = [c for c in find_study(NAME).stages("smoke")[1].configs if c["network"] in first]
    store = tmp_path / "store"
    killed_after(store, len(first) + len(looks), "drop")  # the last look is stored, nothing has been dropped
    kept = Store(store)
    assert all(config in kept for config in (*first, *looks))
    assert len(list(kept.stored())) == len(first) + len(looks)  # of later networks nothing has begun
    again = study(NAME, "smoke", workers=0, store=store, device="cpu", drop_weights=True)
    pd.testing.assert_frame_equal(again.table, whole.table)
    assert not list(store.glob("*/weights.safetensors"))
    third = study(NAME, "smoke", workers=0, store=store, device="cpu")  # analysed without weights, nothing run
    pd.testing.assert_frame_equal(third.table, whole.table)
    with pytest.raises(InputError, match="run the trial again in another store"):
        kept.read(first[0]).weights()


def filled(folder: Path, numbers: range, value: float = 1.0) -> Store:
    store = Store(folder)
    for number in numbers:
        weights = {"w": torch.full((2,), float(number))}
        store.write(
            network(number), {"loss": value * number}, weights=weights, frames={"history": pd.DataFrame({"e": [1]})}
        )
    return store


def test_stores_of_several_machines_become_one(tmp_path: Path) -> None:
    one, other = filled(tmp_path / "one", range(3)), filled(tmp_path / "other", range(2, 6))
    other.drop_weights(network(4))
    (next((tmp_path / "other").glob(f"{other.key(network(5))}/history.parquet"))).write_bytes(b"broken")
    one.drop_weights(network(2))
    done = RUNNER.invoke(app, ["study", "join", str(tmp_path / "all"), str(tmp_path / "one"), str(tmp_path / "other")])
    assert done.exit_code == 0
    assert "1 trial damaged" in done.stderr
    joined = Store(tmp_path / "all")
    assert sorted(stored.metrics["loss"] for stored in joined.stored()) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert joined.read(network(2)).weights()["w"].tolist() == [2.0, 2.0]  # of the machine that still had them
    with pytest.raises(InputError, match="dropped"):
        joined.read(network(4)).weights()
    assert joined.read(network(1)).written == one.read(network(1)).written
    assert not (tmp_path / "all" / other.key(network(5))).exists()
    again = joined.take_from(one)
    assert (len(again.taken), len(again.known)) == (0, 3)


def test_a_trial_with_other_numbers_stays_and_is_named(tmp_path: Path) -> None:
    one, other = filled(tmp_path / "one", range(1, 2)), filled(tmp_path / "other", range(1, 2), 5.0)
    assert other.key(network(1)) in one.take_from(other).differing
    assert one.read(network(1)).metrics["loss"] == 1.0


@pytest.mark.parametrize("words", [["a", "a"], ["a", "nowhere"]])
def test_what_cannot_be_joined_is_refused(words: list[str], tmp_path: Path) -> None:
    filled(tmp_path / "a", range(1))
    with pytest.raises(InputError):
        RUNNER.invoke(app, ["study", "join", *(str(tmp_path / word) for word in words)], catch_exceptions=False)


def test_dropping_weights_is_safe_to_break_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path / "one", range(1, 3))

    class BrokenOff(BaseException):
        pass

    def unlink(self: Path, missing_ok: bool = False) -> None:
        raise BrokenOff

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink)
        with pytest.raises(BrokenOff):
            store.drop_weights(network(1))
    assert network(1) in store
    assert store.is_sound(network(1))
    assert store.read(network(1)).frame("history")["e"].tolist() == [1]
    store.drop_weights(network(1))  # the next run clears what was left
    assert not (tmp_path / "one" / store.key(network(1)) / "weights.safetensors").exists()
    assert network(1) in store
    assert store.is_sound(network(1)), "the marker no longer names what is gone"
    assert network(2) in store
    assert store.read(network(2)).weights()["w"].tolist() == [2.0, 2.0]
