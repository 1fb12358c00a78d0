"""Data sets: read, cut, standardised and labelled anew; those that are published by name, and a user's own."""
