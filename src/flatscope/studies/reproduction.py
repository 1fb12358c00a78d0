"""One page for all four papers: every claim with its verdict, written from the results that were saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from flatscope.registry import PAPERS
from flatscope.studies.claims import VERDICTS
from flatscope.studies.result import VERDICTS_FILE, StudyResult
from flatscope.studies.study import SCALES, Study, declared_studies

HEADER = ("study", "where", "claim", "paper", "here", "runs", "scale", "verdict")
NOT_RUN = "not run"


def load_results(folder: str | Path) -> dict[str, dict[str, StudyResult]]:
    """Saved results by study and scale, from `folder/<study>/<scale>/`."""
    found: dict[str, dict[str, StudyResult]] = {}
    for path in sorted(Path(folder).glob(f"*/*/{VERDICTS_FILE}")):
        result = StudyResult.load(path.parent)
        found.setdefault(result.name, {})[result.scale] = result
    return found


def latest(results: Mapping[str, StudyResult]) -> StudyResult | None:
    """The result at the largest scale; a smoke run is no result."""
    judged = [results[scale] for scale in SCALES if scale in results and scale != "smoke"]
    return judged[-1] if judged else None


def claim_rows(results: Mapping[str, Mapping[str, StudyResult]]) -> list[dict[str, str]]:
    """One row per claim of every declared study; those without a result say so."""
    rows = []
    for declared in declared_studies().values():
        result = latest(results.get(declared.name, {}))
        if result is None:
            rows += [_row_without_result(declared, number) for number in range(len(declared.claims))]
        else:
            rows += [{**row, "paper": result.paper, "scale": result.scale} for row in result.rows()]
    return rows


def reproduction_markdown(results: Mapping[str, Mapping[str, StudyResult]]) -> str:
    """The page: counts, then one table per paper, then how each study deviates."""
    rows = claim_rows(results)
    counts = Counter(row["verdict"] for row in rows)
    summary = ", ".join(f"{counts[word]} {word}" for word in (*VERDICTS, NOT_RUN) if counts[word])
    lines = [
        "# Reproduction of the four papers",
        "",
        "Written by `flatscope study export` from the saved results; do not edit. One row per claim. The range in "
        "which a claim holds is part of its declaration and was fixed before the runs. *Reproduced*: the whole "
        "interval lies in that range. *Partly*: the value does but its interval does not (or a single run has none), "
        "or only the direction holds. *Not judged*: the number could not be had, for the reason given. Intervals are "
        "of 95 % unless a note says otherwise.",
        "",
        f"{len(rows)} claims: {summary}.",
    ]
    for paper, title in PAPERS.items():
        of_paper = [row for row in rows if row["paper"] == paper]
        if not of_paper:
            continue
        lines += ["", f"## {title[:1].upper()}{title[1:]}", "", _line(HEADER), _line("---" for _ in HEADER)]
        for row in of_paper:
            claim = f"{row['statement']} ({row['number']})"
            verdict = f"**{row['verdict']}**" + (f": {row['note']}" if row["note"] else "")
            cells = (f"`{row['study']}`", row["where"], claim, row["reported"], row["found"], row["runs"])
            lines.append(_line((*cells, row["scale"], verdict)))
    lines += ["", "## How the runs differ from the papers", ""]
    for declared in declared_studies().values():
        lines += _deviations(declared, latest(results.get(declared.name, {})))
    return "\n".join(lines) + "\n"


def _deviations(declared: Study, result: StudyResult | None) -> list[str]:
    cost = f" At paper scale: {declared.paper_cost}" if declared.paper_cost else ""
    if result is None:
        return [f"- `{declared.name}`: {NOT_RUN}.{cost}"]
    facts = result.provenance
    told = f"{result.scale}, {facts['seconds']} s on {facts['device']}, {facts['date']}, `{facts['command']}`"
    differences = " ".join(f"{words.rstrip('.')}." for words in (*result.deviations, *result.notes))
    return [f"- `{declared.name}` ({told}): {differences or 'as in the paper.'}{cost}"]


def _row_without_result(declared: Study, number: int) -> dict[str, str]:
    claim = declared.claims[number]
    return {
        "study": declared.name,
        "paper": declared.paper,
        "where": claim.where,
        "statement": claim.statement,
        "number": claim.number,
        "reported": claim.reported,
        "found": "—",
        "runs": "0",
        "scale": "—",
        "verdict": NOT_RUN,
        "note": "",
    }


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
