"""How flat is the minimum of a trained network, does that number mean anything, and what does it say?"""

from flatscope.lazy_names import lazy_names
from flatscope.version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_names(__name__)
