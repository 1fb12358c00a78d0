"""Measures that are made of other ones: their options and facts, where nothing else is said."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from flatscope.registry import F, Facts, Option, declared, measure


def add_options(
    function: Callable[..., Any],
    base: Callable[..., Any],
    before: Mapping[str, Option] = MappingProxyType({}),
    after: Mapping[str, Option] = MappingProxyType({}),
) -> None:
    """Give a function the options of another one, and further ones, in its signature and its docstring."""

    def parameters(options: Mapping[str, Option]) -> list[inspect.Parameter]:
        kind = inspect.Parameter.KEYWORD_ONLY
        return [inspect.Parameter(name, kind, default=one[0], annotation=one[1]) for name, one in options.items()]

    signature = inspect.signature(base, eval_str=True)
    context, *own = signature.parameters.values()
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[context, *parameters(before), *own, *parameters(after)]
    )
    listed = inspect.cleandoc(base.__doc__ or "").partition("\nArgs:\n")[2].rstrip()
    text = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")[0].rstrip()
    first, last = ([f"    {name}: {one[2]}" for name, one in options.items()] for options in (before, after))
    function.__doc__ = "\n".join([text, "", "Args:", *first, *filter(None, [listed]), *last])


def derived(
    base: Callable[..., Any], more: Mapping[str, Option] = MappingProxyType({}), **changed: Any
) -> Callable[[F], F]:
    """Declare a measure that is made of another one, and has its options and its facts where nothing else is said.

    Args:
        base: the other measure, declared already.
        more: further options.
        changed: facts that are not those of the other.
    """

    def declare(function: F) -> F:
        add_options(function, base, after=more)
        facts = {each.name: getattr(declared(base), each.name) for each in fields(Facts)}
        return measure(**facts | {"definition": None} | changed)(function)

    return declare
