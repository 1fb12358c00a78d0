"""`atlas`: networks along training, compared after every epoch and at every level of training loss and accuracy."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from flatscope.errors import InputError, refuse_unknown, refuse_unless_whole
from flatscope.formatting import first_of_names, numbered, readable_number
from flatscope.progress import progress_bar
from flatscope.significance import checked_confidence
from flatscope.stats.estimate import Codes, Floats
from flatscope.training.populations.atlas_curves import AXES, KINDS, Atlas
from flatscope.training.populations.population_frame import comparable_column, measure_columns, target_column
from flatscope.training.populations.resampled import (
    FEWEST,
    copies_in_resamples,
    correlation_intervals,
    weighted_correlation,
)
from flatscope.version import __version__

ALL = "all networks"
NAMED = ("network", "trial", "name", "key")  # columns that tell networks apart
MOST_EPOCHS = 40
MOST_LEVELS = 8  # of a setting whose values get curves of their own
LOSS_RUNGS = [m * 10.0**e for e in range(-9, 3) for m in (1, 2, 3, 5, 7)]
ERROR_RUNGS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01, 0.005, 0.002, 0.001, 0)


class Scope(NamedTuple):
    """Which networks are correlated: their groups, and the strata that resampling keeps; −1 for those left out."""

    name: str
    groups: Codes
    strata: Codes


class Point(NamedTuple):
    """A moment at which networks are compared: the row of each that is there, −1 for the others."""

    axis: str
    at: float
    rows: Codes


def atlas(
    frame: pd.DataFrame,
    measures: Sequence[str] = (),
    *,
    target: str = "",
    by: Sequence[str] = (),
    kinds: Sequence[str] = ("pearson", "spearman"),
    network: str = "",
    levels: Mapping[str, Sequence[float]] | None = None,
    confidence: float = 0.95,
    resamples: int = 1_000,
    seed: int = 0,
) -> Atlas:
    """Correlate every measure with the gap after every epoch, and at every level of training loss and accuracy.

    At a level each network counts as it was at the first row at which its loss was at or below it (its accuracy at or
    above it); networks that never get there are left out. Rows without a finite measure or target are left out where
    they are. Points of fewer than ten networks have no value. Networks are resampled whole, the same at all points.

    Args:
        frame: one row per network and epoch: `epoch`, the target, measures, and where known `train_loss`,
            `train_error` or `train_accuracy`, settings.
        measures: columns of measures; by default those named after a declared measure.
        target: column that they should go along with; by default `gap`, `generalization_gap`, …, else `test_loss`
            less `train_loss`.
        by: settings of the networks (batch size, initialisation): correlations are also taken among networks of one
            value, pooled over the values, and for every value by itself.
        kinds: of "pearson", "spearman" and "kendall".
        network: column that tells networks apart; by default the first of `network`, `trial`, `name`, `key`.
        levels: values of `train_loss` and `train_accuracy` in place of round ones.
        confidence: level of the intervals.
        resamples: of the networks.
        seed: of the resamples.

    Raises:
        InputError: a column that is missing or constant, too few networks, two rows of one network and epoch.

    Example:
        >>> import pandas as pd, flatscope as fs
        >>> rows = [{"network": k, "epoch": e, "gap": k, "margin": k * (1 - 2 * e)} for k in range(12) for e in (0, 1)]
        >>> fs.atlas(pd.DataFrame(rows), kinds=["pearson"], resamples=100).to_frame()["value"].round(6).tolist()
        [1.0, -1.0]
    """
    begun = time.perf_counter()
    for name in kinds:
        refuse_unknown(name, KINDS, "kind of correlation")
    refuse_unless_whole(resamples, "resamples", least=100)
    level = checked_confidence(confidence)
    looks, named, measures, target, notes = _checked_atlas_input(frame, measures, target, by, network)
    codes = looks.pop("network").to_numpy()
    scopes = list(_atlas_scopes(looks, codes, by))
    points = list(_atlas_points(looks, codes, levels or {}))
    if not points:
        got = "at most " + numbered(int(looks.groupby("epoch").size().max()), "network")
        fix = "Look at the networks after the same epochs"
        raise InputError(f"an epoch at which {FEWEST} networks were seen", got, "atlas", fix)
    rows: list[pd.DataFrame] = []
    with progress_bar("Correlations", total=len(kinds) * len(scopes) * len(points)) as advance:
        for scope in scopes:
            counts = copies_in_resamples(scope.strata, resamples, seed)
            for kind, axis in itertools.product(kinds, AXES):
                along_axis = [point for point in points if point.axis == axis]
                rows += (
                    _atlas_curves(looks, measures, target, kind, scope, along_axis, counts, level) if along_axis else ()
                )
                advance(len(along_axis))
    meta = {
        "target": target, "by": list(by), "network": named, "networks": int(codes.max()) + 1, "confidence": level,
        "resamples": resamples, "seed": seed, "notes": notes, "version": __version__,
        "seconds": round(time.perf_counter() - begun, 1),
    }  # fmt: skip
    return Atlas(pd.concat(rows, ignore_index=True), meta)


def _with_gaps(looks: pd.DataFrame) -> pd.DataFrame:
    """The frame with gaps and accuracy, where losses and errors give them."""
    for gap, of in (("gap", "loss"), ("error_gap", "error")):
        if gap not in looks and {f"test_{of}", f"train_{of}"} <= set(looks):
            looks[gap] = looks[f"test_{of}"] - looks[f"train_{of}"]
    if "train_accuracy" not in looks and "train_error" in looks:
        looks["train_accuracy"] = 1 - looks["train_error"]
    return looks


def _refuse_changing(looks: pd.DataFrame, by: Sequence[str]) -> None:
    """Refuse columns to divide by that change along a training, or are missing for a network."""
    for name in by:
        if looks.groupby("network")[name].nunique(dropna=False).max() > 1:
            raise InputError("one value for each network", "several along training", where=f"atlas, {name}")
        if looks[name].isna().any():
            raise InputError("a value for each network", "networks without", where=f"atlas, {name}")


def _refuse_missing(columns: Sequence[str], needed: Sequence[str]) -> None:
    """Refuse a table without the columns that an atlas needs."""
    if missing := [name for name in needed if name not in columns]:
        expected = f"one of {', '.join(NAMED)}; epoch; gap, or test_loss and train_loss"
        fix = "One row per network and epoch; network= and target= (--network, --target) name other columns"
        raise InputError(f"a table with columns {expected}", f"no {' and no '.join(missing)}", "atlas", fix)


def _refuse_rows(looks: pd.DataFrame, named: str, numeric: Sequence[str]) -> None:
    """Refuse texts instead of numbers, rows without network or epoch, and two rows of one network and epoch."""
    for name in numeric:
        if not pd.api.types.is_numeric_dtype(looks[name]):
            raise InputError("a column of numbers", str(looks[name].dtype), where=f"atlas, {name}")
    if looks[[named, "epoch"]].isna().any(axis=None):
        raise InputError(f"{named} and epoch in every row", "rows without", "atlas", "Leave out the other rows first")
    if looks.duplicated([named, "epoch"]).any():
        fix = "One column per layer (kappa/fc1); name the column that tells networks apart with network="
        raise InputError("one row per network and epoch", "several", f"atlas, {named}", fix)


def _notes_on_left_out(constant: Sequence[str], target: str, n_lost: int) -> list[str]:
    notes = [f"{first_of_names(constant, 5)}: constant, left out"] if constant else []
    lost = f"{numbered(n_lost, 'network')} without a finite {target} at times, left out there"
    return [*notes, lost] if n_lost else notes


def _checked_atlas_input(
    frame: pd.DataFrame, measures: Sequence[str], target: str, by: Sequence[str], network: str
) -> tuple[pd.DataFrame, str, list[str], str, list[str]]:
    """Needed columns with networks numbered; the column that names networks; measures; target; remarks."""
    if isinstance(measures, str) or isinstance(by, str):
        raise InputError("a list of columns", repr(measures if isinstance(measures, str) else by), where="atlas")
    looks = _with_gaps(frame.set_axis([str(column) for column in frame.columns], axis=1).reset_index(drop=True))
    columns = [str(column) for column in looks]
    named = network or next((name for name in NAMED if name in columns), NAMED[0])
    asked, target = target, target or target_column(columns) or "gap"
    chosen = list(measures) or list(measure_columns(looks, target))
    for name in (*filter(None, (network, asked)), *chosen, *by):
        refuse_unknown(name, columns, "column")
    _refuse_missing(columns, (named, "epoch", target))
    if not chosen:
        raise InputError("columns named after measures", first_of_names(columns, 8), "atlas", "Name them: measures=[…]")
    numeric = [name for name in ("epoch", "train_loss", "train_accuracy", target, *chosen) if name in columns]
    _refuse_rows(looks, named, numeric)
    looks["network"] = pd.factorize(looks[named])[0]
    if looks["network"].nunique() < FEWEST:
        raise InputError(f"{FEWEST} networks or more", str(looks["network"].nunique()), where=f"atlas, {named}")
    looks[numeric] = looks[numeric].astype("float64").replace([math.inf, -math.inf], math.nan)
    constant = [name for name in (target, *chosen) if looks[name].nunique() < 2]
    if {target, *measures} & set(constant) or set(constant) >= set(chosen):
        raise InputError("a column that varies", "a constant", where=f"atlas, {constant[0]}")
    notes = _notes_on_left_out(constant, target, looks.loc[looks[target].isna(), "network"].nunique())
    _refuse_changing(looks, by)
    looks = looks.sort_values(["network", "epoch"], kind="stable", ignore_index=True)
    return (
        looks[[*dict.fromkeys(["network", *numeric, *by])]],
        named,
        [m for m in chosen if m not in constant],
        target,
        notes,
    )


def _atlas_scopes(looks: pd.DataFrame, codes: Codes, by: Sequence[str]) -> Iterator[Scope]:
    """All networks; within the values of each setting and of all; every value of a setting by itself."""
    settings = looks[list(by)].groupby(codes).first()
    together = np.zeros(int(codes.max()) + 1, dtype=np.int64)
    yield Scope(ALL, together, together)
    numbered_by = {name: pd.factorize(comparable_column(settings[name]), sort=True) for name in by}
    within: dict[str, Codes] = {
        f"within {name}": np.asarray(groups, dtype=np.int64) for name, (groups, _) in numbered_by.items()
    }
    if len(by) > 1:
        within[f"within {' and '.join(by)}"] = np.asarray(settings.groupby(list(by)).ngroup(), dtype=np.int64)
    for name, groups in within.items():
        if groups.max() == 0 or np.bincount(groups).max() < 2:
            if name.removeprefix("within ") not in by:
                continue  # every combination of the settings has one network
            got = "a value of its own for every network" if groups.max() else "one value"
            raise InputError("values that several networks share", got, where=f"atlas, {name.removeprefix('within ')}")
        yield Scope(name, groups, groups)
    for name, (_, values) in numbered_by.items():
        groups = within[f"within {name}"]
        for n, value in enumerate(values if len(values) <= MOST_LEVELS else ()):
            shown = readable_number(value) if isinstance(value, (int, float)) else str(value)
            yield Scope(f"{name} = {shown}", np.where(groups == n, 0, -1), groups)


def _atlas_points(looks: pd.DataFrame, codes: Codes, levels: Mapping[str, Sequence[float]]) -> Iterator[Point]:
    """The epochs, then the levels of loss and accuracy, in the order of training, that enough networks come to."""
    for name in levels:
        refuse_unknown(name, [axis for axis in AXES if axis != "epoch"], "axis with levels")
    size, epochs = int(codes.max()) + 1, looks["epoch"].to_numpy()
    seen = [(at, np.flatnonzero(epochs == at)) for at in np.unique(epochs)]
    seen = [(at, rows) for at, rows in seen if len(rows) >= FEWEST]
    if len(seen) > MOST_EPOCHS:  # as far apart as on a logarithmic axis
        kept = np.unique(np.geomspace(1, len(seen), MOST_EPOCHS).round().astype(int)) - 1
        seen = [seen[n] for n in kept]
    points = [("epoch", float(at), rows) for at, rows in seen]
    for axis, rungs in (("train_loss", LOSS_RUNGS), ("train_accuracy", [1 - rung for rung in ERROR_RUNGS])):
        if axis not in looks:
            continue
        sign = 1 if axis == "train_loss" else -1  # so that lower is later in training
        values = sign * looks[axis].to_numpy()
        starts = values[np.unique(codes, return_index=True)[1]]
        wanted = sorted({sign * at for at in levels.get(axis, rungs)}, reverse=True)
        if axis not in levels:
            wanted = [at for at in wanted if at <= np.nanmax(starts, initial=-math.inf)]
        for at in wanted:
            reached = np.flatnonzero(values <= at)
            first = reached[np.unique(codes[reached], return_index=True)[1]]
            if len(first) >= FEWEST:
                points.append((axis, float(sign * at), first))
    for axis, at, rows in points:
        of_network = np.full(size, -1, dtype=np.int64)
        of_network[codes[rows]] = rows
        yield Point(axis, at, of_network)


def _atlas_curves(
    looks: pd.DataFrame, measures: Sequence[str], target: str, kind: str, scope: Scope, points: Sequence[Point],
    counts: Floats, confidence: float,
) -> Iterator[pd.DataFrame]:  # fmt: skip
    """The curve of every measure over the points of an axis; the bands of all of them hold together."""
    drawn = np.zeros((len(counts), len(measures), len(points)))
    sizes, groups = np.zeros((2, len(measures), len(points)), dtype=np.int64)
    columns = {name: looks[name].to_numpy() for name in (target, *measures)}
    for p, point in enumerate(points):
        there = np.flatnonzero((scope.groups >= 0) & (point.rows >= 0))
        for m, measure in enumerate(measures):
            x, y = (columns[name][point.rows[there]] for name in (measure, target))
            known = np.isfinite(x) & np.isfinite(y)
            of_group = np.bincount(scope.groups[there[known]], minlength=1)
            known &= of_group[scope.groups[there]] > 1  # a network alone in its group has nothing to differ from
            sizes[m, p], groups[m, p] = known.sum(), (of_group > 1).sum()
            if sizes[m, p] >= FEWEST:
                pair = x[known], y[known], counts[:, there[known]]
                drawn[:, m, p] = weighted_correlation(*pair, kind, scope.groups[there[known]])
    shape = sizes.shape
    intervals = correlation_intervals(drawn.reshape(len(counts), -1), sizes.ravel(), groups.ravel(), confidence)
    value = np.where((sizes >= FEWEST) & (drawn.any(axis=0)), drawn[0], math.nan)
    medians = np.array([_median_epoch_and_loss(looks, scope, point) for point in points]).reshape(-1, 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        z, reach = np.arctanh(value), intervals.reach.reshape(shape)
    for m, measure in enumerate(measures):
        ends = {"low": -1.0, "high": 1.0, "band_low": -intervals.factor, "band_high": intervals.factor}
        yield pd.DataFrame(
            {
                "measure": measure, "kind": kind, "scope": scope.name, "axis": [point.axis for point in points],
                "at": [point.at for point in points], "value": value[m],
                **{name: np.tanh(z[m] + by * reach[m]) for name, by in ends.items()},
                "n": sizes[m], "networks": int((scope.groups >= 0).sum()),
                "median_epoch": medians[:, 0], "median_loss": medians[:, 1],
            }
        )  # fmt: skip


def _median_epoch_and_loss(looks: pd.DataFrame, scope: Scope, point: Point) -> tuple[float, float]:
    """Epoch and training loss of the networks at a point, in the median."""
    rows = point.rows[(scope.groups >= 0) & (point.rows >= 0)]
    return _median_of_known(looks, "epoch", rows), _median_of_known(looks, "train_loss", rows)


def _median_of_known(looks: pd.DataFrame, name: str, rows: Codes) -> float:
    """Of what is known of these rows; NaN for nothing."""
    values = looks[name].to_numpy()[rows] if name in looks else np.empty(0)
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else math.nan
