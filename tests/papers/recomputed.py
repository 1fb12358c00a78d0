"""Claims of the papers' studies computed a second time from the saved tables, by other methods.

Nothing of `flatscope_papers` takes part but the loader of results: values are written out anew from the words of each
claim, intervals are bootstrap percentiles over networks (or seeds), resampled within strata where the claim has them.

    python tests/papers/recomputed.py        # prints every claim with both numbers and both decisions
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from recomputed_more import MORE
from second import RESULTS, Second, Statistic, Table, decided, kind, pearson, per, ranks_within, table


def errors_by_size(study: str, random: bool) -> Iterator[Second]:
    """Figures 1, 2, 22 and 23 of Zhang et al."""

    def few(t: Table) -> Any:
        return t["n"] < t["W"]

    def most(t: Table) -> Any:
        return t["n"] == t["n"].max()

    def less(t: Table, column: str) -> float:
        return float((per(column, "seed", most)(t) - per(column, "seed", few)(t)).mean())

    own = {"unit": ("seed",)}
    if random:
        yield Second(study, "chance", lambda t: per("test_error", "seed")(t).mean(), **own)
        yield Second(study, "rises", lambda t: less(t, "train_error"), **own)
        yield Second(study, "reaches_chance", lambda t: per("gap", "seed", most)(t).mean(), **own)
        return
    yield Second(study, "fitted", lambda t: t[few(t)]["train_error"].max())
    yield Second(study, "no_generalization", lambda t: per("gap", "seed", few)(t).mean(), **own)
    yield Second(study, "gap_closes", lambda t: less(t, "gap"), **own)
    yield Second(study, "generalizes", lambda t: per("gap", "seed", most)(t).mean(), **own)


def errors_by_width(study: str) -> Iterator[Second]:
    """Figures 3 and 24 of Zhang et al."""

    def grows(t: Table) -> float:
        over = t[t["W"] >= t["n"]]
        ends = [
            over[over["W"] == width].set_index("seed")["test_error"] for width in (over["W"].max(), over["W"].min())
        ]
        return float((ends[0] - ends[1]).mean())

    yield Second(study, "not_before", lambda t: t[t["W"] < t["n"]]["train_error"].mean(), unit=("seed",))
    yield Second(study, "no_overfitting", grows, unit=("seed",))


def petzka() -> Iterator[Second]:
    """Figures 1 to 6, of MNIST at a reduced scale, the ridge penalty, Table 1, feature robustness."""
    for number, measure in ((3, "kappa_trace"), (4, "rho_layer_sum"), (5, "rho")):
        for layer in ("fc1", "fc2", "fc3", "fc4"):
            yield Second(
                f"petzka2019-fig{number}",
                layer,
                pearson(f"{measure}/{layer}"),
                unit=("train.batch_size", "train.seed"),
                scale="small",
            )

    def last(t: Table) -> Table:
        t = t.dropna(axis="columns", how="all")
        seen = t[(t["kind"] == "look") & (t["epoch"] == 500) & (t["init"] != "wide_normal")]
        columns = ["network", "batch", "test_loss", "train_loss", "factor", *(c for c in seen if c.endswith("/fc3"))]
        seen = seen[columns]
        gap = (seen["test_loss"] - seen["train_loss"]).astype(float)
        factor = seen["factor"].astype(float) ** -2
        moved = {f"moved_{name}": seen[f"{name}/fc3"] * factor for name in ("layer_trace", "layer_max_eigenvalue")}
        return seen.assign(gap=gap, **moved)

    def within(t: Table) -> float:
        left = t[["kappa_trace/fc3", "gap"]].astype(float)
        return float((left - left.groupby(t["batch"]).transform("mean")).corr().iloc[0, 1])

    def fallen(t: Table) -> Table:
        t = t.dropna(axis="columns", how="all")
        seen = t[(t["kind"] == "look") & (t["below"] <= 0.1)].sort_values("epoch").groupby("network").head(1)
        gap = seen["test_loss"] - seen["train_loss"]
        return seen[["network", "kappa_trace/fc3", "kappa/fc3"]].assign(gap=gap.astype(float))

    one = "petzka2019-fig1"
    yield Second(one, "trace", pearson("kappa_trace/fc3"), fallen, ("network",))
    yield Second(one, "eigenvalue", pearson("kappa/fc3"), fallen, ("network",))
    yield Second(one, "trace_last_epoch", pearson("kappa_trace/fc3"), last, ("network",))
    yield Second(one, "trace_within", within, last, ("network",), ("batch",))
    for key, pick in (("highest", max), ("lowest", min)):
        yield Second(one, key, lambda t, pick=pick: _over_epochs(t, pick))
    for name, key in (("layer_trace", "hessian_trace_last"), ("layer_max_eigenvalue", "hessian_eigenvalue_last")):
        yield Second(
            "petzka2019-fig2", key, pearson(f"moved_{name}", size=True), lambda t: last(_looks(t)), ("network",)
        )
    yield Second("petzka2019-ridge", "printed", lambda t: _ridge(t, "kappa", 100))
    yield Second(
        "petzka2019-feature-robustness", "bound", lambda t: (t["worst"] / t["bound"])[t["delta"] == 0.001].max()
    )
    kept = ["kappa", "kappa_trace", "kappa_max", "kappa_sum", "kappa_trace_max", "kappa_trace_sum"]
    yield Second(
        "petzka2019-table1",
        "layers_kept",
        lambda t: t[(t["way"] == "layer") & t["measure"].isin(kept)]["change"].max(),
    )


def _looks(_: Table) -> Table:
    return table("petzka2019-fig1")


def _ridge(t: Table, column: str, times: int) -> float:
    due = 2 * t["squared_norm"] * t["top_moment"] * times
    return float((t[column] / due - 1).abs().max())


def _over_epochs(t: Table, pick: Callable[[list[float]], float]) -> float:
    seen = t[(t["kind"] == "look") & (t["init"] != "wide_normal") & (t["variant"] == "plain")]
    by_epoch = [part for _, part in seen.groupby("epoch") if len(part) >= 0.9 * 144]
    return pick([pearson("kappa_trace/fc3")(p.assign(gap=p["test_loss"] - p["train_loss"])) for p in by_epoch])


def yi() -> Iterator[Second]:
    """Balance, radius, both bounds, movements."""
    study, unit = "yi2019-balance", ("row",)

    def family(name: str) -> Callable[[Table], Table]:
        return lambda t: t[t["shape"] == name].reset_index(names="row")

    def apart(first: str, second: str) -> Statistic:
        return lambda t: float(
            np.log10(t[t["shape"] == first]["psi_epsilon"]).mean()
            - np.log10(t[t["shape"] == second]["psi_epsilon"]).mean()
        )

    yield Second(study, "balanced", ranks_within("balance", "psi_epsilon", "start"), family("family"), unit, ("start",))
    for key, x, y in (("balance_set", "balance", "psi_epsilon"), ("balance_error", "balance", "test_error")):
        yield Second(study, key, ranks_within(x, y, "floor"), family("floor"), unit, ("floor",))
    yield Second(study, "pole", ranks_within("pole", "psi_epsilon", "floor"), family("floor"), unit, ("floor",))
    for key, pair in (("width", ("wide", "narrow")), ("depth", ("deep", "shallow"))):
        rows = lambda t, pair=pair: t[t["shape"].isin(pair)].reset_index(names="row")  # noqa: E731
        yield Second(study, key, apart(*pair), rows, unit, ("shape",))
    yield Second("yi2019-radius", "radius", lambda t: (t["flips_0.98"] == 0).mean(), lambda t: _flips(t), ("seed",))
    yield Second(
        "yi2019-simulated-bound", "bound", lambda t: (t["left"] <= t["right"]).groupby(t["sigma"]).mean().min()
    )
    yield Second("yi2019-pac-bayes", "vacuous", _slope, unit=("network",))


def _flips(t: Table) -> Table:
    return t.assign(**{"flips_0.98": t[["flips_0.1", "flips_0.3", "flips_0.98"]].sum(axis=1)})


def _slope(t: Table) -> float:
    wide = t.pivot_table(index="network", columns="sigma", values="right")
    first, second = wide.columns[:2]
    return float((np.log(wide[second] / wide[first]) / np.log(second / first)).mean())


def neyshabur() -> Iterator[Second]:
    """Figure 4 and the smallest product."""

    def errors(t: Table) -> float:
        ends = [t[t["hidden"] == width].set_index("seed")["test_error"] for width in (32, t["hidden"].max())]
        return float((ends[0] - ends[1]).mean())

    def moves(column: str, first: int, until: int | None = None) -> Statistic:
        def found(t: Table) -> float:
            last = until or t["hidden"].max()
            ends = [np.log10(t[t["hidden"] == width].set_index("seed")[column]) for width in (last, first)]
            return float((ends[0] - ends[1]).mean())

        return found

    study, own = "neyshabur2017-fig4", {"rows": kind("network"), "unit": ("seed",)}
    yield Second(study, "test_error", errors, **own)
    claims = {
        "falls_l2_path_norm": ("l2_path_norm", 32, 128),
        "falls_spectral_norm": ("spectral_norm", 32, 128),
        "falls_l2_norm": ("l2_norm", 32, 128),
        "falls_l1_path_norm": ("l1_path_norm", 32, 128),
        "l2_path_keeps_falling": ("l2_path_norm", 128, None),
        "rises_l2_norm": ("l2_norm", 128, None),
        "rises_l1_path_norm": ("l1_path_norm", 128, None),
        "counted_l2_path_norm": ("l2_path_norm_capacity", 128, None),
        "counted_spectral_norm": ("spectral_norm_capacity", 128, None),
        "spectral_beyond_512": ("spectral_norm", 512, None),
    }
    for key, move in claims.items():
        yield Second(study, key, moves(*move), **own)
    yield Second("neyshabur2017-smallest-product", "never_below", lambda t: t["least_drawn"].min())
    yield Second("neyshabur2017-smallest-product", "attained", lambda t: (t["greedy"] - 1).abs().max())
    yield Second("neyshabur2017-smallest-product", "all_outputs", lambda t: t["all_outputs"].min())


def zhang() -> Iterator[Second]:
    """Errors by size and width, Figure 15, Conjecture 1, small problems."""
    for study, random in (("fig1", False), ("fig22", False), ("fig2", True), ("fig23", True)):
        yield from errors_by_size(f"zhang2017-{study}", random)
    for study in ("fig3", "fig24"):
        yield from errors_by_width(f"zhang2017-{study}")
    for key, column, beyond in (
        ("anywhere", "gap", False),
        ("beyond_samples", "gap", True),
        ("expected_error", "test_error", True),
    ):
        yield Second("zhang2017-fig15", key, _ends_over_sizes(column, beyond), unit=("seed",))
    study, networks, remarks = "zhang2017-conjecture1", kind("network"), kind("remark")
    for key, column in (("radius", "radius"), ("margin", "margin")):
        yield Second(
            study,
            key,
            _natural_over_random(column),
            lambda t: networks(t).reset_index(names="row"),
            ("row",),
            ("random",),
        )
    for key, x, y in (("together", "radius", "margin"), ("error", "margin", "test_error")):
        rows = lambda t: networks(t).reset_index(names="row")  # noqa: E731
        yield Second(study, key, ranks_within(x, y, "random"), rows, ("row",), ("random",))
    for key, column in (("one_pass", "one_pass"),):
        yield Second(
            study, key, lambda t, c=column: t[c].mean(), lambda t: remarks(t).reset_index(names="row"), ("row",)
        )
    further, rows = "zhang2017-further", lambda t: t.reset_index(names="row")
    logs = {
        "conjecture_2": ("robust_sgdl", "robust_sgd"),
        "conjecture_3": ("input_tolerance", "weight_tolerance"),
        "proposition_1": ("deep_test", "shallow_test"),
    }
    for key, (one, other) in logs.items():
        yield Second(further, key, lambda t, a=one, b=other: np.log10(t[a] / t[b]).mean(), rows, ("row",))
    yield Second(further, "complexity", lambda t: (t["deep_random"] - t["shallow_random"]).mean(), rows, ("row",))
    yield Second(further, "residual_norm", lambda t: t["norm_slope"].mean(), rows, ("row",))
    for key, column in {"stages": "deep_ratio", "factors": "factors", "hinge": "hinge", "same_end": "same_end"}.items():
        yield Second(further, key, lambda t, c=column: t[c].max())
    statements = "zhang2017-statements"
    yield Second(statements, "minimum_norm", lambda t: t[["gd", "sgd"]].max().max())
    yield Second(statements, "sandwich", lambda t: t["sandwich"].max())
    yield Second(statements, "open_path_weights", lambda t: t["below_epsilon"].mean(), rows, ("row",))


def _natural_over_random(column: str) -> Statistic:
    return lambda t: float(np.log10(t[t["random"] == 0][column]).mean() - np.log10(t[t["random"] == 1][column]).mean())


def _ends_over_sizes(column: str, beyond: bool) -> Statistic:
    """Largest less smallest network (beyond: the first with as many weights as samples), by size and seed, mean."""

    def found(t: Table) -> float:
        apart = []
        for n, part in t.groupby("n"):
            chosen = part[part["W"] >= n] if beyond else part
            if chosen["W"].nunique() > 1:
                ends = [
                    chosen[chosen["W"] == width].set_index("seed")[column]
                    for width in (chosen["W"].max(), chosen["W"].min())
                ]
                apart.append((ends[0] - ends[1]).mean())
        return float(np.mean(apart))

    return found


CLAIMS = [*yi(), *petzka(), *neyshabur(), *zhang(), *MORE]


if __name__ == "__main__":
    from flatscope_papers import load_result

    alike = 0
    for second in CLAIMS:
        saved = {f.claim.key: f for f in load_result(RESULTS / second.study / second.scale).findings}[second.key]
        ends = second.interval()
        verdict, stored = (
            decided(ends, saved.claim.holds),
            decided((saved.answer.low, saved.answer.high), saved.claim.holds),
        )
        alike += verdict == stored
        print(
            f"{second.study:32} {second.key:24} {saved.answer.value:10.4g} {second.value():10.4g} "
            f"[{ends[0]:.3g}, {ends[1]:.3g}] {stored} {'' if verdict == stored else verdict.upper()}"
        )
    print(f"{len(CLAIMS)} claims; {alike} decided alike")
    sys.exit(0)
