"""A population on the page: one row per trained network, each measure against how well the networks generalize."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import pandas as pd

from flatscope.charts import Bars
from flatscope.errors import InputError, refuse_unknown
from flatscope.formatting import first_of_names, readable_number
from flatscope.progress import progress_bar
from flatscope.registry import Declaration, declarations
from flatscope.result import DRAWN, Result

if TYPE_CHECKING:
    from flatscope.stats import Estimate

TARGETS = ("generalization_gap", "generalisation_gap", "gap", "error_gap", "loss_gap")
# Columns that say how a training went, not how it was set up.
OUTCOME = re.compile(
    r"(.*\.)?((train|test|final)_.*|.*(loss|error|gap|accuracy|seconds|epochs?|steps|passes|status|reason)"
    r"|stopped_by|diverged|group|key|name|trial)$"
)
MOST_LEVELS = 7  # of a hyper-parameter that is shown by colour and shape; more only of numbers, on a colour ramp
CONFIDENCE = 0.95
MOST_NAMED = 4  # measures in a line of the headline


@dataclass(frozen=True, eq=False, repr=False)
class PopulationFrame(Result):
    """Many trained networks as a frame: hyper-parameters, measures and a target per row.

    Attributes:
        frame: one row per network.
        target: column of the generalization gap (or whatever the measures should go along with); by default the
            first of `generalization_gap`, `gap`, `error_gap`, `loss_gap`.
        measures: columns of measures; by default those named after a declared measure.
        parameters: columns of hyper-parameters; by default the others that vary and do not describe an outcome.
        meta: provenance.

    Example:
        >>> import pandas as pd, flatscope as fs
        >>> columns = {"lr": [0.1, 0.1, 0.2, 0.2], "margin": [1.0, 2.0, 3.0, 4.0], "gap": [0.4, 0.3, 0.2, 0.1]}
        >>> frame = pd.DataFrame(columns)
        >>> population = fs.PopulationFrame(frame)
        >>> population.target, population.measures, population.parameters
        ('gap', ('margin',), ('lr',))
    """

    frame: pd.DataFrame
    target: str = ""
    measures: Sequence[str] = ()
    parameters: Sequence[str] | None = None
    meta: Mapping[str, Any] | None = None

    WORD = "population"
    ENDINGS = (".parquet", ".csv", ".md", ".html", *DRAWN)
    READABLE = (".parquet",)

    def __post_init__(self) -> None:
        columns = [str(column) for column in self.frame.columns]
        object.__setattr__(self, "frame", self.frame.set_axis(columns, axis=1))
        given = [self.target] if self.target else []
        for name in (*given, *self.measures, *(self.parameters or ())):
            refuse_unknown(name, columns, "column of the population")
        target = self.target or target_column(columns)
        if not target:
            fix = 'Name it: PopulationFrame(frame, target="…")'
            raise InputError(f"a target column, such as {TARGETS[0]}", ", ".join(columns[:8]), "population", fix)
        measures = tuple(self.measures) or measure_columns(self.frame, target)
        if not measures:
            fix = "Name them: PopulationFrame(frame, measures=[…])"
            raise InputError("columns named after measures", ", ".join(columns[:8]), "population", fix)
        for name in (target, *measures):
            if not pd.api.types.is_numeric_dtype(self.frame[name]):
                raise InputError("a column of numbers", str(self.frame[name].dtype), where=f"population, {name}")
        others = [name for name in columns if name != target and name not in measures and not OUTCOME.match(name)]
        parameters = self.parameters
        if parameters is None:
            most = max(3, len(self.frame) // 2)
            parameters = [name for name in others if 1 < comparable_column(self.frame[name]).nunique() < most]
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "measures", measures)
        object.__setattr__(self, "parameters", tuple(parameters))

    def __len__(self) -> int:
        return len(self.frame)

    def to_frame(self) -> pd.DataFrame:
        """A copy: one row per network."""
        return self.frame.copy()

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Correlation of every measure with the target: Kendall's tau with its interval, and its adjusted p-value."""
        header = ["measure", f"Kendall's tau with {self.target}", "adjusted p"]
        return header, [[s.measure, str(s.kendall), readable_number(s.adjusted)] for s in self.statistics]

    def chart(self) -> Bars:
        """Kendall's tau of every measure with the target, the clearest first."""
        values = [entry.kendall.value for entry in self.statistics]
        return Bars(
            [entry.measure for entry in self.statistics], {"tau": values}, axis=f"Kendall's tau with {self.target}"
        )

    def headline_lines(self) -> list[str]:
        """Which measure correlates most clearly with the target, in which direction, and what that is worth."""
        clear = [entry for entry in self.statistics if entry.adjusted < 1 - CONFIDENCE]
        size = f"{len(self)} networks, {len(self.measures)} measures"
        if not clear:
            none = f"No measure correlates significantly with {self.target} (Holm-adjusted p ≥ 0.05; {size})."
            return [none, "Next: more networks, or settings that change how well they generalize."]
        best = clear[0]
        lines = [
            f"{best.measure} correlates most clearly with {self.target}: Kendall's tau {best.kendall} ({size}).",
            f"{len(clear)} of {len(self.statistics)} measures correlate significantly (Holm-adjusted p < 0.05).",
        ]
        signs = {"lower": 1, "higher": -1}
        wrong = [e.measure for e in clear if e.entry and e.kendall.value * signs.get(e.entry.direction, 0) < 0]
        if wrong:
            lines.append(f"In the wrong direction: {first_of_names(wrong, MOST_NAMED)}.")
        return [*lines, "A correlation over settings need not hold within one: fs.stats.granulated_kendall tells."]

    def _head(self) -> dict[str, Any]:
        chosen = {"target": self.target, "measures": list(self.measures), "parameters": list(self.parameters or ())}
        return chosen | {"meta": dict(self.meta or {})}

    @classmethod
    def _from_rows(cls, frame: pd.DataFrame, head: Any) -> Self:
        return cls(frame, head["target"], tuple(head["measures"]), tuple(head["parameters"]), head["meta"])

    @cached_property
    def statistics(self) -> list[MeasureStatistics]:
        """Correlation of every measure with the target; see `population_statistics`."""
        return population_statistics(self)


def target_column(columns: Iterable[str]) -> str:
    """The first column that is called like a generalization gap, in a sweep also `metrics.gap`; empty if none is."""
    by_end = {str(column).rpartition(".")[2]: str(column) for column in columns}
    return next((by_end[name] for name in TARGETS if name in by_end), "")


def measure_columns(frame: pd.DataFrame, target: str = "") -> tuple[str, ...]:
    """Numeric columns named after a declared measure, with or without options or a layer behind the name.

    One without any value is left out: a population has a column `gradient_norm` whether or not it was computed.
    """
    numeric = frame.select_dtypes("number").dropna(axis="columns", how="all")
    known = declarations()
    return tuple(str(name) for name in numeric.columns if str(name) != target and base_name(str(name)) in known)


def comparable_column(column: pd.Series[Any]) -> pd.Series[Any]:
    """Numbers as they are, anything else as text where there is any: lists, as widths of networks, have no order."""
    numeric = pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)
    return column if numeric else column.map(str, na_action="ignore")


def base_name(column: str) -> str:
    """`psi_trace[rule=cyclic]`, `kappa/fc1`, `metrics.rho_sum` → the measure's own name."""
    return re.split(r"[\[{/:@ ]", column, maxsplit=1)[0].rpartition(".")[2]


def is_population(frame: pd.DataFrame) -> bool:
    """True if a bare frame says by its column names that it is a population."""
    # A frame of `train_population` has an empty `gradient_norm`, unless training was to stop by it.
    measured = any(frame[name].notna().any() for name in measure_columns(frame))
    return bool(target_column(map(str, frame.columns))) and measured


class MeasureStatistics(NamedTuple):
    """Correlation of one measure with the target."""

    measure: str
    entry: Declaration | None
    pearson: Estimate
    spearman: Estimate
    kendall: Estimate
    partial: Estimate | None  # Spearman with the hyper-parameters held fixed
    adjusted: float  # p-value of Kendall's tau, adjusted for the number of measures tried


def population_statistics(population: PopulationFrame) -> list[MeasureStatistics]:
    """Statistics of every measure, the closest association (by Kendall's tau) first, missing ones last."""
    # Loaded here: SciPy's statistics take a second, which every other page and command would pay.
    from flatscope.stats import correlate, holm, partial_correlation

    frame, known = population.frame, declarations()
    target = frame[population.target].to_numpy(dtype="float64")
    statistics = []
    with progress_bar("Correlations", total=len(population.measures)) as advance:
        for name in population.measures:
            pair = frame[name].to_numpy(dtype="float64"), target
            pearson, spearman, kendall = (correlate(*pair, kind) for kind in ("pearson", "spearman", "kendall"))
            partial = None
            if population.parameters:
                partial = partial_correlation(frame, name, population.target, population.parameters, "spearman")
            entry = known.get(base_name(name))
            statistics.append(MeasureStatistics(name, entry, pearson, spearman, kendall, partial, np.nan))
            advance(1)
    adjusted = holm([entry.kendall.p for entry in statistics])
    statistics = [entry._replace(adjusted=float(p)) for entry, p in zip(statistics, adjusted, strict=True)]
    return sorted(statistics, key=lambda entry: -abs(entry.kendall.value) if np.isfinite(entry.kendall.value) else 1.0)


def colour_column(population: PopulationFrame) -> pd.Series[Any] | None:
    """The column that colours the networks: the first hyper-parameter, else outcome, of few levels or of numbers."""
    frame = population.frame
    used = {population.target, *population.measures}
    for name in dict.fromkeys([*(population.parameters or ()), *(name for name in frame.columns if name not in used)]):
        column = comparable_column(frame[name])
        if column.nunique() > 1 and (column.nunique() <= MOST_LEVELS or pd.api.types.is_numeric_dtype(column)):
            return column
    return None


def network_names(population: PopulationFrame) -> list[str]:
    """The rows by a column `name` or `key` that tells them apart, else by their index, numbered from 1 if it counts."""
    for column in ("name", "key"):
        if column in population.frame.columns and population.frame[column].is_unique:
            return [str(value) for value in population.frame[column]]
    index = population.frame.index
    if isinstance(index, pd.RangeIndex):
        return [f"network {n + 1}" for n in range(len(index))]
    return [str(label) for label in index]
