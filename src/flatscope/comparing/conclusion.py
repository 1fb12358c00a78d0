"""Which of the networks is flatter, by which measures that may say so, and by how much: the answer in a sentence."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flatscope.comparing.rankings import foremost
from flatscope.comparing.verdicts import CLEAR_ERRORS, Quantity
from flatscope.formatting import number, with_error
from flatscope.registry import declarations

# Without a known error a difference is clear from this factor on, a rule of thumb: exact values of these samples say
# nothing about others.
CLEAR_FACTOR = 1.1
FAMILIES = {"psi flatness": "PSI flatness", "pac bayes": "PAC-Bayes", "adaptive": "the Fisher-Rao norm"}


class Voice(NamedTuple):
    """What one family of flatness measures says, by the one of its measures that speaks for it.

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
        return f"{factor} ± {error} times by {by}" if error else f"{number(self.factor, 3)} times by {by}"


@dataclass(frozen=True)
class Conclusion:
    """The answer to "which is flatter?".

    Attributes:
        code: "flatter" (one network is, and no family says otherwise), "split" (families name different ones), "alike"
            (nothing is clear between those in front), "one function" (nothing to compare) or "untold" (no flatness
            measure may compare these networks).
        winner: the network that is flatter; empty where there is none.
        voices: one per family of comparable flatness measures.
        sentence: the answer for people; where all comparable measures together, norms and margins included, put
            another network first than the flatter one, it says so.
        first: who is first by all families of comparable measures together, as `Comparison.ranking` has it.
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
    names: Sequence[str], distinct: Sequence[str], comparable: Sequence[Quantity], refused: Mapping[str, Sequence[str]]
) -> Conclusion:
    """The answer.

    Args:
        names: all networks.
        distinct: one network of every function.
        comparable: the measures that may rank them.
        refused: labels of the measures that may not, by the reason.
    """
    if len(distinct) < 2:
        return Conclusion("one function", "", (), f"{_listed(names)} are one function: none is flatter.")
    first = tuple(foremost(comparable, distinct))
    speakers = _speakers(comparable)
    if not speakers:
        return Conclusion("untold", "", (), f"Which is flatter cannot be told: {_why_untold(refused)}.", first)
    voices = tuple(_voice(FAMILIES.get(family, family), quantity, distinct) for family, quantity in speakers.items())
    pairs = itertools.permutations(distinct, 2)
    ahead = {pair for pair in pairs if any(_clear(quantity, *pair) for quantity in speakers.values())}
    beats = {(one, other) for one, other in ahead if (other, one) not in ahead}
    in_front = [name for name in distinct if not any((other, name) in beats for other in distinct)]
    winner = next((n for n in in_front if all((n, other) in beats for other in distinct if other != n)), "")
    if winner:
        return Conclusion("flatter", winner, voices, _flatter(distinct, winner, voices, first), first)
    if in_front and not any(pair in ahead for pair in itertools.permutations(in_front, 2)):
        return Conclusion("alike", "", voices, _alike(distinct, in_front, voices), first)
    clear = [voice for voice in voices if voice.clear]
    said = clear if len({voice.best for voice in clear}) > 1 else voices
    bests = dict.fromkeys(voice.best for voice in said)
    text = ", but ".join(f"{name} is flatter, {_by(said, name)}" for name in bests)
    return Conclusion("split", "", voices, f"The flatness measures disagree: {text}.", first)


def _flatter(distinct: Sequence[str], winner: str, voices: Sequence[Voice], first: Sequence[str]) -> str:
    clear = [voice for voice in voices if voice.clear and voice.best == winner]
    others = [name for name in distinct if name != winner]
    than = f"flatter than {others[0]}" if len(others) == 1 else f"the flattest of {len(distinct)} networks"
    text = f"{winner} is {than}: {_by(clear, winner) if clear else 'no other is clearly ahead of it by any family'}"
    if len(others) > 1 and clear:
        text += f", ahead of {_listed(list(dict.fromkeys(voice.next for voice in clear)))}"
    unclear = [voice.family for voice in voices if voice not in clear]
    undecided = f"; {_listed(unclear)} {'show' if len(unclear) > 1 else 'shows'} no clear difference" if unclear else ""
    return f"{text}{undecided}.{'' if list(first) == [winner] else _overall(first)}"


def _overall(first: Sequence[str]) -> str:
    preferred = f"put {first[0]} first" if len(first) == 1 else f"prefer none of {_listed(first)}"
    return f" All comparable measures together, norms and margins included, {preferred}."


def _alike(distinct: Sequence[str], in_front: Sequence[str], voices: Sequence[Voice]) -> str:
    if len(in_front) < len(distinct):
        return f"No clear difference in flatness between {_listed(in_front)}, which are ahead of the others."
    said = "; ".join(f"{voice.best} {voice}" for voice in voices)
    return f"No clear difference in flatness: {said}, which is within noise."


def _by(voices: Sequence[Voice], name: str) -> str:
    return _listed([str(voice) for voice in voices if voice.best == name])


def _speakers(comparable: Iterable[Quantity]) -> dict[str, Quantity]:
    """One measure for each family: one with a headline, else the first of it."""
    families: dict[str, Quantity] = {}
    for quantity in comparable:
        entry = quantity.entry
        if entry is None or not entry.falls_with_loss:  # a norm or a margin: not about flatness
            continue
        before = families.get(entry.family)
        if before is None or (entry.headline and not (before.entry and before.entry.headline)):
            families[entry.family] = quantity
    return families


def _clear(quantity: Quantity, one: str, other: str) -> bool:
    """Whether the first is flatter by more than noise."""
    lead = quantity.value[other] - quantity.value[one]
    lead = lead if quantity.lower_is_better else -lead
    error = math.hypot(quantity.total_stderr(one), quantity.total_stderr(other))
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
