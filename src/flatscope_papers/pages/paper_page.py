"""The page of one paper: what it is read for first, then every study, folded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flatscope_papers.claims import COUNTED, ERRATUM, REMARK, SIGNS, counted
from flatscope_papers.declaration import Study
from flatscope_papers.pages.markdown import (
    AFTER,
    CLAIM_HEADER,
    capital,
    claim_row,
    figure,
    sentence,
    table,
    text,
    verdict,
)
from flatscope_papers.pages.markdown import (
    told as number_of,
)
from flatscope_papers.pages.overview import badge, headlines
from flatscope_papers.reproduction import Entry, Results, entries, latest
from flatscope_papers.study_result import StudyResult
from flatscope_papers.toml_files import FOUR_PAPERS, paper_words

NEWER = f"{AFTER} Claim or range set after first results were seen."


def paper_page(paper: str, results: Results) -> str:
    """The page as Markdown; pictures are in `images` beside it."""
    found = [entry for entry in entries(results) if entry.study.paper == paper]
    words = paper_words(paper)
    by_study: dict[str, list[Entry]] = {}
    for entry in found:
        by_study.setdefault(entry.study.name, []).append(entry)
    lines = [f"# {capital(FOUR_PAPERS[paper])}: {text(words.title)}", "", words.says, ""]
    lines += [f"{badge(found)}: {counted(e.finding.verdict for e in found if e.finding.counts)}.", ""]
    lines += ["## What it is read for", "", *_headline_table(found), ""]
    if any(entry.finding.claim.after_results for entry in found):
        lines += [NEWER, ""]
    lines += ["## Every study", ""]
    told: dict[str, str] = {}
    for entries_of in by_study.values():
        declared = entries_of[0].study
        lines += [*_study(declared, entries_of, latest(results.get(declared.name, {})), told), ""]
    return "\n".join(lines)


def _headline_table(found: Iterable[Entry]) -> list[str]:
    rows = [
        [
            verdict(entry.finding),
            f"[{text(entry.finding.claim.headline)}](#{entry.study.name})",
            text(entry.finding.claim.reported),
            text(number_of(entry.finding)),
            entry.scale or "—",
        ]
        for chosen in headlines(found).values()
        for entry in chosen
    ]
    return table(["verdict", "claim", "paper", "here", "scale"], rows)


def _study(declared: Study, found: Sequence[Entry], result: StudyResult | None, told: dict[str, str]) -> list[str]:
    signs = " ".join(f"{SIGNS[e.finding.verdict]}" for e in found if e.finding.counts)
    scale = f"{result.scale} scale" if result else "not run"
    lines = [f'<a id="{declared.name}"></a>', "", f"### {text(declared.figure)}: {text(declared.title)}", ""]
    lines += [
        f"{signs} · {scale}",
        "",
        '<details markdown="1"><summary>Figure, claims, and how it was done</summary>',
        "",
    ]
    if result:
        lines += [figure(f"images/{declared.name}.png", f"{declared.title}, as found here"), ""]
    lines += [*table(CLAIM_HEADER, (claim_row(e) for e in found if e.finding.claim.kind in COUNTED)), ""]
    for kind, title in ((ERRATUM, "Slips of the printed text"), (REMARK, "Told, and not judged")):
        others = [claim_row(entry) for entry in found if entry.finding.claim.kind == kind]
        if others:
            lines += [f"{title}:", "", *table(CLAIM_HEADER, others), ""]
    if result:
        lines += _bullets("Differs from the paper", result.deviations, told) + _bullets("Also seen", result.notes, told)
        lines += [f"Run: {text(result.how)}. `{result.command}`", ""]
    return [*lines, "</details>"]


def _bullets(label: str, words: Sequence[str], told: dict[str, str]) -> list[str]:
    """A list; what an earlier study of the page says in the same words is not said again."""
    new = [part for part in words if part not in told]
    told.update(dict.fromkeys(new, label))
    again = [] if len(new) == len(words) else ["- As told above of other studies."]
    return [f"{label}:", "", *(f"- {sentence(part)}" for part in new), *again, ""] if words else []
