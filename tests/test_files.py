"""Files: changed bytes are noticed; damaged and hostile ones are refused in our words, before memory is taken."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import fuzz
import fuzz_kinds
import numpy as np
import pandas as pd
import pytest
import torch

import flatscope as fs
from flatscope import files
from flatscope.errors import FlatscopeError
from flatscope.files import (
    foreign_parquet,
    from_json_bytes,
    from_npz_bytes,
    json_bytes,
    npz_bytes,
)
from flatscope.inputs.formats import read_npz
from flatscope.inputs.weight_files import read_weights, save_weights
from flatscope.tensor_files import read_tensors, tensor_bytes

KINDS = fuzz_kinds.kinds()


@pytest.mark.filterwarnings("ignore:.* no checksum protects")
@pytest.mark.parametrize("name", list(KINDS))
def test_a_changed_file_is_refused_or_read_as_it_was(name: str, tmp_path: Path) -> None:
    outcomes = [fuzz.attack(KINDS[name], tmp_path / "files", seed) for seed in range(16)]
    assert "refused" in outcomes or not KINDS[name].own or name in ("landscape rows", "trial")


@pytest.mark.parametrize("name", ["table.json", "weights.safetensors", "weights.pt", "simplex.npz", "table.parquet"])
def test_every_flipped_bit_of_the_data_is_noticed(name: str, tmp_path: Path) -> None:
    """Not a sample: every 7th byte, so that a format whose checksum leaves a part out cannot hide."""
    kind = KINDS[name]
    kind.write(tmp_path)
    path = next(tmp_path.iterdir())
    content, before = path.read_bytes(), kind.read(tmp_path)
    step = max(7, len(content) // 200)
    for place in range(0, len(content), step):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        try:
            assert kind.read(tmp_path) == before, place
        except FlatscopeError:
            continue


def test_checksums_are_of_the_content(tmp_path: Path) -> None:
    sealed = json_bytes(json.dumps({"a": [1, 2]}, indent=1))
    assert from_json_bytes(sealed) == {"a": [1, 2]}
    assert json.loads(sealed)["a"] == [1, 2]
    for wrong in (sealed.replace(b"2", b"3", 1), sealed.replace(b'"checksum": "', b'"checksum": "x')):
        with pytest.raises(ValueError, match="checksum"):
            from_json_bytes(wrong)
    assert from_json_bytes(b'{"a": 1}') == {"a": 1}  # of others
    assert from_json_bytes(json_bytes("{}")) == {}

    arrays = from_npz_bytes(npz_bytes({"a": np.arange(3), "b": np.float64(2.0)}))
    assert sorted(arrays) == ["a", "b"]
    other = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(npz_bytes({"a": np.arange(3)}))) as archive:
        np.savez(
            other, a=np.arange(1, 4), flatscope_checksum=np.load(io.BytesIO(archive.read("flatscope_checksum.npy")))
        )
    with pytest.raises(ValueError, match="checksum"):
        from_npz_bytes(other.getvalue())

    path = tmp_path / "t.safetensors"
    path.write_bytes(tensor_bytes({"w": torch.ones(2, dtype=torch.bfloat16), "e": torch.zeros(0)}, {"note": "x"}))
    tensors, head = read_tensors(path)
    assert head == {"note": "x"}
    assert tensors["w"].dtype == torch.bfloat16
    path.write_bytes(path.read_bytes().replace(b'"note":"x"', b'"note":"y"'))
    with pytest.raises(ValueError, match="checksum"):
        read_tensors(path)


def _bomb(folder: Path) -> Path:
    """Zeros, 64 MiB of them in 64 KiB."""
    path = folder / "bomb.npz"
    np.savez_compressed(path, x_train=np.zeros(1 << 26, dtype=np.int8), y_train=np.arange(2))
    return path


def _wide(folder: Path) -> Path:
    """A header that declares an exbibyte."""
    path, held = folder / "wide.npz", io.BytesIO()
    np.lib.format.write_array_header_1_0(held, {"descr": "<f8", "fortran_order": False, "shape": (1 << 40, 1 << 17)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x_train.npy", held.getvalue() + bytes(64))
    return path


def _objects(folder: Path) -> Path:
    path = folder / "objects.npz"
    np.savez(path, x_train=np.array([{}, []], dtype=object), y_train=np.arange(2))
    return path


@pytest.mark.parametrize("make", [_bomb, _wide, _objects])
def test_hostile_arrays_are_refused_before_memory_is_taken(make, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(files, "LEAST_LIMIT", 1 << 20)
    with pytest.raises(FlatscopeError):
        read_npz(make(tmp_path))


def test_hostile_frames_and_texts_are_refused(monkeypatch) -> None:
    buffer = io.BytesIO()
    pd.DataFrame({"x": np.zeros(1 << 22, dtype=np.int8)}).to_parquet(buffer, compression="zstd")
    assert len(foreign_parquet(buffer.getvalue())) == 1 << 22
    monkeypatch.setattr(files, "LEAST_LIMIT", 1 << 20)
    with pytest.raises(ValueError, match="rows of 1 columns"):
        foreign_parquet(buffer.getvalue())
    with pytest.raises(ValueError, match="nested"):
        from_json_bytes(b"[" * 200_000 + b"]" * 200_000)


def test_tensors_that_repeat_a_few_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "wide.pt"
    torch.save({"w": torch.zeros(1).expand(1 << 40)}, path)
    with pytest.raises(FlatscopeError, match="bytes of tensors"):
        read_weights(path)


def test_what_was_measured_is_named_by_its_checksum(tmp_path: Path) -> None:
    weights = save_weights(fuzz_kinds.small_network(0), tmp_path / "w.pt")
    np.savez(tmp_path / "data.npz", x_train=np.ones((6, 3), np.float32), y_train=np.arange(6) % 2)
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))\n"
    )
    words = ["--model", f"{tmp_path / 'net.py'}:build", "--weights", str(weights), "--data", str(tmp_path / "data.npz")]
    out = tmp_path / "table.json"
    subprocess.run(
        [sys.executable, "-m", "flatscope", "measure", "--measure", "l2_norm", *words, "--out", str(out)],
        check=True,
        timeout=120,
    )
    meta = fs.Table.load(out).meta
    expected = {
        f"{name} checksum": files.file_digest(path) for name, path in {"weights": weights, "data": words[-1]}.items()
    }
    assert expected.items() <= meta.items()
