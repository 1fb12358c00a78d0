"""How networks are run: float32 that a forward names, what modules keep, what autocast and torch.func do inside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import flatscope as fs

INPUTS = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(24) % 3
MIX = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


class Mixed(nn.Module):
    """Inputs times a constant, a hidden layer, and classes; in float64 wherever the weights are."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.activation = activation
        self.register_buffer("kept", MIX.clone())
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 3)

    def constant(self, x: Tensor) -> Tensor:
        return x @ self.kept

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.activation(self.inner(self.constant(x))))


class Attribute(Mixed):
    """The constant is a plain attribute, as anchors and positional encodings often are."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__(activation)
        self.mix = MIX.clone()

    def constant(self, x: Tensor) -> Tensor:
        return x @ self.mix


class Cast(Mixed):
    """float32 by name, in each of the ways in which it can be named."""

    def constant(self, x: Tensor) -> Tensor:
        filled = torch.zeros(4, 4, dtype=torch.float32)
        filled[:] = MIX
        one_hot = functional.one_hot(torch.arange(4), 4).float()
        return (x.float() @ one_hot).to(torch.float32) @ (filled * torch.ones(4).type(torch.FloatTensor))


class InFloat32Only(Mixed):
    """A product for which torch has no kernel in float64, as mixtures of experts use it."""

    def constant(self, x: Tensor) -> Tensor:
        padded, mix = functional.pad(x, (0, 12)), functional.pad(MIX.to(x), (0, 12, 0, 12))
        ends = torch.tensor([len(x)], dtype=torch.int32)
        return torch._grouped_mm(padded, mix[None], offs=ends)[:, :4]


def dense_trace(model: Mixed) -> float:
    """Trace of the Hessian of the mean loss, from all of its entries, in float64."""
    params = {name: value.detach().double() for name, value in model.named_parameters()}
    plainly = Mixed(model.activation)

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(
            functional_call(plainly, weights | {"kept": MIX.double()}, (INPUTS.double(),)), LABELS
        )

    blocks = torch.func.hessian(loss)(params)
    return sum(float(blocks[name][name].reshape(v.numel(), v.numel()).trace()) for name, v in params.items())


NAMES = ("hessian_trace", "rho_sum", "psi_trace", "expected_flatness", "l2_path_norm")
FLOAT32_INSIDE = (Attribute, Cast, InFloat32Only)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", [torch.relu, torch.tanh])
@pytest.mark.parametrize("kind", FLOAT32_INSIDE)
def test_float32_inside_a_network_changes_no_number(kind: type[Mixed], activation: Any, dtype: torch.dtype) -> None:
    """Against the same network with nothing of float32 in it, and against a dense Hessian."""
    found = fs.measure(fs.Problem(kind(activation), train=(INPUTS, LABELS), dtype=dtype), NAMES, precision=0)
    wanted = fs.measure(fs.Problem(Mixed(activation), train=(INPUTS, LABELS), dtype=dtype), NAMES, precision=0)
    digits = 1e-9 if dtype == torch.float64 and kind is not InFloat32Only else 3e-5
    for name in NAMES:
        if kind is not InFloat32Only or name in ("hessian_trace", "rho_sum"):  # its product is not known to scale
            assert found[name] == pytest.approx(wanted[name], rel=digits, nan_ok=True), name
    assert found["hessian_trace"] == pytest.approx(dense_trace(kind(activation)), rel=digits)


@pytest.mark.parametrize("kind", FLOAT32_INSIDE)
def test_networks_with_float32_inside_are_audited_compared_and_bounded(kind: type[Mixed]) -> None:
    problem = fs.Problem(kind(), train=(INPUTS, LABELS))
    audit = fs.audit(problem, ["hessian_trace", "margin"], by="unit", trials=1)
    assert audit.verdict("margin", "unit_scaling") == "invariant"
    assert audit.verdict("hessian_trace", "unit_scaling") == "moved"
    table = fs.compare({"one": kind(), "other": kind()}, (INPUTS, LABELS), ["fisher_rao_norm"])
    assert "fisher_rao_norm" in str(table)
    assert fs.landscape(problem, grid=3).loss.isfinite().all()
    assert fs.eigenpairs(problem, top=1).values[0] == pytest.approx(
        fs.measure(problem, "hessian_max_eigenvalue")["hessian_max_eigenvalue"], rel=1e-3
    )


class Remembering(nn.Module):
    """Keeps its activations on itself: as a tensor, in a list, in a dictionary, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 3)
        self.seen: list[Tensor] = []
        self.by_name: dict[str, Any] = {}
        self.register_buffer("state", torch.zeros(1, 6))

    def forward(self, x: Tensor) -> Tensor:
        self.state = torch.zeros(len(x), 6, dtype=x.dtype)
        self.state = torch.tanh(self.inner(x) + self.state)
        self.features = self.state
        self.seen.append(self.features)
        self.by_name["last"] = [self.features]
        return self.outer(self.features)


@pytest.mark.parametrize("first", ["", "gradient_noise", "hessian_trace"])
@pytest.mark.parametrize("trained", [False, True])
def test_what_modules_keep_spoils_no_later_call(trained: bool, first: str) -> None:
    model = Remembering()
    if trained:  # what they keep knows how it was computed, which cannot be copied
        functional.cross_entropy(model(INPUTS), LABELS).backward()
    problem = fs.Problem(model, train=(INPUTS, LABELS))
    if first:
        assert fs.measure(problem, first).to_frame()["reason"].str.contains("failed").sum() == 0
    kept = {name: value for name, value in problem.model.__dict__.items() if name in ("features", "seen", "by_name")}
    assert len(kept["seen"]) == len(model.seen), "a pass left something behind"
    audit = fs.audit(problem, ["margin"], trials=1)
    assert audit.verdict("margin", "layer_scaling") == "not tested"  # tanh: nothing can be rescaled
    names = ["hessian_trace", "gradient_noise", "rho_sum", "fisher_rao_norm"]
    plainly = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    plainly.load_state_dict(dict(zip(plainly.state_dict(), list(model.state_dict().values())[1:], strict=True)))
    wanted = fs.measure(fs.Problem(plainly, train=(INPUTS, LABELS)), names)
    for name in names:
        assert fs.measure(problem, names)[name] == pytest.approx(wanted[name], rel=1e-5), name


class Continuing(nn.Module):
    """Its outputs depend on the passes before: no one function."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 3)
        self.last = torch.zeros(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.line(x) + self.last
        self.last = outputs.detach()[:1]
        return outputs


def test_a_network_with_a_memory_is_refused_as_before() -> None:
    with pytest.raises(fs.InputError, match="the same outputs from two forward passes"):
        fs.Problem(Continuing(), train=(INPUTS, LABELS))


class Slopes(nn.Module):
    """The derivative of a network by its inputs, taken in its forward, beside a layer of the usual kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.inner = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
        self.outer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.func.vmap(torch.func.grad(lambda row: self.inner(row).squeeze(-1)))(x))


def exact_trace(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Trace of the Hessian of the mean cross-entropy, one row of it after the other, in float64."""
    twin = copy.deepcopy(model).double()
    params = list(twin.parameters())
    loss = functional.cross_entropy(twin(x.double()), y)
    total = 0.0
    for param, slope in zip(
        params, torch.autograd.grad(loss, params, create_graph=True, materialize_grads=True), strict=True
    ):
        for place, entry in enumerate(slope.flatten()):
            if entry.requires_grad:
                (row,) = torch.autograd.grad(entry, param, retain_graph=True, materialize_grads=True)
                total += float(row.flatten()[place])
    return total


def test_derivatives_inside_a_network_are_served_or_refused_with_a_reason() -> None:
    problem = fs.Problem(Slopes(), train=(INPUTS, LABELS))
    names = ["hessian_trace", "gradient_noise", "rho_sum", "kappa_trace_sum", "psi_trace", "layer_trace"]
    frame = fs.measure(problem, names, precision=0).to_frame()
    assert not frame["reason"].str.contains("failed").any(), frame["reason"].tolist()
    by_name = frame[frame["layer"] == ""].set_index("measure")
    assert by_name.loc["hessian_trace", "value"] == pytest.approx(exact_trace(Slopes(), INPUTS, LABELS), rel=1e-5)
    for name in ("rho_sum", "kappa_trace_sum"):  # a sum of the outer layer alone would not be that of the network
        assert torch.tensor(by_name.loc[name, "value"]).isnan()
        assert "inside torch.func" in by_name.loc[name, "reason"]
    value = by_name.loc["psi_trace", "value"]
    assert value == pytest.approx(by_name.loc["hessian_trace", "value"], rel=1e-5), "no unit can be rescaled"


class Halved(nn.Module):
    """Asks for bfloat16 in its forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.outer(torch.relu(self.inner(x))).float()


def test_a_network_that_asks_for_autocast_is_measured_in_full_precision() -> None:
    plainly = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    plainly.load_state_dict(dict(zip(plainly.state_dict(), Halved().state_dict().values(), strict=True)))
    names = ["gradient_norm", "hessian_trace", "rho_sum", "psi_trace", "l2_path_norm"]
    found, wanted = (fs.measure(fs.Problem(m, train=(INPUTS, LABELS)), names) for m in (Halved(), plainly))
    for name in names:
        assert found[name] == pytest.approx(wanted[name], rel=1e-5), name
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.mm(INPUTS.T, INPUTS).dtype == torch.bfloat16, "the caller's own autocast is left alone"
