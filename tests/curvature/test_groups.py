"""Groups of samples with vectors of their own: the same on any number of ranks, and one pass tells as much as more."""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch
from scipy import stats

import flatscope as fs
from flatscope.context import Context
from flatscope.curvature.estimators import Asked, HutchinsonDraws
from flatscope.curvature.layer_directions import LayerDirections
from flatscope.curvature.operators import Hessian
from flatscope.curvature.random_signs import Signs
from flatscope.limits import STANDARD
from flatscope.ranks import Ranks


def test_groups_that_are_alike_tell_as_much_as_passes() -> None:
    """Of samples that are alike one pass with a vector for each group tells as much as several with one for all."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    x, y = torch.randn(16, 3, generator=generator).repeat(8, 1), torch.arange(2).repeat(64)
    ctx = Context(fs.Problem(model.double(), train=(x.double(), y)))
    spreads = []
    for groups in (1, 4):
        directions = LayerDirections(ctx, "trace", ["0.weight", "2.weight"])
        directions.matrix._matrix.groups = directions.matrix.groups = groups  # type: ignore[attr-defined]
        values, variances = [], []
        for seed in range(300):
            draws = HutchinsonDraws(directions, Signs(seed, "t"), Asked(0.0, 12), STANDARD)
            draws.draw_until(12)
            values.append(float(draws.spread.values({})["", "trace"]))
            freedom = max(1.0, float(draws.spread.freedom(("", "trace"))))
            student = float(stats.t.ppf(0.975, freedom) / stats.norm.ppf(0.975))
            variances.append((float(draws.spread.stderrs["", "trace"]) / student) ** 2)
        spreads.append(statistics.stdev(values))
        assert statistics.mean(variances) ** 0.5 == pytest.approx(spreads[-1], rel=0.2)
    assert spreads[1] == pytest.approx(spreads[0] / 2, rel=0.15)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_ranks_share_the_groups(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has which samples: a group that two ranks share has the same vectors on both."""
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    x, y = torch.randn(101, 3, generator=generator).double(), torch.arange(101) % 2
    vectors = torch.randn(5, 26, 2, generator=generator).double()
    monkeypatch.setattr(Ranks, "anywhere", lambda self, flag: flag)

    def products(ranks: Ranks) -> torch.Tensor:
        problem = fs.Problem(model, train=(x, y))
        problem.ranks = ranks
        operator, total = Hessian(Context(problem), groups=5), torch.zeros(5, 26, 2, dtype=torch.float64)
        operator._batch_size = 8
        for group, product in operator._of_this_rank(lambda group: vectors[group], list):  # type: ignore
            total[group] += product
        return total

    alone, shared = products(Ranks()), sum(products(Ranks(rank, size)) for rank in range(size))
    torch.testing.assert_close(shared, alone, rtol=1e-12, atol=1e-12)
    edges = [group * 101 // 5 for group in range(6)]
    for group, (start, stop) in enumerate(itertools.pairwise(edges)):
        part = fs.hessian(fs.Problem(model, train=(x[start:stop], y[start:stop]))) @ vectors[group]
        torch.testing.assert_close(alone[group], part * (stop - start) / 101, rtol=1e-10, atol=1e-12)
