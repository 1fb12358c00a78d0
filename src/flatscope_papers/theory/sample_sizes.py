"""How many samples are enough, and for which class of functions: formulas of Zhang et al. 2017 beside the bounds.

Deep against shallow networks, eq (26) to (30): n is the number of inputs, m the smoothness of the function, M the
number of samples, r the number of units. Orders of magnitude: constants are left out, except the factor n of (30),
which the memo drops. Then Dudley's integral (25) with the entropies that go into it, the ball that training explores
(15), and the cells of a grid, of which (19) tries one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy.integrate import quad
from scipy.optimize import minimize_scalar

from flatscope.errors import InputError, UnknownNameError

KINDS = ("shallow", "deep")
RATES = ("memo", "sqrt")


def size_ratio(epsilon: float, n: int, m: float, form: str = "memo") -> float:
    """Parameters of a deep over those of a shallow network for accuracy ε, as (26) has it or from the sizes themselves.

    Args:
        epsilon: accuracy, in (0, 1).
        n: number of inputs, at least 2.
        m: smoothness.
        form: "memo": ε^n; "sizes": (n-1) ε^((n-2)/m), from ε^(-n/m) units against (n-1) ε^(-2/m).
    """
    if not 0 < epsilon < 1 or n < 2 or not m > 0:
        raise InputError("0 < epsilon < 1, n ≥ 2, m > 0", f"{epsilon}, {n}, {m}", where="size_ratio")
    if form == "memo":
        return float(epsilon**n)
    if form != "sizes":
        raise UnknownNameError.among(form, ("memo", "sizes"), "form of size_ratio")
    return float((n - 1) * epsilon ** ((n - 2) / m))


def log10_size_ratio(epsilon: float, n: int, m: float = 1.0, form: str = "memo") -> float:
    """log10 of how many times more parameters the shallow network needs: 10^4 for n = 10^4 and ε = 0.1, as printed."""
    if form == "memo":
        return -n * math.log10(epsilon)
    if form != "sizes":
        raise UnknownNameError.among(form, ("memo", "sizes"), "form of log10_size_ratio")
    return -math.log10(n - 1) - (n - 2) / m * math.log10(epsilon)


def multitask_gain(tasks: int, log_specific: float, log_shared: float) -> float:
    """Factor by which (61) is smaller for each of T tasks with a shared part G than for one; √T if H costs nothing."""
    if tasks < 1 or log_specific < 0 or not log_shared > 0:
        raise InputError("tasks and sizes from 1", f"{tasks}, {log_specific}, {log_shared}", where="multitask_gain")
    return math.sqrt((log_specific + log_shared) / (log_specific + log_shared / tasks))


def vc_gap(dimension: float, samples: int) -> float:
    """√(d/N), the order of the gap for a class of VC dimension d (Section 1)."""
    if not dimension > 0 or samples < 1:
        raise InputError("a positive dimension and samples", f"{dimension}, {samples}", where="vc_gap")
    return math.sqrt(dimension / samples)


def stability_beta(lipschitz: float, penalty: float, samples: int) -> float:
    """K/(λn), the order of the β-stability of regularised learning: how far one sample moves the loss (Section 6)."""
    if not min(lipschitz, penalty) > 0 or samples < 1:
        raise InputError("positive K, λ and n", f"{lipschitz}, {penalty}, {samples}", where="stability_beta")
    return lipschitz / (penalty * samples)


def approximation_and_estimation_error(
    r: float, n: int, m: float, samples: float, kind: str, rate: str = "memo"
) -> float:
    """Approximation plus estimation error with r units.

    Approximation: r^(-m/n) for a shallow network, n r^(-m/2) for a deep one. Estimation: rn/√M as in (27)
    (`rate="memo"`), or √(rn/M), which counting parameters gives (`rate="sqrt"`).
    """
    _check_sizes(n, m, samples, kind, rate)
    if not r > 0:
        raise InputError("a positive number of units", str(r), where="approximation_and_estimation_error")
    approximation = float(r ** (-m / n) if kind == "shallow" else n * r ** (-m / 2))
    return approximation + (r * n / math.sqrt(samples) if rate == "memo" else math.sqrt(r * n / samples))


def number_of_units_with_least_error(n: int, m: float, samples: float, kind: str, rate: str = "memo") -> float:
    """Order of the number of units with the least total error, (28): it balances the two terms."""
    _check_sizes(n, m, samples, kind, rate)
    root = math.sqrt(samples)
    if rate == "memo":
        return float((root / n) ** (n / (m + n)) if kind == "shallow" else root ** (2 / (m + 2)))
    return float((samples / n) ** (n / (2 * m + n)) if kind == "shallow" else (n * samples) ** (1 / (m + 1)))


def least_total_error(n: int, m: float, samples: float, kind: str, rate: str = "memo") -> float:
    """Order of the least total error: (29) for a shallow network, (30) with its factor n for a deep one."""
    _check_sizes(n, m, samples, kind, rate)
    root = math.sqrt(samples)
    if kind == "shallow":
        return float((n / root) ** (m / (m + n)) if rate == "memo" else (n / samples) ** (m / (2 * m + n)))
    return float(n * (1 / root) ** (m / (m + 2)) if rate == "memo" else n * (n * samples) ** (-m / (2 * m + 2)))


def _check_sizes(n: int, m: float, samples: float, kind: str, rate: str) -> None:
    if n < 1 or not m > 0 or not samples >= 1:
        raise InputError("n ≥ 1, m > 0 and at least one sample", f"{n}, {m}, {samples}", where="sample complexity")
    for given, known, what in ((kind, KINDS, "kind of network"), (rate, RATES, "rate")):
        if given not in known:
            raise UnknownNameError.among(given, known, what)


def dudley_entropy_bound(
    log_covering: Callable[[float], float], largest: float, n: int, constant: float = 1.0
) -> float:
    """(25): C inf over ε of ε + n^(-1/2) ∫ from ε to the largest value of √(log N_δ) dδ; C is not known.

    Args:
        log_covering: logarithm of the covering number at a radius.
        largest: largest value of a function of the class.
        n: number of samples.
        constant: C.
    """
    if not largest > 0 or n < 1 or not constant > 0:
        raise InputError(
            "positive largest value, samples and constant", f"{largest}, {n}, {constant}", where="dudley_entropy_bound"
        )

    def total(log_epsilon: float) -> float:
        epsilon = math.exp(log_epsilon)
        area = quad(
            lambda t: math.exp(t) * math.sqrt(max(log_covering(math.exp(t)), 0.0)),
            log_epsilon,
            math.log(largest),
            limit=200,
        )[0]
        return epsilon + float(area) / math.sqrt(n)

    top = math.log(largest)
    minimum = minimize_scalar(total, bounds=(top - 40, top), method="bounded")
    return constant * min(float(minimum.fun), largest)


def smooth_entropy(epsilon: float, dimension: int, smoothness: float, locality: int | None = None) -> float:
    """Order of log N: (1/ε)^(d/s), or d (1/ε)^(h/s) for compositions of functions of h variables."""
    if not epsilon > 0 or dimension < 1 or not smoothness > 0 or (locality is not None and locality < 1):
        raise InputError(
            "positive numbers", f"{epsilon}, {dimension}, {smoothness}, {locality}", where="smooth_entropy"
        )
    if locality is None:
        return float((1 / epsilon) ** (dimension / smoothness))
    return float(dimension * (1 / epsilon) ** (locality / smoothness))


def explored_radius(start_distance: float, steps: int) -> float:
    """G_T ≤ R√T for steps of size R/(L√T) on a convex L-Lipschitz loss, R = ‖f_0 − f*‖ (Zhang et al. 2017, §8.2)."""
    if not start_distance >= 0 or steps < 1:
        raise InputError("a distance and at least one step", f"{start_distance}, {steps}", where="explored_radius")
    return start_distance * math.sqrt(steps)


def dyadic_grid(index: int, dimension: int, classes: int = 1) -> float:
    """Cells of the grid of side 2^(-k) on [0, 1]^d, times the classes: cells must separate labels as well."""
    if index < 1 or dimension < 1 or classes < 1:
        raise InputError("numbers from 1", f"{index}, {dimension}, {classes}", where="dyadic_grid")
    log2 = index * dimension + math.log2(classes)
    return 2.0**log2 if log2 < 1023 else math.inf
