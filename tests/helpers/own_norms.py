"""Norms, paths and certificates from their definitions; they join `own_measures`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import scipy.sparse.linalg
import torch
from own_measures import Subject, values
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Seen(TorchFunctionMode):
    """Convolutions, with the function, its settings and the shape of its input, by their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[
            int, tuple[Callable[..., Tensor], tuple[int, ...], Tensor, tuple[Any, ...], dict[str, Any]]
        ] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "").startswith("conv") and len(args) > 1 and isinstance(args[1], Tensor):
            rest = {k: v for k, v in kwargs.items() if k != "bias"}
            self.calls[args[1].data_ptr()] = func, tuple(args[0].shape[1:]), args[1], args[3:], rest
        return func(*args, **kwargs)


@values
def fan_in_l1(s: Subject) -> dict[str, Tensor]:
    return {layer: s.folded.rows(name).abs().sum(1) for layer, name in s.folded.acting.items()}


def _norm(name: str, of_layer: Callable[[Subject, str], float]) -> None:
    def norms(s: Subject) -> dict[str, float]:
        found = {layer: of_layer(s.folded, weight) for layer, weight in s.folded.acting.items()}
        return {"": math.prod(found.values()), **found}

    norms.__name__ = name
    values(norms)
    _with_margin(name, lambda s: norms(s)[""], {"l2_norm": 4.0}.get(name, 1.0), name == "spectral_norm")


def _with_margin(name: str, norm: Callable[[Subject], float | None], factor: float, widths: bool) -> None:
    def over(s: Subject) -> float | None:
        found = norm(s)
        return None if found is None else (found / s.margin) ** 2

    def capacity(s: Subject) -> float | None:
        ratio = over(s)
        for name in s.folded.acting.values() if ratio is not None else ():
            ratio *= factor * (len(s.folded.reading(name).rows) if widths else 1)
        return ratio

    over.__name__, capacity.__name__ = f"{name}_over_margin", f"{name}_capacity"
    values(over)
    values(capacity)


def operator_norm(s: Subject, name: str) -> float:
    """Largest singular value: of a convolution as the linear map that it is on inputs of its true size."""
    weight = s.own.everything[name]
    seen = Seen()
    with torch.no_grad(), seen:
        s.own.outputs(inputs=s.own.cut(slice(0, 1)))
    call = seen.calls.get(weight.data_ptr())
    if name in s.groups:
        return max(float(torch.linalg.matrix_norm(part, 2)) for part in s.rows(name).chunk(s.groups[name]))
    if call is None:
        return float(torch.linalg.matrix_norm(weight.reshape(weight.shape[0], -1), 2))
    func, shape, _, args, kwargs = call
    x = torch.zeros(1, *shape, dtype=weight.dtype, requires_grad=True)

    def apply(v: Any) -> Any:
        given = torch.as_tensor(v, dtype=weight.dtype).reshape(x.shape)
        out = func(x, weight, None, *args, **kwargs)
        back = torch.autograd.grad(out, x, func(given, weight, None, *args, **kwargs).detach())[0]
        return back.reshape(-1).numpy()

    size = x.numel()
    square = scipy.sparse.linalg.LinearOperator((size, size), matvec=apply, dtype=float)
    if size < 3:
        return math.sqrt(max(torch.linalg.eigvalsh(torch.from_numpy(square @ torch.eye(size).numpy())).tolist()))
    start = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64).numpy()
    return math.sqrt(float(scipy.sparse.linalg.eigsh(square, k=1, v0=start, return_eigenvectors=False, tol=1e-11)[0]))


_norm("l2_norm", lambda s, name: math.sqrt(s.norm2(name)))
_norm("l1_inf_norm", lambda s, name: float(s.rows(name).abs().sum(1).max()))
_norm("group_norm", lambda s, name: float(s.rows(name).abs().pow(3).sum(1).pow(0.5).sum() ** (1 / 1.5)))
_norm("spectral_norm", operator_norm)


LINEAR = """
linear prelu conv1d conv2d conv3d conv_transpose1d conv_transpose2d relu relu_ leaky_relu add __add__ __iadd__ add_ pad
abs matmul __matmul__ sum cat stack flatten reshape view transpose permute t contiguous max_pool1d max_pool2d dropout
squeeze unsqueeze chunk split unbind narrow identity __getitem__ __get__ __len__ dim size
is_floating_point device dtype empty
"""


class OfPaths(TorchFunctionMode):
    """The network on sums of p-th powers of paths: every weight is |w|^p already, averages have edges 1/n."""

    KEPT = frozenset(LINEAR.split())

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.unknown = p, set[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        if name in ("mean", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_avg_pool1d"):
            out = func(*args, **kwargs)
            if name == "avg_pool2d":
                size = args[1] if len(args) > 1 else kwargs["kernel_size"]
                count = size**2 if isinstance(size, int) else math.prod(size)
            else:
                count = args[0].numel() / out.numel()
            return out * count ** (1 - self.p)
        if name in ("sub", "__sub__"):
            return torch.add(*args, **kwargs)
        if name in ("mul", "__mul__") and any(_is_mask(part) for part in args[:2]):
            return func(*args, **kwargs)
        if name not in self.KEPT:
            self.unknown.add(name)
        return func(*args, **kwargs)


def _is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and bool(((value == 0) | (value == 1)).all())


def path_sums(s: Subject, p: float, biases: bool = True) -> Tensor | None:
    """Sum over all paths to each output of the p-th powers of their weights; None where an operation is unknown."""
    own = s.folded.own
    vectors = {name: value for name, value in own.model.named_parameters() if value.ndim == 1}
    powers = {name: value.abs() ** p for name, value in own.everything.items()}
    powers |= {name: torch.zeros_like(own.everything[name]) for name in vectors if not biases}
    cut = own.cut(slice(0, 1))
    ones = tuple(map(torch.ones_like, cut)) if isinstance(cut, tuple) else torch.ones_like(cut)
    mode = OfPaths(p)
    with torch.no_grad(), mode:
        found = own.outputs(powers, ones)
    return None if mode.unknown else found.reshape(-1)


def _path(name: str, p: float, widths: bool) -> None:
    def norm(s: Subject) -> float | None:
        found = path_sums(s, p)
        return None if found is None else float(found.sum() ** (1 / p))

    norm.__name__ = name
    values(norm)
    _with_margin(name, norm, 4.0, widths)


_path("l1_path_norm", 1.0, False)
_path("l2_path_norm", 2.0, True)


@values
def lipschitz_linf(s: Subject) -> float | None:
    found = path_sums(s, 1.0, biases=False)
    return None if found is None else float(found.max())


class Patterns(TorchFunctionMode):
    """Which entries of every ReLU are on."""

    def __init__(self) -> None:
        super().__init__()
        self.on: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("relu", "relu_", "leaky_relu", "threshold"):
            self.on.append((args[0] > 0).flatten())
        return func(*args, **(kwargs or {}))


def kink_free(s: Subject, radius: float, lines: int = 20) -> bool:
    """Whether no ReLU of any sample changes where the values of paths move by that much in random directions."""
    paths, own = s.in_paths
    v, generator = paths.values(), torch.Generator().manual_seed(5)
    moves = torch.randn(lines, len(v), generator=generator, dtype=torch.float64)
    found = []
    for move in (torch.zeros(1, len(v), dtype=torch.float64), *moves.split(1)):
        mode = Patterns()
        with torch.no_grad(), mode:
            step = 0.999 * radius * move[0] / move[0].norm().clamp_min(1e-300)
            own.outputs({**own.everything, **paths.params_of(v + step.to(v))})
        found.append(torch.cat(mode.on))
    return all(torch.equal(found[0], one) for one in found)
