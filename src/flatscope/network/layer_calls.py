"""Calls that have a weight: their kind, and their arguments in order."""

from __future__ import annotations

DENSE_ORDER = ("input", "weight", "bias")
CONV_ORDER = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
TRANSPOSED_ORDER = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
LOOKUP_ORDER = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
NORM_ORDER = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
# The calls of a layer: its kind, and its arguments in order.
LAYER_CALLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "linear": ("dense", DENSE_ORDER),
    **{f"conv{n}d": ("conv", CONV_ORDER) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": ("transposed", TRANSPOSED_ORDER) for n in (1, 2, 3)},
    "embedding": ("lookup", LOOKUP_ORDER),
}
# These, and the call that has a scale and a shift for every channel.
WEIGHT_CALLS = LAYER_CALLS | {"batch_norm": ("batchnorm", NORM_ORDER)}
