"""`flatscope spectrum`: eigenvalues of the Hessian or the Gauss-Newton matrix, and their density."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from flatscope.cli.output import check_place, command_line, note_missing_weights, show_grid
from flatscope.cli.sources import load_problem, network_meta
from flatscope.errors import InputError
from flatscope.ranks import process_group
from flatscope.reports.page import report
from flatscope.spectra.density import SpectralDensity
from flatscope.spectra.finding import eigenpairs, spectral_density
from flatscope.spectra.pairs import Eigenpairs

if TYPE_CHECKING:
    from flatscope.cli.options import SpectrumCommand


def run_spectrum(given: SpectrumCommand) -> None:
    """Find, show, save."""
    for path in given.out or ():
        check_place(path, (*SpectralDensity.ENDINGS, ".html"))
        if not given.draws and path.suffix.lower() != ".html":
            raise InputError("--draws of at least 1 for a file of the density", "0", where=str(path))
    if given.pairs_out is not None:
        check_place(given.pairs_out, Eigenpairs.ENDINGS)
    if given.top + given.bottom + given.draws < 1 or min(given.top, given.bottom, given.draws) < 0:
        raise InputError(
            "eigenvalues or draws to find", f"{given.top}, {given.bottom} and {given.draws}", where="spectrum"
        )
    if given.pairs_out is not None and not given.top + given.bottom:
        raise InputError("--top or --bottom of at least 1", "0", where="--pairs-out")
    with process_group(given.device) as own_device:
        problem, _ = load_problem(given, device=own_device)
        seed = given.seed
        pairs: Eigenpairs | None = None
        density: SpectralDensity | None = None
        if given.top + given.bottom:
            pairs = eigenpairs(
                problem,
                given.top,
                given.layer,
                given.curvature,
                given.tolerance,
                bottom=given.bottom,
                seed=seed,
                memory=given.memory,
            )
        if given.draws:
            density = spectral_density(
                problem, given.draws, given.layer, given.curvature, steps=given.steps, seed=seed, memory=given.memory
            )
        if problem.ranks.rank:
            return  # every rank has the same spectrum; the first one shows it
    found = [result for result in (pairs, density) if result is not None]
    for result in found:
        result.meta.update(network_meta(given))
    if given.as_json:
        typer.echo(json.dumps({result.WORD: json.loads(result.to_json()) for result in found}, indent=1))
    else:
        for result in found:
            show_grid(*result.cells())
    note_missing_weights(given.weights)
    for path in given.out or ():
        if path.suffix.lower() == ".html":
            report(found, path, command=command_line())
        elif density is not None:
            density.save(path)
    if given.pairs_out is not None and pairs is not None:
        pairs.save(given.pairs_out)
