"""The two ways to write HTML, an element or a template; either escapes all that is not markup already."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """An element with escaped text and attributes.

    A trailing underscore frees Python's keywords (`class_`), other underscores become hyphens, and an
    attribute that is None is left out.

    Example:
        >>> str(element("a", "x < y", href="#top", class_="link"))
        '<a href="#top" class="link">x &lt; y</a>'
    """
    written = Markup("").join(
        Markup(' {}="{}"').format(Markup(name.rstrip("_").replace("_", "-")), value)
        for name, value in attributes.items()
        if value is not None
    )
    inner = Markup("").join(escape(child) for child in children)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(tag), written, inner)


def fragment(template: str, *, package: str = "flatscope.reports", **values: Any) -> Markup:
    """A template in the folder of a package, filled in."""
    return Markup(_templates(package).get_template(template).render(values))


def source(name: str, *, package: str = "flatscope.reports") -> str:
    """The text of a file in the folder of a package, as it is: the style sheet, the script."""
    environment = _templates(package)
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def breakable(name: str) -> Markup:
    """A name that may wrap after its underscores, where a reader would wrap it."""
    return Markup("_<wbr>").join(escape(part) for part in name.split("_"))


@cache
def _templates(package: str) -> Environment:
    environment = Environment(
        loader=PackageLoader(package, "."),
        autoescape=True,
        undefined=StrictUndefined,  # a misspelt name is an error here, not a hole in the page
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = breakable
    return environment
