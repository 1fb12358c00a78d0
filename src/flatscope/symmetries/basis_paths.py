"""BasisPaths: a network described by the values of its basis paths instead of its weights."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor, nn

from flatscope.errors import InputError, NumericalWarning
from flatscope.guards import precise_math
from flatscope.network.tracing import trace
from flatscope.params import Params, copied, named_parameters
from flatscope.samples import Inputs
from flatscope.symmetries.folding import fold_batchnorm
from flatscope.symmetries.path_coordinates import PathCoordinates


class BasisPaths:
    r"""Values of the basis paths of a network (Yi et al. 2019, section 2.2), for any architecture that can be traced.

    The m − H values determine the function, and no rescaling of units changes them. m counts weights and biases, H
    the units that can be rescaled; units tied to one scale (residual connections) count once, those tied to the
    network's input or output not at all. Paths run from ground to ground: from an input, a constant, a bias or a
    unit that cannot be rescaled, to an output or again such a unit. In a ReLU network without walls these are the
    paths of the paper. A wall (GELU, LayerNorm, softmax) ends and begins paths: the values still are a full set of
    coordinates of the function that no rescaling moves, but the network is then no longer a sum over paths. What
    cannot be rescaled at all, and parameters that are no edges (a PReLU slope), are their own values.

    Values depend on the skeleton, hence on `rule`: always report it with a number.

    Args:
        model: any module; BatchNorm is folded into it first. It is copied, not touched.
        example: a batch of inputs.
        rule: "max_product": the strongest way through every unit, which neither rescaling nor permuting units
            changes; "cyclic": unit i is joined to unit i modulo the width, at a convolution's centre tap, whatever
            the weights are; "diagonal": to unit i, for equal widths.
        cut: name of a layer: units in front of it are held by their incoming skeleton weight, the others by the
            outgoing one. This changes the weights that `to_model` gives, never the function.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)).double()
        >>> paths = BasisPaths(net, torch.ones(2, 4))
        >>> paths.count == 4 * 3 + 3 + 3 * 2 + 2 - 3
        True
        >>> torch.allclose(paths.to_model(paths.values())[0].weight, net[0].weight)
        True
    """

    @precise_math()
    def __init__(self, model: nn.Module, example: Inputs, rule: str = "max_product", cut: str = "") -> None:
        if not isinstance(model, nn.Module):
            raise InputError("a torch.nn.Module", type(model).__name__, where="BasisPaths")
        self.model = fold_batchnorm(model, example)
        graph = trace(self.model, example)
        if not graph.layers:
            raise InputError("a network with layers", "none", where="BasisPaths", fix=graph.summary())
        self.coordinates = PathCoordinates(graph, named_parameters(self.model), rule, cut)
        self._dtype = self.coordinates.params[graph.layers[0].weight].dtype

    @property
    def rule(self) -> str:
        """How the skeleton was chosen."""
        return self.coordinates.rule

    @property
    def count(self) -> int:
        """Number of values, m − H."""
        return self.coordinates.count

    @property
    def n_classes(self) -> int:
        """H: units that can be rescaled, those tied to one scale counted once."""
        return self.coordinates.n_classes

    @property
    def frozen(self) -> dict[str, Tensor]:
        """Flat indices of the weights that are held fixed (value and sign), by parameter name; H in all."""
        return {block.name: block.frozen for block in self.coordinates.blocks if len(block.frozen)}

    @precise_math()
    def values(self) -> Tensor:
        """The values (count,), in the model's type: layer by layer, each weight in memory order before its bias.

        Products over tens of layers may be too small for float32: see `log_values`.
        """
        log, sign = self.coordinates.log_values()
        found = (sign * log.exp()).to(self._dtype)
        smallest = math.log(torch.finfo(self._dtype).tiny)
        lost = int((log.isfinite() & (log < smallest)).sum())
        if lost:
            warnings.warn(
                f"{lost} of {self.count} path values are below {self._dtype}'s normal range, so that `to_model` cannot "
                "give their weights back; use a float64 model, or log_values()",
                NumericalWarning,
                stacklevel=2,
            )
        return found

    @precise_math()
    def log_values(self) -> tuple[Tensor, Tensor]:
        """log|v| and sign of v, float64: right however deep the network is."""
        return self.coordinates.log_values()

    @precise_math()
    def values_of(self, params: Params) -> Tensor:
        """Values at other weights of the same network with the same skeleton, float64; differentiable."""
        return self.coordinates.values_of(params)

    @precise_math()
    def params_of(self, values: Tensor) -> Params:
        """Weights that have these values: the inverse, differentiable twice over and usable under vmap."""
        return self.coordinates.params_of(values)

    @precise_math()
    def to_model(self, values: Tensor) -> nn.Module:
        """A new module, in eval mode and without BatchNorm, whose basis paths have these values."""
        if not isinstance(values, Tensor) or values.shape != (self.count,) or not bool(values.isfinite().all()):
            shown = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise InputError(f"{self.count} finite values", shown, where="BasisPaths.to_model")
        with torch.no_grad():
            params = self.coordinates.params_of(values.to(next(iter(self.coordinates.params.values())).device))
            twin = copied(self.model)
            for name, value in twin.named_parameters():
                value.copy_(params[name])
        return twin
