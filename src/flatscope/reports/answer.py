"""The top of the page: how well each network fits, and which of them is flatter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
from markupsafe import Markup

from flatscope.comparing.comparison import Comparison
from flatscope.comparing.verdicts import STANDING, Standing
from flatscope.formatting import with_error, written
from flatscope.reports.markup import Cell, breakable, element, listed, table
from flatscope.reports.measured import MeasuredCell, headline_words, lines, minimum_verdict
from flatscope.table import Table

UNKNOWN = Standing("", 0, math.nan, math.nan, math.nan, math.nan, rescalable=True)
MARKS = {"yes": "✓ yes", "nearly": "≈ nearly", "no": "! no", "unknown": "? not known"}
ONE_TRAINING = "± is a standard error of the measures: another training could give another order."
ONE_NETWORK = "Invariant measures such as rho_sum say which of two networks is flatter, not whether one is flat."
MOST_HEADLINES = 5
MOST_SIDE_BY_SIDE = 4  # networks that fit beside each other; a table of more scrolls


def with_comparison(kinds: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The tables of given comparisons among the measures; several tables without a comparison get one."""
    tables: dict[str, Table] = dict(kinds["measures"])
    for found in kinds["comparisons"].values():
        tables = found.tables | tables
    comparisons = dict(kinds["comparisons"])
    if not comparisons and len(tables) > 1:
        standings = {name: told_standing(found) for name, found in tables.items()}
        loss = next((found.meta["loss"] for found in tables.values() if "loss" in found.meta), "")
        comparisons["comparison"] = Comparison(tables, standings, meta={"loss": loss})
    return {**kinds, "measures": tables, "comparisons": comparisons}


def told_standing(found: Table) -> Standing:
    """Where the network of a table stands, as far as its metadata tell."""
    return Standing.from_dict(found.meta[STANDING]) if STANDING in found.meta else UNKNOWN


def answer(kinds: Mapping[str, Mapping[str, Any]]) -> Markup:
    """The sentence that answers, the networks side by side, and what to keep in mind; empty without measures."""
    tables, comparisons = kinds["measures"], kinds["comparisons"]
    names = list(dict.fromkeys([*tables, *kinds["histories"]]))
    if not names:
        return Markup("")
    sentences = [element("p", str(found.conclusion), class_="conclusion") for found in comparisons.values()]
    remarks = [remark for found in comparisons.values() for remark in found.warnings()]
    sentences += [element("p", remark, class_="held-out") for remark in remarks if remark.code == "test"]
    if comparisons and any(found.conclusion.voices for found in comparisons.values()):
        sentences.append(element("p", ONE_TRAINING, class_="quiet"))
    if len(tables) == 1:
        sentences.append(element("p", ONE_NETWORK, class_="conclusion"))
    warnings = [str(remark) for remark in remarks if remark.code != "test"]
    for found in tables.values():
        warnings += [f"{words[0].upper()}{words[1:].rstrip('.')}." for words in found.meta.get("remarks", ())]
    rows = [*_fit_rows(names, kinds), *_minimum_row(names, tables), *_headline_rows(names, tables, comparisons)]
    few = "facts" if len(names) <= MOST_SIDE_BY_SIDE else "plain"
    facts = table("The networks side by side", ["", *names], rows, class_=few) if rows else Markup("")
    return Markup("").join((*sentences, facts, listed(dict.fromkeys(warnings))))


def _fit_rows(names: list[str], kinds: Mapping[str, Mapping[str, Any]]) -> list[list[object]]:
    """Loss, test error and the gap between test and training samples, where they are known."""
    known = {name: _standing(name, kinds) for name in names}
    n_test = next((int(found.meta.get("n_test") or 0) for found in kinds["comparisons"].values()), 0)
    classes = not all(math.isnan(found.error) for found in known.values())
    what = "error" if classes else "loss"
    shown = [
        ("Training loss", [found.loss for found in known.values()], False, 0),
        ("Test loss", [found.test_loss for found in known.values()], False, 0),
        ("Test error", [found.test_error for found in known.values()], True, n_test),
        (
            f"Gap of the {what}",
            [getattr(found, f"test_{what}") - getattr(found, what) for found in known.values()],
            classes,
            0,
        ),
    ]
    return [
        [words, *(_shown(value, share, spread) for value in values)]
        for words, values, share, spread in shown
        if not all(map(math.isnan, values))
    ]


def _shown(value: float, share: bool, n: int = 0) -> str:
    if math.isnan(value):
        return "n/a"
    if not share:
        return written(value, 3)
    error = f" ± {100 * math.sqrt(value * (1 - value) / n):.1f}" if n and 0 < value < 1 else ""
    return f"{100 * value:.2f}{error}\u202f%".replace("-", "−")


def _standing(name: str, kinds: Mapping[str, Mapping[str, Any]]) -> Standing:
    """From a comparison, else from the table's metadata, else the last line of a training history."""
    for found in kinds["comparisons"].values():
        if name in found.networks and not math.isnan(found.networks[name].loss):
            known: Standing = found.networks[name]
            return known
    told = told_standing(kinds["measures"][name]) if name in kinds["measures"] else UNKNOWN
    history = kinds["histories"].get(name)
    return told if not math.isnan(told.loss) or history is None else _from_history(history)


def _from_history(history: pd.DataFrame) -> Standing:
    last = history.iloc[-1]
    loss, error, test_loss, test_error = (
        float(last.get(name, math.nan)) for name in ("train_loss", "train_error", "test_loss", "test_error")
    )
    return Standing("", 0, loss, error, test_loss, test_error, rescalable=True)


def _minimum_row(names: list[str], tables: Mapping[str, Table]) -> list[list[object]]:
    """Whether each network is at a minimum at all: flatness is about minima."""
    if not tables:
        return []
    row: list[object] = ["At a minimum?"]
    for name in names:
        verdict = minimum_verdict(tables[name]) if name in tables else None
        words = [MARKS[verdict.level], element("small", verdict.text)] if verdict else ["n/a"]
        row.append(Cell(element("span", *words), class_=f"minimum {verdict.level}" if verdict else None))
    return [row]


def _headline_rows(
    names: list[str], tables: Mapping[str, Table], comparisons: Mapping[str, Comparison]
) -> list[list[object]]:
    """The measures that the conclusion rests on; of one network, the invariant ones to look at first."""
    voices = [voice.measure for found in comparisons.values() for voice in found.conclusion.voices]
    words = headline_words()
    rows: list[list[object]] = []
    for line in lines(tables) if tables else []:
        first = line.standing == "all" and line.name in words if not comparisons else line.label in voices
        if not first or len(rows) >= MOST_HEADLINES:
            continue
        found = dict(zip(tables, line.cells, strict=True))
        name, gist = element("span", breakable(line.label), class_="name"), element("small", words.get(line.name, ""))
        label = element("span", name, gist)
        rows.append([label, *(_cell_words(found.get(name)) for name in names)])
    return rows


def _cell_words(cell: MeasuredCell | None) -> str:
    """A value with what is known of its error: of the draws of an estimate, of the samples being a draw."""
    if cell is None:
        return "n/a"
    text, error = with_error(cell.value, cell.relative * abs(cell.value))
    return f"{text} ± {error}" if error else cell.text
