"""More claims computed a second time from the saved tables; see `recomputed`, which has the means for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats
from second import Second, Statistic, Table, kind, pearson, per, table

NORMS = ("l2_norm", "l1_path_norm", "l2_path_norm", "spectral_norm")
SEED = {"unit": ("seed",)}


def decades(t: Table, column: str) -> Table:
    """log10 of random over true labels: a row per seed, a column per size."""
    both = t.set_index(["seed", "size", "labels"])[column].map(np.log10).unstack("labels")
    return (both["random"] - both["true"]).unstack("size")


def steepness(y: Table) -> pd.Series:
    """Least-squares slope of every row against log10 of the sizes that its columns are."""
    x = np.log10(y.columns.to_numpy(float))
    return (y * (x - x.mean())).sum(axis=1) / ((x - x.mean()) ** 2).sum()


def growth(t: Table, column: str, labels: str) -> pd.Series:
    """Exponent by which a measure grows with the samples, by seed."""
    return steepness(t[t["labels"] == labels].pivot(index="seed", columns="size", values=column).map(np.log10))


def all_norms(labels: str) -> Statistic:
    return lambda t: float(np.mean([growth(t, name, labels).mean() for name in NORMS]))


REFINED = "kl_at_0.05_refined"


def neyshabur_labels() -> Iterator[Second]:
    """Figures 1 to 3; of the first two also those at a reduced scale: two seeds are too few to draw again."""
    yield from _true_and_random_labels(scale="small", **SEED)
    yield from _true_and_random_labels()
    yield Second("neyshabur2017-fig1", "zero_error", lambda t: t["train_error"].max())
    three, networks = "neyshabur2017-fig3", {"rows": kind("network")}
    for name in NORMS:
        yield Second(three, f"follows_{name}", by_rank(name, "test_error"), **networks)
    yield Second(three, "sharpness", by_rank("sharpness", "test_error"), **networks)
    yield Second(three, "kl", by_rank(REFINED, "test_error"), **networks)
    within = lambda t: t.groupby("seed")[["confused", "test_error"]].apply(by_rank("confused", "test_error")).mean()  # noqa: E731
    yield Second(three, "test_error", within, **networks)


def _true_and_random_labels(**given: Any) -> Iterator[Second]:
    """Norms and perturbations of the networks of Figures 1 and 2, by seed."""
    one = "neyshabur2017-fig1"
    for name in NORMS:
        yield Second(one, f"higher_{name}", lambda t, c=name: decades(t, c).min(axis=1).mean(), **given)
        yield Second(one, f"grows_{name}", lambda t, c=name: steepness(decades(t, c)).mean(), **given)

    def pronounced(t: Table) -> float:
        slopes = pd.DataFrame({name: steepness(decades(t, name)) for name in NORMS})
        first = slopes[["l2_norm", "l2_path_norm"]].min(axis=1)
        return float((first - slopes[["l1_path_norm", "spectral_norm"]].max(axis=1)).mean())

    yield Second(one, "most_pronounced", pronounced, **given)
    yield Second(one, "linear", all_norms("random"), **given)
    yield Second(one, "small_increase", all_norms("true"), **given)
    two, own = "neyshabur2017-fig2", {"rows": kind("network"), **given}
    levels = [f"kl_at_{level}_on_grid" for level in ("0.02", "0.05", "0.1", "0.5")]
    yield Second(two, "large", lambda t: decades(t, "sharpness")[t["size"].max()].mean(), **own)
    yield Second(two, "small", lambda t: decades(t, "sharpness")[t["size"].min()].mean(), **own)
    yield Second(two, "curves", lambda t: np.mean([decades(t, name).mean(axis=1).mean() for name in levels]), **own)
    yield Second(two, "fixed", lambda t: decades(t, REFINED).min(axis=1).mean(), **own)
    yield Second(two, "moves", lambda t: (growth(t, REFINED, "random") - growth(t, REFINED, "true")).mean(), **own)


def by_rank(x: str, y: str) -> Statistic:
    """Spearman's correlation from ranks and squared distances where there are no ties, else from Pearson's of ranks."""

    def found(t: Table) -> float:
        a, b = stats.rankdata(t[x]), stats.rankdata(t[y])
        n = len(a)
        if len(set(a)) == len(set(b)) == n:
            return float(1 - 6 * ((a - b) ** 2).sum() / (n * (n**2 - 1)))
        return float(np.corrcoef(a, b)[0, 1])

    return found


def neyshabur_theory() -> Iterator[Second]:
    """Conditions of a learned network, and Theorem 1."""
    five = "neyshabur2017-fig5"

    def mean_log(column: str) -> Statistic:
        return lambda t: float(np.exp(np.log(t[column]).mean()))

    learned = lambda t: t[t["mu"].notna()]  # noqa: E731
    columns = {"mu": "mu", "c2": "c2_floor_pixels/max", "c2_as_stated": "c2_any_unit/max"}
    for key, column in {**columns, "c3": "c3_figure", "c3_as_stated": "c3_condition"}.items():
        yield Second(five, key, mean_log(column), rows=learned, **SEED)

    def ratio(column: str) -> Statistic:
        def found(t: Table) -> float:
            both = t[t["mu"].notna()].pivot(index="seed", columns="weights", values=column).map(np.log)
            return float(np.exp((both["learned"] - both["initial"]).mean()))

        return found

    for key in ("all", "inner", "edge"):
        yield Second("neyshabur2017-fig6", key, ratio(f"inverse_mu_median/{key}"))
    yield Second("neyshabur2017-fig7", "constant", ratio("c2_floor_pixels/max"))
    yield Second("neyshabur2017-fig8", "figure", ratio("c3_figure"))
    yield Second("neyshabur2017-fig8", "condition", ratio("c3_condition"))
    study, networks, noise = "neyshabur2017-theorem1", kind("network"), kind("noise")
    whole = lambda t: (t["rise"] <= t["bound"]).groupby(t["network"]).all().mean()  # noqa: E731
    yield Second(study, "theorem", whole, rows=noise)
    yield Second(study, "split", lambda t: t["split"].max(), rows=noise)
    yield Second(study, "lemma_2", lambda t: t["switched"].sum() / len(t), rows=networks)
    yield Second(study, "rescaled", lambda t: np.log10(t["sharpness_ratio"]).mean(), rows=networks)
    yield Second(study, "shuffled", lambda t: np.log10(t["shuffled_ratio"]).mean(), rows=networks)


def yi_more() -> Iterator[Second]:
    """Basis paths, invariance, radius, Figure 3."""
    study = "yi2019-basis-paths"
    largest = {
        "dependent": "figure_1_error",
        "path_sum": "sum_error",
        "bijection": "inverse_error",
        "lemma": "lemma_error",
    }
    for key, column in largest.items():
        yield Second(study, key, lambda t, c=column: t[c].max())
    yield Second(study, "count", lambda t: (t["rank"] - t["basis"]).abs().max())
    yield Second(study, "degrees", lambda t: (t["degree"] == t["layers"]).mean())
    weights = ["epsilon_flatness", "hessian_trace", "expected_flatness"]

    def relative(t: Table, columns: list[str], way: Callable[[Table], Any]) -> Table:
        first = t[t["way"] == "as trained"].set_index("network")[columns]
        moved = t[way(t)].set_index("network")[columns]
        return (moved / first.reindex(moved.index) - 1).abs()

    def moves(t: Table) -> float:
        rescaled = relative(t, weights, lambda t: t["way"].str.startswith("rescaled"))
        return float(rescaled.groupby("network").median().min(axis=1).min())

    yield Second("yi2019-invariance", "weights_move", moves)
    yield Second("yi2019-radius", "first_layer", lambda t: (t["first_layer"] == 0).mean())
    yield Second("yi2019-radius", "difference", lambda t: t["ratio"].max())
    networks = {"rows": lambda t: t[t["row"] == "network"].reset_index(names="one"), "scale": "small"}
    study, own = "yi2019-fig3", {**networks, "unit": ("one",), "strata": ("batch",)}

    def between(column: str, log: bool = False) -> Statistic:
        def found(t: Table) -> float:
            values = np.log10(t[column].astype(float)) if log else t[column]
            means = values.groupby(t["batch"]).mean()
            return float((means[256] - means[16]) if log else means[16] - means[256])

        return found

    yield Second(study, "generalizes", between("test_accuracy"), **own)
    yield Second(study, "flatter", between("rise_psi", log=True), **own)
    yield Second(study, "related", lambda t: -by_rank("rise_psi", "test_accuracy")(t), **networks)

    def lower(t: Table) -> float:
        wide = t.pivot(index="seed", columns="batch", values="rise_weights")
        return float((wide[16] < wide[256]).mean())

    yield Second(study, "weight_space", lower, **networks)


def petzka_more() -> Iterator[Second]:
    """Figure 2 at a training loss of 0.1, Table 1."""

    def fallen(_: Table) -> Table:
        t = table("petzka2019-fig1").dropna(axis="columns", how="all")
        seen = t[(t["kind"] == "look") & (t["below"] <= 0.1)].sort_values("epoch").groupby("network").head(1).copy()
        seen["gap"] = (seen["test_loss"] - seen["train_loss"]).astype(float)
        for name in ("layer_trace", "layer_max_eigenvalue"):
            seen[f"moved_{name}"] = seen[f"{name}/fc3"] / seen["factor"].astype(float) ** 2
        return seen

    for name, key in (("layer_trace", "trace"), ("layer_max_eigenvalue", "eigenvalue")):
        after, before = pearson(f"moved_{name}", size=True), pearson(f"{name}/fc3", size=True)
        yield Second("petzka2019-fig2", f"hessian_{key}", after, fallen, ("network",))
        drop = lambda t, a=after, b=before: b(t) - a(t)  # noqa: E731
        yield Second("petzka2019-fig2", f"{key}_drops", drop, fallen, ("network",))

    def least_moved(way: str, *measures: str) -> Statistic:
        def found(t: Table) -> float:
            own = t[(t["way"] == way) & t["measure"].isin(measures)]
            return float(own.groupby(["network", "measure"])["change"].median().min())

        return found

    own = "petzka2019-table1"
    yield Second(own, "not_by_neurons", least_moved("neuron", "kappa", "kappa_trace"))
    hessian = ("layer_max_eigenvalue", "layer_trace")
    yield Second(own, "hessian_moves", least_moved("layer", *hessian))


def zhang_more() -> Iterator[Second]:
    """Errors, noise on images, regions between minima, radii, gradients, chains."""
    study, wide = "zhang2017-fig20", {"unit": ("one",), "strata": ("labels",)}
    numbered = lambda t: t.assign(one=t["labels"] + t["network"].astype(str))  # noqa: E731

    def worse(most: float) -> Statistic:
        def found(t: Table) -> float:
            some = t[(t["gamma"] > 0) & (t["gamma"] <= most)].groupby("labels")["error"].mean()
            return float(some["random"] - some["natural"])

        return found

    yield Second(study, "worse", worse(np.inf), rows=numbered, **wide)
    yield Second(study, "worse-near", worse(1.0), rows=numbered, **wide)
    noisy = lambda t: t[(t["labels"] == "random") & (t["gamma"] > 0) & (t["gamma"] <= 1)]["error"].mean()  # noqa: E731
    yield Second(study, "random-low", noisy, rows=numbered, **wide)

    def at_end(column: str) -> Statistic:
        def found(t: Table) -> float:
            ends = t[t["epoch"] == t.groupby(["seed", "polynomial"])["epoch"].transform("max")]
            means = ends.groupby(ends["polynomial"].astype(bool))[column].mean()
            return float(means[True] - means[False])

        return found

    for key, column in (("training", "train_error"), ("testing", "test_error")):
        yield Second("zhang2017-fig21", key, at_end(column), **SEED)

    def better(t: Table) -> float:
        late = t[t["epoch"] > t["epoch"].max() - 5]
        means = late.groupby("kind")["test_error"].mean()
        return float(means["SGDL"] - means["SGD"])

    yield Second("zhang2017-fig6", "better_validation", better, **SEED)
    for number in (13, 14):
        few = lambda t: t[t["n"] == t["n"].min()].sort_values("epoch").groupby("seed").tail(1)  # noqa: E731
        yield Second(f"zhang2017-fig{number}", "little_generalization", lambda t: t["gap"].mean(), rows=few, **SEED)
    ends = lambda t: per("test_error", "n", lambda t: t["W"] == t["W"].max())(t)  # noqa: E731
    yield Second("zhang2017-fig15", "more_data", lambda t: ends(t).iloc[-1] - ends(t).iloc[0], **SEED)

    def best(t: Table) -> float:
        lowest = t.loc[t.groupby("seed")["test_error"].idxmin()]
        return float(np.log10(lowest["W"] / lowest["n"]).mean())

    yield Second("zhang2017-fig3", "best_at_boundary", best, **SEED)
    trained = {"rows": lambda t: t[t["batch"] == 100], "unit": ("network",)}
    yield Second("zhang2017-fig5", "gaussian", lambda t: t["gaussian"].mean(), **trained)

    def order(t: Table) -> float:
        logs = np.log10(t["radius"]).groupby([t["moved"], t["labels"]]).mean().unstack("labels")
        return float((logs["natural"] - logs["random"]).min())

    yield Second(
        "zhang2017-table1", "order_cifar", order, rows=lambda t: t[(t["set"] == "cifar") & (t["objective"] == "loss")]
    )
    yield Second("zhang2017-fig11", "wider", lambda t: region(t, "natural") - region(t, "random"))
    yield Second("zhang2017-fig12", "regions", lambda t: region(t, "natural"))
    remarks = kind("remark")
    yield Second("zhang2017-conjecture1", "torus", lambda t: (t["torus_error"] - t["plain_error"]).mean(), rows=remarks)
    yield Second(
        "zhang2017-conjecture1", "nearest_gap", lambda t: (t["nearest_test"] - t["nearest_train"]).mean(), rows=remarks
    )
    for name in ("small_alexnet", "small_inception"):
        before = {"small_alexnet": "mlp_1x512", "small_inception": "small_alexnet"}[name]
        gain = lambda t, a=name, b=before: per("test_accuracy", "network")(t)[a] - per("test_accuracy", "network")(t)[b]  # noqa: E731
        yield Second("zhang2017-table2", f"better/{name}", gain, scale="small")


def region(t: Table, labels: str) -> float:
    """Share of mixtures nearest to a corner (ties count for each) with 90 % right, mean over corners and triangles."""
    own = t[t["labels"] == labels]
    shares = []
    for corner in ("lambda1", "lambda2", "lambda3"):
        most = own[["lambda1", "lambda2", "lambda3"]].max(axis=1)
        near = own[own[corner] >= most - 1e-6]
        shares.append((near["accuracy"] >= 0.9).groupby(near["triangle"]).mean())
    return float(pd.concat(shares, axis=1).mean(axis=1).mean())


MORE = [*neyshabur_labels(), *neyshabur_theory(), *yi_more(), *petzka_more(), *zhang_more()]
