"""Decision: what to do with these networks, in one sentence, and what flatness may say in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flatscope.comparing.held_out import HeldOut
from flatscope.comparing.records import DIFFERENCES, RANKING, records_by_measure
from flatscope.doubts import MOST
from flatscope.formatting import with_error, written
from flatscope.leaks import Overlap
from flatscope.network_summary import NetworkSummary

LEARNING = 0.05  # training error from which on a network that stands on a slope is called not trained to the end
MOST_VALUES = 4  # networks whose errors are said
UNTRIED = {"next_token": "on language models", "mse": "on regression"}  # what has no record, by its loss


@dataclass(frozen=True)
class Decision:
    """A decision between networks, with its sentence.

    Attributes:
        code: "keep" (one is clearly better), "either" (the test data cannot tell some apart), "one function" (they are
            copies), "train on", or "hold out" (no test data tell anything).
        networks: those to keep, or to train on; all of them where nothing tells them apart.
        sentence: for people.
    """

    code: str
    networks: tuple[str, ...]
    sentence: str

    def __str__(self) -> str:
        """The sentence."""
        return self.sentence


def decide_network_to_keep(
    names: Sequence[str],
    distinct: Sequence[str],
    networks: Mapping[str, NetworkSummary],
    tests: HeldOut | None,
    is_new: bool,
    overlap: Overlap | None = None,
) -> Decision:
    """Decide which network to keep, by held-out data first.

    Args:
        names: all networks.
        distinct: one network of every function.
        networks: where each stands.
        tests: the test errors of the distinct ones; None without any.
        is_new: whether the test samples are others than those of training.
        overlap: how many of them are training samples all the same; None where nobody looked.
    """
    if len(distinct) < 2:
        text = f"Keep {'either' if len(names) == 2 else 'any'}: {names_in_words(names)} are one and the same function."
        return Decision("one function", tuple(names), text)
    usable = tests if is_new and not (overlap is not None and overlap.leaked) else None
    able = networks_able_at_high_loss(distinct, networks, usable)
    if not able and (untrained := _reason_nothing_is_trained(distinct, networks)):
        sentence = (
            f"; test {_test_quantity_in_plural(usable)}: {first_test_errors_in_words(usable, distinct)}"
            if usable
            else ""
        )
        return Decision("train on", tuple(distinct), f"Train first, or check the data: {untrained}{sentence}.")
    if tests is None or not is_new:
        why = "no test data were given" if tests is None else "the test samples are the training samples"
        text = f"Hold out test data before you choose: {why}, and flatness alone should not decide."
        return Decision("hold out", tuple(distinct), text)
    if overlap is not None and overlap.leaked:
        start = f"{overlap}: hold out others before you choose"
        return Decision("hold out", tuple(distinct), f"{start}, and flatness alone should not decide.")
    decision = _decide_by_test_errors(distinct, networks, tests, able)
    scaled = [name for name in able if name in decision.networks]
    return replace(decision, sentence=f"{decision.sentence} {_scale_words(scaled, networks)}") if scaled else decision


def networks_able_at_high_loss(
    names: Sequence[str], networks: Mapping[str, NetworkSummary], tests: HeldOut | None
) -> list[str]:
    """Networks that tell classes apart although their loss is no better than that of a constant output."""
    useful = tests.useful if tests is not None else []
    return [name for name in names if name in useful and networks[name].untrained and not networks[name].error > MOST]


def untrained_words(names: Sequence[str], networks: Mapping[str, NetworkSummary], tests: HeldOut | None) -> str:
    """Clause on networks whose flatness numbers mean nothing because their loss is no better than a constant's."""
    able = networks_able_at_high_loss(names, networks, tests)
    raw = [name for name in names if name not in able]
    words = [f"{names_in_words(raw)} {'is' if len(raw) == 1 else 'are'} not trained"] if raw else []
    if able:
        words.append(
            f"the training loss of {names_in_words(able)} is no better than that of outputs that ignore the inputs"
        )
    return " and ".join(words)


def _scale_words(names: Sequence[str], networks: Mapping[str, NetworkSummary]) -> str:
    """Remark on the scale of outputs that tell classes apart at a loss that is no better than a constant's."""
    over = all(networks[name].loss > networks[name].constant for name in names)
    fault = "Overconfident" if over else "Outputs of the wrong scale"
    return f"{fault}: {_loss_words(names, networks)}; rescale the outputs (temperature)."


def _loss_words(names: Sequence[str], networks: Mapping[str, NetworkSummary]) -> str:
    """Clause on training losses that are no better than a constant's."""
    losses = _first_few_in_words([f"{name} {written(networks[name].loss, 3)}" for name in names])
    constant = f"{written(networks[names[0]].constant, 3)}, that of outputs that ignore the inputs"
    return f"the training loss is no better than {constant} ({losses})"


def _reason_nothing_is_trained(distinct: Sequence[str], networks: Mapping[str, NetworkSummary]) -> str:
    """The reason why none of the networks is trained; empty where one is."""
    lost = [name for name in distinct if networks[name].error > MOST]
    if len(lost) == len(distinct):
        return f"{names_in_words(distinct)} misclassify most of their own training samples"
    raw = [name for name in distinct if networks[name].untrained]
    rest = [name for name in distinct if name not in raw]
    if not set(rest) <= set(lost):
        return ""
    text = _loss_words(raw, networks)
    return f"{text}, or most of the training samples are misclassified ({_first_few_in_words(rest)})" if rest else text


def _decide_by_test_errors(
    distinct: Sequence[str], networks: Mapping[str, NetworkSummary], tests: HeldOut, able: Sequence[str]
) -> Decision:
    """Keep the lowest test error where it is clear; else name those not told apart, or advise to train on.

    Args:
        distinct: one network of every function.
        networks: where each stands.
        tests: their test errors.
        able: those that are wrong in scale alone, which no training has to cure.
    """
    level, many = tests.level, _test_quantity_in_plural(tests)
    lowest_first = sorted(distinct, key=lambda name: (tests.values[name], name != tests.best))
    values = first_test_errors_in_words(tests, distinct if len(distinct) <= MOST_VALUES else lowest_first)
    if len(level) == 1:
        nearest = min(tests.differences.values(), key=lambda difference: difference.apart)
        apart = difference_in_points(tests, nearest.apart, nearest.stderr)
        text = f"Keep {level[0]}: its test {tests.what} is clearly the lowest ({values}; {apart} ahead)."
        return Decision("keep", tuple(level), text)
    steep = [name for name in level if name not in able and _training_was_broken_off(networks[name])]
    if len(steep) == len(level):
        text = (
            f"Train on before you choose: {names_in_words(level)} are not at a minimum, and test {many} do not differ"
        )
        errors_in_words = first_test_errors_in_words(tests, [name for name in lowest_first if name in level])
        return Decision("train on", tuple(level), f"{text} ({errors_in_words}).")
    if len(distinct) == 2:
        text = f"Keep either: test {many} do not differ ({values}); flatness should not decide."
        return Decision("either", tuple(level), text)
    best, *others = (name for name in lowest_first if name in level)
    text = f"Keep {best}, whose test {tests.what} is the lowest ({test_error_in_words(tests, best)}), or one that "
    text += f"cannot be told apart from it: {first_test_errors_in_words(tests, others)}"
    worse = [name for name in distinct if name not in level]
    clearly = f"; {len(worse)} {'is' if len(worse) == 1 else 'are'} clearly worse" if worse else ""
    return Decision("either", tuple(level), f"{text}{clearly}. Flatness should not decide.")


def _training_was_broken_off(network: NetworkSummary) -> bool:
    """True for a training that was broken off: the loss still falls, and samples are still to be learnt."""
    return network.on_a_slope and not network.error <= LEARNING


def first_test_errors_in_words(tests: HeldOut, names: Sequence[str]) -> str:
    """Test errors of the first networks, and how many there are more."""
    return _first_few_in_words([f"{name} {test_error_in_words(tests, name)}" for name in names])


def _first_few_in_words(sentences: Sequence[str]) -> str:
    """The first of them as people list them, and how many there are more."""
    return names_in_words(
        [*sentences[:MOST_VALUES], *([f"{len(sentences) - MOST_VALUES} more"] if len(sentences) > MOST_VALUES else [])]
    )


def _test_quantity_in_plural(tests: HeldOut) -> str:
    """Name of the test quantity that decides, in the plural."""
    return "losses" if tests.what == "loss" else "errors"


def test_error_in_words(tests: HeldOut, name: str) -> str:
    """The test error of a network with its standard error, `2.5 ± 0.8 %`; the loss without classes."""
    return difference_in_points(tests, tests.values[name], tests.errors[name], unit=" %")


def difference_in_points(tests: HeldOut, value: float, stderr: float, unit: str = " points") -> str:
    """A difference of test errors in points, or of losses."""
    scale, unit = (100, unit) if tests.what == "error" else (1, "")
    if not stderr > 0:
        return f"{written(scale * value, 3)}{unit}"
    first = math.floor(math.log10(scale * stderr))
    decimals = max(0, -first + (scale * stderr < 2 * 10.0**first))  # one digit of the error, two of one below 2
    if decimals <= 4:
        return f"{scale * value:.{decimals}f} ± {scale * stderr:.{decimals}f}{unit}"
    shown, error = with_error(scale * value, scale * stderr)
    return f"{shown} ± {error}{unit}"


def ranking_record_in_words(difference: str, counting: Sequence[str]) -> str:
    """Sentence on how often the measures ranked released networks that differ like these rightly.

    Args:
        difference: one of `DIFFERENCES`.
        counting: names of the measures that count in the ranking.
    """
    known = records_by_measure(difference)
    asked = DIFFERENCES[difference]
    best = max((name for name in counting if name in known), key=lambda name: known[name].psi, default="")
    flat = known["rho_sum"]
    if best:
        record = f"{best} was {known[best].words}, rho_sum in {flat.share}, a coin in 50 %"
    else:
        vote = known[RANKING]
        record = f"rho_sum was {flat.words}, the best measures together in {vote.share}, a coin in 50 %"
    return f"What that is worth, for {asked}, on 1,024 small networks: {record}."


def untried_loss_in_words(loss: str) -> str:
    """Sentence in place of `ranking_record_in_words` where there are no classes, with what was not tried."""
    what = UNTRIED.get(loss, "with this loss")
    return f"What that is worth was not tried {what}: the record is of small image classifiers."


def names_in_words(names: Sequence[str], word: str = "and") -> str:
    """Names as people list them."""
    *first, last = names
    return f"{', '.join(first)} {word} {last}" if first else last
