"""Every figure and table of the four papers as a study with claims and verdicts.

The library finds this package by its entry point in the group `flatscope.parts`, and asks it for `OFFER`.
"""

from typing import TYPE_CHECKING, Any

from flatscope.parts import Offer

if TYPE_CHECKING:
    from flatscope_papers.known_studies import find_study, studies
    from flatscope_papers.study_result import load_result
    from flatscope_papers.study_runs import study

__all__ = ["OFFER", "find_study", "load_result", "studies", "study"]

OFFER = Offer(
    "flatscope_papers",
    names={"study": "study_runs:study"},
    commands={"study": ("Figures and tables of the four papers, re-run with a verdict.", "study_commands:app")},
    kinds="study_kind:KINDS",
)


# Names of this package alone, loaded when first asked for like those above.
_HOMES = {
    "find_study": "known_studies:find_study",
    "load_result": "study_result:load_result",
    "studies": "known_studies:studies",
}


def __getattr__(name: str) -> Any:
    return OFFER.load(_HOMES[name]) if name in _HOMES else OFFER.attribute(name)
