"""`flatscope spectrum`: eigenvalues of the Hessian or the Gauss-Newton matrix, and their density."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from flatscope.cli.output import check_outputs, check_place, deliver, note_missing_weights, show_grid, show_note
from flatscope.cli.sources import load_problem, network_meta
from flatscope.errors import InputError
from flatscope.ranks import process_group
from flatscope.spectra.density import SpectralDensity
from flatscope.spectra.finding import eigenpairs, spectral_density
from flatscope.spectra.pairs import Eigenpairs

if TYPE_CHECKING:
    from flatscope.cli.options import SpectrumCommand


def run_spectrum(given: SpectrumCommand) -> None:
    """Find, show, save."""
    check_outputs(given, SpectralDensity)
    for path in given.out or ():
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
    note_missing_weights(given.weights)
    if given.pairs_out is not None and pairs is not None:
        pairs.save(given.pairs_out)
        show_note(f"eigenvalues written to {given.pairs_out}")

    def show() -> None:
        for result in found:
            show_grid(*result.cells())

    def as_json() -> str:
        return json.dumps({result.WORD: json.loads(result.to_json()) for result in found}, indent=1)

    deliver(density or found[0], given, show, page=found, as_json=as_json)
