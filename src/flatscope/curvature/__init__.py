"""Curvature of the loss: exact sweeps, operators, spectra and estimators."""
