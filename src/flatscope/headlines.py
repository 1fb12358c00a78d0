"""Headlines of tables: is it a minimum, how flat by what no rescaling changes, what that is worth, what to do next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from flatscope.formatting import numbered, typeset, with_error, written
from flatscope.network_summary import NOT_LOOKED, STANDING, NetworkSummary
from flatscope.registry import declarations
from flatscope.rows import rows_of, searched_text

RESOLVED = 0.5  # of a value: with a larger standard error it may as well be zero
NEGLIGIBLE = 1e-3  # of the largest eigenvalue: a smaller negative one is rounding
FIRST = ("rho_sum", "psi_trace", "fisher_rao_norm", "l2_path_norm", "margin")  # invariant under every rescaling
MOST_NAMED = 3
MOST_TOLD = 5  # lines
UNCERTIFIED = "NOT CERTIFIED"  # in the assumptions of a bound that shows the order of a formula
TRAIN_IT = "Train it before flatness is read"
STILL = "still on a slope"  # how a remark begins that a headline says in its own words
LOWER_LEVELS = "layers, units or samples"
Meta = Mapping[str, Any]
RESCALED = {"layer_scaling", "unit_scaling"}


def minimum_verdict(frame: pd.DataFrame, meta: Meta, *, briefly: bool = False) -> tuple[str, str]:
    """Word for how near the network is to a minimum, as `NetworkSummary.minimum` gives it, and the sentence.

    Judged by the fall of the loss one step down the gradient, and by the smallest Hessian eigenvalue where it is known.

    Args:
        frame: the rows of the table.
        meta: what is known of it.
        briefly: whether the words go into a cell.
    """
    summary = NetworkSummary.from_dict(meta[STANDING]) if STANDING in meta else None
    level, words = summary.minimum if summary else ("unknown", NOT_LOOKED)
    words = summary.brief if summary and briefly else words
    if level == "unknown":
        value = float(meta.get("gradient_norm", _network_value(frame, "gradient_norm")))
        length = (
            ""
            if math.isnan(value)
            else f"gradient norm {written(value, 3)}, which has no scale{_negative_curvature_remark(frame)}"
        )
        return level, length or words
    return level, f"{words}{_negative_curvature_remark(frame)}"


def table_headline(frame: pd.DataFrame, meta: Meta) -> list[str]:
    """Lines of the headline of a table of measures or of bounds."""
    if "vacuous" in frame:
        return bounds_headline(frame)
    level, words = minimum_verdict(frame, meta)
    steep = level == "no"
    minimum = {
        "yes": f"At a minimum: {words}.",
        "nearly": f"Nearly at a minimum: {words}.",
        "no": f"No minimum: {words}. Train on before flatness is read.",
        "open": f"No better than a constant: {words}. {TRAIN_IT}, or see whether there is anything to learn.",
        "unknown": "" if words == NOT_LOOKED else f"Whether this is a minimum is not known: {words}.",
    }[level]
    if STANDING in meta and NetworkSummary.from_dict(meta[STANDING]).untrained:
        unclear = (
            ""
            if steep or _negative_curvature_remark(frame)
            else "; where the data cannot be learned, this may yet be a minimum"
        )
        minimum = f"Not trained: {words}. {TRAIN_IT}{unclear}."
    cautions = [str(remark) for remark in meta.get("remarks", ()) if not str(remark).startswith("still on a")]
    rescalable = STANDING not in meta or NetworkSummary.from_dict(meta[STANDING]).rescalable
    lines = [
        minimum,
        f"Caution: {cautions[0].rstrip('.')}." if cautions else "",
        _fit_in_words(meta),
        _flatness_in_words(frame, rescalable),
    ]
    lines = [line for line in lines if line]
    sentences = [*(lines or [_first_values_in_words(frame)]), *_advice_in_words(frame, steep or level == "open")]
    # What to do is never left out.
    return sentences if len(sentences) <= MOST_TOLD else [*sentences[: MOST_TOLD - 1], sentences[-1]]


def bounds_headline(frame: pd.DataFrame) -> list[str]:
    """Sentences on the smallest of the bounds: its guarantee, and what may be made of it."""
    valued = frame[frame["value"].notna()]
    below = valued[~valued["vacuous"].astype(bool)]
    certified = below[~below["assumptions"].str.contains(UNCERTIFIED)]
    if certified.empty:
        evaluated = f"{len(valued)} of {numbered(len(frame), 'bound')} could be evaluated"
        evaluated += (
            f", {len(below)} of them below 1 and not certified" if len(below) else ", all of them vacuous (1 or more)"
        )
        return [
            f"Nothing is guaranteed: {evaluated}."
            if len(valued)
            else "Nothing is guaranteed: no bound has a value here.",
            "A vacuous bound says nothing of the test error, and the smaller of two does not say which is better.",
            "Next: fs.bounds(problem, 'pac_bayes_optimised') with the weights before training, or held-out data.",
        ]
    best = certified.sort_values("value", kind="stable").iloc[0]
    entry = declarations("bound").get(str(best["measure"]))
    what = "" if entry is None else f" {entry.summary.rstrip('.')}:"
    return [
        f"{best['measure']}:{what} at most {written(float(best['value']), 3)}, "
        f"with probability {written(100 * float(best['confidence']), 3)} %.",
        f"It holds where this does: {best['assumptions'] or 'samples drawn independently'}.",
        f"{len(certified)} of {numbered(len(valued), 'bound')} say something; the others are vacuous or not certified.",
    ]


def _fit_in_words(meta: Meta) -> str:
    """Training and test error, or losses, in a sentence; empty where they are not known."""
    if STANDING not in meta:
        return ""
    summary = NetworkSummary.from_dict(meta[STANDING])
    what, train, test = "error", summary.error, summary.test_error
    if math.isnan(train):
        what, train, test = "loss", summary.loss, summary.test_loss
    scale, unit = (100, " %") if what == "error" else (1, "")
    text = f"Training {what} {written(scale * train, 3)}{unit}"
    if math.isnan(test):
        return f"{text}; nothing held out."
    error = math.sqrt(test * (1 - test) / summary.n_test) if what == "error" and summary.n_test else 0.0
    shown, spread = with_error(scale * test, scale * error)
    shown = f"{shown} ± {spread}" if spread else written(scale * test, 3)
    overfits = what == "loss" and test >= summary.constant and not summary.tells_nothing
    useless = f": no better than {written(summary.constant, 3)}, that of outputs that ignore the inputs"
    return f"{text}, test {what} {shown}{unit}{useless if overfits else ''}."


def _flatness_in_words(frame: pd.DataFrame, rescalable: bool) -> str:
    """Measures that no rescaling changes, and those that it does, where some unit can be rescaled."""
    known, whole = declarations(), rows_of(frame, "network")
    valued = {str(row["measure"]): row for _, row in whole[whole["value"].notna()].iloc[::-1].iterrows()}
    names = [str(name) for name in whole["measure"].unique() if name in valued]
    flat = [name for name in names if name in known and known[name].falls_with_loss]
    invariant = [name for name in FIRST if name in valued]
    invariant += [name for name in flat if name not in invariant and known[name].invariant_under >= RESCALED]
    moved = [name for name in flat if not known[name].invariant_under >= RESCALED and name != "gradient_norm"]
    text = ""
    if not rescalable and flat:
        shown = [name for name in [*invariant, *moved] if name in flat][:MOST_NAMED]
        values = ", ".join(f"{name} {_value_in_words(valued[name])}" for name in shown)
        return f"No unit of this network can be rescaled, so that no flatness number can be changed by it: {values}."
    if invariant:
        values = ", ".join(f"{name} {_value_in_words(valued[name])}" for name in invariant[:MOST_NAMED])
        text = f"Unchanged by rescaling: {values}."
    if moved:
        text += f" Changed by it, so not to be compared alone: {', '.join(moved[:MOST_NAMED])}."
    return text.strip()


def _advice_in_words(frame: pd.DataFrame, steep: bool) -> list[str]:
    """Advice: what one network's numbers are worth, and what to do with them."""
    known = declarations()
    if not any(name in known and known[name].falls_with_loss for name in frame["measure"].unique()):
        return []
    alone = (
        "One network alone is neither flat nor sharp: only a second one, at the same loss, gives its numbers a scale."
    )
    next_step = "train on, then compare" if steep else "compare it with another network, held-out data first"
    return [alone, f"Next: {next_step} (fs.compare, flatscope compare)."]


def _first_values_in_words(frame: pd.DataFrame) -> str:
    """The first values of a table that has nothing about minima."""
    whole = rows_of(frame, "network").drop_duplicates("measure")
    valued = whole[whole["value"].notna()]
    values = [f"{row['measure']} {_value_in_words(row)}" for _, row in valued.head(MOST_NAMED).iterrows()]
    missing = frame["value"].isna().groupby(frame["measure"]).all()
    if missing.all():
        return "Nothing could be measured here: each row says why."
    more = missing.size - len(values) - int(missing.sum())
    if more:
        values.append(
            f"{numbered(more, 'more measure')} in the rows below" if values else f"values of {LOWER_LEVELS} below"
        )
    return f"{', '.join(values)}."


def _value_in_words(row: Any) -> str:
    value, error = with_error(float(row["value"]), float(row["stderr"]))
    if float(row["stderr"]) > RESOLVED * abs(float(row["value"])):
        return f"not resolved ({value} ± {error})"
    return typeset(searched_text(row)) or (f"{value} ± {error}" if error else value)


def _negative_curvature_remark(frame: pd.DataFrame) -> str:
    """A remark if the loss clearly curves down along some direction: all of the interval, beyond rounding."""
    rows, largest = _rows_of_measure(frame, "hessian_min_eigenvalue"), _network_value(frame, "hessian_max_eigenvalue")
    if not len(rows):
        return ""
    row = rows.iloc[0]
    value, high = float(row["value"]), float(row["high"])
    surely = value if math.isnan(high) else max(value, high)
    if not (surely < 0 and -surely > NEGLIGIBLE * (0.0 if math.isnan(largest) else largest)):
        return ""
    return f"; the loss curves down somewhere (eigenvalue {typeset(searched_text(row)) or written(value, 3)})"


def _network_value(frame: pd.DataFrame, name: str) -> float:
    """The network-wide value with the options that come first; NaN where there is none."""
    rows = _rows_of_measure(frame, name)
    return float(rows["value"].iloc[0]) if len(rows) else math.nan


def _rows_of_measure(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    return frame[(frame["measure"] == name) & (frame["layer"] == "")]


def headline_has_remark(remark: str, headline: str) -> bool:
    """True if a line of the headline has this remark already, in its own words or in these."""
    return remark[1:].rstrip(".") in headline or (
        remark.startswith(STILL)
        and any(line.startswith(("No minimum", "Not trained")) for line in headline.splitlines())
    )
