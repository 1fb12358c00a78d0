"""All bounds. Importing a family declares it; a new family is one line here.

The package is also the public function of its name: `fs.bounds(problem)` evaluates, `import flatscope.bounds.psi`
imports, and both mean this one object, whatever was imported first.
"""

import inspect
import sys
from types import ModuleType
from typing import Any

from flatscope.bounds import classical, norm_based, optimised_posterior, pac_bayes, psi
from flatscope.measuring import bounds as evaluate
from flatscope.table import Table

__all__ = ["classical", "norm_based", "optimised_posterior", "pac_bayes", "psi"]
__doc__ = evaluate.__doc__ or ""


class _CallablePackage(ModuleType):
    """A package that can be called: with the arguments of `flatscope.measuring.bounds`."""

    __signature__ = inspect.signature(evaluate)

    def __call__(self, *args: Any, **options: Any) -> Table:
        return evaluate(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
