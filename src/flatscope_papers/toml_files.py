"""What stands in files beside the code of a paper: `studies.toml` with its claims, `grids.toml` with its settings.

A table of `studies.toml` has the name of a study:

    figure, title        the figure or table of the paper, and what it shows
    at_paper_scale       what is run at paper scale, in words
    differs              scale -> how that scale differs from the paper's setting; what the paper leaves open too
    kind                 of its claims, where they do not name one: see `claims.KINDS`
    claims               what the paper says: the attributes of `Claim`, and `reason`: why it may fail, at every scale
                         or by scale

The table [paper] says what the paper is about: `title`, `says`, and `figure`, the study whose figure stands for
it: see `PaperWords`.
A text "@name" is that of the table [texts]. A range is [low, high], "above 0" or "below 0".
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from flatscope import InputError
from flatscope.extend import PAPERS
from flatscope_papers.claims import EXPERIMENT, NEGATIVE, POSITIVE, Claim, Range

FOUR_PAPERS = {key: name for key, name in PAPERS.items() if key != "flatscope"}
RANGES = {"above 0": POSITIVE, "below 0": NEGATIVE}
OPTIONAL = {"at_paper_scale", "differs", "kind"}
PARTS = {"figure", "title", "claims"} | OPTIONAL


@dataclass(frozen=True)
class Words:
    """Statements of a paper on one of its figures or tables, and how our runs differ.

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


def study_words(package: str, name: str) -> Words:
    """The table of a study in `studies.toml` of a package."""
    return study_words_of_table(_read_package_toml(package, "studies.toml"), name, where=f"{package}, studies.toml")


@dataclass(frozen=True)
class PaperWords:
    """Title and summary of a paper.

    Attributes:
        title: as printed.
        says: its thesis in a sentence or two.
        figure: the study whose figure stands for it.
        holds: what of it holds. In this and the next two "{study claim}" stands for the number that was found.
        fails: what does not hold.
        depends: what depends on what, and what is open.
        caption: what is seen in that figure here.
        rests_on: the findings behind these, each "study claim verdict"; without one of them they are not told.
    """

    title: str
    says: str
    figure: str
    holds: str
    fails: str
    depends: str
    caption: str
    rests_on: Sequence[str]


def paper_words(paper: str) -> PaperWords:
    """The table [paper] in `studies.toml` of a paper's package."""
    return PaperWords(**_read_package_toml(f"{__package__}.{paper}", "studies.toml")["paper"])


def study_words_of_table(whole: Mapping[str, Any], name: str, where: str) -> Words:
    """The table of a study, with its texts filled in.

    Args:
        whole: the file.
        name: of the study.
        where: the file in words, for errors.
    """
    if name not in whole:
        raise InputError(f"a table [{name}]", f"only {', '.join(whole)}", where=where)
    table, place = whole[name], f"{where}, {name}"
    if set(table) | OPTIONAL != PARTS:
        raise InputError(f"entries {', '.join(sorted(PARTS))}", ", ".join(sorted(table)), where=place)

    def text(word: str) -> str:
        texts = whole.get("texts", {})
        if word.startswith("@") and word[1:] not in texts:
            raise InputError("the name of a text", word, where=place, fix="Write it under [texts]")
        return str(texts[word[1:]]) if word.startswith("@") else word

    claims = tuple(
        _claim_from_toml(
            {"kind": table.get("kind", EXPERIMENT)} | entry | {"comment": text(entry.get("comment", ""))}, place
        )
        for entry in table["claims"]
    )
    keys = [claim.key for claim in claims]
    if len(set(keys)) != len(keys):
        raise InputError("claims with different keys", ", ".join(keys), where=place)
    given = {entry["key"]: entry["reason"] for entry in table["claims"] if "reason" in entry}
    by_scale = {key: words if isinstance(words, dict) else {"": words} for key, words in given.items()}
    return Words(
        figure=table["figure"],
        title=table["title"],
        claims=claims,
        differs={scale: tuple(map(text, words)) for scale, words in table.get("differs", {}).items()},
        at_paper_scale=text(table.get("at_paper_scale", "")),
        reasons={(key, scale): text(word) for key, words in by_scale.items() for scale, word in words.items()},
    )


def settings_by_scale(module: str) -> dict[str, dict[str, Any]]:
    """The settings of a module by scale, from `grids.toml` beside it."""
    package, _, name = module.rpartition(".")
    settings: dict[str, dict[str, Any]] = _read_package_toml(package, "grids.toml")[name]
    return settings


@functools.cache
def _read_package_toml(package: str, file: str) -> dict[str, Any]:
    return tomllib.loads(files(package).joinpath(file).read_text(encoding="utf-8"))


def _claim_from_toml(entry: Mapping[str, Any], where: str) -> Claim:
    given = {name: value for name, value in entry.items() if name != "reason"}
    try:
        return Claim(**given | {name: _range_from_toml(given[name]) for name in ("holds", "partly") if name in given})
    except (TypeError, ValueError, KeyError) as problem:
        raise InputError("the entries of a claim", str(problem), f"{where}, claim {entry.get('key')}") from problem


def _range_from_toml(given: Any) -> Range:
    if isinstance(given, str):
        return RANGES[given]
    low, high = given
    return float(low), float(high)
