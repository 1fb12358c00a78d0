"""What studies would cost where others have been timed: from networks that were, by multiply-adds.

Times on a GPU are dear. A training kind that has none takes that of a kin: a network of the same name if one was timed,
else one of the same sort, with or without convolutions. Seconds per image grow with the multiply-adds of the stack, and
with the number of steps where batches are smaller; where either is less than the kin's, nothing is taken off, since
small networks cost launches and not arithmetic. Measurements are not reckoned.
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from flatscope.errors import InputError
from flatscope.studies.cost import TRAINING, Cost, CostRow
from flatscope.studies.costing import added_up, again, blank_row, rounded, timed_rows
from flatscope.studies.pieces import Piece, pieces_of
from flatscope.studies.running import typed_command
from flatscope.studies.study import Config, check_scale, declared_studies, find_study
from flatscope.studies.timing import epochs_of
from flatscope.sweeps.work import builder_of, trial_of
from flatscope.training.data import load
from flatscope.training.trials import build_model, count_classes, read_trials

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class _Load:
    """What a training image costs a stack, as far as it can be counted."""

    model: str
    multiply_adds: float
    convolutional: bool
    batch: int


def reckoned_costs(names: Sequence[str], saved: Mapping[str, Cost], scale: str = "paper") -> list[Cost]:
    """Costs of studies from times that are there; see the module.

    Args:
        names: of the studies.
        saved: costs with timed rows, those of other studies too; the device with the most of them counts.
        scale: of the studies.

    Raises:
        InputError: nothing was timed.
    """
    check_scale(scale)
    devices = Counter(str(cost.provenance.get("device")) for cost in saved.values() for row in cost.rows if row.total)
    if not devices:
        fix = "Time some studies first: flatscope study cost NAMES"
        raise InputError("saved times", "none", where="study cost, reckon", fix=fix)
    device = devices.most_common(1)[0][0]
    there = {name: cost for name, cost in saved.items() if cost.provenance.get("device") == device}
    timed = timed_rows(saved, device)
    every = {piece.kind: piece for name in declared_studies() for piece in _pieces(name, scale)}
    kins = {
        kind: (again(timed[kind], "", [piece]), piece)
        for kind, piece in every.items()
        if kind in timed and piece.part == TRAINING
    }

    def row_of(study: str, alike: Sequence[Piece]) -> CostRow:
        blank = blank_row(alike)
        if blank.kind in timed:
            return again(timed[blank.kind], study, alike)
        if blank.part != TRAINING:
            return replace(blank, problem="no time of this kind of measurement")
        kin = _kin(max(alike, key=lambda piece: piece.images), kins)
        return _training(blank, alike, *kins[kin]) if kin else replace(blank, problem="no kin was timed")

    facts = {**next(iter(there.values())).provenance, "command": typed_command(f"reckoned_costs({list(names)})")}
    found = added_up({name: _pieces(name, scale) for name in names}, scale, row_of, facts)
    # What runs elsewhere, as the studies without networks do, keeps the times that it has from there.
    return [saved[cost.name] if cost.name in saved.keys() - there.keys() else cost for cost in found]


def _pieces(name: str, scale: str) -> list[Piece]:
    return pieces_of(find_study(name).stages(scale), "cpu")


def _training(blank: CostRow, alike: Sequence[Piece], row: CostRow, kin: Piece) -> CostRow:
    """A row of stacks from the timed epoch of a kin."""
    per_image = _per_image(alike[0], row, kin)
    total = sum(epochs_of(piece) * per_image * piece.images for piece in alike)
    return replace(
        blank,
        each=rounded(per_image * blank.images),
        total=rounded(total),
        epochs=epochs_of(max(alike, key=lambda piece: piece.images)),
        timed_on=row.timed_on,
        like=row.what,
    )


def _per_image(piece: Piece, row: CostRow, kin: Piece) -> float:
    assert row.each is not None
    mine, theirs = _load(piece), _load(kin)
    factor = max(1.0, mine.multiply_adds / theirs.multiply_adds) * max(1.0, theirs.batch / mine.batch)
    return factor * row.each / row.images


def _kin(piece: Piece, timed: Mapping[str, tuple[CostRow, Piece]]) -> str | None:
    """The kind to reckon from: of the same model if one was timed, else of the same sort.

    Each of them gives too long a time, or the right one if it is busy with arithmetic: the shortest counts.
    """
    mine = _load(piece)
    loads = {kind: _load(other) for kind, (_, other) in timed.items()}
    for alike in (
        [kind for kind, other in loads.items() if other.model == mine.model],
        [kind for kind, other in loads.items() if other.convolutional == mine.convolutional],
    ):
        if alike:
            return min(alike, key=lambda kind: _per_image(piece, *timed[kind]))
    return None


def _load(piece: Piece) -> _Load:
    first = piece.configs[0]
    parts = {"data": first["data"], "model": first["model"]}
    adds, convolutional = _multiply_adds(json.dumps(parts, sort_keys=True))
    batch = int(first["train"].get("batch_size", 64))
    return _Load(first["model"]["name"], adds * len(piece.configs), convolutional, batch)


@functools.cache
def _multiply_adds(network: str) -> tuple[float, bool]:
    """Of one image through one network, and whether it has convolutions."""
    config: Config = {**json.loads(network), "train": {}}
    image, n_classes = _example(json.dumps({**config["data"], "train_size": None, "test_size": 0, "seed": 0}))
    build = builder_of(config["model"]["name"])
    (trial,) = read_trials([trial_of(config, "0")], build)
    model = build_model(build, trial, image, n_classes).eval()
    counts: list[float] = []

    def count(layer: nn.Module, _: Any, output: Tensor) -> None:
        if isinstance(layer, nn.Linear):
            counts.append(output.numel() * layer.in_features)
        elif isinstance(layer, CONVOLUTIONS):
            counts.append(output.numel() * layer.weight[0].numel())

    handles = [layer.register_forward_hook(count) for layer in model.modules()]
    with torch.no_grad():
        model(image)
    for handle in handles:
        handle.remove()
    return math.fsum(counts), any(isinstance(layer, CONVOLUTIONS) for layer in model.modules())


@functools.cache
def _example(settings: str) -> tuple[Tensor, int]:
    """An image of a data set, and the number of its classes."""
    data = load(**{name: value for name, value in json.loads(settings).items() if value is not None})
    return data.train[0][:1].clone(), count_classes(data, data.train[1])
