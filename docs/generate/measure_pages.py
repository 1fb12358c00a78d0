"""One page for each measure and bound, and the two lists of them, from the declarations and from measuring."""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
import runpy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import networks_table
import numpy as np
import pandas as pd
from measure_words import cell, markdown, reading, sentence, symbols, worth

import flatscope as fs
from flatscope.formatting import options_in_words, with_error, written
from flatscope.registry import COSTS, NEEDS, SEARCHES, SYMMETRIES, Declaration, declarations, family_name
from flatscope.training.benchmarking.leaderboard_result import Leaderboard
from flatscope.training.benchmarking.release import released_leaderboard
from flatscope.training.benchmarking.scores import score_number

HERE = Path(__file__).parent
EXAMPLE = HERE / "example_network.py"
TWINS = {"layers rescaled": "layer", "units rescaled": "unit"}
BOTH = ("measure", "bound")


class Examples:
    """Values of every measure and bound on the example network and on two twins that compute the same function."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = runpy.run_path(str(EXAMPLE))
            problem, model, x = made["problem"], made["model"], made["train"][0]
            twins = {name: fs.rescale(model, x[:2], by=by, seed=1) for name, by in TWINS.items()}
            problems = {"as trained": problem}
            for name, twin in twins.items():
                problems[name] = fs.Problem(twin, train=made["train"], test=made["test"])
            self.measures = {name: _frame(fs.measure(other, "all")) for name, other in problems.items()}
            self.bounds = _frame(fs.bounds(problem, "all"))

    def rows(self, entry: Declaration) -> pd.DataFrame:
        """What the example gives for a measure or bound."""
        frame = self.bounds if entry.kind == "bound" else self.measures["as trained"]
        return frame[frame["measure"] == entry.name]

    def value(self, entry: Declaration, network: str) -> float | None:
        """The one number of a measure on a network; None where there are several or none."""
        frame = self.measures[network]
        rows = frame[frame["measure"] == entry.name]
        if len(rows) != 1 or not isinstance(rows["value"].iloc[0], float) or pd.isna(rows["value"].iloc[0]):
            return None
        return float(rows["value"].iloc[0])


def _frame(table: fs.Table) -> pd.DataFrame:
    return table.to_frame()


def pages() -> Iterator[tuple[str, str]]:
    """Path inside the documentation, and Markdown, of every generated page about measures and bounds."""
    examples = Examples()
    works = networks_table.known()
    for kind in BOTH:
        known = list(declarations(kind).values())
        yield f"{kind}s/index.md", overview(kind, known)
        for entry in known:
            yield f"{kind}s/{entry.name}.md", page(entry, known, examples, works)


def _families(known: list[Declaration]) -> dict[str, list[Declaration]]:
    families: dict[str, list[Declaration]] = {}
    for entry in known:
        families.setdefault(entry.family, []).append(entry)
    return families


def _family_title(family: str) -> str:
    title = family_name(family)
    return title[0].upper() + title[1:]


def by_family() -> dict[str, list[dict[str, list[str]]]]:
    """The navigation: for the folder of each kind, the pages of every family under its title."""
    return {
        f"{kind}s/": [
            {_family_title(family): [f"{kind}s/{entry.name}.md" for entry in entries]}
            for family, entries in _families(list(declarations(kind).values())).items()
        ]
        for kind in BOTH
    }


def overview(kind: str, known: list[Declaration]) -> str:
    """The list of all measures or bounds, by family."""
    lines = [f"# All {kind}s", ""]
    if kind == "measure":
        lines += [
            f"{len(known)} measures in {len({entry.family for entry in known})} families. Not sure which? "
            "[Which measure should I use?](../choose.md) says it in one page; "
            "[Which measure works where](../networks.md) shows on which networks each has a value; "
            "[All measures under all symmetries](../symmetries.md) what moves, by how much, on networks to load.",
            "",
            "The marks say what leaves a value alone: "
            + "; ".join(f"{_chip(word)} {words}" for word, words in SYMMETRIES.values())
            + ". A measure without the mark “unit” can be changed at will without changing what the network computes.",
        ]
    else:
        lines += [
            f"{len(known)} bounds on the generalization gap, or on what it is made of. Each row of `fs.bounds` "
            "says whether the bound is vacuous and what it assumes; an assumption that does not hold is a refusal with "
            "the reason, never a number. On networks of practical size nearly all of them are vacuous: "
            "[what that means](../concepts/pac-bayes.md).",
        ]
    for family, entries in _families(known).items():
        lines += ["", f"## {_family_title(family)}", ""]
        lines += [(inspect.getdoc(inspect.getmodule(entries[0].function)) or "").partition("\n")[0], ""]  # of its file
        head = ["measure", "what", "unchanged by"] if kind == "measure" else ["bound", "what", "paper"]
        lines += ["| " + " | ".join(head) + " |", "|---|---|---|"]
        for entry in entries:
            last = _chips(entry) if kind == "measure" else _paper(entry)
            lines.append(f"| [`{entry.name}`]({entry.name}.md) | {cell(entry.summary)} | {last} |")
    if kind == "measure":
        lines += ["", *_example_code()]
    return "\n".join(lines) + "\n"


def page(entry: Declaration, known: list[Declaration], examples: Examples, works: dict[str, dict[str, str]]) -> str:
    """Everything that is known about one measure or bound."""
    body, arguments = _docstring(entry)
    lines = [
        "---",
        f"description: {json.dumps(entry.summary)}",
        "---",
        f"# `{entry.name}`",
        "",
        f"**{markdown(entry.summary)}**",
        "",
        "$$",
        entry.symbol,
        "$$",
        "",
        *symbols(entry),
        *reading(entry),
        *worth(entry),
        "## In short",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {cell(value)} |" for name, value in _facts(entry).items() if value),
        "",
    ]
    if body:
        lines += [markdown(body), ""]
    if entry.conventions:
        lines += ["**Conventions.** " + sentence(entry.conventions), ""]
    if entry.assumptions:
        lines += ["## What it assumes", "", *(f"- {markdown(words)}" for words in entry.assumptions), ""]
    lines += _options(entry, arguments)
    lines += _example(entry, examples)
    if entry.kind == "measure":
        lines += _where(entry, works)
    others = [other for other in known if other.family == entry.family and other is not entry]
    if others:
        lines += ["## Of the same family", "", *(f"- [`{o.name}`]({o.name}.md): {markdown(o.summary)}" for o in others)]
    return "\n".join(lines) + "\n"


def _facts(entry: Declaration) -> dict[str, str]:
    direction = {"lower": "lower", "higher": "higher"}.get(entry.direction)
    facts = {
        "Paper": _paper(entry),
        "Value": {"network": "one per network"}.get(entry.per, f"one per {entry.per}"),
    }
    if entry.kind == "measure":
        facts |= {
            "Unchanged by": _chips(entry),
            "Expected with better generalization": f"{direction} values" if direction else "no order is claimed",
            "Found on small networks": _found(entry) if direction else "",
            "BatchNorm": "folded into the layers first" if entry.on_folded else "as given",
        }
    return facts | {
        "Cost": COSTS[entry.cost] + (f"; at most {_passes(entry)}" if entry.passes else ""),
        "Exact": f"no: {SEARCHES[entry.search]}"
        if entry.search
        else "yes, where the row says so"
        if entry.exact
        else "no: an estimate, with its standard error",
        "Needs": ", ".join(NEEDS[word] for word in sorted(entry.needs)),
    }


@functools.cache
def _boards() -> tuple[Leaderboard, Leaderboard]:
    return released_leaderboard(), released_leaderboard(few=True)


def _found(entry: Declaration) -> str:
    """How far a measure goes along with generalization on the networks of the benchmark, where it was scored."""
    for board in _boards():
        score = board.mean(entry.name, "psi")
        if not math.isnan(score):
            sure = {np.sign(row["low"]) if row["low"] * row["high"] > 0 else 0.0 for row in _scores(board, entry)}
            alone = sure.pop() if len(sure) == 1 else 0.0
            said = {1.0: "as expected", -1.0: "the other way round"}.get(alone, "no clear order")
            networks = f"[{board.meta['networks']:,} networks](../leaderboard.md)"
            return f"{said}: Ψ = {score_number(score)} on {networks}, where 1 is best and 0 is chance"
    return ""


def _scores(board: Leaderboard, entry: Declaration) -> Iterator[pd.Series[Any]]:
    rows = (board.row(entry.name, *population, "psi") for population in board.populations)
    yield from (row for row in rows if row is not None)


def _passes(entry: Declaration) -> str:
    return ", ".join(f"{written(number)} {kind}" for kind, number in (entry.passes or {}).items()) + " passes"


def _paper(entry: Declaration) -> str:
    return f"{entry.citation}, {entry.equation}" if entry.paper != "flatscope" else entry.equation


def _chip(word: str) -> str:
    return f'<span class="chip">{word}</span>'


def _chips(entry: Declaration) -> str:
    kept = [SYMMETRIES[name][0] for name in SYMMETRIES if name in entry.invariant_under]
    return " ".join(map(_chip, kept)) or "nothing"


def _docstring(entry: Declaration) -> tuple[str, dict[str, str]]:
    """The text between the first line and the arguments, and what each argument is."""
    text = inspect.getdoc(entry.function) or ""
    text, _, listed = text.partition("\nArgs:\n")
    body = text.partition("\n")[2].strip()
    listed = re.split(r"\n(?=\S)", listed)[0]  # up to the next section
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", listed, flags=re.MULTILINE)
    return body, {name: " ".join(words.split()) for name, words in found}


def _options(entry: Declaration, arguments: dict[str, str]) -> list[str]:
    options = {name: value for name, value in entry.options.items() if value is not inspect._empty}
    if not options:
        return []
    call = "bounds" if entry.kind == "bound" else "measure"
    name, default = next(iter(options.items()))
    rows = [f"| `{name}` | `{default!r}` | {cell(arguments.get(name, ''))} |" for name, default in options.items()]
    return [
        "## Options",
        "",
        "| option | default | what |",
        "|---|---|---|",
        *rows,
        "",
        f'Set them by name: `fs.{call}(problem, "{entry.name}", '
        f'options={{"{entry.name}": {{"{name}": {default!r}}}}})`.',
        "",
    ]


def _example(entry: Declaration, examples: Examples) -> list[str]:
    call = "bounds" if entry.kind == "bound" else "measure"
    rows = examples.rows(entry)
    lines = [
        "## Example",
        "",
        "On [the network of the examples](../measures/index.md#the-network-of-the-examples):",
        "",
        "```python",
        f'fs.{call}(problem, "{entry.name}")',
        "```",
        "",
        *_value_table(rows),
        "",
    ]
    if entry.kind == "bound":
        return lines
    values = {name: examples.value(entry, name) for name in ("as trained", *TWINS)}
    first = values["as trained"]
    if any(value is None for value in values.values()) or not first:
        return lines
    lines += ["The same function, written with other weights:", "", "| weights | value | change |", "|---|---|---|"]
    lines += [f"| {name} | {written(value)} | {_change(value / first)} |" for name, value in values.items()]  # type: ignore[operator,arg-type]
    return [*lines, ""]


def _change(ratio: float) -> str:
    return "none" if abs(ratio - 1) < 1e-4 else f"× {written(ratio)}"


def _value_table(rows: pd.DataFrame) -> list[str]:
    """Rows of a table, at most eight; values per unit or sample by their smallest and largest."""
    shown: list[list[str]] = []
    for (options, layer), group in rows.groupby(["options", "layer"], sort=False, dropna=False):
        first = group.iloc[0]
        several = f"{written(group['value'].min())} … {written(group['value'].max())} ({len(group):,} values)"
        value, error = (several, "") if len(group) > 1 else with_error(first["value"], first["stderr"])
        kind = "exact" if first["exact"] else "estimate"
        shown.append([options_in_words(str(options)), str(layer or ""), value, error, kind, str(first["reason"])])
    heads = ["options", "layer", "value", "± s.e.", "", "remark"]
    kept = [i for i in range(len(heads)) if any(row[i] for row in shown)]
    more = [f"… and {len(shown) - 8} more rows."] if len(shown) > 8 else []
    return [
        "| " + " | ".join(heads[i] for i in kept) + " |",
        "|" + "---|" * len(kept),
        *("| " + " | ".join(cell(row[i]) for i in kept) + " |" for row in shown[:8]),
        *(["", *more] if more else []),
    ]


def _where(entry: Declaration, works: dict[str, dict[str, str]]) -> list[str]:
    if entry.cost == "long":
        return []
    reasons = {network: found[entry.name] for network, found in works.items() if found.get(entry.name)}
    if any(entry.name not in found for found in works.values()):
        return []
    if not reasons:
        return ["## Where it works", "", f"It has a value on all [{len(works)} networks tried](../networks.md).", ""]
    lines = [
        "## Where it works",
        "",
        f"It has a value on {len(works) - len(reasons)} of [{len(works)} networks tried](../networks.md). Not on:",
        "",
    ]
    by_reason: dict[str, list[str]] = {}
    for network, reason in reasons.items():
        by_reason.setdefault("no time left" if reason.startswith("not begun") else reason, []).append(network)
    return [*lines, *(f"- {', '.join(names)}: {markdown(reason)}" for reason, names in by_reason.items()), ""]


def _example_code() -> list[str]:
    return [
        "## The network of the examples",
        "",
        "The pages of measures and bounds show numbers of this network; it trains in a second.",
        "",
        "```python",
        EXAMPLE.read_text(encoding="utf-8").partition("\n\n")[2].rstrip(),
        "```",
    ]
