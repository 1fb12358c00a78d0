"""A parameter times a fixed mask is a layer of that parameter: connections that do not exist have no curvature."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parametrize, prune

import flatscope as fs

torch.set_num_threads(1)
X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(16) % 3


def zeros_and_ones(*shape: int) -> Tensor:
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape))) > 0.4).double()


class Masked(nn.Linear):
    """As masked autoregressive flows write it."""

    def __init__(self, n_in: int, n_out: int, how: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(n_in, n_out, dtype=torch.float64)
        self.register_buffer("mask", zeros_and_ones(n_out, n_in))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.how(self.weight, self.mask), self.bias)


class Transposed(nn.Module):
    """x @ (weight · mask), as networks without modules write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5, dtype=torch.float64))
        self.register_buffer("mask", zeros_and_ones(6, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * self.mask)


class MaskedConvolution(nn.Conv1d):
    """As causal image models write it."""

    def __init__(self) -> None:
        super().__init__(2, 3, 3, padding=1, dtype=torch.float64)
        self.register_buffer("mask", zeros_and_ones(3, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv1d(x, self.weight * self.mask, self.bias, padding=1)


class HalfFixed(nn.Module):
    """A parametrization of the user's."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.tril()


def perceptron(first: nn.Module, wide: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(wide, 3).double()).eval()


def parametrized() -> nn.Module:
    first = nn.Linear(6, 5).double()
    parametrize.register_parametrization(first, "weight", HalfFixed())
    return first


def pruned() -> nn.Module:
    torch.manual_seed(1)
    return prune.random_unstructured(nn.Linear(6, 5).double(), "weight", amount=0.4)


def twice() -> nn.Module:
    first = Masked(6, 6, lambda w, m: w * m)
    return perceptron(nn.Sequential(first, nn.ReLU(), first), wide=6)


def linear(how: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: perceptron(Masked(6, 5, how))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], str]] = {  # and the parameter behind its first layer
    "weight * mask": (linear(lambda w, m: w * m), "0.weight"),
    "mask * weight": (linear(lambda w, m: m * w), "0.weight"),
    "a boolean mask": (linear(lambda w, m: w * m.bool()), "0.weight"),
    "masked_fill": (linear(lambda w, m: w.masked_fill(m == 0, 0.0)), "0.weight"),
    "where": (linear(lambda w, m: torch.where(m > 0, w, 0.0)), "0.weight"),
    "of rows": (linear(lambda w, m: w * m[:, :1]), "0.weight"),
    "of its own sign": (linear(lambda w, m: torch.relu(w)), "0.weight"),
    "made in forward": (linear(lambda w, m: w * torch.ones_like(w).tril(-1)), "0.weight"),
    "tril, by a parametrization": (lambda: perceptron(parametrized()), "0.parametrizations.weight.original"),
    "pruned": (lambda: perceptron(pruned()), "0.weight_orig"),
    "x @ (weight * mask)": (lambda: perceptron(Transposed()), "0.weight"),
    "a convolution": (
        lambda: perceptron(nn.Sequential(nn.Unflatten(1, (2, 3)), MaskedConvolution(), nn.Flatten()), 9),
        "0.1.weight",
    ),
    "used twice": (twice, "0.0.weight"),
    "all there is": (lambda: Masked(6, 3, lambda w, m: w * m).eval(), "weight"),
    "all there is, pruned": (
        lambda: prune.l1_unstructured(nn.Linear(6, 3).double(), "weight", amount=0.4).eval(),
        "weight_orig",
    ),
    "no entry is masked": (linear(lambda w, m: w * torch.ones_like(m)), "0.weight"),
}


def hessian_of(model: nn.Module, name: str) -> Tensor:
    value = model.get_parameter(name).detach()

    def loss(vector: Tensor) -> Tensor:
        given = {name: vector.reshape(value.shape)}  # torch's tying would leave it in a module that is passed twice
        return functional.cross_entropy(functional_call(model, given, (X,), tie_weights=False), Y)

    return torch.autograd.functional.hessian(loss, value.reshape(-1))


@pytest.mark.parametrize("name", NETWORKS)
def test_rows_are_those_of_the_parameter(name: str) -> None:
    build, parameter = NETWORKS[name]
    model = build()
    hessian, value = hessian_of(model, parameter), model.get_parameter(parameter).detach()
    weight = value * (hessian.diagonal() != 0).reshape(value.shape)  # what is masked has no curvature
    names = ["layer_trace", "kappa_trace", "layer_max_eigenvalue", "rho_layer_sum", "l2_norm", "hessian_trace"]
    problem = fs.Problem(model, train=(X, Y))
    table = fs.measure(problem, names, precision=0, options={"layer_max_eigenvalue": {"tolerance": 1e-9}})
    layer = next(iter(table.layer("layer_trace")))
    trace = float(hessian.trace())
    assert table.layer("layer_trace")[layer] == pytest.approx(trace, rel=1e-9)
    assert table.layer("kappa_trace")[layer] == pytest.approx(trace * float(weight.square().sum()), rel=1e-9)
    top = float(torch.linalg.eigvalsh(hessian)[-1])
    assert table.layer("layer_max_eigenvalue")[layer] == pytest.approx(top, rel=1e-6)
    assert table.layer("l2_norm")[layer] == pytest.approx(float(weight.norm()), rel=1e-9)
    if weight.ndim == 2:
        blocks = hessian.reshape(*weight.shape, *weight.shape)
        columns = weight if name.startswith("x @") else weight.T
        if name.startswith("x @"):
            forms = [weight[j] @ blocks[j, :, j, :] @ weight[j] for j in range(len(weight))]
        else:
            forms = [weight[:, j] @ blocks[:, j, :, j] @ weight[:, j] for j in range(len(columns))]
        assert table.layer("rho_layer_sum")[layer] == pytest.approx(float(torch.stack(forms).sum()), rel=1e-9)
    whole = sum(float(hessian_of(model, key).trace()) for key in dict(model.named_parameters()))
    assert table["hessian_trace"] == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("precision", [0.05, 0.5])
def test_estimates_of_a_masked_layer_are_of_the_parameter_too(name: str, precision: float) -> None:
    build, parameter = NETWORKS[name]
    model = build()
    table = fs.measure(fs.Problem(model, train=(X, Y)), "layer_trace", precision=precision)
    layer = next(iter(table.layer("layer_trace")))
    expected, error = float(hessian_of(model, parameter).trace()), table.stderr("layer_trace", layer)
    assert abs(table.layer("layer_trace")[layer] - expected) <= max(5 * error, 1e-9 * abs(expected))


@pytest.mark.parametrize("name", NETWORKS)
def test_other_measures_know_the_mask(name: str) -> None:
    model = NETWORKS[name][0]()
    names = ["*path_norm", "lipschitz*", "psi_trace", "spectral_norm", "sharpness", "gradient_noise", "flatness_radius"]
    names += ["gradient_norm", "input_sensitivity", "feature_robustness", "epsilon_flatness", "margin"]
    frame = fs.measure(fs.Problem(model, train=(X, Y)), names).to_frame()
    assert not frame["reason"].str.startswith("failed").any()
    if "all there is" in name or name == "used twice":
        return  # no unit can be rescaled or change places
    twin = fs.rescale(model, X, by="permutation", seed=1)
    with torch.no_grad():
        torch.testing.assert_close(twin(X), model(X), rtol=1e-9, atol=1e-11)
    audit = fs.audit(fs.Problem(model, train=(X, Y)), ["fisher_rao_norm", "gradient_norm"], trials=1).to_frame()
    assert (audit[audit["measure"] == "fisher_rao_norm"]["verdict"] != "moved").all()


def test_a_mask_that_is_not_of_zeros_and_ones_makes_another_weight_and_the_row_says_so() -> None:
    model = perceptron(Masked(6, 5, lambda w, m: w * (m + 0.5)))
    frame = fs.measure(fs.Problem(model, train=(X, Y)), ["layer_trace", "layer_max_eigenvalue"]).to_frame()
    rows = frame[frame["layer"] == "0"]
    assert rows["reason"].str.contains("of the weight that is computed from 0.weight", regex=False).all()
    assert (frame[frame["layer"] == "2"]["reason"].str.contains("computed")).sum() == 0


def test_a_parameter_that_is_also_used_without_its_mask_is_no_masked_layer() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = Masked(6, 6, lambda w, m: w * m), nn.Linear(6, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.tanh(self.inner(x)) + torch.tanh(functional.linear(x, self.inner.weight)))

    torch.manual_seed(0)
    model = Both().eval()
    table = fs.measure(
        fs.Problem(model, train=(X, Y)), ["layer_trace", "hessian_trace", "kappa_trace_sum"], precision=0
    )
    whole = sum(float(hessian_of(model, key).trace()) for key in dict(model.named_parameters()))
    assert table["hessian_trace"] == pytest.approx(whole, rel=1e-9)
    frame = table.to_frame()
    rows = frame[(frame["measure"] == "layer_trace") & frame["layer"].str.startswith("inner")]
    for _, row in rows.iterrows():
        alone = float(hessian_of(model, "inner.weight").trace())
        assert "computed from" in row["reason"] or row["value"] == pytest.approx(alone, rel=1e-9)
