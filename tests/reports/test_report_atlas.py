"""Curves of correlations along training, chosen and read off in headless Chromium."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile import STRINGS, tidy
from test_atlas import followed
from test_hostile_strings import looked_at
from test_report_browser import SIDEWAYS, brightness, made, opened, pytestmark  # noqa: F401  a fixture
from test_report_layout import NOTHING, VIEWS, found

import flatscope as fs
from flatscope.reports.page import report

CURVES, SHOWN = ".atlas .curves", "[...document.querySelectorAll('.atlas .curves polyline')].length"


def atlas() -> fs.Atlas:
    frame = followed(40)
    frame["kappa/a_layer_with_a_long_name.conv2"] = frame["margin"] ** 2
    return fs.atlas(frame, by=["batch", "init"], resamples=100)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return made({"many": atlas()}, tmp_path_factory.mktemp("atlas"))


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    for page in opened(browser, address):
        page.wait_for_selector(f"{CURVES}[data-at]")
        yield page


def readout(page: Any) -> str:
    return str(page.locator(".atlas output").text_content())


def test_the_first_line_answers_and_all_is_there(page: Any) -> None:
    first, known = page.locator(".conclusion").text_content(), atlas()
    assert first == known.sentence("margin")
    assert "turns between epochs" in first
    assert page.title() == "When does a measure go along with generalization?"
    text = page.locator("#answer").text_content()
    assert f"{3 * 2 * 9 * 3} curves" in text.replace("\u202f", "")
    assert "networks are in" in text
    assert page.evaluate(SHOWN) == 1
    assert page.locator(".correlations tbody tr").count() == 3
    assert page.evaluate(SIDEWAYS) == 0


def test_measures_axes_groups_and_kinds_are_chosen(page: Any) -> None:
    known = atlas()
    page.check(".measures-shown input[value='1']")
    assert page.evaluate(SHOWN) == 2
    assert page.locator(".atlas .said li").all_text_contents() == [known.sentence("margin"), known.sentence("rho")]
    page.select_option("select.axis", label="training loss")
    page.select_option("select.scope", label="within batch")
    page.select_option("select.kind", label="Spearman’s correlation")
    chosen = known.sentence("margin", "train_loss", "within batch", "spearman")
    assert page.locator(".atlas .said li").first.text_content() == chosen
    page.locator(CURVES).focus()
    page.keyboard.press("Home")
    first = known.curve("margin", "train_loss", "within batch", "spearman")[0]
    assert f"{first.value:+.2f}".replace("-", "−") in readout(page)
    assert f"{first.n} of {first.networks} networks" in readout(page)
    assert "for all at once" not in readout(page)
    page.check("input.wide")
    assert f"[{first.band_low:.2f}, {first.band_high:.2f}]".replace("-", "−") in readout(page)
    for box in page.locator(".measures-shown input").all():
        box.uncheck()
    assert page.evaluate(SHOWN) == 0


def test_pointing_and_keys_read_off_every_point(page: Any) -> None:
    points = atlas().curve("margin")
    page.locator(CURVES).focus()
    page.keyboard.press("Home")
    for number, point in enumerate(points):
        assert page.locator(CURVES).get_attribute("data-at") == f"{point.at:g}"
        words = f"margin {point.value:+.2f} [{point.low:.2f}, {point.high:.2f}]".replace("-", "−")
        assert words in readout(page)
        assert f"{point.n} of 40 networks" in readout(page)
        if number < len(points) - 1:
            page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")  # no further
    assert page.locator(CURVES).get_attribute("data-at") == "16"
    page.keyboard.press("ArrowLeft")
    assert page.locator(CURVES).get_attribute("data-at") == "8"
    box = page.locator(CURVES).bounding_box()
    page.mouse.move(box["x"] + 52, box["y"] + 80)
    assert page.locator(CURVES).get_attribute("data-at") == "1"
    page.mouse.move(box["x"] + box["width"] - 12, box["y"] + 80)
    assert page.locator(CURVES).get_attribute("data-at") == "16"


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_nothing_overlaps_and_nothing_is_cut(browser: Any, address: str, width: int, scheme: str) -> None:
    for page in opened(browser, address, viewport={"width": width, "height": 900}, color_scheme=scheme):
        assert (brightness(page) > 200) == (scheme == "light")
        for axis in range(3):
            page.select_option("select.axis", str(axis))
            assert page.evaluate(SIDEWAYS) == 0
            assert {check: found(page, check) for check in NOTHING} == NOTHING
            assert page.locator(CURVES).bounding_box()["width"] > 250
        page.set_viewport_size({"width": 500, "height": 900})  # drawn anew, not stretched
        for _ in range(100):
            drawn = page.locator(CURVES).evaluate("svg => svg.viewBox.baseVal.width")
            if drawn < 500:
                break
            page.wait_for_timeout(50)  # the page's policy forbids what Playwright's own waiting does
        assert drawn < 500


def test_reads_and_prints_without_its_script(browser: Any, address: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    assert page.locator(".hero .chart").is_visible()
    assert page.locator(".correlations").is_visible()
    assert not page.locator(".atlas").is_visible()
    assert page.pdf(format="A4").startswith(b"%PDF")
    context.close()


def test_names_and_values_that_want_to_be_more_are_text(browser: Any, tmp_path: Path) -> None:
    texts = [text for text in STRINGS.values() if "\ud800" not in text and text.strip()]
    frame = followed(24)
    frame["init"] = [texts[int(name[1:]) % 4] for name in frame["network"]]
    measures = {f"rho[{text}]": frame["rho"] + k * frame["margin"] for k, text in enumerate(texts[4:16])}
    setting = texts[16]
    looks = frame.drop(columns=["rho", "margin"]).assign(**measures).rename(columns={"init": setting})
    made_of_them = fs.atlas(looks, by=[setting], kinds=["spearman"], resamples=100)
    whole = json.loads(made_of_them.to_json())
    whole["meta"] |= {"target": texts[0], "notes": texts[:6], "networks": texts[1], texts[2]: texts[3]}
    (tmp_path / "a.json").write_text(json.dumps(whole))
    item = fs.Atlas.load(tmp_path / "a.json")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # glyphs that no font has
        written = report({texts[1]: item}, tmp_path / "page.html")
    seen = looked_at(browser, written)
    text = tidy(seen["text"])
    assert [name for name in measures if tidy(name) not in text] == []


def test_several_atlases_stand_on_one_page(browser: Any, tmp_path: Path) -> None:
    items = {"first": atlas(), "second": fs.atlas(followed(20, seed=5), ["rho"], kinds=["kendall"], resamples=100)}
    for page in opened(browser, made(items, tmp_path)):
        page.wait_for_selector(f"#atlas-1 {CURVES}[data-at]")
        assert page.locator("#atlas-1 .measures-shown input").count() == 1
        assert page.locator("#answer h3").all_text_contents() == ["first", "second"]
