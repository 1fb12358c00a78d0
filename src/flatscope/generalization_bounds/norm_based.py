"""Gaps that norms of the weights allow: of their order relative to the margin, and by Rademacher complexity.

The latter (Zhang et al. 2017, eq 24, 57 and 60) are for networks with bounded ℓ1 norms, and are statements about y f(x)
with y = ±1. A network with two outputs is the function f = f_1 - f_0. For K > 2 outputs the margin takes the place of
y f(x), and 2K times the complexity of a single output that of the complexity of f (Kuznetsov, Mohri and Syed 2015): in
min(margin, θ) = f_y - max_k (f_k - θ 1[k = y]) the first part is a sum over the classes, and a maximum of K functions
is no richer than all of them together. Cutting the margin off changes nothing for a loss that is constant above θ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch

from flatscope.context import Context
from flatscope.errors import InputError, NotApplicable, refuse_unknown
from flatscope.measures.interactions import relu_chain
from flatscope.measures.margins import margin
from flatscope.network.stretch_rules import safe_log
from flatscope.registry import Value, bound, declarations
from flatscope.samples import as_rows, tensors_of_inputs

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
    invariant_under={"layer_scaling", "permutation", "output_scaling"},
    needs={"classes", "chain"},
    cost="sweep",
    on_folded=True,
)
def norm_capacity(ctx: Context, *, delta: float, norms: tuple[str, ...] = SHOWN, epsilon: float = 0.05) -> list[Value]:
    """Gap of the order of the root of capacity over samples, one row per norm.

    The capacities are those of the measures with form="capacity". They are printed for inputs of norm one; here the
    largest training input is put in, so that the value does not change when inputs are scaled up and the first layer
    down.

    Args:
        delta: not used: the statement hides it among the constants.
        norms: of l2_norm, l1_path_norm, l2_path_norm, spectral_norm and l1_inf_norm.
        epsilon: fraction of the training samples that may lie at or below the margin.
    """
    del delta
    known, rows = declarations(), []
    for name in (norms,) if isinstance(norms, str) else norms:
        refuse_unknown(name, INPUT_NORMS, "norm of norm_capacity")
        try:
            log_capacity = float(known[name].function(ctx, form="capacity", log=True, epsilon=epsilon).value)
            largest = ctx.cached(largest_inputs)[INPUT_NORMS[name]]
            log_gap = 0.5 * (log_capacity - math.log(ctx.problem.n_train)) + safe_log(largest)
            gap = math.exp(log_gap) if log_gap < 700 else math.inf
            rows.append(Value(gap, options={"norm": name}, reason=f"capacity e^{log_capacity:.4g}"))
        except NotApplicable as refusal:
            rows.append(Value(math.nan, exact=False, options={"norm": name}, reason=str(refusal)))
    return rows


def largest_inputs(ctx: Context) -> dict[str, float]:
    """Largest ℓ2 norm and largest absolute entry ("linf") of a training input."""
    largest = {"l2": 0.0, "linf": 0.0}
    for inputs, _ in ctx.batches():
        parts = tensors_of_inputs(inputs)
        if len(parts) != 1:
            raise NotApplicable("a network with one input", f"{len(parts)} inputs")
        rows = as_rows(parts[0].double())
        largest["l2"] = max(largest["l2"], float(rows.norm(dim=1).max()))
        largest["linf"] = max(largest["linf"], float(rows.abs().max()))
    return largest


STRUCTURE_SAMPLES = 100  # on which the network is compared with the chain of layers that the class is made of
_by_l1_norms = partial(
    bound, paper="zhang2017", invariant_under={"permutation"}, needs={"classes", "chain"}, on_folded=True
)
_CLASS = (
    "a chain of dense layers with ReLU between them (checked)",
    "y f(x) is the margin where there are more than two classes",
    "inputs no larger than the largest training input",
    "NOT CERTIFIED: the norms B_i are read off the trained weights, the theorem fixes them before",
    "samples drawn independently (cannot be checked)",
)


@dataclass(frozen=True)
class L1Class:
    """Networks whose units have incoming weights of ℓ1 norm at most B_i in layer i."""

    bounds: tuple[float, ...]  # B_1 … B_k
    dimension: int  # number of inputs
    largest: float = 1.0  # largest absolute entry of an input
    classes: int = 2  # 2 where the function is a difference of outputs; more where it is any one of as many

    @property
    def supremum(self) -> float:
        """No output is larger in absolute value."""
        return self.largest * math.prod(self.bounds)

    def rademacher(self, n: int) -> float:
        """Bound on the Rademacher complexity of n samples: ½ Π(2B_i) √(2 ln(2d) / n), half of (57).

        The paper prints ln d, which is zero for one input although the complexity is not.
        """
        if n < 1 or self.dimension < 1:
            raise InputError("at least one sample and one input", f"{n}, {self.dimension}", where="rademacher")
        factors = math.prod(2 * b for b in self.bounds)
        return 0.5 * self.largest * factors * math.sqrt(2 * math.log(2 * self.dimension) / n)

    def margin_complexity(self, n: int) -> float:
        """Bound on the complexity of y f(x), or of the margins of K > 2 classes: 2K times that of an output."""
        return (1 if self.classes == 2 else 2 * self.classes) * self.rademacher(n)


def l1_class(ctx: Context) -> L1Class:
    """The smallest class that contains the network's difference of outputs, or each of more than two outputs.

    Biases are weights from an input that is always one, which every hidden layer hands on: then no B_i is below one.
    """
    classes = ctx.problem.n_outputs
    if classes < 2:
        raise NotApplicable("at least two outputs", f"{classes}")
    chain = ctx.cached(relu_chain, samples=STRUCTURE_SAMPLES)
    biased = any(bool(bias.any()) for bias in chain.biases)
    weights, biases = list(chain.weights), list(chain.biases)
    if classes == 2:
        weights[-1], biases[-1] = weights[-1][1:] - weights[-1][:1], biases[-1][1:] - biases[-1][:1]
    norms = [float((w.abs().sum(1) + b.abs()).max()) for w, b in zip(weights, biases, strict=True)]
    largest = ctx.cached(largest_inputs)["linf"]
    if biased:
        norms = [max(b, 1.0) for b in norms[:-1]] + norms[-1:]
        largest = max(largest, 1.0)
    return L1Class(tuple(norms), chain.widths[0] + biased, largest, classes)


@_by_l1_norms(
    symbol=r"c\, x_{\max} \sqrt{2\log 2d}\,\tfrac{\prod_i 2B_i}{\sqrt n} + \sqrt{\tfrac{\log(1/\delta)}{2n}}",
    equation="Lemma 4, eq (57), with log 2d",
    assumptions=(
        "loss in [0, 1], 1-Lipschitz in y f(x) and constant where that is large, as the ramp loss is",
        *_CLASS,
    ),
)
def rademacher_l1(ctx: Context, *, delta: float) -> Value:
    """Gap of any network with these ℓ1 norms for a loss in [0, 1] that is 1-Lipschitz in the margin.

    (57) bounds the expected supremum; the second term makes it hold with probability 1 - delta.

    Args:
        delta: the bound holds with probability at least 1 - delta.
    """
    n, l1 = ctx.problem.n_train, ctx.cached(l1_class)
    value = 2 * l1.margin_complexity(n) + math.sqrt(math.log(1 / delta) / (2 * n))
    return Value(value, reason=f"B = {', '.join(f'{b:.3g}' for b in l1.bounds)}")


def margin_bound(fraction: float, complexity: float, gamma: float, supremum: float, n: int, delta: float) -> float:
    """The right-hand side of (60), with log₂ inside: fraction + 4R/γ + √(log log₂(4C/γ) / n) + √(log(1/δ) / 2n).

    With the printed natural logarithm the root does not exist for γ > 4C/e; with log₂ it does for γ ≤ 2C.
    """
    if not 0 < gamma <= 2 * supremum or n < 1:
        raise InputError("0 < gamma ≤ 2C and at least one sample", f"{gamma}, {supremum}, {n}", where="margin_bound")
    union = math.sqrt(math.log(math.log2(4 * supremum / gamma)) / n)
    return fraction + 4 / gamma * complexity + union + math.sqrt(math.log(1 / delta) / (2 * n))


@_by_l1_norms(
    symbol=r"\tfrac{\#\{y_if(x_i) < \gamma\}}{n} + \tfrac{4}{\gamma} \hat R + \sqrt{\tfrac{\log\log_2(4C/\gamma)}{n}}"
    r" + \sqrt{\tfrac{\log(1/\delta)}{2n}}",
    equation="Theorem 5, eq (60), with log₂",
    assumptions=("holds for all margins γ at once: the best is taken", *_CLASS),
)
def margin_l1(ctx: Context, *, delta: float) -> Value:
    """Expected error by the fraction of small margins and the ℓ1 norms of the weights, at the best margin.

    Args:
        delta: the bound holds with probability at least 1 - delta.
    """
    n, l1, margins = ctx.problem.n_train, ctx.cached(l1_class), ctx.scores().margins
    assert margins is not None  # class labels are needed, by declaration
    complexity, ordered = l1.margin_complexity(n), margins.sort().values
    delta /= 2  # summed over the margins of a geometric grid the failures come to π²/6 times what (60) says
    candidates = [*dict.fromkeys(ordered[ordered > 0].tolist()), 2 * l1.supremum]
    best, gamma = math.inf, math.nan
    for candidate in candidates:
        if 0 < candidate <= 2 * l1.supremum:
            below = int(torch.searchsorted(ordered, candidate)) / n  # strictly smaller
            value = margin_bound(below, complexity, candidate, l1.supremum, n, delta)
            best, gamma = min((best, gamma), (value, candidate))
    if math.isinf(best):
        raise NotApplicable("the network's outputs are all equal")
    return Value(best, reason=f"at γ = {gamma:.3g}; R = {complexity:.3g}, C = {l1.supremum:.3g}")


def local_margin_bound(
    fraction: float, complexity: float, gamma: float, supremum: float, n: int, delta: float, constant: float
) -> float:
    """The right-hand side of (24): 1.01 fraction + K((2 log³n / γ²) R² + 2 log(log(4b/γ)/δ) / n)."""
    if not 0 < gamma <= supremum or n < 1 or not constant > 0:
        raise InputError("0 < gamma ≤ b, samples, K > 0", f"{gamma}, {supremum}, {n}, {constant}", where="(24)")
    inner = 2 * math.log(n) ** 3 / gamma**2 * complexity**2
    return 1.01 * fraction + constant * (inner + 2 * math.log(math.log(4 * supremum / gamma) / delta) / n)


@_by_l1_norms(
    symbol=r"1.01\, I_{S,\gamma} + K\left(\tfrac{2\log^3 n}{\gamma^2} R_n^2"
    r" + \tfrac{2\log(\log(4b/\gamma)/\delta)}{n}\right)",
    equation="Theorem 3, eq (24)",
    assumptions=("NOT CERTIFIED: the constant K is not known; the value is for the K that is given", *_CLASS),
)
def margin_rademacher(ctx: Context, *, delta: float, constant: float = 1.0, epsilon: float = 0.05) -> Value:
    """Expected error by the fraction of small margins and the squared Rademacher complexity, for a given constant.

    Args:
        delta: the bound holds with probability at least 1 - delta.
        constant: K, which the theorem leaves open.
        epsilon: γ is the margin that this fraction of the samples reach at most.
    """
    n, l1, margins = ctx.problem.n_train, ctx.cached(l1_class), ctx.scores().margins
    assert margins is not None
    gamma = float(margin(ctx, epsilon=epsilon))
    if not gamma > 0:
        raise NotApplicable(f"a positive margin of all but {epsilon:g} of the samples", f"{gamma:.4g}")
    fraction, complexity = float((margins < gamma).double().mean()), l1.margin_complexity(n)
    supremum = l1.supremum if l1.classes == 2 else 2 * l1.supremum  # a margin is a difference of outputs
    value = local_margin_bound(fraction, complexity, gamma, supremum, n, delta, constant)
    return Value(value, reason=f"K = {constant:g}, γ = {gamma:.3g}, R = {complexity:.3g}")
