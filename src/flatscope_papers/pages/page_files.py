"""All pages of the papers, written to a folder of documentation with the pictures they show."""

from __future__ import annotations

from pathlib import Path

from flatscope.extend import write_whole
from flatscope_papers.pages.lists import costs_page, errata_page, scales_page
from flatscope_papers.pages.overview import overview_page
from flatscope_papers.pages.paper_items import coverage_page
from flatscope_papers.pages.paper_page import paper_page
from flatscope_papers.reproduction import Results, result_at_largest_scale
from flatscope_papers.study_registry import studies
from flatscope_papers.toml_files import FOUR_PAPERS

FOLDER, IMAGES = "papers", "images"


def pages_by_file_name(results: Results) -> dict[str, str]:
    """The pages below the first one, by file name."""
    shown = [paper for paper in FOUR_PAPERS if any(declared.paper == paper for declared in studies().values())]
    pages = {f"{paper}.md": paper_page(paper, results) for paper in shown}
    return pages | {
        "errata.md": errata_page(results),
        "scales.md": scales_page(results),
        "costs.md": costs_page(results),
        "coverage.md": coverage_page(),
    }


def write_pages(results: Results, first: Path) -> None:
    """Write the first page, and the others into `papers` beside it.

    Pictures of results that were saved without one stay as they are.
    """
    folder = first.parent / FOLDER
    write_whole(first, overview_page(results, FOLDER).encode())
    for name, page in pages_by_file_name(results).items():
        write_whole(folder / name, page.encode())
    for name in studies():
        result = result_at_largest_scale(results.get(name, {}))
        if result and result.png:
            write_whole(folder / IMAGES / f"{name}.png", result.png)
