"""All studies by name: every module of a paper's folder is imported, which declares its studies."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from flatscope.errors import UnknownNameError
from flatscope_papers import neyshabur2017, petzka2019, yi2019, zhang2017
from flatscope_papers.declaration import Study, declared_studies

FOLDERS = (yi2019, petzka2019, neyshabur2017, zhang2017)


@functools.cache
def studies() -> dict[str, Study]:
    """All studies by name, in the order of the papers."""
    for folder in FOLDERS:
        for module in pkgutil.iter_modules(folder.__path__):
            importlib.import_module(f"{folder.__name__}.{module.name}")
    return declared_studies()


def find_study(name: str) -> Study:
    """The study of that name."""
    known = studies()
    if name not in known:
        raise UnknownNameError.among(name, known, "study")
    return known[name]
