"""The gallery of examples: a card for each file of examples/ that draws, a line for others, a page with its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
# Examples that drew a picture which another page shows as well.
DRAWN_ELSEWHERE = {"edge_of_stability": "edge-of-stability.png", "landscape_invariance": "landscapes.png"}
INTRODUCTION = """# Examples

Scripts to run and to change; every one of them runs in the tests. Two notebooks show the same with their results:
[choosing between checkpoints](../notebooks/checkpoints.md),
[the landscape of a network](../notebooks/landscapes.md).

<div class="gallery" markdown>
"""


def pages() -> Iterator[tuple[str, str]]:
    """Path inside the documentation, and Markdown, of the gallery and of every example."""
    cards, lines = [INTRODUCTION], ["</div>", "", "These print their answer:", ""]
    for path in sorted((ROOT / "examples").glob("*.py")):
        title, _, rest = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")
        picture = DRAWN_ELSEWHERE.get(path.stem, f"examples/{path.stem}.png")
        shown = f"![{title}](../images/{picture})" if (IMAGES / picture).exists() else ""
        name = _name(path)
        if shown:
            cards.append(f'<div class="card" markdown>\n{shown}\n\n[**{name}**]({path.stem}.md)<br>{title}\n</div>\n')
        else:
            lines.append(f"- [**{name}**]({path.stem}.md): {title}")
        yield f"examples/{path.stem}.md", _page(path, title, rest.strip(), shown)
    yield "examples/index.md", "\n".join([*cards, *lines, ""])


def _name(path: Path) -> str:
    return path.stem.replace("_", " ").capitalize()


def _page(path: Path, title: str, rest: str, picture: str) -> str:
    code = path.read_text(encoding="utf-8").rstrip()
    head = f"# {_name(path)}\n\n{title}\n\n{picture}\n"
    usage = f"\n```text\n{rest}\n```\n" if rest else ""
    return f'{head}{usage}\n```python title="examples/{path.name}"\n{code}\n```\n'
