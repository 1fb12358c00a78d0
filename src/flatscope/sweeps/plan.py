"""A sweep as a file describes it: a base configuration, what varies, and which trials go together.

name = "rates"
group_by = ["model", "train.batch_size"]        # trials that agree on these are one unit; left out: each its own

[base.data]
name = "digits"
[base.train]
epochs = 20

[grid]                                          # every combination; or [[trials]], one by one
"train.lr" = [0.01, 0.1, 1.0]
"train.seed" = [0, 1, 2]
"""

from __future__ import annotations

import itertools
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatscope.errors import InputError, UnknownNameError
from flatscope.sweeps.configuration import flat, key_of, plain, to_json

TRAIN_AND_MEASURE = "flatscope.sweeps.work:train_and_measure"
PARTS = ("name", "group_by", "group_size", "work", "base", "grid", "trials")

Config = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """What a sweep consists of.

    Attributes:
        name: of the sweep, under which a store remembers it.
        work: "package.module:function" that does a unit.
        base: configuration that all trials share.
        grid: lists of values by dotted name ("train.lr"); every combination is a trial, the last varies fastest.
        trials: changes to the base, one entry per trial; with a grid, each is combined with all of the grid.
        group_by: dotted names; trials that agree on all of them form a unit. None: each trial is a unit.
        group_size: trials in a unit at most.
    """

    name: str
    work: str = TRAIN_AND_MEASURE
    base: Mapping[str, Any] = field(default_factory=dict)
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    trials: Sequence[Mapping[str, Any]] = field(default_factory=list)
    group_by: Sequence[str] | None = None
    group_size: int | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "sweep") -> Sweep:
        """The sweep that a dictionary describes; unknown keys are refused."""
        for name in values:
            if name not in PARTS:
                fix = "What the trials share goes into [base], as [base.data] and [base.train]"
                raise UnknownNameError(f"one of {', '.join(PARTS)}", repr(name), where=where, fix=fix)
        given = {name: plain(value, f"{where}, {name}") for name, value in values.items()}
        if not isinstance(given.get("name"), str) or not given["name"]:
            raise InputError("a name", repr(given.get("name")), where=f"{where}, name")
        for name, kind, words in (("base", dict, "a table"), ("grid", dict, "a table"), ("trials", list, "tables")):
            if not isinstance(given.get(name, kind()), kind):
                raise InputError(words, repr(given[name]), where=f"{where}, {name}")
        grid = _dotted(given.get("grid", {}))
        for name, listed in grid.items():
            if not isinstance(listed, list) or not listed:
                raise InputError("a list of values", repr(listed), f"{where}, grid, {name}", "Put it into [base]")
        if not grid and not given.get("trials"):
            raise InputError("a [grid] or [[trials]]", "neither", where=where)
        if any(not isinstance(trial, dict) for trial in given.get("trials", [])):
            raise InputError("tables", repr(given["trials"]), where=f"{where}, trials")
        names = given.get("group_by")
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise InputError("a list of names", repr(names), where=f"{where}, group_by")
        size = given.get("group_size")
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise InputError("a whole number of at least 1", repr(size), where=f"{where}, group_size")
        return cls(**{**given, "grid": grid})

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Sweep:
        """The sweep that a TOML file describes; its name is the file's unless it has one."""
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError("a readable TOML file", error.strerror or str(error), where=str(path)) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError("TOML", str(error), where=str(path)) from None
        return cls.from_dict({"name": Path(path).stem, **values}, where=str(path))

    def to_dict(self) -> Config:
        """Plain values, from which `from_dict` makes the same sweep."""
        values = {name: getattr(self, name) for name in PARTS}
        return {name: plain(value) for name, value in values.items() if value is not None}

    def configs(self) -> list[Config]:
        """Resolved configurations of all trials, each once."""
        combinations = [dict(zip(self.grid, chosen, strict=True)) for chosen in itertools.product(*self.grid.values())]
        made = [
            _changed(self.base, {**_dotted(trial), **combination})
            for trial in self.trials or [{}]
            for combination in combinations
        ]
        return list({key_of(config): config for config in made}.values())

    def units(self) -> list[list[Config]]:
        """The configurations, those that belong together in one list."""
        configs = self.configs()
        if self.group_by is None:
            return [[config] for config in configs]
        groups: dict[str, list[Config]] = {}
        for config in configs:
            groups.setdefault(to_json([_part(config, name) for name in self.group_by]), []).append(config)
        for name in self.group_by:
            if all(_part(config, name) is None for config in configs):
                known = {part for config in configs for path in flat(config) for part in _prefixes(path)}
                raise UnknownNameError.among(name, known, "name in group_by")
        size = self.group_size or max(1, len(configs))
        return [group[start : start + size] for group in groups.values() for start in range(0, len(group), size)]


def _dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"train": {"lr": 1}}` as `{"train.lr": 1}`: a file may write both."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _dotted(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def _changed(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Config:
    """A copy of the base with other values at dotted places."""
    config: Config = plain(base)
    for path, value in changes.items():
        *folders, name = path.split(".")
        place = config
        for folder in folders:
            inner = place.get(folder)
            if inner is not None and not isinstance(inner, dict):
                raise InputError(f"a table {folder!r} to put {name!r} into", repr(inner), where=f"sweep, {path}")
            place[folder] = inner or {}
            place = place[folder]
        place[name] = plain(value)
    return config


def _part(config: Mapping[str, Any], path: str) -> Any:
    found: Any = config
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _prefixes(path: str) -> Iterable[str]:
    parts = path.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))
