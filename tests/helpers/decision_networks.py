"""Networks for the tests of decisions: small, float64, trained a little, of every kind that the functions name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from networks import attention, batchnorm_conv, lenet_like, mlp, regression, residual, sequences, smooth
from torch import Tensor, nn
from torch.func import functional_call


class Adapted(nn.Module):
    """A frozen dense layer with a low-rank adapter."""

    def __init__(self, inputs: int, outputs: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class MergedAdapter(nn.Module):
    """The same with the adapter's product added to the weight inside of forward."""

    def __init__(self, inputs: int, outputs: int, rank: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5, requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(rank, inputs)), nn.Parameter(0.3 * torch.randn(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight + self.b @ self.a)


class Transposed(nn.Module):
    """Matrices used as `x @ w`, and a table that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.w = nn.Parameter(torch.randn(4, 4) / 2)

    def forward(self, tokens: Tensor) -> Tensor:
        h = torch.relu(self.table(tokens).mean(1) @ self.w)
        return h @ self.table.weight.T


def built(
    build: Callable[[], nn.Module], shape: tuple[int, ...], classes: int, n: int = 24
) -> tuple[nn.Module, Tensor, Tensor]:
    """A model in float64 with samples."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = build().double().eval()
        return model, torch.randn(n, *shape, dtype=torch.float64), torch.randint(classes, (n,))


def lora() -> tuple[nn.Module, Tensor, Tensor]:
    return built(lambda: nn.Sequential(Adapted(5, 6), nn.ReLU(), Adapted(6, 3)), (5,), 3)


def merged_lora() -> tuple[nn.Module, Tensor, Tensor]:
    return built(lambda: nn.Sequential(MergedAdapter(5, 6), nn.ReLU(), nn.Linear(6, 3)), (5,), 3)


def transposed_conv() -> tuple[nn.Module, Tensor, Tensor]:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 49, 3)
        )

    return built(build, (4, 3, 3), 3)


def grouped() -> tuple[nn.Module, Tensor, Tensor]:
    """Two groups of channels, then a depthwise convolution."""

    def build() -> nn.Module:
        first, second = nn.Conv2d(4, 6, 3, stride=2, groups=2), nn.Conv2d(6, 6, 3, padding="same", groups=6)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(54, 3))

    return built(build, (4, 7, 7), 3)


class UsedTwice(nn.Module):
    """One layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.head = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.both(torch.relu(self.both(x)))))


def used_twice() -> tuple[nn.Module, Tensor, Tensor]:
    return built(UsedTwice, (5,), 3)


def tied() -> tuple[nn.Module, Tensor, Tensor]:
    model, _, _ = built(Transposed, (1,), 7)
    tokens = torch.randint(7, (24, 5), generator=torch.Generator().manual_seed(1))
    return model, tokens, torch.randint(7, (24,), generator=torch.Generator().manual_seed(2))


def _tiny(build: Callable[[], object]) -> Callable[[], tuple[nn.Module, Tensor, Tensor]]:
    def made() -> tuple[nn.Module, Tensor, Tensor]:
        tiny = build()
        return tiny.model, tiny.x, tiny.y  # type: ignore[attr-defined]

    return made


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {
    "mlp": _tiny(mlp),
    "lenet-like": _tiny(lenet_like),
    "batchnorm": _tiny(batchnorm_conv),
    "residual": _tiny(residual),
    "sequences": _tiny(sequences),
    "smooth": _tiny(smooth),
    "attention": _tiny(attention),
    "lora": lora,
    "merged lora": merged_lora,
    "transposed": transposed_conv,
    "tied": tied,
    "grouped": grouped,
    "used twice": used_twice,
    "regression": _tiny(regression),
}
LOSSES = {"regression": "mse"}


def sample_losses(name: str, model: nn.Module, x: Tensor, y: Tensor, params: dict[str, Tensor] | None = None) -> Tensor:
    """Loss of every sample, written out."""
    outputs = functional_call(model, params or {}, (x,))
    if name == "regression":
        return ((outputs - y) ** 2).sum(1)
    return torch.logsumexp(outputs, 1) - outputs[torch.arange(len(y)), y]


def dense_block(name: str, model: nn.Module, x: Tensor, y: Tensor, weight: str) -> tuple[Tensor, Tensor]:
    """Gradient (p,) and Hessian (p, p) of the mean loss by one parameter, by autograd's own functions."""
    value = dict(model.named_parameters())[weight].detach()

    def loss(flat: Tensor) -> Tensor:
        return sample_losses(name, model, x, y, {weight: flat.reshape(value.shape)}).mean()

    flat = value.reshape(-1).clone()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        gradient = torch.autograd.functional.jacobian(loss, flat)
        return gradient, torch.autograd.functional.hessian(loss, flat)
