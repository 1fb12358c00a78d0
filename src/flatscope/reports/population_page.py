"""A population on the page: what goes along with the gap, scatters of the closest measures, all correlations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from flatscope.formatting import first_of_names, numbered, written
from flatscope.reports.markup import Cell, Colours, PagePart, Section, answer_and_list, badge, breakable, element, table
from flatscope.reports.measured import INVARIANCE_WORDS, MANY, invariance_of_measure
from flatscope.reports.plots import (
    COLOURS,
    Plot,
    figure_from_axes_function,
    first_plot_for_top,
    is_better_on_log_axis,
    legend_above,
    plot_card,
    scale_axis,
    shortened_name,
)
from flatscope.training.populations.population_frame import (
    CONFIDENCE,
    MOST_LEVELS,
    MeasureStatistics,
    PopulationFrame,
    colour_column,
    network_names,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from flatscope.stats import Estimate

MARKERS = "os^DvPp"  # one per level beside its colour, so that no level is told by colour alone
SCATTERS = 8  # measures with a scatter of their own
ROW = 0.17  # inches of a measure in the figure of all correlations
MOST_NAMED = 5


def populations_part(populations: Mapping[str, PopulationFrame], colours: Colours) -> PagePart:
    """For every population its scatters and the table of correlations."""
    sections, answers, top = [], [], Markup("")
    for n, (name, population) in enumerate(populations.items()):
        plots = list(population_plots({name: population}, colours))
        scatters = plots[1:]
        answers += [element("h3", name)] if len(populations) > 1 else []
        answers.append(answer_and_list(population_sentences(population, population.statistics)))
        top = top or first_plot_for_top(scatters)
        title = "Population" if len(populations) == 1 else f"Population: {name}"
        gist = f"{numbered(len(population), 'network')}, {numbered(len(population.measures), 'measure')}"
        body = (
            _scatter_chooser(n, scatters)
            + element("div", plot_card(plots[0]), class_="charts")
            + _correlations_table(n, name, population)
        )
        sections.append(Section(f"population-{n}" if n else "population", title, body, gist))
    provenance = {f"{name}, population": dict(p.meta or {}) | {"networks": len(p)} for name, p in populations.items()}
    return PagePart(Markup("").join(answers), sections, provenance, picture=top)


def _scatter_chooser(n: int, scatters: Sequence[Plot]) -> Markup:
    """The scatters, of which the script shows one at a time."""
    if not scatters:
        return Markup("")
    options = [element("option", plot.title) for plot in scatters]
    label = element("label", "Measure ", element("select", *options, id=f"scatter-{n}"), class_="tools", hidden="")
    return element("div", label, element("div", *map(plot_card, scatters), class_="charts"), class_="chooser")


def _correlations_table(n: int, name: str, population: PopulationFrame) -> Markup:
    """Every measure with all its correlations."""
    kinds: dict[str, Callable[[MeasureStatistics], Estimate | None]]
    kinds = {"Pearson": lambda s: s.pearson, "Spearman": lambda s: s.spearman, "Kendall": lambda s: s.kendall}
    if population.parameters:
        kinds["Settings fixed"] = lambda s: s.partial
    rows = []
    for entry in population.statistics:
        stands = invariance_of_measure(entry.entry)
        word, kind = INVARIANCE_WORDS[stands]
        source = entry.entry.citation if entry.entry else ""
        rows.append(
            [
                Cell(element("span", breakable(entry.measure), class_="name"), entry.measure),
                *(_correlation_cell(correlation_of(entry)) for correlation_of in kinds.values()),
                Cell(_p_value_in_words(entry.adjusted), "" if math.isnan(entry.adjusted) else repr(entry.adjusted)),
                Cell(badge(word, kind), str(list(INVARIANCE_WORDS).index(stands))),
                Cell(source, source, "source"),
            ]
        )
    fixed = (
        f"Settings fixed: Spearman’s correlation of what is left of both when {', '.join(population.parameters)} are "
        "accounted for. "
        if population.parameters
        else ""
    )
    note = (
        f"Intervals of {100 * CONFIDENCE:g}\u202f% over resampled networks. {fixed}p, adjusted: of Kendall’s tau, by "
        f"Holm’s method for {len(rows)} measures tried. A correlation says that two things go together in this "
        "population, not that one causes the other."
    )
    return Markup("").join(
        (
            element("h3", f"All measures against {population.target}", class_="table-name"),
            table(
                f"Correlations of the measures of {name} with {population.target}. Column headers sort.",
                ["Measure", *kinds, "p, adjusted", "Rescaling", "Source"],
                rows,
                class_="measures correlations",
                id_=f"population-table-{n}",
                sorts=["text", *["number"] * (len(kinds) + 2), "text"],
                invariances=[invariance_of_measure(entry.entry) for entry in population.statistics],
                tall=len(rows) > MANY,
            ),
            element("p", note, class_="quiet note"),
        )
    )


def _correlation_cell(estimate: Estimate | None) -> Cell:
    value, _, interval = estimate_in_words(estimate).partition(" ")
    known = estimate is not None and not math.isnan(estimate.value)
    notes = [text for text in (interval, estimate.note if estimate is not None else "") if text]
    shown = element("span", value, class_="value") + Markup("").join(element("small", text) for text in notes)
    return Cell(shown, f"{estimate.value:.6f}" if known and estimate is not None else "", "correlate")


def _p_value_in_words(p: float) -> str:
    return "n/a" if math.isnan(p) else "< 0.0001" if p < 0.0001 else f"{p:.2g}"


def estimate_in_words(estimate: Estimate | None) -> str:
    """`0.62 [0.31, 0.81]`."""
    if estimate is None or math.isnan(estimate.value):
        return "n/a"
    text = f"{estimate.value:.2f}"
    if not math.isnan(estimate.low):
        text += f" [{estimate.low:.2f}, {estimate.high:.2f}]"
    return text.replace("-", "−")


def population_sentences(population: PopulationFrame, statistics: list[MeasureStatistics]) -> list[str]:
    """Sentences on what the population shows and how far that can be trusted."""
    valued = [entry for entry in statistics if math.isfinite(entry.kendall.value)]
    target = population.frame[population.target]
    size = (
        f"{numbered(len(population), 'network')}; {population.target} from {written(float(target.min()), 3)} to "
        f"{written(float(target.max()), 3)}."
    )
    if not valued:
        return [size, "No measure varies over them, so nothing can be said about any."]
    clear = [entry for entry in valued if entry.adjusted < 1 - CONFIDENCE]
    best = valued[0]
    invariant = next((entry for entry in valued if invariance_of_measure(entry.entry) == "all"), None)
    tau = estimate_in_words(best.kendall)
    closest = f"{best.measure} goes along with {population.target} most closely: Kendall’s tau {tau}"
    if invariant is not None and invariant is not best:
        closest += f"; of the invariant measures {invariant.measure}: {estimate_in_words(invariant.kendall)}"
    sentences = [f"{closest}. {size}"]
    if not clear:
        none = (
            f"None of {len(valued)} measures has an association that chance would hardly give when so many are tried "
            f"(Holm-adjusted p < {1 - CONFIDENCE:.2g}): take more networks, or settings that change how well they "
            "generalize."
        )
        sentences = [none, f"The closest of them: {closest}. {size}"]
    else:
        sentences.append(
            f"{len(clear)} of {numbered(len(valued), 'measure')} {'has' if len(clear) == 1 else 'have'} an association "
            "that chance would hardly give even once when so many are tried "
            f"(Holm-adjusted p < {1 - CONFIDENCE:.2g}){_associations_left_in_words(population, clear)}."
        )
    against = [e.measure for e in clear if e.entry and _contradicts_expected_direction(e)]
    if against:
        sentences.append(f"Against the direction that their source expects: {first_of_names(against, MOST_NAMED)}.")
    missing = [entry.measure for entry in statistics if entry not in valued]
    if missing:
        sentences.append(f"Without a correlation, for lack of values that vary: {first_of_names(missing, MOST_NAMED)}.")
    return sentences


def _associations_left_in_words(population: PopulationFrame, clear: list[MeasureStatistics]) -> str:
    """Number of associations that are left when the settings are held fixed, in words."""
    if not population.parameters:
        return ""
    kept = [e for e in clear if e.partial and not math.isnan(e.partial.low) and e.partial.low * e.partial.high > 0]
    fixed = f"when {', '.join(population.parameters)} are held fixed"
    if len(clear) == 1:
        return f"; it {'remains' if kept else 'does not remain'} {fixed}"
    how_many = "all" if len(kept) == len(clear) else "none" if not kept else str(len(kept))
    return f"; {how_many} of these remain {fixed}"


def _contradicts_expected_direction(entry: MeasureStatistics) -> bool:
    """True if a larger gap goes with values that the source calls better."""
    assert entry.entry is not None
    sign = {"lower": 1, "higher": -1}.get(entry.entry.direction, 0)
    return sign * entry.kendall.value < 0


def population_plots(populations: Mapping[str, PopulationFrame], _: Colours) -> Iterator[Plot]:
    """The correlations of all measures, then the scatter of the closest ones."""
    for name, population in populations.items():
        statistics = population.statistics
        shown = [entry for entry in statistics if np.isfinite(entry.kendall.value)]

        def correlations(ax: Axes, shown: list[MeasureStatistics] = shown) -> None:
            taus = np.array([[e.kendall.value, e.kendall.low, e.kendall.high] for e in shown]).reshape(-1, 3)
            ends = np.nan_to_num(np.abs(taus[:, 1:] - taus[:, :1]).T)
            ax.errorbar(
                taus[:, 0], range(len(shown)), xerr=ends, fmt="o", color=COLOURS[0], markersize=3.5, elinewidth=1
            )
            ax.axvline(0, color="#333333", linewidth=1)
            ax.set_yticks(range(len(shown)), [shortened_name(entry.measure, 30) for entry in shown], fontsize=8)
            ax.set_ylim(max(len(shown), 1) - 0.5, -0.5)
            ax.set_xlim(-1, 1)
            scale_axis(ax.xaxis, "Kendall’s tau")

        yield Plot(
            f"{name}-correlations",
            f"Kendall’s tau with {population.target}",
            f"Every measure with its {100 * CONFIDENCE:g}\u202f% interval, the closest association on top.",
            figure_from_axes_function(correlations, height=1.0 + ROW * len(shown)),
        )
        colour_by = colour_column(population)
        for entry in shown[:SCATTERS]:
            yield _scatter_plot(name, population, entry, colour_by)


def _scatter_plot(
    name: str, population: PopulationFrame, entry: MeasureStatistics, colour_by: pd.Series[Any] | None
) -> Plot:
    """One mark per network, coloured and shaped by a setting; pointing at a mark names the network."""
    x = population.frame[entry.measure].to_numpy(dtype="float64")
    y = population.frame[population.target].to_numpy(dtype="float64")
    names = np.array(network_names(population), dtype=object)
    style: dict[str, Any] = {"s": 20, "alpha": 0.75, "linewidths": 0}
    known = np.isfinite(x) & np.isfinite(y)

    def draw_marks(ax: Axes, rows: Any, **look: Any) -> Any:
        drawn = ax.scatter(x[rows], y[rows], **style, **look)
        drawn.set_urls(list(names[rows]))
        return drawn

    def draw(ax: Axes) -> None:
        if colour_by is None:
            draw_marks(ax, known, color=COLOURS[0])
        elif colour_by.nunique() <= MOST_LEVELS:
            codes, levels = pd.factorize(colour_by, sort=True)
            for n, level in enumerate(levels):
                label = level if isinstance(level, str) else f"{level:g}"
                draw_marks(ax, known & (codes == n), color=COLOURS[n], marker=MARKERS[n], label=shortened_name(label))
            draw_marks(ax, known & (codes < 0), color=COLOURS[-1])
            title = shortened_name(str(colour_by.name), 30)
            legend_above(ax, columns=4, title=title, title_fontsize=9, handletextpad=0.1)
        else:
            drawn = draw_marks(ax, known, c=colour_by.to_numpy(dtype="float64")[known], cmap="viridis")
            bar = ax.figure.colorbar(drawn, ax=ax)
            scale_axis(bar.ax.yaxis, shortened_name(str(colour_by.name), 30))
        for axis, title, values in ((ax.xaxis, shortened_name(entry.measure, 40), x), (ax.yaxis, population.target, y)):
            scale_axis(axis, title, values.tolist(), log=is_better_on_log_axis(values.tolist()))

    columns = [*(population.parameters or ()), population.target, entry.measure]
    return Plot(
        f"{name}-{entry.measure}",
        entry.measure,
        f"{population.target} over {entry.measure}, one mark per network. "
        f"Spearman {estimate_in_words(entry.spearman)}, Kendall {estimate_in_words(entry.kendall)}; "
        f"{numbered(entry.kendall.n, 'network')}.",
        figure_from_axes_function(draw, height=3.3),
        ["network", *columns],
        [
            [str(names[n]), *(_setting_in_words(population.frame[column].iloc[n]) for column in columns)]
            for n in range(len(names))
        ],
    )


def _setting_in_words(value: Any) -> str:
    if isinstance(value, (float, np.floating)):
        return written(float(value))
    return "n/a" if pd.isna(value) else str(value)
