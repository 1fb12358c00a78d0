"""Tiny float64 problems, all under 500 parameters, on which every measure is compared with its naive twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import flatscope as fs


@dataclass(frozen=True)
class Tiny:
    """A small network with data, and what a dense computation needs to know about it."""

    name: str
    model: nn.Module
    x: Tensor
    y: Tensor
    layers: tuple[str, ...]
    loss: Any = "cross_entropy"
    chain: bool = True
    piecewise_linear: bool = True
    xt: Tensor | None = None
    yt: Tensor | None = None
    initial: dict[str, Tensor] = field(default_factory=dict)

    def problem(self, **changes: Any) -> fs.Problem:
        given: dict[str, Any] = {"train": (self.x, self.y), "loss": self.loss, "initial": self.initial or None}
        if self.xt is not None:
            given["test"] = (self.xt, self.yt)
        return fs.Problem(self.model, **(given | changes))

    def with_model(self, model: nn.Module) -> Tiny:
        return replace(self, model=model)


class Residual(nn.Module):
    """A skip whose inner layer shares its input with the skip."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.outer, self.head = (nn.Linear(*s) for s in ((5, 4), (4, 6), (6, 4), (4, 3)))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        return self.head(torch.relu(x + self.outer(torch.relu(self.inner(x)))))


class Attention(nn.Module):
    """One attention block with a skip, LayerNorm and GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.mix = nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attend(h, h, h, need_weights=False)[0]
        return self.head(nn.functional.gelu(self.mix(x)).mean(1))


class Attending(nn.Module):
    """Little but attention: a normalisation, queries, keys and values of two heads, and what is read off them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.query, self.key, self.value, self.head = (nn.Linear(4, n) for n in (4, 4, 4, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (part(h).unflatten(-1, (2, 2)).transpose(1, 2) for part in (self.query, self.key, self.value))
        return self.head(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)[:, 0])


class OnSequences(nn.Module):
    """Linear layers applied at each position of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.mix, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.mix(torch.relu(self.token(x)))).sum(1))


def _built(
    name: str, model: nn.Module, shape: tuple[int, ...], classes: int, layers: tuple[str, ...], n: int = 11, **more: Any
) -> Tiny:
    generator = torch.Generator().manual_seed(len(name))
    model = model.double().eval()
    for parameter in model.parameters():  # wide enough that units are on and off, biases included
        bound = 1.5 / max(1, parameter[0].numel() if parameter.ndim > 1 else 4) ** 0.5
        parameter.data = (torch.rand(parameter.shape, generator=generator, dtype=torch.float64) * 2 - 1) * bound
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean = torch.randn(module.num_features, generator=generator, dtype=torch.float64) * 0.3
            module.running_var = torch.rand(module.num_features, generator=generator, dtype=torch.float64) + 0.5
            module.weight.data.abs_().add_(0.5)
        if isinstance(module, nn.LayerNorm):
            module.weight.data.abs_().add_(0.5)
    x = torch.randn(n, *shape, generator=generator, dtype=torch.float64)
    y = torch.randint(0, classes, (n,), generator=generator)
    xt = torch.randn(7, *shape, generator=generator, dtype=torch.float64)
    yt = torch.randint(0, classes, (7,), generator=generator)
    initial = {
        k: v.detach() + 0.1 * torch.randn(v.shape, generator=generator, dtype=v.dtype)
        for k, v in model.named_parameters()
    }
    given = {"x": x, "y": y, "xt": xt, "yt": yt, "initial": initial} | more
    return Tiny(name, model, layers=layers, **given)


def mlp() -> Tiny:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    return _built("mlp", model, (4,), 3, ("0", "2", "4"))


def binary() -> Tiny:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    return _built("binary", model, (3,), 2, ("0", "2"))


def lenet_like() -> Tiny:
    model = nn.Sequential()
    model.add_module("conv1", nn.Conv2d(1, 3, 3, padding=1))
    model.add_module("relu1", nn.ReLU())
    model.add_module("pool1", nn.MaxPool2d(2))
    model.add_module("conv2", nn.Conv2d(3, 4, 2))
    model.add_module("relu2", nn.ReLU())
    model.add_module("pool2", nn.AvgPool2d(2))
    model.add_module("flatten", nn.Flatten())
    model.add_module("fc1", nn.Linear(4, 5))
    model.add_module("relu3", nn.ReLU())
    model.add_module("fc2", nn.Linear(5, 3))
    return _built("lenet-like", model, (1, 6, 6), 3, ("conv1", "conv2", "fc1", "fc2"))


def batchnorm_conv() -> Tiny:
    """BatchNorm, stride, groups and dilation."""
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 2, dilation=2),
        nn.BatchNorm2d(4),
        nn.LeakyReLU(0.1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    return _built("batchnorm-conv", model, (2, 6, 6), 3, ("0", "3", "7"))


def residual() -> Tiny:
    return _built("residual", Residual(), (5,), 3, ("stem", "inner", "outer", "head"), chain=False)


def regression() -> Tiny:
    tiny = _built("regression", nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), (3,), 2, ("0", "2"))
    y, yt = (
        torch.randn(len(v), 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        for v in (tiny.y, tiny.yt)
    )
    return replace(tiny, y=y, yt=yt, loss="mse")


def sequences() -> Tiny:
    return _built("sequences", OnSequences(), (3, 3), 2, ("token", "mix", "head"))


def one_dimensional() -> Tiny:
    model = nn.Sequential(nn.Conv1d(2, 3, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(9, 3))
    return _built("one-dimensional", model, (2, 6), 3, ("0", "3"))


def smooth() -> Tiny:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
    return _built("smooth", model, (3,), 3, ("0", "2"), piecewise_linear=False)


def walled() -> Tiny:
    """Free units on both sides of a wall: scales and units stop in the midst of the network."""
    before, behind = (nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 5)), (nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    model = nn.Sequential(*before, nn.Tanh(), *behind)
    return _built("walled", model, (3,), 3, ("0", "2", "4", "6"), piecewise_linear=False)


def walled_batchnorm() -> Tiny:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    return _built("walled batchnorm", model, (3,), 3, ("0", "3", "5"), piecewise_linear=False)


def attention() -> Tiny:
    layers = ("attend.in_proj_weight", "attend.out_proj", "mix", "head")
    return _built("attention", Attention(), (3, 4), 3, layers, chain=False, piecewise_linear=False)


def attending() -> Tiny:
    layers = ("query", "key", "value", "head")
    tiny = _built("attending", Attending(), (3, 4), 3, layers, chain=False, piecewise_linear=False)
    with torch.no_grad():  # attention as sharp as no other layer, and right about its samples, as after training
        for part, factor in (("query", 4.0), ("key", 4.0), ("value", 2.0)):
            for value in tiny.model.get_submodule(part).parameters():
                value *= factor
        return replace(tiny, y=tiny.model(tiny.x).argmax(1))


def softmax_regression() -> Tiny:
    return _built("softmax-regression", nn.Sequential(nn.Linear(4, 3)), (4,), 3, ("0",))


BUILDERS: tuple[Callable[[], Tiny], ...] = (
    mlp,
    binary,
    lenet_like,
    batchnorm_conv,
    residual,
    regression,
    sequences,
    one_dimensional,
    smooth,
    attention,
    softmax_regression,
)
