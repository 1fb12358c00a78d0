"""An atlas on the page: what turns, curves to choose and read off, every measure in numbers."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from flatscope.formatting import as_percent, numbered, printable_text, written
from flatscope.reports.markup import (
    Cell,
    Colours,
    PagePart,
    Section,
    answer_and_list,
    breakable,
    element,
    table,
    text_of_package_file,
)
from flatscope.reports.plots import (
    COLOURS,
    Plot,
    figure_from_axes_function,
    first_plot_for_top,
    is_better_on_log_axis,
    legend_above,
    scale_axis,
    shortened_name,
)
from flatscope.training.populations.atlas_curves import (
    AXES,
    KINDS,
    MANY,
    Atlas,
    CurvePoint,
    axis_value_in_words,
    interval_in_words,
    level_in_words,
    places_between_in_words,
    signed_number,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DRAWN = 6  # measures that a static figure tells apart by colour; the script repeats colours with other dashes
FINE = 100_000  # parts of one in which the script gets numbers, so that it rounds as the page does
ADVICE = (
    "The shaded band is the {level} interval of each point by itself, over resampled networks. The wide one holds for "
    "all measures and points of the chosen panel at once: a sign is settled where it excludes zero, a turn where it "
    "does so on both sides. At a level of loss or accuracy each network counts as it was at its first look there or "
    "beyond. Networks that never get there are out, so a curve may bend because other networks are left. Pearson’s "
    "intervals are too short where a few values are far above the others; ranks are not moved by that."
)
KEYS = "Point at the curves to read them off, or focus them and use the arrow keys, Home and End."


def atlases_part(atlases: Mapping[str, Atlas], _: Colours) -> PagePart:
    """Part of the page on correlations in training: sentences, curves with controls, a table of all measures."""
    answers, sections, top = [], [], Markup("")
    for n, (name, atlas) in enumerate(atlases.items()):
        answers += [element("h3", name)] if len(atlases) > 1 else []
        answers.append(answer_and_list(atlas_sentences(atlas)))
        top = top or first_plot_for_top([_scopes_plot(name, atlas)])
        title = "Atlas" if len(atlases) == 1 else f"Atlas: {name}"
        networks = atlas.curve(atlas.names("measure")[0])[0].networks
        gist = f"{numbered(networks, 'network')}, {numbered(len(atlas.names('measure')), 'measure')}"
        sections.append(
            Section(
                f"atlas-{n}" if n else "atlas", title, _atlas_chart(n, atlas) + _atlas_overview_table(name, atlas), gist
            )
        )
    provenance = {f"{name}, atlas": atlas.meta for name, atlas in atlases.items()}
    style, script = (text_of_package_file(f"atlas.{ending}", package=__package__) for ending in ("css", "js"))
    return PagePart(Markup("").join(answers), sections, provenance, picture=top, style=style, script=script)


def atlas_sentences(atlas: Atlas) -> list[str]:
    """The first measure's curve, how many others turn, what is left within groups, who is in, how much is shown."""
    measures, target = atlas.names("measure"), atlas.meta.get("target", "the gap")
    said = [atlas.sentence(measures[0]), _sign_changes_in_words(atlas, atlas.names("scope")[0], target)]
    said += [
        _sign_changes_in_words(atlas, scope, target) for scope in atlas.names("scope") if scope.startswith("within ")
    ]
    said += [
        words for axis in atlas.names("axis") if axis != "epoch" and (words := _networks_left_in_words(atlas, axis))
    ]
    sizes = {column: len(atlas.names(column)) for column in ("kind", "scope", "axis")}
    curves, points = len(measures) * math.prod(sizes.values()), len(atlas.to_frame())
    said.append(
        f"This page holds {curves} curves with {written(points)} points ({numbered(len(measures), 'measure')}, "
        f"{numbered(sizes['kind'], 'kind')} of correlation, {numbered(sizes['scope'], 'choice')} of networks, along "
        f"{', '.join(MANY[axis] for axis in atlas.names('axis'))}): some look striking by chance. No "
        "point was picked for a sentence: each is about first and last points and about turns."
    )
    return said + [f"{note}." for note in atlas.meta.get("notes", ())]


def _sign_changes_in_words(atlas: Atlas, scope: str, target: str) -> str:
    """Number of measures whose correlation changes sign along the epochs, and the signs at the end."""
    measures = atlas.names("measure")
    turned = [measure for measure in measures if atlas.turns(measure, scope=scope)]
    ends = Counter(atlas.curve(measure, scope=scope)[-1].settled for measure in measures)
    words = f"{numbered(len(measures), 'measure')} {'has' if len(turned) == 1 else 'have'} a settled turn"
    signs = {1: "positive", -1: "negative", 0: "not settled"}
    shares = ", ".join(f"{ends[sign]} {called}" for sign, called in signs.items() if ends[sign])
    along = f"{scope[:1].upper()}{scope[1:]}, along the {MANY[atlas.names('axis')[0]]}"
    return f"{along}: {len(turned)} of {words}; correlations with {target} at the end: {shares}."


def _networks_left_in_words(atlas: Atlas, axis: str) -> str:
    """Who is left at the last level of an axis, by the values of the settings."""
    measure = atlas.names("measure")[0]
    last = atlas.curve(measure, axis)[-1]
    if last.n == last.networks:
        return ""
    by: dict[str, list[str]] = {}
    for scope in atlas.names("scope"):
        setting, equals, value = scope.partition(" = ")
        if equals:
            point = atlas.curve(measure, axis, scope)[-1]
            by.setdefault(setting, []).append(f"{value}: {point.n} of {point.networks}")
    groups = "".join(f"; by {setting}, {', '.join(parts)}" for setting, parts in by.items())
    share = as_percent(last.n / last.networks)
    return (
        f"At {axis_value_in_words(axis, last.at)}, the last level shown, {last.n} of {last.networks} networks are in, "
        f"{share}{groups}."
    )


def _atlas_chart(n: int, atlas: Atlas) -> Markup:
    """Controls, an empty picture that the script draws into, and where it says what it shows; hidden without it."""
    choices = {
        "Along": ("axis", [AXES[axis] for axis in atlas.names("axis")]),
        "Networks": ("scope", atlas.names("scope")),
        "Correlation": ("kind", [KINDS[kind] for kind in atlas.names("kind")]),
    }
    tools = []
    for words, (key, options) in choices.items():
        listed = [element("option", option, value=k) for k, option in enumerate(options)]
        tools.append(element("label", f"{words} ", element("select", *listed, class_=key)))
    tools.append(element("label", element("input", type="checkbox", class_="wide"), " band for all points at once"))
    boxes = []
    for k, measure in enumerate(atlas.names("measure")):
        named = element("span", class_="swatch") + element("span", breakable(measure), class_="name")
        boxes.append(element("label", element("input", type="checkbox", value=k), named))
    label = f"Correlation of measures with {atlas.meta.get('target', 'the gap')} along training"
    picture = element(
        "svg", class_="chart curves", role="application", aria_roledescription="curves to read off", tabindex=0,
        aria_label=label, aria_describedby=f"atlas-keys-{n}",
    )  # fmt: skip
    chosen = element("fieldset", element("legend", "Measures"), *boxes, class_="measures-shown")
    shown = element("div", picture, element("output", aria_live="polite"), element("ul", class_="findings said"))
    return element(
        "div",
        element("div", *tools, class_="tools"),
        element("div", shown, chosen, class_="beside"),
        element("p", KEYS, class_="quiet words", id=f"atlas-keys-{n}"),
        class_="atlas card",
        data_atlas=json.dumps(_chart_data(atlas), separators=(",", ":")),
        hidden="",
    )


def _chart_data(atlas: Atlas) -> dict[str, Any]:
    """Names and numbers for the script: correlations and reaches on Fisher's scale as whole numbers."""
    measures, kinds, scopes, axes = (atlas.names(column) for column in ("measure", "kind", "scope", "axis"))
    curves, said, factors = [], [], []
    for kind, scope, axis in itertools.product(kinds, scopes, axes):
        own = [atlas.curve(measure, axis, scope, kind) for measure in measures]
        said += [printable_text(atlas.sentence(measure, axis, scope, kind)) for measure in measures]
        wider = [
            _interval_half_width(p.band_low, p.band_high) / _interval_half_width(p.low, p.high)
            for p in itertools.chain(*own)
            if p.low < p.high
        ]
        factors.append(round(float(np.nanmedian(wider)), 4) if wider else 1.0)
        curves += [
            [
                [_scaled_whole_number(point.value) for point in curve],
                [_scaled_whole_number(_interval_half_width(point.low, point.high)) for point in curve],
                [point.n for point in curve],
            ]
            for curve in own
        ]
    return {
        "measures": [printable_text(name) for name in measures],
        "scopes": [printable_text(name) for name in scopes],
        "networks": [atlas.curve(measures[0], scope=scope)[0].networks for scope in scopes],
        "axes": [_axis_points(axis, atlas.curve(measures[0], axis)) for axis in axes],
        "curves": curves, "said": said, "factors": factors, "fine": FINE,
    }  # fmt: skip


def _interval_half_width(low: float, high: float) -> float:
    """Half the width of an interval on Fisher's scale."""
    inside = -1 < low <= high < 1
    return (math.atanh(high) - math.atanh(low)) / 2 if inside else math.nan


def _scaled_whole_number(value: float) -> int | None:
    return round(FINE * value) if math.isfinite(value) else None


def _axis_points(axis: str, curve: Sequence[CurvePoint]) -> dict[str, Any]:
    """Points of an axis: where, how they are called, what the networks there have gone through in the median."""
    at = np.array([point.at for point in curve])
    scale = np.arange(len(at)) if axis == "train_accuracy" else np.log(at) if _axis_is_logarithmic(axis, at) else at
    span = float(scale[-1] - scale[0]) or 1.0
    passed = [
        f"after {written(point.median_epoch, 3)} epochs, training loss {written(point.median_loss, 3)} (medians)"
        if math.isfinite(point.median_loss) else ""
        for point in curve
    ]  # fmt: skip
    return {
        "words": AXES[axis], "labels": [level_in_words(axis, value) for value in at],
        "x": [round(float((value - scale[0]) / span), 4) for value in scale], "passed": passed,
    }  # fmt: skip


def _axis_is_logarithmic(axis: str, at: Any) -> bool:
    return bool((at > 0).all()) and (axis == "train_loss" or is_better_on_log_axis(at.tolist()))


def _atlas_overview_table(name: str, atlas: Atlas) -> Markup:
    """Every measure among all networks and within groups: first and last point of the epochs, and turns."""
    scopes = [scope for scope in atlas.names("scope") if " = " not in scope]
    rows = [
        [
            element("span", breakable(measure), class_="name"),
            *(_first_and_last_correlation_cell(atlas, measure, scope) for scope in scopes),
        ]
        for measure in atlas.names("measure")
    ]
    axis, curve = atlas.names("axis")[0], atlas.curve(atlas.names("measure")[0])
    ends = f"{axis_value_in_words(axis, curve[0].at)} → {axis_value_in_words(axis, curve[-1].at)}"
    label = f"Correlations of {name} with {atlas.meta.get('target', 'the gap')} along training"
    level = as_percent(atlas.confidence)
    return Markup("").join(
        (
            element("p", ADVICE.format(level=level), class_="quiet note"),
            element("h3", f"All measures, {KINDS[atlas.names('kind')[0]]}, {ends}", class_="table-name"),
            table(label, ["Measure", *scopes], rows, class_="measures correlations"),
        )
    )


def _first_and_last_correlation_cell(atlas: Atlas, measure: str, scope: str) -> Cell:
    first, last = (atlas.curve(measure, scope=scope)[end] for end in (0, -1))
    turns, axis = atlas.turns(measure, scope=scope), atlas.names("axis")[0]
    words = "; ".join(f"turns between {places_between_in_words(axis, a, b)}" for a, b in turns) or "no settled turn"
    value = element("span", f"{signed_number(first.value)} → {signed_number(last.value)}", class_="value")
    ends = element("small", f"{interval_in_words(first)} → {interval_in_words(last)}".strip(" →"))
    return Cell(value + ends + element("small", words), class_="correlate")


def atlas_plots(atlases: Mapping[str, Atlas], _: Colours) -> Iterator[Plot]:
    """The first measure within groups; then, for every axis, the first measures among all networks."""
    for name, atlas in atlases.items():
        yield _scopes_plot(name, atlas)
        for axis in atlas.names("axis"):
            shown = atlas.names("measure")[:DRAWN]
            lines = {measure: atlas.curve(measure, axis) for measure in shown}
            words = f"{KINDS[atlas.names('kind')[0]]} with {atlas.meta.get('target', 'the gap')} along the {AXES[axis]}"
            yield _plot_of_curves(
                f"{name}-{axis}", words, "Among all networks; shaded: interval of the first.", axis, lines
            )


def _scopes_plot(name: str, atlas: Atlas) -> Plot:
    measure = atlas.names("measure")[0]
    scopes = [scope for scope in atlas.names("scope") if " = " not in scope]
    lines = {scope: atlas.curve(measure, scope=scope) for scope in scopes}
    level = as_percent(atlas.confidence)
    caption = f"{KINDS[atlas.names('kind')[0]]}; shaded: {level} interval among all networks, of each point by itself."
    axis = atlas.names("axis")[0]
    words = f"{measure} with {atlas.meta.get('target', 'the gap')}, along the {MANY[axis]}"
    return _plot_of_curves(f"{name}-within", words, caption, axis, lines)


def _plot_of_curves(stem: str, title: str, caption: str, axis: str, lines: Mapping[str, Sequence[CurvePoint]]) -> Plot:
    """Curves over an axis, the first with its intervals."""
    first = next(iter(lines.values()))
    at = np.array([point.at for point in first])
    places = np.arange(len(at)) if axis == "train_accuracy" else at

    def draw(ax: Axes) -> None:
        ax.axhline(0, color="#bbbbbb", linewidth=1)
        ends = [point.low for point in first], [point.high for point in first]
        ax.fill_between(places, *ends, color=COLOURS[0], alpha=0.18, linewidth=0)
        for n, (label, curve) in enumerate(lines.items()):
            style, values = "-" if n < 2 else "--" if n < 4 else ":", [point.value for point in curve]
            ax.plot(places, values, style, color=COLOURS[n % len(COLOURS)], label=shortened_name(label, 26))
        ax.set_ylim(-1, 1)
        scale_axis(ax.yaxis, "correlation")
        scale_axis(ax.xaxis, AXES[axis], at.tolist(), log=_axis_is_logarithmic(axis, at))
        if axis == "train_accuracy":
            few = list(range(0, len(at), max(1, len(at) // 4)))
            ax.set_xticks(few, [level_in_words(axis, at[k]) for k in few])
        if axis == "train_loss":
            ax.invert_xaxis()
        legend_above(ax)

    rows = [
        [level_in_words(axis, at[k]), *(signed_number(curve[k].value) for curve in lines.values()), written(first[k].n)]
        for k in range(len(at))
    ]
    return Plot(stem, title, caption, figure_from_axes_function(draw), [AXES[axis], *lines, "networks"], rows)
