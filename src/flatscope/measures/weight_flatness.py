"""Flatness in weight space: the gradient and the Hessian of the training loss as they are."""

from __future__ import annotations

from flatscope.context import Context
from flatscope.curvature.estimators import trace
from flatscope.curvature.operators import Hessian
from flatscope.params import norm
from flatscope.registry import Value, measure


@measure(
    symbol=r"\|\nabla \hat L(w)\|_2",
    paper="yi2019",
    equation="Section 2.1",
    direction="none",
    invariant_under={"permutation"},
    cost="light",
    passes={"forward": 1, "backward": 1},
    conventions="all trainable parameters, biases included; mean over samples",
)
def gradient_norm(ctx: Context) -> float:
    r"""Euclidean norm of the gradient of the training loss: is this a minimum at all?

    .. math:: \| \tfrac1n \sum_i \nabla_w \ell(f_w(x_i), y_i) \|_2

    Curvature says how flat a minimum is only where this is close to zero.
    """
    return norm(ctx.gradient())


@measure(
    symbol=r"\operatorname{tr} \nabla^2 \hat L(w)",
    paper="yi2019",
    equation="Definition 2.1",
    direction="lower",
    invariant_under={"permutation"},
    cost="sweep",
    exact=False,
    conventions="all trainable parameters, BatchNorm's included; mean over samples; not divided by their number",
)
def hessian_trace(ctx: Context, *, accuracy: float = 0.01, most_products: int = 1024) -> Value:
    """Trace of the Hessian of the training loss over all trainable parameters.

    Args:
        ctx: the network.
        accuracy: relative standard error to reach.
        most_products: give up after so many Hessian products.
    """
    found = trace(Hessian(ctx), ctx.generator("hessian_trace"), accuracy=accuracy, most_products=most_products)
    reason = "" if found.converged else f"asked for {accuracy:.2g} relative, not reached in {found.products} products"
    return Value(found.value, stderr=found.stderr, exact=found.exact, reason=reason)
