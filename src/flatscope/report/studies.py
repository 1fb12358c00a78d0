"""Studies on the page: a paper's figure beside what came out here, and a verdict on every claim."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from flatscope.registry import PAPERS
from flatscope.report.charts import Colours
from flatscope.report.markup import fragment
from flatscope.report.parts import Part, Section

if TYPE_CHECKING:
    from flatscope.studies.result import StudyResult  # only then: studies need Matplotlib, most pages do not

BADGES = {"reproduced": "good", "partly": "fair", "not reproduced": "poor", "not judged": ""}


def studies_part(studies: Mapping[str, StudyResult], _: Colours) -> Part:
    """Verdicts in the summary; per study its figure, its claims and how its setting differs from the paper's."""
    counts = {name: Counter(finding.verdict for finding in study.findings) for name, study in studies.items()}
    words = {
        name: ", ".join(f"{count[verdict]} {verdict}" for verdict in BADGES if count[verdict]) or "no claims"
        for name, count in counts.items()
    }
    body = fragment(
        "studies.html",
        studies=studies,
        pictures={name: base64.b64encode(study.svg.encode()).decode() for name, study in studies.items()},
        words=words,
        papers=PAPERS,
        badges=BADGES,
    )
    provenance = {f"{name}, study": dict(study.provenance) for name, study in studies.items()}
    summary = fragment("study_summary.html", studies=studies, words=words)
    return Part(summary, [Section("studies", "Studies", body)], provenance)
