"""Several trained networks side by side: which is flatter, by which measures, and which may be asked."""

from flatscope.comparing.comparison import Comparison
from flatscope.comparing.running import compare

__all__ = ["Comparison", "compare"]
