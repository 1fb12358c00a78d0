"""A reason is given for a claim that fails, and for no other."""

from __future__ import annotations

import pytest

from flatscope_papers.claims import POSITIVE, Answer, Claim
from flatscope_papers.contradiction_notes import answers_with_reasons

CLAIMS = [Claim(key, "Figure 1", "more", "a difference", "more", holds=POSITIVE) for key in ("a", "b")]
REASONS = {"a": "too few images"}


@pytest.mark.parametrize(
    ("value", "scale", "said"),
    [(-1.0, "small", True), (1.0, "small", False), (-1.0, "smoke", False)],
)
def test_reasons(value: float, scale: str, said: bool) -> None:
    found = {"a": Answer(value, value, value, note="seen"), "b": Answer(-1.0, -1.0, -1.0)}
    told = answers_with_reasons(found, CLAIMS, scale, REASONS)
    assert ("likeliest reason: too few images" in told["a"].note) is said
    assert told["a"].note.startswith("seen")
    assert told["b"].note == ""
    assert found["a"].note == "seen"
