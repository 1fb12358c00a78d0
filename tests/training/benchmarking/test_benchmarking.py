"""The benchmark of measures: its design, its scores with their intervals, the released table, a measure that joins."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from test_cli import Run
from test_cli import run as run  # a fixture
from test_nothing_changes import CtrlC, Drawing, differing, made, own_measure, state

from flatscope import registry, stats
from flatscope.errors import InputError
from flatscope.inputs.factories import find_factory
from flatscope.registry import declarations
from flatscope.reports.leaderboard_page import leaderboard_sentences
from flatscope.reports.page import page_text
from flatscope.training.benchmarking import leaderboard, recipe, release, scores
from flatscope.training.benchmarking.leaderboard import benchmark
from flatscope.training.benchmarking.leaderboard_result import Leaderboard
from flatscope.training.benchmarking.release import released_leaderboard, released_population
from flatscope.training.benchmarking.scores import CHANCE, CONTROLS, ORACLE, population_with_controls, score_all
from flatscope.training.sweeps.configuration import key_of
from flatscope.training.sweeps.store import Store
from flatscope.training.sweeps.work import stored_problem, train_and_measure

pytestmark = pytest.mark.long

QUICK = ["l2_norm", "l2_path_norm", "parameter_count", "distance_from_initialization"]
OF_QUICK = ["parameter_count[form=vc_dimension]"]  # these networks have no positive margin


# --- the design


def test_every_combination_is_one_network_with_a_seed_of_its_own() -> None:
    rows = recipe.benchmark_networks()
    assert len(rows) == 1024 == rows["seed"].nunique()
    assert not rows.drop(columns="seed").duplicated().any()
    assert (rows.groupby("data").size() == 512).all()


@pytest.mark.parametrize("count", [8, 64, 128, 1024])
def test_smaller_designs_are_whole_and_balanced(count: int) -> None:
    rows = recipe.benchmark_networks(count)
    assert len(rows) == count
    varied = [name for name in recipe.SETTINGS if rows[name].nunique() > 1]
    assert set(varied) == set(recipe.ORDER[: len(varied)])
    assert 2 ** len(varied) * len(recipe.DATA_SETS) == count


@pytest.mark.parametrize("count", [0, 4, 100, 4096])
def test_other_numbers_of_networks_are_refused(count: int) -> None:
    with pytest.raises(InputError, match="power of 2"):
        recipe.benchmark_networks(count)


@pytest.mark.parametrize("kind", recipe.SETTINGS["kind"])
@pytest.mark.parametrize("data", recipe.DATA_SETS)
def test_networks_take_their_images(kind: str, data: str) -> None:
    channels, side = recipe.IMAGES[data]
    model = recipe.small_network(kind, 16, 2, channels, side)
    assert model(torch.zeros(3, channels, side, side)).shape == (3, 10)


# --- a population of eight small networks, from training to the page


def of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the recipe three settings that vary, on the embedded digits."""
    varied = {"width": (24, 32), "optimizer": ("momentum", "adam"), "label_noise": (0.0, 0.2)}
    monkeypatch.setattr(recipe, "DATA_SETS", ("digits",))
    monkeypatch.setitem(recipe.IMAGES, "digits", (1, 8))
    monkeypatch.setattr(recipe, "TRAIN_SIZE", 60)
    monkeypatch.setattr(recipe, "SUBSET", 8)
    monkeypatch.setattr(leaderboard, "SUBSET", 8)
    monkeypatch.setattr(release, "SUBSET", 8)
    for name, values in recipe.SETTINGS.items():
        monkeypatch.setitem(recipe.SETTINGS, name, varied.get(name, values[:1]))
    monkeypatch.setitem(recipe.SETTINGS, "batch_size", (5,))
    monkeypatch.setitem(recipe.SETTINGS, "lr", (0.1,))
    monkeypatch.setattr(recipe, "ORDER", (*varied, *(name for name in recipe.ORDER if name not in varied)))
    some = {name: entry for name, entry in declarations().items() if name in QUICK}
    monkeypatch.setattr(recipe, "declarations", lambda: some)


def of_few_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give it also stops that a few epochs reach, where nothing depends on how far a network is trained."""
    of_eight(monkeypatch)
    for module in (recipe, leaderboard, scores):
        monkeypatch.setattr(module, "STOPS", (1.5, 1.0))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    of_eight(monkeypatch)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    of_few_epochs(monkeypatch)


def test_a_network_at_a_stop_is_the_one_that_plain_training_gives(small: None, tmp_path: Path) -> None:
    row = recipe.benchmark_networks().iloc[5].to_dict()
    configs = [recipe.network_configuration(row, stop) for stop in recipe.STOPS]
    ours, plain = Store(tmp_path / "ours"), Store(tmp_path / "plain")
    recipe.train_networks(configs, ours, lambda *_: None)
    train_and_measure(configs, plain, lambda *_: None)
    for config in configs:
        mine, theirs = ours.read(config), plain.read(config)
        assert mine.metrics["reached"]
        assert mine.metrics["train_loss"] < config["train"]["stop_loss"]
        for name in ("epochs", "train_loss", "train_error", "test_loss", "test_error"):
            assert mine.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-4), name
        weights = theirs.weights()  # of another stack, in which sums add in another order
        assert all(torch.allclose(value, weights[name], atol=1e-3) for name, value in mine.weights().items())


def test_a_network_that_does_not_get_there_stays_without_values(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "MOST_EPOCHS", 3)
    frame, _ = recipe.train_and_measure_population(Store(tmp_path), workers=0)
    assert len(frame) == 2 * len(recipe.benchmark_networks())
    assert not frame["reached"].any()
    assert frame["gap"].isna().all()
    assert score_all(population_with_controls(frame), [ORACLE]).empty


def test_twins_compute_the_same_with_other_weights(small: None, tmp_path: Path) -> None:
    config = recipe.network_configuration(recipe.benchmark_networks().iloc[0].to_dict(), 0.1)
    recipe.train_networks([config], Store(tmp_path), lambda *_: None)
    problem = stored_problem(Store(tmp_path), config)
    twin = recipe.rescaled_twin(problem, 3)
    x, _ = next(iter(problem.batches()))
    assert torch.allclose(problem.model(x), twin.model(x), atol=1e-4)
    assert not torch.allclose(problem.model[0].weight, twin.model[0].weight, rtol=0.1)


def largest_weight(ctx: object) -> float:
    """A measure of somebody's own, declared nowhere."""
    return max(float(value.abs().max()) for value in ctx.params.values())  # type: ignore[attr-defined]


def test_a_population_is_built_scored_and_joined(soon: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = str(tmp_path / "store")
    board = release.rebuild_release(tmp_path, store, workers=0)
    assert set(board.names) == {*QUICK, *OF_QUICK, *CONTROLS}
    assert (tmp_path / release.POPULATION_FILE).stat().st_size < 100_000
    again = release.rebuild_release(tmp_path, store, workers=0)  # nothing is left to do: the same numbers
    assert board.to_frame().equals(again.to_frame())
    population, meta = release.from_parquet_bytes(
        (tmp_path / release.POPULATION_FILE).read_bytes(), release.POPULATION_KEY
    )
    assert meta["seconds training"] >= 0
    monkeypatch.setattr(leaderboard, "released_population", lambda: (population, meta))
    monkeypatch.setattr(leaderboard, "released_leaderboard", lambda few: board)
    joined = benchmark(largest_weight, networks="all", store=store, workers=0)
    assert {*QUICK, *OF_QUICK, ORACLE, CHANCE, "largest_weight"} == set(joined.names)
    row = joined.row("largest_weight", "digits", 1.0, "tau")
    assert row is not None
    assert math.isfinite(row["value"])
    values = leaderboard._values_of_own_functions(
        {"largest_weight": largest_weight}, population_with_controls(population), Store(store)
    )
    assert np.isfinite(values["largest_weight"]).all()
    assert not np.allclose(values["largest_weight"][1], values["rescaled.largest_weight"][1])
    with pytest.raises(InputError, match="not taken"):
        benchmark(lambda_named("l2_path_norm"), store=store)
    with pytest.raises(InputError, match="a number"):
        benchmark(lambda_named("words", "many"), networks="all", store=store, workers=0)


def test_a_first_look_needs_no_download(soon: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATSCOPE_DATA", str(tmp_path / "nothing"))
    asked = [largest_weight, "l2_path_norm"]
    board = benchmark(asked, networks=8, data="digits", store=str(tmp_path / "store"), workers=0)
    assert set(board.names) == {"largest_weight", "l2_path_norm", ORACLE, CHANCE}
    assert {data for data, _ in board.populations} == {"digits"}
    assert "do not put these" in board.headline
    assert board.headline.startswith(("largest_weight: place", "largest_weight: no score"))
    assert board.meta["own"] == ["largest_weight"]
    first, second = leaderboard_sentences(board)[:2]
    assert re.search(r"Better than chance: (yes|no, worse|not clear) \(Ψ digits 1.5: \S+ \[", first)
    assert "two trainings of one architecture: right in " in second
    with pytest.raises(InputError, match="digits"):
        benchmark(largest_weight, data="mnist")


def test_a_declared_measure_that_fails_stops_at_the_first_network(
    soon: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    calls = []

    @registry.measure(symbol="f", paper="flatscope", equation="none")
    def failing(ctx: object) -> float:
        """Nothing: it fails."""
        calls.append(ctx)
        raise AttributeError("no confidence")

    with pytest.raises(AttributeError, match="no confidence") as caught, pytest.warns(RuntimeWarning):
        benchmark(failing, networks=8, data="digits", store=str(tmp_path), workers=0)
    assert caught.traceback[-1].name == "failing"  # the command line tells its file and line
    assert len(calls) == 2


def test_missing_images_are_said_before_anything_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATSCOPE_DATA", str(tmp_path / "nothing"))
    monkeypatch.setattr(leaderboard, "train_missing_networks", lambda *_, **__: pytest.fail("a network is trained"))
    with pytest.raises(InputError, match=r"images of cifar10.*data fetch cifar10.*--data digits"):
        benchmark(largest_weight, networks=8, store=str(tmp_path / "store"), workers=0)


def test_interrupts_change_nothing_of_the_callers_and_no_score(
    soon: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Networks are trained and measured in this very process; what was done before the interrupt is not done again."""
    monkeypatch.setitem(recipe.SETTINGS, "width", (24,))  # four networks are as good as eight
    board = release.rebuild_release(tmp_path, str(tmp_path / "first"), workers=0)
    population = release.from_parquet_bytes((tmp_path / release.POPULATION_FILE).read_bytes(), release.POPULATION_KEY)
    monkeypatch.setattr(leaderboard, "released_population", lambda: population)
    monkeypatch.setattr(leaderboard, "released_leaderboard", lambda few: board)

    def joined(store: str) -> pd.DataFrame:
        own = [largest_weight, own_measure]
        return benchmark(own, networks="all", store=str(tmp_path / store), workers=0).to_frame()

    model, data = made(Drawing)
    torch.backends.cuda.matmul.allow_tf32 = False
    before = state(model, data)
    with CtrlC(10**9) as counted:
        whole = joined("second")
    assert differing(before, state(model, data)) == []
    for at in sorted(random.Random(0).sample(range(counted.calls), 3)):
        with pytest.raises(KeyboardInterrupt), CtrlC(at):
            joined(f"after {at}")
        assert differing(before, state(model, data)) == [], f"interrupted in call {at} of {counted.calls}"
    pd.testing.assert_frame_equal(joined(f"after {at}"), whole)


def lambda_named(name: str, value: object = 1.0) -> Callable[[object], object]:
    def made(ctx: object) -> object:
        return value

    made.__name__ = name
    return made


# --- scores


def factorial(settings: int, seed: int, *, shared: float = 0.5, repeats: int = 1) -> pd.DataFrame:
    """Every combination of two-valued settings; the gap and a measure follow them, and share some of the rest."""
    rng = np.random.default_rng(seed)
    names = list(recipe.SETTINGS)[:settings]
    frame = pd.DataFrame(list(itertools.product((0, 1), repeat=settings)) * repeats, columns=names)
    effects = 1.0 / (1 + np.arange(settings))
    of_settings, noise = frame.to_numpy() @ effects, rng.standard_normal((2, len(frame)))
    gap = of_settings + noise[0]
    return frame.assign(gap=gap, turned=shared * noise[0] + 0.5 * of_settings + noise[1])


def estimates(frame: pd.DataFrame, names: list[str]) -> dict[str, stats.Estimate]:
    return {
        "tau": stats.correlate(frame["turned"], frame["gap"], "kendall"),
        "psi": stats.granulated_kendall(frame, "turned", "gap", names).average,
        "information": stats.conditional_mutual_information(frame, "turned", "gap", names),
        "worst_error": stats.sign_error(frame, "turned", "gap", names).worst,
    }


def truths(settings: int, shared: float) -> dict[str, float]:
    """Of averages over pairs, their mean over many populations; of the others, what a large population has."""
    names, found = list(recipe.SETTINGS)[:settings], []
    environments: list[list[float]] = []
    for seed in range(250):
        frame = factorial(settings, 10_000 + seed, shared=shared)
        tau = stats.correlate(frame["turned"], frame["gap"], "kendall").value
        found.append((tau, stats.granulated_kendall(frame, "turned", "gap", names).average.value))
        signs = stats.sign_error(frame, "turned", "gap", names).by_environment.values()
        environments.append([error.value for error in signs])
    large = factorial(settings, 1, shared=shared, repeats=2048 // 2**settings)
    information = stats.conditional_mutual_information(large, "turned", "gap", names).value
    tau, psi = np.mean(found, axis=0)
    return {"tau": tau, "psi": psi, "information": information, "worst_error": max(np.mean(environments, axis=0))}


@pytest.mark.parametrize("shared", [0.0, 0.8])
def test_intervals_of_every_score_cover(shared: float) -> None:
    """95 % intervals, 200 populations of 64 networks; those that allow for a choice may cover more."""
    settings, repeats = 6, 200
    names, truth = list(recipe.SETTINGS)[:settings], truths(settings, shared)
    held: dict[str, list[bool]] = {name: [] for name in truth}
    for seed in range(repeats):
        for name, found in estimates(factorial(settings, seed, shared=shared), names).items():
            held[name].append(bool(found.low <= truth[name] <= found.high))
    covered = {name: float(np.mean(hits)) for name, hits in held.items()}
    print(covered)
    assert all(value >= 0.90 for value in covered.values()), covered
    assert covered["psi"] <= 0.99, covered


def test_the_jackknife_of_information_leaves_out_each_network_in_turn() -> None:
    frame = factorial(4, 0)
    names = list(recipe.SETTINGS)[:4]
    found = stats.conditional_mutual_information(frame, "turned", "gap", names)
    without = [
        stats.conditional_mutual_information(frame.drop(index=row), "turned", "gap", names).value for row in frame.index
    ]
    n = len(frame)
    error = math.sqrt((n - 1) / n * np.sum((np.array(without) - np.mean(without)) ** 2))
    reach = 2.131450 * error  # Student, 15 degrees of freedom
    assert (found.low, found.high) == pytest.approx((max(0, found.value - reach), found.value + reach), rel=1e-5)


def test_the_worst_environment_allows_for_the_choice() -> None:
    frame = factorial(5, 0, shared=0.0)
    found = stats.sign_error(frame, "turned", "gap", list(recipe.SETTINGS)[:5])
    alone = next(e for e in found.by_environment.values() if e.value == found.worst.value)
    assert found.worst.low < alone.low
    assert found.worst.high >= alone.high


def test_a_measure_that_knows_one_setting_alone_fails_somewhere() -> None:
    frame = factorial(5, 0).rename(columns={"turned": "other"})
    frame = frame.assign(data="made", stop=0.01, reached=True, turned_on=frame["kind"] + 0.0, oracle=frame["gap"])
    for name in recipe.SETTINGS:
        frame[name] = frame.get(name, 0)
    board = Leaderboard(score_all(frame, ["turned_on", "oracle"]))
    assert board.mean("turned_on", "information") == 0.0
    assert board.mean("turned_on", "psi") < 0.3
    assert board.mean("turned_on", "worst_error") == 0.5
    assert board.mean("oracle", "psi") == 1.0
    assert board.mean("oracle", "information") == pytest.approx(1.0)
    assert board.names == ["oracle", "turned_on"]


# --- the release


def test_the_released_table_is_the_design() -> None:
    population, meta = released_population()
    rows = recipe.benchmark_networks()
    assert len(population) == 2 * len(rows)
    for stop, part in population.groupby("stop"):
        pd.testing.assert_frame_equal(part[list(rows)].reset_index(drop=True), rows, check_dtype=False)
        there = part[part["reached"]]
        assert (there["train_loss"] < stop).all()
        assert there["gap"].between(-1, 1).all()
    assert meta["networks"] == len(rows)
    assert population["l2_norm"].notna().equals(population["reached"])


def test_measures_lie_between_chance_and_the_test_error() -> None:
    board = released_leaderboard()
    assert board.names[0] == ORACLE
    for data, stop in board.populations:
        oracle, chance = (board.row(name, data, stop, "psi") for name in (ORACLE, CHANCE))
        assert oracle is not None
        assert chance is not None
        assert oracle["value"] > 0.7
        assert abs(chance["value"]) < 0.02, "the mean of many draws"
        assert chance["low"] < 0 < chance["high"]
        information = board.row(CHANCE, data, stop, "information")
        assert information is not None
        assert information["value"] < 0.01
        values = [board.row(name, data, stop, "psi") for name in board.names]
        assert all(row is None or math.isnan(row["value"]) or row["value"] <= oracle["value"] for row in values)


def test_what_declares_to_be_invariant_survives_rescaling() -> None:
    board = released_leaderboard()
    for name, entry in declarations().items():
        kept = board.mean(name, "survival") if name in board.names else math.nan
        if "unit_scaling" in entry.invariant_under and not entry.search and entry.exact and math.isfinite(kept):
            assert kept > 0.95, name


def test_all_measures_of_a_board_were_taken_of_the_same_networks() -> None:
    long = {name for name, entry in declarations().items() if entry.cost == "long"}
    board, few = released_leaderboard(), released_leaderboard(few=True)
    assert not long & set(board.names)
    assert long & set(few.names)
    for one, count in ((board, 1024), (few, 128)):
        assert one.meta["networks"] == count
        taus = one.to_frame().query("score == 'tau'")
        for _, part in taus.groupby(["data", "stop"]):
            assert part["networks"].min() > 0.95 * part["networks"].max()
    assert benchmark("geometric_margin").meta["networks"] == 128
    with pytest.raises(InputError, match="128 or fewer"):
        benchmark("geometric_margin", networks="all")


def test_any_smaller_design_is_scored_from_the_table() -> None:
    board = benchmark(["l2_path_norm", "geometric_marg*"], networks=16)
    assert board.meta["networks"] == 16
    assert set(board.names) == {"l2_path_norm", "geometric_margin", ORACLE, CHANCE}


def test_a_form_of_a_measure_is_scored_by_its_label() -> None:
    label = "l2_path_norm[form=over_margin]"
    board = benchmark([label, "margin"])
    assert set(board.names) == {label, "margin", ORACLE, CHANCE}
    assert benchmark("l2_path_norm").names == [ORACLE, "l2_path_norm", CHANCE]
    assert {label, "kappa[form=max]", "spectral_norm[form=lipschitz_l2]"} <= set(benchmark().names)
    with pytest.raises(InputError, match="l2_path_norm"):
        benchmark("l2_path_norm[form=half]")


def test_released_scores_are_those_of_the_released_table() -> None:
    population, _ = released_population()
    part = population_with_controls(population)
    part = part[(part["data"] == "cifar10") & (part["stop"] == 0.01)]
    chosen = ["l2_path_norm", "margin", "certified_radius", "kappa[form=sum]"]
    again = score_all(part, chosen)
    board = released_leaderboard().only(chosen).to_frame()
    board = board[(board["data"] == "cifar10") & (board["stop"] == 0.01)].reset_index(drop=True)
    order = ["measure", "score"]
    pd.testing.assert_frame_equal(
        again.sort_values(order, ignore_index=True), board.sort_values(order, ignore_index=True), rtol=1e-6
    )


def test_the_page_shows_every_measure_and_needs_nothing_else() -> None:
    board = released_leaderboard()
    page = page_text({"all": board, "few": released_leaderboard(few=True)})
    assert all(name.replace("_", "_<wbr>") in page for name in board.names)
    assert "flatscope benchmark my.py:function" in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")


def test_results_come_back_from_files(tmp_path: Path) -> None:
    board = benchmark(["l2_path_norm", "margin"])
    for ending in Leaderboard.READABLE:
        board.save(tmp_path / f"board{ending}")
        assert Leaderboard.load(tmp_path / f"board{ending}") == board


def test_the_command_shows_chosen_measures(run: Run, tmp_path: Path) -> None:
    shown = run("benchmark", "l2_path_norm", "l2_*", "--json").out
    names = {row["measure"] for row in json.loads(shown)["rows"]}
    assert {"l2_path_norm", "l2_norm", ORACLE, CHANCE} <= names
    whole = run("benchmark").out
    assert whole.startswith(f"{benchmark().names[1]} ranks networks most as the gap does")
    # No column is cut off, and controls have no place.
    lines = [line.split() for line in whole.splitlines() if " [" in line and "pairs" not in line]
    assert all(word in whole for word in ("survival", "τ", "Ψ"))
    assert lines[0][0] == ORACLE
    assert [line[0] for line in lines if line[0].isdigit()] == [str(n + 1) for n in range(len(lines) - len(CONTROLS))]
    assert lines[1][-1] == "1.00"
    for words in (["no_such_measure"], ["margin", "--networks", "many"], ["--rebuild", str(tmp_path)]):
        assert run("benchmark", *words).code != 0


def test_networks_that_version_0_2_trained_are_found_by_their_names() -> None:
    config = recipe.network_configuration(recipe.rows_as_dictionaries(recipe.benchmark_networks())[0], recipe.STOPS[0])
    assert key_of(config) == "cd0fa0b06c697532616ca1672315050e"
    assert find_factory(config["model"]["name"]) is recipe.small_network
