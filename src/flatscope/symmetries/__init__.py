"""Transformations of the weights that leave the function unchanged."""
