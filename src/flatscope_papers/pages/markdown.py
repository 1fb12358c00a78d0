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


def escaped_words(words: str) -> str:
    """Words as they are to be read: signs that mean something in Markdown or HTML do not here."""
    return "".join(ESCAPED.get(sign, sign) for sign in words)


def capitalised(words: str) -> str:
    """Words with a capital at the beginning; a Greek letter is a symbol and stays as it is."""
    return words[:1].upper() + words[1:] if words[:1].isascii() else words


def escaped_sentence(words: str) -> str:
    """Words as a sentence, escaped."""
    return f"{capitalised(escaped_words(words)).rstrip('.')}."


def words_in_small_print(words: str) -> str:
    """Words in small print, escaped; nothing for none."""
    return f"<sub>{escaped_words(words)}</sub>" if words else ""


def table_lines(header: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """Lines of a table; cells are Markdown already."""
    titles = list(header)
    return [_markdown_row(titles), _markdown_row("---" for _ in titles), *map(_markdown_row, rows)]


def _markdown_row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def brief_number(answer: Answer) -> str:
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


def number_with_meaning(finding: Finding) -> str:
    """The number of a headline with what it is."""
    return f"{finding.claim.quantity} {brief_number(finding.answer)}".strip()


def figure_link(path: str, words: str) -> str:
    """A picture that leads to itself in full: wide ones are smaller on the page, and scroll on a phone."""
    return f"[![{escaped_words(words)}]({path})]({path})"


def verdict_with_sign(finding: Finding) -> str:
    """Sign and word, whether it holds in part, and whether it was set after first results were seen."""
    mark = AFTER if finding.claim.after_results else ""
    part = "<br><sub>holds in part</sub>" if finding.holds_in_wider_range else ""
    return f"{SIGNS[finding.verdict]}&nbsp;{finding.verdict}{mark}{part}"


def number_and_verdict(finding: Finding) -> str:
    """Number and verdict, in a line."""
    return f"{escaped_words(brief_number(finding.answer))}, {finding.verdict}"


CLAIM_HEADER = ("verdict", "claim", "paper", "here")


def claim_table_row(entry: Entry) -> tuple[str, str, str, str]:
    """Verdict, claim, what the paper has, what came out here with all there is to know about it."""
    claim, answer = entry.finding.claim, entry.finding.answer
    elsewhere = "; ".join(f"{scale} scale: {number_and_verdict(other)}" for scale, other in entry.turned.items())
    here = [
        escaped_words(answer_text(answer)),
        words_in_small_print(answer.note),
        words_in_small_print(claim.comment),
        f"<sub>{elsewhere}</sub>",
    ]
    return (
        verdict_with_sign(entry.finding),
        f"{escaped_words(claim.statement)}<br>{words_in_small_print(f'{claim.where}: {claim.number}')}",
        f"{escaped_words(claim.reported)}<br>{words_in_small_print(claim.rule)}",
        "<br>".join(part for part in here if part and part != "<sub></sub>"),
    )
