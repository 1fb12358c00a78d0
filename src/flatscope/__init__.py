"""How flat is the minimum of a trained network, does that number mean anything, and what does it say?"""

from flatscope import stats
from flatscope.auditing import audit
from flatscope.context import Context
from flatscope.dynamics.langevin import SGLD
from flatscope.errors import FlatscopeError, InputError, NumericalWarning
from flatscope.interpolation import Simplex, interpolate
from flatscope.landscape import Surface, landscape
from flatscope.measuring import bounds, measure
from flatscope.problem import Problem
from flatscope.report.page import report
from flatscope.report.population import PopulationFrame
from flatscope.studies import study
from flatscope.symmetries import BasisPaths, fold_batchnorm, rescale
from flatscope.symmetries.audit import Audit
from flatscope.table import Table
from flatscope.training.population import Population, train_population
from flatscope.version import __version__

__all__ = [
    "SGLD",
    "Audit",
    "BasisPaths",
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
