"""Changed files of every kind that flatscope reads: `make fuzz` for as long as one likes, some of them in the tests.

Each kind is written by flatscope itself, or as a stranger would write it. One seeded change is made to its bytes. What
flatscope wrote must then be refused with an error of its own, or be read as it was; what a stranger wrote must be
refused with an error of its own, or be read. In place of a file there may also be what is none: a pipe, a device, a
folder, a link that leads nowhere. That is refused as well, or done without, and nothing waits for it.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import shutil
import signal
import tempfile
import time
import warnings
from collections import Counter
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
from flatscope.disk import write_with_sum
from flatscope.errors import FlatscopeError, InputError
from flatscope.landscapes.making import KeptRows, kept_directions
from flatscope.results import Result
from flatscope_app.cli.run_population import read_looks
from flatscope_app.reports.items import read_item
from flatscope_papers.study_result import StudyResult, load_result
from flatscope_training.checkpoint import TrainConfig
from flatscope_training.data.formats import read_npz
from flatscope_training.loop import train
from flatscope_training.sweeps.configuration import Sweep
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


SPECIAL: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a device without end": lambda path: path.symlink_to("/dev/zero"),
    "an empty device": lambda path: path.symlink_to("/dev/null"),
    "a folder": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "an empty file": lambda path: path.write_bytes(b"") and None,
}
PATIENCE = 20  # seconds that a reader may take with what is no file


def replace_file(kind: Kind, folder: Path, seed: int) -> str:
    """What became of something else in the place of a file: "refused" or "done without"; anything else is raised."""
    if not folder.exists():
        folder.mkdir(parents=True)
        kind.write(folder)
    before = kind.read(folder) if kind.own else ""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    target = files[seed % len(files)]
    name = [*SPECIAL][seed // len(files) % len(SPECIAL)]
    aside = target.with_name(f"{target.name}.aside")
    target.rename(aside)
    signal.signal(signal.SIGALRM, _out_of_patience)
    signal.alarm(PATIENCE)
    try:
        SPECIAL[name](target)
        after = kind.read(folder)
    except FlatscopeError:
        return "refused"
    finally:
        signal.alarm(0)
        shutil.rmtree(target, ignore_errors=True) if target.is_dir() and not target.is_symlink() else target.unlink()
        aside.rename(target)
    if kind.own and after != before:
        raise AssertionError(f"{name} in the place of {target.name}, seed {seed}: other content without a word")
    return "done without"


def _out_of_patience(*_: object) -> None:
    raise TimeoutError(f"no end after {PATIENCE} s")


def flip(kind: Kind, folder: Path, seed: int, before: str) -> str:
    """What became of one flipped bit, by its number over all files of the kind: "refused", "same" or "read"."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    place = random.Random(seed).randrange(sum(path.stat().st_size for path in files) * 8)
    for target in files:
        if place < (size := target.stat().st_size * 8):
            break
        place -= size
    content = bytearray(target.read_bytes())
    content[place // 8] ^= 1 << place % 8
    whole = target.read_bytes()
    target.write_bytes(content)
    try:
        after = kind.read(folder)
    except FlatscopeError:
        return "refused"
    finally:
        target.write_bytes(whole)
    if kind.own and after != before:
        raise AssertionError(f"{target.name}, bit {place}: read as something else without a word")
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


def _many_trials(folder: Path, ending: str) -> None:
    store = Store(folder / "store")
    for seed in range(4):
        store.write({"lr": 0.1, "seed": seed, "words": f"w{seed}"}, {"loss_gap": 0.25 / (seed + 1), "margin": 1.5})
    store.export(folder / f"export{ending}")
    shutil.rmtree(folder / "store")


def _exported(folder: Path, ending: str) -> str:
    read: pd.DataFrame = read_looks(str(folder / f"export{ending}"))
    return repr([(name, str(kind)) for name, kind in read.dtypes.items()]) + read.to_csv()


def _run_folder(folder: Path) -> None:
    frame = pd.DataFrame({"epoch": [1, 2], "train_loss": [0.5, 0.25], "train_error": [0.5, 0.0]})
    write_with_sum(folder / "history.csv", frame.to_csv(index=False).encode())


def _plans(folder: Path) -> None:
    Store(folder).remember("rates", Sweep.from_dict(PLAN).to_dict())


def _planned(folder: Path) -> str:
    store = Store(folder)
    for problem in store.damaged_plans().values():
        raise problem
    # a name is the file's own: another name is another plan, and of this one there is none
    return repr({name: plan for name, plan in store.plans().items() if name == "rates"})


PLAN = {"name": "rates", "work": "a:b", "base": {"model": {"name": "mlp"}}, "grid": {"train.lr": [0.05, 0.1]}}


def _sweep_file(folder: Path) -> None:
    (folder / "sweep.toml").write_text('name = "rates"\n[base.train]\nepochs = 2\n[grid]\n"train.lr" = [0.1, 0.2]\n')


def _directions(folder: Path) -> str:
    like = {"w": torch.zeros(3)}
    return repr([found["w"].tolist() for found in kept_directions(folder, like, lambda: [{"w": torch.ones(3)}])])


def _study(folder: Path) -> None:
    table = pd.DataFrame({"x": [1.0, 2.0]})
    StudyResult(
        name="a", title="b", paper="yi2019", source="c", scale="small", table=table, findings=(), svg="<svg></svg>",
        png=b"picture", deviations=(), notes=("n",), provenance={"date": "today"},
    ).save(folder)  # fmt: skip


def _loaded_study(folder: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            found = load_result(folder)
        except UserWarning as word:  # that a picture is gone: not without a word
            raise InputError("every picture", str(word)) from None
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
        "directions": Kind(lambda folder: void(_directions(folder)), _directions),
        "trial": Kind(_store, _stored),
        "export.parquet": Kind(lambda f: _many_trials(f, ".parquet"), lambda f: _exported(f, ".parquet")),
        "export.csv": Kind(lambda f: _many_trials(f, ".csv"), lambda f: _exported(f, ".csv")),
        "run folder": Kind(_run_folder, lambda f: repr([(n, t.to_csv()) for n, t in read_item(f"a={f}")])),
        "plan": Kind(_plans, _planned),
        "sweep of others": Kind(_sweep_file, lambda f: repr(Sweep.from_file(f / "sweep.toml").configs()), own=False),
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
    parser.add_argument("--bits", type=int, default=0, help="flip so many single bits, and nothing else")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    end, seed, counts = time.monotonic() + 60 * given.minutes, given.seed, {}
    with tempfile.TemporaryDirectory() as folder:
        everything = kinds()
        if given.bits:
            raise SystemExit(flip_bits(everything, Path(folder), given.bits, given.seed, end))
        while time.monotonic() < end:
            for name, kind in everything.items():
                try:
                    outcome = (replace_file if seed % 8 == 7 else attack)(kind, Path(folder) / name, seed)
                except Exception as problem:
                    outcome = "FAILED"
                    print(f"{name}, seed {seed}: {type(problem).__name__}: {problem}")
                counts[outcome] = counts.get(outcome, 0) + 1
            seed += 1
    print(
        f"{sum(counts.values())} changed files of {len(everything)} kinds, seeds {given.seed} to {seed - 1}: {counts}"
    )
    raise SystemExit("FAILED" in counts)


def flip_bits(everything: dict[str, Kind], folder: Path, count: int, seed: int, end: float) -> bool:
    """Flip single bits of every kind of file that flatscope writes, in turn; whether one was read as something else."""
    own = {name: kind for name, kind in everything.items() if kind.own}
    before, counts = {}, {name: Counter[str]() for name in own}
    for name, kind in own.items():
        (folder / name).mkdir(parents=True)
        kind.write(folder / name)
        before[name] = kind.read(folder / name)
    tried = 0
    while tried < count and time.monotonic() < end:
        for name, kind in own.items():
            try:
                outcome = flip(kind, folder / name, seed + tried, before[name])
            except Exception as problem:
                outcome = "FAILED"
                print(f"{name}: {type(problem).__name__}: {problem}", flush=True)
            counts[name][outcome] += 1
            tried += 1
    for name, outcomes in counts.items():
        print(f"{name}: {dict(outcomes)}")
    total = sum(counts.values(), Counter[str]())
    print(f"{tried} single flipped bits over {len(own)} kinds of files: {dict(total)}")
    return "FAILED" in total


if __name__ == "__main__":
    main()
