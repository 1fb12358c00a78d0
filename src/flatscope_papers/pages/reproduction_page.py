"""One page for all four papers: what reproduces and what does not, then every study with its figure and its claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

from flatscope.registry import PAPERS
from flatscope_papers.claims import NOT_JUDGED, NOT_REPRODUCED, PARTLY, REPRODUCED, SIGNS
from flatscope_papers.declaration import Study
from flatscope_papers.intervals import COVERED
from flatscope_papers.known_studies import studies
from flatscope_papers.reproduction import latest, rows_of
from flatscope_papers.study_result import PICTURE_FILE, StudyResult

Results = Mapping[str, Mapping[str, StudyResult]]
Row = Mapping[str, str]
HEADER = ("where", "claim", "paper", "here", "runs", "verdict")
REASON = "likeliest reason: "  # what notes say after these words is quoted where the page says what fails
NAMED = 2  # claims of a study that are named there; the others are counted

ESCAPED = {sign: f"\\{sign}" for sign in "\\|*~$`[]"} | {"<": "&lt;", "&": "&amp;", "\n": " "}

INTRODUCTION = f"""\
Written by `flatscope study export` from the saved results; do not edit.

Every figure and table of the four papers is a study, every statement about it a claim. The range of values in which a
claim holds was fixed before its study ran, except where "differs from the paper" tells that a claim was added or put
right, or a setting changed, once results were known. The verdict follows from the number found and its interval:

- {SIGNS[REPRODUCED]} **reproduced**: the whole interval lies in that range;
- {SIGNS[PARTLY]} **partly**: the value does but its interval does not (or there is none), or the whole interval lies in
  a second, wider range (the right sign, or the right size within a factor), where the claim has one;
- {SIGNS[NOT_REPRODUCED]} **not reproduced**: neither; *undecided* where the interval still reaches the first range, so
  that more runs could turn it;
- {SIGNS[NOT_JUDGED]} **not judged**: the number could not be had, for the reason given.

Both ranges stand below what the paper says.

Intervals in brackets are of 95 %. *All*, *largest* and *smallest of n networks* is what was seen among those networks:
such claims are about every network, and the note says what share of such networks that speaks for. *Exact* numbers
have no chance in them. `small` runs take minutes on two CPU cores, with smaller networks and fewer samples than the
papers: a claim that fails there may hold at the paper's own scale.
"""


def reproduction_markdown(results: Results, figures: str = "../results") -> str:
    """The page as Markdown.

    Args:
        results: by study and scale.
        figures: folder of the results, as seen from the page.
    """
    known = studies()
    rows = {name: rows_of(declared, results) for name, declared in known.items()}
    lines = ["# Reproduction of the four papers", "", INTRODUCTION, "## Summary", "", *_summary(rows), ""]
    lines += ["## What does not reproduce, and the likeliest reason", "", *_failures(known, rows, results)]
    told: dict[tuple[str, ...], str] = {}
    for paper, title in PAPERS.items():
        of_paper = {name: declared for name, declared in known.items() if declared.paper == paper}
        if not of_paper:
            continue
        lines += ["", f"## {_capital(title)}", "", *_index(of_paper, rows)]
        for name, declared in of_paper.items():
            result = latest(results.get(name, {}))
            picture = f"{figures}/{name}/{result.scale}/{PICTURE_FILE}" if result else ""
            lines += ["", *_opening(declared, rows[name], picture), *_remarks(declared, result, told)]
            if declared.words.at_paper_scale:
                lines.append(f"- **At paper scale:** {_sentence(declared.words.at_paper_scale)}")
    return "\n".join(lines) + "\n"


def _summary(rows: Mapping[str, Sequence[Row]]) -> list[str]:
    """Paper against verdict."""
    everything = [row for of_study in rows.values() for row in of_study]
    given = [word for word in SIGNS if any(row["verdict"] == word for row in everything)]
    lines = _table_head(["paper", "claims", *(f"{SIGNS[word]} {word}" for word in given)])

    def counts(title: str, counted: Sequence[Row]) -> str:
        number = Counter(row["verdict"] for row in counted)
        return _line([title, len(counted), *(number[word] for word in given)])

    for paper, title in PAPERS.items():
        if of_paper := [row for row in everything if row["paper"] == paper]:
            lines.append(counts(_capital(title), of_paper))
    lines.append(counts("**all**", everything))
    scales = Counter(of_study[0]["scale"] for of_study in rows.values() if of_study and of_study[0]["scale"] != "—")
    at = ", ".join(f"{number} at `{scale}` scale" for scale, number in sorted(scales.items()))
    told = f"{len(rows)} studies; judged here: {at or 'none'}."
    failed, undecided = (sum(bool(of(row)) for row in everything) for of in (_failed, itemgetter("undecided")))
    if undecided:
        told += f" Of the {failed} not reproduced, {undecided} are undecided: their interval reaches the range."
    return [*lines, "", told]


def _failed(row: Row) -> bool:
    return row["verdict"] == NOT_REPRODUCED


def _failures(studies: Mapping[str, Study], rows: Mapping[str, Sequence[Row]], results: Results) -> list[str]:
    lines = _table_head(["study", "not reproduced", "claims", "likeliest reason, or what was noted"])
    for name, declared in studies.items():
        failed = [row for row in rows[name] if _failed(row)]
        result = latest(results.get(name, {}))
        if not failed or result is None:
            continue
        named = [row["statement"] for row in failed[:NAMED]]
        more = [f"and {len(failed) - NAMED} more"] if len(failed) > NAMED else []
        study = f"[{text(declared.figure)} of {PAPERS[declared.paper]}](#{name})"
        open_ones = sum(bool(row["undecided"]) for row in failed)
        count = f"{len(failed)} of {len(rows[name])}" + (f", {open_ones} undecided" if open_ones else "")
        lines.append(_line([study, count, text("; ".join([*named, *more])), _reason(result, failed)]))
    return lines if len(lines) > 2 else ["Nothing."]


def _reason(result: StudyResult, failed: Sequence[Row]) -> str:
    stated = [note[len(REASON) :] for note in result.notes if note.lower().startswith(REASON)]
    stated += [row["note"].partition(REASON)[2] for row in failed if REASON in row["note"]]
    reasons = dict.fromkeys(stated or [_remark(row["note"]) for row in failed])
    return " ".join(_sentence(words) for words in reasons if words) or "None known."


def _remark(note: str) -> str:
    """A note without what it says about networks that were not seen."""
    return "; ".join(part for part in note.split("; ") if not part.startswith(COVERED))


def _index(studies: Mapping[str, Study], rows: Mapping[str, Sequence[Row]]) -> list[str]:
    lines = _table_head(["study", "what", "claims", "verdicts"])
    for name, declared in studies.items():
        link = f"[{text(declared.figure)}](#{name})"
        lines.append(_line([link, text(declared.title), len(rows[name]), _signs(rows[name])]))
    return lines


def _opening(declared: Study, rows: Sequence[Row], picture: str) -> list[str]:
    """A study's figure and its claims."""
    lines = [f'<a id="{declared.name}"></a>', "", f"### {text(declared.figure)}: {text(declared.title)}", ""]
    if picture:
        lines += [f"![{text(declared.title)}, as found here]({picture})", ""]
    return [*lines, *_table_head(HEADER), *(_claim_line(row) for row in rows), ""]


def _remarks(declared: Study, result: StudyResult | None, told: dict[tuple[str, ...], str]) -> list[str]:
    """How it was run and what to know; what an earlier study says in the same words (`told`) is not said again."""
    if result is None:
        return [f"- **Run:** not yet. `flatscope study run {declared.name}`"]
    lines = [f"- **Run:** {text(result.how)}. `{result.command}`"]
    for label, words in (("Differs from the paper", result.deviations), ("Also seen", result.notes)):
        lines += _bullets(label, words, declared.name, told)
    return lines


def _claim_line(row: Row) -> str:
    here = "<br>".join(part for part in (text(row["found"]), _small(row["note"]), _small(row["elsewhere"])) if part)
    claim = f"{text(row['statement'])}<br>{_small(row['number'])}"
    paper = f"{text(row['reported'])}<br>{_small(row['rule'])}"
    verdict = f"{SIGNS[row['verdict']]}&nbsp;{row['verdict']}{'<br><sub>undecided</sub>' if row['undecided'] else ''}"
    return _line([text(row["where"]), claim, paper, here, row["runs"], verdict])


def _bullets(label: str, words: Sequence[str], name: str, told: dict[tuple[str, ...], str]) -> list[str]:
    if not words:
        return []
    key = (label, *words)
    if key in told and len(words) > 1:
        return [f"- **{label}:** as in [{told[key]}](#{told[key]})."]
    told.setdefault(key, name)
    if len(words) == 1:
        return [f"- **{label}:** {_sentence(words[0])}"]
    return [f"- **{label}:**", *(f"  - {_sentence(part)}" for part in words)]


def _signs(rows: Iterable[Row]) -> str:
    counts = Counter(row["verdict"] for row in rows)
    return " ".join(f"{SIGNS[word]} {counts[word]}" for word in SIGNS if counts[word])


def _small(words: str) -> str:
    return f"<sub>{text(words)}</sub>" if words else ""


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _sentence(words: str) -> str:
    return f"{_capital(text(words)).rstrip('.')}."


def _table_head(cells: Iterable[str]) -> list[str]:
    titles = list(cells)
    return [_line(titles), _line("---" for _ in titles)]


def _line(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def text(words: str) -> str:
    """Words as they are to be read: signs that mean something in Markdown or HTML do not here."""
    return "".join(ESCAPED.get(sign, sign) for sign in words)
