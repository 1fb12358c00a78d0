"""What `flatscope demo` does: the same network trained with a small and a large batch, measured and compared."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import typer

from flatscope.auditing import audit
from flatscope.cli.output import check_output_file, command_line, show_note, show_progress_line
from flatscope.cli.run_compare import show_comparison_answer
from flatscope.comparing.compare_function import compare
from flatscope.errors import NumericalWarning
from flatscope.inputs.data_set import Data
from flatscope.inputs.loading import load
from flatscope.inputs.weight_files import save_weights
from flatscope.landscapes.landscape_function import landscape
from flatscope.measuring import bounds
from flatscope.problem import Problem
from flatscope.registry import CORE, PICTURED
from flatscope.reports.page import report, save_figures
from flatscope.spectra.spectrum_functions import spectral_density
from flatscope.training.checkpoint import TrainConfig
from flatscope.training.loop import train
from flatscope.training.models import build

WIDTHS = (64, 64, 32, 10)
# One stop rule for both: curvature of cross-entropy falls with the loss, so only equal losses compare.
STOP_LOSS = 0.002
RUNS = {
    "batch 16": TrainConfig(batch_size=16, lr=0.01, momentum=0.9, epochs=400, stop_loss=STOP_LOSS),
    "batch 512": TrainConfig(batch_size=512, lr=0.05, momentum=0.9, epochs=2000, stop_loss=STOP_LOSS),
}

# The core set, its values by layer for the pictures, whether the loss curves down, and flatness in path space.
MEASURED = (*CORE, *PICTURED, "hessian_min_eigenvalue", "psi_trace")
# Directions in proportion to what they move, so that the planes of both networks reach as far; the path plane is wide
# enough to meet poles.
PLANES: tuple[dict[str, Any], ...] = (
    {"space": "weights", "directions": "filter"},
    {"space": "psi", "relative": True, "noise": 0.3},
)
GRID = 25  # points a side
DRAWS = 3  # of the density of eigenvalues

# One or two of each family; `flatscope audit` takes all of them.
AUDITED = (
    "hessian_trace",
    "hessian_max_eigenvalue",
    "expected_flatness",
    "pac_bayes_kl",
    "l2_norm",
    "spectral_norm",
    "kappa",
    "kappa_trace_sum",
    "rho_sum",
    "relative_flatness",
    "l1_path_norm",
    "l2_path_norm",
    "psi_trace",
    "margin",
)


def run_demo(out: Path, seed: int) -> None:
    """Train two networks on the embedded digits, measure both, write a report into `out`."""
    check_output_file(out / "report.html", (".html",))  # before the minutes of training
    data = load("digits", flatten=True, seed=seed)
    histories: dict[str, pd.DataFrame] = {}
    problems: dict[str, Problem] = {}
    for name, config in RUNS.items():
        show_progress_line(
            f"Training a {'-'.join(map(str, WIDTHS))} network on digits with {name} to a loss of {STOP_LOSS} …"
        )
        problems[name], histories[name] = _trained_demo_network(name, config, data, seed, out)
        last = histories[name].iloc[-1]
        show_progress_line(f"  {int(last['epoch'])} epochs, test error {100 * last['test_error']:.1f} %")
    show_progress_line("Measuring both …")
    comparison = compare(problems, names=MEASURED, seed=seed)
    certificates = {name: bounds(problem, seed=seed) for name, problem in problems.items()}
    density = {name: spectral_density(problem, draws=DRAWS, seed=seed) for name, problem in problems.items()}
    show_progress_line("Walking away from them on planes in weight space and in path space …")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)  # poles are met on purpose, and the page says so
        surfaces = {
            name: [landscape(problem, grid=GRID, seed=seed, **plane) for plane in PLANES]
            for name, problem in problems.items()
        }
    first = next(iter(problems))
    show_progress_line(f"Writing the {first} network with other weights, and measuring the same function again …")
    audits = {first: audit(problems[first], AUDITED, by=("layer", "unit"), trials=1, seed=seed)}
    for name, table in comparison.tables.items():
        table.save(out / f"{_file_name_of_network(name)}.parquet")
    items = {name: [certificates[name], histories[name], surfaces[name], density[name]] for name in problems}
    everything = [comparison, items, audits]
    page = report(everything, out / "report.html", title="flatscope demo", command=command_line())
    figures = save_figures(everything, out / "figures")
    show_comparison_answer(comparison)
    show_note(f"{len(figures)} figures in {out / 'figures'}, tables and weights in {out}")
    _show_next_command(page, out)


def _show_next_command(page: Path, out: Path) -> None:
    """The report, and a command that does the same with one's own networks."""
    network = f"--model mlp --model-option widths={','.join(map(str, WIDTHS))} --data digits --flatten"
    files = " ".join(str(out / f"{_file_name_of_network(name)}.safetensors") for name in RUNS)
    typer.echo(f"\nOpen {page} in a browser. Next, the same for networks of your own, with theirs in place of these:")
    typer.echo(f"  flatscope compare {files} \\\n    {network}")


def _trained_demo_network(
    name: str, config: TrainConfig, data: Data, seed: int, out: Path
) -> tuple[Problem, pd.DataFrame]:
    model = build("mlp", seed=seed, widths=WIDTHS)
    initial = {key: value.detach().clone() for key, value in model.state_dict().items()}
    result = train(model, data, TrainConfig.from_dict(config.to_dict() | {"seed": seed}))
    save_weights(model, out / f"{_file_name_of_network(name)}.safetensors")
    return Problem(model, train=data.train, test=data.test, initial=initial), result.history


def _file_name_of_network(name: str) -> str:
    return name.replace(" ", "-")
