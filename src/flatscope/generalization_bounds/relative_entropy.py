"""Relative entropy of two chances, its exact inverse, and the error that PAC-Bayes certifies with it.

Langford and Seeger (2001): with probability 1 - δ, kl(ê(Q)‖e(Q)) ≤ (KL(Q‖P) + ln(n/δ)) / (n-1) for all Q at once. The
prior's variance may be chosen afterwards from a grid c exp(-j/b), j = 1, 2, …, if its j-th value gets 6δ / (π²j²)
(Dziugaite and Roy 2017).
"""

from __future__ import annotations

import math

from flatscope.errors import InputError

STEPS_PER_E = 100  # b


def relative_entropy(q: float, p: float) -> float:
    """kl(q‖p) = q ln(q/p) + (1-q) ln((1-q)/(1-p)) of two chances, 0 < p < 1, to rounding also where they are close."""
    pairs = ((q, p, p - q), (1 - q, 1 - p, q - p))  # with the difference: else digits are lost where they are close
    return -sum(a * (math.log1p(by / a) if abs(by) < a / 2 else math.log(b / a)) for a, b, by in pairs if a > 0)


def largest_mean_within_entropy(q: float, entropy: float) -> float:
    """The largest p with kl(q‖p) ≤ entropy, by bisection down to neighbouring numbers, of which it is the upper one.

    Example:
        >>> round(largest_mean_within_entropy(0.0, 0.1), 6), round(largest_mean_within_entropy(0.02, 0.1), 6)
        (0.095163, 0.150812)
    """
    if not 0 <= q <= 1 or not entropy >= 0:
        raise InputError("0 ≤ q ≤ 1 and an entropy from 0 up", f"{q}, {entropy}", where="largest_mean_within_entropy")
    low, high = q, 1.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if relative_entropy(q, middle) > entropy else (middle, high)
    return high


def prior_variance_of(index: int, largest: float) -> float:
    """λ_j = c exp(-j/b), b = 100."""
    return largest * math.exp(-index / STEPS_PER_E)


def log_price_of_prior_variance(index: float, n: int, delta: float) -> float:
    """ln(n/δ_j), where δ_j = 6δ / (π²j²) is what the j-th variance of the grid gets of δ."""
    return math.log(n / delta) + math.log(math.pi**2 / 6) + 2 * math.log(index)


def certified_error(
    error: float, draws: int, kl: float, index: int, n: int, delta: float, sampling_delta: float
) -> float:
    """Upper bound on the expected error of a stochastic classifier; it fails with a chance of delta + sampling_delta.

    Args:
        error: mean error of the draws on the samples.
        draws: how many independent ones there were.
        kl: divergence of the posterior from the prior whose variance is number `index` of the grid.
        index: j ≥ 1.
        n: samples that the prior has not seen.
        delta: chance that the samples mislead.
        sampling_delta: chance that the draws do (Chernoff's inequality, one-sided).
    """
    if draws < 1 or not kl >= 0 or index < 1 or n < 2 or not (0 < delta < 1 and 0 < sampling_delta < 1):
        got = f"{draws}, {kl}, {index}, {n}, {delta}, {sampling_delta}"
        raise InputError("draws, KL ≥ 0, j ≥ 1, two samples, chances in (0, 1)", got, where="certified_error")
    on_training = largest_mean_within_entropy(error, math.log(1 / sampling_delta) / draws)
    return largest_mean_within_entropy(on_training, (kl + log_price_of_prior_variance(index, n, delta)) / (n - 1))
