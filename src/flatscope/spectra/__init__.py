"""Curvature for itself: operators, eigenpairs and the density of the spectrum."""
