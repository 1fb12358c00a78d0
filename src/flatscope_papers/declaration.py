"""How a study is declared: what a paper's figure or table needs trained, measured, drawn and decided.

A study is a plain function from finished runs to an analysis, with a declaration above it. The runs go through the
sweep store, so studies that need the same networks share them and nothing is trained twice.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from torch import Tensor

from flatscope.errors import InputError, UnknownNameError, refuse_unknown
from flatscope.training import Store, Stored, train_and_measure
from flatscope_papers.claims import Answer, Claim
from flatscope_papers.toml_files import FOUR_PAPERS, Words, study_words

SCALES = ("smoke", "small", "paper")

Config = Mapping[str, Any]
Report = Callable[[float, str], None]
FromTable = Callable[[pd.DataFrame, str], "Analysis"]
Work = Callable[[list[dict[str, Any]], Store, Report], None]


def importable_name(function: Callable[..., Any]) -> str:
    """Name of a function in configurations and other processes: "module:function"."""
    return f"{function.__module__}:{function.__qualname__}"


@dataclass(frozen=True)
class Measured:
    """Stored result of a trial: numbers, and perhaps tables and trained weights."""

    metrics: Mapping[str, Any]
    frames: Mapping[str, pd.DataFrame] | None = None
    weights: Mapping[str, Tensor] | None = None


def each_trial(note: str) -> Callable[[Callable[[Config, Store], Measured]], Work]:
    """Make a function of one configuration (and the store, to read other trials) the work of a whole unit.

    Args:
        note: what it does, in a word, for the progress bar.
    """

    def decorate(measured: Callable[[Config, Store], Measured]) -> Work:
        @functools.wraps(measured)
        def work(configs: list[dict[str, Any]], store: Store, report: Report) -> None:
            for number, config in enumerate(configs):
                measured_now = measured(config, store)
                store.write(config, measured_now.metrics, frames=measured_now.frames, weights=measured_now.weights)
                report((number + 1) / len(configs), note)

        return work

    return decorate


@dataclass(frozen=True)
class Stage:
    """Work that must be finished before the next stage begins.

    Attributes:
        units: configurations; those in one unit are handled together (one population).
        work: handles a unit and writes to the store; a function of a module, so that other processes find it.
        gpus: share of a GPU that a unit asks for, where there is one.
    """

    units: Sequence[Sequence[Config]]
    work: Work = train_and_measure
    gpus: float = 1.0

    @property
    def configs(self) -> list[Config]:
        """All configurations, unit after unit."""
        return [config for unit in self.units for config in unit]


@dataclass(frozen=True)
class Runs:
    """Input of the analysis of a study: every stage's configurations, with their results in the store."""

    scale: str
    stages: Sequence[Stage]
    store: Store

    def stored(self, stage: int = -1) -> list[Stored]:
        """Results of a stage (the last by default), in the order of its units."""
        return [self.store.read(config) for config in self.stages[stage].configs]

    def frame(self, stage: int = -1) -> pd.DataFrame:
        """One row per configuration of a stage: its settings and metrics."""
        return self.store.frame(self.stages[stage].configs)

    def frames(self, name: str, stage: int = -1) -> list[pd.DataFrame]:
        """The named frame ("history", "table", ...) of each configuration of a stage."""
        return [stored.frame(name) for stored in self.stored(stage)]


@dataclass(frozen=True)
class Analysis:
    """Result of a study.

    Attributes:
        table: the numbers behind the figure, one row per point.
        answers: one to every claim, by its key.
        draw: draws the figure, in the paper's arrangement, on an empty canvas.
        notes: what was seen beside the claims.
        reasons: why claims may fail, by their keys, where it takes these runs to tell; told only if they do.
    """

    table: pd.DataFrame
    answers: Mapping[str, Answer]
    draw: Callable[[Figure], None]
    notes: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)


def keep_saved_figure(_: Figure) -> None:
    """In the place of a drawing: the figure that was saved stays."""


@dataclass(frozen=True)
class Study:
    """Declaration of a study; see `study`."""

    name: str
    paper: str
    words: Words
    stages: Callable[[str], Sequence[Stage]]
    analyse: Callable[[Runs], Analysis]
    from_table: FromTable | None = None
    table_of: str = ""

    @property
    def figure(self) -> str:
        """The figure or table it re-runs."""
        return self.words.figure

    @property
    def title(self) -> str:
        """Title of the figure or table, in a few words."""
        return self.words.title

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Claims of the paper, each with the range in which it holds."""
        return self.words.claims

    @property
    def description(self) -> str:
        """The docstring of its function."""
        return inspect.getdoc(self.analyse) or ""


_STUDIES: dict[str, Study] = {}


def study(
    name: str,
    *,
    stages: Callable[[str], Sequence[Stage]],
    from_table: FromTable | None = None,
    table_of: str = "",
) -> Callable[[Callable[[Runs], Analysis]], Callable[[Runs], Analysis]]:
    """Declare a study: a function of its finished runs that gives an Analysis.

    What the paper says stands in the table of that name in `studies.toml`, beside the module of the function.

    Args:
        name: paper key and figure, "petzka2019-fig1".
        stages: scale -> what to train and measure, in order.
        from_table: saved table and scale -> the analysis, as far as that table bears it: what is judged again when a
            rule changes, without any network. Answers that it lacks stay as they were.
        table_of: the study whose table that is; its own by default.
    """

    def register(analyse: Callable[[Runs], Analysis]) -> Callable[[Runs], Analysis]:
        paper = name.split("-")[0]
        refuse_unknown(paper, FOUR_PAPERS, f"paper of the study {name}")
        if not inspect.getdoc(analyse):
            raise InputError("a docstring", "none", where=name, fix="Say what is trained and what is looked at")
        _STUDIES[name] = Study(
            name=name,
            paper=paper,
            words=study_words(analyse.__module__.rpartition(".")[0], name),
            stages=stages,
            analyse=analyse,
            from_table=from_table,
            table_of=table_of or name,
        )
        return analyse

    return register


def declared_studies() -> dict[str, Study]:
    """All studies by name; in the order of the papers."""
    order = list(FOUR_PAPERS)
    return dict(sorted(_STUDIES.items(), key=lambda item: (order.index(item[1].paper), _natural_sort_key(item[0]))))


def check_scale(scale: str) -> None:
    """Refuse a scale that is none."""
    if scale not in SCALES:
        raise UnknownNameError.among(scale, SCALES, "scale")


def _natural_sort_key(name: str) -> tuple[str, float, str]:
    """fig2 before fig10."""
    stem = name.rstrip("0123456789")
    digits = name[len(stem) :]
    return stem, float(digits) if digits else math.inf, name
