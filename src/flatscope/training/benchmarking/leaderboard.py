"""The leaderboard: every measure with its scores, from the released table, and how a user's own measure joins it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from flatscope.comparing.records import DIFFERENCES
from flatscope.context import Context
from flatscope.errors import FlatscopeError, InputError, refuse_unknown
from flatscope.forms import context_in_declared_form
from flatscope.inputs.factories import find_factory
from flatscope.inputs.loading import load
from flatscope.inputs.public_sets import data_root
from flatscope.isolation import own_settings
from flatscope.measuring import FAILED, measure
from flatscope.problem import Problem
from flatscope.progress import progress_bar
from flatscope.registry import Value, declarations, select
from flatscope.training.benchmarking.differences import records_on_population
from flatscope.training.benchmarking.leaderboard_result import Leaderboard
from flatscope.training.benchmarking.recipe import (
    EMBEDDED,
    RESCALED,
    STOPS,
    SUBSET,
    collect_stored_results,
    network_configuration,
    options_of,
    rescaled_twin,
    rows_as_dictionaries,
    train_missing_networks,
)
from flatscope.training.benchmarking.recipe import benchmark_networks as design
from flatscope.training.benchmarking.release import population_counts, released_leaderboard, released_population
from flatscope.training.benchmarking.scores import (
    BASELINES,
    CHANCE,
    CONTROLS,
    ORACLE,
    SECOND,
    columns_named,
    columns_with_values,
    population_with_controls,
    score_all,
)
from flatscope.training.sweeps.store import Store
from flatscope.training.sweeps.work import stored_problem
from flatscope.version import __version__

Function = Callable[[Context], Any]
OWN_NETWORKS = 64


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
    own, named = _split_functions_and_names(measures)
    if data is not None:
        return _leaderboard_on_embedded_digits(
            own, named, data, _number_of_networks(networks, OWN_NETWORKS), store, workers
        )
    table, _ = released_population()
    baselines = [] if own or named else [*BASELINES, SECOND]
    chosen = columns_named(table, named)
    later = [name for name in chosen if name not in table and name in named]  # declared after the release
    own |= {name: declarations()[name].function for name in later}
    few = bool(named) and not set(chosen) <= set(columns_with_values(table))
    rows = design(_number_of_networks(networks, OWN_NETWORKS if own else SUBSET if few else "all"))
    population = table[table["seed"].isin(rows["seed"])].reset_index(drop=True)
    there = columns_with_values(population)
    _refuse_partly_measured([name for name in chosen if named and name in table and name not in there])
    beside = [*(name for name in chosen if name in there and name not in own), ORACLE, CHANCE, *baselines]
    if not own:
        return _leaderboard_of_measures(population, beside)
    refuse_missing_data(rows["data"].unique())
    kept = _benchmark_store(store)
    train_missing_networks(rows, kept, workers=workers)
    joined = population.assign(**_values_of_own_functions(own, population, kept))
    frames = [score_all(joined, own), _leaderboard_of_measures(population, beside).to_frame()]
    meta = population_counts(population) | {
        "own": sorted(own),
        "pairs": _pair_records_in_words(joined, own),
        "version": __version__,
    }
    return Leaderboard(pd.concat(frames, ignore_index=True), meta)


def _split_functions_and_names(
    measures: str | Function | Iterable[str | Function] | None,
) -> tuple[dict[str, Function], list[str]]:
    """Functions of the user by name, and names or globs of measures of the library."""
    asked = [measures] if isinstance(measures, str) or callable(measures) else list(measures or ())
    functions = [find_factory(given) if isinstance(given, str) else given for given in asked if _is_own_function(given)]
    names = [str(given) for given in asked if not _is_own_function(given)]
    return {_own_name(function): function for function in functions}, names


def _refuse_partly_measured(names: Sequence[str]) -> None:
    """Refuse measures that were taken of some of these networks only."""
    if names:
        fix = f"Take networks={SUBSET} or fewer: of these every measure was taken"
        raise InputError("measures that were taken of all these networks", ", ".join(names), "benchmark", fix)


def _benchmark_store(folder: str | None) -> Store:
    return Store(folder or data_root() / "benchmark-networks")


def refuse_missing_data(names: Iterable[str]) -> None:
    """Raise where the images of a data set are not there, before the first network is trained on it."""
    for name in names:
        try:
            load(name, train_size=10, test_size=0)
        except FlatscopeError as problem:
            fix = f'Or look first on data="{EMBEDDED}" (--data {EMBEDDED}), which comes with the package'
            raise InputError(f"the images of {name}", str(problem), where="benchmark", fix=fix) from problem


def _leaderboard_on_embedded_digits(
    own: Mapping[str, Function], named: list[str], data: str, count: int | None, store: str | None, workers: int | None
) -> Leaderboard:
    """Scores on networks that are trained here on the embedded digits, of which no released table exists."""
    refuse_unknown(data, (EMBEDDED,), "data of benchmark")
    rows, kept = design(count, (data,)), _benchmark_store(store)
    train_missing_networks(rows, kept, workers=workers)
    population, _ = collect_stored_results(rows, kept)
    beside = {entry.name: entry.function for entry in select(named or None) if entry.name not in own}
    joined = population.assign(**_values_of_own_functions({**own, **beside}, population, kept))
    scores = score_all(population_with_controls(joined), [*own, *beside, ORACLE, CHANCE])
    meta = population_counts(population) | {
        "own": sorted(own),
        "pairs": _pair_records_in_words(joined, own),
        "data": data,
    }
    meta["version"] = __version__
    return Leaderboard(scores, meta)


def _pair_records_in_words(joined: pd.DataFrame, own: Iterable[str]) -> dict[str, str]:
    """{function: how it ranked pairs, in words, by what they differ in}."""
    return {
        name: "; ".join(
            f"{DIFFERENCES[kind]}: {record.words}" for kind, record in records_on_population(joined, name).items()
        )
        for name in own
    }


def _is_own_function(given: str | Function) -> bool:
    return not isinstance(given, str) or ":" in given


def _number_of_networks(given: int | str | None, otherwise: int | str) -> int | None:
    """Number of networks; None for all."""
    count = otherwise if given is None else given
    if isinstance(count, str) and count != "all":
        raise InputError('a number of networks, or "all"', repr(count), where="benchmark, networks")
    return None if isinstance(count, str) else count


def _leaderboard_of_measures(population: pd.DataFrame, names: list[str]) -> Leaderboard:
    """From a file of the release where it has these networks, else computed."""
    count = population["seed"].nunique()
    if count in (SUBSET, len(design())):
        return released_leaderboard(count == SUBSET).only(names)
    return Leaderboard(
        score_all(population_with_controls(population), names), population_counts(population) | {"version": __version__}
    )


def _own_name(function: Function) -> str:
    known = declarations().get(name := getattr(function, "__name__", "function"))
    if name in CONTROLS or (known is not None and known.function is not function):
        raise InputError("a name that is not taken", name, where="benchmark", fix="Rename the function")
    return name


def _values_of_own_functions(
    own: Mapping[str, Function], population: pd.DataFrame, store: Store
) -> dict[str, list[float]]:
    """Columns of the user's functions: on every network, and on its rescaled twin at the last stop."""
    columns: dict[str, list[float]] = {f"{prefix}{name}": [] for name in own for prefix in ("", RESCALED)}
    with progress_bar("measuring", total=len(population)) as advance:
        for row in rows_as_dictionaries(population):
            config = network_configuration(row, row["stop"])
            there = store.read(config).metrics["reached"]
            problem = stored_problem(store, config) if there else None
            twin = rescaled_twin(problem, int(row["seed"])) if problem and row["stop"] == STOPS[-1] else None
            for name, function in own.items():
                for prefix, one in (("", problem), (RESCALED, twin)):
                    columns[f"{prefix}{name}"].append(value_of(name, function, one) if one else math.nan)
            advance(1)
    return columns


def value_of(name: str, function: Function, problem: Problem) -> float:
    """A user's function on one network: as `measure` runs a declared one, others as they are; raises where it fails."""
    entry = declarations().get(name)
    if entry is not None and entry.function is function:
        table = measure(problem, name, options=options_of([name]))
        if table.to_frame()["reason"].str.startswith(FAILED).any() and function.__module__.split(".")[0] != "flatscope":
            with own_settings(problem.generators):  # once more, for the error with its file and line
                function(context_in_declared_form(Context(problem), entry))
        return table.one_each()[name]
    with own_settings(problem.generators):
        value: Any = function(Context(problem))
    try:
        return float(value.value if isinstance(value, Value) else value)
    except (TypeError, ValueError):
        fix = "Return a float, or declare it with @measure"
        raise InputError("a number", type(value).__name__, f"benchmark, {name}", fix) from None
