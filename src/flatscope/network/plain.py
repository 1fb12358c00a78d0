"""The same network written plainly: known operations, and every weight that acts a parameter of its own.

A weight may be a parameter as it is, a view of one (`x @ w`, a slice of a packed projection), or computed from several
(weight_norm, spectral_norm, a mask, a low-rank update). In the plain network each of them is a parameter that a
`linear`, a convolution or a lookup reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from flatscope.guards import own_settings
from flatscope.network.expansions import EXPANSIONS
from flatscope.network.layers import ACTING
from flatscope.network.liveness import dead_operations
from flatscope.network.masks import fixed_mask, mask_name
from flatscope.network.operations import TABLE
from flatscope.network.planned import plan_of, set_plan
from flatscope.network.products import LAYER_CALLS, LOOKUPS, Product
from flatscope.network.watching import Operation, output_tensors, replay, returned_tensors
from flatscope.network.weights import Key, WeightPlan, Writer, part_name
from flatscope.params import copied, trainable_names
from flatscope.samples import Batch, Inputs, one_more, output_tensor, parts_of

_UNCOVERED, _SEARCHED = "_flatscope_uncovered", "_flatscope_searched"
# Names that parametrizations, weight_norm, spectral_norm and pruning give to what a weight is made of.
_MADE = re.compile(r"(?P<owner>.*?)(?:parametrizations\.(?P<new>\w+)\.original\d*|(?P<old>\w+?)_(?:g|v|orig))$")


@dataclass(frozen=True)
class Use:
    """One meeting of a tensor made of parameters with a signal."""

    params: frozenset[str]  # what the tensor is made of
    key: Key | None  # of the weight or bias, where it is one; None for any other meeting
    value: Tensor  # the weight or bias as the canonical call takes it
    place: str  # the operation and the module
    harmless: bool = True  # whether it is a shift, a scale or a constant, entry by entry


class Survey(Writer):
    """A Writer that notes how parameters meet signals, for the plan.

    A parameter with a copy for every sample (learned queries, say) is a signal as well: what multiplies it is a layer.

    Args:
        model: whose forward is about to run.
        uses: what is noted.
        n: number of samples.
        constants: whether what multiplies rows of constants is a layer.
    """

    def __init__(self, model: nn.Module, uses: list[Use], n: int, constants: bool) -> None:
        super().__init__(model, WeightPlan(constants=constants))
        self.uses, self.changed, self._n = uses, False, n
        self.rows = False  # whether a product with rows of constants meets a signal in another way than as a weight

    def follow(self, op: Operation) -> Any:
        """Run one operation, and note what it does with parameters."""
        weights = [tensor for tensor in op.tensors if self.weights.is_weight(tensor)]
        n_uses = len(self.uses)
        result = super().follow(op)
        self._note_copies(weights, result)
        written_out = op.name in EXPANSIONS and len(self.uses) > n_uses
        self.changed |= op.name in EXPANSIONS
        mixed = weights and any(self.weights.source(tensor) is None for tensor in op.tensors)
        if mixed and not written_out and len(self.uses) == n_uses:
            self._note_meeting(op, weights, result)
        return result

    def product(self, op: Operation, product: Product) -> Tensor:
        """Run it, and note weight and bias."""
        result = super().product(op, product)
        self.changed |= op.name not in LAYER_CALLS
        for value, origin in ((product.weight, product.origin), (product.bias, product.bias)):
            if value is None or origin is None or not self.weights.is_weight(origin):
                continue
            source = self.weights.source(origin)
            assert source is not None
            self.rows |= source.rows and op.name in LOOKUPS
            lost = value.requires_grad and not result.requires_grad
            if (copied := self.weights.source(product.signal)) is not None and copied.params:
                wide = [name for name in copied.params if _is_matrix(self.weights.named[name])]
                self.uses.append(Use(copied.params, None, product.signal, op.place, len(wide) <= 1))
            self.uses.append(Use(source.params, self.weights.key(value, origin), value, op.place, not lost))
        return result

    def _note_copies(self, weights: list[Tensor], result: Any) -> None:
        """Note whether a tensor of parameters has a copy for every sample."""
        if not weights or not self.weights.is_weight(result):
            return
        largest = max(tensor.numel() for tensor in weights)
        new = result.shape[:1] == (self._n,) and result.numel() == self._n * largest
        new &= all(tensor.ndim < result.ndim or tensor.shape[:1] != (self._n,) for tensor in weights)
        if new or any(self.weights.is_signal(tensor) for tensor in weights):
            self.weights.copies.add(id(result))

    def _note_meeting(self, op: Operation, weights: list[Tensor], result: Any) -> None:
        meaning = TABLE.get(op.name)
        sizes = [tensor.numel() for tensor in op.tensors if self.weights.source(tensor) is None]
        spread = isinstance(result, Tensor) and result.numel() > max(sizes)
        for weight in weights:
            source = self.weights.source(weight)
            assert source is not None
            self.rows |= source.rows
            wide = _is_matrix(weight)
            harmless = meaning is not None and meaning.takes_vectors and not (meaning.multiplies and spread and wide)
            harmless &= op.within != "cdist"  # a distance to every row of a matrix is no shift
            self.uses.append(Use(source.params, None, weight, op.place, harmless))


def _is_matrix(value: Tensor) -> bool:
    return sum(size > 1 for size in value.shape) > 1


@dataclass(frozen=True)
class Surveyed:
    """How parameters meet signals in one forward pass."""

    uses: list[Use]
    changed: bool  # whether anything is written in other words
    alive: set[str]  # parameters that gradients of the outputs reach
    rows: bool  # whether what multiplies rows of constants has to be a layer for parameters to be followed


def survey(model: nn.Module, example: Inputs, constants: bool = False) -> Surveyed:
    """Look at one forward pass; with `constants` what multiplies rows of constants is a layer."""
    uses: list[Use] = []
    found = Survey(model, uses, len(parts_of(example)[0]), constants)
    with torch.enable_grad():
        raw = replay(model, example, found.follow)
        outputs = [tensor for tensor in output_tensors(raw) if tensor.requires_grad]
        free = {name: value for name, value in model.named_parameters() if value.requires_grad}
        alive = _reached([output.sum() for output in outputs], free)
    # A product inside `no_grad` is a constant; one inside an operation that cannot be followed is not.
    uses = [use if use.harmless or use.params & alive else replace(use, harmless=True) for use in uses]
    return Surveyed(uses, found.changed, alive, found.rows)


def _reached(sums: list[Tensor], free: dict[str, nn.Parameter]) -> set[str]:
    """Names of the parameters that gradients of the outputs reach; all of them where torch cannot tell."""
    if not sums:
        return set()
    try:
        slopes = torch.autograd.grad(sums, list(free.values()), allow_unused=True, retain_graph=True)
    except Exception:  # written in place over what the gradient needs, or a backward pass of the user's that fails
        return set(free)
    return {name for name, slope in zip(free, slopes, strict=True) if slope is not None}


def plain(model: nn.Module, examples: Iterable[Inputs], *, acting: bool = True, everything: bool = False) -> nn.Module:
    """The same function in plain words: a new module in which nothing else has changed.

    Args:
        model: in eval mode; not touched.
        examples: batches to look at; more than the first are looked at only while a parameter has not been met.
        acting: whether weights that are views or computed become parameters of their own.
        everything: look at all examples, since they may use weights in other ways.
    """
    twin, examples = copied(model), iter(examples)
    first = next(examples)
    if plan_of(twin) is None and not hasattr(model, _SEARCHED):
        leave_out_dead(twin, [first, one_more(first)], returned_tensors)
    frozen = not any(value.requires_grad for value in twin.parameters())  # then all of them count as trainable
    trainable = set(trainable_names(twin))
    for name, value in twin.named_parameters():
        value.requires_grad_(name in trainable)
    found: list[list[Use]] = []
    changed, constants, reached, idle = False, False, set[str](), idle_parameters(twin)
    with own_settings():
        for example in chain([first], examples):
            for part in (example, one_more(example)) if not found else (example,):
                if part is not example and all(use.key == ("whole", *use.params) for use in found[0]):
                    break  # no weight is made: one sample more would show the same
                seen = survey(twin, part, constants)
                if seen.rows and not constants:
                    constants, seen = True, survey(twin, part, constants=True)
                found.append(seen.uses)
                changed, reached = changed | seen.changed, reached | seen.alive
            if not everything and trainable - idle <= {name for some in found for use in some for name in use.params}:
                break
    uses = _in_one_way(found)
    for name in sorted(reached - {name for use in uses for name in use.params}):
        value = twin.get_parameter(name)
        uses.append(Use(frozenset({name}), None, value, "an operation that cannot be followed", harmless=False))
    made = _acting_weights(twin, uses) if acting else {}
    mark_uncovered(twin, _uncovered(twin, uses, made, trainable))
    if changed or made or constants:
        _write_plainly(twin, uses, made, constants)
    if frozen:
        twin.requires_grad_(False)
    return twin


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


def write_out(model: nn.Module, example: Inputs, others: Iterable[Batch] | None = None) -> None:
    """Let a module's forward run in plain words, with the parameters that it has; it is changed in place.

    Args:
        model: in eval mode.
        example: a few samples, which show whether there is anything to write out.
        others: batches with all samples, where these may take another way: all is written out then.
    """
    examples = chain([example, one_more(example)], (inputs for inputs, _ in others or ()))
    leave_out_dead(model, examples, lambda raw: [output_tensor(raw)])
    with own_settings():
        changed = others is not None or survey(model, example).changed
    if changed:
        set_plan(model, plan_of(model) or WeightPlan())


def leave_out_dead(model: nn.Module, examples: Iterable[Inputs], outputs: Callable[[Any], list[Tensor]]) -> None:
    """Hide from every rule what does not reach the outputs of a module that runs as it is; it is changed in place."""
    with own_settings():
        dead = dead_operations(model, examples, outputs)
    object.__setattr__(model, _SEARCHED, True)
    if dead is not None:
        set_plan(model, WeightPlan(dead=dead))


def idle_parameters(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that are read, but do not reach the outputs."""
    plan = plan_of(model)
    return plan.dead.idle if plan is not None and plan.dead is not None else frozenset()


def mark_uncovered(model: nn.Module, found: dict[str, str]) -> None:
    """Note on a network that is plain already what takes part in no layer."""
    object.__setattr__(model, _UNCOVERED, found)


def uncovered(model: nn.Module) -> dict[str, str]:
    """Trainable matrices of a plain network that take part in no layer, with the operation that reads them."""
    found: dict[str, str] = getattr(model, _UNCOVERED, {})
    return found


def is_rewritten(model: nn.Module) -> bool:
    """Whether a plain network has other layers than the network that it was made of shows."""
    plan: WeightPlan | None = plan_of(model)
    return plan is not None and bool(plan.acting or plan.constants)


def only_rearranges(model: nn.Module) -> bool:
    """Whether the new parameters of a plain network are the given ones in another order, each entry once.

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


def _write_plainly(twin: nn.Module, uses: list[Use], made: dict[str, tuple[Key, Tensor]], constants: bool) -> None:
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
    set_plan(twin, replace(plan, acting=acting, masks=masks, absorbed=frozenset(absorbed - kept)))


def made_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Of the new parameters of a plain network those that are computed: {name: parameters of which they are}."""
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
    """Whether a weight may be a parameter of its own: all that it is made of says the same wherever it is used."""
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
    """That of the parameter and its part, of the weight that it makes, or of all that it is made of."""
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


def _uncovered(
    model: nn.Module, uses: list[Use], made: dict[str, tuple[Key, Tensor]], trainable: set[str]
) -> dict[str, str]:
    """Matrices that some operation reads in a way that is not a layer, a shift or a scale."""
    acting = {key for key, _ in made.values()}
    found: dict[str, str] = {}
    for name, value in model.named_parameters():
        if name not in trainable or not _is_matrix(value):
            continue
        own = [use for use in uses if name in use.params]
        for use in own:
            several = use.key is not None and use.key[0] == "made" and use.key not in acting
            if not use.harmless or several:
                found.setdefault(name, use.place if not several else f"{use.place}, computed in several ways")
    return found
