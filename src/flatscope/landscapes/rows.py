"""Finished rows of a landscape in a folder, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatscope.errors import InputError
from flatscope.files import from_json_bytes, from_npz_bytes, json_bytes, npz_bytes
from flatscope.guards import write_whole
from flatscope.params import Params, count, flatten, unflatten

Row = tuple[Tensor, Tensor | None, Tensor]


class KeptRows:
    """Rows of one landscape; nothing is kept without a folder.

    Args:
        folder: where; made if missing. It may hold the rows of this landscape only.
        key: everything that the values depend on.
        centre: loss of the network: other data would show here.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, key: dict[str, Any], centre: float) -> None:
        self._folder = None if folder is None else Path(folder)
        if self._folder is None:
            return
        written = self._folder / "landscape.json"
        if not written.exists():
            write_whole(written, json_bytes(json.dumps({"key": key, "centre": centre}, indent=1)))
            return
        try:
            known = from_json_bytes(written.read_bytes())
            same = known["key"] == json.loads(json.dumps(key))
            same = same and math.isclose(known["centre"], centre, rel_tol=1e-5, abs_tol=1e-9)
            differing = [name for name in key if known["key"].get(name) != json.loads(json.dumps(key[name]))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            raise InputError("the folder of a landscape", str(problem), where=str(written)) from problem
        if not same:
            got = f"rows of another one (other {', '.join(differing) or 'data'})"
            fix = "Choose another folder, or remove this one"
            raise InputError("the folder of this very landscape", got, f"checkpoint {self._folder}", fix)

    def read(self, number: int, size: int) -> Row | None:
        """A finished row; None if there is none, or none that can be read."""
        if self._folder is None or not (self._folder / _name(number)).exists():
            return None
        try:
            stored = from_npz_bytes((self._folder / _name(number)).read_bytes())
            arrays = {name: torch.from_numpy(array) for name, array in stored.items()}
            row = arrays["loss"], arrays.get("error"), arrays["poles"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return row if all(part is None or part.shape == (size,) for part in row) else None

    def write(self, number: int, row: Row) -> None:
        """Keep a finished row."""
        if self._folder is None:
            return
        loss, error, poles = row
        arrays: dict[str, Any] = {"loss": loss.numpy(), "poles": poles.numpy()}
        if error is not None:
            arrays["error"] = error.numpy()
        write_whole(self._folder / _name(number), npz_bytes(arrays))


def kept_directions(
    folder: str | os.PathLike[str] | None, like: Params, make: Callable[[], list[Params]]
) -> list[Params]:
    """Directions that cannot be made twice to the last digit: from the folder, or made and put there."""
    if folder is None:
        return make()
    path = Path(folder) / "directions.npz"
    if path.exists():
        try:
            stored = from_npz_bytes(path.read_bytes())
            vectors = [torch.from_numpy(stored[name]) for name in sorted(stored)]
        except (OSError, ValueError) as problem:
            raise InputError("directions of a landscape", str(problem), where=str(path)) from problem
        if any(vector.shape != (count(like.values()),) for vector in vectors):
            raise InputError("directions of this network", "others", where=str(path), fix="Choose another folder")
        device = next(iter(like.values())).device
        return [unflatten(vector.to(device), like) for vector in vectors]
    found = make()
    arrays = {f"direction{i}": flatten(direction).cpu().numpy() for i, direction in enumerate(found)}
    write_whole(path, npz_bytes(arrays))
    return found


def fingerprint(params: Params) -> str:
    """A short hash of weights, or of a direction."""
    digest = hashlib.blake2b(digest_size=12)
    for name in sorted(params):
        digest.update(name.encode())
        digest.update(params[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _name(number: int) -> str:
    return f"row-{number:05d}.npz"
