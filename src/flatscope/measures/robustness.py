"""Robustness to changes of the input: errors under noise, and how steeply the outputs depend on the input."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatscope.context import Context, sample_margins
from flatscope.curvature.random_signs import Signs
from flatscope.errors import NotApplicable, refuse_unless_whole
from flatscope.limits import STANDARD
from flatscope.network.layer_uses import LayerRecorder, LayerUse
from flatscope.network.singular_values import matrix_norm
from flatscope.perturbation import checked_levels
from flatscope.registry import FUNCTION_SYMMETRIES, Value, measure
from flatscope.samples import Inputs, as_rows
from flatscope.sampling import TIME_IS_UP, Sampler, refuse_out_of_time, sample_until, time_is_over
from flatscope.significance import wilson

GAMMAS = (0, 0.05, 0.1, 0.2, 0.5, 1)
PAST = "the input reaches the output past the first layer as well"
IDENTITY = 1e-3  # agreement, in single precision, of the input gradient with what the first layer's gives


@measure(
    symbol=r"\tilde E(\gamma) = \tfrac{1}{n} \sum_i \mathbf{1}[f(x_i + \gamma \epsilon_i) \neq y_i],"
    r"\ \epsilon_i \sim N(0, I)",
    paper="zhang2017",
    equation="Section 9.5, eq (44), Figure 20",
    direction="lower",
    invariant_under={*FUNCTION_SYMMETRIES, "output_scaling"},
    needs={"classes"},
    cost="sweep",
    typical={"forward": 15},
    passes={"forward": 51},
    exact=False,
    function_only=True,
    conventions="training samples; noise in the units of the network's input; the mean over `draws` of independent "
    "noise, the same for every gamma; low and high: Wilson's interval of 95 % for all draws; a tie is an error",
)
def perturbation_robustness(ctx: Context, *, gammas: Any = GAMMAS, draws: int = 10) -> list[Value]:
    """Training error when every input gets Gaussian noise of standard deviation gamma.

    Args:
        gammas: noise levels, a row each; or one number. 0 gives the training error itself.
        draws: the most noise vectors of each sample and level, at least 2; fewer for levels that have reached the
            precision that is asked for after 2, 4 or 8.
    """
    levels = checked_levels(gammas, "gammas", zero=True)
    refuse_unless_whole(draws, "draws", least=2)
    wrong = ctx.cached(errors_until_precise, gammas=tuple(g for g in levels if g), draws=draws)
    rows = list[Value]()
    for gamma in levels:
        if gamma == 0:
            rows.append(Value(ctx.scores().error, exact=True, options={"gamma": 0.0}))
            continue
        errors = wrong[gamma]
        low, high = wilson(round(errors.rate * errors.draws * errors.samples), errors.draws * errors.samples)
        remark = f"{errors.draws} draws" if errors.draws == draws else f"{errors.draws} of {draws} draws"
        value = Value(errors.rate, stderr=errors.stderr, low=low, high=high, options={"gamma": gamma}, reason=remark)
        rows.append(value)
    return rows


UNDECIDED = 32  # samples whose draws differ: from fewer of them the error of a rate is not known


@dataclass(frozen=True)
class ErrorRate:
    """Errors of all samples under noise."""

    rate: float  # the mean over samples
    stderr: float  # its standard error
    draws: int  # of each sample
    samples: int  # how many there are
    undecided: int  # those that noise makes wrong in some draws and not in others: the error is estimated from them

    @classmethod
    def of(cls, rates: Tensor, draws: int) -> ErrorRate:
        """From the rate of every sample (n,). Samples err independently: the variances of their means add up."""
        stderr = math.sqrt(float((rates * (1 - rates)).sum()) / (draws - 1)) / len(rates)
        return cls(float(rates.mean()), stderr, draws, len(rates), int(((rates > 0) & (rates < 1)).sum()))

    def relative_error(self) -> float:
        """Relative standard error; infinite where too few samples tell it, or nothing errs."""
        known = self.undecided >= UNDECIDED and self.rate > 0
        return self.stderr / self.rate if known else math.inf


def errors_until_precise(ctx: Context, gammas: tuple[float, ...], draws: int) -> dict[float, ErrorRate]:
    """Error rate at each noise level, after 2, 4, 8, … draws, or all: as many as its precision takes."""
    return sample_until(NoiseDraws(ctx, gammas, draws), ctx.effort.precision) if gammas else {}


class NoiseDraws(Sampler[dict[float, ErrorRate]]):
    """Errors under noise; a level that is precise takes no more draws.

    Args:
        ctx: the network.
        gammas: the levels.
        draws: the most of them.
    """

    def __init__(self, ctx: Context, gammas: tuple[float, ...], draws: int) -> None:
        self._ctx, self._imprecise, self._draws = ctx, gammas, draws
        self._total: dict[float, Tensor] = dict.fromkeys(gammas, torch.zeros(()))
        self._found: dict[float, ErrorRate] = {}
        self.first_look = min(2, draws)

    @property
    def most(self) -> float:
        """As many as were allowed."""
        return self._draws

    def draw_until(self, number: int) -> str:
        """Measure the levels that are not precise yet under further draws, the same for all."""
        until = min(number, self._draws)
        rates = errors_under_noise(self._ctx, self._imprecise, self._draws, self.taken, until)
        for gamma, each in zip(self._imprecise, rates, strict=True):
            self._total[gamma] = self._total[gamma] + each * (until - self.taken)
            self._found[gamma] = ErrorRate.of(self._total[gamma] / until, until)
        self.taken = until
        return TIME_IS_UP if time_is_over(self._ctx) else ""

    def relative_errors(self, precision: float) -> list[float]:
        """Relative standard errors of the levels that are not precise yet."""
        errors = {gamma: self._found[gamma].relative_error() for gamma in self._imprecise}
        self._imprecise = tuple(gamma for gamma, error in errors.items() if not error <= precision)
        return list(errors.values())

    def result(self, ended: str) -> dict[float, ErrorRate]:
        """The rate at each level."""
        del ended
        return self._found


def errors_under_noise(
    ctx: Context, gammas: tuple[float, ...], draws: int, begin: int = 0, end: int | None = None
) -> Tensor:
    """Fraction of draws `begin` to `end` in which each sample is misclassified: (gammas, n), in the order of the data.

    A draw is the same whichever of them are looked at.
    """
    used = range(draws)[begin:end]
    shares: list[Tensor] = [torch.zeros(len(gammas), 0, dtype=torch.float64)]
    with torch.no_grad():
        dimension = max(1, _real_entries(ctx.problem.example(1)).numel())
        size = max(1, min(ctx.problem.batch_size, ctx.effort.limits.noise_numbers // (draws * dimension)))
        for inputs, targets in ctx.share(size=size) if gammas else ():
            x = _real_entries(inputs)
            noise = _noise_of_samples(ctx, x, draws, used.stop)[begin:]  # (used, n, ...)
            wrong = torch.zeros(len(gammas), len(targets), dtype=torch.float64)
            for place, gamma in enumerate(gammas):
                for one in noise:
                    margins = sample_margins(ctx.forward(x + gamma * one), targets)
                    wrong[place] += (~(margins > 0)).double().cpu()
            shares.append(wrong / len(used))
    ctx.charge_passes("forward", len(used) * len(gammas) * ctx.problem.n_train)
    return ctx.problem.ranks.joined(torch.cat(shares, dim=1).T).T


def _noise_of_samples(ctx: Context, x: Tensor, draws: int, first: int) -> Tensor:
    """Standard normal noise that belongs to the samples themselves, wherever in the data they stand: (first, n, ...).

    Seeded by the content of each sample: another order, other batches or another device change nothing. Of all draws
    only the first ones are made. torch makes normal numbers in blocks of 16, the last one apart if it is not whole, so
    that a beginning of whole blocks is the same however many follow.
    """
    size = x[0].numel()
    made = max(16, -(-first * size // 16) * 16)
    if made > draws * size - 16:
        made = draws * size
    stream = ctx.generator("perturbation_robustness").initial_seed().to_bytes(8, "big")
    generator, rows = torch.Generator(), []
    for sample in x.detach().float().cpu().contiguous():
        digest = hashlib.blake2b(sample.numpy().tobytes(), key=stream, digest_size=8).digest()
        generator.manual_seed(int.from_bytes(digest, "big") >> 1)
        rows.append(torch.randn(made, generator=generator)[: first * size].reshape(first, *sample.shape))
    return torch.stack(rows, dim=1).to(x)


@measure(
    symbol=r"\|\partial f(x_i) / \partial x\|_F \le \|W_1\|_2 \|\partial f / \partial W_1\|_F / \|x_i\|",
    paper="zhang2017",
    equation="Section 5.4",
    per="sample",
    direction="lower",
    invariant_under=FUNCTION_SYMMETRIES,
    cost="sweep",
    typical={"forward": 1, "column": 0.5},
    conventions="Jacobian of all outputs, Frobenius norm, training samples in the order of the data; of more than "
    f"{STANDARD.few_outputs} outputs from {STANDARD.output_draws} random vectors for each sample, exact with "
    "precision=0; high: bound by the gradient of a dense first layer, which holds for every such network, whatever its "
    "activation patterns",
)
def input_sensitivity(ctx: Context) -> Value:
    """Norm of the outputs' Jacobian at each input, and its bound by the Jacobian at the first layer's weight.

    With G = ∂f/∂W₁ = s xᵀ for a first layer that is dense on the input itself, ∂f/∂x = W₁ᵀ G x / ‖x‖² exactly. A
    convolution sums s uᵀ over its patches, and that sum can vanish where ∂f/∂x does not: no such bound there.
    """
    if ctx.effort.precision > 0 and ctx.problem.n_outputs > ctx.effort.limits.few_outputs:
        return _sampled_input_sensitivity(ctx, ctx.effort.limits.output_draws)
    norms, bounds = list[Tensor](), list[Tensor]()
    layer = _FirstLayer(ctx)
    size: float | None = None
    for inputs, _ in ctx.share():
        x = _real_entries(inputs).detach().requires_grad_()
        squares = layer.squared_gradients(x)
        norms.append(squares[0].sqrt())
        if not layer.refusal:
            size = matrix_norm(layer.weight, partial(refuse_out_of_time, ctx)) if size is None else size
            bounds.append(size * squares[1].sqrt())  # ‖s xᵀ‖_F / ‖x‖ = ‖s‖
    n, ranks = ctx.problem.n_train, ctx.problem.ranks
    ctx.charge_passes("forward", n)
    ctx.charge_passes("backward", ctx.problem.n_outputs * n)
    value = ranks.joined(torch.cat(norms))
    if ranks.anywhere(bool(layer.refusal)):
        return Value(value, reason=f"no bound: {layer.refusal or PAST}")
    return Value(value, high=ranks.joined(torch.cat(bounds)))


class _FirstLayer:
    """The first layer of a network, by whose gradient that of the input is bounded; or why it is not."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._params = {name: value.detach() for name, value in ctx.params.items()}
        self.refusal = _why_no_bound(ctx, ctx.structure.program.layer_uses())  # empty where it may be
        self.weight = torch.zeros(0)

    def squared_gradients(self, x: Tensor) -> Tensor:
        """Sums over all outputs of squared gradients at the inputs and, where there is a bound, behind the layer."""
        recorder = LayerRecorder(self._params)
        with torch.enable_grad():
            outputs = as_rows(self._ctx.forward(x, self._params, [] if self.refusal else [recorder.follow]))
        self.refusal = self.refusal or _why_no_bound(self._ctx, recorder.uses) or self._changed_input(recorder, x)
        reached: list[Any] = [x]
        if not self.refusal and (edge := recorder.of_layers[0].edge) is not None:
            self.weight, reached = self._params[recorder.of_layers[0].weight], [x, edge]
        squares = torch.zeros(len(reached), len(x), dtype=torch.float64)
        for output in outputs.unbind(1):
            gradients = torch.autograd.grad(output.sum(), reached, retain_graph=True, materialize_grads=True)
            squares += torch.stack([as_rows(g.double()).square().sum(1).cpu() for g in gradients])
            if len(gradients) == 2:
                self.refusal = self.refusal or _broken_identity(self.weight, *gradients)
        return squares

    def _changed_input(self, recorder: LayerRecorder, x: Tensor) -> str:
        """Why there is no bound if the layer is given anything but the inputs; empty otherwise."""
        first = recorder.of_layers[0]
        if first.input.shape == as_rows(x).shape and torch.equal(first.input, as_rows(x)):
            return ""
        return f"the input reaches the first layer, {_name_of(self._ctx, first.weight)}, changed"


def _sampled_input_sensitivity(ctx: Context, draws: int) -> Value:
    """The same from random vectors for each sample, without a bound."""
    signs, seen = Signs(ctx.seed, "outputs of input_sensitivity"), ctx.problem.ranks.share(ctx.problem.n_train)[0]
    params = {name: value.detach() for name, value in ctx.params.items()}
    norms, errors = list[Tensor](), list[Tensor]()
    for inputs, targets in ctx.share():
        x = _real_entries(inputs).detach().requires_grad_()
        with torch.enable_grad():
            outputs = as_rows(ctx.forward(x, params))  # (n, C)
        numbers = torch.arange(seen, seen + len(targets), device=outputs.device)
        drawn = signs.draw(numbers, range(draws), outputs.shape[1], outputs.dtype)
        lengths = torch.stack([_squared_gradients_along(outputs, x, z) for z in drawn])  # (draws, n)
        norms.append(lengths.mean(0).sqrt())
        errors.append(lengths.std(0) / (2 * draws**0.5 * norms[-1].clamp_min(torch.finfo(torch.float64).tiny)))
        seen += len(targets)
    n, ranks = ctx.problem.n_train, ctx.problem.ranks
    ctx.charge_passes("forward", n)
    ctx.charge_passes("backward", draws * n)
    reason = f"sampled, {draws} draws of {ctx.problem.n_outputs} outputs"
    return Value(ranks.joined(torch.cat(norms)), ranks.joined(torch.cat(errors)), exact=False, reason=reason)


def _squared_gradients_along(outputs: Tensor, x: Tensor, vectors: Tensor) -> Tensor:
    """‖Jᵀz‖² of every sample: of signs z its mean is the square of J's Frobenius norm."""
    (gradient,) = torch.autograd.grad(outputs, x, vectors, retain_graph=True, materialize_grads=True)
    return as_rows(gradient.double()).square().sum(1).cpu()


def _why_no_bound(ctx: Context, uses: Sequence[LayerUse[Any]]) -> str:
    """Why the gradient of the first layer says nothing of the input's; empty where it may."""
    uses = [use for use in uses if use.kind != "batchnorm"]
    if not uses:
        return "no layer was found"
    first, name = uses[0], _name_of(ctx, uses[0].weight)
    if first.kind != "dense" or first.opaque:
        return f"the first layer, {name}, is not dense"
    if len(first.input.shape) != 2:
        return f"the first layer, {name}, is applied at many positions"
    if sum(use.weight == first.weight for use in uses) > 1:
        return f"the weight of the first layer, {name}, is used more than once"
    return ""


def _name_of(ctx: Context, weight: str) -> str:
    """Name of the layer with a weight."""
    return next((layer.name for layer in ctx.network if layer.weight == weight), weight)


def _broken_identity(weight: Tensor, by_input: Tensor, by_layer: Tensor) -> str:
    """∂f/∂x = W₁ᵀ s, unless the input has another way to the output."""
    through = as_rows(by_layer) @ weight
    far = float((through - as_rows(by_input)).norm()) > IDENTITY * float(through.norm() + by_input.norm())
    return PAST if far else ""


def _real_entries(inputs: Inputs) -> Tensor:
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        raise NotApplicable("needs one input of real numbers")
    return inputs
