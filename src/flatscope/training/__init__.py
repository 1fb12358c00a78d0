"""Networks in training, one or many: models, loops, populations, recorders, sweeps, the benchmark, stability."""
