"""The result of a study: table, figure, claims with verdicts, and how it came about; kept as small files."""

from __future__ import annotations

import base64
import io
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from flatscope.errors import DataFileError
from flatscope.extend import numbered, read_file, write_whole
from flatscope.files import CHANGED, csv_bytes, digest, from_json_bytes, json_bytes, without_nan
from flatscope_papers.claims import Answer, Claim, Finding, finding_of_claim, judged_verdict_counts, number_text

UNKNOWN: dict[str, Any] = {"date": "a day not noted", "device": "a device not noted", "seconds": math.nan}
TABLE_FILE, VERDICTS_FILE, FIGURE_FILE, PICTURE_FILE = "table.csv", "verdicts.json", "figure.svg", "figure.png"
MOST_VERDICTS = 1 << 28  # bytes of a file of verdicts that is read


@dataclass(frozen=True)
class StudyResult:
    """Result of a study at one scale.

    Attributes:
        name: of the study.
        title: what it shows.
        paper: key of the paper.
        source: figure or table of that paper.
        scale: "smoke", "small" or "paper".
        table: the numbers behind the figure.
        findings: every claim with its answer and verdict.
        svg: the figure.
        png: the same for places that do not show SVG.
        deviations: how this scale differs from the paper's setting.
        notes: what was seen beside the claims.
        provenance: version, command, device, date, seconds, networks.
    """

    name: str
    title: str
    paper: str
    source: str
    scale: str
    table: pd.DataFrame
    findings: tuple[Finding, ...]
    svg: str
    png: bytes
    deviations: tuple[str, ...]
    notes: tuple[str, ...]
    provenance: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"StudyResult({self.name}, {self.scale}: {self.counts})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{escape(row['statement'])}</td><td>{escape(row['reported'])}</td>"
            f"<td>{escape(row['found'])}</td><td>{escape(row['verdict'])}</td></tr>"
            for row in self.rows()
        )
        head = "<tr><th>claim</th><th>paper</th><th>here</th><th>verdict</th></tr>"
        picture = base64.b64encode(self.svg.encode()).decode()  # as an image, in which no script runs
        return (
            f"<h3>{escape(self.title)}</h3><table>{head}{rows}</table>"
            f'<img alt="{escape(self.title)}" src="data:image/svg+xml;base64,{picture}">'
        )

    @property
    def counts(self) -> str:
        """Number of each verdict, in words; slips and remarks are outside."""
        return judged_verdict_counts(self.findings)

    @property
    def how(self) -> str:
        """Device, time and day of the run, in words; reading stored trials again is not what a study costs."""
        first = self.provenance.get("first run")
        facts = UNKNOWN | dict(first or self.provenance)
        trials, now = facts.get("configurations", 0), facts.get("of which run now", 0)
        run_in_words = f"{self.scale} scale, {facts['seconds']:g} s on {facts['device']}, {facts['date']}"
        if first is None and trials and not now:
            return f"{self.scale} scale, {_reanalysis_in_words(facts)}"
        if now < trials:
            run_in_words += f"; {trials - now} of {trials} trials were there already"
        return (
            run_in_words
            if first is None
            else f"{run_in_words}; {_reanalysis_in_words(UNKNOWN | dict(self.provenance))}"
        )

    def with_run_facts_of(self, before: StudyResult) -> StudyResult:
        """This result; where nothing was run for it, with what it took when its trials were run."""
        if self.provenance.get("of which run now") or not self.provenance.get("configurations"):
            return self
        first = before.provenance.get("first run", before.provenance)
        kept = {name: first[name] for name in ("version", "device", "date", "seconds") if name in first}
        return replace(self, provenance={**self.provenance, "first run": kept})

    @property
    def command(self) -> str:
        """Command that runs it again."""
        return f"flatscope study run {self.name} --scale {self.scale}"

    def rows(self) -> list[dict[str, str]]:
        """One row per claim, as text."""
        return [
            {
                "study": self.name,
                "where": finding.claim.where,
                "statement": finding.claim.statement,
                "number": finding.claim.number,
                "reported": finding.claim.reported,
                "rule": finding.claim.rule,
                "found": answer_text(finding.answer),
                "runs": str(finding.answer.runs),
                "verdict": finding.verdict,
                "in_part": "holds in part" if finding.holds_in_wider_range else "",
                "kind": finding.claim.kind,
                "note": finding.answer.note,
            }
            for finding in self.findings
        ]

    def save(self, folder: str | Path) -> Path:
        """Write table, verdicts and figure into `folder`; each file whole, the verdicts last.

        Returns:
            The folder.
        """
        target = Path(folder)
        table = csv_bytes(self.table, "%.8g")
        made = {TABLE_FILE: table, FIGURE_FILE: self.svg.encode(), PICTURE_FILE: self.png}
        files = {name: content for name, content in made.items() if content}
        for name, content in files.items():
            write_whole(target / name, content)
        saved = {
            "name": self.name,
            "title": self.title,
            "paper": self.paper,
            "source": self.source,
            "scale": self.scale,
            "findings": [_finding_to_json(finding) for finding in self.findings],
            "deviations": list(self.deviations),
            "notes": list(self.notes),
            "provenance": dict(self.provenance),
            "files": {name: digest([content]) for name, content in files.items()},
        }
        write_whole(target / VERDICTS_FILE, json_bytes(json.dumps(saved, indent=1, allow_nan=False)))
        return target

    @classmethod
    def load(cls, folder: str | Path) -> StudyResult:
        """The result that `save` wrote."""
        target = Path(folder)
        try:
            saved = from_json_bytes(read_file(target / VERDICTS_FILE, MOST_VERDICTS))
            # Pictures may be gone: those of a scale that a larger one has superseded are not kept.
            here = [TABLE_FILE, *(name for name in (FIGURE_FILE, PICTURE_FILE) if (target / name).exists())]
            files = {name: read_file(target / name) for name in here}
            for name, checksum in saved.pop("files", {}).items():
                if name in files and digest([files[name]]) != checksum:
                    raise ValueError(f"{name}: {CHANGED}")
            return cls(
                table=pd.read_csv(io.BytesIO(files[TABLE_FILE])),
                findings=tuple(_finding_from_json(entry, saved["scale"]) for entry in saved.pop("findings")),
                svg=files.get(FIGURE_FILE, b"").decode(),
                png=files.get(PICTURE_FILE, b""),
                deviations=tuple(saved.pop("deviations")),
                notes=tuple(saved.pop("notes")),
                **saved,
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            raise DataFileError(
                "the result of a study",
                f"{type(problem).__name__}: {problem}",
                where=str(target),
                fix=f"Run it again: flatscope study run {target.parent.name} --scale {target.name}",
            ) from problem


def _reanalysis_in_words(facts: Mapping[str, Any]) -> str:
    """From what a result was analysed a second time."""
    trials = numbered(facts.get("configurations", 0), "stored trial")
    stored = f" of {facts['stored on']}" if facts.get("stored on") else ""
    weights = " without their weights" if facts.get("weights") == "not kept" else ""
    return f"analysed again on {facts['date']} from {trials}{stored}{weights}"


def load_result(folder: str | Path) -> StudyResult:
    """The result that `StudyResult.save` wrote into a folder; says which of its pictures are gone."""
    result, target = StudyResult.load(folder), Path(folder)
    written = from_json_bytes(read_file(target / VERDICTS_FILE, MOST_VERDICTS)).get("files", {})
    if gone := [name for name in written if not (target / name).exists()]:
        warnings.warn(f"{target}: {', '.join(gone)} of this study is gone; it is shown without", stacklevel=2)
    return result


def answer_text(answer: Answer) -> str:
    """Value and interval in words."""
    if math.isnan(answer.value):
        return "—"
    if answer.low is None or answer.high is None:
        return f"{answer.value:.4g} ({answer.without_interval})"
    if answer.seen:
        return _extreme_in_words(answer)
    if answer.low == answer.value == answer.high:
        return f"{number_text(answer.value)} (exact)"
    return f"{answer.value:.4g} [{answer.low:.4g}, {answer.high:.4g}]"


def _extreme_in_words(answer: Answer) -> str:
    """An extreme among the networks looked at."""
    value, low, high, all_of = answer.value, answer.low, answer.high, f"{answer.runs} {answer.seen}"
    if low == high:
        return f"{value:.4g} (all {all_of})"
    side, other = (f"largest of {all_of}", f"smallest {low:.4g}")
    if value == low:
        side, other = (f"smallest of {all_of}", f"largest {high:.4g}")
    return f"{value:.4g} ({side}, {other})"


def _finding_to_json(finding: Finding) -> dict[str, Any]:
    entry = {"claim": asdict(finding.claim), "estimate": asdict(finding.answer), "verdict": finding.verdict}
    cleaned: dict[str, Any] = without_nan(entry)
    return cleaned


def _finding_from_json(entry: Mapping[str, Any], scale: str) -> Finding:
    """A claim with its answer; the verdict follows from them, and is in the file for those who read it."""
    claim, answer = dict(entry["claim"]), dict(entry["estimate"])
    for name in ("holds", "partly"):
        if claim[name] is not None:
            claim[name] = tuple(float(end) for end in claim[name])
    for name in ("value", "low", "high"):
        answer[name] = None if answer[name] is None else float(answer[name])
    return finding_of_claim(Claim(**claim), Answer(**answer), scale)
