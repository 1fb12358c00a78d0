"""The one table of operations: what each of them does to scales, to derivatives, to paths and to distances.

An operation that is not listed is a wall, and curved: whatever enters it is fixed as far as scales go, and nothing is
known of its derivatives, its paths or how far it stretches. That is always safe, only less than could be said. A new
operation is one entry; `tests/test_operations.py` holds every entry to what the operation does.

`Linearity` reads off it for which parameters the Hessian block is exactly the Gauss-Newton block: where everything
between a parameter and the outputs is piecewise linear, and the parameter is used once, the second derivative of the
outputs with respect to it vanishes almost everywhere. A numerical probe checks that the network was read correctly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from flatscope.network import path_rules, scales, stretch_rules
from flatscope.network.products import LAYER_CALLS, NORM_ORDER
from flatscope.network.watching import Operation, is_in_place, tensors_in
from flatscope.params import Params

# What an operation is as a function of its tensors.
PIECES = "piecewise linear in all of them together"
PRODUCT = "linear in each of them"
RATIO = "linear in the first, which the second divides"
CURVED = "neither"
TO_PYTHON = ("item", "tolist", "numpy", "bool", "float", "int", "index", "complex", "is_nonzero", "contains")
LEAVES_TORCH = (*TO_PYTHON, "array", "equal", "allclose")


@dataclass(frozen=True)
class Meaning:
    """What is known of one operation."""

    scale: Callable[[scales.Step], Any] | None = None  # what it does to scales and units; None: a wall
    linear: str = CURVED  # what it is as a function of its tensors
    paths: path_rules.Rule | None = None  # what it does to sums over paths; None: there are none through it
    stretch: stretch_rules.Rule | None = None  # how far it can stretch; None: unknown, unless `slope` says it
    slope: float | None = None  # largest slope of a smooth function that is the same for every entry
    creates: bool = False  # whether it takes no more than shape and type from its tensors
    identity: bool = False  # whether it changes nothing but type, place or memory (dropout is off)
    moves: bool = False  # whether entries only change places, are repeated or dropped
    takes_vectors: bool = False  # whether a parameter may enter it as a shift, a scale or a constant
    multiplies: bool = False  # whether it multiplies entry by entry
    writes_safely: bool = False  # whether bounds survive when it writes in place


# Families ------------------------------------------------------------------------------------------------------------

MOVE = Meaning(scales.move, PIECES, path_rules.move, stretch_rules.move, moves=True, takes_vectors=True)
KEEP = Meaning(scales.keep, PIECES, path_rules.same, stretch_rules.entrywise, writes_safely=True)
SAME = replace(KEEP, identity=True)
CAST = replace(SAME, scale=scales.cast, paths=path_rules.cast, writes_safely=False)
LEAKY = replace(KEEP, paths=path_rules.leaky, stretch=stretch_rules.leaky)
BEND = Meaning(scales.bend)
CREATE = Meaning(scales.create, PIECES, creates=True)
LAYER = Meaning(None, PRODUCT, path_rules.layer, stretch_rules.layer)
POOL = Meaning(scales.pool, PIECES)
MAX_POOL = replace(POOL, paths=path_rules.max_pool, stretch=stretch_rules.max_pool)
AVERAGE_POOL = replace(POOL, paths=path_rules.average_pool, stretch=stretch_rules.linear_pool)
ADD = Meaning(scales.add, PIECES, path_rules.add, stretch_rules.add, takes_vectors=True, writes_safely=True)
EXTREME = Meaning(scales.add, PIECES, path_rules.maximum, stretch_rules.maximum, takes_vectors=True)
REDUCE = Meaning(scales.reduce, PIECES, path_rules.sum_paths, stretch_rules.sum_entries)
BOUND = Meaning(scales.one_sided, PIECES, path_rules.one_sided, stretch_rules.entrywise)
COMPARE = Meaning(scales.compare, PIECES)
MATRIX = Meaning(scales.matrix_product, PRODUCT, path_rules.matrix_product, stretch_rules.matrix_product)
MULTIPLY = Meaning(
    scales.multiply, PRODUCT, path_rules.scale, stretch_rules.scale, takes_vectors=True, multiplies=True,
    writes_safely=True,
)  # fmt: skip
NORMALISE = Meaning(takes_vectors=True)  # a wall with a scale and a shift of its own


def _each(names: str, meaning: Meaning) -> dict[str, Meaning]:
    return dict.fromkeys(names.split(), meaning)


# Smooth activations by their largest slope. That of gelu is 1.1289, at √2; a little more where it is approximated.
SLOPES = dict.fromkeys(("tanh", "softplus", "softsign", "log_sigmoid", "sin", "cos", "tanhshrink"), 1.0)
SLOPES |= {"sigmoid": 0.25, "gelu": 1.13, "silu": 1.1}
_DIMENSIONS = ("1d", "2d", "3d")

TABLE: dict[str, Meaning] = {
    **_each(
        """view reshape flatten unflatten ravel permute transpose t T mT H mH movedim moveaxis swapaxes swapdims squeeze
        unsqueeze expand expand_as repeat repeat_interleave tile broadcast_to broadcast_tensors cat stack hstack vstack
        dstack chunk split split_with_sizes tensor_split unbind select narrow getitem flip fliplr flipud roll rot90
        index_select pixel_shuffle pixel_unshuffle channel_shuffle tril triu diag_embed
        unfold view_as reshape_as hsplit vsplit atleast_1d atleast_2d atleast_3d copy""",
        MOVE,
    ),
    **_each("gather take_along_dim diagonal", replace(MOVE, scale=scales.choose)),
    **_each("detach data", replace(MOVE, paths=path_rules.same, stretch=stretch_rules.entrywise, identity=True)),
    **_each("setitem", replace(MOVE, scale=scales.set_item, paths=None, stretch=None)),
    **_each("pad", replace(MOVE, scale=scales.pad, paths=path_rules.pad_paths, moves=False)),
    **_each(
        "masked_fill",
        replace(
            MOVE, scale=scales.masked_fill, paths=path_rules.masked_fill, stretch=stretch_rules.entrywise, moves=False
        ),
    ),
    **_each("relu abs neg", KEEP),
    **_each("positive requires_grad alias", replace(SAME, writes_safely=False)),
    **_each("dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout", SAME),
    **_each("contiguous clone", replace(SAME, paths=path_rules.copied, writes_safely=False)),
    **_each("to float double half bfloat16 type type_as cpu cuda", CAST),
    **_each("leaky_relu rrelu", LEAKY),
    **_each("prelu", replace(LEAKY, scale=scales.prelu, linear=PRODUCT, takes_vectors=True, writes_safely=False)),
    **_each("clamp clamp_min clamp_max", replace(BOUND, writes_safely=True)),
    **_each("threshold", replace(BOUND, scale=scales.threshold, stretch=None)),
    **_each("relu6 hardtanh", replace(BEND, linear=PIECES, slope=1.0, writes_safely=True)),
    **_each("softshrink hardshrink", replace(BEND, linear=PIECES)),
    **{name: replace(BEND, slope=slope) for name, slope in SLOPES.items()},
    **_each("elu selu celu mish exp expm1 log log1p sqrt rsqrt square pow rpow rdiv reciprocal erf", BEND),
    **_each("sign", replace(BEND, linear=PIECES)),
    **_each("add sub", ADD),
    **_each("maximum minimum fmax fmin", EXTREME),
    **_each("where", replace(EXTREME, scale=scales.where, paths=None, stretch=None)),
    **_each("mul", MULTIPLY),
    **_each("div", replace(MULTIPLY, scale=scales.divide, linear=RATIO)),
    **_each("sum mean", REDUCE),
    **_each("amax amin max min", replace(REDUCE, paths=path_rules.maximum, stretch=stretch_rules.maximum)),
    **_each("gt lt ge le eq ne", COMPARE),
    **_each(
        """zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full
        new_tensor""",
        CREATE,
    ),
    **_each("zero fill", replace(CREATE, linear=PIECES)),
    **{
        f"{kind}max_pool{n}{end}": MAX_POOL
        for kind in ("", "adaptive_")
        for n in _DIMENSIONS
        for end in ("", "_with_indices")
    },
    **{f"{kind}avg_pool{n}": AVERAGE_POOL for kind in ("", "adaptive_") for n in _DIMENSIONS},
    **_each("interpolate", replace(POOL, paths=path_rules.interpolate, stretch=stretch_rules.linear_pool)),
    **_each("lp_pool1d lp_pool2d lp_pool3d", replace(POOL, linear=CURVED)),
    **_each("max_unpool1d max_unpool2d max_unpool3d", POOL),
    **_each("matmul", MATRIX),
    **dict.fromkeys(LAYER_CALLS, LAYER),
    **_each("embedding", replace(LAYER, paths=None, stretch=None)),
    **_each("batch_norm", Meaning(None, PRODUCT, path_rules.batch_norm, stretch_rules.batch_norm, takes_vectors=True)),
    **_each("layer_norm group_norm instance_norm rms_norm local_response_norm", NORMALISE),
    **_each("scaled_dot_product_attention", Meaning(scales.attention)),
    **_each("softmax log_softmax", Meaning()),
}


_CUTS = ("detach", "data", "sign", "gt", "lt", "ge", "le", "eq", "ne", "argmax", "argmin", "isnan", "isfinite")


class Linearity:
    """A rule for `watched` that follows which parameters each tensor depends on, and where that is curved.

    Args:
        leaves: the parameters in question, by name.
    """

    def __init__(self, leaves: Params) -> None:
        self._bits = {name: 1 << i for i, name in enumerate(leaves)}
        # By memory, so that a view written in place changes what it is a view of; tensors are kept, so that no address
        # is used twice.
        self._masks: dict[int, int] = {}
        self._kept: list[Tensor] = []
        self.curved: dict[str, str] = {}
        self.reads: Counter[str] = Counter()  # operations that read a parameter itself, views of it left out
        for name, value in leaves.items():
            self._add(value, self._bits[name])
        self._leaves = {self._place(value): name for name, value in leaves.items()}

    def follow(self, op: Operation) -> Any:
        """Run one operation, and note what its result depends on."""
        for tensor in op.tensors:  # as they are before one of them is written to
            self._notice(tensor)
        result = op.run()
        outcomes = [tensor for tensor in tensors_in(result) if tensor.is_floating_point() or tensor.is_complex()]
        if op.name == "setitem" or is_in_place(op):
            outcomes.append(op.tensors[0])
        masks = [self.mask(tensor) for tensor in op.tensors]
        total = 0
        for mask in masks:
            total |= mask
        meaning = TABLE.get(op.name)
        if not outcomes or not total or op.name in _CUTS or (meaning is not None and meaning.creates):
            self._kept += outcomes
            return result
        self._judge(op, meaning, masks, total)
        written = {self._place(tensor) for tensor in outcomes}
        self.reads.update(
            self._leaves[place]
            for place in {self._place(tensor) for tensor in op.tensors} & self._leaves.keys() - written
        )
        for tensor in outcomes:
            self._add(tensor, total)
        return result

    def mask(self, tensor: Tensor) -> int:
        """Bits of the parameters that a tensor depends on."""
        return self._masks.get(self._place(tensor), 0)

    def held(self) -> int:
        """Bytes of all that was computed: it is kept until the end."""
        sizes: dict[int, int] = {}
        for tensor in self._kept:
            place, size = self._place(tensor), tensor.numel() * tensor.element_size()
            if place not in self._leaves:
                sizes[place] = max(sizes.get(place, 0), size)
        return sum(sizes.values())

    def reached(self, outputs: Tensor) -> set[str]:
        """Names of the parameters that the outputs depend on at all."""
        self._notice(outputs)
        mask = self.mask(outputs)
        return {name for name, bit in self._bits.items() if mask & bit}

    def _notice(self, tensor: Tensor) -> None:
        """A tensor with a gradient that nothing seen has given (`torch.jit.script`): it may be any function of all."""
        if tensor.requires_grad and not self.mask(tensor):
            everything = sum(self._bits.values())
            self._taint(everything, "a part of the network, such as a scripted function, cannot be seen")
            self._add(tensor, everything)

    def _add(self, tensor: Tensor, mask: int) -> None:
        self._kept.append(tensor)
        place = self._place(tensor)
        self._masks[place] = self._masks.get(place, 0) | mask

    def _place(self, tensor: Tensor) -> int:
        """Address of a tensor's memory. Inside `vmap` it has none: then nothing is known to be linear."""
        try:
            return tensor.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):
            self._taint(sum(self._bits.values()), "torch.func.vmap hides what is computed")
            return -1

    def _judge(self, op: Operation, meaning: Meaning | None, masks: list[int], total: int) -> None:
        """Mark the parameters in which this operation is not piecewise linear."""
        linear = "" if meaning is None else meaning.linear
        if op.name == "batch_norm" and op.named(*NORM_ORDER).get("training"):
            linear = ""
        if linear == PIECES:
            return
        if linear == PRODUCT:
            seen = 0
            for mask in masks:
                self._taint(seen & mask, f"{op.place} multiplies it with itself")
                seen |= mask
        elif linear == RATIO:
            first = op.args[0] if op.args else op.kwargs.get("input")
            divisor = total if not isinstance(first, Tensor) else masks[1] if len(masks) > 1 else 0
            self._taint(divisor, f"it stands in a denominator ({op.place})")
        else:
            self._taint(total, f"{op.place} is not piecewise linear")

    def _taint(self, mask: int, reason: str) -> None:
        for name, bit in self._bits.items():
            if mask & bit:
                self.curved.setdefault(name, reason)


_CHOOSING = (*TO_PYTHON, "nonzero", "argwhere", "masked_select", "unique")
_INDEXED = ("getitem", "setitem", "index_select", "index_add", "index_put", "index_copy", "take", "masked_scatter")


class Choices:
    """A rule for `watched` that finds whether values decide what is computed: branches, masks, routed samples."""

    def __init__(self) -> None:
        self.found = ""

    def follow(self, op: Operation) -> Any:
        """Run one operation."""
        by_value = op.name in _CHOOSING and bool(op.tensors)
        by_index = op.name in _INDEXED and any(not t.is_floating_point() for t in op.tensors)
        if by_value or by_index:
            self.found = self.found or op.place
        return op.run()
