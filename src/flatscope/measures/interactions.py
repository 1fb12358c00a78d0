"""How the layers of a ReLU network act together: the conditions C1, C2 and C3 of Neyshabur et al. 2017, Section 4.

For one input the network is linear: f(x) = W_d D_{d-1} W_{d-1} … D_1 W_1 x with D_i the 0/1 pattern of the units that
are on. The conditions ask how the products of these matrices compare with their factors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.errors import InputError, NotApplicable, refuse_unless_whole
from flatscope.registry import Value, measure
from flatscope.samples import as_rows, tensors_of_inputs

Triples = Literal["all", "inner", "edge"]
Reading = Literal["condition", "figure"]
Units = Literal["rms", "raw"]
_condition = partial(
    measure,
    paper="neyshabur2017",
    invariant_under={"layer_scaling", "permutation", "output_scaling"},
    cost="long",
    passes={"forward": 1},
    on_folded=True,
)
_CHAIN = "needs a chain of dense layers with ReLU between them and nothing behind the last"


@dataclass(frozen=True)
class ReluChain:
    """A fully connected ReLU network written out, with its activation patterns on some training samples."""

    names: tuple[str, ...]  # of the layers
    weights: tuple[Tensor, ...]  # W_1 … W_d, float64
    biases: tuple[Tensor, ...]  # of each layer; zeros where it has none
    inputs: Tensor  # samples as vectors (n, h_0)
    signals: tuple[Tensor, ...]  # pre-activations of each layer (n, h_i), biases included; the last are the outputs
    complete: bool  # whether these are all the training samples

    @property
    def depth(self) -> int:
        """Number of weight matrices d."""
        return len(self.weights)

    @property
    def widths(self) -> tuple[int, ...]:
        """h_0 … h_d."""
        return (self.weights[0].shape[1], *(len(weight) for weight in self.weights))

    def pattern(self, level: int, sample: int) -> Tensor:
        """Which units of layer 1 … d are on: all of the last, which has no ReLU."""
        signal = self.signals[level - 1][sample]
        return signal > 0 if level < self.depth else torch.ones_like(signal, dtype=torch.bool)


def relu_chain(ctx: Context, *, samples: int) -> ReluChain:
    """The network as a chain of dense layers; refused where running that chain does not give the network's outputs."""
    layers = ctx.network.layers
    if not ctx.network.chain:
        raise NotApplicable(f"{_CHAIN}; this one branches")
    other = next((layer for layer in layers if layer.kind != "dense" or len(layer.input_shape) != 1), None)
    if not layers or other is not None:
        raise NotApplicable(f"{_CHAIN}; {'it has no layer' if other is None else f'{other.name} is not dense'}")
    weights = tuple(ctx.params[layer.weight].detach().double() for layer in layers)
    biases = tuple(
        torch.zeros_like(weight[:, 0]) if layer.bias is None else ctx.params[layer.bias].detach().double()
        for layer, weight in zip(layers, weights, strict=True)
    )
    inputs, outputs = _chosen_samples(ctx, samples)
    signals: list[Tensor] = []
    for weight, bias in zip(weights, biases, strict=True):
        below = signals[-1].clamp(min=0) if signals else inputs
        if below.shape[1] != weight.shape[1]:
            raise NotApplicable(_CHAIN)
        signals.append(below @ weight.T + bias)
    rounding = 1e5 * torch.finfo(ctx.problem.dtype).eps * max(1.0, float(outputs.abs().max()))
    if outputs.shape != signals[-1].shape or not bool((outputs - signals[-1]).abs().max() <= rounding):
        raise NotApplicable(f"{_CHAIN}; other operations change the outputs")
    names = tuple(layer.name for layer in layers)
    return ReluChain(names, weights, biases, inputs, tuple(signals), len(inputs) == ctx.problem.n_train)


def _chosen_samples(ctx: Context, samples: int) -> tuple[Tensor, Tensor]:
    """Inputs as vectors, and outputs, of that many training samples at random (all where there are no more)."""
    refuse_unless_whole(samples, "samples")
    n, start, batches = ctx.problem.n_train, 0, []
    order = torch.randperm(n, generator=ctx.generator("interactions"))[:samples]
    chosen = torch.zeros(n, dtype=torch.bool).index_fill(0, order, True)
    with torch.no_grad():
        for inputs, targets in ctx.batches():
            mine = chosen[start : start + len(targets)].nonzero()[:, 0]
            start += len(targets)
            if not len(mine):
                continue
            outputs = ctx.forward(inputs)
            ctx.charge_passes("forward", len(targets))
            if len(tensors_of_inputs(inputs)) != 1:
                raise NotApplicable(f"{_CHAIN}; this one has several inputs")
            vectors = as_rows(tensors_of_inputs(inputs)[0])
            batches.append([t[mine.to(t.device)].double() for t in (vectors, as_rows(outputs))])
    given, out = (torch.cat(column) for column in zip(*batches, strict=True))
    return given, out


@_condition(
    symbol=r"\mu = \min \frac{\sqrt{h_c}\,\|\prod_{i=a}^{b} D_iW_i\|_F}"
    r"{\|\prod_{i=c+1}^{b} D_iW_i\|_F \|\prod_{i=a}^{c} D_iW_i\|_F}",
    equation="Section 4, condition C1",
    direction="higher",
    conventions="a ≤ c < b with W_0 = x and no ReLU behind the last layer; patterns of the network as it runs, biases "
    "in no product; products that are zero are counted in the remark and not in the minimum",
)
def condition_c1_mu(ctx: Context, *, samples: int = 100, triples: Triples = "all") -> Value:
    """Smallest ratio of the norm of a product of layers to the product of the norms of its two parts.

    Over all samples and all triples a ≤ c < b; 1/μ is what the paper calls a condition number.

    Args:
        samples: training samples to look at, at random; all of them where there are no more.
        triples: "all"; "inner" for a < c < b - 1; "edge" for c = a or c = b - 1 (the paper's Figure 6).
    """
    chain = ctx.cached(relu_chain, samples=samples)
    values = ctx.cached(interaction_ratios, samples=samples)  # (samples, triples)
    kept = [
        index
        for index, (a, c, b) in enumerate(all_triples(chain.depth))
        if triples == "all" or (triples == "edge") == (c in (a, b - 1))
    ]
    if not kept:
        raise NotApplicable(f"a network of {chain.depth} layers has no {triples} triples")
    values = values[:, kept]
    alive = values[values > 0]  # not those that are zero, nor NaN where a factor is zero as well
    dead = int((values == 0).sum())
    if not len(alive):
        raise NotApplicable("every product of layers is zero: no unit is on")
    remark = f"1/μ: median {float((1 / alive).median()):.3g}, largest {float(1 / alive.min()):.3g}"
    remark += f"; {dead} of {values.numel()} products are zero: there 1/μ = ∞" if dead else ""
    return Value(float(alive.min()), exact=chain.complete, reason=remark)


def all_triples(depth: int) -> list[tuple[int, int, int]]:
    """All (a, c, b) with 0 ≤ a ≤ c < b ≤ d."""
    return [(a, c, b) for a in range(depth + 1) for c in range(a, depth) for b in range(c + 1, depth + 1)]


def interaction_ratios(ctx: Context, *, samples: int) -> Tensor:
    """The ratio of C1 for each sample and triple: (samples, triples), in the order of `all_triples`."""
    chain = ctx.cached(relu_chain, samples=samples)
    widths, triples = chain.widths, all_triples(chain.depth)
    rows = []
    for sample in range(len(chain.inputs)):
        norms = dict(product_norms(chain, sample))
        ratios = []
        for a, c, b in triples:
            parts = norms[c + 1, b] * norms[a, c]
            ratios.append(math.sqrt(widths[c]) * norms[a, b] / parts if parts > 0 else math.nan)
        rows.append(ratios)
    return torch.tensor(rows, dtype=torch.float64)


def product_norms(chain: ReluChain, sample: int) -> Iterator[tuple[tuple[int, int], float]]:
    """((a, b), ‖D_bW_b … D_aW_a‖_F) for all 0 ≤ a ≤ b ≤ d, with the sample itself as W_0.

    Products grow by one factor at a time. Units that are off are cut out, which leaves about a quarter of the work.
    """
    x = chain.inputs[sample]
    active = [chain.pattern(level, sample).nonzero()[:, 0] for level in range(1, chain.depth + 1)]
    # Rows of the units that are on; after the first, columns of those that are on below.
    rows = [weight[on] for weight, on in zip(chain.weights, active, strict=True)]
    inner = [rows[0], *(weight[:, on] for weight, on in zip(rows[1:], active, strict=False))]
    yield (0, 0), float(x.norm())
    for a in range(chain.depth + 1):
        product = x[:, None] if a == 0 else rows[a - 1]
        if a:
            yield (a, a), float(product.norm())
        for b in range(a + 1, chain.depth + 1):
            product = inner[b - 1] @ product
            yield (a, b), float(product.norm())


@_condition(
    symbol=r"C_2 = \sup_{\delta \ge \delta_0} \tfrac1\delta \tfrac{1}{h_k} \#\{i: |z_{k,i}| \le \delta\}",
    equation="Section 4, condition C2",
    direction="lower",
    conventions="absolute values, which the paper leaves out; hidden layers; pre-activations with their biases; δ in "
    "units of their root mean square; without a floor the smallest one decides",
)
def condition_c2(ctx: Context, *, floor: float = 0.1, units: Units = "rms", samples: int = 100) -> dict[str, Value]:
    """Largest fraction of units within δ of switching, relative to δ; worst sample, and worst layer.

    Args:
        floor: smallest δ, in units of the root mean square of the layer's pre-activations.
        units: "rms": δ in the same units; "raw": δ as it is, which depends on the scale of weights and inputs.
        samples: training samples to look at, at random; all of them where there are no more.
    """
    if not 0 <= floor < math.inf:
        raise InputError("a floor of at least 0", str(floor), where="condition_c2")
    chain = ctx.cached(relu_chain, samples=samples)
    if chain.depth < 2:
        raise NotApplicable("needs a hidden layer")
    values = {}
    for name, signal in zip(chain.names[:-1], chain.signals[:-1], strict=True):
        scale = signal.square().mean(1).sqrt()  # (n,)
        alive = scale > 0
        relative = signal[alive].abs() / scale[alive, None]
        value = largest_slope_of_distribution(relative, floor) / (scale[alive] if units == "raw" else 1.0)
        values[name] = float(value.max()) if len(value) else math.inf
    return _worst_and_layers(values, chain.complete)


def largest_slope_of_distribution(sizes: Tensor, floor: float) -> Tensor:
    """Supremum over δ ≥ floor of (fraction of sizes ≤ δ) / δ, per row (n, h) -> (n,): at a jump or at the floor."""
    ordered, h = sizes.sort(dim=1).values, sizes.shape[1]
    fractions = torch.arange(1, h + 1, dtype=sizes.dtype, device=sizes.device) / h
    best: Tensor = (fractions / ordered.clamp(min=floor)).amax(1)
    return best


@_condition(
    symbol=r"C_3 = \max_i \frac{\sqrt{h_i}\,\|W_i\|_{2,\infty}}{\|D_iW_i\|_F}",
    equation="Section 4, condition C3",
    direction="lower",
    conventions="all layers, no unit of the last is off; samples with every unit of a layer off are counted in the "
    "remark; Figure 5 divides by the mean row norm instead, without D",
)
def condition_c3(ctx: Context, *, reading: Reading = "condition", samples: int = 100) -> dict[str, Value]:
    """Ratio of the largest row of a layer's weight to the others; of the worst sample, and of the worst layer.

    Args:
        reading: "condition": the largest row norm over ‖D_iW_i‖_F / √h_i; "figure": over the mean row norm.
        samples: training samples to look at, at random; all of them where there are no more.
    """
    chain = ctx.cached(relu_chain, samples=samples)
    values, dead = {}, 0
    for level, (name, weight) in enumerate(zip(chain.names, chain.weights, strict=True), start=1):
        squares = weight.square().sum(1)  # (h,)
        if reading == "figure":
            smallest = float(squares.sqrt().mean())
        else:
            on = chain.signals[level - 1] > 0 if level < chain.depth else torch.ones_like(chain.signals[-1]) > 0
            totals = on.double() @ squares  # (n,)
            dead += int((totals == 0).sum())
            smallest = math.sqrt(float(totals[totals > 0].min()) / len(squares)) if bool((totals > 0).any()) else 0.0
        largest = math.sqrt(float(squares.max()))
        values[name] = largest / smallest if smallest > 0 else math.inf
    remark = f"{dead} times a sample has every unit of a layer off: there C3 = ∞" if dead else ""
    return _worst_and_layers(values, reading == "figure" or chain.complete, remark)


def _worst_and_layers(by_layer: dict[str, float], known: bool, remark: str = "") -> dict[str, Value]:
    everything = {"": max(by_layer.values()), **by_layer}
    return {name: Value(value, exact=known, reason=remark) for name, value in everything.items()}
