"""Two criteria at once: expected sharpness against the divergence from the prior, one point per noise level."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import NamedTuple

from flatscope.formatting import written
from flatscope.reports.charts import Chart, Colours, Key, Line, line_plot
from flatscope.reports.figure_data import wants_log
from flatscope.table import Table

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


def bicriteria_chart(data: BiCriteriaData, colours: Colours) -> Chart:
    """Lines that fall from the upper left: less divergence is bought with more sharpness."""
    lines = [
        Line(c.divergence, c.sharpness, f"line c{colours[c.network]}", dotted=True, errors=c.errors)
        for c in data.curves
    ]
    words = "; ".join(
        f"{c.network}: sharpness {written(c.sharpness[0])} at a divergence of {written(c.divergence[0])}, "
        f"{written(c.sharpness[-1])} at {written(c.divergence[-1])}"
        for c in data.curves
    )
    return Chart(
        title="Expected sharpness against KL divergence",
        caption=(
            "One dot per noise level α, the smallest at the right. Across: divergence of the noise from the prior, "
            f"logarithmic. Up: how much the loss rises under that noise{', logarithmic' if data.log else ''}. "
            "A curve nearer to the lower left is better at both."
        ),
        legend=[Key(curve.network, colours[curve.network]) for curve in data.curves],
        body=line_plot(lines, f"Expected sharpness over KL divergence. {words}.", log_x=True, log_y=data.log),
        header=["network", "α", "KL divergence", "expected sharpness", "± s.e."],
        rows=[
            [c.network, written(a), written(d), written(s), written(e, 2) if e else "exact"]
            for c in data.curves
            for a, d, s, e in zip(c.alphas, c.divergence, c.sharpness, c.errors, strict=True)
        ],
    )
