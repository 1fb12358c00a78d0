"""Table 1 of Zhang et al. (2017), the flatness test: how far weights can go in a random direction.

The paper does not state the network. Its "objective function" is read as the loss; the error is measured beside it.
The radius is the first crossing; the printed supremum may jump over bumps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flatscope.training import Store, measure_stored
from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Runs, Stage, study
from flatscope_papers.fitting import answer_if_networks_fitted, notes_on_unfitted_networks
from flatscope_papers.toml_files import settings_by_scale
from flatscope_papers.zhang2017.minima import (
    COLOURS,
    LABELS,
    TITLES,
    minimiser_configs,
    product_precision_of_config,
    training_errors_by_kind,
)

SETS, MOVED, OBJECTIVES = ("mnist", "cifar"), ("all", "top"), ("loss", "error")
WORDS = {"all": "all parameters", "top": "top layer"}
SIZES = settings_by_scale(__name__)
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


def flatness_radius_stages(scale: str) -> list[Stage]:
    """The minimisers, then four radii of each."""
    kinds = list(itertools.product(SETS, LABELS))
    most = SIZES[scale].get("minima")
    radii = [
        [
            _radius_config(scale, one, data, labels, moved, objective)
            for moved, objective in itertools.product(MOVED, OBJECTIVES)
            if objective == "loss" or one["model"]["seed"] < SIZES[scale].get("of_error", math.inf)
        ]
        for data, labels in kinds
        for one in minimiser_configs(scale, data, labels, most)
    ]
    return [Stage([minimiser_configs(scale, *kind, most) for kind in kinds]), Stage(radii, measure_radii, 0.5)]


def _radius_config(
    scale: str, network: dict[str, Any], data: str, labels: str, moved: str, objective: str
) -> dict[str, Any]:
    options = {
        "epsilon": 0.05,
        "directions": SIZES[scale]["directions"][data],
        "objective": objective,
        "layers": None if moved == "all" else "top",
        "tolerance": SIZES[scale]["tolerance"],
    }
    cell = {"set": data, "kind": labels, "moved": moved}
    coarse = {"products": SIZES[scale]["products"]} if "products" in SIZES[scale] else {}
    return {
        **coarse,
        "cell": cell,
        "network": network,
        "measures": ["flatness_radius"],
        "measure_options": {"flatness_radius": options},
        "measure_seed": network["model"]["seed"],  # other directions at every minimum: the spread has both
    }


def measure_radii(configs: list[dict[str, Any]], store: Store, report: Callable[[float, str], None]) -> None:
    """`measure_stored`, with the products that the configurations name."""
    with product_precision_of_config(configs[0]):
        measure_stored(configs, store, report)


def flatness_radius_answers(radii: pd.DataFrame) -> dict[str, Answer]:
    """The eight numbers of the table, of the loss, and their order; a row per network, moved parameters, objective."""
    of_loss = radii[radii["objective"] == "loss"]
    cells = {key: part["radius"].to_numpy() for key, part in of_loss.groupby(["set", "labels", "moved"])}
    answers = {"-".join(cell): intervals.mean_over_runs(cells[cell]) for cell in PRINTED}
    return answers | {f"order_{data}": _smaller_label_ratio(cells, data) for data in SETS}


def _smaller_label_ratio(cells: Mapping[Any, np.ndarray[Any, Any]], data: str) -> Answer:
    """The smaller ratio of natural to random labels, of all parameters and of the top layer."""
    level = intervals.joint_confidence_level(len(MOVED))
    ratios = [
        intervals.difference_of_means(
            np.log10(cells[data, "natural", moved]),
            np.log10(cells[data, "random", moved]),
            WORDS[moved],
            level=level,
        )
        for moved in MOVED
    ]
    return intervals.smallest_answer(ratios)


def _error_radii_in_words(radii: pd.DataFrame) -> str:
    """The same table for the error, which the caption may mean as well."""
    means = radii[radii["objective"] == "error"].groupby(["set", "labels", "moved"])["radius"].mean()
    words = [f"{TITLES[cell[0]]} {cell[1]} {WORDS[cell[2]]} {means[cell]:.1f}" for cell in PRINTED]
    return f"the same radii for the error in place of the loss: {', '.join(words)}"


def radii_of_table(radii: pd.DataFrame, scale: str) -> Analysis:
    """Claims and figure of the saved table, which has the training error of the network in every row."""
    del scale
    left = notes_on_unfitted_networks(radii.set_index(["set", "labels"]))
    judged = {}
    for key, answer in flatness_radius_answers(radii).items():
        data, *labels = (key.removeprefix("order_") if key.startswith("order_") else key.rpartition("-")[0]).split("-")
        kinds = [(data, one) for one in labels or LABELS]
        judged[key] = answer_if_networks_fitted(answer, kinds, left)
    return Analysis(radii, judged, lambda figure: _draw_flatness_radii(figure, radii), (_error_radii_in_words(radii),))


@study("zhang2017-table1", stages=flatness_radius_stages, from_table=radii_of_table)
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
    errors = (
        training_errors_by_kind(runs)
        .rename_axis(["set", "labels"])
        .set_index(runs.frame(0)["model.seed"].rename("minimum"), append=True)
    )
    return radii_of_table(radii.join(errors, on=["set", "labels", "minimum"]), runs.scale)


def _draw_flatness_radii(figure: Figure, radii: pd.DataFrame) -> None:
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
