"""How the report is laid out at the widths of a desk, a tablet and a phone, in light and in dark."""

from __future__ import annotations

from typing import Any

import pytest
from networks import mlp
from test_report import bounds_table, figure, history, row
from test_report_browser import SIDEWAYS, browser, made, opened, pytestmark  # noqa: F401  the browser is a fixture
from test_report_landscape import bowl, criteria_table, units_table
from test_report_population import population

import flatscope as fs
from flatscope.auditing import audit
from flatscope.reports import PopulationFrame
from flatscope.table import Table

VIEWS = [(width, scheme) for width in (1400, 768, 390) for scheme in ("light", "dark")]
FIRST_PICTURE = 1500  # pixels from the top at which it must have ended
# Text that a reader sees, with its box: elements that hold text of their own, and are neither hidden nor scrolled away.
TEXTS = """() => [...document.querySelectorAll("main *, header *")].filter(e => !e.closest(".hidden, math, title, nav, canvas")
  && !e.closest("tbody, thead") && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())
  && e.checkVisibility({ visibilityProperty: true })).map(e => {
    const box = e.getBoundingClientRect();
    return [e.textContent.trim().slice(0, 40), box.left, box.right, e.closest("svg, .card") ? 1 : 0];
  })"""
# Pairs of labels of one picture that lie on each other, by more than a rounding.
COLLISIONS = """() => [...document.querySelectorAll("svg.chart")].filter(e => e.checkVisibility()).flatMap(svg => {
  const texts = [...svg.querySelectorAll("text")].map(e => [e.textContent, e.getBoundingClientRect()]);
  return texts.flatMap(([a, p], n) => texts.slice(n + 1).filter(([, q]) =>
    Math.min(p.right, q.right) - Math.max(p.left, q.left) > 1 && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 1.5
  ).map(([b]) => `${svg.getAttribute("aria-label").slice(0, 40)}: ${a} on ${b}`));
})"""
# Labels that stick out of the card, or of the column, in which their picture is.
CUT = """() => [...document.querySelectorAll("svg.chart text")].filter(e => e.checkVisibility()).filter(e => {
  const [box, frame] = [e.getBoundingClientRect(), e.closest(".card, .hero").getBoundingClientRect()];
  return box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
}).map(e => e.textContent)"""
# Contrast of text with what it stands on, by the formula of the Web Content Accessibility Guidelines.
CONTRAST = """() => {
  const channels = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
  const ground = (e) => { for (; e; e = e.parentElement) { const c = channels(getComputedStyle(e).backgroundColor); if (c.length === 3) return c; } return [255, 255, 255]; };
  return [...document.querySelectorAll("main p, main th, main td, main h1, main h2, main h3, main small, .badge, .chart text, summary, .gist")]
    .filter(e => e.checkVisibility() && e.textContent.trim()).map(e => {
      const style = getComputedStyle(e);
      const [a, b] = [light(channels(e.closest("svg") ? style.fill : style.color)), light(ground(e.closest("svg")?.parentElement ?? e))].sort((x, y) => y - x);
      return [(a + 0.05) / (b + 0.05), `${e.tagName} ${e.className.baseVal ?? e.className} ${e.textContent.trim().slice(0, 30)}`];
    }).filter(([ratio]) => ratio < 4.5);
}"""
UNNAMED = """() => [...document.querySelectorAll("button, select, input, a, canvas, svg[role=img], img, [role=region]")].filter(e =>
  e.checkVisibility() && !(e.getAttribute("aria-label") || e.labels?.length || e.textContent.trim() || e.alt)).map(e => e.outerHTML.slice(0, 80))"""


def measured(scale: float) -> Table:
    rows = [
        row("rho_sum", 2.0 * scale, stderr=0.1, exact=False), row("psi_trace", 30.0 * scale), row("gradient_norm", 2e-4),
        row("margin", 2.0 / scale), row("l1_path_norm_over_margin", 1e5 * scale**5), row("parameter_count", 100.0),
        *units_table(scale).to_frame().to_dict("records"), *criteria_table(scale).to_frame().to_dict("records"),
        *(row("kappa", value * scale, layer=f"features.block{value}.conv") for value in (1, 2, 3)),
    ]  # fmt: skip
    return Table(rows, {"loss": "cross_entropy", "n_train": 50})


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    problem = mlp().problem()
    networks = {
        "batch 16": [measured(1.0), bounds_table(), history(), bowl(grid=21), bowl("psi", grid=21)],
        "batch 512": [measured(2.0), history(2.0), bowl(grid=21, steep=50.0), bowl(dimensions=1)],
    }
    network = fs.measure(problem, ["gradient_norm", "rho_sum", "margin", "functional_margin"])
    audited = audit(problem, ["hessian_trace", "rho_sum"], by=("layer",), trials=1)
    density = fs.spectral_density(problem, draws=2, steps=8)
    many = PopulationFrame(population(40, 20))
    folder = tmp_path_factory.mktemp("layout")
    return {
        "networks": made([networks, figure()], folder / "networks"),
        "one network": made({"net": [network, audited, density]}, folder / "one"),
        "population": made({"many": many}, folder / "many"),
    }


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
@pytest.mark.parametrize("name", ["networks", "one network", "population"])
def test_nothing_overlaps_and_nothing_is_cut(
    browser: Any,  # noqa: F811
    pages: dict[str, str],
    name: str,
    width: int,
    scheme: str,
) -> None:
    size = {"width": width, "height": 900}
    for page in opened(browser, pages[name], viewport=size, color_scheme=scheme):
        top = page.locator("svg.chart").first.bounding_box()
        assert top["y"] + top["height"] <= FIRST_PICTURE
        assert page.evaluate(SIDEWAYS) == 0
        assert page.evaluate(COLLISIONS) == []
        assert page.evaluate(CUT) == []
        outside = [text for text, left, right, inside in page.evaluate(TEXTS) if left < -1 or right > width + 1]
        assert outside == []
        assert page.evaluate(CONTRAST) == []
        assert page.evaluate(UNNAMED) == []


def test_the_answer_is_above_the_fold(browser: Any, pages: dict[str, str]) -> None:  # noqa: F811
    for page in opened(browser, pages["networks"], viewport={"width": 1400, "height": 900}):
        sentence = page.locator(".conclusion")
        assert sentence.text_content().startswith("batch 16 is flatter than batch 512: 2.00 ± 0.11 times by relative")
        assert sentence.bounding_box()["y"] < 400
        for heading in ("Training loss", "Test loss"):
            assert page.locator(".facts th", has_text=heading).bounding_box()["y"] < 900
        picture = page.locator(".hero").bounding_box()
        assert picture["y"] + picture["height"] < 900


def test_both_networks_are_seen_on_a_phone(browser: Any, pages: dict[str, str]) -> None:  # noqa: F811
    for page in opened(browser, pages["networks"], viewport={"width": 390, "height": 844}):
        for table in ("#answer", "#measures"):
            for heading in page.locator(f"{table} thead th").all()[:3]:
                box = heading.bounding_box()
                assert box["x"] + box["width"] <= 390


def test_the_keyboard_reaches_and_opens_everything(browser: Any, pages: dict[str, str]) -> None:  # noqa: F811
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(pages["networks"])
    page.locator("#measures summary").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("#measure-table").is_visible()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.type") == "search"
    page.close()
