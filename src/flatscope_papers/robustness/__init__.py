"""A study of our own: which measures keep their order of networks when measured on other samples or weights."""

from flatscope_papers.robustness import of_measures  # noqa: F401  declares the study
