"""The public sets: found wherever they lie and in every form, verified to the byte, downloaded whole or not."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import http.server
import io
import lzma
import os
import pickle
import random
import shutil
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from test_formats import fields, idx, python2_batch, records

from flatscope.errors import DataFileError, InputError, UnknownNameError
from flatscope.inputs.known_files import CIFAR10, MNIST, SETS, Download, KnownFile, PublicSet
from flatscope.inputs.loading import load
from flatscope.inputs.public_sets import available, data_root, fetch, read_part, verify

pytestmark = pytest.mark.long

Files = dict[str, bytes]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def shrunk(public: PublicSet, contents: Files) -> PublicSet:
    """The same set with these few bytes as its published content."""
    files = tuple(
        dataclasses.replace(file, size=len(contents[file.name]), sha256=sha256(contents[file.name]))
        for file in public.files
    )
    return dataclasses.replace(public, files=files)


@pytest.fixture(params=["mnist", "fashion-mnist"])
def tiny_idx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Files]:
    stream = np.random.RandomState(len(request.param))
    contents = {}
    for stem, n in (("train", 40), ("t10k", 20)):
        contents[f"{stem}-images-idx3-ubyte"] = idx(stream.randint(256, size=(n, 28, 28), dtype=np.uint8))
        contents[f"{stem}-labels-idx1-ubyte"] = idx(stream.permutation(np.arange(n, dtype=np.uint8) % 10))
    monkeypatch.setitem(SETS, request.param, shrunk(SETS[request.param], contents))
    return request.param, contents


@pytest.fixture
def tiny_cifar(monkeypatch: pytest.MonkeyPatch) -> Files:
    contents = {file.name: records(20, seed) for seed, file in enumerate(CIFAR10.files)}
    monkeypatch.setitem(SETS, "cifar10", shrunk(CIFAR10, contents))
    return contents


def put(folder: Path, files: Files) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def put_tar(path: Path, files: Files) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(f"cifar-10-batches/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


@pytest.mark.parametrize("packing", ["", ".gz", ".xz"])
@pytest.mark.parametrize("place", [0, 1, "root"])
def test_idx_sets_are_found_in_usual_folders(tmp_path: Path, tiny_idx, packing: str, place) -> None:
    name, contents = tiny_idx
    folder = tmp_path if place == "root" else tmp_path / SETS[name].folders[place]
    pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[packing]
    put(folder, {file + packing: pack(content) for file, content in contents.items()})
    assert {check.status for check in verify(name, tmp_path)} == {"ok"}
    data = load(name, tmp_path, standardize=False)
    assert data.train[0].shape == (40, 1, 28, 28)
    assert data.train[0].dtype == torch.float32
    assert data.train[1].dtype == torch.int64
    pixels = np.frombuffer(contents["t10k-images-idx3-ubyte"], np.uint8, offset=16)
    assert np.array_equal(data.test[0].numpy().ravel(), pixels.astype(np.float32) / np.float32(255))
    assert {item.name: item.status for item in available(tmp_path)}[name] == "complete"


def python_batches(contents: Files) -> Files:
    return {name.removesuffix(".bin"): python2_batch(content) for name, content in contents.items()}


@pytest.mark.parametrize("form", ["bin", "bin.xz", "bin.gz", "bin tar", "py", "py.xz", "py.gz", "py tar"])
def test_cifar_is_read_in_every_form(tmp_path: Path, tiny_cifar: Files, form: str) -> None:
    files = python_batches(tiny_cifar) if form.startswith("py") else tiny_cifar
    folder = tmp_path / ("cifar-10-batches-py" if form.startswith("py") else "cifar-10-batches-bin")
    if form.endswith("tar"):
        put_tar(tmp_path / f"cifar-10-{'python' if form.startswith('py') else 'binary'}.tar.gz", files)
    else:
        suffix = form[form.index(".") :].removeprefix(".bin") if "." in form else ""
        pack = {".xz": lzma.compress, ".gz": gzip.compress}.get(suffix, bytes)
        put(folder, {name + suffix: pack(content) for name, content in files.items()})
    images, labels = read_part("cifar10", "train", tmp_path)
    whole = b"".join(tiny_cifar[f"data_batch_{i}.bin"] for i in range(1, 6))
    assert images.shape == (100, 3, 32, 32)
    rows = np.concatenate((labels.astype(np.uint8)[:, None], images.reshape(100, -1)), axis=1)
    assert rows.tobytes() == whole
    assert [check.status for check in verify("cifar10", tmp_path)] == ["ok"] * 6


def test_wrong_content_is_found_by_verify_and_by_load(tmp_path: Path, tiny_cifar: Files) -> None:
    batch = fields(tiny_cifar["data_batch_2.bin"])
    batch[b"labels"][3] = 9 - batch[b"labels"][3]
    files = python_batches(tiny_cifar) | {"data_batch_2": pickle.dumps(batch, protocol=2)}
    put(tmp_path / "cifar-10", files)
    checks = verify("cifar10", tmp_path)
    assert [check.status for check in checks] == ["ok", "damaged", "ok", "ok", "ok", "ok"]
    assert checks[1].found_size == checks[1].expected_size == 20 * 3073
    assert checks[1].found_sha256 != checks[1].expected_sha256
    with pytest.raises(DataFileError) as error:
        load("cifar10", tmp_path)
    for part in ("data_batch_2", str(20 * 3073), "flatscope data fetch cifar10", checks[1].expected_sha256[:12]):
        assert part in str(error.value)


def changed(content: bytes, chance: random.Random) -> bytes:
    """Content with a bit turned over, a run of other bytes, one byte more or fewer, or its end cut off."""
    at = chance.randrange(len(content))
    ways = [
        content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :],
        content[:at] + chance.randbytes(40) + content[at + 40 :],
        content[:at] + b"\0" + content[at:],
        content[:at] + content[at + 1 :],
        content[:at],
    ]
    return chance.choice(ways)


@pytest.mark.parametrize("form", ["bin", "bin.gz", "bin.xz", "bin tar", "py"])
def test_no_changed_file_of_cifar_is_read_as_something_else(tmp_path: Path, tiny_cifar: Files, form: str) -> None:
    chance, whole, refused = random.Random(0), b"".join(tiny_cifar[f"data_batch_{i}.bin"] for i in range(1, 6)), 0
    folder = tmp_path / "cifar-10"
    put(folder, python_batches(tiny_cifar) if form == "py" else tiny_cifar)
    target = folder / ("data_batch_4" if form == "py" else "data_batch_4.bin")
    if form == "bin tar":
        shutil.rmtree(folder)
        put_tar(target := tmp_path / "cifar-10-binary.tar.gz", tiny_cifar)
    elif form not in ("bin", "py"):
        pack = gzip.compress if form == "bin.gz" else lzma.compress
        target.unlink()
        target = target.with_name(target.name + form.removeprefix("bin"))
        target.write_bytes(pack(tiny_cifar["data_batch_4.bin"]))
    original = target.read_bytes()
    for _ in range(40):
        target.write_bytes(changed(original, chance))
        checks = {check.status for check in verify("cifar10", tmp_path)}
        try:
            images, labels = read_part("cifar10", "train", tmp_path)
        except DataFileError:
            refused += "damaged" in checks
            continue
        rows = np.concatenate((labels.astype(np.uint8)[:, None], images.reshape(len(images), -1)), axis=1)
        assert rows.tobytes() == whole  # the change is in what the packing says of its file, such as a date
    assert refused > 20


def test_truncated_files_name_file_and_sizes(tmp_path: Path, tiny_cifar: Files, tiny_idx) -> None:
    name, contents = tiny_idx
    put(tmp_path / name, {file + ".gz": gzip.compress(content) for file, content in contents.items()})
    cut = tmp_path / name / "train-images-idx3-ubyte.gz"
    cut.write_bytes(cut.read_bytes()[:-1000])
    put_tar(tmp_path / "cifar-10-binary.tar.gz", tiny_cifar)
    archive = tmp_path / "cifar-10-binary.tar.gz"
    archive.write_bytes(archive.read_bytes()[:100_000])
    for set_name, path, size in ((name, cut, 16 + 40 * 784), ("cifar10", archive, 20 * 3073)):
        with pytest.raises(DataFileError) as error:
            load(set_name, tmp_path)
        assert str(path) in str(error.value)
        damaged = [check for check in verify(set_name, tmp_path) if check.status == "damaged"]
        assert damaged[0].expected_size == size
        assert str(path) in damaged[0].where
    with pytest.raises(DataFileError, match=str(16 + 40 * 784)):
        load(name, tmp_path)
    assert read_part(name, "test", tmp_path)[0].shape[0] == 20  # the test part is whole, and is read alone


def test_missing_files_say_where_and_which_command(tmp_path: Path, tiny_cifar: Files) -> None:
    with pytest.raises(DataFileError) as error:
        load("mnist", tmp_path)
    for part in (str(tmp_path), "mnist/", "MNIST/raw/", "flatscope data fetch mnist", "train-images-idx3-ubyte"):
        assert part in str(error.value)
    put(tmp_path / "cifar-10", {"test_batch.bin": tiny_cifar["test_batch.bin"]})
    listing = {item.name: item for item in available(tmp_path)}
    assert listing["digits"].status == "embedded"
    assert listing["mnist"].status == "absent"
    assert listing["cifar10"].status == "incomplete"
    assert listing["cifar10"].missing == tuple(f"data_batch_{i}.bin" for i in range(1, 6))
    assert [check.status for check in verify("cifar10", tmp_path)] == ["missing"] * 5 + ["ok"]
    with pytest.raises(DataFileError, match=r"data_batch_4\.bin"):
        load("cifar10", tmp_path)


def test_loose_files_in_the_root_belong_to_one_set(tmp_path: Path, tiny_idx) -> None:
    name, contents = tiny_idx
    other = "mnist" if name == "fashion-mnist" else "fashion-mnist"
    put(tmp_path, contents)
    status = {item.name: item.status for item in available(tmp_path)}
    assert (status[name], status[other]) == ("complete", "absent")
    put(tmp_path / other, contents)
    assert SETS[name].title in verify(other, tmp_path)[0].detail
    with pytest.raises(DataFileError, match=f"this is a file of {SETS[name].title}"):
        load(other, tmp_path)


def test_root_comes_from_argument_then_environment_then_cache(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FLATSCOPE_DATA", str(tmp_path / "a"))
    assert data_root(tmp_path / "b") == tmp_path / "b"
    assert data_root() == tmp_path / "a"
    monkeypatch.delenv("FLATSCOPE_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_root().name == "flatscope"


def test_a_second_read_is_from_memory_until_the_file_changes(tmp_path: Path, tiny_idx) -> None:
    name, contents = tiny_idx
    put(tmp_path / name, contents)
    first = read_part(name, "train", tmp_path)
    assert read_part(name, "train", tmp_path)[0] is first[0]
    assert not first[0].flags.writeable
    assert not first[1].flags.writeable
    path = tmp_path / name / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1] + b"\0\0")
    with pytest.raises(DataFileError, match="train-images-idx3-ubyte"):
        read_part(name, "train", tmp_path)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    folder = tmp_path / "served"
    folder.mkdir()
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}", folder
        httpd.shutdown()
        thread.join()


@pytest.fixture
def offered(server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """A server with two small files that stand for a public set."""
    contents = {"a-images": idx(np.zeros((3, 4, 4), np.uint8)), "a-labels": idx(np.arange(3, dtype=np.uint8))}
    packed = {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in contents.items()}
    downloads = tuple(Download(name, len(data), f"sha256:{sha256(data)}") for name, data in packed.items())
    files = tuple(KnownFile(name, "train", len(data), sha256(data)) for name, data in contents.items())
    tiny = dataclasses.replace(MNIST, files=files, downloads=downloads, url=server[0])
    monkeypatch.setitem(SETS, "mnist", tiny)
    put(server[1], packed)
    return server


def test_fetch_downloads_verifies_and_keeps(tmp_path: Path, offered: tuple[str, Path]) -> None:
    root = tmp_path / "root"
    paths = fetch("mnist", root, base_url=offered[0])
    assert [path.relative_to(root).as_posix() for path in paths] == ["mnist/a-images.gz", "mnist/a-labels.gz"]
    assert [check.status for check in verify("mnist", root)] == ["ok", "ok"]
    for file in offered[1].iterdir():
        file.unlink()
    assert fetch("mnist", root) == paths  # whole already: the server is not asked
    assert fetch("digits", root) == []


def test_load_downloads_only_when_told(tmp_path: Path, offered: tuple[str, Path]) -> None:
    with pytest.raises(DataFileError):
        load("mnist", tmp_path / "root", test_size=0)
    data = load("mnist", tmp_path / "root", test_size=0, download=True)
    assert data.train[0].shape == (3, 1, 4, 4)
    assert data.test is None


@pytest.mark.parametrize("fault", ["wrong bytes", "not found", "no server"])
def test_failed_download_leaves_nothing(tmp_path: Path, offered: tuple[str, Path], fault: str) -> None:
    url, served = offered
    name = "a-images.gz"
    size, checksum = (served / name).stat().st_size, sha256((served / name).read_bytes())
    if fault == "wrong bytes":
        (served / name).write_bytes(b"<html>please log in</html>")
    elif fault == "not found":
        (served / name).unlink()
    else:
        url = "http://127.0.0.1:9"
    root = tmp_path / "root"
    with pytest.raises(DataFileError) as error:
        fetch("mnist", root, base_url=url)
    for part in (name, str(size), checksum, url):
        assert part in str(error.value)
    assert [path for path in root.rglob("*") if path.is_file()] == []


def test_fetch_without_pooch_or_with_an_unknown_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(InputError, match="pip install pooch"):
        fetch("mnist", tmp_path)
    with pytest.raises(UnknownNameError, match="fashion-mnist"):
        fetch("fashion", tmp_path)
    with pytest.raises(UnknownNameError, match="cifar10"):
        verify("cifar", tmp_path)


real_data = pytest.mark.skipif(not os.environ.get("FLATSCOPE_DATA"), reason="FLATSCOPE_DATA names no folder")
MNIST_TRAIN = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


@pytest.mark.real_data
@real_data
@pytest.mark.parametrize(
    ("name", "train", "test"), [("mnist", MNIST_TRAIN, MNIST_TEST), ("fashion-mnist", [6000] * 10, [1000] * 10)]
)
def test_real_idx_sets(name: str, train: list[int], test: list[int]) -> None:
    data = load(name)
    assert data.train[0].shape == (60_000, 1, 28, 28)
    assert data.test[0].shape == (10_000, 1, 28, 28)
    assert data.train[1].bincount().tolist() == train
    assert data.test[1].bincount().tolist() == test
    assert abs(data.train[0].double().mean()) < 1e-6
    assert data.train[0].double().std(correction=0) == pytest.approx(1, abs=1e-6)
    assert {check.status for check in verify(name)} == {"ok"}


@pytest.mark.real_data
@real_data
def test_real_cifar(monkeypatch: pytest.MonkeyPatch) -> None:
    from flatscope.inputs import formats

    monkeypatch.setattr(formats, "read_bytes", functools.cache(formats.read_bytes))  # unpacked once
    data = load("cifar10", train_size=None, crop=None)
    assert data.train[0].shape == (50_000, 3, 32, 32)
    assert data.test[0].shape == (10_000, 3, 32, 32)
    assert data.train[1].bincount().tolist() == [5000] * 10
    assert data.test[1].bincount().tolist() == [1000] * 10
    means = [255 * mean for mean in data.mean]
    assert means == pytest.approx([125.306918046875, 122.950394140625, 113.86538318359375], rel=1e-13)
    small = load("cifar10", train_size=1000, test_size=0, crop=28, standardize=False)
    assert small.train[0].shape == (1000, 3, 28, 28)
    assert small.train[1].bincount().tolist() == [100] * 10
    assert {check.status for check in verify("cifar10")} == {"ok"}


@pytest.mark.real_data
@real_data
@pytest.mark.parametrize("name", ["mnist/train-images-idx3-ubyte.gz", "cifar-10/test_batch.bin.xz"])
def test_real_file_with_a_flipped_byte(tmp_path: Path, name: str) -> None:
    source = Path(os.environ["FLATSCOPE_DATA"]) / name
    if not source.exists():
        pytest.skip(f"{source} lies there in another form")
    damaged = tmp_path / name
    damaged.parent.mkdir()
    shutil.copyfile(source, damaged)
    with damaged.open("r+b") as file:
        file.seek(1_000_000)
        byte = file.read(1)[0]
        file.seek(1_000_000)
        file.write(bytes([byte ^ 0x10]))
    set_name = "mnist" if name.startswith("mnist") else "cifar10"
    found = {check.where: check for check in verify(set_name, tmp_path) if check.status != "missing"}
    assert found[str(damaged)].status == "damaged"
    assert found[str(damaged)].expected_size in (47_040_016, 30_730_000)
