"""Studies of Neyshabur et al. (2017): they run through at smoke size, and planted results get their verdicts."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import flatscope as fs
from flatscope.inputs.loading import load
from flatscope.measures.interactions import relu_chain
from flatscope.training.label_noise import confusion_set
from flatscope.training.models import build
from flatscope.training.sweeps.store import Store
from flatscope_papers import find_study, intervals, study
from flatscope_papers.claims import CONTRADICTED, HOLDS, INCONCLUSIVE, NOT_JUDGED, UNTESTABLE, Answer, finding_of_claim
from flatscope_papers.fitting import largest_training_error
from flatscope_papers.neyshabur2017.complexity import (
    EPSILONS,
    NORMS,
    desiderata_note,
    log_log_slope,
    mean_over_seeds,
    measured_problem,
)
from flatscope_papers.neyshabur2017.conditions import (
    CURVES,
    PARAMETERS,
    _ratio_of_learned_to_initial,
    largest_distance_of_curves,
    layer_with_largest_distance,
)
from flatscope_papers.neyshabur2017.confusion import rank_correlation_of_test_error
from flatscope_papers.neyshabur2017.deep_networks import (
    FLOOR,
    _near_switching_curves,
    _relative_row_norms,
    _switching_constants,
    histogram_table,
    triples_of_panel,
)
from flatscope_papers.neyshabur2017.label_networks import (
    SIZES,
    growth_exponent_with_samples,
    label_demand_in_words,
    log_ratio_of_random_to_true_labels,
    slope_of_random_to_true_ratio,
)
from flatscope_papers.neyshabur2017.noisy_networks import noise_claim_answers as noise_found
from flatscope_papers.neyshabur2017.overlap import (
    histogram_overlap,
    histograms_by_weights_and_seed,
    learned_initial_overlap,
)
from flatscope_papers.neyshabur2017.true_and_random_labels import (
    excess_slope_of_l2_measures,
    mean_growth_exponent_of_norms,
    order_agreement_over_epsilons,
)
from flatscope_papers.neyshabur2017.width import log10_change_between_widths

CLAIMS_1, CLAIMS_3, CLAIMS_4, CLAIMS_5, CLAIMS_6, CLAIMS_7 = (
    find_study(f"neyshabur2017-fig{number}").claims for number in (1, 3, 4, 5, 6, 7)
)

NAMES = [f"fig{number}" for number in range(1, 9)]
EXPONENTS = {"l2_norm": 1.6, "l1_path_norm": 1.2, "l2_path_norm": 1.5, "spectral_norm": 1.1}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.mark.parametrize("name", ["theorem1", "smallest-product"])
def test_smoke_of_the_statements(name: str, store: Path) -> None:
    result = study(f"neyshabur2017-{name}", "smoke", workers=0, store=store, device="cpu")
    assert {finding.verdict for finding in result.findings} == {NOT_JUDGED}
    assert all(math.isfinite(finding.answer.value) for finding in result.findings)


def test_what_noise_does_gets_the_verdict_that_is_due() -> None:
    claims = {claim.key: claim for claim in find_study("neyshabur2017-theorem1").claims}
    table = pd.DataFrame(
        {"switched": [2.0, 2.1, 2.2], "sharpness_ratio": [9.0, 8.0, 9.5], "shuffled_ratio": [3.0, 3.1, 2.9]}
    )
    noise = pd.DataFrame({"network": [0, 0, 1, 2], "rise": [0.1, 0.2, 0.1, 0.3], "bound": 5.0, "split": 0.9})
    answers = noise_found(table, noise)
    verdicts = {key: finding_of_claim(claims[key], answer, "paper").verdict for key, answer in answers.items()}
    failing = {key for key, verdict in verdicts.items() if verdict != HOLDS}
    assert failing == {"depth", "lemma_2"}
    worse = noise_found(1 / table, noise.assign(bound=0.15, split=1.1))
    verdicts = {key: finding_of_claim(claims[key], answer, "paper").verdict for key, answer in worse.items()}
    assert HOLDS not in verdicts.values()
    assert answers["depth"].value == pytest.approx(1.5)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::UserWarning")  # six networks: SciPy warns about such short samples
def test_smoke(name: str, store: Path) -> None:
    result = study(f"neyshabur2017-{name}", "smoke", workers=0, store=store, device="cpu")
    assert {finding.verdict for finding in result.findings} == {NOT_JUDGED}
    assert len(result.table)
    assert "<svg" in result.svg
    told = " ".join(result.notes)
    for word in ("Loss:", "argin", "ooling", "Biases:", "h_i", "BatchNorm"):
        assert word in told
    if name in NAMES[:4]:
        assert "Demand “" in told
    if name in NAMES[1:4]:  # two columns for one level: their names and the notes say which is which
        assert {"kl_at_0.05_refined", "kl_at_0.05_on_grid"} <= set(result.table)
        assert "kl_at_0.05_refined" in told


def test_figures_share_their_networks(store: Path) -> None:
    first = [find_study(f"neyshabur2017-fig{number}").stages("paper")[0].configs for number in (1, 2)]
    assert first[0] == first[1]
    conditions = [find_study(f"neyshabur2017-fig{number}").stages("paper") for number in (5, 6, 7, 8)]
    assert all(stages == conditions[0] for stages in conditions)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("undrawn")
def test_the_confusion_set_is_not_measured(store: Path) -> None:
    study("neyshabur2017-fig3", "smoke", workers=0, store=store, device="cpu")
    config = find_study("neyshabur2017-fig3").stages("smoke")[1].configs[-1]
    network, first = config["network"], config["first"]
    problem = measured_problem(Store(store), config)
    ((x, y),) = problem.batches(size=2 * first)
    labels = {name: value for name, value in network["labels"].items() if name != "confusion"}
    both = confusion_set(load(**network["data"]), network["labels"]["confusion"], **labels)
    assert both.is_confused.sum() == network["labels"]["confusion"] > 0
    assert torch.equal(x, both.x[~both.is_confused])
    assert torch.equal(y, both.y_true[~both.is_confused])


def test_a_kind_of_label_that_no_network_fits_is_not_judged() -> None:
    points = planted(1.0)
    points.loc[points["labels"] == "random", list(NORMS)] = math.nan
    frames = by_epsilon(points)
    for found in (
        order_agreement_over_epsilons(points, frames),
        mean_over_seeds(points, lambda rows: slope_of_random_to_true_ratio(rows, "l2_norm")),
    ):
        assert math.isnan(found.value)
        assert verdict(CLAIMS_1, "epsilon", found) == UNTESTABLE


def test_the_paper_scale_is_the_papers_setting() -> None:
    for config in find_study("neyshabur2017-fig1").stages("paper")[0].configs:
        train = config["train"]
        assert (train["lr"], train["momentum"], train["batch_size"], train["stop_loss"]) == (0.01, 0.9, 64, 1e-4)
        assert (config["model"]["name"], config["data"]["name"]) == ("vgg", "cifar10")
    for config in find_study("neyshabur2017-fig2").stages("small")[0].configs:
        assert config["train"]["lr"] == 0.01  # a larger one turns the order of sharpness around
    assert SIZES["paper"]["perturbations"]["steps"] == 2_000
    assert SIZES["paper"]["perturbations"]["draws"] == 1_000
    for config in find_study("neyshabur2017-fig3").stages("paper")[0].configs:
        assert config["labels"]["true_size"] == 10_000
    widths = find_study("neyshabur2017-fig5").stages("paper")[0].configs[0]["model"]["options"]["widths"]
    assert widths == [784, *[1_000] * 10, 10]


def planted(advantage: float, noise: float = 0.0, seeds: int = 4) -> pd.DataFrame:
    """Measures that grow with known powers of the size; random labels are `advantage` decades above at size 1000."""
    generator = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for seed, size, labels in itertools.product(range(seeds), (500, 1000, 2000), ("true", "random")):
        row: dict[str, Any] = {"seed": seed, "size": size, "labels": labels}
        for name, power in EXPONENTS.items():
            exponent = power if labels == "random" else 0.5
            shift = advantage if labels == "random" else 0.0
            row[name] = 10 ** (shift + exponent * math.log10(size / 1000) + noise * generator.normal())
        rows.append(row)
    return pd.DataFrame(rows)


def by_epsilon(points: pd.DataFrame) -> list[pd.DataFrame]:
    """A frame per network, in which no ε changes anything."""
    return [pd.DataFrame({"epsilon": EPSILONS, **row}) for row in points[list(NORMS)].to_dict("records")]


def verdict(claims: Any, key: str, answer: Any) -> str:
    (claim,) = [claim for claim in claims if claim.key == key]
    return finding_of_claim(claim, answer, "small").verdict


@pytest.mark.parametrize(("advantage", "expected"), [(1.0, HOLDS), (0.1, CONTRADICTED), (-1.0, CONTRADICTED)])
def test_random_above_true_at_every_size(advantage: float, expected: str) -> None:
    points = planted(advantage, 0.01)  # at size 500 the advantage is smaller by log10(2) times the gap of exponents
    found = mean_over_seeds(points, lambda rows: float(log_ratio_of_random_to_true_labels(rows, "l2_norm").min()))
    assert verdict(CLAIMS_1, "higher_l2_norm", found) == expected


def test_exponents_are_found() -> None:
    points = planted(1.0)
    rows = points[points["seed"] == 0]
    for name, power in EXPONENTS.items():
        assert growth_exponent_with_samples(rows, name, "random") == pytest.approx(power)
        assert growth_exponent_with_samples(rows, name, "true") == pytest.approx(0.5)
        assert slope_of_random_to_true_ratio(rows, name) == pytest.approx(power - 0.5)
    assert mean_growth_exponent_of_norms(rows, "true") == pytest.approx(0.5)
    assert mean_growth_exponent_of_norms(rows, "random") == pytest.approx(np.mean(list(EXPONENTS.values())))
    assert excess_slope_of_l2_measures(rows) == pytest.approx(1.5 - 1.2)
    swapped = rows.rename(columns={"l2_norm": "spectral_norm", "spectral_norm": "l2_norm"})
    assert excess_slope_of_l2_measures(swapped) == pytest.approx(1.1 - 1.6)


@pytest.mark.parametrize("exponent", [0.1, 0.4, 0.9])
def test_increases_with_true_labels(exponent: float) -> None:
    points = planted(1.0, 0.001)
    factors = (points["size"] / 1000) ** (exponent - 0.5)
    points[list(NORMS)] = points[list(NORMS)].mul(factors, axis=0)
    found = mean_over_seeds(points, lambda rows: mean_growth_exponent_of_norms(rows, "true"))
    assert found.value == pytest.approx(exponent, abs=0.01)
    assert verdict(CLAIMS_1, "small_increase", found) == NOT_JUDGED  # the paper prints no exponent


def test_a_missing_value_is_no_value() -> None:
    points = planted(1.0)
    points.loc[0, "l2_norm"] = math.nan
    rows = points[points["seed"] == 0]
    assert math.isnan(slope_of_random_to_true_ratio(rows, "l2_norm"))
    assert math.isnan(log_ratio_of_random_to_true_labels(rows, "l2_norm").min(skipna=False))
    found = mean_over_seeds(points, lambda rows: slope_of_random_to_true_ratio(rows, "l2_norm"))
    assert found.runs == 3
    assert "1 of 4 seeds" in found.note


@pytest.mark.parametrize(("seeds", "expected"), [(30, HOLDS), (3, UNTESTABLE)])
def test_the_share_of_comparisons_that_do_not_depend_on_epsilon(seeds: int, expected: str) -> None:
    points = planted(1.0, seeds=seeds)
    frames = by_epsilon(points)
    assert (
        order_agreement_over_epsilons(points, frames).runs == 3 * seeds
    )  # pairs of networks; not times four norms and three ε
    assert ("73 would be needed" in order_agreement_over_epsilons(points, frames).note) == (3 * seeds < 73)
    assert verdict(CLAIMS_1, "epsilon", order_agreement_over_epsilons(points, frames)) == expected
    for frame in frames[::2]:  # true labels: far above random ones at one of the three other ε
        frame.loc[frame["epsilon"] == 0.1, list(NORMS)] *= 1e6
    if seeds == 30:
        assert order_agreement_over_epsilons(points, frames).value == pytest.approx(2 / 3)


def test_label_verdicts_say_who_is_met() -> None:
    told = label_demand_in_words(planted(1.0), {"l2_norm": "ℓ2 norm"})
    assert "ℓ2 norm met (12 of 12)" in told
    assert "ℓ2 norm not met (0 of 12)" in label_demand_in_words(planted(-1.0), {"l2_norm": "ℓ2 norm"})
    assert desiderata_note(pd.DataFrame(columns=["measure", "demand", "verdict", "reason"])) == ""


def test_the_slope_of_a_power() -> None:
    assert log_log_slope([10, 100, 1000], [1.0, 3.0, 5.0]) == pytest.approx(2.0)
    assert math.isnan(log_log_slope([10], [1.0]))


@pytest.mark.parametrize(("worst", "expected"), [(0.0, HOLDS), (0.01, CONTRADICTED)])
def test_one_network_that_does_not_fit_is_enough(worst: float, expected: str) -> None:
    errors = [0.0] * 17 + [worst]
    assert verdict(CLAIMS_3, "zero_error", intervals.largest_over_networks(errors)) == expected


@pytest.mark.parametrize(("worst", "expected"), [(2e-5, HOLDS), (0.02, UNTESTABLE)])
def test_a_network_that_training_left_unfitted_shows_our_budget(worst: float, expected: str) -> None:
    networks = pd.DataFrame({"train_error": [0.0] * 11 + [worst]})
    assert verdict(CLAIMS_1, "zero_error", largest_training_error(networks)) == expected


@pytest.mark.parametrize(("falling", "expected"), [(0, HOLDS), (2, INCONCLUSIVE)])
def test_the_test_error_rises_with_the_confusion_set(falling: int, expected: str) -> None:
    """Three seeds that agree are not exact: the interval is that of the steps of a rank correlation."""
    rows = [
        {"seed": seed, "confused": size, "test_error": (-1 if seed < falling else 1) * size + 0.1 * seed}
        for seed, size in itertools.product(range(3), (0, 250, 500, 1000))
    ]
    found = rank_correlation_of_test_error(pd.DataFrame(rows))
    assert found.low is not None
    assert found.low < found.value <= 1
    assert verdict(CLAIMS_3, "test_error", found) == expected


@pytest.mark.parametrize(("factor", "expected"), [(0.5, HOLDS), (2.0, CONTRADICTED)])
def test_change_with_width(factor: float, expected: str) -> None:
    rows = [
        {"hidden": hidden, "seed": seed, "l2_norm": factor ** ((1 + 0.01 * seed) * math.log2(hidden / 32))}
        for hidden, seed in itertools.product((32, 64, 128), range(3))
    ]
    points = pd.DataFrame(rows)
    found = mean_over_seeds(points, lambda own: log10_change_between_widths(own, "l2_norm", 32, 128))
    assert found.value == pytest.approx(2.02 * math.log10(factor))
    assert verdict(CLAIMS_4, "falls_l2_norm", found) == expected
    assert math.isnan(
        log10_change_between_widths(points[points["seed"] == 0], "l2_norm", 128, 128)
    )  # nothing beyond the largest width
    assert math.isnan(log10_change_between_widths(points[points["seed"] == 0], "l2_norm", 512, 1024))


def small_chain() -> tuple[torch.nn.Module, torch.Tensor, fs.Context]:
    model = build("mlp", widths=(5, 6, 4, 3), bias=False, seed=1).double().eval()
    x = torch.rand(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ctx = fs.Context(fs.Problem(model, train=(x, torch.arange(7) % 3)))
    return model, x, ctx


def test_switching_by_definition() -> None:
    model, x, ctx = small_chain()
    chain = ctx.cached(relu_chain, samples=7)
    found = _switching_constants(chain)
    weights = [parameter.detach() for parameter in model.parameters()]
    hidden = [x @ weights[0].T]
    hidden.append(hidden[0].clamp(min=0) @ weights[1].T)
    largest: dict[str, list[float]] = {"any_pixels": [], "any_unit": [], "floor_pixels": []}
    for sample in range(7):
        per_layer: dict[str, list[float]] = {name: [] for name in largest}
        for z in (layer[sample].abs() for layer in hidden):
            smallest = FLOOR * float(z.square().mean().sqrt())
            for delta in (*z.tolist(), smallest):
                ratio = float((z <= delta).double().mean()) / delta
                per_layer["any_pixels"].append(ratio if delta in z.tolist() else 0.0)
                per_layer["any_unit"].append((ratio if delta in z.tolist() else 0.0) * float(x[sample].norm()))
                per_layer["floor_pixels"].append(ratio if delta >= smallest else 0.0)
        for name, values in per_layer.items():
            largest[name].append(max(values))
    for name, values in largest.items():
        assert found[f"c2_{name}/max"] == pytest.approx(max(values))
        assert found[f"c2_{name}/median"] == pytest.approx(sorted(values)[3])
    curve = _near_switching_curves(chain)
    assert (curve.groupby("layer")["share"].apply(lambda share: share.is_monotonic_increasing)).all()
    assert _relative_row_norms(chain).groupby("layer")["ratio"].mean().to_numpy() == pytest.approx(1.0)


@pytest.mark.parametrize("grown", [1.0, 3.0])
def test_relative_curves_do_not_see_that_pre_activations_grow(grown: float) -> None:
    """A first layer `grown` times as large moves the curve over δ, and not the one over δ in units of its rms."""
    model, x, ctx = small_chain()
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(iter(other.parameters())).mul_(grown)
    grown_ctx = fs.Context(fs.Problem(other, train=(x, torch.arange(7) % 3)))
    curves = {
        which: _near_switching_curves(c.cached(relu_chain, samples=7)).assign(seed=0)
        for which, c in (("initial", ctx), ("learned", grown_ctx))
    }
    gaps = largest_distance_of_curves(curves)
    assert gaps["relative_share"].tolist() == pytest.approx([0.0])
    assert (gaps["share"].item() > 0.1) == (grown > 1)
    found = {
        key: intervals.mean_over_runs([gaps[name].item()] * 3, resolution=0.01, bounds=(0, 1))
        for key, name in CURVES.items()
    }
    assert verdict(CLAIMS_7, "curve", found["curve"]) == (HOLDS if grown == 1 else CONTRADICTED)
    assert verdict(CLAIMS_7, "curve_relative", found["curve_relative"]) == HOLDS


def test_columns_of_figure_6() -> None:
    products = pd.DataFrame({"edge": [True, False, True], "inverse_mu": [1.0, 2.0, 3.0]})
    assert triples_of_panel(products, "all")["inverse_mu"].tolist() == [1, 2, 3]
    assert triples_of_panel(products, "edge")["inverse_mu"].tolist() == [1, 3]
    assert triples_of_panel(products, "inner")["inverse_mu"].tolist() == [2]
    shares = histogram_table([0.0, 0.1, 0.9, math.inf], [0.0, 1.0, math.inf], bins=2)
    assert shares["share"].tolist() == pytest.approx([2 / 3, 1 / 3])
    assert shares["high"].tolist() == [0.5, 1.0]


@pytest.mark.parametrize(
    ("apart_by", "width", "alike"), [(0.0, 1.0, True), (0.5, 1.0, False), (0.0, 10.0, False), (2.0, 1.0, False)]
)
def test_distributions_and_not_only_their_medians(apart_by: float, width: float, *, alike: bool) -> None:
    """A spike and a slab around the same median are not alike."""
    generator = np.random.default_rng(0)
    drawn = {"initial": (0.0, 1.0), "learned": (apart_by, width)}
    values = {
        which: pd.DataFrame({"seed": np.repeat([0, 1, 2], 4_000), "v": generator.normal(*law, 12_000)})
        for which, law in drawn.items()
    }
    each = histograms_by_weights_and_seed(values, "v", pd.concat(values)["v"])
    found = learned_initial_overlap(each)
    assert (found.value >= 0.9) == alike
    assert verdict(CLAIMS_6, "distribution_all", found) == NOT_JUDGED  # `all` is the one that counts
    assert "two initializations overlap by 0.9" in found.note
    assert histogram_overlap(each["initial", 0], each["initial", 0]) == pytest.approx(1.0)
    if width == 1:  # what two bell curves so far apart have in common
        assert found.value == pytest.approx(math.erfc(apart_by / 2 / math.sqrt(2)), abs=0.05)


def test_layers_that_move_apart_are_named() -> None:
    """Averaged over layers, opposite differences cancel; the note has the layers one by one."""
    shares = {"initial": {"a": 0.5, "b": 0.5}, "learned": {"a": 0.9, "b": 0.2}}
    curves = {
        which: pd.DataFrame(
            [
                {"seed": seed, "layer": layer, "delta": delta, "share": delta * up, "relative_share": delta}
                for seed, (layer, up), delta in itertools.product(range(2), of_layer.items(), (0.0, 0.5, 1.0))
            ]
        )
        for which, of_layer in shares.items()
    }
    assert largest_distance_of_curves(curves)["share"].tolist() == pytest.approx([0.05, 0.05])
    assert "0.35 on average over layers and 0.4 in the worst, a " in layer_with_largest_distance(curves, "share")
    assert "0 on average" in layer_with_largest_distance(curves, "relative_share")


@pytest.mark.parametrize(("ratio", "expected"), [(1.05, HOLDS), (1.6, CONTRADICTED), (3.0, CONTRADICTED)])
def test_learned_beside_initial(ratio: float, expected: str) -> None:
    rows = [
        {"seed": seed, "weights": which, "v": (1 + 0.01 * seed) * (ratio + 0.001 * seed if which == "learned" else 1)}
        for seed, which in itertools.product(range(3), ("initial", "learned"))
    ]
    assert (
        finding_of_claim(CLAIMS_6[0], _ratio_of_learned_to_initial(pd.DataFrame(rows), "v"), "small").verdict
        == expected
    )


def test_the_count_in_the_caption_is_not_met() -> None:
    assert PARAMETERS == 9_804_010
    found = Answer.exact(float(PARAMETERS))
    assert verdict(CLAIMS_5, "parameters", found) == CONTRADICTED
