"""A network as a sum over its paths (Zhang et al. 2017, Section 5.4), and what that says about its derivatives.

f(x) = σ(W_L σ(W_{L−1} … σ(W_1 σ(x)))): every path multiplies its input, its weights and the gates of its units. The
ReLU on the inputs and on the output are the paper's; both can be left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flatscope_papers.theory.loss_responses import relative_factors
from flatscope_papers.theory.polynomial_operator import BinaryTree

SHAPES = [(3, 4, 1), (3, 4, 3, 2), (2, 3, 3, 2, 1)]


def weights_of(shape: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pairs = itertools.pairwise(shape)
    return [torch.randn(out, into, generator=generator, dtype=torch.float64) for into, out in pairs]


def forward(weights: list[Tensor], x: Tensor, input_relu: bool, output_relu: bool) -> tuple[Tensor, list[Tensor]]:
    """Outputs, and the gates of every layer of units, inputs and outputs included."""
    gates = [(x > 0).double() if input_relu else torch.ones_like(x)]
    signal = x * gates[0]
    for number, weight in enumerate(weights):
        signal = weight @ signal
        has_relu = number < len(weights) - 1 or output_relu
        gates.append((signal > 0).double() if has_relu else torch.ones_like(signal))
        signal = signal * gates[-1]
    return signal, gates


def paths(weights: list[Tensor], gates: list[Tensor]) -> Iterator[tuple[tuple[int, ...], float]]:
    """(units i_0, …, i_L, product of weights and gates) of every path."""
    widths = [weights[0].shape[1], *[len(weight) for weight in weights]]
    for units in itertools.product(*map(range, widths)):
        product = math.prod(float(weight[units[k + 1], units[k]]) for k, weight in enumerate(weights))
        yield units, product * math.prod(float(gate[unit]) for gate, unit in zip(gates, units, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("input_relu", "output_relu"), [(True, True), (False, False)])
def test_the_paths_add_up_to_the_network_and_to_its_derivatives(
    shape: tuple[int, ...], input_relu: bool, output_relu: bool
) -> None:
    for seed in range(4):
        weights = weights_of(shape, seed)
        x = weights_of((1, shape[0]), seed + 50)[0][:, 0]
        free_x, free = x.clone().requires_grad_(), [weight.clone().requires_grad_() for weight in weights]
        outputs, _ = forward(free, free_x, input_relu, output_relu)
        _, gates = forward(weights, x, input_relu, output_relu)
        for o in range(shape[-1]):
            slopes = torch.autograd.grad(outputs[o], [free_x, *free], retain_graph=True)
            value, by_input = 0.0, torch.zeros_like(x)
            by_weight = [torch.zeros_like(weight) for weight in weights]
            for units, product in paths(weights, gates):
                if units[-1] != o:
                    continue
                value += float(x[units[0]]) * product
                by_input[units[0]] += product
                for k, weight in enumerate(weights):  # both ends of the edge are fixed
                    edge = (units[k + 1], units[k])
                    by_weight[k][edge] += float(x[units[0]]) * product / float(weight[edge])
            assert value == pytest.approx(float(outputs[o].detach()), rel=1e-12, abs=1e-12)
            torch.testing.assert_close(by_input, slopes[0], rtol=1e-12, atol=1e-12)
            for found, slope in zip(by_weight, slopes[1:], strict=True):
                torch.testing.assert_close(found, slope, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_layer_alone_gives_back_the_output(shape: tuple[int, ...]) -> None:
    """Euler: ⟨W_k, ∂f/∂W_k⟩ = f for every k, so that the gradient cannot vanish where f does not."""
    weights = [weight.requires_grad_() for weight in weights_of(shape, 3)]
    x = weights_of((1, shape[0]), 7)[0][:, 0]
    outputs, _ = forward(weights, x, input_relu=False, output_relu=False)
    reached = 0
    for output in outputs:
        slopes = torch.autograd.grad(output, weights, retain_graph=True)
        value = float(output.detach())
        for weight, slope in zip(weights, slopes, strict=True):
            assert float((weight * slope).sum().detach()) == pytest.approx(value, rel=1e-12, abs=1e-13)
        square = sum(float(slope.square().sum()) for slope in slopes)
        least = sum(value**2 / float(weight.detach().square().sum()) for weight in weights)
        assert square >= least * (1 - 1e-12)
        reached += value != 0
    assert reached


@pytest.mark.parametrize("shape", SHAPES)
def test_the_input_gradient_follows_from_that_of_the_first_layer(shape: tuple[int, ...]) -> None:
    """∂f/∂x = W_1ᵀ(∂f/∂W_1)x/‖x‖², hence ‖∇_x f‖ ≤ ‖W_1‖₂‖∇_{W_1} f‖_F/‖x‖: with no ReLU on the inputs."""
    weights = [weight.requires_grad_() for weight in weights_of(shape, 3)]
    x = weights_of((1, shape[0]), 7)[0][:, 0].requires_grad_()
    outputs, _ = forward(weights, x, input_relu=False, output_relu=False)
    moved = 0
    for output in outputs:
        by_input, by_weight = torch.autograd.grad(output, [x, weights[0]], retain_graph=True)
        with torch.no_grad():
            expected = weights[0].T @ (by_weight @ x) / x.square().sum()
            torch.testing.assert_close(by_input, expected, rtol=1e-12, atol=1e-13)
            bound = torch.linalg.matrix_norm(weights[0], ord=2) * by_weight.norm() / x.norm()
            assert float(by_input.norm()) <= float(bound) * (1 + 1e-12)
        moved += bool(by_input.any())
    assert moved


def tree_paths(tree: BinaryTree) -> list[tuple[int, float]]:
    """(input, product of weights) of every path through a binary tree."""
    found = []
    levels = [weight.detach().double() for weight in tree.weights]
    units = levels[0].shape[1]

    def climb(leaf: int, level: int, node: int, place: int, product: float) -> None:
        """`place` is the position among the inputs of the node at `level`."""
        if level == len(levels):
            found.append((leaf, product))
            return
        for unit in range(levels[level].shape[1]):
            above = (node % 2) * units + unit  # of the node above, this is the left or the right half
            climb(leaf, level + 1, node // 2, above, product * float(levels[level][node, unit, place]))

    for leaf in range(2 ** len(levels)):
        climb(leaf, 0, leaf // 2, leaf % 2, 1.0)
    return found


@pytest.mark.parametrize(("units", "expected"), [(1, 8), (2, 32)])
def test_paths_of_the_binary_tree_of_figure_18(units: int, expected: int) -> None:
    """Eight inputs: D = d paths with one ReLU per node, 4d with two."""
    tree = BinaryTree(3, units, seed=1).double()
    found = tree_paths(tree)
    assert len(found) == expected
    # Without ReLUs the paths of each input add up to the collapsed weight; ‖w̃‖₁ ≤ ‖ŵ‖₁ since signs cancel.
    linear = BinaryTree(3, units, seed=1).double()
    linear.relus = torch.nn.ModuleList()
    collapsed = torch.autograd.functional.jacobian(lambda v: linear(v[None])[0, 0], torch.zeros(8, dtype=torch.float64))
    summed = torch.zeros(8, dtype=torch.float64)
    for leaf, product in found:
        summed[leaf] += product
    torch.testing.assert_close(summed, collapsed, rtol=1e-12, atol=1e-14)
    total = sum(abs(product) for _, product in found)
    assert float(collapsed.abs().sum()) <= total * (1 + 1e-12)
    assert (float(collapsed.abs().sum()) == pytest.approx(total)) == (units == 1)


def test_a_change_of_all_weights_does_more_than_one_of_the_input() -> None:
    """Eqs. (50) and (51): eight layers and Δ = 0.1 multiply every path by 2.14 and by 1.1."""
    weights = [weight + 0.5 for weight in weights_of((3, 4, 4, 4, 4, 4, 4, 4, 2), 2)]  # some paths stay open
    x = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    before, _ = forward(weights, x, input_relu=False, output_relu=False)
    by_weights, _ = forward([1.1 * weight for weight in weights], x, input_relu=False, output_relu=False)
    by_input, _ = forward(weights, 1.1 * x, input_relu=False, output_relu=False)
    factors = relative_factors(len(weights), 0.1)
    assert factors == pytest.approx((2.14, 1.1), abs=5e-3)
    assert bool((before != 0).any())
    torch.testing.assert_close(by_weights, factors[0] * before)
    torch.testing.assert_close(by_input, factors[1] * before)
