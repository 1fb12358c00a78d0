"""What each rank of a `torch.distributed.run` does for test_ranks.py: measure, and try what must be refused."""

from __future__ import annotations

import io
import json
import os
import sys
import weakref
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist
from networks import Tiny, attention, batchnorm_conv, lenet_like, mlp, regression, smooth
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flatscope as fs
from flatscope.cli import main

N = 53  # neither 2 nor 3 ranks get equal shares, all of more than one batch
NETWORKS = (mlp, lenet_like, batchnorm_conv, regression, smooth, attention)


def larger(tiny: Tiny) -> Tiny:
    """The same network on 101 samples."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(N, *tiny.x.shape[1:], generator=generator, dtype=torch.float64)
    if tiny.y.is_floating_point():
        return replace(tiny, x=x, y=torch.randn(N, *tiny.y.shape[1:], generator=generator, dtype=torch.float64))
    return replace(tiny, x=x, y=torch.randint(0, int(tiny.y.max()) + 1, (N,), generator=generator))


def frames() -> dict[str, pd.DataFrame]:
    """Every default measure and every bound on every network."""
    found = {}
    for tiny in map(larger, (build() for build in NETWORKS)):
        problem = tiny.problem(batch_size=16)
        found[f"{tiny.name} measures"] = fs.measure(problem).to_frame()
        found[f"{tiny.name} bounds"] = fs.bounds(problem).to_frame()
    tiny = larger(mlp())
    loader = DataLoader(TensorDataset(tiny.x, tiny.y), batch_size=13)
    found["loader measures"] = fs.measure(tiny.problem(train=loader), ["hessian_trace", "gradient_norm"]).to_frame()
    return found


def sampled_frames() -> dict[str, pd.DataFrame]:
    """What is estimated, from random columns and from random products: every rank draws what one process would."""
    names = ["hessian_trace", "layer_trace", "kappa_trace*", "rho*", "relative_flatness"]
    wide = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 60)).double()
    bent = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 60)).double()
    curved = nn.Sequential(nn.Linear(60, 20), nn.GELU(), nn.Linear(20, 60)).double()  # columns at the GELU
    found = {}
    for number, (model, width) in enumerate(((wide, 4), (bent, 30), (curved, 60))):
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for value in model.parameters():
                value.copy_(torch.randn(value.shape, generator=generator, dtype=torch.float64) / value.shape[-1] ** 0.5)
        x = torch.randn(N, width, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 60, (N,), generator=generator)
        for curvature in ("hessian", "gauss_newton"):
            problem = fs.Problem(model, train=(x, y), batch_size=16)
            frame = fs.measure(problem, names, precision=0.2, curvature=curvature).to_frame()
            found[f"sampled {number} {curvature}"] = frame
    return found


def spectra() -> dict[str, list[float]]:
    """Eigenvalues and nodes of the spectral density, out of products that the ranks share."""
    problem = larger(lenet_like()).problem(batch_size=16)
    pairs = fs.eigenpairs(problem, top=2, bottom=1, tolerance=1e-6)
    density = fs.spectral_density(problem, draws=2, steps=6)
    return {"eigenvalues": pairs.values.tolist(), "nodes": density.nodes.tolist(), "weights": density.weights.tolist()}


def refusals(rank: int) -> dict[str, str | int]:
    """Messages of what may not be shared; the ranks of a problem that is not, and the samples of this rank of one."""
    tiny = larger(mlp())
    other = fs.rescale(tiny.model, tiny.x, seed=rank)
    attempts = {
        "few": {"train": (tiny.x[:1], tiny.y[:1])},
        "shuffled": {"train": DataLoader(TensorDataset(tiny.x, tiny.y), batch_size=13, shuffle=True)},
        "other data": {"train": (tiny.x + rank, tiny.y)},
    }
    said: dict[str, str | int] = {}
    for name, changes in attempts.items():
        try:
            tiny.problem(**changes)
        except fs.InputError as problem:
            said[name] = str(problem)
    try:
        tiny.with_model(other).problem()
    except fs.InputError as problem:
        said["other weights"] = str(problem)
    said["alone"] = tiny.problem(shard=False, **attempts["few"]).ranks.size
    said["share"] = sum(len(targets) for _, targets in fs.Context(tiny.problem()).share())
    return said


def measured(folder: Path) -> None:
    """Everything above, as this rank finds it."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name, frame in (frames() | sampled_frames()).items():
        frame.to_parquet(folder / f"{name} {rank}.parquet")
    (folder / f"spectra {rank}.json").write_text(json.dumps(spectra()))
    said = refusals(rank)
    group = weakref.ref(dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()
    said["groups left"] = int(group() is not None)
    said["flatscope"] = fs.__file__
    (folder / f"refusals {rank}.json").write_text(json.dumps(said))


def typed(folder: Path) -> None:
    """Commands one after the other, each with a process group of its own: what this rank says, and its exit code."""
    rank = os.environ["RANK"]
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # where a second group would find the addresses of the first
    for name, (port, *words) in json.loads((folder / "commands.json").read_text()).items():
        os.environ["MASTER_PORT"] = port
        sys.argv, code = ["flatscope", *words], 0
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            try:
                main()
            except SystemExit as end:
                code = int(end.code or 0)
        said = {"code": code, "out": out.getvalue(), "err": err.getvalue()}
        (folder / f"{name} {rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    {"measured": measured, "typed": typed}[sys.argv[1]](Path(sys.argv[2]))
