"""Networks as polynomials: every ReLU replaced by a polynomial fitted where the network uses it.

Section 9.10 and Figures 21-25 of Zhang et al. (2017). Composing l layers of degree k gives degree k^l (the paper's
k = 10·l is a slip). The interval of the fit is not stated there; here it is what the network's own pre-activations
cover on given data, recorded with the fit, and values outside can be counted on any other data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.polynomial import legendre
from torch import Tensor, nn
from torch.nn import functional

from flatscope import InputError
from flatscope.extend import Operation, replay, watched

RELUS = (functional.relu, functional.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_)
KINKS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.GELU, nn.Tanh, nn.Sigmoid)
POWERS_UP_TO = 12  # coefficients of powers grow like 5^degree; beyond this float32 loses a digit too many
OUTSIDE = ("polynomial", "clip", "relu")


class PolynomialActivation(nn.Module):
    """The polynomial nearest to ReLU in mean square on an interval, as Legendre coefficients.

    Args:
        low: lower end of the interval.
        high: upper end.
        degree: of the polynomial.
        outside: beyond the interval: "polynomial" goes on, and grows fast; "clip" takes the value at the nearer end;
            "relu" is ReLU there. Only the first is a polynomial.
        dtype: of the coefficients.

    Example:
        >>> p = PolynomialActivation(-5.0, 5.0, degree=10)
        >>> round(p.max_error() / 5, 4), [round(c, 4) for c in p.monomial_coefficients()[:3]]
        (0.0278, [0.1388, 0.5, 0.3608])
    """

    coefficients: Tensor
    powers: Tensor

    def __init__(
        self,
        low: float,
        high: float,
        degree: int = 10,
        outside: str = "polynomial",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not low < high or degree < 1 or outside not in OUTSIDE:
            got = f"[{low:g}, {high:g}], degree {degree}, outside {outside!r}"
            expected = f"an interval, a degree of 1 or more and outside one of {', '.join(OUTSIDE)}"
            raise InputError(expected, got, where="PolynomialActivation")
        self.low, self.high, self.degree, self.outside = low, high, degree, outside
        dtype = dtype or torch.get_default_dtype()
        fitted = _least_squares_legendre_coefficients(low, high, degree)
        self.register_buffer("coefficients", torch.tensor(fitted, dtype=dtype))
        self.register_buffer("powers", torch.tensor(legendre.leg2poly(fitted), dtype=dtype))  # of t in [-1, 1]

    def forward(self, x: Tensor) -> Tensor:
        """The polynomial of each entry."""
        inside = x.clamp(self.low, self.high) if self.outside != "polynomial" else x
        t = (2 * inside - (self.high + self.low)) / (self.high - self.low)
        value = self._by_powers(t) if self.degree <= POWERS_UP_TO else self._by_recursion(t)
        if self.outside == "relu":
            return torch.where((x < self.low) | (x > self.high), x.clamp_min(0), value)
        return value

    def _by_powers(self, t: Tensor) -> Tensor:
        """Horner's rule: one operation per degree, exact enough while the coefficients stay small."""
        c = self.powers.to(t.dtype)
        value = c[-1].expand_as(t)
        for k in range(self.degree - 1, -1, -1):
            value = torch.addcmul(c[k], t, value)
        return value

    def _by_recursion(self, t: Tensor) -> Tensor:
        """Clenshaw's recursion: stable for any degree."""
        c = self.coefficients.to(t.dtype)
        ahead, further = torch.zeros_like(t), torch.zeros_like(t)
        for k in range(self.degree, 0, -1):
            ahead, further = c[k] + (2 * k + 1) / (k + 1) * t * ahead - (k + 1) / (k + 2) * further, ahead
        return c[0] + t * ahead - further / 2

    def monomial_coefficients(self) -> list[float]:
        """Coefficients of 1, x, x², ...; for reading, the values come from the Legendre form."""
        series = legendre.Legendre(self.coefficients.double().cpu().numpy(), domain=[self.low, self.high])
        return [float(c) for c in series.convert(kind=np.polynomial.Polynomial).coef]

    def max_error(self) -> float:
        """Largest distance from ReLU on the interval."""
        x = torch.cat([torch.linspace(self.low, self.high, 4001, dtype=torch.float64), torch.zeros(1).double()])
        x = x[(x >= self.low) & (x <= self.high)]
        series = legendre.Legendre(self.coefficients.double().cpu().numpy(), domain=[self.low, self.high])
        return float(np.abs(series(x.numpy()) - x.clamp_min(0).numpy()).max())

    def extra_repr(self) -> str:
        """Degree and interval."""
        return f"degree={self.degree}, interval=[{self.low:.4g}, {self.high:.4g}], outside={self.outside}"


def _least_squares_legendre_coefficients(low: float, high: float, degree: int) -> list[float]:
    """Legendre coefficients of the least-squares fit, by Gauss quadrature on both sides of the kink: exact."""
    nodes, weights = legendre.leggauss(degree + 2)
    kink = min(max(-(high + low) / (high - low), -1.0), 1.0)  # where x = 0 lies in t of [-1, 1]
    total = np.zeros(degree + 1)
    for begin, end in ((-1.0, kink), (kink, 1.0)):
        t = begin + (nodes + 1) * (end - begin) / 2
        x = (t * (high - low) + high + low) / 2
        total += (weights * (end - begin) / 2 * np.maximum(x, 0)) @ legendre.legvander(t, degree)
    return [float(c) for c in total * (2 * np.arange(degree + 1) + 1) / 2]


@dataclass(frozen=True)
class PolynomialTwin:
    """A network with polynomials in the place of its ReLUs.

    Attributes:
        model: the twin; its weights are copies.
        activations: the polynomials in the order in which the network comes to them, each with its interval.
        remaining: kinds of parts that are still no polynomials, such as max pools.
    """

    model: nn.Module
    activations: Mapping[str, PolynomialActivation]
    remaining: tuple[str, ...]

    @property
    def degree(self) -> int | None:
        """Bound on the degree in the inputs: the product over the activations; None if other kinks remain.

        For layers that follow one another it is attained: k^l. Branches that run side by side count too often.
        """
        if self.remaining or any(a.outside != "polynomial" for a in self.activations.values()):
            return None
        product = 1
        for activation in self.activations.values():
            product *= activation.degree
        return product

    def outside_share(self, x: Tensor) -> dict[str, float]:
        """Share of pre-activations outside the interval of the fit, per activation, on other inputs."""
        counts = {name: [0, 0] for name in self.activations}

        def watch(name: str) -> Callable[..., None]:
            def hook(part: nn.Module, given: tuple[Tensor, ...]) -> None:
                assert isinstance(part, PolynomialActivation)
                values = given[0].detach()
                counts[name][0] += int((~((values >= part.low) & (values <= part.high))).sum())  # NaN is outside
                counts[name][1] += values.numel()

            return hook

        hooks = [a.register_forward_pre_hook(watch(name)) for name, a in self.activations.items()]
        try:
            _replay_without_gradients(self.model, x, Operation.run)
        finally:
            for hook in hooks:
                hook.remove()
        return {name: outside / max(1, seen) for name, (outside, seen) in counts.items()}


def polynomial_twin(
    model: nn.Module,
    x: Tensor,
    *,
    degree: int = 10,
    stretch: float = 1.5,
    radius: float | None = None,
    outside: str = "polynomial",
) -> PolynomialTwin:
    """A copy of a network in which every ReLU is a polynomial, fitted on the range of its own pre-activations.

    ReLU modules are replaced in place of the copy; where ReLU is called as a function, the copy is wrapped in a module
    that answers these calls, in the order in which they come.

    To train a twin from its first weights, take radius=5 and outside="clip": on 2,000 images of CIFAR-10 the network
    of 9,370 parameters then comes as far as with ReLUs (error 0.615 and 0.618, three seeds, lr=0.02). Without the
    clip it diverged or stayed at chance, at learning rates from 0.001 to 0.02.

    Args:
        model: any network; its ReLUs must come in the same order for every input.
        x: inputs (n, ...) on which the ranges are recorded.
        degree: of each polynomial.
        stretch: how many times the recorded range the interval is long, around the same centre.
        radius: instead of the recorded ranges, [−radius, radius] for all.
        outside: as for `PolynomialActivation`.

    Raises:
        InputError: no ReLU was called.
    """
    twin = copy.deepcopy(model)
    calls, owners = _ranges_at_relu_calls(twin, x)
    if not calls:
        raise InputError("a network that calls ReLU", type(model).__name__, where="polynomial_twin")
    dtype = next((p.dtype for p in twin.parameters()), x.dtype)

    def fitted(ranges: Sequence[tuple[float, float]]) -> PolynomialActivation:
        low, high = min(r[0] for r in ranges), max(r[1] for r in ranges)
        half = max((high - low) / 2, 1e-6) * stretch
        ends = (-radius, radius) if radius is not None else ((low + high) / 2 - half, (low + high) / 2 + half)
        return PolynomialActivation(*ends, degree=degree, outside=outside, dtype=dtype).to(x.device)

    activations: dict[str, PolynomialActivation] = {}
    if all(owner is not None for owner in owners):
        for name in dict.fromkeys(owner for owner in owners if owner is not None):
            ranges = [r for r, owner in zip(calls, owners, strict=True) if owner == name]
            activations[name] = fitted(ranges)
            if name == "":  # the model itself is a ReLU
                twin = activations[name]
            else:
                parent, _, child = name.rpartition(".")
                setattr(twin.get_submodule(parent), child, activations[name])
    else:
        activations = {f"call{n}": fitted([r]) for n, r in enumerate(calls)}
        twin = _Answering(twin, activations)
    twin.train(model.training)
    remaining = sorted({type(part).__name__ for part in twin.modules() if isinstance(part, KINKS)})
    return PolynomialTwin(twin, activations, tuple(remaining))


class _Answering(nn.Module):
    """A network whose n-th call of ReLU is answered by the n-th polynomial."""

    def __init__(self, model: nn.Module, activations: Mapping[str, PolynomialActivation]) -> None:
        super().__init__()
        self.model = model
        self.activations = nn.ModuleDict(activations)

    def forward(self, *inputs: Any) -> Any:
        """The network's outputs with its ReLUs replaced."""
        order = iter(self.activations.values())

        def answer(values: Tensor) -> Tensor:
            activation = next(order, None)
            if activation is None:
                got = f"more than the {len(self.activations)} recorded"
                raise InputError("as many calls of ReLU as were recorded", got, where="polynomial twin")
            result: Tensor = activation(values)
            return result

        with watched(_replace_relu_calls(answer)):
            return self.model(*inputs)


def _replace_relu_calls(answer: Callable[[Tensor], Tensor]) -> Callable[[Operation], Any]:
    """A rule that hands what is given to any form of ReLU to a function, whose answer takes its place."""

    def follow(op: Operation) -> Any:
        if op.function not in RELUS:
            return op.run()
        values = op.args[0] if op.args else op.kwargs["input"]
        in_place = op.kwargs.get("inplace", False) or (len(op.args) > 1 and bool(op.args[1])) or op.in_place
        if in_place:  # what was to be overwritten must be; of a copy, since the gradient needs the old values
            return values.copy_(answer(values.clone()))
        return answer(values)

    return follow


def _ranges_at_relu_calls(model: nn.Module, x: Tensor) -> tuple[list[tuple[float, float]], list[str | None]]:
    """Range of what each call of ReLU was given, and the name of the ReLU module that made it (None: a function)."""
    calls: list[tuple[float, float]] = []
    owners: list[str | None] = []
    relus = {name: part for name, part in model.named_modules() if isinstance(part, nn.ReLU)}
    for part in relus.values():
        part.inplace = False  # in a copy; the polynomial that comes in its place is not in place either

    def follow(op: Operation) -> Any:
        def answer(values: Tensor) -> Tensor:
            calls.append((float(values.min()), float(values.max())))
            owners.append(op.module if op.module in relus else None)
            return values.clamp_min(0)

        return _replace_relu_calls(answer)(op)

    _replay_without_gradients(model, x, follow)
    return calls, owners


def _replay_without_gradients(model: nn.Module, x: Tensor, rule: Callable[[Operation], Any]) -> None:
    """One watched pass in eval mode, without gradients; the mode is put back."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            replay(model, x, rule)
    finally:
        model.train(was_training)
