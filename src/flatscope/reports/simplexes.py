"""Mixtures of networks on the page: loss along a line, or over a triangle with a network at each corner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from markupsafe import Markup

from flatscope.formatting import written
from flatscope.interpolation import CORNERS, Simplex
from flatscope.reports.charts import Chart, Colours, PlotLine, line_plot
from flatscope.reports.figure_data import Scale, wants_log
from flatscope.reports.markup import Part, Section, element, fragment
from flatscope.reports.surfaces import colour_key, ramp_colour

SIDE, MARGIN = 360, 26  # pixels at full size
MOST_ROWS = 40  # of the table that stands for the picture


def simplexes_part(simplexes: Mapping[str, Simplex], _: Colours) -> Part:
    """One figure per interpolation, and whether a barrier lies between the networks."""
    notes = [(name, simplex_words(simplex)) for name, simplex in simplexes.items()]
    body = fragment("charts.html", charts=[_chart(name, simplex) for name, simplex in simplexes.items()], wide=False)
    summary = fragment("simplex_summary.html", notes=notes)
    provenance = {f"{name}, interpolation": simplex.meta for name, simplex in simplexes.items()}
    return Part(summary, [Section("interpolation", "Interpolation", body)], provenance)


def simplex_words(simplex: Simplex) -> str:
    """Losses at the networks, and the barrier between them."""
    corners = [float(simplex.loss[n]) for n in simplex.vertices]
    words = f"Loss {', '.join(written(loss, 3) for loss in corners)} at the networks; "
    if not np.isfinite(simplex.loss.numpy()).all():
        return words + "some mixtures have no finite loss."
    if simplex.barrier <= 1e-3 * max(map(abs, corners)):
        return words + "no barrier between them: no mixture has more loss than the networks mixed in it."
    return words + f"between them a barrier of {written(simplex.barrier, 3)}."


def _chart(name: str, simplex: Simplex) -> Chart:
    values = simplex.loss.numpy()
    finite = values[np.isfinite(values)]
    log = wants_log(finite.tolist())
    if simplex.weights.shape[1] == 2:
        known = np.isfinite(values)
        line = PlotLine(simplex.weights[:, 1].numpy()[known].tolist(), finite.tolist(), "line c0")
        body = (
            line_plot([line], f"Loss between two networks. {simplex_words(simplex)}", log_y=log) if len(finite) else ""
        )
        caption = "From the first network (0) to the second (1)"
    else:
        low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
        scale = Scale(low, high if high > low else low + max(abs(low), 1.0), log)
        key = element("div", element("span", "Loss"), colour_key(scale), class_="height-key")
        body = Markup("").join((key, _triangle(simplex, scale)))
        caption = "A network at each corner; every point is the mixture of their weights by its nearness to the corners"
    every = max(1, -(-len(values) // MOST_ROWS))
    shown = sorted({*range(0, len(values), every), *simplex.vertices})
    accuracy = simplex.accuracy
    return Chart(
        title=name,
        caption=f"{caption}{', logarithmic scale' if log else ''}. {simplex_words(simplex)}",
        legend=[],
        body=Markup(body),
        header=["mixture", "loss", *(["accuracy"] if accuracy is not None else [])],
        rows=[
            [
                " + ".join(f"{share:.3g}" for share in simplex.weights[n].tolist()),
                written(float(values[n])),
                *([f"{100 * float(accuracy[n]):.3g}\u202f%"] if accuracy is not None else []),
            ]
            for n in shown
        ],
    )


def _triangle(simplex: Simplex, scale: Scale) -> Markup:
    """Small triangles in the colour of their mean loss; those without a finite one are left striped."""
    places = {tuple(key): n for n, key in enumerate(_counts(simplex).tolist())}
    points = simplex.positions.numpy() * SIDE
    height = CORNERS[2][1] * SIDE
    loss = simplex.loss.numpy()
    shapes: list[Markup] = []
    holes = False
    for (a, b, c), first in places.items():
        # Upward from this point, and downward beside it, where the lattice has them.
        up = (first, places.get((a - 1, b + 1, c)), places.get((a - 1, b, c + 1)))
        down = (places.get((a - 1, b + 1, c)), places.get((a - 1, b, c + 1)), places.get((a - 2, b + 1, c + 1)))
        for corners in (up, down):
            if None in corners:
                continue
            known: list[Any] = list(corners)
            mean = float(loss[known].mean())
            holes |= not np.isfinite(mean)
            if np.isfinite(mean):
                path = "M" + "L".join(f"{points[n, 0]:.1f} {height - points[n, 1]:.1f}" for n in known) + "Z"
                colour = ramp_colour(scale(mean))
                shapes.append(element("path", d=path, fill=colour, stroke=colour, class_="mixture"))
    corners_of = [(x * SIDE, height - y * SIDE) for x, y in CORNERS]
    ground = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in corners_of) + "Z"
    below = (
        [element("path", d=ground, class_="ground"), element("path", d=ground, fill="url(#stripes)")] if holes else []
    )
    labels = [
        element("text", f"network {n}", x=x, y=y + (18 if y else -8), text_anchor=("start", "end", "middle")[n - 1])
        for n, (x, y) in enumerate(corners_of, start=1)
    ]
    box = f"{-MARGIN / 2} {-MARGIN} {SIDE + MARGIN} {height + 2 * MARGIN:.0f}"
    label = f"Loss over mixtures of three networks. {simplex_words(simplex)}"
    return element("svg", *below, *shapes, *labels, viewBox=box, class_="map", role="img", aria_label=label)


def _counts(simplex: Simplex) -> np.ndarray[Any, Any]:
    """The mixtures as whole numbers of steps, whose sum is the resolution."""
    weights = simplex.weights.numpy()
    smallest = weights[weights > 1e-12].min()
    return np.asarray(np.rint(weights * round(1 / smallest)), dtype=np.int64)
