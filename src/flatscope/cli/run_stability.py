"""`flatscope stability`: the sharpness of a training's checkpoints against what its step size allows."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from flatscope.cli.options import INITIAL_FILE, KEPT_FOLDER, StabilityCommand
from flatscope.cli.output import check_outputs, command_line, show_grid, show_note, show_text, write_and_show_result
from flatscope.cli.sources import load_model, load_source, parse_model_options
from flatscope.disk import MOST_TEXT, read_file
from flatscope.errors import InputError, Interrupted
from flatscope.files import from_json_bytes
from flatscope.input_checks import usable_device
from flatscope.inputs.data_set import Data
from flatscope.inputs.factories import find_factory
from flatscope.inputs.weight_files import STATE_FILE
from flatscope.progress import progress_bar
from flatscope.result import reading
from flatscope.symmetries.folding import has_batchnorm
from flatscope.training.checkpoint import EARLIER, TrainConfig, data_fingerprint, learning_rate
from flatscope.training.stability.recording import StabilityRecorder
from flatscope.training.stability.sharpness_record import Stability

OTHER_FUNCTION = "measured as the network is used: BatchNorm trains with the statistics of each batch, another function"
AUGMENTED = "measured on the samples as they are: the training saw changed ones ({name})"


class Checkpoint(NamedTuple):
    """Weights of a training, and how it went on from there."""

    path: Path
    step: int
    lr: float


class Run(NamedTuple):
    """A training, as far as its update rule is known."""

    checkpoints: list[Checkpoint]
    momentum: float
    weight_decay: float
    batch: int | None
    loss: str
    remarks: tuple[str, ...] = ()


def run_stability(given: StabilityCommand) -> None:
    """Measure the checkpoints one after the other, show, save."""
    check_outputs(given, Stability)
    options, device = parse_model_options(given.model_option), usable_device(given.device or "cpu")
    loaded = load_source(given)
    run = (
        _run_of_training_folder(given, loaded)
        if len(given.weights) == 1 and given.weights[0].is_dir()
        else _run_of_checkpoint_files(given)
    )
    recorder = StabilityRecorder(
        loaded.train,
        batch=run.batch,
        loss=find_factory(run.loss) if ":" in run.loss else run.loss,
        noise_every=given.noise_every,
        density_every=given.density_every,
        tolerance=given.tolerance,
        seed=given.seed,
    )
    remarks, stopped = list(run.remarks), None
    try:
        with progress_bar("Measuring", total=len(run.checkpoints)) as advance:
            for checkpoint in run.checkpoints:
                network = load_model(given.model, checkpoint.path, loaded, given.seed, options).to(device)
                recorder.record(
                    network, checkpoint.step, lr=checkpoint.lr, momentum=run.momentum, weight_decay=run.weight_decay
                )
                advance(1, note=checkpoint.path.name)
    except KeyboardInterrupt as stop:
        done = len(recorder.tables)
        if not done:
            raise
        text = f"{str(stop) or 'Interrupted'}: {done} of {len(run.checkpoints)} checkpoints are done"
        stopped = Interrupted(text, recorder.stability)
    remarks += [OTHER_FUNCTION] if has_batchnorm(network) else []
    stability = recorder.stability
    stability.meta.update({"model": given.model, "data": given.data, "command": command_line()})
    if remarks:
        stability.meta["remarks"] = [*stability.meta.get("remarks", ()), *remarks]

    def show() -> None:
        for sentence in stability.summary().splitlines():
            show_text(sentence)
        show_grid(*stability.cells())

    write_and_show_result(stability, given, show, unfinished=stopped is not None)
    if stopped:
        raise stopped


def _run_of_checkpoint_files(given: StabilityCommand) -> Run:
    """Checkpoints by name, with the settings of the command line."""
    if given.lr is None:
        fix = "Give the learning rate of the training; only the folder of flatscope train --keep-every knows its own"
        raise InputError("--lr", "none", where="flatscope stability", fix=fix)
    steps = given.step or _numbers_in(given.weights)
    if len(steps) != len(given.weights) or sorted(set(steps)) != list(steps):
        expected = f"a rising --step for each of {len(given.weights)} checkpoints"
        raise InputError(expected, ", ".join(map(str, steps)), where="--step")
    checkpoints = [Checkpoint(path, step, given.lr) for path, step in zip(given.weights, steps, strict=True)]
    return Run(checkpoints, given.momentum or 0.0, given.weight_decay or 0.0, given.batch, given.loss)


def _numbers_in(paths: list[Path]) -> list[int]:
    """The last number in each name where they all have one and it rises, else their places."""
    digits = [re.findall(r"\d+", path.stem) for path in paths]
    numbers = [int(each[-1]) for each in digits if each]
    return numbers if len(numbers) == len(paths) and sorted(set(numbers)) == numbers else list(range(len(paths)))


def _run_of_training_folder(given: StabilityCommand, loaded: Any) -> Run:
    """The kept weights of `flatscope train`, with the settings that its checkpoint names."""
    folder = given.weights[0]
    state = folder / "checkpoint" / STATE_FILE
    if not state.is_file():
        fix = "Name the --out of flatscope train, or files of weights and --lr"
        raise InputError(f"a folder with checkpoint/{STATE_FILE}", "none", where=str(folder), fix=fix)
    with reading("the state of a training", str(state)):
        saved = from_json_bytes(read_file(state, MOST_TEXT))
        config = TrainConfig.from_dict(EARLIER | saved["config"])
        digest, epochs = str(saved["data"]), int(saved["state"]["epochs"])
    if config.optimizer != "sgd":
        raise InputError("a run of SGD, whose threshold is known", config.optimizer, where=str(folder))
    kept = sorted((folder / KEPT_FOLDER).glob("epoch-*.safetensors"))
    if not kept:
        fix = "Train with --keep-every N"
        raise InputError(f"weights in {folder / KEPT_FOLDER}", "none", where=str(folder), fix=fix)
    for name in ("lr", "momentum", "weight_decay", "batch", "step"):
        if getattr(given, name) is not None:
            option = "--" + name.replace("_", "-")
            raise InputError("settings of the run alone", option, where=str(folder), fix=f"Leave out {option}")
    if given.loss not in ("cross_entropy", config.loss):
        raise InputError(f"the loss of the run, {config.loss}", given.loss, where="--loss")
    if not isinstance(loaded, Data) or data_fingerprint(*loaded.train) != digest:
        fix = "Give --data, --train-size, --flatten and the other options of the training"
        raise InputError("the samples that the run was trained on", "others", where=str(folder), fix=fix)
    n = len(loaded.train[1])
    each = math.ceil(n / config.batch_size)
    numbered = {int(path.stem.rpartition("-")[2]): path for path in kept}
    if (folder / INITIAL_FILE).is_file():
        numbered = {0: folder / INITIAL_FILE} | numbered
    checkpoints = [
        Checkpoint(path, each * epoch, learning_rate(config, max(epoch - 1, 0)))
        for epoch, path in sorted(numbered.items())
        if epoch <= epochs
    ]
    batch = config.batch_size if config.batch_size < n else None
    remarks = () if config.augmentation == "none" else (AUGMENTED.format(name=config.augmentation),)
    show_note(
        f"{len(checkpoints)} checkpoints of {folder}; learning rate, momentum, batch and loss are those of the run"
    )
    return Run(checkpoints, config.momentum, config.weight_decay, batch, config.loss, remarks)
