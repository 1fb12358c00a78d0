"""Time one piece of every kind on a shortened run, in a store of its own that is thrown away.

A stack of networks trains for a few epochs on as many images as take a moment; epochs with and without an evaluation
come one after the other, so that both are known, and the first two, with what is set up once, do not count. A
measurement looks at such a network, with as many repetitions, or on as many images, as take a moment. What the whole
piece takes is then read off a line through two sizes, since a part of the time does not grow with them.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flatscope.errors import FlatscopeError
from flatscope.factories import find_factory
from flatscope.inspection import first_line
from flatscope.studies.cost import TRAINING
from flatscope.studies.pieces import Piece, sizes
from flatscope.studies.study import Config
from flatscope.sweeps.configuration import key_of
from flatscope.sweeps.store import Store

MOMENT = 0.3  # seconds: what a timed epoch or measurement should take at least
LONGEST = 30.0  # seconds after which a shortened run is given up, at the end of an epoch
COLD = 4.0  # seconds up to which a first measurement is done again, for the sake of what it set up
FIRST_IMAGES, MOST_IMAGES = 128, 10_000
LEAST_IMAGES = 1_000  # measured: enough for batches of that size
WARM_UP = 2  # epochs
FEWEST_EPOCHS, MOST_EPOCHS = 4, 24
SAFE_RATE = 0.01  # a diverged network stops, and cannot be measured; how long a step takes does not depend on the rate
NEVER = {"stop_loss": 1e-30, "stop_zero_error": False, "stop_gradient_norm": 1e-30}  # rules that do not hold
SPENT = "the time for timing was spent"

Repetitions = Callable[[int], float]


@dataclass(frozen=True)
class Repeated:
    """Counts in the configurations of a work: its time is a constant plus something in proportion to the repetitions.

    Attributes:
        paths: names of the counts.
        least: what each count may be brought down to, for the second point of a line.
        times: how many repetitions a count stands for.
    """

    paths: tuple[str, ...]
    least: int
    times: Repetitions = float


REPEATED: Mapping[str, Repeated] = {
    "flatscope.studies.neyshabur2017_complexity:perturbations": Repeated(
        ("perturbations.steps", "perturbations.draws"), 4
    ),
    "flatscope.studies.neyshabur2017_interactions:conditions": Repeated(("samples.products",), 2),
    "flatscope.studies.yi2019:surfaces": Repeated(("surface.grid",), 3, lambda grid: grid**2),
    "flatscope.studies.yi2019_invariance:written_otherwise": Repeated(("rescalings",), 2),
    "flatscope.studies.zhang2017_chains:run_potential": Repeated(("steps",), 400),
    "flatscope.studies.zhang2017_landscape:mix": Repeated(("resolution",), 2, lambda side: (side + 1) * (side + 2) / 2),
    "flatscope.sweeps.stored_networks:measure_stored": Repeated(("measure_options.flatness_radius.directions",), 2),
}
ONCE = Repeated((), 1)


class NotTimed(Exception):  # noqa: N818  a reason in a table
    """Why a piece has no time."""


@dataclass(frozen=True)
class Line:
    """Time against size: through the point that was timed, with the slope to a smaller one.

    Attributes:
        size: that was timed.
        seconds: it took.
        growing: share of the time that grows with the size.
    """

    size: float
    seconds: float
    growing: float = 1.0

    @classmethod
    def through(cls, size: float, seconds: float, smaller: float, less: float) -> Line:
        """The line through two points; never steeper than through nothing, never falling."""
        if seconds <= 0 or smaller >= size:
            return cls(size, max(seconds, 0.0))
        growing = (seconds - less) / seconds / (1 - smaller / size)
        return cls(size, seconds, min(1.0, max(0.0, growing)))

    def at(self, size: float) -> float:
        """Seconds at that size."""
        return self.seconds * (1 + self.growing * (size / self.size - 1))


@dataclass(frozen=True)
class TrainingTime:
    """Of a stack: an epoch without evaluation, an evaluation of all images, a look at the followed networks."""

    images: int
    epoch: Line
    evaluation: Line
    look: Line

    def each(self, piece: Piece) -> float:
        """Seconds of an epoch of that piece, evaluations included."""
        every = int(piece.configs[0]["train"].get("evaluate_every", 1))
        return self.epoch.at(piece.images) + self.evaluation.at(piece.images + piece.tested) / every

    def total(self, piece: Piece) -> float:
        """Seconds of all its epochs."""
        follow = piece.configs[0].get("follow")
        looks = len(follow["epochs"]) + len(follow["losses"]) + 1 if follow else 0
        return epochs_of(piece) * self.each(piece) + looks * self.look.at(piece.images)


@dataclass(frozen=True)
class MeasuringTime:
    """Of a measurement of the largest piece of its kind, and the share of its repetitions and images that was done."""

    seconds: float
    share: float


def epochs_of(piece: Piece) -> int:
    """Epochs at most."""
    return max(int(config["train"].get("epochs", 10)) for config in piece.configs)


class Timer:
    """Times pieces, each kind once.

    Args:
        pieces: all that may be asked for, networks to be measured among them.
        store: for shortened networks; not the user's.
        budget: seconds after which nothing new is begun.
    """

    def __init__(self, pieces: Sequence[Piece], store: Store, budget: float) -> None:
        self._store, self._end = store, time.perf_counter() + budget
        self._largest: dict[str, Piece] = {}
        self._home: dict[str, tuple[Piece, int]] = {}
        for piece in pieces:
            if piece.kind not in self._largest or piece.images > self._largest[piece.kind].images:
                self._largest[piece.kind] = piece
            if piece.part == TRAINING:
                self._home.update({key_of(config): (piece, place) for place, config in enumerate(piece.configs)})
        self._known: dict[str, TrainingTime | MeasuringTime | NotTimed] = {}
        self._trained: dict[str, list[dict[str, Any]]] = {}

    def training(self, piece: Piece) -> TrainingTime:
        """Times of a stack's kind."""
        found = self._once(piece, self._time_training)
        assert isinstance(found, TrainingTime)
        return found

    def measuring(self, piece: Piece) -> MeasuringTime:
        """Time of a measurement's kind."""
        found = self._once(piece, self._time_measuring)
        assert isinstance(found, MeasuringTime)
        return found

    def _once(self, piece: Piece, timed: Callable[[Piece], TrainingTime | MeasuringTime]) -> Any:
        if piece.kind not in self._known:
            try:
                if time.perf_counter() > self._end:
                    raise NotTimed(SPENT)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # about networks that are hardly trained
                    self._known[piece.kind] = timed(self._largest[piece.kind])
            except NotTimed as problem:
                self._known[piece.kind] = problem
            except Exception as problem:  # whatever it is, it costs this kind only
                said = str(problem) if isinstance(problem, FlatscopeError) else first_line(problem)
                self._known[piece.kind] = NotTimed(f"{type(problem).__name__}: {said}")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        found = self._known[piece.kind]
        if isinstance(found, NotTimed):
            raise found
        return found

    def _time_training(self, piece: Piece) -> TrainingTime:
        batch = piece.configs[0]["train"].get("batch_size", 64)
        images = min(piece.images, batch * math.ceil(FIRST_IMAGES / batch))
        looks = int("follow" in piece.configs[0])
        epochs = FEWEST_EPOCHS + 2 * looks
        at_first = self._epochs(piece, images, epochs)
        enough = MOMENT / max(at_first[0] + at_first[1], 1e-6)
        if enough < 2:
            return TrainingTime(images, *(Line(*point) for point in _points(piece, images, at_first)))
        more = min(piece.images, max(images, MOST_IMAGES), batch * math.ceil(images * enough / batch))
        # Where all images do not take a moment, more epochs of them do.
        longer = 2 * round(enough * images / more)
        after = self._epochs(piece, more, max(epochs, min(MOST_EPOCHS, longer)))
        pairs = zip(_points(piece, more, after), _points(piece, images, at_first), strict=True)
        return TrainingTime(more, *(Line.through(*large, *small) for large, small in pairs))

    def _epochs(self, piece: Piece, images: int, epochs: int) -> tuple[float, float, float]:
        """Seconds of an epoch, of an evaluation and of a look, when the stack is trained on that many images."""
        configs = [_shortened_training(config, images, piece.tested, epochs) for config in piece.configs]
        stamps: list[tuple[int, float]] = []
        begun = now()

        def report(_: float, note: str) -> None:
            if note.startswith("epoch "):
                stamps.append((int(note.removeprefix("epoch ")), now()))
                if stamps[-1][1] - begun > LONGEST:
                    raise NotTimed(f"{len(stamps)} epochs of {images} images took longer than {LONGEST:g} s")

        find_factory(piece.work)(configs, self._store, report)
        self._trained[piece.kind] = configs
        if not stamps:  # the work does not tell of its epochs: twice as many of them, without what is set up once
            took, begun = now() - begun, now()
            longer = [_shortened_training(config, images, piece.tested, 2 * epochs) for config in piece.configs]
            find_factory(piece.work)(longer, self._store, report)
            return max(0.0, now() - begun - took) / epochs, 0.0, 0.0
        epoch = evaluation = look = 0.0
        for group in _groups(stamps):
            steps = itertools.pairwise(group)
            counted = {late[0]: late[1] - early[1] for early, late in steps if late[0] > WARM_UP}
            if len(group) < epochs:
                raise NotTimed("its networks diverge")
            last = counted.pop(epochs) if "follow" in piece.configs[0] else 0.0
            plain = statistics.median(seconds for number, seconds in counted.items() if number % 2)
            evaluated = statistics.median(seconds for number, seconds in counted.items() if number % 2 == 0)
            epoch += plain
            evaluation += max(0.0, evaluated - plain)
            look += max(0.0, last - evaluated)
        return epoch, evaluation, look

    def _time_measuring(self, piece: Piece) -> MeasuringTime:
        """Fewer repetitions where the work has some, else fewer images; more of them until they take a moment."""
        config, whole = piece.configs[0], piece.images
        repeated = REPEATED.get(piece.work, ONCE)
        is_repeated = any(count_at(config, path) is not None for path in repeated.paths)

        def run(share: float, least: int) -> tuple[float, float]:
            """Seconds of about that share of the piece, and the share that it was."""
            short, images = dict(config), whole
            if is_repeated:
                short = _fewer(config, repeated, share, least * repeated.least)
            elif whole:
                images = min(whole, max(math.ceil(share * whole), least * LEAST_IMAGES))
            networks = [self._network(network, images) for network in piece.networks]
            if networks:
                short |= {"network": networks[0]} if "network" in short else {"networks": networks}
            begun = now()
            find_factory(piece.work)([short], self._store, lambda *_: None)
            done = _share(config, short, repeated) if is_repeated else images / whole if whole else 1.0
            return now() - begun, done

        seconds, share = run(0.0, 2)
        if seconds < COLD:
            seconds, share = run(0.0, 2)  # the first time also loads and compiles
        while seconds < MOMENT and share < 1:
            seconds, share = run(min(1.0, share * min(8.0, max(2.0, MOMENT / seconds))), 2)
        if share == 1:
            return MeasuringTime(seconds, 1.0)
        less, smaller = run(share / 4, 1)
        return MeasuringTime(Line.through(share, seconds, smaller, less).at(1.0), share)

    def _network(self, network: Config, images: int) -> dict[str, Any]:
        """Configuration with that many images under which the store has weights of a shortened training."""
        if key_of(network) not in self._home:
            raise NotTimed("it measures networks that the study does not train")
        piece, place = self._home[key_of(network)]
        try:
            self.training(piece)
        except NotTimed as problem:
            raise NotTimed(f"its networks: {problem}") from None
        trained = self._trained[piece.kind][place]
        short = _cut(network, images, piece.tested) if images < sizes(network)[0] else dict(network)
        if short not in self._store:
            found = self._store.read(trained)
            frames = {name: found.frame(name) for name in found.frames}
            self._store.write(short, found.metrics, weights=found.weights(), frames=frames)
        return short


def _shortened_training(config: Config, images: int, tested: int, epochs: int) -> dict[str, Any]:
    """The configuration with few images and epochs, evaluated after every other epoch, that no rule stops."""
    short = {name: value for name, value in _cut(config, images, tested).items() if name not in ("measures", "bounds")}
    train = {**config["train"], **{name: value for name, value in NEVER.items() if config["train"].get(name)}}
    train |= {"epochs": epochs, "evaluate_every": 2, "lr": min(train.get("lr", SAFE_RATE), SAFE_RATE)}
    if "follow" in config:
        short["follow"] = {"epochs": [], "losses": []}
    return {**short, "train": train}


def _cut(config: Config, images: int, tested: int) -> dict[str, Any]:
    """The configuration with fewer images; a set of confusing images has no place in it."""
    labels = config.get("labels")
    short = dict(config) if not labels or "confusion" not in labels else {**config, "labels": None}
    return {**short, "data": {**config["data"], "train_size": images, "test_size": min(tested, images)}}


def _points(piece: Piece, images: int, took: Sequence[float]) -> list[tuple[float, float]]:
    """Size and seconds of an epoch, of an evaluation and of a look."""
    return [(size, time) for size, time in zip((images, images + min(piece.tested, images), images), took, strict=True)]


def _groups(stamps: Sequence[tuple[int, float]]) -> list[list[tuple[int, float]]]:
    """Epochs with their times, one list per network or stack: its epochs are counted from one."""
    groups: list[list[tuple[int, float]]] = []
    for epoch, when in stamps:
        if not groups or epoch <= groups[-1][-1][0]:
            groups.append([])
        groups[-1].append((epoch, when))
    return groups


def count_at(config: Config, path: str) -> int | None:
    """The count of that name, "perturbations.draws"; None where there is none."""
    value: Any = config
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, int) else None


def _with_count(config: Config, path: str, count: int) -> dict[str, Any]:
    name, _, rest = path.partition(".")
    return {**config, name: _with_count(config[name], rest, count) if rest else count}


def _fewer(config: Config, repeated: Repeated, share: float, least: int) -> dict[str, Any]:
    """The configuration with that share of each repetition, rounded up; odd counts stay odd, and even ones even."""
    whole = {path: count for path in repeated.paths if (count := count_at(config, path))}
    first = {path: min(least, count) for path, count in whole.items()}
    first = {path: count + (whole[path] - count) % 2 for path, count in first.items()}
    possible = max((repeated.times(first[path]) / repeated.times(whole[path]) for path in whole), default=1.0)
    short = dict(config)
    for path, count in whole.items():
        wanted = max(share, possible) * repeated.times(count)
        enough = (few for few in range(first[path], count + 1, 2) if repeated.times(few) >= wanted)
        short = _with_count(short, path, next(enough, count))
    return short


def _share(config: Config, short: Config, repeated: Repeated) -> float:
    """Share of the repetitions that a shortened configuration has."""
    pairs = [(count_at(config, path), count_at(short, path)) for path in repeated.paths]
    return min((repeated.times(few) / repeated.times(count) for count, few in pairs if count and few), default=1.0)


def now() -> float:
    """Seconds, once the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
