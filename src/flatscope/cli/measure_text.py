"""What `flatscope measures NAME` prints: a measure in words, its formula with every symbol, usual values, options."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable

from rich.cells import cell_len

from flatscope.comparing.records import DIFFERENCES, records_of_measure
from flatscope.definitions import explained_symbols, typical_values
from flatscope.formulas import formula_as_text
from flatscope.registry import COSTS, NEEDS, SEARCHES, SYMMETRIES, Declaration, declarations, family_name

INDENT = "  "
LEAST_WIDTH, MOST_WIDTH = 50, 100  # of a line
WIDEST_NAME = 16  # of a column of names; longer ones get a line of their own


def measure_page(entry: Declaration, width: int = 80) -> str:
    """Everything that is known about one measure, as text of lines no longer than that."""
    width = min(max(width, LEAST_WIDTH), MOST_WIDTH)
    body, arguments = _split_docstring(entry)
    parts = [f"{entry.name}\n{_wrapped_text(entry.summary, width)}", _formula_text(entry, width)]
    parts += [
        _two_column_text(_meaning_rows(entry), width),
        _titled_lines("What it is worth", _ranking_record_lines(entry), width),
    ]
    parts += [_wrapped_text(paragraph, width) for paragraph in body.split("\n\n")]
    parts += [
        _two_column_text(_declaration_rows(entry), width),
        _titled_lines("What it assumes", entry.assumptions, width),
    ]
    parts.append(_options_text(entry, arguments, width))
    return "\n\n".join(part for part in parts if part.strip()) + "\n"


def _formula_text(entry: Declaration, width: int) -> str:
    symbols = [(formula_as_text(symbol), words) for symbol, words in explained_symbols(entry.symbol, entry.definition)]
    written = textwrap.fill(formula_as_text(entry.symbol), width, initial_indent=INDENT, subsequent_indent=INDENT * 3)
    return f"{written}\n{_two_column_text(symbols, width, indent=INDENT * 2)}".rstrip()


def _meaning_rows(entry: Declaration) -> list[tuple[str, str]]:
    """Meaning of large and small values, usual values, and when not to trust them."""
    definition = entry.definition
    if definition is None:
        return []
    values = [("Usual values" if n == 0 else "", text) for n, text in enumerate(typical_values(entry.name, entry.per))]
    said = [("Large", definition.large), ("Small", definition.small), *values, ("Caution", definition.caution)]
    return [(name, f"{text[0].upper()}{text[1:]}.".replace("..", ".")) for name, text in said]


def _ranking_record_lines(entry: Declaration) -> list[str]:
    """Share of pairs of released networks that the measure ranked rightly, by what the two differ in."""
    if entry.direction == "none":
        return []
    return [f"{DIFFERENCES[name]}: {record.words}" for name, record in records_of_measure(entry.name).items()]


def _declaration_rows(entry: Declaration) -> list[tuple[str, str]]:
    expected = {"none": "no order is claimed"}.get(entry.direction, f"{entry.direction} values generalize better")
    facts = {
        "Paper": ", ".join(filter(None, (entry.citation, entry.equation))),
        "One value per": entry.per,
        "Expected": expected,
        "Unchanged by": symmetries_in_words(entry),
        "BatchNorm": "folded into the layers first" if entry.on_folded else "as given",
        "Needs": ", ".join(NEEDS[word] for word in sorted(entry.needs)),
        "Cost": COSTS[entry.cost],
        "Search": SEARCHES[entry.search],
        "Conventions": entry.conventions,
    }
    return [(name, text) for name, text in facts.items() if text]


def symmetries_in_words(entry: Declaration) -> str:
    """Symmetries that leave a measure unchanged, in words."""
    scaled = [words[0] for name, words in SYMMETRIES.items() if name in entry.invariant_under - {"permutation"}]
    ordered = ["reordering of units"] if "permutation" in entry.invariant_under else []
    return "; ".join([*([f"rescaling of {', '.join(scaled)}"] if scaled else []), *ordered]) or "nothing"


def measure_list(width: int = 80) -> str:
    """All measures and bounds by family, each with what it is in a line or two."""
    width = min(max(width, LEAST_WIDTH), MOST_WIDTH)
    families: dict[str, list[tuple[str, str]]] = {}
    for kind in ("measure", "bound"):
        for entry in declarations(kind).values():
            title = f"{kind}s: {family_name(entry.family)}"
            families.setdefault(title, []).append((entry.name, entry.summary))
    column = max(len(name) for rows in families.values() for name, _ in rows)
    return (
        "\n\n".join(f"{title}\n{_two_column_text(rows, width, column=column)}" for title, rows in families.items())
        + "\n"
    )


def _options_text(entry: Declaration, arguments: dict[str, str], width: int) -> str:
    """Options with their defaults and what they do."""
    rows = []
    for name, default in entry.options.items():
        value = "" if default is inspect.Parameter.empty else f" = {default!r}"
        rows.append((f"{name}{value}", arguments.get(name, "")))
    return f"{INDENT}Options\n{_two_column_text(rows, width, indent=INDENT * 2)}" if rows else ""


def _split_docstring(entry: Declaration) -> tuple[str, dict[str, str]]:
    """The text between the first line and the arguments, with formulas as text, and what each argument is."""
    text = inspect.getdoc(entry.function) or ""
    text = re.sub(r":math:`([^`]*)`", lambda match: formula_as_text(match[1]), text)
    text = re.sub(r"\.\. math:: (.*)", lambda match: formula_as_text(match[1]), text)
    text, _, listed = text.partition("\nArgs:\n")
    listed = re.split(r"\n(?=\S)", listed)[0]  # up to the next section
    arguments = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", listed, flags=re.MULTILINE)
    return text.partition("\n")[2].strip(), {name: " ".join(words.split()) for name, words in arguments}


def _wrapped_text(text: str, width: int, indent: str = INDENT) -> str:
    return textwrap.fill(" ".join(text.split()), width, initial_indent=indent, subsequent_indent=indent)


def _two_column_text(rows: Iterable[tuple[str, str]], width: int, indent: str = INDENT, column: int = 0) -> str:
    """Names with what is said of them beside: words are never broken, long names have a line of their own."""
    rows = list(rows)
    column = column or min(max((cell_len(name) for name, _ in rows), default=0), WIDEST_NAME)
    beside = indent + " " * (column + 2)
    lines = []
    for name, words in rows:
        text = textwrap.fill(
            " ".join(words.split()), width, initial_indent=beside, subsequent_indent=beside, break_long_words=False
        )
        blank = " " * (column - cell_len(name))
        long = cell_len(name) > column
        lines.append(f"{indent}{name}\n{text}" if long else f"{indent}{name}{blank}  {text[len(beside) :]}".rstrip())
    return "\n".join(lines)


def _titled_lines(title: str, items: Iterable[str], width: int) -> str:
    """A title, and a line for each item below it."""
    hanging = INDENT * 2
    lines = [textwrap.fill(item, width, initial_indent=hanging, subsequent_indent=hanging + INDENT) for item in items]
    return "\n".join([INDENT + title, *lines]) if lines else ""
