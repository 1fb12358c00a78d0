"""Scores of measures on populations of networks, as a result that is shown and saved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from flatscope.charts import Bars
from flatscope.comparing.records import records_by_measure, share_words
from flatscope.result import Result, checked_columns
from flatscope.training.benchmarking.scores import (
    COLUMNS,
    CONTROLS,
    ORACLE,
    place_of_own_measure_in_words,
    score_in_words,
    score_number,
)

RELEASED = 1024
SHOWN = ("psi", "tau", "information", "worst_error", "survival")


class Leaderboard(Result):
    """Measures with their scores, one row per measure, data set, stop and score.

    Args:
        frame: columns measure, data, stop, score, value, low, high, networks, note.
        meta: how many networks, how many did not reach a stop, what it cost.

    Example:
        >>> import flatscope as fs
        >>> board = fs.benchmark(["l2_path_norm", "l2_norm"])
        >>> board.names[0], board.names[-1]
        ('oracle', 'chance')
    """

    WORD = "leaderboard"
    COLUMNS = COLUMNS

    def __init__(self, frame: pd.DataFrame, meta: Mapping[str, Any] | None = None) -> None:
        self._frame = checked_columns(frame, COLUMNS, "leaderboard")
        self.meta: dict[str, Any] = dict(meta or {})
        keys = self._frame[["measure", "data", "stop", "score"]].itertuples(index=False, name=None)
        self._places = {key: place for place, key in enumerate(keys)}

    def to_frame(self) -> pd.DataFrame:
        """A copy of all scores."""
        return self._frame.copy()

    @property
    def names(self) -> list[str]:
        """The measures, the best by Ψ averaged over data sets and stops first; those without one at the end."""
        psi = self._frame[self._frame["score"] == "psi"]
        return (
            psi.groupby("measure", sort=False)["value"]
            .mean()
            .sort_values(ascending=False, kind="stable")
            .index.tolist()
        )

    @property
    def populations(self) -> list[tuple[str, float]]:
        """Data sets and stops, in the order of the table."""
        return list(self._frame[["data", "stop"]].drop_duplicates().itertuples(index=False, name=None))

    def row(self, name: str, data: str, stop: float, score: str) -> pd.Series[Any] | None:
        """One score of one measure with its interval; None where it was not taken."""
        place = self._places.get((name, data, stop, score))
        return None if place is None else self._frame.iloc[place]

    def mean(self, name: str, score: str) -> float:
        """A score averaged over data sets and stops; NaN where there is none."""
        values = self._frame[(self._frame["measure"] == name) & (self._frame["score"] == score)]["value"].dropna()
        return float(values.mean()) if len(values) else math.nan

    def share(self, name: str) -> str:
        """Share of pairs that a measure ranks rightly, with its interval, averaged over data sets and stops.

        The ends too: as if all of these erred together, since networks are one at both stops.
        """
        rows = self._frame[(self._frame["measure"] == name) & (self._frame["score"] == "psi")].dropna(subset="value")
        psi, low, high = (float(rows[column].mean(skipna=False)) for column in ("value", "low", "high"))
        return f"{share_words(psi, low, high)} of pairs of {rows.groupby('data')['networks'].max().sum():,} networks"

    def chart(self) -> Bars:
        """Ψ of every measure, averaged over data sets and stops, the best first."""
        scored = [name for name in self.names if not math.isnan(self.mean(name, "psi"))]
        return Bars(scored, {"Ψ": [self.mean(name, "psi") for name in scored]}, axis="Ψ: 1 is best, 0 is chance")

    def headline_lines(self) -> list[str]:
        """Which measure ranks networks best, how far it is from certain, what to choose by."""
        ranked = [name for name in self.names if name not in CONTROLS]
        psi = {name: self.mean(name, "psi") for name in ranked}
        known = [name for name in ranked if not math.isnan(psi[name])]
        if not known:
            return ["No measure has a score on these networks."]
        best, wrong = known[0], [name for name in known if psi[name] < 0]
        lines = [
            *(
                place_of_own_measure_in_words(own, known, self.share(own), self.mean(own, "survival"))
                for own in self.meta.get("own", ())
            ),
            f"{best} ranks two networks that differ in one setting rightly in {self.share(best)} "
            f"(Ψ = {score_number(psi[best])}; the test error itself {score_number(self.mean(ORACLE, 'psi'))}).",
        ]
        if wrong and len(known) > 1:
            lines.append(f"{len(wrong)} of {len(known)} measures rank them wrongly more often than rightly.")
        few = self.meta.get("networks") != RELEASED
        if few and (self.meta.get("own") or self.meta.get("data")):
            lines.append("Fewer networks and settings than the released 1,024: do not put these Ψ beside theirs.")
        training = records_by_measure("training")
        if not few and best in training:
            lines.append(f"Between two trainings of one architecture {best} was {training[best].words}.")
        return [*lines, "Choose networks by held-out data; a measure is for when there are none."]

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """The scores averaged over data sets and stops; Ψ of each with its interval."""
        populations = [f"{data} {stop:g}" for data, stop in self.populations]
        header = ["#", "measure", "Ψ", *populations, "τ", "info", "worst", "survival"]
        rows, place = [], 0
        for name in self.names:
            place += name not in CONTROLS
            psi = [score_in_words(self.row(name, data, stop, "psi")) for data, stop in self.populations]
            means = [score_number(self.mean(name, score)) for score in SHOWN]
            number = "" if name in CONTROLS else str(place)
            rows.append([number, name, means[0], *psi, *means[1:]])
        return header, rows

    def only(self, names: Iterable[str]) -> Leaderboard:
        """The same for some of the measures."""
        return Leaderboard(self._frame[self._frame["measure"].isin(set(names))], self.meta)
