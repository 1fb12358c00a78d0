"""The page of which measure has a value on which network, and why not where it has none.

`python docs/generate/networks_table.py [NETWORK …]` measures these networks (all, if none is named) of
tests/helpers/architectures.py with the default measures and keeps what it finds in docs/networks.json; with `--missing`
only measures that the file lacks. The documentation's page is made from that file.
"""

import json
import re
import sys
import warnings
from pathlib import Path

import torch

import flatscope as fs
from flatscope.registry import select

BUDGET = "40s"  # for each network
SAMPLES = 3
DOCS = Path(__file__).parents[1]
FOUND = DOCS / "networks.json"
INTRODUCTION = f"""# Which measure works where

Every measure of the default table on networks as they come out of `timm`,
`transformers` and plain `torch`: random weights, small sizes, {SAMPLES} samples with the classes that the network
itself predicts, `precision=0.1`, at most {BUDGET} for each network on a CPU.

✓: it has a value. A number: it has none, for the reason of that number below the table. t: not within that time.
"""


def reasons(name: str, measures: list[str]) -> dict[str, str]:
    """Why each of the measures has no value on a network; empty where it has one."""
    from architectures import architectures, outputs

    model, inputs, targets, loss = architectures()[name]()
    inputs = {key: value[:SAMPLES] for key, value in inputs.items()} if isinstance(inputs, dict) else inputs[:SAMPLES]
    with torch.no_grad():
        made = outputs(model(**inputs) if isinstance(inputs, dict) else model(inputs))
    targets = made.argmax(1 if loss == "cross_entropy" else -1) if loss != "mse" else targets[:SAMPLES]
    before = {key: value.detach() / 2 for key, value in model.named_parameters()}
    problem = fs.Problem(model, (inputs, targets), test=(inputs, targets), loss=loss, initial=before)
    frame = fs.measure(problem, measures, precision=0.1, budget=BUDGET).to_frame()
    empty = frame["value"].isna().groupby(frame["measure"]).all()
    first = frame.groupby("measure")["reason"].first()
    return {measure: str(first[measure]) if empty[measure] else "" for measure in frame["measure"].unique()}


def in_general(reason: str) -> str:
    """A reason without the names of one network's modules and without its numbers."""
    reason = re.sub(r"[\w.]*\.[\w.]*(weight|bias)[\w.\[\]:]*", "a parameter", reason)
    reason = re.sub(r" \([\w.]+\)", "", reason)
    return re.sub(r"-?\d+\.\d+(e-?\d+)?", "…", reason)


def page(found: dict[str, dict[str, str]]) -> str:
    """The page in Markdown."""
    numbers: dict[str, int] = {}

    def cell(reason: str) -> str:
        if not reason or reason.startswith("not begun"):
            return "t" if reason else "✓"
        return str(numbers.setdefault(in_general(reason), len(numbers) + 1))

    rows = []
    for entry in select("standard", "measure"):
        cells = (cell(found[name][entry.name]) for name in found)
        rows.append(f"| [`{entry.name}`](measures/{entry.name}.md) | {' | '.join(cells)} |")
    header = ["| measure | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
    listed = [f"{number}. {reason}" for reason, number in numbers.items()]
    table = ['<div class="matrix" markdown>', "", *header, *rows, "", "</div>", ""]
    return "\n".join([INTRODUCTION, *table, "## Reasons", "", *listed, ""])


def known() -> dict[str, dict[str, str]]:
    """What was found, by network and measure."""
    return dict(json.loads(FOUND.read_text(encoding="utf-8")))


def main(names: list[str]) -> None:
    """Measure the named networks, or all, and keep what is found."""
    from architectures import architectures

    missing, names = "--missing" in names, [name for name in names if name != "--missing"]
    for name in names or architectures():
        kept = known().get(name, {}) if missing else {}
        measures = [entry.name for entry in select("standard", "measure") if entry.name not in kept]
        found = {**kept, **(reasons(name, measures) if measures else {})}
        failed = {measure: reason for measure, reason in found.items() if reason.startswith("failed")}
        print(name, f"{sum(not reason for reason in found.values())} of {len(found)}", failed or "", flush=True)
        all_found = {**(known() if FOUND.exists() else {}), name: found}
        ordered = {name: all_found[name] for name in architectures() if name in all_found}
        FOUND.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(DOCS.parent / "tests" / "helpers"))
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
