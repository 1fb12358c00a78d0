"""Starting weights: the papers' initialisation schemes, drawn from private generators only.

Every draw comes from a CPU generator of its own and is copied to the model's device, so one seed gives the
same weights on every device and the global random state is never read or moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from flatscope.errors import InputError, refuse_unknown

LAYERS = (nn.Linear, nn.modules.conv._ConvNd)

Draw = Callable[[Tensor, torch.Generator], object]


def schemes() -> list[str]:
    """Names that `initialize` knows."""
    return ["kaiming_uniform", "normal", "torch", "uniform", "xavier_normal"]


def initialize(
    model: nn.Module,
    scheme: str = "torch",
    seed: int = 0,
    *,
    bound: float = 0.1,
    variance: float = 0.1,
    scale: float = 1.0,
    skeleton: float | None = None,
) -> nn.Module:
    r"""Draw all weights of `model` anew, in place, and return it.

    | scheme | weight | used by |
    |---|---|---|
    | `xavier_normal` | $N(0, 2/(n_{in}+n_{out}))$ | Petzka et al. (2019) |
    | `kaiming_uniform` | $U(\pm\sqrt{6/n_{in}})$ | Petzka et al. (2019) |
    | `uniform` | $U(-bound, bound)$ | Petzka et al. (2019), bound 0.1 |
    | `normal` | $N(0, variance)$ | Petzka et al. (2019), variance 0.1, so standard deviation 0.316 |
    | `torch` | $U(\pm 1/\sqrt{n_{in}})$, biases too: what `reset_parameters` does | torch's default |

    Biases are set to zero by all schemes except `torch`, which draws them (the papers do not say).
    Normalisation layers go back to scale one, shift zero and fresh running statistics.

    Args:
        model: any module whose parameters sit in linear, convolution and normalisation layers.
        scheme: one of the names above.
        seed: the same seed gives the same weights, whatever happened before.
        bound: half-width of `uniform`.
        variance: variance (not standard deviation) of `normal`.
        scale: factor on all weights and biases of linear and convolution layers; 10 for the large start of
            Zhang et al. (2017), Figures 16 and 17.
        skeleton: if given, the cyclic skeleton is set to this value afterwards, see `set_skeleton`.

    Example:
        >>> layer = initialize(nn.Linear(4, 2), "uniform", seed=3, bound=0.5)
        >>> bool(layer.weight.abs().max() <= 0.5), layer.bias.tolist()
        (True, [0.0, 0.0])
    """
    draw = _weight_filler(scheme, bound=bound, variance=variance)
    _check_positive(bound=bound, variance=variance, scale=scale)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, LAYERS):
                _fill_parameter(module.weight, draw, generator, scale)
                if module.bias is not None and scheme == "torch":
                    reach = 1 / math.sqrt(nn.init._calculate_fan_in_and_fan_out(module.weight)[0])
                    _fill_parameter(module.bias, _uniform_filler(reach), generator, scale)
                elif module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, nn.modules.batchnorm._NormBase | nn.LayerNorm | nn.GroupNorm):
                module.reset_parameters()  # constants only: no random draw
            elif direct := [key for key, _ in module.named_parameters(recurse=False)]:
                expected = "parameters in linear, convolution and normalisation layers only"
                got = f"{type(module).__name__} with {', '.join(direct)}"
                fix = "Initialise this model yourself"
                raise InputError(expected, got, f"initialize, module {name or '(the model itself)'}", fix)
    if skeleton is not None:
        set_skeleton(model, skeleton)
    return model


def set_skeleton(model: nn.Module, value: float = 1.0) -> nn.Module:
    """Set the cyclic skeleton weights of every layer to `value`, in place, and return the model.

    A layer of width `n_in` to `n_out` has max(n_in, n_out) of them: for u = 0, 1, ... the weight from channel
    u mod n_in to channel u mod n_out, at the kernel's centre. A dense layer that reads flattened maps counts
    channels, not columns, and takes each map's centre pixel. With ordinary weights the path values of deep
    networks vanish (1e-24 after 18 layers), so Yi et al. (2019), whose perturbations of path values are
    absolute, need a skeleton of ones to start from.

    Example:
        >>> set_skeleton(nn.Linear(2, 3)).weight.detach().eq(1).int().tolist()
        [[1, 0], [0, 1], [1, 0]]
    """
    channels = 0
    with torch.no_grad():
        for module in model.modules():
            if not isinstance(module, LAYERS):
                continue
            weight = module.weight  # (out, in, *kernel); transposed convolutions (in, out, *kernel): same rule
            kernel = [size // 2 for size in weight.shape[2:]]
            columns = torch.arange(max(weight.shape[:2])) % weight.shape[1]
            rows = torch.arange(max(weight.shape[:2])) % weight.shape[0]
            pixels = weight.shape[1] // channels if channels and isinstance(module, nn.Linear) else 1
            if pixels > 1 and weight.shape[1] == channels * pixels:
                units = torch.arange(max(weight.shape[0], channels))
                rows, columns = units % weight.shape[0], (units % channels) * pixels + _central_pixel(pixels)
            taps: tuple[Tensor | int, ...] = (rows, columns, *kernel)
            weight[taps] = value
            channels = 0 if isinstance(module, nn.Linear) else module.out_channels
    return model


def _weight_filler(scheme: str, *, bound: float, variance: float) -> Draw:
    """The function that fills a weight under this scheme."""
    table: dict[str, Draw] = {
        "xavier_normal": lambda weight, g: nn.init.xavier_normal_(weight, generator=g),
        "kaiming_uniform": lambda weight, g: nn.init.kaiming_uniform_(weight, nonlinearity="relu", generator=g),
        "uniform": _uniform_filler(bound),
        "normal": lambda weight, g: weight.normal_(0.0, math.sqrt(variance), generator=g),
        "torch": lambda weight, g: nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=g),
    }
    refuse_unknown(scheme, table, "initialisation scheme")
    return table[scheme]


def _uniform_filler(reach: float) -> Draw:
    return lambda weight, g: weight.uniform_(-reach, reach, generator=g)


def _fill_parameter(parameter: Tensor, draw: Draw, generator: torch.Generator, scale: float) -> None:
    """Draw on the CPU, then copy: the same numbers on every device."""
    values = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
    draw(values, generator)
    parameter.copy_(values if scale == 1.0 else values * scale)


def _central_pixel(pixels: int) -> int:
    """Index of the central pixel of a flattened square map (of the middle one where it is not square)."""
    side = math.isqrt(pixels)
    return (side // 2) * side + side // 2 if side * side == pixels else pixels // 2


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise InputError("a positive finite number", repr(value), where=f"initialize, {name}")
