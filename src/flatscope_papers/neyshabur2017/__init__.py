"""Neyshabur et al. (2017), Exploring Generalization in Deep Learning."""

from flatscope_papers.neyshabur2017 import conditions, confusion, labels, width  # noqa: F401  declare studies
