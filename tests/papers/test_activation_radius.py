"""The radius and the output difference that Yi et al. (2019) print, and the stages that their code uses."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from flatscope import BasisPaths
from flatscope_papers.theory.activation_radius import (
    output_difference_bound,
    printed_activation_radius,
    units_flipped_within_radius,
)
from flatscope_papers.theory.stage_paths import StagePaths


def network(seed: int, d: int = 3, n: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    first, second, x = (torch.randn(a, d, generator=generator, dtype=torch.float64) for a in (d, d, n))
    return first, second.fill_diagonal_(1.0), x / x.norm(dim=1, keepdim=True)


def test_the_literal_radius_is_that_of_its_formula() -> None:
    first, second, x = network(0)
    terms = []
    for sample in x:
        z = first @ sample
        terms += [abs(float(value)) for value in z]
        y = z.clamp_min(0)
        for i in range(3):
            others = [j for j in range(3) if j != i]
            signal = y[i] + sum(second[i, j] * y[j] for j in others)
            if signal != 0:
                terms.append(abs(float(signal)) / float(2 * sum(second[i, j] ** 2 for j in others)) ** 0.5)
    assert printed_activation_radius(first, second, x) == pytest.approx(min(terms), rel=1e-12)


def test_flips_are_found_beyond_the_first_layers_radius_and_not_before() -> None:
    first, _, x = network(1)
    alone = torch.eye(3, dtype=torch.float64)
    nearest = float((x @ first.T).abs().min())
    assert units_flipped_within_radius(first, alone, x, 0.999 * nearest)[0] == 0
    assert units_flipped_within_radius(first, alone, x, 1.01 * nearest)[0] >= 1


def test_the_literal_radius_is_not_safe() -> None:
    found = [network(seed, d=4, n=8) for seed in range(40)]
    unsafe = [units_flipped_within_radius(*one, 0.98 * printed_activation_radius(*one)) != (0, 0) for one in found]
    assert 0 < sum(unsafe) < 40


def test_the_difference_of_outputs_is_bounded_path_by_path() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 2), (2, 3), (2, 2)]
    weights = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    moved = [
        weight * (1 + 1e-4 * torch.randn(weight.shape, generator=generator, dtype=torch.float64)) for weight in weights
    ]
    x = torch.randn(5, 2, generator=generator, dtype=torch.float64)

    def outputs(by: list[Tensor]) -> Tensor:
        signal = x
        for number, weight in enumerate(by):
            signal = (signal @ weight.T).clamp_min(0) if number < 2 else signal @ weight.T
        return signal

    bound = output_difference_bound(weights, moved, x)
    for row, sample in enumerate(x):
        one = (weights[0] @ sample).clamp_min(0)
        two = (weights[1] @ one).clamp_min(0)
        total = 0.0
        for k, c, b, a in itertools.product(range(2), range(2), range(3), range(2)):
            values = [by[2][k, c] * by[1][c, b] * by[0][b, a] for by in (weights, moved)]
            total += float((values[1] - values[0]) ** 2 * (one[b] > 0) * (two[c] > 0) * sample[a] ** 2)
        assert float(bound[row]) == pytest.approx(24 * total**0.5, rel=1e-6)
    assert bool(((outputs(moved) - outputs(weights)).norm(dim=1) <= bound).all())


class TwoStages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a1, self.a2, self.b1, self.b2 = (
            nn.Conv2d(*io, 3, padding=1, bias=False) for io in ((2, 3), (3, 3), (3, 4), (4, 4))
        )
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels) for channels in (3, 3, 4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip((self.a1, self.a2, self.b1, self.b2), self.norms, strict=True):
            x = torch.relu(norm(layer(x)))
        return x.mean((2, 3))


def test_stages_have_paths_of_their_own_and_no_scale_invariance() -> None:
    torch.manual_seed(0)
    model = TwoStages().double().eval()
    stages = [["a1", "a2"], ["b1", "b2"]]
    paths = StagePaths(model, stages)
    own = nn.Sequential(model.a1, nn.ReLU(), model.a2)
    alone = BasisPaths(own, torch.ones(1, 2, 5, 5, dtype=torch.float64), "cyclic")
    assert paths.counts == [alone.count, 3 * 4 * 9 + 4 * 4 * 9 - 4]
    torch.testing.assert_close(paths.values()[: alone.count], alone.values())
    moved = paths.values() * (1 + 0.1 * torch.rand(sum(paths.counts), dtype=torch.float64))
    torch.testing.assert_close(StagePaths(paths.to_model(moved), stages).values(), moved)
    # The same function with another scale and shift of a BatchNorm, and other weights behind it: other values.
    x = torch.randn(3, 2, 6, 6, dtype=torch.float64)
    before, values = model(x), paths.values()
    with torch.no_grad():
        model.norms[0].weight *= 3
        model.norms[0].bias *= 3
        model.a2.weight /= 3
    torch.testing.assert_close(model(x), before)
    assert float((StagePaths(model, stages).values() - values).abs().max()) > 1e-3
