"""Comparison: the measures of several networks, the ranking they give, and which of them can rank these networks."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Self

import pandas as pd

from flatscope.charts import Bars
from flatscope.comparing import rankings
from flatscope.comparing.conclusion import Compared, Conclusion, conclude_which_is_flatter
from flatscope.comparing.decision import (
    Decision,
    decide_network_to_keep,
    ranking_record_in_words,
    untried_loss_in_words,
)
from flatscope.comparing.held_out import HeldOut, overlap_remarks, unpaired_test_errors
from flatscope.comparing.losses import AT_EQUAL_LOSS, loss_remark
from flatscope.comparing.records import kind_of_difference, records_by_measure
from flatscope.comparing.remarks import Remark, remarks_on_near_copies
from flatscope.comparing.verdicts import (
    Quantity,
    SameFunction,
    Verdict,
    network_wide_quantities,
    remarks_on_slopes,
    remarks_on_time_limit,
    remarks_on_undertrained_networks,
    values_differ,
    verdict_on_ranking,
)
from flatscope.errors import InputError, NotApplicable, UnknownNameError
from flatscope.formatting import readable_number
from flatscope.leaks import Overlap
from flatscope.network_summary import NetworkSummary
from flatscope.result import DRAWN, MOST_LINES, Result, plain, reading
from flatscope.table import Table

ERRORS = (
    "± is a standard error: of the random draws where a value is estimated, and of the training samples being a draw "
    "where that is known. For values without ± none was computed. Between networks the errors count as independent; on "
    "the same samples they seldom are, and differences are known better than the ± says."
)
INTERVALS = (
    "Ranks from and to are the places in {:g} % of draws from the standard errors. Nothing else moves them: a value "
    "without ± counts as exact, and measures that disagree do not widen them."
)
FIRST_REMARKS = ("overlap", "copy", "loss", "fit", "time")  # what could turn the answer round
_COPIES_DIFFER = "differ between copies of one function"


class Comparison(Result):
    """Several networks on the same data.

    Args:
        tables: what was measured, by network.
        networks: loss, error and architecture of each.
        same_function: pairs of networks that compute the same function.
        meta: how it was made: loss, number of samples, tolerance, level of intervals.

    Example:
        >>> import torch, flatscope as fs
        >>> nets = {name: torch.nn.Linear(3, 2) for name in ("first", "second")}
        >>> found = fs.compare(nets, (torch.eye(3), torch.tensor([0, 1, 0])), names=["margin", "parameter_count"])
        >>> found.names, found.verdict("parameter_count").word
        (['first', 'second'], 'no direction')
    """

    WORD = "comparison"
    ENDINGS = (".json", ".csv", ".md", ".html", *DRAWN)
    READABLE = (".json",)

    def __init__(
        self,
        tables: Mapping[str, Table],
        networks: Mapping[str, NetworkSummary],
        same_function: Sequence[SameFunction] = (),
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        if list(tables) != list(networks) or len(tables) < 2:
            raise InputError("the same two or more networks in both", f"{list(tables)} and {list(networks)}", "tables")
        self.tables = dict(tables)
        self.networks = dict(networks)
        self.same_function = list(same_function)
        self.meta: dict[str, Any] = plain(meta or {})
        self._quantities = {quantity.label: quantity for quantity in network_wide_quantities(self.tables)}
        loss = str(self.meta.get("loss", ""))
        self._verdicts = {
            label: verdict_on_ranking(quantity, self.networks, self.same_function, loss)
            for label, quantity in self._quantities.items()
        }

    def __eq__(self, other: object) -> bool:
        """Equal tables, also in what is not network-wide and so not in `to_frame`."""
        return isinstance(other, Comparison) and self.to_json() == other.to_json()

    __hash__ = None

    @property
    def names(self) -> list[str]:
        """The networks, in the order given."""
        return list(self.networks)

    @property
    def distinct(self) -> list[str]:
        """One network of every function: rankings are between these."""
        copies = {pair.second for pair in self.same_function}
        return [name for name in self.names if name not in copies]

    @property
    def comparable(self) -> list[str]:
        """Measures that rank these networks."""
        return [label for label, verdict in self._verdicts.items() if verdict.word == "comparable"]

    def verdict(self, measure: str) -> Verdict:
        """Verdict on the ranking by a measure: whether it counts, and why not."""
        return self._verdicts[self._quantity(measure).label]

    @property
    def difference(self) -> str:
        """Kind of difference between the networks by their modules: "training", "width" or "architecture"."""
        return kind_of_difference(self.networks[name].architecture for name in self.distinct)

    @property
    def counting(self) -> list[str]:
        """Comparable measures that count in the ranking: they ranked networks that differ like these rightly.

        On the released population, more often than wrongly and beyond chance (`fs.benchmark`); others do not count.
        """
        known = {name: records_by_measure(self.difference).get(self._recorded(name)) for name in self.comparable}
        return [name for name, record in known.items() if record is not None and record.counts]

    def _recorded(self, name: str) -> str:  # with its options where these were scored, else without
        return name if name in records_by_measure(self.difference) else self._quantities[name].measure

    @property
    def tests(self) -> HeldOut | None:
        """The test errors of the distinct networks: paired tests where they were compared sample by sample; or None."""
        if "tests" not in self.meta:
            return unpaired_test_errors(
                {name: self.networks[name] for name in self.distinct}, int(self.meta.get("n_test") or 0)
            )
        return None if self.meta["tests"] is None else HeldOut.from_dict(self.meta["tests"])

    @property
    def decision(self) -> Decision:
        """Which network to keep, or what to do before that can be said."""
        is_new, overlap = not self.meta.get("nothing_held_out"), Overlap.from_meta(self.meta)
        return decide_network_to_keep(self.names, self.distinct, self.networks, self.tests, is_new, overlap)

    @property
    def conclusion(self) -> Conclusion:
        """Which network is flatter, by which measures and by how much; first of all whether they are at a minimum."""
        comparable, counting = ([self._quantities[n] for n in names] for names in (self.comparable, self.counting))
        refused, loss = self.not_comparable(), str(self.meta.get("loss", ""))
        tests = self.tests
        return conclude_which_is_flatter(
            Compared(self.names, self.distinct, self.networks, tests, comparable, counting, refused, loss)
        )

    def moved_between_copies(self) -> list[str]:
        """Measures that differ between networks that are the same function: they mean nothing for the ranking."""
        pairs = [(pair.first, pair.second) for pair in self.same_function]
        usable = [(label, q) for label, q in self._quantities.items() if self._verdicts[label].word != "no value"]
        return [label for label, q in usable if any(values_differ(q, *pair) for pair in pairs)]

    def ranking(self, measure: str | None = None) -> pd.DataFrame:
        """The networks, best first, with intervals of their ranks; copies are left out.

        Args:
            measure: its name (with options where it has several values); None: the mean rank over the families of
                the measures that count, each family with the same weight; see `counting`.
        """
        level = float(self.meta.get("confidence", 0.95))
        if measure is None:
            if len(self.distinct) < 2:
                raise NotApplicable("two different functions to rank", "copies of one", where="ranking")
            if not self.counting:
                fix = "Ask for l2_path_norm or perturbation_robustness, or decide by held-out data"
                raise NotApplicable("a measure that counts here", "none", where="ranking", fix=fix)
            return rankings.consensus_ranking(
                [self._quantities[label] for label in self.counting], self.distinct, level
            )
        quantity = self._quantity(measure)
        if (verdict := self._verdicts[quantity.label]).word in ("no value", "no direction"):
            raise NotApplicable(f"a measure that can rank: {verdict.reason}", measure, where="ranking")
        return rankings.ranking_of_networks(quantity, self.distinct, level).to_frame()

    def agreement(self, everything: bool = False) -> pd.DataFrame:
        """Kendall's tau-b between the rankings of every two measures, over the distinct functions.

        Args:
            everything: also of measures that are not comparable here.
        """
        words = ("comparable", "not comparable") if everything else ("comparable",)
        chosen = [q for label, q in self._quantities.items() if self._verdicts[label].word in words]
        return rankings.agreement_of_rankings(chosen, self.distinct)

    def orders(self, word: str = "comparable") -> dict[str, list[str]]:
        """Which orders of the networks the measures give, best first, and which measures give each."""
        measures_by_order: dict[str, list[str]] = {}
        for label, quantity in self._quantities.items():
            if self._verdicts[label].word == word and len(self.distinct) > 1:
                measures_by_order.setdefault(
                    rankings.order_in_words(rankings.ranking_of_networks(quantity, self.distinct)), []
                ).append(label)
        return dict(sorted(measures_by_order.items(), key=lambda item: -len(item[1])))

    @property
    def table(self) -> pd.DataFrame:
        """One row per network-wide measure: its value for every network, the order, the verdict and the reason."""
        rows = []
        for label, quantity in self._quantities.items():
            verdict = self._verdicts[label]
            orderable = verdict.word in ("comparable", "not comparable") and len(self.distinct) > 1
            order = rankings.order_in_words(rankings.ranking_of_networks(quantity, self.distinct)) if orderable else ""
            rows.append([label, *quantity.value.values(), order, verdict.word, verdict.reason])
        columns = ["measure", *self.names, "order", "verdict", "reason"]
        return pd.DataFrame(rows, columns=columns).set_index("measure")

    def chart(self) -> Bars:
        """Each network's value as a multiple of the first network's, for measures above zero on all of them."""
        values = {
            label: [float(quantity.value[name]) for name in self.names] for label, quantity in self._quantities.items()
        }
        known = {label: row for label, row in values.items() if all(0 < value < math.inf for value in row)}
        series = {name: [row[place] / row[0] for row in known.values()] for place, name in enumerate(self.names)}
        return Bars(list(known), series, axis=f"times {self.names[0]}")

    def to_frame(self) -> pd.DataFrame:
        """One row per measure and network; rank and its interval where the measure ranks that network."""
        level = float(self.meta.get("confidence", 0.95))
        ranks = ["rank", "rank_low", "rank_high", "probability_best"]
        rows = []
        for label, quantity in self._quantities.items():
            verdict = self._verdicts[label]
            places: dict[str, list[float]] = {}
            if verdict.word in ("comparable", "not comparable"):
                ranking = rankings.ranking_of_networks(quantity, self.distinct, level).to_frame()
                places = dict(zip(ranking["name"], ranking[ranks].to_numpy().tolist(), strict=True))
            for name in self.names:
                numbers = [quantity.value[name], quantity.stderr[name], quantity.data_stderr[name]]
                numbers += places.get(name, [math.nan] * len(ranks))
                rows.append([quantity.measure, quantity.options, name, *numbers, verdict.word, verdict.reason])
        floats = ["value", "stderr", "data_stderr", *ranks]
        columns = ["measure", "options", "network", *floats, "verdict", "reason"]
        return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(floats, "float64"))

    def warnings(self) -> list[Remark]:
        """Cautions to read before any number: sentences, each with a `code`."""
        remarks = [Remark("overlap", text) for text in overlap_remarks(self.meta)]
        remarks += [Remark("copy", f"{pair}.") for pair in self.same_function if pair.first in self.distinct]
        if moved := self.moved_between_copies():
            text = "Different for networks that are one function, and so without meaning for the ranking"
            remarks.append(Remark("moved", f"{text}: {', '.join(moved)}."))
        remarks += loss_remark(self.networks, str(self.meta.get("loss", ""))) + remarks_on_near_copies(self.meta)
        remarks += remarks_on_undertrained_networks(self.networks) + remarks_on_slopes(self.networks)
        remarks += remarks_on_time_limit(self._quantities.values(), self.meta.get("not_looked", []))
        if len({network.architecture for network in self.networks.values()}) > 1:
            text = "The architectures differ: only measures of the function itself are comparable."
            remarks.append(Remark("architecture", text))
        return remarks

    def headline_lines(self) -> list[str]:
        """Which network to keep, whether they are at a minimum, which is flatter, what that is worth."""
        lines = [str(self.decision)]
        if len(self.distinct) > 1:
            names = [self._recorded(label) for label in self.counting]
            classes = not any(math.isnan(self.networks[name].error) for name in self.distinct)
            conclusion = self.conclusion
            worth = (
                ranking_record_in_words(self.difference, names)
                if classes
                else untried_loss_in_words(str(self.meta.get("loss", "")))
            )
            if conclusion.code == "untold":
                worth = worth.replace("What that is worth", "What flatness would be worth")
            lines += [str(conclusion), worth]
        said = lines[1] if len(lines) > 1 else ""  # the losses that keep the question open are said there already
        codes = [code for code in FIRST_REMARKS if not (code == "loss" and AT_EQUAL_LOSS in said)]
        return [*lines, *(remark for remark in self.warnings() if remark.code in codes)]

    def summary(self) -> str:
        """The warnings, the ranking, where measures agree and which do not count, in a few sentences."""
        samples = f"{len(self.names)} networks, {self.meta.get('n_train', '?')} training samples."
        said = self.headline_lines()[:MOST_LINES]
        lines = [*said, samples, *(remark for remark in self.warnings() if remark not in said)]
        if len(self.distinct) < 2:
            return "\n".join([*lines, "One function: there is nothing to rank."])
        if self.counting:
            ranking = self.ranking()
            lines.append(f"The measures that count together ({', '.join(self.counting)}):")
            for place, row in zip(rankings.places_in_words(ranking), ranking.itertuples(index=False), strict=True):
                voices = f"first in {row.families_first} of the {row.families} families of measures"
                voices = "in the only family of measures" if row.families == 1 else voices
                lines.append(
                    f"{place} {row.name}: mean rank {row.mean_rank:.2f}, {voices}; "
                    f"rank {row.rank_low:g} to {row.rank_high:g}."
                )
            lines.append(INTERVALS.format(100 * float(self.meta.get("confidence", 0.95))))
            lines += self.ranking_remarks()
            for order, labels in self.orders().items():
                lines.append(f"{order}: {len(labels)} of {len(self.comparable)} comparable: {', '.join(labels)}.")
        else:
            lines.append("No measure asked for has ranked networks that differ like these rightly: no ranking.")
        for reason, labels in self.not_comparable().items():
            if reason != _COPIES_DIFFER:  # a warning names these
                lines.append(f"Not comparable, {reason}: {', '.join(labels)}.")
        lines.append(ERRORS)
        return "\n".join(lines)

    def ranking_remarks(self) -> list[str]:
        """Remarks on the ranking: who is not in it, which order one family decides."""
        ranking, lines = self.ranking(), list[str]()
        if ranking["families_first"].sum() > ranking["families"].iloc[0] > 1:
            lines.append("A family in which several share the first place counts for each of them.")
        originals = {pair.second: pair.first for pair in self.same_function if pair.first in self.distinct}
        lines += [f"{copy} is not ranked: it is the same function as {name}." for copy, name in originals.items()]
        voices = rankings.family_ranks([self._quantities[label] for label in self.counting], self.distinct)
        return lines + rankings.close_neighbours_in_words(voices, self.distinct)

    def not_comparable(self) -> dict[str, list[str]]:
        """Reasons why measures do not rank these networks, with the measures concerned."""
        labels_by_reason: dict[str, list[str]] = {}
        for label, verdict in self._verdicts.items():
            if verdict.word == "not comparable":
                reason = _COPIES_DIFFER if verdict.code == "copy" else verdict.reason
                labels_by_reason.setdefault(reason, []).append(label)
        return labels_by_reason

    def lines(self) -> list[list[str]]:
        """The rows for people: loss and error first, then measures: values, order, verdict."""
        rows = [["training loss", *[readable_number(network.loss) for network in self.networks.values()], "", ""]]
        for title, name in (("training error", "error"), ("test loss", "test_loss"), ("test error", "test_error")):
            values = [getattr(network, name) for network in self.networks.values()]
            if any(value == value for value in values):  # NaN without classes or a test set
                rows.append([title, *map(readable_number, values), "", ""])
        orders = self.table["order"]
        for label, quantity in self._quantities.items():
            cells = [quantity.text(name) for name in self.names]
            rows.append([label, *cells, str(orders[label]), self._verdicts[label].word])
        return rows

    @property
    def header(self) -> list[str]:
        """Titles of the columns of `lines`."""
        return ["measure", *self.names, "best first", "verdict"]

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows for people."""
        return self.header, self.lines()

    def _headline_html(self) -> str:
        return "".join(f"<p>{html.escape(line)}</p>\n" for line in self.summary().splitlines())

    def __repr__(self) -> str:
        return f"{self.summary()}\n{self._grid()}"

    def to_markdown(self) -> str:
        """Warnings, ranking and table as Markdown."""
        sentences = "\n".join(f"- {line.replace('<', '&lt;')}" for line in self.summary().splitlines())
        return f"{sentences}\n\n{super().to_markdown()}"

    def to_json(self) -> str:
        """Tables, networks and pairs as JSON."""
        content = {
            "flatscope_comparison": 1,
            "meta": self.meta,
            "networks": {name: network.to_dict() for name, network in self.networks.items()},
            "same_function": [asdict(pair) for pair in self.same_function],
            "tables": {name: json.loads(table.to_json()) for name, table in self.tables.items()},
        }
        return json.dumps(content, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The comparison that `to_json` wrote."""
        with reading("a flatscope comparison as JSON", "comparison file"):
            content = json.loads(text)
            return cls(
                {name: Table.from_json(json.dumps(table)) for name, table in content["tables"].items()},
                {name: NetworkSummary.from_dict(network) for name, network in content["networks"].items()},
                [SameFunction(**pair) for pair in content["same_function"]],
                content["meta"],
            )

    def _quantity(self, measure: str) -> Quantity:
        """By its label, or by its name alone where it has one value."""
        if measure in self._quantities:
            return self._quantities[measure]
        same = [label for label, quantity in self._quantities.items() if quantity.measure == measure]
        if len(same) == 1:
            return self._quantities[same[0]]
        raise UnknownNameError.among(measure, self._quantities, "measure in this comparison")
