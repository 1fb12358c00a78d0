"""Populations in the report and in its figures, without a browser."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from test_report import HOSTILE, Page

from flatscope.errors import InputError
from flatscope.registry import declarations
from flatscope.reports.items import by_kind
from flatscope.reports.page import page_text, report, save_figures
from flatscope.reports.population_page import population_sentences
from flatscope.training.populations.population_frame import (
    PopulationFrame,
    base_name,
    colour_column,
    is_population,
    network_names,
    target_column,
)

pytestmark = pytest.mark.long

NETWORK_WIDE = [name for name, entry in declarations().items() if entry.per == "network"]


def population(n: int = 24, n_measures: int = 5, seed: int = 0) -> pd.DataFrame:
    """Networks over batch sizes and optimizers; the first measure explains the gap, the others are noise."""
    draw = np.random.default_rng(seed)
    cause = draw.normal(size=n)
    frame = pd.DataFrame(
        {
            "batch_size": np.array([4, 32, 256])[np.arange(n) % 3],
            "optimizer": np.array(["sgd", "adam"])[np.arange(n) // 3 % 2],
            "seed": np.arange(n),
            "train_loss": draw.random(n),
            "generalization_gap": 0.1 + 0.02 * cause + 0.002 * draw.normal(size=n),
        }
    )
    measures = {name: np.exp(3 * draw.normal(size=n)) for name in NETWORK_WIDE[:n_measures]}
    measures[NETWORK_WIDE[0]] = np.exp(2 * cause)
    return pd.concat([frame, pd.DataFrame(measures)], axis=1)


def test_columns_of_lists_and_columns_without_a_value_do_no_harm() -> None:
    frame = population(n_measures=2)
    widths = [[64, 16, 10], [64, 32, 10]] * 12
    found = PopulationFrame(frame.assign(gradient_noise=math.nan, **{"model.widths": widths}))
    assert list(found.measures) == NETWORK_WIDE[:2]
    assert (
        getattr(colour_column(PopulationFrame(found.frame, parameters=["model.widths"])), "name", None)
        == "model.widths"
    )


def test_columns_find_their_parts() -> None:
    found = PopulationFrame(population())
    assert found.target == "generalization_gap"
    assert list(found.measures) == NETWORK_WIDE[:5]
    assert found.parameters == ("batch_size", "optimizer")  # the seed differs in every row, the loss is an outcome
    by = [found, PopulationFrame(population(), parameters=["optimizer"]), PopulationFrame(population(), parameters=[])]
    chosen = [colour_column(one) for one in by]
    assert [None if column is None else column.name for column in chosen] == ["batch_size", "optimizer", "batch_size"]
    rest = population().drop(columns=["batch_size", "optimizer", "seed"])
    assert getattr(colour_column(PopulationFrame(rest)), "name", None) == "train_loss"
    sweep = population().rename(columns=lambda name: f"metrics.{name}")
    assert is_population(sweep)
    assert list(PopulationFrame(sweep).measures) == [f"metrics.{name}" for name in NETWORK_WIDE[:5]]
    assert PopulationFrame(sweep).parameters == ("metrics.batch_size", "metrics.optimizer")
    assert base_name("psi_trace[rule=cyclic]") == base_name("a.b.psi_trace/fc1") == "psi_trace"
    assert not is_population(pd.DataFrame({"error_gap": [0.1, 0.2], "gradient_norm": [np.nan, np.nan]}))
    assert base_name('expected_sharpness{"alpha": 0.1}') == "expected_sharpness"
    assert target_column(["x", "loss_gap", "gap"]) == "gap"
    assert network_names(PopulationFrame(population(3).assign(name=["a", "b", "c"]))) == ["a", "b", "c"]
    assert network_names(PopulationFrame(population(2)))[1] == "network 2"


@pytest.mark.parametrize(
    ("frame", "arguments", "words"),
    [
        (population().drop(columns="generalization_gap"), {}, "a target column"),
        (population()[["batch_size", "generalization_gap"]], {}, "columns named after measures"),
        (population(), {"target": "gpa"}, "column of the population"),
        (population(), {"measures": ["nothing"]}, "column of the population"),
        (population(), {"measures": ["optimizer"]}, "a column of numbers"),
    ],
)
def test_what_is_no_population_is_refused(frame: pd.DataFrame, arguments: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        PopulationFrame(frame, **arguments)


def test_statistics_are_those_of_scipy_and_come_with_intervals() -> None:
    frame = population(60)
    found = PopulationFrame(frame).statistics
    best = found[0]
    assert best.measure == NETWORK_WIDE[0]
    x, y = frame[best.measure], frame["generalization_gap"]
    assert best.kendall.value == pytest.approx(stats.kendalltau(x, y).statistic)
    assert best.spearman.value == pytest.approx(stats.spearmanr(x, y).statistic)
    assert best.pearson.value == pytest.approx(stats.pearsonr(x, y).statistic)
    assert best.kendall.low < best.kendall.value < best.kendall.high
    assert best.partial is not None
    assert best.adjusted < 1e-6
    assert [entry.kendall.value for entry in found[1:]] == sorted(
        (entry.kendall.value for entry in found[1:]), key=lambda value: -abs(value)
    )


def test_the_page_says_what_is_reliable() -> None:
    frame = population(60)
    words = Page(page_text(frame)).text()
    assert "60 networks; generalization_gap from" in words
    assert f"{NETWORK_WIDE[0]} goes along with generalization_gap most closely: Kendall’s tau 0.9" in words
    assert "1 of 5 measures has an association" in words
    assert "it remains when batch_size, optimizer are held fixed" in words
    noise = PopulationFrame(frame.assign(generalization_gap=np.random.default_rng(1).random(60)))
    said = " ".join(population_sentences(noise, noise.statistics))
    assert said.startswith("None of 5 measures has"), "what chance may give is not said first"
    assert "more networks" in said
    assert "0 of" not in said
    constant = PopulationFrame(frame.assign(**{NETWORK_WIDE[1]: 1.0}))
    assert f"Without a correlation, for lack of values that vary: {NETWORK_WIDE[1]}." in " ".join(
        population_sentences(constant, constant.statistics)
    )


def test_expectations_are_held_against_the_sign() -> None:
    lower = next(name for name in NETWORK_WIDE if declarations()[name].direction == "lower")
    frame = population(60)[["generalization_gap"]]
    with_it = PopulationFrame(frame.assign(**{lower: frame["generalization_gap"] * 2}))
    against = PopulationFrame(frame.assign(**{lower: -frame["generalization_gap"]}))
    assert "Against the direction" not in " ".join(population_sentences(with_it, with_it.statistics))
    assert f"Against the direction that their source expects: {lower}" in " ".join(
        population_sentences(against, against.statistics)
    )


def test_marks_without_a_value_are_left_out_and_the_others_carry_their_names() -> None:
    frame = population()
    frame.loc[2, NETWORK_WIDE[0]] = math.nan
    frame.loc[3, NETWORK_WIDE[0]] = math.inf
    page = Page(page_text({"mine": PopulationFrame(frame, measures=[NETWORK_WIDE[0]])}))
    named = " ".join(page.words["title"])
    assert "network 1" in named
    assert "network 24" in named
    assert "network 3network" not in named.replace(" ", "")
    assert "22 networks" in page.text()


def test_structure_and_table_fallback() -> None:
    frame = population()
    page = Page(page_text([frame, ("second", population(seed=1))]))
    assert [section["id"] for section in page.all("section")] == [
        "answer", "population", "population-1", "provenance",
    ]  # fmt: skip
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert page.text("h1") == "What goes along with generalization?"
    points = page.text("table")
    assert "network 24" in points
    assert len([th for th in page.all("th") if "aria-sort" in th]) == 2 * 8
    assert len(page.all("select")) == 2


def test_hostile_names_stay_text() -> None:
    frame = population(8).rename(columns={"optimizer": HOSTILE, NETWORK_WIDE[0]: f"{NETWORK_WIDE[0]}[{HOSTILE}]"})
    frame[HOSTILE] = ["</script><b>", HOSTILE] * 4
    text = page_text({HOSTILE: frame})
    page = Page(text)
    assert "<script>alert" not in text
    assert len(page.all("script")) == 1


@pytest.mark.parametrize(
    "frame",
    [
        population(1),
        population(2),
        population(6).assign(generalization_gap=math.nan),
        population(6).assign(generalization_gap=-1.0),
        population(6).assign(batch_size=[1, 2, None, 4, 5, 6], optimizer=None),
        population(30).assign(flag=[True, False] * 15),
    ],
    ids=["one", "two", "no target", "constant", "missing settings", "booleans"],
)
def test_odd_populations_make_a_page_and_figures(frame: pd.DataFrame, tmp_path: Path) -> None:
    Page(page_text(frame))
    assert save_figures(frame, tmp_path)


def test_144_networks_make_a_small_page(tmp_path: Path) -> None:
    frame = population(144, n_measures=60)
    size = report({"population": PopulationFrame(frame)}, tmp_path / "report.html").stat().st_size
    assert size < 1_000_000  # the promise is 10 MB


def test_figures(tmp_path: Path) -> None:
    saved = save_figures({"mine": population()}, tmp_path, ("svg",))
    assert len(saved) == 1 + 5
    assert saved[0].name == "mine-correlations.svg"
    assert saved[1].name == f"mine-{NETWORK_WIDE[0]}.svg"


def test_kinds_are_told_apart() -> None:
    with_epochs = population().assign(epoch=3)  # a population may say after how many epochs it was measured
    kinds = by_kind([with_epochs, pd.DataFrame({"epoch": [1], "train_loss": [2.0]})])
    assert (len(kinds["populations"]), len(kinds["histories"])) == (1, 1)
