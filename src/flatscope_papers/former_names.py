"""Trials that version 0.1 stored: functions that their configurations name were in other modules then.

The name of a trial in the store is a hash of its configuration, names of functions included. What 0.1 trained is taken
over under its new name, and not trained again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from flatscope import InputError
from flatscope_training.sweeps.store import Store

FORMER_MODULES = {
    "flatscope_papers.smoke_data": "flatscope.studies.smoke_data",
    "flatscope_papers.zhang2017.all_conv_networks": "flatscope.studies.zhang2017_networks",
}


def with_former_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as version 0.1 wrote it."""
    return {name: _former(value) for name, value in config.items()}


def _former(value: Any) -> Any:
    if isinstance(value, Mapping):
        return with_former_names(value)
    if isinstance(value, list | tuple):
        return [_former(entry) for entry in value]
    if not isinstance(value, str):
        return value
    module, colon, function = value.partition(":")
    return f"{FORMER_MODULES.get(module, module)}{colon}{function}"


def take_over(configs: Iterable[Mapping[str, Any]], store: Store) -> None:
    """Give trials that the store has under former names the names of today."""
    for config in configs:
        former = with_former_names(config)
        if former != config and config not in store and former in store:
            stored = store.read(former)
            weights: dict[str, Tensor] | None = None
            with contextlib.suppress(InputError):  # measurements are stored without weights
                weights = stored.weights()
            frames = {name: stored.frame(name) for name in stored.frames}
            store.write(config, stored.metrics, weights=weights, frames=frames)
