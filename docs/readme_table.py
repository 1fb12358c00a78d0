"""Writes the tables of measures and bounds into README.md, from the declarations."""

import re
from pathlib import Path

from flatscope.registry import catalogue_markdown

readme = Path(__file__).parent.parent / "README.md"
text = readme.read_text(encoding="utf-8")
for marker, kind in (("measures", "measure"), ("bounds", "bound")):
    block = f"<!-- {marker} -->\n{catalogue_markdown(kind)}\n<!-- /{marker} -->"
    text = re.sub(f"<!-- {marker} -->.*?<!-- /{marker} -->", lambda _, block=block: block, text, flags=re.DOTALL)
readme.write_text(text, encoding="utf-8")
