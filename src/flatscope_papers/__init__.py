"""Every figure and table of the four papers as a study with claims and verdicts."""

from flatscope.extend import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
