"""Numbers, counts and options as text: one way for terminals, pages and files.

`readable_number` is for terminals and files, `written` the same number as a page sets it; the page's script follows
`written`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence


def readable_number(value: float, digits: int = 4) -> str:
    """A number for people: significant digits, whole numbers in full, n/a for NaN.

    Example:
        >>> readable_number(0.123456), readable_number(12.0), readable_number(float("nan")), readable_number(1e-7, 2)
        ('0.1235', '12', 'n/a', '1e-07')
    """
    if math.isnan(value):
        return "n/a"
    if math.isfinite(value) and value == int(value) and abs(value) < 1e9:
        return str(int(value))
    return f"{value:.{digits}g}"


def written(value: float, digits: int = 4) -> str:
    """The same for a page: grouped integers, powers of ten as powers, a real minus sign.

    Example:
        >>> written(-1.5e-7), written(12345)
        ('−1.5×10⁻⁷', '12\u202f345')
    """
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if math.isfinite(value) and value == int(value) and 1e4 <= abs(value) < 1e9:
        return f"{int(value):,}".replace(",", "\u202f").replace("-", "−")
    return typeset(readable_number(value, digits))


def typeset(text: str) -> str:
    """Numbers within a text as a page sets them."""
    return re.sub(r"e([+-])0*(\d+)", _power_of_ten, text).replace("-", "−")


def _power_of_ten(match: re.Match[str]) -> str:
    raised = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
    return "×10" + ("⁻" if match[1] == "-" else "") + match[2].translate(raised)


def with_error(value: float, stderr: float) -> tuple[str, str]:
    """Value and standard error for a page, with the same last digit: two digits of the error, no more of the value."""
    if not (stderr > 0 and math.isfinite(value) and math.isfinite(stderr)):
        return written(value), ""
    decimals = 1 - math.floor(math.log10(stderr))
    if 0 <= decimals <= 6 and abs(value) < 1e6:
        return f"{value:.{decimals}f}".replace("-", "−"), f"{stderr:.{decimals}f}"
    digits = max(2, decimals + math.floor(math.log10(abs(value))) + 1) if value else 2
    return written(value, min(digits, 6)), written(stderr, 2)


UNRESOLVED = ", not resolved"
WIDE = 0.1  # of its larger end: both ends of such an interval are shown


def number_within_interval(value: float, low: float, high: float, digits: int = 4) -> str:
    """A number that an interval is known of: with no more digits than that vouches for, or both ends, or the outer one.

    Example:
        >>> number_within_interval(0.123456, 0.1231, 0.1243), number_within_interval(-1e-4, -0.00191, -1e-4)
        ('0.123', '> -0.002, not resolved')
        >>> number_within_interval(12.3, 12.3, 40.2)
        '12 … 41, not resolved'
        >>> number_within_interval(1.106, 1.106, 1.351)
        '1.106 to 1.351'
    """
    width, size = high - low, max(abs(low), abs(high))
    if not 0 < width < math.inf:
        return readable_number(value, digits)
    if WIDE * size < width <= size / 2:
        low, high = number_rounded_outward(low, -1, 4), number_rounded_outward(high, 1, 4)
        return f"{readable_number(low)} to {readable_number(high)}"
    if 2 * width <= size:
        decimals = -math.ceil(math.log10(width / 2))
        kept = decimals + math.floor(math.log10(abs(value))) + 1 if value else 1
        return readable_number(value, min(max(kept, 1), digits))
    if low * high > 0 and size <= 10 * min(abs(low), abs(high)):
        low, high = number_rounded_outward(low, -1, 2), number_rounded_outward(high, 1, 2)
        return f"{readable_number(low)} … {readable_number(high)}{UNRESOLVED}"
    bound = (
        f"> {readable_number(number_rounded_outward(low, -1, 1))}"
        if abs(low) >= abs(high)
        else f"< {readable_number(number_rounded_outward(high, 1, 1))}"
    )
    return f"{bound}{UNRESOLVED}"


def number_rounded_outward(value: float, side: int, digits: int) -> float:
    """A number with so few digits, rounded away from an interval: down for side -1, up for side 1."""
    if not value:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(abs(value))) + 1 - digits)
    steps = value / unit
    near = round(steps)
    whole = near if abs(steps - near) < 1e-9 else math.floor(steps) if side < 0 else math.ceil(steps)
    return float(f"{whole * unit:.{digits}g}")


def as_percent(share: float) -> str:
    """A share as per cent, for a page; n/a for NaN."""
    return "n/a" if math.isnan(share) else f"{100 * share:.2g}\u202f%"


def numbered(count: int, noun: str) -> str:
    """Number and noun: "1 trial", "2 trials"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def printable_text(text: str) -> str:
    """Text that any file, page and terminal can hold, of names that may be anything.

    Without control characters, which move the cursor, name windows and fill clipboards; without those that turn the
    direction of what follows; without halves of characters. Each gives way to one sign, so that lengths stay.
    """
    return _UNPRINTABLE.sub("\ufffd", text)


_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]|\r(?!\n)"
)


def first_of_names(names: Sequence[str], most: int) -> str:
    """The first of the names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def options_in_words(options: str) -> str:
    """Options, kept as JSON, as people write them: `alpha=0.1, steps=5`."""
    return printable_text(", ".join(f"{name}={value}" for name, value in json.loads(options or "{}").items()))


def measure_label(name: str, options: str) -> str:
    """A measure with those of its options that differ from the default: `psi_trace[rule=cyclic]`."""
    return f"{name}[{options_in_words(options)}]" if options else name


def time_in_words(seconds: float) -> str:
    """A time as one says it: "4 s", "12 min", "3 h"."""
    if seconds < 1:
        return "1 s"
    for unit, size in (("s", 1), ("min", 60), ("h", 3600)):
        if seconds < 100 * size or unit == "h":
            return f"{seconds / size:.0f} {unit}"
    raise AssertionError
