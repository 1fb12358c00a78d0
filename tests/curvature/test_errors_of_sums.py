"""Standard errors of sums and means: by hand, and of independent sources in squares."""

from __future__ import annotations

import math

import pytest
import torch
from networks import mlp
from scipy import stats
from torch import nn

import flatscope as fs
from flatscope.curvature import estimators
from flatscope.curvature.estimators import DiagonalSums, Spread
from flatscope.curvature.sweep_result import Curvature, Mean
from flatscope.limits import STANDARD
from flatscope.measures import layer_values

pytestmark = pytest.mark.fast


def widened(variances: torch.Tensor, freedom: int) -> float:
    """Factor by which Student's 95 % interval of a sum is wider than a normal one, by Satterthwaite's degrees.

    Args:
        variances: found for its independent parts, each from a sum of squares with `freedom` degrees.
        freedom: of each part.
    """
    degrees = (freedom + 2) * float(variances.sum()) ** 2 / float(variances.square().sum()) - 2
    return float(stats.t.ppf(0.975, degrees) / stats.norm.ppf(0.975))


def test_the_error_of_a_mean_over_samples_and_draws_by_hand() -> None:
    """Three samples with four draws each: Σ_i s_i² / draws is the variance of their sum."""
    drawn = torch.tensor([[1.0, 3.0, 2.0, 2.0], [5.0, 5.0, 9.0, 1.0], [0.0, 0.0, 0.0, 4.0]], dtype=torch.float64)
    mean = Mean(draws=4)
    mean.add(drawn.sum(1), drawn.square().sum(1))
    assert float(mean.value) == pytest.approx(float(drawn.mean()))
    plain = math.sqrt(float(drawn.var(1).sum()) / 4) / 3
    assert float(mean.stderr) == pytest.approx(plain * widened(drawn.var(1), 3))
    # The spread of the samples themselves: that of their means less what the draws add to it.
    spread = float(drawn.mean(1).var()) - float(drawn.var(1).mean()) / 4
    assert float(mean.data_stderr) == pytest.approx(math.sqrt(spread / 3))


def test_the_error_of_one_sample_with_few_draws_is_students() -> None:
    drawn = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    mean, spread = Mean(draws=3), Spread()
    mean.add(drawn.sum()[None], drawn.square().sum()[None])
    spread.add({("", "trace"): drawn[None, None]})
    half = float(stats.t.ppf(0.975, 2)) * float(drawn.std()) / math.sqrt(3)
    for error in (mean.stderr, spread.stderrs["", "trace"]):
        assert 1.96 * float(error) == pytest.approx(half, rel=1e-4)


def test_a_second_pass_counts_as_more_draws() -> None:
    drawn = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = []
    for part in (drawn[:, :2], drawn[:, 2:]):
        mean = Mean(draws=part.shape[1])
        mean.add(part.sum(1), part.square().sum(1))
        parts.append(mean)
    both = parts[0].joined(parts[1])
    assert float(both.value) == pytest.approx(float(drawn.mean()))
    within = sum(float(part.var(1).sum()) * (part.shape[1] - 1) for part in (drawn[:, :2], drawn[:, 2:]))
    deviations = [part.var(1) * (part.shape[1] - 1) for part in (drawn[:, :2], drawn[:, 2:])]
    degrees = within**2 / sum(float(d.square().sum()) / (n + 1) for d, n in zip(deviations, (2, 4), strict=True)) - 2
    student = float(stats.t.ppf(0.975, degrees) / stats.norm.ppf(0.975))
    assert float(both.stderr) == pytest.approx(student * math.sqrt(within / 4 / 6) / 5)


def test_errors_of_independent_parts_add_in_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network of which random columns give one part (±3) and random products the other (±4)."""
    draws = torch.tensor([[10.0 - 3, 10.0 + 3]], dtype=torch.float64).repeat(1, 5000)  # 10,000 draws of variance 9
    draws *= 100  # whose mean has an error of 3
    mean = Mean(draws=10_000)
    mean.add(draws.sum(1), draws.square().sum(1))
    assert float(mean.stderr) == pytest.approx(3.0, rel=1e-3)
    covered = Curvature({("", "trace"): mean}, {"attend": "used twice"}, draws=10_000)
    key = "", "trace"
    rest = DiagonalSums({key: torch.tensor([7.0])}, {key: torch.tensor([4.0])}, 5, 10, False, "")
    monkeypatch.setattr(layer_values, "swept", lambda *args, **options: covered)
    monkeypatch.setattr(layer_values, "_products_for_uncovered_parameters", lambda *args: rest)
    found = layer_values.network_value(fs.Context(mlp().problem()), "trace")
    assert (found.value, found.stderr) == (pytest.approx(1007.0), pytest.approx(5.0, rel=1e-3))
    assert found.exact is False


def test_products_that_come_in_blocks_have_the_error_of_all_of_them() -> None:
    drawn = torch.randn(2, 3, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 5
    spread = Spread()
    for block in (drawn[..., :1], drawn[..., 1:4], drawn[..., 4:]):
        spread.add({("layer", "trace"): block})
    # Two groups of samples with draws of their own: the sum of their means, whose errors are independent.
    torch.testing.assert_close(spread.values({})["layer", "trace"], drawn.mean(2).sum(0))
    variances = drawn.var(2)  # (groups, units)
    student = torch.tensor([widened(of_unit, 9) for of_unit in variances.T], dtype=torch.float64)
    expected = (variances / 10).sum(0).sqrt() * student
    torch.testing.assert_close(spread.stderrs["layer", "trace"], expected)


class Twice(nn.Module):
    """Its middle layer is used two times, so that it goes by products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 10), nn.Linear(10, 10), nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        for _ in range(2):
            h = h + torch.tanh(self.middle(h))
        out: torch.Tensor = self.last(h)
        return out


@pytest.mark.parametrize("twice", [False, True], ids=["columns", "products"])
def test_errors_are_right_where_one_sample_has_all_the_curvature(twice: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network is sure of all samples but one: two draws of that one may be alike by chance."""
    monkeypatch.setitem(vars(STANDARD), "few_unreached", 0)
    monkeypatch.setitem(vars(STANDARD), "dense_weights", 0)
    monkeypatch.setitem(vars(STANDARD), "few_directions", 0)
    monkeypatch.setitem(vars(STANDARD), "dense_weights", 0)
    monkeypatch.setattr(estimators, "cheaper_one_by_one", lambda *_: False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = (Twice() if twice else nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 3))).double()
        last = model.last if isinstance(model, Twice) else model[2]
        x = torch.randn(4000, 4).double()
    with torch.no_grad():
        last.weight *= 40
        largest = model(x).topk(2, dim=1).values
        order = (largest[:, 0] - largest[:, 1]).argsort(descending=True)
        x = x[torch.cat([order[:255], order[-1:]])]
        problem = fs.Problem(model, train=(x, model(x).argmax(1)))
    exact = fs.measure(problem, "layer_trace", precision=0).to_frame()["value"]
    scores = []
    for seed in range(40):
        found = fs.measure(problem, "layer_trace", precision=0.3, seed=seed).to_frame()
        drawn = found["stderr"] > 1e-9 * found["value"].abs()
        scores += ((found["value"] - exact) / found["stderr"])[drawn].tolist()
    assert len(scores) >= 40
    assert max(map(abs, scores)) < 6
    assert sum(abs(z) > 3 for z in scores) <= 0.05 * len(scores)
