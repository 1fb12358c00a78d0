"""Studies of statements that the papers do not run: what is planted gets the verdict that is due."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
import pytest
import torch

from flatscope_papers import find_study
from flatscope_papers.claims import CONTRADICTED, HOLDS, NOT_JUDGED, UNTESTABLE, Answer, finding_of_claim
from flatscope_papers.neyshabur2017.smallest_product import (
    product_of_largest_unit_norms,
    rescaled_weights,
    weights_with_smallest_product,
)
from flatscope_papers.neyshabur2017.smallest_product import smallest_product_answers as products_found
from flatscope_papers.yi2019.simulated_bound import sample_normal_classes
from flatscope_papers.yi2019.simulated_bound import simulated_bound_answers as bound_found
from flatscope_papers.zhang2017.further_statements import _perturbation_size_at_error
from flatscope_papers.zhang2017.further_statements import further_statement_answers as further_found

GOOD = {
    "robust_sgd": 2.0, "robust_sgdl": 1.0, "weight_tolerance": 0.3, "input_tolerance": 0.6, "deep_test": 0.02,
    "shallow_test": 0.4, "deep_random": 0.6, "shallow_random": 0.9, "deep_ratio": 1.4, "direct_ratio": 21.0,
    "in_order": 1.0, "same_end": 1e-9, "norm_slope": -1.0, "hinge": 0.9, "factors": 1e-14, "swap": 1e-9, "scaled": 1e-9,
}  # fmt: skip


def verdicts(name: str, answers: Mapping[str, Answer]) -> dict[str, str]:
    return {
        claim.key: finding_of_claim(claim, answers[claim.key], "paper").verdict for claim in find_study(name).claims
    }


def problems(**changes: float) -> pd.DataFrame:
    noise = np.random.default_rng(0).normal(size=(20, len(GOOD)))
    exact = {"in_order", "same_end", "hinge", "factors", "swap", "scaled"}
    columns = (GOOD | changes).items()
    return pd.DataFrame(
        {name: value * (1 + (name not in exact) * 0.02 * noise[:, i]) for i, (name, value) in enumerate(columns)}
    )


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("conjecture_3", {"input_tolerance": 0.1}),
        ("factors", {"factors": 1e-3}),
        ("proposition_1", {"deep_test": 1.0}),
        ("complexity", {"deep_random": 1.0}),
        ("stages", {"deep_ratio": 21.0}),
        ("order", {"in_order": 0.0}),
        ("same_end", {"same_end": 0.1}),
        ("residual_norm", {"norm_slope": -0.5}),
        ("hinge", {"hinge": 1.1}),
        ("swap", {"swap": 0.97}),
        ("scaled", {"scaled": 0.2}),
    ],
)
def test_every_statement_can_fail_by_itself(key: str, changes: dict[str, float]) -> None:
    good = verdicts("zhang2017-further", further_found(problems()))
    assert good.pop("conjecture_2") == NOT_JUDGED
    assert set(good.values()) == {HOLDS}
    bad = verdicts("zhang2017-further", further_found(problems(**changes)))
    assert {name for name, verdict in bad.items() if verdict == CONTRADICTED} == {key}


@pytest.mark.parametrize("at", [0.01, 0.4, 5.0])
def test_the_size_at_which_samples_go_wrong_is_found(at: float) -> None:
    step: Callable[[float], float] = lambda size: 0.2 * (size >= at)  # noqa: E731
    assert _perturbation_size_at_error(step) == pytest.approx(at, rel=0.01)
    assert _perturbation_size_at_error(lambda size: 0.0) == np.inf


def sets(broken: int) -> pd.DataFrame:
    """A hundred training sets; at one size of the noise the bound is broken for some of them."""
    rows = [
        {"network": i, "sigma": sigma, "left": 0.1, "right": 0.05 if sigma == 0.3 and i < broken else 0.5}
        for i in range(100)
        for sigma in (0.1, 0.3)
    ]
    return pd.DataFrame(rows)


@pytest.mark.parametrize(("broken", "due"), [(0, HOLDS), (20, CONTRADICTED)])
def test_a_hundred_training_sets_can_show_a_share_of_95_per_cent(broken: int, due: str) -> None:
    assert verdicts("yi2019-simulated-bound", bound_found(sets(broken))) == {"bound": due}
    few = bound_found(sets(0).query("network < 20"))["bound"]
    assert finding_of_claim(find_study("yi2019-simulated-bound").claims[0], few, "paper").verdict not in (
        HOLDS,
        UNTESTABLE,
    )


def test_the_samples_of_the_simulation_are_independent_of_their_class() -> None:
    x, y = sample_normal_classes(20_000, torch.Generator().manual_seed(0))
    for label in range(4):
        own = x[y == label]
        assert len(own) / len(x) == pytest.approx(0.25, abs=0.02)
        assert own.mean(0).tolist() == pytest.approx([2.0 * (i == label) for i in range(8)], abs=0.06)
        torch.testing.assert_close(own.T.cov(), torch.eye(8, dtype=torch.float64), rtol=0, atol=0.08)


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_the_smallest_product_is_attained_and_rescaling_keeps_the_function(p: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((5, 3), (4, 5), (2, 4))]
    factors = [torch.rand(n, generator=generator).double() + 0.1 for n in (5, 4)]

    def outputs(layers: list[torch.Tensor]) -> torch.Tensor:
        x = torch.linspace(-1, 1, 3, dtype=torch.float64)
        for w in layers[:-1]:
            x = (w @ x).relu()
        return layers[-1] @ x

    paths = [
        sum(float((weights[2][o, b] * weights[1][b, a] * weights[0][a, i]).abs() ** p)
            for a in range(5) for b in range(4) for i in range(3)) ** (1 / p)
        for o in range(2)
    ]  # fmt: skip
    for moved in (rescaled_weights(weights, factors), weights_with_smallest_product(weights, p)):
        torch.testing.assert_close(outputs(moved), outputs(weights))
        assert product_of_largest_unit_norms(moved, p) >= max(paths) * (1 - 1e-12)
    assert product_of_largest_unit_norms(weights_with_smallest_product(weights, p), p) == pytest.approx(max(paths))
    table = pd.DataFrame({"least_drawn": [1.5] * 9, "greedy": [1.0] * 9, "all_outputs": [1.4] * 9})
    assert verdicts("neyshabur2017-smallest-product", products_found(table)) == {
        "never_below": HOLDS, "attained": HOLDS, "all_outputs": CONTRADICTED,
    }  # fmt: skip
    low = products_found(table.assign(least_drawn=0.9, greedy=1.1))
    assert verdicts("neyshabur2017-smallest-product", low)["never_below"] == CONTRADICTED
    assert verdicts("neyshabur2017-smallest-product", low)["attained"] == CONTRADICTED
