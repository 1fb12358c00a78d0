"""Takes the pictures of the gallery: `python docs/generate/example_pictures.py [NAME …]` runs examples.

One that writes a page is shown by the first picture of that page, one that draws by its figure. One that only prints
has no picture: text is read on its page, not in a thumbnail.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from example_pages import DRAWN_ELSEWHERE
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "images" / "examples"
# What to run them with, where their own defaults take minutes.
ARGUMENTS = {"two_basins": ["--quick"]}
PRINTED = (
    "my_model",
    "flatness_radius",
    "geometric_margins",
    "non_vacuous_bound",
    "polynomial_network",
    "true_and_random_labels",
)
LEFT_OUT = (*PRINTED, *DRAWN_ELSEWHERE)
FIRST_PICTURE = ".hero canvas, .hero svg.chart, main canvas, main svg.chart"


def take(browser: Any, path: Path) -> None:
    """Run one example in an empty folder and keep a picture of what comes out."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(path), *ARGUMENTS.get(path.stem, [])]
        subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        made = sorted(Path(folder).rglob("*"))
        target = PICTURES / f"{path.stem}.png"
        pages = [file for file in made if file.suffix == ".html"]
        figures = [file for file in made if file.suffix == ".png"]
        view = browser.new_page(viewport={"width": 760, "height": 900}, device_scale_factor=1.5, color_scheme="light")
        view.goto((pages or figures)[0].as_uri())
        view.locator(FIRST_PICTURE if pages else "img").first.screenshot(path=target)
        view.close()


def main(names: list[str]) -> None:
    """Take the named pictures, or all."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for path in sorted((ROOT / "examples").glob("*.py")):
            if path.stem in (names or [path.stem]) and path.stem not in LEFT_OUT:
                take(browser, path)
                print(path.stem, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
