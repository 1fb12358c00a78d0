"""What is computed and dropped counts nowhere: values are those of the network that does not compute it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatscope as fs

torch.set_num_threads(1)
X = torch.randn(24, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(24) % 3
Head = Callable[["Net", Tensor], Any]


class Doubled(torch.autograd.Function):
    """An operation that no rule sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@dataclass
class Found:
    logits: Tensor
    boxes: Any = None


class Net(nn.Module):
    """A body, the head that is measured, and another whose result is dropped."""

    def __init__(self, drop: Head, dropped: bool, bend: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(6, 7).double(), nn.Linear(7, 5).double()
        self.head, self.other = nn.Linear(5, 3).double(), nn.Linear(5, 4).double()
        self.norm = nn.BatchNorm1d(4).double()
        self.norm.running_var.fill_(2.0)
        self.table = nn.Parameter(torch.randn(5, 4, dtype=torch.float64))
        self.drop, self.dropped, self.bend = drop, dropped, bend

    def forward(self, x: Tensor) -> Any:
        h = self.bend(self.second(self.bend(self.first(x))))
        outputs = self.head(h)
        if self.dropped:
            rest = self.drop(self, h)
            if isinstance(rest, Found | dict):
                return Found(outputs, rest.boxes) if isinstance(rest, Found) else {"logits": outputs, **rest}
        return outputs


def written_in_place(m: Net, h: Tensor) -> None:
    boxes = torch.zeros(len(h), 4, dtype=h.dtype)
    boxes[:, :2] = m.other(h)[:, :2]
    boxes.sigmoid_()


def many(m: Net, h: Tensor) -> None:
    for _ in range(3):
        torch.softmax(m.norm(m.other(h)), 1).argmax(1)


DROPPED: dict[str, Head] = {
    "a softmax": lambda m, h: torch.softmax(m.other(h), 1),
    "normalised": lambda m, h: torch.sigmoid(m.norm(m.other(h))),
    "a product with a table": lambda m, h: torch.exp(h @ m.table),
    "written in place": written_in_place,
    "several": many,
    "a view": lambda m, h: torch.cumprod(h[:, :4], 1),
    "the last layer once more": lambda m, h: torch.softmax(m.head(h.square()), 1),
    "the first layer once more": lambda m, h: torch.tanh(m.second(torch.tanh(m.first(h @ h.new_ones(5, 6))))),
    "a part of a dataclass": lambda m, h: Found(h, torch.sigmoid(m.other(h))),
    "an entry of a dictionary": lambda m, h: {"boxes": torch.sigmoid(m.other(h))},
    "an operation that cannot be followed": lambda m, h: Doubled.apply(m.other(h)).tanh(),
    "of constants": lambda m, h: torch.linspace(0, 1, 5, dtype=h.dtype).exp() @ m.other(h).new_ones(5, 3),
    "without derivatives": lambda m, h: torch.softmax(m.other(h.detach()), 1).detach(),
}
NAMES = [
    "*trace*",
    "kappa*",
    "rho*",
    "*eigenvalue",
    "gradient_norm",
    "*path_norm",
    "lipschitz*",
    "certified_radius",
    "psi_*",
    "l2_norm",
    "spectral_norm",
    "fisher_rao_norm",
    "gradient_noise",
    "sharpness",
    "relative_flatness",
    "margin",
    "parameter_count",
]


def values(model: nn.Module, names: list[str] = NAMES, **options: Any) -> Any:
    frame = fs.measure(fs.Problem(model.eval(), train=(X, Y)), names, **options).to_frame()
    return frame[["measure", "layer", "unit", "value", "stderr", "exact", "reason"]]


def assert_same(found: Any, expected: Any) -> None:
    for column in ("measure", "layer", "unit", "exact", "reason"):
        assert found[column].tolist() == expected[column].tolist(), column
    for column in ("value", "stderr"):
        left, right = (torch.tensor(frame[column].to_numpy(dtype=float)) for frame in (found, expected))
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("name", DROPPED)
def test_every_value_is_that_of_the_network_that_does_not_compute_it(name: str) -> None:
    found = values(Net(DROPPED[name], True), precision=0)
    assert_same(found, values(Net(DROPPED[name], False), precision=0))
    assert found["value"].notna().mean() > 0.9


def test_samples_that_are_drawn_and_curved_networks_too() -> None:
    pair = [values(Net(DROPPED["a softmax"], dropped, torch.tanh), precision=0.1) for dropped in (True, False)]
    assert_same(*pair)


@pytest.mark.parametrize("name", ["a softmax", "normalised", "written in place"])
def test_rescaling_folding_and_auditing_leave_it_alone(name: str) -> None:
    both = [Net(DROPPED[name], dropped).eval() for dropped in (True, False)]
    twins = [fs.rescale(net, X, by="unit", seed=1) for net in both]
    with torch.no_grad():
        torch.testing.assert_close(twins[0](X), both[0](X), rtol=1e-9, atol=1e-11)
    for key in ("first.weight", "second.bias", "head.weight"):
        torch.testing.assert_close(twins[0].get_parameter(key), twins[1].get_parameter(key))
    names = ["psi_trace", "l2_path_norm", "fisher_rao_norm", "hessian_trace"]
    one, other = (fs.audit(fs.Problem(net, train=(X, Y)), names, trials=1).to_frame() for net in both)
    assert one["verdict"].tolist() == other["verdict"].tolist()
    torch.testing.assert_close(torch.tensor(one["after"].to_numpy()), torch.tensor(other["after"].to_numpy()))


def test_outputs_beside_the_measured_one_keep_what_they_say_where_weights_are_rescaled() -> None:
    net = Net(DROPPED["an entry of a dictionary"], True).eval()
    twin = fs.rescale(net, X, by="unit", seed=1)
    with torch.no_grad():
        for key, value in net(X).items():
            torch.testing.assert_close(twin(X)[key], value, rtol=1e-9, atol=1e-11)


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return 2 * x


class Alive(nn.Module):
    """What looks dropped and is not: the outputs need it in a way that is given."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second = nn.Linear(6, 5).double(), nn.Linear(5, 5).double()
        self.out, self.held = nn.Linear(5, 3).double(), None
        self.way = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.way(self, torch.tanh(self.first(x))))


def through_memory(m: Alive, h: Tensor) -> Tensor:
    room = torch.zeros_like(h)
    for row in range(len(h)):
        room[row] = torch.tanh(m.second(h[row : row + 1]))[0]
    return room


def through_a_view(m: Alive, h: Tensor) -> Tensor:
    room = torch.zeros_like(h)
    room.view(-1)[:] = torch.tanh(m.second(h)).reshape(-1)
    return room


def added_in_place(m: Alive, h: Tensor) -> Tensor:
    room = h.clone()
    room[:, 1:].add_(torch.tanh(m.second(h))[:, 1:])
    return room


def with_an_argument(m: Alive, h: Tensor) -> Tensor:
    room = torch.empty_like(h)
    with torch.no_grad():
        torch.mul(torch.tanh(m.second(h)), 0.5, out=room)
    return h + room


def on_another_way(m: Alive, h: Tensor) -> Tensor:
    one, other = torch.tanh(m.second(h)), torch.sigmoid(m.second(h))
    return one if bool(h[0, 0] > 0) else other


def kept_on_the_module(m: Alive, h: Tensor) -> Tensor:
    m.held = torch.tanh(m.second(h))
    return h * m.held


NEEDED: dict[str, Callable[[Alive, Tensor], Tensor]] = {
    "through memory, row by row": through_memory,
    "through a view of memory": through_a_view,
    "added in place to a part": added_in_place,
    "written where an argument says": with_an_argument,
    "through an operation that cannot be followed": lambda m, h: Doubled.apply(torch.tanh(m.second(h))),
    "through a scripted function without derivatives": lambda m, h: h + scripted(torch.tanh(m.second(h)).detach()),
    "through numpy": lambda m, h: h + torch.from_numpy(torch.tanh(m.second(h)).detach().numpy()),
    "through Python numbers": lambda m, h: h * (1 + torch.tanh(m.second(h)).abs().sum().item() * 0),
    "through a list": lambda m, h: torch.stack([row * 2 for row in torch.tanh(m.second(h))]),
    "through iteration": lambda m, h: torch.stack([*torch.tanh(m.second(h))]),
    "through data": lambda m, h: h + torch.tanh(m.second(h)).data,
    "on a way that other samples take": on_another_way,
    "kept on the module": kept_on_the_module,
}


@pytest.mark.parametrize("name", NEEDED)
def test_what_the_outputs_need_is_never_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["*trace*", "kappa*", "rho*", "*path_norm", "lipschitz*", "gradient_norm"]
    found = values(Alive(NEEDED[name]), names)
    monkeypatch.setattr("flatscope.network.normal_form.dead_operations", lambda *_: None)
    assert_same(found, values(Alive(NEEDED[name]), names))


def test_a_way_that_only_other_samples_take_is_seen() -> None:
    """Of the first samples the one branch is dropped, of others the other."""
    net = Alive(on_another_way).eval()
    x = torch.cat([X[:, :1].abs() + 1, X[:, 1:]], 1)
    problem = fs.Problem(net, train=(torch.cat([x, -x]), torch.cat([Y, Y])), batch_size=24)
    assert "second" in fs.measure(problem, "layer_trace").layer("layer_trace")
