"""The page around the answer and the sections: head with its security policy, bar, title, provenance, foot."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from markupsafe import Markup

from flatscope.reports.markup import Section, element
from flatscope.version import __version__

LOGO = element(
    "svg",
    element("path", d="M1 2C6 2 7 14 20 14S34 2 39 2"),
    element("circle", cx=20, cy=12, r="2.2"),
    viewBox="0 0 40 16",
    width=40,
    height=16,
    aria_hidden="true",
)


def page_with_frame(
    title: str,
    answers: Sequence[Markup],
    pictures: Sequence[Markup],
    sections: Sequence[Section],
    *,
    provenance: Markup,
    networks: Mapping[str, int],
    style: str,
    script: str,
    command: str | None,
    refresh: float | None,
) -> str:
    """The whole page as text.

    Args:
        title: heading of the page.
        answers: what stands at its top.
        pictures: what stands beside them.
        sections: what opens below.
        provenance: table of where the numbers come from.
        networks: numbers of their colours, by name.
        style: the only rules that a browser may apply.
        script: the only script that a browser may run.
        command: the command line that produced the page.
        refresh: seconds after which a browser reads the page anew.
    """
    head = _head(title, style=style, script=script, refresh=refresh)
    main = element(
        "main",
        _title(title, networks),
        element(
            "section",
            element("div", *answers),
            element("div", *pictures, class_="pictures") if pictures else "",
            id="answer",
            aria_label="Answer",
            class_="with-picture" if pictures else None,
        ),
        *map(_folded_section, sections),
        _folded_section(_provenance_section(provenance, command)),
        id="main",
        tabindex=-1,
    )
    foot = element("p", f"Written by flatscope {__version__}. This page is one file and works offline.")
    body = element(
        "body",
        element("a", "Skip to the report", class_="skip", href="#main"),
        _bar(sections),
        main,
        element("footer", foot),
        element("script", Markup(script)),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _head(title: str, *, style: str, script: str, refresh: float | None) -> Markup:
    """The head of the page, whose policy forbids all but its own style and script."""
    allowed = f"style-src '{_content_security_hash(style)}'; script-src '{_content_security_hash(script)}'"
    policy = Markup(f"default-src 'none'; img-src data:; {allowed}")
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="generator", content=f"flatscope {__version__}"),
        "" if refresh is None else element("meta", http_equiv="refresh", content=f"{refresh:g}"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("link", rel="icon", href="data:,"),
        element("style", Markup(style)),
    )


def _content_security_hash(text: str) -> str:
    """Hash by which the page's security policy allows this very text and nothing else."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _bar(sections: Sequence[Section]) -> Markup:
    """The bar at the top: the name, links to the sections, the button for dark colours."""
    links = [*((section.anchor, section.title) for section in sections), ("provenance", "Provenance")]
    items = [element("li", element("a", title, href=f"#{anchor}")) for anchor, title in links]
    content = element(
        "div",
        element("p", LOGO, "flatscope", class_="brand"),
        element("nav", element("ul", *items), aria_label="Sections"),
        element("button", "Dark", type="button", id="theme", class_="theme", hidden=True),
        class_="bar",
    )
    return element("header", content, class_="page-head")


def _title(title: str, networks: Mapping[str, int]) -> Markup:
    """The heading of the page, when it was written, and the networks with their colours."""
    now = datetime.now(UTC)
    words = f"{now.day} {now.strftime('%B %Y, %H:%M')} UTC"
    shown = [
        element("span", element("span", class_=f"dot c{colour}", aria_hidden="true"), network, class_="network")
        for network, colour in networks.items()
    ]
    written = element("time", words, datetime=now.isoformat(timespec="seconds"))
    meta = element("p", Markup("\n").join([written, *shown]), class_="meta")
    return element("div", element("h1", title), meta, class_="title")


def _folded_section(section: Section) -> Markup:
    """A section that opens under its heading."""
    heading = f"{section.anchor}-title"
    summary = element(
        "summary",
        element("h2", section.title, id=heading),
        element("span", section.gist, class_="gist") if section.gist else "",
    )
    body = element("details", summary, section.body, class_="section", open=section.open)
    return element("section", body, id=section.anchor, aria_labelledby=heading)


def _provenance_section(provenance: Markup, command: str | None) -> Section:
    """Section on where the numbers come from, with the command that made the page."""
    made_by = element("p", "Made by the command") + element("pre", element("code", command)) if command else Markup("")
    return Section("provenance", "Provenance", made_by + provenance, "versions, seeds, commands")
