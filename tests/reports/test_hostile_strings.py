"""Strings that want to be more than text, in every place of a page: a browser shows them and does nothing else."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from hostile import STRINGS, Filler, hostile_items, tidy
from test_report_browser import opened, pytestmark  # noqa: F401

import flatscope as fs
from flatscope.cli.run_watch import watch_run
from flatscope.formatting import printable_text
from flatscope.reports.page import report, save_figures
from flatscope.training.checkpoint import TrainConfig
from flatscope.training.loop import train

SEEN = """() => ({
    ran: window.ran, scripts: document.scripts.length, policies: document.querySelectorAll("meta[http-equiv]").length,
    text: document.documentElement.textContent,
    titles: [...document.querySelectorAll("[title], [aria-label], [alt], [value]")].map(
        e => ["title", "aria-label", "alt", "value"].map(name => e.getAttribute(name) || "").join(" ")).join(" "),
    guests: document.querySelectorAll("iframe, object, embed, mglyph, base, form, [onerror], [onload]").length,
    shown: getComputedStyle(document.body).display, images: [...document.images].map(i => i.src.slice(0, 5)),
})"""
SHOWN = (
    "called",
    "table ('rows', 0, 'layer')",
    "measure",
    "title",
    "statement",
    "note",
    "deviation",
    "population batch_size",
    "level",
)


def looked_at(browser: Any, path: Path) -> dict[str, Any]:
    """The page, once the mouse has been on everything that answers to it."""
    for page in opened(browser, path.as_uri()):
        for place in page.locator("summary, th button, select, input").all()[:40]:
            place.dispatch_event("mouseover")
            place.dispatch_event("focus")
        page.wait_for_timeout(50)
        found: dict[str, Any] = page.evaluate(SEEN)
    assert found["ran"] is None
    assert found["guests"] == 0
    assert found["policies"] == 1, "the security policy is gone, or there is a second one"
    assert found["shown"] == "block"
    assert set(found["images"]) <= {"data:"}
    return found


@pytest.mark.parametrize("shift", range(0, len(STRINGS), int(os.environ.get("HOSTILE_STEP", "12"))))
def test_a_string_in_any_place_is_text(browser: Any, shift: int, tmp_path: Path) -> None:
    fill = Filler(shift)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # glyphs that no font has
        items, refused = hostile_items(fill)
        page = report(items, tmp_path / "page.html", title=fill("heading"), command=fill("command"))
        figures = save_figures(items, tmp_path / "figures")
    assert all(path.parent == tmp_path / "figures" for path in figures)
    found = looked_at(browser, page)
    seen = tidy(found["text"] + found["titles"])
    missing = {  # names of files lose what turns directions
        place: text for place, text in fill.used.items()
        if any(word in place for word in SHOWN) and len(tidy(text)) > 6
        and tidy(text) not in seen and tidy(printable_text(text)) not in seen
    }  # fmt: skip
    assert missing == {}
    sys.stderr.write(f"{len(fill.used)} places, {refused} more refuse what they are given\n")


def test_a_watched_training_with_a_hostile_name_is_text(browser: Any, tmp_path: Path) -> None:
    import torch

    folder = tmp_path / "<img src=x onerror=window.ran=1>'\"&$\\frac{"
    train(torch.nn.Linear(3, 2), (torch.eye(3), torch.tensor([0, 1, 0])), TrainConfig(epochs=2), checkpoint=folder)
    watch_run(str(folder), 1.0, tmp_path / "page.html", once=True)
    assert tidy(folder.name) in tidy(looked_at(browser, tmp_path / "page.html")["text"])


def test_names_of_files_that_are_no_text_can_be_compared_and_reported(tmp_path: Path) -> None:
    from test_results import small_data, small_network

    found = fs.compare({"a\udcff": small_network(0), "b\x00": small_network(1)}, small_data(), ["l2_norm"])
    found.save(tmp_path / "found.json")
    assert fs.Comparison.load(tmp_path / "found.json") == found
    assert report({"c\udcff": found}, tmp_path / "page.html").read_text().count("\ufffd") > 2
