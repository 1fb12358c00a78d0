"""Figures 7 to 10 of Zhang et al. (2017): where noise leaves gradient descent between minima of equal depth.

The potentials of the paper are unpublished; those of `theory.potentials` have what its captions describe.
Every number comes with an interval over chains, which are independent, and with the gap between the chains that
started in the one minimum and those that started in the other: a gap of more than 0.02 means that they have not
forgotten their start.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from flatscope.stats import wilson
from flatscope.training import Stored
from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Runs, Stage, study
from flatscope_papers.toml_files import settings_by_scale
from flatscope_papers.zhang2017.potential_chains import (
    MAPS,
    draw_density,
    draw_histograms_by_dimension,
    draw_potential,
    potential_of_config,
    run_potential,
)

DIMENSIONS = (1, 2, 3, 4, 5)
TOLERANCE = 0.02
BETWEEN = 3.0  # the w_1 half-way between the point at 2 and the valley at 4
BASINS = {"potential": "two basins", "temperature": 0.15, "lr": 0.01, "span": [-1.5, 4.5]}
VALLEY = {"potential": "valley and point", "temperature": 0.25, "lr": 0.02, "span": [0.5, 5.5]}
SIZES = settings_by_scale(__name__)


def _chain_configs(scale: str, base: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"study": "potential", **base, **SIZES[scale], "seed": 0, **more}


def _stages_by_dimension(base: Mapping[str, Any]) -> Callable[[str], list[Stage]]:
    return lambda scale: [Stage([[_chain_configs(scale, base, dimension=d)] for d in DIMENSIONS], run_potential, 0.25)]


def flat_share_answer(stored: Stored, of: int = 1) -> Answer:
    """The share in the flatter minimum, with its interval over chains and the gap between the two starts."""
    note = f"two-start gap {stored.metrics['gap']:.3f}, exp(−U/T) gives {stored.metrics['exact']:.4f}"
    return intervals.mean_over_runs(
        stored.frame("chains")["share"], note, bounds=(0, 1), level=intervals.joint_confidence_level(of)
    )


def smallest_rise_between_groups(groups: Sequence[Any], note: str = "") -> Answer:
    """The smallest rise from one group of chains to the next; its interval holds for all rises at once."""
    pairs = list(itertools.pairwise(groups))
    level = intervals.joint_confidence_level(len(pairs))
    return intervals.smallest_answer(
        [intervals.difference_of_means(after, before, note, level=level) for before, after in pairs]
    )


def _share_minus_exact_answer(stored: Stored, of: int = 1) -> Answer:
    """The share less that of exp(−U/T); one `of` several whose intervals are to hold at once."""
    shares = stored.frame("chains")["share"] - stored.metrics["exact"]
    return intervals.mean_over_runs(
        shares, f"two-start gap {stored.metrics['gap']:.3f}", level=intervals.joint_confidence_level(of)
    )


def _mixing_notes(chains: Sequence[Stored]) -> tuple[str, ...]:
    gaps = [stored.metrics["gap"] for stored in chains]
    mixed = "all runs mixed" if max(gaps) <= TOLERANCE else "not all runs mixed: more steps are needed"
    return (f"largest gap between chains of different starts {max(gaps):.3f} ({mixed})",)


def _flat_share_table(chains: Sequence[Stored]) -> pd.DataFrame:
    parts = []
    for stored in chains:
        kind = stored.config.get("method", "GDL")
        parts.append(stored.frame("histogram").assign(method=kind, dimension=stored.config["dimension"]))
    return pd.concat(parts, ignore_index=True)[["method", "dimension", "low", "high", "density", "exact"]]


@study("zhang2017-fig7", stages=_stages_by_dimension(BASINS))
def figure_7(runs: Runs) -> Analysis:
    """Langevin chains on two flat balls in 1 to 5 dimensions: histogram of w_1, share of time in the wide ball."""
    chains = runs.stored()
    answers = {f"D{stored.config['dimension']}": flat_share_answer(stored) for stored in chains}
    answers["grows"] = smallest_rise_between_groups([stored.frame("chains")["share"] for stored in chains])
    return Analysis(
        _flat_share_table(chains),
        answers,
        lambda figure: draw_histograms_by_dimension(figure, chains, "wide"),
        _mixing_notes(chains),
    )


@study(
    "zhang2017-fig8", stages=lambda scale: [Stage([[_chain_configs(scale, VALLEY, dimension=2)]], run_potential, 0.25)]
)
def figure_8(runs: Runs) -> Analysis:
    """Langevin chains on a valley at w_1 = 4 and a point at w_1 = 2, equally deep: where they spend their time."""
    (stored,) = runs.stored()
    share = flat_share_answer(stored)
    answers = {"prefers": _answer_minus_amount(share, 0.5), "boltzmann": _share_minus_exact_answer(stored)}

    def draw(figure: Figure) -> None:
        figure.set_size_inches(8.4, 3.2)
        left, right = figure.subplots(1, 2)
        draw_density(left, stored, f"GDL: P(valley) = {stored.metrics['share']:.3f}")
        draw_potential(right, potential_of_config(stored.config), MAPS["x"][:2])
        right.set_title("potential: point at 2, valley at 4", fontsize=9)

    return Analysis(stored.frame("map"), answers, draw, _mixing_notes([stored]))


def _answer_with_dimension(answer: Answer, stored: Stored) -> Answer:
    """With the dimension; two dimensions are looked at twice."""
    dimension = stored.config["dimension"]
    same = ", the chains and the share of zhang2017-fig8" if dimension == 2 else ""
    return replace(answer, note=f"least at D = {dimension}{same}; {answer.note}")


def _answer_minus_amount(answer: Answer, amount: float) -> Answer:
    low, high = (None if end is None else end - amount for end in (answer.low, answer.high))
    return Answer(answer.value - amount, low, high, answer.runs, answer.note)


@study("zhang2017-fig9", stages=_stages_by_dimension(VALLEY))
def figure_9(runs: Runs) -> Analysis:
    """Langevin chains on a valley, flat in D − 1 directions, and a point: histogram of w_1 as D grows."""
    chains = runs.stored()
    frames = [stored.frame("chains") for stored in chains]
    shares = [_answer_with_dimension(flat_share_answer(stored, of=len(chains) - 1), stored) for stored in chains[1:]]
    slip = "a slip of the caption: the minimum at W_1 = 2 must be the non-degenerate one"
    answers = {
        "prefers": _answer_minus_amount(intervals.smallest_answer(shares), 0.5),
        "falls": smallest_rise_between_groups([-frame["near_sharp"] for frame in frames]),
        "rate": intervals.answer_farthest_from_zero(
            [_share_minus_exact_answer(stored, of=len(chains)) for stored in chains]
        ),
        "caption": smallest_rise_between_groups([-frame["near_flat"] for frame in frames], slip),
    }
    return Analysis(
        _flat_share_table(chains),
        answers,
        lambda figure: draw_histograms_by_dimension(figure, chains, "valley"),
        _mixing_notes(chains),
    )


def _figure_10_stages(scale: str) -> list[Stage]:
    parts = {"SGD": 1.0, "SGDL": 0.5}  # of the temperature, from mini-batches; the rest is added noise
    units = [[_chain_configs(scale, VALLEY, dimension=2, method=name, sgd_share=part)] for name, part in parts.items()]
    return [Stage(units, run_potential, 0.25)]


def share_nearest_average_minimum(cells: pd.DataFrame, effective: float) -> Answer:
    """Share beyond one half of the time in the valley that is spent in the half of it nearest to w_2 = 0.

    Args:
        cells: density over a grid of (w_1, w_2), lower corners of the cells.
        effective: independent samples that the chains are worth.
    """
    low, high, number = MAPS["y"]
    middle = cells["w2"] + (high - low) / number / 2
    valley = cells["w1"] >= BETWEEN
    share = cells["density"][valley & (middle.abs() < high / 2)].sum() / cells["density"][valley].sum()
    ends = wilson(share * effective, max(1, round(effective)))
    note = "the valley is flat in w_2, so exp(−U/T) is uniform there: 1/2 of the time in half of it"
    return Answer(float(share) - 0.5, ends[0] - 0.5, ends[1] - 0.5, round(effective), note)


@study("zhang2017-fig10", stages=_figure_10_stages)
def figure_10(runs: Runs) -> Analysis:
    """Chains with mini-batches of five of 200 sample losses, alone (SGD) and with added noise (SGDL)."""
    chains = runs.stored()
    answers: dict[str, Answer] = {}
    for stored in chains:
        name = stored.config["method"]
        answers[f"{name}-prefers"] = _answer_minus_amount(flat_share_answer(stored), 0.5)
        answers[f"{name}-boltzmann"] = _share_minus_exact_answer(stored)
    (sgd,) = (stored for stored in chains if stored.config["method"] == "SGD")
    answers["average"] = share_nearest_average_minimum(sgd.frame("map"), sgd.metrics["effective_samples"])

    def draw(figure: Figure) -> None:
        figure.set_size_inches(10.5, 3.0)
        panels: Any = figure.subplots(1, 3)
        for axes, stored in zip(panels, chains, strict=False):
            draw_density(axes, stored, f"{stored.config['method']}: P(valley) = {stored.metrics['share']:.3f}")
        draw_potential(panels[2], potential_of_config(chains[0].config), MAPS["x"][:2])

    table = pd.concat([stored.frame("map").assign(method=stored.config["method"]) for stored in chains])
    return Analysis(table.reset_index(drop=True), answers, draw, _mixing_notes(chains))
