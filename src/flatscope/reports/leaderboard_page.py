"""A leaderboard on the page: which measures rank networks as generalization does, by every score, with intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from flatscope.comparing.records import DIFFERENCES, RANKING, Record, records_by_measure
from flatscope.formatting import first_of_names, numbered
from flatscope.registry import declarations
from flatscope.reports.markup import (
    Cell,
    Colours,
    PagePart,
    Section,
    answer_and_list,
    badge,
    breakable,
    bullet_list,
    element,
    table,
)
from flatscope.reports.measured import INVARIANCE_WORDS, invariance_of_measure
from flatscope.reports.plots import (
    COLOURS,
    Plot,
    figure_from_axes_function,
    first_plot_for_top,
    legend_above,
    scale_axis,
    shortened_name,
)
from flatscope.training.benchmarking.leaderboard_result import RELEASED, Leaderboard
from flatscope.training.benchmarking.recipe import MOST_EPOCHS, SETTINGS, STOPS
from flatscope.training.benchmarking.scores import CONTROLS, SCORES, score_in_words, score_number
from flatscope.training.populations.population_frame import base_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXPLAINED = {**CONTROLS, RANKING: "vote of all that count, chosen on one data set and scored on the other"}
ALWAYS = ("rho_sum", "hessian_trace", "psi_trace")  # in the picture wherever they are in the order
TITLES = {
    "tau": "τ",
    "psi": "Ψ",
    "information": "Information",
    "worst_error": "Worst error",
    "survival": "Survival",
    "tau_rescaled": "τ, rescaled",
}
DRAWN, ROW = 16, 0.3  # measures in the picture, and inches of each
MARKERS = "osD^"
JOIN = "flatscope benchmark my.py:function --networks 64 --report leaderboard.html"


def leaderboards_part(boards: Mapping[str, Leaderboard], colours: Colours) -> PagePart:
    """The order of the measures, and below it all scores on each data set at each stop."""
    sections, answers, top = [], [], Markup("")
    for n, (name, board) in enumerate(boards.items()):
        plots = list(leaderboard_plots({name: board}, colours))
        top = top or first_plot_for_top(plots)
        answers += [element("h3", name)] if len(boards) > 1 else []
        answers.append(answer_and_list(leaderboard_sentences(board)))
        more = f"-{n}" if n else ""
        body = _ranking_table(board, more) + _scores_by_difference_table(board, more) + _explanation_of_columns(board)
        gist, which = numbered(len(board.names), "measure"), f": {name}" if len(boards) > 1 else ""
        sections.append(Section(f"leaderboard{more}", f"Leaderboard{which}", body, gist, open=not n))
        for place, (data, stop) in enumerate(board.populations):
            shown = f"{data}, training loss {stop:g}{which}"
            scores = _scores_table(board, data, stop, f"{more}-{place}")
            sections.append(Section(f"scores{more}-{place}", shown, scores, "every score with its interval"))
    provenance = {f"{name}, {board.WORD}": board.meta for name, board in boards.items()}
    return PagePart(Markup("").join(answers), sections, provenance, picture=top)


def leaderboard_sentences(board: Leaderboard) -> list[str]:
    """Which measure is best, which are no better than chance, and how many networks say so."""
    ranked = [name for name in board.names if name not in CONTROLS and not math.isnan(board.mean(name, "psi"))]
    if not ranked:
        return ["No measure has a score on these networks."]
    firm = [name for name in ranked if board.mean(name, "survival") > 0.99]
    best = (
        f"{ranked[0]} ranks networks most as the gap does: Ψ = {score_number(board.mean(ranked[0], 'psi'))} on average"
    )
    if firm and firm[0] != ranked[0]:
        best += f"; of those that no rescaling moves {firm[0]}: {score_number(board.mean(firm[0], 'psi'))}"
    networks, missed = board.meta.get("networks", "?"), board.meta.get("not reached", {})
    told_missed = ", ".join(f"{count} did not reach {stop}" for stop, count in missed.items() if count)
    sentences = [
        *_own_measures_in_words(board, ranked),
        f"{best}.",
        f"{networks} networks" + (f", of which {told_missed}." if told_missed else "."),
    ]
    known = declarations()
    ordered = [name for name in ranked if base_name(name) in known and known[base_name(name)].direction != "none"]
    wrong = [name for name in ordered if all(_sign_of_clear_score(board, name, *key) < 0 for key in board.populations)]
    if wrong:
        sentences.append(
            "Significantly correlated in the wrong direction, on every data set at every training loss: "
            f"{first_of_names(wrong, 8)}."
        )
    if board.meta.get("networks") == RELEASED:
        sentences += _ranked_pairs_in_words(board)
    elif board.meta.get("own") or board.meta.get("data"):
        sentences.append("Fewer networks than the released 1,024: do not put these Ψ beside theirs.")
    return sentences


def _own_measures_in_words(board: Leaderboard, ranked: Sequence[str]) -> list[str]:
    """Sentences on the user's own measures, the last one first: place, Ψ, and how they rank pairs."""
    sentences: list[str] = []
    for own in reversed(board.meta.get("own", [])):
        if own in ranked:
            psi = score_number(board.mean(own, "psi"))
            place = f"place {ranked.index(own) + 1} of {len(ranked)}, Ψ = {psi}"
            sentences.append(f"{own}: {place}.{_better_than_random_numbers_in_words(board, own)}")
        else:
            sentences.append(f"{own}: no score.")
        if pairs := board.meta.get("pairs", {}).get(own):
            sentences.append(f"{own} by what two networks differ in: {pairs}.")
    return sentences


def _ranked_pairs_in_words(board: Leaderboard) -> list[str]:
    """A sentence on how the two best known measures ranked pairs of released networks; none where both are missing."""
    training, width = records_by_measure("training"), records_by_measure("width")
    names = [name for name in ("l2_path_norm", "rho_sum") if name in board.names]
    records = [f"{name} {training[name].words}, for two widths in {width[name].share}" for name in names]
    return [f"For two trainings of one architecture: {'; '.join(records)}."] if names else []


def _better_than_random_numbers_in_words(board: Leaderboard, name: str) -> str:
    """Verdict on whether a measure ranks networks better than random numbers, with its intervals."""
    signs = {_sign_of_clear_score(board, name, *key) for key in board.populations}
    answer = {1.0: "yes", -1.0: "no, worse"}.get(signs.pop(), "not clear") if len(signs) == 1 else "not clear"
    intervals = [
        f"{data} {stop:g}: {score_in_words(board.row(name, data, stop, 'psi'))}" for data, stop in board.populations
    ]
    return f" Better than chance: {answer} (Ψ {', '.join(intervals)})."


def _sign_of_clear_score(board: Leaderboard, name: str, data: str, stop: float) -> float:
    """The sign of Ψ where its interval leaves one, else 0."""
    row = board.row(name, data, stop, "psi")
    return 0.0 if row is None or not row["low"] * row["high"] > 0 else float(np.sign(row["value"]))


def _measure_name_cell(name: str, place: int | None = None) -> Cell:
    parts = [element("span", f"{place}. ", class_="quiet")] if place else []
    parts.append(element("span", breakable(name), class_="name"))
    parts += [element("small", EXPLAINED[name])] if name in EXPLAINED else []
    return Cell(Markup("").join(parts), name)


def _mean_score_cell(board: Leaderboard, name: str, score: str) -> Cell:
    value = board.mean(name, score)
    return Cell(
        element("span", score_number(value), class_="value"), "" if math.isnan(value) else f"{value:.6f}", "correlate"
    )


def _score_cell(row: pd.Series[Any] | None, *, noted: bool = False) -> Cell:
    value, _, interval = score_in_words(row).partition(" ")
    notes = [interval, str(row["note"]) if row is not None and (noted or value == "n/a") else ""]
    shown = element("span", value, class_="value") + Markup("").join(element("small", text) for text in notes if text)
    return Cell(shown, "" if row is None or math.isnan(row["value"]) else f"{row['value']:.6f}", "correlate")


def _ranking_table(board: Leaderboard, more: str) -> Markup:
    """One row per measure: Ψ of each population with its interval, the other scores on average."""
    known, others = declarations(), [score for score in TITLES if score not in ("psi", "tau_rescaled")]
    heads = [f"Ψ {data} {stop:g}" for data, stop in board.populations]
    rows, invariances = [], []
    for place, name in enumerate(board.names, start=1):
        stands = invariance_of_measure(known.get(base_name(name)))
        word, kind = INVARIANCE_WORDS[stands]
        invariances.append(stands)
        rows.append(
            [
                _measure_name_cell(name, place),
                _mean_score_cell(board, name, "psi"),
                *(_score_cell(board.row(name, data, stop, "psi")) for data, stop in board.populations),
                *(_mean_score_cell(board, name, score) for score in others),
                Cell("" if name in CONTROLS else badge(word, kind), str(list(INVARIANCE_WORDS).index(stands))),
            ]
        )
    header = ["Measure", "Ψ", *heads, *(TITLES[score] for score in others), "Rescaling"]
    sorts = ["text", *["number"] * (len(header) - 1)]
    label = "Measures by Ψ, averaged over data sets and stops. Column headers sort."
    return table(
        label,
        header,
        rows,
        class_="measures correlations",
        id_=f"leaderboard-table{more}",
        sorts=sorts,
        invariances=invariances,
    )


def _scores_by_difference_table(board: Leaderboard, more: str) -> Markup:
    """Ψ by what two networks differ in, of the released networks; empty for a board of others."""
    if board.meta.get("networks") != RELEASED:
        return Markup("")
    known = {kind: records_by_measure(kind) for kind in DIFFERENCES}
    rows = []
    for name in [*board.names, RANKING]:
        records = [known[kind].get(name) for kind in DIFFERENCES]
        if any(records):
            rows.append([_measure_name_cell(name), *map(_record_cell, records)])
    label = "Ψ by what two networks differ in. Column headers sort."
    sorts = ["text", *["number"] * len(DIFFERENCES)]
    header, id_ = ["Measure", *DIFFERENCES], f"differences-table{more}"
    words = "; ".join(f"{kind}: {text}" for kind, text in DIFFERENCES.items())
    title = element("h3", "By what two networks differ in")
    grid = table(label, header, rows, class_="measures correlations", id_=id_, sorts=sorts, tall=True)
    return title + element("p", f"{words}.", class_="quiet") + grid


def _record_cell(record: Record | None) -> Cell:
    if record is None:
        return Cell("n/a", "", "correlate")
    ends = "" if math.isnan(record.low) else f"[{score_number(record.low)}, {score_number(record.high)}]"
    shown = element("span", score_number(record.psi), class_="value") + element("small", ends)
    return Cell(shown, f"{record.psi:.6f}", "correlate")


def _scores_table(board: Leaderboard, data: str, stop: float, more: str) -> Markup:
    """Every score of every measure on one data set at one stop."""
    scores = [score for score in SCORES if any(board.row(name, data, stop, score) is not None for name in board.names)]
    rows = []
    for name in board.names:
        row_by_score = {score: board.row(name, data, stop, score) for score in scores}
        tau = row_by_score["tau"]
        count = "" if tau is None else str(int(tau["networks"]))
        rows.append(
            [
                _measure_name_cell(name),
                *(_score_cell(row, noted=score == "worst_error") for score, row in row_by_score.items()),
                Cell(count, count),
            ]
        )
    header = ["Measure", *(TITLES[score] for score in scores), "Networks"]
    label = f"Scores on {data} at a training loss of {stop:g}. Column headers sort."
    sorts = ["text", *["number"] * (len(header) - 1)]
    return table(label, header, rows, class_="measures correlations", id_=f"scores-table{more}", sorts=sorts)


def _explanation_of_columns(board: Leaderboard) -> Markup:
    """Explanation of the columns and of the networks."""
    words = [f"{TITLES[score]}: {said}; best {best:g}." for score, (said, best) in SCORES.items()]
    varied = ", ".join(name.replace("_", " ") for name in SETTINGS)
    stops = " and ".join(f"{stop:g}" for stop in STOPS)
    notes = [
        *words,
        "All but information are turned so that a measure that is right as declared has a positive score.",
        f"Networks differ in {varied}; each is taken after the first epoch with a training loss below {stops}, within "
        f"{MOST_EPOCHS} epochs. The gap is the error on 10,000 test images, whose labels are right, less the training "
        "error, whose labels are partly wrong where there is label noise.",
        "Intervals of 95 % over networks, the data sets held fixed. Averages over data sets and stops have none.",
    ]
    join = element("p", "A measure of your own joins with one command: ", element("code", JOIN))
    return element("h3", "How to read it") + bullet_list(notes) + join


def leaderboard_plots(boards: Mapping[str, Leaderboard], _: Colours) -> Iterator[Plot]:
    """Ψ of the best measures, and of the two controls, with intervals."""
    for name, board in boards.items():
        own = set(board.meta.get("own", []))
        valued = [measure for measure in board.names if not math.isnan(board.mean(measure, "psi"))]
        kept = [m for place, m in enumerate(valued) if place < DRAWN or m in own or m in (*CONTROLS, *ALWAYS)]

        def draw(ax: Axes, kept: list[str] = kept, board: Leaderboard = board) -> None:
            for n, (data, stop) in enumerate(board.populations):
                rows = [board.row(measure, data, stop, "psi") for measure in kept]
                ends = np.array(
                    [[math.nan] * 3 if row is None else row[["value", "low", "high"]] for row in rows], float
                )
                reach = np.nan_to_num(np.abs(ends[:, 1:] - ends[:, :1]).T)
                heights = np.arange(len(kept)) + 0.16 * (n - (len(board.populations) - 1) / 2)
                style: dict[str, Any] = {"fmt": MARKERS[n % 4], "color": COLOURS[n], "markersize": 3, "elinewidth": 1}
                ax.errorbar(ends[:, 0], heights, xerr=reach, label=f"{data} {stop:g}", **style)
            ax.axvline(0, color="#333333", linewidth=1)
            ax.set_yticks(range(len(kept)), [shortened_name(measure, 30) for measure in kept], fontsize=8)
            ax.set_ylim(max(len(kept), 1) - 0.5, -0.5)
            scale_axis(ax.xaxis, "granulated Ψ with the gap")
            legend_above(ax, columns=2, handletextpad=0.1)

        caption = "Granulated Ψ on each data set at each training loss, with 95 % intervals; the best on top."
        yield Plot(
            f"{name}-psi",
            "Which measures rank networks as the gap does?",
            caption,
            figure_from_axes_function(draw, height=1.2 + ROW * len(kept)),
        )
