"""The steepness of networks with hundreds of outputs, from random mixtures of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flatscope as fs


def network(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, outputs))


def test_the_steepness_of_many_outputs_is_drawn_with_errors_that_cover() -> None:
    """Against Jacobians written out: z values of 200 samples, and none without noise that should have some."""
    x, y = torch.randn(200, 6, generator=torch.Generator().manual_seed(1)), torch.zeros(200, 360)
    model = network(360)
    problem = fs.Problem(model, train=(x, y), loss="bce")
    true = torch.func.vmap(torch.func.jacrev(model))(x).detach().double().flatten(1).norm(dim=1)
    frame = fs.measure(problem, "input_sensitivity").to_frame()
    value, error = (torch.tensor(frame[name].to_numpy()) for name in ("value", "stderr"))
    assert not frame["exact"].any()
    assert (error > 0).all()
    z = (value - true) / error
    assert float(z.square().mean().sqrt()) == pytest.approx(1.0, abs=0.25)
    assert float(z.mean()) == pytest.approx(0.0, abs=0.3)
    assert fs.measure(problem, "input_sensitivity").meta["passes"]["backward"] == 64
    exact = fs.measure(problem, "input_sensitivity", precision=0).to_frame()
    assert torch.tensor(exact["value"].to_numpy()).sub(true).abs().max() < 1e-5 * true.max()
    in_batches = fs.Problem(model, train=(x, y), loss="bce", batch_size=33)
    again = fs.measure(in_batches, "input_sensitivity").to_frame()["value"]
    assert again.to_numpy() == pytest.approx(frame["value"].to_numpy(), rel=1e-5)


def test_the_steepness_of_few_outputs_is_exact_and_bounded() -> None:
    x, y = torch.randn(20, 6), torch.arange(20) % 5
    frame = fs.measure(fs.Problem(network(5), train=(x, y)), "input_sensitivity").to_frame()
    assert frame["exact"].all()
    assert (frame["high"] >= frame["value"]).all()
