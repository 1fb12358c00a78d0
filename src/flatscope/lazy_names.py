"""Public names of a package, loaded when they are first asked for.

torch, pandas and scipy take seconds to load, which the help of a command or a misspelt word should not cost. The stub
`__init__.pyi` beside a package's `__init__.py` is the one list of its public names: type checkers read it, and so does
`lazy_names`.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import random
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package, from the imports of its stub.

    Args:
        package: its name; the stub has lines `from module import name as name`, and nothing else that counts.
    """
    stub = ast.parse(pkgutil.get_data(package, "__init__.pyi") or b"")
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    module_of = {alias.name: str(node.module) for node in imports for alias in node.names}

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        state = random.getstate()
        try:
            home = module_of[name]
            value = (
                importlib.import_module(f"{package}.{name}")
                if home == package
                else getattr(importlib.import_module(home), name)
            )
        finally:
            random.setstate(state)  # packages that are loaded here draw from it (rich does)
        vars(sys.modules[package])[name] = value  # asked once only
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return load, names, sorted(module_of)
