"""The report page as a reader meets it, in headless Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_report import HOSTILE, figure, history, table

from flatscope.reports.page import report

NAMES = "[...document.querySelectorAll('#measure-table tbody tr:not([hidden]) .name')].map(e => e.textContent)"
FILTER, STATUS = "#measure-table-tools input[type=search]", "#measure-table-tools [role=status]"
SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.long,
]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    networks = {"small batch": [table(), history()], "large batch": [table(3.0), history(2.0)]}
    long_name = table(2.0, layer="a_very_long_layer_name." * 8)
    return made([networks, {HOSTILE * 3: long_name}, figure()], tmp_path_factory.mktemp("page"))


def made(items: object, folder: Path) -> str:
    return report(items, folder / "report.html", command="flatscope demo " + "--option value " * 20).as_uri()


def opened(browser: Any, address: str, **options: Any) -> Iterator[Any]:
    """The page, all of it unfolded; anything on the console and any request but for the page itself is an error."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"} | options)
    context.set_default_timeout(10_000)
    page = context.new_page()
    heard: list[str] = []
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("dialog", lambda dialog: (heard.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: heard.append(request.url))
    page.goto(address)
    page.eval_on_selector_all("details.section", "all => all.forEach(e => { e.open = true; })")
    yield page
    context.close()
    assert [text for text in heard if text != address and not text.startswith("data:")] == []


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    yield from opened(browser, address)


def sort_states(page: Any) -> list[str]:
    return page.eval_on_selector_all("#measure-table th[aria-sort]", "all => all.map(e => e.ariaSort)")


def test_loads_in_silence_and_shows_itself(page: Any) -> None:
    assert page.title() == "How flat are these minima?"
    assert page.locator("#theme").is_visible()
    assert page.locator(FILTER).is_visible()
    assert page.locator(STATUS).text_content() == "6 measures"
    assert page.locator("math").first.bounding_box()["width"] > 5
    for chart in page.locator("svg.chart").all():
        assert chart.bounding_box()["width"] > 200
    assert page.evaluate(SIDEWAYS) == 0


def test_details_are_folded_and_links_open_them(browser: Any, address: str) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(address)
    assert not page.locator("#measure-table").is_visible()
    page.locator("nav a[href='#measures']").press("Enter")
    page.wait_for_selector("#measure-table", state="visible")
    assert page.locator("#comparison details.section").get_attribute("open") is None
    page.goto(f"{address}#provenance")
    page.reload()
    page.wait_for_selector("#provenance pre", state="visible")
    page.close()


def test_sorts_by_mouse_and_keyboard(page: Any) -> None:
    given = page.evaluate(NAMES)
    page.get_by_role("button", name="Measure", exact=True).click()
    assert page.evaluate(NAMES) == sorted(given)
    assert sort_states(page)[0] == "ascending"
    page.get_by_role("button", name="small batch").focus()
    page.keyboard.press("Enter")
    assert page.evaluate(NAMES)[:3] == ["gradient_norm", "margin", "functional_margin"]
    assert page.evaluate(NAMES)[-1] == "parameter_count"  # no value: last in either direction
    page.keyboard.press("Space")
    assert page.evaluate(NAMES)[0] == "l2_norm"
    assert page.evaluate(NAMES)[-1] == "parameter_count"
    assert sort_states(page)[:2] == ["none", "descending"]
    assert "sorted by small batch, descending" in page.locator(STATUS).text_content()


def test_filters(page: Any) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.locator(FILTER).fill("YI trace")
    assert page.evaluate(NAMES) == ["hessian_trace"]
    assert page.locator(STATUS).text_content() == "1 of 6 measures"
    page.locator(FILTER).press("Escape")
    assert len(page.evaluate(NAMES)) == 6
    page.locator("#measure-table-tools input[type=checkbox]").press("Space")
    assert page.evaluate(NAMES) == ["margin", "parameter_count", "functional_margin"]


def brightness(page: Any) -> float:
    """Mean of the page's background, 0 to 255."""
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    parts = [float(part) for part in colour.removeprefix("rgb(").rstrip(")").split(",")]
    return sum(parts) / 3


def test_light_dark_and_the_switch_between(page: Any) -> None:
    assert brightness(page) > 200
    page.emulate_media(color_scheme="dark")
    assert brightness(page) < 60
    page.get_by_role("button", name="Switch to light colours").press("Enter")
    assert brightness(page) > 200
    page.reload()
    assert brightness(page) > 200  # the choice is kept
    page.get_by_role("button", name="Switch to dark colours").click()
    assert brightness(page) < 60
    page.emulate_media(media="print")
    assert brightness(page) == 255  # paper is white, whatever the screen


def test_fits_a_phone(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate(SIDEWAYS) == 0
    page.eval_on_selector_all("details", "all => all.forEach(e => { e.open = true; })")
    assert page.evaluate(SIDEWAYS) == 0
    assert page.evaluate("(b => b.scrollWidth > b.clientWidth)(document.querySelector('#measures .scroll'))")
    page.wait_for_selector("#measures .scroll.wide")  # and says so


def test_prints(page: Any) -> None:
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 720, "height": 1000})  # A4 less its margins
    assert page.evaluate(SIDEWAYS) == 0
    assert not page.locator(".page-head").is_visible()
    assert not page.locator("#measure-table-tools").is_visible()
    assert page.locator("#measures table").is_visible()
    assert page.pdf(format="A4").startswith(b"%PDF")


def test_reads_without_its_script(browser: Any, address: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    assert page.locator("#measures tbody tr").count() == 6
    assert not page.locator("#theme").is_visible()
    context.close()
