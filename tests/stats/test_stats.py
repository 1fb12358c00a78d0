"""Statistics against SciPy, hand-worked tables, simulated coverage and populations made to mislead."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats

from flatscope import stats
from flatscope.errors import InputError, UnknownNameError
from flatscope.stats import correlation

SCIPY = {"pearson": scipy_stats.pearsonr, "spearman": scipy_stats.spearmanr, "kendall": scipy_stats.kendalltau}
kinds = pytest.mark.parametrize("kind", sorted(SCIPY))


def sample(n: int = 40, seed: int = 0, slope: float = 0.7) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n)
    return x, slope * x + math.sqrt(1 - slope**2) * rng.standard_normal(n)


@kinds
@pytest.mark.parametrize("ties", [False, True])
def test_values_and_p_values_are_those_of_scipy(kind: str, ties: bool) -> None:
    x, y = sample()
    if ties:
        x, y = np.round(x), np.round(2 * y)
    found, known = stats.correlate(x, y, kind), SCIPY[kind](x, y)
    assert found.value == pytest.approx(known.statistic, abs=1e-14)
    assert found.p == pytest.approx(known.pvalue)
    assert found.low < found.value < found.high
    assert found.n == 40


@kinds
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("n", [4, 7, 25])
def test_the_interval_is_that_of_the_jackknife(kind: str, ties: bool, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Fisher's scale, from the correlations without each of the samples as SciPy gives them."""
    x, y = sample(n, seed=2)
    if ties:
        x, y = np.round(2 * x), np.round(2 * y)
    found = stats.correlate(x, y, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without one of four, another may be constant: no association is known then
        each = [SCIPY[kind](np.delete(x, i), np.delete(y, i)).statistic for i in range(n)]
    each = np.nan_to_num(each)
    error = math.sqrt((n - 1) / n * ((each - each.mean()) ** 2).sum()) / (1 - found.value**2)
    reach = scipy_stats.t.ppf(0.975, n - 2) * error
    assert math.atanh(found.high) - math.atanh(found.value) == pytest.approx(reach, rel=1e-9)
    assert math.atanh(found.value) - math.atanh(found.low) == pytest.approx(reach, rel=1e-9)
    monkeypatch.setattr(correlation, "BLOCK", 50)
    in_parts = stats.correlate(x, y, kind)
    assert (in_parts.low, in_parts.high) == pytest.approx((found.low, found.high), rel=1e-12)


@pytest.mark.parametrize("kind", ["spearman", "kendall"])
def test_rank_correlations_do_not_see_monotone_transforms(kind: str) -> None:
    x, y = sample()
    plain = stats.correlate(x, y, kind)
    bent = stats.correlate(np.exp(3 * x), y**3, kind)
    turned = stats.correlate(-np.exp(x), y, kind)
    assert (bent.value, bent.low, bent.high, bent.p) == pytest.approx((plain.value, plain.low, plain.high, plain.p))
    assert turned.value == pytest.approx(-plain.value)


def test_pearson_sees_monotone_transforms_but_not_affine_ones() -> None:
    x, y = sample()
    plain = stats.correlate(x, y).value
    assert stats.correlate(3 * x - 7, y).value == pytest.approx(plain)
    line = np.arange(10.0)
    assert stats.correlate(line, line).value == pytest.approx(1)
    assert stats.correlate(np.exp(line), line).value < 0.8


def test_kendall_by_hand() -> None:
    # x 1 2 3 4, y 1 3 2 4: of 6 pairs one (2,3) is discordant: (5 − 1)/6
    assert stats.correlate([1, 2, 3, 4], [1, 3, 2, 4], "kendall").value == pytest.approx(4 / 6)
    # x 1 1 2 3, y 1 2 3 3: pairs 12 tied in x, 34 tied in y, the other 4 concordant: 4/√(5·5)
    assert stats.correlate([1, 1, 2, 3], [1, 2, 3, 3], "kendall").value == pytest.approx(4 / 5)


@kinds
def test_permutation_p_value_of_all_pairings(kind: str) -> None:
    x, y = [1.0, 2.0, 3.0, 5.0, 9.0], [1.0, 2.0, 4.0, 3.0, 8.0]
    strength = SCIPY[kind](x, y).statistic
    every = [SCIPY[kind](x, list(order)).statistic for order in itertools.permutations(y)]
    upper = sum(value >= strength - 1e-12 for value in every) / 120
    found = stats.correlate(x, y, kind, permutations=1000)
    assert found.p == pytest.approx(2 * upper)  # all 120 pairings; SciPy doubles the smaller tail


@pytest.mark.parametrize(
    ("x", "y", "note"),
    [
        ([1, 1, 1, 1], [1, 2, 3, 4], "x is constant"),
        ([1, 2, 3, 4], [2, 2, 2, 2], "y is constant"),
        ([1], [2], "at least 2"),
        ([], [], "at least 2"),
        ([1, 2], [2, 4], "always lie on a line"),
        ([1, math.nan, 3], [1, 2, math.inf], "at least 2"),
    ],
)
def test_samples_without_a_correlation_say_why(x: list[float], y: list[float], note: str) -> None:
    found = stats.correlate(x, y)
    assert math.isnan(found.value)
    assert note in found.note
    assert note in str(found)


def test_perfect_agreement_has_no_interval_and_says_so() -> None:
    found = stats.correlate(range(10), range(10), "kendall")
    assert found.value == pytest.approx(1)
    assert math.isnan(found.low)
    assert "perfect agreement" in found.note
    assert "no interval from 3" in stats.correlate([1, 2, 3], [1, 3, 2]).note


def test_missing_values_are_dropped_and_counted() -> None:
    x, y = sample(20)
    holes = np.concatenate([x, [math.nan, 1.0, math.inf]]), np.concatenate([y, [1.0, math.nan, 2.0]])
    found, plain = stats.correlate(*holes), stats.correlate(x, y)
    assert (found.value, found.low, found.n, found.dropped) == (plain.value, plain.low, 20, 3)
    assert "(3 dropped)" in str(found)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="spearman"):
        stats.correlate([1, 2], [1, 2], "spearmen")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="as many x as y"):
        stats.correlate([1, 2], [1, 2, 3])
    with pytest.raises(InputError, match="between 0 and 1"):
        stats.correlate([1, 2], [1, 2], confidence=95)
    with pytest.raises(InputError, match="one number per sample"):
        stats.correlate([[1, 2]], [1, 2])
    frame = pd.DataFrame({"lr": [1, 2], "m": [1, 2], "gap": [1, 2]})
    with pytest.raises(UnknownNameError, match="column"):
        stats.granulated_kendall(frame, "m", "gab", ["lr"])
    with pytest.raises(InputError, match="list"):
        stats.granulated_kendall(frame, "m", "gap", [])
    with pytest.raises(InputError, match="list"):
        stats.correlation_table(frame, "m", "gap")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="from 0 to 1"):
        stats.holm([0.5, 1.5])


def grid() -> pd.DataFrame:
    """Four networks: width 1 or 2, optimiser a or b."""
    return pd.DataFrame(
        {
            "width": [1, 1, 2, 2],
            "optimiser": ["a", "b", "a", "b"],
            "gap": [1.0, 2.0, 3.0, 4.0],
            "measure": [1.0, 2.0, 5.0, 4.0],
        }
    )


def test_granulated_kendall_by_hand() -> None:
    # width moves: (a) 1→5 with 1→3: +1, (b) 2→4 with 2→4: +1, so ψ = 1
    # optimiser moves: (width 1) 1→2 with 1→2: +1, (width 2) 5→4 with 3→4: −1, so ψ = 0; Ψ = ½
    found = stats.granulated_kendall(grid(), "measure", "gap", ["width", "optimiser"])
    assert found.by_parameter["width"].value == 1.0
    assert found.by_parameter["optimiser"].value == 0.0
    assert found.average.value == 0.5
    # two pairs of four networks, off by +½ and −½: a standard error of √½, three degrees of freedom
    assert found.by_parameter["optimiser"].high == pytest.approx(math.tanh(3.182446 * math.sqrt(0.5)), abs=1e-6)
    assert found.by_parameter["optimiser"].low == -found.by_parameter["optimiser"].high
    assert "ψ(width)" in str(found)


@pytest.mark.parametrize("effect", [0.0, 1.0])
def test_the_interval_of_granulated_kendall_covers(effect: float) -> None:
    """Networks, not groups, are what is independent: each is in a pair of every hyper-parameter."""
    names, rng = list("abcd"), np.random.default_rng(0)
    settings = pd.DataFrame(list(itertools.product((0, 1), repeat=4)) * 2, columns=names)
    shared = effect * settings.sum(axis=1).to_numpy()
    found = []
    for _ in range(150):
        noise = rng.standard_normal((2, len(settings)))
        frame = settings.assign(measure=shared + noise[0], gap=shared + 0.5 * noise[0] + noise[1])
        found.append(stats.granulated_kendall(frame, "measure", "gap", names).average)
    truth = np.mean([one.value for one in found])
    held = np.mean([one.low <= truth <= one.high for one in found])
    assert held >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / len(found))
    assert held < 1.0


def test_sign_error_by_hand() -> None:
    # four pairs, one wrong: ¼; changes of width never wrong, of the optimiser one in two
    found = stats.sign_error(grid(), "measure", "gap", ["width", "optimiser"])
    assert found.mean.value == 0.25
    assert found.by_environment[("width", "1", "2")].value == 0.0
    assert found.worst.value == 0.5
    assert found.worst_environment == "optimiser a to b"
    # targets differ by 1 between optimisers and by 2 between widths
    assert stats.sign_error(grid(), "measure", "gap", ["width", "optimiser"], smallest_difference=1.5).mean.value == 0.0
    tied = grid().assign(measure=1.0)
    assert stats.sign_error(tied, "measure", "gap", ["width", "optimiser"]).mean.value == 0.5


def simpson(n_widths: int = 6, repeats: int = 6, seed: int = 0) -> pd.DataFrame:
    """The gap falls with the width, as does the measure; at a fixed width they go against each other."""
    rng = np.random.default_rng(seed)
    rows = []
    for width, lr in itertools.product(range(n_widths), range(repeats)):
        jitter = 0.01 * rng.standard_normal(2)
        rows.append((width, lr, 10.0 * width + lr + jitter[0], 10.0 * width - lr + jitter[1], width))
    return pd.DataFrame(rows, columns=["width", "lr", "gap", "measure", "width_again"])


def test_plain_kendall_misleads_where_the_granulated_one_does_not() -> None:
    frame = simpson()
    assert stats.correlate(frame["measure"], frame["gap"], "kendall").value > 0.6
    found = stats.granulated_kendall(frame, "measure", "gap", ["width", "lr"])
    assert found.by_parameter["width"].value == 1.0
    assert found.by_parameter["lr"].value == -1.0
    assert found.average.value == 0.0
    assert stats.sign_error(frame, "measure", "gap", ["width", "lr"]).worst.value == 1.0
    partial = stats.partial_correlation(frame, "measure", "gap", ["width"])
    assert partial.value < -0.5


def test_repeats_do_not_count_as_changes() -> None:
    frame = pd.DataFrame({"lr": [1, 1, 2, 2], "gap": [1.0, 2, 3, 4], "measure": [2.0, 1, 4, 3]})
    found = stats.granulated_kendall(frame, "measure", "gap", ["lr"])
    assert found.average.value == 1.0  # 1→3, 1→4, 2→3, 2→4 all agree; the pairs with equal lr are not asked
    assert stats.correlate(frame["measure"], frame["gap"], "kendall").value == pytest.approx(2 / 6)


def test_partial_correlation_is_the_textbook_formula_for_one_control() -> None:
    rng = np.random.default_rng(2)
    z = rng.standard_normal(50)
    frame = pd.DataFrame({"z": z, "x": z + rng.standard_normal(50), "y": 2 * z + rng.standard_normal(50)})
    xy, xz, yz = frame.corr().loc[["x", "x", "y"], ["y", "z", "z"]].to_numpy().diagonal()
    found = stats.partial_correlation(frame, "x", "y", ["z"], "pearson")
    assert found.value == pytest.approx((xy - xz * yz) / math.sqrt((1 - xz**2) * (1 - yz**2)))
    t = found.value * math.sqrt(47 / (1 - found.value**2))  # n − 2 − 1 = 47
    assert found.p == pytest.approx(2 * scipy_stats.t.sf(abs(t), 47))
    assert found.low < found.value < found.high


def test_partial_correlation_with_categories_removes_their_means() -> None:
    rng = np.random.default_rng(3)
    group = np.repeat(["a", "b", "c"], 10)
    shift = np.repeat([0.0, 30.0, -20.0], 10)
    x, y = rng.standard_normal(30), rng.standard_normal(30)
    frame = pd.DataFrame({"g": group, "x": x + shift, "y": y + shift})
    within = [v - np.repeat(v.reshape(3, 10).mean(1), 10) for v in (x, y)]
    found = stats.partial_correlation(frame, "x", "y", ["g"], "pearson")
    assert found.value == pytest.approx(scipy_stats.pearsonr(*within).statistic)
    assert stats.correlate(frame["x"], frame["y"]).value > 0.9
    none = stats.partial_correlation(frame, "x", "y", [], "spearman")
    assert none.value == pytest.approx(scipy_stats.spearmanr(frame["x"], frame["y"]).statistic)


def test_partial_correlation_of_a_measure_that_is_a_hyper_parameter_does_not_exist() -> None:
    found = stats.partial_correlation(simpson(), "width_again", "gap", ["width"])
    assert math.isnan(found.value)
    assert "is a function of width" in found.note
    few = stats.partial_correlation(simpson().head(3), "measure", "gap", ["width", "lr"])
    assert "no degree of freedom" in few.note


def test_information_is_nothing_for_a_measure_that_only_knows_a_hyper_parameter() -> None:
    rng = np.random.default_rng(5)
    frame = simpson().assign(gap=lambda f: f["width"] + 1.5 * rng.standard_normal(len(f)))
    found = stats.conditional_mutual_information(frame, "width_again", "gap", ["width", "lr"])
    assert found.value == pytest.approx(0, abs=1e-12)
    assert "width" in found.note
    unconditional = stats.conditional_mutual_information(frame, "width_again", "gap", ["width", "lr"], most=0)
    assert unconditional.value > 0.2


def test_information_is_whole_for_a_measure_that_knows_the_gap() -> None:
    rng = np.random.default_rng(6)
    frame = simpson().assign(gap=lambda f: rng.standard_normal(len(f)))
    frame["oracle"], frame["backwards"] = np.exp(frame["gap"]), -frame["gap"]
    for name in ("oracle", "backwards"):  # information does not ask for the direction
        assert stats.conditional_mutual_information(frame, name, "gap", ["width"]).value == pytest.approx(1)
    noise = frame.assign(noise=rng.standard_normal(len(frame)))
    assert stats.conditional_mutual_information(noise, "noise", "gap", ["width"]).value < 0.1


def test_information_by_hand() -> None:
    # No conditioning: 12 ordered pairs of the grid; the measure's sign is the gap's except for the pair (3, 4) and its
    # reverse. P(same +) = P(same −) = 5/12, P(+,−) = P(−,+) = 1/12, margins ½: I = log 2 − h(1/6), H(V_g) = log 2
    wrong = 1 / 6
    h = -(wrong * math.log(wrong) + (1 - wrong) * math.log(1 - wrong))
    found = stats.conditional_mutual_information(grid(), "measure", "gap", ["width"], most=0)
    assert found.value == pytest.approx(1 - h / math.log(2))
    # Given the width: pairs of unequal width are settled by it (H = 0); the four of equal width are (+,+), (−,−) at
    # width 1 and (+,−), (−,+) at width 2, so the sign of the measure settles the rest: I = H and the score is 1
    assert stats.conditional_mutual_information(grid(), "measure", "gap", ["width"], most=1).value == pytest.approx(
        1 - h / math.log(2)
    )
    constant = grid().assign(measure=1.0)
    assert stats.conditional_mutual_information(constant, "measure", "gap", ["width"]).value == 0.0


def test_holm_by_hand() -> None:
    # sorted 0.01 0.02 0.04, times 3 2 1: 0.03 0.04 0.04, running maximum the same; a missing one is no test
    assert stats.holm([0.04, 0.01, math.nan, 0.02]) == pytest.approx([0.04, 0.03, math.nan, 0.04], nan_ok=True)
    # times 2 1: 0.6 0.4 → running maximum 0.6 0.6; nothing above 1
    assert stats.holm([0.3, 0.4]) == pytest.approx([0.6, 0.6])
    assert stats.holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])
    assert len(stats.holm([])) == 0


def test_wilson_is_scipys() -> None:
    for k, n in ((0, 10), (3, 10), (10, 10), (57, 100)):
        known = scipy_stats.binomtest(k, n).proportion_ci(method="wilson")
        assert stats.wilson(k, n) == pytest.approx((known.low, known.high))
    assert stats.wilson(0, 0) == (0.0, 1.0)


def test_ranking_of_two_is_the_normal_distribution() -> None:
    found = stats.rank_with_uncertainty([1.0, 2.0], [0.6, 0.8], ["a", "b"])
    assert found.better[0, 1] == pytest.approx(scipy_stats.norm.cdf(1.0))  # difference 1, error √(0.36 + 0.64) = 1
    assert found.better + found.better.T == pytest.approx(np.ones((2, 2)))
    assert found.best[0] == pytest.approx(scipy_stats.norm.cdf(1.0), abs=0.02)
    assert list(found.low) == [1, 1]
    assert list(found.high) == [2, 2]
    assert found.to_frame()["name"].tolist() == ["a", "b"]
    other = stats.rank_with_uncertainty([1.0, 2.0], [0.6, 0.8], ["a", "b"], lower_is_better=False)
    assert other.to_frame()["name"].tolist() == ["b", "a"]


def test_exact_values_have_a_certain_ranking_and_ties_are_shared() -> None:
    found = stats.rank_with_uncertainty([3.0, 1.0, 2.0])
    assert list(found.rank) == list(found.low) == list(found.high) == [3, 1, 2]
    assert list(found.best) == [0, 1, 0]
    tied = stats.rank_with_uncertainty([1.0, 1.0, 5.0])
    assert list(tied.best) == [0.5, 0.5, 0]
    assert list(tied.rank) == [1.5, 1.5, 3]
    assert tied.better[0, 1] == 0.5
    assert "best with probability 0.50" in str(tied)
    with pytest.raises(InputError, match="finite"):
        stats.rank_with_uncertainty([1.0, math.nan])
    with pytest.raises(InputError, match="names"):
        stats.rank_with_uncertainty([1.0, 2.0], names=["a", "a"])


def test_correlation_table_has_every_measure_and_corrects_over_them() -> None:
    rng = np.random.default_rng(0)
    frame = simpson().assign(
        noise=lambda f: rng.standard_normal(len(f)), constant=1.0, holes=lambda f: f["gap"].where(f["lr"] > 0)
    )
    names = ["measure", "noise", "constant", "holes"]
    table = stats.correlation_table(frame, names, "gap", ["width", "lr"])
    kendall = table[table["statistic"] == "kendall"].set_index("measure")
    assert list(kendall.index) == names
    assert kendall["p_holm"].to_numpy() == pytest.approx(stats.holm(kendall["p"]), nan_ok=True)
    assert kendall.loc["holes", "dropped"] == 6
    assert kendall.loc["constant", "note"] == "x is constant"
    assert set(table["statistic"]) == {
        *SCIPY, "partial_pearson", "partial_spearman", "granulated_kendall", "granulated_kendall[width]",
        "granulated_kendall[lr]", "conditional_mutual_information", "sign_error", "robust_sign_error",
    }  # fmt: skip
    plain = stats.correlation_table(frame, ["noise"], "gap")
    assert plain["statistic"].tolist() == ["pearson", "spearman", "kendall"]
    with pytest.raises(UnknownNameError):
        stats.correlation_table(frame, ["measure", "nothing"], "gap")
