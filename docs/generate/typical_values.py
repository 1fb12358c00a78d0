"""Typical values of measures and bounds: writes src/flatscope/typical_values.json.

Of the released networks, which come with the package, and of the two networks that `flatscope demo` trains, on which
every measure and bound is taken, those that take long as well: some minutes. With names behind the command only those
are taken anew.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd

import flatscope as fs
from flatscope.cli.run_demo import RUNS, _trained_demo_network
from flatscope.inputs import load
from flatscope.registry import declarations
from flatscope.training import released_population
from flatscope.training.benchmarking.recipe import OPTIONS

TARGET = Path(__file__).parents[2] / "src" / "flatscope" / "typical_values.json"
STOP = 0.01  # training loss at which the released networks were measured; each is stored at two
SHARES = (0.05, 0.5, 0.95)
DIGITS = 3
# Measures that give a row for each of several options: that one, as in the released networks.
ONE_OPTION = {
    name: {key: value for key, value in options.items() if key in ("alpha", "gammas")}
    for name, options in OPTIONS.items()
    if {"alpha", "gammas"} & options.keys()
} | {"takeuchi_trace": {"damping": 0.01}}  # which these networks are too large to have without


def released() -> dict[str, dict[str, Any]]:
    """The middle 90 % of the released networks, and their middle, for each measure that was taken of them."""
    population, _ = released_population()
    frame = population[(population["stop"] == STOP) & population["reached"]]
    values: dict[str, dict[str, Any]] = {}
    for name in declarations():
        known = frame[name].dropna() if name in frame else pd.Series(dtype=float)
        if len(known):
            low, middle, high = (rounded(float(known.quantile(share))) for share in SHARES)
            values[name] = {"low": low, "middle": middle, "high": high, "networks": len(known)}
    return values


def demo(names: list[str]) -> dict[str, dict[str, Any]]:
    """Every measure and bound on the two networks of the demo: the smallest and the largest of its values."""
    values: dict[str, dict[str, Any]] = {}
    for network in RUNS:
        problem = demo_problem(network)
        measures = [name for name in names if name in declarations()]
        options = {name: given for name, given in ONE_OPTION.items() if name in measures}
        bounds = [name for name in names if name not in measures]
        tables = [fs.measure(problem, measures, options=options)] if measures else []
        for table in [*tables, fs.bounds(problem, bounds)] if bounds else tables:
            for name, rows in table.to_frame().groupby("measure", sort=False):
                values.setdefault(str(name), {})[network] = summary(rows)
    return values


def demo_problem(network: str) -> fs.Problem:
    """One of the two networks of the demo, trained."""
    with TemporaryDirectory() as folder:
        problem, _ = _trained_demo_network(
            network, RUNS[network], load("digits", flatten=True, seed=0), 0, Path(folder)
        )
    return problem


def summary(rows: pd.DataFrame) -> dict[str, Any]:
    """One value of a network, or of how many the smallest and the largest; or why there is none."""
    whole = rows[rows["layer"].eq("") & rows["unit"].isna() & rows["sample"].isna()]
    chosen = whole if len(whole) else rows
    known = chosen["value"].dropna()
    if not len(known):
        return {"reason": str(chosen["reason"].iloc[0])}
    ends = {"low": rounded(float(known.min())), "high": rounded(float(known.max()))}
    return {"value": ends["low"]} if len(known) == 1 else {**ends, "values": len(known)}


def rounded(value: float) -> float | str:
    """So many digits; JSON has no infinity."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)


def main() -> None:
    """Measure and write."""
    names = sys.argv[1:] or [*declarations(), *declarations("bound")]
    known = json.loads(TARGET.read_text(encoding="utf-8"))["demo"] if sys.argv[1:] else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"released": OPTIONS, "demo": ONE_OPTION}
        content = {"options": options, "released": released(), "demo": known | demo(names)}
    TARGET.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
