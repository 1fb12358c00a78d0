"""Executed notebooks as pages: their text, code, printed results, tables and pictures, read from the saved file.

`python docs/generate/notebook_pages.py` runs the notebooks and saves them with what they show.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def pages() -> Iterator[tuple[str, str]]:
    """Path inside the documentation, and Markdown, of every notebook."""
    for path in NOTEBOOKS:
        parts = []
        for number, cell in enumerate(_cells(path)):
            text = "".join(cell["source"])
            parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
            parts += [shown for output in cell.get("outputs", ()) if (shown := _shown(output, f"{path.stem}-{number}"))]
        yield f"notebooks/{path.stem}.md", "\n\n".join(parts) + "\n"


def pictures() -> dict[str, bytes]:
    """Path inside the documentation, and bytes, of every picture that a notebook shows."""
    return {
        f"notebooks/{path.stem}-{number}.png": base64.b64decode("".join(output["data"]["image/png"]))
        for path in NOTEBOOKS
        for number, cell in enumerate(_cells(path))
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", {})
    }


def _cells(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text(encoding="utf-8"))["cells"])


def _shown(output: dict[str, Any], name: str) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f"![What the code above draws]({name}.png)"
    if "text/html" in data:
        return '<div class="output">\n' + "".join(data["text/html"]).strip() + "\n</div>"
    text = "".join(output.get("text", data.get("text/plain", ""))).rstrip()
    return f"```text\n{text}\n```" if text else ""


def run() -> None:
    """Run every notebook from its first cell and save what it shows."""
    import nbformat
    from nbclient import NotebookClient

    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, timeout=300).execute()
        notebook.metadata.pop("language_info", None)
        for cell in notebook.cells:
            cell.metadata = {}
        nbformat.write(notebook, path)


if __name__ == "__main__":
    run()
