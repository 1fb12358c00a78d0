"""Readers for the file formats of image data sets: IDX, CIFAR-10 batches (binary and python), npz.

Content of known files is compared with its checksum before it comes here; errors name the file. Nothing in one is ever
run: the pickles among them are only listed, instruction by instruction, and refused where they ask for code.
"""

from __future__ import annotations

import gzip
import lzma
import pickletools
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from flatscope import files
from flatscope.disk import open_file
from flatscope.errors import DataFileError

Bytes = npt.NDArray[np.uint8]

GZIP_MAGIC, XZ_MAGIC = b"\x1f\x8b", b"\xfd7zXZ\x00"
UNPACKED_LIMIT = 1 << 30  # the largest real file has 47 MB; what unpacks to more than this is an attack
CIFAR_RECORD = 1 + 3 * 32 * 32  # label, then the red, green and blue planes
NPZ_KEYS = ("x_train", "y_train", "x_test", "y_test", "classes")

REPLACE = "The file is damaged or not what its name says"
UNTRUSTED = "Do not trust this file; get the data from its publisher"

_ARRAYS = {"numpy ndarray", "numpy dtype", "_codecs encode"} | {
    f"numpy.{core}.{name}" for core in ("core", "_core") for name in ("multiarray _reconstruct", "numeric _frombuffer")
}
_NUMBERS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"}
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, tarfile.TarError, zipfile.BadZipFile)


def read_bytes(path: Path, expected_size: int | None = None) -> bytes:
    """Content of a file, unpacked where it is gzip or xz (told by its first bytes); the size is for messages only."""
    try:
        with open_file(path) as file:
            head = file.read(len(XZ_MAGIC))
            file.seek(0)
            opener: Any = gzip.open if head.startswith(GZIP_MAGIC) else lzma.open if head == XZ_MAGIC else nullcontext
            with opener(file) as stream:
                content: bytes = stream.read(UNPACKED_LIMIT + 1)
    except _DAMAGE as error:
        wanted = "a whole gzip or xz file" + (f" of {expected_size} bytes unpacked" if expected_size else "")
        raise DataFileError(wanted, f"damage ({error})", str(path), REPLACE) from error
    except OSError as error:
        raise DataFileError("a readable file", error.strerror or str(error), where=str(path)) from error
    if len(content) > UNPACKED_LIMIT:
        raise DataFileError(f"at most {UNPACKED_LIMIT} bytes unpacked", "more", where=str(path))
    return content


def read_tar(path: Path, names: Collection[str]) -> dict[str, bytes]:
    """Contents of the members of a tar archive that are there, by base name; nothing is extracted."""
    contents: dict[str, bytes] = {}
    try:
        with open_file(path) as file, tarfile.open(fileobj=file, mode="r:*") as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                if name not in names or name in contents or not member.isfile():
                    continue
                if member.size > UNPACKED_LIMIT:
                    wanted = f"at most {UNPACKED_LIMIT} bytes in {name}"
                    raise DataFileError(wanted, f"{member.size} bytes", where=str(path))
                stream = tar.extractfile(member)
                contents[name] = stream.read() if stream else b""
                if len(contents[name]) != member.size:
                    raise EOFError(f"{name} has {len(contents[name])} of {member.size} bytes")
                if len(contents) == len(names):
                    break
    except (*_DAMAGE, OSError) as error:
        got = f"damage after {len(contents)} of {len(names)} files ({error})"
        raise DataFileError("a whole tar archive", got, str(path), REPLACE) from error
    return contents


def parse_idx(content: bytes) -> Bytes:
    """The array of an IDX file of bytes (MNIST's format), known to be whole by its checksum."""
    start = 4 + 4 * content[3]
    return np.frombuffer(content, np.uint8, offset=start).reshape(struct.unpack(f">{content[3]}I", content[4:start]))


def parse_cifar(content: bytes) -> tuple[Bytes, Bytes]:
    """Images (n, 3, 32, 32) and labels (n,) of CIFAR-10 records, known to be whole by their checksum; views."""
    records = np.frombuffer(content, np.uint8).reshape(-1, CIFAR_RECORD)  # (n, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def cifar_records_from_pickle(content: bytes, where: str) -> bytes:
    """The binary layout of a CIFAR-10 python batch, a pickle of {labels, data}: so that both have one checksum.

    It is not unpickled: its instructions are listed, the pixels are the longest string among them, and the labels are
    the numbers that follow their name.

    Raises:
        DataFileError: if it wants anything but arrays, lists, dicts, strings and integers, or is no batch.
    """
    pixels, counting = b"", False
    labels: list[Any] = []
    try:
        for instruction, given, _ in pickletools.genops(content):
            if instruction.name in ("GLOBAL", "INST") and given not in _ARRAYS:
                got = f"one that wants {'.'.join(str(given).split())}; nothing was run"
                raise DataFileError(
                    "a pickle of arrays, lists, dicts, strings and integers only", got, where, UNTRUSTED
                )
            if instruction.name in _NUMBERS and counting:
                labels.append(given)
            elif isinstance(given, str | bytes | bytearray) and instruction.name not in ("GLOBAL", "INST"):
                raw = given.encode("latin1") if isinstance(given, str) else bytes(given)
                pixels = max(pixels, raw, key=len)
                counting = raw == b"labels" or (counting and not labels and raw == b"latin1")
            elif instruction.name in ("SETITEM", "SETITEMS", "GLOBAL"):
                counting = False
        if len(pixels) != len(labels) * (CIFAR_RECORD - 1) or not labels or not 0 <= min(labels) <= max(labels) <= 9:
            raise ValueError(f"{len(labels)} labels from 0 to 9 and {len(pixels)} bytes of pixels")
    except DataFileError:
        raise
    except Exception as error:  # damaged pickles fail in many ways; all mean the same here
        wanted = f"a CIFAR-10 batch: a pickled dict with data (n, {CIFAR_RECORD - 1}) and labels 0 to 9"
        raise DataFileError(wanted, f"{len(content)} bytes: {error}", where, REPLACE) from error
    rows = np.frombuffer(pixels, np.uint8).reshape(len(labels), -1)
    return np.concatenate((np.array(labels, np.uint8)[:, None], rows), axis=1).tobytes()


def read_npz(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Arrays of a user's npz: `x_train`, `y_train` and, if there, `x_test`, `y_test`, `classes`."""
    wanted = "an npz file with arrays x_train, y_train and optionally x_test, y_test, classes"
    try:
        with open_file(path) as file:
            arrays = files.read_npz(file, path.stat().st_size)
    except FileNotFoundError as error:
        raise DataFileError(wanted, "no such file", str(path), "Check the path") from error
    except (ValueError, OSError) as error:
        fix = "Save plain arrays, no objects, with np.savez(path, x_train=..., y_train=...)"
        raise DataFileError(wanted, f"one that cannot be read ({error})", str(path), fix) from error
    needed = NPZ_KEYS[:4] if arrays.keys() & {"x_test", "y_test"} else NPZ_KEYS[:2]
    if lacking := [key for key in needed if key not in arrays]:
        got = f"arrays {', '.join(sorted(arrays)) or 'none'}; {', '.join(lacking)} missing"
        raise DataFileError(wanted, got, where=str(path))
    return {key: arrays[key] for key in NPZ_KEYS if key in arrays}
