"""Unit profiles: the values of a layer's units from the largest to the smallest, of all networks in one figure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from flatscope.errors import InputError
from flatscope.formatting import percent, written
from flatscope.reports.charts import Chart, Colours, Key, Line, line_plot
from flatscope.reports.figure_data import labels, of_measure, wants_log
from flatscope.table import Table

MOST_POINTS = 160  # of a line; wider layers are shown by that many of their ranks
MOST_LAYERS = 24  # figures of one measure


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


def units_chart(data: UnitsData, colours: Colours) -> Chart:
    """Lines over the rank of the unit."""
    lines = [
        Line(ranks, values, f"line c{colours[network]}", dotted=len(ranks) == 1)
        for network, ranks, values in zip(data.networks, data.ranks, data.values, strict=True)
    ]
    words = "; ".join(
        f"{network}: {written(values[0])} down to {written(values[-1])}"
        for network, values in zip(data.networks, data.values, strict=True)
    )
    return Chart(
        title=f"{data.measure} · {data.layer}",
        caption=f"Units by rank, the largest first{', logarithmic scale' if data.log else ''}.",
        legend=[Key(network, colours[network]) for network in data.networks],
        body=line_plot(lines, f"{data.measure} of the units of {data.layer} by rank. {words}.", log_y=data.log),
        header=["network", "units", "largest", "median", "smallest", "share of the largest tenth"],
        rows=[
            [network, written(n), written(v[0]), written(median), written(v[-1]), percent(share)]
            for network, n, v, median, share in zip(
                data.networks, data.n_units, data.values, data.medians, data.shares, strict=True
            )
        ],
    )
