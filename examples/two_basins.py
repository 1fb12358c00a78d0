"""Noise prefers wide minima: Figures 7-10 of Zhang et al. (2017), redrawn with what exp(-U/T) predicts.

python examples/two_basins.py                      the figures, about two minutes on one core
python examples/two_basins.py --quick              a quick look: too few steps, and the table says so
"""

import argparse
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flatscope_papers.theory.potentials import (
    FlatShare,
    Potential,
    TwoBasins,
    ValleyAndPoint,
    simulate,
    white_sample_noise,
)

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "0.45"
TOLERANCE = 0.02


class HistogramData(NamedTuple):
    title: str
    edges: np.ndarray
    density: np.ndarray
    grid: np.ndarray
    exact: np.ndarray
    note: str


class PlaneData(NamedTuple):
    title: str
    xs: np.ndarray
    ys: np.ndarray
    values: np.ndarray  # (ys, xs)
    note: str


def histogram_data(potential: Potential, found: FlatShare, flat: str, span: tuple[float, float]) -> HistogramData:
    histogram = found.run.histogram(span=span)
    grid = np.linspace(*span, 400)
    exact = potential.marginal(grid, found.run.temperature)
    note = f"P({flat})\n{found.simulated:.3f} run\n{found.exact:.3f} exact"
    return HistogramData(f"D = {potential.dimension}", histogram.edges, histogram.density, grid, exact, note)


def draw_histogram(data: HistogramData, ax: Axes) -> None:
    ax.stairs(data.density, data.edges, fill=True, color=BLUE, alpha=0.35, label="chains")
    ax.plot(data.grid, data.exact, color=ORANGE, linewidth=1.4, label="exp(−U/T)")
    ax.text(0.04, 0.96, data.note, transform=ax.transAxes, va="top", fontsize=8, linespacing=1.3)
    ax.set_title(data.title, fontsize=9)
    ax.set_ylim(0, 1.6 * max(data.exact.max(), data.density.max()))  # room for the note
    ax.set_xlim(data.edges[0], data.edges[-1])
    ax.set_yticks([])
    ax.set_xlabel("$w_1$", fontsize=8)
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right", "left"]].set_visible(False)


def potential_data(potential: Potential) -> PlaneData:
    xs, ys = np.linspace(0.5, 5.5, 200), np.linspace(-2, 2, 160)
    grid = np.stack(np.meshgrid(xs, ys), axis=-1).reshape(-1, 2)
    values = potential.energy(torch.from_numpy(grid)).numpy().reshape(len(ys), len(xs))
    return PlaneData("potential U", xs, ys, values, "point at 2, valley at 4")


def plane_data(found: FlatShare, title: str) -> PlaneData:
    points = found.run.values[..., :2].reshape(-1, 2).numpy()
    values, xs, ys = np.histogram2d(points[:, 0], points[:, 1], bins=(50, 40), range=((0.5, 5.5), (-2, 2)))
    note = f"P(valley) {found.simulated:.3f} run, {found.exact:.3f} exact"
    return PlaneData(title, xs, ys, values.T, note)


def draw_plane(data: PlaneData, ax: Axes) -> None:
    if len(data.xs) == data.values.shape[1]:
        ax.contourf(data.xs, data.ys, np.minimum(data.values, 2), levels=16, cmap="Blues_r")
    else:
        ax.pcolormesh(data.xs, data.ys, data.values, cmap="Blues")
    ax.set_title(data.title, fontsize=9)
    ax.set_xlabel(f"$w_1$\n{data.note}", fontsize=8)
    ax.set_ylabel("$w_2$", fontsize=8)
    ax.tick_params(labelsize=8)


def run(
    name: str, potential: Potential, T: float, lr: float, steps: int, chains: int, sgd_share: float = 0.0
) -> FlatShare:
    """One row of the table; `sgd_share` of the temperature comes from mini-batches, the rest is added noise."""
    noise = white_sample_noise(potential.dimension, sgd_share * T, lr) if sgd_share else None
    found = simulate(
        potential, T, lr=lr, steps=steps, chains=chains, sample_noise=noise, record_every=20, show_progress=True
    )
    right = abs(found.simulated - found.exact) < TOLERANCE and found.mixing.mixed(TOLERANCE)
    print(
        f"{name:<17} D={potential.dimension}  {found.simulated:6.3f} {found.exact:6.3f} {found.closed_form:6.3f} "
        f"{found.mixing.two_start_gap:6.3f} {found.mixing.effective_samples:8.0f} {found.run.seconds:6.1f} s  "
        + ("" if right else "not mixed: take more steps")
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few chains of few steps")
    parser.add_argument("--steps", type=int, default=16_000, help="of each chain; enough for 0.02")
    parser.add_argument("--chains", type=int, default=4000)
    parser.add_argument("--output", default="two_basins.png")
    arguments = parser.parse_args()
    steps, chains = (600, 400) if arguments.quick else (arguments.steps, arguments.chains)
    torch.set_num_threads(1)

    print(f"{'share in the flatter minimum':<22}   run  exact  alone    gap  eff. size")
    figure = Figure(figsize=(11, 8.4), layout="constrained")
    rows = figure.subfigures(3, 1, height_ratios=(1, 1, 1.05))

    rows[0].suptitle("Figure 7: two flat balls of equal depth, one twice as wide", fontsize=11, x=0.01, ha="left")
    for dimension, ax in enumerate(rows[0].subplots(1, 5), start=1):
        basins = TwoBasins(dimension)
        found = run("Fig. 7 two basins", basins, T=0.15, lr=0.01, steps=steps, chains=chains)
        draw_histogram(histogram_data(basins, found, "wide", (-1.5, 4.5)), ax)

    title = "Figure 9: a valley at 4, flat in D − 1 directions, against a point at 2"
    rows[1].suptitle(title, fontsize=11, x=0.01, ha="left")
    plane = None
    for dimension, ax in enumerate(rows[1].subplots(1, 5), start=1):
        valley = ValleyAndPoint(dimension)
        found = run("Fig. 9 valley", valley, T=0.25, lr=0.02, steps=steps, chains=chains)
        plane = found if dimension == 2 else plane
        draw_histogram(histogram_data(valley, found, "valley", (0.5, 5.5)), ax)
        if dimension == 1:
            ax.legend(frameon=False, fontsize=7, loc="upper right")

    assert plane is not None
    title = "Figures 8 and 10: the same in two dimensions, by GDL, SGD and SGDL"
    rows[2].suptitle(title, fontsize=11, x=0.01, ha="left")
    axes = rows[2].subplots(1, 4, sharey=True)
    valley = ValleyAndPoint(2)
    draw_plane(potential_data(valley), axes[0])
    draw_plane(plane_data(plane, "Fig. 8: GDL, full gradient + noise"), axes[1])
    for ax, kind, sgd_share in ((axes[2], "SGD", 1.0), (axes[3], "SGDL", 0.5)):
        found = run(f"Fig. 10 {kind}", valley, T=0.25, lr=0.02, steps=steps, chains=chains // 2, sgd_share=sgd_share)
        parts = "mini-batches only" if kind == "SGD" else "mini-batches + noise"
        draw_plane(plane_data(found, f"Fig. 10: {kind}, {parts}"), ax)
    for ax in axes[1:]:
        ax.set_ylabel("")
    figure.savefig(arguments.output, dpi=130)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
