"""Linear models: minimum norm, maximum margin and robust losses against other solvers and sampled worst cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from flatscope.errors import InputError
from flatscope_papers.theory.linear import (
    descend,
    largest_stable_step,
    logistic_descent,
    max_margin,
    minimum_norm,
    robust_hinge,
)
from flatscope_papers.theory.uncertainty import is_atomic


def system(n: int = 10, d: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((n, d), (n,)))  # type: ignore[return-value]


def separable(n: int = 20, d: int = 3, seed: int = 0, unit: bool = False, shift: float = 0.7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, d, generator=generator, dtype=torch.float64)
    y = torch.where(X[:, 0] > 0, 1.0, -1.0).double()
    X[:, 0] += shift * y
    return (X / X.norm(dim=1, keepdim=True) if unit else X), y


@pytest.mark.parametrize("stochastic", [False, True])
def test_descent_from_zero_reaches_the_minimum_norm_solution(stochastic: bool) -> None:
    X, y = system()
    expected = X.T @ torch.linalg.solve(X @ X.T, y)
    torch.testing.assert_close(minimum_norm(X, y), expected, rtol=1e-10, atol=1e-12)
    run = descend(X, y, 0.5 * largest_stable_step(X, stochastic), 8000 if stochastic else 3000, stochastic=stochastic)
    assert float((run.weights - expected).norm()) < 1e-10
    assert run.outside_span < 1e-12
    assert float(run.losses[-1]) < 1e-20
    assert float(run.losses[-1]) < float(run.losses[0])


@pytest.mark.parametrize("stochastic", [False, True])
def test_from_elsewhere_the_limit_keeps_what_the_data_do_not_see(stochastic: bool) -> None:
    X, y = system(seed=1)
    start = system(1, 40, seed=2)[0][0]
    run = descend(X, y, 0.5 * largest_stable_step(X, stochastic), 8000, stochastic=stochastic, start=start)
    unseen = torch.eye(40, dtype=torch.float64) - torch.linalg.pinv(X) @ X
    torch.testing.assert_close(run.limit, torch.linalg.pinv(X) @ y + unseen @ start, rtol=0, atol=1e-10)
    assert run.distance < 1e-10
    assert run.outside_span < 1e-12
    assert float(run.weights.norm()) > float(minimum_norm(X, y).norm())


def test_steps_above_the_limit_diverge() -> None:
    X, y = system()
    assert descend(X, y, 1.02 * largest_stable_step(X), 2000).losses[-1] > 1e3
    assert descend(X, y, 0.98 * largest_stable_step(X), 2000).losses[-1] < 1
    single = X[:1]
    assert largest_stable_step(single, stochastic=True) == pytest.approx(largest_stable_step(single))
    assert descend(single, y[:1], 1.02 * largest_stable_step(single, True), 2000, stochastic=True).losses[-1] > 1e3


def by_other_solver(X: Tensor, y: Tensor, sizes: Tensor, bias: bool) -> np.ndarray:
    A = (y[:, None] * torch.column_stack([X, torch.full((len(X),), float(bias))])).numpy()
    first = max_margin(X, y, bias=bias)
    start = np.append(2 * first.weight.numpy() * float(sizes.max()), 2 * first.bias * float(sizes.max()))
    found = minimize(
        lambda z: z[:-1] @ z[:-1] / 2,
        start,
        jac=lambda z: np.append(z[:-1], 0.0),
        constraints={"type": "ineq", "fun": lambda z: A @ z - sizes.numpy(), "jac": lambda z: A},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert found.success, found.message
    return np.asarray(found.x)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("uncertain", ["inputs", "weights", "weights-linf"])
def test_margins_agree_with_another_solver(bias: bool, uncertain: str) -> None:
    for seed in range(3):
        X, y = separable(seed=seed)
        sizes = {"inputs": torch.ones(len(X)).double(), "weights": X.norm(dim=1), "weights-linf": X.abs().sum(1)}
        found = max_margin(X, y, uncertain=uncertain, bias=bias)
        other = by_other_solver(X, y, sizes[uncertain], bias)
        np.testing.assert_allclose(found.weight.numpy(), other[:-1], atol=1e-6)
        if bias:
            assert found.bias == pytest.approx(other[-1], abs=1e-6)
        # The radius is what the worst sample withstands, and what holds it are the samples with equality.
        room = y * (X @ found.weight + found.bias) / (found.weight.norm() * sizes[uncertain])
        assert float(room.min()) == pytest.approx(found.radius, rel=1e-9)
        assert bool(found.support.any())
        assert bool((room[found.support] < found.radius * (1 + 1e-6)).all())


def test_robustness_of_the_weights_is_the_margin_for_inputs_of_one_length_only() -> None:
    X, y = separable(unit=True)
    svm, robust = max_margin(X, y), max_margin(X, y, uncertain="weights")
    assert svm.radius == pytest.approx(robust.radius, rel=1e-9)
    torch.testing.assert_close(svm.weight, robust.weight, rtol=1e-8, atol=1e-10)
    X, y = separable(seed=3)
    svm, robust = max_margin(X, y), max_margin(X, y, uncertain="weights")
    cosine = float(svm.weight @ robust.weight / svm.weight.norm() / robust.weight.norm())
    assert cosine < 0.99


def test_a_disturbance_of_the_radius_is_withstood_and_a_larger_one_is_not() -> None:
    X, y = separable(seed=4)
    found = max_margin(X, y, uncertain="weights")
    worst = -y[:, None] * X / X.norm(dim=1, keepdim=True) * found.weight.norm() * found.radius
    for factor, expected in ((0.999, True), (1.001, False)):
        values = y * (((found.weight + factor * worst) * X).sum(1) + found.bias)
        assert bool((values >= 0).all()) == expected


def test_logistic_descent_turns_towards_the_margin_slowly() -> None:
    """How fast depends on the data: after 10,000 steps cosines from 0.994 to 0.9999 were seen."""
    for data, cosine in ((separable(shift=0.3), 0.999), (separable(seed=2), 0.999), (separable(40, 5), 0.99)):
        run = logistic_descent(*data, steps=10_000)
        assert run.steps[-1] == 10_000
        assert run.cosines[-1] > cosine
        assert run.cosines[-1] > run.cosines[0]
        assert 0.8 < run.margin_ratios[-1] <= 1 + 1e-12
        assert run.sideways[-1] < 0.15 * float(run.weight.norm())


def test_robust_hinge_is_the_worst_case_and_below_the_regularised_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    for seed in range(20):
        X, y = separable(seed=seed, unit=True, shift=-0.2)
        weight = torch.randn(3, generator=generator, dtype=torch.float64)
        exact, above = robust_hinge(weight, 0.1, X, y, 0.3)
        assert exact <= above + 1e-12
        worst = X - 0.3 * y[:, None] * weight / weight.norm()
        assert float((1 - y * (worst @ weight + 0.1)).clamp_min(0).mean()) == pytest.approx(exact)
        for _ in range(20):
            noise = torch.randn(X.shape, generator=generator, dtype=torch.float64)
            other = X + 0.3 * noise / noise.norm(dim=1, keepdim=True)
            assert float((1 - y * (other @ weight + 0.1)).clamp_min(0).mean()) <= exact + 1e-12


def test_atomic_sets_have_one_support_both_ways() -> None:
    """Definition 4 directly: the support function of w and of −w on many directions."""
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    zero = torch.zeros(1, 3, dtype=torch.float64)
    cube = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 3)
    inner = 0.3 * half[:1]  # its mirror image is not a point of the set, but lies in the hull
    cases = {
        "mirrored": (torch.cat([zero, half, -half]), True),
        "cube with a point inside": (torch.cat([zero, cube, 0.1 * inner]), True),
        "one sided": (torch.cat([zero, half]), False),
        "mirrored but for one corner": (torch.cat([zero, half, -half[1:], -0.9 * half[:1]]), False),
        "without zero": (torch.cat([half, -half]), False),
        "zero alone": (zero, True),
    }
    directions = torch.randn(4000, 3, generator=generator, dtype=torch.float64)
    for name, (points, expected) in cases.items():
        assert is_atomic(points) == expected, name
        values = points @ directions.T
        symmetric = torch.allclose(values.amax(0), (-values).amax(0), rtol=0, atol=1e-9)
        assert symmetric == (expected or name == "without zero"), name
    assert not is_atomic(torch.tensor([[0.0], [math.inf]]))


def test_what_is_refused() -> None:
    X = torch.tensor([[0.0], [1.0], [2.0]])
    with pytest.raises(InputError, match="classes that a plane separates"):
        max_margin(X, torch.tensor([1, -1, 1]))
    with pytest.raises(InputError, match="classes -1 and 1"):
        max_margin(X, torch.tensor([0, 1, 1]))
    with pytest.raises(InputError, match="uncertain one of"):
        max_margin(X, torch.tensor([-1, -1, 1]), uncertain="labels")
    with pytest.raises(InputError, match="targets"):
        minimum_norm(X, torch.ones(2))
    assert max_margin(X, torch.tensor([-1, -1, 1])).radius == pytest.approx(0.5)
    assert math.isclose(max_margin(1e6 * X, torch.tensor([-1, -1, 1])).radius, 5e5, rel_tol=1e-9)
