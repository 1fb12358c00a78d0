"""The models of the benchmarks on a GPU, at random weights and on random data: nothing is downloaded.

The cost of a measurement does not depend on what a network has learned. BatchNorm gets the statistics of the data, so
that outputs are of ordinary size. `tiny` gives networks of the same kinds that a CPU measures in seconds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatscope.training import build


class Case(NamedTuple):
    """A network with its data: what `fs.Problem` and the peers take."""

    model: nn.Module
    x: Tensor
    y: Tensor
    loss: str = "cross_entropy"

    @property
    def parameters(self) -> int:
        return sum(value.numel() for value in self.model.parameters())


class Logits(nn.Module):
    """A model of transformers as a function of one tensor that gives one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


class FlatTokens(nn.Module):
    """A language model whose outputs are a row per token, as the peers' cross-entropy wants them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).flatten(0, 1)


class Block(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out)
        same = stride == 1 and n_in == n_out
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out))
        )

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


def resnet18(classes: int = 10, width: int = 64, stem: str = "cifar") -> nn.Sequential:
    """ResNet-18 of He et al. (2016); its stem for small images, or (`imagenet`) the one of timm and torchvision."""
    small = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    large = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks, n_in = [], width
    for stage in range(4):
        n_out = width * 2**stage
        blocks += [Block(n_in, n_out, 1 if stage == 0 else 2), Block(n_out, n_out, 1)]
        n_in = n_out
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_in, classes)]
    return nn.Sequential(*(small if stem == "cifar" else large), *blocks, *head)


def resnet50_case(n: int, device: str, tiny: bool) -> Case:
    """ResNet-50, 1,000 classes, 224 px, as transformers builds it."""
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]} if tiny else {}
    model = ResNetForImageClassification(ResNetConfig(num_labels=20 if tiny else 1000, **sizes))
    return _images(Logits(model), min(n, 8) if tiny else n, 32 if tiny else 224, 20 if tiny else 1000, device)


def timm_resnet50_case(n: int, device: str, tiny: bool) -> Case:
    """ResNet-50 as timm builds it, or torchvision where timm is not there: the same network under other names."""
    classes, size = (20, 32) if tiny else (1000, 224)
    try:
        import timm

        shape = {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16), "stem_width": 8} if tiny else {}
        model = timm.create_model("resnet50", num_classes=classes, zero_init_last=False, **shape)
    except ImportError:
        from torchvision.models.resnet import Bottleneck, ResNet

        model = ResNet(Bottleneck, [1, 1, 1, 1] if tiny else [3, 4, 6, 3], num_classes=classes)
    return _images(model, min(n, 16) if tiny else n, size, classes, device)


def resnet18_case(n: int, device: str, tiny: bool, classes: int = 10, width: int = 64, stem: str = "cifar") -> Case:
    """ResNet-18 on images of 32 px."""
    model = resnet18(min(classes, 20) if tiny else classes, 4 if tiny else width, stem)
    return _images(model, min(n, 16) if tiny else n, 32, min(classes, 20) if tiny else classes, device)


def vit_case(n: int, device: str, tiny: bool, trained: bool = False) -> Case:
    """ViT-S/16, 1,000 classes, 224 px; if asked for trained on its images until it knows most of them.

    Without training the traces of some layers are zero but for noise: their relative error would mean nothing.
    """
    from transformers import ViTConfig, ViTForImageClassification

    shape = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536, "num_hidden_layers": 12}
    if tiny:
        shape = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 2}
    classes, size = (20, 32) if tiny else (1000, 224)
    config = ViTConfig(image_size=size, patch_size=16, num_labels=classes, attn_implementation="eager", **shape)
    case = _images(Logits(ViTForImageClassification(config)), min(n, 8) if tiny else n, size, classes, device)
    if trained:
        _train(case)
    return case


def _train(case: Case, loss: float = 1.5, epochs: int = 150, batch: int = 64) -> None:
    optimizer = torch.optim.Adam(case.model.parameters(), 1e-4)
    for _ in range(epochs):
        losses = []
        for x, y in zip(case.x.split(batch), case.y.split(batch), strict=True):
            optimizer.zero_grad()
            value = nn.functional.cross_entropy(case.model(x), y)
            value.backward()
            nn.utils.clip_grad_norm_(case.model.parameters(), 1.0)
            optimizer.step()
            losses.append(value.detach())
        if float(torch.stack(losses).mean()) < loss:
            break
    case.model.zero_grad()


def gpt2_case(n: int, length: int, device: str, tiny: bool, small: bool = False, vocabulary: int = 1000) -> Case:
    """GPT-2 (124 M), or one of 3 M beside its vocabulary of so many tokens; each token's target is the next one."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_embd": 256, "n_layer": 4, "n_head": 4, "vocab_size": vocabulary} if small else {}
    if tiny:
        shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50}
        n, length = min(n, 4), min(length, 16)
    config = GPT2Config(use_cache=False, attn_implementation="eager", **shape)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Logits(GPT2LMHeadModel(config)).eval().to(device)
        tokens = torch.randint(0, config.vocab_size, (n, length + 1))
    return Case(model, tokens[:, :-1].to(device), tokens[:, 1:].to(device), "next_token")


def lenet_case(n: int, device: str, tiny: bool) -> Case:
    """LeNet-5 on images of the size of CIFAR-10's."""
    return _images(build("lenet5"), min(n, 40) if tiny else n, 32, 10, device)


def _images(model: nn.Module, n: int, size: int, classes: int, device: str) -> Case:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, size, size, generator=generator).to(device)
    y = torch.randint(0, classes, (n,), generator=generator).to(device)
    model = model.to(device)
    _calibrate(model, x[:64])
    return Case(model.eval(), x, y)


def _calibrate(model: nn.Module, x: Tensor) -> None:
    """Statistics of BatchNorm from one batch."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    for module in norms:
        module.momentum = 1.0
        module.train()
    if norms:
        with torch.no_grad():
            model(x)
