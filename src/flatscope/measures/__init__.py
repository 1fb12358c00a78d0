"""All measures. Importing a family declares it; a new family is one line here.

Tables show families in this order: an imported family comes after those that it imports itself.
"""

import importlib

FAMILIES = (
    "weight_flatness",
    "relative_flatness",
    "psi_flatness",
    "pac_bayes",
    "sharpness",
    "group_sharpness",
    "margins",
    "adaptive",
    "radius",
    "path_norms",
    "lipschitz",
    "geometric_margin",
    "norms",
    "robustness",
    "feature_robustness",
    "interactions",
    "gradient_noise",
    "information",
    "learning_coefficient",
    "batch_sharpness",
)
for _family in FAMILIES:
    importlib.import_module(f"{__name__}.{_family}")
