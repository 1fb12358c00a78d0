"""A trial's configuration as plain JSON: one text, so one name, for what is the same; NaN and infinity survive."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from flatscope.errors import InputError
from flatscope.files import from_json_bytes

NOT_FINITE = "$float"  # JSON has no NaN and no infinity: {"$float": "nan"}
PLACE = "device"  # where a trial runs is kept with it, but is not part of its name


def plain(value: Any, where: str = "configuration") -> Any:
    """The value as JSON would give it back: dictionaries with text keys, lists, numbers, text, True, False, None.

    Raises:
        InputError: something in it that JSON cannot hold, with its place.
    """
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key == NOT_FINITE:
                raise InputError(f"names as text, none of them {NOT_FINITE}", repr(key), where=where)
        return {key: plain(item, f"{where}, {key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}, entry {index}") for index, item in enumerate(value)]
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
    return json.dumps(_tagged(value), indent=indent, allow_nan=False, ensure_ascii=False)


def from_json(text: str | bytes, *, sealed_only: bool = False) -> Any:
    """What `to_json` wrote, with or without the checksum of a file."""
    return from_json_bytes(text.encode() if isinstance(text, str) else text, _untagged, sealed_only=sealed_only)


def key_of(config: Mapping[str, Any]) -> str:
    """Name of a configuration: 32 hexadecimal digits.

    The order of its entries, 1 against 1.0, and its entry "device" do not matter: a trial is the same wherever it ran.

    Example:
        >>> key_of({"lr": 1, "seed": 0}) == key_of({"seed": 0, "lr": 1.0})
        True
    """
    if not isinstance(config, Mapping):
        raise InputError("a dictionary", type(config).__name__, where="configuration")
    same = _tagged(_whole_as_integer({name: item for name, item in plain(config).items() if name != PLACE}))
    text = json.dumps(same, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """One entry per number or word, named by its path; lists as JSON text, so that a cell holds one thing.

    Example:
        >>> flat({"train": {"lr": 0.1}, "widths": [8, 2]})
        {'train.lr': 0.1, 'widths': '[8, 2]'}
    """
    cells: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            cells |= flat(value, f"{prefix}{name}.")
        else:
            cells[prefix + name] = to_json(value) if isinstance(value, list | tuple) else value
    return cells


def _whole_as_integer(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole_as_integer(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole_as_integer(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _tagged(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _tagged(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_tagged(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {NOT_FINITE: str(value)}
    return value


def _untagged(entry: dict[str, Any]) -> Any:
    return float(entry[NOT_FINITE]) if entry.keys() == {NOT_FINITE} else entry
