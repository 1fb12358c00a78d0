"""What pages are made of: elements, formulas, tables, sections; all that is not markup already is escaped."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from itertools import repeat, starmap
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element

from latex2mathml.converter import convert_to_element
from markupsafe import Markup, escape

Colours = Mapping[str, int]  # network: number of its colour
# Attributes of formulas that are kept: none of them leads anywhere or changes the style of the page.
_ATTRIBUTES = ("mathvariant", "stretchy", "fence", "form", "width", "accent", "lspace", "rspace")
_ALPHABETS = {"script": "SCRIPT", "bold": "BOLD", "double-struck": "DOUBLE-STRUCK", "fraktur": "FRAKTUR"}
_VOID = {"meta", "link", "input", "img"}  # elements without content, which nothing closes
_ARGUMENTS = {"mfrac": 2, "msub": 2, "msup": 2, "mover": 2, "munder": 2, "mroot": 2, "msubsup": 3, "munderover": 3}


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """An element with escaped text and attributes.

    A trailing underscore frees Python's keywords (`class_`), other underscores become hyphens. An attribute that is
    True stands without a value; one that is None or False is left out.

    Example:
        >>> str(element("a", "x < y", href="#top", class_="link"))
        '<a href="#top" class="link">x &lt; y</a>'
        >>> str(element("details", open=True))
        '<details open></details>'
    """
    start = f"<{tag}{''.join(starmap(_attribute, attributes.items()))}>"
    return Markup(start) if tag in _VOID else Markup(f"{start}{''.join(map(escape, children))}</{tag}>")


def _attribute(name: str, value: object) -> str:
    """An attribute of an element; markup that holds double quotes stands in single ones."""
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    text = str(escape(value))
    return f""" {name}='{text.replace("'", "&#39;")}'""" if '"' in text else f' {name}="{text}"'


def text_of_package_file(name: str, *, package: str = "flatscope.reports") -> str:
    """The text of a file in the folder of a package, as it is: the style sheet, the script."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


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
    """Table in a frame that scrolls; it sorts where `sorts` says how, and filters where it has an `id_`.

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
    titles = [_column_title(title, sorts[n] if sorts else None) for n, title in enumerate(header)]
    body = [
        element("tr", *map(_table_cell, row, ["th", *["td"] * (len(row) - 1)]), data_invariance=invariance)
        for row, invariance in zip(rows, invariances or repeat(None), strict=False)
    ]
    head = element("thead", element("tr", *titles))
    content = element("table", head, element("tbody", *body), id=id_, class_=class_ or None)
    class_of_frame = "scroll tall" if tall else "scroll"
    frame = element("div", content, class_=class_of_frame, role="region", aria_label=label, tabindex=0)
    return _table_filter(id_, by_invariance=bool(invariances)) + frame if id_ else frame


def _column_title(title: object, sort: str | None) -> Markup:
    """The head of a column; a button where the column sorts."""
    if sort is not None:
        button = element("button", title, element("span", class_="order", aria_hidden="true"), type="button")
        return element("th", button, scope="col", aria_sort="none", data_kind=sort)
    return element("th", title, scope="col") if title else element("td")


def _table_cell(cell: object, tag: str) -> Markup:
    shown = cell if isinstance(cell, Cell) else Cell(cell)
    scope = "row" if tag == "th" else None
    return element(tag, shown.content, scope=scope, class_=shown.class_ or None, data_sort=shown.key)


def _table_filter(id_: str, *, by_invariance: bool) -> Markup:
    """Search field that filters a table's rows; hidden until the script of the page shows it."""
    field = element(
        "input", type="search", placeholder="name, paper", autocomplete="off", spellcheck="false", aria_controls=id_
    )
    box = element("input", type="checkbox")
    return element(
        "div",
        element("label", "Filter ", field, class_="search"),
        element("label", box, " only invariant under rescaling", class_="check") if by_invariance else "",
        element("p", role="status", aria_live="polite"),
        class_="tools",
        id=f"{id_}-tools",
        hidden=True,
    )


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


class PagePart(NamedTuple):
    """Contribution of one kind of thing to the page: its answer, sections and picture."""

    answer: Markup  # what it says to the page's question, for the top of the page
    sections: list[Section]  # its details, folded
    provenance: Mapping[str, Mapping[str, Any]]  # where it comes from, by name
    picture: Markup = Markup("")  # one that may stand at the top; the first of them does
    below: tuple[Markup, ...] = ()  # the same in its section, which goes without it where it stands at the top
    style: str = ""  # rules that only this part needs
    script: str = ""  # likewise
