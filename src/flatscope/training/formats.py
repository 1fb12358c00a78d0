"""Readers for the file formats of image data sets: IDX, CIFAR-10 batches (binary and python), npz.

Content of known files is compared with its checksum before it comes here; errors name the file. Nothing in one is ever
run: the pickles among them are read with stand-ins for the few names that arrays need, and refused otherwise.
"""

from __future__ import annotations

import gzip
import io
import lzma
import pickle
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection
from contextlib import nullcontext
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from flatscope.errors import DataFileError
from flatscope.files import refuse_bombs

Bytes = npt.NDArray[np.uint8]

GZIP_MAGIC, XZ_MAGIC = b"\x1f\x8b", b"\xfd7zXZ\x00"
UNPACKED_LIMIT = 1 << 30  # the largest real file has 47 MB; what unpacks to more than this is an attack
CIFAR_RECORD = 1 + 3 * 32 * 32  # label, then the red, green and blue planes
CIFAR_CLASSES = 10
NPZ_KEYS = ("x_train", "y_train", "x_test", "y_test", "classes")

REPLACE = "The file is damaged or not what its name says"
UNTRUSTED = "Do not trust this file; get the data from its publisher"

_PIECE = 1 << 22
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, tarfile.TarError, zipfile.BadZipFile)


def read_bytes(path: Path, expected_size: int | None = None) -> bytes:
    """Content of a file, unpacked where it is gzip or xz (told by its first bytes); the size is for messages only."""
    try:
        with path.open("rb") as file:
            return _unpack(file, path, expected_size)
    except OSError as error:
        raise DataFileError("a readable file", error.strerror or str(error), where=str(path)) from error


def _unpack(file: IO[bytes], path: Path, expected_size: int | None) -> bytes:
    head = file.read(len(XZ_MAGIC))
    file.seek(0)
    kind = "gzip" if head.startswith(GZIP_MAGIC) else "xz" if head == XZ_MAGIC else "plain"
    opener: Any = {"gzip": gzip.open, "xz": lzma.open, "plain": nullcontext}[kind]
    pieces: list[bytes] = []
    size = 0
    try:
        with opener(file) as stream:
            while piece := stream.read(_PIECE):
                pieces.append(piece)
                size += len(piece)
                if size > UNPACKED_LIMIT:
                    raise DataFileError(f"at most {UNPACKED_LIMIT} bytes unpacked", "more", where=str(path))
    except _DAMAGE as error:
        wanted = f"a whole {kind} file" + (f" of {expected_size} bytes unpacked" if expected_size else "")
        raise DataFileError(wanted, f"{size} bytes and then damage ({error})", str(path), REPLACE) from error
    return b"".join(pieces)


def read_tar(path: Path, names: Collection[str]) -> dict[str, bytes]:
    """Those members of a tar archive (any compression) that are there, by base name; nothing is extracted."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:*") as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                if name not in names or name in found or not member.isfile():
                    continue
                if member.size > UNPACKED_LIMIT:
                    wanted = f"at most {UNPACKED_LIMIT} bytes in {name}"
                    raise DataFileError(wanted, f"{member.size} bytes", where=str(path))
                stream = tar.extractfile(member)
                found[name] = stream.read() if stream else b""
                if len(found[name]) != member.size:
                    raise EOFError(f"{name} has {len(found[name])} of {member.size} bytes")
                if len(found) == len(names):
                    break
    except (*_DAMAGE, OSError) as error:
        got = f"damage after {len(found)} of {len(names)} files ({error})"
        raise DataFileError("a whole tar archive", got, str(path), REPLACE) from error
    return found


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

    Raises:
        DataFileError: if it wants anything but arrays, lists, dicts, strings and integers, or is no batch.
    """
    try:
        batch, as_array = _load_pickled_arrays(content, where)
        if not isinstance(batch, dict):
            raise TypeError(f"a {type(batch).__name__} instead of a dict")
        fields = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
        missing = {"data", "labels"} - fields.keys()
        if missing:
            raise TypeError(f"a dict without {' and '.join(sorted(missing))}")
        pixels = as_array(fields["data"])
        listed = isinstance(fields["labels"], list)
        labels = np.asarray(fields["labels"]) if listed else as_array(fields["labels"])
        if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != CIFAR_RECORD - 1:
            raise TypeError(f"pixels of shape {pixels.shape} and type {pixels.dtype}")
        if labels.shape != pixels.shape[:1] or labels.dtype.kind not in "iu":
            raise TypeError(f"labels {labels.shape} of type {labels.dtype} for {len(pixels)} images")
        if labels.size and not 0 <= labels.min() <= labels.max() < CIFAR_CLASSES:
            raise TypeError(f"labels from {labels.min()} to {labels.max()}")
    except DataFileError:
        raise
    except Exception as error:  # a damaged or hostile pickle can fail in any way; all mean the same here
        wanted = f"a CIFAR-10 batch: a pickled dict with data (n, {CIFAR_RECORD - 1}) and labels 0 to 9"
        raise DataFileError(wanted, f"{len(content)} bytes: {error}", where, REPLACE) from error
    return np.concatenate((labels.astype(np.uint8)[:, None], pixels), axis=1).tobytes()


def _load_pickled_arrays(content: bytes, where: str) -> tuple[object, Callable[[object], npt.NDArray[Any]]]:
    """Unpickle with stand-ins for numpy; also the function that makes a real array of a stand-in.

    numpy's own classes are kept out: a crafted dtype state can make raw bytes pass for object pointers. The
    stand-ins are made anew for each file, because a pickle may set attributes on whatever it is given.
    """

    class Dtype:
        def __init__(self, code: bytes | str, *_: object) -> None:
            self.code, self.order = _text(code), "|"

        def __setstate__(self, state: tuple[Any, ...]) -> None:
            self.order = _text(state[1])

    class Array:
        state: tuple[Any, ...] = ()  # version, shape, dtype, Fortran order?, raw bytes

        def __setstate__(self, state: tuple[Any, ...]) -> None:
            self.state = state

    def reconstruct(*_: object) -> Array:
        return Array()

    def from_buffer(buffer: bytes, dtype: Dtype, shape: tuple[int, ...], order: str) -> Array:
        array = Array()
        array.state = (1, shape, dtype, order != "C", buffer)
        return array

    def encode_latin1(text: str, codec: str | bytes = "") -> bytes:
        if _text(codec) not in ("latin1", "latin-1"):
            raise DataFileError("only latin1 strings in the pickle", repr(codec), where, UNTRUSTED)
        return text.encode("latin1")

    allowed: dict[tuple[str, str], Callable[..., object]] = {
        ("numpy", "ndarray"): Array,
        ("numpy", "dtype"): Dtype,
        ("_codecs", "encode"): encode_latin1,
    }
    for core in ("numpy.core", "numpy._core"):
        allowed[f"{core}.multiarray", "_reconstruct"] = reconstruct
        allowed[f"{core}.numeric", "_frombuffer"] = from_buffer

    class ArrayUnpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) not in allowed:
                wanted = "a pickle of arrays, lists, dicts, strings and integers only"
                got = f"one that wants {module}.{name}; nothing was run"
                raise DataFileError(wanted, got, where, UNTRUSTED)
            return allowed[module, name]

    def as_array(stand_in: object) -> npt.NDArray[Any]:
        if not isinstance(stand_in, Array):
            raise TypeError(f"a {type(stand_in).__name__} instead of an array")
        _, shape, dtype, fortran, raw = stand_in.state
        if not isinstance(dtype, Dtype) or not re.fullmatch("[<>|=]?[iu][1248]", dtype.order + dtype.code):
            raise TypeError("an array that is not of integers")
        flat = np.frombuffer(raw, np.dtype(dtype.order + dtype.code))
        return flat.reshape(shape, order="F" if fortran else "C")

    return ArrayUnpickler(io.BytesIO(content), encoding="bytes").load(), as_array


def _text(value: bytes | str) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else str(value)


def read_npz(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Arrays of a user's npz: `x_train`, `y_train` and, if there, `x_test`, `y_test`, `classes`."""
    wanted = "an npz file with arrays x_train, y_train and optionally x_test, y_test, classes"
    try:
        with path.open("rb") as file:
            refuse_bombs(file, path.stat().st_size)
            archive = np.load(file, allow_pickle=False)
            keys = set(archive.files) if isinstance(archive, np.lib.npyio.NpzFile) else set()
            arrays = {key: archive[key] for key in NPZ_KEYS if key in keys}
    except FileNotFoundError as error:
        raise DataFileError(wanted, "no such file", str(path), "Check the path") from error
    except (*_DAMAGE, OSError) as error:
        got = f"{path.stat().st_size} bytes that cannot be read ({error})"
        raise DataFileError(wanted, got, str(path), REPLACE) from error
    except ValueError as error:  # numpy's answer to object arrays and to pickles
        fix = "Save plain arrays with np.savez(path, x_train=..., y_train=...)"
        raise DataFileError(wanted, f"objects or no array at all ({error})", str(path), fix) from error
    needed = NPZ_KEYS[:4] if keys & {"x_test", "y_test"} else NPZ_KEYS[:2]
    lacking = [key for key in needed if key not in keys]
    if lacking:
        got = f"arrays {', '.join(sorted(keys)) or 'none'}; {', '.join(lacking)} missing"
        raise DataFileError(wanted, got, where=str(path))
    return arrays
