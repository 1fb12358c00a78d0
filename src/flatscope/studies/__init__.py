"""Every figure and table of the four papers as a study with claims and verdicts."""

from flatscope.studies import (  # noqa: F401  declare studies
    neyshabur2017_labels,
    petzka2019_lenet,
    petzka2019_mnist,
    petzka2019_theory,
)
from flatscope.studies.running import study
from flatscope.studies.study import declared_studies as studies
from flatscope.studies.study import find_study

__all__ = ["find_study", "studies", "study"]
