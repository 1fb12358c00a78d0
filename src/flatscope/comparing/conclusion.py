"""Which of the networks is flatter, by which measures that may say so, and by how much: the answer in a sentence."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flatscope.comparing.verdicts import Quantity
from flatscope.formatting import number, with_error
from flatscope.registry import declarations

# A difference is called clear from so many standard errors on; without a known error, from this factor on, which is a
# rule of thumb: exact values of these samples say nothing about others.
CLEAR_ERRORS, CLEAR_FACTOR = 1.96, 1.1
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
        code: "flatter" (all families name one network), "split" (they name different ones), "alike" (none is clear),
            "one function" (nothing to compare) or "untold" (no flatness measure may compare these networks).
        winner: the network that is flatter; empty where there is none.
        voices: one per family of comparable flatness measures.
        sentence: the answer for people.
    """

    code: str
    winner: str
    voices: tuple[Voice, ...]
    sentence: str

    def __str__(self) -> str:
        """The sentence."""
        return self.sentence


def conclude(
    names: Sequence[str], distinct: Sequence[str], comparable: Iterable[Quantity], refused: Mapping[str, Sequence[str]]
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
    voices = tuple(_voices(comparable, distinct))
    if not voices:
        return Conclusion("untold", "", (), f"Which is flatter cannot be told: {_why_untold(refused)}.")
    clear = [voice for voice in voices if voice.clear]
    winners = list(dict.fromkeys(voice.best for voice in clear))
    if not winners:
        said = "; ".join(f"{voice.best} {voice}" for voice in voices)
        text = f"No clear difference in flatness: {said}, which is within noise."
        return Conclusion("alike", "", voices, text)
    if len(winners) > 1:
        said = ", but ".join(f"{name} is flatter, {_by(clear, name)}" for name in winners)
        return Conclusion("split", "", voices, f"The flatness measures disagree: {said}.")
    return Conclusion("flatter", winners[0], voices, _flatter(distinct, winners[0], voices))


def _flatter(distinct: Sequence[str], winner: str, voices: Sequence[Voice]) -> str:
    clear = [voice for voice in voices if voice.clear]
    others = [name for name in distinct if name != winner]
    than = f"flatter than {others[0]}" if len(others) == 1 else f"the flattest of {len(distinct)} networks"
    text = f"{winner} is {than}: {_by(clear, winner)}"
    if len(others) > 1:
        text += f", ahead of {_listed(list(dict.fromkeys(voice.next for voice in clear)))}"
    unclear = [voice.family for voice in voices if not voice.clear]
    undecided = f"; {_listed(unclear)} {'show' if len(unclear) > 1 else 'shows'} no clear difference" if unclear else ""
    return f"{text}{undecided}."


def _by(voices: Sequence[Voice], name: str) -> str:
    return _listed([str(voice) for voice in voices if voice.best == name])


def _voices(comparable: Iterable[Quantity], names: Sequence[str]) -> Iterator[Voice]:
    """One voice per family: a measure with a headline speaks for its family, else the first of it."""
    families: dict[str, Quantity] = {}
    for quantity in comparable:
        entry = quantity.entry
        if entry is None or not entry.falls_with_loss:  # a norm or a margin: not about flatness
            continue
        before = families.get(entry.family)
        if before is None or (entry.headline and not (before.entry and before.entry.headline)):
            families[entry.family] = quantity
    for family, quantity in families.items():
        yield _voice(FAMILIES.get(family, family), quantity, names)


def _voice(family: str, quantity: Quantity, names: Sequence[str]) -> Voice:
    sign = 1 if quantity.lower_is_better else -1
    best, second = sorted(names, key=lambda name: sign * quantity.value[name])[:2]
    low, high = sorted((quantity.value[best], quantity.value[second]))
    errors = {name: quantity.total_stderr(name) for name in (best, second)}
    error = math.hypot(*errors.values())
    clear = high - low > CLEAR_ERRORS * error if error > 0 else high - low > (CLEAR_FACTOR - 1) * abs(low)
    if low <= 0:
        return Voice(family, quantity.label, best, second, math.nan, 0.0, clear)
    stderr = high / low * math.hypot(*(own / quantity.value[name] for name, own in errors.items()))
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
