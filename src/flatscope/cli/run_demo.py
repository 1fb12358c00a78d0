"""What `flatscope demo` does: the same network trained with a small and a large batch, measured and compared."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from flatscope.auditing import audit
from flatscope.cli.output import check_place, command_line, show_grid
from flatscope.cli.run_audit import show_audit
from flatscope.context import Context
from flatscope.errors import NumericalWarning
from flatscope.landscapes.making import landscape
from flatscope.landscapes.surface import Surface
from flatscope.measuring import bounds, measure
from flatscope.problem import Problem
from flatscope.registry import select
from flatscope.reports.figures import save_figures
from flatscope.reports.measured import lines
from flatscope.reports.page import report
from flatscope.table import Table
from flatscope.training.checkpoint import TrainConfig
from flatscope.training.data import Data, load
from flatscope.training.loop import train
from flatscope.training.models import build
from flatscope.training.weight_files import save_weights

WIDTHS = (64, 64, 32, 10)
# One stop rule for both: curvature of cross-entropy falls with the loss, so only equal losses compare.
STOP_LOSS = 0.002
RUNS = {
    "batch 16": TrainConfig(batch_size=16, lr=0.01, momentum=0.9, epochs=400, stop_loss=STOP_LOSS),
    "batch 512": TrainConfig(batch_size=512, lr=0.05, momentum=0.9, epochs=2000, stop_loss=STOP_LOSS),
}

# All that do not take long, and the sharpness that belongs to the divergence.
MEASURED = (*(entry.name for entry in select(None)), "expected_sharpness")
OPTIONS = {"expected_sharpness": {"draws": 60}}
# Directions in proportion to what they move, so that the planes of both networks reach as far; the path plane is wide
# enough to meet poles.
PLANES: tuple[dict[str, Any], ...] = (
    {"space": "weights", "directions": "filter"},
    {"space": "psi", "relative": True, "noise": 0.3},
)
GRID = 25  # points a side

# One or two of each family; `flatscope audit` takes all of them.
AUDITED = (
    "hessian_trace",
    "hessian_max_eigenvalue",
    "expected_flatness",
    "pac_bayes_kl",
    "l2_norm",
    "spectral_norm",
    "kappa_max",
    "kappa_trace_sum",
    "rho_sum",
    "relative_flatness",
    "l1_path_norm",
    "l2_path_norm",
    "psi_trace",
    "margin",
)


def demonstrate(out: Path, seed: int) -> None:
    """Train two networks on the embedded digits, measure both, write a report into `out`."""
    say = Console(stderr=True, soft_wrap=True).print
    check_place(out / "report.html", (".html",))  # before the minutes of training
    data = load("digits", flatten=True, seed=seed)
    tables: dict[str, Table] = {}
    histories: dict[str, pd.DataFrame] = {}
    certificates: dict[str, Table] = {}
    surfaces: dict[str, list[Surface]] = {}
    problems: dict[str, Problem] = {}
    for name, config in RUNS.items():
        say(f"Training a {'-'.join(map(str, WIDTHS))} network on digits with {name} to a loss of {STOP_LOSS} …")
        problem, histories[name] = _trained(name, config, data, seed, out)
        problems[name] = problem
        last = histories[name].iloc[-1]
        say(
            f"  {int(last['epoch'])} epochs, training loss {last['train_loss']:.3g}, "
            f"test error {100 * last['test_error']:.1f} %. Measuring …"
        )
        context = Context(problem, seed=seed)
        tables[name] = measure(problem, MEASURED, options=OPTIONS, context=context)
        certificates[name] = bounds(problem, context=context)
        tables[name].save(out / f"{_file_name(name)}.parquet")
        say("  Walking away from it on planes in weight space and in path space …")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NumericalWarning)  # poles are met on purpose, and the page says so
            surfaces[name] = [landscape(problem, grid=GRID, seed=seed, **plane) for plane in PLANES]
    first = next(iter(tables))
    say(f"Writing the {first} network with other weights, and measuring the same function again …")
    audits = {first: audit(problems[first], AUDITED, by=("layer", "unit"), trials=1, seed=seed)}
    _show(tables, histories)
    show_audit(audits[first])
    command = command_line()
    items = {name: [tables[name], certificates[name], histories[name], surfaces[name]] for name in tables}
    page = report([items, audits], out / "report.html", title="flatscope demo", command=command)
    figures = save_figures([tables, histories, surfaces], out / "figures")
    say(f"\nReport: {page}\nFigures: {len(figures)} in {out / 'figures'}")


def _trained(name: str, config: TrainConfig, data: Data, seed: int, out: Path) -> tuple[Problem, pd.DataFrame]:
    model = build("mlp", seed=seed, widths=WIDTHS)
    initial = {key: value.detach().clone() for key, value in model.state_dict().items()}
    result = train(model, data, TrainConfig.from_dict(config.to_dict() | {"seed": seed}))
    save_weights(model, out / f"{_file_name(name)}.safetensors")
    return Problem(model, train=data.train, test=data.test, initial=initial), result.history


def _show(tables: dict[str, Table], histories: dict[str, pd.DataFrame]) -> None:
    """The networks side by side: one line per network-wide measure, with what leaves it unchanged."""
    first, *others = tables
    header = ["measure", *tables, "ratio", "unchanged by"]
    rows = [
        ["training loss", *[f"{h['train_loss'].iloc[-1]:.4f}" for h in histories.values()], "", ""],
        ["test error", *[f"{100 * h['test_error'].iloc[-1]:.2f} %" for h in histories.values()], "", ""],
    ]
    for line in lines(tables):  # what was measured: declarations also have long ones, and several rows of one name
        cells = [cell for cell in line.cells if cell is not None]
        if line.entry is None or line.entry.per != "network" or len(cells) < len(tables):
            continue
        if line.name.endswith("_capacity"):  # in the report; here they would say the norms again
            continue
        shown = [f"{cell.text} ± {cell.stderr}" if cell.stderr else cell.text for cell in cells]
        ratio = cells[-1].value / cells[0].value if cells[0].value else math.nan
        kept = ", ".join(sorted(key.removesuffix("_scaling") for key in line.entry.invariant_under)) or "—"
        rows.append([line.label, *shown, f"{ratio:.2f}" if math.isfinite(ratio) else "", kept])
    show_grid(header, rows, title=f"{first} against {', '.join(others)}")


def _file_name(name: str) -> str:
    return name.replace(" ", "-")
