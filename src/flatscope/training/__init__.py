"""Networks in training, one or many: models, loops, populations, recorders, sweeps, the benchmark, stability."""

from flatscope.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
