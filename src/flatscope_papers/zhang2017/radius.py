"""Table 1 of Zhang et al. (2017), the flatness test: how far weights can go in a random direction.

The paper states neither the objective (loss or error) nor the network, so both objectives are measured and every cell
of the table is a claim for each. The radius is the first crossing; the printed supremum may jump over bumps.
"""

from __future__ import annotations

import itertools
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from flatscope.sweeps.stored_networks import measure_stored
from flatscope_papers import intervals
from flatscope_papers.claims import POSITIVE, Claim, Estimate
from flatscope_papers.declaration import Analysis, Runs, Stage, study
from flatscope_papers.reasons import with_reasons
from flatscope_papers.zhang2017.minima import COLOURS, COST, DEVIATIONS, LABELS, TITLES, minima

SETS, MOVED, OBJECTIVES = ("mnist", "cifar"), ("all", "top"), ("loss", "error")
WORDS = {"all": "all parameters", "top": "top layer"}
DIRECTIONS = {"smoke": 2, "small": 20, "paper": 100}
TOLERANCE = {"smoke": 0.2, "small": 0.01, "paper": 1e-4}  # relative accuracy of a radius
BOTH = "loss and error, as the paper does not say which"
FEW = "random labels are the harder to fit the more images there are; 2,000 are too few for the printed contrast"
PRINTED = {  # mean and deviation over minima
    ("mnist", "natural", "all"): (45.4, 2.7),
    ("mnist", "random", "all"): (6.9, 1.0),
    ("mnist", "natural", "top"): (15.0, 1.7),
    ("mnist", "random", "top"): (3.0, 0.1),
    ("cifar", "natural", "all"): (17.0, 2.4),
    ("cifar", "random", "all"): (5.7, 1.0),
    ("cifar", "natural", "top"): (19.5, 4.0),
    ("cifar", "random", "top"): (12.1, 2.6),
}


def _value_claims() -> list[Claim]:
    return [
        Claim(
            f"{data}-{labels}-{moved}-{objective}",
            "Table 1",
            f"{TITLES[data]}, {labels} labels, {WORDS[moved]}: the {objective} has changed by 0.05 at a distance of "
            f"{mean} ± {sd}",
            "flatness radius, mean over minima",
            f"{mean} ± {sd}",
            holds=(mean - sd, mean + sd),
            partly=(mean / 2, 2 * mean),
        )
        for (data, labels, moved), (mean, sd) in PRINTED.items()
        for objective in OBJECTIVES
    ]


def _order_claims() -> list[Claim]:
    natural = [
        Claim(
            f"{data}-{moved}-{objective}-order",
            "Table 1, section 6.1",
            f"{TITLES[data]}, {WORDS[moved]}: the flatness radius of the {objective} is larger with natural than with "
            "random labels",
            "log10 of the ratio of the radii, natural to random",
            f"log10 of {PRINTED[data, 'natural', moved][0]} / {PRINTED[data, 'random', moved][0]}",
            holds=POSITIVE,
        )
        for data, moved, objective in itertools.product(SETS, MOVED, OBJECTIVES)
    ]
    top = [
        Claim(
            f"cifar-top-above-all-{objective}",
            "Table 1",
            f"CIFAR-10, natural labels: the flatness radius of the {objective} is larger for the top layer than for "
            "all parameters",
            "radius of the top layer minus that of all parameters, per minimum",
            "19.5 against 17.0",
            holds=POSITIVE,
        )
        for objective in OBJECTIVES
    ]
    return natural + top


CLAIMS = [*_value_claims(), *_order_claims()]


def _reasons() -> dict[str, str]:
    """Why claims fail at 2,000 images: the labels are too easy, or the network is not the paper's."""
    other = "the paper's network for CIFAR-10 is not known and not this perceptron, whose top layer has 5,130 of "
    other += "1,209,866 parameters"
    found = {claim.key: FEW for claim in CLAIMS if "-random-" in claim.key or claim.key.endswith("-order")}
    return found | {claim.key: other for claim in CLAIMS if claim.key.startswith("cifar") and "-top-" in claim.key}


def stages(scale: str) -> list[Stage]:
    """The minimisers, then four radii of each."""
    kinds = list(itertools.product(SETS, LABELS))
    most = 2 if scale == "smoke" else None
    radii = [
        [
            _radius(scale, one, data, labels, moved, objective)
            for moved, objective in itertools.product(MOVED, OBJECTIVES)
        ]
        for data, labels in kinds
        for one in minima(scale, data, labels, most)
    ]
    return [Stage([minima(scale, *kind, most) for kind in kinds]), Stage(radii, measure_stored, 0.5)]


def _radius(scale: str, network: dict[str, Any], data: str, labels: str, moved: str, objective: str) -> dict[str, Any]:
    options = {
        "epsilon": 0.05,
        "directions": DIRECTIONS[scale],
        "objective": objective,
        "layers": None if moved == "all" else "top",
        "tolerance": TOLERANCE[scale],
    }
    cell = {"set": data, "kind": labels, "moved": moved}
    return {
        "cell": cell,
        "network": network,
        "measures": ["flatness_radius"],
        "measure_options": {"flatness_radius": options},
        "measure_seed": network["model"]["seed"],  # other directions at every minimum: the spread has both
    }


def estimates(radii: pd.DataFrame) -> dict[str, Estimate]:
    """Every claim's number from one row per network, moved parameters and objective."""
    cells = {key: part["radius"].to_numpy() for key, part in radii.groupby(["set", "labels", "moved", "objective"])}
    found = {
        f"{data}-{labels}-{moved}-{objective}": intervals.mean(cells[data, labels, moved, objective])
        for (data, labels, moved), objective in itertools.product(PRINTED, OBJECTIVES)
    }
    for data, moved, objective in itertools.product(SETS, MOVED, OBJECTIVES):
        natural, random = (cells[data, labels, moved, objective] for labels in LABELS)
        found[f"{data}-{moved}-{objective}-order"] = intervals.log_ratio(natural, random)
    for objective in OBJECTIVES:
        top, every = (cells["cifar", "natural", moved, objective] for moved in ("top", "all"))
        found[f"cifar-top-above-all-{objective}"] = intervals.paired_difference(top, every)
    return found


@study(
    "zhang2017-table1",
    figure="Table 1",
    title="The flatness test: distance to a change of 0.05, natural and random labels",
    claims=CLAIMS,
    stages=stages,
    deviations={
        "small": (*DEVIATIONS["small"], "20 directions per minimum, radii to 1 %", BOTH, FEW),
        "paper": (*DEVIATIONS["paper"], "100 directions per minimum", BOTH),
    },
    paper_cost=COST,
)
def table_1(runs: Runs) -> Analysis:
    """Mean distance in random directions at which the training loss, or error, has changed by 0.05."""
    frame = runs.frame()
    names = {
        "cell.set": "set",
        "cell.kind": "labels",
        "cell.moved": "moved",
        "measure_options.flatness_radius.objective": "objective",
        "network.model.seed": "minimum",
        "flatness_radius": "radius",
    }
    radii = frame[list(names)].rename(columns=names)
    reasons = _reasons() if runs.scale == "small" else {}
    found = with_reasons(estimates(radii), CLAIMS, runs.scale, reasons)
    return Analysis(radii, found, lambda figure: _draw(figure, radii))


def _draw(figure: Figure, radii: pd.DataFrame) -> None:
    figure.set_size_inches(9.0, 3.8)
    panels: Any = figure.subplots(1, 2, sharey=True)
    rows = list(itertools.product(MOVED, LABELS))
    for axes, data in zip(panels, SETS, strict=True):
        for place, (moved, labels) in enumerate(rows):
            mean, sd = PRINTED[data, labels, moved]
            axes.barh(
                -place, 2 * sd, left=mean - sd, height=0.8, color="0.8", label="paper, ± sd" if not place else None
            )
            for objective, shift, marker in (("loss", 0.15, "o"), ("error", -0.15, "s")):
                chosen = radii[
                    (radii["set"] == data)
                    & (radii["labels"] == labels)
                    & (radii["moved"] == moved)
                    & (radii["objective"] == objective)
                ]["radius"]
                name = f"here, {objective}" if not place else None
                axes.errorbar(
                    chosen.mean(),
                    -place + shift,
                    xerr=chosen.std(),
                    fmt=marker,
                    ms=5,
                    capsize=2,
                    color=COLOURS[labels],
                    mfc=COLOURS[labels] if objective == "loss" else "white",
                    label=name,
                )
        axes.set_title(TITLES[data], fontsize=9)
        axes.set_xlabel("flatness radius (± sd over minima)")
        axes.set_xlim(left=0)
    panels[0].set_yticks([-place for place in range(len(rows))], [f"{WORDS[m]}\n{lab} labels" for m, lab in rows])
    panels[0].legend(fontsize=7, loc="lower right")
