"""`flatscope train`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from flatscope.cli.options import INITIAL_FILE, DataName, DataOptions, ModelName, ModelOptions
from flatscope.cli.output import check_folder, show_grid, show_note
from flatscope.errors import InputError

# What loads torch is imported inside the commands: their help, and a slip in one, should not take seconds.

BESIDE_POPULATION = ("population", "out", "device", "data_root")


@dataclass(frozen=True, kw_only=True)
class TrainedModelOptions(ModelOptions):
    """The model to train; none where a file describes many."""

    model: ModelName = ""


@dataclass(frozen=True, kw_only=True)
class TrainingDataOptions(DataOptions):
    """The samples to train on; none where a file describes them."""

    data: DataName = ""


def train(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for checkpoint, weights and history; resumes what it finds.")],
    building: TrainedModelOptions,
    samples: TrainingDataOptions,
    population: Annotated[
        Path | None,
        typer.Option(help="TOML file that describes many networks, trained at once; see examples/population.toml."),
    ] = None,
    # From here on the defaults are those of TrainConfig, which a test holds them to.
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 0.01,
    momentum: Annotated[float, typer.Option(help="Momentum of SGD.")] = 0.0,
    weight_decay: Annotated[float, typer.Option(help="Weight decay.")] = 0.0,
    batch_size: Annotated[int, typer.Option(help="Samples per step.")] = 64,
    epochs: Annotated[int, typer.Option(help="Passes over the data at most.")] = 10,
    lr_step: Annotated[list[str] | None, typer.Option(help="epoch:factor; repeatable.")] = None,
    lr_decay: Annotated[float, typer.Option(help="Factor on the rate after each epoch.")] = 1.0,
    loss: Annotated[str, typer.Option(help="cross_entropy or mse.")] = "cross_entropy",
    stop_loss: Annotated[float | None, typer.Option(help="Stop below this training loss.")] = None,
    stop_zero_error: Annotated[bool, typer.Option(help="Stop at zero training error.")] = False,
    stop_gradient_norm: Annotated[float | None, typer.Option(help="Stop below this gradient norm.")] = None,
    augmentation: Annotated[str, typer.Option(help="none or crop-flip.")] = "none",
    init: Annotated[str | None, typer.Option(help="Initialisation; the model's own by default.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, …")] = "cpu",
) -> None:
    """Train a model with SGD, or many at once; run the same command again to resume."""
    from flatscope.cli.population import train_file
    from flatscope.cli.sources import load_data, load_model, parse_model_options
    from flatscope.formatting import number
    from flatscope.guards import write_whole
    from flatscope.inspection import usable_device
    from flatscope.training.checkpoint import TrainConfig
    from flatscope.training.initialization import initialize
    from flatscope.training.loop import train as train_model
    from flatscope.training.weights import WEIGHTS_FILE, save_weights

    check_folder(out)
    if population is not None:
        _refuse_beside_population(context)
        train_file(population, out, device, samples.data_root)
        return
    for name, value in (("--model", building.model), ("--data", samples.data)):
        if not value:
            raise InputError(f"{name}, or --population with a file", "neither", where="flatscope train")
    config = TrainConfig.from_dict(
        {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "batch_size": batch_size,
            "epochs": epochs,
            "lr_steps": [_step(entry) for entry in lr_step or ()],
            "lr_decay": lr_decay,
            "loss": loss,
            "seed": building.seed,
            "stop_loss": stop_loss,
            "stop_zero_error": stop_zero_error,
            "stop_gradient_norm": stop_gradient_norm,
            "augmentation": augmentation,
        }
    )
    place = usable_device(device)
    options = parse_model_options(building.model_option)
    loaded = load_data(samples)
    network = load_model(building.model, None, loaded, building.seed, options)
    if init is not None:
        initialize(network, init, building.seed)
    checkpoint = out / "checkpoint"
    if not (checkpoint / WEIGHTS_FILE).exists():  # a run that is taken up, or refused, keeps the weights it began with
        save_weights(network, out / INITIAL_FILE)
    result = train_model(network.to(place), loaded, config, checkpoint=checkpoint)
    if result.resumed_from:
        show_note(f"resumed after epoch {result.resumed_from}")
    save_weights(result.model, out / "weights.safetensors")
    write_whole(out / "history.csv", result.history.to_csv(index=False).encode())
    last = result.history.iloc[-1]
    shown = ["epoch", "train_loss", "train_error", "test_loss", "test_error"]
    show_grid(shown, [[number(float(last[name])) for name in shown]], title=f"stopped by {result.stopped_by}")
    show_note(f"weights in {out / 'weights.safetensors'}, before training in {out / INITIAL_FILE}")
    if result.diverged:
        raise typer.Exit(code=1)


def _refuse_beside_population(context: typer.Context) -> None:
    """Settings on the command line that the file would silently overrule."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and name not in BESIDE_POPULATION:
            option = "--" + name.replace("_", "-")
            fix = "Write it into the file, under [train], [model] or [data]"
            raise InputError("settings in the file alone", f"{option} on the command line", "--population", fix)


def _step(entry: str) -> list[float]:
    """`80:0.1` as [80, 0.1]."""
    epoch, _, factor = entry.partition(":")
    try:
        return [int(epoch), float(factor)]
    except ValueError as problem:
        raise InputError("epoch:factor, as in 80:0.1", repr(entry), where="--lr-step") from problem
