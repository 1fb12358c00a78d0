"""What a measurement may cost, as people write it: "10m" of time, "8GiB" of memory, 2 % of error."""

from __future__ import annotations

import math
import re
import time
from numbers import Real

from flatscope.context import Effort
from flatscope.errors import InputError, UnknownNameError

CURVATURES = ("hessian", "gauss_newton")
SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
BYTES = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for ending, base in (("b", 1000), ("ib", 1024), ("", 1024))
}


def make_effort(
    precision: float = 0.02,
    budget: float | str | None = None,
    memory: int | str | None = None,
    curvature: str = "hessian",
) -> Effort:
    """The effort that a person asked for; the time of the budget runs from now on.

    Args:
        precision: relative standard error at which estimates stop; 0 for exact values and all draws.
        budget: seconds, or text such as "90s", "10m", "2h"; None for no limit.
        memory: bytes, or text such as "8GiB", "500MB"; None for a share of what is free.
        curvature: "hessian" or "gauss_newton".
    """
    if isinstance(precision, bool) or not isinstance(precision, Real) or not 0 <= precision < 1:
        fix = "0 for exact values, 0.02 for a standard error of 2 %"
        raise InputError("a relative standard error from 0 up to 1", repr(precision), where="precision", fix=fix)
    if curvature not in CURVATURES:
        raise UnknownNameError.among(str(curvature), CURVATURES, "curvature")
    end = None if budget is None else time.monotonic() + seconds_of(budget)
    return Effort(
        precision=float(precision),
        curvature=curvature,
        memory=None
        if memory is None
        else int(_amount(memory, BYTES, "memory", '"8GiB", "500MB" or a number of bytes')),
        deadline=end,
        end=end,
    )


def seconds_of(budget: float | str) -> float:
    """A time in seconds, from a number or from text such as "90s", "10m", "2h"."""
    return _amount(budget, SECONDS, "budget", '"90s", "10m", "2h" or a number of seconds')


def bytes_of(memory: int | str) -> int:
    """An amount of memory in bytes, from a number or from text such as "8GiB", "500MB"."""
    return int(_amount(memory, BYTES, "memory", '"8GiB", "500MB" or a number of bytes'))


def _amount(given: float | str, units: dict[str, int], where: str, examples: str) -> float:
    wrong = InputError(examples, repr(given), where=where)
    if isinstance(given, str):
        parts = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", given.strip().lower())
        if parts is None or parts[2] not in units:
            raise wrong
        given = float(parts[1]) * units[parts[2]]
    if isinstance(given, bool) or not isinstance(given, Real) or not 0 < given < math.inf:
        raise wrong
    return float(given)


def time_text(seconds: float) -> str:
    """A time as one says it: "4 s", "12 min", "3 h"."""
    if seconds < 1:
        return "1 s"
    for unit, size in (("s", 1), ("min", 60), ("h", 3600)):
        if seconds < 100 * size or unit == "h":
            return f"{seconds / size:.0f} {unit}"
    raise AssertionError
