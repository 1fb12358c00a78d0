"""Files as they are read and written: regular ones alone, of bounded size, whole or not at all."""

from __future__ import annotations

import glob
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from flatscope.errors import InputError

MOST_BYTES, MOST_TEXT = 8 << 30, 1 << 28  # of a file that is read as a whole, and of one that people write
CHUNK = 1 << 24
SUM_ENDING = ".b2sum"  # of the file beside one that has no room for a checksum: what `b2sum -l 128` prints
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(path: str | os.PathLike[str]) -> BufferedReader:
    """A regular file, open for reading; pipes, devices and folders are refused at once, without waiting for them.

    Raises:
        OSError: it is not there, or may not be read.
        InputError: it is something else than a regular file.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            got = _KINDS.get(stat.S_IFMT(mode), "something else")
            raise InputError("a regular file", got, where=os.fspath(path), fix="Name a file")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_file(path: str | os.PathLike[str], most: int = MOST_BYTES) -> bytes:
    """The content of a regular file of at most so many bytes."""
    with open_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise InputError(f"a file of at most {most:,} bytes", f"{size:,}", where=os.fspath(path))
        content = file.read(size + 1)  # takes memory for as much as is asked for, also where the file is smaller
        if len(content) > size:  # it grew, or its size was not known
            content = _read_rest_of_file(file, content, most)
    if len(content) > most:
        raise InputError(f"a file of at most {most:,} bytes", "more", where=os.fspath(path))
    return content


def _read_rest_of_file(file: BufferedReader, begun: bytes, most: int) -> bytes:
    """Content of a file whose first bytes were read, up to something beyond so many bytes."""
    parts, length = [begun], len(begun)
    while length <= most and (part := file.read(CHUNK)):
        parts.append(part)
        length += len(part)
    return b"".join(parts)


def check_file(path: str | os.PathLike[str]) -> None:
    """Refuse, as `open_file` does, what a library is going to open by its name."""
    open_file(path).close()


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; it takes the name `path` only if the block ends well.

    Flushed to the disk before and after the rename, so that a kill or a power cut at any moment leaves the old
    file or the new one, never half of one. Missing parent folders are made. Nobody can know the temporary name before,
    and no link of that name is followed.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(8)}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            raise IsADirectoryError(f"{target} is a folder")
        _remove_leftovers(target)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)
        os.close(os.open(temporary, flags, 0o666))
        try:
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(target)
            flush_folder(target.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise InputError("a place that can be written to", reason, str(target), "Choose another path") from problem


def write_whole(path: str | os.PathLike[str], payload: bytes, *, with_sum: bool = False) -> None:
    """Write a file whole or not at all.

    Args:
        path: its place; missing folders are made.
        payload: what it holds.
        with_sum: whether its checksum goes into a second file beside it, for a format that has no room for one. At no
            moment is there a checksum beside a file that it does not fit.
    """
    beside = _checksum_path(Path(path))
    if with_sum:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
    with whole_file(path) as temporary:
        temporary.write_bytes(payload)
    if with_sum:
        write_whole(beside, f"{_payload_checksum(payload)}  {Path(path).name}\n".encode())


def read_with_sum(path: str | os.PathLike[str]) -> bytes:
    """The content of a file, compared with the checksum beside it where there is one; ValueError where it differs."""
    content, beside = read_file(path), _checksum_path(Path(path))
    if beside.exists() and read_file(beside, 1 << 12).split()[:1] != [_payload_checksum(content).encode()]:
        raise InputError(
            f"the bytes whose checksum is in {beside.name}", "others", os.fspath(path),
            f"Remove {beside.name} if you changed the file yourself",
        )  # fmt: skip
    return content


def _payload_checksum(payload: bytes) -> str:
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


def _checksum_path(path: Path) -> Path:
    return path.with_name(path.name + SUM_ENDING)


def _remove_leftovers(target: Path) -> None:
    """Half-written files of processes that were killed; those of living ones are left alone."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.*.part"):
        owner = path.name.removeprefix(f".{target.name}.").split(".")[0]
        if owner.isdigit() and Path("/proc/self").exists() and not Path(f"/proc/{owner}").exists():
            path.unlink(missing_ok=True)


def flush_folder(folder: Path) -> None:
    """Bring a rename to the disk: it lies in the folder, which needs a flush of its own."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
