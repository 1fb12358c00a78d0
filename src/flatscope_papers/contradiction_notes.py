"""The likeliest reason beside a number that does not bear out its claim: said only where that is the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from flatscope_papers.claims import CONTRADICTED, Answer, Claim, finding_of_claim

BEGINS = "likeliest reason: "


def answers_with_reasons(
    answers: Mapping[str, Answer], claims: Iterable[Claim], scale: str, reasons: Mapping[str, str]
) -> dict[str, Answer]:
    """The answers; those of claims that are contradicted with the reason that is given for them.

    Args:
        answers: given by the keys of the claims.
        claims: of the study.
        scale: of the run.
        reasons: why a claim may fail at this scale, by the key of the claim.
    """
    explained = dict(answers)
    for claim in claims:
        answer = explained[claim.key]
        if claim.key in reasons and finding_of_claim(claim, answer, scale).verdict == CONTRADICTED:
            words = "; ".join(part for part in (answer.note, f"{BEGINS}{reasons[claim.key]}") if part)
            explained[claim.key] = replace(answer, note=words)
    return explained


def answer_without_reason(answer: Answer) -> Answer:
    """The answer without what `answers_with_reasons` added."""
    return replace(answer, note=answer.note.partition(BEGINS)[0].rstrip("; "))
