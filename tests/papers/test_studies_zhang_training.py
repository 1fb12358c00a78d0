"""Studies of Zhang et al. (2017) about training: they run through at smoke size, and their checks bite."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from flatscope.training.models import build
from flatscope.training.stacked_layers import StackedNetwork
from flatscope_papers import find_study, study
from flatscope_papers.claims import (
    CONTRADICTED,
    EXPERIMENT,
    HOLDS,
    INCONCLUSIVE,
    NOT_JUDGED,
    UNTESTABLE,
    Answer,
    Claim,
    finding_of_claim,
)
from flatscope_papers.theory.polynomial import PolynomialActivation
from flatscope_papers.zhang2017 import added_noise, architectures
from flatscope_papers.zhang2017.all_conv_networks import (
    SIZES,
    ClippedPolynomial,
    all_conv_config,
    parameter_count_of_all_conv,
    polynomial_all_conv,
    training_settings,
)
from flatscope_papers.zhang2017.errors_by_size import (
    error_curve_answers,
    natural_label_answers,
    random_label_answers,
)
from flatscope_papers.zhang2017.errors_by_width import (
    EPOCHS_15,
    errors_by_width_answers,
    generalization_gap_answers,
    networks_at_epoch,
)
from flatscope_papers.zhang2017.polynomial_networks import (
    operation_overhead_of_polynomials,
    polynomial_similarity_answers,
)

NAMES = ["fig1", "fig2", "fig3", "fig4", "fig6", "fig13", "fig14", "fig15", "fig21", "fig22", "fig23", "fig24"]
W, SEEDS = 1_000, 3


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_smoke(name: str, store: Path) -> None:
    result = study(f"zhang2017-{name}", "smoke", workers=0, store=store, device="cpu")
    assert {finding.verdict for finding in result.findings} == {NOT_JUDGED}
    assert len(result.table)
    assert "<svg" in result.svg
    answers = [finding.answer for finding in result.findings]
    assert all(math.isfinite(answer.value) or "not trained until they fit" in answer.note for answer in answers)


def test_smoke_of_the_table(store: Path) -> None:
    result = study("zhang2017-table2", "smoke", workers=0, store=store, device="cpu")
    assert {finding.verdict for finding in result.findings} == {NOT_JUDGED}
    assert set(result.table["network"]) == {"mlp_1x512", "small_alexnet"}
    assert "<svg" in result.svg


def test_the_paper_scale_is_the_papers_network() -> None:
    assert parameter_count_of_all_conv("paper", SIZES["paper"]["base"]) == 9_370
    assert 9_370 in SIZES["paper"]["train_sizes"]
    wide = [c for c in SIZES["paper"]["channels"] if parameter_count_of_all_conv("paper", c) >= 50_000]
    assert min(wide) == 38


@pytest.mark.parametrize("scale", ["smoke", "small", "paper"])
def test_parameters_and_samples_cross_at_every_scale(scale: str) -> None:
    size = SIZES[scale]
    width = parameter_count_of_all_conv(scale, size["base"])
    assert min(size["train_sizes"]) < width < max(size["train_sizes"])
    widths = [parameter_count_of_all_conv(scale, c) for c in size["channels"]]
    assert min(widths) < size["fixed_size"] <= max(widths)


def test_figures_share_their_networks() -> None:
    first = study_configs("zhang2017-fig1")
    assert first == study_configs("zhang2017-fig13")
    assert all(one in study_configs("zhang2017-fig22") for one in study_configs("zhang2017-fig21")[-1:])
    gaps = study_configs("zhang2017-fig15", "paper")
    alone = [one for one in study_configs("zhang2017-fig3", "paper") if one not in gaps]
    assert {one["model"]["options"]["channels"] for one in alone} == {38}  # trained for longer, until they fit


def study_configs(name: str, scale: str = "small") -> list[Any]:
    return [one for stage in find_study(name).stages(scale) for one in stage.configs]


@pytest.mark.parametrize(("n", "epochs"), [(500, 100), (5_000, 10)])
def test_steps_are_the_same_whatever_the_size(n: int, epochs: int) -> None:
    settings = training_settings({"lr": 0.1, "batch_size": 50, "steps": 1_000, "looks": 20}, n)
    assert settings["epochs"] == epochs
    assert settings["lr_decay"] ** settings["epochs"] == pytest.approx(0.1)
    assert settings["evaluate_every"] == max(1, epochs // 20)
    assert "steps" not in settings
    assert "looks" not in settings


def test_figure_15_of_the_paper_can_be_read_after_30_epochs() -> None:
    for one in study_configs("zhang2017-fig15", "paper"):
        assert one["train"]["epochs"] >= EPOCHS_15
        assert EPOCHS_15 % one["train"]["evaluate_every"] == 0
        assert one["train"]["lr_decay"] == pytest.approx(0.95)  # as if training had been planned for 30 epochs


def test_small_training_sets_of_the_paper_scale_get_as_many_steps_as_large_ones() -> None:
    for name in ("fig1", "fig2", "fig13", "fig14", "fig22", "fig23"):
        for one in study_configs(f"zhang2017-{name}", "paper"):
            train = one["train"]
            steps = train["epochs"] * math.ceil(one["data"]["train_size"] / train["batch_size"])
            longer = "labels" in one and one["data"]["train_size"] in (2000, 5000)  # not fitted after so many
            assert steps == pytest.approx(300_000 if longer else 30_000, rel=0.01)


def test_random_labels_have_the_seed_of_their_network() -> None:
    assert all_conv_config("small", 3, 100, 7, random=True)["labels"] == {"random": 1.0, "seed": 7}


def test_the_polynomial_is_that_of_the_library_and_stacks() -> None:
    x = torch.linspace(-8, 8, 999, dtype=torch.float64)
    expected = PolynomialActivation(-5.0, 5.0, 10, outside="clip", dtype=torch.float64)(x)
    torch.testing.assert_close(ClippedPolynomial(5.0, 10)(x), expected, rtol=0, atol=1e-12)
    network = polynomial_all_conv(2, side=16)
    StackedNetwork(network, torch.ones(2, 3, 16, 16))  # raises if it cannot be stacked
    plain = build("all_conv", channels=2, input_shape=(3, 16, 16))
    assert [p.shape for p in network.parameters()] == [p.shape for p in plain.parameters()]
    assert sum(isinstance(part, ClippedPolynomial) for part in network) == 4


def apart(*place: int) -> float:
    """A little spread that no two settings share: runs that are all alike have no interval."""
    return 1e-3 * float(np.random.default_rng(place).random())


def by_size(few_train: float, many_train: float, test: float) -> pd.DataFrame:
    """Networks of W = 1,000: a training error for N below W, another above."""
    rows = []
    for n, seed in itertools.product((100, 500, 5_000), range(SEEDS)):
        train, error = (few_train if n < W else many_train) + apart(n, seed), test + apart(n, seed, 1)
        rows.append({"n": n, "W": W, "seed": seed, "train_error": train, "test_error": error, "gap": error - train})
    return pd.DataFrame(rows)


def claims_of(name: str) -> tuple[Claim, ...]:
    return find_study(f"zhang2017-{name}").claims


def verdicts(claims: tuple[Claim, ...], found: dict[str, Answer]) -> dict[str, str]:
    assert {claim.key for claim in claims} == set(found)
    judged = [replace(claim, kind=EXPERIMENT, comment="") for claim in claims]  # remarks too
    return {claim.key: finding_of_claim(claim, found[claim.key], "small").verdict for claim in judged}


def test_natural_labels() -> None:
    claims = claims_of("fig1")
    assert set(verdicts(claims, natural_label_answers(by_size(0.0, 0.48, 0.5))).values()) == {HOLDS}
    other = verdicts(claims, natural_label_answers(by_size(0.3, 0.1, 0.95)))
    assert other["good_test_error"] == other["gap_closes"] == CONTRADICTED
    assert other["fitted"] == UNTESTABLE  # what was not trained until it fits shows its budget
    assert verdicts(claims, natural_label_answers(by_size(0.02, 0.4, 0.5)))["fitted"] == UNTESTABLE
    assert verdicts(claims, natural_label_answers(by_size(0.0, 0.48, 0.5)))["generalizes"] == HOLDS
    assert verdicts(claims, natural_label_answers(by_size(0.0, 0.4, 0.5)))["generalizes"] == CONTRADICTED
    assert other["generalizes"] == CONTRADICTED
    little = natural_label_answers(by_size(0.0, 0.48, 0.89))["good_test_error"]
    assert verdicts(claims, natural_label_answers(by_size(0.0, 0.48, 0.89)))["good_test_error"] == HOLDS
    assert "test error of 0.89" in little.note  # reproduced, but the reader sees how good it is
    assert "which is little" in next(claim for claim in claims if claim.key == "good_test_error").statement


def test_random_labels() -> None:
    claims = claims_of("fig2")
    assert set(verdicts(claims, random_label_answers(by_size(0.0, 0.88, 0.9))).values()) == {HOLDS}
    other = verdicts(claims, random_label_answers(by_size(0.2, 0.1, 0.5)))
    assert other.pop("fitted") == UNTESTABLE
    assert set(other.values()) == {CONTRADICTED}


def test_small_training_sets() -> None:
    points = by_size(0.0, 0.4, 0.5)
    points.loc[points["n"] < W, "test_error"] += 0.2
    points["gap"] = points["test_error"] - points["train_error"]
    assert set(verdicts(claims_of("fig13"), error_curve_answers(points)).values()) == {HOLDS}
    points["n"] = 10_000 - points["n"]
    assert verdicts(claims_of("fig13"), error_curve_answers(points))["more_data"] == CONTRADICTED


def by_width(test_beyond: float, train_beyond: float = 0.0) -> pd.DataFrame:
    """Networks on N = 1,000 samples; the largest has a test error of its own."""
    rows = []
    for width, seed in itertools.product((100, 1_000, 10_000), range(SEEDS)):
        train = (0.5 if width < W else train_beyond) + apart(width, seed)
        test = {100: 0.7, 1_000: 0.5, 10_000: test_beyond}[width] + apart(width, seed, 1)
        rows.append({"W": width, "n": W, "seed": seed, "train_error": train, "test_error": test, "gap": test - train})
    return pd.DataFrame(rows)


def test_more_parameters() -> None:
    claims = claims_of("fig3")
    found = verdicts(claims, errors_by_width_answers(by_width(0.51)))
    assert found.pop("best_at_boundary") == INCONCLUSIVE  # widths a power of ten apart do not tell half of one
    assert set(found.values()) == {HOLDS}
    other = verdicts(claims, errors_by_width_answers(by_width(0.6, train_beyond=0.2)))
    assert other["zero_error"] == UNTESTABLE
    assert other["no_overfitting"] == CONTRADICTED
    better = verdicts(claims, errors_by_width_answers(by_width(0.3)))
    assert better["no_overfitting"] == HOLDS
    assert better["best_at_boundary"] == INCONCLUSIVE


def test_the_gap_against_parameters() -> None:
    few, many = by_width(0.5), by_width(0.4)
    few["n"] = 50
    few["test_error"] += 0.2
    few["gap"] += 0.2
    points = pd.concat([few, many], ignore_index=True)
    found = verdicts(claims_of("fig15"), generalization_gap_answers(points))
    assert found["more_data"] == HOLDS
    assert found["anywhere"] == CONTRADICTED  # zero training error only where W ≥ N: the gap grows on the way
    worse = verdicts(claims_of("fig15"), generalization_gap_answers(by_width(0.9)))
    assert worse["beyond_samples"] == worse["expected_error"] == CONTRADICTED
    better = verdicts(claims_of("fig15"), generalization_gap_answers(by_width(0.3)))
    assert better["expected_error"] == HOLDS


def test_networks_are_read_at_their_epoch() -> None:
    curves = pd.DataFrame(
        {
            "channels": 2,
            "W": 10,
            "n": [5, 5, 5, 7],
            "seed": 0,
            "polynomial": False,
            "epoch": [10, 30, 60, 20],
            "train_error": [0.3, 0.2, 0.1, 0.0],
            "test_error": 0.5,
            "gap": 0.1,
        }
    )
    assert networks_at_epoch(curves, 30).set_index("n")["train_error"].to_dict() == {5: 0.2, 7: 0.0}
    assert networks_at_epoch(curves, None).set_index("n")["train_error"].to_dict() == {5: 0.1, 7: 0.0}


@pytest.mark.parametrize(
    ("shift", "better", "same"),
    [(-0.01, HOLDS, HOLDS), (0.01, CONTRADICTED, HOLDS), (-0.2, HOLDS, CONTRADICTED)],
)
def test_noise(shift: float, better: str, same: str) -> None:
    rows = []
    for kind, seed, epoch in itertools.product(("SGD", "SGDL"), range(SEEDS), range(1, 21)):
        # Early epochs must not count, so they are far off.
        error = 0.9 if epoch < 10 else 0.5 + 0.05 * seed + (shift if kind == "SGDL" else 0.0)
        error += apart(seed, epoch, kind == "SGDL", 1)
        train = 0.1 + apart(seed, epoch, kind == "SGDL")
        rows.append({"kind": kind, "seed": seed, "epoch": epoch, "train_error": train, "test_error": error})
    found = verdicts(claims_of("fig6"), added_noise.added_noise_answers(pd.DataFrame(rows)))
    assert found == {"same_training": HOLDS, "same_validation": same, "better_validation": better}


@pytest.mark.parametrize(("shift", "verdict"), [(0.01, HOLDS), (0.05, CONTRADICTED), (0.3, CONTRADICTED)])
def test_similar_networks(shift: float, verdict: str) -> None:
    rows = [
        {
            "polynomial": kind,
            "seed": s,
            "epoch": e,
            "train_error": 0.1,
            "test_error": 0.5 + shift * kind + apart(s, kind),
        }
        for kind, s, e in itertools.product((False, True), range(SEEDS), (1, 2))
    ]
    found = polynomial_similarity_answers(pd.DataFrame(rows))
    assert verdicts(claims_of("fig21"), found)["testing"] == verdict
    assert found["degree"].value == 10_000  # 10^4: the printed 40 is wrong
    assert verdicts(claims_of("fig21"), found)["degree"] == CONTRADICTED


def test_operations_of_polynomials() -> None:
    # One channel on 8×8: convolutions of 16, 4 and 1 outputs (27, 9 and 9 weights), 1 (1 weight), then 10 of 1 weight.
    convolutions = 2 * (16 * 27 + 4 * 9 + 1 * 9 + 1 * 1 + 10 * 1)
    assert operation_overhead_of_polynomials(channels=1, side=8) == pytest.approx(22 * 19 / (convolutions + 22))
    assert (
        operation_overhead_of_polynomials(channels=64)
        < operation_overhead_of_polynomials()
        < operation_overhead_of_polynomials(channels=4)
    )  # more weights per unit, less in activations


def test_the_table_of_architectures() -> None:
    claims = claims_of("table2")
    accuracies = {"mlp_1x512": 50.0, "small_alexnet": 76.0, "small_inception": 60.0}
    jitter = np.array([-0.1, 0.0, 0.1])
    points = pd.concat(
        pd.DataFrame({"network": name, "seed": range(3), "train_accuracy": 100.0, "test_accuracy": value + jitter})
        for name, value in accuracies.items()
    )
    built = architectures.parameter_counts()
    full = verdicts(claims, architectures.architecture_answers(points, built, full=True))
    assert {full[f"parameters/{name}"] for name in built} == {HOLDS}
    assert full["better/small_alexnet"] == HOLDS
    assert full["better/small_inception"] == CONTRADICTED
    assert full["better/wide_resnet"] == full["test/wide_resnet"] == UNTESTABLE
    assert full["test/small_alexnet"] == HOLDS
    assert full["test/small_inception"] == CONTRADICTED
    few = architectures.architecture_answers(points, built, full=False)
    assert math.isnan(few["test/small_alexnet"].value)
    assert "50.0" in few["test/mlp_1x512"].note
