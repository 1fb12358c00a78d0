"""Stability: what was recorded along a training, and whether it stands at the edge of stability.

Full-batch gradient descent sharpens until η·λ_max is 2, and stays there (Cohen et al. 2021); of SGD the batch
sharpness settles at 2/η (Andreyev and Beneventano 2024).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np
import pandas as pd

from flatscope.charts import Curves
from flatscope.formatting import readable_number
from flatscope.result import MOST_LINES, Result, checked_columns
from flatscope.spectra.density import SpectralDensity
from flatscope.stats.estimate import Estimate, mean_of_series
from flatscope.training.stability.update_rule import UpdateRule

# The rule of the verdict. At the edge: from a record on that is at 2 or up to 15 % above, nine in ten lie within 15 %
# of 2, of the next ten as of all, and the last third is not 5 % further from 2 than the first: it does not drift away.
# Else below or above: the last quarter of the records is on that side of the band.
EDGE, BAND, DRIFT, INSIDE, LEAST_RECORDS, LAST = 2.0, 0.15, 0.05, 0.9, 10, 0.25
FEWEST = 3  # records without which nothing is said
WORDS = {
    "normalized_sharpness": "η·λ_max, 2 at the edge",
    "normalized_batch": "η·batch sharpness",
    "lambda_max": "λ_max",
}


@dataclass(frozen=True)
class EdgeStanding:
    """Place of a series against the edge, which is 2.

    Attributes:
        where: "edge", "below", "above", "moving" or "unknown".
        start: step from which on it has stood there; that of the first record looked at.
        mean: over the records since then, with its interval.
        spread: standard deviation of the records since then.
        last: the last value.
    """

    where: str
    start: int = 0
    mean: Estimate = field(default_factory=lambda: Estimate(math.nan))
    spread: float = math.nan
    last: float = math.nan

    def words(self, symbol: str) -> str:
        """A sentence."""
        if self.where == "unknown":
            return f"{symbol} is not known."
        mean, edge = f"{self.mean.value:.2f}", f"the edge of stability, which is {EDGE:g}"
        if not math.isnan(self.mean.low):
            mean += f" ± {(self.mean.high - self.mean.low) / 2:.2g}"
        few = "" if "±" in mean else ", too few or too alike for an interval"
        records = f"{self.mean.n} records, spread {self.spread:.2g}{few}"
        if self.where == "edge":
            return f"From step {self.start} on {symbol} stays at {mean} ({records}): {edge}."
        if self.where == "moving" and self.mean.n < FEWEST:
            return f"{symbol} is {self.last:.2f} at the end: too few records ({self.mean.n}) to set against {edge}."
        if self.where == "moving":
            return f"{symbol} is {self.last:.2f} at the end and has not settled at {edge}, nor below it."
        since = f"{mean} from step {self.start} on ({records})"
        return f"{symbol} is {self.last:.2f} at the end, {since}: {self.where} {edge}."


def edge_standing(steps: Sequence[float], values: Sequence[float]) -> EdgeStanding:
    """Place of a series against the edge, by the rule at the top of this file.

    Args:
        steps: of the records, rising.
        values: η·λ_max, or what else is 2 at the edge; missing ones are left out.

    Example:
        >>> found = edge_standing(range(30), [0.1 * min(k, 20) for k in range(30)])
        >>> found.where, found.start, found.mean.value
        ('edge', 20, 2.0)
    """
    series = np.array(values, dtype="float64")
    kept = np.isfinite(series)
    at, series = np.array(steps)[kept], series[kept]
    if not len(series):
        return EdgeStanding("unknown")

    def standing_from(where: str, first: int) -> EdgeStanding:
        part = series[first:]
        return EdgeStanding(where, int(at[first]), mean_of_series(part), float(part.std()), float(series[-1]))

    inside = np.abs(series - EDGE) <= BAND * EDGE
    for first in np.flatnonzero(inside & (series >= EDGE)).tolist():
        begun = inside[first : first + LEAST_RECORDS]
        stays = len(begun) == LEAST_RECORDS and min(begun.mean(), inside[first:].mean()) >= INSIDE
        if stays and not _series_drifts_away(series[first:]):
            return standing_from("edge", first)
    last = len(series) - max(FEWEST, math.ceil(LAST * len(series)))
    if last < 0:
        return standing_from("moving", 0)
    if (series[last:] < (1 - BAND) * EDGE).all():
        return standing_from("below", last)
    return standing_from("above" if (series[last:] > (1 + BAND) * EDGE).all() else "moving", last)


def _series_drifts_away(series: np.ndarray[Any, np.dtype[np.float64]]) -> bool:
    third = len(series) // 3
    before, after = (abs(part.mean() - EDGE) for part in (series[:third], series[-third:]))
    return bool(after - before > DRIFT * EDGE)


@dataclass(frozen=True, eq=False, repr=False)
class Stability(Result):
    """Sharpness along a training against the threshold of its update rule.

    Attributes:
        rows: one per record: step, lr, threshold, loss, lambda_max, the reach of its interval above it, the products it
            took, normalized_sharpness (η·λ_max of gradient descent: 2 at the edge), batch_sharpness with its error,
            normalized_batch (η times it), noise_scale, remark.
        rule: the update rule at the last record.
        batch: samples of a mini-batch; None for full-batch gradient descent.
        densities: spectral densities by step.
        meta: provenance.

    Example:
        >>> import torch
        >>> import flatscope as fs
        >>> recorder = fs.StabilityRecorder((torch.eye(3), torch.tensor([0, 1, 0])))
        >>> model = torch.nn.Linear(3, 2)
        >>> for step in range(3):
        ...     _ = recorder.record(model, step, lr=0.1)
        >>> recorder.stability.sharpness.where
        'below'
    """

    rows: pd.DataFrame
    rule: UpdateRule
    batch: int | None = None
    densities: Mapping[int, SpectralDensity] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    WORD = "stability"
    COLUMNS = {  # noqa: RUF012  a ClassVar of the base
        "step": "int64",
        **dict.fromkeys(("lr", "threshold", "loss", "lambda_max", "reach", "products"), "float64"),
        **dict.fromkeys(("normalized_sharpness", "batch_sharpness", "batch_stderr"), "float64"),
        **dict.fromkeys(("normalized_batch", "noise_scale"), "float64"),
        "remark": "str",
    }

    def __post_init__(self) -> None:
        """The columns in their order, whatever was recorded."""
        object.__setattr__(
            self, "rows", checked_columns(self.rows.reindex(columns=list(self.COLUMNS)), self.COLUMNS, self.WORD)
        )

    @property
    def sharpness(self) -> EdgeStanding:
        """Place of η·λ_max against the edge."""
        return edge_standing(self.rows["step"].tolist(), self.rows["normalized_sharpness"].tolist())

    @property
    def batch_sharpness(self) -> EdgeStanding:
        """Place of η times the batch sharpness against the edge."""
        return edge_standing(self.rows["step"].tolist(), self.rows["normalized_batch"].tolist())

    def headline_lines(self) -> list[str]:
        """Sentences on the place of the training against its threshold, and what that means for the step size."""
        advice = {
            "below": "Next: a larger step is stable from here; whether it trains better, held-out data say.",
            "edge": "At the edge a larger step flattens and a smaller one lets the curvature grow: both are normal.",
            "above": "Next: if the loss grows or jumps, lower the step; mini-batch noise can hold it here otherwise.",
        }
        known = not self.rows.empty and not self.rule.unknown
        return [
            *self.sentences()[: MOST_LINES - 1],
            *filter(None, [advice.get(self.sharpness.where, "") if known else ""]),
        ]

    def summary(self) -> str:
        """The headline, and what else there is to say."""
        said = self.headline_lines()
        return "\n".join([*said, *(words for words in self.sentences() if words not in said)])

    def sentences(self) -> list[str]:
        """The answer in a sentence, and what else there is to say."""
        if self.rows.empty:
            return ["Nothing was recorded."]
        last = self.rows.iloc[-1]
        standing = self.sharpness.words(self.rule.symbol)
        if self.rule.unknown:
            standing = f"λ_max is {readable_number(float(last['lambda_max']))} at the end; {self.rule.unknown}."
        sentences = [standing]
        if self.batch is not None:
            words = self.batch_sharpness.words(f"η·batch sharpness (batches of {self.batch})")
            if self.rule.unknown or self.rule.momentum:
                known = "no threshold of it is known here"
                words = f"Batch sharpness is {readable_number(float(last['batch_sharpness']))} at the end; {known}."
            sentences.append(words)
        noise = self.rows["noise_scale"].dropna()
        if len(noise):
            first, end = (readable_number(float(noise.iloc[place]), 3) for place in (0, -1))
            sentences.append(f"The gradient-noise scale goes from {first} to {end} samples.")
        return [*sentences, *self.meta.get("remarks", ())]

    def __repr__(self) -> str:
        return f"{self.summary()}\n\n{self._grid()}"

    def chart(self) -> Curves:
        """Sharpness in units of the threshold along the steps; above 1 training is unstable."""
        named = {"normalized_sharpness": "all samples", "normalized_batch": "mini-batches"}
        known = {words: self.rows[["step", name]].dropna() for name, words in named.items()}
        curves = {
            words: (rows["step"].tolist(), rows.iloc[:, 1].tolist()) for words, rows in known.items() if len(rows)
        }
        return Curves(curves, "step", "sharpness over its threshold", {"edge of stability": 1.0})

    def to_frame(self) -> pd.DataFrame:
        """One row per record; the columns are those of `rows`."""
        return self.rows.copy()

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """The records as text for people; columns without any value are left out."""
        shown = [
            name for name in self.COLUMNS if name not in ("batch_stderr", "remark") and self.rows[name].notna().any()
        ]
        frame = self.rows[shown]
        return [WORDS.get(name, name.replace("_", " ")) for name in shown], [
            [readable_number(float(value)) for value in row] for row in frame.itertuples(index=False)
        ]

    def _head(self) -> dict[str, Any]:
        densities = [[step, json.loads(density.to_json())] for step, density in self.densities.items()]
        return {"meta": self.meta, "rule": asdict(self.rule), "batch": self.batch, "densities": densities}

    @classmethod
    def _from_rows(cls, frame: pd.DataFrame, head: Any) -> Self:
        densities = {int(step): SpectralDensity.from_json(json.dumps(content)) for step, content in head["densities"]}
        rule = UpdateRule(**head["rule"] | {"lr": float(head["rule"]["lr"])})
        return cls(checked_columns(frame, cls.COLUMNS, cls.WORD), rule, head["batch"], densities, head["meta"])
