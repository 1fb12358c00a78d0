"""How flat is the minimum of a trained network, does that number mean anything, and what does it say?"""

import importlib
import random
from typing import TYPE_CHECKING, Any

from flatscope.parts import public_name
from flatscope.version import __version__ as __version__

if TYPE_CHECKING:
    from flatscope import stats as stats
    from flatscope.auditing import Audit as Audit
    from flatscope.auditing import audit as audit
    from flatscope.comparing.comparison import Comparison as Comparison
    from flatscope.comparing.running import compare as compare
    from flatscope.context import Context as Context
    from flatscope.decisions.allocation import Allocation as Allocation
    from flatscope.decisions.applying import Rounded as Rounded
    from flatscope.decisions.diagonal import Diagonal as Diagonal
    from flatscope.decisions.diagonal import diagonal as diagonal
    from flatscope.decisions.forecast import Forecast as Forecast
    from flatscope.decisions.forecast import forecast as forecast
    from flatscope.decisions.sensitivity import Sensitivity as Sensitivity
    from flatscope.decisions.sensitivity_function import sensitivity as sensitivity
    from flatscope.errors import FlatscopeError as FlatscopeError
    from flatscope.errors import InputError as InputError
    from flatscope.errors import NumericalWarning as NumericalWarning
    from flatscope.explaining import Explanation as Explanation
    from flatscope.explaining import explain as explain
    from flatscope.interpolation import Simplex as Simplex
    from flatscope.interpolation import interpolate as interpolate
    from flatscope.landscapes.making import landscape as landscape
    from flatscope.landscapes.surface import Surface as Surface
    from flatscope.langevin import SGLD as SGLD
    from flatscope.measuring import bounds as bounds
    from flatscope.measuring import measure as measure
    from flatscope.problem import Problem as Problem
    from flatscope.spectra.density import SpectralDensity as SpectralDensity
    from flatscope.spectra.eigenpairs import Eigenpairs as Eigenpairs
    from flatscope.spectra.finding import eigenpairs as eigenpairs
    from flatscope.spectra.finding import gauss_newton as gauss_newton
    from flatscope.spectra.finding import hessian as hessian
    from flatscope.spectra.finding import spectral_density as spectral_density
    from flatscope.symmetries.basis_paths import BasisPaths as BasisPaths
    from flatscope.symmetries.folding import fold_batchnorm as fold_batchnorm
    from flatscope.symmetries.scaling import rescale as rescale
    from flatscope.table import Table as Table
    from flatscope_app import report as report
    from flatscope_papers import study as study
    from flatscope_training import Atlas as Atlas
    from flatscope_training import Leaderboard as Leaderboard
    from flatscope_training import Population as Population
    from flatscope_training import PopulationFrame as PopulationFrame
    from flatscope_training import Stability as Stability
    from flatscope_training import StabilityRecorder as StabilityRecorder
    from flatscope_training import atlas as atlas
    from flatscope_training import benchmark as benchmark
    from flatscope_training import train_population as train_population

# Where each public name lives. It is loaded when first asked for: torch, pandas and scipy take seconds, which the help
# of a command or a misspelt word should not cost.
_HOMES = {
    "SGLD": "langevin",
    "Allocation": "decisions.allocation",
    "Audit": "auditing",
    "BasisPaths": "symmetries.basis_paths",
    "Comparison": "comparing.comparison",
    "Context": "context",
    "Diagonal": "decisions.diagonal",
    "Eigenpairs": "spectra.eigenpairs",
    "Explanation": "explaining",
    "FlatscopeError": "errors",
    "Forecast": "decisions.forecast",
    "InputError": "errors",
    "NumericalWarning": "errors",
    "Problem": "problem",
    "Rounded": "decisions.applying",
    "Sensitivity": "decisions.sensitivity",
    "Simplex": "interpolation",
    "SpectralDensity": "spectra.density",
    "Surface": "landscapes.surface",
    "Table": "table",
    "audit": "auditing",
    "compare": "comparing.running",
    "diagonal": "decisions.diagonal",
    "eigenpairs": "spectra.finding",
    "explain": "explaining",
    "fold_batchnorm": "symmetries.folding",
    "forecast": "decisions.forecast",
    "gauss_newton": "spectra.finding",
    "hessian": "spectra.finding",
    "interpolate": "interpolation",
    "landscape": "landscapes.making",
    "measure": "measuring",
    "rescale": "symmetries.scaling",
    "sensitivity": "decisions.sensitivity_function",
    "spectral_density": "spectra.finding",
}
# Packages that are public themselves; `bounds` can be called.
_PACKAGES = ("bounds", "stats")
# Names of the packages beside this one, which are asked for them.
_IN_PARTS = (
    "Atlas",
    "Leaderboard",
    "Population",
    "PopulationFrame",
    "Stability",
    "StabilityRecorder",
    "atlas",
    "benchmark",
    "report",
    "study",
    "train_population",
)
__all__ = sorted((*_HOMES, *_PACKAGES, *_IN_PARTS, "__version__"))


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    state = random.getstate()
    try:
        if name in _PACKAGES:
            return importlib.import_module(f"flatscope.{name}")
        if name in _IN_PARTS:
            found = public_name(name)
        else:
            found = getattr(importlib.import_module(f"flatscope.{_HOMES[name]}"), name)
    finally:
        random.setstate(state)  # packages that are loaded here draw from it (rich does)
    globals()[name] = found  # asked once only
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
