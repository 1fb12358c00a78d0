"""Yi et al. (2019), Positively Scale-Invariant Flatness of ReLU Networks."""

from flatscope_papers.yi2019 import balance, basis_paths, invariance, landscapes, pac_bayes  # noqa: F401  declare studies
