"""What several processes, on one machine or many, share in a store: the files of trials, and who works on which.

A trial is there whole or not at all, and checked whenever it is read. `metrics.json` is its marker: it lists the other
files with size and checksum and carries a checksum of itself. On a disk the folder is written under another name and
renamed; where there is no rename (object stores) the marker comes last.

A lease is an empty file whose name says it all: trial, owner, last sign of life. Whoever wants a trial asks for it by
putting a file, then looks: if another's is there, it withdraws; else the trial is its own, and a second file says so.
Of two who ask at the same time at most one sees nobody (a file put before a look is seen by it), so no two hold one
trial, on any file system that lists what was written; none has to offer locks. Of two who see each other asking,
both withdraw and ask again after a random pause.

A lease ends when its owner releases it or is dead. Of a process on this machine that is known, whatever the clock says;
one of another machine counts as dead when there was no sign of life for the length of its lease, or when the last sign
is further in the future than that: clocks of different machines may differ by less.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import random
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from flatscope.disk import flush_folder, read_file
from flatscope.errors import DataFileError, InputError
from flatscope.files import digest, json_bytes
from flatscope.training.sweeps.configuration import from_json, to_json
from flatscope.version import __version__

ASKED, HELD = "asked", "held"
TRIES = 6
BEATS_PER_LEASE = 4


@dataclass(frozen=True)
class Owner:
    """A process: the machine it runs on, its number there, when it began (numbers are used again)."""

    machine: str
    process: int
    begun: int

    @property
    def name(self) -> str:
        """As part of a file name."""
        return f"{self.machine}.{self.process}.{self.begun}"

    @classmethod
    def from_name(cls, name: str) -> Owner:
        """The owner that `name` stands for."""
        machine, process, begun = name.split(".")
        return cls(machine, int(process), int(begun))

    def is_dead(self) -> bool | None:
        """True if the process is gone; None where that cannot be known."""
        if self.machine != this_machine() or not Path("/proc/self/stat").exists():
            return None
        return _process_start_time(self.process) != self.begun


def this_process() -> Owner:
    """The process that asks."""
    return Owner(this_machine(), os.getpid(), _process_start_time(os.getpid()))


@functools.cache
def this_machine() -> str:
    """Short name of this machine since it was started; containers with process numbers of their own differ."""
    parts = [platform.node()]
    with contextlib.suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=6).hexdigest()


def _process_start_time(process: int) -> int:
    """When a process of this machine began, in clock ticks; 0 if it is gone, a zombie, or not to be found out."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


@dataclass(frozen=True)
class _Lease:
    """The parts of a lease's file name."""

    key: str
    owner: Owner
    nonce: str
    state: str
    lease: float
    seen: float

    @property
    def name(self) -> str:
        times = f"{int(self.lease * 1000)}.{int(self.seen * 1000)}"
        return f"{self.key}.{self.owner.name}.{self.nonce}.{self.state}.{times}"

    @property
    def is_over(self) -> bool:
        dead = self.owner.is_dead()
        return abs(time.time() - self.seen) > self.lease if dead is None else dead

    def held_now(self) -> _Lease:
        return replace(self, state=HELD, seen=time.time())

    @classmethod
    def from_name(cls, name: str) -> _Lease | None:
        try:
            key, *owner, nonce, state, lease, seen = name.split(".")
            return cls(key, Owner.from_name(".".join(owner)), nonce, state, int(lease) / 1000, int(seen) / 1000)
        except ValueError:
            return None


class Leases:
    """The leases in one folder of an fsspec file system."""

    def __init__(self, fs: Any, folder: str) -> None:
        self._fs, self._folder = fs, folder

    def held(self) -> set[str]:
        """Keys that somebody holds now."""
        return {lease.key for lease in self._all() if not lease.is_over}

    def clear(self) -> None:
        """Remove leases that have ended; those of trials that nobody asks for again would stay for ever."""
        for lease in self._all():
            if lease.is_over:
                self._remove(lease)

    @contextlib.contextmanager
    def hold(self, key: str, lease: float) -> Iterator[bool]:
        """Hold the lease of `key` for the length of the block, with signs of life; False if another process has it."""
        try:
            files = self._take_lease(key, lease)
        except OSError as problem:
            got = problem.strerror or str(problem)
            raise InputError("a folder that can be written to", got, self._folder, "Remove it") from None
        if not files:
            yield False
            return
        stop = threading.Event()
        beating = threading.Thread(target=self._renew_lease, args=(files, lease, stop), daemon=True)
        beating.start()
        try:
            yield True
        finally:
            stop.set()
            beating.join()
            for file in files:
                self._remove(file)

    def _take_lease(self, key: str, lease: float) -> list[_Lease]:
        """The files of a lease that this process has now; none if another process has it."""
        for attempt in range(TRIES):
            mine = _Lease(key, this_process(), secrets.token_hex(4), ASKED, lease, time.time())
            self._put(mine)
            others = [other for other in self._all() if other.key == key and other.nonce != mine.nonce]
            alive = [other for other in others if not other.is_over]
            if not alive:
                for other in others:
                    self._remove(other)
                self._put(held := mine.held_now())
                return [mine, held]
            self._remove(mine)
            if any(other.state == HELD for other in alive):
                return []
            time.sleep(random.uniform(0.01, 0.03) * 2**attempt)
        return []

    def _renew_lease(self, files: list[_Lease], lease: float, stop: threading.Event) -> None:
        """Give signs of life by newer file names, until stopped, or until another process took the lease for ended.

        The name before stays until the next sign: a listing is no snapshot, and one that runs while the old name goes
        and the new one comes could miss both.
        """
        while not stop.wait(lease / BEATS_PER_LEASE):
            try:
                if not self._fs.exists(self._path(files[-1])):
                    return
                self._put(newer := files[-1].held_now())
                files.append(newer)
                while len(files) > 2:
                    self._remove(files.pop(0))
            except OSError:
                continue  # a network may fail for a moment; the lease allows for three such moments

    def _all(self) -> list[_Lease]:
        self._fs.invalidate_cache()
        try:
            paths = self._fs.ls(self._folder, detail=False)
        except FileNotFoundError:
            return []
        except OSError as problem:
            raise InputError("a folder", problem.strerror or str(problem), self._folder, "Remove it") from None
        leases = [_Lease.from_name(path.rpartition("/")[2]) for path in paths]
        return [lease for lease in leases if lease is not None]

    def _put(self, lease: _Lease) -> None:
        self._fs.makedirs(self._folder, exist_ok=True)
        self._fs.pipe_file(self._path(lease), b"")

    def _path(self, lease: _Lease) -> str:
        return f"{self._folder}/{lease.name}"

    def _remove(self, lease: _Lease) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(lease))


FORMAT = 1
MARKER_FILE, CONFIG_FILE = "metrics.json", "config.json"
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

    def read(self, name: str) -> bytes:
        """A file of the store, by its name in it; what is no regular file is as good as none."""
        path = self.place(name)
        if not self.renames:
            content: bytes = self._fs.cat_file(path)
            return content
        try:
            return read_file(path)
        except InputError as problem:
            raise OSError(str(problem)) from problem

    def damaged(self) -> list[str]:
        """Keys of trials that were written and cannot be read any more."""
        return [key for key in self.keys() if not self.holds(key) and (self.renames or self._is_marked(key))]

    def _is_marked(self, key: str) -> bool:
        """True if a marker is there: without, a trial is being written."""
        return bool(self._fs.exists(self.place(f"{key}/{MARKER_FILE}")))

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
        """True if marker and configuration are as they were written, and every file has its size."""
        try:
            marker = self.marker(key)
            self.content(key, CONFIG_FILE, marker["files"][CONFIG_FILE])
            sizes = {entry["name"].rpartition("/")[2]: entry["size"] for entry in self._fs.ls(self.place(key), True)}
        except (InputError, OSError, KeyError):
            return False
        return all(sizes.get(name) == expected["size"] for name, expected in marker["files"].items())

    def marker(self, key: str) -> dict[str, Any]:
        """Content of the marker, once its own checksum has been found right."""
        self._fs.invalidate_cache()
        try:
            lines = self.read(f"{key}/{MARKER_FILE}")
        except (FileNotFoundError, NotADirectoryError):
            raise InputError("a finished trial", "none with this configuration", where=f"trial {key}") from None
        except OSError:
            raise _damaged_trial_error(key, MARKER_FILE) from None
        try:
            marker: dict[str, Any] = from_json(lines, sealed_only=True)
        except ValueError:
            raise _damaged_trial_error(key, MARKER_FILE) from None
        if marker["format"] != FORMAT:
            got = f"{marker['format']}, written by flatscope {marker['version']}"
            raise InputError(f"a trial of format {FORMAT}", got, f"trial {key}", "Use that version, or another store")
        return marker

    def content(self, key: str, file: str, expected: Mapping[str, Any]) -> bytes:
        """A file of the trial, checked against what the marker says about it."""
        try:
            content = self.read(f"{key}/{file}")
        except OSError:
            raise _damaged_trial_error(key, file) from None
        if len(content) != expected["size"] or digest([content]) != expected["checksum"]:
            raise _damaged_trial_error(key, file)
        return content

    def is_sound(self, key: str) -> bool:
        """True if every byte is as it was written: reads all files."""
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
        self.put(key, {**contents, MARKER_FILE: json_bytes(to_json(marker, indent=1))})

    def put(self, key: str, everything: Mapping[str, bytes]) -> None:
        """Write the files of a trial, its marker last among them."""
        (self._write_and_rename if self.renames else self._write_marker_last)(key, everything)

    def remove(self, key: str) -> None:
        """Remove a trial; the marker goes first, so that what is left counts as absent."""
        for path in (self.place(f"{key}/{MARKER_FILE}"), self.place(key)):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                remove_file_or_folder(Path(path)) if self.renames else self._fs.rm(path, recursive=True)

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
                remove_file_or_folder(target)
                partial.rename(target)
        except OSError as error:
            got, fix = error.strerror or str(error), "Choose another store, or make room there"
            raise InputError("a place that can be written to", got, f"store {self._path}", fix) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        flush_folder(target.parent)


def remove_file_or_folder(path: Path) -> None:
    """Remove a folder with all that is in it, or whatever has its name; a link, and not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _damaged_trial_error(key: str, file: str) -> DamagedTrial:
    fix = "Run the sweep again: damaged trials are done anew"
    return DamagedTrial("the file that was written", "one that is damaged or missing", f"trial {key}, {file}", fix)
