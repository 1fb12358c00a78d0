"""What every command needs: data sets, weights in files, networks of hubs, functions found by name."""

from flatscope.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
