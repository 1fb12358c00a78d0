"""Options that several commands share, declared once each, in bundles.

A command takes a bundle as one parameter, and `commands.spread_option_bundles` gives it one option per field; its
help begins with the line of its bundle. A field of `DataOptions` goes to `flatscope.inputs.load` under its own name,
a field of `ProblemOptions` to `Problem`: what these take becomes an option of every command with that bundle by one
new field here. A field of another bundle is read where the bundle is used. Options of the program itself, as --debug,
are in `app.py`.

Nothing here loads torch: the help of a command, and a slip in one, should not take seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

INITIAL_FILE = "initial.safetensors"  # what `flatscope train` writes beside the trained weights
KEPT_FOLDER = "kept"  # where it keeps weights along the way

DataName = Annotated[
    str,
    typer.Option(
        "--data", help="digits, mnist, fashion-mnist, cifar10, file.npz, file.py:function, hf:FOLDER, -FILE or -ID."
    ),
]
ModelName = Annotated[str, typer.Option("--model", help="file.py:factory, timm:NAME, hf:FOLDER-OR-ID, or a built-in.")]
_MEASURES = 'Name or glob, "standard" or "all"; repeatable. The core set by default.'
Measures = Annotated[list[str] | None, typer.Option("--measure", "-m", help=_MEASURES)]
Extensions = Annotated[
    list[str] | None,
    typer.Option(
        "--extension",
        help="FILE.py or MODULE that declares measures, bounds or report sections of your own, run first; repeatable.",
    ),
]
Initial = Annotated[
    Path | None,
    typer.Option(
        help=f"Weights before training, for distances; else {INITIAL_FILE} where --weights is a folder with it."
    ),
]
StoreRoot = Annotated[str, typer.Option("--store", help="Folder of the results, or an address (s3://…).")]
_AS_LOAD_CALLS_THEM = {"data": "name", "data_root": "root", "data_seed": "seed", "column": "columns"}


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which samples."""

    data: DataName
    data_root: Annotated[Path | None, typer.Option(help="Folder of the data; else FLATSCOPE_DATA.")] = None
    train_size: Annotated[int | None, typer.Option(help="Class-balanced subset of the training data.")] = None
    test_size: Annotated[int | None, typer.Option(help="Class-balanced subset of the test data.")] = None
    standardize: Annotated[
        bool | None,
        typer.Option(
            "--standardize/--no-standardize",
            help="Per channel, to mean 0 and variance 1 over the training samples; by default the sets by name are, "
            "your own data are not.",
        ),
    ] = None
    standardize_by: Annotated[
        str,
        typer.Option(
            help="Which training samples: all of the data set, or those drawn by --train-size, as sweeps and studies "
            "do."
        ),
    ] = "all"
    flatten: Annotated[bool, typer.Option("--flatten", help="One vector per sample.")] = False
    # Not the seed of training: networks of different seeds must be measured on the samples they were trained on.
    data_seed: Annotated[int, typer.Option(help="Of subsets and of the split of digits.")] = 0
    column: Annotated[
        list[str] | None, typer.Option(help="Of hf: data: input=NAME (several with commas) or label=NAME; repeatable.")
    ] = None

    def load_arguments(self) -> dict[str, Any]:
        """As arguments of `flatscope.inputs.load`."""
        return {
            _AS_LOAD_CALLS_THEM.get(name, name): value
            for name, value in _values_of_own_fields(self, DataOptions).items()
        }


@dataclass(frozen=True, kw_only=True)
class ProblemOptions:
    """Loss, device and batch size."""

    loss: Annotated[
        str, typer.Option(help="cross_entropy, bce, next_token, mse, or file.py:function with one loss per sample.")
    ] = "cross_entropy"
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …")] = None
    batch_size: Annotated[int | None, typer.Option(help="Samples evaluated at once; changes no value.")] = None

    def problem_arguments(self) -> dict[str, Any]:
        """As arguments of `Problem`."""
        return _values_of_own_fields(self, ProblemOptions)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Function that builds every model, and the seed of what is drawn."""

    model_option: Annotated[list[str] | None, typer.Option(help="name=value for the factory; repeatable.")] = None
    seed: Annotated[int, typer.Option(help="Of all random streams.")] = 0


@dataclass(frozen=True, kw_only=True)
class NetworkOptions(ModelOptions, ProblemOptions, DataOptions):
    """One network with its data."""

    model: ModelName
    weights: Annotated[Path | None, typer.Option(help="safetensors, a state dict, or the folder of a checkpoint.")] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointsOptions(ModelOptions, ProblemOptions, DataOptions):
    """Several networks with the same data."""

    model: Annotated[
        list[str],
        typer.Option("--model", help="file.py:factory, module:factory or a built-in name; once, or per checkpoint."),
    ]


@dataclass(frozen=True, kw_only=True)
class ExtensionOptions:
    """Files with measures, bounds and report sections of the user's own, loaded before the command runs."""

    extension: Extensions = None


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(ExtensionOptions):
    """Names of measures and their options."""

    measures: Measures = None
    option: Annotated[
        list[str] | None, typer.Option(help="NAME.option=value, of a measure or a bound; repeatable.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class EffortOptions:
    """Precision, time and memory; arguments of `context.make_effort`."""

    precision: Annotated[
        float, typer.Option(help="Relative standard error at which estimates stop; 0: exact values, all draws.")
    ] = 0.02
    budget: Annotated[str | None, typer.Option(help='Time to end in: "90s", "10m", "2h".')] = None
    memory: Annotated[str | None, typer.Option(help='What sweeps may use: "8GiB"; else a share of what is free.')] = (
        None
    )
    curvature: Annotated[str, typer.Option(help="hessian, or gauss_newton where the cheaper matrix is wanted.")] = (
        "hessian"
    )

    def effort_arguments(self) -> dict[str, Any]:
        """As arguments of `context.make_effort`."""
        return _values_of_own_fields(self, EffortOptions)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Files and formats of a result."""

    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, nothing else on stdout.")] = False
    out: Annotated[
        list[Path] | None,
        typer.Option(help="Write a file; its ending says in which form (.json, .csv, …); repeatable."),
    ] = None
    report: Annotated[Path | None, typer.Option(help="Write an HTML report.")] = None


@dataclass(frozen=True, kw_only=True)
class MeasureCommand(NetworkOptions, MeasureOptions, EffortOptions, OutputOptions):
    """Measure a trained model and print the table."""

    initial: Initial = None
    bounds: Annotated[bool, typer.Option(help="Evaluate the bounds that do not take long as well.")] = False
    bound: Annotated[
        list[str] | None, typer.Option("--bound", help='Bound to evaluate: name or glob, or "all"; repeatable.')
    ] = None
    delta: Annotated[float, typer.Option(help="Bounds hold with probability 1 - delta.")] = 0.05
    dtype: Annotated[str | None, typer.Option(help="float32 or float64.")] = None


@dataclass(frozen=True, kw_only=True)
class CompareCommand(CheckpointsOptions, MeasureOptions, EffortOptions, OutputOptions):
    """Rank checkpoints by every measure that may rank them, and name those that may not."""

    checkpoints: Annotated[
        list[Path], typer.Argument(help="Two or more: safetensors, state dicts, or folders of checkpoints.")
    ]
    name: Annotated[list[str] | None, typer.Option(help="What to call a checkpoint; repeatable, in order.")] = None
    tolerance: Annotated[
        float, typer.Option(help="Relative difference of outputs up to which two checkpoints are one function.")
    ] = 1e-5


@dataclass(frozen=True, kw_only=True)
class AuditCommand(NetworkOptions, MeasureOptions, OutputOptions):
    """Rewrite a network's weights without changing its function, and see which measures move."""

    initial: Initial = None
    by: Annotated[
        list[str] | None,
        typer.Option(
            help="layer, unit, permutation, batchnorm, attention, norm; repeatable. All that the network can have by "
            "default."
        ),
    ] = None
    trials: Annotated[int, typer.Option(help="Networks to draw of each kind.")] = 3


@dataclass(frozen=True, kw_only=True)
class ExplainCommand(NetworkOptions, ExtensionOptions, OutputOptions):
    """Explain how a network is read: layers, units, how each parameter's curvature is found and why, what it costs."""

    measures: Measures = None
    precision: Annotated[float, typer.Option(help="Relative standard error of estimates; 0: exact values.")] = 0.02
    curvature: Annotated[str, typer.Option(help="hessian or gauss_newton.")] = "hessian"


@dataclass(frozen=True, kw_only=True)
class LandscapeCommand(NetworkOptions, OutputOptions):
    """Draw the loss around a network, in weight space or in path space, where rescaling cannot change the picture."""

    space: Annotated[str, typer.Option(help="weights, or psi: the same for every way of writing the function.")] = (
        "weights"
    )
    directions: Annotated[
        str | None, typer.Option(help="filter, gaussian or hessian; by default filter, in psi gaussian.")
    ] = None
    to: Annotated[
        list[Path] | None,
        typer.Option(
            help="Weights of another network of the same model: the way to it is the direction. Several, as the "
            "checkpoints of a training: the plane in which they move most, with their path."
        ),
    ] = None
    grid: Annotated[int, typer.Option(help="Points per axis, an odd number.")] = 41
    span: Annotated[float, typer.Option(help="Coordinates run from -span to span.")] = 1.0
    dimensions: Annotated[int, typer.Option(help="1 for a line, 2 for a plane.")] = 2
    part: Annotated[str, typer.Option(help="train or test samples.")] = "train"
    noise: Annotated[
        float | None,
        typer.Option(help="Length of gaussian or hessian directions over the root of the number of entries: 0.05."),
    ] = None
    relative: Annotated[
        bool, typer.Option("--relative", help="Length in units of the weights' norm; in psi, of each value itself.")
    ] = False
    rule: Annotated[str, typer.Option(help="Skeleton of the paths: max_product, cyclic or diagonal.")] = "max_product"
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder that keeps finished rows: the same command goes on where it stopped.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class SpectrumCommand(NetworkOptions, OutputOptions):
    """Find the largest eigenvalues of a network's Hessian and how all of them are spread."""

    top: Annotated[int, typer.Option(help="How many of the largest eigenvalues to find.")] = 10
    bottom: Annotated[int, typer.Option(help="How many of the smallest.")] = 0
    layer: Annotated[str | None, typer.Option(help="Of this layer's weight alone; else of all parameters.")] = None
    curvature: Annotated[str, typer.Option(help="hessian or gauss_newton.")] = "hessian"
    tolerance: Annotated[float, typer.Option(help="Relative accuracy of the eigenvalues.")] = 1e-3
    draws: Annotated[int, typer.Option(help="Random starts of the density; 0 for eigenvalues alone.")] = 5
    steps: Annotated[int, typer.Option(help="Curvature products of each start.")] = 64
    memory: Annotated[str | None, typer.Option(help='What a pass may use: "8GiB"; else a share of what is free.')] = (
        None
    )
    pairs_out: Annotated[
        Path | None, typer.Option(help="Write the eigenvalues as .npz (with the vectors), .parquet, .json or .csv.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ReportCommand(ExtensionOptions):
    """Make one self-contained HTML page from saved results, and figures for papers."""

    items: Annotated[
        list[str],
        typer.Argument(
            help="Tables, audits, surfaces, populations (.parquet, .json, .npz, .csv), folders of training runs or of "
            "studies (results/NAME, or results/NAME/SCALE); name=path gives a name, things with one name belong to "
            "one network."
        ),
    ]
    out: Annotated[Path, typer.Option(help="The page to write, .html.")] = Path("report.html")
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None
    target: Annotated[str, typer.Option(help="Column of the generalization gap in a population.")] = ""
    measures: Annotated[
        list[str] | None, typer.Option("--measure", "-m", help="Column of a measure in a population; repeatable.")
    ] = None
    figures: Annotated[Path | None, typer.Option(help="Folder for static figures of the same data.")] = None
    formats: Annotated[str, typer.Option("--format", help="Of pdf, svg, png; several with commas.")] = "png"


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
class EngineOptions:
    """Engine and workers that run the trials of a sweep."""

    store: StoreRoot
    engine: Annotated[str, typer.Option(help="local (processes here) or ray.")] = "local"
    workers: Annotated[int | None, typer.Option(help="Units at once; 0 runs them in this process.")] = None
    address: Annotated[str | None, typer.Option(help="Of a running Ray cluster.")] = None
    cpus: Annotated[float, typer.Option(help="Cores for each unit.")] = 1
    gpus: Annotated[float, typer.Option(help="GPUs for each unit; a fraction shares one.")] = 0


def _values_of_own_fields(bundle: Any, kind: Any) -> dict[str, Any]:
    """Values of the fields that one of the bundle's classes declares."""
    return {field.name: getattr(bundle, field.name) for field in fields(kind)}
