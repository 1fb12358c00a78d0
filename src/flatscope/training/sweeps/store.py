"""Results of trials: one folder each, named by the hash of its configuration, there whole or not at all.

    <key>/config.json  metrics.json  weights.safetensors  <frame>.parquet
    .claims/ .failed/ .partial/ .plans/          who works on what, what went wrong, half-written trials, sweeps
    .unfinished/                                 checkpoints of work that is going on or was broken off

A trial whose files are not those that were written counts as absent: it is done again, and never read as a result.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec
import pandas as pd
import safetensors.torch
from torch import Tensor

from flatscope.disk import MOST_TEXT, read_file, write_whole
from flatscope.errors import InputError
from flatscope.files import csv_bytes, foreign_parquet, frame_bytes, json_bytes
from flatscope.formatting import first_of_names, numbered
from flatscope.inputs.weight_files import WEIGHTS_FILE, plain_tensors
from flatscope.tensor_files import tensor_bytes
from flatscope.training.sweeps.configuration import flat_values, from_json, key_of, plain_value, to_json
from flatscope.training.sweeps.trial_files import CONFIG_FILE, PARTIAL, DamagedTrial, Leases, TrialFiles
from flatscope.training.sweeps.trial_moves import DROPPED, Joined, drop_file_of_trial, join_stores
from flatscope.version import __version__

CLAIMS, FAILED, SWEEPS, UNFINISHED = ".claims", ".failed", ".plans", ".unfinished"
KEYS_ENDING = ".keys"  # of the list of trials beside their checkpoints
LEASE_SECONDS = 60.0
DO_AGAIN = "Run the sweep again: damaged trials are done anew"
PLAIN_NAME = re.compile(r"\w[\w.-]*")
TAKEN_NAMES = {"config", "metrics", "weights"}


class Stored:
    """One whole trial.

    Attributes:
        key: its name in the store.
        config: the resolved configuration.
        metrics: what was measured.
        version: of the flatscope that wrote it.
        written: when, in UTC.
    """

    def __init__(self, files: TrialFiles, key: str) -> None:
        marker = files.marker(key)
        self._store, self._files, self._dropped = files, marker["files"], marker.get(DROPPED, [])
        self.key, self.metrics, self.version = key, dict(marker["metrics"]), str(marker["version"])
        self.written = str(marker["written"])
        self.config: dict[str, Any] = from_json(self._content(CONFIG_FILE, "a configuration"))

    def __repr__(self) -> str:
        return f"Stored({self.key}, {', '.join(self._files)})"

    @property
    def frames(self) -> tuple[str, ...]:
        """Names that `frame` knows."""
        return tuple(name.removesuffix(".parquet") for name in self._files if name.endswith(".parquet"))

    def weights(self) -> dict[str, Tensor]:
        """The stored tensors by name, on the CPU."""
        return safetensors.torch.load(self._content(WEIGHTS_FILE, "weights"))

    def frame(self, name: str) -> pd.DataFrame:
        """A stored frame."""
        return foreign_parquet(self._content(f"{name}.parquet", f"frame {name!r}"))

    def _content(self, file: str, what: str) -> bytes:
        if file not in self._files:
            fix = (
                "They were dropped to save room: run the trial again in another store" if file in self._dropped else ""
            )
            raise InputError(f"a trial with {what}", f"only {', '.join(self._files)}", f"trial {self.key}", fix)
        return self._store.content(self.key, file, self._files[file])


class Store:
    """Results of trials under one folder, which many processes may fill and read at once.

    Args:
        root: a path, or any address that fsspec knows (`s3://bucket/folder`, `memory://name`).
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        try:
            self._fs, path = fsspec.core.url_to_fs(os.path.expanduser(os.fspath(root)))
        except (ImportError, ValueError) as error:
            fix = "Install the package that the address needs, or name a folder"
            raise InputError("a folder or an address that fsspec knows", str(error), f"store {root}", fix) from error
        self._path = str(path).rstrip("/")
        self._trials = TrialFiles(self._fs, self._path)
        for folder in (PARTIAL, FAILED, SWEEPS, UNFINISHED):
            self._trials.place(folder)
        self._leases = Leases(self._fs, self._trials.place(CLAIMS))
        self.root = self._path if self._trials.renames else os.fspath(root)

    def __repr__(self) -> str:
        return f"Store({self.root!r})"

    @property
    def is_shared(self) -> bool:
        """True if other processes see the same store; not so for `memory://`."""
        return "memory" not in self._fs.protocol

    def key(self, config: Mapping[str, Any]) -> str:
        """Name of the configuration's folder: a hash of its canonical JSON."""
        return key_of(config)

    def __contains__(self, config: object) -> bool:
        """True if the trial is there, readable, and every file has the size it should have."""
        return isinstance(config, Mapping) and self._trials.holds(key_of(config))

    def write(
        self,
        config: Mapping[str, Any],
        metrics: Mapping[str, Any],
        *,
        weights: Mapping[str, Tensor] | None = None,
        frames: Mapping[str, pd.DataFrame] | None = None,
    ) -> None:
        """Store a finished trial; a whole one that is there already stays as it is.

        Args:
            config: its resolved configuration.
            metrics: numbers, words, lists and dictionaries of them; NaN and infinity are kept.
            weights: tensors by name.
            frames: tables by name.
        """
        resolved, measured = plain_value(config), plain_value(metrics, "metrics")
        clash = [name for name in flat_values(measured) if name in flat_values(resolved) or name == "key"]
        if clash:
            fix = "Name them otherwise: both are columns of one frame"
            raise InputError("metrics that no setting is named like", ", ".join(clash), "metrics", fix)
        contents = {CONFIG_FILE: to_json(resolved, indent=1).encode()}
        if weights is not None:
            contents[WEIGHTS_FILE] = tensor_bytes(plain_tensors(weights, where="weights"))
        for name, frame in (frames or {}).items():
            if not PLAIN_NAME.fullmatch(name) or name in TAKEN_NAMES:
                raise InputError("a plain name for a frame", repr(name), where="frames")
            contents[f"{name}.parquet"] = frame_bytes(frame)
        self._trials.write(key_of(resolved), contents, measured)
        self.forgive(config)

    def read(self, config: Mapping[str, Any]) -> Stored:
        """The trial of this configuration.

        Raises:
            InputError: there is none.
            DamagedTrial: its files are not those that were written.
        """
        return Stored(self._trials, key_of(config))

    def stored(self) -> Iterator[Stored]:
        """Every whole trial, in the order of their keys; says how many are damaged, if there are any."""
        for key in self._trials.keys():  # noqa: SIM118  not a dictionary
            if self._trials.holds(key):
                with contextlib.suppress(DamagedTrial):  # which it has become meanwhile
                    yield Stored(self._trials, key)
        if damaged := self.damaged():
            warnings.warn(f"{self._damage_words(damaged)}; left out here. {DO_AGAIN}", stacklevel=2)

    def damaged(self) -> list[str]:
        """Keys of trials whose files are not those that were written."""
        return self._trials.damaged()

    def _damage_words(self, damaged: Sequence[str]) -> str:
        shown = first_of_names([key[:8] for key in damaged], 3)
        return f"{len(damaged)} of {numbered(len(self._trials.keys()), 'trial')} damaged ({shown})"

    def frame(self, configs: Iterable[Mapping[str, Any]] | None = None) -> pd.DataFrame:
        """One row per whole trial: configuration ("train.lr"), metrics, key.

        Args:
            configs: only these, in their order; those that are not there are left out.
        """
        trials = self.stored() if configs is None else (self.read(config) for config in configs if config in self)
        rows = [(flat_values(trial.config), flat_values(trial.metrics), trial.key) for trial in trials]
        names = [name for row in rows for name in row[0]] + [name for row in rows for name in row[1]]
        cells = [settings | metrics | {"key": key} for settings, metrics, key in rows]
        return pd.DataFrame(cells, columns=[*dict.fromkeys(names), "key"])

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write `frame()` to a file: Parquet, or CSV if the name ends in .csv; refused where trials are damaged."""
        if damaged := self.damaged():
            raise DamagedTrial("whole trials", self._damage_words(damaged), f"store {self.root}", DO_AGAIN)
        target, frame = Path(path), self.frame()
        if target.suffix.lower() == ".csv":
            write_whole(target, csv_bytes(frame), with_sum=True)
        elif target.suffix.lower() == ".parquet":
            for name in frame.columns:  # a column of Parquet has one kind of value
                if (
                    frame[name].dtype.kind == "O"
                    and len({type(value) for value in frame[name] if not pd.isna(value)}) > 1
                ):
                    frame[name] = [None if pd.isna(value) else str(value) for value in frame[name]]
            write_whole(target, frame_bytes(frame))
        else:
            raise InputError("a file name ending in .parquet or .csv", str(target), where="export")

    @contextlib.contextmanager
    def claim(self, config: Mapping[str, Any], *, lease: float = LEASE_SECONDS) -> Iterator[bool]:
        """Ask for a trial: `with store.claim(config) as mine:` gives True if this process may run it.

        False if it is done or another process is at it. While the block runs, signs of life are given; where there
        were none for `lease` seconds, or the process is known to be dead, another may take the trial over.
        """
        key = key_of(config)
        with self._leases.hold(key, lease) as mine:
            # Asked while the lease is held: whoever held it before has written by now, or never will.
            yield mine and not self._trials.holds(key)

    @contextlib.contextmanager
    def unfinished(self, configs: Iterable[Mapping[str, Any]]) -> Iterator[Path | None]:
        """A folder for checkpoints of work on these trials: `with store.unfinished(configs) as folder:`.

        Removed when the block ends well. Where it does not, the same trials find the folder again, with what is in it.
        It may not exist yet. None if the store is not a folder of this machine.
        """
        if not self._trials.renames:
            yield None
            return
        names = [__version__, *map(key_of, configs)]
        folder = Path(self._path) / UNFINISHED / hashlib.blake2b(" ".join(names).encode(), digest_size=16).hexdigest()
        listed = folder.with_suffix(KEYS_ENDING)
        write_whole(listed, " ".join(names[1:]).encode())
        yield folder
        shutil.rmtree(folder, ignore_errors=True)
        listed.unlink(missing_ok=True)

    def running(self) -> set[str]:
        """Keys that somebody is working on now."""
        return self._leases.held()

    def is_sound(self, config: Mapping[str, Any]) -> bool:
        """True if every byte of the trial is as it was written; one of which this is not so is removed.

        Reads all files of the trial.
        """
        key = key_of(config)
        if self._trials.is_sound(key):
            return True
        if self._trials.holds(key):  # of the right sizes, and yet damaged
            with self._leases.hold(key, LEASE_SECONDS) as mine:  # nobody else is writing it anew
                if mine and not self._trials.is_sound(key):
                    self._trials.remove(key)
        return False

    def drop_weights(self, config: Mapping[str, Any]) -> None:
        """Remove the weights of a trial to save room; it counts as whole without them."""
        drop_file_of_trial(self._trials, key_of(config), WEIGHTS_FILE)

    def take_from(self, other: Store) -> Joined:
        """Copy every sound trial of another store that this one has not, byte for byte.

        A trial that is here without its weights, and there with them, is taken too.
        """
        if os.path.realpath(self._path) == os.path.realpath(other._path):
            raise InputError("two stores", "one and the same", where=f"store {self.root}")
        return join_stores(other._trials, self._trials, WEIGHTS_FILE)

    def clear_leftovers(self) -> None:
        """Remove what killed processes left behind: half-written trials, ended leases, checkpoints of finished work."""
        self._trials.clear_leftovers()
        self._leases.clear()
        if not self._trials.renames:
            return
        for listed in (Path(self._path) / UNFINISHED).glob(f"*{KEYS_ENDING}"):
            with contextlib.suppress(OSError, ValueError):
                if all(map(self._trials.holds, read_file(listed, MOST_TEXT).decode().split())):
                    shutil.rmtree(listed.with_suffix(""), ignore_errors=True)
                    listed.unlink(missing_ok=True)

    def fail(self, config: Mapping[str, Any], error: str) -> None:
        """Record that a trial could not be done."""
        time = datetime.now(UTC).isoformat(timespec="seconds")
        self._put_record(FAILED, key_of(config), {"error": error, "time": time, "config": plain_value(config)})

    def forgive(self, config: Mapping[str, Any]) -> None:
        """Remove the record of a failure."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._path}/{FAILED}/{key_of(config)}.json")

    def failures(self) -> dict[str, str]:
        """Error by key, of the trials that could not be done."""
        return {
            key: str(entry.get("error", "")) if isinstance(entry, dict) else f"the record of its failure: {entry}"
            for key, entry in self._records(FAILED)
        }

    def remember(self, name: str, sweep: Mapping[str, Any]) -> None:
        """Keep a sweep, so that it can be resumed from the store alone."""
        if not PLAIN_NAME.fullmatch(name):
            raise InputError("a plain name for a sweep", repr(name), where="sweep")
        kept = plain_value(sweep, f"sweep {name}")
        if self.sweeps().get(name) != kept:  # a disk that can only be read may have all that there is to do
            self._put_record(SWEEPS, name, kept)

    def sweeps(self) -> dict[str, dict[str, Any]]:
        """The sweeps kept here, by name."""
        return {name: entry for name, entry in self._records(SWEEPS) if isinstance(entry, dict)}

    def damaged_sweeps(self) -> dict[str, InputError]:
        """Damage of the other sweeps, by name."""
        return {name: entry for name, entry in self._records(SWEEPS) if isinstance(entry, InputError)}

    def _put_record(self, folder: str, name: str, entry: Mapping[str, Any]) -> None:
        path, payload = f"{self._path}/{folder}/{name}.json", json_bytes(to_json(entry, indent=1))
        if self._trials.renames:
            write_whole(path, payload)
        else:
            self._fs.pipe_file(path, payload)

    def _records(self, folder: str) -> Iterator[tuple[str, dict[str, Any] | InputError]]:
        """Records of a folder by name; an error in the place of each damaged one."""
        self._fs.invalidate_cache()
        try:
            paths = sorted(self._fs.ls(f"{self._path}/{folder}", detail=False))
        except FileNotFoundError:
            return
        except OSError as problem:
            where = f"{self._path}/{folder}"
            raise InputError("a folder", problem.strerror or str(problem), where, "Remove it") from None
        for name in (path.rpartition("/")[2] for path in paths if path.endswith(".json")):
            with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                yield name.removesuffix(".json"), self._record(f"{folder}/{name}", sealed_only=folder == SWEEPS)

    def _record(self, name: str, *, sealed_only: bool) -> dict[str, Any] | InputError:
        try:
            record = from_json(self._trials.read(name), sealed_only=sealed_only)
            if isinstance(record, dict):
                return record
            got = f"JSON of a {type(record).__name__}"
        except FileNotFoundError:
            if not self._trials.renames or not os.path.lexists(self._trials.place(name)):
                raise
            got = "a link to nothing"
        except (OSError, ValueError) as problem:
            got = str(problem).rstrip(".")
        where = f"{self._path}/{name}"
        return InputError(
            "the file that flatscope wrote", got, where, "Run the sweep from its file, or remove this one"
        )
