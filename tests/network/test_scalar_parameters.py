"""Networks that compute with a parameter without axes: a temperature, a gate, a mixing share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from forms_of_measures import value_of
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import flatscope as fs
from flatscope.errors import NotApplicable

torch.set_num_threads(1)
Form = Callable[["Scaled", Tensor], Tensor]


class Scaled(nn.Module):
    """Two layers, and two numbers t and u that meet the signal in between in some form."""

    def __init__(self, form: Form, bend: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()
        self.t, self.u = (nn.Parameter(torch.tensor(value, dtype=torch.float64)) for value in (0.7, -1.3))
        self.form, self.bend = form, bend

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.form(self, self.bend(self.first(x))))
        return found


FORMS: dict[str, Form] = {
    "t * x": lambda m, x: m.t * x,
    "x * t": lambda m, x: x * m.t,
    "exp(t) * x": lambda m, x: m.t.exp() * x,
    "torch.exp(t) * x": lambda m, x: torch.exp(m.t) * x,
    "(1 + t) * x": lambda m, x: (1 + m.t) * x,
    "(1 - t) * x": lambda m, x: (1 - m.t) * x,
    "(t + 1) * x": lambda m, x: (m.t + 1) * x,
    "x / t": lambda m, x: x / m.t,
    "x / softplus(t)": lambda m, x: x / functional.softplus(m.t),
    "sigmoid(t) * x": lambda m, x: torch.sigmoid(m.t) * x,
    "-t * x": lambda m, x: -m.t * x,
    "clamp(t, min=.1) * x": lambda m, x: m.t.clamp(min=0.1) * x,
    "t.view(1) * 2 * x": lambda m, x: m.t.view(1) * 2 * x,
    "t * u * x": lambda m, x: m.t * m.u * x,
    "x ** (1 + t ** 2)": lambda m, x: (x.abs() + 0.1) ** (1 + m.t**2),
    "1 / t * x": lambda m, x: 1 / m.t * x,
    "x + t": lambda m, x: x + m.t,
    "x - u * t": lambda m, x: x - m.u * m.t,
    "x + tanh(t)": lambda m, x: x + torch.tanh(m.t),
    "a mixture": lambda m, x: torch.sigmoid(m.t) * x + (1 - torch.sigmoid(m.t)) * x.flip(1),
    "lerp": lambda m, x: torch.lerp(x, x.flip(1), torch.sigmoid(m.t)),
    "stack of two": lambda m, x: torch.stack([m.t, m.u]).sum() * x,
    "softmax of two": lambda m, x: torch.softmax(torch.stack([m.t, m.u]), 0)[0] * x,
    "t.abs().sqrt()": lambda m, x: m.t.abs().sqrt() * x,
    "square(t)": lambda m, x: m.t.square() * x,
    "expanded": lambda m, x: m.t.expand(5) * x,
    "a cosine with a temperature": lambda m, x: m.t.exp() * functional.normalize(x + 0.1, dim=1),
    "read as a number of t.data": lambda m, x: (1 + m.t) * x * float(m.t.data),
}
WALLS = ("x ** (1 + t ** 2)", "x + t", "x - u * t", "x + tanh(t)", "lerp", "a cosine with a temperature")
X = torch.randn(9, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(9) % 3


def hessians(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Of the mean loss: with respect to all parameters, and to each of them."""
    params = {name: value.detach() for name, value in model.named_parameters()}
    sizes = [value.numel() for value in params.values()]

    def loss(vector: Tensor) -> Tensor:
        parts = zip(params.items(), vector.split(sizes), strict=True)
        given = {name: part.reshape(value.shape) for (name, value), part in parts}
        return functional.cross_entropy(functional_call(model, given, (X,)), Y)

    whole: Any = torch.autograd.functional.hessian(loss, torch.cat([value.reshape(-1) for value in params.values()]))
    blocks, at = {}, 0
    for name, size in zip(params, sizes, strict=True):
        blocks[name], at = whole[at : at + size, at : at + size], at + size
    return whole, blocks


@pytest.mark.parametrize("bend", [torch.relu, torch.tanh], ids=["relu", "tanh"])
@pytest.mark.parametrize("name", FORMS)
def test_values_are_those_of_a_dense_hessian(name: str, bend: Callable[[Tensor], Tensor]) -> None:
    model = Scaled(FORMS[name], bend).eval()
    whole, blocks = hessians(model)
    names = ["hessian_trace", "hessian_max_eigenvalue", "layer_trace", "kappa_trace", "layer_max_eigenvalue"]
    table = fs.measure(fs.Problem(model, train=(X, Y)), names, precision=0)
    assert table["hessian_trace"] == pytest.approx(float(whole.trace()), rel=1e-8)
    assert table["hessian_max_eigenvalue"] == pytest.approx(float(torch.linalg.eigvalsh(whole)[-1]), rel=1e-5)
    assert list(table.layer("layer_trace")) == ["first", "last"]
    for layer in ("first", "last"):
        block = blocks[f"{layer}.weight"]
        norm = float(model.get_parameter(f"{layer}.weight").detach().square().sum())
        assert table.layer("layer_trace")[layer] == pytest.approx(float(block.trace()), rel=1e-8, abs=1e-11)
        assert table.layer("kappa_trace")[layer] == pytest.approx(float(block.trace()) * norm, rel=1e-8, abs=1e-11)
        top = float(torch.linalg.eigvalsh(block)[-1])
        assert table.layer("layer_max_eigenvalue")[layer] == pytest.approx(top, rel=1e-5)


@pytest.mark.parametrize("name", FORMS)
def test_rescaling_keeps_the_function_and_no_measure_crashes(name: str) -> None:
    model = Scaled(FORMS[name]).eval()
    if name in WALLS:
        with pytest.raises(NotApplicable, match="something that can be rescaled"):
            fs.rescale(model, X, by="unit", seed=1)
    else:
        twin = fs.rescale(model, X, by="unit", seed=1)
        torch.testing.assert_close(twin(X), model(X), rtol=1e-9, atol=1e-11)
    names = ["*path_norm", "lipschitz*", "psi_trace", "l2_norm", "gradient_noise", "margin", "sharpness"]
    frame = fs.measure(fs.Problem(model, train=(X, Y)), names).to_frame()
    assert not frame["reason"].str.startswith("failed").any()
    audit = fs.audit(fs.Problem(model, train=(X, Y)), ["fisher_rao_norm"], trials=1)
    assert set(audit.to_frame()["verdict"]) <= {"invariant", "moved", "not tested"}


@pytest.mark.parametrize("name", ["t * x", "exp(t) * x", "(1 + t) * x", "t * u * x", "x / t", "expanded"])
def test_norms_are_those_of_the_network_with_the_factor_in_its_last_weight(name: str) -> None:
    model = Scaled(FORMS[name]).eval()
    factor = float(FORMS[name](model, torch.ones(1, 5, dtype=torch.float64)).detach()[0, 0])
    twin = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double().eval()
    with torch.no_grad():
        twin[0].weight.copy_(model.first.weight)
        twin[0].bias.copy_(model.first.bias)
        twin[2].weight.copy_(model.last.weight * factor)
        twin[2].bias.copy_(model.last.bias)
    names = ["l1_path_norm", "l2_path_norm", "lipschitz_linf"]
    found, expected = (fs.measure(fs.Problem(net, train=(X, Y)), names) for net in (model, twin))
    for measure in names:
        assert found[measure] == pytest.approx(expected[measure], rel=1e-9), measure
    bound, other = (value_of(fs.Problem(net, train=(X, Y)), "lipschitz_l2") for net in (model, twin))
    assert bound == pytest.approx(other, rel=1e-9)


def test_a_similarity_with_a_temperature_as_in_contrastive_models() -> None:
    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.image = nn.Linear(4, 5).double()
            self.classes = nn.Parameter(torch.randn(3, 5).double())
            self.logit_scale = nn.Parameter(torch.tensor(1.2, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            image = functional.normalize(self.image(x), dim=-1)
            return self.logit_scale.exp() * image @ functional.normalize(self.classes, dim=-1).t()

    model = Contrast().eval()
    whole, blocks = hessians(model)
    table = fs.measure(fs.Problem(model, train=(X, Y)), ["hessian_trace", "layer_trace"], precision=0)
    assert table["hessian_trace"] == pytest.approx(float(whole.trace()), rel=1e-8)
    assert table.layer("layer_trace")["image"] == pytest.approx(float(blocks["image.weight"].trace()), rel=1e-8)


@pytest.mark.parametrize("space", ["weights", "psi"])
def test_landscapes_have_a_plane_through_it(space: str) -> None:
    problem = fs.Problem(Scaled(FORMS["exp(t) * x"]).eval(), train=(X, Y))
    surface = fs.landscape(problem, space=space, grid=5, span=0.01)
    assert torch.as_tensor(surface.loss).isfinite().all()


def test_chains_move_it_as_they_move_a_vector_of_one() -> None:
    model, twin = Scaled(FORMS["exp(t) * x"]).eval(), Scaled(FORMS["exp(t) * x"]).eval()
    for name in ("t", "u"):
        setattr(twin, name, nn.Parameter(getattr(twin, name).detach().reshape(1)))
    names = ["local_learning_coefficient", "wbic"]
    one, other = (fs.measure(fs.Problem(m, train=(X, Y)), names) for m in (model, twin))
    for name in names:
        assert one[name] == pytest.approx(other[name], rel=1e-9), one.reason(name)


def test_a_parameter_without_entries_has_no_curvature() -> None:
    """Products cannot be reshaped around it: eigenvalues failed."""
    model = nn.Sequential(nn.Linear(4, 3)).double()
    x, y = torch.eye(4).double(), torch.tensor([0, 1, 2, 0])
    names = ["hessian_max_eigenvalue", "hessian_trace", "gradient_norm", "parameter_count"]
    expected = fs.measure(fs.Problem(model, train=(x, y)), names)
    model.register_parameter("none", nn.Parameter(torch.zeros(0, 3).double()))
    found = fs.measure(fs.Problem(model, train=(x, y)), names)
    assert [found[name] for name in names] == pytest.approx([expected[name] for name in names], rel=1e-12)
