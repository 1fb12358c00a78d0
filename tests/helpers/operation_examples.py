"""Uses of every operation in the table, small enough to be taken apart numerically.

A use is a function of one or more signals (2, channels, ...) and, at will, of a weight. Where an operation has options
that change what the table may say of it, or can meet several units at once, it has several uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flatscope.network.operations import TABLE

SAMPLES = 2
WEIGHT = torch.tensor([[0.6, -1.1, 0.4, 0.9], [0.3, 0.8, -0.7, 0.2], [-0.5, 0.1, 1.2, -0.4]], dtype=torch.float64)
VECTOR = torch.tensor([0.7, -1.3, 0.5, 1.6], dtype=torch.float64)
MASK = torch.tensor([True, False, True, False])
INDEX = torch.tensor([2, 0, 1, 1])
PLACES = torch.tensor([[0], [1], [1], [0]])


@dataclass(frozen=True, eq=False)
class Use:
    """One use of an operation.

    Attributes:
        function: of the signals, then of the weight if there is one; gives a tensor or several.
        shapes: of one sample of each signal; channels come first.
        weight: a constant that enters.
    """

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...] = ((4,),)
    weight: Tensor | None = None

    def __call__(self, *tensors: Tensor) -> Tensor:
        """The results as one tensor (samples, ...)."""
        rows = len(tensors[0])
        made = (
            self.function(*tensors)
            if self.weight is None
            else self.function(*tensors[: len(self.shapes)], self._w(tensors))
        )
        parts = [made] if isinstance(made, Tensor) else [part for part in made if isinstance(part, Tensor)]
        parts = [part for part in parts if part.is_floating_point() or part.dtype == torch.bool]
        return torch.cat([part.double().reshape(rows, -1) for part in parts], 1)

    def _w(self, tensors: tuple[Tensor, ...]) -> Tensor:
        assert self.weight is not None
        return tensors[len(self.shapes)] if len(tensors) > len(self.shapes) else self.weight


def one(function: Callable[[Tensor], Any], *shape: int) -> list[Use]:
    """One signal."""
    return [Use(function, (shape or (4,),))]


def two(function: Callable[[Tensor, Tensor], Any]) -> list[Use]:
    """Two signals, and a signal with a constant."""
    return [Use(function, ((4,), (4,))), Use(function, weight=VECTOR)]


def call(place: Any, *rest: Any, **options: Any) -> Callable[[str], list[Use]]:
    """A use of the function of that name, found in a module or a class, on a signal and other arguments."""

    def use(name: str) -> list[Use]:
        function = getattr(place, name)
        return one(lambda x: function(x, *rest, **options))

    return use


def seeded(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same random numbers in every call."""

    def run(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return function(x)

    return run


def pools(function: Callable[..., Any], n: int) -> list[Use]:
    """A pool of windows of two along n axes: once over places of one channel, once over places of different units."""
    grid = (4, *[2] * (n - 1)) if n < 3 else (2, 2, 2)

    def over_units(x: Tensor) -> Any:
        return function(x.movedim(1, -1))

    return [Use(function, ((2, *grid),)), Use(over_units, ((2, *[2] * n),))]


def unpooled(x: Tensor, n: int) -> Tensor:
    """Largest values of windows, put back where they came from."""
    pool, back = getattr(functional, f"max_pool{n}d"), getattr(functional, f"max_unpool{n}d")
    values, places = pool(x, 2, return_indices=True)
    made: Tensor = back(values, places, 2)
    return made


def written(x: Tensor, into: Tensor | None = None) -> Tensor:
    """Half of a signal in the midst of zeros, or of another one."""
    target = x.new_zeros(x.shape) if into is None else into.clone()
    target[:, 1:3] = x[:, :2]
    return target


def normalised(x: Tensor, weight: Tensor) -> Tensor:
    """A BatchNorm in eval mode."""
    return functional.batch_norm(x, 0.3 * VECTOR, VECTOR.abs(), weight, VECTOR)


def looked_up(x: Tensor, table: Tensor) -> Tensor:
    """Rows of a table, beside the signal."""
    return torch.cat([functional.embedding(INDEX[: len(x)] % len(table), table), x], 1)


def attention(value: Tensor) -> Tensor:
    """Of constant queries and keys."""
    given = WEIGHT[:, :2].expand(len(value), -1, -1)
    return functional.scaled_dot_product_attention(given, given + 0.1, value)


def convolution(name: str, n: int) -> list[Use]:
    """With a constant weight of two channels, and a bias."""
    size = (2, 2, *[2] * (n - 1), 1) if n > 1 else (2, 2, 2)
    weight = torch.linspace(-1, 1.3, 2 ** len(size) // (2 if n > 1 else 1), dtype=torch.float64).reshape(size)
    function = getattr(functional, name)
    return [Use(lambda x, w: function(x, w, VECTOR[:2]), ((2, *[2] * n),), weight)]


def _movers() -> dict[str, list[Use]]:
    by_axis = {
        name: one(lambda x, name=name: getattr(torch, name)(x, 1, 2), 2, 3)
        for name in ["movedim", "moveaxis", "swapaxes", "swapdims", "transpose"]
    }
    itself = {name: one(lambda x, name=name: getattr(x, name)) for name in ("T", "H")}
    turned = {name: one(lambda x, name=name: getattr(x, name), 2, 3) for name in ("mT", "mH")}
    joined = {
        name: [Use(lambda x, y, name=name: getattr(torch, name)([x, y, x]), ((4,), (4,)))]
        for name in ("hstack", "vstack", "dstack", "stack")
    }
    halves = {name: one(lambda x, name=name: getattr(x, name)(2, 1)) for name in ("chunk", "split", "tensor_split")}
    squares = {name: one(lambda x, name=name: getattr(x, name)(), 3, 3) for name in ("tril", "triu")}
    like = {
        name: [Use(lambda x, y, name=name: getattr(x, name)(y), ((4,), (2, 2)))] for name in ("view_as", "reshape_as")
    }
    return (
        by_axis
        | itself
        | turned
        | joined
        | halves
        | squares
        | like
        | {
            "view": one(lambda x: x.view(-1, 2)),
            "reshape": one(lambda x: x.reshape(-1, 2)),
            "flatten": one(lambda x: x.flatten(1), 2, 2),
            "unflatten": one(lambda x: x.unflatten(1, (2, 2))),
            "ravel": one(torch.ravel),
            "permute": one(lambda x: x.permute(0, 2, 1), 2, 3),
            "t": one(torch.t),
            "squeeze": one(lambda x: x.squeeze(2), 4, 1),
            "unsqueeze": one(lambda x: x.unsqueeze(1)),
            "expand": one(lambda x: x.expand(-1, -1, 3), 4, 1),
            "expand_as": [Use(Tensor.expand_as, ((4, 1), (4, 2)))],
            "repeat": one(lambda x: x.repeat(1, 2)),
            "repeat_interleave": one(lambda x: x.repeat_interleave(2, dim=1)),
            "tile": one(lambda x: x.tile(1, 2)),
            "broadcast_to": one(lambda x: torch.broadcast_to(x, (len(x), 4, 3)), 4, 1),
            "broadcast_tensors": [Use(lambda x, y: torch.broadcast_tensors(x, y)[0], ((4, 1), (4, 2)))],
            "cat": [Use(lambda x, y: torch.cat([x, y, x], 1), ((4,), (4,)))],
            "split_with_sizes": one(lambda x: x.split_with_sizes([1, 3], 1)),
            "unbind": one(lambda x: x.unbind(1)),
            "select": one(lambda x: x.select(1, 2)),
            "narrow": one(lambda x: x.narrow(1, 1, 2)),
            "getitem": one(lambda x: x[:, 1:3]),
            "flip": one(lambda x: x.flip(1)),
            "fliplr": one(torch.fliplr),
            "flipud": one(torch.flipud),
            "roll": one(lambda x: x.roll(1, 1)),
            "rot90": one(torch.rot90),
            "index_select": one(lambda x: x.index_select(1, INDEX)),
            "gather": one(lambda x: x.gather(2, PLACES.expand(len(x), -1, -1)), 4, 2),
            "take_along_dim": one(lambda x: x.take_along_dim(PLACES.expand(len(x), -1, -1), 2), 4, 2),
            "pixel_shuffle": one(lambda x: functional.pixel_shuffle(x, 2), 4, 2, 1),
            "pixel_unshuffle": one(lambda x: functional.pixel_unshuffle(x, 2), 2, 2, 2),
            "channel_shuffle": one(lambda x: functional.channel_shuffle(x, 2), 4, 2, 1),
            "diagonal": one(lambda x: x.diagonal(dim1=1, dim2=2), 3, 3),
            "diag_embed": one(torch.diag_embed),
            "unfold": one(lambda x: x.unfold(1, 2, 1)),
            "hsplit": one(lambda x: x.hsplit(2)),
            "vsplit": one(lambda x: x.vsplit([1])),
            "atleast_1d": one(lambda x: torch.atleast_1d(x[:, 0])),
            "atleast_2d": one(lambda x: torch.atleast_2d(x[:, 0])),
            "atleast_3d": one(torch.atleast_3d),
            "copy": [Use(lambda x, y: x.clone().copy_(y), ((4,), (4,)))],
            "setitem": [*one(written), Use(written, ((4,), (4,)))],
            "pad": one(lambda x: functional.pad(x, (1, 2))) + one(lambda x: functional.pad(x, (1, 2), value=1.5)),
            "masked_fill": one(lambda x: x.masked_fill(MASK, 0.0))
            + one(lambda x: x.masked_fill(MASK, 1.5))
            + [Use(lambda x, y: x.masked_fill(y > 0, 0.0), ((4,), (4,)))],
        }
    )


def _entrywise() -> dict[str, list[Use]]:
    found = dict[str, list[Use]]()
    for place, names in (
        (torch, "abs neg positive sin cos exp expm1 square erf sign reciprocal detach clone"),
        (
            functional,
            "relu relu6 hardtanh tanh sigmoid softplus softsign gelu silu tanhshrink elu selu celu mish",
        ),
        (Tensor, "contiguous float double half bfloat16 cpu"),
    ):
        found |= {name: call(place)(name) for name in names.split()}
    for name in (
        "dropout",
        "alpha_dropout",
        "feature_alpha_dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "feature_dropout",
    ):
        drop = getattr(torch if name == "feature_dropout" else functional, name)
        shape = (2, *[2] * int(name[-2])) if name.endswith("d") and name[-2].isdigit() else (2, 3)
        found[name] = one(lambda x, drop=drop: drop(x, 0.5, False), *shape)
    positive = {
        name: one(lambda x, name=name: getattr(torch, name)(x.abs())) for name in ("log", "log1p", "sqrt", "rsqrt")
    }
    shrinks = {name: call(functional, 0.5)(name) for name in ("softshrink", "hardshrink")}
    return (
        found
        | positive
        | shrinks
        | {
            "data": one(lambda x: x.data),
            "requires_grad": one(lambda x: x.clone().requires_grad_(True)),
            "alias": one(torch.ops.aten.alias),
            "log_sigmoid": one(functional.logsigmoid),
            "rrelu": one(lambda x: functional.rrelu(x, 0.2, 0.2)),
            "to": one(lambda x: x.to(torch.float64)),
            "type": one(lambda x: x.type(torch.float64)),
            "type_as": [*one(lambda x: x.type_as(WEIGHT)), Use(Tensor.type_as, ((4,), (4,)))],
            "leaky_relu": one(lambda x: functional.leaky_relu(x, 0.3)) + one(lambda x: functional.leaky_relu(x, -1.7)),
            "prelu": [Use(functional.prelu, weight=VECTOR)],
            "clamp": one(lambda x: x.clamp(min=0)) + one(lambda x: x.clamp(-1, 1)),
            "clamp_min": one(lambda x: x.clamp_min(0)) + one(lambda x: x.clamp_min(-1)),
            "clamp_max": one(lambda x: x.clamp_max(0)) + one(lambda x: x.clamp_max(1)),
            "threshold": one(lambda x: functional.threshold(x, 0, 0)) + one(lambda x: functional.threshold(x, 1, 3)),
            "pow": one(lambda x: x.pow(3)),
            "rpow": one(lambda x: 2**x),
            "rdiv": one(lambda x: 1 / x),
        }
    )


def _created() -> dict[str, list[Use]]:
    new = {"zeros": (), "ones": (), "full": (2.0,)}
    like = {f"{word}_like": call(torch, *rest)(f"{word}_like") for word, rest in new.items()}
    ones = {
        f"new_{word}": one(lambda x, w=word, r=rest: getattr(x, f"new_{w}")((len(x), 3), *r))
        for word, rest in new.items()
    }
    return (
        like
        | ones
        | {
            "empty_like": one(lambda x: torch.empty_like(x).fill_(2.0)),
            "rand_like": one(seeded(torch.rand_like)),
            "randn_like": one(seeded(torch.randn_like)),
            "new_empty": one(lambda x: x.new_empty(len(x), 3).fill_(2.0)),
            "new_tensor": one(lambda x: x.new_tensor([[1.0], [2.0]])),
            "zero": one(lambda x: x.clone().zero_()),
            "fill": one(lambda x: x.clone().fill_(2.0)),
        }
    )


def _mixing() -> dict[str, list[Use]]:
    found = {name: two(getattr(torch, name)) for name in ("add", "sub", "mul", "div")}
    found |= {name: [Use(getattr(torch, name), ((4,), (4,)))] for name in ("maximum", "minimum", "fmax", "fmin")}
    found |= {name: one(lambda x, name=name: getattr(x, name)(1)) for name in ("sum", "mean", "amax", "amin")}
    found |= {name: one(lambda x, name=name: getattr(x, name)(1)[0]) for name in ("max", "min")}
    found |= {name: [*call(Tensor, 0)(name), *call(Tensor, 1.0)(name)] for name in ("gt", "lt", "ge", "le")}
    for name in ("eq", "ne"):  # with numbers that are met
        found[name] = [*one(lambda x, name=name: getattr(x.relu(), name)(0)), *call(Tensor, 3.9375)(name)]
    found["gt"] += [Use(torch.gt, ((4,), (4,)))]
    for n in (1, 2, 3):
        for kind in ("max", "adaptive_max"):
            found[f"{kind}_pool{n}d"] = pools(partial(_pool, f"{kind}_pool{n}d"), n)
            found[f"{kind}_pool{n}d_with_indices"] = pools(partial(_pool, f"{kind}_pool{n}d_with_indices"), n)
        for kind in ("avg", "adaptive_avg"):
            found[f"{kind}_pool{n}d"] = pools(partial(_pool, f"{kind}_pool{n}d"), n)
        found[f"lp_pool{n}d"] = pools(lambda x, n=n: getattr(functional, f"lp_pool{n}d")(x.abs(), 2, 2), n)
        found[f"max_unpool{n}d"] = pools(partial(unpooled, n=n), n)
        found[f"conv{n}d"] = convolution(f"conv{n}d", n)
        found[f"conv_transpose{n}d"] = convolution(f"conv_transpose{n}d", n)
    larger = [
        *one(lambda x: functional.interpolate(x, scale_factor=2), 2, 3),
        *one(lambda x: functional.interpolate(x.movedim(1, -1), scale_factor=2, mode="linear"), 2, 2),
    ]
    return found | {
        "where": [
            Use(lambda x, y: torch.where(x > 0, x, y), ((4,), (4,))),
            Use(lambda x, y: torch.where(torch.stack([MASK, ~MASK]), x, y), ((4,), (4,))),
        ],
        "interpolate": larger,
        "matmul": [
            Use(lambda x, w: x @ w.T, weight=WEIGHT),
            Use(lambda x, w: w @ x, ((4, 2),), WEIGHT),
            Use(lambda x, w: w.reshape(2, 3, 2) @ x.reshape(-1, 2, 2, 1), weight=WEIGHT),
            Use(torch.matmul, ((2, 2), (2, 2))),
        ],
        "linear": [Use(lambda x, w: functional.linear(x, w, VECTOR[:3]), weight=WEIGHT)],
        "embedding": [Use(looked_up, weight=WEIGHT)],
        "batch_norm": [Use(normalised, weight=VECTOR)],
        "layer_norm": [
            *one(lambda x: functional.layer_norm(x, (4,))),
            Use(lambda x, weight: functional.layer_norm(x, (4,), weight), weight=VECTOR),
        ],
        "rms_norm": [
            *one(lambda x: functional.rms_norm(x, (4,))),
            Use(lambda x, weight: functional.rms_norm(x, (4,), weight), weight=VECTOR),
        ],
        "local_response_norm": one(lambda x: functional.local_response_norm(x, 2, alpha=1.0), 4, 2),
        "softmax": one(lambda x: x.softmax(-1)),
        "log_softmax": one(lambda x: x.log_softmax(-1)),
        "scaled_dot_product_attention": [
            Use(attention, ((3, 2),)),
            Use(functional.scaled_dot_product_attention, ((3, 2), (3, 2), (3, 2))),
        ],
    }


def _pool(name: str, x: Tensor) -> Any:
    return getattr(functional, name)(x, 2 if "adaptive" not in name else [size // 2 for size in x.shape[2:]])


EXAMPLES = _movers() | _entrywise() | _created() | _mixing()
# Not on this machine; and those that are written out before the table is asked (tests/network/test_expansions.py).
ELSEWHERE = {"cuda", "group_norm", "instance_norm"}
NAMES = [name for name in TABLE if name not in ELSEWHERE]
