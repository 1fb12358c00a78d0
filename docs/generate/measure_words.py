"""What the page of a measure or bound says in words: symbols, what values mean, what it is worth, when to doubt it."""

from __future__ import annotations

import math
import re

from measure_pictures import picture_of

from flatscope.comparing.records import DIFFERENCES, Record, records_of_measure
from flatscope.definitions import explained_symbols, typical_values
from flatscope.registry import Declaration, declarations

BOTH = ("measure", "bound")


def symbols(entry: Declaration) -> list[str]:
    """What every symbol of the formula stands for."""
    rows = [
        f"| ${symbol}$ | {cell(_linked(words))} |"
        for symbol, words in explained_symbols(entry.symbol, entry.definition)
    ]
    return ["| symbol | stands for |", "|---|---|", *rows, ""] if rows else []


def _linked(text: str) -> str:
    """Names of measures in a text as code, which the site makes links of."""
    names = {name for kind in BOTH for name in declarations(kind) if "_" in name}
    return re.sub(r"(?<![`\w])\w+(?![`\w])", lambda word: f"`{word[0]}`" if word[0] in names else word[0], text)


def reading(entry: Declaration) -> list[str]:
    """What a value says, which are usual, and when not to trust them."""
    definition, usual = entry.definition, typical_values(entry.name, entry.per)
    if definition is None:
        return []
    lines = ["## What a value says", ""]
    lines += [f"- **Large**: {_linked(definition.large)}.", f"- **Small**: {_linked(definition.small)}."]
    lines += [f"- **Usual**: {text}." for text in usual]
    if picture := picture_of(entry):
        alt = f"{entry.name} of each network against its generalization gap"
        said = "Each point is a network of the benchmark; dotted: the two networks of the demo."
        lines += ["", f"![{alt}]({picture})", "", said]
    return [*lines, "", "## When not to trust it", "", sentence(_linked(definition.caution)), ""]


def worth(entry: Declaration) -> list[str]:
    """How often it ranked pairs of networks rightly, by what they differ in."""
    records = records_of_measure(entry.name) if entry.direction != "none" else {}
    if not records:
        return []
    rows = [
        f"| {DIFFERENCES[name]} | {record.percent(record.psi)} | {_interval(record)} | {record.pairs:,} |"
        for name, record in records.items()
    ]
    return [
        "## What it is worth",
        "",
        f"Of 100 pairs of small networks, in how many the one with the {entry.direction} value generalizes better; 50 "
        "is a coin. [How that was found](../leaderboard.md).",
        "",
        "| pairs that differ by | right | 95 % interval | pairs |",
        "|---|---|---|---|",
        *rows,
        "",
    ]


def _interval(record: Record) -> str:
    return "" if math.isnan(record.low) else f"{record.percent(record.low)} to {record.percent(record.high)}"


def cell(text: str) -> str:
    """Text of a cell of a table."""
    return markdown(text).replace("|", "\\|").replace("\n", " ")


def sentence(text: str) -> str:
    """Text that begins with a capital and ends with a full stop."""
    text = markdown(text)
    return text[0].upper() + text[1:] + ("" if text.endswith(".") else ".")


def markdown(text: str) -> str:
    """Formulas as docstrings mark them, as Markdown marks them."""
    return re.sub(r":math:`([^`]*)`", r"$\1$", text)
