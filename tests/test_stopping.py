"""Means over draws that stop when they are precise enough: honest errors, the same draws, and the truth in the row."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
import torch
from networks import binary, mlp
from torch import Tensor

import flatscope as fs
from flatscope.context import Context, Effort
from flatscope.sampling import draw_until_precise, pair_means

pytestmark = pytest.mark.long

OPTIONS: dict[str, dict[str, Any]] = {
    "expected_sharpness": {"alpha": 0.01},
    "expected_flatness": {"draws": 1000},
    "adaptive_sharpness": {"mode": "average", "draws": 1000},
    "flatness_radius": {"directions": 500},
}


PROBLEM = functools.cache(lambda: mlp().problem())
SMALL = functools.cache(lambda: binary().problem())  # one hidden layer


def context(precision: float = 0.02, deadline: float | None = None) -> Context:
    return Context(PROBLEM(), effort=Effort(precision=precision, deadline=deadline))


def normal_blocks(seed: int, taken: list[int], width: int = 1) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        taken[0] += 16
        yield 1 + 0.3 * torch.randn(16, width, generator=generator, dtype=torch.float64)


def test_draws_stop_where_the_error_is_small_enough_and_no_more_are_made() -> None:
    taken = [0]
    found = draw_until_precise(context(0.05), normal_blocks(0, taken), 10_000)
    assert len(found.samples) == taken[0]
    assert found.stderrs[0] <= 0.05 * found.means[0]
    assert len(found.samples) in (32, 64, 128)  # (0.3 / 0.05)² = 36
    assert found.remark() == f"{taken[0]} of 10,000 draws"


def test_all_quantities_must_be_precise() -> None:
    def blocks() -> Iterator[Tensor]:
        for block in normal_blocks(0, [0], 2):
            yield block * torch.tensor([1.0, 1.0]) + torch.tensor([0.0, -0.9])  # the second has a mean of 0.1

    found = draw_until_precise(context(0.05), blocks(), 100_000)
    assert len(found.samples) >= 2048  # (0.3 / 0.1 / 0.05)² = 3600
    assert found.stderrs[1] <= 0.05 * found.means[1]


def test_precision_zero_takes_all_draws() -> None:
    blocks = (torch.ones(10, dtype=torch.float64) for _ in range(10))
    assert len(draw_until_precise(context(0.0), blocks, 100).samples) == 100


@pytest.mark.parametrize("precision", [0.0, 1e-9])
def test_no_more_than_the_most_draws_are_taken(precision: float) -> None:
    """However many the blocks could give: Hessian products of a large network never end otherwise."""
    taken = [0]
    found = draw_until_precise(context(), normal_blocks(0, taken), most=96, precision=precision)
    assert len(found.samples) == taken[0] == 96


def test_a_mean_of_zero_is_never_precise() -> None:
    blocks = (torch.tensor([1.0, -1.0] * 8) for _ in range(20))
    assert len(draw_until_precise(context(0.5), blocks, 320).samples) == 320


def test_a_deadline_ends_with_what_there_is() -> None:
    found = draw_until_precise(context(1e-9, deadline=time.monotonic() - 1), normal_blocks(0, [0]), 1000)
    assert len(found.samples) == 16
    assert found.remark(each=2) == "32 of 2,000 draws: the time was up"


def test_pairs_are_put_together_across_blocks() -> None:
    values = torch.arange(8.0, dtype=torch.float64)
    found = torch.cat(list(pair_means(values.split(3))))
    assert found.tolist() == [0.5, 2.5, 4.5, 6.5]


def test_the_standard_error_of_a_stopped_mean_covers() -> None:
    """Of 400 runs of skewed draws each stopped by its own error, at least 91 % hold the truth in ±1.96 errors."""
    hits = 0
    for seed in range(400):
        generator = torch.Generator().manual_seed(seed)
        blocks = (torch.rand(16, generator=generator, dtype=torch.float64).square() for _ in range(1000))
        found = draw_until_precise(context(0.05), blocks, 16_000)
        assert len(found.samples) < 16_000
        hits += abs(found.means[0] - 1 / 3) <= 1.96 * found.stderrs[0]
    assert 0.91 <= hits / 400 <= 0.98


@pytest.fixture(scope="module")
def by_seed() -> list[pd.DataFrame]:
    """All estimators with each of 200 seeds; that one changes no other is tested below."""
    tables = (fs.measure(SMALL(), list(OPTIONS), seed, OPTIONS, precision=0.2) for seed in range(200))
    return [table.to_frame().set_index("measure")[["value", "stderr"]] for table in tables]


@pytest.mark.parametrize("name", OPTIONS)
def test_the_standard_error_of_a_measure_that_stopped_covers(name: str, by_seed: list[pd.DataFrame]) -> None:
    """200 seeds of each estimator on a tiny network, against one long run of another seed."""
    exact = fs.measure(SMALL(), name, seed=999, options={name: _long(name)}, precision=0)
    truth, error = exact[name], exact.stderr(name)
    found = [frame.loc[name].tolist() for frame in by_seed]
    hits = sum(abs(value - truth) <= 1.96 * math.hypot(stderr, error) for value, stderr in found)
    assert 0.89 <= hits / 200 <= 0.99


def _long(name: str) -> dict[str, Any]:
    many = "directions" if name == "flatness_radius" else "draws"
    return OPTIONS[name] | {many: 8000}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_measure_that_stops_has_the_same_draws_as_one_that_goes_on(name: str) -> None:
    problem = mlp().problem()
    stopped = fs.measure(problem, name, options={name: OPTIONS[name]}, precision=0.3).to_frame().iloc[0]
    all_of_them = fs.measure(problem, name, options={name: OPTIONS[name]}, precision=0).to_frame().iloc[0]
    assert stopped["stderr"] <= 0.3 * abs(stopped["value"])
    assert stopped["passes"] < all_of_them["passes"]
    assert all_of_them["stderr"] < stopped["stderr"]
    assert abs(stopped["value"] - all_of_them["value"]) < 5 * stopped["stderr"]
    many = "directions" if name == "flatness_radius" else "draws"
    assert " of " in stopped["reason"]
    assert many in stopped["reason"]
    assert f"{OPTIONS[name].get(many, 1000):,} {many}" in all_of_them["reason"]
    if name not in ("flatness_radius", "expected_sharpness"):  # those draw many at once, and so others for fewer
        taken = int(stopped["reason"].split(" of ")[0].replace(",", ""))
        alone = fs.measure(problem, name, options={name: OPTIONS[name] | {many: taken}}, precision=0).to_frame().iloc[0]
        assert stopped["value"] == pytest.approx(alone["value"], rel=1e-12)


def test_one_more_measure_changes_no_other() -> None:
    problem, names = mlp().problem(), ["expected_flatness", "expected_sharpness", "hessian_max_eigenvalue"]
    alone = {name: fs.measure(problem, name).to_frame()["value"].tolist() for name in names}
    together = fs.measure(problem, ["hessian_min_eigenvalue", "flatness_radius", *reversed(names)]).to_frame()
    for name in names:
        assert together.loc[together["measure"] == name, "value"].tolist() == alone[name]


@pytest.mark.parametrize(
    "name", ["sharpness", "epsilon_flatness", "adaptive_sharpness", "psi_epsilon", "feature_robustness"]
)
def test_a_search_says_how_far_its_last_step_went(name: str) -> None:
    options = {name: {"steps": 5}}
    for reason in fs.measure(mlp().problem(), name, options=options).to_frame()["reason"]:
        assert "the last step added" in reason or "no step led higher" in reason


def test_noise_on_inputs_stops_for_each_level_by_itself() -> None:
    torch.manual_seed(0)
    x = torch.randn(3000, 4)
    problem = fs.Problem(torch.nn.Linear(4, 3), (x, torch.randint(3, (3000,))))
    name, options = "perturbation_robustness", {"perturbation_robustness": {"gammas": (0.1, 1.0)}}
    stopped = fs.measure(problem, name, options=options, precision=0.01).to_frame()
    full = fs.measure(problem, name, options=options, precision=0).to_frame()
    assert stopped["reason"].tolist() == ["2 of 10 draws", "2 of 10 draws"]
    assert full["reason"].tolist() == ["10 draws", "10 draws"]
    assert (stopped["stderr"] <= 0.01 * stopped["value"]).all()
    assert ((stopped["value"] - full["value"]).abs() < 5 * stopped["stderr"]).all()
