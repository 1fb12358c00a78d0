"""Means to compute a claim a second time from the saved table of its study: statistics, bootstrap percentiles."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

RESULTS = Path(__file__).parents[2] / "src" / "flatscope_papers" / "results"
DRAWS = 200
Table = pd.DataFrame
Statistic = Callable[[Table], float]


@dataclass(frozen=True)
class Second:
    """A claim computed again.

    Attributes:
        study: of the claim.
        key: of the claim.
        statistic: its number, of a table.
        rows: the part of the saved table that it is about.
        unit: columns that tell independent units apart; none where the claim is about each of them, or exact.
        strata: columns within which units are drawn again.
        scale: of the saved table.
    """

    study: str
    key: str
    statistic: Statistic
    rows: Callable[[Table], Table] = lambda t: t
    unit: tuple[str, ...] = ()
    strata: tuple[str, ...] = ()
    scale: str = "paper"

    def value(self) -> float:
        """The number."""
        return float(self.statistic(self.rows(table(self.study, self.scale))))

    def interval(self) -> tuple[float, float]:
        """Ends of the bootstrap percentile interval of 95 %; the number twice where units are not drawn."""
        rows = self.rows(table(self.study, self.scale))
        if not self.unit:
            value = float(self.statistic(rows))
            return value, value
        generator, groups = np.random.default_rng(0), units(rows, self.unit, self.strata)
        found = [self.statistic(again(rows, self.unit, groups, generator)) for _ in range(DRAWS)]
        low, high = np.nanpercentile(found, [2.5, 97.5])
        return float(low), float(high)


@functools.cache
def table(study: str, scale: str = "paper") -> Table:
    """The saved table."""
    return pd.read_csv(RESULTS / study / scale / "table.csv", low_memory=False)


def again(
    rows: Table, unit: tuple[str, ...], groups: list[list[np.ndarray[Any, Any]]], generator: np.random.Generator
) -> Table:
    """Units drawn again with replacement, each as a unit of its own."""
    drawn = [members[i] for members in groups for i in generator.integers(len(members), size=len(members))]
    number = np.repeat(np.arange(len(drawn)), [len(places) for places in drawn])
    return rows.iloc[np.concatenate(drawn)].assign(**{unit[0]: number})


def units(rows: Table, unit: tuple[str, ...], strata: tuple[str, ...]) -> list[list[np.ndarray[Any, Any]]]:
    """Places of the rows of every unit, by stratum."""
    places = np.arange(len(rows))
    groups = rows.groupby(list(strata)).indices.values() if strata else [places]
    return [[group[i] for i in rows.iloc[group].groupby(list(unit)).indices.values()] for group in groups]


def per(column: str, by: str, where: Callable[[Table], Any] | None = None) -> Callable[[Table], Any]:
    """Mean of a column for each value of another."""
    return lambda t: (t if where is None else t[where(t)]).groupby(by)[column].mean()


def ranks_within(x: str, y: str, by: str) -> Statistic:
    """Pearson's correlation of the ranks in each stratum over its size."""

    def found(t: Table) -> float:
        pairs = []
        for _, part in t.groupby(by):
            both = np.stack([stats.rankdata(part[x]), stats.rankdata(part[y])]) / len(part)
            pairs.append(both - both.mean(axis=1, keepdims=True))
        a, b = np.concatenate(pairs, axis=1)
        return float(a @ b / np.sqrt((a @ a) * (b @ b)))

    return found


def pearson(x: str, y: str = "gap", size: bool = False) -> Statistic:
    """Pearson's correlation, from its definition."""

    def found(t: Table) -> float:
        a, b = (t[name].to_numpy(float) - t[name].mean() for name in (x, y))
        r = float((a * b).sum() / np.sqrt((a**2).sum() * (b**2).sum()))
        return abs(r) if size else r

    return found


def kind(name: str) -> Callable[[Table], Table]:
    """Rows of one kind."""
    return lambda t: t[t["kind"] == name]


def decided(ends: tuple[float, float], holds: tuple[float, float]) -> str:
    """Where an interval lies: within, outside, or across."""
    low, high = ends
    slack = 1e-12 * max(abs(low), abs(high))
    if holds[0] - slack <= low and high <= holds[1] + slack:
        return "holds"
    return "contradicted" if high < holds[0] or low > holds[1] else "inconclusive"
