"""Chains on the two potentials, run, stored and drawn for Figures 7 to 10 of Zhang et al. (2017)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flatscope.training import Store, Stored
from flatscope_papers.declaration import Config, Measured, each_trial
from flatscope_papers.theory.potentials import (
    FlatShare,
    Potential,
    TwoBasins,
    ValleyAndPoint,
    simulate,
    white_sample_noise,
)

NEAR = 0.1  # half-width of the bins in which the density at a minimum is counted
MAPS = {"x": (0.5, 5.5, 50), "y": (-2.0, 2.0, 40)}
BLUE, ORANGE = "#0072B2", "#D55E00"


@each_trial("chains")
def run_potential(config: Config, store: Store) -> Measured:
    """Run the chains of each configuration; store shares per chain, the histogram of w_1, and a map of (w_1, w_2)."""
    potential = potential_of_config(config)
    T, lr, part = config["temperature"], config["lr"], config.get("sgd_share", 0.0)
    shares = simulate(
        potential,
        T,
        lr=lr,
        steps=config["steps"],
        chains=config["chains"],
        sample_noise=white_sample_noise(potential.dimension, part * T, lr) if part else None,
        record_every=20,
        seed=config["seed"],
        device=config.get("device", "cpu"),
    )
    metrics = {
        "share": shares.simulated,
        "exact": shares.exact,
        "alone": shares.closed_form,
        "gap": shares.mixing.two_start_gap,
        "effective_samples": shares.mixing.effective_samples,
    }
    frames = {
        "chains": _flat_share_per_chain(potential, shares),
        "histogram": _first_coordinate_histogram(potential, shares, config["span"]),
    }
    if potential.dimension == 2:
        frames["map"] = _density_on_grid(shares)
    return Measured(metrics, frames=frames)


def potential_of_config(config: Mapping[str, Any]) -> Potential:
    """The potential that a configuration names."""
    kind = TwoBasins if config["potential"] == "two basins" else ValleyAndPoint
    return kind(config["dimension"])


def _flat_share_per_chain(potential: Potential, shares: FlatShare) -> pd.DataFrame:
    """Of each chain: its start, the share of its records in the flatter minimum, and near either minimum's w_1."""
    values = shares.run.values.cpu()
    columns = {"start": shares.run.starts.cpu().numpy(), "share": values[..., 2].double().mean(0).numpy()}
    for name, place in zip(("sharp", "flat"), potential.minima()[:, 0].tolist(), strict=True):
        near = (values[..., 0] - place).abs() < NEAR
        columns[f"near_{name}"] = near.double().mean(0).numpy() / (2 * NEAR)
    return pd.DataFrame(columns)


def _first_coordinate_histogram(potential: Potential, shares: FlatShare, span: Sequence[float]) -> pd.DataFrame:
    drawn = shares.run.histogram(span=(span[0], span[1]))
    middle = (drawn.edges[:-1] + drawn.edges[1:]) / 2
    exact = potential.marginal(middle, shares.run.temperature)
    return pd.DataFrame({"low": drawn.edges[:-1], "high": drawn.edges[1:], "density": drawn.density, "exact": exact})


def _density_on_grid(shares: FlatShare) -> pd.DataFrame:
    """Density of (w_1, w_2) on a grid, one row per cell."""
    points = shares.run.values[..., :2].reshape(-1, 2).cpu().numpy()
    (x0, x1, nx), (y0, y1, ny) = MAPS["x"], MAPS["y"]
    density, xs, ys = np.histogram2d(
        points[:, 0], points[:, 1], bins=(nx, ny), range=((x0, x1), (y0, y1)), density=True
    )
    return pd.DataFrame({"w1": np.repeat(xs[:-1], ny), "w2": np.tile(ys[:-1], nx), "density": density.ravel()})


def draw_histograms_by_dimension(figure: Figure, chains: Sequence[Stored], words: str) -> None:
    """Histograms of w_1 as the dimension grows; below, the potential on its axis and in two dimensions."""
    figure.set_size_inches(10.0, 4.4)
    parts: Any = figure.subfigures(2, 1, height_ratios=(1, 1.1))
    top, bottom = parts
    panels: Any = top.subplots(1, len(chains))
    for axes, stored in zip(np.ravel(panels), chains, strict=True):
        bars = stored.frame("histogram")
        edges = np.append(bars["low"], bars["high"].iloc[-1])
        axes.stairs(bars["density"], edges, fill=True, color=BLUE, alpha=0.4, label="chains")
        axes.plot((bars["low"] + bars["high"]) / 2, bars["exact"], color=ORANGE, lw=1.2, label="exp(−U/T)")
        axes.set_title(f"D = {stored.config['dimension']}: P({words}) = {stored.metrics['share']:.3f}", fontsize=8)
        axes.set_xlabel("$w_1$")
        axes.tick_params(labelsize=7)
    np.ravel(panels)[0].set_ylabel("density")
    np.ravel(panels)[-1].legend(fontsize=6, frameon=False, loc="upper left")
    line, plane = bottom.subplots(1, 2)
    potential = potential_of_config(chains[0].config)
    span = chains[0].config["span"]
    xs = torch.linspace(span[0], span[1], 300, dtype=torch.float64)
    line.plot(xs, potential.energy(xs[:, None]), color="black", lw=1.2)
    line.set_xlabel("$w_1$")
    line.set_ylabel("U, other weights 0")
    draw_potential(plane, potential_of_config({**chains[0].config, "dimension": 2}), (span[0], span[1]))


def draw_potential(axes: Axes, potential: Potential, span: tuple[float, float]) -> None:
    """U over (w_1, w_2)."""
    xs, ys = torch.linspace(*span, 200, dtype=torch.float64), torch.linspace(-2, 2, 160, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(xs, ys, indexing="xy"), dim=-1).reshape(-1, 2)
    values = potential.energy(grid).clamp(max=2).reshape(len(ys), len(xs)).numpy()
    extent = (span[0], span[1], -2.0, 2.0)
    drawn = axes.imshow(values, origin="lower", extent=extent, aspect="auto", cmap="Blues_r")
    assert axes.figure is not None
    axes.figure.colorbar(drawn, ax=axes, label="U (cut at 2)")
    axes.set_xlabel("$w_1$")
    axes.set_ylabel("$w_2$")


def draw_density(axes: Axes, stored: Stored, title: str) -> None:
    """Draw the density of the chains over (w_1, w_2)."""
    cells = stored.frame("map")
    xs, ys = np.unique(cells["w1"]), np.unique(cells["w2"])
    density = cells["density"].to_numpy().reshape(len(xs), len(ys)).T
    drawn = axes.imshow(density, origin="lower", extent=(*MAPS["x"][:2], *MAPS["y"][:2]), aspect="auto", cmap="Blues")
    assert axes.figure is not None
    axes.figure.colorbar(drawn, ax=axes, label="density of chains")
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("$w_1$")
    axes.set_ylabel("$w_2$")
