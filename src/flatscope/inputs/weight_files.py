"""Weight files: safetensors or torch state dicts, written whole or not at all, read without running anything."""

from __future__ import annotations

import io
import os
import pickle
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor, nn

from flatscope.disk import open_file, write_whole
from flatscope.errors import InputError, WeightsError
from flatscope.files import LARGEST_RATIO, LEAST_LIMIT
from flatscope.formatting import first_of_names
from flatscope.params import plain_names
from flatscope.tensor_files import read_tensors, tensor_bytes

WEIGHTS_FILE, STATE_FILE = "weights.safetensors", "state.json"  # of a checkpoint: its weights, how far it is
FOLDER = 0x10  # bit of a zip entry's attributes
MODEL_PREFIX = "model."  # of the network's own tensors in a checkpoint, where momentum and others lie beside them
STATE_KEY = "flatscope_training_state"  # header entry that tells a checkpoint from a plain weight file


def save_weights(model: nn.Module, path: str | os.PathLike[str]) -> Path:
    """Write parameters and buffers to `path`: safetensors, or a torch state dict if the name ends in .pt or .pth.

    The file appears under its name only once it is complete. Tensors that share memory are written once per
    name.
    """
    path = Path(path)
    tensors = plain_tensors(model.state_dict(), where=f"save_weights, {path}")
    if path.suffix in (".pt", ".pth"):
        buffer = io.BytesIO()
        torch.save(tensors, buffer)
        write_whole(path, buffer.getvalue())
    else:
        write_whole(path, tensor_bytes(tensors))
    return path


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Fill `model` in place from a weight file and return it; the file must fit it name by name.

    Takes what `save_weights` writes, any state dict of tensors (also inside {"state_dict": ...}, or with what
    `torch.compile` and DataParallel put into its names), and the folder or file of a training checkpoint.

    Raises:
        WeightsError: the file is missing, damaged or would have to run code, or names or shapes differ from
            the model's; the model is then unchanged.
    """
    fit_weights(model, read_weights(path), where=str(path))
    return model


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Tensors of a weight file by name, on the CPU. Nothing in the file is run, whatever it contains."""
    path = Path(path)
    if (path / WEIGHTS_FILE).is_file():
        path = path / WEIGHTS_FILE
    try:
        with open_file(path) as file:
            head = file.read(9)
    except OSError as error:
        got = error.strerror or str(error)
        raise WeightsError("a readable weight file", got, str(path), "Check the path") from None
    except InputError as problem:
        raise WeightsError(problem.expected, problem.got, str(path), problem.fix) from None
    # By content, not by suffix: an eight-byte length and an opening brace begin every safetensors file.
    if head[8:9] == b"{" or not head.startswith((b"PK", b"\x80")):
        return _read_safetensors(path)
    return _read_state_dict(path)


def fit_weights(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy `tensors` into `model` if names and shapes agree; otherwise name what does not and change nothing."""
    state = model.state_dict()
    if not tensors.keys() <= state.keys():  # saved from a wrapped model, or to be loaded into one
        names = dict(zip(plain_names(state), state, strict=True))
        tensors = {names.get(name, name): value for name, value in plain_names(tensors).items()}
    twins = _names_of_shared_memory(state)
    absent = [name for name in state if name not in tensors and not (twins[name] & tensors.keys())]
    extra = sorted(name for name in tensors if name not in state)
    shapes = [
        f"{name} {tuple(tensors[name].shape)} for {tuple(value.shape)}"
        for name, value in state.items()
        if name in tensors and tensors[name].shape != value.shape
    ]
    differences = [("missing ", absent), ("not in the model ", extra), ("tensors of another shape ", shapes)]
    if problems := "; ".join(label + first_of_names(list(names), 5) for label, names in differences if names):
        raise WeightsError("the weights of this model", problems, where, "Take the weights of the same architecture")
    for name in state:
        for twin in twins[name] & tensors.keys():
            if name in tensors and not torch.equal(tensors[name], tensors[twin]):
                wanted = f"equal values for {name} and {twin}, which the model shares"
                raise WeightsError(wanted, "different ones", where=where)
    model.load_state_dict(dict(tensors), strict=False)


def plain_tensors(state: Mapping[str, object], where: str) -> dict[str, Tensor]:
    """Copies on the CPU that share no memory, as files need them."""
    for name, value in state.items():
        if not isinstance(value, Tensor):
            fix = "Save the weights alone: torch.save(model.state_dict(), path)"
            raise WeightsError("only tensors in the state dict", f"{name}: {type(value).__name__}", where, fix)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors, head = read_tensors(path)
    except ValueError as error:
        got = f"one that cannot be read ({error})"
        fix = "Save it again with flatscope's save_weights or torch.save(model.state_dict(), path)"
        raise WeightsError("a whole safetensors file or torch state dict", got, str(path), fix) from None
    if STATE_KEY in head:
        return {name.removeprefix(MODEL_PREFIX): t for name, t in tensors.items() if name.startswith(MODEL_PREFIX)}
    return tensors


def _read_state_dict(path: Path) -> dict[str, Tensor]:
    try:
        # an open file, since torch.load guesses the format from the suffix of a path
        with open_file(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols; the error below says what matters
            is_protected = _refuse_changed_archive(file, path.stat().st_size)
            content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        got = "a pickle that is damaged or wants to run code of its own; nothing in it was run"
        fix = "Whole models are refused too: save torch.save(model.state_dict(), path) or safetensors"
        raise WeightsError("a state dict of plain tensors", got, str(path), fix) from None
    except Exception as error:  # damaged archives fail in many ways, all of them the file's fault
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        fix = "Save it again: torch.save(model.state_dict(), path)"
        if path.suffix == ".npz":
            reason, fix = "an .npz of arrays", f"Data go to --data; weights to a file of their own. {fix}"
        raise WeightsError("a whole state dict", f"one that cannot be read ({reason})", str(path), fix) from None
    if not is_protected:
        unprotected = f"{path}: written in torch's old format, in which no checksum protects the numbers"
        warnings.warn(f"{unprotected}; torch.save(state_dict, path) writes the newer one", stacklevel=3)
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise WeightsError("a state dict of tensors by name", type(content).__name__, where=str(path))
    _refuse_repeated_storage(content, path)
    return plain_tensors(content, where=str(path))


def _refuse_changed_archive(file: BinaryIO, size: int) -> bool:
    """True if checksums protect it: those of a zip's members, which torch does not compare, are compared here."""
    if is_zip := zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > 2 * size:
                raise ValueError("it declares more than twice its own bytes")
            for entry in archive.infolist():
                if entry.external_attr & FOLDER:
                    raise ValueError(f"{entry.filename} in it is marked as a folder")  # torch would read past it
                checksum = 0
                with archive.open(entry) as member:
                    member._expected_crc = None  # type: ignore[attr-defined]  # compared below: it may be switched off
                    while block := member.read(1 << 22):
                        checksum = zlib.crc32(block, checksum)
                if entry.CRC and checksum != entry.CRC:
                    raise ValueError(f"the checksum of {entry.filename} in it differs")
    file.seek(0)
    return is_zip


def _refuse_repeated_storage(state: Mapping[str, object], path: Path) -> None:
    """A few bytes can be repeated into a tensor of any size: refused before it is written out."""
    limit = max(LEAST_LIMIT, LARGEST_RATIO * path.stat().st_size)
    sizes = {name: t.numel() * t.element_size() for name, t in state.items() if isinstance(t, Tensor)}
    if sum(sizes.values()) > limit:
        largest = max(sizes, key=lambda name: sizes[name])
        got = f"{sum(sizes.values()):,} bytes of tensors in {path.stat().st_size:,} ({largest}: {sizes[largest]:,})"
        raise WeightsError("tensors that the file holds", got, where=str(path))


def _names_of_shared_memory(state: Mapping[str, Tensor]) -> dict[str, set[str]]:
    """For each entry the names of the others that are the same memory (tied weights)."""
    places: dict[object, set[str]] = {}
    keys = {name: (t.device, t.data_ptr(), t.shape, t.stride()) for name, t in state.items() if t.numel()}
    for name, key in keys.items():
        places.setdefault(key, set()).add(name)
    return {name: places[keys[name]] - {name} if name in keys else set() for name in state}
