"""Every error a user can cause, in one sentence form: what was expected, what came, where, what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

FEW_NAMES = 6  # known ones that are all listed, whether or not one is near


class FlatscopeError(Exception):
    """Base of all errors that flatscope raises on purpose.

    Args:
        expected: what should have been there.
        got: what was there instead (value, shape or type).
        where: the place: an argument, a layer, a file.
        fix: what the user can do about it.

    Example:
        >>> print(FlatscopeError("a positive number", "-1", where="lr", fix="Take 0.1"))
        lr: expected a positive number, got -1. Take 0.1.
    """

    def __init__(self, expected: str, got: str = "", where: str = "", fix: str = "") -> None:
        self.expected, self.got, self.where, self.fix = expected, got, where, fix
        super().__init__(expected, got, where, fix)  # the arguments, so that the error survives pickling

    def __str__(self) -> str:
        """One sentence, parts left out where nothing was said."""
        text = f"{self.where}: " if self.where else ""
        text += f"expected {self.expected}, got {self.got}" if self.got else self.expected
        return " ".join(part if part.endswith((".", "?", "!")) else f"{part}." for part in (text, self.fix) if part)


class InputError(FlatscopeError, ValueError):
    """The model, the data, an option or a file is not what is needed.

    Example:
        >>> import flatscope as fs
        >>> try:
        ...     fs.measure(3)
        ... except fs.InputError as problem:
        ...     print(problem.got)
        int
    """


class NotApplicable(FlatscopeError):  # noqa: N818  a refusal in a table, not a fault
    """A measure or bound has no value here; its row says why and the table goes on."""


class DataFileError(InputError):
    """A data file is missing, truncated, damaged or not of its format."""


class WeightsError(InputError):
    """A weight file or state dict does not fit the model or may not be read safely."""


class UnknownNameError(InputError, KeyError):
    """A name that is not in a list of known ones; the nearest are offered."""

    @classmethod
    def among(
        cls, name: str, known: Iterable[str], kind: str, also: Mapping[str, str] | None = None
    ) -> UnknownNameError:
        """Error for an unknown `name` of the given `kind`, with the nearest known ones.

        Args:
            name: that was given.
            known: the names there are.
            kind: of what.
            also: what is called otherwise elsewhere, and its known name.
        """
        names = sorted(known)
        lower = {other.lower(): other for other in names}
        near = [lower[other] for other in difflib.get_close_matches(name.lower(), lower, n=4)]
        near += [other for other in names if name and name in other and other not in near][:3]
        near = [also[name.lower()]] if also and name.lower() in also else near
        parts = ["Did you mean " + ", ".join(near) + "?"] if near else []
        if not near or len(names) <= FEW_NAMES:  # a near spelling need not be what was meant
            parts.append("Known: " + ", ".join(names) + ".")
        return cls(f"a known {kind}", repr(name), where=kind, fix=" ".join(parts))


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM during a long call: scripts stop, what was reached is in `result`, and it says how to go on."""

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


def refuse_unknown(name: object, known: Collection[object], kind: str, also: Mapping[str, str] | None = None) -> None:
    """Raise where the name is not among the known ones of its kind; `also` has other words for those."""
    if name not in known:
        raise UnknownNameError.among(str(name), map(str, known), kind, also)


def refuse_unless_whole(value: object, where: str, least: int = 1) -> None:
    """Raise where the value is not a whole number of at least so much."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"a whole number of at least {least}", repr(value), where=where)


def first_line(problem: BaseException) -> str:
    """First line of an error of another package, without its details."""
    return next(iter(str(problem).splitlines()), "") or type(problem).__name__


# In the ways in which torch says so: of an operation of its own, of a Function of somebody's, of a script's.
_NO_DERIVATIVE = re.compile(
    r"derivative for '?(?:aten::)?_?(?P<operation>\w+?)(?:_backward)?'? is not implemented|once_differentiable|"
    "does not have a derivative|modified by an inplace operation"
)


def missing_derivative(problem: BaseException) -> NotApplicable | None:
    """In words what torch says where it cannot differentiate an operation (twice); None where it says anything else."""
    match = _NO_DERIVATIVE.search(str(problem))
    if match is None:
        return None
    what = match["operation"] or "one whose backward is not differentiable"
    fix = (
        "Curvature needs it: write the operation with others (sums, products, exp, log, gather, index_add), or ask for "
        "measures that need the first derivative only, such as gradient_norm"
    )
    return NotApplicable("operations that can be differentiated twice", f"{what}, which cannot", "autograd", fix)


@contextmanager
def differentiated_twice() -> Iterator[None]:
    """Say in a refusal what autograd says of a loss whose second derivative it does not have."""
    try:
        yield
    except RuntimeError as problem:
        refusal = missing_derivative(problem)
        if refusal is None:
            raise
        raise refusal from problem


def lack_of_memory(problem: BaseException) -> str:
    """Sentence on what did not fit, for errors of memory; empty for other errors."""
    words = str(problem)
    known = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc", "Unable to allocate")
    if not isinstance(problem, MemoryError) and not any(each in words for each in known):
        return ""
    asked = re.search(r"tried to allocate ([\d.]+ ?\w+)|Unable to allocate ([\d.]+ \w+)", words)
    wanted = f": {asked[1] or asked[2]} more were asked for" if asked else ""
    fix = "take fewer samples (--train-size), smaller batches (--batch-size) or a machine with more"
    return f"the memory does not suffice{wanted}; {fix}"


class NumericalWarning(UserWarning):
    """A number was computed but did not reach the accuracy asked for.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", NumericalWarning)  # to stop where accuracy was not reached
        >>> warnings.simplefilter("default", NumericalWarning)
    """
