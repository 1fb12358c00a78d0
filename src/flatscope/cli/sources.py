"""Models, weights and options as they are written on the command line."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatscope.errors import InputError, UnknownNameError
from flatscope.factories import find_factory
from flatscope.training import models
from flatscope.training.data import Data
from flatscope.training.weights import load_weights

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def load_model(model: str, weights: Path | None = None, data: Data | None = None, seed: int = 0) -> nn.Module:
    """A model from `file.py:factory`, `package.module:factory` or a built-in name, in eval mode.

    Args:
        model: where the model comes from.
        weights: safetensors file, state dict or run folder to load into it.
        data: a built-in model takes its input shape and number of classes from it.
        seed: of a built-in model's initial weights.
    """
    if ":" in model:
        built = find_factory(model)()
        if not isinstance(built, nn.Module):
            raise InputError("a factory that returns a torch.nn.Module", type(built).__name__, where=f"--model {model}")
    elif model in models.available():
        fitting: dict[str, object] = {}
        if data is not None and "input_shape" in models.model_options(model):
            fitting = {"input_shape": data.input_shape, "classes": data.n_classes}
        built = models.build(model, seed=seed, **fitting)
    else:
        raise UnknownNameError.among(model, [*models.available(), "file.py:factory"], "model")
    if weights is not None:
        load_weights(built, weights)
    return built.eval()


def parse_options(entries: Iterable[str]) -> dict[str, dict[str, Any]]:
    """`measure.option=value` entries as {measure: {option: value}}; values are Python literals or words."""
    options: dict[str, dict[str, Any]] = {}
    for entry in entries:
        name, found, value = entry.partition("=")
        measure, dot, option = name.partition(".")
        if not (found and dot and option):
            raise InputError("measure.option=value, as in margin.epsilon=0.1", repr(entry), where="--option")
        try:
            parsed = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            parsed = value
        options.setdefault(measure, {})[option] = parsed
    return options


def parse_dtype(name: str | None) -> torch.dtype | None:
    """float32 or float64."""
    if name is None:
        return None
    if name not in DTYPES:
        raise UnknownNameError.among(name, DTYPES, "dtype")
    return DTYPES[name]
