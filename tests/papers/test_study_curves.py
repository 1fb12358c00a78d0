"""Curves of several runs: means, reach, and runs that end early."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from flatscope_papers import curves

FRAME = pd.DataFrame({"n": [10, 10, 20, 20, 30], "seed": [0, 1, 0, 1, 0], "error": [0.2, 0.4, 0.1, 0.5, 0.3]})


def test_runs_side_by_side() -> None:
    drawn = curves.runs_as_columns(FRAME, "n", "error")
    assert list(drawn.index) == [10, 20, 30]
    assert drawn[1].isna().tolist() == [False, False, True]  # a setting that was not run stays empty
    assert curves.runs_as_columns(FRAME, "n", "error", carry=True)[1].tolist() == [0.4, 0.5, 0.5]


def test_reach_is_that_of_the_runs_or_one_deviation() -> None:
    drawn = curves.runs_as_columns(FRAME, "n", "error")
    mean, low, high = curves.mean_and_spread_of_runs(drawn)
    assert (round(mean[10], 9), low[10], high[10]) == (0.3, 0.2, 0.4)
    mean, low, high = curves.mean_and_spread_of_runs(drawn, deviations=True)
    assert round(high[10] - mean[10], 6) == round(mean[10] - low[10], 6) == 0.141421


def test_what_is_drawn() -> None:
    axes = Figure().subplots()
    drawn = curves.runs_as_columns(FRAME, "n", "error")
    curves.draw_band(axes, drawn, "black", label="band")
    curves.draw_error_bars(axes, drawn, "black", marker="o", label="bars")
    curves.draw_runs_as_dots(axes, drawn, "black", marker="s", label="dots")
    assert axes.get_legend_handles_labels()[1] == ["band", "dots", "bars"]
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (0.1, 0.5)


def test_shades_follow_the_order_of_the_values() -> None:
    found = curves.colours_from_dark_to_light([3, 1, 3, 2])
    assert list(found) == [1, 2, 3]
    assert sum(found[1][:3]) < sum(found[3][:3])
    assert list(curves.colours_from_dark_to_light([5])) == [5]
