"""Transformations of the weights that leave the function unchanged."""

from flatscope.symmetries.basis_paths import BasisPaths
from flatscope.symmetries.folding import fold_batchnorm
from flatscope.symmetries.scaling import (
    given_scales,
    permuted_params,
    random_permutation,
    random_scales,
    rescale,
    rescaled_params,
)

__all__ = [
    "BasisPaths",
    "fold_batchnorm",
    "given_scales",
    "permuted_params",
    "random_permutation",
    "random_scales",
    "rescale",
    "rescaled_params",
]
