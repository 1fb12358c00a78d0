"""SGD as noise, and the cases in which its limit is known: Langevin dynamics, linear and polynomial networks."""

from flatscope.dynamics.chains import ChainRun, SampleNoise, gradient_of, run_chains
from flatscope.dynamics.langevin import SGLD, quadratic_variance
from flatscope.dynamics.linear import max_margin, minimum_norm
from flatscope.dynamics.path_penalty import path_penalty
from flatscope.dynamics.polynomial import polynomial_twin
from flatscope.dynamics.potentials import TwoBasins, ValleyAndPoint, simulate

__all__ = [
    "SGLD",
    "ChainRun",
    "SampleNoise",
    "TwoBasins",
    "ValleyAndPoint",
    "gradient_of",
    "max_margin",
    "minimum_norm",
    "path_penalty",
    "polynomial_twin",
    "quadratic_variance",
    "run_chains",
    "simulate",
]
