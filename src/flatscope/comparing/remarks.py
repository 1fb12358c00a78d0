"""Remark: a sentence of caution beside the numbers of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flatscope.formatting import first_of_names

MOST_NAMED = 3


class Remark(str):
    """Sentence with a code: "overlap", "copy", "near", "moved", "loss", "fit", "slope", "constant", "architecture"."""

    code: str

    def __new__(cls, code: str, text: str) -> Remark:
        """The sentence `text`."""
        made = super().__new__(cls, text)
        made.code = code
        return made


def remarks_on_near_copies(meta: Mapping[str, Any]) -> list[Remark]:
    """The remark that pairs have nearly equal weights, and what tells more of them; none where there is no pair."""
    pairs = [f"{other} and {one} ({100 * apart:.2g} %)" for one, other, apart in meta.get("near_copies", ())]
    text = "Nearly equal weights (rounded, pruned, fine-tuned or averaged?)"
    more = "fs.forecast says layer by layer what the step between them does to the loss"
    return [Remark("near", f"{text}: {first_of_names(pairs, MOST_NAMED)}; {more}.")] if pairs else []
