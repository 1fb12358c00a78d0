"""The files of one trial: written so that they are there whole or not at all, and checked whenever they are read.

`metrics.json` is the marker: it lists the other files with size and checksum and carries a checksum of itself. On a
disk the folder is written under another name and renamed; where there is no rename (object stores) the marker comes
last.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from flatscope.errors import DataFileError, InputError
from flatscope.files import digest, json_bytes
from flatscope.guards import flush_folder
from flatscope.sweeps.configuration import from_json, to_json
from flatscope.sweeps.leases import Owner, this_process
from flatscope.version import __version__

FORMAT = 1
MARKER_FILE = "metrics.json"
PARTIAL = ".partial"
KEY = re.compile(r"[0-9a-f]{32}")


class DamagedTrial(DataFileError):  # noqa: N818  named as the other refusals are
    """A stored trial whose files are not those that were written."""


class TrialFiles:
    """Folders of trials below one path of a file system of fsspec's."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path
        self.renames = isinstance(fs, LocalFileSystem)

    def place(self, name: str) -> str:
        """Path of something in the store; what leads out of it, by its name or by a link, is refused."""
        path = f"{self._path}/{name}"
        leaves = self.renames and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self._path))
        if leaves or ".." in name.split("/"):
            raise InputError("files inside of the store", "one that leads out of it", path, "Put it there")
        return path

    def keys(self) -> list[str]:
        """Names of all folders of trials, whole or not."""
        self._fs.invalidate_cache()
        try:
            paths = self._fs.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        names = (path.rstrip("/").rpartition("/")[2] for path in paths)
        return sorted(name for name in names if KEY.fullmatch(name))

    def holds(self, key: str) -> bool:
        """Whether the marker can be read and every file has its size."""
        try:
            marker = self.marker(key)
            sizes = {entry["name"].rpartition("/")[2]: entry["size"] for entry in self._fs.ls(self.place(key), True)}
        except (InputError, OSError):
            return False
        return all(sizes.get(name) == expected["size"] for name, expected in marker["files"].items())

    def marker(self, key: str) -> dict[str, Any]:
        """What the marker says, once its own checksum has been found right."""
        self._fs.invalidate_cache()
        try:
            lines = self._fs.cat_file(self.place(f"{key}/{MARKER_FILE}"))
        except FileNotFoundError:
            raise InputError("a finished trial", "none with this configuration", where=f"trial {key}") from None
        try:
            marker: dict[str, Any] = from_json(lines, sealed_only=True)
        except ValueError:
            raise _damaged(key, MARKER_FILE) from None
        if marker["format"] != FORMAT:
            got = f"{marker['format']}, written by flatscope {marker['version']}"
            raise InputError(f"a trial of format {FORMAT}", got, f"trial {key}", "Use that version, or another store")
        return marker

    def content(self, key: str, file: str, expected: Mapping[str, Any]) -> bytes:
        """A file of the trial, checked against what the marker says about it."""
        try:
            found: bytes = self._fs.cat_file(self.place(f"{key}/{file}"))
        except FileNotFoundError:
            raise _damaged(key, file) from None
        if len(found) != expected["size"] or digest([found]) != expected["checksum"]:
            raise _damaged(key, file)
        return found

    def is_sound(self, key: str) -> bool:
        """Whether every byte is as it was written: reads all files."""
        try:
            for file, expected in self.marker(key)["files"].items():
                self.content(key, file, expected)
        except InputError:
            return False
        return True

    def write(self, key: str, contents: Mapping[str, bytes], metrics: Mapping[str, Any]) -> None:
        """Write a trial in place of a damaged one or of none; a whole one that is there stays."""
        if self.holds(key):
            return
        files = {name: {"size": len(data), "checksum": digest([data])} for name, data in contents.items()}
        written = datetime.now(UTC).isoformat(timespec="seconds")
        marker = {"format": FORMAT, "version": __version__, "written": written, "files": files, "metrics": metrics}
        everything = {**contents, MARKER_FILE: json_bytes(to_json(marker, indent=1))}
        if self.renames:
            self._write_and_rename(key, everything)
        else:
            self._write_marker_last(key, everything)

    def remove(self, key: str) -> None:
        """Remove a trial; the marker goes first, so that what is left counts as absent."""
        for name in (f"{key}/{MARKER_FILE}", key):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(self.place(name), recursive=True)

    def clear_leftovers(self) -> None:
        """Remove what killed processes of this machine had half written."""
        folder = Path(self._path) / PARTIAL
        if self.renames and folder.is_dir():
            for path in folder.iterdir():
                with contextlib.suppress(ValueError):
                    if Owner.from_name(path.name.partition(".")[2]).is_dead():
                        shutil.rmtree(path, ignore_errors=True)

    def _write_marker_last(self, key: str, contents: Mapping[str, bytes]) -> None:
        self.remove(key)
        for name, data in contents.items():
            self._fs.pipe_file(f"{self._path}/{key}/{name}", data)

    def _write_and_rename(self, key: str, contents: Mapping[str, bytes]) -> None:
        target = Path(self.place(key))
        partial = Path(self._path) / PARTIAL / f"{key}.{this_process().name}"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            for name, data in contents.items():
                with (partial / name).open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            try:
                partial.rename(target)
            except OSError:
                if self.holds(key):  # somebody was faster
                    return
                shutil.rmtree(target)
                partial.rename(target)
        except OSError as error:
            got, fix = error.strerror or str(error), "Choose another store, or make room there"
            raise InputError("a place that can be written to", got, f"store {self._path}", fix) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        flush_folder(target.parent)


def _damaged(key: str, file: str) -> DamagedTrial:
    fix = "Run the sweep again: damaged trials are done anew"
    return DamagedTrial("the file that was written", "one that is damaged or missing", f"trial {key}, {file}", fix)
