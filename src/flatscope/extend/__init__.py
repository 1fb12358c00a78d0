"""Names for those who add measures, bounds, operations, results, sections of the report or studies to flatscope."""

from flatscope.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
