"""Curvature for itself: operators, eigenpairs and the density of the spectrum."""

from flatscope.spectra.density import SpectralDensity
from flatscope.spectra.finding import eigenpairs, gauss_newton, hessian, spectral_density
from flatscope.spectra.pairs import Eigenpairs

__all__ = ["Eigenpairs", "SpectralDensity", "eigenpairs", "gauss_newton", "hessian", "spectral_density"]
