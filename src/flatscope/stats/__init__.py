"""Does a measure go along with generalization? Correlations with intervals, also with hyper-parameters held fixed."""

from flatscope.stats.correlation import correlate
from flatscope.stats.estimate import Estimate
from flatscope.stats.information import conditional_mutual_information
from flatscope.stats.partial import partial_correlation
from flatscope.stats.proportions import holm, wilson
from flatscope.stats.ranking import Ranking, rank_with_uncertainty
from flatscope.stats.sign_agreement import Granulated, SignError, granulated_kendall, sign_error
from flatscope.stats.summary import correlation_table

__all__ = [
    "Estimate",
    "Granulated",
    "Ranking",
    "SignError",
    "conditional_mutual_information",
    "correlate",
    "correlation_table",
    "granulated_kendall",
    "holm",
    "partial_correlation",
    "rank_with_uncertainty",
    "sign_error",
    "wilson",
]
