"""How flat is the minimum of a trained network, does that number mean anything, and what does it say?"""

import importlib
import random
from typing import TYPE_CHECKING, Any

from flatscope.factories import from_papers
from flatscope.version import __version__

if TYPE_CHECKING:
    from flatscope import stats
    from flatscope.auditing import audit
    from flatscope.comparing.comparison import Comparison
    from flatscope.comparing.running import compare
    from flatscope.context import Context
    from flatscope.errors import FlatscopeError, InputError, NumericalWarning
    from flatscope.interpolation import Simplex, interpolate
    from flatscope.landscapes.making import landscape
    from flatscope.landscapes.surface import Surface
    from flatscope.measuring import bounds, measure
    from flatscope.problem import Problem
    from flatscope.reports.page import report
    from flatscope.reports.population_frame import PopulationFrame
    from flatscope.spectra.density import SpectralDensity
    from flatscope.spectra.finding import eigenpairs, gauss_newton, hessian, spectral_density
    from flatscope.spectra.pairs import Eigenpairs
    from flatscope.symmetries import BasisPaths, fold_batchnorm, rescale
    from flatscope.symmetries.audit import Audit
    from flatscope.table import Table
    from flatscope.training.langevin import SGLD
    from flatscope.training.population import Population, train_population

__all__ = [
    "SGLD",
    "Audit",
    "BasisPaths",
    "Comparison",
    "Context",
    "Eigenpairs",
    "FlatscopeError",
    "InputError",
    "NumericalWarning",
    "Population",
    "PopulationFrame",
    "Problem",
    "Simplex",
    "SpectralDensity",
    "Surface",
    "Table",
    "__version__",
    "audit",
    "bounds",
    "compare",
    "eigenpairs",
    "fold_batchnorm",
    "gauss_newton",
    "hessian",
    "interpolate",
    "landscape",
    "measure",
    "report",
    "rescale",
    "spectral_density",
    "stats",
    "study",
    "train_population",
]

# Where each public name lives. It is loaded when first asked for: torch, pandas and scipy take seconds, which the help
# of a command or a misspelt word should not cost.
_HOMES = {
    "SGLD": "training.langevin",
    "Audit": "symmetries.audit",
    "BasisPaths": "symmetries",
    "Comparison": "comparing.comparison",
    "Context": "context",
    "Eigenpairs": "spectra.pairs",
    "FlatscopeError": "errors",
    "InputError": "errors",
    "NumericalWarning": "errors",
    "Population": "training.population",
    "PopulationFrame": "reports.population_frame",
    "Problem": "problem",
    "Simplex": "interpolation",
    "SpectralDensity": "spectra.density",
    "Surface": "landscapes.surface",
    "Table": "table",
    "audit": "auditing",
    "compare": "comparing.running",
    "eigenpairs": "spectra.finding",
    "fold_batchnorm": "symmetries",
    "gauss_newton": "spectra.finding",
    "hessian": "spectra.finding",
    "interpolate": "interpolation",
    "landscape": "landscapes.making",
    "measure": "measuring",
    "report": "reports.page",
    "rescale": "symmetries",
    "spectral_density": "spectra.finding",
    "train_population": "training.population",
}
# Packages that are public themselves; `bounds` can be called.
_PACKAGES = ("bounds", "stats")


def __getattr__(name: str) -> Any:
    if name == "study":  # the studies live in a package of their own
        return from_papers("study")
    if name not in _HOMES and name not in _PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    state = random.getstate()
    try:
        if name in _PACKAGES:
            return importlib.import_module(f"flatscope.{name}")
        found = getattr(importlib.import_module(f"flatscope.{_HOMES[name]}"), name)
    finally:
        random.setstate(state)  # packages that are loaded here draw from it (rich does)
    globals()[name] = found  # asked once only
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
