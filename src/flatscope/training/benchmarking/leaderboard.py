"""The leaderboard: every measure with its scores, from the released table, and how a user's own measure joins it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd

from flatscope.charts import Bars
from flatscope.comparing.records import DIFFERENCES, records_by_measure, share_words
from flatscope.comparing.records import FILE as RECORDS_FILE
from flatscope.context import Context
from flatscope.disk import write_whole
from flatscope.errors import FlatscopeError, InputError, refuse_unknown
from flatscope.files import csv_bytes, from_parquet_bytes, parquet_bytes
from flatscope.forms import point_of
from flatscope.inputs.factories import find_factory
from flatscope.inputs.loading import load
from flatscope.inputs.public_sets import data_root
from flatscope.isolation import own_settings
from flatscope.measuring import FAILED, measure
from flatscope.problem import Problem
from flatscope.progress import progress
from flatscope.registry import Value, declarations, select
from flatscope.result import Result, checked_columns
from flatscope.training.benchmarking.differences import by_difference, records_on
from flatscope.training.benchmarking.recipe import (
    EMBEDDED,
    RESCALED,
    STOPS,
    SUBSET,
    build,
    collected,
    configuration,
    options_of,
    records,
    rescaled_twin,
    train,
)
from flatscope.training.benchmarking.recipe import networks as design
from flatscope.training.benchmarking.scores import (
    BASELINES,
    CHANCE,
    COLUMNS,
    CONTROLS,
    ORACLE,
    SECOND,
    columns_named,
    place_words,
    score_all,
    score_number,
    score_words,
    valued,
    with_controls,
)
from flatscope.training.sweeps.store import Store
from flatscope.training.sweeps.work import stored_problem
from flatscope.version import __version__

Function = Callable[[Context], Any]
POPULATION_FILE, POPULATION_KEY = "population.parquet", b"flatscope_benchmark"
LEADERBOARD_FILE, LEADERBOARD_OF_FEW = "leaderboard.parquet", "leaderboard-of-few.parquet"
OWN_NETWORKS = 64
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
            *(place_words(own, known, self.share(own), self.mean(own, "survival")) for own in self.meta.get("own", ())),
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
            psi = [score_words(self.row(name, data, stop, "psi")) for data, stop in self.populations]
            means = [score_number(self.mean(name, score)) for score in SHOWN]
            number = "" if name in CONTROLS else str(place)
            rows.append([number, name, means[0], *psi, *means[1:]])
        return header, rows

    def only(self, names: Iterable[str]) -> Leaderboard:
        """The same for some of the measures."""
        return Leaderboard(self._frame[self._frame["measure"].isin(set(names))], self.meta)


def benchmark(
    measures: str | Function | Iterable[str | Function] | None = None,
    *,
    networks: int | str | None = None,
    data: str | None = None,
    store: str | None = None,
    workers: int | None = None,
) -> Leaderboard:
    """Score measures on the released population: do they rank networks as the generalization gap does?

    Measures of the library come from the released table, in a second. A function of your own is run on networks that
    are trained here by the same recipe (and kept, so that the next function finds them), and is scored beside all
    others on these very networks.

    Args:
        measures: names or globs of measures, also as "l2_norm[form=over_margin]" where the released table has that
            option; "file.py:function", or a function of a `Context` that gives a number, declared with `@measure` or
            not (then low is taken to be good); None for all of the library.
        networks: how many of the population, a power of 2 from 8 to 1,024, or "all". By default all; 64 for functions
            of your own; 128 where measures of cost "long" are named, which were taken of these only.
        data: "digits": networks of the same recipe on the embedded digits, trained here, for a first look without a
            download; named measures, or the core set, are taken of them beside functions of your own. None: the
            released population, on CIFAR-10 and Fashion-MNIST.
        store: folder for the trained networks; else one in the user's cache folder.
        workers: processes that train; None for one per core, 0 for this one.

    Example:
        >>> import flatscope as fs
        >>> fs.benchmark("l2_path_norm").names
        ['oracle', 'l2_path_norm', 'chance']
    """
    own, named = _own_and_named(measures)
    if data is not None:
        return _on_embedded(own, named, data, _count(networks, OWN_NETWORKS), store, workers)
    table, _ = released_population()
    baselines = [] if own or named else [*BASELINES, SECOND]
    chosen = columns_named(table, named)
    later = [name for name in chosen if name not in table and name in named]  # declared after the release
    own |= {name: declarations()[name].function for name in later}
    few = bool(named) and not set(chosen) <= set(valued(table))
    rows = design(_count(networks, OWN_NETWORKS if own else SUBSET if few else "all"))
    population = table[table["seed"].isin(rows["seed"])].reset_index(drop=True)
    there = valued(population)
    _refuse_untaken([name for name in chosen if named and name in table and name not in there])
    beside = [*(name for name in chosen if name in there and name not in own), ORACLE, CHANCE, *baselines]
    if not own:
        return _scored(population, beside)
    refuse_missing_data(rows["data"].unique())
    kept = _store(store)
    train(rows, kept, workers=workers)
    joined = population.assign(**_values(own, population, kept))
    frames = [score_all(joined, own), _scored(population, beside).to_frame()]
    meta = summary(population) | {"own": sorted(own), "pairs": _pairs(joined, own), "version": __version__}
    return Leaderboard(pd.concat(frames, ignore_index=True), meta)


def _own_and_named(
    measures: str | Function | Iterable[str | Function] | None,
) -> tuple[dict[str, Function], list[str]]:
    """Functions of the user by name, and names or globs of measures of the library."""
    asked = [measures] if isinstance(measures, str) or callable(measures) else list(measures or ())
    functions = [find_factory(given) if isinstance(given, str) else given for given in asked if _is_own(given)]
    names = [str(given) for given in asked if not _is_own(given)]
    return {_own_name(function): function for function in functions}, names


def _refuse_untaken(names: Sequence[str]) -> None:
    """Refuse measures that were taken of some of these networks only."""
    if names:
        fix = f"Take networks={SUBSET} or fewer: of these every measure was taken"
        raise InputError("measures that were taken of all these networks", ", ".join(names), "benchmark", fix)


def _store(folder: str | None) -> Store:
    return Store(folder or data_root() / "benchmark-networks")


def refuse_missing_data(names: Iterable[str]) -> None:
    """Raise where the images of a data set are not there, before the first network is trained on it."""
    for name in names:
        try:
            load(name, train_size=10, test_size=0)
        except FlatscopeError as problem:
            fix = f'Or look first on data="{EMBEDDED}" (--data {EMBEDDED}), which comes with the package'
            raise InputError(f"the images of {name}", str(problem), where="benchmark", fix=fix) from problem


def _on_embedded(
    own: Mapping[str, Function], named: list[str], data: str, count: int | None, store: str | None, workers: int | None
) -> Leaderboard:
    """Scores on networks that are trained here on the embedded digits, of which no released table exists."""
    refuse_unknown(data, (EMBEDDED,), "data of benchmark")
    rows, kept = design(count, (data,)), _store(store)
    train(rows, kept, workers=workers)
    population, _ = collected(rows, kept)
    beside = {entry.name: entry.function for entry in select(named or None) if entry.name not in own}
    joined = population.assign(**_values({**own, **beside}, population, kept))
    scores = score_all(with_controls(joined), [*own, *beside, ORACLE, CHANCE])
    meta = summary(population) | {"own": sorted(own), "pairs": _pairs(joined, own), "data": data}
    meta["version"] = __version__
    return Leaderboard(scores, meta)


def _pairs(joined: pd.DataFrame, own: Iterable[str]) -> dict[str, str]:
    """{function: how it ranked pairs, in words, by what they differ in}."""
    return {
        name: "; ".join(f"{DIFFERENCES[kind]}: {record.words}" for kind, record in records_on(joined, name).items())
        for name in own
    }


def _is_own(given: str | Function) -> bool:
    return not isinstance(given, str) or ":" in given


def _count(given: int | str | None, otherwise: int | str) -> int | None:
    """Number of networks; None for all."""
    count = otherwise if given is None else given
    if isinstance(count, str) and count != "all":
        raise InputError('a number of networks, or "all"', repr(count), where="benchmark, networks")
    return None if isinstance(count, str) else count


def _scored(population: pd.DataFrame, names: list[str]) -> Leaderboard:
    """From a file of the release where it has these networks, else computed."""
    count = population["seed"].nunique()
    if count in (SUBSET, len(design())):
        return released_leaderboard(count == SUBSET).only(names)
    return Leaderboard(score_all(with_controls(population), names), summary(population) | {"version": __version__})


def _own_name(function: Function) -> str:
    known = declarations().get(name := getattr(function, "__name__", "function"))
    if name in CONTROLS or (known is not None and known.function is not function):
        raise InputError("a name that is not taken", name, where="benchmark", fix="Rename the function")
    return name


def _values(own: Mapping[str, Function], population: pd.DataFrame, store: Store) -> dict[str, list[float]]:
    """Columns of the user's functions: on every network, and on its rescaled twin at the last stop."""
    found: dict[str, list[float]] = {f"{prefix}{name}": [] for name in own for prefix in ("", RESCALED)}
    with progress("measuring", total=len(population)) as advance:
        for row in records(population):
            config = configuration(row, row["stop"])
            there = store.read(config).metrics["reached"]
            problem = stored_problem(store, config) if there else None
            twin = rescaled_twin(problem, int(row["seed"])) if problem and row["stop"] == STOPS[-1] else None
            for name, function in own.items():
                for prefix, one in (("", problem), (RESCALED, twin)):
                    found[f"{prefix}{name}"].append(value_of(name, function, one) if one else math.nan)
            advance(1)
    return found


def value_of(name: str, function: Function, problem: Problem) -> float:
    """A user's function on one network: as `measure` runs a declared one, others as they are; raises where it fails."""
    entry = declarations().get(name)
    if entry is not None and entry.function is function:
        found = measure(problem, name, options=options_of([name]))
        if found.to_frame()["reason"].str.startswith(FAILED).any() and function.__module__.split(".")[0] != "flatscope":
            with own_settings(problem.generators):  # once more, for the error with its file and line
                function(point_of(Context(problem), entry))
        return found.one_each()[name]
    with own_settings(problem.generators):
        value: Any = function(Context(problem))
    try:
        return float(value.value if isinstance(value, Value) else value)
    except (TypeError, ValueError):
        fix = "Return a float, or declare it with @measure"
        raise InputError("a number", type(value).__name__, f"benchmark, {name}", fix) from None


def summary(population: pd.DataFrame) -> dict[str, Any]:
    """Number of networks, and of those that did not reach each stop."""
    missed = population[~population["reached"]].groupby("stop").size()
    return {
        "networks": int(population["seed"].nunique()),
        "not reached": {f"{stop:g}": int(missed.get(stop, 0)) for stop in STOPS},
    }


def released_population() -> tuple[pd.DataFrame, dict[str, Any]]:
    """The table of the release: a row per network and stop; and where it comes from."""
    return from_parquet_bytes((files(__package__) / POPULATION_FILE).read_bytes(), POPULATION_KEY)


def released_leaderboard(few: bool = False) -> Leaderboard:
    """The scores of the measures on all networks, or those of all measures on the few of which all were taken."""
    file = LEADERBOARD_OF_FEW if few else LEADERBOARD_FILE
    return Leaderboard.from_parquet((files(__package__) / file).read_bytes())


def rebuild(folder: Path, store: str, *, workers: int | None = None) -> Leaderboard:
    """Train and measure the whole population anew, and write the files of a release into a folder.

    Args:
        folder: for the table and the two leaderboards.
        store: for the networks; a run that was broken off goes on from it.
        workers: processes; None for one per core, 0 for this one.
    """
    population, spent = build(Store(store), workers=workers)
    return write_release(population, spent, folder)


def write_release(population: pd.DataFrame, spent: Mapping[str, Any], folder: Path) -> Leaderboard:
    """Score the measures of a table on all networks and on the few; write the table and both leaderboards."""
    some = population[population["seed"].isin(design(SUBSET)["seed"])].reset_index(drop=True)
    about = {**spent, "version": __version__, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    write_whole(folder / POPULATION_FILE, parquet_bytes(population, POPULATION_KEY, summary(population) | about))
    boards = []
    for part, file in ((some, LEADERBOARD_OF_FEW), (population, LEADERBOARD_FILE)):
        scores = score_all(with_controls(part), [*valued(part), *CONTROLS])
        boards.append(Leaderboard(scores, summary(part) | about))
        boards[-1].save(folder / file)
    names = [*valued(population), *BASELINES, ORACLE, SECOND]
    found = by_difference(with_controls(population), names).round(3)
    write_whole(folder / RECORDS_FILE, csv_bytes(found), with_sum=True)
    return boards[-1]
