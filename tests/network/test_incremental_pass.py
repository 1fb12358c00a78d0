"""A remembered pass gives what a plain pass gives, whatever the network does, and runs less where it can."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from architectures import architectures
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

import flatscope as fs
from flatscope.network import incremental_pass
from flatscope.network.incremental_pass import IncrementalPass
from flatscope.samples import tensors_of_inputs


class Forward(nn.Module):
    """Two dense layers and a norm, used by some function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("table", torch.linspace(-1, 1, 4))
        self.constant = torch.full((4,), 0.3)
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(self, x)


def _squares(x: Tensor) -> Tensor:
    return x * x


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    UNSEEN = torch.jit.trace(_squares, torch.ones(2), check_trace=False)  # an operation that no mode sees


def read_then_written(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    y = m.b(h)
    h.mul_(3)
    return y + h


def clean_is_written_to(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h += m.b(x)
    return torch.relu_(h)


def view_is_written_to(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    alias = h.view_as(m.b(x))
    alias.add_(1)
    return h


def decided_by_values(m: Any, x: Tensor) -> Tensor:
    h = m.b(x)
    scale = float(h.abs().max())
    return m.a(x) * scale + h


def other_way(m: Any, x: Tensor) -> Tensor:
    h = m.b(x)
    return m.a(x).sin() if bool(h.mean() > 0.1) else m.a(x.cos())


def written_to_for_large_values(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    if bool(m.b(x).abs().max() > 2):
        h.add_(1)
    return h


def unseen_then_written(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    y = UNSEEN(h)
    h.add_(5)
    return y + m.b(x) + h


def through_numpy(m: Any, x: Tensor) -> Tensor:
    h = torch.from_numpy(m.b(x).detach().numpy().copy())
    return m.a(x) + h


def filled(m: Any, x: Tensor) -> Tensor:
    h = torch.zeros(len(x), 4)
    h[:, 1:] = m.b(x)[:, 1:]
    return m.a(x) + h


def constants(m: Any, x: Tensor) -> Tensor:
    return m.a(x) * m.constant + m.b(m.norm(x) + m.table) * torch.arange(4.0)


def twice(m: Any, x: Tensor) -> Tensor:
    return m.a(m.b(m.a(x)))


FUNCTIONS = [
    read_then_written,
    clean_is_written_to,
    view_is_written_to,
    written_to_for_large_values,
    decided_by_values,
    other_way,
    unseen_then_written,
    through_numpy,
    filled,
    constants,
    twice,
]


def runner(model: nn.Module, x: Tensor) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda params: functional_call(model, params, (x,))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_outputs_are_those_of_a_plain_pass(function: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Forward(function).eval(), torch.randn(6, 4)
    params = {name: value.detach() for name, value in model.named_parameters()}
    run = runner(model, x)
    found = IncrementalPass(run, params, [x, *model.buffers()])
    assert torch.equal(found.outputs, run(params))
    for _ in range(2):
        for name in params:
            moved = {**params, name: params[name] + torch.randn_like(params[name])}
            assert torch.equal(found.again(moved), run(moved)), name
    assert torch.equal(found.again(params), run(params))


def test_what_comes_before_a_changed_weight_is_not_run_again() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))), torch.randn(3, 4)
    params = {name: value.detach() for name, value in model.named_parameters()}
    found = IncrementalPass(runner(model, x), params, [x])
    runs: list[int] = []
    original = incremental_pass._alike
    incremental_pass._alike = lambda one, other: (
        runs.append(1) or original(one, other)
    )  # asked once for each that is run
    try:
        found.again({**params, "4.weight": params["4.weight"] + 1})
    finally:
        incremental_pass._alike = original
    assert len(runs) == 2


def test_another_way_through_the_network_is_noticed() -> None:
    torch.manual_seed(0)
    x, params = torch.randn(3, 4), {"w": torch.randn(4, 4), "v": torch.randn(4, 4)}
    functions = [torch.sin, torch.cos]

    def run(params: dict[str, Tensor]) -> Tensor:
        return functions[0](x @ params["w"]) @ params["v"]

    found = IncrementalPass(run, params, [x])
    functions.reverse()
    assert torch.equal(found.again({**params, "v": params["w"]}), run({**params, "v": params["w"]}))


def test_slopes_in_forward_mode_pass_through() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 2)).eval(), torch.randn(3, 4)
    params = {name: value.detach() for name, value in model.named_parameters()}
    run = runner(model, x)
    found, step = IncrementalPass(run, params, [x]), torch.randn(2, 5)
    with forward_ad.dual_level():
        moved = {**params, "2.weight": forward_ad.make_dual(params["2.weight"], step)}
        tangents = [forward_ad.unpack_dual(each(moved)).tangent for each in (found.again, run)]
    assert torch.equal(*tangents)


@pytest.mark.parametrize("name", list(architectures()))
def test_networks_of_all_kinds(name: str) -> None:
    model, inputs, targets, loss = architectures()[name]()
    problem = fs.Problem(model, train=(inputs, targets), loss=loss)
    inputs, _ = next(iter(problem.batches(size=4)))
    run = partial(problem.forward, inputs)
    found = IncrementalPass(run, problem.params, [*problem.buffers.values(), *tensors_of_inputs(inputs)])
    for weight, value in list(problem.params.items())[:6]:
        moved = {**problem.params, weight: value + 0.1 * torch.randn_like(value)}
        with torch.no_grad():
            assert torch.equal(found.again(moved), run(moved)), weight
