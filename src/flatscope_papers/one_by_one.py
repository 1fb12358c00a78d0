"""The order in which trials of studies are run: what looks at a network comes right after it, and not after all others.

Whoever loses the machine, or its ten minutes, keeps what was trained, measured and stored until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatscope.training import key_of
from flatscope_papers.declaration import Config, Stage


@dataclass(frozen=True)
class Portion:
    """Units of one stage that are run together.

    Attributes:
        stage: the units.
        finished: configurations that nothing after it looks at.
    """

    stage: Stage
    finished: tuple[Config, ...]


def portions_of_stages(stages: Sequence[Stage], at_once: int | None) -> list[Portion]:
    """The stages in small parts, each followed by what can be done of later stages then.

    Args:
        stages: in their order.
        at_once: units that look at nothing, and are run together; None for all of a stage.
    """
    parts = list(_stages_in_portions(stages, at_once))
    needed = [_keys_named_by(part.configs) for part in parts]
    last = {key: number for number, keys in enumerate(needed) for key in keys}
    made: dict[str, Config] = {}
    portions = []
    for number, part in enumerate(parts):
        made |= {key_of(config): config for config in part.configs}
        over = [key for key in made if last.get(key, -1) <= number]
        portions.append(Portion(part, tuple(made.pop(key) for key in over)))
    return portions


def stages_that_read_trials_of(own: Sequence[Stage], later: Iterable[Stage]) -> tuple[list[Stage], set[str]]:
    """Of other studies: what looks at trials of this one and at nothing else new; keys that the rest of them looks at.

    Args:
        own: the stages of this study.
        later: those of the studies that come after it.
    """
    others = list(later)
    every = {key_of(config) for stage in (*own, *others) for config in stage.configs}
    known = {key_of(config) for stage in own for config in stage.configs}
    readers, rest = [], set[str]()
    for stage in others:
        units = []
        for unit in stage.units:
            keys = {key_of(config) for config in unit}
            needs = _keys_named_by(unit) & every
            if needs and needs <= known:
                known |= keys
                units.append(unit)
            elif not keys <= known:
                rest |= needs
        if units:
            readers.append(Stage(units, stage.work, stage.gpus))
    return readers, rest


def _stages_in_portions(stages: Sequence[Stage], at_once: int | None) -> Iterator[Stage]:
    known = {key_of(config) for stage in stages for config in stage.configs}
    wanted = [[_keys_named_by(unit) & known for unit in stage.units] for stage in stages]
    waiting = [[place for place, keys in enumerate(needs) if keys] for needs in wanted]
    done: set[str] = set()
    for number, stage in enumerate(stages):
        roots = [place for place, keys in enumerate(wanted[number]) if not keys]
        size = max(1, len(roots) if at_once is None else at_once)
        for start in range(0, len(roots), size):
            yield _stage_of_some_units(stage, roots[start : start + size], done)
            for later in range(len(stages)):
                ready = [place for place in waiting[later] if wanted[later][place] <= done]
                waiting[later] = [place for place in waiting[later] if place not in ready]
                if ready:
                    yield _stage_of_some_units(stages[later], ready, done)


def _stage_of_some_units(stage: Stage, places: Sequence[int], done: set[str]) -> Stage:
    """Some units of a stage, whose trials are then done."""
    part = Stage([stage.units[place] for place in places], stage.work, stage.gpus)
    done |= {key_of(config) for config in part.configs}
    return part


def _keys_named_by(configs: Iterable[Config]) -> set[str]:
    return {key for config in configs for key in keys_within_configuration(config)}


def keys_within_configuration(value: Any) -> Iterator[str]:
    """Keys of all dictionaries within a configuration: a trial names those that it looks at by their configurations."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for part in inner:
        if isinstance(part, Mapping):
            yield key_of(part)
        yield from keys_within_configuration(part)
