"""Options that several commands have, with one wording.

Nothing here loads torch: the help of a command, and a slip in one, should not take seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

INITIAL_FILE = "initial.safetensors"  # what `flatscope train` writes beside the trained weights

ModelName = Annotated[str, typer.Option("--model", help="file.py:factory, package.module:factory, or a built-in name.")]
ModelOptions = Annotated[
    list[str] | None, typer.Option("--model-option", help="name=value for the factory; repeatable.")
]
DataName = Annotated[
    str,
    typer.Option("--data", help="digits, mnist, fashion-mnist, cifar10, file.npz, file.py:factory, module:factory."),
]
DataRoot = Annotated[Path | None, typer.Option("--data-root", help="Folder of the data; else FLATSCOPE_DATA.")]
TrainSize = Annotated[int | None, typer.Option("--train-size", help="Class-balanced subset of the training data.")]
TestSize = Annotated[int | None, typer.Option("--test-size", help="Class-balanced subset of the test data.")]
Standardize = Annotated[
    bool, typer.Option(help="Per channel, to mean 0 and variance 1 over the training samples; else scaled to [0, 1].")
]
StandardizeBy = Annotated[
    str,
    typer.Option(
        help="Which training samples: all of the data set, or those drawn by --train-size, as sweeps and studies do."
    ),
]
Flatten = Annotated[bool, typer.Option("--flatten", help="One vector per sample.")]
# Not the seed of training: networks of different seeds must be measured on the samples they were trained on.
DataSeed = Annotated[int, typer.Option("--data-seed", help="Of subsets and of the split of digits.")]
Weights = Annotated[Path | None, typer.Option(help="safetensors, a state dict, or the folder of a checkpoint.")]
Initial = Annotated[
    Path | None,
    typer.Option(
        help=f"Weights before training, for distances; else {INITIAL_FILE} where --weights is a folder with it."
    ),
]
MeasureNames = Annotated[list[str] | None, typer.Option("--measure", "-m", help='Name or glob, or "all"; repeatable.')]
MeasureOptions = Annotated[list[str] | None, typer.Option(help="measure.option=value; repeatable.")]
LossName = Annotated[str, typer.Option(help="cross_entropy or mse.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, …")]
BatchSize = Annotated[int | None, typer.Option(help="Samples evaluated at once; changes no value.")]
Precision = Annotated[
    float, typer.Option(help="Relative standard error at which estimates stop; 0: exact values, all draws.")
]
Budget = Annotated[str | None, typer.Option(help='Time to end in: "90s", "10m", "2h".')]
Memory = Annotated[str | None, typer.Option(help='What sweeps may use: "8GiB"; else a share of what is free.')]
Curvature = Annotated[str, typer.Option(help="hessian, or gauss_newton where the cheaper matrix is wanted.")]
