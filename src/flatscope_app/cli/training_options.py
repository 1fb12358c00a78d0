"""Options of the commands that train, in bundles as the library's own commands have them.

Nothing here loads torch: the help of a command, and a slip in one, should not take seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from flatscope_app.cli.options import DataName, DataOptions, ModelName, ModelOptions, OutputOptions, ProblemOptions

KEPT_FOLDER = "kept"  # where `flatscope train` keeps weights along the way
StoreRoot = Annotated[str, typer.Option("--store", help="Folder of the results, or an address (s3://…).")]


@dataclass(frozen=True, kw_only=True)
class StabilityCommand(ModelOptions, ProblemOptions, DataOptions, OutputOptions):
    """See whether a training stood at the edge of stability: the sharpness of its checkpoints against its step size."""

    model: ModelName
    weights: Annotated[
        list[Path],
        typer.Option(
            help="Checkpoints of one training, in its order; or the one --out of flatscope train --keep-every, whose "
            "settings are then read."
        ),
    ]
    lr: Annotated[float | None, typer.Option(help="Learning rate of the training; of a run, its own.")] = None
    momentum: Annotated[float | None, typer.Option(help="Momentum of SGD; of a run, its own.")] = None
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay of SGD; of a run, its own.")] = None
    batch: Annotated[
        int | None, typer.Option(help="Samples of a mini-batch, for the batch sharpness; of a run, its own.")
    ] = None
    step: Annotated[
        list[int] | None,
        typer.Option(help="Step of each checkpoint; else the last number in its name, else its place. Repeatable."),
    ] = None
    noise_every: Annotated[int, typer.Option(help="Checkpoints between two gradient-noise scales; 0 for none.")] = 1
    density_every: Annotated[int, typer.Option(help="Checkpoints between two spectral densities; 0 for none.")] = 0
    tolerance: Annotated[float, typer.Option(help="Relative accuracy of the largest eigenvalue.")] = 1e-3


@dataclass(frozen=True, kw_only=True)
class TrainCommand(ModelOptions, DataOptions):
    """Options of `flatscope train`; neither model nor data are needed where a file describes many networks."""

    out: Annotated[Path, typer.Option(help="Folder for checkpoint, weights and history; resumes what it finds.")]
    model: ModelName = ""
    data: DataName = ""
    population: Annotated[
        Path | None,
        typer.Option(help="TOML file that describes many networks, trained at once; see examples/population.toml."),
    ] = None
    # From here on the defaults are those of TrainConfig, which a test holds them to.
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 0.01
    optimizer: Annotated[str, typer.Option(help="sgd or adam.")] = "sgd"
    momentum: Annotated[float, typer.Option(help="Momentum of SGD.")] = 0.0
    weight_decay: Annotated[float, typer.Option(help="Weight decay.")] = 0.0
    batch_size: Annotated[int, typer.Option(help="Samples per step.")] = 64
    epochs: Annotated[int, typer.Option(help="Passes over the data at most.")] = 10
    lr_step: Annotated[list[str] | None, typer.Option(help="epoch:factor; repeatable.")] = None
    lr_decay: Annotated[float, typer.Option(help="Factor on the rate after each epoch.")] = 1.0
    loss: Annotated[str, typer.Option(help="cross_entropy or mse.")] = "cross_entropy"
    stop_loss: Annotated[float | None, typer.Option(help="Stop below this training loss.")] = None
    stop_zero_error: Annotated[bool, typer.Option(help="Stop at zero training error.")] = False
    stop_gradient_norm: Annotated[float | None, typer.Option(help="Stop below this gradient norm.")] = None
    augmentation: Annotated[str, typer.Option(help="none or crop-flip.")] = "none"
    precision: Annotated[str, typer.Option(help="Of training steps: float32, tf32 or bf16.")] = "float32"
    keep_every: Annotated[
        int, typer.Option(help="Epochs between weights that are kept beside the last ones, in OUT/kept; 0 for none.")
    ] = 0
    init: Annotated[str | None, typer.Option(help="Initialisation; the model's own by default.")] = None
    device: Annotated[str, typer.Option(help="cpu, cuda, …")] = "cpu"


@dataclass(frozen=True, kw_only=True)
class AtlasCommand(OutputOptions):
    """Correlate measures with the gap along training: after every epoch, at every training loss and accuracy."""

    source: Annotated[
        str,
        typer.Argument(
            help="Networks along training: .parquet or .csv with one row per network and epoch, or a store."
        ),
    ]
    target: Annotated[str, typer.Option(help="Column that measures should go along with; gap by default.")] = ""
    measures: Annotated[
        list[str] | None,
        typer.Option("--measure", "-m", help="Column of a measure; repeatable. Declared ones by default."),
    ] = None
    by: Annotated[list[str] | None, typer.Option(help="Setting to hold fixed, as a batch size; repeatable.")] = None
    kinds: Annotated[
        list[str] | None,
        typer.Option("--kind", help="pearson, spearman or kendall; repeatable. The first two by default."),
    ] = None
    where: Annotated[
        list[str] | None, typer.Option(help="Rows to take: COLUMN=VALUE or COLUMN!=VALUE; repeatable.")
    ] = None
    network: Annotated[str, typer.Option(help="Column that tells networks apart: network, trial, name or key.")] = ""
    resamples: Annotated[int, typer.Option(help="Of the networks, for intervals.")] = 1000
    seed: Annotated[int, typer.Option(help="Of the resamples.")] = 0


@dataclass(frozen=True, kw_only=True)
class BenchmarkCommand(OutputOptions):
    """Score measures, also your own, on the released population: do they rank networks as generalization does?"""

    measures: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names or globs of measures; file.py:function for your own. All of the library by default."
        ),
    ] = None
    networks: Annotated[
        str | None,
        typer.Option(help="How many, a power of 2 from 8 up, or all; by default all, 64 for measures of your own."),
    ] = None
    store: Annotated[
        str | None, typer.Option(help="Folder of the trained networks; else one in the user's cache folder.")
    ] = None
    workers: Annotated[int | None, typer.Option(help="Processes that train; 0 for none but this one.")] = None
    rebuild: Annotated[
        Path | None, typer.Option(help="Train and measure the whole population; write its table into this folder.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Where the trials of a sweep run."""

    store: StoreRoot
    engine: Annotated[str, typer.Option(help="local (processes here) or ray.")] = "local"
    workers: Annotated[int | None, typer.Option(help="Units at once; 0 runs them in this process.")] = None
    address: Annotated[str | None, typer.Option(help="Of a running Ray cluster.")] = None
    cpus: Annotated[float, typer.Option(help="Cores for each unit.")] = 1
    gpus: Annotated[float, typer.Option(help="GPUs for each unit; a fraction shares one.")] = 0
