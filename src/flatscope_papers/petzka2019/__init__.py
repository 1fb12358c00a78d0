"""Petzka et al. (2019), A Reparameterization-Invariant Flatness Measure."""

from flatscope_papers.petzka2019 import correlations, mnist, reparameterized, table1, theory  # noqa: F401  declare studies
