"""Surfaces that turn and populations that are looked through, in headless Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from test_report import table
from test_report_browser import SIDEWAYS, brightness, made, opened, pytestmark  # noqa: F401  a fixture
from test_report_landscape import bowl
from test_report_population import NETWORK_WIDE, population

from flatscope.training.populations.population_frame import PopulationFrame

N_NETWORKS = 40
CORRELATIONS = "[...document.querySelectorAll('.correlations tbody tr:not([hidden]) .name')].map(e => e.textContent)"
INK = """canvas => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let painted = 0;
  for (let n = 3; n < data.length; n += 4) painted += data[n] > 0;
  return painted / (data.length / 4);
}"""
PICTURE = "canvas => canvas.toDataURL()"


@pytest.fixture(scope="module")
def landscape_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    items = {
        "small batch": [table(), bowl(grid=31), bowl("psi", grid=31)],
        "large batch": [table(3.0), bowl(grid=31, steep=9.0), bowl(dimensions=1)],
    }
    return made(items, tmp_path_factory.mktemp("landscape"))


@pytest.fixture(scope="module")
def population_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return made({"many": PopulationFrame(population(N_NETWORKS, 20))}, tmp_path_factory.mktemp("population"))


@pytest.fixture
def landscape(browser: Any, landscape_page: str) -> Iterator[Any]:
    for page in opened(browser, landscape_page):
        page.wait_for_selector("canvas[data-azimuth]")
        yield page


@pytest.fixture
def many(browser: Any, population_page: str) -> Iterator[Any]:
    yield from opened(browser, population_page)


def angles(canvas: Any) -> tuple[float, float, float]:
    return tuple(float(canvas.get_attribute(f"data-{name}")) for name in ("azimuth", "elevation", "zoom"))  # type: ignore[return-value]


def settled(page: Any) -> None:
    """Drawing happens with the next frame."""
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def drag(page: Any, canvas: Any, across: float, down: float) -> None:
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x + across / 2, y + down / 2)
    page.mouse.move(x + across, y + down)
    page.mouse.up()
    settled(page)


def test_a_surface_turns_under_the_hand(landscape: Any) -> None:
    canvas = landscape.locator("canvas").first
    before, picture = angles(canvas), canvas.evaluate(PICTURE)
    assert 0.1 < canvas.evaluate(INK) < 0.9
    drag(landscape, canvas, 80, 20)
    assert angles(canvas) == pytest.approx((before[0] + 40, before[1] + 10, 1.0))
    assert canvas.evaluate(PICTURE) != picture
    drag(landscape, canvas, -80, -20)
    assert angles(canvas) == pytest.approx(before)
    assert canvas.evaluate(PICTURE) == picture


def test_surfaces_of_one_network_turn_together(landscape: Any) -> None:
    canvases = landscape.locator("canvas")
    assert canvases.count() == 3
    drag(landscape, canvases.nth(0), 50, 0)
    assert angles(canvases.nth(1)) == angles(canvases.nth(0))
    assert angles(canvases.nth(2)) != angles(canvases.nth(0))  # another network


def test_keys_turn_and_zoom(landscape: Any) -> None:
    canvas = landscape.locator("canvas").first
    azimuth, elevation, _ = angles(canvas)
    canvas.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowUp", "+"):
        landscape.keyboard.press(key)
    settled(landscape)
    assert angles(canvas) == pytest.approx((azimuth + 10, elevation + 5, 1.15))
    assert "seen from −28°, 37° up" in landscape.locator(".relief output").first.text_content()
    for _ in range(20):
        landscape.keyboard.press("ArrowUp")
    settled(landscape)
    assert angles(canvas)[1] == 90  # straight from above, and no further
    landscape.keyboard.press("0")
    settled(landscape)
    assert angles(canvas) == (azimuth, elevation, 1.0)


def test_the_wheel_zooms_only_a_focused_surface(landscape: Any) -> None:
    canvas = landscape.locator("canvas").first
    canvas.scroll_into_view_if_needed()
    canvas.hover()
    landscape.mouse.wheel(0, -40)
    settled(landscape)
    assert angles(canvas)[2] == 1.0  # the page scrolled instead
    canvas.focus()
    canvas.hover()
    landscape.mouse.wheel(0, -100)
    landscape.wait_for_function("document.querySelector('canvas').dataset.zoom > 1.1")


def test_pointing_reads_off_the_loss(landscape: Any) -> None:
    canvas = landscape.locator("canvas").first
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    read = landscape.locator(".relief output").first
    landscape.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert "loss" in read.text_content()
    landscape.mouse.move(box["x"] + 2, box["y"] + box["height"] - 2)
    assert read.text_content() == ""


def test_surfaces_follow_the_theme_and_the_paper(landscape: Any) -> None:
    canvas = landscape.locator("canvas").first
    light = canvas.evaluate(PICTURE)
    landscape.get_by_role("button", name="Switch to dark colours").click()
    settled(landscape)
    assert brightness(landscape) < 60
    assert canvas.evaluate(PICTURE) != light
    landscape.emulate_media(media="print")
    landscape.set_viewport_size({"width": 720, "height": 1000})
    settled(landscape)
    assert landscape.evaluate(SIDEWAYS) == 0
    assert landscape.locator("#landscape .chart").first.is_visible()
    assert canvas.evaluate(INK) > 0.05
    assert landscape.pdf(format="A4").startswith(b"%PDF")


def test_a_phone_shows_surfaces_and_populations(browser: Any, landscape_page: str, population_page: str) -> None:
    for address in (landscape_page, population_page):
        for page in opened(browser, address, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True):
            assert page.evaluate(SIDEWAYS) == 0
            page.eval_on_selector_all("details", "all => all.forEach(e => { e.open = true; })")
            assert page.evaluate(SIDEWAYS) == 0
            for wide in page.locator("canvas:visible, .chart:visible").all():
                assert 250 < wide.bounding_box()["width"] <= 390


def test_contour_maps_need_no_script(browser: Any, landscape_page: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(landscape_page)
    page.locator("#landscape summary").first.click()
    shown = [
        picture.get_attribute("aria-label") for picture in page.locator("svg[aria-label^='Contour map']:visible").all()
    ]
    assert len({label.partition(".")[0] for label in shown}) == len(shown) == 3  # two of them at the top
    assert not page.locator("canvas").first.is_visible()
    context.close()


def test_of_several_scatters_the_chosen_one_is_shown(many: Any) -> None:
    shown = many.locator(".chooser figure:visible")
    assert shown.count() == 1
    assert shown.locator("h3").text_content() == NETWORK_WIDE[0]
    assert shown.locator("title").count() == N_NETWORKS  # pointing at a mark names its network
    many.locator(".chooser select").focus()
    many.keyboard.press("ArrowDown")
    assert shown.locator("h3").text_content() != NETWORK_WIDE[0]


def test_scatters_need_no_script(browser: Any, population_page: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(population_page)
    assert page.locator(".chooser figure:visible").count() > 1
    assert not page.locator(".chooser select").is_visible()
    context.close()


def test_correlations_sort_and_filter(many: Any) -> None:
    names = many.evaluate(CORRELATIONS)
    assert len(names) == 20
    many.locator(".correlations th button").first.press("Enter")
    assert many.evaluate(CORRELATIONS) == sorted(names)
    many.locator(".correlations th button").nth(3).click()
    assert many.eval_on_selector_all(".correlations th[aria-sort]", "all => all.map(e => e.ariaSort)")[3] == "ascending"
    many.locator("#population-table-0-tools input[type=search]").fill(NETWORK_WIDE[3])
    assert NETWORK_WIDE[3] in many.evaluate(CORRELATIONS)
    assert len(many.evaluate(CORRELATIONS)) < len(names)
