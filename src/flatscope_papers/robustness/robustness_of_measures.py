"""Our own study: every measure against the generalization gap, and what a rescaling of the weights leaves of it.

One population with six settings varied at once. Every network is measured twice: as trained, and after a random
rescaling of its hidden units that changes its weights and not its function. A number that says something about the
function cannot care.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from flatscope.registry import declarations
from flatscope.stats import correlate, correlation_table
from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Runs, study
from flatscope_papers.robustness.grid_networks import SETTINGS, STOP_LOSS, population, stages

Floats = NDArray[np.float64]
SIGNS = {"lower": 1.0, "higher": -1.0}  # a good network has a low value: it should rise with the gap
FEWEST = 10  # networks with a value, below which a measure is not ranked


def ranked(frame: pd.DataFrame) -> tuple[list[str], dict[str, str]]:
    """Measures that can be ranked over this population, and why the others cannot."""
    kept, left_out = [], {}
    for name in declarations():
        values = [frame[f"{when}.{name}"] for when in ("before", "after") if f"{when}.{name}" in frame]
        finite = [int(np.isfinite(part.to_numpy(float)).sum()) for part in values]
        if len(values) < 2 or min(finite) < min(FEWEST, len(frame)):
            left_out[name] = "no value on these networks"
        elif any(part.nunique() < 2 for part in values):
            left_out[name] = "the same on all networks"
        else:
            kept.append(name)
    return kept, left_out


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per measure: correlations with the gap, granulated Kendall, and how far its order survives."""
    names, _ = ranked(frame)
    known = declarations()
    before = frame.rename(columns={f"before.{name}": name for name in names})
    varied = [name for name in SETTINGS if frame[name].nunique() > 1]
    table = correlation_table(before, names, "gap", varied, kinds=("spearman", "kendall"))
    rows = []
    for name in names:
        part = table[table["measure"] == name].set_index("statistic")
        kept = correlate(frame[f"before.{name}"], frame[f"after.{name}"], "kendall")
        row: dict[str, Any] = {
            "measure": name,
            "paper": known[name].paper,
            "direction": known[name].direction,
            "invariant": "unit_scaling" in known[name].invariant_under,
        }
        for statistic in ("spearman", "kendall", "granulated_kendall"):
            row |= {f"{statistic}{end}": part.loc[statistic, column] for end, column in ENDS.items()}
        row |= {"kendall_p_holm": part.loc["kendall", "p_holm"], "networks": part.loc["kendall", "n"]}
        row |= {"kept": kept.value, "kept_low": kept.low, "kept_high": kept.high}
        row["kendall_after"] = correlate(frame[f"after.{name}"], frame["gap"], "kendall").value
        row["as_declared"] = SIGNS.get(known[name].direction, math.nan) * row["granulated_kendall"]
        rows.append(row)
    order = ["invariant", "as_declared"]
    return pd.DataFrame(rows).sort_values(order, ascending=False, ignore_index=True)


ENDS = {"": "value", "_low": "low", "_high": "high"}


def kendalls(pairs: Sequence[tuple[Floats, Floats]], counts: Floats) -> Floats:
    """Tau-b of each pair of columns in each resample, (pairs, resamples); `counts` says how often each row is in it."""
    found = []
    for x, y in pairs:
        known = np.isfinite(x) & np.isfinite(y)  # a network without a value takes part in no comparison
        sx, sy = (np.sign(v[:, None] - v[None, :]) for v in (np.where(known, v, 0.0) for v in (x, y)))
        sx, sy = (np.where(known[:, None] & known[None, :], signs, 0.0) for signs in (sx, sy))
        together, first, second = (((counts @ form) * counts).sum(-1) for form in (sx * sy, np.abs(sx), np.abs(sy)))
        size = np.sqrt(first * second)
        found.append(np.divide(together, size, out=np.zeros_like(together), where=size > 0))
    return np.array(found)


def found_in(frame: pd.DataFrame, table: pd.DataFrame, resamples: int) -> dict[str, Answer]:
    """The numbers of the claims; intervals resample networks, all measures together."""
    fragile = table[~table["invariant"]]["measure"].tolist()
    sound = table[table["invariant"] & table["direction"].isin(SIGNS)]["measure"].tolist()
    n = len(frame)
    generator = np.random.default_rng(0)
    counts = np.vstack([np.ones(n), generator.multinomial(n, np.full(n, 1 / n), size=resamples)]).astype(float)

    def of(name: str, when: str) -> Floats:
        return np.asarray(frame[f"{when}.{name}"], dtype=np.float64)

    def against_gap(names: Sequence[str], when: str) -> Floats:
        gap = np.asarray(frame["gap"], dtype=np.float64)
        return kendalls([(of(name, when), gap) for name in names], counts)

    kept = kendalls([(of(name, "before"), of(name, "after")) for name in fragile], counts)
    loss = np.abs(against_gap(fragile, "before")).mean(0) - np.abs(against_gap(fragile, "after")).mean(0)
    signs = declarations()
    best = [
        np.array([SIGNS[signs[name].direction] for name in names])[:, None] * against_gap(names, "after")
        for names in (sound, [name for name in fragile if signs[name].direction in SIGNS])
    ]
    directed = table[table["direction"].isin(SIGNS)]
    sign = directed["direction"].map(SIGNS)
    wrong = np.where(sign > 0, directed["granulated_kendall_high"] < 0, directed["granulated_kendall_low"] > 0)
    return {
        "invariant_kept": _least(table[table["invariant"]]),
        "others_lost": _percentiles(np.median(kept, axis=0), n, f"{len(fragile)} measures"),
        "wrong_way": intervals.share(wrong, "; ".join([", ".join(directed["measure"][wrong]), _namesakes(directed)])),
        "link_lost": _percentiles(loss, n, f"{len(fragile)} measures"),
        "best_invariant": lead_of_best(best[0], best[1], n, f"best as declared: {sound[int(best[0][:, 0].argmax())]}"),
    }


def _namesakes(directed: pd.DataFrame) -> str:
    """How many measures there really are: some rank every population alike, as a product and its square root do."""
    distinct = len(directed.drop_duplicates([f"granulated_kendall{end}" for end in ENDS]))
    return f"{distinct} of the {len(directed)} rank these networks each in their own way, which the interval overlooks"


def _least(invariant: pd.DataFrame) -> Answer:
    """The measure that keeps its order least: of these measures, on these networks."""
    kept = invariant.set_index("measure")["kept"].sort_values()
    return Answer(kept.iloc[0], kept.iloc[0], kept.iloc[-1], len(kept), str(kept.index[0]), seen="measures")


def _percentiles(draws: Floats, networks: int, note: str) -> Answer:
    """The first is the population itself, the others its resamples."""
    low, high = np.percentile(draws[1:], [2.5, 97.5])
    return Answer(float(draws[0]), float(low), float(high), networks, note)


def lead_of_best(first: Floats, second: Floats, networks: int, note: str = "") -> Answer:
    """The largest of `first` minus the largest of `second`; the population in column 0, its resamples in the others.

    The best of many is best partly by luck, the more so the more there are. So all of them get intervals that hold at
    once (the largest deviation over its standard error, bootstrapped), and the lead the interval that follows.
    """
    draws = np.vstack([first, second])
    errors = draws[:, 1:].std(axis=1)
    off = np.abs(draws[:, 1:] - draws[:, :1]) / np.where(errors > 0, errors, np.inf)[:, None]
    reach = np.quantile(off.max(axis=0), 0.95) * errors
    low, high = draws[:, 0] - reach, draws[:, 0] + reach
    here, there = slice(len(first)), slice(len(first), None)
    ends = low[here].max() - high[there].max(), high[here].max() - low[there].max()
    return Answer(float(first[:, 0].max() - second[:, 0].max()), float(ends[0]), float(ends[1]), networks, note)


@study("robustness-of-measures", stages=stages)
def robustness(runs: Runs) -> Analysis:
    """Correlations over a population with six settings varied, before and after a random rescaling of every network."""
    frame = population(runs)
    resamples = 200 if runs.scale == "smoke" else 1_000
    table = summary(frame)
    _, left_out = ranked(frame)
    reached = int((frame["train_loss"] < STOP_LOSS).sum())
    notes = [
        f"{len(frame)} networks, {reached} of them below a training loss of {STOP_LOSS:g}; "
        f"gaps of the 0/1 error from {frame['gap'].min():.3f} to {frame['gap'].max():.3f}",
        f"{len(table)} of {len(declarations())} measures are ranked",
        *(f"left out: {name}, {why}" for name, why in left_out.items()),
    ]
    return Analysis(table, found_in(frame, table, resamples), lambda figure: _draw(figure, table), tuple(notes))


def _draw(figure: Figure, table: pd.DataFrame) -> None:
    """Two groups of measures, each sorted by what it says about the gap; beside it what is left of their order."""
    figure.set_size_inches(9.0, 1.4 + 0.18 * len(table))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    names, places, place = [], [], 0.0
    for invariant, colour, marker, words in (
        (True, "#0072B2", "o", "invariant to the scale of units"),
        (False, "#D55E00", "D", "not invariant"),
    ):
        part = table[table["invariant"] == invariant]
        sign = part["direction"].map(SIGNS).fillna(1.0).to_numpy(float)
        rows = place + 1.0 + np.arange(len(part))
        for axes, name, turned in ((left, "granulated_kendall", sign), (right, "kept", 1.0)):
            middle = turned * part[name].to_numpy(float)
            ends = np.stack([turned * part[f"{name}_{end}"].to_numpy(float) for end in ("low", "high")])
            reach = np.nan_to_num(np.abs(np.sort(ends, axis=0) - middle))
            axes.errorbar(middle, rows, xerr=reach, fmt=marker, ms=3.5, lw=1, color=colour, label=words)
        left.text(0.01, place, words, transform=left.get_yaxis_transform(), color=colour, va="center", weight="bold")
        names += [f"{name} {ARROWS[way]}" for name, way in zip(part["measure"], part["direction"], strict=True)]
        places += rows.tolist()
        place = rows[-1] + 1.5 if len(rows) else place
    left.set_yticks(places, names, fontsize=7.5)
    left.set_ylim(place, -1.0)
    left.axvline(0, color="0.5", lw=0.8)
    left.set_xlabel(
        "granulated Kendall coefficient with the gap,\npositive: as declared (↓ low is good, ↑ high is good)"
    )
    right.set_xlabel("Kendall coefficient of ranks\nbefore and after rescaling")
    right.set_xlim(min(0.0, float(np.nanmin(table["kept_low"].fillna(table["kept"])))) - 0.05, 1.05)
    for axes in (left, right):
        axes.grid(axis="both", lw=0.3, color="0.85")


ARROWS = {"lower": "↓", "higher": "↑", "none": "–"}
