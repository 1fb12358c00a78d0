"""The page of all measures under all symmetries: what moves, by how much, on networks that anyone can load.

`python docs/generate/symmetry_matrix.py [MEASURE …]` measures the pairs of networks in
docs/symmetries/networks.safetensors with these measures (all, if none is named) and keeps the values in
docs/symmetries/found.json; the documentation's page is made from that file. Pairs that are not there are made first:
networks trained on iris flowers, and the same function with other weights. `--again` makes them anew.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import flatscope as fs
from flatscope.auditing import _audit_row
from flatscope.formatting import numbered, written
from flatscope.network.interception import refuse_if_different
from flatscope.registry import FUNCTION_SYMMETRIES, SYMMETRIES, Declaration, declarations, select

FOLDER = Path(__file__).parents[1] / "symmetries"
FOUND = FOLDER / "found.json"
FILE = FOLDER / "networks.safetensors"  # tensors by "data/x", "mlp/initial/0.weight", "unit_scaling/after/0.weight"
NETWORKS = {  # as the page shows them
    "mlp": "nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))",
    "batchnorm": "nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))",
    "transformer": "nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Linear(1, 8), nn.TransformerEncoderLayer(8, 2, 8, 0.0, "
    "batch_first=True, norm_first=True), nn.LayerNorm(8), nn.Flatten(), nn.Linear(32, 3))",
}
PAIRS = {  # the network of each symmetry, and how `fs.rescale` calls it
    "layer_scaling": ("mlp", "layer"),
    "unit_scaling": ("mlp", "unit"),
    "permutation": ("mlp", "permutation"),
    "batchnorm_scaling": ("batchnorm", "batchnorm"),
    "attention_scaling": ("transformer", "attention"),
    "norm_scaling": ("transformer", "norm"),
    "output_scaling": ("mlp", ""),
}
RANGE = {"attention_scaling": (0.04, 25.0)}  # of factors; attention matters less than the rest of so small a network
USUAL = (0.2, 5.0)
TIMES = 3.0  # what multiplies the outputs, for `output_scaling`
# Noise as small as by default hides in its own error what a rescaling does; this shows it.
OPTIONS: dict[str, dict[str, Any]] = {
    "expected_flatness": {"sigma": 0.3, "draws": 2000},
    "expected_sharpness": {"alpha": 0.3, "slope": 0.0},
    "flatness_radius": {"epsilon": 0.2, "directions": 2000},
    "psi_expected": {"epsilon": 0.9, "draws": 400},
}


@cache
def stored(place: str) -> dict[str, Tensor]:
    """What the file of networks has under a place: "data", or a network or a symmetry with a moment."""
    tensors = load_file(FILE)
    return {key.removeprefix(f"{place}/"): value for key, value in tensors.items() if key.startswith(f"{place}/")}


def built(name: str) -> nn.Module:
    """A network with random weights, from the words that the page shows."""
    model: nn.Module = eval(NETWORKS[name], {"nn": nn})
    return model.double().eval()


def trained(name: str, data: dict[str, Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
    """A network after training, and its weights before."""
    torch.manual_seed(0)
    model = built(name).train()
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(400):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data["x"]), data["y"]).backward()
        optimizer.step()
    return model.eval(), before


def times(model: nn.Module, factor: float, example: Tensor) -> nn.Module:
    """A chain of d dense layers whose outputs are the factor times those of the given one, all layers sharing it."""
    twin = fs.rescale(model, example, low=1.0, high=1.0)
    layers = [module for module in twin if isinstance(module, nn.Linear)]  # type: ignore[attr-defined]
    root = factor ** (1 / len(layers))
    with torch.no_grad():
        for depth, layer in enumerate(layers, start=1):
            layer.weight.mul_(root)
            layer.bias.mul_(root**depth)
    return twin


def make_pairs() -> None:
    """Write data, the weights before training, and for every symmetry two networks."""
    from sklearn.datasets import load_iris

    features, classes = load_iris(return_X_y=True)
    x = torch.tensor(features, dtype=torch.float64)
    x, y = (x - x.mean(0)) / x.std(0), torch.tensor(classes)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    first, rest = order[:30], order[30:60]
    data = {"x": x[first], "y": y[first], "x_test": x[rest], "y_test": y[rest]}
    places, models = {"data": data}, {}
    for name in NETWORKS:
        models[name], places[f"{name}/initial"] = trained(name, data)
    for symmetry, (name, way) in PAIRS.items():
        model = models[name]
        low, high = RANGE.get(symmetry, USUAL)
        twin = fs.rescale(model, data["x"], way, low, high, seed=1) if way else times(model, TIMES, data["x"])
        places[f"{symmetry}/before"], places[f"{symmetry}/after"] = model.state_dict(), twin.state_dict()
    FOLDER.mkdir(exist_ok=True)
    tensors = {f"{place}/{key}": value for place, held in places.items() for key, value in held.items()}
    save_file({key: value.detach().clone().contiguous() for key, value in tensors.items()}, FILE)


@cache
def problem(symmetry: str, when: str) -> fs.Problem:
    """One of the two networks of a symmetry, as the file has it."""
    name = PAIRS[symmetry][0]
    data, model = stored("data"), built(name)
    model.load_state_dict(stored(f"{symmetry}/{when}"))
    initial = stored(f"{name}/initial")
    train, test = (data["x"], data["y"]), (data["x_test"], data["y_test"])
    return fs.Problem(model, train, test=test, initial=initial)


def refuse_other_functions(symmetry: str) -> None:
    """The two networks of a symmetry compute the same, or a multiple of it."""
    before, after = (problem(symmetry, when).model for when in ("before", "after"))
    if symmetry == "output_scaling":
        before = times(before, TIMES, stored("data")["x"])
    refuse_if_different(before, after, stored("data")["x_test"], symmetry)


def compared(symmetry: str, entries: list[Declaration]) -> dict[str, dict[str, Any]]:
    """What the audit says about each measure, from the two networks."""
    refuse_other_functions(symmetry)
    names = [entry.name for entry in entries]
    options = {name: given for name, given in OPTIONS.items() if name in names}
    before, after = (fs.measure(problem(symmetry, when), names, options=options) for when in ("before", "after"))
    way = PAIRS[symmetry][1] or "unit"
    found = {}
    for entry in entries:
        row = _audit_row(entry, way, before, [after], torch.float64, "")
        kept = ("before", "after", "relative_change", "stderr", "verdict", "reason")
        cell = {key: None if row[key] != row[key] else row[key] for key in kept}
        found[entry.name] = cell | {"declared": symmetry in entry.invariant_under}
    return found


def known() -> dict[str, Any]:
    """What was found: under "cells" by symmetry and measure, and how it was made."""
    return dict(json.loads(FOUND.read_text(encoding="utf-8")))


INTRODUCTION = """# All measures under all symmetries

**{n} measures on networks with the same function and other weights: which are invariant, which change, by how much.**
Measured, not only declared. Every number can be repeated with [one file](symmetries/networks.safetensors).

- ✓: it is invariant, to rounding or to the error of the estimate, as it must.
- A number: by how much it changed, relative to its largest value before; where there is a value for each layer, unit or
  sample, the one that changed most.
- ≈: on this pair it does not change beyond its own error; on another it could.
- A letter: there is no value to compare, for [the reason of that letter](#reasons).

"""
PAIRS_WORDS = """## The pairs

{networks} networks with at most {most} weights, trained on 30 iris flowers, and for each symmetry a twin with the same
function (for `output_scaling`: {times:g} times the outputs). Factors are drawn between 0.2 and 5, for queries and keys
between 0.04 and 25. All networks share the data. [The file](symmetries/networks.safetensors) has all of it, each
tensor by its place and name. To see a measure change:

```python
{snippet}
```

```text
{printed}
```
"""
SNIPPET = """import flatscope as fs
from torch import nn
from safetensors.torch import load_file

stored = load_file("networks.safetensors")
model = {network}
for when in ("before", "after"):
    weights = {{name: stored[f"{symmetry}/{{when}}/{{name}}"] for name in model.state_dict()}}
    model.double().eval().load_state_dict(weights)
    table = fs.measure(fs.Problem(model, train=(stored["data/x"], stored["data/y"])), "{measure}")
    print(when, table["{measure}"])"""
SHOWN = "unit_scaling", "hessian_trace"


def snippet(symmetry: str = SHOWN[0], measure: str = SHOWN[1]) -> str:
    """Code that measures both networks of a pair."""
    return SNIPPET.format(network=NETWORKS[PAIRS[symmetry][0]], symmetry=symmetry, measure=measure)


def letters(number: int) -> str:
    """The number in letters: a, b, …, z, aa, ab and so on."""
    word = chr(97 + number % 26)
    return word if number < 26 else letters(number // 26 - 1) + word


def page(found: dict[str, Any]) -> str:
    """The page in Markdown."""
    cells, reasons = found["cells"], dict[str, str]()
    columns = [symmetry for symmetry in SYMMETRIES if symmetry in cells]

    def cell(measure: str, symmetry: str) -> str:
        given = cells[symmetry].get(measure)
        if given is None:
            return "?"
        if given["verdict"] == "not tested":
            return f"*{reasons.setdefault(given['reason'], letters(len(reasons)))}*"
        moved = given["verdict"] == "moved"
        wrong = "!" if moved and given["declared"] else ""
        text = f"**{_change(given)}**" if moved else "✓" if given["declared"] else "≈"
        return f'<span title="{_value(given["before"])} → {_value(given["after"])}">{text}</span>{wrong}'

    head = [f"[{SYMMETRIES[s][0]}](#{s})" for s in columns]
    rows = [
        f"| [`{name}`](measures/{name}.md) | " + " | ".join(cell(name, symmetry) for symmetry in columns) + " |"
        for name in declarations()
    ]
    table = [f"| measure | {' | '.join(head)} |", "|---" * (len(columns) + 1) + "|", *rows]
    verdicts = {m: {cells[s].get(m, {}).get("verdict") for s in FUNCTION_SYMMETRIES} for m in declarations()}
    still = sum("moved" not in found and "invariant" in found for found in verdicts.values())
    lines = [INTRODUCTION.format(n=len(declarations()))]
    lines += [
        f"{still} of them are changed by no symmetry that leaves the outputs as they are, wherever they have a value.",
        "",
    ]
    lines += ['<div class="symmetries" markdown>', "", *table, "", "</div>", "", "## Reasons", ""]
    lines += [f"- *{letter}*: {reason}" for reason, letter in reasons.items()]
    most = max(sum(value.numel() for value in built(name).parameters()) for name in NETWORKS)
    shown = cells[SHOWN[0]][SHOWN[1]]
    printed = f"before {shown['before']}\nafter {shown['after']}"
    words = {"networks": "Three", "most": most, "times": TIMES, "snippet": snippet(), "printed": printed}
    lines += ["", PAIRS_WORDS.format(**words)]
    for symmetry in columns:
        lines += _pair(symmetry, cells[symmetry])
    given = "; ".join(f"`{name}` {', '.join(f'{k}={v}' for k, v in o.items())}" for name, o in OPTIONS.items())
    lines += ["", f"Options other than the defaults: {given}.", "", found["made"]]
    return "\n".join(lines) + "\n"


def _pair(symmetry: str, cells: dict[str, dict[str, Any]]) -> list[str]:
    """Where a symmetry has its networks, and both values of whatever moved."""
    name = PAIRS[symmetry][0]
    moved = {measure: cell for measure, cell in cells.items() if cell["verdict"] == "moved"}
    lines = [f"### {symmetry}", "", f"{SYMMETRIES[symmetry][1][0].upper()}{SYMMETRIES[symmetry][1][1:]}. "]
    lines += [
        f"Network `{name}`: `{symmetry}/before`, `{symmetry}/after`; weights before training: `{name}/initial`.",
        "",
    ]
    lines += ["```python", f"model = {NETWORKS[name]}", "```", ""]
    lines += [f'??? note "The two values of what changes: {numbered(len(moved), "measure")}"', ""]
    lines += ["    | measure | before | after | change |", "    |---|---|---|---|"]
    for measure, cell in moved.items():
        error = f" ± {cell['stderr']:.1g}" if cell["stderr"] else ""
        values = f"{_value(cell['before'])} | {_value(cell['after'])} | {_change(cell)}{error}"
        lines.append(f"    | [`{measure}`](measures/{measure}.md) | {values} |")
    return [*lines, ""]


def _change(cell: dict[str, Any]) -> str:
    change = cell["relative_change"]
    return f"{change:.2g}" if change < 99.5 else f"{float(f'{change:.2g}'):,.0f}"


def _value(value: float | None) -> str:
    return written(value) if value is not None and math.isfinite(value) else str(value)


def main() -> None:
    """Measure and keep what is found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measures", nargs="*", help="all by default")
    parser.add_argument("--only", choices=SYMMETRIES, help="one symmetry; all by default")
    parser.add_argument("--again", action="store_true", help="make the pairs of networks anew")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.again or not FILE.exists():
        make_pairs()
    begun = time.perf_counter()
    entries = select(given.measures or "all")
    cells = dict(known()["cells"]) if (given.measures or given.only) and FOUND.exists() else {}
    for symmetry in [given.only] if given.only else SYMMETRIES:
        found = {**cells.get(symmetry, {}), **compared(symmetry, entries)}
        cells[symmetry] = {name: found[name] for name in declarations() if name in found}
        moved = sum(cell["verdict"] == "moved" for cell in found.values())
        print(symmetry, f"{moved} of {len(found)} moved", f"{time.perf_counter() - begun:.0f} s", flush=True)
    words = f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, torch {torch.__version__}, one thread"
    made = f"Made by `python docs/generate/symmetry_matrix.py` ({words}); some minutes."
    cells = {symmetry: cells[symmetry] for symmetry in SYMMETRIES if symmetry in cells}
    FOUND.write_text(json.dumps({"made": made, "cells": cells}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
