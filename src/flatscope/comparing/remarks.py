"""Remark: a sentence of caution beside the numbers of a comparison."""

from __future__ import annotations


class Remark(str):
    """A sentence, with a code: "overlap", "copy", "moved", "loss", "fit", "slope", "constant" or "architecture"."""

    code: str

    def __new__(cls, code: str, text: str) -> Remark:
        """The sentence `text`."""
        made = super().__new__(cls, text)
        made.code = code
        return made
