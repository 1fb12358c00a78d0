"""All measures. Importing a family declares it; a new family is one line here."""

from flatscope.measures import (
    adaptive,
    feature_robustness,
    geometric_margin,
    gradient_noise,
    interactions,
    lipschitz,
    margins,
    norms,
    pac_bayes,
    path_norms,
    psi_flatness,
    radius,
    relative_flatness,
    robustness,
    sharpness,
    weight_flatness,
)

__all__ = [
    "adaptive",
    "feature_robustness",
    "geometric_margin",
    "gradient_noise",
    "interactions",
    "lipschitz",
    "margins",
    "norms",
    "pac_bayes",
    "path_norms",
    "psi_flatness",
    "radius",
    "relative_flatness",
    "robustness",
    "sharpness",
    "weight_flatness",
]
