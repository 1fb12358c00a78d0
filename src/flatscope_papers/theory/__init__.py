"""SGD as noise, and the cases in which its limit is known: Langevin dynamics, linear and polynomial networks."""

from flatscope import SGLD
from flatscope.training.langevin import quadratic_variance
from flatscope_papers.theory.chains import ChainRun, SampleNoise, gradient_of, run_chains
from flatscope_papers.theory.linear import max_margin, minimum_norm
from flatscope_papers.theory.path_penalty import path_penalty
from flatscope_papers.theory.polynomial import polynomial_twin
from flatscope_papers.theory.potentials import TwoBasins, ValleyAndPoint, simulate

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
