"""Studies on the page: all of them in one small file, to be looked through by paper and verdict."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
from test_report_browser import SIDEWAYS, opened
from test_report_browser import pytestmark as in_browser

from flatscope.registry import PAPERS
from flatscope.reports.page import report
from flatscope_papers import studies
from flatscope_papers.pages.section import image_address_of_svg
from flatscope_papers.reproduction import load_results, result_at_largest_scale
from flatscope_papers.study_result import StudyResult

pytestmark = pytest.mark.long

SAVED = Path(__file__).parents[2] / "src" / "flatscope_papers" / "results"
SHOWN = "[...document.querySelectorAll('article.study:not([hidden])')].map(e => e.dataset.paper)"
CLAIMS = (
    "[...document.querySelectorAll('article.study:not([hidden]) tr[data-verdict]:not([hidden])')]"
    ".map(e => e.dataset.verdict)"
)
UNDRAWN = "[...document.images].filter(e => !e.complete || e.naturalWidth < 50).length"


@pytest.fixture(scope="module")
def found() -> list[StudyResult]:
    results = load_results(SAVED)
    return [result for name in studies() if (result := result_at_largest_scale(results.get(name, {})))]


@pytest.fixture(scope="module")
def path(found: list[StudyResult], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report(found, tmp_path_factory.mktemp("studies") / "report.html", title="Reproduction")


def test_all_studies_fit_into_a_page_that_can_be_sent(found: list[StudyResult], path: Path) -> None:
    assert len(found) == len(studies())
    assert path.stat().st_size < 3_000_000
    page = path.read_text(encoding="utf-8")
    for word in ("http://", "https://"):
        assert word not in page


def test_a_picture_as_an_address_is_the_same_picture(found: list[StudyResult]) -> None:
    for result in found:
        written = str(image_address_of_svg(result.svg)).replace("&amp;", "&")
        start = "data:image/svg+xml;charset=utf-8,"
        assert written.startswith(start)
        assert "'" not in written
        ours, theirs = (ElementTree.fromstring(svg) for svg in (unquote(written[len(start) :]), result.svg))
        elements = [[part for part in root.iter() if part.tag.endswith(("}path", "}use"))] for root in (ours, theirs)]
        texts = [[" ".join(part.split()) for part in root.itertext() if part.strip()] for root in (ours, theirs)]
        assert len(elements[0]) == len(elements[1])
        assert texts[0] == [text for text in texts[1] if "Matplotlib" not in text and "svg+xml" not in text]


@pytest.fixture
def page(browser: Any, path: Path) -> Iterator[Any]:
    yield from opened(browser, path.as_uri())


@in_browser[0]
@in_browser[1]
def test_studies_are_chosen_by_paper_and_verdict(page: Any, found: list[StudyResult]) -> None:
    verdicts = [finding.verdict for result in found for finding in result.findings]
    assert page.evaluate(CLAIMS) == verdicts
    assert page.evaluate(UNDRAWN) == 0
    page.select_option("select[data-by=paper]", "petzka2019")
    assert page.evaluate(SHOWN) == ["petzka2019"] * sum(result.paper == "petzka2019" for result in found)
    page.select_option("select[data-by=verdict]", "contradicted")
    left = [f.verdict for r in found for f in r.findings if (r.paper, f.verdict) == ("petzka2019", "contradicted")]
    assert page.evaluate(CLAIMS) == left
    assert page.text_content("#studies-tools [role=status]").startswith(f"{len(left)} claims of ")
    page.select_option("select[data-by=paper]", "")
    assert len(page.evaluate(CLAIMS)) == verdicts.count("contradicted")


@in_browser[0]
@in_browser[1]
def test_a_link_to_a_study_that_is_hidden_shows_it(page: Any, found: list[StudyResult]) -> None:
    result = next(result for result in found if result.paper == "zhang2017")
    page.select_option("select[data-by=paper]", "yi2019")
    page.click(f'a[href="#{result.name}-{result.scale}"]')
    page.wait_for_selector(f"#{result.name}-{result.scale}:not([hidden])")
    assert set(page.evaluate(SHOWN)) == {result.paper for result in found} <= set(PAPERS)


@in_browser[0]
@in_browser[1]
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_page(browser: Any, path: Path, width: int) -> None:
    for view in opened(browser, path.as_uri(), viewport={"width": width, "height": 900}):
        assert view.evaluate(SIDEWAYS) <= 0
        badge, claim = (view.locator(f".claims tbody tr:first-child {part}").first for part in (".badge", "th"))
        assert badge.bounding_box()["x"] + badge.bounding_box()["width"] <= width
        assert claim.bounding_box()["x"] + claim.bounding_box()["width"] <= width
