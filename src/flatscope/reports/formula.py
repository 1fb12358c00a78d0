r"""From the LaTeX of a declaration to MathML, which browsers draw without any library.

It reads the part of LaTeX that formulas of one line use: sub- and superscripts, fractions, roots, accents,
alphabets, named operators, Greek letters, delimiters. What it does not know it does not guess: the reader
then sees the source.

    formula  := item*
    item     := atom ( "_" argument | "^" argument | "'" )*
    argument := atom            (one letter, one digit, one command or a group)
    atom     := letter | number | symbol | "{" formula "}" | "\" command argument*
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from markupsafe import Markup

from flatscope.reports.markup import element

_LETTERS = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ϵ", "varepsilon": "ε", "zeta": "ζ", "eta": "η",
    "theta": "θ", "vartheta": "ϑ", "iota": "ι", "kappa": "κ", "lambda": "λ", "mu": "μ", "nu": "ν", "xi": "ξ", "pi": "π",
    "rho": "ρ", "sigma": "σ", "tau": "τ", "upsilon": "υ", "phi": "ϕ", "varphi": "φ", "chi": "χ", "psi": "ψ",
    "omega": "ω", "Gamma": "Γ", "Delta": "Δ", "Theta": "Θ", "Lambda": "Λ", "Xi": "Ξ", "Pi": "Π", "Sigma": "Σ",
    "Upsilon": "Υ", "Phi": "Φ", "Psi": "Ψ", "Omega": "Ω",
    "varrho": "ϱ", "ell": "ℓ", "infty": "∞", "emptyset": "∅", "top": "⊤", "dots": "…", "ldots": "…", "cdots": "⋯",
}  # fmt: skip
_OPERATORS = {
    "nabla": "∇", "partial": "∂", "cdot": "⋅", "times": "×", "pm": "±", "mp": "∓", "circ": "∘", "odot": "⊙",
    "Rightarrow": "⇒",
    "otimes": "⊗", "oplus": "⊕", "le": "≤", "leq": "≤", "ge": "≥", "geq": "≥", "ne": "≠", "neq": "≠", "ll": "≪",
    "gg": "≫", "approx": "≈", "sim": "∼", "simeq": "≃", "equiv": "≡", "propto": "∝", "in": "∈", "notin": "∉",
    "subset": "⊂", "subseteq": "⊆", "cup": "∪", "cap": "∩", "setminus": "∖", "to": "→", "rightarrow": "→",
    "mapsto": "↦", "forall": "∀", "exists": "∃", "mid": "∣", "colon": ":", "prime": "′", "#": "#", "%": "%", "&": "&",
}  # fmt: skip
_DELIMITERS = {
    "|": "‖", "Vert": "‖", "lVert": "‖", "rVert": "‖", "vert": "|", "lvert": "|", "rvert": "|", "langle": "⟨",
    "rangle": "⟩", "lfloor": "⌊", "rfloor": "⌋", "lceil": "⌈", "rceil": "⌉", "{": "{", "}": "}",
}  # fmt: skip
_BIG = {"sum": "∑", "prod": "∏", "int": "∫", "bigcup": "⋃", "bigcap": "⋂"}
_FUNCTIONS = ["log", "ln", "exp", "sin", "cos", "tan", "tanh", "det", "dim", "ker", "deg", "arg", "Pr"]
_LIMITS = ["max", "min", "sup", "inf", "lim", "argmax", "argmin", "limsup", "liminf"]
_SPACES = {
    ",": "0.167em",
    ":": "0.222em",
    ";": "0.278em",
    "!": "-0.167em",
    " ": "0.25em",
    "quad": "1em",
    "qquad": "2em",
}
_ACCENTS = {
    "hat": "^",
    "widehat": "^",
    "bar": "¯",
    "overline": "¯",
    "tilde": "~",
    "widetilde": "~",
    "vec": "→",
    "dot": "˙",
}
_ALPHABETS = {"mathbf": "BOLD", "boldsymbol": "BOLD", "mathcal": "SCRIPT", "mathbb": "DOUBLE-STRUCK"}
_WORDS = ("mathrm", "text", "textrm", "textsc")
_SIZES = ("left", "right", "big", "Big", "bigl", "bigr", "Bigl", "Bigr", "bigg", "Bigg")
_IGNORED = ("displaystyle", "textstyle", "limits", "nolimits")

_TOKEN = re.compile(r"\\([A-Za-z]+\*?|.)|(\d+(?:\.\d+)?)|(\s+)|(.)", re.DOTALL)
# A bar may open or close; without spaces of its own it looks right either way, and keeps the height of a letter.
_TIGHT = {"stretchy": "false", "lspace": "0", "rspace": "0"}


class UnknownLatexError(ValueError):
    """Something in the formula that this converter does not read."""


def formula(source: str) -> Markup:
    r"""The formula as MathML, or its LaTeX source in <code> where it cannot be converted.

    Example:
        >>> str(formula(r"\mathrm{a}^2"))
        '<math alttext="\\mathrm{a}^2"><msup><mi mathvariant="normal">a</mi><mn>2</mn></msup></math>'
    """
    try:
        return element("math", *mathml(source), alttext=source)
    except UnknownLatexError:
        return element("code", source, class_="tex")


def mathml(source: str) -> list[Markup]:
    """The items of the formula as MathML elements.

    Raises:
        UnknownLatexError: a command that is not known, or braces that do not match.
    """
    reader = _Reader(source)
    items = reader.items("")
    if reader.position < len(reader.tokens):
        raise UnknownLatexError(f"unexpected {reader.tokens[reader.position]!r} in {source!r}")
    return items


class _Reader:
    """Recursive descent over the tokens; commands keep their backslash, spaces are dropped."""

    def __init__(self, source: str) -> None:
        self.source, self.position = source, 0
        self.tokens = [match.group() for match in _TOKEN.finditer(source)]

    def peek(self) -> str:
        while self.position < len(self.tokens) and self.tokens[self.position].isspace():
            self.position += 1
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        if not token:
            raise UnknownLatexError(f"something is missing at the end of {self.source!r}")
        self.position += 1
        return token

    def items(self, end: str) -> list[Markup]:
        """Scripted atoms up to the closing token or the end of the source."""
        found = []
        while (token := self.peek()) and token not in ("}", end):
            if token.startswith("\\") and token[1:] in _IGNORED:
                self.take()
                continue
            found.append(self.scripted())
        return found

    def scripted(self) -> Markup:
        limits = self.peek().removeprefix("\\") in (*_BIG, *_LIMITS, "operatorname*")
        base = self.atom()
        below: Markup | None = None
        above: list[Markup] = []
        while (token := self.peek()) in ("_", "^", "'"):
            self.take()
            if token == "'":
                above.append(element("mo", "′"))
            elif token == "^":
                above.append(self.argument())
            else:
                below = self.argument()
        upper = above[0] if len(above) == 1 else element("mrow", *above)
        if below is not None and above:
            return element("munderover" if limits else "msubsup", base, below, upper)
        if below is not None:
            return element("munder" if limits else "msub", base, below)
        return element("mover" if limits else "msup", base, upper) if above else base

    def argument(self) -> Markup:
        """One group, or one atom; of a longer number only the first digit, as TeX reads it."""
        token = self.peek()
        if token[:1].isdigit() and len(token) > 1:
            self.tokens[self.position : self.position + 1] = [token[0], token[1:]]
        return self.atom()

    def group(self) -> Markup:
        self.expect("{")
        items = self.items("}")
        self.expect("}")
        return items[0] if len(items) == 1 else element("mrow", *items)

    def words(self) -> str:
        """The raw text of a group, spaces kept, or one letter."""
        if self.peek().isalpha():
            return self.take()
        self.expect("{")
        text = ""
        while self.position < len(self.tokens) and self.tokens[self.position] != "}":
            token = self.tokens[self.position]
            if token.startswith("\\") or token in "{$":
                raise UnknownLatexError(f"{token!r} inside text in {self.source!r}")
            text += token
            self.position += 1
        self.expect("}")
        return text

    def expect(self, token: str) -> None:
        if (found := self.take()) != token:
            raise UnknownLatexError(f"expected {token!r}, got {found!r} in {self.source!r}")

    def atom(self) -> Markup:
        if self.peek() == "{":
            return self.group()
        token = self.take()
        if token.startswith("\\"):
            return self.command(token[1:])
        if token[0].isdigit():
            return element("mn", token)
        if token.isalpha():
            return element("mi", token)
        if token in "()[]|":
            return element("mo", token, **_TIGHT)
        if token in "+-*/=<>,.:;!":
            return element("mo", "−" if token == "-" else token)
        raise UnknownLatexError(f"{token!r} in {self.source!r}")

    def command(self, name: str) -> Markup:
        for table, write in _SIMPLE:
            if name in table:
                return write(table[name])
        if name in _FUNCTIONS or name in _LIMITS:
            return self.function(name)
        if name in ("operatorname", "operatorname*"):
            return self.function(self.words())
        if name in _WORDS:
            text = self.words()
            return element("mi", text, mathvariant="normal") if len(text) == 1 else element("mtext", text)
        if name in _ACCENTS:
            return element("mover", self.argument(), element("mo", _ACCENTS[name], **_TIGHT), accent="true")
        if name in _ALPHABETS:
            return element("mi", "".join(_letter(_ALPHABETS[name], letter) for letter in self.words()))
        if name in ("frac", "tfrac", "dfrac"):
            return element("mfrac", self.argument(), self.argument())
        if name == "sqrt":
            return self.root()
        if name in _SIZES:
            return element("mo", self.delimiter())
        raise UnknownLatexError(f"\\{name} in {self.source!r}")

    def function(self, name: str) -> Markup:
        """A name in upright letters, and a thin space where its argument has no bracket."""
        upright = element("mi", name, mathvariant="normal")
        bracketed = self.peek() in ("", "(", "[", "}", ",", "\\left", "\\big", "\\Big", "\\bigl", "\\Bigl")
        return upright if bracketed else element("mrow", upright, element("mspace", width="0.167em"))

    def root(self) -> Markup:
        if self.peek() != "[":
            return element("msqrt", self.argument())
        self.take()
        degree = element("mrow", *self.items("]"))
        self.expect("]")
        return element("mroot", self.argument(), degree)

    def delimiter(self) -> str:
        token = self.take()
        known = _DELIMITERS.get(token[1:], "") if token.startswith("\\") else token
        if not known or (len(token) == 1 and token not in "()[]|/."):
            raise UnknownLatexError(f"{token!r} as a delimiter in {self.source!r}")
        return "" if token == "." else known


def _letter(alphabet: str, letter: str) -> str:
    """A letter of a mathematical alphabet; MathML in browsers knows these as characters, not as a style."""
    if not letter.isascii() or not letter.isalnum():
        raise UnknownLatexError(f"{letter!r} has no {alphabet.lower()} form")
    if letter.isdigit():
        return letter
    kind = f"{alphabet} {'CAPITAL' if letter.isupper() else 'SMALL'} {letter.upper()}"
    try:
        return unicodedata.lookup(f"MATHEMATICAL {kind}")
    except KeyError:  # some, such as the double-struck R, are older than the block of the others
        return unicodedata.lookup(kind)


_SIMPLE: tuple[tuple[dict[str, str], Callable[[str], Markup]], ...] = (
    (_LETTERS, lambda text: element("mi", text)),
    (_OPERATORS, lambda text: element("mo", text)),
    (_DELIMITERS, lambda text: element("mo", text, **_TIGHT)),
    (_BIG, lambda text: element("mo", text)),
    (_SPACES, lambda width: element("mspace", width=width)),
)
