"""Options that several commands share, declared once each, in bundles.

A command takes a bundle as one parameter, and `spread` gives it one option per field. A field of `DataOptions` goes
to `training.data.load` under its own name, a field of `ProblemOptions` to `Problem`: a new option for all commands is
a new field here, and nothing else.

Nothing here loads torch: the help of a command, and a slip in one, should not take seconds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

INITIAL_FILE = "initial.safetensors"  # what `flatscope train` writes beside the trained weights

DataName = Annotated[
    str,
    typer.Option("--data", help="digits, mnist, fashion-mnist, cifar10, file.npz, file.py:function, module:function."),
]
ModelName = Annotated[str, typer.Option("--model", help="file.py:factory, package.module:factory, or a built-in name.")]
Initial = Annotated[
    Path | None,
    typer.Option(
        help=f"Weights before training, for distances; else {INITIAL_FILE} where --weights is a folder with it."
    ),
]
_AS_LOAD_CALLS_THEM = {"data": "name", "data_root": "root", "data_seed": "seed"}


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

    def for_load(self) -> dict[str, Any]:
        """As arguments of `training.data.load`."""
        return {_AS_LOAD_CALLS_THEM.get(name, name): value for name, value in _own(self, DataOptions).items()}


@dataclass(frozen=True, kw_only=True)
class ProblemOptions:
    """How the loss is computed."""

    loss: Annotated[
        str, typer.Option(help="cross_entropy, bce, next_token, mse, or file.py:function with one loss per sample.")
    ] = "cross_entropy"
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …")] = None
    batch_size: Annotated[int | None, typer.Option(help="Samples evaluated at once; changes no value.")] = None

    def for_problem(self) -> dict[str, Any]:
        """As arguments of `Problem`."""
        return _own(self, ProblemOptions)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How every model is built, and the seed of what is drawn."""

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
class MeasureOptions:
    """What to measure."""

    measures: Annotated[
        list[str] | None, typer.Option("--measure", "-m", help='Name or glob, or "all"; repeatable.')
    ] = None
    option: Annotated[
        list[str] | None, typer.Option(help="NAME.option=value, of a measure or a bound; repeatable.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class EffortOptions:
    """What it may cost; arguments of `effort.make_effort`."""

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


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer wants it: every parameter that is a bundle as one parameter per field of the bundle."""
    hints = get_type_hints(command, include_extras=True)
    bundles: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for given in inspect.signature(command).parameters.values():
        kind = hints[given.name]
        if not is_dataclass(kind):
            parameters.append(given.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=kind))
            continue
        bundles[given.name] = kind
        types = get_type_hints(kind, include_extras=True)
        for field in sorted(fields(kind), key=lambda field: field.default is not MISSING):  # what is needed first
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            kind_of = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(field.name, kind_of, default=default, annotation=types[field.name]))

    def run(**values: Any) -> None:
        made = {
            name: kind(**{field.name: values.pop(field.name) for field in fields(kind)})
            for name, kind in bundles.items()
        }
        command(**made, **values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _own(bundle: Any, kind: Any) -> dict[str, Any]:
    """Values of the fields that one of the bundle's classes declares."""
    return {field.name: getattr(bundle, field.name) for field in fields(kind)}
