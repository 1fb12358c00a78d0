"""`flatscope spectrum`: eigenvalues of the Hessian or the Gauss-Newton matrix, and their density."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatscope.cli.options import NetworkOptions
from flatscope.cli.output import check_place, command_line, network_meta, note_missing_weights, show_grid
from flatscope.errors import InputError

if TYPE_CHECKING:
    from flatscope.spectra import Eigenpairs, SpectralDensity

# What loads torch is imported inside the commands: their help, and a slip in one, should not take seconds.


def spectrum(
    network: NetworkOptions,
    top: Annotated[int, typer.Option(help="How many of the largest eigenvalues to find.")] = 10,
    bottom: Annotated[int, typer.Option(help="How many of the smallest.")] = 0,
    layer: Annotated[str | None, typer.Option(help="Of this layer's weight alone; else of all parameters.")] = None,
    curvature: Annotated[str, typer.Option(help="hessian or gauss_newton.")] = "hessian",
    tolerance: Annotated[float, typer.Option(help="Relative accuracy of the eigenvalues.")] = 1e-3,
    draws: Annotated[int, typer.Option(help="Random starts of the density; 0 for eigenvalues alone.")] = 5,
    steps: Annotated[int, typer.Option(help="Curvature products of each start.")] = 64,
    memory: Annotated[str | None, typer.Option(help='What a pass may use: "8GiB"; else a share of what is free.')] = (
        None
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, nothing else on stdout.")] = False,
    out: Annotated[
        list[Path] | None,
        typer.Option(help="Write the density as .npz, .parquet, .json, .csv, .png, .svg, .pdf, or both as .html."),
    ] = None,
    pairs_out: Annotated[
        Path | None, typer.Option(help="Write the eigenvalues as .npz (with the vectors), .parquet, .json or .csv.")
    ] = None,
) -> None:
    """Find the largest eigenvalues of a network's Hessian and how all of them are spread."""
    from flatscope.cli.sources import load_problem
    from flatscope.ranks import process_group
    from flatscope.reports.page import report
    from flatscope.spectra import Eigenpairs, SpectralDensity, eigenpairs, spectral_density

    for path in out or ():
        check_place(path, (*SpectralDensity.ENDINGS, ".html"))
        if not draws and path.suffix.lower() != ".html":
            raise InputError("--draws of at least 1 for a file of the density", "0", where=str(path))
    if pairs_out is not None:
        check_place(pairs_out, Eigenpairs.ENDINGS)
    if top + bottom + draws < 1 or min(top, bottom, draws) < 0:
        raise InputError("eigenvalues or draws to find", f"{top}, {bottom} and {draws}", where="spectrum")
    if pairs_out is not None and not top + bottom:
        raise InputError("--top or --bottom of at least 1", "0", where="--pairs-out")
    with process_group(network.device) as own_device:
        problem, _ = load_problem(network, device=own_device)
        seed = network.seed
        pairs: Eigenpairs | None = None
        density: SpectralDensity | None = None
        if top + bottom:
            pairs = eigenpairs(problem, top, layer, curvature, tolerance, bottom=bottom, seed=seed, memory=memory)
        if draws:
            density = spectral_density(problem, draws, layer, curvature, steps=steps, seed=seed, memory=memory)
        if problem.ranks.rank:
            return  # every rank has the same spectrum; the first one shows it
    found = [result for result in (pairs, density) if result is not None]
    for result in found:
        result.meta.update(network_meta(network))
    if as_json:
        typer.echo(json.dumps({result.WORD: json.loads(result.to_json()) for result in found}, indent=1))
    else:
        for result in found:
            show_grid(*result.cells())
    note_missing_weights(network.weights)
    for path in out or ():
        if path.suffix.lower() == ".html":
            report(found, path, command=command_line())
        elif density is not None:
            density.save(path)
    if pairs_out is not None and pairs is not None:
        pairs.save(pairs_out)
