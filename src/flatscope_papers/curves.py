"""Curves of several runs against a setting or along training: their mean, and how far the runs reach around it."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import pandas as pd

TRAIN, TEST = "#0072b2", "#d55e00"  # told apart by those who do not see red and green as well
ERRORS = {"train_error": ("training error", TRAIN, "o"), "test_error": ("test error", TEST, "s")}


def runs_as_columns(
    frame: pd.DataFrame, by: str, column: str, run: str = "seed", *, carry: bool = False
) -> pd.DataFrame:
    """One row per place, one column per run.

    Args:
        frame: one row per place and run.
        by: the column of places: a setting, or epochs.
        column: what is drawn.
        run: the column that tells runs apart.
        carry: a run that ended keeps its last value: for epochs, not for settings.
    """
    wide: pd.DataFrame = frame.pivot_table(index=by, columns=run, values=column)
    return wide.ffill() if carry else wide


def mean_and_spread_of_runs(drawn: pd.DataFrame, *, deviations: bool = False) -> tuple[Any, Any, Any]:
    """Mean over runs, and the ends of what is drawn around it: smallest and largest run, or one deviation."""
    mean = drawn.mean(axis=1)
    if deviations:
        spread = drawn.std(axis=1)
        return mean, mean - spread, mean + spread
    return mean, drawn.min(axis=1), drawn.max(axis=1)


def draw_band(
    axes: Any, drawn: pd.DataFrame, colour: Any, *, deviations: bool = False, alpha: float = 0.15, **how: Any
) -> None:
    """The mean as a line, the reach of the runs as a band; `how` is passed on to the line."""
    mean, low, high = mean_and_spread_of_runs(drawn, deviations=deviations)
    axes.plot(drawn.index, mean, color=colour, **how)
    axes.fill_between(drawn.index, low, high, color=colour, alpha=alpha, linewidth=0)


def draw_error_bars(axes: Any, drawn: pd.DataFrame, colour: Any, *, deviations: bool = False, **how: Any) -> None:
    """The mean as a line with markers, the reach of the runs as error bars; `how` is passed on."""
    mean, low, high = mean_and_spread_of_runs(drawn, deviations=deviations)
    below, above = (part.clip(lower=0) for part in (mean - low, high - mean))  # rounding may leave −1e-17
    axes.errorbar(drawn.index, mean, yerr=[below, above], color=colour, capsize=2, **how)


def draw_runs_as_dots(axes: Any, drawn: pd.DataFrame, colour: Any, *, marker: str, label: str) -> None:
    """The mean as a line with markers, every run as a small dot."""
    axes.plot(drawn.index, drawn.mean(axis=1), color=colour, marker=marker, markersize=5, label=label)
    for run in drawn.columns:
        axes.scatter(drawn.index, drawn[run], color=colour, marker=marker, s=8, alpha=0.4)


def colours_from_dark_to_light(values: Any) -> dict[Any, Any]:
    """A colour for each of some ordered values, from dark to light."""
    ordered = sorted(set(values))
    colours = mpl.colormaps["viridis"]
    return {value: colours(0.9 * place / max(1, len(ordered) - 1)) for place, value in enumerate(ordered)}
