"""How a measure or a bound is declared, and the one list of all of them.

A measure is a plain function of a context. The decorator above it says what it is; the listing, the
documentation and the contract tests read that declaration, so nothing is typed twice. The list is complete
whatever was imported before: asking for it imports our own families.
"""

from __future__ import annotations

import ast
import fnmatch
import importlib
import inspect
import numbers
import re
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from torch import Tensor

from flatscope.definitions import Definition, own_definition
from flatscope.errors import InputError, UnknownNameError, refuse_unknown

# Packages whose import declares our measures and bounds. They stand on this file, so that only their names are here.
OWN_FAMILIES = ("flatscope.measures", "flatscope.generalization_bounds")
SYMMETRIES = {  # in a word, and in some
    "layer_scaling": ("layer", "one layer times c, the next divided by c"),
    "unit_scaling": ("unit", "one unit's incoming weights times c, its outgoing ones divided by c"),
    "permutation": ("permutation", "units of a layer in another order"),
    "batchnorm_scaling": ("BatchNorm", "scale and shift of a BatchNorm times c, the next layer divided by c"),
    "attention_scaling": ("attention", "queries times c, keys divided by c, for each dimension of a head"),
    "norm_scaling": (
        "norm",
        "scale and shift of a LayerNorm, RMSNorm or GroupNorm times c, the next layer divided by c",
    ),
    "output_scaling": ("output", "all outputs times c, margins scaling along"),
}
FUNCTION_SYMMETRIES = frozenset(SYMMETRIES) - {"output_scaling"}  # what leaves the outputs as they are
# Of coordinates and sums of paths, which end at attention and at normalisations.
PATH_SYMMETRIES = FUNCTION_SYMMETRIES - {"attention_scaling", "norm_scaling"}
LAYER_SYMMETRIES = frozenset({"layer_scaling", "permutation"})  # of what treats each layer as a whole
LEVELS = ("network", "layer", "unit", "sample")
DIRECTIONS = ("lower", "higher", "none")
NEEDS = {
    "test": "test data",
    "initial": "the weights before training (`initial=`)",
    "classes": "class labels",
    "layers": "layers that can be read off the network",
    "every_layer": "that every trainable matrix is a recognised layer",
    "chain": "a chain of layers without branches",
}
COSTS = {
    "light": "at most one pass over the data",
    "sweep": "a sweep: some passes over the data, shared with others of this cost",
    "long": 'long: a search or many draws; run only when asked for by name or with `"all"`',
}
# What is measured where nobody names anything: is it a minimum, how flat as people usually say it, how flat by what no
# rescaling changes, and the norms and margins that predict generalization best on the benchmark.
CORE = (
    "gradient_norm",
    "hessian_trace",
    "hessian_max_eigenvalue",
    "kappa_trace_sum",
    "rho_sum",
    "fisher_rao_norm",
    "l2_path_norm",
    "margin",
    "parameter_count",
)
# Values of layers and samples that the sweeps of the core set give besides: what the pictures of a report show.
PICTURED = ("layer_trace", "kappa_trace", "rho_layer_sum", "functional_margin")
SEARCHES = {
    "": "",
    "lower": "a lower bound of the maximum, which a search found",
    "upper": "an upper bound of the minimum, which a search found",
}
PAPERS: Mapping[str, str] = MappingProxyType(
    {
        "yi2019": "Yi et al. 2019",
        "petzka2019": "Petzka et al. 2019",
        "neyshabur2017": "Neyshabur et al. 2017",
        "zhang2017": "Zhang et al. 2017",
        "flatscope": "beyond the papers",
    }
)


# Families that people write otherwise than their files are called.
FAMILY_NAMES = {"psi flatness": "PSI flatness", "pac bayes": "PAC-Bayes", "adaptive": "adaptive flatness", "psi": "PSI"}


@dataclass(frozen=True)
class Value:
    """Result of a measure where a bare number does not say enough.

    `value` is a float, or a 1-D tensor for one value per unit or sample (then `low`, `high`, `stderr` and
    `data_stderr` may be tensors as well).

    Attributes:
        stderr: standard error of the estimator; 0 where the value is exact.
        data_stderr: standard error that comes from the samples being a draw; None where not known.
        low: lower end of an interval, or a certified lower bound.
        high: upper end.
        exact: None takes the declaration's word.
        options: what distinguishes this row (one alpha of several).
        reason: a remark, or why there is no value.
    """

    value: float | Tensor
    stderr: float | Tensor = 0.0
    data_stderr: float | Tensor | None = None
    low: float | Tensor | None = None
    high: float | Tensor | None = None
    exact: bool | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


F = TypeVar("F", bound=Callable[..., Any])
Result = float | Tensor | Value | dict[str, "float | Tensor | Value"] | list[Value]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Properties of a measure or bound that are known before it is computed."""

    symbol: str  # LaTeX
    # a key of `PAPERS` ("flatscope" for what is ours), a citation in words ("Keskar et al. 2017"), or None
    paper: str | None
    equation: str  # equation, definition or table in that paper
    per: str = "network"  # "network", "layer", "unit" or "sample"
    # "lower" if lower values are expected to go with better generalization, "higher", or "none"
    direction: str = "none"
    invariant_under: Set[str] = frozenset()  # symmetries of the function that leave the value unchanged
    needs: Set[str] = frozenset()  # words of `NEEDS`
    cost: str = "light"  # a word of `COSTS`; "long" ones are left out unless asked for
    # the most passes over the data, by kind, with default options; None if it depends on the data
    passes: Mapping[str, float] | None = None
    # what it usually takes, where that is not `passes`, for plans: passes by kind, or a "sweep" of all columns and the
    # "gradient", which measures share, a "column" pass of each output that is its own and may be drawn, one of each
    # "output" where none is, or a forward pass of one "sample" where their number does not grow with the data
    typical: Mapping[str, float] | None = None
    exact: bool = True  # whether the value has no estimator error
    on_folded: bool = False  # whether BatchNorm is folded into the layers first
    conventions: str = ""  # what the paper leaves open and how it is read here
    assumptions: tuple[str, ...] = ()  # of a bound: what has to hold, each with a word on whether it was checked
    # "lower" if the value is a lower bound of a maximum that a search found, "upper" for an upper bound of a minimum;
    # empty where nothing is searched. A search may end elsewhere when roundings or starts differ
    search: str = ""
    # whether low and high enclose what the search looks for, so that two searches may differ by as much
    bracketed: bool = False
    # a few words on what it is, if it is one of the handful of measures to look at first; else empty
    caption: str = ""
    # whether it is a derivative or a rise of the training loss. That of cross-entropy vanishes with the loss near
    # interpolation, so that networks with very different losses cannot be compared by it
    falls_with_loss: bool = False
    # whether it depends on the outputs as a function of the inputs alone, so that networks of different architectures
    # can be compared by it
    function_only: bool = False
    # what its symbols stand for, what large and small values say, when not to trust it; ours have theirs in files
    definition: Definition | None = None


@dataclass(frozen=True, kw_only=True)
class Declaration(Facts):
    """A measure or bound: its function with the facts that were declared above it."""

    name: str
    function: Callable[..., Any]
    kind: str

    @property
    def citation(self) -> str:
        """The paper as people cite it; empty where none was named."""
        return PAPERS.get(self.paper or "", self.paper or "")

    @property
    def summary(self) -> str:
        """First line of the function's docstring."""
        return (inspect.getdoc(self.function) or "").split("\n")[0]

    @property
    def family(self) -> str:
        """The file it lives in, as words."""
        return self.function.__module__.rpartition(".")[2].replace("_", " ")

    @property
    def options(self) -> dict[str, Any]:
        """Keyword options and their defaults, read from the signature."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}

    @property
    def source(self) -> str:
        """File and line of the function."""
        return f"{self.function.__module__}:{self.function.__code__.co_firstlineno}"

    def checked_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The given options, after refusing names the function does not know and values of another kind."""
        if not isinstance(given, Mapping):
            raise InputError("a dictionary of options", repr(given), where=f"options of {self.name}")
        parameters = inspect.signature(self.function).parameters
        for name, value in given.items():
            refuse_unknown(name, self.options, f"option of {self.name}")
            if (choices := _choices(self.function, parameters[name].annotation)) and value not in choices:
                raise UnknownNameError.among(str(value), choices, f"{name} of {self.name}")
            takes_fractions = parameters[name].annotation in ("float", float)
            wanted = "a number" if takes_fractions else _kind(parameters[name].default)
            if wanted and _kind(value) not in (wanted, "a whole number" if wanted == "a number" else wanted):
                raise InputError(wanted, repr(value), where=f"{self.name}, {name}")
        # Lists become tuples: what is computed is kept by its options, and a list cannot be a key.
        return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def _choices(function: Callable[..., Any], annotation: Any) -> tuple[str, ...]:
    """The words that an option of the type `Literal["one", "other"]` may be; empty for other options."""
    named = getattr(function, "__globals__", {}).get(annotation, annotation)  # a type of that module, by its name
    match = re.fullmatch(r"(?:typing\.)?Literal\[(.*)\]", str(named), re.DOTALL)
    return tuple(ast.literal_eval(f"({match[1]},)")) if match else ()


def _kind(value: Any) -> str:
    """Kind of an option's value in words; empty where any may be meant."""
    if isinstance(value, bool):
        return "True or False"
    if isinstance(value, numbers.Integral):
        return "a whole number"
    if isinstance(value, numbers.Real):
        return "a number"
    return "a word" if isinstance(value, str) else ""


def family_name(family: str) -> str:
    """A family as people write it."""
    return FAMILY_NAMES.get(family, family)


_REGISTRY: dict[str, Declaration] = {}


class measure(Facts):  # noqa: N801  it is read as a decorator
    """Declare a measure: a function of (ctx, *, options) giving a Result."""

    def __call__(self, function: F) -> F:
        """Register the function with these facts."""
        return _add(self, function, "measure")


class bound(Facts):  # noqa: N801
    """Declare a bound: a function of (ctx, *, delta, options) giving a Value; `assumptions` are listed beside it."""

    def __call__(self, function: F) -> F:
        """Register the function with these facts."""
        return _add(self, function, "bound")


def _add(facts: Facts, function: F, kind: str) -> F:
    name = function.__name__
    known_facts = vars(facts) | {"definition": own_definition(name) or facts.definition}
    declaration = Declaration(name=name, function=function, kind=kind, **known_facts)
    _check(declaration)
    if not declaration.function.__module__.startswith(OWN_FAMILIES):
        _load_own_families()  # a name of ours is refused to others, whoever comes first
    known = _REGISTRY.get(declaration.name)
    if known is not None and known.source != declaration.source:
        got = f"{declaration.name}, declared at {known.source}"
        raise InputError("a name that is not taken", got, declaration.source, "Rename the new function")
    _REGISTRY[declaration.name] = declaration
    return function


def declared(function: Callable[..., Any]) -> Declaration:
    """The declaration of a function that was declared already."""
    return _REGISTRY[function.__name__]


Option = tuple[Any, Any, str]  # default, type, and what the docstring says


def _check(declaration: Declaration) -> None:
    """A declaration uses only words that the rest of the package knows."""
    vocabulary = (
        ("per", {declaration.per}, LEVELS),
        ("direction", {declaration.direction}, DIRECTIONS),
        ("invariant_under", declaration.invariant_under, SYMMETRIES),
        ("needs", declaration.needs, NEEDS),
        ("cost", {declaration.cost}, COSTS),
        ("search", {declaration.search}, SEARCHES),
        ("paper", _paper_keys(declaration.paper), PAPERS),
    )
    for name, used, known in vocabulary:
        for word in used:
            refuse_unknown(word, known, f"{name} of {declaration.name}")
    if not declaration.summary:
        raise InputError("a docstring", "none", where=declaration.source, fix="Say in one line what is measured")


def _paper_keys(paper: str | None) -> set[str]:
    """The paper, where it is one word: citations have several, so that a misspelt key is not taken for one."""
    return {paper} if paper is not None and len(paper.split()) < 2 else set()


def _load_own_families() -> None:
    for package in OWN_FAMILIES:
        importlib.import_module(package)  # at once where it is loaded


def declarations(kind: str = "measure") -> dict[str, Declaration]:
    """All measures (or bounds) by name, ours included, in the order in which they were declared."""
    _load_own_families()
    return {name: entry for name, entry in _REGISTRY.items() if entry.kind == kind}


def select(names: str | Iterable[str] | None, kind: str = "measure") -> list[Declaration]:
    """Declarations for names and globs; None: the core set; "standard": all but the long ones; "all": every one.

    Of bounds there is no core set: None is "standard".
    """
    known = declarations(kind)
    if names is None:
        names = CORE if kind == "measure" else "standard"
    if not isinstance(names, Iterable):
        raise InputError(f"names of {kind}s", repr(names), where="names")
    chosen: dict[str, Declaration] = {}
    for pattern in [names] if isinstance(names, str) else names:
        if not isinstance(pattern, str):
            raise InputError(f"names of {kind}s", type(pattern).__name__, where="names")
        matches = [name for name, entry in known.items() if _matches(pattern, entry)]
        if not matches:
            unknown = unknown_name(pattern, known, kind)
            if kind == "measure" and fnmatch.filter(declarations("bound"), pattern):
                unknown.fix = (
                    f"{pattern} is a bound: fs.bounds(problem, {pattern!r}), flatscope measure --bound {pattern}"
                )
            raise unknown
        chosen.update({name: known[name] for name in matches})
    return list(chosen.values())


def unknown_name(name: str, known: Mapping[str, Declaration], kind: str) -> UnknownNameError:
    """Error for the name of a measure or bound that is not known: what an option gives it, or the nearest names."""
    error = UnknownNameError.among(name, known, kind)
    error.fix = _as_option(name, known) or error.fix
    return error


def _as_option(name: str, known: Mapping[str, Declaration]) -> str:
    """Measure with an option in place of an unknown name that ends in a word of that option, and how to ask for it."""
    options, fix = list[str](), ""
    for entry in known.values():
        for option, parameter in inspect.signature(entry.function).parameters.items():
            for word in _choices(entry.function, parameter.annotation):
                whole = f"{entry.name}_{word}"
                if name == whole or (option == "form" and whole.endswith(f"_{name}")):
                    options.append(f"{entry.name} with {option}={word!r}")
                    fix = f"options={{{entry.name!r}: {{{option!r}: {word!r}}}}}, --option {entry.name}.{option}={word}"
    return f"It is {' or '.join(options)}: {fix}" if options else ""


def _matches(pattern: str, entry: Declaration) -> bool:
    if pattern == "standard":
        return entry.cost != "long"
    return pattern == "all" or fnmatch.fnmatchcase(entry.name, pattern)
