"""The one table of operations: what each of them does to scales, to derivatives, to paths and to distances.

An operation that is not listed is a wall, and curved: whatever enters it is fixed as far as scales go, and nothing is
known of its derivatives, its paths or how far it stretches. That is always safe, only less than could be said. A new
operation is one entry; `tests/network/test_operations.py` holds every entry to what the operation does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flatscope.network import path_rules, scales, stretch_rules
from flatscope.network.interception import LAYER_CALLS

# What an operation is as a function of its tensors.
PIECES = "piecewise linear in all of them together"
PRODUCT = "linear in each of them"
RATIO = "linear in the first, which the second divides"
CURVED = "neither"
TO_PYTHON = ("item", "tolist", "numpy", "bool", "float", "int", "index", "complex", "is_nonzero", "contains")
LEAVES_TORCH = (*TO_PYTHON, "array", "equal", "allclose")


@dataclass(frozen=True)
class Meaning:
    """Properties of one operation, as every reading of a network uses them."""

    scale: scales.ScaleRule | None = None  # what it does to scales and units; None: a wall
    linear: str = CURVED  # what it is as a function of its tensors
    paths: path_rules.PathRule | None = None  # what it does to sums over paths; None: there are none through it
    stretch: stretch_rules.StretchRule | None = None  # how far it can stretch; None: unknown, unless `slope` says it
    slope: float | None = None  # largest slope of a function that is the same for every entry
    kinks: bool = False  # whether its slope jumps somewhere, which a finite difference counts
    creates: bool = False  # whether it takes no more than shape and type from its tensors
    identity: bool = False  # whether it changes nothing but type, place or memory (dropout is off)
    moves: bool = False  # whether entries only change places, are repeated or dropped
    takes_vectors: bool = False  # whether a parameter may enter it as a shift, a scale or a constant
    multiplies: bool = False  # whether that parameter then multiplies a signal
    writes_safely: bool = False  # whether bounds survive when it writes in place


# Families ------------------------------------------------------------------------------------------------------------

MOVE = Meaning(scales.move, PIECES, path_rules.move, stretch_rules.move, moves=True, takes_vectors=True)
KEEP = Meaning(scales.keep, PIECES, path_rules.same, stretch_rules.entrywise, writes_safely=True)
SAME = replace(KEEP, identity=True)
RECTIFY = replace(KEEP, kinks=True)
CAST = replace(SAME, scale=scales.cast, paths=path_rules.cast)
LEAKY = replace(RECTIFY, paths=path_rules.leaky, stretch=stretch_rules.leaky)
BEND = Meaning(scales.bend)
CREATE = Meaning(scales.create, PIECES, creates=True)
LAYER = Meaning(None, PRODUCT, path_rules.layer, stretch_rules.layer)
POOL = Meaning(scales.pool, PIECES)
MAX_POOL = replace(POOL, paths=path_rules.max_pool, stretch=stretch_rules.max_pool, kinks=True)
AVERAGE_POOL = replace(POOL, paths=path_rules.average_pool, stretch=stretch_rules.linear_pool)
ADD = Meaning(scales.add, PIECES, path_rules.add, stretch_rules.add, takes_vectors=True, writes_safely=True)
EXTREME = Meaning(scales.add, PIECES, path_rules.maximum, stretch_rules.maximum, kinks=True, takes_vectors=True)
REDUCE = Meaning(scales.reduce, PIECES, path_rules.sum_paths, stretch_rules.sum_entries)
BOUND = Meaning(scales.one_sided, PIECES, path_rules.one_sided, stretch_rules.entrywise, kinks=True)
COMPARE = Meaning(scales.compare, PIECES, takes_vectors=True)
MATRIX = Meaning(scales.matrix_product, PRODUCT, path_rules.matrix_product, stretch_rules.matrix_product)
MULTIPLY = Meaning(
    scales.multiply, PRODUCT, path_rules.scale, stretch_rules.scale, takes_vectors=True, multiplies=True,
    writes_safely=True,
)  # fmt: skip
NORMALISE = Meaning(takes_vectors=True, multiplies=True)  # a wall with a scale and a shift of its own


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
        dstack chunk split split_with_sizes tensor_split unbind select narrow flip fliplr flipud roll rot90
        pixel_shuffle pixel_unshuffle channel_shuffle tril triu diag_embed
        unfold view_as reshape_as hsplit vsplit atleast_1d atleast_2d atleast_3d copy""",
        MOVE,
    ),
    **_each("getitem index_select", replace(MOVE, scale=scales.pick)),
    **_each("gather take_along_dim diagonal", replace(MOVE, scale=scales.choose)),
    **_each("detach data", replace(SAME, scale=scales.move, moves=True)),
    **_each("setitem", replace(MOVE, scale=scales.set_item, paths=None, stretch=None)),
    **_each("pad", replace(MOVE, scale=scales.pad, paths=path_rules.pad_paths, moves=False)),
    **_each(
        "masked_fill",
        replace(KEEP, scale=scales.masked_fill, paths=path_rules.masked_fill, takes_vectors=True),
    ),
    **_each("relu abs", RECTIFY),
    **_each("neg", KEEP),
    **_each(
        """positive requires_grad alias
        dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout""",
        SAME,
    ),
    **_each("contiguous clone", replace(SAME, paths=path_rules.copied)),
    **_each("to float double half bfloat16 type cpu cuda", CAST),
    **_each("type_as", replace(CAST, takes_vectors=True)),
    **_each("leaky_relu rrelu", LEAKY),
    **_each("prelu", replace(LEAKY, scale=scales.prelu, linear=PRODUCT, takes_vectors=True, multiplies=True)),
    **_each("clamp clamp_min clamp_max", replace(BOUND, writes_safely=True)),
    **_each("threshold", replace(BOUND, scale=scales.threshold, stretch=None)),
    **_each("relu6 hardtanh", replace(BEND, linear=PIECES, slope=1.0, kinks=True, writes_safely=True)),
    **_each("softshrink", replace(BEND, linear=PIECES, slope=1.0, kinks=True)),
    **_each("hardshrink", replace(BEND, linear=PIECES, kinks=True)),
    **{name: replace(BEND, slope=slope, writes_safely=True) for name, slope in SLOPES.items()},
    **_each("elu celu mish exp expm1 log log1p sqrt rsqrt square pow rpow rdiv reciprocal erf", BEND),
    **_each("selu", replace(BEND, kinks=True)),
    **_each("sign", replace(BEND, linear=PIECES, kinks=True)),
    **_each("add sub", ADD),
    **_each("maximum minimum fmax fmin", EXTREME),
    **_each("where", replace(EXTREME, scale=scales.where, paths=None, stretch=None)),
    **_each("mul", MULTIPLY),
    **_each("div", replace(MULTIPLY, scale=scales.divide, linear=RATIO)),
    **_each("sum mean", REDUCE),
    **_each("amax amin max min", replace(REDUCE, paths=path_rules.maximum, stretch=stretch_rules.maximum, kinks=True)),
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
    **_each(
        "batch_norm", replace(NORMALISE, linear=PRODUCT, paths=path_rules.batch_norm, stretch=stretch_rules.batch_norm)
    ),
    **_each("layer_norm group_norm instance_norm rms_norm local_response_norm", NORMALISE),
    **_each("scaled_dot_product_attention", Meaning(scales.attention)),
    **_each("softmax log_softmax", Meaning()),
}
