"""Judge a saved result by the claims as they are declared today, from its own table: no network is needed for it.

A rule may turn out to be wrong after a run: that a number was taken over networks that differ in what acts, say. The
rule is then changed in the declaration, where its history can be read, and the claim marked as newer than its results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

import pandas as pd

from flatscope import InputError
from flatscope_papers.claims import Answer
from flatscope_papers.contradiction_notes import answer_without_reason
from flatscope_papers.declaration import Analysis, Study, keep_saved_figure
from flatscope_papers.study_result import StudyResult
from flatscope_papers.study_runs import judged_study_result


def result_with_current_claims(declared: Study, saved: StudyResult, tables: Mapping[str, pd.DataFrame]) -> StudyResult:
    """The saved result with today's claims.

    Answers come from the table where the study can take them from there; else a number that is computed as it was
    keeps its answer. A claim with neither is left out: it has not been run.

    Args:
        declared: the study.
        saved: its result at one scale.
        tables: by study, the saved tables of the same scale.
    """
    if declared.table_of not in tables:
        raise InputError(f"the table of {declared.table_of}", "none saved", where=f"{declared.name}, {saved.scale}")
    analysis_of_table = declared.from_table(tables[declared.table_of], saved.scale) if declared.from_table else None
    numbers = {claim.key: claim.number for claim in declared.claims}
    answers = {
        finding.claim.key: answer_without_reason(finding.answer)
        for finding in saved.findings
        if numbers.get(finding.claim.key) == finding.claim.number
    } | dict(analysis_of_table.answers if analysis_of_table else {})
    claims = tuple(claim for claim in declared.claims if claim.key in answers)
    known: dict[str, Answer] = {claim.key: answers[claim.key] for claim in claims}
    asked = replace(declared, words=replace(declared.words, claims=claims))
    notes = tuple(dict.fromkeys((*saved.notes, *(analysis_of_table.notes if analysis_of_table else ()))))
    provenance = {**saved.provenance, "judged again": datetime.now(UTC).strftime("%Y-%m-%d")}
    analysis = Analysis(
        saved.table,
        known,
        analysis_of_table.draw if analysis_of_table else keep_saved_figure,
        notes,
        analysis_of_table.reasons if analysis_of_table else {},
    )
    result = judged_study_result(asked, saved.scale, analysis, provenance)
    drawn = (
        analysis_of_table is not None and analysis_of_table.draw is not keep_saved_figure and bool(saved.svg)
    )  # no picture is kept of a scale that a larger one has superseded
    return result if drawn else replace(result, svg=saved.svg, png=saved.png)
