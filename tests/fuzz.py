"""Changed files of every kind that flatscope reads: `make fuzz` for as long as one likes, some of them in the tests.

Each kind is written by flatscope itself, or as a stranger would write it. One seeded change is made to its bytes. What
flatscope wrote must then be refused with an error of its own, or be read as it was; what a stranger wrote must be
refused with an error of its own, or be read.
"""

from __future__ import annotations

import argparse
import io
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from test_results import made_again, old_data, old_network

import flatscope as fs
from flatscope.errors import FlatscopeError
from flatscope.landscapes.making import KeptRows
from flatscope.results import Result
from flatscope_app.reports.items import read_item
from flatscope_papers.study_result import StudyResult
from flatscope_training.checkpoint import TrainConfig
from flatscope_training.data.formats import read_npz
from flatscope_training.loop import train
from flatscope_training.sweeps.store import Store
from flatscope_training.weight_files import read_weights, save_weights


@dataclass(frozen=True)
class Kind:
    """Files of one kind.

    Attributes:
        write: makes them in a folder.
        read: gives back what they hold, as text that is equal for equal content.
        own: whether flatscope wrote them.
    """

    write: Callable[[Path], None]
    read: Callable[[Path], str]
    own: bool = True


def change(content: bytes, seed: int) -> bytes:
    """The bytes with one change: a flipped bit or byte, a part cut, doubled, set to zero or put elsewhere."""
    rng = random.Random(seed)
    data = bytearray(content)
    place = rng.randrange(len(data))
    length = min(len(data) - place, rng.choice((1, 4, 16, 64)))
    kind = rng.choice(("bit", "bit", "byte", "byte", "zero", "cut", "double", "end", "move"))
    if kind == "bit":
        data[place] ^= 1 << rng.randrange(8)
    elif kind == "byte":
        data[place] = rng.randrange(256)
    elif kind == "zero":
        data[place : place + length] = bytes(length)
    elif kind == "cut":
        del data[place : place + length]
    elif kind == "double":
        data[place:place] = data[place : place + length]
    elif kind == "end":
        del data[place:]
    else:
        part = data[place : place + length]
        del data[place : place + length]
        data[(at := rng.randrange(len(data) + 1)) : at] = part
    return bytes(data)


def attack(kind: Kind, folder: Path, seed: int) -> str:
    """What became of one change: "refused", "unchanged", "same" or "read"; anything else is raised."""
    if not folder.exists():
        folder.mkdir(parents=True)
        kind.write(folder)
    before = kind.read(folder) if kind.own else ""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    target = files[seed % len(files)]
    content = target.read_bytes()
    changed = change(content, seed)
    if changed == content:
        return "unchanged"
    target.write_bytes(changed)
    try:
        after = kind.read(folder)
    except FlatscopeError:
        return "refused"
    finally:
        target.write_bytes(content)
    if kind.own and after != before:
        raise AssertionError(f"{target.name}, seed {seed}: other content was taken without a word")
    return "same" if kind.own else "read"


def _tensors(found: dict[str, Any]) -> str:
    return repr({name: (str(value.dtype), value.tolist()) for name, value in sorted(found.items())})


NEWER: dict[str, type[Result]] = {
    "eigenpairs": fs.Eigenpairs, "density": fs.SpectralDensity, "atlas": fs.Atlas, "leaderboard": fs.Leaderboard,
    "stability": fs.Stability,
}  # fmt: skip


def _newer(name: str) -> Result:
    """A result of a kind that version 0.1 did not have."""
    problem = fs.Problem(old_network(0), train=old_data())
    if name == "eigenpairs":
        return fs.eigenpairs(problem, top=2)
    if name == "density":
        return fs.spectral_density(problem, draws=2, steps=4)
    if name == "atlas":
        rows = [{"network": k, "epoch": e, "gap": k, "margin": k * e + k % 3} for k in range(12) for e in (0, 1)]
        return fs.atlas(pd.DataFrame(rows), kinds=["pearson"], resamples=100)
    if name == "leaderboard":
        return fs.benchmark("path_norm", networks=8)
    recorder = fs.StabilityRecorder(old_data())
    for step in range(3):
        recorder.record(old_network(0), step, lr=0.1)
    return recorder.stability


@cache
def _made(name: str) -> Result:
    """Made when a file of it is first asked for, not for a list of names."""
    return _newer(name) if name in NEWER else made_again(name)


def _result(name: str, ending: str) -> Kind:

    def read(folder: Path) -> str:
        again: Result = type(_made(name)).load(folder / f"file{ending}")
        return repr(again.to_frame().to_csv()) + again.to_json()

    return Kind(lambda folder: _made(name).save(folder / f"file{ending}"), read)


def _train(folder: Path, **settings: Any) -> Any:
    config = TrainConfig(epochs=2, batch_size=6, seed=1)
    return train(old_network(0), old_data(), config, checkpoint=folder, show_progress=False, **settings)


def _rows(folder: Path, write: bool) -> str:
    kept = KeptRows(folder, {"grid": 3}, 0.5)
    if write:
        kept.write(1, (torch.tensor([1.0, 2.0, 3.0]), None, torch.zeros(3)))
    # a row that is not right any more is one that was never finished: it is computed again
    return "whole" if (row := kept.read(1, 3)) is None or row[0].tolist() == [1.0, 2.0, 3.0] else repr(row)


def _store(folder: Path) -> None:
    frame = pd.DataFrame({"epoch": [1, 2], "loss": [0.5, 0.25]})
    Store(folder).write({"lr": 0.1}, {"loss": 0.25}, weights={"w": torch.arange(6.0)}, frames={"history": frame})


def _stored(folder: Path) -> str:
    if {"lr": 0.1} not in Store(folder):
        return _WHOLE_TRIAL
    trial = Store(folder).read({"lr": 0.1})
    return repr((trial.config, trial.metrics, trial.weights()["w"].tolist(), trial.frame("history").to_csv()))


_WHOLE_TRIAL = repr(({"lr": 0.1}, {"loss": 0.25}, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], ",epoch,loss\n0,1,0.5\n1,2,0.25\n"))


def _study(folder: Path) -> None:
    table = pd.DataFrame({"x": [1.0, 2.0]})
    StudyResult(
        name="a", title="b", paper="yi2019", source="c", scale="small", table=table, findings=(), svg="<svg></svg>",
        png=b"picture", deviations=(), notes=("n",), provenance={"date": "today"},
    ).save(folder)  # fmt: skip


def _loaded_study(folder: Path) -> str:
    found = StudyResult.load(folder)
    return repr((found.name, found.title, found.table.to_csv(), found.svg, found.png, found.notes, found.provenance))


def _foreign_npz(folder: Path) -> None:
    np.savez_compressed(folder / "data.npz", x_train=np.ones((4, 2)), y_train=np.arange(4))


def _foreign_parquet(folder: Path) -> None:
    frame = pd.DataFrame({"lr": [0.1, 0.2, 0.3], "margin": [1.0, 2.0, 3.0], "gap": [0.3, 0.2, 0.1]})
    (folder / "frame.parquet").write_bytes(frame.to_parquet())


def _foreign_csv(folder: Path) -> None:
    (folder / "frame.csv").write_text("lr,margin,gap\n0.1,1,0.3\n0.2,2,0.2\n0.3,4,0.1\n")


def _foreign_weights(folder: Path) -> None:
    buffer = io.BytesIO()
    torch.save(old_network(0).state_dict(), buffer, _use_new_zipfile_serialization=False)
    (folder / "old.pt").write_bytes(buffer.getvalue())


def kinds() -> dict[str, Kind]:
    """Every kind of file."""
    found = {
        f"{name}{ending}": _result(name, ending)
        for name, endings in {
            "table": (".json", ".parquet"), "audit": (".json", ".parquet"), "comparison": (".json",),
            "surface": (".npz", ".parquet", ".json"), "simplex": (".npz", ".json"),
        }.items()
        for ending in endings
    }  # fmt: skip
    for name, kind in NEWER.items():
        found |= {f"{name}{ending}": _result(name, ending) for ending in kind.READABLE}
    return found | {
        "weights.safetensors": Kind(
            lambda folder: void(save_weights(old_network(0), folder / "w.safetensors")),
            lambda folder: _tensors(read_weights(folder / "w.safetensors")),
        ),
        "weights.pt": Kind(
            lambda folder: void(save_weights(old_network(0), folder / "w.pt")),
            lambda folder: _tensors(read_weights(folder / "w.pt")),
        ),
        "checkpoint": Kind(
            lambda folder: void(_train(folder)),
            lambda folder: _train(folder).history.drop(columns="seconds", errors="ignore").to_csv(),
        ),
        "landscape rows": Kind(lambda folder: void(_rows(folder, True)), lambda folder: _rows(folder, False)),
        "trial": Kind(_store, _stored),
        "study": Kind(_study, _loaded_study),
        "npz of others": Kind(_foreign_npz, lambda folder: repr(read_npz(folder / "data.npz")), own=False),
        "parquet of others": Kind(_foreign_parquet, lambda f: repr(read_item(str(f / "frame.parquet"))), own=False),
        "csv of others": Kind(_foreign_csv, lambda folder: repr(read_item(str(folder / "frame.csv"))), own=False),
        "pickled weights of others": Kind(_foreign_weights, lambda f: _tensors(read_weights(f / "old.pt")), own=False),
    }


def void(_: object) -> None:
    """A write that returns something, as one that does not."""


def main() -> None:
    """Attack all kinds in turn until the time is over, and say what happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first change")
    given = parser.parse_args()
    end, seed, counts = time.monotonic() + 60 * given.minutes, given.seed, {}
    with tempfile.TemporaryDirectory() as folder:
        everything = kinds()
        while time.monotonic() < end:
            for name, kind in everything.items():
                try:
                    outcome = attack(kind, Path(folder) / name, seed)
                except Exception as problem:
                    outcome = "FAILED"
                    print(f"{name}, seed {seed}: {type(problem).__name__}: {problem}")
                counts[outcome] = counts.get(outcome, 0) + 1
            seed += 1
    print(
        f"{sum(counts.values())} changed files of {len(everything)} kinds, seeds {given.seed} to {seed - 1}: {counts}"
    )
    raise SystemExit("FAILED" in counts)


if __name__ == "__main__":
    main()
