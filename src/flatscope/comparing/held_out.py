"""Whether test errors differ by more than chance, by paired tests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.isolation import untouched_randomness
from flatscope.leaks import Overlap
from flatscope.network_summary import NetworkSummary
from flatscope.sample_digests import order_digest
from flatscope.samples import Samples

SIGNIFICANT = 0.05
CLEARLY = 3  # standard errors by which a test error is lower than that of a constant output


@dataclass(frozen=True)
class Difference:
    """Excess of a network's test error or loss over that of the best one.

    Attributes:
        apart: its mean test error, or test loss without classes, less that of the best.
        stderr: standard error of the difference; paired where both saw the same samples in the same order.
        p: of no difference, two-sided; adjusted for all pairs of networks (Bonferroni).
        paired: whether the samples could be matched; else as if the networks erred independently of each other.
    """

    apart: float
    stderr: float
    p: float
    paired: bool

    @property
    def clear(self) -> bool:
        """True if the difference is more than chance."""
        return self.p < SIGNIFICANT


@dataclass(frozen=True)
class HeldOut:
    """The test errors of several networks against the lowest of them; losses where there are no classes.

    Attributes:
        what: "error" or "loss".
        n: number of test samples.
        best: the network with the lowest.
        values: of every network.
        errors: standard error of each, over the samples.
        differences: of every other network from the best.
        constant: test error of the best output that does not depend on the inputs; NaN where nobody asked.
    """

    what: str
    n: int
    best: str
    values: Mapping[str, float]
    errors: Mapping[str, float]
    differences: Mapping[str, Difference]
    constant: float = math.nan

    @property
    def useful(self) -> list[str]:
        """Networks whose test error is clearly lower than that of a constant output."""
        chance = math.sqrt(self.constant * (1 - self.constant) / self.n)
        apart = {name: self.constant - value for name, value in self.values.items()}
        return [name for name in self.values if apart[name] > CLEARLY * math.hypot(self.errors[name], chance)]

    @property
    def level(self) -> list[str]:
        """The best network and those that are not clearly worse, in the order given."""
        return [name for name in self.values if name == self.best or not self.differences[name].clear]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"constant": None if math.isnan(self.constant) else self.constant}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """Test errors from the dictionary that `to_dict` gave."""
        differences = {name: Difference(**fields) for name, fields in given["differences"].items()}
        constant = math.nan if given.get("constant") is None else given["constant"]
        return cls(**{**given, "differences": differences, "constant": constant})


def overlap_remarks(meta: Mapping[str, Any]) -> list[str]:
    """The remark of a stored overlap, if there is one."""
    overlap = Overlap.from_meta(meta)
    return [overlap.remark] if overlap and overlap.remark else []


def paired_test_errors(
    contexts: Mapping[str, Context], summaries: Mapping[str, NetworkSummary], distinct: list[str]
) -> HeldOut | None:
    """Paired tests between the best and every other network on the test samples; None without any.

    Args:
        contexts: the networks on their data.
        summaries: with their test errors.
        distinct: one network of every function: copies are no further chances.
    """
    first = contexts[distinct[0]].problem
    if first.test is None or len(distinct) < 2:
        return None
    what = "error" if first.classification else "loss"
    read = {name: getattr(summaries[name], f"test_{what}") for name in distinct}
    if not all(map(math.isfinite, read.values())):
        return None
    samples = {name: _test_values_per_sample(contexts[name], what) for name in distinct}
    generators = [generator for name in distinct for generator in contexts[name].problem.generators]
    with untouched_randomness(generators):
        again = [contexts[name].problem.test for name in distinct for _ in range(2)]
        paired = len({order_digest(each) for each in again if each is not None}) == 1
    best = min(read, key=lambda name: read[name])
    pairs = len(distinct) * (len(distinct) - 1) // 2
    differences = {
        name: difference_of_test_errors(samples[best], samples[name], paired=paired, pairs=pairs)
        for name in distinct
        if name != best
    }
    errors = {name: float(values.std(ddof=1) / math.sqrt(len(values))) for name, values in samples.items()}
    asked = what == "error" and any(summaries[name].untrained for name in distinct)
    with untouched_randomness(generators):
        constant = _constant_error(first.test) if asked else math.nan
    return HeldOut(what, first.test.n, best, read, errors, differences, constant)


def _constant_error(samples: Samples) -> float:
    """Share of the samples that are not of the class that most are of."""
    targets = torch.cat([labels.reshape(len(labels), -1) for _, labels in samples.batches()])
    classes = targets.argmax(1) if targets.shape[1] > 1 else targets.flatten()
    return 1 - int(classes.unique(return_counts=True)[1].max()) / len(classes)


def unpaired_test_errors(summaries: Mapping[str, NetworkSummary], n_test: int = 0) -> HeldOut | None:
    """The same of test errors alone, as if networks erred independently; None where some are not known."""
    rates = {name: summary.test_error for name, summary in summaries.items()}
    n = min(summary.n_test or n_test for summary in summaries.values())
    if len(rates) < 2 or not n or not all(map(math.isfinite, rates.values())):
        return None
    samples = {name: np.repeat([1.0, 0.0], [round(rate * n), n - round(rate * n)]) for name, rate in rates.items()}
    best, pairs = min(rates, key=lambda name: rates[name]), len(rates) * (len(rates) - 1) // 2
    differences = {
        name: difference_of_test_errors(samples[best], samples[name], paired=False, pairs=pairs)
        for name in rates
        if name != best
    }
    errors = {name: math.sqrt(rate * (1 - rate) / n) for name, rate in rates.items()}
    return HeldOut("error", n, best, rates, errors, differences)


def difference_of_test_errors(best: np.ndarray, other: np.ndarray, *, paired: bool, pairs: int = 1) -> Difference:
    """The difference of two networks' means over test samples, and how likely chance makes it as large.

    Args:
        best: per-sample losses, or 1 where a sample is misclassified and 0 elsewhere, of the better network.
        other: of the other.
        paired: whether entries of the same place are of the same sample.
        pairs: of networks that are compared, by which p is multiplied.
    """
    from scipy import stats  # SciPy's statistics take as long to load as torch

    apart, n = float(other.mean() - best.mean()), len(best)
    counted = bool(np.isin(best, (0, 1)).all() and np.isin(other, (0, 1)).all())
    if paired:
        moved = other - best
        stderr = float(moved.std(ddof=1) / math.sqrt(n)) if n > 1 else math.inf
        worse, better = int((moved > 0).sum()), int((moved < 0).sum())
        if counted:  # McNemar's test, exact
            p = float(stats.binomtest(worse, worse + better).pvalue) if worse + better else 1.0
        else:
            p = float(stats.ttest_1samp(moved, 0.0).pvalue) if stderr > 0 else float(apart == 0)
    else:
        stderr = math.hypot(*(values.std(ddof=1) / math.sqrt(n) for values in (best, other))) if n > 1 else math.inf
        if counted:
            table = [[int(values.sum()), n - int(values.sum())] for values in (best, other)]
            p = float(stats.fisher_exact(table).pvalue)
        else:
            p = float(stats.ttest_ind(best, other, equal_var=False).pvalue) if stderr > 0 else float(apart == 0)
    return Difference(apart, stderr, min(1.0, 1.0 if math.isnan(p) else p * pairs), paired)


def _test_values_per_sample(context: Context, what: str) -> np.ndarray:
    scores = context.scores("test")
    values: Tensor = scores.losses if what == "loss" or scores.margins is None else (scores.margins <= 0).double()
    return values.numpy()
