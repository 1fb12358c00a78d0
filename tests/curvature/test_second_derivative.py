"""Curvature is refused where autograd's second derivative is not that of the function, and nowhere else."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from own_double import OwnDouble
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import flatscope as fs
from flatscope.context import Context
from flatscope.curvature import second_derivative
from flatscope.curvature.checked_pass import SharedPass
from flatscope.curvature.second_derivative import look_at_second_derivative
from flatscope.errors import NotApplicable

CURVATURE = ["hessian_trace", "hessian_max_eigenvalue", "hessian_min_eigenvalue", "batch_sharpness"]
OF_LAYERS = ["kappa_trace_sum", "rho_sum", "psi_trace", "layer_trace"]


class Marked(torch.autograd.Function):
    """relu(x)² whose backward may be differentiated once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0) ** 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * 2 * x.clamp(min=0)


class Detached(torch.autograd.Function):
    """relu(x)² whose backward takes its slope for a constant: products are symmetric and wrong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.slope = 2 * x.clamp(min=0).detach()
        return x.clamp(min=0) ** 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.slope


class Right(torch.autograd.Function):
    """relu(x)² with a backward that can be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0) ** 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * 2 * x.clamp(min=0)


class Activated(nn.Module):
    """Two layers and a function between them."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int = 8) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(6, width), nn.Linear(width, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.a(x)))


class Equilibrium(nn.Module):
    """z = tanh(W z + U x): the first derivative by the implicit function theorem in a hook, or unrolled."""

    def __init__(self, unrolled: bool) -> None:
        super().__init__()
        self.w, self.u, self.o, self.unrolled = nn.Linear(5, 5), nn.Linear(6, 5), nn.Linear(5, 3), unrolled
        self.w.weight.data.mul_(0.3)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.w(z) + self.u(x))

    def forward(self, x: Tensor) -> Tensor:
        z = x.new_zeros(len(x), 5)
        with torch.set_grad_enabled(self.unrolled and torch.is_grad_enabled()):
            for _ in range(50):
                z = self.step(z, x)
        if self.unrolled:
            return self.o(z)
        z = self.step(z, x)
        start = z.clone().detach().requires_grad_()
        following = self.step(start, x)

        def solved(gradient: Tensor) -> Tensor:
            found = gradient
            for _ in range(50):
                found = torch.autograd.grad(following, start, found, retain_graph=True)[0] + gradient
            return found

        if z.requires_grad:
            z.register_hook(solved)
        return self.o(z)


@pytest.fixture
def doubtful(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every network had something in it that is not known, so that numbers have to tell."""
    monkeypatch.setattr(second_derivative, "_has_doubts", lambda *_: True)


def data(n: int = 40) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, torch.arange(n) % 3


def made(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return build().to(dtype).eval()


def dense_hessian(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """By central differences of the gradient, entry by entry."""
    names, values = zip(*model.named_parameters(), strict=True)
    sizes = [value.numel() for value in values]
    start = torch.cat([value.detach().flatten() for value in values])

    def gradient(vector: Tensor) -> Tensor:
        parts = [
            part.view_as(value).clone().requires_grad_()
            for part, value in zip(vector.split(sizes), values, strict=True)
        ]
        outputs = torch.func.functional_call(model, dict(zip(names, parts, strict=True)), (x,))
        loss = nn.functional.cross_entropy(outputs, y)
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, parts)])

    step = 1e-5
    rows = [
        (gradient(start + step * unit) - gradient(start - step * unit)) / (2 * step)
        for unit in torch.eye(len(start), dtype=start.dtype)
    ]
    found = torch.stack(rows)
    return (found + found.T) / 2


WRONG = {
    "once_differentiable": (lambda: Activated(Marked.apply), "Marked"),
    "detached slope": (lambda: Activated(Detached.apply), "Detached"),
    "hook": (lambda: Equilibrium(unrolled=False), "hook"),
}
RIGHT: dict[str, Callable[[], nn.Module]] = {
    "written in torch": lambda: Activated(lambda h: h.clamp(min=0) ** 2),
    "own function": lambda: Activated(Right.apply),
    "unrolled": lambda: Equilibrium(unrolled=True),
    "tanh": lambda: Activated(torch.tanh),
    "relu": lambda: Activated(torch.relu, 300),
    "hard tanh": lambda: Activated(nn.functional.hardtanh, 300),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wrong_second_derivatives_are_refused_by_name(name: str, dtype: torch.dtype) -> None:
    build, said = WRONG[name]
    x, y = data()
    problem = fs.Problem(made(build, dtype), train=(x.to(dtype), y))
    frame = fs.measure(problem, [*CURVATURE, *OF_LAYERS, "gradient_norm"]).to_frame().set_index("measure")
    assert math.isfinite(frame.loc["gradient_norm", "value"])
    assert frame.loc[OF_LAYERS, "value"].isna().all()
    for measure in CURVATURE:
        assert math.isnan(frame.loc[measure, "value"]), measure
        assert "second derivative" in frame.loc[measure, "reason"]
        assert said in frame.loc[measure, "reason"]
    for made_by in (fs.hessian, fs.eigenpairs, fs.spectral_density):
        with pytest.raises(NotApplicable, match="second derivative"):
            made_by(problem)


@pytest.mark.usefixtures("doubtful")
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_right_ones_are_served(name: str, dtype: torch.dtype) -> None:
    x, y = data()
    model = made(RIGHT[name], dtype)
    problem = fs.Problem(model, train=(x.to(dtype), y))
    assert look_at_second_derivative(Context(problem)).checked
    table = fs.measure(problem, ["hessian_trace"], precision=0)
    if "relu" not in name and "hard" not in name:
        true = float(dense_hessian(model.double(), x, y).trace())
        assert table["hessian_trace"] == pytest.approx(true, rel=1e-4 if dtype == torch.float32 else 1e-6)


@pytest.mark.parametrize("name", ["once_differentiable", "hook"])
def test_products_with_the_jacobian_are_refused_where_two_backward_passes_lose_terms(name: str) -> None:
    problem = fs.Problem(made(WRONG[name][0]), train=data())
    frame = fs.measure(problem, ["fisher_rao_norm"]).to_frame()
    assert math.isnan(frame["value"][0])
    assert WRONG[name][1] in frame["reason"][0]
    with pytest.raises(NotApplicable, match="Jacobian"):
        fs.gauss_newton(problem)


def test_a_constant_slope_changes_no_product_with_the_jacobian() -> None:
    names = ["fisher_rao_norm", "gradient_norm"]
    x, y = data()
    wrong, right = (
        fs.measure(fs.Problem(made(build), train=(x, y)), names)
        for build in (WRONG["detached slope"][0], RIGHT["written in torch"])
    )
    for name in names:
        assert wrong[name] == pytest.approx(right[name], rel=1e-12)


class Kinks(nn.Module):
    """ReLU, max-pooling and hard tanh over ten thousand units."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.other = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3)
        self.out = nn.Linear(16 * 36, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.max_pool2d(torch.relu(self.conv(x)), 2)
        return self.out(nn.functional.hardtanh(self.other(h)).flatten(1))


@pytest.mark.usefixtures("doubtful")
@pytest.mark.parametrize("seed", range(4))
def test_no_false_alarm_at_kinks_with_ten_thousand_samples(seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(10_000, 1, 16, 16).clamp(min=0)  # half of every image is blank
    x[::7] = 0
    problem = fs.Problem(Kinks().eval(), train=(x, torch.arange(10_000) % 10))
    found = look_at_second_derivative(Context(problem))
    assert found.checked
    assert not found.wrong


@pytest.mark.usefixtures("doubtful")
def test_no_false_alarm_where_units_stand_exactly_at_their_kink() -> None:
    """A layer of zeros in front of a ReLU: the gradient has a jump there, and differences see half of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 3)).double().eval()
    nn.init.zeros_(model[0].weight[:10])
    nn.init.zeros_(model[0].bias)
    nn.init.zeros_(model[2].weight[:4])
    nn.init.zeros_(model[2].bias)
    x, y = data()
    found = look_at_second_derivative(Context(fs.Problem(model, train=(x, y))))
    assert not found.wrong
    value = fs.measure(fs.Problem(model, train=(x, y)), "hessian_trace")["hessian_trace"]
    assert math.isfinite(value)


@pytest.mark.usefixtures("doubtful")
def test_differences_that_cross_a_kink_are_not_believed() -> None:
    """Every unit is so near its kink, on all samples, that the smallest step crosses it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3)).double().eval()
    x = torch.randn(1, 6, dtype=torch.float64)
    with torch.no_grad():
        model[0].bias.copy_(1e-10 - (x @ model[0].weight.T)[0])
    found = look_at_second_derivative(Context(fs.Problem(model, train=(x.repeat(12, 1), torch.arange(12) % 3))))
    assert not found.wrong


@pytest.mark.usefixtures("doubtful")
def test_a_wrong_layer_is_found_among_many_right_ones() -> None:
    """Its share of the whole product is a thousandth; every parameter is looked at by itself."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 3))
            self.small = Activated(Detached.apply, 2)

        def forward(self, x: Tensor) -> Tensor:
            return 5 * self.body(x) + 0.05 * self.small(x)

    found = look_at_second_derivative(Context(fs.Problem(made(Large), train=data())))
    assert {"small.a.weight", "small.a.bias"} <= set(found.wrong)


def rounded(w: Tensor) -> Tensor:
    """Four bits, passed straight through by the gradient."""
    with torch.no_grad():
        scale = w.abs().max() / 7
    return w + ((w / scale).round() * scale - w).detach()


CONSTANTS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "straight-through rounding": lambda m, x: m.b(torch.tanh(nn.functional.linear(x, rounded(m.a.weight), m.a.bias))),
    "a detached branch": lambda m, x: m.b(torch.tanh(m.a(x)) * torch.sigmoid(m.a(x)).detach()),
    "a statistic of the weights": lambda m, x: m.b(torch.tanh(m.a(x)) / float(m.b.weight.detach().norm())),
    "weights under no_grad": lambda m, x: m.b(torch.tanh(m.a(x)) + _without_grad(m.a, x)),
    "weights read as data": lambda m, x: m.b(torch.tanh(m.a(x)) * m.a.weight.data.sum()),
}


def _without_grad(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = layer(x)
        found += 1
        return found


@pytest.mark.usefixtures("doubtful")
@pytest.mark.parametrize("name", CONSTANTS)
def test_what_a_network_takes_for_a_constant_is_no_wrong_derivative(name: str) -> None:
    class Net(Activated):
        def forward(self, x: Tensor) -> Tensor:
            return CONSTANTS[name](self, x)

    model = made(lambda: Net(torch.tanh))
    x, y = data()
    problem = fs.Problem(model, train=(x, y))
    found = look_at_second_derivative(Context(problem))
    assert found.checked
    assert found.wrong == {}
    values = list(model.parameters())
    slopes = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), values, create_graph=True)
    flat = torch.cat([slope.flatten() for slope in slopes])
    rows = [torch.autograd.grad(entry, values, retain_graph=True, materialize_grads=True) for entry in flat]
    trace = sum(float(torch.cat([part.flatten() for part in row])[i]) for i, row in enumerate(rows))
    assert fs.measure(problem, "hessian_trace", precision=0)["hessian_trace"] == pytest.approx(trace, rel=1e-8)


def test_what_is_not_twice_differentiable_at_all_is_refused_with_a_reason() -> None:
    x, y = torch.randn(12, 10, 4), torch.randint(1, 4, (12, 3))
    model = nn.Sequential(nn.Linear(4, 5)).eval()

    def ctc(outputs: Tensor, targets: Tensor) -> Tensor:
        logs = outputs.log_softmax(2).transpose(0, 1)
        lengths = torch.full((len(targets),), 10), torch.full((len(targets),), 3)
        return nn.functional.ctc_loss(logs, targets, *lengths, reduction="none")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frame = fs.measure(fs.Problem(model, train=(x, y), loss=ctc), "hessian_trace").to_frame()
    assert math.isnan(frame["value"][0])
    assert "differentiated twice" in frame["reason"][0]
    assert not frame["reason"][0].startswith("failed")


@pytest.mark.usefixtures("doubtful")
@pytest.mark.parametrize("padding", [3, -6])
@pytest.mark.parametrize("tied", [False, True])
def test_no_false_alarm_at_the_word_of_padding(padding: int, tied: bool) -> None:
    """The table gives it no gradient, whatever its vector does to the outputs."""

    class Texts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, 4, padding_idx=padding)
            nn.init.normal_(self.words.weight)
            self.inner, self.head = nn.Linear(20, 4), nn.Linear(4, 9)
            if tied:
                self.head.weight = self.words.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(torch.tanh(self.inner(self.words(tokens).flatten(1))))

    torch.manual_seed(0)
    tokens = torch.randint(0, 9, (8, 5), generator=torch.Generator().manual_seed(1))
    assert (tokens == 3).any()
    model = Texts().double().eval()
    problem = fs.Problem(model, train=(tokens, torch.arange(8) % 3))
    found = look_at_second_derivative(Context(problem))
    assert found.checked
    assert not found.wrong
    own = OwnDouble(model, tokens, torch.arange(8) % 3, "cross_entropy")
    value = fs.measure(problem, "hessian_trace", precision=0)["hessian_trace"]
    assert value == pytest.approx(float(own.hessian.trace()), rel=1e-9)


def test_a_pass_with_other_outputs_is_not_the_networks() -> None:
    """The shared pass runs with views of its own; where that changed anything the network itself would be taken."""
    context = Context(fs.Problem(made(next(iter(RIGHT.values()))), train=data()))
    shared = SharedPass(context)
    run = shared.run
    assert shared.as_it_runs(run) is run
    other = replace(run, outputs=run.outputs * 1.01)
    assert shared.as_it_runs(other) is not other
    torch.testing.assert_close(shared.as_it_runs(other).outputs, run.outputs)
