"""All measures. Importing a family declares it; a new family is one line here.

Tables show families in this order: an imported family comes after those that it imports itself.
"""

# isort: off
from flatscope.measures import weight_flatness
from flatscope.measures import relative_flatness
from flatscope.measures import psi_flatness
from flatscope.measures import pac_bayes
from flatscope.measures import sharpness
from flatscope.measures import margins
from flatscope.measures import adaptive
from flatscope.measures import radius
from flatscope.measures import path_norms
from flatscope.measures import lipschitz
from flatscope.measures import geometric_margin
from flatscope.measures import norms
from flatscope.measures import robustness
from flatscope.measures import feature_robustness
from flatscope.measures import interactions
from flatscope.measures import gradient_noise
# isort: on

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
