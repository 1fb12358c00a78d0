"""Figures 1 and 2 of Petzka et al. (2019): their numbers on networks whose verdict is known."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from flatscope_papers import find_study
from flatscope_papers.claims import CONTRADICTED, HOLDS, finding_of_claim
from flatscope_papers.petzka2019.correlations import excess_correlation_of_kappa_trace
from flatscope_papers.petzka2019.lenet import RULES, lenet_stages
from flatscope_papers.petzka2019.reparameterized import change_by_reparameterization, trace_and_eigenvalue_answers
from flatscope_papers.petzka2019.stop_rules import (
    Rule,
    correlation_answer_at_rule,
    correlation_holding_setting_fixed,
    correlations_by_stop_rule,
    sign_change_epochs_in_words,
    stop_rules,
)

FIRST = {claim.key: claim for claim in find_study("petzka2019-fig1").claims}
SECOND = {claim.key: claim for claim in find_study("petzka2019-fig2").claims}
LOSS = RULES[0]


def networks(of_trace: float, of_top: float, n: int = 200) -> pd.DataFrame:
    """κ_τ and κ of the output matrix as multiples of the gap, with noise of size one; looked at after three epochs."""
    generator = np.random.default_rng(0)
    gap = generator.normal(size=n)
    columns = {"kappa_trace": of_trace, "kappa": of_top, "layer_trace": of_trace, "layer_max_eigenvalue": of_top}
    noisy = {f"{name}/fc3": 100 + slope * gap + generator.normal(size=n) for name, slope in columns.items()}
    settings = {
        "network": np.arange(n),
        "batch": np.arange(n) % 4,
        "init": np.arange(n) % 3,
        "factor": 5 + np.arange(n) % 21,
    }
    one = pd.DataFrame({**noisy, **settings, "gap": gap, "error_gap": gap, "gradient": 1.0})
    # Every network reaches the loss after the second look, before which its measures are of the other sign.
    early = one.assign(epoch=10, train_loss=1.0, **{name: 200 - one[name] for name in noisy})
    return pd.concat([early, one.assign(epoch=20, train_loss=0.09), one.assign(epoch=30, train_loss=0.05, gap=0.0)])


def test_each_network_is_taken_where_the_rule_stops_it() -> None:
    looks = networks(1.0, 1.0)
    points = LOSS.stops(looks)
    assert points["network"].is_unique
    assert (points["epoch"] == 20).all()
    assert (Rule("epoch", 30).stops(looks)["gap"] == 0.0).all()
    assert len(RULES[1].stops(looks)) == 0


def test_correlations_are_a_function_of_the_rule() -> None:
    along = correlations_by_stop_rule(networks(3.0, 3.0), ["kappa_trace/fc3"], stop_rules(networks(3.0, 3.0), RULES))
    found = along[along["target"] == "gap"].set_index("rule")["pearson"]
    assert found["epoch 10"] == pytest.approx(-found["loss 0.1"])
    assert found["loss 0.1"] == found["epoch 20"] > 0.9
    assert "loss 0.01" not in found.index  # nobody came there
    assert "the sign turns by epoch 20" in sign_change_epochs_in_words(
        along[along["rule"] != "epoch 30"], "kappa_trace/fc3"
    )


@pytest.mark.parametrize(("slope", "verdict"), [(2.0, HOLDS), (0.7, CONTRADICTED), (-2.0, CONTRADICTED)])
def test_a_planted_correlation_gets_its_verdict(slope: float, verdict: str) -> None:
    found = correlation_answer_at_rule(networks(slope, 1.0, n=400), LOSS, 400, "kappa_trace/fc3")
    assert finding_of_claim(FIRST["trace"], found, "paper").verdict == verdict


def test_a_rule_that_too_few_come_to_is_not_judged() -> None:
    looks = networks(2.0, 1.0)
    late = looks[(looks["network"] >= 30) | (looks["epoch"] == 10)]
    assert math.isnan(correlation_answer_at_rule(late, LOSS, 200, "kappa_trace/fc3").value)
    assert math.isfinite(correlation_answer_at_rule(late, LOSS, 185, "kappa_trace/fc3").value)
    assert math.isnan(excess_correlation_of_kappa_trace(late, LOSS, 200).value)


@pytest.mark.parametrize(
    ("of_trace", "of_top", "due"),
    [
        (3.0, 0.5, HOLDS),
        (3.0, -0.5, HOLDS),
        (0.5, 3.0, CONTRADICTED),
        (0.5, -3.0, CONTRADICTED),
        (-0.5, -3.0, CONTRADICTED),  # the less negative of two is not the stronger
        (-3.0, -0.5, CONTRADICTED),  # nor is the stronger one in the wrong direction
    ],
)
def test_the_stronger_correlation_is_one_in_the_papers_direction(of_trace: float, of_top: float, due: str) -> None:
    assert (
        finding_of_claim(
            FIRST["stronger"], excess_correlation_of_kappa_trace(networks(of_trace, of_top), LOSS, 200), "paper"
        ).verdict
        == due
    )


def test_what_the_training_loss_and_the_batches_make_of_a_correlation_is_seen() -> None:
    generator = np.random.default_rng(0)
    points = pd.DataFrame({"batch": np.repeat([4, 32, 512], 40), "init": 0, "train_loss": generator.normal(size=120)})
    noise = 0.01 * generator.normal(size=(3, 120))
    points["gap"] = -points["train_loss"] + noise[0] + points["batch"]
    points["by_loss"] = -points["train_loss"] + noise[1]
    points["by_batch"] = points["batch"] + noise[2]
    assert points["by_batch"].corr(points["gap"]) > 0.99
    assert abs(correlation_holding_setting_fixed(points, "by_batch", "batch")) < 0.3
    assert correlation_holding_setting_fixed(points, "by_loss", "batch") > 0.99
    assert abs(correlation_holding_setting_fixed(points, "by_loss", "train_loss")) < 0.3


def test_measures_that_only_the_hessian_makes_are_seen_to_fail() -> None:
    points = LOSS.stops(networks(9.0, 9.0))  # of which factors from 5 to 25 leave nothing
    verdicts = {
        key: finding_of_claim(SECOND[key], answer, "paper").verdict
        for key, answer in trace_and_eigenvalue_answers(points).items()
    }
    assert set(verdicts) | {"invariant", "hessian_trace_last", "hessian_eigenvalue_last"} == set(SECOND)
    assert set(verdicts.values()) == {HOLDS}
    same = trace_and_eigenvalue_answers(points.assign(factor=4))  # a power of two: nothing is rounded
    still = {key: finding_of_claim(SECOND[key], answer, "paper").verdict for key, answer in same.items()}
    assert set(still.values()) == {CONTRADICTED}


def test_a_measure_that_moves_is_seen() -> None:
    looks = pd.DataFrame({"network": [0, 0, 1, 1], "moved": [1e-12, 1e-12, 1e-12, 1e-12]})
    assert finding_of_claim(SECOND["invariant"], change_by_reparameterization(looks), "paper").verdict == HOLDS
    one = looks.assign(moved=[1e-12, 1e-12, 0.01, 0.01])
    assert finding_of_claim(SECOND["invariant"], change_by_reparameterization(one), "paper").verdict == CONTRADICTED


def test_the_paper_scale_is_the_papers_grid() -> None:
    unit, *variants = lenet_stages("paper")[0].units
    assert [one["variant"] for one, *_ in variants] == ["rounded", "script", "momentum", "constant_ratio"]
    assert {len(others) for others in variants} == {144}
    assert {config["follow"]["losses"][4] for config in unit} == {0.1}
    assert len(unit) == 144
    rates = {(config["train"]["batch_size"], config["train"]["lr"]) for config in unit}
    assert rates == {(4, 0.001), (32, 0.008), (64, 0.02), (512, 0.1)}
    assert not any("momentum" in config["train"] for config in unit)
    assert len({config["train"]["seed"] for config in unit}) == 144
    assert {config["follow"]["factor"] for config in unit} <= set(range(5, 26))
    assert {config["init"].get("variance") for config in unit if "normal" in config["setup"]} == {None, 0.01}
