"""What pages are made of: elements, templates, formulas, sections; all that is not markup already is escaped."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element

from jinja2 import Environment, PackageLoader, StrictUndefined
from latex2mathml.converter import convert_to_element
from markupsafe import Markup, escape

Colours = Mapping[str, int]  # network: number of its colour
# Attributes of formulas that are kept: none of them leads anywhere or changes the style of the page.
_ATTRIBUTES = ("mathvariant", "stretchy", "fence", "form", "width", "accent", "lspace", "rspace")
_ALPHABETS = {"script": "SCRIPT", "bold": "BOLD", "double-struck": "DOUBLE-STRUCK", "fraktur": "FRAKTUR"}
_ARGUMENTS = {"mfrac": 2, "msub": 2, "msup": 2, "mover": 2, "munder": 2, "mroot": 2, "msubsup": 3, "munderover": 3}


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """An element with escaped text and attributes.

    A trailing underscore frees Python's keywords (`class_`), other underscores become hyphens, and an
    attribute that is None is left out.

    Example:
        >>> str(element("a", "x < y", href="#top", class_="link"))
        '<a href="#top" class="link">x &lt; y</a>'
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{tag}{written}>{''.join(map(escape, children))}</{tag}>")


def fragment(template: str, *, package: str = "flatscope.reports", **values: Any) -> Markup:
    """A template in the folder of a package, filled in."""
    return Markup(_template_environment(package).get_template(template).render(values))


def text_of_package_file(name: str, *, package: str = "flatscope.reports") -> str:
    """The text of a file in the folder of a package, as it is: the style sheet, the script."""
    environment = _template_environment(package)
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def breakable(name: str) -> Markup:
    """A name that may wrap after its underscores, where a reader would wrap it."""
    return Markup("_<wbr>").join(escape(part) for part in name.split("_"))


@cache
def formula_as_mathml(source: str) -> Markup:
    r"""A formula of one line as MathML, which browsers draw without any library; its source where it cannot be read.

    Example:
        >>> str(formula_as_mathml(r"\mathcal{L}^2"))
        '<math alttext="\\mathcal{L}^2"><mrow><msup><mi>ℒ</mi><mn>2</mn></msup></mrow></math>'
        >>> str(formula_as_mathml(r"\unheardof"))
        '<code class="tex">\\unheardof</code>'
    """
    try:
        if not _braces_are_balanced(source):
            raise ValueError(source)
        inner = Markup("").join(_mathml(child) for child in convert_to_element(source))
    except Exception:  # the converter has errors of many kinds, and a page does not fail for a formula
        return element("code", source, class_="tex")
    return element("math", inner, alttext=source)


def _mathml(node: Element) -> Markup:
    """An element of a formula, escaped; ValueError where the converter did not know what it read."""
    text, children = html.unescape(node.text or ""), list(node)
    if "\\" in text or len(children) < _ARGUMENTS.get(node.tag, 0):
        raise ValueError(text or node.tag)
    attributes = {name: value for name, value in node.attrib.items() if name in _ATTRIBUTES}
    alphabet = attributes.get("mathvariant", "")
    if alphabet in _ALPHABETS:  # browsers know these letters as characters, not as a style
        text = "".join(_letter_of_alphabet(_ALPHABETS[alphabet], letter) for letter in text)
        del attributes["mathvariant"]
    return element(node.tag, text, *map(_mathml, children), **attributes)


def _letter_of_alphabet(alphabet: str, letter: str) -> str:
    """A letter of a mathematical alphabet; anything else as it is."""
    kind = f"{alphabet} {'CAPITAL' if letter.isupper() else 'SMALL'} {letter.upper()}"
    for name in (f"MATHEMATICAL {kind}", kind):  # some, as the double-struck R, are older than the block of the others
        with suppress(KeyError):
            return unicodedata.lookup(name)
    return letter


def _braces_are_balanced(source: str) -> bool:
    """True if every brace that opens a group is closed again."""
    depth = 0
    for brace in re.findall(r"\\.|[{}]", source):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            return False
    return depth == 0


@cache
def _template_environment(package: str) -> Environment:
    environment = Environment(
        loader=PackageLoader(package, "."),
        autoescape=True,
        undefined=StrictUndefined,  # a misspelt name is an error here, not a hole in the page
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = breakable
    return environment


class Cell(NamedTuple):
    """A cell of a table: what it shows, by what its column sorts, and its class."""

    content: object
    key: str | None = None
    class_: str | None = None


def table(
    label: str,
    header: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    class_: str = "",
    id_: str | None = None,
    sorts: Sequence[str] = (),
    invariances: Sequence[str] = (),
    tall: bool = False,
) -> Markup:
    """Table of the page: it scrolls within its frame, and sorts and filters where it is told how.

    Args:
        label: what it shows, for those who do not see it.
        header: titles of the columns.
        rows: a heading and cells; text, markup or `Cell`.
        class_: of the table.
        id_: by which its script finds it.
        sorts: "text" or "number" per column, for a table whose columns sort.
        invariances: per row, what rescaling does to the measure in it; by that a checkbox filters.
        tall: whether it scrolls within itself, under a heading that stays.
    """
    shown = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    about: dict[str, Any] = {"class_": class_, "id": id_, "sorts": sorts, "invariances": invariances, "tall": tall}
    return fragment("table.html", label=label, header=header, rows=shown, **about)


def badge(text: str, kind: str = "", title: str | None = None) -> Markup:
    """A word with a coloured ground; `kind` is good, fair, poor or nothing."""
    return element("span", text, class_=f"badge {kind}".strip(), title=title)


def bullet_list(sentences: Iterable[object]) -> Markup:
    """Sentences as a list; nothing for none."""
    items = [element("li", sentence) for sentence in sentences]
    return element("ul", *items, class_="findings") if items else Markup("")


def answer_and_list(sentences: Sequence[object]) -> Markup:
    """An answer: its first sentence large, the others as a list."""
    first = element("p", sentences[0], class_="conclusion") if sentences else Markup("")
    return first + bullet_list(sentences[1:])


class Section(NamedTuple):
    """A part of the page that opens under its heading; `gist` says beside the heading what is inside."""

    anchor: str
    title: str
    body: Markup
    gist: str = ""
    open: bool = False


class Part(NamedTuple):
    """Contribution of one kind of thing to the page: its answer, sections and picture."""

    answer: Markup  # what it says to the page's question, for the top of the page
    sections: list[Section]  # its details, folded
    provenance: Mapping[str, Mapping[str, Any]]  # where it comes from, by name
    picture: Markup = Markup("")  # one that may stand at the top; the first of them does
    below: tuple[Markup, ...] = ()  # the same in its section, which goes without it where it stands at the top
    style: str = ""  # rules that only this part needs
    script: str = ""  # likewise
