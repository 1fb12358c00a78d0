"""`flatscope audit`, `landscape` and `spectrum`: what one network shows beside its measures."""

from __future__ import annotations

import json

from rich.text import Text

from flatscope.audit_result import Audit
from flatscope.auditing import audit
from flatscope.cli.options import AuditCommand, ExplainCommand, LandscapeCommand, SpectrumCommand
from flatscope.cli.output import (
    check_output_file,
    check_output_folder,
    check_outputs,
    note_found_initial,
    note_missing_weights,
    show_grid,
    show_headline,
    show_note,
    write_and_show_result,
)
from flatscope.cli.sources import (
    check_measures,
    find_initial,
    load_model,
    load_problem,
    network_meta,
    parse_model_options,
    parse_options,
)
from flatscope.errors import InputError, refuse_unknown
from flatscope.explaining import Explanation, explain
from flatscope.formatting import first_of_names, numbered, readable_number
from flatscope.inputs.weight_files import read_weights
from flatscope.landscapes.landscape_function import landscape
from flatscope.landscapes.surface import Surface
from flatscope.ranks import process_group
from flatscope.spectra.density import SpectralDensity
from flatscope.spectra.eigenpairs import Eigenpairs
from flatscope.spectra.spectrum_functions import eigenpairs, spectral_density
from flatscope.symmetries.scaling import WAYS, applicable_ways_of_rewriting

SHOWN = 6  # measures that are named beside a reason
_STYLES = {"moved": "yellow", "invariant": "green", "not tested": "dim"}


def run_audit(given: AuditCommand) -> None:
    """Audit, show, save."""
    check_measures(given.measures)
    options = parse_options(given.option or ())
    parse_model_options(given.model_option)
    begun = find_initial(given.initial, given.weights)
    for way in given.by or ():
        refuse_unknown(way, WAYS, "--by")
    check_outputs(given, Audit)
    with process_group(given.device) as own_device:
        before = None if begun is None else read_weights(begun)
        problem, _ = load_problem(given, device=own_device, initial=before)
        ways = given.by or applicable_ways_of_rewriting(problem.model, problem.example())
        result = audit(problem, given.measures, ways, given.trials, given.seed, options=options)
        if problem.ranks.rank:
            return  # every rank has the same audit; the first one shows it
    result.meta |= network_meta(given)
    note_missing_weights(given.model, given.weights)
    note_found_initial(given.initial, begun)
    write_and_show_result(result, given, lambda: show_audit(result))


def show_audit(audited: Audit) -> None:
    """The matrix of measures and symmetries; red where a verdict contradicts the declaration."""

    def styled(text: str, wrong: bool) -> Text:
        style = next((style for verdict, style in _STYLES.items() if text.startswith(verdict)), "")
        return Text(text, style="bold red" if wrong else style)

    rows = [[Text(name), *(styled(*cell) for cell in cells)] for (name, _), *cells in audited.lines()]
    header = ["measure", *(name.replace("_", " ") for name in audited.symmetries)]
    show_grid(header, rows, title="relative change of each measure, same function")
    for reason, names in audited.notes().items():
        listed = "all measures" if len(names) == len(audited.measures) else first_of_names(names, SHOWN)
        show_note(f"{reason.rstrip('.')} ({listed})")
    wrong = audited.disagrees
    for name, symmetry, declared in zip(wrong["measure"], wrong["symmetry"], wrong["declared"], strict=True):
        says = "declared invariant, and moved" if declared else "not declared invariant, yet stands still"
        show_note(f"{name} under {symmetry.replace('_', ' ')}: {says}")


def run_explain(given: ExplainCommand) -> None:
    """Explain, show, save."""
    check_measures(given.measures)
    parse_model_options(given.model_option)
    check_outputs(given, Explanation)
    problem, _ = load_problem(given)
    explanation = explain(problem, given.measures, given.precision, curvature=given.curvature)
    explanation.meta |= network_meta(given)
    note_missing_weights(given.model, given.weights)
    write_and_show_result(explanation, given, lambda: show_explanation(explanation))


def show_explanation(explanation: Explanation) -> None:
    """The headline, the row of every parameter, and what holds for several of them."""
    show_headline(explanation.headline)
    show_grid(*explanation.cells())
    for line in explanation.details():
        show_note(line)


def run_landscape(given: LandscapeCommand) -> None:
    """Evaluate, show, save."""
    check_outputs(given, Surface)
    if given.checkpoint is not None:
        check_output_folder(given.checkpoint)
    if given.to and given.directions is not None:
        raise InputError("either --directions or --to", "both", where="landscape")
    options = parse_model_options(given.model_option)
    problem, loaded = load_problem(given)
    others = [load_model(given.model, path, loaded, given.seed, options) for path in given.to or ()]
    directions = others if len(others) > 1 else others[0] if others else given.directions
    same = ("space", "grid", "span", "seed", "dimensions", "part", "noise", "relative", "rule", "checkpoint")
    surface = landscape(problem, directions=directions, **{name: getattr(given, name) for name in same})
    surface.meta.update(network_meta(given))
    note_missing_weights(given.model, given.weights)
    if not (given.out or given.report or given.as_json):
        show_note("no picture was asked for: --out plane.png, or --report page.html, writes one")
    write_and_show_result(surface, given, lambda: show_surface(surface))


def show_surface(surface: Surface) -> None:
    """Print the numbers of a landscape, without its picture."""
    low, high = surface.heights
    size, poles = "×".join(str(len(axis)) for axis in surface.axes), int(surface.poles.sum())
    rows = [
        ["space", surface.space + (f", rule {surface.meta['rule']}" if surface.space == "psi" else "")],
        [
            "directions",
            f"{surface.directions}, length " + ", ".join(readable_number(x) for x in surface.meta["lengths"]),
        ],
        ["grid", size + (f", {numbered(poles, 'point')} beyond a pole of path space" if poles else "")],
        [f"{surface.meta['part']} loss at the network", readable_number(surface.centre)],
        ["lowest and highest", f"{readable_number(low)} … {readable_number(high)}"],
    ]
    if surface.error is not None and surface.meta["centre_error"] is not None:
        finite = surface.error[surface.error.isfinite()]
        rows.append([f"{surface.meta['part']} error at the network", readable_number(surface.meta["centre_error"])])
        if len(finite):
            rows.append(
                [
                    "lowest and highest",
                    f"{readable_number(float(finite.min()))} … {readable_number(float(finite.max()))}",
                ]
            )
    show_grid(["landscape", ""], rows)


def _check_spectrum(given: SpectrumCommand) -> None:
    """Refuse files without numbers for them, and numbers that ask for nothing."""
    check_outputs(given, SpectralDensity)
    for path in given.out or ():
        if not given.draws and path.suffix.lower() != ".html":
            raise InputError("--draws of at least 1 for a file of the density", "0", where=str(path))
    if given.pairs_out is not None:
        check_output_file(given.pairs_out, Eigenpairs.ENDINGS)
    if given.top + given.bottom + given.draws < 1 or min(given.top, given.bottom, given.draws) < 0:
        got = f"{given.top}, {given.bottom} and {given.draws}"
        raise InputError("eigenvalues or draws to find", got, where="spectrum")
    if given.pairs_out is not None and not given.top + given.bottom:
        raise InputError("--top or --bottom of at least 1", "0", where="--pairs-out")


def run_spectrum(given: SpectrumCommand) -> None:
    """Find, show, save."""
    _check_spectrum(given)
    with process_group(given.device) as own_device:
        problem, _ = load_problem(given, device=own_device)
        seed = given.seed
        pairs: Eigenpairs | None = None
        density: SpectralDensity | None = None
        if given.top + given.bottom:
            where = (given.layer, given.curvature, given.tolerance)
            pairs = eigenpairs(problem, given.top, *where, bottom=given.bottom, seed=seed, memory=given.memory)
        if given.draws:
            density = spectral_density(
                problem, given.draws, given.layer, given.curvature, steps=given.steps, seed=seed, memory=given.memory
            )
        if problem.ranks.rank:
            return  # every rank has the same spectrum; the first one shows it
    results = [result for result in (pairs, density) if result is not None]
    for result in results:
        result.meta.update(network_meta(given))
    note_missing_weights(given.model, given.weights)
    if given.pairs_out is not None and pairs is not None:
        pairs.save(given.pairs_out)
        show_note(f"eigenvalues written to {given.pairs_out}")

    def show() -> None:
        for result in results:
            show_grid(*result.cells())

    def as_json() -> str:
        return json.dumps({result.WORD: json.loads(result.to_json()) for result in results}, indent=1)

    write_and_show_result(density or results[0], given, show, page=results, as_json=as_json)
