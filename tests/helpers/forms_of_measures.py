"""Measures with the option that makes another number of them: these keep a contract of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import flatscope as fs
from flatscope.registry import Declaration, declarations


@dataclass(frozen=True, kw_only=True)
class Form(Declaration):
    """A measure with options; its twin has a name of its own."""

    given: Mapping[str, Any]
    twin: str


def form(name: str, word: str, twin: str = "", **facts: Any) -> Form:
    """The measure with `form=word`, and the facts that are not those of the measure itself."""
    entry = declarations()[name]
    known = {each.name: getattr(entry, each.name) for each in fields(Declaration)}
    return Form(**known | {"per": "network"} | facts, given={"form": word}, twin=twin or f"{name}_{word}")


def over_margin(name: str, word: str) -> Form:
    entry = declarations()[name]
    needs = {"classes", "chain"} if word == "capacity" or "path" not in name else {"classes"}
    kept = {*entry.invariant_under, "output_scaling"}
    return form(name, word, needs=needs, invariant_under=kept, passes={"forward": 1})


NORMS = ("l2_norm", "spectral_norm", "l1_inf_norm", "group_norm", "l1_path_norm", "l2_path_norm")
FORMS = [
    *(over_margin(name, word) for name in NORMS for word in ("over_margin", "capacity")),
    form("spectral_norm", "lipschitz_l2", "lipschitz_l2", passes=None),
    form("parameter_count", "vc_dimension", "vc_dimension"),
    form("kappa", "max"),
    form("kappa", "sum"),
    form("kappa_trace", "max"),
    form("rho", "max"),
]
BY_NAME = {each.twin: each for each in FORMS}


def table_of(problem: fs.Problem, name: str, context: fs.Context | None = None, **options: Any) -> fs.Table:
    """The table of one measure, or of one form by the name of its twin."""
    form = BY_NAME.get(name)
    measure, given = (name, {}) if form is None else (form.name, dict(form.given))
    return fs.measure(problem, measure, options={measure: given | options}, context=context)


def value_of(problem: fs.Problem, name: str, context: fs.Context | None = None, **options: Any) -> float:
    """The value of the network."""
    table = table_of(problem, name, context, **options)
    return float(table[table.names[0]])


def values_of(problem: fs.Problem, *names: str) -> dict[str, float]:
    """The values of the network."""
    return {name: value_of(problem, name) for name in names}
