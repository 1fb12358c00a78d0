"""The store: what is written comes back, what is torn does not, and two processes never hold one trial."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from trial_work import write_one

from flatscope.errors import InputError
from flatscope.training.sweeps import trial_files
from flatscope.training.sweeps.configuration import from_json, plain_value, to_json
from flatscope.training.sweeps.store import Store
from flatscope.training.sweeps.trial_files import DamagedTrial
from flatscope.version import __version__

pytestmark = [
    pytest.mark.fast,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]
CONFIG: dict[str, Any] = {"x": 5, "train": {"lr": 0.1, "steps": [[80, 0.1]]}, "name": "α"}


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """On a disk, and where there is no rename."""
    if request.param == "folder":
        yield Store(tmp_path / "store")
    else:
        made = Store(f"memory://{tmp_path}")
        yield made
        made._fs.rm(made._path, recursive=True) if made._fs.exists(made._path) else None


def files_of(store: Store, config: dict[str, Any]) -> list[str]:
    return sorted(store._fs.ls(f"{store._path}/{store.key(config)}", detail=False))


def in_a_fork(function: Callable[[], None]) -> int:
    """Run it in a child process; the wait status. A fork, since a fresh process takes seconds to import torch."""
    child = os.fork()
    if child == 0:
        try:
            function()
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def test_what_is_written_comes_back(store: Store) -> None:
    assert CONFIG not in store
    weights = {"a": torch.randn(3, 2), "b": torch.tensor(7), "h": torch.ones(2, dtype=torch.float64)}
    table = pd.DataFrame({"epoch": [1, 2], "loss": [0.5, math.nan], "name": ["x", "y"]})
    metrics = {"loss": 0.1 + 0.2, "bad": math.nan, "up": math.inf, "down": -math.inf, "n": 3, "ok": True, "no": None}
    store.write(CONFIG, metrics, weights=weights, frames={"history": table})
    assert CONFIG in store
    assert store.is_sound(CONFIG)
    found = store.read(CONFIG)
    assert found.config == CONFIG
    assert repr(found.metrics) == repr(metrics)  # NaN is NaN here, and 3 is not 3.0
    assert (found.version, found.frames, found.key) == (__version__, ("history",), store.key(CONFIG))
    assert all(torch.equal(found.weights()[name], value) for name, value in weights.items())
    assert found.weights()["h"].dtype == torch.float64
    pd.testing.assert_frame_equal(found.frame("history"), table)
    assert [trial.key for trial in store.stored()] == [store.key(CONFIG)]
    with pytest.raises(InputError, match="frame 'other'"):
        found.frame("other")


def test_key_is_of_the_meaning_not_of_the_writing(store: Store) -> None:
    same = {"name": "α", "train": {"steps": ((80.0, 0.1),), "lr": np.float64(0.1)}, "x": np.int64(5)}
    assert store.key(CONFIG) == store.key(same) == store.key({**same, "device": "cuda"})
    others = [{**CONFIG, "x": 6}, {**CONFIG, "x": "5"}, {**CONFIG, "x": None}, {**CONFIG, "x": True}, {"x": 5}]
    others += [{"x": math.nan}, {"x": math.inf}, {"x": "nan"}, {"x": [5]}]
    assert len({store.key(other) for other in [CONFIG, *others]}) == len(others) + 1
    # Fixed for all time: a store filled by another version, machine or Python is found again.
    assert store.key({"lr": 0.1, "seed": 0, "of": [1, None, "ä"]}) == "1a3d9161de314f8bc6429311160df740"


def test_not_everything_is_a_configuration(store: Store) -> None:
    for bad in ({"x": torch.zeros(3)}, {"x": object()}, {1: 2}, {"x": {"$float": "nan"}}, {"x": {1, 2}}):
        with pytest.raises(InputError, match="configuration"):
            store.key(bad)
    with pytest.raises(InputError, match="dictionary"):
        store.key([1])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="metrics, a, b"):
        store.write(CONFIG, {"a": {"b": object()}})
    with pytest.raises(InputError, match=r"train\.lr"):
        store.write(CONFIG, {"train.lr": 1})
    for name in ("../up", "weights", "metrics", ""):
        with pytest.raises(InputError, match="plain name"):
            store.write(CONFIG, {}, frames={name: pd.DataFrame({"a": [1]})})
    assert CONFIG not in store
    with pytest.raises(InputError, match="none with this configuration"):
        store.read(CONFIG)


def test_every_json_parser_can_read_what_is_written() -> None:
    value = {"a": [math.nan, -math.inf, 1.5], "b": {"c": math.inf}, "d": "NaN"}
    text = to_json(plain_value(value))
    assert "NaN" not in text.replace('"NaN"', "")
    assert "Infinity" not in text
    assert repr(from_json(text)) == repr(value)


def test_first_whole_result_stays(store: Store) -> None:
    store.write(CONFIG, {"loss": 1.0})
    store.write(CONFIG, {"loss": 2.0})
    assert store.read(CONFIG).metrics == {"loss": 1.0}


@pytest.mark.filterwarnings("ignore:.* damaged")
@pytest.mark.parametrize("how", ["cut", "empty", "longer", "flipped", "removed"])
def test_torn_and_damaged_files_are_found_and_the_trial_is_done_again(store: Store, how: str) -> None:
    config = {"x": 7}
    write_one(config, store)
    files = files_of(store, config)
    assert len(files) == 4
    whole = {path: store._fs.cat_file(path) for path in files}
    for path in files:
        for place in {"flipped": (0, len(whole[path]) // 2, -1)}.get(how, (0,)):
            data = bytearray(whole[path])
            if how == "flipped":
                data[place] ^= 1
            cut = {"cut": data[:-3], "empty": b"", "longer": data + b"\n"}.get(how, data)
            store._fs.rm_file(path) if how == "removed" else store._fs.pipe_file(path, bytes(cut))
            if how != "flipped" or path.endswith("metrics.json"):
                assert config not in store, path  # found without reading the other files
                assert list(store.stored()) == []
                assert store.frame().empty
            elif path.endswith(("safetensors", "parquet")):
                trial = store.read(config)
                with pytest.raises(DamagedTrial, match="damaged or missing"):
                    trial.weights() if path.endswith("safetensors") else trial.frame("history")
            else:
                with pytest.raises(DamagedTrial):
                    store.read(config)
                assert list(store.stored()) == []
            assert not store.is_sound(config), path
            assert config not in store  # from here on for everybody
            write_one(config, store)
            assert store.is_sound(config)
            assert store.read(config).metrics["square"] == 49


def test_frame_has_a_row_per_trial_and_exports(store: Store, tmp_path: Path) -> None:
    for x in (1, 3, 2):
        write_one({"x": x, "train": {"lr": 0.5, "widths": [8, 2]}}, store)
    store.write({"x": 9, "other": "word"}, {"square": math.inf, "listed": [1, 2], "nested": {"a": 1}})
    frame = store.frame()
    settings = {"x", "train.lr", "train.widths", "other"}
    assert set(frame.columns) == settings | {"square", "third", "note", "listed", "nested.a", "key"}
    assert list(frame["key"]) == sorted(frame["key"])
    by_x = frame.set_index("x")
    assert by_x.loc[[1, 2, 3, 9], "square"].tolist() == [1, 4, 9, math.inf]
    assert by_x.loc[1, "train.widths"] == "[8, 2]"
    assert by_x.loc[9, "nested.a"] == 1
    assert math.isnan(by_x.loc[3, "third"])
    two = store.frame([{"x": 9, "other": "word"}, {"x": 1, "train": {"lr": 0.5, "widths": [8, 2]}}, {"x": 77}])
    assert two["x"].tolist() == [9, 1]
    store.export(tmp_path / "all.parquet")
    store.export(tmp_path / "all.csv")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "all.parquet"), frame, check_dtype=False)
    assert pd.read_csv(tmp_path / "all.csv")["square"].tolist() == frame["square"].tolist()
    store.write({"x": "not a number"}, {"square": "unknown"})
    store.export(tmp_path / "mixed.parquet")
    assert "unknown" in pd.read_parquet(tmp_path / "mixed.parquet")["square"].tolist()
    with pytest.raises(InputError, match=r"parquet or \.csv"):
        store.export(tmp_path / "all.xlsx")


def test_a_kill_while_writing_leaves_nothing_that_counts(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def write() -> None:
        Path.rename = die  # type: ignore[assignment]
        write_one({"x": 1}, store)

    assert in_a_fork(write) == signal.SIGKILL
    left = list((tmp_path / "store" / ".partial").iterdir())
    assert len(left) == 1
    assert len(list(left[0].iterdir())) == 4
    assert {"x": 1} not in store
    assert list(store.stored()) == []
    store.clear_leftovers()
    assert list((tmp_path / "store" / ".partial").iterdir()) == []
    write_one({"x": 1}, store)
    assert {"x": 1} in store


def test_a_trial_is_claimed_by_one_at_a_time(store: Store) -> None:
    with store.claim(CONFIG) as mine:
        assert mine
        assert store.running() == {store.key(CONFIG)}
        with store.claim(CONFIG) as again, store.claim({"x": 6}) as other:
            assert not again
            assert other
    assert store.running() == set()
    with store.claim(CONFIG) as mine:
        assert mine
        store.write(CONFIG, {"loss": 1.0})
    with store.claim(CONFIG) as mine:
        assert not mine  # it is done


@pytest.mark.long
def test_a_claim_gives_signs_of_life_and_ends_without_them(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = trial_files.Owner("0123456789ab", 1, 1)
    with store.claim(CONFIG, lease=0.4) as mine:
        assert mine
        before = set(store._fs.ls(f"{store._path}/.claims", detail=False))
        time.sleep(1.2)  # three leases
        after = set(store._fs.ls(f"{store._path}/.claims", detail=False))
        assert not before & after
        assert len(after) <= 2
        with store.claim(CONFIG, lease=0.4) as again:
            assert not again
    monkeypatch.setattr(trial_files, "this_process", lambda: foreign)
    holding = store._leases._take_lease(store.key(CONFIG), lease=0.5)  # somebody on another machine, who then dies
    monkeypatch.undo()
    assert holding
    assert not foreign.is_dead()  # as far as can be known here
    with store.claim(CONFIG) as mine:
        assert not mine
    store.clear_leftovers()
    assert store.running() == {store.key(CONFIG)}
    time.sleep(0.6)
    assert store.running() == set()
    with store.claim(CONFIG) as mine:
        assert mine
    assert store._fs.ls(f"{store._path}/.claims", detail=False) == []


def test_the_claim_of_a_dead_process_ends_at_once(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def claim() -> None:
        with store.claim({"x": 1}) as mine:
            os._exit(0 if mine else 1)

    assert in_a_fork(claim) == 0
    assert list((tmp_path / ".claims").iterdir())  # it had no time to take them away
    with store.claim({"x": 1}) as mine:
        assert mine
    me = trial_files.this_process()
    assert not me.is_dead()
    assert trial_files.Owner(me.machine, me.process, me.begun + 1).is_dead()  # the number was used again
    assert not trial_files.Owner("elsewhere", me.process, me.begun + 1).is_dead()


def test_many_who_ask_at_once_never_hold_together(store: Store) -> None:
    inside, most, got = [0], [0], [0]
    lock = threading.Lock()

    def ask() -> None:
        for _ in range(12):
            with store.claim(CONFIG) as mine:
                if mine:
                    with lock:
                        inside[0] += 1
                        most[0], got[0] = max(most[0], inside[0]), got[0] + 1
                    time.sleep(0.002)
                    with lock:
                        inside[0] -= 1

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1
    assert got[0] >= 6  # and they do get it


def test_failures_and_plans_are_kept(store: Store) -> None:
    store.fail(CONFIG, "ValueError: no")
    assert store.failures() == {store.key(CONFIG): "ValueError: no"}
    store.write(CONFIG, {"loss": 1.0})
    assert store.failures() == {}
    assert store.sweeps() == {}
    store.remember("rates", {"grid": {"lr": [1, math.inf]}})
    assert store.sweeps() == {"rates": {"grid": {"lr": [1, math.inf]}}}
    with pytest.raises(InputError, match="plain name"):
        store.remember("../up", {})


def test_places_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="fsspec"):
        Store("nonsense://bucket")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="written to"):
        Store(tmp_path / "file").write(CONFIG, {})
