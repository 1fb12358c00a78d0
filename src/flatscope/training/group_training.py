"""The training of one group of a population: epochs, evaluations, stop rules, checkpoints."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from flatscope.errors import Interrupted
from flatscope.progress import Advance
from flatscope.training.checkpoint import CheckpointPace, learning_rate
from flatscope.training.evaluation import Pair
from flatscope.training.fused_stack import FusedNetwork, FusedStack
from flatscope.training.loop import COLUMNS, TrainResult, stop_rule, train
from flatscope.training.population_group import (
    Group,
    PopulationView,
    Record,
    fill,
    resume_group,
    tensors_of,
    write_group,
)
from flatscope.training.stack import Stack
from flatscope.training.trials import StackSamples

AfterEpoch = Callable[[int, PopulationView], None]

# A new stack on a GPU means a new graph; so stopped trials run along until they are this share of the stack.
STOPPED_SHARE = {"cuda": 1 / 8}


def train_stacked(
    group: Group,
    test: Pair | None,
    folder: Path | None,
    pace: tuple[int, float],
    after_epoch: AfterEpoch | None,
    advance: Advance,
) -> None:
    """Train a group as one stack until every trial of it has stopped, from its checkpoint if there is one.

    Checkpoints are written at the given pace (epochs, seconds), each after `after_epoch` has seen its epoch: what that
    function keeps on disk is never behind a checkpoint.

    On Ctrl-C the group holds the last finished epoch, and the KeyboardInterrupt goes on.
    """
    assert group.network is not None
    group.live = list(range(len(group.trials)))
    velocity = None if folder is None else resume_group(folder, group)
    for trial, record in zip(group.trials, group.records, strict=True):
        advance(trial.config.epochs if record.stopped_by else record.epochs)
    if all(record.stopped_by for record in group.records):
        return
    rows = group.live
    samples = StackSamples.of(group.data)
    kind = FusedStack if isinstance(group.network, FusedNetwork) else Stack
    stack: Stack = kind(
        group.network,
        [group.trials[row] for row in rows],
        samples if len(rows) == len(group.trials) else samples.rows(torch.tensor(rows, device=samples.images.device)),
        {name: value[rows] for name, value in group.weights.items()},
        group.trained,
        {name: group.initial[name][rows] for name in group.trained},
        velocity,
    )
    kept, writing = _copies(stack), CheckpointPace(*pace)
    begun = time.perf_counter() - group.seconds
    try:
        while not all(record.stopped_by for record in group.records):
            places = [place for place, row in enumerate(group.live) if group.records[row].stopped_by is None]
            active = [group.live[place] for place in places]
            share = len(active) / len(group.live)
            finite = stack.train_epoch(
                group.epoch, lambda steps=1, note="", part=share: advance(steps * part, note=note)
            )
            ended = _after_epoch(group, stack, places, finite, test, begun)
            ends = [record.stopped_by is not None for record in ended]
            group.take(
                stack.weights,
                [row for row, end in zip(active, ends, strict=True) if end],
                [place for place, end in zip(places, ends, strict=True) if end],
            )
            records = list(group.records)
            for row, record in zip(active, ended, strict=True):
                records[row] = record
            weights = stack.weights
            stack, live = _without_stopped(stack, group.live, records, finite)
            # Together, so that Ctrl-C finds the group before or after this epoch and nowhere between.
            group.records, group.epoch, group.seconds, group.live, kept = (
                records,
                group.epoch + 1,
                time.perf_counter() - begun,
                live,
                _copies(stack),
            )
            for row, record in zip(active, ended, strict=True):
                if record.stopped_by is not None:
                    advance(group.trials[row].config.epochs - record.epochs)
            if after_epoch is not None:
                after_epoch(group.epoch, PopulationView(group, active, weights, places))
            if folder is not None and writing.is_due(group.epoch, over=all(r.stopped_by for r in records)):
                write_group(folder, group, stack)
    except KeyboardInterrupt:
        going_on = [place for place, row in enumerate(group.live) if group.records[row].stopped_by is None]
        group.take(kept, [group.live[place] for place in going_on], going_on)
        raise


def train_alone(
    group: Group,
    test: Pair | None,
    folder: Path | None,
    pace: tuple[int, float],
    after_epoch: AfterEpoch | None,
    advance: Advance,
) -> None:
    """Train the one trial of a group by the plain loop, with the same records as a stack gives."""
    [trial], [data], [record] = group.trials, group.data, group.records
    model = copy.deepcopy(group.template)
    fill(model, group.state(0))
    model.to(data.images.device)
    seen = 0

    def finished(epoch: int, network: nn.Module) -> None:
        nonlocal seen
        advance(epoch - seen, note=f"trial {trial.name}, epoch {epoch}")
        seen = group.epoch = record.epochs = epoch
        if after_epoch is not None:
            weights = {name: value[None] for name, value in tensors_of(network).items()}
            after_epoch(epoch, PopulationView(group, [0], weights, [0]))

    def keep(result: TrainResult, stopped_by: str | None) -> None:
        group.weights = {name: value[None].to("cpu", copy=True) for name, value in tensors_of(model).items()}
        rows = [{str(key): float(value) for key, value in row.items()} for row in result.history.to_dict("records")]
        group.epoch, group.seconds = result.epochs, rows[-1]["seconds"] if rows else 0.0
        group.records = [Record(rows, result.epochs, group.seconds, stopped_by)]

    place = None if folder is None else folder / f"trial-{trial.index:04d}"
    try:
        result = train(
            model,
            data.pair(),
            trial.config,
            test=test,
            checkpoint=place,
            checkpoint_every=pace[0],
            checkpoint_seconds=pace[1],
            after_epoch=finished,
            show_progress=False,
        )
    except Interrupted as interrupt:
        keep(interrupt.result, None)
        raise
    keep(result, result.stopped_by)
    advance(trial.config.epochs - seen)


def _after_epoch(
    group: Group, stack: Stack, places: Sequence[int], finite: Sequence[bool], test: Pair | None, begun: float
) -> list[Record]:
    """New records of the trials at these places of the stack: evaluated where it is time, ended where a rule holds."""
    done = group.epoch + 1
    due = {
        place: done % stack.trials[place].config.evaluate_every == 0 or done == stack.trials[place].config.epochs
        for place in places
    }
    measured: dict[str, list[float]] = {}
    if any(due[place] and finite[place] for place in places):
        measured["train_loss"], measured["train_error"] = stack.evaluate()
        if test is not None:
            measured["test_loss"], measured["test_error"] = stack.evaluate(test)
        measured["distance"] = stack.distances()
        if any(stack.trials[place].config.stop_gradient_norm is not None and due[place] for place in places):
            measured["gradient_norm"] = stack.gradient_norms()
    ended = []
    for place in places:
        config, record = stack.trials[place].config, group.records[group.live[place]]
        rows, stopped_by = record.rows, None if finite[place] else "diverged"
        seconds = time.perf_counter() - begun
        if not finite[place] or due[place]:
            row = dict.fromkeys(COLUMNS, math.nan)
            row |= {"epoch": float(done), "lr": learning_rate(config, group.epoch), "seconds": seconds}
            if finite[place]:
                row |= {name: values[place] for name, values in measured.items()}
                if config.stop_gradient_norm is None:
                    row["gradient_norm"] = math.nan
                stopped_by = stop_rule(config, row)
            rows = [*rows, row]
        if done == config.epochs:
            stopped_by = stopped_by or "epochs"
        ended.append(Record(rows, done, seconds, stopped_by))
    return ended


def _without_stopped(
    stack: Stack, live: list[int], records: Sequence[Record], finite: Sequence[bool]
) -> tuple[Stack, list[int]]:
    """The stack of the trials that go on, once enough of the others have stopped, and their rows in the group."""
    going_on = [place for place, row in enumerate(live) if records[row].stopped_by is None]
    stopped = len(live) - len(going_on)
    harmful = not all(finite) or any(records[row].stopped_by == "diverged" for row in live)
    share = 0.0 if isinstance(stack, FusedStack) else STOPPED_SHARE.get(stack.device.type, 0.0)
    enough = harmful or stopped >= share * len(live)
    if not going_on or not stopped or not enough:
        return stack, live
    return stack.keep(going_on), [live[place] for place in going_on]


def _copies(stack: Stack) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in stack.weights.items()}
