"""The catalogue of measures and bounds, written from their declarations."""

from __future__ import annotations

import inspect

from flatscope.registry import PAPERS, Declaration, declarations

_SHORT = {
    "layer_scaling": "layer",
    "unit_scaling": "unit",
    "permutation": "permutation",
    "batchnorm_scaling": "BatchNorm",
    "output_scaling": "output",
}


def catalogue_markdown(kind: str = "measure") -> str:
    """One table row per measure (or bound)."""
    lines = [
        "| measure | per | what | unchanged by | paper |"
        if kind == "measure"
        else "| bound | what | assumes | paper |",
        "|---|---|---|---|---|" if kind == "measure" else "|---|---|---|---|",
    ]
    for entry in declarations(kind).values():
        paper = f"{PAPERS[entry.paper]}, {entry.equation}" if entry.paper != "flatscope" else entry.equation
        if kind == "measure":
            kept = ", ".join(word for key, word in _SHORT.items() if key in entry.invariant_under) or "—"
            cells = [f"`{entry.name}`", entry.per, entry.summary, kept, paper]
        else:
            cells = [f"`{entry.name}`", entry.summary, "; ".join(entry.assumptions), paper]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def measure_page(entry: Declaration) -> str:
    """Everything that is known about one measure, as text."""
    facts = {
        "symbol": entry.symbol,
        "paper": f"{PAPERS[entry.paper]}, {entry.equation}",
        "per": entry.per,
        "direction": {"none": "not ordered"}.get(
            entry.direction, f"{entry.direction} is expected to generalize better"
        ),
        "invariant under": ", ".join(sorted(entry.invariant_under)) or "nothing",
        "BatchNorm": "folded first" if entry.on_folded else "as given",
        "needs": ", ".join(sorted(entry.needs)) or "nothing more",
        "cost": entry.cost,
        "search": {"lower": "a lower bound that a search found", "upper": "an upper bound that a search found"}.get(
            entry.search, ""
        ),
        "conventions": entry.conventions,
        "assumptions": "; ".join(entry.assumptions),
        "options": ", ".join(
            f"{name}={value!r}" for name, value in entry.options.items() if value is not inspect._empty
        ),
    }
    width = max(len(name) for name in facts)
    listed = "\n".join(f"  {name:<{width}}  {value}" for name, value in facts.items() if value)
    doc = inspect.getdoc(entry.function) or ""
    indented = "\n".join(f"  {line}".rstrip() for line in doc.splitlines())
    return f"{entry.name}\n{indented}\n\n{listed}\n"
