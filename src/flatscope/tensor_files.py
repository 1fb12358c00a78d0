"""Tensors by name as safetensors files with a checksum; nothing that is read is run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from flatscope.disk import check_file
from flatscope.errors import first_line
from flatscope.files import CHANGED, CHECKSUM, digest


def tensor_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Tensors by name as a safetensors file; its header has their checksum."""
    head = dict(metadata or {})  # no other entry than needed: the format writes them in any order
    return safetensors.torch.save(dict(tensors), head | {CHECKSUM: _tensor_digest(tensors, head)})


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors of a safetensors file, which stays open while they live, and its header without the checksum."""
    try:
        check_file(path)
        with safetensors.safe_open(path, framework="pt") as file:
            head = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
    except (safetensors.SafetensorError, OSError) as problem:
        raise ValueError(first_line(problem)) from problem
    checksum = head.pop(CHECKSUM, None)
    hidden = any(re.fullmatch("[0-9a-f]{32}", value) for value in head.values())  # under a name that was changed
    if hidden or (checksum is not None and checksum != _tensor_digest(tensors, head)):
        raise ValueError(CHANGED)
    return tensors, head


def _tensor_digest(tensors: Mapping[str, Tensor], head: Mapping[str, str]) -> str:
    parts: list[bytes | memoryview] = [json.dumps(dict(sorted(head.items()))).encode()]
    for name in sorted(tensors):
        held = tensors[name].detach().cpu().contiguous()
        parts.append(f"\n{name} {held.dtype} {tuple(held.shape)}\n".encode())
        if held.numel():
            parts.append(held.reshape(-1).view(torch.uint8).numpy().data)
    return digest(parts)
