"""Stores of which only configurations, metrics and tables were kept: enough to analyse, too little to train on."""

from __future__ import annotations

from collections.abc import Mapping

from flatscope import FlatscopeError
from flatscope.training import Store


class ReadOnlyStore(Store):
    """A store to be read, whose trials count although their weights are gone."""

    def __contains__(self, config: object) -> bool:
        """True if configuration, metrics and the list of files can be read."""
        try:
            return isinstance(config, Mapping) and bool(self.read(config))
        except FlatscopeError:
            return False
