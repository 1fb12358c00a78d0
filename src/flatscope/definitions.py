"""Definitions: what a measure or bound means in words, and which values are usual, from the files that come with us."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from flatscope.formatting import numbered, options_in_words, written
from flatscope.formulas import explained_and_unexplained_symbols

FILES = ("measures/definitions.toml", "generalization_bounds/definitions.toml")
TYPICAL_FILE = "typical_values.json"
SHARED = "symbols"  # the section of symbols that mean the same in every formula
WORDS = ("large", "small", "caution")


@dataclass(frozen=True)
class Definition:
    """Meaning of a measure or bound: its symbols, how to read it, when not to trust it.

    Attributes:
        large: what a large value says, and what a small one.
        small: likewise.
        caution: when not to trust it.
        symbols: what the symbols of its formula stand for, by their LaTeX; those of `shared_symbols` need not be said.
    """

    large: str
    small: str
    caution: str
    symbols: Mapping[str, str] = field(default_factory=dict)


@cache
def _definition_sections() -> dict[str, Any]:
    sections: dict[str, Any] = {}
    for name in FILES:
        sections |= tomllib.loads((files("flatscope") / name).read_text(encoding="utf-8"))
    return sections


def shared_symbols() -> dict[str, str]:
    """Meanings of the symbols that are the same in every formula, by their LaTeX."""
    return dict(_definition_sections()[SHARED])


def own_definition(name: str) -> Definition | None:
    """The definition of one of our measures or bounds; None for others."""
    return _merged_definition(name) if name in _definition_sections() and name != SHARED else None


@cache
def _merged_definition(name: str) -> Definition:
    section = _definition_sections()[name]
    base = _merged_definition(section["like"]) if "like" in section else None
    said = {key: section.get(key) or (getattr(base, key) if base else "") for key in WORDS}
    symbols = {**(base.symbols if base else {}), **section.get(SHARED, {})}
    return Definition(**said, symbols=symbols)


def definition_entry(name: str) -> dict[str, Any]:
    """Entry of a measure or bound in the file, without what it takes from another."""
    return dict(_definition_sections()[name])


def defined_names() -> set[str]:
    """Names of all measures and bounds that the files define."""
    return set(_definition_sections()) - {SHARED}


def explained_symbols(formula: str, definition: Definition | None) -> list[tuple[str, str]]:
    """The symbols of a formula in its order, as LaTeX, with what they stand for."""
    own_symbols = dict(definition.symbols) if definition else {}
    known = shared_symbols() | own_symbols
    return [(symbol, known[symbol]) for symbol in explained_and_unexplained_symbols(formula, known, own_symbols)[0]]


def unexplained_symbols(formula: str, definition: Definition | None) -> list[str]:
    """Pieces of a formula of which nothing is said."""
    return explained_and_unexplained_symbols(
        formula, {**shared_symbols(), **(definition.symbols if definition else {})}
    )[1]


@cache
def _typical_values_file() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((files("flatscope") / TYPICAL_FILE).read_text(encoding="utf-8"))
    return content


def typical_values(name: str, per: str = "network") -> list[str]:
    """Sentences on usual values of one of our measures or bounds; empty for others.

    Args:
        name: of the measure or bound.
        per: what it has a value of: "network", "layer", "unit" or "sample".
    """
    known = _typical_values_file()
    given = {group: options_in_words(json.dumps(rows.get(name, {}))) for group, rows in known["options"].items()}
    options = {group: f"; with {words}" if words else "" for group, words in given.items()}
    lines = []
    if released := known["released"].get(name):
        low, middle, high = (written(float(released[key])) for key in ("low", "middle", "high"))
        mean = "" if per == "network" else f", each the mean over its {per}s"
        lines.append(
            f"{middle} in the middle, nine in ten from {low} to {high}: "
            f"{numbered(released['networks'], 'small network')} of the benchmark, trained on CIFAR-10 or "
            f"Fashion-MNIST to a loss of 0.01{mean}{options['released']}"
        )
    if demo := known["demo"].get(name):
        values = " and ".join(f"{_range_in_words(usual)} ({network})" for network, usual in demo.items())
        lines.append(f"{values}: the two networks of `flatscope demo`, trained on digits{options['demo']}")
    return lines


def typical_numbers(name: str) -> dict[str, float]:
    """The one value of a measure on each network of the demo; empty where it has several or none."""
    values = _typical_values_file()["demo"].get(name, {})
    return {network: float(numbers["value"]) for network, numbers in values.items() if "value" in numbers}


def _range_in_words(usual: Mapping[str, Any]) -> str:
    if "value" in usual:
        return written(float(usual["value"]))
    return f"{written(float(usual['low']))} … {written(float(usual['high']))}"
