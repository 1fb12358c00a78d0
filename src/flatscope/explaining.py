"""Explain how a network is read: layers, units, the way of every parameter's curvature, and what it will cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pandas as pd

from flatscope.charts import Bars
from flatscope.context import Context, make_effort
from flatscope.curvature.route import Route, Way, route_of, trace_route
from flatscope.errors import FlatscopeError, InputError
from flatscope.formatting import first_of_names, numbered
from flatscope.forms import plain_context
from flatscope.isolation import own_settings
from flatscope.measuring import plan_of_measures
from flatscope.network.layers import Layer
from flatscope.network.linearity import choice_in
from flatscope.network.normal_form import made_of
from flatscope.network.not_covered import NotCovered
from flatscope.network.program import Program
from flatscope.network.tracing import trace
from flatscope.network.units import Graph, GraphLayer
from flatscope.planning import wants_only_whole_trace
from flatscope.problem import Problem
from flatscope.reading import graph_of_problem
from flatscope.registry import select
from flatscope.result import Result, checked_columns, plain
from flatscope.symmetries.folding import fold_batchnorm, has_batchnorm

COLUMNS = {
    "parameter": "str",
    "shape": "str",
    "layer": "str",
    "role": "str",
    "uses": "int64",
    "units": "int64",
    "rescalable": "int64",
    "not_rescaled": "str",
    "way": "str",
    "passes": "float64",
    "reason": "str",
}
NO_UNITS = -1  # of parameters that no units belong to
FROZEN, DROPPED = "not trained", "reaches no output"
SHOWN = 4  # names that are listed before the others are counted


class Explanation(Result):
    """Structure of a network as it was read, one row for each parameter.

    Args:
        frame: with the columns of `to_frame`.
        meta: what holds for the network as a whole.

    Example:
        >>> import torch, flatscope as fs
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> found = fs.explain(fs.Problem(net, train=(torch.eye(3), torch.tensor([0, 1, 0]))))
        >>> found.to_frame()[["parameter", "rescalable", "way"]].to_numpy().tolist()[:2]
        [['0.weight', 4, 'exact columns'], ['0.bias', 4, 'exact columns']]
    """

    WORD = "explanation"
    COLUMNS = COLUMNS

    def __init__(self, frame: pd.DataFrame, meta: Mapping[str, Any] | None = None) -> None:
        self._frame = checked_columns(frame, COLUMNS, self.WORD)
        self.meta: dict[str, Any] = plain(meta or {})

    def to_frame(self) -> pd.DataFrame:
        """One row per parameter.

        `role` is what it is in its layer, `uses` how often a forward pass uses it there, `units` the output units of
        the layer and `rescalable` how many of them can be rescaled without changing the function (-1 where there are
        none), `not_rescaled` what holds the others. `way` is how its curvature is found, `passes` what that is expected
        to cost in forward passes over the training data, `reason` why it is this way.
        """
        return self._frame.copy()

    def chart(self) -> Bars:
        """Expected cost of the curvature of each parameter."""
        rows = self._frame[self._frame["passes"] > 0]
        return Bars(
            rows["parameter"].tolist(), {"passes": rows["passes"].tolist()}, axis="forward passes over the data"
        )

    def headline_lines(self) -> list[str]:
        """Layers and units that were recognised, the ways of curvature, what is left out, and the cost."""
        meta = self.meta
        lines = [meta["layers"], meta["units"], self._ways_in_words()]
        if meta["not_covered"]:
            named = NotCovered(meta["not_covered"]).in_words(SHOWN)
            lines.append(f"Sums over layers are refused: no recognised layer has {named}.")
        return [*lines, meta["plan"]]

    def _ways_in_words(self) -> str:
        trained = self._frame[~self._frame["way"].isin((FROZEN, DROPPED))]
        counts = [
            f"of {numbered(len(rows), 'parameter tensor')} by {way}" for way, rows in trained.groupby("way", sort=False)
        ]
        return f"Curvature {', '.join(counts)}." if counts else "No parameter that is trained reaches the outputs."

    def summary(self) -> str:
        """The headline, then what each way rests on, the units that are tied, and what is dropped."""
        return "\n".join([self.headline, "", *self.details()])

    def details(self) -> list[str]:
        """Lines on several parameters at once: reasons of ways, held units, ties, computed weights, choices."""
        meta, lines = self.meta, []
        grouped: dict[Any, Any] = self._frame.groupby(["way", "reason"], sort=False)["parameter"].agg(list).to_dict()
        for (way, reason), names in grouped.items():
            why = f" ({reason})" if reason else ""
            lines.append(f"{way}{why}: {first_of_names(names, SHOWN)}")
        held = self._frame[self._frame["not_rescaled"] != ""]
        for reason, rows in held.groupby("not_rescaled", sort=False):
            lines.append(f"not rescaled, {reason!s}: {first_of_names(list(rows['parameter']), SHOWN)}")
        lines += [f"tied to one scale: {what}, {times} times" for what, times in meta["ties"].items()]
        lines += [f"{name} is computed from {first_of_names(parts, SHOWN)}" for name, parts in meta["made"].items()]
        if meta["choice"]:
            lines.append(f"values of samples decide what is computed, at {meta['choice']}: all samples are read")
        return lines

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """A row for each parameter, as short as it can be."""
        rows = []
        for row in self._frame.to_dict("records"):
            units = "" if row["units"] == NO_UNITS else f"{row['rescalable']} of {row['units']}"
            cost = "" if row["way"] in (FROZEN, DROPPED) else f"{row['passes']:,.0f}"
            rows.append([row["parameter"], row["shape"], row["role"], units, row["way"], cost, row["reason"]])
        return ["parameter", "shape", "role", "units that rescale", "curvature by", "passes", "because"], rows


def explain(
    problem: Problem,
    names: str | Iterable[str] | None = None,
    precision: float = 0.02,
    *,
    curvature: str = "hessian",
) -> Explanation:
    """Explain how a network is read and how its measures would be computed, before anything is.

    Args:
        problem: the network with its data.
        names: measures to plan, as in `measure`; the core set by default.
        precision: relative standard error at which estimates stop; 0 for exact values.
        curvature: "hessian" or "gauss_newton".

    Example:
        >>> import torch, flatscope as fs
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> problem = fs.Problem(net, train=(torch.eye(3), torch.tensor([0, 1, 0])))
        >>> fs.explain(problem).headline.splitlines()[1]
        'All 4 hidden units can be rescaled without changing the function.'
    """
    if not isinstance(problem, Problem):
        raise InputError("a Problem", type(problem).__name__, where="explain", fix="Make one: Problem(model, train=…)")
    names = names if names is None or isinstance(names, str) else list(names)
    given = Context(problem, effort=make_effort(precision=precision, curvature=curvature))
    with own_settings(problem.generators):
        context = plain_context(given)
        chosen = {entry.name: entry for entry in select(names)}
        alone = "hessian_trace" in chosen and wants_only_whole_trace(chosen.values())
        route, graph = trace_route(context) if alone else route_of(context), _graph_of_units(context.problem)
        program = context.structure.program
        frame = pd.DataFrame(_parameter_rows(context, route, graph), columns=list(COLUMNS))
        meta = _explanation_meta(context, graph, program)
    meta["plan"] = f"Measuring it: {replace(plan_of_measures(given, names), sweep=route.passes)}."
    return Explanation(frame, meta)


def _graph_of_units(problem: Problem) -> Graph:
    """The network's units, without BatchNorm where that can be folded away."""
    if has_batchnorm(problem.model):
        with suppress(FlatscopeError):  # where it cannot be, its channels stay fixed, and the walls say so
            example = problem.example()
            return trace(fold_batchnorm(problem.model, example), example)
    return graph_of_problem(problem)


def _parameter_rows(context: Context, route: Route, graph: Graph) -> list[dict[str, Any]]:
    layers = {layer.weight: layer for layer in context.network}
    biases = {layer.bias: layer for layer in layers.values() if layer.bias is not None}
    units = {layer.weight: layer for layer in graph}
    program = context.structure.program
    normalised = {name: use.kind for use in program.layer_uses() for name in (use.weight, use.bias) if name}
    ways = {name: way for name, way in route.ways.items() if name in _parameters_read(program)}
    shown = [name for name in context.params if name in context.problem.trainable or name in {*layers, *biases}]
    return [
        _parameter_row(
            context, name, layers.get(name), biases.get(name), units, normalised.get(name, ""), ways.get(name)
        )
        for name in shown
    ]


def _parameter_row(
    context: Context,
    name: str,
    weight_of: Layer | None,
    bias_of: Layer | None,
    units: Mapping[str, GraphLayer],
    kind: str,
    way: Way | None,
) -> dict[str, Any]:
    layer = weight_of or bias_of
    traced = units.get(layer.weight) if layer is not None else None
    frozen = name not in context.problem.trainable
    return {
        "parameter": name,
        "shape": "×".join(map(str, context.params[name].shape)) or "1",
        "layer": layer.name if layer is not None else "",
        "role": _role_of_parameter(weight_of, bias_of, kind),
        "uses": layer.uses if layer is not None else 1,
        "units": len(traced.outputs) if traced is not None else NO_UNITS,
        "rescalable": traced.n_free if traced is not None else NO_UNITS,
        "not_rescaled": ", ".join(traced.walls) if traced is not None else "",
        "way": FROZEN if frozen else DROPPED if way is None else way.kind,
        "passes": 0.0 if frozen or way is None else way.passes,
        "reason": "" if frozen or way is None else way.reason,
    }


def _role_of_parameter(weight_of: Layer | None, bias_of: Layer | None, kind: str) -> str:
    names = {"conv": "a convolution", "transposed": "a transposed convolution", "lookup": "a lookup"}
    if weight_of is not None:
        return f"weight of {names.get(weight_of.kind, 'a dense layer')}"
    if bias_of is not None:
        return f"bias of {names.get(bias_of.kind, 'a dense layer')}"
    return "scale or shift of a BatchNorm" if kind == "batchnorm" else "a shift, a scale or another vector"


def _explanation_meta(context: Context, graph: Graph, program: Program) -> dict[str, Any]:
    network, problem = context.network, context.problem
    form = "one after the other" if network.chain else "with branches"
    hidden = (
        _rescalable_units_in_words(graph)
        or f"all {graph.n_units} hidden units can be rescaled without changing the function"
    )
    return {
        "layers": f"{numbered(len(network.layers), 'layer')} {form}, {numbered(len(program.steps), 'operation')}.",
        "units": f"{hidden[0].upper()}{hidden[1:]}.",
        "not_covered": dict(network.not_covered),
        "ties": dict(graph.ties),
        "made": {name: list(parts) for name, parts in made_of(problem.model).items()},
        "choice": choice_in(program) if problem.samples_decide else "",
    }


def _rescalable_units_in_words(graph: Graph) -> str:
    """Number of hidden units that can be rescaled, and the first things that stop the others; empty if nothing does."""
    hidden = [layer for layer in graph if layer.hidden]
    walls = list(dict.fromkeys([wall for layer in hidden for wall in layer.walls] + [*graph.not_covered.values()]))
    free = sum(layer.n_free for layer in hidden)
    return (
        f"{free} of {graph.n_units} hidden units can be rescaled; stopped by {first_of_names(walls, 3)}"
        if walls
        else ""
    )


def _parameters_read(program: Program) -> set[str]:
    """Names of the parameters that some recorded step reads."""
    owners = {memory: name for name, memory in program.parameters.items()}
    return {owners[slot.memory] for step in program.steps for slot in step.reads if slot.memory in owners}
