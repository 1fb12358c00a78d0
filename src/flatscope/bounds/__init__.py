"""All bounds. Importing a family declares it; a new family is one line here."""

from flatscope.bounds import classical, psi

__all__ = ["classical", "psi"]
