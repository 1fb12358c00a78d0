"""The page of all claims: complete, short where it can be, and readable as Markdown."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from markdown_it import MarkdownIt

from flatscope_papers import find_study, studies
from flatscope_papers.claims import SIGNS, Answer, judge
from flatscope_papers.intervals import COVERED
from flatscope_papers.pages.reproduction_page import reproduction_markdown, text
from flatscope_papers.reproduction import claim_frame, claim_rows
from flatscope_papers.study_result import StudyResult

NAME = "zhang2017-fig1"
FACTS = {"seconds": 12.5, "device": "a CPU", "date": "2026-01-01", "command": "x"}


def result(name: str, value: float = 0.0, scale: str = "small", **changes: object) -> StudyResult:
    entry = find_study(name)
    findings = tuple(
        judge(claim, Answer(value, value, value, note=f"seen so; {COVERED} of some"), scale) for claim in entry.claims
    )
    made = StudyResult(
        name, entry.title, entry.paper, entry.figure, scale, pd.DataFrame(), findings, "", b"", (), (), FACTS
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def section(page: str, name: str) -> str:
    return page.split(f'<a id="{name}"></a>')[1].split("<a id=")[0]


def test_there_is_a_row_for_every_claim_of_every_study() -> None:
    page = reproduction_markdown({})
    for name, entry in studies().items():
        part = section(page, name)
        for claim in entry.claims:
            assert text(claim.statement) in part
            assert text(claim.number) in part
    assert page.count("&nbsp;not run |") == sum(len(entry.claims) for entry in studies().values())


def test_every_link_within_the_page_has_its_place() -> None:
    page = reproduction_markdown({NAME: {"small": result(NAME, 100.0)}})
    places = re.findall(r'<a id="([^"]+)">', page)
    assert len(places) == len(set(places)) == len(studies())
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) == set(places)


def test_tables_are_tables_and_signs_mean_nothing() -> None:
    odd = ("A < b | c * d ~ e $x$ [1] & `code`", "second")
    page = reproduction_markdown({NAME: {"small": result(NAME, deviations=odd)}})
    shown = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(page)
    assert "A &lt; b | c * d ~ e $x$ [1] &amp; `code`" in shown
    rows = len(claim_rows({}))
    assert shown.count("<tr>") > rows
    assert "| ---" not in shown


def test_counts_are_those_of_the_verdicts() -> None:
    found = {NAME: {"small": result(NAME, 0.05)}}
    given = Counter(row["verdict"] for row in claim_rows(found) if row["paper"] == "zhang2017")
    lines = reproduction_markdown(found).splitlines()
    head, line = (next(line for line in lines if line.startswith(word)) for word in ("| paper", "| Zhang"))
    cells = dict(zip(head.strip("| ").split(" | "), line.strip("| ").split(" | "), strict=True))
    assert cells["claims"] == str(given.total())
    assert len(given) > 2
    for word, number in given.items():
        assert cells[f"{SIGNS[word]} {word}"] == str(number)


def test_ranges_and_what_is_undecided_are_shown() -> None:
    entry = find_study(NAME)
    claim = next(claim for claim in entry.claims if math.isfinite(claim.holds[1]))
    wide = Answer(claim.holds[1] + 1, claim.holds[1] - 1, claim.holds[1] + 3)
    findings = tuple(judge(other, wide if other is claim else Answer.exact(-1e9), "small") for other in entry.claims)
    page = reproduction_markdown({NAME: {"small": result(NAME, findings=findings)}})
    row = next(line for line in section(page, NAME).splitlines() if text(claim.statement) in line)
    assert text(claim.rule) in row
    assert "<sub>undecided</sub>" in row
    assert "1 are undecided" in page
    frame = claim_frame({NAME: {"small": result(NAME, findings=findings)}})
    own = frame[(frame["study"] == NAME) & (frame["key"] == claim.key)].iloc[0]
    assert (own["value"], own["interval_low"], own["holds_high"]) == (wide.value, wide.low, claim.holds[1])
    assert len(frame) == len(claim_rows({}))
    assert frame[frame["study"] != NAME]["value"].isna().all()


def test_what_fails_is_told_first_with_the_reason_stated_or_else_noted() -> None:
    def failures(page: str) -> str:
        return page.split("## What does not reproduce")[1].split("\n## ")[0]

    noted = failures(reproduction_markdown({NAME: {"small": result(NAME, -100.0)}}))
    assert "Seen so." in noted
    assert COVERED not in noted
    stated = result(NAME, -100.0, notes=("Likeliest reason: too few epochs", "something else"))
    told = failures(reproduction_markdown({NAME: {"small": stated}}))
    assert "Too few epochs." in told
    assert "Seen so." not in told
    assert "omething else" not in told
    assert "Nothing." in failures(reproduction_markdown({}))


def test_the_largest_scale_is_shown_and_the_other_is_mentioned() -> None:
    both = {"small": result(NAME, 0.25), "paper": result(NAME, 0.125, "paper")}
    part = section(reproduction_markdown({NAME: both}), NAME)
    assert f"../results/{NAME}/paper/figure.png" in part
    assert "--scale paper`" in part
    row = next(line for line in part.splitlines() if text(find_study(NAME).claims[0].statement) in line)
    here, elsewhere = row.index("0.125"), row.index("small scale: 0.25")
    assert here < elsewhere
    assert "small" not in section(reproduction_markdown({NAME: {"paper": both["paper"]}}), NAME)


def test_what_an_earlier_study_says_is_not_said_again() -> None:
    words = ("fewer images than in the paper", "another network")
    alike = {name: {"small": result(name, deviations=words)} for name in (NAME, "zhang2017-fig2")}
    page = reproduction_markdown(alike)
    assert page.count("Fewer images than in the paper.") == 1
    assert f"as in [{NAME}](#{NAME})" in section(page, "zhang2017-fig2")


def test_the_page_says_what_the_paper_scale_runs() -> None:
    declared = text(find_study(NAME).words.at_paper_scale.rstrip("."))[1:]  # the page begins it with a capital
    assert declared in section(reproduction_markdown({}), NAME)


@pytest.mark.parametrize("folder", ["../results", "elsewhere"])
def test_figures_are_where_the_page_looks_for_them(folder: str) -> None:
    page = reproduction_markdown({NAME: {"small": result(NAME)}}, figures=folder)
    assert f"]({folder}/{NAME}/small/figure.png)" in page


def test_the_same_results_give_the_same_page(tmp_path: Path) -> None:
    found = {NAME: {"small": result(NAME)}}
    assert reproduction_markdown(found) == reproduction_markdown(found)
