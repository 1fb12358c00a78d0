"""What Figures 1 to 4 of Neyshabur et al. (2017) measure: norms over the margin, sharpness, the PAC-Bayes pair.

Both works take networks that a store has, fold BatchNorm, and measure on the samples the network was trained on, or
on the first of them ("first"), which are the true-labelled part where a confusion set was added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from flatscope import Context, Problem, fold_batchnorm, measure
from flatscope.errors import NotApplicable
from flatscope.extend import coarse_products, tensors_in
from flatscope.training import Store, stored_problem
from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.curves import draw_error_bars, runs_as_columns
from flatscope_papers.declaration import Config, Measured, Runs, Stage, each_trial
from flatscope_papers.neyshabur2017.bi_criteria import (
    NoiseLevel,
    bi_criteria,
    kl_at_sharpness,
    noise_level_at_sharpness,
)

NORMS = {
    "l2_norm": "ℓ2 norm",
    "l1_path_norm": "ℓ1-path norm",
    "l2_path_norm": "ℓ2-path norm",
    "spectral_norm": "spectral norm",
}
WITH_WIDTHS = ("l2_path_norm", "spectral_norm")  # norms whose printed capacity counts the widths of the layers
EPSILON = 0.05
EPSILONS = (0.001, 0.01, EPSILON, 0.1)
LEVEL = 0.05  # expected sharpness at which the paper's text reads the divergence off
LEVELS = (0.02, LEVEL, 0.1, 0.5)
KL, SHARPNESS = f"kl_at_{LEVEL:g}_refined", "sharpness"
ON_GRID = {f"kl_at/{level:g}": f"kl_at_{level:g}_on_grid" for level in LEVELS}
COLUMNS = {"kl_at_level": KL, **ON_GRID}  # as stored, and as they are called in tables
ASKED = ("network.", "norms.", "perturbations.", "first", "key", "device")  # columns that are settings, not numbers
GPU_BATCH = 1024  # so that several processes have room for the activations of VGG
FITTED = ("train_loss", "train_error", "test_error", "epochs")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999", "#F0E442", "#882255")
CONVENTIONS = (
    "Loss: cross-entropy (the mean, not the 0/1 error). Margin: 5th percentile of the training margins, ε = 0.05, "
    "k-th smallest with k = ⌈εm⌉. Norms over margin are squared, as in the caption, and leave out factors of depth and "
    "width; where widths count, h_i is the number of channels or units of each layer, the last included. Biases: "
    "edges from an always-on unit in path norms, left out of ℓ2 and spectral norms, perturbed in sharpness and KL. "
    "Max-pooling: `max`; convolutions in the spectral norm as operators. BatchNorm folded before anything is measured. "
    "KL without the ½, as in appendix A (twice the divergence). KL at an expected sharpness s: columns kl_at_s_on_grid "
    f"interpolate the noise levels of the table; {KL} takes a further noise level where that interpolation puts "
    f"{LEVEL:g} and interpolates again, and is meant where nothing else is said. Bars in the figure reach from the "
    "smallest to the largest seed; curves are means over seeds."
)


def norm_stage(units: Sequence[Sequence[Config]], epsilons: Sequence[float] = (EPSILON,), **shared: Any) -> Stage:
    """Norms over the margin of the networks that `units` train."""
    return Stage(_measured_configurations(units, norms={"epsilons": epsilons}, **shared), norms, 0.25)


def perturbation_stage(
    units: Sequence[Sequence[Config]], settings: Mapping[str, Any], gpus: float = 0.5, **shared: Any
) -> Stage:
    """Sharpness and the PAC-Bayes pair of the networks that `units` train."""
    return Stage(_measured_configurations(units, perturbations=settings, **shared), perturbations, gpus)


def _measured_configurations(units: Sequence[Sequence[Config]], **settings: Any) -> list[list[dict[str, Any]]]:
    return [[{"network": config, **settings} for config in unit] for unit in units]


@each_trial("norms")
def norms(config: Config, store: Store) -> Measured:
    """The four norms over the margin, and the two printed capacities with widths, for several ε of the margin."""
    problem = measured_problem(store, config)
    ctx = Context(problem)
    rows = []
    for epsilon in config["norms"]["epsilons"]:
        values: dict[str, float] = {}
        for form, names, ending in (("over_margin", NORMS, ""), ("capacity", WITH_WIDTHS, "_capacity")):
            options = {name: {"form": form, "epsilon": epsilon} for name in names}
            table = measure(problem, list(names), options=options, context=ctx)
            values |= {f"{name}{ending}": table[name] for name in names}
        rows.append({"epsilon": epsilon, **values})
    frame = pd.DataFrame(rows)
    chosen = next(row for row in rows if row["epsilon"] == EPSILON)
    usual = {name: value for name, value in chosen.items() if name != "epsilon"}
    metrics = {**usual, "error": ctx.scores().error, "loss": ctx.scores().loss}
    return Measured(metrics, frames={"epsilons": frame})


@each_trial("sharpness")
def perturbations(config: Config, store: Store) -> Measured:
    """Sharpness, the curve of divergence against expected sharpness, and the divergence at the paper's level."""
    settings = config["perturbations"]
    problem = measured_problem(store, config)
    ctx = Context(problem)
    options = {SHARPNESS: {"steps": settings["steps"]}}
    ctx.scores()  # in full: a few passes, where the ascent takes a hundred
    with coarse_products(settings.get("ascent") == "tf32"):
        sharp = measure(problem, SHARPNESS, options=options, context=ctx)[SHARPNESS]
    grid, draws = tuple(settings["alphas"]), settings["draws"]
    curve = bi_criteria(ctx, grid, draws=draws, appendix=True)
    try:
        at_level = kl_at_sharpness(ctx, LEVEL, alpha=grid, draws=draws, appendix=True, refinements=1).kl
    except NotApplicable:
        at_level = math.nan
    metrics = {SHARPNESS: sharp, "kl_at_level": at_level} | {
        f"kl_at/{level:g}": _divergence_at_sharpness(curve, level) for level in LEVELS
    }
    points = [
        {"alpha": point.alpha, "kl": point.kl, "expected_sharpness": point.sharpness, "stderr": point.stderr}
        for point in curve
    ]
    return Measured(metrics, frames={"curve": pd.DataFrame(points)})


def _divergence_at_sharpness(curve: list[NoiseLevel], level: float) -> float:
    try:
        return noise_level_at_sharpness(curve, level).kl
    except NotApplicable:
        return math.nan


def measured_problem(store: Store, config: Mapping[str, Any]) -> Problem:
    """The stored network without BatchNorm, on its training samples or on the first of them."""
    problem = stored_problem(store, config["network"], device=config.get("device"))
    model = fold_batchnorm(problem.model, problem.example())
    batches = list(problem.batches())
    inputs = torch.cat([images for part, _ in batches for images in tensors_in(part)])
    targets = torch.cat([part for _, part in batches])
    first = config.get("first")
    layout = {"memory_format": torch.channels_last} if inputs.is_cuda and inputs.ndim == 4 else {}
    pair = (inputs[:first].contiguous(**layout), targets[:first])
    return Problem(model, train=pair, device=problem.device, batch_size=GPU_BATCH if inputs.is_cuda else None)


def measured_networks(runs: Runs, settings: Mapping[str, str]) -> pd.DataFrame:
    """One row per network: the settings asked for by a short name, how it was fitted, and all that was measured."""
    trained = runs.frame(0)
    parts = [trained[list(settings)].set_axis(list(settings.values()), axis=1), trained[list(FITTED)]]
    for stage in range(1, len(runs.stages)):
        networks = runs.frame(stage)
        kept = networks[[name for name in networks if not str(name).startswith(ASKED)]]
        parts.append(kept.rename(columns=COLUMNS))
    return pd.concat(parts, axis=1)


def mean_over_seeds(
    frame: pd.DataFrame, statistic: Callable[[pd.DataFrame], float], note: str = "", **how: Any
) -> Answer:
    """A number from all runs of one seed, then its mean over seeds: seeds are what is independent.

    `how` goes to `intervals.mean_over_runs`.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        values = [float(statistic(rows)) for _, rows in frame.groupby("seed")]
    lost = int(np.isnan(values).sum())
    words = [note] if note else []
    words += [f"{lost} of {len(values)} seeds without a value"] if lost else []
    return intervals.mean_over_runs(values, "; ".join(words), **how)


def log_log_slope(x: Iterable[float], y: Iterable[float]) -> float:
    """Of the least-squares line through (log10 x, y): decades per decade where y is a logarithm."""
    across, up = np.log10(np.asarray(list(x), float)), np.asarray(list(y), float)
    if len(across) < 2 or not np.isfinite(up).all():
        return math.nan
    return float(np.polyfit(across, up, 1)[0])


def bi_criteria_curves(runs: Runs, settings: pd.DataFrame) -> pd.DataFrame:
    """The bi-criteria curves of all networks, one row per noise level, beside the settings of their network."""
    rows = settings.to_dict("records")
    parts = [frame.assign(**row) for frame, row in zip(runs.frames("curve"), rows, strict=True)]  # type: ignore[arg-type]
    return pd.concat(parts, ignore_index=True)


def networks_and_curves_table(points: pd.DataFrame, levels: pd.DataFrame) -> pd.DataFrame:
    """Networks, then the points of their curves."""
    return pd.concat([points.assign(kind="network"), levels.assign(kind="noise level")], ignore_index=True)


def desiderata_note(table: pd.DataFrame) -> str:
    """The verdict table of `desiderata` in one sentence per demand."""
    sentences = []
    for demand, rows in table.groupby("demand", sort=False):
        words = [f"{row.measure} {row.verdict} ({row.reason})" for row in rows.itertuples()]
        sentences.append(f"Demand “{demand}”: {', '.join(words)}")
    return ". ".join(sentences)


def draw_measures_against_setting(
    axes: Any, frame: pd.DataFrame, by: str, columns: Mapping[str, str], *, log: bool = True
) -> None:
    """One line per column against `by`: mean over seeds, bars from the smallest to the largest."""
    for colour, marker, (column, label) in zip(COLOURS, "osD^v<>", columns.items(), strict=False):
        draw_error_bars(axes, runs_as_columns(frame, by, column), colour, marker=marker, ms=4, label=label)
    if log:
        axes.set_yscale("log")


def draw_relative_measures(axes: Any, frame: pd.DataFrame, by: str, columns: Mapping[str, str]) -> None:
    """The measures on one axis: each divided by its own mean over all networks."""
    scaled = frame.assign(**{name: frame[name] / frame[name].mean() for name in columns})
    draw_measures_against_setting(axes, scaled, by, columns)
    axes.set_ylabel("measure / its mean over all networks")


def draw_bi_criteria_curves(
    axes: Any, points: pd.DataFrame, by: str, *, colours: Mapping[Any, str] | None = None
) -> None:
    """Expected sharpness against KL, one line per value of `by`: the mean over seeds at each noise level."""
    values = sorted(points[by].unique())
    chosen = colours or dict(zip(values, COLOURS, strict=False))
    for value in values:
        line = points[points[by] == value].groupby("alpha")[["kl", "expected_sharpness"]].mean()
        axes.plot(line["kl"], line["expected_sharpness"], "o-", ms=3, color=chosen[value], label=f"{value:g}")
    axes.axhline(LEVEL, color="0.6", lw=0.8, ls="--")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("KL (nats, without ½)")
    axes.set_ylabel("expected sharpness (nats)")


def row_of_three_panels(figure: Figure) -> Any:
    """A row of three, as in Figures 2, 3 and 4."""
    figure.set_size_inches(10.5, 3.4)
    return figure.subplots(1, 3)


def draw_errors_measures_and_curves(
    figure: Figure, points: pd.DataFrame, levels: pd.DataFrame, by: str, words: str
) -> Any:
    """The row of Figures 3 and 4: errors, measures and bi-criteria curves against one setting; the three axes."""
    left, middle, right = row_of_three_panels(figure)
    draw_measures_against_setting(
        left, points, by, {"train_error": "training error", "test_error": "test error"}, log=False
    )
    left.set_ylabel("error (share of images)")
    draw_relative_measures(middle, points, by, {**NORMS, SHARPNESS: "sharpness"})
    for axes in (left, middle):
        axes.set_xlabel(words)
        axes.legend(fontsize=7)
    draw_bi_criteria_curves(right, levels, by)
    return left, middle, right
