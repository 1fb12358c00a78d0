"""Options of the commands about decisions: sensitivity, forecast, diagonal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from flatscope.cli.options import NetworkOptions, OutputOptions


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """Limits of time and memory."""

    budget: Annotated[str | None, typer.Option(help='Time to end in: "90s", "10m", "2h".')] = None
    memory: Annotated[str | None, typer.Option(help='What a pass may use: "8GiB"; else a share of what is free.')] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class SensitivityCommand(NetworkOptions, LimitOptions, OutputOptions):
    """See which layers take few bits or can be pruned: the rise of the loss for each, predicted and measured."""

    bits: Annotated[list[int] | None, typer.Option(help="To round to; repeatable. 8, 4, 3 and 2 by default.")] = None
    sparsity: Annotated[
        list[float] | None,
        typer.Option(help="Share of a layer's weights to set to zero; repeatable. 0.5 and 0.9 by default; 0 for none."),
    ] = None
    rounding: Annotated[
        str, typer.Option(help="Which weights share a scale: channel (an output row), tensor, or group:128.")
    ] = "channel"
    layer: Annotated[list[str] | None, typer.Option(help="Only this layer; repeatable.")] = None
    mean_bits: Annotated[
        float | None, typer.Option(help="Choose bits by layer for this size, and measure all layers rounded together.")
    ] = None
    allocation_out: Annotated[Path | None, typer.Option(help="Write the chosen bits as .json.")] = None
    rounded_out: Annotated[Path | None, typer.Option(help="Write the rounded weights as .safetensors.")] = None
    precision: Annotated[float, typer.Option(help="Relative standard error of estimated curvature; 0: exact.")] = 0.05


@dataclass(frozen=True, kw_only=True)
class ForecastCommand(NetworkOptions, LimitOptions, OutputOptions):
    """See what other weights (fine-tuned, merged, pruned) do to this loss, layer by layer."""

    to: Annotated[Path, typer.Option(help="The new weights: safetensors, a state dict, the folder of a checkpoint.")]


@dataclass(frozen=True, kw_only=True)
class DiagonalCommand(NetworkOptions, LimitOptions):
    """Write the diagonal of the Hessian, Gauss-Newton or empirical Fisher matrix, one number for every weight."""

    out: Annotated[Path, typer.Option(help="The file to write, .safetensors: entries by the names of the parameters.")]
    matrix: Annotated[str, typer.Option(help="hessian, gauss_newton or empirical_fisher.")] = "hessian"
    precision: Annotated[float, typer.Option(help="Relative error of a tensor that is estimated; 0: exact.")] = 0.02
