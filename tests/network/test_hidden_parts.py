"""Parts of a network that are easily overlooked: complex buffers, second uses of a parameter, samples with NaN."""

from __future__ import annotations

import types

import pytest
import torch
from networks import _built
from references import TWINS, Dense
from torch import Tensor, nn
from torch.nn import functional

import flatscope as fs
from flatscope.context import Context, Effort, Scores
from flatscope.curvature import coverage
from flatscope.curvature.coverage import coverage_by_layer_uses
from flatscope.errors import InputError
from flatscope.network.structure import Structure
from flatscope.reading import recorded_structure


class Rotary(nn.Module):
    """Attention whose queries and keys are turned by a complex buffer, as large language models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(4, size) for size in (4, 4, 4, 3))
        angles = torch.outer(torch.arange(3).double(), torch.tensor([1.0, 0.1]).double())
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def turned(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, 3, 4)
        return self.out(
            functional.scaled_dot_product_attention(self.turned(self.q(x)), self.turned(self.k(x)), self.v(x))
        ).mean(1)


def test_complex_buffers_stay_complex() -> None:
    tiny = _built("rotary", Rotary(), (12,), 3, ("q", "k", "v", "out"))
    table = fs.measure(tiny.problem(), ["hessian_trace", "gradient_norm"], precision=0)
    for name in ("hessian_trace", "gradient_norm"):
        assert table[name] == pytest.approx(TWINS[name](Dense(tiny)), rel=1e-9)
    single = fs.Problem(tiny.model, train=(tiny.x, tiny.y), dtype=torch.float32)
    assert single.buffers["turns"].dtype == torch.complex64


def test_complex_parameters_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model.register_parameter("w", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    with pytest.raises(fs.InputError, match="real parameters") as refused:
        fs.Problem(model.eval(), train=(torch.randn(5, 3), torch.arange(5) % 3))
    assert refused.value.where == "w"


class Again(nn.Module):
    """The bias of a layer is added once more, for marked samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x[:, 1:]))
        return self.last(torch.where(x[:, :1] > 0, h + self.first.bias, h))


def test_a_second_use_that_few_samples_need_is_seen() -> None:
    tiny = _built("again", Again(), (5,), 3, ("first", "last"))
    tiny.x[:, 0] = 0.0
    tiny.x[-1, 0] = 1.0
    table = fs.measure(tiny.problem(), ["hessian_trace", "layer_trace"], precision=0)
    assert table["hessian_trace"] == pytest.approx(TWINS["hessian_trace"](Dense(tiny)), rel=1e-9)
    assert table.layer("layer_trace") == pytest.approx(TWINS["layer_trace"](Dense(tiny)), rel=1e-9)


class Listed(nn.Module):
    """Reads a weight from a list of its own, where nothing can be put in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.weights = [self.first.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(functional.linear(x, self.weights[0], self.first.bias)))


def test_a_parameter_that_is_read_behind_the_modules_is_refused() -> None:
    with pytest.raises(fs.InputError, match="read from their modules") as refused:
        fs.Problem(Listed().eval(), train=(torch.randn(6, 4), torch.arange(6) % 3))
    assert refused.value.where == "first.weight"


class Unused(nn.Module):
    """Curved in all parameters but one, which does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.idle = nn.Linear(4, 3), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


def test_an_idle_parameter_beside_curved_ones() -> None:
    tiny = _built("unused", Unused(), (4,), 3, ("layer",))
    found = fs.measure(tiny.problem(), "hessian_trace", precision=0)["hessian_trace"]
    names = [name for name, _ in tiny.model.named_parameters() if name != "idle"]
    assert found == pytest.approx(float(Dense(tiny).hessian_of(names).trace()), rel=1e-9)


class Divided(nn.Module):
    """0/0 for samples of which no unit is active."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        return self.last(h / h.norm(dim=1, keepdim=True))


def test_samples_without_an_output_are_named_and_no_search_goes_on_for_ever() -> None:
    model = Divided().double().eval()
    with torch.no_grad():
        model.first.weight.fill_(1.0)
        model.first.bias.zero_()
    x = torch.ones(8, 2, dtype=torch.float64)
    x[-1] = -1.0
    problem = fs.Problem(model, train=(x, torch.arange(8) % 3), batch_size=4)
    frame = fs.measure(problem, ["hessian_max_eigenvalue", "hessian_min_eigenvalue", "margin"]).to_frame()
    assert frame["value"].isna().all()
    assert frame["reason"].str.len().gt(0).all()


def test_a_margin_that_is_no_number_is_an_error() -> None:
    assert Scores(torch.zeros(2), torch.tensor([1.0, torch.nan])).error == 0.5


@torch.jit.script
def softly_clipped(x: Tensor) -> Tensor:
    """ReLU up to 3, smooth beyond, where few samples come."""
    return torch.where(x > 3, 3 + torch.tanh(x - 3), torch.relu(x))


class Scripted(nn.Module):
    """A function whose operations nobody sees from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(softly_clipped(self.first(x)))


def test_what_a_scripted_function_hides_is_not_taken_for_linear() -> None:
    tiny = _built("scripted", Scripted(), (4,), 3, ("first", "last"))
    tiny.x[-1] *= 30
    ctx = fs.Context(tiny.problem())
    assert "first.weight" in ctx.cached(coverage_by_layer_uses).curved
    found = fs.measure(tiny.problem(), "hessian_trace", precision=0)["hessian_trace"]
    assert found == pytest.approx(TWINS["hessian_trace"](Dense(tiny)), rel=1e-9)


class Branching(nn.Module):
    """A network that looks at its samples before it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x)) if bool((x > 9).any()) else self.first(x)
        out: Tensor = self.last(h)
        return out


def test_all_samples_are_read_only_where_they_decide_what_is_computed() -> None:
    x, y = torch.randn(40, 4), torch.arange(40) % 3
    for model, decide in (
        (nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), False),
        (Branching(), True),
    ):
        problem = fs.Problem(model.eval(), train=(x, y))
        assert problem.samples_decide == decide
        forward = 2 if decide else 0
        context = Context(problem)
        context.cached(coverage_by_layer_uses)
        assert context.passes["forward"] == forward


def test_samples_are_read_within_the_memory_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def noted(problem: fs.Problem, inputs: Tensor) -> Structure:
        sizes.append(len(inputs))
        return recorded_structure(problem, inputs)

    monkeypatch.setattr(coverage, "recorded_structure", noted)
    problem = fs.Problem(Branching().eval(), train=(torch.randn(400, 4), torch.arange(400) % 3), batch_size=128)
    found = Context(problem).cached(coverage_by_layer_uses)
    assert max(sizes) == 128
    sizes.clear()
    program = Context(problem).structure.program
    held = 2 * program.held_bytes() / program.n_samples
    assert held == pytest.approx(2 * 4 * (2 * 5 + 3), rel=0.5)  # two hidden layers of five numbers, three outputs
    less = Context(problem, effort=Effort(memory=int(10 * held))).cached(coverage_by_layer_uses)
    assert max(sizes) == 10
    assert (less.curved, less.rows) == (found.curved, found.rows)


def test_a_forward_that_holds_another_model_is_refused() -> None:
    """Its copy would run the original, whose weights do not move: gradient and curvature came out as zero."""
    model = torch.nn.ModuleDict({"inner": torch.nn.Linear(3, 4), "head": torch.nn.Linear(4, 2)})
    model.forward = lambda x: 3 * model["head"](torch.tanh(model["inner"](x)))  # type: ignore[method-assign]
    data = torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 1, 0])
    with pytest.raises(InputError, match="that no module of it has"):
        fs.Problem(model, train=data)
    bound = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    bound.forward = types.MethodType(lambda self, x: self[2](self[1](self[0](x))), bound)  # type: ignore[method-assign]
    assert fs.measure(fs.Problem(bound, train=data), "gradient_norm")["gradient_norm"] > 0  # a method moves along


def test_parameters_of_a_module_that_is_not_registered_are_refused() -> None:
    class Listed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.hidden = torch.nn.Linear(4, 2), [torch.nn.Linear(3, 4)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.head(self.hidden[0](x))
            return made

    with pytest.raises(InputError, match=r"\(4, 3\) that no module"):
        fs.Problem(Listed(), train=(torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 1, 0])))
