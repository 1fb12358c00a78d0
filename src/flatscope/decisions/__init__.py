"""Decisions: what people do with flatness. Which layers take few bits, what a change of weights costs, diagonals."""
