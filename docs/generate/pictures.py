"""Draws the pictures of the pages about concepts: `python docs/generate/pictures.py` writes docs/images/concepts/."""

from __future__ import annotations

import copy
import itertools
import re
import runpy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import flatscope as fs

HERE = Path(__file__).parent
FOLDER = HERE.parent / "images" / "concepts"
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "0.55"
rcParams.update({"svg.hashsalt": "flatscope", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})


def save(figure: Figure, name: str) -> None:
    """Write a figure that does not depend on the day."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})


def rescaling(example: dict[str, Any]) -> None:
    """The loss along one random direction, as trained and after layer scaling."""
    model, (x, y) = example["model"], example["train"]
    twin = fs.rescale(model, x[:2], factors={"0": 5.0})
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, net, title, colour in (
        (left, model, "as trained", BLUE),
        (right, twin, "layer 1 × 5, layer 2 ÷ 5", ORANGE),
    ):
        problem = fs.Problem(net, train=(x, y))
        trace = fs.measure(problem, "hessian_trace")["hessian_trace"]
        steps = np.linspace(-1, 1, 81)
        for seed in range(8):
            axes.plot(steps, _line(net, x, y, steps, seed), color=colour, alpha=0.45, linewidth=1)
        axes.set(title=f"{title}: Hessian trace {trace:.3g}", xlabel="step along a random direction of length 1")
        axes.set_ylim(0, 1.2)
    left.set_ylabel("training loss")
    save(figure, "rescaling")


def _line(net: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, steps: np.ndarray, seed: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    direction = [torch.randn(value.shape, generator=generator) for value in net.parameters()]
    length = float(sum((part**2).sum() for part in direction)) ** 0.5
    losses = []
    for step in steps:
        moved = copy.deepcopy(net)
        with torch.no_grad():
            for value, part in zip(moved.parameters(), direction, strict=True):
                value.add_(float(step) / length * part)
            losses.append(float(torch.nn.functional.cross_entropy(moved(x), y)))
    return losses


def relative(example: dict[str, Any]) -> None:
    """Three measures over twenty random rescalings."""
    model, (x, y) = example["model"], example["train"]
    names = {"hessian_trace": ORANGE, "kappa_trace_sum": BLUE, "rho_sum": GREEN}
    first = fs.measure(fs.Problem(model, train=(x, y)), list(names))
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    for axes, by in zip(figure.subplots(1, 2, sharey=True), ("layer", "unit"), strict=True):
        tables = [
            fs.measure(fs.Problem(fs.rescale(model, x[:2], by=by, seed=seed), train=(x, y)), list(names))
            for seed in range(20)
        ]
        ends = {name: tables[-1][name] / first[name] for name in names}
        for name, colour in names.items():
            axes.plot([table[name] / first[name] for table in tables], "o-", color=colour, markersize=3, linewidth=0.8)
            above = 8 if name == "kappa_trace_sum" and abs(ends[name] - ends["rho_sum"]) < 0.1 else 0
            axes.annotate(name, (19, ends[name]), (6, above - 2), textcoords="offset points", color=colour)
        axes.set(yscale="log", xlabel="rescaling", title=f"by {by}s", xlim=(-1, 27), xticks=[0, 5, 10, 15])
    figure.axes[0].set_ylabel("value ÷ value as trained")
    save(figure, "relative")


def paths() -> None:
    """A small network with a skeleton and one path."""
    figure = Figure(figsize=(7, 2.7), layout="constrained")
    axes = figure.subplots()
    columns: list[list[tuple[float, float]]] = [
        [(0, y) for y in (0.5, 1.5, 2.5)],
        [(2, y) for y in (0, 1, 2, 3)],
        [(4, y) for y in (1, 2)],
    ]
    for one, two in itertools.pairwise(columns):
        for start in one:
            for end in two:
                axes.plot(*zip(start, end, strict=True), color="0.8", linewidth=1, zorder=1)
    for unit, source in enumerate((0, 1, 1, 2)):
        axes.plot(
            *zip(columns[0][source], columns[1][unit], strict=True), color=BLUE, linewidth=3.5, zorder=2, alpha=0.8
        )
    route = [columns[0][2], columns[1][2], columns[2][1]]
    axes.plot(*zip(*route, strict=True), color=ORANGE, linewidth=2, zorder=3)
    for place, words in (((0.85, 2.42), "× c"), ((2.9, 2.12), "÷ c")):
        axes.annotate(words, place, color=ORANGE, fontsize=11, zorder=6)
    for column, word in zip(columns, ("inputs", "hidden units", "outputs"), strict=True):
        axes.scatter([x for x, _ in column], [y for _, y in column], s=160, color="white", edgecolor="0.25", zorder=5)
        axes.annotate(word, (column[0][0], -0.65), ha="center", color="0.3")
    axes.annotate("path value = product of its weights", (4.25, 2.0), color=ORANGE, va="center")
    axes.annotate("skeleton: one edge\ninto each hidden unit", (4.25, 1.0), color=BLUE, va="center")
    axes.set(xlim=(-0.3, 6.3), ylim=(-0.8, 3.3))
    axes.set_axis_off()
    save(figure, "paths")


def pac_bayes(example: dict[str, Any]) -> None:
    """The two terms of the bound over the noise, and their sum, as the bound's own rows have them."""
    levels = [float(level) for level in np.geomspace(0.01, 1.0, 13)]
    bound, noisy = [], []
    for level in levels:
        options = {"pac_bayes": {"alpha": (level,), "draws": 100}}
        row = fs.bounds(example["problem"], "pac_bayes", options=options).to_frame().iloc[0]
        bound.append(float(row["value"]))
        noisy.append(float(re.findall(r"with noise ([\d.e-]+)", row["reason"])[0]))
    cost = [total - error for total, error in zip(bound, noisy, strict=True)]
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes: Axes = figure.subplots()
    axes.plot(levels, noisy, color=BLUE)
    axes.plot(levels, cost, color=ORANGE)
    axes.plot(levels, bound, color="black", linewidth=2)
    axes.axhline(1, color=GREY, linestyle=":")
    axes.annotate("vacuous above 1", (levels[0], 1), (2, -11), textcoords="offset points", color="0.4")
    for values, words, colour, below in (
        (noisy, "training error with noise", BLUE, -14),
        (cost, "cost of the noise", ORANGE, 6),
        (bound, "bound", "black", 6),
    ):
        axes.annotate(words, (levels[-1], values[-1]), (6, below // 4), textcoords="offset points", color=colour)
    axes.set(xscale="log", xlim=(levels[0], 4.5), xlabel="noise level α", ylabel="error", ylim=(0, 2))
    axes.set_xticks([0.01, 0.1, 1], ["0.01", "0.1", "1"])
    save(figure, "pac-bayes")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    made = runpy.run_path(str(HERE / "example_network.py"))
    rescaling(made)
    relative(made)
    paths()
    pac_bayes(made)
