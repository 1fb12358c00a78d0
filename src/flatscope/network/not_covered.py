"""The one word for parameters that a way of reading a network does not cover, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flatscope.formatting import first_of_names


class NotCovered(dict[str, str]):
    """{parameter: reason} for the parameters that some way does not cover; whoever gives one says which way.

    Example:
        >>> from flatscope.network.not_covered import NotCovered
        >>> found = NotCovered({"b": "a lookup"}) | {"a": "used through a view of it"}
        >>> found.note("b", "too late"), found.among(["a", "b", "c"])
        (None, {'a': 'used through a view of it', 'b': 'a lookup'})
    """

    def note(self, name: str, reason: str) -> None:
        """Take a parameter in; the first reason stays."""
        self.setdefault(name, reason)

    def __or__(self, others: Mapping[str, str]) -> NotCovered:  # type: ignore[override]
        """These and others, whose reasons count where both have one."""
        return NotCovered({**self, **others})

    def among(self, names: Iterable[str]) -> NotCovered:
        """The entries of some parameters, in the order of these names."""
        return NotCovered({name: self[name] for name in names if name in self})

    def in_words(self, most: int) -> str:
        """Names with their reasons, the first of them."""
        return first_of_names([f"{name} ({reason})" for name, reason in self.items()], most)
