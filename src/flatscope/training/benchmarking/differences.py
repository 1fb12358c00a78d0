"""What a measure is worth for the question at hand: Ψ by what two networks differ in, and that of the vote of many.

Ψ over all settings mixes questions: whoever has two checkpoints of one architecture asks about pairs that differ in
their training alone. Pairs are taken of both data sets and both stops; a network is one at both stops, which the errors
take into account.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import betaincinv

from flatscope.comparing.records import COLUMNS, RANKING, Record
from flatscope.registry import declarations
from flatscope.stats.estimate import Codes, Floats, coded_settings
from flatscope.stats.sign_agreement import pairs_differing_in_one_column, shared_error
from flatscope.training.benchmarking.recipe import SETTINGS
from flatscope.training.benchmarking.scores import BASELINES, SIGNS, TARGET
from flatscope.training.populations.population_frame import base_name

# Settings whose change makes each difference.
CHANGED: dict[str, tuple[str, ...]] = {
    "training": ("batch_size", "lr", "weight_decay", "optimizer"),
    "architecture": ("kind", "width", "depth"),
    "width": ("width",),
    "start": ("init_scale",),
    "label noise": ("label_noise",),
}
NORMAL = 1.959964
Vote = Callable[[Codes, Codes], Floats]


@dataclass(frozen=True)
class PairedNetworks:
    """The networks of one data set at one stop, and their pairs that differ in one setting alone."""

    frame: pd.DataFrame
    pairs: Mapping[str, tuple[Codes, Codes]]
    signs: Mapping[str, Floats]  # of the differences of their gaps

    @property
    def data(self) -> str:
        """Name of the data set."""
        return str(self.frame["data"].iloc[0])


def parts_of_population(population: pd.DataFrame) -> list[PairedNetworks]:
    """The population by data set and stop."""
    populations = []
    for _, frame in population[population["reached"]].groupby(["data", "stop"], sort=False):
        rows = frame.reset_index(drop=True)
        settings = [name for name in SETTINGS if rows[name].nunique() > 1]
        codes, gap = coded_settings(rows[settings]), rows[TARGET].to_numpy(dtype=float)
        pairs = {name: pairs_differing_in_one_column(codes, place)[:2] for place, name in enumerate(settings)}
        signs = {name: np.sign(gap[first] - gap[second]) for name, (first, second) in pairs.items()}
        populations.append(PairedNetworks(rows, pairs, signs))
    return populations


class Agreement(NamedTuple):
    """Ψ over some pairs.

    Attributes:
        value: Ψ; NaN without pairs.
        error: its standard error.
        pairs: their number.
        apart: how many of them share no network with another one, at most; 0 where every pair is tied.
    """

    value: float
    error: float
    pairs: int
    apart: int

    @property
    def ends(self) -> tuple[float, float]:
        """A 95 % interval on Fisher's scale; NaN where all pairs are tied.

        Without spread, as where all are right, that of Clopper and Pearson for pairs that share no network.
        """
        if not self.apart:
            return math.nan, math.nan
        if self.error > 0:
            reach = NORMAL * self.error / (1 - self.value**2)
            return math.tanh(math.atanh(self.value) - reach), math.tanh(math.atanh(self.value) + reach)
        right = self.apart * (1 + self.value) / 2
        low = float(betaincinv(right, self.apart - right + 1, 0.025)) if right else 0.0
        high = float(betaincinv(right + 1, self.apart - right, 0.975)) if right < self.apart else 1.0
        return 2 * low - 1, 2 * high - 1


def agreement_over_pairs(parts: Sequence[PairedNetworks], votes: Sequence[Vote], changed: Sequence[str]) -> Agreement:
    """Ψ over the pairs that differ in one of these settings.

    Args:
        parts: data sets and stops, each with the same weight.
        votes: of each part: for pairs of rows, 1 where the first is said to have the larger gap, −1, or 0; NaN for
            pairs that it has nothing to say of, which are left out.
        changed: settings, each with the same weight.
    """
    total, count, off, tied = 0.0, 0, [], True
    cells = [(part, vote, name) for part, vote in zip(parts, votes, strict=True) for name in changed]
    cells = [(part, vote, name) for part, vote, name in cells if name in part.pairs]
    for part, vote, name in cells:
        first, second = part.pairs[name]
        agree = vote(first, second) * part.signs[name]
        known = np.isfinite(agree)
        if not known.any():
            return Agreement(math.nan, math.nan, 0, 0)
        value, seeds = float(agree[known].mean()), part.frame["seed"].to_numpy()
        total, count = total + value / len(cells), count + int(known.sum())
        tied &= not agree[known].any()
        spread = (agree[known] - value) / (known.sum() * len(cells))
        off.append((seeds[first[known]], seeds[second[known]], spread))
    if not off:
        return Agreement(math.nan, math.nan, 0, 0)
    one, other, spread = (np.concatenate(side) for side in zip(*off, strict=True))
    error = shared_error(one, other, spread, int(max(one.max(), other.max())) + 1)
    apart = 0 if tied else len(np.union1d(one, other)) // 2
    return Agreement(total, error, count, apart)


def scores_by_difference(population: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Ψ of every measure for every kind of difference, and of the vote of those that count; columns of a record."""
    parts, rows = parts_of_population(population), []
    for name in names:
        votes = [_vote_of_measure(part.frame, name) for part in parts]
        for kind, changed in CHANGED.items():
            scored = agreement_over_pairs(parts, votes, changed)
            rows.append((name, kind, scored.value, *scored.ends, scored.pairs))
    for kind in CHANGED:
        scored = vote_on_the_other(parts, names, kind)
        rows.append((RANKING, kind, scored.value, *scored.ends, scored.pairs))
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(COLUMNS)


def records_on_population(population: pd.DataFrame, name: str) -> dict[str, Record]:
    """{kind of difference: how a measure ranked such pairs}, for the kinds that the population has."""
    parts, records = parts_of_population(population), {}
    votes = [_vote_of_measure(part.frame, name) for part in parts]
    for kind, changed in CHANGED.items():
        scored = agreement_over_pairs(parts, votes, changed)
        if scored.pairs:
            records[kind] = Record(scored.value, *scored.ends, scored.pairs)
    return records


def vote_on_the_other(parts: Sequence[PairedNetworks], names: Sequence[str], kind: str) -> Agreement:
    """Ψ of the vote of all measures that count, which are chosen on one data set and scored on the other, both ways."""
    votes = []
    for scored in dict.fromkeys(part.data for part in parts):
        chosen = measures_that_count([part for part in parts if part.data != scored], names, kind)
        there = [part for part in parts if part.data == scored]
        votes.append(
            agreement_over_pairs(there, [_vote_of_measures(part.frame, chosen) for part in there], CHANGED[kind])
        )
    values, errors, pairs, apart = zip(*votes, strict=True)
    return Agreement(float(np.mean(values)), math.hypot(*errors) / len(errors), sum(pairs), sum(apart))


def measures_that_count(parts: Sequence[PairedNetworks], names: Sequence[str], kind: str) -> list[str]:
    """Measures that rank such pairs rightly more often than wrongly, beyond chance; controls and baselines never."""
    known, chosen = declarations(), []
    for name in names:
        entry = known.get(base_name(name))
        if entry is not None and entry.direction != "none":
            scored = agreement_over_pairs(parts, [_vote_of_measure(part.frame, name) for part in parts], CHANGED[kind])
            if scored.ends[0] > 0:
                chosen.append(name)
    return chosen


def _vote_of_measure(frame: pd.DataFrame, name: str) -> Vote:
    values = _column_rising_with_gap(frame, name)
    return lambda first, second: np.sign(values[first] - values[second])


def _vote_of_measures(frame: pd.DataFrame, names: Sequence[str]) -> Vote:
    """The mean over families of the mean of their measures' signs."""
    known, families = declarations(), dict[str, list[Floats]]()
    for name in names:
        families.setdefault(known[base_name(name)].family, []).append(_column_rising_with_gap(frame, name))

    def vote(first: Codes, second: Codes) -> Floats:
        total = np.zeros(len(first))
        for members in families.values():
            total += np.mean([np.nan_to_num(np.sign(v[first] - v[second])) for v in members], axis=0)
        return np.sign(total.round(9))

    return vote


def _column_rising_with_gap(frame: pd.DataFrame, name: str) -> Floats:
    """A column with the sign with which it should rise with the gap."""
    entry = declarations().get(base_name(name))
    direction = BASELINES.get(name, "lower") if entry is None else entry.direction
    values = frame[name].to_numpy(dtype=float)
    return SIGNS[direction] * np.where(np.isfinite(values), values, math.nan)
