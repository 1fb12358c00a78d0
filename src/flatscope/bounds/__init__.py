"""All bounds. Importing a family declares it; a new family is one line here."""

from flatscope.bounds import classical, norm_based, pac_bayes, psi, rademacher, robustness, sharpness_theorem

__all__ = ["classical", "norm_based", "pac_bayes", "psi", "rademacher", "robustness", "sharpness_theorem"]
