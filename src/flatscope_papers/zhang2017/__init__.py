"""Zhang et al. (2017), Theory of Deep Learning III."""

from flatscope_papers.zhang2017 import (  # noqa: F401  declare studies
    architectures,
    counts,
    dynamics,
    landscape,
    langevin,
    margins,
    noise,
    parameters,
    perturbed,
    polynomial,
    radius,
    training,
)
