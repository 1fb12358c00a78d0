"""Functions of which torch has a wrong second derivative, or none: values are those of differences of the gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parametrizations

import flatscope as fs

torch.set_num_threads(1)
X = torch.randn(20, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(20) % 3


def old_weight_norm(module: nn.Module, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and in use
        return torch.nn.utils.weight_norm(module, **options)


def shifted(model: nn.Module) -> nn.Module:
    """Moved away from where the scale is the norm, as training moves it."""
    torch.manual_seed(5)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(1.5).add_(0.1 * torch.randn_like(value))
    return model.double().eval()


def perceptron(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return shifted(nn.Sequential(wrap(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 3)))


def convolution(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    parts = nn.Unflatten(1, (2, 3)), wrap(nn.Conv1d(2, 3, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3)
    return shifted(nn.Sequential(*parts))


class Branches(nn.Module):
    """The normalised layer is passed only by samples with a positive first entry, which the first ones have not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(6, 3), parametrizations.weight_norm(nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.tanh(self.one(x))
        chosen = x[:, 0] > SECOND_LARGEST
        if bool(chosen.any()):
            outputs = outputs.masked_scatter(chosen[:, None], torch.tanh(self.other(x[chosen])))
        return outputs


SECOND_LARGEST = float(X[2:, 0].topk(2).values[1])
assert X[:2, 0].max() < SECOND_LARGEST


class Centres(nn.Module):
    """Distances to centres, and a layer on what a bump makes of them."""

    def __init__(self, p: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 4), nn.Linear(5, 3)
        self.centres, self.p = nn.Parameter(torch.randn(5, 4)), p

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.exp(-torch.cdist(self.first(x), self.centres, self.p)))
        return found


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: perceptron(parametrizations.weight_norm),
    "weight_norm along inputs": lambda: perceptron(lambda m: parametrizations.weight_norm(m, dim=1)),
    "weight_norm of the whole": lambda: perceptron(lambda m: parametrizations.weight_norm(m, dim=None)),
    "weight_norm of old": lambda: perceptron(old_weight_norm),
    "weight_norm of old, of the whole": lambda: perceptron(lambda m: old_weight_norm(m, dim=None)),
    "weight_norm of a convolution": lambda: convolution(parametrizations.weight_norm),
    "weight_norm of old, of a convolution": lambda: convolution(old_weight_norm),
    "weight_norm of all there is": lambda: shifted(parametrizations.weight_norm(nn.Linear(6, 3))),
    "weight_norm of old, of all there is": lambda: shifted(old_weight_norm(nn.Linear(6, 3))),
    "weight_norm where few samples pass": lambda: shifted(Branches()),
    **{f"cdist, p = {p}": lambda p=p: shifted(Centres(p)) for p in (1.0, 1.5, 2.0, 3.0)},
}


def differences(model: nn.Module) -> Tensor:
    """The Hessian of the mean loss, by central differences of its gradient."""
    params = {name: value.detach() for name, value in model.named_parameters()}
    sizes = [value.numel() for value in params.values()]

    def gradient(vector: Tensor) -> Tensor:
        parts = zip(params.values(), vector.split(sizes), strict=True)
        leaves = [part.reshape(value.shape).clone().requires_grad_() for value, part in parts]
        outputs = functional_call(model, dict(zip(params, leaves, strict=True)), (X,))
        slopes = torch.autograd.grad(functional.cross_entropy(outputs, Y), leaves)
        return torch.cat([slope.reshape(-1) for slope in slopes])

    at, step = torch.cat([value.reshape(-1) for value in params.values()]), 1e-5
    moves = step * torch.eye(len(at), dtype=at.dtype)
    return torch.stack([(gradient(at + move) - gradient(at - move)) / (2 * step) for move in moves])


@pytest.mark.parametrize("name", NETWORKS)
def test_the_hessian_is_that_of_the_function(name: str) -> None:
    model = NETWORKS[name]()
    expected = differences(model)
    problem = fs.Problem(model, train=(X, Y))
    operator = fs.hessian(problem)
    assert list(operator.names) == list(dict(model.named_parameters()))
    found = operator @ torch.eye(operator.shape[0], dtype=torch.float64)
    torch.testing.assert_close(found, found.T, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    values = torch.linalg.eigvalsh((expected + expected.T) / 2)
    names = ["hessian_trace", "hessian_max_eigenvalue", "hessian_min_eigenvalue"]
    table = fs.measure(problem, names, precision=0, options={n: {"tolerance": 1e-8} for n in names[1:]})
    assert table["hessian_trace"] == pytest.approx(float(expected.trace()), rel=1e-6, abs=1e-8)
    assert table["hessian_max_eigenvalue"] == pytest.approx(float(values[-1]), rel=1e-6)
    assert table["hessian_min_eigenvalue"] == pytest.approx(float(values[0]), rel=1e-6, abs=1e-8)
    pairs = fs.eigenpairs(problem, top=2, tolerance=1e-8)
    assert [float(value) for value in pairs.values] == pytest.approx(values.flip(0)[:2].tolist(), rel=1e-6)


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_with_them_serve_what_needs_copies_of_the_weights(name: str) -> None:
    model = NETWORKS[name]()
    problem = fs.Problem(model, train=(X, Y))
    slopes = []
    for row in range(len(X)):
        loss = functional.cross_entropy(model(X[row : row + 1]), Y[row : row + 1])
        own = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
        slopes.append(torch.cat([slope.reshape(-1) for slope in own]))
    norms = torch.stack(slopes).mean(0).norm()
    table = fs.measure(problem, ["gradient_norm", "gradient_noise", "sharpness"])
    assert table["gradient_norm"] == pytest.approx(float(norms), rel=1e-9)
    if "few samples" not in name:  # whose branch vmap cannot follow: refused with a reason
        assert table.to_frame()["value"].notna().all()
        surface = fs.landscape(problem, grid=3, span=0.1)
        assert float(surface.loss[1, 1]) == pytest.approx(surface.centre, rel=1e-12)


def test_distances_to_centres_are_no_layer_and_nothing_is_summed_without_them() -> None:
    table = fs.measure(fs.Problem(NETWORKS["cdist, p = 2.0"](), train=(X, Y)), ["kappa_trace_sum", "layer_trace"])
    assert "centres" in table.to_frame().query("measure == 'kappa_trace_sum'")["reason"].item()
    assert list(table.layer("layer_trace")) == ["first", "last"]
