r"""Formulas of declarations, which are LaTeX: as text for a terminal, and the symbols that they are made of.

Only what our declarations use is known: letters with accents and indices, fractions, roots, norms, sums. `\|…\|_F` is
one symbol, written `\|\cdot\|_F`, and what stands within it is read as well.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable
from typing import NamedTuple

_TOKEN = re.compile(r"\\(?:operatorname|mathrm|text|mathbb|mathbf)\{[^}]*\}|\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|[^\s]")
_SPACES = {r"\,", r"\ ", r"\!", r"\;", r"\left", r"\right", r"\Big", r"\big"}
# Signs that every reader of formulas knows; every letter and every other command is a symbol that has to be explained.
_KNOWN = {r"\sum", r"\prod", r"\max", r"\min", r"\sup", r"\inf", r"\log", r"\ln", r"\sqrt", r"\frac", r"\tfrac"}
_KNOWN |= {r"\le", r"\ge", r"\ne", r"\neq", r"\sim", r"\cdot", r"\forall", r"\Rightarrow", r"\{", r"\}", r"\langle"}
_KNOWN |= {r"\rangle", r"\lceil", r"\rceil", r"\parallel"}
_SIGNS = {
    r"\sum": "Σ", r"\prod": "Π", r"\le": "≤", r"\ge": "≥", r"\ne": "≠", r"\neq": "≠", r"\sim": "~", r"\cdot": "·",
    r"\forall": "for all", r"\Rightarrow": "⇒", r"\{": "{", r"\}": "}", r"\langle": "⟨", r"\rangle": "⟩",
    r"\lceil": "⌈", r"\rceil": "⌉", r"\top": "ᵀ", r"\nabla": "∇", r"\partial": "∂", r"\odot": "⊙", r"\infty": "∞",
    r"\ell": "ℓ", r"\#": "#", r"\parallel": "∥", r"\epsilon": "ε", r"\phi": "φ", r"\dim": "dim",
}  # fmt: skip
_ACCENTS = {r"\hat": "\u0302", r"\bar": "\u0304", r"\tilde": "\u0303", r"\overline": "\u0304"}
_RAISED = dict(zip("0123456789+-ᵀ*", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ᵀ*", strict=True))
_LOWERED = dict(zip("0123456789", "₀₁₂₃₄₅₆₇₈₉", strict=True))
_LIMITS = {"Σ", "Π", "max", "min", "sup", "inf", "E"}  # what carries conditions below it
_RELATIONS = {"=", "+", "−", "≤", "≥", "≠", "~", "⇒", "<", ">", "⊙", "∥", "/", "for all"}
_CLINGING = {"∇", "∂", "#", "∇²"}  # to what follows


def formula_tokens(formula: str) -> list[str]:
    r"""Pieces of a formula without spaces; a norm is `\|` where it opens and `\|\cdot\|_F` where it closes.

    Example:
        >>> formula_tokens(r"\|w\|_F^2\, H_l")
        ['\\|', 'w', '\\|\\cdot\\|_F', '^', '2', 'H', '_', 'l']
    """
    pieces = [piece for piece in _TOKEN.findall(formula) if piece not in _SPACES]
    result: list[str] = []
    opened, position = False, 0
    while position < len(pieces):
        piece = pieces[position]
        position += 1
        if piece == r"\|":
            if opened:
                end = _end_of_index(pieces, position)
                piece += r"\cdot\|" + "".join(pieces[position:end])
                position = end
            opened = not opened
        result.append(piece)
    return result


def _end_of_index(pieces: list[str], position: int) -> int:
    """End of the index that begins here; the same place where there is none."""
    if pieces[position : position + 1] != ["_"]:
        return position
    return _end_of_group(pieces, position + 1)


def _end_of_group(pieces: list[str], position: int) -> int:
    """Behind the group, or the one piece, that begins here."""
    if pieces[position] != "{":
        return position + 1
    depth = 0
    for place in range(position, len(pieces)):
        depth += {"{": 1, "}": -1}.get(pieces[place], 0)
        if not depth:
            return place + 1
    raise ValueError(f"a brace of {''.join(pieces)} is not closed")


def explained_and_unexplained_symbols(
    formula: str, known: Iterable[str], own_symbols: Iterable[str] = ()
) -> tuple[list[str], list[str]]:
    r"""Known symbols that a formula uses, in its order, and the pieces that none of them explains.

    Longer symbols come first: where `H_l` is known, `H` and `l` need not be. Those that are the formula's own are named
    also where they stand within longer ones only.

    Example:
        >>> explained_and_unexplained_symbols(r"\sum_l \|w^l\|_F^2 H_l", ["w^l", "H_l", r"\|\cdot\|_F"])
        (['w^l', '\\|\\cdot\\|_F', 'H_l'], ['l'])
    """
    pieces = formula_tokens(formula)
    own_symbols = set(own_symbols)
    of_symbols = {
        symbol: ([symbol] if symbol.startswith(r"\|\cdot\|") else formula_tokens(symbol))
        for symbol in {*known, *own_symbols}
    }
    first: dict[str, int] = {}
    covered = [False] * len(pieces)
    for symbol, sought in sorted(of_symbols.items(), key=lambda item: -len(item[1])):
        for start in range(len(pieces) - len(sought) + 1):
            place = slice(start, start + len(sought))
            if pieces[place] == sought and (symbol in own_symbols or not any(covered[place])):
                covered[place] = [True] * len(sought)
                first.setdefault(symbol, start)
    left = [piece for piece, done in zip(pieces, covered, strict=True) if not done and _has_meaning(piece)]
    return sorted(first, key=lambda symbol: (first[symbol], -len(of_symbols[symbol]), symbol)), list(
        dict.fromkeys(left)
    )


def _has_meaning(piece: str) -> bool:
    """True if a reader has to be told what it is."""
    if piece.startswith("\\"):
        return piece not in _KNOWN | {r"\|"} and not piece.startswith(r"\text") and piece not in _ACCENTS
    return piece.isalpha() or piece in ("#",)


def formula_as_text(formula: str) -> str:
    r"""A formula in one line of Unicode, for a terminal.

    Example:
        >>> formula_as_text(r"\rho^{\Sigma} = \sum_l \|w^l\|_F^2 \operatorname{Tr} H_l")
        'ρ^Σ = Σ_l ‖w^l‖_F² Tr H_l'
        >>> formula_as_text(r"\tfrac1n \sum_i (g_i - \bar g)^\top, \ \max_{\|u\|_2 \le \rho} \sqrt{\frac{a+b}{2n}}")
        '1/n Σ_i (g_i − ḡ)ᵀ, max[‖u‖₂ ≤ ρ] √((a + b)/(2n))'
    """
    pieces = [piece for piece in _TOKEN.findall(formula) if piece not in _SPACES]
    return unicodedata.normalize("NFC", _FormulaReader(pieces).read())


class _Word(NamedTuple):
    """A piece of text, and what it is to its neighbours."""

    text: str
    kind: str  # "letter", "number", "fraction", "name", "relation", "open", "close", "comma", "clinging"


class _FormulaReader:
    """Reads pieces of a formula from left to right into text."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces, self.place = pieces, 0
        self.bars: dict[str, bool] = {"|": False, "‖": False}  # whether one is open

    def read(self) -> str:
        """Text of all that is left of this group."""
        words: list[_Word] = []
        while self.place < len(self.pieces):
            word = self._read_atom()
            while self.place < len(self.pieces) and self.pieces[self.place] in "^_'":
                word = self._with_index_and_exponent(word)
            words.append(word)
        return _joined_symbols(words)

    def _read_group(self) -> str:
        """The braced group, or the one piece, that comes next."""
        end = _end_of_group(self.pieces, self.place)
        inside = self.pieces[self.place : end]
        self.place = end
        return _FormulaReader(inside[1:-1] if inside[0] == "{" else inside).read()

    def _read_atom(self) -> _Word:
        piece = self.pieces[self.place]
        if piece == "{":
            return _Word(self._read_group(), "letter")
        self.place += 1
        if piece in (r"\frac", r"\tfrac"):
            return _Word(f"{_in_parentheses(self._read_group())}/{_in_parentheses(self._read_group())}", "fraction")
        if piece == r"\sqrt":
            return _Word(f"√{_in_parentheses(self._read_group())}", "letter")
        if piece in _ACCENTS:
            inside = self._read_group()
            return _Word(f"mean({inside})" if len(inside) > 1 else inside + _ACCENTS[piece], "letter")
        if "{" in piece and len(piece) > 2:
            name = piece.partition("{")[2][:-1]
            return _Word(name, "name" if len(name) > 1 else "number" if name.isdigit() else "letter")
        return self._read_sign(piece)

    def _read_sign(self, piece: str) -> _Word:
        text = {r"\|": "‖", "-": "−"}.get(piece) or _SIGNS.get(piece) or piece
        if text in self.bars:
            self.bars[text] = not self.bars[text]
            return _Word(text, "open" if self.bars[text] else "close")
        if text.startswith("\\"):
            text = _greek_letter(text[1:])
        for kind, signs in (("relation", _RELATIONS), ("clinging", _CLINGING), ("open", "([{⟨⌈"), ("close", ")]}⟩⌉")):
            if text in signs:
                return _Word(text, kind)
        if text in ",:":
            return _Word(text, "comma")
        named = len(text) > 1 or text in "ΣΠ"
        return _Word(text, "number" if text[0].isdigit() else "name" if named else "letter")

    def _with_index_and_exponent(self, base: _Word) -> _Word:
        mark = self.pieces[self.place]
        self.place += 1
        if mark == "'":
            return base._replace(text=f"{base.text}′")
        inside = self._read_group()
        limit = base.text.partition("[")[0] in _LIMITS
        if limit and ((mark == "_" and len(inside) > 1) or base.text.endswith("]")):
            more = f"{base.text[:-1]}…{inside}]" if base.text.endswith("]") else f"{base.text}[{inside}]"
            return _Word(more, "name")
        return base._replace(text=base.text + _index_or_exponent(inside, mark))


def _index_or_exponent(inside: str, mark: str) -> str:
    """An index or an exponent: as small digits where there are such, in parentheses where it is long."""
    inside = re.sub(r"\s*([−+,/])\s*", r"\1", inside)
    table = _RAISED if mark == "^" else _LOWERED
    if all(letter in table for letter in inside.replace("−", "-")):
        return "".join(table[letter] for letter in inside.replace("−", "-"))
    enclosed = inside.isalnum() or len(inside) == 1 or re.fullmatch(r"\([^()]*\)", inside)
    return f"{mark}{inside}" if enclosed else f"{mark}({inside})"


def _greek_letter(name: str) -> str:
    """A Greek letter by its name; other commands by their name."""
    size = "CAPITAL" if name[:1].isupper() else "SMALL"
    try:
        return unicodedata.lookup(f"GREEK {size} LETTER {'LAMDA' if name.lower() == 'lambda' else name.upper()}")
    except KeyError:
        return name


def _in_parentheses(text: str) -> str:
    """In parentheses where it is more than one piece."""
    one = re.fullmatch(r"\d+|[^\s/()+−·\d][^\s/()+−·]*(?:\([^()]*\))?", text)
    return text if one else f"({text})"


def _joined_symbols(words: list[_Word]) -> str:
    """Words side by side, with a space wherever two would be read as one."""
    text = ""
    for before, word in itertools.pairwise([_Word("", "open"), *words]):
        of_fraction = before.text in ("log", "ln") and word.kind == "fraction"
        text += " " * _need_space_between(before, word) + (f"({word.text})" if of_fraction else word.text)
    return text


def _need_space_between(before: _Word, word: _Word) -> bool:
    """True if there is a space between two words."""
    if before.kind in ("open", "clinging") or word.kind in ("close", "comma"):
        return False
    if "relation" in (before.kind, word.kind) or before.kind == "comma":
        return True
    if word.text == "(" or word.text in ("{", "["):
        return before.text[:1] in "ΣΠ" or before.text.endswith("]") or before.kind == "fraction"
    if before.text in ("log", "ln") and word.kind == "fraction":
        return False
    return before.kind != "number" or word.kind in ("name", "fraction") or word.text[:1] == "√"
