"""Readers of data files: what is right is read to the byte, what is wrong is named, nothing hostile runs."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import pickle
import struct
import tarfile
import warnings
from pathlib import Path

import numpy as np
import pytest

from flatscope.errors import DataFileError
from flatscope.inputs import formats

PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def records(n: int, seed: int = 0) -> bytes:
    stream = np.random.RandomState(seed)
    rows = stream.randint(256, size=(n, formats.CIFAR_RECORD), dtype=np.uint8)
    rows[:, 0] = np.arange(n) % 10
    return rows.tobytes()


def fields(content: bytes) -> dict[bytes, object]:
    rows = np.frombuffer(content, np.uint8).reshape(-1, formats.CIFAR_RECORD)
    return {b"batch_label": b"tiny", b"labels": rows[:, 0].tolist(), b"data": rows[:, 1:].copy()}


def python2_batch(content: bytes) -> bytes:
    """The opcodes that python 2's cPickle wrote for CIFAR-10, by hand: 8-bit strings, numpy.core, protocol 2."""
    rows = np.frombuffer(content, np.uint8).reshape(-1, formats.CIFAR_RECORD)
    raw = rows[:, 1:].tobytes()

    def string(text: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(text)) + text

    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01"
    array += b"J" + struct.pack("<i", len(rows)) + b"M\x00\x0c\x86" + dtype + b"\x89" + string(raw) + b"tb"
    labels = b"](" + b"".join(b"K" + bytes([label]) for label in rows[:, 0]) + b"e"
    return b"\x80\x02}(" + string(b"data") + array + string(b"labels") + labels + b"u."


def message(error: pytest.ExceptionInfo[DataFileError], *parts: object) -> None:
    for part in parts:
        assert str(part) in str(error.value)


@pytest.mark.parametrize("suffix", PACK)
def test_idx_is_read_in_every_packing(tmp_path: Path, suffix: str) -> None:
    array = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    path = tmp_path / f"images{suffix}"
    path.write_bytes(PACK[suffix](idx(array)))
    read = formats.parse_idx(formats.read_bytes(path))
    assert read.shape == (2, 3, 4)
    assert (read == array).all()


def test_packing_is_told_by_content_not_by_name(tmp_path: Path) -> None:
    path = tmp_path / "labels.gz"
    path.write_bytes(b"not packed at all")
    assert formats.read_bytes(path) == b"not packed at all"


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_damaged_packing_names_file_and_sizes(tmp_path: Path, suffix: str, damage: str) -> None:
    packed = bytearray(PACK[suffix](records(3)))
    if damage == "cut":
        del packed[len(packed) // 2 :]
    else:
        packed[len(packed) // 2] ^= 0x40
    path = tmp_path / f"data_batch_1.bin{suffix}"
    path.write_bytes(packed)
    with pytest.raises(DataFileError) as error:
        formats.read_bytes(path, 3 * 3073)
    message(error, path, 3 * 3073, "damage")


def test_unpacking_stops_at_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "UNPACKED_LIMIT", 1 << 20)
    path = tmp_path / "bomb.xz"
    path.write_bytes(lzma.compress(bytes(1 << 24)))
    with pytest.raises(DataFileError) as error:
        formats.read_bytes(path)
    message(error, path, 1 << 20)


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataFileError) as error:
        formats.read_bytes(tmp_path / "nowhere.gz")
    message(error, "nowhere.gz", "No such file")


def test_cifar_records_are_label_then_planes() -> None:
    content = records(12)
    images, labels = formats.parse_cifar(content)
    assert images.shape == (12, 3, 32, 32)
    assert labels.tolist() == [*range(10), 0, 1]
    assert images[1, 2, 31, 31] == content[2 * 3073 - 1]
    assert images[1, 1, 0, 0] == content[3073 + 1 + 1024]


@pytest.mark.parametrize("mode", ["gz", "xz", ""])
def test_tar_members_are_read_by_base_name(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "any.tar"
    wanted = {"data_batch_1.bin": records(2), "test_batch.bin": records(1, 1)}
    with tarfile.open(path, f"w:{mode}") as tar:
        link = tarfile.TarInfo("sub/test_batch.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        for name, content in {"readme.html": b"x", **wanted}.items():
            info = tarfile.TarInfo(f"../../cifar/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    assert formats.read_tar(path, ["data_batch_1.bin", "test_batch.bin", "absent"]) == wanted
    assert [file.name for file in tmp_path.iterdir()] == ["any.tar"]


def test_truncated_tar_names_the_archive(tmp_path: Path) -> None:
    path = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        info = tarfile.TarInfo("data_batch_1.bin")
        info.size = 3 * 3073
        tar.addfile(info, io.BytesIO(records(3)))
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(DataFileError) as error:
        formats.read_tar(path, ["data_batch_1.bin"])
    message(error, path, "0 of 1")


def test_python2_fixture_is_what_numpy_reads() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy.core is an old name
        batch = pickle.loads(python2_batch(records(11)), encoding="bytes")
    assert (batch[b"data"] == fields(records(11))[b"data"]).all()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5, "python 2"])
def test_python_batch_gives_the_binary_layout(protocol: int | str) -> None:
    content = records(11)
    python3 = pickle.dumps(fields(content), protocol=protocol) if isinstance(protocol, int) else b""
    assert formats.cifar_records_from_pickle(python3 or python2_batch(content), "data_batch_1") == content


def test_python_batch_with_text_keys() -> None:
    content = records(5)
    batch = {key.decode(): value for key, value in fields(content).items()}
    assert formats.cifar_records_from_pickle(pickle.dumps(batch, protocol=2), "x") == content
    assert formats.cifar_records_from_pickle(pickle.dumps(dict(reversed(batch.items())), protocol=4), "x") == content


class Runs:
    """Unpickling this would run `call(*args)`."""

    def __init__(self, call, *args) -> None:
        self.recipe = (call, args)

    def __reduce__(self):
        return self.recipe


@pytest.mark.parametrize("place", ["whole", "data", "labels", "extra"])
@pytest.mark.parametrize("call", [os.system, eval, exec, os.mkdir])
def test_hostile_pickles_are_refused_and_nothing_runs(tmp_path: Path, call, place: str) -> None:
    mark = tmp_path / "ran"
    argument = {os.system: f"touch {mark}", os.mkdir: str(mark)}.get(call, f"__import__('os').mkdir({str(mark)!r})")
    attack = Runs(call, argument)
    batch = attack if place == "whole" else {**fields(records(2)), place.encode(): attack}
    with pytest.raises(DataFileError) as error:
        formats.cifar_records_from_pickle(pickle.dumps(batch, protocol=2), "dir/data_batch_3")
    message(error, "dir/data_batch_3", f".{call.__name__}", "nothing was run")
    assert not mark.exists()


def test_the_marker_would_have_been_made(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    pickle.loads(pickle.dumps(Runs(os.mkdir, str(mark)), protocol=2))
    assert mark.exists()  # so the test above can fail


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02c_codecs\nencode\nX\x03\x00\x00\x00abcX\x05\x00\x00\x00rot13\x86R.",
        b"\x80\x02c_codecs\nencode\nX\x03\x00\x00\x00abc\x85R.",
        b"\x80\x02cnumpy\nload\nX\x01\x00\x00\x00x\x85R.",
        b"\x80\x02cnumpy.core.multiarray\nfromfile\n.",
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.",
        b"\x80\x04\x8c\x05numpy\x8c\x0dndarray.tofile\x93.",
        b"\x80\x02P1\n.",
        b"(i__builtin__\neval\n.",
        b"\x80\x02\x82\x01.",
    ],
)
def test_other_ways_to_reach_code_are_refused(pickled: bytes) -> None:
    with pytest.raises(DataFileError) as error:
        formats.cifar_records_from_pickle(pickled, "dir/test_batch")
    message(error, "dir/test_batch")


def test_a_pickle_cannot_change_the_reader_for_the_next_one() -> None:
    # setattr(ndarray, "__setstate__", 1), then the same on a function
    poison = b"\x80\x02cnumpy\nndarray\nN}X\x0c\x00\x00\x00__setstate__K\x01s\x86b0"
    poison += b"cnumpy.core.multiarray\n_reconstruct\nN}X\x0c\x00\x00\x00__defaults__K\x01\x85s\x86b."
    with pytest.raises(DataFileError):
        formats.cifar_records_from_pickle(poison, "poison")
    assert formats.cifar_records_from_pickle(python2_batch(records(3)), "good") == records(3)


@pytest.mark.parametrize(
    "batch",
    [
        [],
        {},
        {b"data": np.zeros((2, 3072), np.uint8)},
        {b"data": np.zeros((2, 3072), np.float32), b"labels": [0, 1]},
        {b"data": np.zeros((2, 3072), object), b"labels": [0, 1]},
        {b"data": np.zeros((2, 100), np.uint8), b"labels": [0, 1]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 10]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, -1]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, "a"]},
        {b"data": [[0] * 3072], b"labels": [0]},
    ],
)
def test_pickles_that_are_no_batch(batch: object) -> None:
    with pytest.raises(DataFileError) as error:
        formats.cifar_records_from_pickle(pickle.dumps(batch, protocol=2), "dir/data_batch_2")
    message(error, "dir/data_batch_2", "3072")


@pytest.mark.parametrize("end", [1, 10, 100, 5000])
def test_truncated_pickles(end: int) -> None:
    with pytest.raises(DataFileError) as error:
        formats.cifar_records_from_pickle(python2_batch(records(3))[:end], "dir/data_batch_2")
    message(error, "dir/data_batch_2", f"{end} bytes")


def test_npz_keys_and_pickles(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    x, y = np.zeros((3, 2)), np.zeros(3, int)
    np.savez(path, x_train=x, y_train=y, other=x)
    assert set(formats.read_npz(path)) == {"x_train", "y_train"}
    for arrays, missing in (
        ({"x": x, "y": y}, "x_train, y_train missing"),
        ({"x_train": x, "y_train": y, "x_test": x}, "y_test missing"),
    ):
        np.savez(path, **arrays)
        with pytest.raises(DataFileError) as error:
            formats.read_npz(path)
        message(error, path, missing, *arrays)
    np.savez(path, x_train=np.array([Runs(os.mkdir, str(tmp_path / "ran"))], object), y_train=y)
    with pytest.raises(DataFileError) as error:
        formats.read_npz(path)
    message(error, path, "objects")
    assert not (tmp_path / "ran").exists()


def test_npz_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    np.savez(path, x_train=np.ones((40, 40)), y_train=np.zeros(40, int))
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[1000] ^= 1
    array = io.BytesIO()
    np.save(array, np.zeros(3))
    for content in (whole[:500], bytes(flipped), b"", b"hello", pickle.dumps({}), array.getvalue()):
        path.write_bytes(content)
        with pytest.raises(DataFileError) as error:
            formats.read_npz(path)
        message(error, path, "npz")
    with pytest.raises(DataFileError, match="no such file"):
        formats.read_npz(tmp_path / "none.npz")
