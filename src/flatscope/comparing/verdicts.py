"""The numbers of one measure over all networks, whether it may rank them, and why not."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatscope.comparing.losses import LOSS_DECIDES, loss_factor, loss_rule
from flatscope.comparing.remarks import Remark
from flatscope.formatting import measure_label, number_within_interval, readable_number
from flatscope.network_summary import NetworkSummary
from flatscope.registry import Declaration, declarations
from flatscope.rows import rows_of
from flatscope.significance import Readings, change_over_noise
from flatscope.table import Table

_KEYS = ["measure", "options"]
_LATE = re.compile("^not begun: |the time was up|stopped by the time limit")


@dataclass(frozen=True)
class Quantity:
    """A network-wide measure, with a value for every network."""

    measure: str  # its name
    options: str  # options that differ from the default, as JSON
    entry: Declaration | None  # its declaration; None for a measure that is not known here
    value: Mapping[str, float]  # by network; NaN where there is none
    stderr: Mapping[str, float]  # standard error of the estimator, by network
    data_stderr: Mapping[str, float]  # standard error from the samples being a draw; 0 where not known
    below: Mapping[str, float]  # how far below the value the interval begins that a search ended at; 0 where none is
    above: Mapping[str, float]  # how far above it ends
    searched: Mapping[str, bool]  # whether the value is what a search without an interval ended at
    reason: str = ""  # why some network has no value

    @property
    def names(self) -> list[str]:
        """The networks."""
        return list(self.value)

    @property
    def label(self) -> str:
        """Name and options, as people write them."""
        return measure_label(self.measure, self.options)

    @property
    def lower_is_better(self) -> bool:
        """Direction of the declaration."""
        return self.entry is None or self.entry.direction != "higher"

    def read(self, name: str) -> Readings:
        """The value of one network with its accuracy."""
        value, stderr, below, above = (column[name] for column in (self.value, self.stderr, self.below, self.above))
        return Readings.one(value, stderr, below, above, self.searched[name])

    def sampling_error(self, name: str) -> float:
        """Errors of estimator and data together, as if they were independent."""
        return math.hypot(self.stderr[name], self.data_stderr[name])

    def total_stderr(self, name: str) -> float:
        """The same with the interval of a search, as two standard errors to either side."""
        return math.hypot(self.sampling_error(name), (self.below[name] + self.above[name]) / 4)

    def text(self, name: str) -> str:
        """The value of one network for people, with its error."""
        value, below, above = self.value[name], self.below[name], self.above[name]
        if below + above > 0:
            return number_within_interval(value, value - below, value + above)
        error = self.sampling_error(name)
        return readable_number(value) + (f" ± {readable_number(error, 2)}" if error > 0 else "")


def network_wide_quantities(tables: Mapping[str, Table]) -> Iterator[Quantity]:
    """The network-wide values of all tables, in the order in which they first appear."""
    known, cells = declarations(), {name: _network_wide_values(table) for name, table in tables.items()}
    for measure, options in dict.fromkeys(key for cells_of_network in cells.values() for key in cells_of_network):
        entry = known.get(measure)
        measured = [cells[name].get((measure, options), _NO_CELL) for name in tables]
        if entry is not None and entry.per != "network" and all(math.isnan(cell[0]) for cell in measured):
            continue  # a refusal of a measure per layer or sample: there is nothing to rank
        columns: list[Any] = [dict(zip(tables, column, strict=True)) for column in zip(*measured, strict=True)]
        columns[-1] = next(filter(None, columns[-1].values()), "")  # the first reason
        yield Quantity(measure, options, entry, *columns)


_NO_CELL = (math.nan, 0.0, 0.0, 0.0, 0.0, False, "")


def _network_wide_values(table: Table) -> dict[tuple[str, str], tuple[Any, ...]]:
    """{(measure, options): value, both errors, the interval, searched, reason without a value} of a network."""
    frame = rows_of(table.to_frame(), "network").drop_duplicates(_KEYS)
    known = declarations()
    bracketed = [name in known and known[name].bracketed for name in frame["measure"]]
    read, errors = Readings.of(frame, bracketed), frame[["stderr", "data_stderr"]].fillna(0.0)
    numbers = (frame["value"], errors["stderr"], errors["data_stderr"], read.below, read.above, read.searched)
    columns = [*(column.tolist() for column in numbers), frame["reason"].where(frame["value"].isna(), "").tolist()]
    return dict(zip(frame[_KEYS].itertuples(index=False, name=None), zip(*columns, strict=True), strict=True))


# A training error that much above the lowest is that of a network which was not trained to the end; without classes, a
# loss so many times the lowest.
ERROR_APART, TIMES_THE_LOSS = 0.05, 3.0
# A difference between two copies that is no rounding: their weights were rounded to float32 when they were stored, and
# minima over samples lose most of those digits.
ROUNDING = 1e-2
EQUAL = 1e-9
OTHER_ARCHITECTURE = "depends on layers and weights, and the architectures differ"
RESCALED = "rescaling units changes this measure but not the function"
CLEAR_ERRORS = 1.96  # standard errors from which on a difference is called clear


@dataclass(frozen=True)
class SameFunction:
    """Two networks that give the same outputs.

    Attributes:
        first: name of one.
        second: name of the other.
        difference: largest difference of the outputs over the samples, relative to the largest output.
        samples: how many samples were looked at.
        how: "equal weights", "units rescaled", "units rescaled and exchanged", or "rewritten".
        around: whether the outputs agree with noise around the samples as well; else nothing is said of other inputs.
    """

    first: str
    second: str
    difference: float
    samples: int
    how: str
    around: bool = False

    def __str__(self) -> str:
        if self.how == "equal weights":
            return f"{self.second} has the weights of {self.first}"
        return (
            f"{self.second} is the same function as {self.first} written with other weights ({self.how}; outputs "
            f"equal to {self.difference:.1g} on {self.samples} samples{', and around them' if self.around else ''})"
        )


@dataclass(frozen=True)
class Verdict:
    """Judgement on the ranking of these networks by a measure.

    Attributes:
        word: "comparable", "not comparable", "equal", "no direction" or "no value".
        reason: why, in words.
        code: what decided, in one word: "value", "direction", "equal", "copy", "function", "architecture", "loss",
            "rescaling"; empty where nothing keeps it from ranking.
    """

    word: str
    reason: str = ""
    code: str = ""


def verdict_on_ranking(
    quantity: Quantity, networks: Mapping[str, NetworkSummary], copies: Sequence[SameFunction], loss: str
) -> Verdict:
    """Verdict on the ranking of these networks by a measure, with the first reason against it."""
    entry = quantity.entry
    missing = [name for name in quantity.names if not math.isfinite(quantity.value[name])]
    if missing:
        why = quantity.reason or "not a finite number"
        return Verdict("no value", f"{', '.join(missing)}: {why}", "value")
    if entry is None or entry.direction == "none":
        return Verdict(
            "no direction", "neither lower nor higher values are expected to go with generalization", "direction"
        )
    values = list(quantity.value.values())
    if max(values) - min(values) <= EQUAL * max(map(abs, values)):
        return Verdict("equal", "the same for all of them", "equal")
    moved = [pair for pair in copies if values_differ(quantity, pair.first, pair.second)]
    if moved:
        pair = max(moved, key=lambda pair: relative_difference(quantity, pair.first, pair.second))
        percent = 100 * relative_difference(quantity, pair.first, pair.second)
        reason = f"differs by {readable_number(percent, 2)} % between {pair.first} and its copy {pair.second}"
        return Verdict("not comparable", reason, "copy")
    if len(networks) - len({pair.second for pair in copies}) == 1:
        return Verdict("equal", "the same for all of them, which are one function", "function")
    if len({network.architecture for network in networks.values()}) > 1 and not entry.function_only:
        return Verdict("not comparable", OTHER_ARCHITECTURE, "architecture")
    if entry.falls_with_loss and not loss_rule(networks, loss).ranks:
        apart = f"the training losses are a factor of {readable_number(loss_factor(networks), 2)} apart"
        return Verdict("not comparable", f"{apart}, and {LOSS_DECIDES}", "loss")
    if any(network.rescalable for network in networks.values()) and "unit_scaling" not in entry.invariant_under:
        kept = " (rescaling whole layers does not)" if "layer_scaling" in entry.invariant_under else ""
        return Verdict("not comparable", f"{RESCALED}{kept}", "rescaling")
    return Verdict("comparable")


def values_differ(quantity: Quantity, one: str, other: str) -> bool:
    """True if two values differ by more than rounding, estimation and search explain."""
    scale = max(abs(quantity.value[one]), abs(quantity.value[other]))
    return bool(change_over_noise(quantity.read(one), quantity.read(other), scale=scale, rounding=ROUNDING)[0] > 1)


def relative_difference(quantity: Quantity, one: str, other: str) -> float:
    """Difference of two values, relative to the larger of them."""
    scale = max(abs(quantity.value[one]), abs(quantity.value[other]))
    return abs(quantity.value[one] - quantity.value[other]) / scale if scale else 0.0


def remarks_on_slopes(networks: Mapping[str, NetworkSummary]) -> list[Remark]:
    """Warnings, a sentence each, where networks are not at a minimum, or rest where a constant output does as well."""
    words = {name: summary.minimum[1] if summary.tells_nothing else summary.step for name, summary in networks.items()}
    steep = [f"{name} ({words[name]})" for name, network in networks.items() if network.on_a_slope]
    resting = [f"{name} ({words[name]})" for name, summary in networks.items() if summary.minimum[0] == "open"]
    remarks = []
    if steep:
        text = f"Still on a slope: {', '.join(steep)}. Curvature there describes where training stopped, not a minimum."
        remarks.append(Remark("slope", text))
    if resting:
        text = f"No better than a constant: {', '.join(resting)}. Train before flatness is read."
        remarks.append(Remark("constant", text))
    return remarks


def remarks_on_undertrained_networks(networks: Mapping[str, NetworkSummary]) -> list[Remark]:
    """Networks that fit the training set far less well than the best of them, a sentence each.

    By the training error; by the loss where there are no classes.
    """
    classes = not any(math.isnan(network.error) for network in networks.values())
    what = "error" if classes else "loss"
    score: dict[str, float] = {name: getattr(network, what) for name, network in networks.items()}
    best = min(score, key=lambda name: score[name])
    limit = score[best] + ERROR_APART if classes else score[best] * TIMES_THE_LOSS
    return [
        Remark(
            "fit",
            f"{name} fits the training set far less well than {best} (training {what} {value:.3g} against "
            f"{score[best]:.3g}): its place says how far it was trained as well as how flat it is.",
        )
        for name, value in score.items()
        if value > limit
    ]


def remarks_on_time_limit(measured: Iterable[Quantity], not_looked: Sequence[str]) -> list[Remark]:
    """Sentence on what the budget of time left no room for.

    Args:
        measured: every measure that was asked for.
        not_looked: networks of which nobody looked whether they are at a minimum.
    """
    asked = list(measured)
    late = [each for each in asked if _LATE.search(each.reason) and not all(map(math.isfinite, each.value.values()))]
    words = [f"{len(late)} of {len(asked)} measures were not done for all networks"] if late else []
    if not_looked:
        who = f"{', '.join(not_looked)} {'is' if len(not_looked) == 1 else 'are'}"
        words.append(f"whether {who} at a minimum was not looked for")
    return [Remark("time", f"Out of time: {', and '.join(words)}. Give it a larger budget.")] if words else []
