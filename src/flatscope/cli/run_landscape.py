"""`flatscope landscape`: loss and error on a line or a plane through a network."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from flatscope.cli.output import check_folder, check_outputs, deliver, note_missing_weights, show_grid
from flatscope.cli.sources import load_model, load_problem, network_meta, parse_model_options
from flatscope.errors import InputError
from flatscope.formatting import number, numbered
from flatscope.landscapes.making import landscape as draw_landscape
from flatscope.landscapes.surface import Surface

if TYPE_CHECKING:
    from flatscope.cli.options import LandscapeCommand


def run_landscape(given: LandscapeCommand) -> None:
    """Evaluate, show, save."""
    check_outputs(given, Surface)
    if given.checkpoint is not None:
        check_folder(given.checkpoint)
    if given.to is not None and given.directions != "gaussian":
        raise InputError("either --directions or --to", "both", where="landscape")
    options = parse_model_options(given.model_option)
    problem, loaded = load_problem(given)
    surface = draw_landscape(
        problem,
        given.space,
        given.directions if given.to is None else load_model(given.model, given.to, loaded, given.seed, options),
        given.grid,
        given.span,
        given.seed,
        dimensions=given.dimensions,
        part=given.part,
        noise=given.noise,
        relative=given.relative,
        rule=given.rule,
        checkpoint=given.checkpoint,
    )
    surface.meta.update(network_meta(given))
    note_missing_weights(given.weights)
    deliver(surface, given, lambda: show_surface(surface), as_json=lambda: _json(surface))


def show_surface(surface: Surface) -> None:
    """What there is to say about a landscape without drawing it."""
    low, high = surface.heights
    size = "×".join(str(len(axis)) for axis in surface.axes)
    rows = [
        ["space", surface.space + (f", rule {surface.meta['rule']}" if surface.space == "psi" else "")],
        ["directions", f"{surface.directions}, length " + ", ".join(number(x) for x in surface.meta["lengths"])],
        ["grid", f"{size}, {numbered(int(surface.poles.sum()), 'point')} across poles"],
        [f"{surface.meta['part']} loss at the network", number(surface.centre)],
        ["lowest and highest", f"{number(low)} … {number(high)}"],
    ]
    if surface.error is not None and surface.meta["centre_error"] is not None:
        finite = surface.error[surface.error.isfinite()]
        rows.append([f"{surface.meta['part']} error at the network", number(surface.meta["centre_error"])])
        if len(finite):
            rows.append(["lowest and highest", f"{number(float(finite.min()))} … {number(float(finite.max()))}"])
    show_grid(["landscape", ""], rows)


def _json(surface: Surface) -> str:
    """Axes, loss and error; null where there is no value."""
    content = {
        "space": surface.space,
        "directions": surface.directions,
        "centre": surface.centre,
        "axes": [axis.tolist() for axis in surface.axes],
        "loss": _plain(surface.loss.tolist()),
        "error": None if surface.error is None else _plain(surface.error.tolist()),
        "poles": surface.poles.tolist(),
        "meta": surface.meta,
    }
    return json.dumps(content, default=str)


def _plain(values: list[object]) -> list[object]:
    """Numbers that JSON can hold; null for NaN, a word for infinity."""
    found: list[object] = []
    for value in values:
        if isinstance(value, list):
            found.append(_plain(value))
        else:
            assert isinstance(value, float)
            found.append(None if value != value else value if abs(value) != float("inf") else str(value))
    return found
