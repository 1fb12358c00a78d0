"""Theory of the papers to play with: SGD as noise and the cases in which its limit is known; lemmas and estimates.

| what | names |
|---|---|
| chains of SGD with noise | `run_chains`, `ChainRun`, `SampleNoise`, `gradient_of`, `stationary_variance_on_parabola` |
| potentials with minima of equal depth (Figures 7 to 10) | `TwoBasins`, `ValleyAndPoint`, `simulate` |
| the noise of mini-batch gradients (Figure 5) | `noise_at`, `noise_spectrum`, `GradientNoise` |
| linear networks: minimum norm, maximum margin, descent | `minimum_norm`, `max_margin`, `descend`, `logistic_descent` |
| polynomial networks | `polynomial_twin`, `PolynomialActivation`, `monomials`, `monomial_count`, `BinaryTree` |
| the sum of squared paths as a regulariser, the sides of (43) | `path_penalty`, `network_sides` |
| worst hinge losses, (37) and (38) | `robust_hinge` of `linear` |
| atomic uncertainty sets (Definition 4) | `is_atomic` of `uncertainty` |
| changed samples and changed weights (section 9.7, (49) to (51)) | module `loss_responses` |
| functions that are trees, and networks for them (Proposition 1) | module `compositional` |
| dynamics of deep linear networks, residual layers (Proposition 3) | module `linear_dynamics` |
| samples that deep and shallow networks need, entropies (eq 25 to 30) | module `sample_sizes` |
| robustness on any partition of the inputs (eq 17) | module `partitions` |
| matrices on features as changes of inputs (Petzka et al. 2019, Appendix D) | module `input_changes` |
| lemmas about noise on the weights (Neyshabur et al. 2017) | module `sharpness_lemmas` |
| paths one by one, their matrix, Lemma 5.1 (Yi et al. 2019) | module `path_matrix` |
| the radius (32) as printed, and the output difference (33) | module `activation_radius` |
| basis paths of each stage, BatchNorm left alone | module `stage_paths` |
| robust optimisation (10), open paths, Proposition 2 | module `robust_weights` |
"""

from flatscope_papers.theory.chains import (
    ChainRun,
    SampleNoise,
    gradient_of,
    run_chains,
    stationary_variance_on_parabola,
)
from flatscope_papers.theory.linear import descend, logistic_descent, max_margin, minimum_norm
from flatscope_papers.theory.mini_batch_noise import GradientNoise, noise_at, noise_spectrum
from flatscope_papers.theory.path_penalties import path_penalty
from flatscope_papers.theory.polynomial import PolynomialActivation, polynomial_twin
from flatscope_papers.theory.polynomial_operator import BinaryTree, monomial_count, monomials
from flatscope_papers.theory.potentials import TwoBasins, ValleyAndPoint, simulate

__all__ = [
    "BinaryTree",
    "ChainRun",
    "GradientNoise",
    "PolynomialActivation",
    "SampleNoise",
    "TwoBasins",
    "ValleyAndPoint",
    "descend",
    "gradient_of",
    "logistic_descent",
    "max_margin",
    "minimum_norm",
    "monomial_count",
    "monomials",
    "noise_at",
    "noise_spectrum",
    "path_penalty",
    "polynomial_twin",
    "run_chains",
    "simulate",
    "stationary_variance_on_parabola",
]
