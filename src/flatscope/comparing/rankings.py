"""Rankings by one measure and by all of them together, how far the measures agree, and the answer in a sentence."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from flatscope.comparing.verdicts import CLEAR_ERRORS, LOSS_SHARE, Quantity
from flatscope.formatting import with_error, written
from flatscope.registry import declarations, family_name

if TYPE_CHECKING:
    from flatscope.stats.estimate import Ranking

DRAWS = 4_000
_SURE = 0.975  # probability of being better with which a place in an order is called certain


def ranked(quantity: Quantity, names: Sequence[str], confidence: float = 0.95) -> Ranking:
    """These networks by one measure; errors of estimator and data count, as if independent between networks.

    All networks are measured on the same samples with the same random numbers, so their errors go together and the
    differences are known better than this: the intervals are cautious.
    """
    from flatscope.stats.estimate import rank_with_uncertainty  # SciPy's statistics take as long to load as torch

    return rank_with_uncertainty(
        [quantity.value[name] for name in names],
        [quantity.total_stderr(name) for name in names],
        names,
        lower_is_better=quantity.lower_is_better,
        draws=DRAWS,
        confidence=confidence,
    )


def consensus(found: Sequence[Quantity], names: Sequence[str], confidence: float = 0.95) -> pd.DataFrame:
    """The networks by their mean rank over families of measures, best first.

    Measures of one family (those of one file: all path norms, all of relative flatness) say much the same, so ranks are
    averaged within a family first, and every family has one voice.
    """
    from scipy.stats import rankdata

    from flatscope.stats.estimate import rank_spread

    families = _by_family(found)
    drawn = np.zeros((DRAWS, len(names)))
    for family, members in enumerate(families.values()):
        for place, quantity in enumerate(members):
            spread = np.array([quantity.total_stderr(name) for name in names])
            noise = np.random.default_rng([family, place]).standard_normal((DRAWS, len(names)))
            noisy = rankdata(_badness(quantity, names) + spread * noise, axis=1)
            drawn += noisy / (len(members) * len(families))
    voices = np.array(list(family_ranks(found, names).values()))  # (families, networks)
    means, first = voices.mean(axis=0), (voices == voices.min(axis=1, keepdims=True)).sum(axis=0)
    low, high, best = rank_spread(rankdata(drawn.round(9), axis=1), confidence)
    frame = pd.DataFrame(
        {
            "name": list(names),
            "mean_rank": means,
            "rank": rankdata(means.round(9)),
            "rank_low": low,
            "rank_high": high,
            "probability_best": best,
            "families_first": first,
            "families": len(families),
        }
    )
    return frame.sort_values("rank", kind="stable", ignore_index=True)


def family_ranks(found: Sequence[Quantity], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Mean ranks (networks,) of every family, over its measures."""
    from scipy.stats import rankdata

    return {
        family: np.mean([rankdata(_badness(quantity, names)) for quantity in members], axis=0)
        for family, members in _by_family(found).items()
    }


def foremost(found: Sequence[Quantity], names: Sequence[str]) -> list[str]:
    """Who has the lowest mean rank over the families; several where it is shared, none without a family."""
    voices = family_ranks(found, names)
    means = np.mean(list(voices.values()), axis=0).round(9) if voices else np.array([])
    return [name for name, mean in zip(names, means, strict=False) if mean == means.min()]


def close_text(voices: Mapping[str, np.ndarray], names: Sequence[str]) -> list[str]:
    """Neighbours in the order by mean rank that would not be in this order without some one family, a sentence each.

    Args:
        voices: what `family_ranks` gave.
        names: the networks, in the order of its columns.
    """
    if len(voices) == 1:
        return [f"One family of measures alone ({next(iter(voices))}) makes this order."]
    total = np.sum(list(voices.values()), axis=0).round(9)
    order = np.argsort(total, kind="stable")
    sentences = []
    for one, other in itertools.pairwise(order):
        lead = total[other] - total[one]
        decisive = [family for family, ranks in voices.items() if ranks[other] - ranks[one] >= lead - 1e-9]
        if lead > 0 and decisive:
            sentences.append(
                f"{names[one]} before {names[other]} is too close to call: one family of measures more or less would "
                f"turn it round. Without {' or '.join(decisive)}, {names[one]} would not be ahead."
            )
    return sentences


def _by_family(found: Sequence[Quantity]) -> dict[str, list[Quantity]]:
    families: dict[str, list[Quantity]] = {}
    for quantity in found:
        if quantity.entry is not None:
            families.setdefault(quantity.entry.family, []).append(quantity)
    return dict(sorted(families.items()))


def _badness(quantity: Quantity, names: Sequence[str]) -> np.ndarray:
    """Values (networks,), lower is better."""
    return np.array([quantity.value[name] for name in names]) * (1 if quantity.lower_is_better else -1)


def places(ranking: pd.DataFrame) -> list[str]:
    """The place of each row of `consensus` in words: "1.", "tied first:", "tied for 2 to 3:"."""
    shared = ranking["rank"].map(ranking["rank"].value_counts())
    words = []
    for rank, networks in zip(ranking["rank"], shared, strict=True):
        best, worst = rank - (networks - 1) / 2, rank + (networks - 1) / 2
        tied = "tied first:" if best == 1 else f"tied for {best:g} to {worst:g}:"
        words.append(f"{rank:g}." if networks == 1 else tied)
    return words


def agreement(found: Sequence[Quantity], names: Sequence[str]) -> pd.DataFrame:
    """Kendall's tau-b between the rankings of every two measures; NaN where one does not tell networks apart."""
    return pd.DataFrame({q.label: _badness(q, names) for q in found}).corr(method="kendall")


def order_text(ranking: Ranking) -> str:
    """Best first: `a > b`, better for certain; `a ≳ b`, noise could turn it round; `a = b`, equal values."""
    order = np.argsort(ranking.rank, kind="stable")
    text = str(ranking.names[order[0]])
    for one, other in itertools.pairwise(order):
        sign = "=" if ranking.rank[one] == ranking.rank[other] else ">" if ranking.better[one, other] > _SURE else "≳"
        text += f" {sign} {ranking.names[other]}"
    return text


# Without a known error a difference is clear from this factor on, a rule of thumb: exact values of these samples say
# nothing about others.
CLEAR_FACTOR = 1.1


class Voice(NamedTuple):
    """Verdict of one family of flatness measures, by the measure that stands for it.

    Attributes:
        family: the family in words.
        measure: label of the measure.
        best: the network that it calls flattest.
        next: the one that comes second.
        factor: how many times flatter the first is than the second; NaN where values have no ratio.
        stderr: standard error of the factor.
        clear: whether the difference is more than noise.
    """

    family: str
    measure: str
    best: str
    next: str
    factor: float
    stderr: float
    clear: bool

    def __str__(self) -> str:
        """The factor with its uncertainty, the family and its measure."""
        by = f"{self.family} ({self.measure})"
        if math.isnan(self.factor):
            return f"by {by}"
        factor, error = with_error(self.factor, self.stderr)
        return f"{factor} ± {error} times by {by}" if error else f"{written(self.factor, 3)} times by {by}"


@dataclass(frozen=True)
class Conclusion:
    """The answer to "which is flatter?".

    Attributes:
        code: "flatter" (one network is, and no family says otherwise), "split" (families name different ones), "alike"
            (nothing is clear between those in front), "one function" (nothing to compare) or "untold" (no flatness
            measure may compare these networks, or the losses account for what they say).
        winner: the network that is flatter; empty where there is none.
        voices: one per family of comparable flatness measures.
        sentence: the answer for people; where the measures that count in the ranking put another network first than
            the flatter one, it says so.
        first: who is first by all families of measures that count, as `Comparison.ranking` has it.
    """

    code: str
    winner: str
    voices: tuple[Voice, ...]
    sentence: str
    first: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The sentence."""
        return self.sentence


def conclude(
    names: Sequence[str],
    distinct: Sequence[str],
    comparable: Sequence[Quantity],
    counting: Sequence[Quantity],
    refused: Mapping[str, Sequence[str]],
    losses: Mapping[str, float],
) -> Conclusion:
    """The answer.

    Args:
        names: all networks.
        distinct: one network of every function.
        comparable: the measures that may rank them.
        counting: those of them that count in the ranking.
        refused: labels of the measures that may not, by the reason.
        losses: training losses where curvature falls with them, as that of cross-entropy does; else empty.
    """
    if len(distinct) < 2:
        return Conclusion("one function", "", (), f"{_listed(names)} are one function: none is flatter.")
    first = tuple(foremost(counting, distinct))
    speakers = _speakers(comparable)
    if not speakers:
        return Conclusion("untold", "", (), f"Which is flatter cannot be told: {_why_untold(refused)}.", first)
    voices = tuple(_voice(family_name(family), quantity, distinct) for family, quantity in speakers.items())
    pairs = itertools.permutations(distinct, 2)
    ahead = {pair for pair in pairs if any(_clear(quantity, *pair) for quantity in speakers.values())}
    beats = {(one, other) for one, other in ahead if (other, one) not in ahead}
    in_front = [name for name in distinct if not any((other, name) in beats for other in distinct)]
    winner = next((n for n in in_front if all((n, other) in beats for other in distinct if other != n)), "")
    if winner and (apart := _made_by_losses(winner, voices, losses)):
        lower = (
            f"{winner} has the lower numbers, {_by(voices, winner)}, but its training loss is {written(apart, 3)} times"
        )
        text = f"Which is flatter cannot be told: {lower} lower, and curvature of cross-entropy falls with the loss."
        return Conclusion("untold", "", voices, text, first)
    if winner:
        return Conclusion("flatter", winner, voices, _flatter(distinct, winner, voices, first), first)
    if in_front and not any(pair in ahead for pair in itertools.permutations(in_front, 2)):
        return Conclusion("alike", "", voices, _alike(distinct, in_front, voices), first)
    clear = [voice for voice in voices if voice.clear]
    said = clear if len({voice.best for voice in clear}) > 1 else voices
    bests = dict.fromkeys(voice.best for voice in said)
    text = ", but ".join(f"{name} is flatter, {_by(said, name)}" for name in bests)
    return Conclusion("split", "", voices, f"The flatness measures disagree: {text}.", first)


def _made_by_losses(winner: str, voices: Sequence[Voice], losses: Mapping[str, float]) -> float:
    """Factor by which the winner's loss is lower, where it accounts for every clear lead of the winner; else 0."""
    clear = [voice for voice in voices if voice.clear and voice.best == winner]
    if not clear or not losses or losses[winner] <= 0:
        return 0.0
    apart = [losses[voice.next] / losses[winner] for voice in clear]
    made = all(v.factor - 2 * v.stderr <= ratio for v, ratio in zip(clear, apart, strict=True))  # NaN: not known
    return max(apart) if made and min(apart) > LOSS_SHARE else 0.0


def _flatter(distinct: Sequence[str], winner: str, voices: Sequence[Voice], first: Sequence[str]) -> str:
    clear = [voice for voice in voices if voice.clear and voice.best == winner]
    others = [name for name in distinct if name != winner]
    than = f"flatter than {others[0]}" if len(others) == 1 else f"the flattest of {len(distinct)} networks"
    text = f"{winner} is {than}: {_by(clear, winner) if clear else 'no other is clearly ahead of it by any family'}"
    if len(others) > 1 and clear:
        text += f", ahead of {_listed(list(dict.fromkeys(voice.next for voice in clear)))}"
    unclear = [voice.family for voice in voices if voice not in clear]
    undecided = f"; {_listed(unclear)} {'show' if len(unclear) > 1 else 'shows'} no clear difference" if unclear else ""
    if not first or list(first) == [winner]:
        return f"{text}{undecided}."
    preferred = f"put {first[0]} first" if len(first) == 1 else f"do not favour any of {_listed(first)}"
    return f"{text}{undecided}. The measures that count in the ranking {preferred}."


def _alike(distinct: Sequence[str], in_front: Sequence[str], voices: Sequence[Voice]) -> str:
    if len(in_front) < len(distinct):
        return f"No clear difference in flatness between {_listed(in_front)}, which are ahead of the others."
    said = "; ".join(f"{voice.best} {voice}" for voice in voices)
    return f"No clear difference in flatness: {said}, which is within noise."


def _by(voices: Sequence[Voice], name: str) -> str:
    return _listed([str(voice) for voice in voices if voice.best == name])


def _speakers(comparable: Iterable[Quantity]) -> dict[str, Quantity]:
    """One measure for each family: one with a caption, else the first of it."""
    families: dict[str, Quantity] = {}
    for quantity in comparable:
        entry = quantity.entry
        if entry is None or not entry.falls_with_loss:  # a norm or a margin: not about flatness
            continue
        before = families.get(entry.family)
        if before is None or (entry.caption and not (before.entry and before.entry.caption)):
            families[entry.family] = quantity
    return families


def _clear(quantity: Quantity, one: str, other: str) -> bool:
    """True if the first is flatter by more than noise."""
    lead = quantity.value[other] - quantity.value[one]
    lead -= quantity.below[other] + quantity.above[one]  # between the ends of two searches' intervals
    if not quantity.lower_is_better:
        lead = quantity.value[one] - quantity.value[other] - quantity.below[one] - quantity.above[other]
    error = math.hypot(quantity.sampling_error(one), quantity.sampling_error(other))
    least = min(abs(quantity.value[one]), abs(quantity.value[other]))
    return lead > (CLEAR_ERRORS * error if error > 0 else (CLEAR_FACTOR - 1) * least)


def _voice(family: str, quantity: Quantity, names: Sequence[str]) -> Voice:
    sign = 1 if quantity.lower_is_better else -1
    best, second = sorted(names, key=lambda name: sign * quantity.value[name])[:2]
    low, high = sorted((quantity.value[best], quantity.value[second]))
    clear = _clear(quantity, best, second)
    if low <= 0:
        return Voice(family, quantity.label, best, second, math.nan, 0.0, clear)
    stderr = high / low * math.hypot(*(quantity.total_stderr(n) / quantity.value[n] for n in (best, second)))
    return Voice(family, quantity.label, best, second, high / low, stderr, clear)


def _why_untold(refused: Mapping[str, Sequence[str]]) -> str:
    """The reason that keeps most flatness measures from ranking these networks."""
    known = declarations()
    counts: Counter[str] = Counter()
    for reason, labels in refused.items():
        entries = [known.get(label.partition("[")[0]) for label in labels]
        counts[reason] += sum(entry is not None and entry.falls_with_loss for entry in entries)
    if not counts.total():
        return "no flatness measure that is invariant under rescaling (such as rho_sum or psi_trace) was measured"
    return counts.most_common(1)[0][0]


def _listed(names: Sequence[str]) -> str:
    *some, last = names
    return f"{', '.join(some)} and {last}" if some else last
