"""The same network written plainly: known operations, and every weight that acts a parameter of its own.

A weight may be a parameter as it is, a view of one (`x @ w`, a slice of a packed projection), or computed from several
(weight_norm, spectral_norm, a mask, a low-rank update). In the plain network each of them is a parameter that a
`linear`, a convolution or a lookup reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from flatscope.isolation import own_settings
from flatscope.network.interception import returned_tensors
from flatscope.network.liveness import dead_operations
from flatscope.network.normal_form_pass import ACTING, Key, WeightPlan, part_name, plan_of, set_plan
from flatscope.network.not_covered import NotCovered
from flatscope.network.parameter_uses import Use, UsesOfPasses, idle_parameters, is_matrix
from flatscope.network.pass_recording import record
from flatscope.network.program import Dead
from flatscope.params import Params, independent_module_copy, trainable_names
from flatscope.samples import Inputs, inputs_with_first_repeated

_NOT_COVERED, _SEARCHED = "_flatscope_not_covered", "_flatscope_searched"
# Names that parametrizations, weight_norm, spectral_norm and pruning give to what a weight is made of.
_MADE = re.compile(r"(?P<owner>.*?)(?:parametrizations\.(?P<new>\w+)\.original\d*|(?P<old>\w+?)_(?:g|v|orig))$")


def normal_form(
    model: nn.Module, examples: Iterable[Inputs], *, acting: bool = True, everything: bool = False
) -> nn.Module:
    """The same function in normal form: a new module in which nothing else has changed.

    Args:
        model: in eval mode; not touched.
        examples: batches to look at; more than the first are looked at only while a parameter has not been met.
        acting: whether weights that are views or computed become parameters of their own.
        everything: look at all examples, since they may use weights in other ways.
    """
    twin, examples = independent_module_copy(model), iter(examples)
    if is_rewritten(twin):  # a rescaled copy, say, of which everything is known
        return twin
    first = next(examples)
    if plan_of(twin) is None and not hasattr(model, _SEARCHED):
        outputs = returned_tensors  # also those beside the one that is measured
        passes = (
            record(twin, inputs, _leaves(twin)).dead(outputs) for inputs in (first, inputs_with_first_repeated(first))
        )
        leave_out_dead(twin, passes, first, outputs)
    frozen = not any(value.requires_grad for value in twin.parameters())  # then all of them count as trainable
    trainable = set(trainable_names(twin))
    for name, value in twin.named_parameters():
        value.requires_grad_(name in trainable)
    with own_settings():
        seen = _uses_of_passes(twin, chain([first], examples), trainable, everything)
    uses = _all_uses(twin, seen)
    made = _acting_weights(twin, uses) if acting else {}
    mark_not_covered(twin, _not_covered(twin, uses, made, trainable))
    if seen.changed or made or seen.constants:
        _give_parameters(twin, uses, made, seen.constants)
    if frozen:
        twin.requires_grad_(False)
    return twin


def _leaves(model: nn.Module) -> Params:
    """All parameters, on the graph."""
    return {name: value.detach().requires_grad_(value.is_floating_point()) for name, value in model.named_parameters()}


def _uses_of_passes(twin: nn.Module, examples: Iterator[Inputs], trainable: set[str], everything: bool) -> UsesOfPasses:
    """Uses of passes until every trainable parameter was met, or of all examples."""
    seen, sought = UsesOfPasses(), trainable - idle_parameters(twin)
    for number, example in enumerate(examples):
        _add_uses(twin, example, seen)
        # Where weights are made, one sample more shows whether their shapes hang on the number of samples.
        if number == 0 and any(use.key != ("whole", *use.params) for use in seen.batches[0].uses):
            _add_uses(twin, inputs_with_first_repeated(example), seen)
        if not everything and sought <= seen.met:
            break
    return seen


def _add_uses(twin: nn.Module, example: Inputs, seen: UsesOfPasses) -> None:
    uses = record(twin, example, dict(twin.named_parameters()), seen.constants).uses()
    if uses.rows and not seen.constants:
        seen.constants = True
        _add_uses(twin, example, seen)
    else:
        seen.batches.append(uses)


def not_covered_as_it_is(model: nn.Module, seen: UsesOfPasses, trainable: set[str]) -> NotCovered | None:
    """Trainable matrices that take part in no layer, of a network in normal form already; None where it may not be.

    Args:
        model: that was recorded.
        seen: its passes, of different numbers of samples.
        trainable: names of the parameters that may move.
    """
    keys = {use.key for batch in seen.batches for use in batch.uses}
    if any(key is not None and key[0] != "whole" for key in keys) or any(batch.rows for batch in seen.batches):
        return None
    return _not_covered(model, _all_uses(model, seen), {}, trainable) if trainable <= seen.met else None


def _all_uses(model: nn.Module, seen: UsesOfPasses) -> list[Use]:
    """The uses of all passes, and one for each parameter that reaches the outputs in a way that nobody saw."""
    uses = _in_one_way([batch.uses for batch in seen.batches])
    for name in sorted(seen.alive - {name for use in uses for name in use.params}):
        value = model.get_parameter(name)
        uses.append(Use(frozenset({name}), None, value, "an operation that cannot be followed", harmless=False))
    return uses


def _in_one_way(found: list[list[Use]]) -> list[Use]:
    """The uses of several batches; what is computed from parameters in another shape for each of them is no weight."""
    ways: dict[frozenset[str], set[Key]] = {}
    changing: set[frozenset[str]] = set()
    for uses in found:
        here: dict[frozenset[str], set[Key]] = {}
        for use in uses:
            if use.key is not None and use.key[0] == "made":
                here.setdefault(use.params, set()).add(use.key)
        for params, keys in here.items():
            if ways.setdefault(params, keys) != keys:
                changing.add(params)
    return [
        replace(use, key=None, harmless=False) if use.key and use.key[0] == "made" and use.params in changing else use
        for uses in found
        for use in uses
    ]


def leave_out_dead(
    model: nn.Module, passes: Iterable[Dead], example: Inputs, outputs: Callable[[Any], list[Tensor]]
) -> bool:
    """Hide from every rule what does not reach the outputs of a module that runs as it is; it is changed in place.

    One that runs by a plan already, as a rescaled copy may, keeps that: without it, it would be another function.

    Args:
        model: in eval mode.
        passes: what each of several passes needs; only the first is read where that needs everything.
        example: some samples.
        outputs: the tensors that count of what the model returns.
    """
    object.__setattr__(model, _SEARCHED, True)
    if plan_of(model) is not None:
        return False
    with own_settings():
        dead = dead_operations(passes, model, example, outputs)
    if dead is not None:
        set_plan(model, WeightPlan(dead=dead))
    return dead is not None


def run_in_normal_form(model: nn.Module) -> None:
    """Let a module's forward run in normal form, with the parameters that it has; it is changed in place."""
    set_plan(model, plan_of(model) or WeightPlan())


def mark_not_covered(model: nn.Module, found: NotCovered) -> None:
    """Note on a network in normal form already what takes part in no layer."""
    object.__setattr__(model, _NOT_COVERED, found)


def not_covered(model: nn.Module) -> NotCovered:
    """Trainable matrices of a network in normal form that take part in no layer."""
    found: NotCovered | None = getattr(model, _NOT_COVERED, None)
    return NotCovered() if found is None else found


def is_rewritten(model: nn.Module) -> bool:
    """True where the normal form has parameters that the network itself does not have."""
    plan: WeightPlan | None = plan_of(model)
    return plan is not None and bool(plan.acting or plan.constants)


def only_rearranges(model: nn.Module) -> bool:
    """True where the new parameters are the given ones in another order, each entry once.

    Then whatever does not depend on the order of parameters (traces, eigenvalues, norms) is the same on both.
    """
    plan: WeightPlan | None = plan_of(model)
    params = dict(model.named_parameters())
    if plan is None:
        return True
    counts: dict[str, int] = {}
    for key, name in plan.acting.items():
        if key[0] != "view":
            return False
        counts[key[1]] = counts.get(key[1], 0) + params[name].numel()  # views of one parameter do not overlap
    return all(count == params[name].numel() for name, count in counts.items())


def _give_parameters(twin: nn.Module, uses: list[Use], made: dict[str, tuple[Key, Tensor]], constants: bool) -> None:
    """Give the module its new parameters; what they are made of is a constant unless something else reads it."""
    masks, named = dict[str, str](), dict(twin.named_parameters())
    for name, (key, value) in made.items():
        alone = not any(set(key[1]) & use.params and use.key != key for use in uses)  # nothing else reads what it is of
        mask = fixed_mask(named[key[1][0]], value) if key[0] == "made" and len(key[1]) == 1 and alone else None
        parameter = nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad)
        twin.register_parameter(acting_name(name), parameter)
        if mask is not None and not mask.all():
            masks[acting_name(name)] = mask_name(acting_name(name))
            twin.register_buffer(masks[acting_name(name)], mask.to(value.dtype))
    keys = {key for key, _ in made.values()}
    absorbed = {name for use in uses if use.key in keys for name in use.params}
    kept = {name for use in uses if use.key not in keys for name in use.params}
    for name, value in twin.named_parameters():
        if name in absorbed - kept:
            value.requires_grad_(False)
    acting = {key: acting_name(name) for name, (key, _) in made.items()}
    plan = replace(plan_of(twin) or WeightPlan(), constants=constants)
    gone = plan.absorbed | absorbed - kept
    set_plan(twin, replace(plan, acting=plan.acting | acting, masks=plan.masks | masks, absorbed=frozenset(gone)))


def made_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Of the new parameters of a normal form those that are computed: {name: parameters of which they are}."""
    plan: WeightPlan | None = plan_of(model)
    acting = {} if plan is None else plan.acting
    made = {name: key[1] for key, name in acting.items() if key[0] == "made"}
    return {name: params for name, params in made.items() if plan is None or name not in plan.masks}


def acting_name(name: str) -> str:
    """Name of the new parameter for a weight or bias: at the root, since a container may run all of its modules."""
    return f"{ACTING}{name.replace('.', '/')}"


def _acting_weights(model: nn.Module, uses: list[Use]) -> dict[str, tuple[Key, Tensor]]:
    """{name: (key, value)} of the weights and biases that are not parameters as they stand."""
    found: dict[str, tuple[Key, Tensor]] = {}
    known: set[Key] = set()
    for use in uses:
        if use.key is None or use.key[0] == "whole" or use.key in known or not use.harmless:
            continue
        known.add(use.key)
        if _stands_alone(model, use, uses):
            name = _name(model, use, found)
            found[name] = use.key, use.value
    return found


def _stands_alone(model: nn.Module, use: Use, uses: list[Use]) -> bool:
    """True where a weight may become a parameter: what it is made of means the same in all of its uses."""
    assert use.key is not None
    same = [other for other in uses if other.key == use.key]
    if any(not torch.equal(other.value, use.value) for other in same):
        return False  # computed in several ways
    if use.key[0] == "made":  # of something that is no weight itself, whose row would lack this use
        return all(other.key is None or other.key[0] == "made" for other in uses if use.params & other.params)
    others = {other.key for other in uses if use.params & other.params} - {use.key}
    if any(key is None or key[0] != "view" for key in others):
        return False  # also read as a whole, or in another role
    whole = dict(model.named_parameters())[use.key[1]]
    places = torch.arange(whole.numel())
    read = [places.as_strided(key[3], key[4], key[2]).reshape(-1) for key in (use.key, *others) if key is not None]
    return int(torch.cat(read).bincount().max()) <= 1


def _name(model: nn.Module, use: Use, taken: dict[str, Any]) -> str:
    """Name for a derived weight: its base parameter, else the attribute it replaces, else all parameter names."""
    assert use.key is not None
    if use.key[0] == "view":
        candidate = part_name(use.key, model.get_parameter(use.key[1]))
    else:
        parts = [_MADE.match(name) for name in sorted(use.params)]
        attributes = {f"{m['owner']}{m['new'] or m['old']}" for m in parts if m is not None}
        full = None not in parts and len(attributes) == 1
        candidate = attributes.pop() if full else "+".join(sorted(use.params))
    name, number = candidate, 2
    while name in taken:
        name, number = f"{candidate}#{number}", number + 1
    return name


def _not_covered(
    model: nn.Module, uses: list[Use], made: dict[str, tuple[Key, Tensor]], trainable: set[str]
) -> NotCovered:
    """Matrices that some operation reads in a way that is not a layer, a shift or a scale."""
    acting = {key for key, _ in made.values()}
    found = NotCovered()
    for name, value in model.named_parameters():
        if name not in trainable or not is_matrix(value):
            continue
        own = [use for use in uses if name in use.params]
        for use in own:
            several = use.key is not None and use.key[0] == "made" and use.key not in acting
            if not use.harmless or several:
                found.note(name, f"read by {use.place}" + (", computed in several ways" if several else ""))
    return found


# Fixed masks of weights: zeros and ones that a network multiplies a parameter with before it multiplies a signal ----


def fixed_mask(parameter: Tensor, value: Tensor) -> Tensor | None:
    """Zeros and ones that a weight is the product of a parameter with; None where it is made in another way.

    Args:
        parameter: the only one that the weight is computed from.
        value: the weight, on the autograd graph, in the parameter's layout or transposed.
    """
    if not value.requires_grad or not parameter.requires_grad or parameter.ndim < 2:
        return None
    drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(value)
    (slope,) = torch.autograd.grad(value, parameter, drawn, retain_graph=True, allow_unused=True)
    if slope is None:
        return None
    for slopes, whole in ((slope, parameter), (slope.transpose(-2, -1), parameter.transpose(-2, -1))):
        mask: Tensor = slopes != 0
        if mask.shape == value.shape and torch.equal(slopes, drawn * mask) and torch.equal(whole * mask, value):
            return mask
    return None


def mask_name(weight: str) -> str:
    """Name of the buffer with the mask of a new parameter, if it has one."""
    return f"{weight}:mask"


def masks_of(model: nn.Module) -> dict[str, Tensor]:
    """The fixed masks of a normal form's weights, by the names of their buffers."""
    plan, buffers = plan_of(model), dict(model.named_buffers())
    return {} if plan is None else {name: buffers[name] for name in plan.masks.values()}
