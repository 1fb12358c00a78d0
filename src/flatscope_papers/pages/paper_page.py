"""The page of one paper: what it is read for first, then every study, folded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flatscope_papers.claims import COUNTED, ERRATUM, EXPERIMENT, REMARK, SIGNS, judged_verdict_counts
from flatscope_papers.declaration import Study
from flatscope_papers.pages import markdown
from flatscope_papers.pages.overview import headline_claims_by_verdict, judged_studies_badge
from flatscope_papers.reproduction import (
    AT_PAPER_SCALE,
    GROUPS,
    REDUCED,
    Entry,
    Results,
    claim_entries,
    result_at_largest_scale,
)
from flatscope_papers.study_result import StudyResult
from flatscope_papers.toml_files import FOUR_PAPERS, paper_words

NEWER = f"{markdown.AFTER} Claim or range set after first results were seen."


def paper_page(paper: str, results: Results) -> str:
    """The page as Markdown; pictures are in `images` beside it."""
    entries = [entry for entry in claim_entries(results) if entry.study.paper == paper]
    words = paper_words(paper)
    by_study: dict[str, list[Entry]] = {}
    for entry in entries:
        by_study.setdefault(entry.study.name, []).append(entry)
    lines = [f"# {markdown.capitalised(FOUR_PAPERS[paper])}: {markdown.escaped_words(words.title)}", "", words.says, ""]
    lines += [
        f"{judged_studies_badge(entries)}: {judged_verdict_counts(entry.finding for entry in entries)}.",
        "",
    ]
    lines += ["## What it is read for", "", *_headline_claims_table(entries), ""]
    if any(entry.finding.claim.after_results for entry in entries):
        lines += [NEWER, ""]
    lines += ["## Every study", ""]
    texts_shown: dict[str, str] = {}
    for entries_of in by_study.values():
        declared = entries_of[0].study
        lines += [
            *_study_section(declared, entries_of, result_at_largest_scale(results.get(declared.name, {})), texts_shown),
            "",
        ]
    return "\n".join(lines)


def _headline_claims_table(entries: Iterable[Entry]) -> list[str]:
    rows = [
        [
            markdown.verdict_with_sign(entry.finding),
            f"[{markdown.escaped_words(entry.finding.claim.headline)}](#{entry.study.name})",
            markdown.escaped_words(entry.finding.claim.reported),
            markdown.escaped_words(markdown.number_with_meaning(entry.finding)),
            {AT_PAPER_SCALE: "paper", REDUCED: "reduced"}.get(entry.group, GROUPS[entry.group]),
        ]
        for chosen in headline_claims_by_verdict(entries).values()
        for entry in chosen
    ]
    return markdown.table_lines(["verdict", "claim", "paper", "here", "kind or scale"], rows)


def _study_section(
    declared: Study, entries: Sequence[Entry], result: StudyResult | None, texts_shown: dict[str, str]
) -> list[str]:
    signs = " ".join(f"{SIGNS[e.finding.verdict]}" for e in entries if e.finding.counts)
    experiments = any(entry.finding.claim.kind == EXPERIMENT for entry in entries)
    scale = (f"{result.scale} scale" if experiments else "no experiment of the paper") if result else "not run"
    lines = [
        f'<a id="{declared.name}"></a>',
        "",
        f"### {markdown.escaped_words(declared.figure)}: {markdown.escaped_words(declared.title)}",
        "",
    ]
    lines += [
        f"{signs} · {scale}",
        "",
        '<details markdown="1"><summary>Figure, claims, and how it was done</summary>',
        "",
    ]
    if result:
        lines += [markdown.figure_link(f"images/{declared.name}.png", f"{declared.title}, as found here"), ""]
    lines += [
        *markdown.table_lines(
            markdown.CLAIM_HEADER, (markdown.claim_table_row(e) for e in entries if e.finding.claim.kind in COUNTED)
        ),
        "",
    ]
    for kind, title in ((ERRATUM, "Slips of the printed text"), (REMARK, "Told, and not judged")):
        others = [markdown.claim_table_row(entry) for entry in entries if entry.finding.claim.kind == kind]
        if others:
            lines += [f"{title}:", "", *markdown.table_lines(markdown.CLAIM_HEADER, others), ""]
    if result:
        lines += _bullet_list_without_repeats(
            "Differs from the paper", result.deviations, texts_shown
        ) + _bullet_list_without_repeats("Also seen", result.notes, texts_shown)
        lines += [f"Run: {markdown.escaped_words(result.how)}. `{result.command}`", ""]
    return [*lines, "</details>"]


def _bullet_list_without_repeats(label: str, words: Sequence[str], texts_shown: dict[str, str]) -> list[str]:
    """A list; what an earlier study of the page says in the same words is not said again."""
    new = [part for part in words if part not in texts_shown]
    texts_shown.update(dict.fromkeys(new, label))
    again = [] if len(new) == len(words) else ["- As told above of other studies."]
    return [f"{label}:", "", *(f"- {markdown.escaped_sentence(part)}" for part in new), *again, ""] if words else []
