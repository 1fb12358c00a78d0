"""Several trained networks side by side: which is flatter, and which measures can tell."""

from flatscope.comparing.comparison import Comparison
from flatscope.comparing.running import compare

__all__ = ["Comparison", "compare"]
