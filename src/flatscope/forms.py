"""The form of a network on which a measure is defined: as given, written plainly, or without BatchNorm."""

from __future__ import annotations

from flatscope.context import Context
from flatscope.errors import InputError, NotApplicable
from flatscope.network.normal_form import only_rearranges
from flatscope.problem import Problem
from flatscope.registry import Declaration
from flatscope.symmetries.folding import fold_batchnorm, has_batchnorm


def context_in_declared_form(ctx: Context, entry: Declaration) -> Context:
    """The network in the form on which the measure is defined: as given, written plainly, or without BatchNorm."""
    plainly = entry.on_folded or bool(entry.needs & {"layers", "every_layer", "chain"})
    # Of all parameters together, in whatever order: the plain network serves as well, and shares its sweeps.
    if not plainly and entry.cost != "light" and "initial" not in entry.needs:
        plainly = only_rearranges(ctx.cached(plain_problem).model)
    if plainly:
        ctx = ctx.cached(plain_context)
    if entry.on_folded and has_batchnorm(ctx.problem.model):
        ctx = ctx.cached(folded_context)
    return ctx


def refuse_missing_needs(ctx: Context, entry: Declaration) -> None:
    """Refuse a measure that needs what this problem does not have."""
    problem = ctx.problem
    if "test" in entry.needs and problem.test is None:
        raise NotApplicable("needs test data; pass test=(x, y)")
    if "initial" in entry.needs and problem.initial is None:
        raise NotApplicable("needs the weights before training; pass initial= (on the command line --initial)")
    if "classes" in entry.needs and not problem.classification:
        raise NotApplicable(problem.no_classes)
    if "layers" in entry.needs and not ctx.network.layers:
        raise NotApplicable(ctx.network.missing)
    if "every_layer" in entry.needs and ctx.network.missing:
        raise NotApplicable(ctx.network.missing)
    if entry.needs & {"layers", "every_layer"} and not any(layer.weight in problem.trainable for layer in ctx.network):
        fix = "give some of them requires_grad=True, or freeze nothing"
        raise NotApplicable(f"no weight matrix is to be trained, all {len(ctx.network.layers)} are frozen; {fix}")
    if "chain" in entry.needs and not ctx.network.chain:
        raise NotApplicable("a product over layers has no meaning on a branching network")


def plain_problem(ctx: Context) -> Problem:
    """The same problem with every weight that acts as a parameter of its own."""
    return ctx.problem.plain


def plain_context(ctx: Context) -> Context:
    """The network as `plain_problem` writes it, at the same point."""
    plain = ctx.cached(plain_problem)
    if plain is ctx.problem:
        return ctx
    if any(ctx.params[name] is not value for name, value in ctx.problem.params.items()):
        raise NotApplicable("weights that are computed are read at the problem's own parameters only")
    return ctx.on(plain)


def folded_context(ctx: Context) -> Context:
    """The same function without BatchNorm, at the same point: norms and perturbations are measured there."""
    if any(ctx.params[name] is not value for name, value in ctx.problem.params.items()):
        raise NotApplicable("BatchNorm is folded at the problem's own weights only")
    try:
        folded = fold_batchnorm(ctx.problem.model, ctx.problem.example())
    except InputError as problem:
        raise NotApplicable(f"BatchNorm cannot be folded: {problem}") from problem
    return ctx.on(ctx.problem.with_model(folded))
