"""What a network is made of: its layers and units, what ties units together, what cannot be rescaled and why."""

from flatscope.graph.network import Graph, GraphLayer, entry_channels
from flatscope.graph.operation import Operation, replay
from flatscope.graph.tracing import trace

__all__ = ["Graph", "GraphLayer", "Operation", "entry_channels", "replay", "trace"]
