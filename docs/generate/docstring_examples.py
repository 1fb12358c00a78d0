"""For mkdocstrings: our docstrings have one `Example:`, which it would read as a note and not as code."""

from __future__ import annotations

import re
from typing import Any

import griffe


class OneExample(griffe.Extension):
    """Reads `Example:` as the section of examples."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section of one object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
