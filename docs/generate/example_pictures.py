"""Takes the pictures of the gallery: `python docs/generate/example_pictures.py [NAME …]` runs examples.

One that writes a page is shown by the top of that page, one that draws by its figure, any other by what it prints.
"""

from __future__ import annotations

import html
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "images" / "examples"
# What to run them with, where their own defaults take minutes or need data sets.
ARGUMENTS = {
    "two_basins": ["--quick"],
    "geometric_margins": ["--data", "digits", "--quick"],
    "polynomial_network": ["--data", "digits"],
    "true_and_random_labels": [
        "--data",
        "digits",
        "--samples",
        "300",
        "--hidden",
        "64",
        "--draws",
        "100",
        "--steps",
        "20",
    ],
}
LEFT_OUT = ("my_model",)  # a file that others use
TERMINAL = "<pre style='font: 15px/1.35 ui-monospace, DejaVu Sans Mono, monospace; padding: 16px; margin: 0'>"


def take(browser: Any, path: Path) -> None:
    """Run one example in an empty folder and keep a picture of what comes out."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(path), *ARGUMENTS.get(path.stem, [])]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        made = sorted(Path(folder).rglob("*"))
        target = PICTURES / f"{path.stem}.png"
        figures = [file for file in made if file.suffix == ".png"]
        pages = [file for file in made if file.suffix == ".html"]
        if figures:
            shown = f"<img src='{figures[0].as_uri()}' style='max-width: 100%'>"
        else:
            shown = TERMINAL + html.escape("\n".join(done.stdout.splitlines()[:28])) + "</pre>"
        made_page = bool(pages)
        if not made_page:
            pages = [Path(folder) / "shown.html"]
            pages[0].write_text(f"<meta charset='utf-8'><body style='margin: 0'>{shown}", encoding="utf-8")
        view = browser.new_page(viewport={"width": 960, "height": 540} if made_page else {"width": 640, "height": 360})
        view.goto(pages[0].as_uri())
        view.screenshot(path=target)
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
