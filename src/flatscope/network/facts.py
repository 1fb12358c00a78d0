"""What is known of a network whatever its weights: found once, shared by its copies with other weights."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from flatscope.network.program import Program, Structure

T = TypeVar("T")


class KnownFacts:
    """Facts about the structure of one network.

    Attributes:
        plain: facts about its plain form, where every weight that acts is a parameter; itself where the network is
            plain as it is; None until somebody has asked.
        not_covered: trainable matrices of the plain form that take part in no layer, with what reads them.
        structure: recorded passes; None until somebody has asked.
        programs: recorded passes of samples of other shapes, by these.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}
        self.plain: KnownFacts | None = None
        self.not_covered: dict[str, str] = {}
        self.structure: Structure | None = None
        self.programs: dict[Hashable, Program] = {}

    def once(self, find: Callable[..., T], *subject: Any, **options: Any) -> T:
        """`find(*subject, **options)`, computed once whatever the subject: a problem, or a context of it."""
        key = (f"{find.__module__}.{find.__qualname__}", tuple(sorted(options.items())))
        if key not in self._known:
            self._known[key] = find(*subject, **options)
        found: T = self._known[key]
        return found
