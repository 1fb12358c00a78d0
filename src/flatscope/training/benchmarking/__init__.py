"""A benchmark for measures: one released population of networks, on which every measure is scored alike."""
