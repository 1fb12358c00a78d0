"""Figure 6 of Zhang et al. (2017): gradient descent with added Gaussian noise of constant power beside plain SGD."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
from matplotlib.figure import Figure

from flatscope_papers import curves, intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Runs, Stage, study
from flatscope_papers.toml_files import settings_by_scale
from flatscope_papers.zhang2017.all_conv_networks import SIZES, all_conv_config
from flatscope_papers.zhang2017.errors_by_size import train_and_test_panels

TEMPERATURE = 1e-5
LAST = 5  # evaluated epochs whose mean is the end of a curve: single epochs jump about
KINDS = {"SGD": ("#0072b2", "-"), "SGDL": ("#d55e00", "--")}
SETTINGS = settings_by_scale(__name__)


def _added_noise_stages(scale: str) -> list[Stage]:
    settings = SETTINGS[scale]
    made = []
    for temperature in (0.0, TEMPERATURE):
        for seed in range(settings["seeds"]):
            one = all_conv_config(scale, SIZES[scale]["base"], settings["n"], seed)
            one["train"] = {**settings["train"], "seed": seed, "noise_temperature": temperature}
            made.append(one)
    return [Stage([made])]


def added_noise_answers(along: pd.DataFrame) -> dict[str, Answer]:
    """Estimates of the claims from curves with columns kind, seed, epoch and the errors."""
    late = along.sort_values("epoch").groupby(["kind", "seed"]).tail(LAST)
    means = late.groupby(["kind", "seed"])[["train_error", "test_error"]].mean()
    training = intervals.paired_difference(means.loc["SGDL", "train_error"], means.loc["SGD", "train_error"])
    validation = intervals.paired_difference(means.loc["SGDL", "test_error"], means.loc["SGD", "test_error"])
    better = replace(validation, note="the same number as for much the same error, in a range that ends at zero")
    return {"same_training": training, "same_validation": validation, "better_validation": better}


@study("zhang2017-fig6", stages=_added_noise_stages)
def figure_6(runs: Runs) -> Analysis:
    """The same starting weights and the same batches, once with and once without noise of constant power."""
    parts = []
    for stored in runs.stored():
        settings = stored.config["train"]
        kind = "SGDL" if settings["noise_temperature"] else "SGD"
        history = stored.frame("history")[["epoch", "train_error", "test_error"]]
        parts.append(history.assign(kind=kind, seed=settings["seed"]))
    along = pd.concat(parts, ignore_index=True)[["kind", "seed", "epoch", "train_error", "test_error"]]
    return Analysis(along, added_noise_answers(along), lambda figure: _draw_added_noise(figure, along))


def _draw_added_noise(figure: Figure, along: pd.DataFrame) -> None:
    panels = train_and_test_panels(figure, ("training error", "validation error"))
    for axes, name in zip(panels, curves.ERRORS, strict=True):
        for kind, (colour, style) in KINDS.items():
            drawn = curves.runs_as_columns(along[along["kind"] == kind], "epoch", name, carry=True)
            curves.draw_band(axes, drawn, colour, linestyle=style, label=kind)
    panels[1].legend()
