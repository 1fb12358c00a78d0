"""Markdown of the papers' pages: tables, sentences, and words in which no sign means anything."""

from __future__ import annotations

import math
from collections.abc import Iterable

from flatscope.extend import written
from flatscope_papers.claims import SIGNS, Answer, Finding, number_text
from flatscope_papers.reproduction import Entry
from flatscope_papers.study_result import answer_text

ESCAPED = {sign: f"\\{sign}" for sign in "\\|*~$`[]"} | {"<": "&lt;", "&": "&amp;", "\n": " "}
AFTER = "†"  # claim or range set after first results were seen


def text(words: str) -> str:
    """Words as they are to be read: signs that mean something in Markdown or HTML do not here."""
    return "".join(ESCAPED.get(sign, sign) for sign in words)


def capital(words: str) -> str:
    """Words with a capital at the beginning; a Greek letter is a symbol and stays as it is."""
    return words[:1].upper() + words[1:] if words[:1].isascii() else words


def sentence(words: str) -> str:
    """Words as a sentence, escaped."""
    return f"{capital(text(words)).rstrip('.')}."


def small(words: str) -> str:
    """Words in small print, escaped; nothing for none."""
    return f"<sub>{text(words)}</sub>" if words else ""


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """Lines of a table; cells are Markdown already."""
    titles = list(header)
    return [_line(titles), _line("---" for _ in titles), *map(_line, rows)]


def _line(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def brief(answer: Answer) -> str:
    """A number for those who want to know what came out, and the interval: two digits, or more to tell them apart."""
    if math.isnan(answer.value):
        return "—"
    value = written(answer.value, 2)
    if answer.low is None or answer.high is None:
        return f"{value} ({answer.without_interval})"
    if answer.low == answer.high:
        return number_text(answer.value)
    if answer.seen:
        return f"{value} ({'largest' if answer.value == answer.high else 'smallest'} of {answer.runs})"
    three = (answer.value, answer.low, answer.high)
    digits = next((digits for digits in (2, 3) if len({written(each, digits) for each in three}) == 3), 4)
    value, low, high = (written(each, digits) for each in three)
    return f"{value} [{low}, {high}]"


def told(finding: Finding) -> str:
    """The number of a headline with what it is."""
    return f"{finding.claim.quantity} {brief(finding.answer)}".strip()


def figure(path: str, words: str) -> str:
    """A picture that leads to itself in full: wide ones are smaller on the page, and scroll on a phone."""
    return f"[![{text(words)}]({path})]({path})"


def verdict(finding: Finding) -> str:
    """Sign and word, whether it holds in part, and whether it was set after first results were seen."""
    mark = AFTER if finding.claim.after_results else ""
    part = "<br><sub>holds in part</sub>" if finding.in_part else ""
    return f"{SIGNS[finding.verdict]}&nbsp;{finding.verdict}{mark}{part}"


def outcome(finding: Finding) -> str:
    """Number and verdict, in a line."""
    return f"{text(brief(finding.answer))}, {finding.verdict}"


CLAIM_HEADER = ("verdict", "claim", "paper", "here")


def claim_row(entry: Entry) -> tuple[str, str, str, str]:
    """Verdict, claim, what the paper has, what came out here with all there is to know about it."""
    claim, answer = entry.finding.claim, entry.finding.answer
    elsewhere = "; ".join(f"{scale} scale: {outcome(other)}" for scale, other in entry.turned.items())
    here = [text(answer_text(answer)), small(answer.note), small(claim.comment), f"<sub>{elsewhere}</sub>"]
    return (
        verdict(entry.finding),
        f"{text(claim.statement)}<br>{small(f'{claim.where}: {claim.number}')}",
        f"{text(claim.reported)}<br>{small(claim.rule)}",
        "<br>".join(part for part in here if part and part != "<sub></sub>"),
    )
