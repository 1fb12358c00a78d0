"""Configurations of trials as plain JSON, and the sweep that a file describes: what varies, which trials go together.

One text, so one name, for what is the same; NaN and infinity survive. A file of a sweep:

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

import hashlib
import itertools
import json
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatscope.disk import MOST_TEXT, read_file
from flatscope.errors import InputError, UnknownNameError, refuse_unless_whole
from flatscope.files import from_json_bytes

NOT_FINITE = "$float"  # JSON has no NaN and no infinity: {"$float": "nan"}
PLACE = "device"  # where a trial runs is kept with it, but is not part of its name


def plain_value(value: Any, where: str = "configuration") -> Any:
    """The value as JSON would give it back: dictionaries with text keys, lists, numbers, text, True, False, None.

    Raises:
        InputError: something in it that JSON cannot hold, with its place.
    """
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key == NOT_FINITE:
                raise InputError(f"names as text, none of them {NOT_FINITE}", repr(key), where=where)
        return {key: plain_value(item, f"{where}, {key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item, f"{where}, entry {index}") for index, item in enumerate(value)]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()  # a number of NumPy's or of torch's
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return float(value) if isinstance(value, float) else int(value)
    fix = "Give numbers, text, lists and dictionaries; name what is larger by a file or a function"
    raise InputError("what JSON can hold", type(value).__name__, where, fix)


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Text of a plain value, readable by any JSON parser."""
    return json.dumps(_with_nonfinite_tagged(value), indent=indent, allow_nan=False, ensure_ascii=False)


def from_json(text: str | bytes, *, sealed_only: bool = False) -> Any:
    """Object that `to_json` wrote, with or without the checksum of a file."""
    return from_json_bytes(
        text.encode() if isinstance(text, str) else text, _without_nonfinite_tags, sealed_only=sealed_only
    )


def key_of(config: Mapping[str, Any]) -> str:
    """Name of a configuration: 32 hexadecimal digits.

    The order of its entries, 1 against 1.0, and its entry "device" do not matter: a trial is the same wherever it ran.

    Example:
        >>> key_of({"lr": 1, "seed": 0}) == key_of({"seed": 0, "lr": 1.0})
        True
    """
    if not isinstance(config, Mapping):
        raise InputError("a dictionary", type(config).__name__, where="configuration")
    same = _with_nonfinite_tagged(
        _whole_numbers_as_integers({name: item for name, item in plain_value(config).items() if name != PLACE})
    )
    text = json.dumps(same, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def flat_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """One entry per number or word, named by its path; lists as JSON text, so that a cell holds one thing.

    Example:
        >>> flat_values({"train": {"lr": 0.1}, "widths": [8, 2]})
        {'train.lr': 0.1, 'widths': '[8, 2]'}
    """
    cells = _nested_as_dotted_keys(values)
    return {name: to_json(value) if isinstance(value, list | tuple) else value for name, value in cells.items()}


def _whole_numbers_as_integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole_numbers_as_integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole_numbers_as_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _with_nonfinite_tagged(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_nonfinite_tagged(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nonfinite_tagged(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {NOT_FINITE: str(value)}
    return value


def _without_nonfinite_tags(entry: dict[str, Any]) -> Any:
    return float(entry[NOT_FINITE]) if entry.keys() == {NOT_FINITE} else entry


TRAIN_AND_MEASURE = "flatscope.training.sweeps.work:train_and_measure"
PARTS = ("name", "group_by", "group_size", "work", "base", "grid", "trials")

Config = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """Definition of a sweep: its work, shared settings, and which settings vary."""

    name: str  # of the sweep, under which a store remembers it
    work: str = TRAIN_AND_MEASURE  # "package.module:function" that does a unit
    base: Mapping[str, Any] = field(default_factory=dict)  # configuration that all trials share
    # lists of values by dotted name ("train.lr"); every combination is a trial, the last varies fastest
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    # changes to the base, one entry per trial; with a grid, each is combined with all of the grid
    trials: Sequence[Mapping[str, Any]] = field(default_factory=list)
    # dotted names; trials that agree on all of them form a unit. None: each trial is a unit
    group_by: Sequence[str] | None = None
    group_size: int | None = None  # trials in a unit at most

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "sweep") -> Sweep:
        """The sweep that a dictionary describes; unknown keys are refused."""
        for name in values:
            if name not in PARTS:
                fix = "What the trials share goes into [base], as [base.data] and [base.train]"
                raise UnknownNameError(f"one of {', '.join(PARTS)}", repr(name), where=where, fix=fix)
        given = {name: plain_value(value, f"{where}, {name}") for name, value in values.items()}
        if not isinstance(given.get("name"), str) or not given["name"]:
            raise InputError("a name", repr(given.get("name")), where=f"{where}, name")
        for name, kind, words in (("base", dict, "a table"), ("grid", dict, "a table"), ("trials", list, "tables")):
            if not isinstance(given.get(name, kind()), kind):
                raise InputError(words, repr(given[name]), where=f"{where}, {name}")
        grid = _nested_as_dotted_keys(given.get("grid", {}))
        for name, listed in grid.items():
            if not isinstance(listed, list) or not listed:
                raise InputError(
                    "a list with at least one value", repr(listed), f"{where}, grid, {name}", "Put it into [base]"
                )
        if not grid and not given.get("trials"):
            raise InputError("[[trials]] or [grid]", "neither", where=where)
        if any(not isinstance(trial, dict) for trial in given.get("trials", [])):
            raise InputError("tables", repr(given["trials"]), where=f"{where}, trials")
        names = given.get("group_by")
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise InputError("a list of names", repr(names), where=f"{where}, group_by")
        if given.get("group_size") is not None:
            refuse_unless_whole(given["group_size"], f"{where}, group_size")
        return cls(**{**given, "grid": grid})

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Sweep:
        """The sweep that a TOML file describes; its name is the file's unless it has one."""
        return cls.from_dict({"name": Path(path).stem, **read_toml(path)}, where=str(path))

    def to_dict(self) -> Config:
        """Plain values, from which `from_dict` makes the same sweep."""
        values = {name: getattr(self, name) for name in PARTS}
        return {name: plain_value(value) for name, value in values.items() if value is not None}

    def combinations(self) -> list[Config]:
        """Resolved configurations of all trials; what a trial sets itself comes before the grid."""
        cells = [dict(zip(self.grid, chosen, strict=True)) for chosen in itertools.product(*self.grid.values())]
        return [
            _with_changes(self.base, {**cell, **_nested_as_dotted_keys(trial)})
            for trial in self.trials or [{}]
            for cell in cells
        ]

    def configs(self) -> list[Config]:
        """The combinations, each once."""
        return list({key_of(config): config for config in self.combinations()}.values())

    def units(self) -> list[list[Config]]:
        """The configurations, those that belong together in one list."""
        configs = self.configs()
        if self.group_by is None:
            return [[config] for config in configs]
        groups: dict[str, list[Config]] = {}
        for config in configs:
            groups.setdefault(to_json([_value_at_dotted_path(config, name) for name in self.group_by]), []).append(
                config
            )
        for name in self.group_by:
            if all(_value_at_dotted_path(config, name) is None for config in configs):
                paths = {tuple(path.split(".")) for config in configs for path in _nested_as_dotted_keys(config)}
                known = {".".join(path[:end]) for path in paths for end in range(1, len(path) + 1)}
                raise UnknownNameError.among(name, known, "name in group_by")
        size = self.group_size or max(1, len(configs))
        return [group[start : start + size] for group in groups.values() for start in range(0, len(group), size)]


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a TOML file."""
    try:
        return tomllib.loads(read_file(path, MOST_TEXT).decode())
    except OSError as error:
        raise InputError("a readable TOML file", error.strerror or str(error), where=str(path)) from None
    except InputError:
        raise
    except RecursionError:
        raise InputError("TOML", "one nested too deeply", where=str(path)) from None
    except ValueError as error:  # no TOML, no text, a number with thousands of digits
        raise InputError("TOML", str(error), where=str(path)) from None


def _nested_as_dotted_keys(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"train": {"lr": 1}}` as `{"train.lr": 1}`: a file may write both."""
    entries: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            entries |= _nested_as_dotted_keys(value, f"{prefix}{name}.")
        else:
            entries[prefix + name] = value
    return entries


def _with_changes(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Config:
    """A copy of the base with other values at dotted places."""
    config: Config = plain_value(base)
    for path, value in changes.items():
        *folders, name = path.split(".")
        place = config
        for folder in folders:
            inner = place.get(folder)
            if inner is not None and not isinstance(inner, dict):
                raise InputError(f"a table {folder!r} to put {name!r} into", repr(inner), where=f"sweep, {path}")
            place[folder] = inner or {}
            place = place[folder]
        place[name] = plain_value(value)
    return config


def _value_at_dotted_path(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
