"""Noisy SGD: single steps against hand recursions, projections, temperatures, resuming."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatscope as fs
from flatscope.errors import InputError
from flatscope.langevin import SGLD, project_onto_domain_in_place

CURVATURE = torch.tensor([[2.0, 0.3], [0.3, 1.0]], dtype=torch.float64)


def weight() -> nn.Parameter:
    return nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))


def walk(optimizer: torch.optim.Optimizer, w: nn.Parameter, steps: int) -> Tensor:
    for _ in range(steps):
        w.grad = CURVATURE @ w.detach()
        optimizer.step()
    return w.detach().clone()


def test_it_is_part_of_the_public_names() -> None:
    assert fs.SGLD is SGLD


@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize("given", [{"noise": 0.05}, {"temperature": 0.2}])
@pytest.mark.parametrize("decay", [0.0, 0.55])
def test_steps_follow_the_hand_recursion(momentum: float, given: dict[str, float], decay: float) -> None:
    w, lr, shrink = weight(), 0.1, 0.01
    optimizer = SGLD([w], lr, **given, momentum=momentum, weight_decay=shrink, noise_decay=decay, seed=3)
    found = walk(optimizer, w, 5)

    generator = torch.Generator().manual_seed(3)
    hand, velocity = weight().detach(), torch.zeros(2, dtype=torch.float64)
    power = given.get("noise") or math.sqrt(2 * lr * (1 - momentum) * given["temperature"])
    for t in range(5):
        normal = torch.empty_like(hand).normal_(generator=generator)
        gradient = CURVATURE @ hand + shrink * hand
        velocity = momentum * velocity - lr * gradient + power * (1 + t) ** -decay * normal
        hand = hand + velocity
    torch.testing.assert_close(found, hand, rtol=1e-12, atol=0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_without_noise_it_is_sgd(momentum: float) -> None:
    w, other = weight(), weight()
    found = walk(SGLD([w], 0.05, temperature=0.0, momentum=momentum, weight_decay=0.02), w, 20)
    expected = walk(torch.optim.SGD([other], 0.05, momentum=momentum, weight_decay=0.02), other, 20)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_on_all_data_without_noise_it_is_gradient_descent() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(8, k, generator=generator, dtype=torch.float64) for k in (3, 1))
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    before = model.weight.detach().clone()
    loss = (model(x) - y).square().mean()
    loss.backward()
    SGLD(model.parameters(), 0.1, noise=0.0).step()
    expected = before - 0.1 * 2 / 8 * (x @ before.T - y).T @ x
    torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-12, atol=1e-15)


def test_projections() -> None:
    outside = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    project_onto_domain_in_place(outside, ("ball", 1.0))
    torch.testing.assert_close(torch.cat([t.flatten() for t in outside]), torch.tensor([0.6, 0.0, 0.8]))
    inside = torch.tensor([0.3, -0.4])
    project_onto_domain_in_place([inside], ("ball", 1.0))
    assert torch.equal(inside, torch.tensor([0.3, -0.4]))
    box = torch.tensor([-3.0, 0.5, 9.0])
    project_onto_domain_in_place([box], ("box", -1.0, 2.0))
    assert torch.equal(box, torch.tensor([-1.0, 0.5, 2.0]))
    turns = torch.tensor([math.pi, -math.pi, 3.5 * math.pi, -1e-20 - math.pi, 0.25], dtype=torch.float64)
    project_onto_domain_in_place([turns], ("torus", -math.pi, math.pi))
    expected = torch.tensor([-math.pi, -math.pi, -0.5 * math.pi, -math.pi, 0.25], dtype=torch.float64)
    torch.testing.assert_close(turns, expected)
    tiny = torch.tensor([-1e-20])  # the remainder rounds to the length, which is the lower end again
    project_onto_domain_in_place([tiny], ("torus", 0.0, 1.0))
    assert float(tiny) == 0.0


@pytest.mark.parametrize("projection", [("ball", 0.5), ("box", -0.2, 0.3), ("torus", -0.1, 0.1)])
def test_an_optimizer_stays_in_its_set(projection: Any) -> None:
    w = weight()
    optimizer = SGLD([w], 0.1, noise=1.0, projection=projection, momentum=0.5)
    for _ in range(30):
        walk(optimizer, w, 1)
        free = w.detach().clone()
        project_onto_domain_in_place([free], projection)
        torch.testing.assert_close(free, w.detach())


def test_temperature_is_reported_and_follows_what_was_given() -> None:
    first, second, third = weight(), weight(), weight()
    groups = [
        {"params": [first]},
        {"params": [second], "noise": 0.3, "lr": 0.5},
        {"params": [third], "temperature": 0.7, "momentum": 0.9},
    ]
    optimizer = SGLD(groups, 0.1, temperature=0.2, momentum=0.5)
    assert optimizer.temperatures() == pytest.approx([0.2, 0.09 / (2 * 0.5 * 0.5), 0.7])
    for group in optimizer.param_groups:
        group["lr"] /= 4
    assert optimizer.temperatures() == pytest.approx([0.2, 4 * 0.18, 0.7])
    assert optimizer.noise_powers()[1] == 0.3
    assert SGLD.temperature_of(0.1, 0.0) == math.inf
    cooling = SGLD([weight()], 0.1, temperature=1.0, noise_decay=0.5)
    cooling.param_groups[0]["steps"] = 99
    assert cooling.temperatures() == pytest.approx([0.01])


def test_a_resumed_run_has_the_same_noise() -> None:
    def made(w: nn.Parameter, seed: int) -> SGLD:
        return SGLD([w], 0.1, temperature=0.1, momentum=0.5, noise_decay=0.1, seed=seed)

    w = weight()
    optimizer = made(w, seed=5)
    middle = walk(optimizer, w, 3)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    copied, pickled = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
    end = walk(optimizer, w, 4)

    buffer.seek(0)
    other = nn.Parameter(middle.clone())
    resumed = made(other, seed=99)
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(walk(resumed, other, 4), end)
    for twin in (copied, pickled):
        (inner,) = twin.param_groups[0]["params"]
        assert torch.equal(walk(twin, inner, 4), end)
    with pytest.raises(InputError, match="a state of SGLD"):
        resumed.load_state_dict(torch.optim.SGD([other], 0.1).state_dict())


def test_no_global_random_state_is_touched() -> None:
    before = torch.get_rng_state()
    w = weight()
    walk(SGLD([w], 0.1, noise=0.1), w, 3)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either temperature or noise"),
        ({"temperature": 1.0, "noise": 1.0}, "either temperature or noise"),
        ({"temperature": -1.0}, "temperature >= 0"),
        ({"temperature": 1.0, "momentum": 1.0}, "momentum below 1"),
        ({"temperature": 1.0, "weight_decay": math.nan}, "weight_decay >= 0"),
        ({"temperature": 1.0, "projection": ("sphere", 1.0)}, '"ball", radius'),
        ({"temperature": 1.0, "projection": ("box", 1.0, -1.0)}, '"ball", radius'),
    ],
)
def test_settings_that_no_step_could_use(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SGLD([weight()], 0.1, **settings)
