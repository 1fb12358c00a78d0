"""Trees of networks, their shallow counterpart, and the dynamics of linear networks, by hand and by closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flatscope_papers.theory.compositional import TreeNetwork, compositional_target, shallow_of_size
from flatscope_papers.theory.linear_dynamics import SINGULAR, learning_times_of_modes, residual_layer_norm


def test_the_target_is_a_tree_of_functions_of_two() -> None:
    x = torch.rand(5, 8) * 2 - 1
    target = compositional_target(3)
    changed = x.clone()
    changed[:, 2:4] = torch.tensor([0.3, -0.7])
    # What the other six variables do to it goes through one number of the pair: mixed ratios of differences agree.
    generator = torch.Generator().manual_seed(3)
    a = 1.5 * torch.randn(7, 3, generator=generator)
    by_hand = [
        torch.tanh(a[i, 0] * x[:, 2 * i] + a[i, 1] * x[:, 2 * i + 1] + a[i, 2] * x[:, 2 * i] * x[:, 2 * i + 1])
        for i in range(4)
    ]
    for level in ((4, 5), (6,)):
        by_hand = [
            torch.tanh(a[n, 0] * u + a[n, 1] * v + a[n, 2] * u * v)
            for n, u, v in zip(level, by_hand[::2], by_hand[1::2], strict=True)
        ]
    torch.testing.assert_close(target(x), by_hand[0])
    assert not torch.allclose(target(changed), target(x))


def test_both_networks_have_as_many_weights() -> None:
    deep, shallow = (sum(p.numel() for p in model.parameters()) for model in (TreeNetwork(0), shallow_of_size(0)))
    assert deep == 231
    assert abs(deep - shallow) <= 10
    state = torch.get_rng_state()
    first, again = TreeNetwork(1), TreeNetwork(1)
    assert bool((torch.get_rng_state() == state).all())
    x = torch.rand(3, 8)
    torch.testing.assert_close(first(x), again(x))
    jacobian = torch.autograd.functional.jacobian(lambda row: first(row[None])[0, 0], x[0])
    assert jacobian.shape == (8,)


def test_singular_values_are_learned_as_in_the_closed_forms() -> None:
    """Entries: 1 − (1 − η)^t. Factors from a₀: s / (1 + (s/a₀ − 1) e^(−2st)), so that t₉₀ − t₁₀ = ln 81 / (2s)."""
    deep, direct, apart = learning_times_of_modes(0, lr=0.002, steps=12_000)
    for times in direct:
        assert times == pytest.approx([math.log(0.9) / math.log(0.998), math.log(0.1) / math.log(0.998)], abs=1.5)
    for (start, end), s in zip(deep, SINGULAR, strict=True):
        assert (end - start) * 0.002 == pytest.approx(math.log(81) / (2 * s), rel=0.1)
    assert bool((np.diff(deep[:, 0]) > 0).all())
    assert apart < 1e-6


def test_residual_layers_are_as_small_as_one_over_their_number() -> None:
    assert residual_layer_norm(0, 64) * 64 == pytest.approx(1.0, rel=0.02)  # ‖M‖ = 1
    assert residual_layer_norm(0, 4) > residual_layer_norm(0, 8) > residual_layer_norm(0, 16)
