"""Studies of Zhang et al. (2017) that probe networks: they run at smoke size, and give the verdict that is due."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from flatscope.training.models import build
from flatscope.training.sweeps.work import builder_of, trial_of
from flatscope.training.trials import build_model, read_trials
from flatscope_papers import find_study, intervals, study
from flatscope_papers.claims import CONTRADICTED, EXPERIMENT, HOLDS, NOT_JUDGED, Answer, Claim, finding_of_claim
from flatscope_papers.fitting import answer_if_networks_fitted, notes_on_unfitted_networks
from flatscope_papers.theory.polynomial_operator import BinaryTree
from flatscope_papers.zhang2017.dynamics import share_nearest_average_minimum, smallest_rise_between_groups
from flatscope_papers.zhang2017.figures_11_and_12 import (
    LAMBDAS,
    flat_regions_of_triangles,
    plateau_shares_of_corners,
    slowdown_by_random_labels,
)
from flatscope_papers.zhang2017.figures_18_and_25 import (
    degree_of_composition,
    monomial_exponents,
    path_count,
    paths_lost_by_unit,
    ridge_function_ranks,
    tree_support,
)
from flatscope_papers.zhang2017.flatness_test import MOVED, OBJECTIVES, PRINTED, SETS, radii_of_table
from flatscope_papers.zhang2017.minima import LABELS, minimiser_config, minimiser_configs
from flatscope_papers.zhang2017.norms_during_training import STARTS, label_comparisons, unit_and_weight_norms
from flatscope_papers.zhang2017.perturbed import GAMMAS, input_noise_answers
from flatscope_papers.zhang2017.potential_chains import MAPS

NAMES = [
    "statements",
    "further",
    "conjecture1",
    "fig5",
    "fig7",
    "fig8",
    "fig9",
    "fig10",
    "fig11",
    "fig12",
    "fig16",
    "fig17",
    "fig19",
    "fig20",
    "fig25",
    "table1",
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # networks so small may be alike: SciPy warns of that
def test_smoke(name: str, store: Path) -> None:
    result = study(f"zhang2017-{name}", "smoke", workers=0, store=store, device="cpu")
    declared = find_study(f"zhang2017-{name}")
    assert [finding.claim for finding in result.findings] == list(declared.claims)
    assert {finding.verdict for finding in result.findings} == {NOT_JUDGED}
    assert len(result.table)
    assert "<svg" in result.svg
    # Networks that were hardly trained may have no margin to compare.
    missing = ("not positive", "no stratum", "are not fitted", "not trained until they fit", "do not fit perfectly")
    found = [finding.answer for finding in result.findings]
    answers = [answer for answer in found if not any(words in answer.note for words in missing)]
    assert all(math.isfinite(answer.value) for answer in answers)


@pytest.mark.parametrize("name", NAMES)
def test_every_scale_is_said_to_differ_and_can_be_planned(name: str) -> None:
    declared = find_study(f"zhang2017-{name}")
    assert declared.words.differs["small"]
    assert declared.words.differs["paper"]
    assert declared.words.at_paper_scale
    assert all(stage.configs for stage in declared.stages("paper"))


@pytest.mark.parametrize("name", ["fig5", "fig11", "fig16", "table1"])
def test_networks_of_the_paper_scale_can_be_built(name: str) -> None:
    for unit in find_study(f"zhang2017-{name}").stages("paper")[0].units:
        config = unit[0]  # the others differ in their seeds
        builder = builder_of(config["model"]["name"])
        (trial,) = read_trials([trial_of(config, "0")], builder)
        shape = (
            (1, 28, 28)
            if config["data"]["name"] == "mnist"
            else (3, 28, 28)
            if "crop" in config["data"]
            else (3, 32, 32)
        )
        model = build_model(builder, trial, torch.zeros(1, *shape), 10)
        assert model(torch.zeros(1, *shape)).shape == (1, 10)


def claim(name: str, key: str) -> Claim:
    (found,) = [one for one in find_study(f"zhang2017-{name}").claims if one.key == key]
    return found


def verdict(name: str, key: str, answer: Answer) -> str:
    return finding_of_claim(replace(claim(name, key), kind=EXPERIMENT, comment=""), answer, "small").verdict


# Counts


@pytest.mark.parametrize(("depth", "units", "paths"), [(3, 1, 8), (3, 2, 32), (2, 3, 12), (4, 2, 128)])
def test_paths_of_a_tree_are_counted(depth: int, units: int, paths: int) -> None:
    assert path_count(BinaryTree(depth, units=units)) == paths == 2**depth * units ** (depth - 1)


@pytest.mark.parametrize(("variables", "degree"), [(1, 5), (2, 3), (4, 2)])
def test_monomials_are_counted_one_by_one(variables: int, degree: int) -> None:
    found = list(monomial_exponents(variables, degree))
    assert len(found) == len(set(found)) == math.comb(variables + degree, degree)
    assert max(map(sum, found)) == degree


def test_degrees_multiply() -> None:
    assert [degree_of_composition(2, layers) for layers in (1, 2, 3)] == [2, 4, 8]


def test_one_direction_less_is_not_enough() -> None:
    found = ridge_function_ranks(2, 3)
    assert found["ridge_with_offset"] == found["expected_with_offset"] == 10
    assert found["ridge_with_offset_one_less"] == 9
    assert found["ridge_without_offset"] == found["expected_without"] == found["dimension_of_degree"] == 4
    assert found["dimension_up_to_degree"] == 10


def test_the_monomials_of_a_tree() -> None:
    assert tree_support(2) == set(monomial_exponents(2, 2))
    four = tree_support(4)
    # q(p(x1, x2), p(x3, x4)): up to degree four in one pair alone, up to two in both.
    expected = {
        m
        for m in monomial_exponents(4, 4)
        if sum(m[2:]) == 0 or sum(m[:2]) == 0 or (sum(m[:2]) <= 2 and sum(m[2:]) <= 2)
    }
    assert four == expected
    assert len(four) == 54


def test_a_unit_that_is_off_takes_its_paths_with_it() -> None:
    assert paths_lost_by_unit(8) == [2, 2, 2, 2, 4, 4, 8]
    assert paths_lost_by_unit(2) == [2]
    assert verdict("fig25", "switched", Answer.exact(0)) == CONTRADICTED
    assert verdict("fig25", "locality", Answer.exact(0.9)) == CONTRADICTED


def test_a_wrong_count_is_seen() -> None:
    assert verdict("fig25", "nodes", Answer.exact(7)) == HOLDS
    assert verdict("fig25", "nodes", Answer.exact(8)) == CONTRADICTED


# Chains


def chains(shares: list[float]) -> list[np.ndarray[tuple[int], np.dtype[np.float64]]]:
    generator = np.random.default_rng(0)
    return [np.clip(share + 0.05 * generator.normal(size=500), 0, 1) for share in shares]


def test_shares_that_grow_with_the_dimension_are_told_from_those_that_do_not() -> None:
    assert verdict("fig7", "grows", smallest_rise_between_groups(chains([0.66, 0.8, 0.89, 0.94]))) == HOLDS
    assert verdict("fig7", "grows", smallest_rise_between_groups(chains([0.66, 0.8, 0.75, 0.94]))) == CONTRADICTED


def test_the_share_of_the_wide_minimum_gets_its_verdict() -> None:
    assert verdict("fig7", "D2", Answer(0.8, 0.79, 0.81, 500)) == HOLDS
    assert verdict("fig7", "D2", Answer(0.7, 0.69, 0.71, 500)) == CONTRADICTED  # preferred, but not four to one
    assert verdict("fig7", "D2", Answer(0.4, 0.39, 0.41, 500)) == CONTRADICTED


def test_a_smallest_rise_pays_for_having_been_chosen() -> None:
    groups = chains([0.66, 0.8, 0.89, 0.94])
    alone = intervals.difference_of_means(groups[3], groups[2])
    chosen = smallest_rise_between_groups(groups)
    assert chosen.value == alone.value
    assert chosen.low is not None
    assert alone.low is not None
    assert chosen.low < alone.low


def density(reach: float) -> pd.DataFrame:
    """Cells of a valley at w_1 = 4 in which all time is spent within `reach` of w_2 = 0; as much time at a point."""
    (x0, x1, nx), (y0, y1, ny) = MAPS["x"], MAPS["y"]
    xs, ys = np.linspace(x0, x1, nx, endpoint=False), np.linspace(y0, y1, ny, endpoint=False)
    cells = pd.DataFrame({"w1": np.repeat(xs, ny), "w2": np.tile(ys, nx)})
    middle = cells["w2"] + (y1 - y0) / ny / 2
    inside = ((cells["w1"] - 4).abs() < 0.3) & (middle.abs() < reach)
    point = ((cells["w1"] - 2).abs() < 0.2) & (middle.abs() < 0.2)
    return cells.assign(density=inside.astype(float) + 50.0 * point)


def test_time_around_the_average_is_told_from_time_anywhere() -> None:
    near, anywhere = (share_nearest_average_minimum(density(reach), 2_000) for reach in (1.1, 2.0))
    assert near.low is not None
    assert near.low > 0
    assert abs(anywhere.value) < 1e-9
    assert share_nearest_average_minimum(density(1.1), 4).low < 0  # so few samples prove nothing


# Mixtures of minima


def simplex(reach: float, steps: int = 12) -> pd.DataFrame:
    """Accuracy 1 within `reach` of a corner, in the largest λ, and chance elsewhere."""
    rows = [(steps - i - j, i, j) for i in range(steps + 1) for j in range(steps + 1 - i)]
    frame = pd.DataFrame(np.array(rows) / steps, columns=LAMBDAS)
    return frame.assign(accuracy=np.where(frame[LAMBDAS].max(axis=1) >= 1 - reach, 1.0, 0.1))


def test_plateaus_measure_the_flat_region_of_each_corner() -> None:
    assert plateau_shares_of_corners(simplex(1.0)) == [1.0, 1.0, 1.0]
    narrow, wide = plateau_shares_of_corners(simplex(0.1)), plateau_shares_of_corners(simplex(0.4))
    assert 0 < narrow[0] < wide[0] < 1
    assert narrow == pytest.approx([narrow[0]] * 3)
    lopsided = simplex(0.4)
    lopsided.loc[lopsided["lambda1"] > 0.5, "accuracy"] = 0.1
    assert plateau_shares_of_corners(lopsided)[0] < plateau_shares_of_corners(lopsided)[1]


def test_mixtures_between_two_minima_count_for_both_or_for_none() -> None:
    ties = simplex(0.4)
    between = (ties[LAMBDAS].to_numpy() == ties[LAMBDAS].max(axis=1).to_numpy()[:, None]).sum(axis=1) > 1
    assert between.sum() == 7  # three edges' middles, the centre, and one more towards each edge
    ties["accuracy"] = np.where(between, 1.0, 0.1)
    assert plateau_shares_of_corners(ties, ties=False) == [0.0, 0.0, 0.0]
    assert min(plateau_shares_of_corners(ties)) > 0
    ties["accuracy"] = np.where(between, 0.1, 1.0)
    assert plateau_shares_of_corners(ties, ties=False) == [1.0, 1.0, 1.0]
    assert max(plateau_shares_of_corners(ties)) < 1


def test_flat_regions_and_wells_are_told_apart() -> None:
    assert verdict("fig12", "wells", intervals.mean_over_runs([0.02, 0.03, 0.05], bounds=(0, 1))) == HOLDS
    assert verdict("fig12", "wells", intervals.mean_over_runs([0.6, 0.62, 0.61], bounds=(0, 1))) == CONTRADICTED


def test_a_triangle_is_one_run() -> None:
    """Its corners share their mixtures: one triangle has no interval, however alike or unlike its corners are."""
    found = flat_regions_of_triangles([simplex(0.4), simplex(0.1), simplex(0.2)])
    assert found.tolist() == [
        pytest.approx(np.mean(plateau_shares_of_corners(simplex(reach)))) for reach in (0.4, 0.1, 0.2)
    ]
    assert intervals.mean_over_runs(flat_regions_of_triangles([simplex(0.4)])).low is None
    assert intervals.mean_over_runs(found).runs == 3
    ours = [len(stage.configs) for stage in find_study("zhang2017-fig11").stages("paper")]
    assert ours == [12, 4]  # six networks of each kind of labels, two triangles


@pytest.mark.parametrize(("mnist", "expected"), [(400.0, HOLDS), (60.0, CONTRADICTED)])
def test_labels_that_are_hard_to_fit(mnist: float, expected: str) -> None:
    epochs = {
        (data, labels): [took, 1.01 * took, 1.02 * took]
        for (data, labels), took in {
            ("mnist", "natural"): 40.0,
            ("mnist", "random"): mnist,
            ("cifar", "natural"): 20.0,
            ("cifar", "random"): 50.0,
        }.items()
    }
    assert verdict("fig12", "harder", slowdown_by_random_labels(epochs)) == expected


def radii(factor: float) -> pd.DataFrame:
    """The printed table with a little spread; random labels moved to `factor` times natural ones where it is given."""
    rows = []
    for data, labels, moved, objective, minimum in itertools.product(SETS, LABELS, MOVED, OBJECTIVES, range(3)):
        mean, sd = PRINTED[data, labels, moved]
        if labels == "random" and factor:
            mean, sd = factor * PRINTED[data, "natural", moved][0], 0.1
        radius = mean + 0.1 * sd * (minimum - 1)
        row = {"set": data, "labels": labels, "moved": moved, "objective": objective, "radius": radius}
        rows.append({**row, "minimum": minimum, "train_error": 0.0})
    return pd.DataFrame(rows)


def test_the_printed_table_has_the_order_and_its_opposite_has_not() -> None:
    found = radii_of_table(radii(0.0), "paper").answers
    assert {verdict("table1", f"order_{data}", found[f"order_{data}"]) for data in SETS} == {HOLDS}
    assert found["mnist-natural-all"].value == pytest.approx(45.4)
    turned = radii_of_table(radii(1.2), "paper").answers
    assert len(turned) == len(PRINTED) + 2
    assert {verdict("table1", f"order_{data}", turned[f"order_{data}"]) for data in SETS} == {CONTRADICTED}


def test_radii_of_networks_that_do_not_fit_their_labels_are_not_judged() -> None:
    table = radii(0.0)
    table.loc[(table["set"] == "mnist") & (table["labels"] == "random"), "train_error"] = 0.03
    found = radii_of_table(table, "paper").answers
    assert [key for key, answer in found.items() if math.isnan(answer.value)] == [
        "mnist-random-all",
        "mnist-random-top",
        "order_mnist",
    ]
    assert "not trained until they fit: errors up to 0.030" in found["order_mnist"].note


def test_minima_differ_in_their_start_only() -> None:
    one, other = minimiser_configs("small", "mnist", "natural")[:2]
    assert one["data"] == other["data"]
    assert one["model"]["seed"] != other["model"]["seed"]
    assert (
        minimiser_config("small", "mnist", "random", 0)["labels"]
        == minimiser_config("small", "mnist", "random", 1)["labels"]
    )
    assert len(minimiser_configs("paper", "cifar", "random", most=3)) == 3


# Perturbed images and margins


def perturbed(random: float) -> pd.DataFrame:
    rows = []
    for labels, seed, gamma in itertools.product(LABELS, range(3), GAMMAS):
        slope = (random if labels == "random" else 0.2) + 0.001 * seed
        rows.append({"labels": labels, "network": seed, "gamma": gamma, "error": min(0.9, slope * gamma)})
    return pd.DataFrame(rows)


@pytest.mark.parametrize(("random", "expected"), [(0.25, HOLDS), (0.8, CONTRADICTED), (0.1, CONTRADICTED)])
def test_slightly_worse_much_worse_and_better(random: float, expected: str) -> None:
    found = input_noise_answers(perturbed(random))
    assert verdict("fig20", "worse", found["worse"]) == expected
    near = perturbed(random).query("0 < gamma <= 1").groupby("labels")["error"].mean()
    assert found["random-low"].value == pytest.approx(near["random"])
    assert found["worse-near"].value == pytest.approx(near["random"] - near["natural"])
    assert found["fitted"].value == 0


def test_networks_that_do_not_fit_perfectly_say_nothing_of_those_that_do() -> None:
    errors = perturbed(0.25)
    errors.loc[errors["gamma"] == 0, "error"] = 0.1
    found = input_noise_answers(errors)["fitted"]
    assert math.isnan(found.value)
    assert "errors up to 0.1" in found.note


def test_kinds_of_networks_that_were_left_unfitted_are_not_judged() -> None:
    kinds = pd.MultiIndex.from_tuples([("mnist", "natural"), ("mnist", "random"), ("mnist", "random")])
    left = notes_on_unfitted_networks(pd.DataFrame({"train_error": [0.001, 0.002, 0.03]}, index=kinds))
    assert list(left) == [("mnist", "random")]
    answer = Answer(1.0, 0.5, 1.5, 6)
    assert answer_if_networks_fitted(answer, [("mnist", "natural")], left) == answer
    told = answer_if_networks_fitted(answer, [("mnist", "natural"), ("mnist", "random")], left)
    assert math.isnan(told.value)
    assert "errors up to 0.030" in told.note


def test_margins_are_compared_in_the_direction_of_the_claim() -> None:
    rows = []
    for labels, start, seed in itertools.product(LABELS, STARTS, range(3)):
        margin = 5.0 - 2 * (labels == "random") - (start == 10) + 0.01 * seed
        margin += 0.001 * ((start == 10) * seed + (labels == "random") * seed**2)  # seeds do not differ all alike
        row = {"labels": labels, "start": start, "seed": seed, "median_margin": margin, "last_l2": 10 - margin}
        rows.append(row)
    networks = pd.DataFrame(rows)
    as_printed = label_comparisons(networks, "margin", "median_margin", "-") | label_comparisons(
        networks, "norm", "last_l2", "+"
    )
    assert {verdict("fig17", key, value) for key, value in as_printed.items()} == {HOLDS}
    networks["median_margin"] *= -1
    turned = label_comparisons(networks, "margin", "median_margin", "-")
    assert {verdict("fig17", key, value) for key, value in turned.items()} == {CONTRADICTED}


@pytest.mark.parametrize(("shift", "expected"), [(0.1, HOLDS), (-0.1, CONTRADICTED)])
def test_networks_of_one_seed_are_compared_with_each_other(shift: float, expected: str) -> None:
    rows = []
    for seed, labels, start in itertools.product((2, 0, 1), LABELS, STARTS):  # in no order
        norm = 10.0 * start + 5.0 * seed + (shift + 0.001 * seed) * (labels == "random") + 0.01 * start * seed**2
        rows.append({"labels": labels, "start": start, "seed": seed, "last_l2": norm})
    found = label_comparisons(pd.DataFrame(rows).sample(frac=1, random_state=0), "norm", "last_l2", "+")
    # Seeds differ by fifty times as much as labels do: unpaired, neither would be seen.
    assert verdict("fig17", "norm-labels-x1", found["norm-labels-x1"]) == expected
    assert found["norm-labels-x1"].runs == 3
    assert found["norm-start-natural"].note  # says why it is not judged
    assert not found["norm-labels-x10"].note


def test_claims_that_the_paper_does_not_make_say_so() -> None:
    assert all("not said in the paper" in one.statement for one in find_study("zhang2017-fig16").claims)
    assert not any("not said" in one.statement for one in find_study("zhang2017-fig17").claims)


def test_norms_of_a_network() -> None:
    model = build("mlp", widths=(2, 2, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-1.0)
    found = unit_and_weight_norms(model.state_dict())
    assert found["fan_in_fc1"] == found["fan_in_fc2"] == found["fan_in"] == 2.0
    assert found["l2"] == pytest.approx(3.0)  # nine parameters of size one
