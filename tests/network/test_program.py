"""The recorded program: what its steps read and write, what it says of layers and samples, how rarely it is made."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import flatscope as fs
from flatscope.curvature import sweep
from flatscope.curvature.route import find_not_covered
from flatscope.network import interception
from flatscope.network.linearity import Linearity, choice_in
from flatscope.network.pass_recording import record
from flatscope.network.program import Program
from flatscope.network.structure import record_structure

torch.set_num_threads(1)


class Net(nn.Module):
    """Two layers between which any function stands."""

    def __init__(self, between: Any, features: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.between = nn.Linear(3, features), nn.Linear(features, 2), between
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        """Samples (n, …, 3)."""
        return self.last(self.between(self.first(x)))


def recorded(model: nn.Module, x: Tensor) -> Program:
    return record(model, x, {name: p.detach().requires_grad_() for name, p in model.named_parameters()}).program


X = torch.linspace(-1, 2, 15, dtype=torch.float64).reshape(5, 3)


def test_a_write_in_place_makes_a_new_slot_of_the_same_memory() -> None:
    program = recorded(Net(lambda h: h.mul_(2)), X)
    linear, multiplied, _ = program.steps
    assert multiplied.written is not None
    assert multiplied.written.memory == linear.results[0].memory
    assert multiplied.written.index != linear.results[0].index
    assert multiplied.reads == linear.results


@pytest.mark.parametrize(
    ("between", "moved", "behind"),
    [
        (torch.relu, "first.weight", ["relu", "linear"]),
        (lambda h: h.detach(), "first.weight", ["detach", "linear"]),
        (lambda h: h.mul_(2), "first.bias", ["mul", "linear"]),
        (torch.relu, "last.weight", []),
    ],
)
def test_what_stands_behind_a_parameter(between: Any, moved: str, behind: list[str]) -> None:
    program = recorded(Net(between), X)
    assert [program.steps[number].name for number in sorted(program.behind([moved]))] == behind


class Turned(nn.Module):
    """A layer whose weight is turned before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.last = nn.Parameter(torch.ones(3, 4, dtype=torch.float64)), nn.Linear(4, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        """Samples (n, 3)."""
        return self.last(torch.relu(functional.linear(x, self.w.T)))


def test_a_layer_that_reads_a_view_of_its_weight_is_not_behind_it() -> None:
    program = recorded(Turned(), X)
    names = [program.steps[number].name for number in sorted(program.behind(["w"]))]
    assert names == ["relu", "linear"]


def test_a_write_that_only_the_tensor_tells() -> None:
    """`relu(h, inplace=True)` has no mark in its name."""
    program = recorded(Net(lambda h: functional.relu(h, inplace=True)), X)
    linear, rectified, _ = program.steps
    assert rectified.written is not None
    assert rectified.written.memory == linear.results[0].memory


def write_through_a_view(h: Tensor) -> Tensor:
    """The rows of `h` are written to through a view of a constant."""
    out = torch.zeros(h.shape, dtype=h.dtype)
    out[:, :2][...] = h[:, :2].square()
    return out


def test_what_is_written_through_a_view_reaches_its_base() -> None:
    model = Net(write_through_a_view)
    linearity = Linearity(recorded(model, X), dict(model.named_parameters()))
    assert linearity.reached == {"first.weight", "first.bias", "last.weight", "last.bias"}
    assert linearity.curved.keys() == {"first.weight", "first.bias"}
    assert "square" in linearity.curved["first.weight"]


def test_what_cannot_be_seen_may_be_curved_in_everything() -> None:
    @torch.jit.script
    def scripted(h: Tensor) -> Tensor:
        return h * 2

    model = Net(scripted)
    assert Linearity(recorded(model, X), dict(model.named_parameters())).curved.keys() >= {"first.weight"}
    assert recorded(model, X).has_hidden_parts()
    assert not recorded(Net(lambda h: h * 2), X).has_hidden_parts()


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        (functional.relu, ""),
        (lambda h: h if h.sum() > 0 else -h, "bool"),
        (lambda h: h[h[:, 0].argsort()], "getitem"),
        (lambda h: h * float(h.max()), "float"),
    ],
)
def test_values_that_decide_what_is_computed(between: Any, expected: str) -> None:
    assert choice_in(recorded(Net(between), X)).split(" ")[0].strip("_") == expected


class Rows(nn.Module):
    """A layer on sequences that are flattened into rows: of each sample together, or all first positions first."""

    def __init__(self, positions_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.positions_first = nn.Linear(3, 2), positions_first
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        """Samples (n, positions, 3)."""
        n, length, _ = x.shape
        if self.positions_first:
            return self.layer(x.transpose(0, 1).reshape(-1, 3)).reshape(length, n, 2).sum(0)
        return self.layer(x.reshape(-1, 3)).reshape(n, length, 2).sum(1)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_rows_are_those_of_a_sample(n: int) -> None:
    x = torch.randn(n, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mixing = {}
    for positions_first in (False, True):
        model = Rows(positions_first)
        mixing[positions_first] = record_structure(model, x, dict(model.named_parameters())).mixing
    assert not mixing[False]
    assert mixing[True] == {"layer.weight"}


def test_the_axis_of_the_samples_is_where_a_pass_of_more_is_longer() -> None:
    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2).double().eval()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.transpose(0, 1)).sum(0)

    model, x = Second(), torch.randn(2, 4, 3, dtype=torch.float64)
    structure = record_structure(model, x, dict(model.named_parameters()))
    assert structure.axes == {"layer.weight": 1}
    assert not structure.mixing


def problem_of(model: nn.Module) -> fs.Problem:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, dtype=torch.float64, generator=generator)
    return fs.Problem(model, (x, torch.randint(0, 2, (40,), generator=generator)))


def test_the_first_passes_record_what_the_network_runs_from_then_on() -> None:
    """Three views of one pass see nothing of each other."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer, self.last = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            """Samples (n, positions, 4)."""
            return self.last(self.layer(x).mean(1))

    for model, shape in ((Net(functional.relu).float(), (3,)), (Encoder().eval(), (5, 4))):
        problem = fs.Problem(model, (torch.randn(6, *shape), torch.arange(6) % 2))
        first, again = problem.structure.program, record(problem.model, problem.example(), problem.leaves()).program
        assert [(step.name, step.module, step.within) for step in first.steps] == [
            (step.name, step.module, step.within) for step in again.steps
        ]


def test_copies_with_other_weights_share_what_was_read() -> None:
    problem = problem_of(Net(functional.relu))
    structure = problem.structure
    twin = problem.rescaled(fs.rescale(problem.model, problem.example(), seed=1))
    assert twin.structure is structure
    assert not torch.equal(twin.params["first.weight"], problem.params["first.weight"])
    other = problem.with_model(problem.model)
    assert other.structure is not structure


def test_structure_is_read_at_the_networks_own_weights() -> None:
    """At zeros every two ways to a number agree; what was believed there would hold for all weights."""
    problem = problem_of(Net(functional.relu))
    zeros = {name: torch.zeros_like(value) for name, value in problem.params.items()}
    moved = fs.Context(problem).at(zeros)
    norm = moved.structural(squared_norm)
    assert norm == pytest.approx(sum(float(v.square().sum()) for v in problem.params.values()))
    assert fs.Context(problem).structural(squared_norm) is norm


def squared_norm(context: fs.Context) -> float:
    return sum(float(value.square().sum()) for value in context.params.values())


@pytest.fixture
def watchers(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many passes were watched."""
    count: Counter[str] = Counter()
    enter = interception.watched.__enter__

    def counted(self: interception.watched) -> Any:
        count["passes"] += 1
        return enter(self)

    monkeypatch.setattr(interception.watched, "__enter__", counted)
    return count


def test_an_audit_reads_the_network_once(watchers: Counter[str]) -> None:
    problem = problem_of(Net(functional.relu, features=16))
    watchers.clear()
    audit = fs.audit(problem, ["hessian_trace", "rho_sum"])
    assert watchers["passes"] <= 25
    verdicts = audit.to_frame().set_index(["measure", "symmetry"])["verdict"]
    assert verdicts["hessian_trace", "unit_scaling"] == "moved"
    assert verdicts["rho_sum", "unit_scaling"] == "invariant"


class Counted(Net):
    """Counts its own calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Samples (n, 3)."""
        type(self).calls += 1
        return super().forward(x)


def test_few_passes_for_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    before, swept = list[int](), sweep.backpropagated

    def noted(*args: Any) -> Any:
        before.append(Counted.calls)
        return swept(*args)

    monkeypatch.setattr(sweep, "backpropagated", noted)
    Counted.calls = 0
    problem = problem_of(Counted(functional.relu))
    assert Counted.calls == 3, "outputs, and two passes that are recorded: their outputs must be the same"
    Counted.calls = 0
    table = fs.measure(problem, "layer_trace")
    assert table.layer("layer_trace").keys() == {"first", "last"}
    assert before == [2], "samples that tell, and one pass to differentiate twice"
    assert Counted.calls == 3, "the sweep"
    fs.measure(problem, "layer_trace", seed=1)
    assert Counted.calls == 4, "the second time the network is known"
    assert table.headline
    assert 4 < Counted.calls <= 14, "what the table says of the minimum: loss, gradient, steps along it"


class Cnn(nn.Module):
    """Two convolutions with pools, and two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.third, self.last = nn.Linear(24, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, 1, 8, 8)."""
        h = functional.max_pool2d(torch.relu(self.first(x)), 2)
        h = functional.max_pool2d(torch.relu(self.second(h)), 2)
        return self.last(torch.relu(self.third(h.flatten(1))))


def test_few_watched_passes_for_the_standard_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every measure that is not long, on a small CNN; of the 14 most are values that no other pass has."""
    watched_calls, depth = list[str](), 0
    enter, leave, forward = interception.watched.__enter__, interception.watched.__exit__, Cnn.forward

    def entered(self: interception.watched) -> Any:
        nonlocal depth
        depth += 1
        return enter(self)

    def left(self: interception.watched, *error: Any) -> None:
        nonlocal depth
        depth -= 1
        leave(self, *error)

    def called(self: Cnn, x: Tensor) -> Tensor:
        if depth:
            watched_calls.append("pass")
        return forward(self, x)

    monkeypatch.setattr(interception.watched, "__enter__", entered)
    monkeypatch.setattr(interception.watched, "__exit__", left)
    monkeypatch.setattr(Cnn, "forward", called)
    x, y = torch.randn(30, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(30) % 3
    problem = fs.Problem(Cnn().eval(), train=(x, y), test=(x[:9].flip(3), y[:9]))
    table = fs.measure(problem, "standard")
    assert math.isfinite(table["psi_activation_radius"])
    assert math.isfinite(table["lipschitz_linf"])
    assert len(watched_calls) <= 15


class Twice(Net):
    """The first layer's weight reads the samples, and what became of them."""

    def forward(self, x: Tensor) -> Tensor:
        """Samples (n, 3)."""
        h = self.first(x)
        return self.last(self.first(functional.relu(h)[:, :3]) + h)


def test_every_use_of_a_layer_counts() -> None:
    context = fs.Context(problem_of(Twice(None)))
    assert [(layer.name, layer.uses) for layer in context.network] == [("first", 2), ("last", 1)]
    assert not context.network.chain


class Tied(Net):
    """The last layer reads the first one's weight through a view of it."""

    def forward(self, x: Tensor) -> Tensor:
        """Samples (n, 3)."""
        return functional.linear(torch.tanh(self.first(x)), self.first.weight.T)


def test_a_weight_that_is_read_through_a_view_is_known_by_name_alone() -> None:
    context = fs.Context(problem_of(Tied(None)))
    uses = context.structure.program.layer_uses()
    assert [(use.weight, use.opaque) for use in uses] == [("first.weight", False), ("first.weight", True)]
    assert find_not_covered(context, "gauss_newton")["first.weight"] == "used through a view of it"


def test_attention_is_recorded_in_its_parts() -> None:
    net = Net(lambda h: functional.scaled_dot_product_attention(*[h.reshape(-1, 2, 2)] * 3).flatten(1))
    program = fs.Context(problem_of(net)).structure.program
    within = [step.name for step in program.steps if step.within == "scaled_dot_product_attention"]
    assert within.count("matmul") == 2
    assert "softmax" in within
    assert "scaled_dot_product_attention" not in {step.name for step in program.steps}


def test_a_tensor_that_is_asked_to_require_a_gradient_goes_on() -> None:
    """`x.requires_grad_()` returns the tensor: what was computed before it reaches the outputs."""

    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.first(x))
            assert isinstance(h.requires_grad, bool)
            return self.last(h.requires_grad_() if h.is_leaf else h.clone().requires_grad_(True))

    torch.manual_seed(0)
    model = Energy().double().eval()
    x, y = torch.randn(9, 3, dtype=torch.float64), torch.arange(9) % 2
    table = fs.measure(fs.Problem(model, train=(x, y)), ["layer_trace", "hessian_trace"])
    plain = nn.Sequential(model.first, nn.Tanh(), model.last)
    expected = fs.measure(fs.Problem(plain, train=(x, y)), ["layer_trace", "hessian_trace"])
    assert table["hessian_trace"] == pytest.approx(expected["hessian_trace"], rel=1e-9)
    assert list(table.layer("layer_trace").values()) == pytest.approx(list(expected.layer("layer_trace").values()))
