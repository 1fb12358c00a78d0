"""Pages beside those of the papers: slips of the printed texts, verdicts that the scale turned, costs and commands."""

from __future__ import annotations

from flatscope_papers.claims import ERRATUM, UNTESTABLE
from flatscope_papers.pages.markdown import (
    capitalised,
    escaped_sentence,
    escaped_words,
    number_and_verdict,
    table_lines,
)
from flatscope_papers.reproduction import REDUCED, Results, claim_entries, result_at_largest_scale
from flatscope_papers.study_registry import studies
from flatscope_papers.study_result import answer_text
from flatscope_papers.toml_files import FOUR_PAPERS


def errata_page(results: Results) -> str:
    """Slips of the printed texts."""
    rows = [
        [
            f"[{capitalised(FOUR_PAPERS[entry.study.paper])}]({entry.study.paper}.md#{entry.study.name})",
            escaped_words(entry.finding.claim.where),
            escaped_words(entry.finding.claim.statement),
            f"{escaped_words(entry.finding.claim.number)}: {escaped_words(answer_text(entry.finding.answer))}",
            escaped_sentence(entry.finding.claim.comment),
        ]
        for entry in claim_entries(results)
        if entry.finding.claim.kind == ERRATUM
    ]
    lines = ["# Errata", "", "Slips of the printed texts. They say nothing against a paper and are in no count.", ""]
    return "\n".join([*lines, *table_lines(["paper", "where", "printed", "found", "correction"], rows)]) + "\n"


def scales_page(results: Results) -> str:
    """Verdicts that turned between a smaller scale and the paper's, with both numbers."""
    entries = [entry for entry in claim_entries(results) if entry.finding.counts and entry.others]
    rows = [
        [
            f"[{escaped_words(entry.study.figure)} of {FOUR_PAPERS[entry.study.paper]}]"
            f"({entry.study.paper}.md#{entry.study.name})",
            escaped_words(entry.finding.claim.statement),
            number_and_verdict(other),
            number_and_verdict(entry.finding),
        ]
        for entry in entries
        for other in entry.turned.values()
    ]
    introduction = (
        f"{len(entries)} claims were looked at both at a reduced scale and at the paper's: {len(rows)} verdicts differ."
    )
    return (
        "\n".join(
            ["# What the scale changes", "", introduction, "", *table_lines(["", "claim", "small", "paper"], rows)]
        )
        + "\n"
    )


def costs_page(results: Results) -> str:
    """Page on how every study was run, what runs it again, and what the paper's scale takes."""
    rows = []
    for name, declared in studies().items():
        result = result_at_largest_scale(results.get(name, {}))
        how = escaped_words(result.how) if result else "not run"
        command = result.command if result else f"flatscope study run {name}"
        rows.append(
            [f"[{name}]({declared.paper}.md#{name})", how, f"`{command}`", escaped_words(declared.words.at_paper_scale)]
        )
    lines = ["# Costs and commands", "", *_studies_waiting_for_gpu(results), "## All studies", ""]
    return "\n".join([*lines, *table_lines(["study", "run", "again", "at paper scale"], rows)]) + "\n"


def _studies_waiting_for_gpu(results: Results) -> list[str]:
    """Studies that a GPU has still to decide, and what they take."""
    counted = [entry for entry in claim_entries(results) if entry.finding.counts]
    rows = []
    for name, declared in studies().items():
        of_study = [entry for entry in counted if entry.study.name == name]
        untested = sum(entry.finding.verdict == UNTESTABLE for entry in of_study)
        reduced = any(entry.group == REDUCED for entry in of_study)
        if reduced or untested:
            why = "judged at a reduced scale" if reduced else f"{untested} of {len(of_study)} claims cannot be tested"
            rows.append([f"[{name}]({declared.paper}.md#{name})", why, escaped_words(declared.words.at_paper_scale)])
    if not rows:
        return []
    introduction = """\
What could not be judged at the paper's scale, and what it takes there. `python -m benchmarks.pending_studies` in the
repository runs these studies one after another, in the order of what they decide for their seconds, on a machine that
is lent for some minutes at a time; `--list` shows what is left."""
    return ["## What waits for a GPU", "", introduction, "", *table_lines(["study", "why", "at paper scale"], rows), ""]
