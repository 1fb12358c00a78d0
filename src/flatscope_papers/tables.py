"""What stands in files beside the code of a paper: `studies.toml` with its claims, `grids.toml` with its settings.

A table of `studies.toml` has the name of a study:

    figure, title        the figure or table of the paper, and what it shows
    at_paper_scale       what is run at paper scale, in words
    differs              scale -> how that scale differs from the paper's setting; what the paper leaves open too
    claims               what the paper says: `key`, `where`, `statement`, `number`, `reported`, `holds`, `partly` as in
                         `Claim`, and `reason`: why it may fail, at every scale or by scale

A text "@name" is that of the table [texts]. A range is [low, high], "above 0" or "below 0".
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from flatscope import InputError
from flatscope_papers.claims import NEGATIVE, POSITIVE, Claim, Range

RANGES = {"above 0": POSITIVE, "below 0": NEGATIVE}
PARTS = {"figure", "title", "at_paper_scale", "differs", "claims"}


@dataclass(frozen=True)
class Words:
    """What a paper says about one of its figures or tables, and how our runs differ.

    Attributes:
        figure: the figure or table.
        title: what it shows, in a few words.
        claims: what the paper says, each with the range in which it holds; fixed before anything runs.
        differs: scale -> how that scale differs from the paper's setting.
        at_paper_scale: what is run at paper scale.
        reasons: (key of a claim, scale) -> why it may fail there.
    """

    figure: str
    title: str
    claims: tuple[Claim, ...]
    differs: Mapping[str, tuple[str, ...]]
    at_paper_scale: str
    reasons: Mapping[tuple[str, str], str]

    def reasons_at(self, scale: str) -> dict[str, str]:
        """Why claims may fail at a scale, by their keys."""
        return {key: words for (key, place), words in self.reasons.items() if place in ("", scale)}


def said_by_paper(package: str, name: str) -> Words:
    """The table of a study in `studies.toml` of a package."""
    whole = _read(package, "studies.toml")
    where = f"{package}, studies.toml, {name}"
    if name not in whole:
        raise InputError(f"a table [{name}]", f"only {', '.join(whole)}", where=where)
    table, texts = whole[name], whole.get("texts", {})
    if unknown := set(table) - PARTS:
        raise InputError(f"entries {', '.join(sorted(PARTS))}", ", ".join(sorted(unknown)), where=where)
    entries = table["claims"]
    keys = [entry["key"] for entry in entries]
    if len(set(keys)) != len(keys):
        raise InputError("claims with different keys", ", ".join(keys), where=where)
    given = {entry["key"]: entry["reason"] for entry in entries if "reason" in entry}
    by_scale = {key: words if isinstance(words, dict) else {"": words} for key, words in given.items()}
    return Words(
        figure=table["figure"],
        title=table["title"],
        claims=tuple(_claim(entry, where) for entry in entries),
        differs={scale: tuple(_text(word, texts) for word in words) for scale, words in table["differs"].items()},
        at_paper_scale=_text(table.get("at_paper_scale", ""), texts),
        reasons={(key, scale): _text(word, texts) for key, words in by_scale.items() for scale, word in words.items()},
    )


def grid(module: str) -> dict[str, dict[str, Any]]:
    """The settings of a module by scale, from `grids.toml` beside it."""
    package, _, name = module.rpartition(".")
    found: dict[str, dict[str, Any]] = _read(package, "grids.toml")[name]
    return found


@functools.cache
def _read(package: str, file: str) -> dict[str, Any]:
    return tomllib.loads(files(package).joinpath(file).read_text(encoding="utf-8"))


def _claim(entry: Mapping[str, Any], where: str) -> Claim:
    given = {name: value for name, value in entry.items() if name != "reason"}
    for name in ("holds", "partly"):
        if name in given:
            given[name] = _range(given[name])
    try:
        return Claim(**given)
    except TypeError as problem:
        raise InputError("the entries of a claim", str(problem), where=f"{where}, claim {entry['key']}") from problem


def _range(given: Any) -> Range:
    if isinstance(given, str):
        return RANGES[given]
    low, high = given
    return float(low), float(high)


def _text(word: str, texts: Mapping[str, str]) -> str:
    return texts[word[1:]] if word.startswith("@") else word
