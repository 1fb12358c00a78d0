"""Landscapes: loss and error on lines and planes through a network, in weight space and in path space."""

from flatscope.landscape.making import landscape
from flatscope.landscape.surface import Surface

__all__ = ["Surface", "landscape"]
