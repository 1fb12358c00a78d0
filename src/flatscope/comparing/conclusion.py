"""Conclusion: which of several networks is flatter, by which measures and by how much, in one sentence."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from flatscope.comparing.decision import names_in_words, untrained_words
from flatscope.comparing.held_out import HeldOut
from flatscope.comparing.losses import AT_EQUAL_LOSS, LOSS_DECIDES, head_start, is_cross_entropy
from flatscope.comparing.rankings import networks_in_front
from flatscope.comparing.verdicts import CLEAR_ERRORS, OTHER_ARCHITECTURE, RESCALED, Quantity
from flatscope.formatting import with_error, written
from flatscope.network_summary import NetworkSummary
from flatscope.registry import declarations, family_name

# The factor from which on one network is called flatter than another. Of two networks that differ in their seed alone
# one pair in four is further apart: upper quartiles 1.32 and 1.34, 1.68 and 1.70, 1.17 and 1.15 of 256 pairs of the
# released population at its two losses (`python -m benchmarks.two_seeds`). Other measures were not tried.
LEAST_FACTORS = {"rho_sum": 1.35, "psi_trace": 1.7, "fisher_rao_norm": 1.2}
# Reasons of single measures in words for all of them.
SAID_OF_ALL = {
    OTHER_ARCHITECTURE: "the architectures differ, and measures of flatness depend on layers and weights",
    RESCALED: "rescaling units changes the flatness measures that were asked for, and not the function",
}


def least_factor(measure: str) -> float:
    """The factor by which two networks must differ before one is called flatter by this measure."""
    return LEAST_FACTORS.get(measure, LEAST_FACTORS["rho_sum"])


class Voice(NamedTuple):
    """Verdict of one family of flatness measures, by the measure that stands for it.

    Attributes:
        family: the family in words.
        measure: label of the measure.
        best: the network that it calls flattest.
        next: the one that comes second.
        factor: how many times flatter the first is than the second; NaN where values have no ratio.
        stderr: standard error of the factor.
        clear: whether the difference is more than noise, than two seeds of one setting make, and than the losses do.
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


@dataclass(frozen=True)
class Compared:
    """The networks and what was measured of them, as far as the answer rests on it.

    Attributes:
        names: all networks.
        distinct: one network of every function.
        networks: where each stands.
        tests: test errors of the distinct ones; None without any.
        comparable: the measures that may rank them.
        counting: those of them that count in the ranking.
        refused: labels of the measures that may not, by the reason.
        loss: name of the loss.
    """

    names: Sequence[str]
    distinct: Sequence[str]
    networks: Mapping[str, NetworkSummary]
    tests: HeldOut | None
    comparable: Sequence[Quantity]
    counting: Sequence[Quantity]
    refused: Mapping[str, Sequence[str]]
    loss: str

    @property
    def losses(self) -> Mapping[str, float]:
        """Training losses where curvature falls with them, as that of cross-entropy does; else empty."""
        return {name: each.loss for name, each in self.networks.items()} if is_cross_entropy(self.loss) else {}


def conclude_which_is_flatter(compared: Compared) -> Conclusion:
    """The answer between the trained networks, with what is to be said first: who is untrained or on a slope."""
    networks, distinct = compared.networks, compared.distinct
    raw = [name for name in distinct if networks[name].untrained]
    trained = [name for name in distinct if name not in raw]
    left_out = untrained_words(raw, networks, compared.tests)
    if len(trained) < 2 <= len(distinct):
        first = tuple(networks_in_front(compared.counting, distinct))
        return Conclusion("untold", "", (), f"Which is flatter cannot be told: {left_out}.", first)
    answer = flatter_by_measures(replace(compared, distinct=trained if raw else distinct))
    if answer.code == "untold" and LOSS_DECIDES in answer.sentence:
        answer = replace(answer, sentence=f"{answer.sentence.removesuffix('.')}: {AT_EQUAL_LOSS}.")
    if raw:
        answer = replace(answer, sentence=f"{answer.sentence} Left out: {left_out}.")
    steep = [name for name in (trained if raw else distinct) if networks[name].on_a_slope]
    if not steep or answer.code == "one function":
        return answer
    who = f"{names_in_words(steep)} {'is' if len(steep) == 1 else 'are'} not"
    who = "None of them is" if len(steep) == len(trained if raw else distinct) else who
    caution = f"{'its' if len(steep) == 1 else 'their'} flatness numbers describe where training stopped"
    return replace(answer, sentence=f"{who} at a minimum: {caution}. {answer.sentence}")


def flatter_by_measures(compared: Compared) -> Conclusion:
    """The answer by the measures of flatness alone, one voice for every family of them."""
    distinct, losses = compared.distinct, compared.losses
    if len(distinct) < 2:
        return Conclusion(
            "one function", "", (), f"{names_in_words(compared.names)} are one function: none is flatter."
        )
    first = tuple(networks_in_front(compared.counting, distinct))
    speakers = _representative_of_family(compared.comparable)
    if not speakers:
        return Conclusion(
            "untold", "", (), f"Which is flatter cannot be told: {_main_reason_of_refusal(compared.refused)}.", first
        )
    voices = tuple(
        _voice_of_family(family_name(family), quantity, distinct, losses) for family, quantity in speakers.items()
    )
    ahead = _clear_leads(speakers.values(), distinct, losses)
    in_front = _networks_in_front(ahead, distinct)
    if winner := _clear_winner(ahead, in_front, distinct):
        return Conclusion("flatter", winner, voices, _flatter_network_in_words(distinct, winner, voices, first), first)
    if in_front and not any(pair in ahead for pair in itertools.permutations(in_front, 2)):
        lower = _clear_leads(speakers.values(), distinct, {})
        if lower == ahead:
            return Conclusion("alike", "", voices, _equally_flat_in_words(distinct, in_front, voices), first)
        clause = _lower_loss_clause(_networks_in_front(lower, distinct), voices, losses)
        text = f"Which is flatter cannot be told: {clause}."
        return Conclusion("untold", "", voices, text, first)
    clear = [voice for voice in voices if voice.clear]
    said = clear if len({voice.best for voice in clear}) > 1 else voices
    bests = dict.fromkeys(voice.best for voice in said)
    text = ", but ".join(f"{name} is flatter, {_measures_that_lead_in_words(said, name)}" for name in bests)
    return Conclusion("split", "", voices, f"The flatness measures disagree: {text}.", first)


def _clear_leads(
    speakers: Iterable[Quantity], names: Sequence[str], losses: Mapping[str, float]
) -> set[tuple[str, str]]:
    """Pairs of which some measure calls the first flatter."""
    measures = list(speakers)
    return {
        pair
        for pair in itertools.permutations(names, 2)
        if any(_is_clearly_flatter(q, *pair, losses) for q in measures)
    }


def _networks_in_front(ahead: set[tuple[str, str]], names: Sequence[str]) -> list[str]:
    """Networks behind none that is ahead of them and not also behind them."""
    return [n for n in names if not any((other, n) in ahead and (n, other) not in ahead for other in names)]


def _clear_winner(ahead: set[tuple[str, str]], in_front: Sequence[str], names: Sequence[str]) -> str:
    """The network that is ahead of all others and behind none; empty where there is none."""
    rest = {name: [other for other in names if other != name] for name in in_front}
    return next((n for n in in_front if all((n, o) in ahead and (o, n) not in ahead for o in rest[n])), "")


def _lower_loss_clause(best: Sequence[str], voices: Sequence[Voice], losses: Mapping[str, float]) -> str:
    """Clause on lower numbers that a lower loss explains."""
    leading = next((name for name in best if any(voice.best == name for voice in voices)), best[0])
    apart = max((head_start(losses, leading, voice.next) for voice in voices if voice.best == leading), default=1.0)
    numbers = f"{leading} has the lower numbers, {_measures_that_lead_in_words(voices, leading)}"
    return f"{numbers}, but its training loss is {written(apart, 3)} times lower, and {LOSS_DECIDES}"


def _flatter_network_in_words(
    distinct: Sequence[str], winner: str, voices: Sequence[Voice], first: Sequence[str]
) -> str:
    clear = [voice for voice in voices if voice.clear and voice.best == winner]
    others = [name for name in distinct if name != winner]
    than = f"flatter than {others[0]}" if len(others) == 1 else f"the flattest of {len(distinct)} networks"
    none_ahead = "no other is clearly ahead of it by any family"
    text = f"{winner} is {than}: {_measures_that_lead_in_words(clear, winner) if clear else none_ahead}"
    if len(others) > 1 and clear:
        text += f", ahead of {names_in_words(list(dict.fromkeys(voice.next for voice in clear)))}"
    unclear = [voice.family for voice in voices if voice not in clear]
    undecided = (
        f"; {names_in_words(unclear)} {'show' if len(unclear) > 1 else 'shows'} no clear difference" if unclear else ""
    )
    if not first or list(first) == [winner]:
        return f"{text}{undecided}."
    preferred = f"put {first[0]} first" if len(first) == 1 else f"do not favour any of {names_in_words(first)}"
    return f"{text}{undecided}. The measures that count in the ranking {preferred}."


def _equally_flat_in_words(distinct: Sequence[str], in_front: Sequence[str], voices: Sequence[Voice]) -> str:
    if len(in_front) < len(distinct):
        return f"No clear difference in flatness between {names_in_words(in_front)}, which are ahead of the others."
    said = "; ".join(f"{voice.best} {voice}" for voice in voices)
    few = "within noise, or what two seeds of one training differ by"
    return f"No clear difference in flatness: {said}, which is {few}."


def _measures_that_lead_in_words(voices: Sequence[Voice], name: str) -> str:
    return names_in_words([str(voice) for voice in voices if voice.best == name])


def _representative_of_family(comparable: Iterable[Quantity]) -> dict[str, Quantity]:
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


def _is_clearly_flatter(quantity: Quantity, one: str, other: str, losses: Mapping[str, float]) -> bool:
    """True if the first is flatter by more than noise, than a second seed makes, and than its lower loss explains."""
    lead = quantity.value[other] - quantity.value[one]
    lead -= quantity.below[other] + quantity.above[one]  # between the ends of two searches' intervals
    if not quantity.lower_is_better:
        lead = quantity.value[one] - quantity.value[other] - quantity.below[one] - quantity.above[other]
    error = math.hypot(quantity.sampling_error(one), quantity.sampling_error(other))
    least = min(abs(quantity.value[one]), abs(quantity.value[other]))
    if not lead > max(CLEAR_ERRORS * error, (least_factor(quantity.measure) - 1) * least):
        return False
    factor, stderr = _ratio_of_values(quantity, one, other)
    return not factor - 2 * stderr <= head_start(losses, one, other)  # without a factor nothing is known


def _ratio_of_values(quantity: Quantity, one: str, other: str) -> tuple[float, float]:
    """Ratio of the larger value to the smaller one, with its standard error; NaN where they have none."""
    low, high = sorted((quantity.value[one], quantity.value[other]))
    if low <= 0:
        return math.nan, 0.0
    return high / low, high / low * math.hypot(*(quantity.total_stderr(n) / quantity.value[n] for n in (one, other)))


def _voice_of_family(family: str, quantity: Quantity, names: Sequence[str], losses: Mapping[str, float]) -> Voice:
    sign = 1 if quantity.lower_is_better else -1
    best, second = sorted(names, key=lambda name: sign * quantity.value[name])[:2]
    clear = _is_clearly_flatter(quantity, best, second, losses)
    return Voice(family, quantity.label, best, second, *_ratio_of_values(quantity, best, second), clear)


def _main_reason_of_refusal(refused: Mapping[str, Sequence[str]]) -> str:
    """The reason that keeps most flatness measures from ranking these networks, said of all of them."""
    known = declarations()
    counts: Counter[str] = Counter()
    for reason, labels in refused.items():
        entries = [known.get(label.partition("[")[0]) for label in labels]
        counts[reason] += sum(entry is not None and entry.falls_with_loss for entry in entries)
    if not counts.total():
        return "no flatness measure that is invariant under rescaling (such as rho_sum or psi_trace) was measured"
    reason = counts.most_common(1)[0][0]
    return next((words for start, words in SAID_OF_ALL.items() if reason.startswith(start)), reason)
