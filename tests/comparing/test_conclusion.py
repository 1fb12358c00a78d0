"""The answer that a comparison gives: which network is flatter, by which measures, and how surely."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_report import row
from torch import nn

import flatscope as fs
from flatscope.comparing.comparison import Comparison
from flatscope.comparing.conclusion import LEAST_FACTORS
from flatscope.comparing.losses import RULES
from flatscope.comparing.verdicts import SameFunction
from flatscope.network_summary import NetworkSummary
from flatscope.reports.figures import comparison_plot
from flatscope.table import Table

ROOT = Path(__file__).parents[2]


def comparison(*networks: dict[str, tuple[float, float]], losses: tuple[float, ...] = (), **more: Any) -> Comparison:
    """Networks a, b, … by {measure: (value, standard error)}, all of one architecture and at a loss of 0.1."""
    names = "abc"[: len(networks)]
    tables = {
        name: Table([row(m, v, stderr=e, exact=e == 0) for m, (v, e) in values.items()])
        for name, values in zip(names, networks, strict=True)
    }
    at = losses or (0.1,) * len(networks)
    summaries = {
        n: NetworkSummary("net", 9, loss, 0.0, loss, 0.0, rescalable=True) for n, loss in zip(names, at, strict=True)
    }
    return Comparison(tables, summaries, meta={"loss": "cross_entropy"}, **more)


def test_the_flatter_network_is_named_with_factor_and_error() -> None:
    found = comparison(
        {"rho_sum": (1.0, 0.05), "psi_trace": (10.0, 0.0), "hessian_trace": (9.0, 0.0)},
        {"rho_sum": (2.0, 0.1), "psi_trace": (30.0, 0.0), "hessian_trace": (1.0, 0.0)},
    ).conclusion
    assert (found.code, found.winner) == ("flatter", "a")
    assert [voice.measure for voice in found.voices] == ["rho_sum", "psi_trace"]  # the trace is moved by rescaling
    assert found.voices[0].factor == pytest.approx(2.0)
    assert found.voices[0].stderr == pytest.approx(2 * math.hypot(0.05, 0.05))
    assert found.voices[1].stderr == 0.0
    for words in ("a is flatter than b", "2.00 ± 0.14 times", "rho_sum", "3 times", "psi_trace"):
        assert words in str(found)


@pytest.mark.parametrize(
    ("first", "second", "code", "winner"),
    [
        ({"rho_sum": (1.0, 0.5)}, {"rho_sum": (1.3, 0.5)}, "alike", ""),
        ({"rho_sum": (1.0, 0.0)}, {"rho_sum": (1.3, 0.0)}, "alike", ""),  # two seeds of one training differ by more
        ({"rho_sum": (1.0, 0.001)}, {"rho_sum": (1.0166, 0.007)}, "alike", ""),  # beyond noise, and yet nothing
        ({"rho_sum": (1.0, 0.0)}, {"rho_sum": (1.4, 0.0)}, "flatter", "a"),
        ({"psi_trace": (1.0, 0.0)}, {"psi_trace": (1.6, 0.0)}, "alike", ""),
        ({"fisher_rao_norm": (1.0, 0.0)}, {"fisher_rao_norm": (1.25, 0.0)}, "flatter", "a"),
        (
            {"rho_sum": (1.0, 0.0), "psi_trace": (5.0, 0.0)},
            {"rho_sum": (2.0, 0.0), "psi_trace": (1.0, 0.0)},
            "split",
            "",
        ),
        ({"hessian_trace": (1.0, 0.0)}, {"hessian_trace": (2.0, 0.0)}, "untold", ""),
        ({"margin": (1.0, 0.0)}, {"margin": (2.0, 0.0)}, "untold", ""),  # no measure of flatness
        ({"rho_sum": (-1.0, 0.0)}, {"rho_sum": (2.0, 0.0)}, "flatter", "a"),
    ],
)
def test_what_is_not_clear_is_not_said(first: Any, second: Any, code: str, winner: str) -> None:
    found = comparison(first, second).conclusion
    assert (found.code, found.winner) == (code, winner)


def test_losses_far_apart_leave_the_question_open() -> None:
    found = comparison({"rho_sum": (1.0, 0.0)}, {"rho_sum": (2.0, 0.0)}, losses=(0.1, 0.9)).conclusion
    assert found.code == "untold"
    assert "loss" in str(found)


def test_losses_far_apart_are_said_once_with_what_to_do_and_drawn_nowhere() -> None:
    found = comparison(
        {"rho_sum": (1.0, 0.0), "margin": (3.0, 0.0)}, {"rho_sum": (2.0, 0.0), "margin": (2.0, 0.0)}, losses=(0.1, 0.9)
    )
    assert found.headline.count("factor of") == 1
    assert "at about the same loss" in found.headline
    (plot,) = comparison_plot(found.tables, {}, [name for names in found.not_comparable().values() for name in names])
    assert [line[0] for line in plot.rows] == ["margin"]
    low, high = plot.make().axes[0].get_xlim()
    assert low < 0.5 < 2 < high, "nothing to read the factor of 0.67 by"


@pytest.mark.parametrize(("high", "due"), [(0.14, []), (0.16, ["loss"]), (0.9, ["loss"])])
def test_losses_that_differ_are_said_beside_the_answer(high: float, due: list[str]) -> None:
    found = comparison({"rho_sum": (1.0, 0.0)}, {"rho_sum": (2.0, 0.0)}, losses=(0.1, high)).warnings()
    assert [remark.code for remark in found if remark.code == "loss"] == due


@pytest.mark.parametrize(
    ("first", "second", "losses", "code"),
    [
        ((1.0, 0.0), (2.0, 0.0), (0.1, 0.22), "untold"),  # twice as flat at a loss 2.2 times lower
        ((1.0, 0.05), (2.3, 0.1), (0.1, 0.22), "untold"),  # within two standard errors of that
        ((1.0, 0.0), (2.6, 0.0), (0.1, 0.22), "flatter"),  # more than the losses make
        ((1.0, 0.0), (1.4, 0.0), (0.1, 0.145), "untold"),  # the losses count where they are not said beside the answer
        ((1.0, 0.0), (1.5, 0.0), (0.1, 0.14), "flatter"),
        ((1.0, 0.001), (1.0166, 0.007), (0.1, 0.112), "alike"),  # nothing to explain
        ((1.0, 0.0), (2.0, 0.0), (0.22, 0.1), "flatter"),  # although the loss is higher
    ],
)
def test_a_lead_that_a_lower_loss_accounts_for_is_not_flatness(first: Any, second: Any, losses: Any, code: str) -> None:
    found = comparison({"rho_sum": first}, {"rho_sum": second}, losses=losses)
    assert (found.conclusion.code, found.conclusion.winner) == (code, "a" if code == "flatter" else "")
    assert ("at about the same loss" in found.headline) == (code == "untold")


def test_the_losses_must_account_for_every_clear_lead() -> None:
    values = {"rho_sum": (1.0, 0.0), "psi_trace": (1.0, 0.0)}, {"rho_sum": (2.0, 0.0), "psi_trace": (9.0, 0.0)}
    found = comparison(*values, losses=(0.1, 0.22)).conclusion
    assert (found.code, found.winner, [voice.clear for voice in found.voices]) == ("flatter", "a", [False, True])
    assert "relative flatness shows no clear difference" in str(found)


def test_a_measure_that_the_losses_explain_does_not_contradict_another() -> None:
    values = {"rho_sum": (1.0, 0.0), "psi_trace": (9.0, 0.0)}, {"rho_sum": (2.0, 0.0), "psi_trace": (1.0, 0.0)}
    assert comparison(*values).conclusion.code == "split"
    found = comparison(*values, losses=(0.1, 0.22)).conclusion
    assert (found.code, found.winner) == ("flatter", "b")


def test_advice_is_about_what_keeps_the_question_open() -> None:
    names = {"rho_sum": (1.0, 0.0)}, {"rho_sum": (2.0, 0.0)}
    found = comparison(*names, losses=(0.1, 0.9))
    assert "at about the same loss" in str(found.conclusion)
    networks = {name: replace(each, architecture=name) for name, each in found.networks.items()}
    other = Comparison(found.tables, networks, meta={"loss": "cross_entropy"})
    said = "the architectures differ, and measures of flatness depend on layers and weights."
    assert str(other.conclusion) == f"Which is flatter cannot be told: {said}"
    moved = comparison({"hessian_trace": (1.0, 0.0)}, {"hessian_trace": (2.0, 0.0)}).conclusion
    assert str(moved).endswith(
        "rescaling units changes the flatness measures that were asked for, and not the function."
    )


def test_losses_of_which_curvature_knows_nothing_explain_nothing() -> None:
    found = comparison({"rho_sum": (1.0, 0.0)}, {"rho_sum": (2.0, 0.0)}, losses=(0.1, 0.22))
    assert found.conclusion.code == "untold"
    for cross_entropy in ("bce", "next_token", "cross_entropy with 3 class weights"):
        found.meta["loss"] = cross_entropy
        assert found.conclusion.code == "untold"
        assert [remark.code for remark in found.warnings()] == ["loss"]
    for other in ("mse", "MSELoss", "my_loss"):
        found.meta["loss"] = other
        assert (found.conclusion.code, found.conclusion.winner) == ("flatter", "a")


def test_the_page_says_what_is_done_at_which_factor_between_losses() -> None:
    page = (ROOT / "docs" / "how-to" / "choose-a-checkpoint.md").read_text()
    rows = [line.split("|")[1:4] for line in page.splitlines() if line.startswith("| ") and "times" in line]
    table = [tuple(cell.strip() for cell in row) for row in rows]
    low, high, _ = RULES
    assert [row[0] for row in table] == [
        f"up to {low.up_to:g} times the smallest",
        f"up to {high.up_to:g} times",
        f"more than {high.up_to:g} times",
    ]
    assert [row[1] for row in table] == ["no", "yes", "yes"]
    assert [row[2].startswith("no,") for row in table] == [not rule.ranks for rule in RULES]
    for name, factor in LEAST_FACTORS.items():
        assert f"{factor:g} times by `{name}`" in page


def test_copies_are_one_function() -> None:
    pair = SameFunction("a", "b", 0.0, 50, "units rescaled")
    found = comparison({"rho_sum": (1.0, 0.0)}, {"rho_sum": (1.0, 0.0)}, same_function=[pair]).conclusion
    assert found.code == "one function"


def test_of_several_the_flattest_is_compared_with_the_next() -> None:
    found = comparison({"rho_sum": (3.0, 0.0)}, {"rho_sum": (1.0, 0.0)}, {"rho_sum": (2.0, 0.0)}).conclusion
    assert (found.code, found.winner) == ("flatter", "b")
    assert (found.voices[0].next, found.voices[0].factor) == ("c", 2.0)


FAMILIES_OF_FIVE = ("rho_sum", "psi_trace", "margin", "l1_path_norm", "lipschitz_linf")


def test_a_flatter_network_that_other_measures_do_not_prefer_is_said_to_be_just_that() -> None:
    found = comparison(
        {"rho_sum": (1.0, 0.0), "margin": (9.0, 0.0), "l1_path_norm": (5.0, 0.0), "lipschitz_linf": (9.0, 0.0)},
        {"rho_sum": (2.0, 0.0), "margin": (3.0, 0.0), "l1_path_norm": (4.0, 0.0), "lipschitz_linf": (8.0, 0.0)},
    )
    assert found.ranking()["name"][0] == "b"
    assert (found.conclusion.code, found.conclusion.winner, found.conclusion.first) == ("flatter", "a", ("b",))
    assert "put b first" in found.headline


def test_no_conclusion_contradicts_the_ranking_or_a_measure() -> None:
    random = np.random.default_rng(0)
    codes = set()
    for _ in range(40):
        values = random.choice([1.0, 1.05, 2.0], size=(random.integers(2, 4), len(FAMILIES_OF_FIVE)))
        errors = random.choice([0.0, 0.3], size=values.shape)
        networks = [
            dict(zip(FAMILIES_OF_FIVE, zip(v, e, strict=True), strict=True))
            for v, e in zip(values.tolist(), errors.tolist(), strict=True)
        ]
        found = comparison(*networks)
        said = found.conclusion
        codes.add(said.code)
        if found.counting:
            ranking = found.ranking()
            assert set(ranking.loc[ranking["rank"] == ranking["rank"].min(), "name"]) == set(said.first)
        if said.winner:
            assert all(voice.best == said.winner for voice in said.voices if voice.clear and voice.next == said.winner)
            agreed = said.first in ((), (said.winner,))
            assert agreed or all(name in said.sentence.rpartition("that count")[2] for name in said.first)
    assert codes >= {"flatter", "split", "alike", "untold"}


def test_a_network_that_some_family_puts_clearly_behind_is_not_the_flattest() -> None:
    found = comparison(
        {"psi_trace": (1.0, 0.0), "rho_sum": (9.0, 0.0)},
        {"psi_trace": (2.0, 0.0), "rho_sum": (1.0, 0.0)},
        {"psi_trace": (3.0, 0.0), "rho_sum": (1.01, 0.0)},
    ).conclusion
    assert (found.code, found.winner) == ("split", "")
    assert {voice.best for voice in found.voices} == {"a", "b"}


def test_those_in_front_may_be_alike() -> None:
    found = comparison({"rho_sum": (1.0, 0.0)}, {"rho_sum": (1.01, 0.0)}, {"rho_sum": (5.0, 0.0)}).conclusion
    assert (found.code, found.winner) == ("alike", "")
    assert "between a and b" in str(found)


def test_test_errors_are_compared_on_the_same_samples() -> None:
    x = torch.arange(40.0)[:, None] / 40
    data = x, (x[:, 0] > 0.5).long()

    def threshold(at: float) -> nn.Module:
        net = nn.Linear(1, 2)
        net.load_state_dict({"weight": torch.tensor([[0.0], [40.0]]), "bias": torch.tensor([40.0 * at, 0.0])})
        return net.eval()

    found = fs.compare({"low": threshold(0.31), "high": threshold(0.81)}, data, ["margin"], test=data)
    wrong = [network.test_error for network in found.networks.values()]
    assert found.tests is not None
    apart = next(iter(found.tests.differences.values()))
    # They err on different sides: 12 samples here, 8 there, of 40.
    assert apart.apart == pytest.approx(abs(wrong[0] - wrong[1]))
    assert apart.stderr == pytest.approx(math.sqrt((sum(wrong) - apart.apart**2) / 39))
    assert apart.paired
    same = fs.compare({"low": threshold(0.31), "again": threshold(0.31)}, data, ["margin"], test=data)
    assert same.decision.code == "one function"
