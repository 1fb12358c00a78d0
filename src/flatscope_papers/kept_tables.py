"""Stores of which only configurations, metrics and tables were kept: enough to analyse, too little to train on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flatscope import FlatscopeError
from flatscope_papers.former_names import with_former_names
from flatscope_training.sweeps.configuration import plain
from flatscope_training.sweeps.store import Store, Stored


class KeptTables(Store):
    """A store to be read, whose trials count although their weights are gone; names of version 0.1 are understood."""

    def __contains__(self, config: object) -> bool:
        """Whether configuration, metrics and the list of files can be read."""
        try:
            return isinstance(config, Mapping) and bool(self.read(config))
        except FlatscopeError:
            return False

    def read(self, config: Mapping[str, Any]) -> Stored:
        """The trial of this configuration; asking for its weights may fail."""
        try:
            return super().read(config)
        except FlatscopeError:
            stored = super().read(with_former_names(config))
            stored.config = plain(config)
            return stored
