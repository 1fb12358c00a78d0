"""How flat is the minimum of a trained network, does that number mean anything, and what does it say?"""

import importlib
from typing import TYPE_CHECKING, Any

from flatscope.auditing import audit
from flatscope.comparing import Comparison, compare
from flatscope.context import Context
from flatscope.dynamics.langevin import SGLD
from flatscope.errors import FlatscopeError, InputError, NumericalWarning
from flatscope.interpolation import Simplex, interpolate
from flatscope.landscape import Surface, landscape
from flatscope.measuring import bounds, measure
from flatscope.problem import Problem
from flatscope.report.page import report
from flatscope.report.population import PopulationFrame
from flatscope.symmetries import BasisPaths, fold_batchnorm, rescale
from flatscope.symmetries.audit import Audit
from flatscope.table import Table
from flatscope.training.population import Population, train_population
from flatscope.version import __version__

if TYPE_CHECKING:
    from flatscope import stats
    from flatscope.studies import study

__all__ = [
    "SGLD",
    "Audit",
    "BasisPaths",
    "Comparison",
    "Context",
    "FlatscopeError",
    "InputError",
    "NumericalWarning",
    "Population",
    "PopulationFrame",
    "Problem",
    "Simplex",
    "Surface",
    "Table",
    "__version__",
    "audit",
    "bounds",
    "compare",
    "fold_batchnorm",
    "interpolate",
    "landscape",
    "measure",
    "report",
    "rescale",
    "stats",
    "study",
    "train_population",
]


def __getattr__(name: str) -> Any:
    """Statistics and studies are loaded when first asked for: they take as long as torch itself."""
    if name == "stats":
        return importlib.import_module("flatscope.stats")
    if name == "study":
        return importlib.import_module("flatscope.studies").study
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
