"""Who may be ranked by what, and how many measures make one voice: on quantities written by hand."""

from __future__ import annotations

import math

import pytest

from flatscope.comparing.rankings import consensus_ranking, family_ranks
from flatscope.comparing.verdicts import Quantity, remarks_on_undertrained_networks, values_differ, verdict_on_ranking
from flatscope.network_summary import NetworkSummary
from flatscope.registry import declarations

pytestmark = pytest.mark.fast


def quantity(name: str, *values: float, stderr: float = 0.0, width: float = 0.0, searched: bool = False) -> Quantity:
    """A measure with one value for each of the networks a, b, c …"""
    networks = "abcdefgh"[: len(values)]
    return Quantity(
        name,
        "",
        declarations()[name],
        value=dict(zip(networks, values, strict=True)),
        stderr=dict.fromkeys(networks, stderr),
        data_stderr=dict.fromkeys(networks, 0.0),
        below=dict.fromkeys(networks, width),
        above=dict.fromkeys(networks, width),
        searched=dict.fromkeys(networks, searched),
    )


def summary(loss: float, *, error: float = 0.0, architecture: str = "mlp", rescalable: bool = True) -> NetworkSummary:
    return NetworkSummary(architecture, 100, loss, error, math.nan, math.nan, rescalable)


@pytest.mark.parametrize(("factor", "word"), [(2.0, "comparable"), (2.9, "comparable"), (5.0, "not comparable")])
def test_curvature_ranks_networks_of_like_losses_only(factor: float, word: str) -> None:
    """Cross-entropy's curvature falls with the loss; a factor of 3 between the losses is the limit."""
    networks = {"a": summary(0.1), "b": summary(0.1 * factor)}
    found = verdict_on_ranking(quantity("rho_sum", 1.0, 2.0), networks, [], "cross_entropy")
    assert (found.word, found.code) == (word, "loss" if factor > 3 else "")
    assert verdict_on_ranking(quantity("rho_sum", 1.0, 2.0), networks, [], "mse").word == "comparable"
    assert verdict_on_ranking(quantity("l1_path_norm", 1.0, 2.0), networks, [], "cross_entropy").word == "comparable"
    without_classes = {name: summary(one.loss, error=math.nan) for name, one in networks.items()}
    assert len(remarks_on_undertrained_networks(without_classes)) == (factor > 3)


def test_losses_far_apart_are_said_before_what_rescaling_changes() -> None:
    networks = {"a": summary(0.1), "b": summary(0.4)}
    for name, code in (("hessian_trace", "loss"), ("kappa_trace_sum", "loss"), ("l2_norm", "rescaling")):
        found = verdict_on_ranking(quantity(name, 1.0, 2.0), networks, [], "cross_entropy")
        assert (found.word, found.code) == ("not comparable", code)
        assert found.reason.startswith("the training losses are a factor of 4 apart, and") == (code == "loss")
    assert verdict_on_ranking(quantity("hessian_trace", 1.0, 2.0), networks, [], "mse").code == "rescaling"
    gone = {"a": summary(0.0), "b": summary(0.4)}
    assert verdict_on_ranking(quantity("hessian_trace", 1.0, 2.0), gone, [], "cross_entropy").code == "loss"


def test_rescalable_networks_are_ranked_by_what_rescaling_leaves_alone() -> None:
    fixed, free = ({"a": summary(0.1, rescalable=r), "b": summary(0.1, rescalable=r)} for r in (False, True))
    for name, word in (("rho_sum", "comparable"), ("kappa_trace_sum", "not comparable"), ("l2_norm", "not comparable")):
        assert verdict_on_ranking(quantity(name, 1.0, 2.0), free, [], "cross_entropy").word == word
        assert verdict_on_ranking(quantity(name, 1.0, 2.0), fixed, [], "cross_entropy").word == "comparable"


def test_other_architectures_are_ranked_by_what_depends_on_the_function_alone() -> None:
    networks = {"a": summary(0.1), "b": summary(0.1, architecture="lenet")}
    assert verdict_on_ranking(quantity("margin", 1.0, 2.0), networks, [], "cross_entropy").word == "comparable"
    assert verdict_on_ranking(quantity("rho_sum", 1.0, 2.0), networks, [], "cross_entropy").word == "not comparable"


def test_copies_differ_beyond_rounding_noise_solver_and_search_only() -> None:
    assert not values_differ(quantity("rho_sum", 1.0, 1.009), "a", "b")
    assert values_differ(quantity("rho_sum", 1.0, 1.011), "a", "b")
    # Errors of both count, in squares: 4.42 (one chance in 10⁵) times √2 times 0.1 is 0.62.
    assert not values_differ(quantity("rho_sum", 1.0, 1.6, stderr=0.1), "a", "b")
    assert values_differ(quantity("rho_sum", 1.0, 1.7, stderr=0.1), "a", "b")
    assert not values_differ(quantity("rho_sum", 1.0, 1.2, width=0.1), "a", "b")
    assert values_differ(quantity("rho_sum", 1.0, 1.3, width=0.1), "a", "b")
    assert not values_differ(quantity("sharpness", 1.0, 1.04, searched=True), "a", "b")
    assert values_differ(quantity("sharpness", 1.0, 1.06, searched=True), "a", "b")


# One family with four measures prefers a; two families with one measure each prefer b, then c.
MANY = [quantity(name, 1.0, 2.0, 3.0) for name in ("l2_norm", "spectral_norm", "l1_inf_norm", "group_norm")]
FEW = [quantity("rho_sum", 3.0, 1.0, 2.0), quantity("expected_sharpness", 3.0, 1.0, 2.0)]


def test_every_family_of_measures_has_one_voice() -> None:
    assert len({one.entry.family for one in (*MANY, *FEW) if one.entry is not None}) == 3
    ranks = {family: list(voice) for family, voice in family_ranks([*MANY, *FEW], "abc").items()}
    assert ranks == {"norms": [1, 2, 3], "relative flatness": [3, 1, 2], "pac bayes": [3, 1, 2]}
    frame = consensus_ranking([*MANY, *FEW], "abc").set_index("name")
    assert frame["mean_rank"].to_dict() == pytest.approx({"b": 4 / 3, "a": 7 / 3, "c": 7 / 3})
    assert frame["rank"].to_dict() == {"b": 1.0, "a": 2.5, "c": 2.5}
    assert frame["families_first"].to_dict() == {"b": 2, "a": 1, "c": 0}
    # Values without errors leave no doubt about the order: drawn ranks weigh families in the same way.
    assert frame["probability_best"].to_dict() == {"b": 1.0, "a": 0.0, "c": 0.0}
    assert frame[["rank_low", "rank_high"]].loc["b"].tolist() == [1.0, 1.0]


def test_more_measures_of_a_family_change_nothing() -> None:
    few, many = (consensus_ranking([*MANY[:number], *FEW], "abc") for number in (1, 4))
    assert few.equals(many)


def test_higher_is_better_where_it_is_declared() -> None:
    frame = consensus_ranking([quantity("margin", 1.0, 3.0, 2.0)], "abc")
    assert frame["name"].tolist() == ["b", "c", "a"]
