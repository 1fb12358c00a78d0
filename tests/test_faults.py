"""A disk that is full or read-only: said in our words, nothing half-written, what was there stays."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from test_results import small_data, small_network

import flatscope as fs
from flatscope.errors import InputError
from flatscope.files import digest
from flatscope.inputs.weight_files import read_weights, save_weights
from flatscope.training.checkpoint import TrainConfig
from flatscope.training.loop import train
from flatscope.training.sweeps import trial_files
from flatscope.training.sweeps.store import Store

ROOM = 256 * 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB in memory."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def fill(disk: Path) -> Path:
    path = disk / "fill"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return path


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != "fill"}


def test_a_full_disk_keeps_what_was_there(small_disk: Path) -> None:
    table = fs.measure(fs.Problem(small_network(0), small_data()), ["l2_norm"])
    table.save(small_disk / "table.json")
    save_weights(small_network(0), small_disk / "w.safetensors")
    before = {name: (small_disk / name).read_bytes() for name in files(small_disk)}
    fill(small_disk)
    for write in (
        lambda: table.save(small_disk / "table.json"),
        lambda: save_weights(small_network(1), small_disk / "w.safetensors"),
        lambda: train(
            small_network(0), small_data(), TrainConfig(epochs=1), checkpoint=small_disk, show_progress=False
        ),
        lambda: Store(small_disk / "store").write({"lr": 0.1}, {"loss": 0.5}, weights={"w": torch.zeros(999)}),
    ):
        with pytest.raises(InputError):
            write()
        assert {name: (small_disk / name).read_bytes() for name in files(small_disk)} == before


def test_a_sweep_goes_on_once_there_is_room(small_disk: Path) -> None:
    store = Store(small_disk / "store")
    store.write({"x": 1}, {"loss": 0.5})
    full = fill(small_disk)
    with pytest.raises(InputError):
        store.write({"x": 2}, {"loss": 0.25})
    assert store.frame()["x"].tolist() == [1]
    full.unlink()
    store.write({"x": 2}, {"loss": 0.25})
    assert sorted(store.frame()["x"]) == [1, 2]


def test_a_read_only_disk_can_be_read(small_disk: Path) -> None:
    save_weights(small_network(0), small_disk / "w.safetensors")
    Store(small_disk / "store").write({"x": 1}, {"loss": 0.5})
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert len(read_weights(small_disk / "w.safetensors")) == 4
    assert Store(small_disk / "store").frame()["loss"].tolist() == [0.5]
    with pytest.raises(InputError):
        Store(small_disk / "store").write({"x": 2}, {"loss": 0.5})
    with pytest.raises(InputError):
        save_weights(small_network(1), small_disk / "w.safetensors")


@pytest.mark.filterwarnings("ignore:.* damaged")
@pytest.mark.parametrize("what", ["file", "marker", "trial", "name"])
def test_what_leads_out_of_a_store_is_refused_before_it_is_read(tmp_path: Path, what: str) -> None:
    store, elsewhere = Store(tmp_path / "store"), Store(tmp_path / "elsewhere")
    for each in (store, elsewhere):
        each.write({"x": 1}, {"loss": 0.5}, weights={"w": torch.zeros(3)})
    trial, other = (Path(each.root) / store.key({"x": 1}) for each in (store, elsewhere))
    if what == "trial":
        shutil.rmtree(trial)
        trial.symlink_to(other)
    elif what == "name":  # a marker whose checksum is right, and which names a file of others
        shutil.move(trial / "config.json", tmp_path / "config.json")
        text = (trial / "metrics.json").read_text().replace("config.json", "../../config.json")
        body = text[: text.rindex('\n"checksum"')].encode()
        (trial / "metrics.json").write_bytes(body + f'\n"checksum": "{digest([body])}"\n}}\n'.encode())
    else:
        name = {"file": "weights.safetensors", "marker": "metrics.json"}[what]
        (trial / name).unlink()
        (trial / name).symlink_to(other / name)
    before = {path: path.read_bytes() for path in other.iterdir()}
    assert len(store.frame()) == (1 if what == "file" else 0)  # the size of a link's target can be known
    with pytest.raises(InputError):
        store.read({"x": 1}).weights()
    assert not store.is_sound({"x": 1})
    with suppress(InputError):  # written anew, or refused; never through the link
        store.write({"x": 1}, {"loss": 0.25}, weights={"w": torch.ones(3)})
    assert {path: path.read_bytes() for path in other.iterdir()} == before


@pytest.mark.parametrize("folder", [".claims", ".partial", ".failed", ".plans", ".unfinished"])
def test_a_store_whose_folders_are_elsewhere_is_refused(tmp_path: Path, folder: str) -> None:
    Store(tmp_path / "store").write({"x": 1}, {"loss": 0.5})
    shutil.rmtree(tmp_path / "store" / folder, ignore_errors=True)
    (tmp_path / "store" / folder).symlink_to(tmp_path)
    with pytest.raises(InputError):
        Store(tmp_path / "store")


def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of this machine, budgets and checkpoints do not ask it; what has a date in the future is read."""
    store, config, day = Store(tmp_path / "store"), {"x": 1}, 86400.0
    now, jumps = time.time, iter(itertools.cycle((0.0, day, -day, 400 * day)))
    calm = fs.measure(fs.Problem(small_network(0), small_data()), ["l2_norm", "sharpness"]).to_frame()["value"]
    trained = train(small_network(0), small_data(), TrainConfig(epochs=2), show_progress=False).history["train_loss"]
    monkeypatch.setattr(time, "time", lambda: now() + next(jumps))
    with store.claim(config) as mine:
        assert mine
        for _ in range(4):
            assert store.running() == {store.key(config)}
            with Store(tmp_path / "store").claim(config) as again:
                assert not again
        store.write(config, {"loss": 0.5})
    again = fs.measure(fs.Problem(small_network(0), small_data()), ["l2_norm", "sharpness"], budget="1h").to_frame()[
        "value"
    ]
    assert again.tolist() == calm.tolist()
    place = tmp_path / "run"
    found = train(small_network(0), small_data(), TrainConfig(epochs=2), checkpoint=place, show_progress=False)
    assert found.history["train_loss"].tolist() == trained.tolist()
    for path in [*place.rglob("*"), *Path(store.root).rglob("*")]:
        os.utime(path, (now() + 400 * day,) * 2)
    assert Store(store.root).frame()["loss"].tolist() == [0.5]
    resumed = train(small_network(0), small_data(), TrainConfig(epochs=2), checkpoint=place, show_progress=False)
    assert resumed.resumed_from == 2


def test_a_lease_of_another_machine_from_the_far_future_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = Store(tmp_path), time.time
    monkeypatch.setattr(trial_files, "this_process", lambda: trial_files.Owner("0123456789ab", 1, 1))
    monkeypatch.setattr(time, "time", lambda: now() + 1e6)
    assert store._leases._take_lease(store.key({"x": 1}), lease=60.0)
    monkeypatch.undo()
    with store.claim({"x": 1}) as mine:
        assert mine


def test_the_page_of_promises_names_tests_that_exist() -> None:
    root = Path(__file__).parents[1]
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (root / "docs" / "faults.md").read_text())
    assert len(named) > 10
    assert [pair for pair in named if f"def {pair[1]}(" not in (root / pair[0]).read_text()] == []
