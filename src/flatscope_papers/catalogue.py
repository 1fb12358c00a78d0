"""All studies by name; importing a paper's package declares its studies."""

from __future__ import annotations

from flatscope.errors import UnknownNameError
from flatscope_papers import neyshabur2017, petzka2019, robustness, yi2019, zhang2017  # noqa: F401  declare studies
from flatscope_papers.declaration import Study, declared_studies


def studies() -> dict[str, Study]:
    """All studies by name, in the order of the papers."""
    return declared_studies()


def find_study(name: str) -> Study:
    """The study of that name."""
    known = studies()
    if name not in known:
        raise UnknownNameError.among(name, known, "study")
    return known[name]
