"""SGD as noise, and the cases in which its limit is known: Langevin dynamics, linear and polynomial networks."""

from flatscope.dynamics.chains import ChainRun, SampleNoise, gradient_of, run_chains
from flatscope.dynamics.langevin import SGLD, quadratic_variance

__all__ = ["SGLD", "ChainRun", "SampleNoise", "gradient_of", "quadratic_variance", "run_chains"]
