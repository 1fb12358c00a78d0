"""`flatscope landscape`: loss and error on a line or a plane through a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatscope.cli.options import NetworkOptions
from flatscope.cli.output import check_folder, check_place, command_line, network_meta, note_missing_weights, show_grid
from flatscope.errors import InputError
from flatscope.formatting import numbered

if TYPE_CHECKING:
    from flatscope.landscapes import Surface

# What loads torch is imported inside the commands: their help, and a slip in one, should not take seconds.


def landscape(
    network: NetworkOptions,
    space: Annotated[str, typer.Option(help="weights, or psi: the same for every way of writing the function.")] = (
        "weights"
    ),
    directions: Annotated[str, typer.Option(help="gaussian, filter or hessian.")] = "gaussian",
    to: Annotated[
        Path | None, typer.Option(help="Weights of another network of the same model: the way to it is the direction.")
    ] = None,
    grid: Annotated[int, typer.Option(help="Points per axis, an odd number.")] = 41,
    span: Annotated[float, typer.Option(help="Coordinates run from -span to span.")] = 1.0,
    dimensions: Annotated[int, typer.Option(help="1 for a line, 2 for a plane.")] = 2,
    part: Annotated[str, typer.Option(help="train or test samples.")] = "train",
    noise: Annotated[float, typer.Option(help="Length of a direction over the root of the number of entries.")] = 0.05,
    relative: Annotated[
        bool, typer.Option("--relative", help="Length in units of the weights' norm; in psi, of each value itself.")
    ] = False,
    rule: Annotated[str, typer.Option(help="Skeleton of the paths: max_product, cyclic or diagonal.")] = "max_product",
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder that keeps finished rows: the same command goes on where it stopped.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the surface as JSON, nothing else on stdout.")] = False,
    out: Annotated[
        list[Path] | None, typer.Option(help="Write .npz, .parquet, .csv, .png, .svg, .pdf or .html; repeatable.")
    ] = None,
) -> None:
    """Draw the loss around a network, in weight space or in path space, where rescaling cannot change the picture."""
    from flatscope.cli.sources import load_model, load_problem, parse_model_options
    from flatscope.landscapes import Surface
    from flatscope.landscapes.making import landscape as draw_landscape
    from flatscope.reports.page import report

    for path in out or ():
        check_place(path, (*Surface.ENDINGS, ".html"))
    if checkpoint is not None:
        check_folder(checkpoint)
    if to is not None and directions != "gaussian":
        raise InputError("either --directions or --to", "both", where="landscape")
    options = parse_model_options(network.model_option)
    problem, loaded = load_problem(network)
    surface = draw_landscape(
        problem,
        space,
        directions if to is None else load_model(network.model, to, loaded, network.seed, options),
        grid,
        span,
        network.seed,
        dimensions=dimensions,
        part=part,
        noise=noise,
        relative=relative,
        rule=rule,
        checkpoint=checkpoint,
    )
    surface.meta.update(network_meta(network))
    if as_json:
        typer.echo(_json(surface))
    else:
        show_surface(surface)
    note_missing_weights(network.weights)
    for path in out or ():
        if path.suffix.lower() == ".html":
            report(surface, path, command=command_line())
        else:
            surface.save(path)


def show_surface(surface: Surface) -> None:
    """What there is to say about a landscape without drawing it."""
    from flatscope.formatting import number

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
