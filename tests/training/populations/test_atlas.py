"""The atlas of correlations along training: naive twins, stop rules by hand, coverage of the intervals, bad input."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import flatscope as fs
from flatscope.reports.page import save_figures
from flatscope.training.populations.atlas_making import FEWEST
from flatscope.training.populations.resampled import copies_in_resamples, correlation_intervals, weighted_correlation
from flatscope.training.sweeps.store import Store

ROOT = Path(__file__).parents[3]
CORRELATIONS: dict[str, Any] = {"pearson": stats.pearsonr, "spearman": stats.spearmanr, "kendall": stats.kendalltau}
EPOCHS = (1, 2, 4, 8, 16)


def followed(networks: int = 40, seed: int = 0, turning: float = 1.0) -> pd.DataFrame:
    """Networks along training: a measure whose correlation with the gap turns, one of noise, lost rows, ties."""
    draw = np.random.default_rng(seed)
    rows = []
    for network in range(networks):
        gap, speed, batch = draw.normal(), draw.uniform(0.5, 1.5), (16, 64)[network % 2]
        for n, epoch in enumerate(EPOCHS):
            if draw.random() < 0.05:
                continue  # not looked at
            loss = 2.0 * math.exp(-speed * n) + 0.01 * draw.normal()
            measure = turning * (2 - n) * gap + 0.8 * draw.normal() + (batch == 64)
            rows.append(
                {
                    "network": f"n{network}", "epoch": epoch,
                    "train_loss": loss, "train_error": min(1, max(0, loss / 3)),
                    "gap": math.nan if draw.random() < 0.03 else gap + 0.1 * draw.normal(), "batch": batch,
                    "init": ("a", "b", "c")[network % 3], "margin": measure, "rho": round(draw.normal(), 1),
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def stops(frame: pd.DataFrame, axis: str, at: float) -> pd.DataFrame:
    """One row per network by a loop: after the epoch, or where the level is first reached."""
    kept = []
    for _, rows in frame.groupby("network", sort=False):
        for _, row in rows.sort_values("epoch").iterrows():
            accuracy = 1 - row["train_error"]
            reached = {
                "epoch": row["epoch"] == at,
                "train_loss": row["train_loss"] <= at,
                "train_accuracy": accuracy >= at,
            }
            if reached[axis]:
                kept.append(row)
                break
    found = pd.DataFrame(kept)
    return found[np.isfinite(found["gap"].astype(float))]


def naive(points: pd.DataFrame, measure: str, kind: str, groups: list[str]) -> tuple[float, int]:
    """The correlation of all networks, or within groups, with SciPy and loops."""
    x, y = points[measure].to_numpy(float), points["gap"].to_numpy(float)
    if not groups:
        return float(CORRELATIONS[kind](x, y).statistic), len(x)
    keys = [tuple(row) for row in points[groups].itertuples(index=False)]
    kept = [n for n, key in enumerate(keys) if keys.count(key) > 1]
    x, y, keys = x[kept], y[kept], [keys[n] for n in kept]
    if kind == "kendall":
        pairs = [(i, j) for i, j in itertools.combinations(range(len(x)), 2) if keys[i] == keys[j]]
        sx, sy = (np.array([np.sign(v[i] - v[j]) for i, j in pairs]) for v in (x, y))
        return float((sx * sy).sum() / math.sqrt(np.abs(sx).sum() * np.abs(sy).sum())), len(x)
    if kind == "spearman":
        x, y = stats.rankdata(x), stats.rankdata(y)
    for key in set(keys):
        inside = [n for n, other in enumerate(keys) if other == key]
        x[inside] -= x[inside].mean()
        y[inside] -= y[inside].mean()
    return float(stats.pearsonr(x, y).statistic), len(x)


@pytest.mark.parametrize("kind", list(CORRELATIONS))
def test_every_point_is_that_of_loops_over_the_networks(kind: str) -> None:
    frame = followed()
    found = fs.atlas(frame, by=["batch", "init"], kinds=[kind], resamples=100)
    groups = {"all networks": [], "within batch": ["batch"], "within batch and init": ["batch", "init"]}
    compared = 0
    there = {
        (axis, p.at): stops(frame, axis, p.at) for axis in found.names("axis") for p in found.curve("margin", axis)
    }
    for axis, (scope, held), measure in itertools.product(found.names("axis"), groups.items(), found.names("measure")):
        for point in found.curve(measure, axis, scope):
            value, n = naive(there[axis, point.at], measure, kind, held)
            assert point.n == n
            if n >= FEWEST:
                assert point.value == pytest.approx(value, abs=1e-12)
                compared += 1
    assert compared > 80
    assert {"batch = 16", "init = c"} <= set(found.names("scope"))


def test_a_level_takes_each_network_where_it_first_gets_there() -> None:
    """A network that falls below, rises again and falls again counts as it was the first time."""
    losses = {"quick": [0.9, 0.05, 0.5, 0.01], "slow": [0.9, 0.8, 0.5, 0.1], "never": [0.9, 0.8, 0.7, 0.6]}
    rows = [
        {
            "network": f"{name} {k}", "epoch": e, "train_loss": loss, "train_accuracy": 1 - loss,
            "gap": k + e, "margin": k * e,
        }
        for name, path in losses.items() for k in range(10) for e, loss in enumerate(path, start=1)
    ]  # fmt: skip
    found = fs.atlas(pd.DataFrame(rows), levels={"train_loss": [0.1, 0.01], "train_accuracy": [0.9]}, resamples=100)
    half, low = found.curve("margin", "train_loss")
    assert (half.n, half.networks, half.median_epoch, half.median_loss) == (20, 30, 3.0, pytest.approx(0.075))
    assert (low.n, low.median_epoch) == (10, 4.0)
    assert found.curve("margin", "train_accuracy")[0].n == 20
    assert [point.at for point in found.curve("margin", "train_loss")] == [0.1, 0.01]  # as training goes
    x = [k * e for e in (2, 4) for k in range(10)]
    y = [k + e for e in (2, 4) for k in range(10)]
    assert half.value == pytest.approx(stats.pearsonr(x, y).statistic)


def test_the_study_of_petzka_has_the_same_numbers() -> None:
    """Figure 1 at paper scale: looks are kept to four digits, correlations were computed from all of them."""
    table = pd.read_csv(ROOT / "src/flatscope_papers/results/petzka2019-fig1/paper/table.csv", low_memory=False)
    table = table[table["variant"] == "plain"]  # the other one looked at losses of mini-batches, on rounded images
    looks = table[(table["kind"] == "look") & (table["init"] != "wide_normal")]
    limits = {"train_loss": [0.1, 0.01]}
    found = fs.atlas(looks, ["kappa_trace/fc3", "rho/fc2"], by=["batch", "init"], levels=limits, resamples=200)
    then = table[(table["kind"] == "correlation") & (table["reading"] == "σ = 0.1") & (table["target"] == "gap")]
    then = then[then["exclusion"] == "accuracy of at least 15 %"]  # the rule that every measure has
    ways = {
        "pearson": ("all networks", "pearson"), "spearman": ("all networks", "spearman"),
        "within_batch": ("within batch", "pearson"), "within_init": ("within init", "pearson"),
    }  # fmt: skip
    compared = 0
    for (column, (scope, kind)), measure in itertools.product(ways.items(), found.names("measure")):
        of_measure = then[then["measure"] == measure].set_index("rule")
        for axis, word in (("epoch", "epoch"), ("train_loss", "loss")):
            for point in found.curve(measure, axis, scope, kind):
                row = of_measure.loc[f"{word} {point.at:g}"]
                assert point.value == pytest.approx(row[column], abs=4e-3)
                assert point.n == row["networks"]
                compared += 1
    assert compared == 2 * 4 * 27
    assert found.turns("kappa_trace/fc3") == [(120.0, 180.0)]
    assert found.sentence("kappa_trace/fc3").startswith("kappa_trace/fc3: Pearson’s correlation +0.71 [0.6")


def test_a_turn_needs_a_band_beyond_zero_on_both_sides() -> None:
    clear = fs.atlas(followed(60), ["margin"], resamples=300)
    assert len(clear.turns("margin")) == 1
    first, last = clear.turns("margin")[0]
    assert first < 4 <= 8 <= last + 4
    assert "turns between epochs" in clear.sentence("margin")
    weak = fs.atlas(followed(60, turning=0.08), ["margin"], resamples=300)
    values = [point.value for point in weak.curve("margin")]
    assert min(values) < 0 < max(values), "it crosses zero, and yet"
    assert weak.turns("margin") == []
    assert "no settled turn" in weak.sentence("margin")
    for point in clear.curve("margin"):
        assert point.band_low < point.low < point.value < point.high < point.band_high


TRUE = {
    "pearson": lambda r: r,
    "spearman": lambda r: 6 / math.pi * math.asin(r / 2),
    "kendall": lambda r: 2 / math.pi * math.asin(r),
}


@pytest.mark.parametrize("kind", list(CORRELATIONS))
@pytest.mark.parametrize("networks", [12, 40])
def test_intervals_cover_the_correlation_of_the_population(kind: str, networks: int) -> None:
    """95 % of 400 populations, within four standard errors; of ranks of few networks more, never less."""
    draw, covered, repeats = np.random.default_rng(0), 0, 400
    one = np.zeros(networks, dtype=np.int64)
    for repeat in range(repeats):
        rho = (0.0, 0.5, 0.8)[repeat % 3]
        x, e = draw.normal(size=(2, networks))
        y = rho * x + math.sqrt(1 - rho**2) * e
        drawn = weighted_correlation(x, y, copies_in_resamples(one, 300, repeat), kind, one)[:, None]
        reach = correlation_intervals(drawn, np.array([networks]), np.array([1]), 0.95).reach[0]
        covered += abs(math.atanh(drawn[0, 0]) - math.atanh(TRUE[kind](rho))) < reach
    assert covered / repeats >= 0.907
    assert covered / repeats <= (0.994 if networks > 20 or kind == "pearson" else 1)


@pytest.mark.parametrize("kind", ["pearson", "kendall"])
def test_intervals_within_groups_cover_although_groups_are_small(kind: str) -> None:
    draw, covered, repeats = np.random.default_rng(1), 0, 400
    groups = np.repeat(np.arange(12), 4)
    for repeat in range(repeats):
        rho = (0.0, 0.6)[repeat % 2]
        x, e = draw.normal(size=(2, 48))
        y = rho * x + math.sqrt(1 - rho**2) * e + 5.0 * draw.normal(size=12)[groups]
        drawn = weighted_correlation(x, y, copies_in_resamples(groups, 300, repeat), kind, groups)[:, None]
        reach = correlation_intervals(drawn, np.array([48]), np.array([12]), 0.95).reach[0]
        covered += abs(math.atanh(drawn[0, 0]) - math.atanh(TRUE[kind](rho))) < reach
    assert 0.907 <= covered / repeats <= (0.994 if kind == "pearson" else 1)


def test_few_networks_have_the_wider_intervals_of_students_t() -> None:
    """By hand; and of 1,500 populations of 12 networks 95 % are covered, as they are not without that factor."""
    draw = np.random.default_rng(6)
    drawn = np.tanh(np.vstack([[0.3, -0.2], 0.4 * draw.normal(size=(500, 2))]))
    for networks, groups, free in ((12, 1, 10), (48, 12, 35), (400, 1, 398)):
        found = correlation_intervals(drawn, np.full(2, networks), np.full(2, groups), 0.9).reach
        far = np.quantile(np.abs(np.arctanh(drawn[1:]) - np.arctanh(drawn[0])), 0.9, axis=0)
        assert found == pytest.approx(far * stats.t(free).ppf(0.95) / stats.norm().ppf(0.95), rel=1e-9)
    one, covered, repeats = np.zeros(12, dtype=np.int64), 0, 1500
    for repeat in range(repeats):
        rho = (0.0, 0.5, 0.8)[repeat % 3]
        x, e = draw.normal(size=(2, 12))
        of_all = weighted_correlation(
            x, rho * x + math.sqrt(1 - rho**2) * e, copies_in_resamples(one, 200, repeat), "pearson", one
        )[:, None]
        reach = correlation_intervals(of_all, np.array([12]), np.array([1]), 0.95).reach[0]
        covered += abs(math.atanh(of_all[0, 0]) - math.atanh(rho)) < reach
    assert 0.95 <= covered / repeats <= 0.98


@pytest.mark.long
def test_the_band_covers_whole_curves_and_intervals_of_points_do_not() -> None:
    """Of 200 populations without any correlation: all 15 points of three measures inside of the band at once."""
    draw, band, each, by_chance = np.random.default_rng(2), 0, 0, 0
    for repeat in range(200):
        gaps = draw.normal(size=30)
        shared = draw.normal(size=(3, 30))
        rows = [
            {"network": k, "epoch": e, "gap": gaps[k]}
            | {measure: 0.6 * shared[n, k] + draw.normal() for n, measure in enumerate("abc")}
            for k in range(30) for e in range(5)
        ]  # fmt: skip
        found = fs.atlas(pd.DataFrame(rows), list("abc"), kinds=["spearman"], resamples=200, seed=repeat)
        frame = found.to_frame()
        band += bool(((frame["band_low"] < 0) & (frame["band_high"] > 0)).all())
        each += bool(((frame["low"] < 0) & (frame["high"] > 0)).all())
        by_chance += any(found.turns(measure) for measure in "abc")
    assert 0.89 <= band / 200 <= 0.999
    assert each / 200 < 0.75, "intervals of single points leave out zero somewhere far more often"
    assert by_chance == 0


def test_resamples_are_those_of_scipy_on_repeated_networks() -> None:
    draw = np.random.default_rng(3)
    x, y = np.round(draw.normal(size=(2, 15)), 1)
    one = np.zeros(15, dtype=np.int64)
    counts = copies_in_resamples(one, 20, 0)
    assert (counts.sum(1) == 15).all()
    for kind, twin in CORRELATIONS.items():
        found = weighted_correlation(x, y, counts, kind, one)
        for row, value in zip(counts, found, strict=True):
            again = np.repeat(np.arange(15), row.astype(int))
            assert value == pytest.approx(twin(x[again], y[again]).statistic, abs=1e-12)
    strata = np.repeat([0, 1, 2], 5)
    assert all((copies_in_resamples(strata, 20, 0)[:, strata == k].sum(1) == 5).all() for k in range(3))


def test_what_is_constant_has_no_correlation_and_large_means_cost_no_digits() -> None:
    draw, one = np.random.default_rng(4), np.zeros(12, dtype=np.int64)
    groups, x, y = np.repeat([0, 1], 6), *draw.normal(size=(2, 12))
    for kind in CORRELATIONS:
        assert not weighted_correlation(groups * 1e9, y, copies_in_resamples(groups, 9, 0), kind, groups).any()
        assert not weighted_correlation(np.full(12, 0.1), y, copies_in_resamples(one, 9, 0), kind, one).any()
    exact = weighted_correlation(x, y, copies_in_resamples(groups, 9, 0), "pearson", groups)
    shifted = weighted_correlation(x + 1e6 * groups + 1e7, y, copies_in_resamples(groups, 9, 0), "pearson", groups)
    assert shifted == pytest.approx(exact, abs=1e-7)


def without(column: str) -> pd.DataFrame:
    return followed().drop(columns=column)


@pytest.mark.parametrize(
    ("frame", "settings", "words"),
    [
        (without("epoch"), {}, "one of network, trial, name, key; epoch; gap, or test_loss"),
        (without("gap"), {}, "test_loss and train_loss, got no gap"),
        (without("network"), {}, "got no network"),
        (pd.DataFrame({"a": [1]}), {}, "got no network and no epoch and no gap"),
        (followed(), {"target": "gapp"}, "'gapp'. Did you mean gap"),
        (followed(), {"measures": ["kapa"]}, "'kapa'"),
        (followed(), {"measures": "margin"}, "a list of columns"),
        (followed(), {"by": ["batchsize"]}, "Did you mean batch"),
        (followed()[["network", "epoch", "gap"]], {}, "columns named after measures"),
        (followed().assign(margin=1.0), {"measures": ["margin"]}, "atlas, margin: expected a column that varies"),
        (followed().assign(gap=0.0), {}, "atlas, gap: expected a column that varies"),
        (followed().assign(margin="big"), {"measures": ["margin"]}, "a column of numbers"),
        (followed(9), {}, "10 networks or more, got 9"),
        (pd.concat([followed(), followed()]), {}, "one row per network and epoch"),
        (followed().assign(network=math.nan), {}, "rows without"),
        (followed()[["network", "gap", "rho"]].assign(epoch=range(189)), {}, "an epoch at which 10 networks were seen"),
        (followed().assign(batch=lambda f: f["epoch"]), {"by": ["batch"]}, "several along training"),
        (followed().assign(batch=math.nan), {"by": ["batch"]}, "a value for each network"),
        (followed().assign(batch=3), {"by": ["batch"]}, "values that several networks share, got one value"),
        (followed().assign(batch=lambda f: f["network"]), {"by": ["batch"]}, "a value of its own for every network"),
        (followed(), {"kinds": ["pearsn"]}, "pearson"),
        (followed(), {"resamples": 3}, "at least 100"),
        (followed(), {"levels": {"loss": [0.1]}}, "train_loss"),
        (followed(), {"confidence": 95}, "between 0 and 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(frame: pd.DataFrame, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(fs.InputError) as problem:
        fs.atlas(frame, **settings)
    assert words in str(problem.value)


def test_settings_of_which_every_combination_has_one_network_are_held_one_by_one() -> None:
    frame = followed(24)
    number = frame["network"].str[1:].astype(int)
    frame = frame.assign(row=number // 4, column=number % 4)
    found = fs.atlas(frame, ["margin"], by=["row", "column"], kinds=["pearson"], resamples=100)
    assert [scope for scope in found.names("scope") if scope.startswith("within")] == ["within row", "within column"]


def test_lost_networks_are_left_out_and_counted() -> None:
    frame = followed()
    frame.loc[frame["network"].isin(["n1", "n2"]), ["gap", "train_loss", "margin"]] = math.nan
    frame.loc[frame["network"] == "n3", "margin"] = math.inf
    before = frame.copy()
    found = fs.atlas(frame.assign(rho=2.0), kinds=["pearson"], resamples=100)
    pd.testing.assert_frame_equal(frame, before)
    last = found.curve("margin")[-1]
    there = frame[(frame["epoch"] == 16) & np.isfinite(frame["gap"]) & np.isfinite(frame["margin"])]
    assert (last.n, last.networks) == (len(there), 40)
    assert found.names("measure") == ["margin"]
    assert "rho: constant, left out" in found.meta["notes"][0]


def test_files_give_it_back_and_half_of_one_is_refused(tmp_path: Path) -> None:
    found = fs.atlas(followed(), by=["batch"], resamples=100)
    for ending in fs.Atlas.READABLE:
        found.save(tmp_path / f"a{ending}")
        assert fs.Atlas.load(tmp_path / f"a{ending}") == found
    found.save(tmp_path / "a.csv")
    assert len(pd.read_csv(tmp_path / "a.csv")) == len(found.to_frame())
    with pytest.raises(fs.InputError, match="the same points"):
        fs.Atlas(found.to_frame().iloc[1:], found.meta)
    with pytest.raises(fs.InputError, match="axis of an atlas"):
        fs.Atlas(found.to_frame().assign(axis="time"), found.meta)
    with pytest.raises(fs.InputError, match="Did you mean within batch"):
        found.curve("margin", scope="within batches")
    assert found.summary().count("\n") == 3  # two lines of the headline, a sentence for each measure
    assert fs.atlas(followed(), by=["batch"], resamples=100).to_frame().equals(found.to_frame())
    assert len(save_figures(found, tmp_path / "figures")) == 4


def test_a_store_of_followed_trials_is_read_with_its_settings(tmp_path: Path) -> None:
    from flatscope.cli.run_population import read_table_of_looks, rows_meeting_conditions

    frame = followed(12)
    store = Store(tmp_path / "store")
    for network, rows in frame.groupby("network"):
        config = {"train": {"batch_size": int(rows["batch"].iloc[0])}, "seed": str(network)}
        store.write(config, {"ok": 1}, frames={"followed": rows.drop(columns=["network", "batch", "init"])})
    looks = read_table_of_looks(str(tmp_path / "store"))
    assert len(looks) == len(frame)
    found = fs.atlas(looks, by=["train.batch_size"], kinds=["spearman"], resamples=100)
    twin = fs.atlas(frame, kinds=["spearman"], resamples=100)
    assert [p.value for p in found.curve("margin")] == pytest.approx(
        [p.value for p in twin.curve("margin")], nan_ok=True
    )
    assert rows_meeting_conditions(frame, ["batch=16", "init!=a"]).equals(
        frame[(frame["batch"] == 16) & (frame["init"] != "a")]
    )
    for condition, words in {
        "batch": "COLUMN=VALUE",
        "bach=3": "Did you mean batch",
        "batch=3": "batch has 16, 64",
    }.items():
        with pytest.raises(fs.InputError, match=words):
            rows_meeting_conditions(frame, [condition])
    Store(tmp_path / "empty")
    (tmp_path / "empty").mkdir(exist_ok=True)
    (tmp_path / "x.txt").write_text("x")
    for place, words in {
        "empty": "measured along training",
        "nowhere": "nothing there",
        "x.txt": ".parquet or .csv",
    }.items():
        with pytest.raises(fs.InputError, match=words):
            read_table_of_looks(str(tmp_path / place))
