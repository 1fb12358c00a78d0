"""Strings that want to be more than text, and every place of every result that a string can be put into."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from test_report import figure, history
from test_report_population import population
from test_results import CLASSES, results

import flatscope as fs
from flatscope.result import Result
from flatscope_papers.claims import Answer, Claim, finding_of_claim
from flatscope_papers.study_result import StudyResult

RAN = "window.ran=1"
STRINGS = {
    "script": f"<script>{RAN}</script>",
    "end of a script": f"</script><script>{RAN}</script>",
    "image": f"<img src=x onerror={RAN}>",
    "attribute": f'" onmouseover="{RAN}" autofocus onfocus="{RAN}" tabindex=1 x="',
    "attribute in single quotes": f"' onmouseover='{RAN}' autofocus onfocus='{RAN}' x='",
    "picture": f"<svg onload={RAN}><script>{RAN}</script></svg>",
    "ends of everything": f"</title></style></textarea></noscript></template><img src=x onerror={RAN}>",
    "comment": f"--><img src=x onerror={RAN}><!--",
    "section of characters": f"]]><img src=x onerror={RAN}><![CDATA[",
    "template": "{{ 7*7 }}{% for x in () %}${7*7}{# x #}",
    "address": f"javascript:{RAN}",
    "style": "</style><style>*{display:none}</style>",
    "formula": f"</math><mglyph><img src=x onerror={RAN}>",
    "broken formula": r"$\frac{\undefined}{$ \href{javascript:window.ran=1}{x} $",
    "Markdown": f"[x](javascript:{RAN}) | ![x](x) ` ~~~",
    "entities": "&lt;script&gt;&#0;&amp;&quot;",
    "control characters": "a\x00\x01\x1b[31mred\x07\r\nb\x7f",
    "other direction": "\u202eabc\u2066\ufeff\u200b",
    "half a character": "a\ud800b",
    "formula of a spreadsheet": "=cmd|' /C calc'!A0",
    "name of an object's parts": "__proto__",
    "no letters": "   ",
    "nothing": "",
    "long": "long " * 999,
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to the strings of a JSON value, and to the keys of what has names; of equal entries of a list the first."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if path and path[-1] in ("meta", "tables", "networks"):
                yield (*path, key, "its name")
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value[:1]):
            yield from places(inner, (*path, number))
    elif isinstance(value, str):
        yield path


def put(value: Any, path: tuple[Any, ...], text: str) -> Any:
    """The JSON value with the text in that place."""
    if not path:
        return text
    if isinstance(value, list):
        return [put(inner, path[1:], text) if number == path[0] else inner for number, inner in enumerate(value)]
    if path[1:] == ("its name",):
        return {text if key == path[0] else key: inner for key, inner in value.items()}
    return value | {path[0]: put(value[path[0]], path[1:], text)}


@dataclass
class Filler:
    """Hands out the strings in turn, each with a number that says for which place it was."""

    shift: int
    asked: int = 0
    used: dict[str, str] = field(default_factory=dict)

    def __call__(self, place: str, whole: bool = False) -> str:
        """The text for a place; `whole` where pandas or Matplotlib would refuse what is no character."""
        every = [text for text in STRINGS.values() if not whole or "\ud800" not in text]
        number = self.asked = self.asked + 1
        self.used[place] = f"{every[(number + self.shift) % len(every)]}{number}"
        return self.used[place]


def hostile_items(fill: Filler) -> tuple[list[tuple[str, Any]], int]:
    """Things for a report with a string in every place; and how many places refuse theirs on reading."""
    found: list[tuple[str, Any]] = []
    refused = 0
    for name, kind in CLASSES.items():
        whole = json.loads(results()[name].to_json())
        for path in reversed(list(places(whole))):  # names last: what is below them is found by them
            text = fill(f"{name} {path}")
            changed = put(whole, path, json.dumps({"x": text}) if path[-1] == "options" else text)
            if _read(kind, changed) is None:
                refused += 1
                del fill.used[f"{name} {path}"]
            else:
                whole = changed
        for network in ("one", "two"):  # in the tables and in what is said of the networks
            changed = json.loads(json.dumps(whole).replace(f'"{network}"', json.dumps(fill(f"{name} of {network}"))))
            whole = changed if _read(kind, changed) is not None else whole
        found.append((fill(f"{name} called"), _read(kind, whole)))
    columns = {column: fill(f"history {column}", whole=True) for column in history().columns[1:4]}
    found.append((fill("history called"), history().rename(columns=columns)))
    frame = population(8)
    columns = {
        column: fill(f"population {column}", whole=True) for column in ("batch_size", "optimizer", "seed", "train_loss")
    }
    columns[frame.columns[-1]] = f"{frame.columns[-1]}[{fill('options of a population', whole=True)}]"
    frame["optimizer"] = [fill("level of a population", whole=True), "sgd"] * 4
    found.append((fill("population called"), frame.rename(columns=columns)))
    found += [
        (fill("figure called"), figure(_drawable(fill("figure", whole=True)))),
        (fill("study called"), _study(fill)),
    ]
    return found, refused


def _read(kind: type[Result], content: Any) -> Result | None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file.json"
        file.write_text(json.dumps(content))
        try:
            return kind.load(file)
        except fs.InputError:
            return None


def _drawable(title: str) -> str:
    """Matplotlib takes what stands between dollars for a formula, and refuses one that is none."""
    return title.replace("$", r"\$")


def _study(fill: Filler) -> StudyResult:
    claim = Claim(fill("key"), fill("where"), fill("statement"), fill("number"), fill("reported"), (0.0, 1.0))
    answer = Answer(0.5, 0.4, 0.6, note=fill("note of an answer"))
    return StudyResult(
        name=fill("study"), title=fill("title"), paper=fill("paper"), source=fill("source"), scale=fill("scale"),
        table=pd.DataFrame({fill("column", whole=True): [fill("cell", whole=True)]}),
        findings=(finding_of_claim(claim, answer, "small"),),
        svg=f"<svg>{fill('picture')}</svg>", png=b"", deviations=(fill("deviation"),), notes=(fill("note"),),
        provenance={fill("fact"): fill("what it is")},
    )  # fmt: skip


def tidy(text: str) -> str:
    """As a browser shows it: without what has no shape, blanks as one."""
    return re.sub(r"\s+", "", re.sub(r"[\x00-\x1f\x7f\ud800-\udfff\ufffd?]", "", text))
