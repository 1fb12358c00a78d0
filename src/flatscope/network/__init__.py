"""What a network is made of: its layers and units, what ties units together, what cannot be rescaled and why."""

from flatscope.network.program import Operation, replay
from flatscope.network.tracing import trace
from flatscope.network.units import Graph, GraphLayer, entry_channels

__all__ = ["Graph", "GraphLayer", "Operation", "entry_channels", "replay", "trace"]
