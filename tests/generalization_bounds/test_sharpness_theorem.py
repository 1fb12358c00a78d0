"""Theorem 1 of Neyshabur et al. as printed against numbers by hand, and its sound lemmas against simulation."""

from __future__ import annotations

import math

import pytest
import torch
from networks import mlp, smooth
from test_interactions import network

import flatscope as fs
from flatscope.errors import InputError
from flatscope.generalization_bounds.pac_bayes import (
    TheoremConstants,
    flip_constant,
    flip_constant_corrected,
    simplified_theorem_1_bound,
    theorem_1_bound,
)
from flatscope.measures.interactions import interaction_ratios, relu_chain
from flatscope_papers.theory.sharpness_lemmas import (
    lemma_1_output_change_bound,
    lemma_2_switching_bound,
    lemma_3_noise_product_bound,
    log_lipschitz_capacity,
    output_change_under_noise,
    rebalancing_layer_factors,
)

pytestmark = pytest.mark.fast

TWO = TheoremConstants(widths=(4, 9, 4), norms=(3.0, 2.0), mu=0.5, c2=2.0, c3=1.5, outputs=0.1, lipschitz=1.5)


def test_lemma_3_second_moment_is_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(3, 5, generator=generator).double(), torch.randn(4, 2, generator=generator).double()
    noise = 0.3 * torch.randn(40_000, 5, 4, generator=generator).double()
    squares = (left @ noise @ right).square().sum((1, 2))
    error = float(squares.std()) / math.sqrt(len(squares))
    assert abs(float(squares.mean()) - lemma_3_noise_product_bound(left, right, 0.3) ** 2) <= 4 * error
    assert float(squares.sqrt().mean()) <= lemma_3_noise_product_bound(left, right, 0.3)


@pytest.mark.parametrize("sigma", [1e-3, 1e-2, 1e-1])
def test_lemma_1_bounds_what_noise_does_while_no_unit_switches(sigma: float) -> None:
    tiny = network(6, 20, 15, 4, n=2, seed=3)
    ctx = fs.Context(tiny.problem())
    chain, ratios = relu_chain(ctx, samples=2), interaction_ratios(ctx, samples=2)
    generator = torch.Generator().manual_seed(1)
    for sample in range(2):
        distances = []
        for _ in range(300):
            h = chain.inputs[sample]
            for level, weight in enumerate(chain.weights, start=1):
                noise = sigma * torch.randn(weight.shape, generator=generator).double()
                h = chain.pattern(level, sample).double() * ((weight + noise) @ h)
            distances.append(float((h - chain.signals[-1][sample]).norm()))
        assert sum(distances) / 300 <= lemma_1_output_change_bound(
            chain, sample, [sigma] * 3, float(ratios[sample].min())
        )


def test_what_noise_does_is_taken_apart_as_in_equation_7() -> None:
    ctx = fs.Context(network(6, 20, 15, 4, n=3, seed=3).problem())
    chain = relu_chain(ctx, samples=3)
    generator = torch.Generator().manual_seed(1)
    noise = [0.3 * torch.randn(weight.shape, generator=generator).double() for weight in chain.weights]
    found = output_change_under_noise(chain, noise)
    for sample, x in enumerate(chain.inputs):
        true, fixed, switched = x, x, []
        for level, (weight, own) in enumerate(zip(chain.weights, noise, strict=True), start=1):
            on = chain.pattern(level, sample)
            true, fixed = (weight + own) @ true, ((weight + own) @ fixed) * on
            if level < 3:
                switched.append(int(((true > 0) != on).sum()))
                true = true.clamp_min(0)
        before = chain.signals[-1][sample]
        assert float(found.moved[sample]) == pytest.approx(float((true - before).norm()))
        assert float(found.fixed[sample]) == pytest.approx(float((fixed - before).norm()))
        assert float(found.error[sample]) == pytest.approx(float((true - fixed).norm()))
        assert found.switched[:, sample].tolist() == switched
    assert bool((found.moved <= found.fixed + found.error + 1e-12).all())


def test_lemma_2_forgets_the_noise_below() -> None:
    ctx = fs.Context(network(6, 200, 200, 4, n=3, seed=3).problem())
    chain = relu_chain(ctx, samples=3)
    noise = [torch.zeros_like(weight) for weight in chain.weights]
    noise[0] += 0.3 * torch.randn(noise[0].shape, generator=torch.Generator().manual_seed(1)).double()
    sigmas = [0.3, 0.0, 0.0]
    assert lemma_2_switching_bound(chain, 2, sigmas, 5.0, 3.0).tolist() == [0.0] * 3
    below = float(chain.inputs[0].norm())
    assert float(lemma_2_switching_bound(chain, 1, sigmas, 5.0, 3.0)[0]) == pytest.approx(5 * 200 * 3 * 0.3 * below)
    assert int(output_change_under_noise(chain, noise).switched[1].sum()) > 0


def test_rebalanced_layers_are_equal_and_the_function_is_the_same() -> None:
    chain = relu_chain(fs.Context(network(6, 20, 15, 4, n=2, seed=3).problem()), samples=2)
    factors = rebalancing_layer_factors(chain, 0)
    assert math.prod(factors) == pytest.approx(1.0)
    h, sizes = chain.inputs[0], []
    for level, (weight, factor) in enumerate(zip(chain.weights, factors, strict=True), start=1):
        sizes.append(float((factor * weight)[chain.pattern(level, 0)].norm()) / math.sqrt(chain.widths[level]))
        h = factor * weight @ h
        h = h.clamp_min(0) if level < chain.depth else h
    assert sizes == pytest.approx([sizes[0]] * 3)
    torch.testing.assert_close(h, chain.signals[-1][0])


def test_capacities_of_lipschitz_functions_are_exponential_in_the_inputs() -> None:
    assert log_lipschitz_capacity(6.0, 2.0, 784) == pytest.approx(784 * math.log(3))
    assert log_lipschitz_capacity(6.0, 2.0, 2, diameter=3.0) == pytest.approx(math.log(81))


def test_theorem_by_hand() -> None:
    """γ_1 = 0.1·6/(0.25·3) = 0.8 and γ_2 = 0.2·6/(0.25·2) = 2.4; C_δ = 1 and 2."""
    rise = 1.8 * 3.4 - 1 + (1 + 2.4) * (1 + 7.2) * ((1 + 1.6) * (1 + 9.6) - 1)
    expected = rise * 0.15 + math.sqrt((900 + 100 + math.log(20)) / 50)
    assert theorem_1_bound(TWO, [0.1, 0.2], [1.0, 2.0], 50, 0.05) == pytest.approx(expected)


def test_simplified_bound_by_hand_with_and_without_the_dropped_factor() -> None:
    rise = 0.5 * (1 + (1 + 0.5 * 3) * 2) * 0.15
    kl = 4 / 0.5**4 * (36 + 36) / 0.25
    assert simplified_theorem_1_bound(TWO, 0.5, 50, 0.05) == pytest.approx(rise + math.sqrt((kl + math.log(20)) / 50))
    with_factor = simplified_theorem_1_bound(TWO, 0.5, 50, 0.05, flips=[3.0, 3.0])
    assert with_factor == pytest.approx(rise + math.sqrt((9 * kl + math.log(20)) / 50))
    assert flip_constant(1000, 0.01) ** 2 == pytest.approx(14.1, abs=0.05)


def test_printed_tail_is_too_short_and_the_corrected_one_is_not() -> None:
    largest = torch.randn(2000, 1000, generator=torch.Generator().manual_seed(0)).abs().amax(1)
    assert float((largest > flip_constant(1000, 0.01)).double().mean()) > 0.1
    assert float((largest > flip_constant_corrected(1000, 0.01)).double().mean()) <= 0.015


@pytest.mark.parametrize("form", ["theorem", "simplified"])
@pytest.mark.parametrize("corrected", [False, True])
def test_bound_is_evaluated_at_the_best_noise_and_marked(form: str, corrected: bool) -> None:
    options = {"sharpness_theorem_1": {"form": form, "corrected": corrected}}
    row = fs.bounds(network(5, 30, 20, 3, n=10).problem(), "sharpness_theorem_1", options=options).to_frame().iloc[0]
    assert 0 < row["value"] < math.inf
    assert row["vacuous"]
    assert row["assumptions"].startswith("NOT CERTIFIED")


def test_other_networks_and_losses_are_refused() -> None:
    assert "chain of dense" in fs.bounds(smooth().problem(), "sharpness_theorem_1").to_frame()["reason"].iloc[0]
    for wrong in (
        lambda: TheoremConstants((4, 4), (1.0,), 0.0, 1, 1, 1, 1),
        lambda: fs.bounds(mlp().problem(), "sharpness_theorem_1", options={"sharpness_theorem_1": {"flip_delta": 2.0}}),
        lambda: flip_constant_corrected(0, 0.1),
    ):
        with pytest.raises(InputError):
            wrong()
