"""How many samples deep and shallow networks need: the estimates of Zhang et al. 2017, eq (26) to (30).

n is the number of inputs, m the smoothness of the function, M the number of samples, r the number of units. Orders of
magnitude: constants are left out, except the factor n of (30), which the memo drops.
"""

from __future__ import annotations

import math

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


def total_error(r: float, n: int, m: float, samples: float, kind: str, rate: str = "memo") -> float:
    """Approximation plus estimation error with r units.

    Approximation: r^(-m/n) for a shallow network, n r^(-m/2) for a deep one. Estimation: rn/√M as in (27)
    (`rate="memo"`), or √(rn/M), which counting parameters gives (`rate="sqrt"`).
    """
    _check(n, m, samples, kind, rate)
    if not r > 0:
        raise InputError("a positive number of units", str(r), where="total_error")
    approximation = float(r ** (-m / n) if kind == "shallow" else n * r ** (-m / 2))
    return approximation + (r * n / math.sqrt(samples) if rate == "memo" else math.sqrt(r * n / samples))


def best_units(n: int, m: float, samples: float, kind: str, rate: str = "memo") -> float:
    """Order of the number of units with the least total error, (28): it balances the two terms."""
    _check(n, m, samples, kind, rate)
    root = math.sqrt(samples)
    if rate == "memo":
        return float((root / n) ** (n / (m + n)) if kind == "shallow" else root ** (2 / (m + 2)))
    return float((samples / n) ** (n / (2 * m + n)) if kind == "shallow" else (n * samples) ** (1 / (m + 1)))


def least_error(n: int, m: float, samples: float, kind: str, rate: str = "memo") -> float:
    """Order of the least total error: (29) for a shallow network, (30) with its factor n for a deep one."""
    _check(n, m, samples, kind, rate)
    root = math.sqrt(samples)
    if kind == "shallow":
        return float((n / root) ** (m / (m + n)) if rate == "memo" else (n / samples) ** (m / (2 * m + n)))
    return float(n * (1 / root) ** (m / (m + 2)) if rate == "memo" else n * (n * samples) ** (-m / (2 * m + 2)))


def _check(n: int, m: float, samples: float, kind: str, rate: str) -> None:
    if n < 1 or not m > 0 or not samples >= 1:
        raise InputError("n ≥ 1, m > 0 and at least one sample", f"{n}, {m}, {samples}", where="sample complexity")
    for given, known, what in ((kind, KINDS, "kind of network"), (rate, RATES, "rate")):
        if given not in known:
            raise UnknownNameError.among(given, known, what)
