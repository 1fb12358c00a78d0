"""What the figures show, as small tuples."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from flatscope.errors import InputError
from flatscope.formatting import labelled
from flatscope.reports.measured import lines
from flatscope.table import Table

PARTS = ("train", "test")
NOT_A_CURVE = ("epoch", "index", "seconds")
MOST_BINS = 40


class ComparisonData(NamedTuple):
    """How many times better than the first network the others are, by measures whose ratios say something.

    That is: with a better direction, invariant under rescaling, positive and different in the networks, and neither in
    proportion to a measure that is there already nor another option of one. `left_out` names the others, by the reason.
    """

    reference: str
    networks: list[str]
    measures: list[str]
    factors: list[list[float]]  # by measure, then network; above 1 is better
    errors: list[list[float]]  # their standard errors
    left_out: dict[str, list[str]]


def comparison_data(tables: Mapping[str, Table]) -> ComparisonData:
    """All networks but the first against the first; without measures if there is only one network."""
    first, *others = tables
    data = ComparisonData(first, others, [], [], [], {})
    seen: set[tuple[str, ...]] = set()
    data_names: set[str] = set()
    for line in lines(tables) if others else []:
        cells = [cell for cell in line.cells if cell is not None and cell.value > 0 and not cell.extent]
        if len(cells) < len(tables) or not all(math.isfinite(cell.value) for cell in cells):
            continue
        reference, *compared = cells
        direction = "none" if line.entry is None else line.entry.direction
        ratios = [cell.value / reference.value for cell in compared]
        factors = ratios if direction == "higher" else [1 / ratio for ratio in ratios]
        shown = tuple(f"{factor:.7g}" for factor in factors)
        why = (
            "constant" if set(shown) == {"1"}
            else "without a better direction" if direction == "none"
            else "not invariant under rescaling" if line.standing != "all"
            else "in proportion to one that is shown, or its other options" if shown in seen or line.name in data_names
            else ""
        )  # fmt: skip
        if why:
            data.left_out.setdefault(why, []).append(line.label)
            continue
        seen.add(shown)
        data_names.add(line.name)
        data.measures.append(line.label)
        data.factors.append(factors)
        pairs = zip(factors, compared, strict=True)
        data.errors.append([factor * math.hypot(cell.relative, reference.relative) for factor, cell in pairs])
    return data


def wants_log(values: Iterable[float]) -> bool:
    """Whether values are positive and span so much that a linear axis would hide most of them."""
    found = list(values)
    return bool(found) and min(found) > 0 and max(found) > 20 * min(found)


class DistributionData(NamedTuple):
    """Values per sample or unit, counted in bins that all networks share."""

    measure: str
    per: str
    networks: list[str]
    edges: list[float]
    shares: list[list[float]]  # by network, then bin: fraction of its values
    quartiles: list[tuple[float, float, float]]
    n_values: list[int]
    below_zero: list[float]  # fraction


def distribution_measures(tables: Mapping[str, Table]) -> list[str]:
    """Labels of the measures with a value per sample."""
    return labels(frame[frame["sample"].notna()] for frame in map(_many_rows, tables.values()))


def distribution_data(tables: Mapping[str, Table], measure: str = "functional_margin") -> DistributionData:
    """The distribution of a measure over samples or units, of every network that has it.

    Args:
        tables: by name of the network.
        measure: its name (then with the options that come first), or its name with options as in the report.
    """
    values: dict[str, np.ndarray[Any, Any]] = {}
    per = "sample"
    for network, table in tables.items():
        rows = of_measure(_many_rows(table), measure)
        found = rows["value"].to_numpy(dtype="float64")
        if np.isfinite(found).any():
            values[network] = found[np.isfinite(found)]
            per = "sample" if rows["sample"].notna().any() else "value"
    if not values:
        raise InputError(f"values of {measure} per sample or unit", "none", where="distribution")
    pooled = np.concatenate(list(values.values()))
    edges = np.histogram_bin_edges(pooled, bins="fd" if np.ptp(pooled) > 0 else 1)
    if len(edges) > MOST_BINS + 1:  # a few far values would otherwise ask for millions of bins
        edges = np.histogram_bin_edges(pooled, bins=MOST_BINS)
    return DistributionData(
        measure=measure,
        per=per,
        networks=list(values),
        edges=edges.tolist(),
        shares=[(np.histogram(v, edges)[0] / len(v)).tolist() for v in values.values()],
        quartiles=[tuple(np.quantile(v, (0.25, 0.5, 0.75)).tolist()) for v in values.values()],
        n_values=[len(v) for v in values.values()],
        below_zero=[float((v < 0).mean()) for v in values.values()],
    )


class LayersData(NamedTuple):
    """A value per layer, layers in forward order; NaN where a network has no such layer."""

    measure: str
    networks: list[str]
    layers: list[str]
    values: list[list[float]]  # by layer, then network
    errors: list[list[float]]


def layers_measures(tables: Mapping[str, Table]) -> list[str]:
    """Labels of the measures with a value per layer."""
    return labels(map(_layer_rows, tables.values()))


def layers_data(tables: Mapping[str, Table], measure: str) -> LayersData:
    """The layer profile of a measure, given as in `distribution_data`."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for network, table in tables.items():
        rows = of_measure(_layer_rows(table), measure)
        pairs = zip(rows["value"].astype(float), rows["stderr"].astype(float), strict=True)
        if len(rows):
            found[network] = dict(zip(rows["layer"].astype(str), pairs, strict=True))
    if not found:
        raise InputError(f"values of {measure} per layer", "none", where="layer profile")
    layers = list(dict.fromkeys(layer for profile in found.values() for layer in profile))
    nothing = (math.nan, 0.0)
    values = [[profile.get(layer, nothing)[0] for profile in found.values()] for layer in layers]
    errors = [[profile.get(layer, nothing)[1] for profile in found.values()] for layer in layers]
    return LayersData(measure, list(found), layers, values, errors)


class Curve(NamedTuple):
    """One quantity of one network over the epochs; `part` is train, test or empty."""

    network: str
    part: str
    epochs: list[float]
    values: list[float]


class CurvesData(NamedTuple):
    """Training curves of one quantity."""

    quantity: str
    curves: list[Curve]
    log: bool


def curves_quantities(histories: Mapping[str, pd.DataFrame]) -> list[str]:
    """What the histories record, without train_ and test_; columns that never change are left out."""
    varying: dict[str, None] = {}
    for history in histories.values():
        numeric = history.reset_index().select_dtypes("number")
        for column in numeric.columns:
            if column not in NOT_A_CURVE and numeric[column].nunique() > 1:
                varying[_split(str(column))[1]] = None
    return list(varying)


def curves_data(histories: Mapping[str, pd.DataFrame], quantity: str = "loss") -> CurvesData:
    """Curves of train_<quantity>, test_<quantity> or <quantity>, non-finite values left out.

    The scale is logarithmic where the values are positive and span more than a factor of 20.
    """
    curves = []
    for network, history in histories.items():
        frame = history.reset_index() if "epoch" not in history.columns else history
        for column in frame.columns:
            part, name = _split(str(column))
            if name != quantity or column == "epoch":
                continue
            points = frame[["epoch", column]].astype("float64").replace([math.inf, -math.inf], math.nan).dropna()
            if len(points):
                curves.append(Curve(network, part, points["epoch"].tolist(), points[column].tolist()))
    if not curves:
        raise InputError(f"a history of {quantity}", "none", where="training curves")
    return CurvesData(quantity, curves, wants_log(value for curve in curves for value in curve.values))


def _split(column: str) -> tuple[str, str]:
    """train_loss → (train, loss)."""
    part, _, name = column.partition("_")
    return (part, name) if part in PARTS and name else ("", column)


def _many_rows(table: Table) -> pd.DataFrame:
    rows = table.to_frame()
    return rows[rows["sample"].notna() | rows["unit"].notna()]


def _layer_rows(table: Table) -> pd.DataFrame:
    rows = table.to_frame()
    return rows[(rows["layer"] != "") & rows["unit"].isna() & rows["sample"].isna()]


def labels(frames: Iterable[pd.DataFrame]) -> list[str]:
    """Measures with their options, as the report writes them, in the order in which they first appear."""
    pairs = [pair for frame in frames for pair in zip(frame["measure"], frame["options"], strict=True)]
    return [labelled(*pair) for pair in dict.fromkeys(pairs)]


def of_measure(rows: pd.DataFrame, measure: str) -> pd.DataFrame:
    """The rows of one measure with one set of options: the one named by the label, else the first."""
    for name, options in dict.fromkeys(zip(rows["measure"], rows["options"], strict=True)):
        if measure in (name, labelled(name, options)):
            return pd.DataFrame(rows[(rows["measure"] == name) & (rows["options"] == options)])
    return rows.iloc[:0]


MOST_POINTS = 160  # of a line; wider layers are shown by that many of their ranks
MOST_LAYERS = 12  # figures of one measure


class UnitsData(NamedTuple):
    """Values of the units of one layer, sorted, by network."""

    measure: str
    layer: str
    networks: list[str]
    ranks: list[list[float]]  # 1 is the largest
    values: list[list[float]]
    n_units: list[int]
    medians: list[float]
    shares: list[float]  # of the largest tenth of the units in the sum; NaN where signs differ
    log: bool


def units_profiles(tables: Mapping[str, Table]) -> list[tuple[str, str]]:
    """(measure, layer) of every profile that can be drawn, layers in forward order."""
    found: dict[tuple[str, str], None] = {}
    frames = [_unit_rows(table) for table in tables.values()]
    for measure in labels(frames):
        layers = dict.fromkeys(layer for frame in frames for layer in of_measure(frame, measure)["layer"])
        for layer in list(layers)[:MOST_LAYERS]:
            found[measure, str(layer)] = None
    return list(found)


def units_data(tables: Mapping[str, Table], measure: str, layer: str) -> UnitsData:
    """The profile of one layer; networks without that layer are left out."""
    data = UnitsData(measure, layer, [], [], [], [], [], [], False)
    for network, table in tables.items():
        rows = of_measure(_unit_rows(table), measure)
        values = rows.loc[rows["layer"] == layer, "value"].to_numpy(dtype="float64")
        values = np.sort(values[np.isfinite(values)])[::-1]
        if len(values):
            shown = np.unique(np.linspace(0, len(values) - 1, min(len(values), MOST_POINTS)).round().astype(int))
            data.networks.append(network)
            data.ranks.append((shown + 1.0).tolist())
            data.values.append(values[shown].tolist())
            data.n_units.append(len(values))
            data.medians.append(float(np.median(values)))
            data.shares.append(_share_of_the_largest(values))
    if not data.networks:
        raise InputError(f"values of {measure} per unit of {layer}", "none", where="unit profile")
    return data._replace(log=wants_log(value for values in data.values for value in values))


def _share_of_the_largest(values: np.ndarray[Any, Any]) -> float:
    """What the largest tenth has of the sum, `values` falling; NaN where they do not all have one sign."""
    if values[-1] < 0 or values.sum() <= 0:
        return math.nan
    return float(values[: max(1, round(len(values) / 10))].sum() / values.sum())


def _unit_rows(table: Table) -> pd.DataFrame:
    rows = table.to_frame()
    return pd.DataFrame(rows[rows["unit"].notna()])


SHARPNESS, DIVERGENCE = "expected_sharpness", "pac_bayes_kl"


class BiCriteriaCurve(NamedTuple):
    """One network; points by growing alpha."""

    network: str
    alphas: list[float]
    divergence: list[float]
    sharpness: list[float]
    errors: list[float]  # standard errors of the sharpness


class BiCriteriaData(NamedTuple):
    """The curves of all networks that have both criteria at two noise levels or more."""

    curves: list[BiCriteriaCurve]
    log: bool  # of the sharpness; the divergence is always on a logarithmic axis


def bicriteria_data(tables: Mapping[str, Table]) -> BiCriteriaData:
    """The curves; without any if no table holds both measures at common values of alpha."""
    curves = []
    for network, table in tables.items():
        sharp, divergence = _by_alpha(table, SHARPNESS), _by_alpha(table, DIVERGENCE)
        alphas = sorted(a for a in sharp if divergence.get(a, (0.0, 0.0))[0] > 0)
        if len(alphas) > 1:
            curves.append(
                BiCriteriaCurve(
                    network,
                    alphas,
                    [divergence[a][0] for a in alphas],
                    [sharp[a][0] for a in alphas],
                    [sharp[a][1] for a in alphas],
                )
            )
    return BiCriteriaData(curves, wants_log(value for curve in curves for value in curve.sharpness))


def _by_alpha(table: Table, measure: str) -> dict[float, tuple[float, float]]:
    """Finite values and standard errors by alpha; where other options differ too, the first set of them."""
    rows = table.to_frame()
    rows = rows[(rows["measure"] == measure) & (rows["options"] != "") & (rows["layer"] == "")]
    found: dict[float, tuple[float, float]] = {}
    for text, value, stderr in zip(rows["options"], rows["value"], rows["stderr"], strict=True):
        alpha = json.loads(text).get("alpha")
        if isinstance(alpha, (int, float)) and math.isfinite(value):
            found.setdefault(float(alpha), (float(value), float(stderr)))
    return found
