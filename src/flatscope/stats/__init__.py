"""Does a measure go along with generalization? Correlations with intervals, also with hyper-parameters held fixed.

Example:
    >>> from flatscope import stats
    >>> found = stats.correlate([1, 2, 3, 4, 5], [1, 3, 2, 5, 4], "kendall")
    >>> round(found.value, 2), found.n
    (0.6, 5)
"""

from flatscope.significance import wilson
from flatscope.stats.correlation import correlate, correlation_table, partial_correlation
from flatscope.stats.estimate import Estimate, Ranking, finite_pairs, holm, mean_of_series, rank_with_uncertainty
from flatscope.stats.sign_agreement import (
    Granulated,
    SignError,
    conditional_mutual_information,
    granulated_kendall,
    sign_error,
)

__all__ = [
    "Estimate",
    "Granulated",
    "Ranking",
    "SignError",
    "conditional_mutual_information",
    "correlate",
    "correlation_table",
    "finite_pairs",
    "granulated_kendall",
    "holm",
    "mean_of_series",
    "partial_correlation",
    "rank_with_uncertainty",
    "sign_error",
    "wilson",
]
