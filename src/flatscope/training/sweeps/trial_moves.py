"""Files of trials on the move: weights dropped to save room, stores of several machines joined into one."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatscope.disk import write_whole
from flatscope.files import json_bytes
from flatscope.training.sweeps.configuration import to_json
from flatscope.training.sweeps.trial_files import MARKER_FILE, TrialFiles

DROPPED = "dropped"  # of a marker: files that were there


@dataclass(frozen=True)
class Joined:
    """Trials of a store that was joined to another: taken, known, differing, damaged.

    Attributes:
        taken: keys of those that were copied.
        known: of those that were there already.
        differing: of those that are there with other numbers, and stay as they are there.
        damaged: of those that cannot be read, and are left out.
    """

    taken: tuple[str, ...]
    known: tuple[str, ...]
    differing: tuple[str, ...]
    damaged: tuple[str, ...]


def drop_file_of_trial(files: TrialFiles, key: str, name: str) -> None:
    """Remove one file of a trial. The marker forgets it first: after a kill in between the trial is whole."""
    marker = files.marker(key)
    if name in marker["files"]:
        marker["files"].pop(name)
        marker[DROPPED] = [*marker.get(DROPPED, []), name]
        write_whole(Path(files.place(f"{key}/{MARKER_FILE}")), json_bytes(to_json(marker, indent=1)))
    elif name not in marker.get(DROPPED, []):
        return
    with contextlib.suppress(FileNotFoundError):
        Path(files.place(f"{key}/{name}")).unlink()


def join_stores(source: TrialFiles, target: TrialFiles, heavy: str) -> Joined:
    """Copy the sound trials of one store into another.

    Args:
        source: where they are.
        target: where they are to be.
        heavy: a file that may have been dropped; a trial that has it takes the place of the same without it.
    """
    kinds: dict[str, list[str]] = {"taken": [], "known": [], "differing": [], "damaged": []}
    for key in source.keys():  # noqa: SIM118  not a dictionary
        kinds[_join_trial(source, target, key, heavy)].append(key)
    return Joined(**{kind: tuple(keys) for kind, keys in kinds.items()})


def _join_trial(source: TrialFiles, target: TrialFiles, key: str, heavy: str) -> str:
    if not source.is_sound(key):
        return "damaged"
    theirs = source.marker(key)
    if target.is_sound(key):
        ours = target.marker(key)
        if not _have_same_numbers(ours, theirs):
            return "differing"
        if heavy in ours["files"] or heavy not in theirs["files"]:
            return "known"
        for name in (heavy, MARKER_FILE):  # in this order: after a kill in between there is a spare file
            write_whole(Path(target.place(f"{key}/{name}")), source.read(f"{key}/{name}"))
        return "taken"
    contents = {name: source.content(key, name, entry) for name, entry in theirs["files"].items()}
    target.put(key, {**contents, MARKER_FILE: source.read(f"{key}/{MARKER_FILE}")})
    return "taken"


def _have_same_numbers(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if two markers are of the same numbers."""
    same: bool = to_json(one["metrics"]) == to_json(other["metrics"])
    return same
