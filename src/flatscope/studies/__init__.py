"""Every figure and table of the four papers as a study with claims and verdicts."""

from flatscope.studies import (  # noqa: F401  declare studies
    neyshabur2017_conditions,
    neyshabur2017_confusion,
    neyshabur2017_labels,
    neyshabur2017_width,
    petzka2019_correlations,
    petzka2019_mnist,
    petzka2019_reparameterized,
    petzka2019_table1,
    petzka2019_theory,
    robustness_of_measures,
    yi2019,
    yi2019_balance,
    yi2019_basis_paths,
    yi2019_invariance,
    yi2019_pac_bayes,
    zhang2017_architectures,
    zhang2017_counts,
    zhang2017_dynamics,
    zhang2017_landscape,
    zhang2017_langevin,
    zhang2017_margins,
    zhang2017_noise,
    zhang2017_parameters,
    zhang2017_perturbed,
    zhang2017_polynomial,
    zhang2017_radius,
    zhang2017_training,
)
from flatscope.studies.running import study
from flatscope.studies.study import declared_studies as studies
from flatscope.studies.study import find_study

__all__ = ["find_study", "studies", "study"]
