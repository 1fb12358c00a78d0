"""How the report is laid out at the widths of a desk, a tablet and a phone, in light and in dark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from networks import mlp
from test_report import bounds_table, figure, history, row
from test_report_browser import SIDEWAYS, made, opened, pytestmark  # noqa: F401  the browser is a fixture
from test_report_landscape import bowl, criteria_table, units_table
from test_report_population import population

import flatscope as fs
from flatscope.auditing import audit
from flatscope.comparing.comparison import Comparison
from flatscope.network_summary import NetworkSummary
from flatscope.table import Table
from flatscope.training.populations.population_frame import PopulationFrame

VIEWS = [(width, scheme) for width in (1400, 768, 390) for scheme in ("light", "dark")]
NOTHING: dict[str, list[str]] = {check: [] for check in ("collisions", "cut", "outside", "faint", "unnamed")}
FIRST_PICTURE = 1530  # pixels from the top at which it must have ended
CHECKS = Path(__file__).with_name("report_layout.js").read_text()


def found(page: Any, check: str) -> list[str]:
    return list(page.evaluate(f"{CHECKS.strip()}.{check}()"))


def measured(scale: float) -> Table:
    rows = [
        row("rho_sum", 2.0 * scale, stderr=0.1, exact=False), row("psi_trace", 30.0 * scale),
        row("gradient_norm", 2e-4), row("margin", 2.0 / scale),
        row("distance_from_initialization", 1e5 * scale**5), row("parameter_count", 100.0),
        *units_table(scale).to_frame().to_dict("records"), *criteria_table(scale).to_frame().to_dict("records"),
        *(row("kappa", value * scale, layer=f"features.block{value}.conv") for value in (1, 2, 3)),
    ]  # fmt: skip
    return Table(rows, {"loss": "cross_entropy", "n_train": 50})


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    problem = mlp().problem()
    networks = {
        "batch 16": [bounds_table(), history(), bowl(grid=21), bowl("psi", grid=21)],
        "batch 512": [history(2.0), bowl(grid=21, steep=50.0), bowl(dimensions=1)],
    }
    summary = NetworkSummary("net", 9, 0.1, 0.0, 0.2, 0.03, rescalable=True)
    compared = Comparison(
        {"batch 16": measured(1.0), "batch 512": measured(2.0)},
        {"batch 16": summary, "batch 512": replace(summary, test_error=0.025)},
        meta={"loss": "cross_entropy", "n_test": 360},
    )
    network = fs.measure(problem, ["gradient_norm", "rho_sum", "margin", "functional_margin"])
    audited = audit(problem, ["hessian_trace", "rho_sum"], by=("layer",), trials=1)
    density = fs.spectral_density(problem, draws=2, steps=8)
    many = PopulationFrame(population(40, 20))
    folder = tmp_path_factory.mktemp("layout")
    return {
        "networks": made([compared, networks, figure()], folder / "networks"),
        "one network": made({"net": [network, audited, density]}, folder / "one"),
        "population": made({"many": many}, folder / "many"),
    }


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
@pytest.mark.parametrize("name", ["networks", "one network", "population"])
def test_nothing_overlaps_and_nothing_is_cut(
    browser: Any,
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
        assert {check: found(page, check) for check in NOTHING} == NOTHING


@pytest.mark.parametrize(
    ("check", "damage"),
    [
        ("collisions", "document.querySelectorAll('.chart text').forEach(e => e.setAttribute('font-size', 40))"),
        ("cut", "document.querySelector('.chart text').setAttribute('transform', 'translate(-300 0)')"),
        ("outside", "document.querySelector('h1').style.marginLeft = '5000px'"),
        ("faint", "document.querySelector('.conclusion').style.color = '#ddd'"),
        ("unnamed", "document.querySelector('.chart').removeAttribute('aria-label')"),
    ],
)
def test_the_checks_bite(browser: Any, pages: dict[str, str], check: str, damage: str) -> None:
    context = browser.new_context(bypass_csp=True)
    page = context.new_page()
    page.goto(pages["networks"])
    assert found(page, check) == []
    page.evaluate(damage)
    assert found(page, check) != []
    context.close()


def test_the_answer_is_above_the_fold(browser: Any, pages: dict[str, str]) -> None:
    for page in opened(browser, pages["networks"], viewport={"width": 1400, "height": 900}):
        sentence = page.locator(".conclusion")
        assert sentence.text_content().startswith("Keep either: test errors do not differ")
        flatter = page.locator(
            ".held-out", has_text="batch 16 is flatter than batch 512: 2.00 ± 0.11 times by relative"
        )
        assert flatter.bounding_box()["y"] < 500
        assert sentence.bounding_box()["y"] < 400
        for heading in ("Training loss", "Test loss", "rho_sum"):
            assert page.locator(".facts th", has_text=heading).bounding_box()["y"] < 900
        assert page.locator(".held-out").first.bounding_box()["y"] < 450
        assert "±" in page.locator(".facts tr", has_text="rho_sum").text_content()
        maps, factors, spectrum = (picture.bounding_box() for picture in page.locator(".hero").all())
        assert maps["y"] + maps["height"] < 900
        assert factors["y"] < 600, "the room below the maps is used"
        beside = page.locator("#answer > div").first.bounding_box()
        assert spectrum["y"] < beside["y"] + beside["height"], "and so is that beside the facts"
        words = page.locator(".hero").nth(1).text_content()
        assert "← batch 16 better" in words
        assert "batch 512 better →" in words


def test_both_networks_are_seen_on_a_phone(browser: Any, pages: dict[str, str]) -> None:
    for page in opened(browser, pages["networks"], viewport={"width": 390, "height": 844}):
        for table in ("#answer", "#measures"):
            for heading in page.locator(f"{table} thead th").all()[:3]:
                box = heading.bounding_box()
                assert box["x"] + box["width"] <= 390


def test_the_keyboard_reaches_and_opens_everything(browser: Any, pages: dict[str, str]) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(pages["networks"])
    page.locator("#measures summary").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("#measure-table").is_visible()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.type") == "search"
    page.close()
