"""The check behind every rewriting of a network: it must still be the same function."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatscope.errors import FlatscopeError
from flatscope.guards import own_settings
from flatscope.network.program import fitting, output_tensors
from flatscope.samples import Inputs, parts_of

_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
_LOW_PRECISION = 5e-2


class FunctionChangedError(FlatscopeError, RuntimeError):
    """A rewritten network gives other outputs: a tie or a wall that was not seen. Nothing is returned then."""


def relative_difference(model: nn.Module, other: nn.Module, example: Inputs) -> float:
    """Largest difference between the outputs of two networks, relative to the largest output."""
    with own_settings(), torch.no_grad():
        before, after = _outputs(model, example), _outputs(other, example)
    scale = max((float(value.abs().max()) for value in before), default=0.0)
    gaps = [float((a.double() - b.double()).abs().max()) for a, b in zip(before, after, strict=True)]
    return max(gaps, default=0.0) / (scale or 1.0)


def refuse_if_different(model: nn.Module, other: nn.Module, example: Inputs, what: str) -> None:
    """Compare two networks in eval mode on the example, to the rounding of their type."""
    dtype = next(value.dtype for value in model.parameters() if value.is_floating_point())
    allowed = _TOLERANCES.get(dtype, _LOW_PRECISION)
    found = relative_difference(model, other, example)
    if not found <= allowed:  # also where the outputs are not finite
        raise FunctionChangedError(
            f"the same outputs to {allowed:g} relative ({dtype})",
            f"outputs that differ by {found:.3g}",
            where=what,
            fix="Please report the network: an operation in it was misread; or use float64 if this is rounding",
        )


def _outputs(model: nn.Module, example: Inputs) -> list[Tensor]:
    inputs = fitting(model, example)
    raw = model(**inputs) if isinstance(inputs, dict) else model(*parts_of(inputs))
    return [value for value in output_tensors(raw) if value.is_floating_point() and value.numel()]
