"""All bounds. Importing a family declares it; a new family is one line here."""

from flatscope.generalization_bounds import classical, norm_based, optimised_posterior, pac_bayes, psi

__all__ = ["classical", "norm_based", "optimised_posterior", "pac_bayes", "psi"]
