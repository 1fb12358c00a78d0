"""A disk that is full or read-only: said in our words, nothing half-written, what was there stays."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from test_results import old_data, old_network

import flatscope as fs
from flatscope.errors import InputError
from flatscope.sweeps.store import Store
from flatscope.training.checkpoint import TrainConfig
from flatscope.training.loop import train
from flatscope.training.weight_files import read_weights, save_weights

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
    table = fs.measure(fs.Problem(old_network(0), old_data()), ["l2_norm"])
    table.save(small_disk / "table.json")
    save_weights(old_network(0), small_disk / "w.safetensors")
    before = {name: (small_disk / name).read_bytes() for name in files(small_disk)}
    fill(small_disk)
    for write in (
        lambda: table.save(small_disk / "table.json"),
        lambda: save_weights(old_network(1), small_disk / "w.safetensors"),
        lambda: train(old_network(0), old_data(), TrainConfig(epochs=1), checkpoint=small_disk, show_progress=False),
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
    save_weights(old_network(0), small_disk / "w.safetensors")
    Store(small_disk / "store").write({"x": 1}, {"loss": 0.5})
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert len(read_weights(small_disk / "w.safetensors")) == 4
    assert Store(small_disk / "store").frame()["loss"].tolist() == [0.5]
    with pytest.raises(InputError):
        Store(small_disk / "store").write({"x": 2}, {"loss": 0.5})
    with pytest.raises(InputError):
        save_weights(old_network(1), small_disk / "w.safetensors")


def test_the_page_of_promises_names_tests_that_exist() -> None:
    root = Path(__file__).parents[1]
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", (root / "docs" / "faults.md").read_text())
    assert len(named) > 10
    assert [pair for pair in named if f"def {pair[1]}(" not in (root / pair[0]).read_text()] == []
