"""Petzka et al. (2019), A Reparameterization-Invariant Flatness Measure."""
