"""Each measure of the default set from its definition, for any network: {(layer, unit or sample): value}.

A function takes a `Subject` and gives its values, or None where this file has no independent computation. Layers and
how their weights are read are given by the subject; the table's layer names are checked against the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from own_double import OwnDouble, hessian_of
from torch import Tensor, nn

from flatscope.network.normal_form import normal_form
from flatscope.network.tracing import trace
from flatscope.symmetries.basis_paths import BasisPaths, PathCoordinates
from flatscope.symmetries.folding import fold_batchnorm

Values = dict[tuple[str, int], float]
FIRST = (nn.modules.conv._ConvTransposeNd, nn.Embedding)  # modules whose weight has its inputs in front


@dataclass
class Reading:
    """Where the entries of a weight lie: one row per output with its incoming weights; one set per input."""

    rows: Tensor  # (outputs, incoming), places in the flat weight
    columns: list[Tensor]  # for each input feature or channel the places of its outgoing weights
    outs: list[Tensor] = field(default_factory=list)


def reading(weight: Tensor, input_first: bool = False, groups: int = 1) -> Reading:
    """By (out, in / groups, taps …), or (in, out / groups, taps …) where inputs come first."""
    place = torch.arange(weight.numel()).reshape(weight.shape[0], weight.shape[1], -1)
    blocks = place.reshape(groups, -1, *place.shape[1:])  # (groups, first, second, taps)
    if input_first:
        rows = blocks.transpose(1, 2).flatten(0, 1).flatten(1)
        return Reading(rows, [one.flatten() for one in place])
    columns = [blocks[g, :, j].flatten() for g in range(groups) for j in range(place.shape[1])]
    return Reading(place.flatten(1), columns)


class HeldPaths(PathCoordinates):
    """Paths of the trainable weights alone, beside frozen ones."""

    def values(self) -> Tensor:
        log, sign = self.log_values()
        return sign * log.exp()


class Subject:
    """A network with all that its definition-by-definition computation needs.

    Args:
        own: the network in double precision.
        layers: {layer's name in the table: name of its parameter}.
        acting: the same of all layers, those that are frozen too.
        input_first: patterns of parameters whose inputs are in front, or with a minus before them are not, whatever
            their module says.
        initial: weights before training, if there are any.
        groups: for weights (groups, outputs, inputs) of products side by side how many there are.
    """

    def __init__(
        self,
        own: OwnDouble,
        layers: dict[str, str],
        acting: dict[str, str] | None = None,
        input_first: tuple[str, ...] = (),
        initial: dict[str, Tensor] | None = None,
        groups: Mapping[str, int] | None = None,
    ) -> None:
        self.groups = groups or {}
        self.own, self.layers, self.first, self.initial = own, layers, input_first, initial
        self.acting = layers if acting is None else acting
        self.matrices = len(self.acting) - sum(
            name in own.everything and own.everything[name].ndim < 2 for name in self.acting.values()
        )

    @cached_property
    def folded(self) -> Subject:
        """The same function without BatchNorm."""
        if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self.own.model.modules()):
            return self
        own = self.own
        model = fold_batchnorm(own.model, own.inputs)
        other = OwnDouble(model, own.inputs, own.targets, own.loss, own.dtype)
        torch.testing.assert_close(other.outputs(), own.outputs(), rtol=1e-9, atol=1e-9)
        kept = {layer: name for layer, name in self.acting.items() if name in other.everything}
        return Subject(other, self.layers, kept, self.first, groups=self.groups)

    @cached_property
    def in_paths(self) -> tuple[BasisPaths | HeldPaths, OwnDouble]:
        """Coordinates of path space, and the network with the weights that they set."""
        own = self.folded.own
        if own.constants:
            model = normal_form(own.model, [own.inputs])  # weights that are computed stand there as parameters
            held = [name for name, value in model.named_parameters() if not value.requires_grad]
            params = {name: value.detach() for name, value in model.named_parameters()}
            held_paths = HeldPaths(trace(model, own.inputs, frozen=held), params, held=held)
            return held_paths, OwnDouble(model, own.inputs, own.targets, own.loss)
        paths = BasisPaths(own.model, own.inputs)
        return paths, OwnDouble(paths.model, own.inputs, own.targets, own.loss, own.dtype)

    def reading(self, name: str) -> Reading:
        if name in self.groups:
            return reading(self.own.everything[name].flatten(0, -2), groups=self.groups[name])
        owner, _, kind = name.rpartition(".")
        modules = dict(self.own.model.named_modules())
        module = modules.get(owner)
        first = name in self.first or (kind == "weight" and isinstance(module, FIRST) and f"-{name}" not in self.first)
        convolution = kind == "weight" and isinstance(module, nn.modules.conv._ConvNd)
        return reading(self.own.everything[name], first, module.groups if convolution else 1)

    def rows(self, name: str) -> Tensor:
        return self.own.everything[name].reshape(-1)[self.reading(name).rows]

    def norm2(self, name: str) -> float:
        return float(self.own.everything[name].square().sum())

    @cached_property
    def margins(self) -> Tensor:
        out, y = self.own.outputs().detach(), self.own.targets
        if out.ndim == 1 or out.shape[1] == 1:  # one logit: against 0, twice its lead
            return out.reshape(-1) * (2 * y.reshape(-1).to(out.dtype) - 1)
        others = out.scatter(1, y[:, None], -math.inf).amax(1)
        return out.gather(1, y[:, None]).squeeze(1) - others

    @property
    def margin(self) -> float:
        k = max(1, math.ceil(round(0.05 * self.own.n, 9)))
        return float(self.margins.sort().values[k - 1])


MEASURES: dict[str, Callable[[Subject], Values | None]] = {}


def values(function: Callable[[Subject], Any]) -> Callable[[Subject], Any]:
    """Register a measure; a float is the network's, a dictionary has layers, tensors have units or samples."""

    def spread(subject: Subject) -> Values | None:
        found = function(subject)
        if found is None:
            return None
        made: Values = {}
        for layer, value in (found if isinstance(found, dict) else {"": found}).items():
            if isinstance(value, Tensor) and value.ndim == 1:
                made |= {(layer, i): float(one) for i, one in enumerate(value)}
            else:
                made[layer, -1] = float(value)
        return made

    MEASURES[function.__name__] = spread
    return function


@values
def gradient_norm(s: Subject) -> float:
    return float(s.own.gradient.norm())


@values
def hessian_trace(s: Subject) -> float:
    return float(s.own.hessian.trace())


@values
def hessian_max_eigenvalue(s: Subject) -> float:
    return float(torch.linalg.eigvalsh(s.own.hessian)[-1])


@values
def hessian_min_eigenvalue(s: Subject) -> float:
    return float(torch.linalg.eigvalsh(s.own.hessian)[0])


@values
def layer_trace(s: Subject) -> dict[str, float]:
    return {layer: float(s.own.block(name).trace()) for layer, name in s.layers.items()}


@values
def layer_max_eigenvalue(s: Subject) -> dict[str, float]:
    return {layer: float(torch.linalg.eigvalsh(s.own.block(name))[-1]) for layer, name in s.layers.items()}


@values
def kappa(s: Subject) -> dict[str, float]:
    return {layer: s.norm2(s.layers[layer]) * value for layer, value in layer_max_eigenvalue(s).items()}


@values
def kappa_trace(s: Subject) -> dict[str, float]:
    return {layer: s.norm2(s.layers[layer]) * value for layer, value in layer_trace(s).items()}


@values
def rho_unit(s: Subject) -> dict[str, Tensor]:
    made = {}
    for layer, name in s.layers.items():
        w, block = s.own.params[name].reshape(-1), s.own.block(name)
        made[layer] = torch.stack([w[c] @ block[c][:, c] @ w[c] for c in s.reading(name).columns])
    return made


@values
def rho(s: Subject) -> dict[str, float]:
    return {layer: float(units.max()) for layer, units in rho_unit(s).items()}


@values
def rho_layer_sum(s: Subject) -> dict[str, float]:
    return {layer: float(units.sum()) for layer, units in rho_unit(s).items()}


@values
def relative_flatness(s: Subject) -> dict[str, float]:
    made = {}
    for layer, name in s.layers.items():
        rows, block = s.reading(name).rows, s.own.block(name)
        inner = s.rows(name) @ s.rows(name).T
        traces = sum(block[rows[:, q]][:, rows[:, q]] for q in range(rows.shape[1]))
        made[layer] = float((inner * traces).sum())
    return made


def _overall(of: Callable[[Subject], dict[str, float]], how: Callable[[Any], float], name: str) -> None:
    def network(s: Subject) -> float:
        return how(of(s).values())

    network.__name__ = name
    values(network)


for _of, _how, _name in (
    (kappa, max, "kappa_max"),
    (kappa, sum, "kappa_sum"),
    (kappa_trace, max, "kappa_trace_max"),
    (kappa_trace, sum, "kappa_trace_sum"),
    (rho, max, "rho_max"),
    (rho_layer_sum, sum, "rho_sum"),
):
    _overall(_of, _how, _name)


@values
def fisher_rao_norm(s: Subject) -> float:
    return math.sqrt(float((s.own.gradients @ s.own.w).square().mean()))


@values
def gradient_noise(s: Subject) -> float:
    rows = s.own.gradients
    return float((rows - rows.mean(0)).square().sum(1).mean())


@values
def gradient_noise_scale(s: Subject) -> float:
    return gradient_noise(s) / float(s.own.gradients.mean(0).square().sum())


@values
def batch_sharpness(s: Subject) -> float:
    w, ratios = s.own.w.clone().requires_grad_(), []
    for one in s.own.losses(w):
        slope = torch.autograd.grad(one, w, create_graph=True)[0]
        g = slope.detach()
        ratios.append(float(g @ torch.autograd.grad(slope, w, g, retain_graph=True)[0] / (g @ g)))
    return sum(ratios) / len(ratios)


@values
def m_sharpness(s: Subject) -> float:
    own = s.folded.own
    up = own.w + 0.05 * own.gradient / own.gradient.norm()
    with torch.no_grad():
        return max(0.0, float(own.mean_loss(up) - own.mean_loss(own.w)))


@values
def pac_bayes_kl(s: Subject) -> Tensor:
    w = s.folded.own.w
    return torch.stack([(w / (a * (10 * w.abs() + 1))).square().sum() / 2 for a in (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)])


@values
def psi_trace(s: Subject) -> float:
    paths, own = s.in_paths
    return float(hessian_of(lambda v: own.loss_at(paths.params_of(v)), paths.values()).trace())


@values
def psi_balance(s: Subject) -> float:
    found = s.in_paths[0].values().abs()
    return float(found.max() / found.min())


@values
def functional_margin(s: Subject) -> Tensor:
    return s.margins


@values
def margin(s: Subject) -> float:
    return s.margin


@values
def parameter_count(s: Subject) -> float:
    return float(s.own.size)


@values
def vc_dimension(s: Subject) -> float:
    return float(s.own.size * s.matrices)


@values
def input_sensitivity(s: Subject) -> Tensor:
    return s.own.jacobians.square().sum((1, 2)).sqrt()


@values
def local_linear_margin(s: Subject) -> Tensor:
    made = []
    outputs, targets = s.own.outputs().detach(), s.own.targets
    if outputs.ndim == 1 or outputs.shape[1] == 1:
        return (s.margins / s.own.jacobians[:, 0].norm(dim=1)).clamp_min(0)
    for out, jacobian, y in zip(outputs, s.own.jacobians, targets.tolist(), strict=True):
        others = [j for j in range(len(out)) if j != y]
        made.append(min(float((out[y] - out[j]) / (jacobian[y] - jacobian[j]).norm()) for j in others))
    return torch.tensor(made, dtype=torch.float64).clamp_min(0)


@values
def distance_from_initialization(s: Subject) -> dict[str, float] | None:
    if s.initial is None:
        return None
    moved = {name: float((value - s.initial[name].to(value)).square().sum()) for name, value in s.own.params.items()}
    layers = {layer: math.sqrt(moved[name]) for layer, name in s.layers.items()}
    return {"": math.sqrt(sum(moved.values()))} | layers
