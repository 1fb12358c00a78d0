"""Landscapes: loss and error on lines and planes through a network, in weight space and in path space."""

from flatscope.landscapes.making import landscape
from flatscope.landscapes.surface import Surface

__all__ = ["Surface", "landscape"]
