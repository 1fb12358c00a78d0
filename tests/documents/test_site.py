"""The site as it is built: links that lead somewhere, and every page in a browser, wide and narrow, light and dark."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
WIDTHS = (1400, 390)
SCHEMES = {"light": "default", "dark": "slate"}  # and how the theme calls them
# Pixels by which a page is wider than the window, and text whose contrast with its ground is below 4.5.
CHECKS = Path(__file__).with_name("site_layout.js")

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="MkDocs is not installed"),
]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does; FLATSCOPE_SITE names one that is already there."""
    if built := os.environ.get("FLATSCOPE_SITE"):
        return Path(built)
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


class Links(HTMLParser):
    """Addresses that a page leads to or loads, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.targets += [values[name] for name in ("href", "src") if name in values]
        self.targets += [part.split()[0] for part in values.get("srcset", "").split(",") if part.strip()]
        self.anchors |= {values[name] for name in ("id", "name") if name in values}


def broken_links(site: Path) -> list[str]:
    """Page and address of every link within the site whose file or anchor is not there."""
    pages = {path.resolve(): Links(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    broken = []
    for path, links in pages.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            found = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            found = found / "index.html" if found.is_dir() else found
            anchor = unquote(parts.fragment)
            there = found.is_file() and (not anchor or found not in pages or anchor in pages[found].anchors)
            if not there and anchor not in ("__top", "__skip", "__comments"):
                broken.append(f"{path.relative_to(site.resolve())} -> {target}")
    return broken


def test_every_link_and_picture_of_the_site_is_there(site: Path) -> None:
    assert broken_links(site) == []


def test_the_page_for_missing_addresses_needs_no_other_file(site: Path) -> None:
    # It is shown at any address, so that neither a relative nor a root-absolute path finds a file.
    page = Links((site / "404.html").read_text(encoding="utf-8"))
    assert page.targets == []
    assert "Page not found" in (site / "404.html").read_text(encoding="utf-8")


def test_the_check_of_links_bites(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text("<a href='b.html#here'>x</a><a href='b.html#gone'>x</a><img src='none.png'>")
    (tmp_path / "b.html").write_text("<h2 id='here'>x</h2>")
    assert broken_links(tmp_path) == ["a.html -> b.html#gone", "a.html -> none.png"]


def test_every_how_to_page_is_two_clicks_from_the_first(site: Path) -> None:
    def led_to(page: Path) -> set[Path]:
        text = page.read_text(encoding="utf-8")
        content = text[text.index("<article") : text.index("</article>")]  # what is read, not the menus around it
        return {(page.parent / urlsplit(target).path).resolve() for target in Links(content).targets}

    one = {page for page in led_to(site / "index.html") if page.suffix == ".html"}
    two = one.union(*map(led_to, one))
    assert set((site / "how-to").resolve().glob("*.html")) <= two
    assert {
        (site / f"{name}.html").resolve() for name in ("install", "tutorial", "choose", "whats-new", "limits")
    } <= two


def faults(page: Any, address: str) -> list[str]:
    """What is wrong with a page at each width, in light and in dark; what the console says while it opens."""
    said: list[str] = []
    page.on("console", lambda message: said.append(f"console: {message.text}") if message.type == "error" else None)
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.goto(address)
    page.add_style_tag(content="*, ::before, ::after { transition: none !important; animation: none !important }")
    page.evaluate("document.querySelectorAll('details').forEach((part) => (part.open = true))")
    checks = CHECKS.read_text(encoding="utf-8")
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        page.evaluate("name => document.body.setAttribute('data-md-color-scheme', name)", SCHEMES[scheme])
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            page.evaluate("() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
            said += [f"{width} px, {scheme}: {fault}" for fault in page.evaluate(checks)]
    return said


@pytest.mark.browser
def test_every_page_is_sound_in_a_browser(site: Path, browser: Any) -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(site.rglob("*.html")):
        page = browser.new_page(bypass_csp=True)
        # The page for addresses that are not there has no themes and no menus to look at.
        if path.name != "404.html" and (wrong := faults(page, path.resolve().as_uri())):
            found[path.relative_to(site).as_posix()] = wrong
        page.close()
    assert found == {}


@pytest.mark.browser
def test_the_checks_in_the_browser_bite(tmp_path: Path, browser: Any) -> None:
    (tmp_path / "wrong.html").write_text(
        "<script>nothing.here()</script><main style='background: #fff'><p style='width: 2000px'>wide</p>"
        "<p style='color: #ccc'>faint</p><img src='none.png'></main>"
    )
    page = browser.new_page(bypass_csp=True)
    said = "\n".join(faults(page, (tmp_path / "wrong.html").as_uri()))
    page.close()
    for word in (
        "error: nothing is not defined",
        "wider than the window",
        "faint (1.6 to 1)",
        "does not open",
        "without words",
    ):
        assert word in said, said
