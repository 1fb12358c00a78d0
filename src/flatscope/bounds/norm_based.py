"""Generalization gaps of the order that norms of the weights allow, relative to the margin."""

from __future__ import annotations

import math

from flatscope.context import Context
from flatscope.errors import NotApplicable, UnknownNameError
from flatscope.registry import Value, bound, declarations
from flatscope.samples import parts_of

# Which norm of an input goes with a norm of the weights: ℓ1 norms of weights pair with the largest entry.
INPUT_NORMS = {
    "l2_norm": "l2",
    "l1_path_norm": "linf",
    "l2_path_norm": "l2",
    "spectral_norm": "l2",
    "l1_inf_norm": "linf",
}
SHOWN = ("l2_norm", "l1_path_norm", "l2_path_norm", "spectral_norm")


@bound(
    symbol=r"\sqrt{\tfrac{1}{n}\, C_{\mathrm{norm}} \max_i \|x_i\|^2}",
    paper="neyshabur2017",
    equation="Section 2.2",
    assumptions=(
        "NOT CERTIFIED: the order of the gap; the paper leaves out constants and logarithms",
        "positive margin of all but a fraction epsilon of the samples (checked)",
        "inputs no larger than the largest training input",
        "norms fixed before seeing the data, biases not counted (path norms count them)",
    ),
    needs={"classes", "chain"},
    cost="sweep",
    on_folded=True,
)
def norm_capacity(ctx: Context, *, delta: float, norms: tuple[str, ...] = SHOWN, epsilon: float = 0.05) -> list[Value]:
    """Gap of the order of the root of capacity over samples, one row per norm.

    The capacities are those of `…_capacity`. They are printed for inputs of norm one; here the largest training input
    is put in, so that the value does not change when inputs are scaled up and the first layer down.

    Args:
        ctx: the network.
        delta: not used: the statement hides it among the constants.
        norms: of l2_norm, l1_path_norm, l2_path_norm, spectral_norm and l1_inf_norm.
        epsilon: fraction of the training samples that may lie at or below the margin.
    """
    del delta
    known, rows = declarations(), []
    for name in (norms,) if isinstance(norms, str) else norms:
        if name not in INPUT_NORMS:
            raise UnknownNameError.among(str(name), INPUT_NORMS, "norm of norm_capacity")
        try:
            log_capacity = float(known[f"{name}_capacity"].function(ctx, log=True, epsilon=epsilon).value)
            log_gap = 0.5 * (log_capacity - math.log(ctx.problem.n_train)) + _log(
                largest_inputs(ctx)[INPUT_NORMS[name]]
            )
            gap = math.exp(log_gap) if log_gap < 700 else math.inf
            rows.append(Value(gap, options={"norm": name}, reason=f"capacity e^{log_capacity:.4g}"))
        except NotApplicable as refusal:
            rows.append(Value(math.nan, exact=False, options={"norm": name}, reason=str(refusal)))
    return rows


def largest_inputs(ctx: Context) -> dict[str, float]:
    """Largest ℓ2 norm and largest absolute entry ("linf") of a training input."""
    return ctx.sweep(_largest_inputs)


def _largest_inputs(ctx: Context) -> dict[str, float]:
    largest = {"l2": 0.0, "linf": 0.0}
    for inputs, _ in ctx.batches():
        parts = parts_of(inputs)
        if len(parts) != 1:
            raise NotApplicable("a network with one input", f"{len(parts)} inputs")
        rows = parts[0].double().flatten(1)
        largest["l2"] = max(largest["l2"], float(rows.norm(dim=1).max()))
        largest["linf"] = max(largest["linf"], float(rows.abs().max()))
    return largest


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
