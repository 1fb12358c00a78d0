"""Every kind of file that flatscope reads, each written by flatscope itself or as a stranger would write it."""

from __future__ import annotations

import io
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from test_results import made, results, small_data, small_network

import flatscope as fs
from flatscope.cli.run_population import read_table_of_looks
from flatscope.cli.run_train import save_population
from flatscope.decisions.allocation import Allocation
from flatscope.disk import read_file, write_whole
from flatscope.errors import InputError
from flatscope.files import from_parquet_bytes, parquet_bytes
from flatscope.inputs.formats import read_npz
from flatscope.inputs.weight_files import read_weights, save_weights
from flatscope.landscapes.landscape_function import KeptRows, kept_directions
from flatscope.reports.items import read_item
from flatscope.result import Result, reading
from flatscope.training.benchmarking.release import POPULATION_KEY
from flatscope.training.checkpoint import TrainConfig
from flatscope.training.loop import train
from flatscope.training.sweeps.configuration import Sweep
from flatscope.training.sweeps.store import Store
from flatscope_papers.study_result import StudyResult, load_result


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


def void(_: object) -> None:
    """A write that returns something, as one that does not."""


def _tensors(found: dict[str, Any]) -> str:
    return repr({name: (str(value.dtype), value.tolist()) for name, value in sorted(found.items())})


NEWER: dict[str, type[Result]] = {
    "eigenpairs": fs.Eigenpairs, "density": fs.SpectralDensity, "atlas": fs.Atlas, "leaderboard": fs.Leaderboard,
    "stability": fs.Stability, "explanation": fs.Explanation, "sensitivity": fs.Sensitivity, "forecast": fs.Forecast,
    "population": fs.PopulationFrame,
}  # fmt: skip


def _newer(name: str) -> Result:
    """A result of a kind that version 0.1 did not have."""
    problem = fs.Problem(small_network(0), train=small_data())
    if name == "eigenpairs":
        return fs.eigenpairs(problem, top=2)
    if name == "density":
        return fs.spectral_density(problem, draws=2, steps=4)
    if name == "atlas":
        rows = [{"network": k, "epoch": e, "gap": k, "margin": k * e + k % 3} for k in range(12) for e in (0, 1)]
        return fs.atlas(pd.DataFrame(rows), kinds=["pearson"], resamples=100)
    if name == "leaderboard":
        return fs.benchmark("l2_path_norm", networks=8)
    if name == "explanation":
        return fs.explain(problem)
    if name == "sensitivity":
        return _sensitivity()
    if name == "forecast":
        return fs.forecast(problem, small_network(1))
    if name == "population":
        return results()["population"]
    recorder = fs.StabilityRecorder(small_data())
    for step in range(3):
        recorder.record(small_network(0), step, lr=0.1)
    return recorder.stability


@cache
def _sensitivity() -> fs.Sensitivity:
    return fs.sensitivity(fs.Problem(small_network(0), train=small_data()), bits=(8, 2), sparsity=())


def _diagonal(folder: Path) -> None:
    noisy = fs.diagonal(fs.Problem(small_network(0).double(), train=small_data()))
    errors = {name: torch.full_like(value, 0.25) for name, value in noisy.items()}  # as an estimate has them
    fs.Diagonal(noisy, errors, noisy.ways, noisy.matrix, noisy.meta).save(folder / "d.safetensors")


def _read_diagonal(folder: Path) -> str:
    read = fs.Diagonal.load(folder / "d.safetensors")
    return _tensors(dict(read)) + _tensors(read.stderr) + repr((list(read), read.matrix, read.ways, read.meta))


def _rounded(folder: Path) -> None:
    measured = _sensitivity()
    measured.apply(small_network(0), measured.allocate(mean_bits=4)).save(folder / "r.safetensors")


def _read_allocation(folder: Path) -> str:
    read = Allocation.load(folder / "a.json")
    return repr((dict(read), read.sizes, read.sum_of_rises, read.rounding, read.weights, read.unchanged))


def _population_run(folder: Path) -> None:
    trials = [{"seed": seed, "epochs": 2, "name": f"n{seed}"} for seed in range(2)]
    save_population(fs.train_population(lambda trial: small_network(trial["seed"]), trials, small_data()), folder)


def _read_population_run(folder: Path) -> str:
    parts = [repr(read_table_of_looks(str(folder / name)).to_csv()) for name in ("frame.csv", "frame.parquet")]
    for trial in sorted((folder / "trials").iterdir()):
        parts += [_tensors(read_weights(trial / f"{name}.safetensors")) for name in ("weights", "initial")]
        parts.append(repr([(name, table.to_csv()) for name, table in read_item(f"a={trial}")]))
    return "".join(parts)


def _rebuilt(folder: Path) -> None:
    frame = pd.DataFrame({"seed": [0, 1], "stop": [0.1, 0.1], "reached": [True, False], "margin": [0.5, 0.25]})
    write_whole(folder / "population.parquet", parquet_bytes(frame, POPULATION_KEY, {"networks": 2}))


def _read_rebuilt(folder: Path) -> str:
    with reading("the population of a benchmark", "population.parquet"):
        try:
            content = read_file(folder / "population.parquet")
        except OSError as problem:
            raise ValueError(str(problem)) from problem
        frame, head = from_parquet_bytes(content, POPULATION_KEY)
    return frame.to_csv() + repr(head)


def _failure(folder: Path) -> None:
    Store(folder).fail({"lr": 0.1}, "ValueError: a loss that is not finite")


def _read_failure(folder: Path) -> str:
    found = [*Store(folder).failures().values()]
    if any("the record of its failure" in words for words in found):  # what `sweep status` shows in its place
        raise InputError("the record of a failure", found[0])
    return repr(found)


@cache
def _made(name: str) -> Result:
    """Made when a file of it is first asked for, not for a list of names."""
    return _newer(name) if name in NEWER else made(name)


def _result(name: str, ending: str) -> Kind:

    def read(folder: Path) -> str:
        again: Result = type(_made(name)).load(folder / f"file{ending}")
        return repr(again.to_frame().to_csv()) + again.to_json() + repr(sorted(dict(again.meta or {}).items(), key=str))

    return Kind(lambda folder: _made(name).save(folder / f"file{ending}"), read)


def _train(folder: Path, **settings: Any) -> Any:
    config = TrainConfig(epochs=2, batch_size=6, seed=1)
    return train(small_network(0), small_data(), config, checkpoint=folder, show_progress=False, **settings)


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
    read: pd.DataFrame = read_table_of_looks(str(folder / f"export{ending}"))
    return repr([(name, str(kind)) for name, kind in read.dtypes.items()]) + read.to_csv()


def _run_folder(folder: Path) -> None:
    frame = pd.DataFrame({"epoch": [1, 2], "train_loss": [0.5, 0.25], "train_error": [0.5, 0.0]})
    write_whole(folder / "history.csv", frame.to_csv(index=False).encode(), with_sum=True)


def _plans(folder: Path) -> None:
    Store(folder).remember("rates", Sweep.from_dict(PLAN).to_dict())


def _planned(folder: Path) -> str:
    store = Store(folder)
    for problem in store.damaged_sweeps().values():
        raise problem
    # a name is the file's own: another name is another plan, and of this one there is none
    return repr({name: plan for name, plan in store.sweeps().items() if name == "rates"})


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
    torch.save(small_network(0).state_dict(), buffer, _use_new_zipfile_serialization=False)
    (folder / "old.pt").write_bytes(buffer.getvalue())


def kinds() -> dict[str, Kind]:
    """Every kind of file."""
    found = {
        f"{name}{ending}": _result(name, ending)
        for name, endings in {
            "table": (".json", ".parquet"), "audit": (".json", ".parquet"), "comparison": (".json",),
            "surface": (".npz", ".parquet", ".json"), "simplex": (".npz", ".parquet", ".json"),
        }.items()
        for ending in endings
    }  # fmt: skip
    for name, kind in NEWER.items():
        found |= {f"{name}{ending}": _result(name, ending) for ending in kind.READABLE}
    return found | {
        "weights.safetensors": Kind(
            lambda folder: void(save_weights(small_network(0), folder / "w.safetensors")),
            lambda folder: _tensors(read_weights(folder / "w.safetensors")),
        ),
        "weights.pt": Kind(
            lambda folder: void(save_weights(small_network(0), folder / "w.pt")),
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
        "failure": Kind(_failure, _read_failure),
        "population run": Kind(_population_run, _read_population_run),
        "rebuilt population": Kind(_rebuilt, _read_rebuilt),
        "diagonal": Kind(_diagonal, _read_diagonal),
        "rounded weights": Kind(_rounded, lambda folder: _tensors(read_weights(folder / "r.safetensors"))),
        "allocation": Kind(
            lambda folder: _sensitivity().allocate(mean_bits=4).save(folder / "a.json"), _read_allocation
        ),
        "sweep of others": Kind(_sweep_file, lambda f: repr(Sweep.from_file(f / "sweep.toml").configs()), own=False),
        "study": Kind(_study, _loaded_study),
        "npz of others": Kind(_foreign_npz, lambda folder: repr(read_npz(folder / "data.npz")), own=False),
        "parquet of others": Kind(_foreign_parquet, lambda f: repr(read_item(str(f / "frame.parquet"))), own=False),
        "csv of others": Kind(_foreign_csv, lambda folder: repr(read_item(str(folder / "frame.csv"))), own=False),
        "pickled weights of others": Kind(_foreign_weights, lambda f: _tensors(read_weights(f / "old.pt")), own=False),
    }
