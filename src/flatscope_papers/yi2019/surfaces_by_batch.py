"""Figure 3 of Yi et al. (2019): the loss around networks of a small and a large batch, in path space and in weights.

The one number of a surface is the median rise of the loss over its grid. A mean would say how close the nearest grid
point comes to a pole of path space, where the loss grows without limit; points behind a pole count as infinite.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from flatscope import BasisPaths, NumericalWarning, Problem, landscape
from flatscope.training import Store, stored_problem
from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Config, Measured, Runs, Stage, each_trial, keep_saved_figure, study
from flatscope_papers.toml_files import settings_by_scale

Shown = tuple[Any, pd.DataFrame]  # a row of `surface_networks_table`, its grid
SPACES = ("psi", "weights")
RULE = "cyclic"
JUDGED = {"batchnorm": True, "augmentation": "none"}  # 87.78 % is what such a network gives without augmentation
LEVEL = 1e-3  # training loss that both batch sizes reach in the paper
SMALL_NET = {"name": "all_conv", "options": {"channels": 8}}
SIZES = settings_by_scale(__name__)


def surface_stages(scale: str) -> list[Stage]:
    """Networks of both batch sizes, then the surfaces around each; at paper scale with and without BatchNorm."""
    size = SIZES[scale]
    units = [
        [_surface_network_config(size, variant, batch, seed) for seed in range(size["seeds"])]
        for variant in _surface_variants(scale)
        for batch in size["batches"]
    ]
    looks = [[{"network": config, "surface": size["surface"]} for config in unit] for unit in units]
    return [Stage(units), Stage(looks, surfaces)]


def _surface_variants(scale: str) -> list[dict[str, Any]]:
    if scale != "paper":
        return [{}]
    return [{"batchnorm": True, "augmentation": how} for how in ("none", "crop-flip")]


def _surface_network_config(
    size: Mapping[str, Any], variant: Mapping[str, Any], batch: int, seed: int
) -> dict[str, Any]:
    model, train = dict(SMALL_NET), {**size["train"], "batch_size": batch, "seed": seed}
    init = {"scheme": "torch", "skeleton": 1.0}
    if variant:
        model = {"name": "plainnet18", "options": {"batchnorm": variant["batchnorm"]}}
        train |= {"augmentation": variant["augmentation"]}
    return {
        "data": size["data"],
        "model": {**model, "seed": seed},
        "init": init,
        "train": train,
    }


@each_trial("surfaces")
def surfaces(config: Config, store: Store) -> Measured:
    """The planes of equation (18) around stored networks in both spaces, and the median rise over each."""
    network, wanted = config["network"], config["surface"]
    frame = pd.DataFrame({"space": [], "draw": [], "t1": [], "t2": [], "loss": [], "pole": []})
    metrics = {"nearest_pole": math.nan}
    if not store.read(network).metrics["diverged"]:
        whole = stored_problem(store, network, device=config.get("device"))
        samples = next(iter(whole.batches(size=wanted["samples"])))
        problem = Problem(whole.model, train=samples)
        frame = pd.concat(_loss_planes(problem, wanted, network["train"]["seed"]), ignore_index=True)
        metrics["nearest_pole"] = BasisPaths(problem.model, problem.example(), RULE).nearest_pole
    for space in SPACES:
        part = frame[frame["space"] == space]
        metrics |= {f"rise_{space}": median_loss_rise(part), f"poles_{space}": float(part["pole"].astype(float).mean())}
    return Measured(metrics, frames={"grid": frame})


def _loss_planes(problem: Problem, wanted: Mapping[str, Any], seed: int) -> list[pd.DataFrame]:
    planes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)  # poles are counted and shown
        for space in SPACES:
            for draw in range(wanted["draws"]):
                directions = 1_000 * draw + seed
                plane = landscape(
                    problem, space, "gaussian", wanted["grid"], seed=directions, noise=wanted["noise"], rule=RULE
                )
                planes.append(plane.to_frame().drop(columns="error").assign(space=space, draw=draw))
    return planes


def median_loss_rise(grid: pd.DataFrame) -> float:
    """Median over grid points and draws of the loss minus that of the network itself; NaN without a network."""
    if grid.empty:
        return math.nan
    centre = grid[(grid["t1"] == 0) & (grid["t2"] == 0)].set_index("draw")["loss"]
    rises = (grid["loss"] - grid["draw"].map(centre)).to_numpy(float)
    return float(np.median(np.where(np.isfinite(rises), rises, np.inf)))


def surfaces_of_table(table: pd.DataFrame, scale: str) -> Analysis:
    """Claims of the saved table, which has networks and grid points one below the other; its figure stays."""
    frame = table[table["row"] == "network"].reset_index(drop=True)
    frame["judged"] = frame["judged"].astype(bool)
    frame["augmentation"] = frame["augmentation"].fillna("none")
    judged = frame[frame["judged"]]
    small, large = (judged[judged["batch"] == batch] for batch in SIZES[scale]["batches"])
    answers = {
        "train_loss": _largest_final_loss(judged),
        "accuracy_small_batch": _accuracy_answer(small, scale),
        "accuracy_large_batch": _accuracy_answer(large, scale),
        "related": rank_correlation_of_rise_and_error(judged),
        **batch_size_comparisons(small, large),
    }
    return Analysis(table, answers, keep_saved_figure, _surface_notes(scale, frame))


@study("yi2019-fig3", stages=surface_stages, from_table=surfaces_of_table)
def figure_3(runs: Runs) -> Analysis:
    """Surfaces in path space and, beside them, in weight space; drawn for the first seed, judged over all."""
    frame = surface_networks_table(runs)
    judged = frame[frame["judged"]]
    small, large = (judged[judged["batch"] == batch] for batch in SIZES[runs.scale]["batches"])
    grids = runs.frames("grid")
    shown: list[Shown] = [(part.iloc[0], grids[int(part["network"].iloc[0])]) for part in (small, large)]
    points = [grid.assign(row="grid point", batch=row["batch"], seed=row["seed"]) for row, grid in shown]
    table = pd.concat([frame.assign(row="network"), *points], ignore_index=True)
    return replace(surfaces_of_table(table, runs.scale), draw=lambda figure: _draw_surfaces(figure, shown))


def surface_networks_table(runs: Runs) -> pd.DataFrame:
    """One row per network: settings, final losses, the two rises."""
    trained, looked = runs.frame(0), runs.frame(1)
    variant = [config["model"].get("options", {}).get("batchnorm") for config in runs.stages[0].configs]
    frame = pd.DataFrame(
        {
            "network": range(len(trained)),
            "batchnorm": variant,
            "augmentation": trained.get("train.augmentation", "none"),
            "batch": trained["train.batch_size"],
            "seed": trained["train.seed"],
            "epochs": trained["epochs"],
            "train_loss": trained["train_loss"],
            "test_accuracy": 100 * (1 - trained["test_error"]),
        }
    )
    for column in ("rise_psi", "rise_weights", "poles_psi", "nearest_pole"):
        frame[column] = looked[column].to_numpy()
    as_judged = (frame["batchnorm"] == JUDGED["batchnorm"]) & (frame["augmentation"] == JUDGED["augmentation"])
    frame["judged"] = as_judged if runs.scale == "paper" else True
    return frame


def batch_size_comparisons(small: pd.DataFrame, large: pd.DataFrame) -> dict[str, Answer]:
    """The three comparisons of the batch sizes, from one row per network with equal seeds in equal places."""
    both = small.merge(large, on="seed", suffixes=("_small", "_large"))
    lower = int((both["rise_psi_small"] < both["rise_psi_large"]).sum())
    unbounded = int(np.isinf(small["rise_psi"]).sum()), int(np.isinf(large["rise_psi"]).sum())
    note = f"{unbounded[0]} and {unbounded[1]} networks with more than half of the plane behind poles left out"
    return {
        "generalizes": intervals.difference_of_means(small["test_accuracy"], large["test_accuracy"]),
        "flatter": intervals.log10_ratio_of_means(
            large["rise_psi"],
            small["rise_psi"],
            "; ".join([*([note] if any(unbounded) else []), _poles_in_words(small, large)]),
        ),
        "weight_space": intervals.share_of_cases(
            both["rise_weights_small"] < both["rise_weights_large"],
            f"in path space it is lower in {lower} of {len(both)}",
        ),
    }


def _poles_in_words(small: pd.DataFrame, large: pd.DataFrame) -> str:
    """Note on what decides the rise where skeleton paths come close to zero."""
    near = [part["nearest_pole"].median() for part in (small, large)]
    return (
        f"rises follow the nearest pole, the smallest absolute value of a skeleton path (Spearman correlation "
        f"{_correlation_of_rise_with_pole(pd.concat([small, large])):.2f}): "
        f"{near[0]:.2g} with the small and {near[1]:.2g} with the large batch (medians)"
    )


def _correlation_of_rise_with_pole(frame: pd.DataFrame) -> float:
    return intervals.correlation_with_interval(frame["nearest_pole"], frame["rise_psi"], "spearman").value


def rank_correlation_of_rise_and_error(frame: pd.DataFrame) -> Answer:
    """Rank correlation of the rise in path space with the test error; a rise behind poles ranks above all others."""
    rises = frame["rise_psi"].replace(math.inf, np.finfo(float).max)
    note = f"with the distance to the nearest pole the rise correlates at {_correlation_of_rise_with_pole(frame):.2f}"
    return intervals.correlation_with_interval(rises, 100 - frame["test_accuracy"], "spearman", note)


def _largest_final_loss(frame: pd.DataFrame) -> Answer:
    """The largest final loss; no number where the epochs ended above the paper's level: that shows the budget."""
    late = frame[frame["train_loss"] > LEVEL]
    if late.empty:
        return intervals.largest_over_networks(frame["train_loss"])
    counts = " and ".join(f"{count} at batch {batch}" for batch, count in late.groupby("batch").size().items())
    words = f"{counts} of {len(frame)} networks were stopped above it: losses up to {late['train_loss'].max():.2g}"
    return Answer(math.nan, runs=len(frame), note=words)


def _accuracy_answer(part: pd.DataFrame, scale: str) -> Answer:
    if scale == "small":
        return Answer(math.nan, runs=len(part), note="other data and another network: looked for at paper scale only")
    return intervals.mean_over_runs(part["test_accuracy"])


def _surface_notes(scale: str, frame: pd.DataFrame) -> tuple[str, ...]:
    weights = frame.groupby("batch")["rise_weights"].median()
    words = ", ".join(f"{value:.3g} at batch {batch}" for batch, value in weights.items())
    within = frame[np.isfinite(frame["rise_psi"])].groupby("batch")["rise_psi"].agg(["min", "max"])
    spread = ", ".join(f"{row['min']:.2g} to {row['max']:.2g} at batch {batch}" for batch, row in within.iterrows())
    notes = [
        f"median over networks of the rise in weight space: {words}",
        f"rises in path space over networks: {spread}",
    ]
    reached = frame[frame["judged"] & (frame["train_loss"] <= LEVEL)]
    if len(reached) < frame["judged"].sum():
        notes.append(_comparisons_at_reached_level_in_words(reached, SIZES[scale]["batches"]))
    if scale == "paper":
        means = frame.groupby(["batchnorm", "augmentation", "batch"])["test_accuracy"].mean().unstack("batch")
        distance = (means[128] - 87.78).abs() + (means[2048] - 86.3).abs()
        nearest: Any = distance.idxmin()
        notes.append(f"nearest to the paper's accuracies: BatchNorm {nearest[0]}, augmentation {nearest[1]}")
    return tuple(notes)


def _interval_in_words(answer: Answer) -> str:
    known = answer.low is not None and answer.high is not None
    return f" [{answer.low:.2f}, {answer.high:.2f}]" if known else ""


def _comparisons_at_reached_level_in_words(frame: pd.DataFrame, batches: Sequence[int]) -> str:
    """The comparisons among the networks that reached the paper's level."""
    small, large = (frame[frame["batch"] == batch] for batch in batches)
    answers = batch_size_comparisons(small, large) | {"related": rank_correlation_of_rise_and_error(frame)}
    names = {"generalizes": "points of accuracy", "flatter": "log10 of the rise", "related": "rank correlation"}
    words = [f"{name} {answers[key].value:.2f}{_interval_in_words(answers[key])}" for key, name in names.items()]
    return f"the same among the {len(frame)} networks that came to a loss of {LEVEL}: {', '.join(words)}"


def _draw_surfaces(figure: Figure, shown: list[Shown]) -> None:
    """Surfaces above contours, as in the paper; path space to the left, weight space to the right.

    Both batches have one height interval in each space. Contours are logarithmic: in path space the loss runs over so
    many decades that on a linear scale one of two panels would be blank.
    """
    figure.set_size_inches(11.0, 4.8)
    for place, space in enumerate(SPACES):
        planes = [(row, _plane_as_grid(grid, space)) for row, grid in shown if len(grid)]
        if not planes:
            continue
        top = max(float(np.nanquantile(plane, 0.9)) for _, plane in planes)  # poles would take all of the scale
        low = max(1e-6, min(float(np.nanmin(plane)) for _, plane in planes))
        levels = np.geomspace(low, max(top, 2 * low), 13)
        flats = []
        for column, (row, plane) in enumerate(planes):
            index = 2 * place + column + 1
            axis = np.linspace(-1, 1, len(plane))
            surface: Any = figure.add_subplot(2, 4, index, projection="3d")
            grid = np.meshgrid(axis, axis)
            drawn = np.minimum(plane, top).T
            surface.plot_surface(*grid, drawn, cmap="viridis", vmin=0, vmax=top, lw=0, rasterized=True)
            surface.set_zlim(0, top)
            surface.set_box_aspect(None, zoom=1.15)
            words = "path space" if space == "psi" else "weight space"
            surface.set_title(f"{words}, batch {row['batch']}; {row['test_accuracy']:.1f} %", fontsize=8)
            surface.tick_params(labelsize=6, pad=-2)
            flat = figure.add_subplot(2, 4, index + 4)
            flat.set_facecolor("0.85")  # behind a pole
            filled = flat.contourf(
                axis, axis, plane.T, levels=levels, cmap="viridis", norm=LogNorm(levels[0], levels[-1]), extend="both"
            )
            flat.set_aspect("equal")
            flat.set_xlabel("$t_1$", fontsize=8)
            flat.set_ylabel("$t_2$", fontsize=8, labelpad=0)
            flat.tick_params(labelsize=7)
            flats.append(flat)
        bar = figure.colorbar(filled, ax=flats, shrink=0.9, label="training loss", ticks=LogLocator())
        bar.ax.tick_params(labelsize=7)


def _plane_as_grid(grid: pd.DataFrame, space: str) -> np.ndarray[Any, Any]:
    part = grid[(grid["space"] == space) & (grid["draw"] == 0)]
    return part.pivot(index="t1", columns="t2", values="loss").to_numpy(float)
