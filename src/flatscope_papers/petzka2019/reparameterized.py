"""Figure 2 of Petzka et al. (2019): what a random layer-wise reparameterization leaves of the correlations."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pandas as pd

from flatscope_papers import intervals
from flatscope_papers.claims import POSITIVE, Claim, Estimate
from flatscope_papers.declaration import Analysis, Runs, study
from flatscope_papers.petzka2019.correlations import DEVIATIONS, MATRICES, draw
from flatscope_papers.petzka2019.lenet import RULE, at_rule, correlations, followed, stages, summary_notes

WEAK = 0.3  # up to here a correlation is "very weak"
READING = (
    "which layers are scaled, and the law of the factors, are our reading: one of the layers in front of the output "
    "matrix, drawn at random, times λ and the output matrix divided by it, or the other way round by a fair coin, λ "
    "uniform in [5, 25]. The norm of the output matrix thus changes by factors from 0.04 to 0.2 and from 5 to 25; that "
    "of the last hidden matrix, and its Hessian, only where this is the layer drawn",
    "added after the results were known: the claims about Tr H and λ_max of the last hidden matrix, with the ranges of "
    "the first reading",
    "restated after the results were known: 'not affected' is looked at for both matrices, and no longer for the "
    "output matrix alone",
)

CLAIMS_2 = (
    Claim(
        "invariant",
        "section 3, Figure 2",
        "κ and κ_τ of layer 5, in either reading, are not affected by the random reparameterization",
        "largest relative change over networks, of both measures of the output and of the last hidden matrix",
        "0",
        holds=(0.0, 1e-3),
    ),
    Claim(
        "trace_after",
        "section 3, Figure 2",
        "the correlation of κ_τ of the output matrix stays the same after the reparameterization",
        "absolute change of its Pearson correlation, output matrix",
        "0",
        holds=(0.0, 1e-3),
    ),
    Claim(
        "eigenvalue_after",
        "section 3, Figure 2",
        "the correlation of κ of the output matrix stays the same after the reparameterization",
        "absolute change of its Pearson correlation, output matrix",
        "0",
        holds=(0.0, 1e-3),
    ),
    Claim(
        "trace_after_hidden",
        "section 3, Figure 2",
        "the correlation of κ_τ of the last hidden matrix stays the same after the reparameterization",
        "absolute change of its Pearson correlation, last hidden matrix",
        "0",
        holds=(0.0, 1e-3),
    ),
    Claim(
        "hessian_trace",
        "section 3, Figure 2",
        "after the reparameterization Tr H of the output matrix correlates only very weakly",
        "absolute Pearson correlation of Tr H with the gap after reparameterization, output matrix",
        "very weak",
        holds=(0.0, WEAK),
    ),
    Claim(
        "hessian_eigenvalue",
        "section 3, Figure 2",
        "after the reparameterization λ_max of the output matrix's Hessian correlates only very weakly",
        "absolute Pearson correlation of λ_max with the gap after reparameterization, output matrix",
        "very weak",
        holds=(0.0, WEAK),
    ),
    Claim(
        "trace_drops",
        "section 3, Figure 2",
        "it is the reparameterization that makes Tr H of the output matrix fail",
        "absolute Pearson correlation of Tr H before minus after, output matrix, bootstrap over networks",
        "fails after it",
        holds=POSITIVE,
    ),
    Claim(
        "eigenvalue_drops",
        "section 3, Figure 2",
        "it is the reparameterization that makes λ_max of the output matrix's Hessian fail",
        "absolute Pearson correlation of λ_max before minus after, output matrix, bootstrap over networks",
        "fails after it",
        holds=POSITIVE,
    ),
    Claim(
        "hessian_trace_hidden",
        "section 3, Figure 2",
        "after the reparameterization Tr H of the last hidden matrix correlates only very weakly",
        "absolute Pearson correlation of Tr H with the gap after reparameterization, last hidden matrix",
        "very weak",
        holds=(0.0, WEAK),
    ),
    Claim(
        "hessian_eigenvalue_hidden",
        "section 3, Figure 2",
        "after the reparameterization λ_max of the last hidden matrix's Hessian correlates only very weakly",
        "absolute Pearson correlation of λ_max with the gap after reparameterization, last hidden matrix",
        "very weak",
        holds=(0.0, WEAK),
    ),
)


@study(
    "petzka2019-fig2",
    figure="Figure 2",
    title="The LeNet-5 of Figure 1 after a random layer-wise reparameterization",
    claims=CLAIMS_2,
    stages=stages,
    deviations={scale: (*words, *READING) for scale, words in DEVIATIONS.items()},
    paper_cost="the networks of petzka2019-fig1; nothing is trained again.",
)
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


def reparameterized_found(kept: pd.DataFrame) -> dict[str, Estimate]:
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


def _change(points: pd.DataFrame, measure: str, layer: str = "fc3") -> Estimate:
    """How far the correlation moves on the same networks."""
    columns = [f"{when}/{measure}/{layer}" for when in ("before", "after")]
    before, after = _both(points, measure, layer)
    found = intervals.spread_of_correlations(points, columns, "gap")
    return replace(found, note=f"{before:.4f} before, {after:.4f} after")


def _left(points: pd.DataFrame, measure: str, layer: str = "fc3") -> Estimate:
    """|r| after the reparameterization."""
    found = intervals.correlation(points[f"after/{measure}/{layer}"], points["gap"])
    return replace(intervals.absolute(found), note=_lost(*_both(points, measure, layer)))


def _drop(points: pd.DataFrame, measure: str) -> Estimate:
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
