"""What studies cost on this machine: pieces of each kind are timed, those of every study added up."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from flatscope.errors import FlatscopeError, InputError
from flatscope.inspection import usable_device
from flatscope.progress import progress
from flatscope.studies.cost import MEASURING, TRAINING, Cost, CostRow
from flatscope.studies.pieces import Piece, pieces_of
from flatscope.studies.running import provenance_of
from flatscope.studies.study import Stage, check_scale, find_study
from flatscope.studies.timing import NotTimed, Timer, epochs_of
from flatscope.sweeps.store import Store

BUDGET = 300.0


def study_costs(
    names: Sequence[str],
    scale: str = "paper",
    *,
    device: str | None = None,
    budget: float = BUDGET,
    saved: Mapping[str, Cost] | None = None,
) -> list[Cost]:
    """What each study costs on a device, and what it adds to those before it in the list.

    Nothing is kept but the times: networks of shortened runs go to a temporary store. Times that were saved from the
    same device stand where the budget does not suffice, and what has none yet is timed first: some short calls add up
    to a long one.

    Args:
        names: of studies.
        scale: "smoke", "small" or "paper".
        device: "cpu", "cuda", ...; the GPU where there is one, by default.
        budget: seconds after which no further kind of work is timed.
        saved: costs of an earlier call, by study.

    Raises:
        InputError: nothing could be planned, as when data are missing.
    """
    check_scale(scale)
    stages = {name: find_study(name).stages(scale) for name in names}
    return costs_of(stages, scale, device=device, budget=budget, saved=saved)


def costs_of(
    studies: Mapping[str, Sequence[Stage]],
    scale: str,
    *,
    device: str | None = None,
    budget: float = BUDGET,
    saved: Mapping[str, Cost] | None = None,
) -> list[Cost]:
    """The same for stages by the name of their study."""
    if not budget > 0:
        raise InputError("more than 0 seconds", repr(budget), where="study cost, budget")
    place = usable_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    plans: dict[str, list[Piece]] = {}
    problems: dict[str, FlatscopeError] = {}
    for name, stages in studies.items():
        try:
            plans[name] = pieces_of(stages, str(place))
        except FlatscopeError as problem:
            problems[name] = problem
    if problems and not plans:
        raise next(iter(problems.values()))
    pieces = [piece for plan in plans.values() for piece in plan]
    provenance = provenance_of(f"study_costs({list(studies)})", place)
    earlier = timed_rows(saved or {}, provenance["device"])
    in_turn = sorted(pieces, key=lambda piece: (piece.kind in earlier, piece.part != TRAINING))
    kinds = list({piece.kind: piece for piece in in_turn}.values())

    def row_of(name: str, alike: Sequence[Piece]) -> CostRow:
        row = _row(timer, alike)
        before = earlier.get(row.kind, {}) if row.total is None else {}
        return again(before, name, alike) if before else row

    with tempfile.TemporaryDirectory(prefix="flatscope-cost-") as folder:
        timer = Timer(pieces, Store(folder), budget)
        with progress("timing", total=len(kinds)) as advance:
            for piece in kinds:
                _row(timer, [piece])
                advance(note=piece.what)
        found = {cost.name: cost for cost in added_up(plans, scale, row_of, provenance)}
    for name, reason in problems.items():
        row = CostRow(MEASURING, "everything", 1, problem=str(reason))
        found[name] = Cost(name, scale, (row,), 0.0, provenance=provenance)
    return [found[name] for name in studies]


def timed_rows(saved: Mapping[str, Cost], device: str) -> dict[str, dict[str, CostRow]]:
    """Rows with a time of their own from that device, by the kind of their pieces, then by study."""
    found: dict[str, dict[str, CostRow]] = {}
    for name, cost in saved.items():
        for row in cost.rows if cost.provenance.get("device") == device else ():
            if row.total is not None and not row.like:
                found.setdefault(row.kind, {})[name] = row
    return found


def again(before: Mapping[str, CostRow], study: str, alike: Sequence[Piece]) -> CostRow:
    """The row of pieces whose kind was timed: for that study, or else for another, with other numbers and epochs."""
    row = before.get(study) or next(iter(before.values()))
    assert row.each is not None
    images = max(piece.images for piece in alike)
    epochs = epochs_of(max(alike, key=lambda piece: piece.images)) if row.part == TRAINING else 0
    if (row.number, row.epochs, row.images) == (len(alike), epochs, images):
        return row
    if row.part != TRAINING:
        return replace(row, number=len(alike), images=images, total=rounded(row.each * len(alike)))
    per_image = row.each / row.images
    total = rounded(sum(epochs_of(piece) * per_image * piece.images for piece in alike))
    return replace(row, number=len(alike), epochs=epochs, images=images, each=rounded(per_image * images), total=total)


def added_up(
    plans: Mapping[str, Sequence[Piece]],
    scale: str,
    row_of: Callable[[str, Sequence[Piece]], CostRow],
    provenance: Mapping[str, Any],
) -> list[Cost]:
    """Costs of studies one after the other, from the row that is given for the pieces of one kind of a study."""
    seen: dict[str, str] = {}
    costs = []
    for name, plan in plans.items():
        # A stack of which some networks are there takes about as long as a whole one.
        left = [piece for piece in plan if not piece.keys <= seen.keys()]
        additional = sum(row_of(name, alike).total or 0.0 for alike in by_kind(left))
        shared = sorted({seen[key] for piece in plan for key in piece.keys if key in seen})
        rows = tuple(row_of(name, alike) for alike in by_kind(plan))
        costs.append(Cost(name, scale, rows, additional, tuple(shared), provenance))
        for piece in plan:
            seen |= {key: name for key in piece.keys if key not in seen}
    return costs


def by_kind(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Pieces that take the same time, together."""
    kinds: dict[str, list[Piece]] = {}
    for piece in pieces:
        kinds.setdefault(piece.kind, []).append(piece)
    return list(kinds.values())


def _row(timer: Timer, alike: Sequence[Piece]) -> CostRow:
    """The cost of pieces of one kind, timed."""
    largest = max(alike, key=lambda piece: piece.images)
    known = blank_row(alike)
    try:
        if largest.part == TRAINING:
            found = timer.training(largest)
            total = sum(found.total(piece) for piece in alike)
            epochs = epochs_of(largest)
            each, images = rounded(found.each(largest)), found.images
            return replace(known, each=each, total=rounded(total), epochs=epochs, timed_on=images)
        timed = timer.measuring(largest)
        each, total = rounded(timed.seconds), rounded(timed.seconds * len(alike))
        return replace(known, each=each, total=total, timed_on=rounded(timed.share))
    except NotTimed as problem:
        return replace(known, problem=str(problem))


def blank_row(alike: Sequence[Piece]) -> CostRow:
    """The row of pieces of one kind, without a time."""
    largest = max(alike, key=lambda piece: piece.images)
    return CostRow(largest.part, largest.what, len(alike), images=largest.images, kind=largest.kind)


def rounded(value: float) -> float:
    """Four digits: times are not known better."""
    return float(f"{value:.4g}")
