"""Figure 2 of Petzka et al. (2019): what a random layer-wise reparameterization leaves of the correlations."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pandas as pd

from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Runs, study
from flatscope_papers.petzka2019.correlations import MATRICES, draw
from flatscope_papers.petzka2019.lenet import RULE, at_rule, correlations, followed, stages, summary_notes

WEAK = 0.3  # up to here a correlation is "very weak"


@study("petzka2019-fig2", stages=stages)
def figure_2(runs: Runs) -> Analysis:
    """What a random factor from [5, 25] on one layer and its inverse on the output matrix does to the correlations."""
    seen = followed(runs)
    points = at_rule(seen, RULE)
    kept = points.dropna(subset=[name for name in points.columns if name.startswith("after/")])
    columns = {
        "after/kappa/fc3": "κ⁵",
        "after/layer_max_eigenvalue/fc3": "λ_max",
        "after/kappa_trace/fc3": "κ_τ⁵",
        "after/layer_trace/fc3": "Tr H",
    }
    along = correlations(seen)
    return Analysis(
        pd.concat([kept.assign(kind="network"), along.assign(kind="correlation")], ignore_index=True),
        reparameterized_found(kept),
        lambda figure: draw(figure, kept, along, columns, "after"),
        notes=(*summary_notes(seen, runs), factors_note(kept)),
    )


def reparameterized_found(kept: pd.DataFrame) -> dict[str, Answer]:
    """The numbers of the claims, from networks seen before and after."""
    return {
        "invariant": intervals.largest(_moved(kept)),
        "trace_after": _change(kept, "kappa_trace"),
        "eigenvalue_after": _change(kept, "kappa"),
        "trace_after_hidden": _change(kept, "kappa_trace", "fc2"),
        "hessian_trace": _left(kept, "layer_trace"),
        "hessian_eigenvalue": _left(kept, "layer_max_eigenvalue"),
        "trace_drops": _drop(kept, "layer_trace"),
        "eigenvalue_drops": _drop(kept, "layer_max_eigenvalue"),
        "hessian_trace_hidden": _left(kept, "layer_trace", "fc2"),
        "hessian_eigenvalue_hidden": _left(kept, "layer_max_eigenvalue", "fc2"),
    }


def factors_note(kept: pd.DataFrame) -> str:
    """By which factors the norms of both matrices changed, and for how many networks."""
    words = []
    for layer, name in MATRICES.items():
        factors = kept[f"after/norm/{layer}"] / kept[f"before/norm/{layer}"]
        scaled = factors[~np.isclose(factors, 1.0, rtol=1e-3)]
        ends = f" (norm times {scaled.min():.2f} to {scaled.max():.3g})" if len(scaled) else ""
        words.append(f"the {name} in {len(scaled)} of {len(kept)} networks{ends}")
    return f"the reparameterization scaled {', '.join(words)}"


def _moved(points: pd.DataFrame) -> pd.Series[float]:
    """Largest relative change of κ and κ_τ of both matrices, one number per network."""
    changes = [
        (points[f"after/{name}"] - points[f"before/{name}"]).abs() / points[f"before/{name}"]
        for name in ("/".join(parts) for parts in itertools.product(("kappa", "kappa_trace"), MATRICES))
    ]
    return pd.concat(changes, axis=1).max(axis=1)


def _change(points: pd.DataFrame, measure: str, layer: str = "fc3") -> Answer:
    """How far the correlation moves on the same networks."""
    columns = [f"{when}/{measure}/{layer}" for when in ("before", "after")]
    before, after = _both(points, measure, layer)
    found = intervals.spread_of_correlations(points, columns, "gap")
    return replace(found, note=f"{before:.4f} before, {after:.4f} after")


def _left(points: pd.DataFrame, measure: str, layer: str = "fc3") -> Answer:
    """|r| after the reparameterization."""
    found = intervals.correlation(points[f"after/{measure}/{layer}"], points["gap"])
    return replace(intervals.absolute(found), note=_lost(*_both(points, measure, layer)))


def _drop(points: pd.DataFrame, measure: str) -> Answer:
    """|r| before minus |r| after."""
    columns = [f"{when}/{measure}/fc3" for when in ("before", "after")]
    found = intervals.lead_of_correlations(points, columns[0], columns[1:], "gap", of_size=True)
    return replace(found, note=_lost(*_both(points, measure, "fc3")))


def _lost(before: float, after: float) -> str:
    """Both correlations, and what is to be said of the one that the reparameterization could take away."""
    told = f"r = {before:.2f} before, {after:.2f} after"
    if abs(before) <= WEAK:
        return f"{told}: very weak before it as well, so that there was little to take away"
    return f"{told}: before it of the wrong sign" if before < 0 else told


def _both(points: pd.DataFrame, measure: str, layer: str) -> list[float]:
    return [points[f"{when}/{measure}/{layer}"].corr(points["gap"]) for when in ("before", "after")]
