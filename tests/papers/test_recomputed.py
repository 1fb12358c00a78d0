"""The claims of the papers' studies agree with what other methods make of the saved tables."""

from __future__ import annotations

import pytest
from recomputed import CLAIMS, RESULTS, Second, decided

from flatscope_papers import load_result
from flatscope_papers.claims import Finding

# Bootstrap percentiles of so few networks are narrower than studentised intervals; these lie on the edge of a range.
ON_THE_EDGE = {("yi2019-balance", "balanced"), ("petzka2019-fig4", "fc4")}


def saved(second: Second) -> Finding:
    result = load_result(RESULTS / second.study / "paper")
    return next(finding for finding in result.findings if finding.claim.key == second.key)


def test_there_are_many_of_them() -> None:
    assert len({(second.study, second.key) for second in CLAIMS}) == len(CLAIMS) >= 60


@pytest.mark.filterwarnings("ignore:.*is gone")
@pytest.mark.parametrize("second", CLAIMS, ids=lambda second: f"{second.study}-{second.key}")
def test_the_number_is_that_of_another_method(second: Second) -> None:
    assert second.value() == pytest.approx(saved(second).answer.value, rel=1e-4, abs=1e-9)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*is gone")
@pytest.mark.parametrize("second", [s for s in CLAIMS if s.unit], ids=lambda second: f"{second.study}-{second.key}")
def test_the_bootstrap_decides_alike(second: Second) -> None:
    finding = saved(second)
    low, high = finding.answer.low, finding.answer.high
    assert low is not None
    assert high is not None
    alike = decided(second.interval(), finding.claim.holds) == decided((low, high), finding.claim.holds)
    assert alike or (second.study, second.key) in ON_THE_EDGE
