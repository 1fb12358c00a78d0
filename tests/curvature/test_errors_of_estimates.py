"""Standard errors of all estimators say how far off they are, also where draws are few or stopped early."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from networks import mlp
from sklearn.datasets import load_digits
from torch import Tensor, nn

import flatscope as fs
from flatscope.context import Context, Effort
from flatscope.limits import STANDARD
from flatscope.registry import declarations
from flatscope.sampling import draw_until_precise

PROBLEM = functools.cache(lambda: mlp().problem())

Law = Callable[[int, torch.Generator], Tensor]


def normal(n: int, generator: torch.Generator) -> Tensor:
    return 1 + 0.3 * torch.randn(n, generator=generator, dtype=torch.float64)


def squares(n: int, generator: torch.Generator) -> Tensor:
    return torch.randn(n, 3, generator=generator, dtype=torch.float64).square().mean(1)


def skewed(n: int, generator: torch.Generator) -> Tensor:
    return torch.exp(0.5 * torch.randn(n, generator=generator, dtype=torch.float64) - 0.125)


def deviations(law: Law, precision: float, most: int, runs: int) -> tuple[np.ndarray[Any, Any], set[int]]:
    """How many standard errors the means of draws with mean 1 are off, and how many draws they took."""
    ctx, found, taken = Context(PROBLEM(), effort=Effort(precision=precision)), [], set()
    for seed in range(runs):
        generator = torch.Generator().manual_seed(seed)
        blocks = (law(min(most, STANDARD.first_look), generator) for _ in range(most))
        draws = draw_until_precise(ctx, blocks, most)
        found.append((draws.means[0] - 1) / draws.stderrs[0])
        taken.add(len(draws.samples))
    return np.array(found), taken


@pytest.mark.parametrize("law", [normal, squares, skewed])
@pytest.mark.parametrize("precision", [0.1, 0.05])
def test_what_stops_early_is_as_far_off_as_it_says(law: Law, precision: float) -> None:
    z, taken = deviations(law, precision, 4096, 1000)
    assert max(taken) < 4096
    assert min(taken) >= STANDARD.first_look
    assert np.sqrt((z**2).mean()) <= 1.2
    assert (np.abs(z) > 4).mean() <= 0.005


@pytest.mark.parametrize("n", [3, 6])
def test_errors_of_few_draws_are_students(n: int) -> None:
    z, taken = deviations(normal, 0.0, n, 3000)
    assert taken == {n}
    assert (np.abs(z) <= 1.96).mean() == pytest.approx(0.95, abs=4 * math.sqrt(0.05 * 0.95 / 3000))


# Every estimator at its default, on one network whose values are known otherwise

SEEDS = 150
TRACES = ("hessian_trace", "layer_trace", "kappa_trace", "kappa_trace_sum", "rho_sum", "relative_flatness", "psi_trace")
DRAWN: dict[str, dict[str, Any]] = {
    "expected_sharpness": {"alpha": 0.01},
    "expected_flatness": {},
    "flatness_radius": {},
    "batch_sharpness": {"batch": 16},
    "m_sharpness": {"m": 16},
}
ENCLOSED: dict[str, dict[str, Any]] = {
    "effective_dimension": {"alpha": 1e-2, "steps": 6},
    "takeuchi_trace": {"damping": 0.1, "steps": 6},
}


@functools.cache
def gelu() -> fs.Problem:
    digits = load_digits()
    x, y = torch.tensor(digits.data[:200]) / 16, torch.tensor(digits.target[:200])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 16), nn.GELU(), nn.Linear(16, 10)).double()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(40):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return fs.Problem(model.eval(), (x, y))


def rows_of(names: list[str], seeds: range, precision: float, options: Any = None) -> Iterator[Any]:
    for seed in seeds:
        frame = fs.measure(gelu(), names, seed, options, precision=precision).to_frame()
        yield frame.set_index(["measure", "layer"])[["value", "stderr"]]


def judge(found: list[Any], truth: Any, what: str) -> None:
    for key in found[0].index:
        values, stderrs = (np.array([frame.loc[key, column] for frame in found]) for column in ("value", "stderr"))
        if not stderrs.any():
            continue
        z = (values - truth.loc[key, "value"]) / np.hypot(stderrs, truth.loc[key, "stderr"])
        rms, beyond = math.sqrt((z**2).mean()), int((np.abs(z) > 4).sum())
        print(f"{what} {key[0]} {key[1]}: rms {rms:.2f}, beyond 4: {beyond}, stderr {np.median(stderrs / values):.3f}")
        assert rms <= 1.2, (what, key)
        assert beyond <= 1, (what, key)


@pytest.mark.long
@pytest.mark.parametrize("precision", [0.1, 0.02])
def test_traces_from_draws_are_as_far_off_as_they_say(precision: float) -> None:
    (truth,) = rows_of([*TRACES], range(1), 0.0)
    judge(list(rows_of([*TRACES], range(SEEDS), precision)), truth, f"precision {precision}")


@pytest.mark.long
@pytest.mark.parametrize("name", DRAWN)
def test_estimates_at_their_defaults_are_as_far_off_as_they_say(name: str) -> None:
    options = DRAWN[name]
    found = list(rows_of([name], range(SEEDS), 0.02, {name: options}))
    many = next(key for key in ("groups", "directions", "draws") if key in declarations()[name].options)
    (truth,) = rows_of([name], range(1000, 1001), 0.0, {name: options | {many: 2000}})
    judge(found, truth, "default")


@pytest.mark.long
@pytest.mark.parametrize("name", ENCLOSED)
def test_what_lanczos_encloses_is_as_far_off_as_it_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network so small that the value is known, taken for a large one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 8, generator=generator, dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 4)).double()
    problem, options = fs.Problem(model, (x, torch.arange(60) % 4)), {name: ENCLOSED[name]}
    truth = fs.measure(problem, name, options=options).to_frame().set_index(["measure", "layer"])
    assert truth["exact"].all()
    monkeypatch.setitem(vars(STANDARD), "inverted_matrix", 0)
    found = [fs.measure(problem, name, seed, options, precision=0.1).to_frame() for seed in range(SEEDS)]
    judge([frame.set_index(["measure", "layer"]) for frame in found], truth, "precision 0.1")
