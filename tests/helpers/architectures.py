"""Networks as they come out of libraries, with random weights and at tiny sizes: which measure works on which?

`architectures()` gives {name: a function that makes (model, inputs, targets, loss)}. Those of timm and transformers are
there where these packages are installed. Everything is seeded, in eval mode and in float32; BatchNorm gets statistics
and scales that do something, since a fresh one is the identity.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

Case = tuple[nn.Module, Any, Tensor, str]
SAMPLES, CLASSES, WORDS = 6, 5, 40

# timm: {name of a model, or module and class: (pixels, options)}. Options make it smaller and leave its shape as it is.
IMAGE_MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "resnet18": (32, {"channels": (8, 16, 24, 32), "stem_width": 8}),
    "resnet50d": (32, {"channels": (8, 12, 16, 20), "stem_width": 8, "layers": (1, 1, 1, 1)}),
    "seresnet18": (32, {"channels": (8, 16, 24, 32), "stem_width": 8}),
    "res2net50_26w_4s": (32, {"channels": (8, 12, 16, 20), "base_width": 26, "layers": (1, 1, 1, 1)}),
    "resnetv2_50": (32, {"channels": (16, 24, 32, 40), "stem_chs": 8, "layers": (1, 1, 1, 1)}),
    "regnetx_002": (32, {}),
    "densenet121": (32, {"growth_rate": 4, "block_config": (2, 2, 2, 2)}),
    "repvgg_a0": (32, {}),
    "mobilenetv2_035": (32, {}),
    "mobilenetv3_small_050": (32, {}),
    "efficientnet_b0": (32, {}),
    "convnext_atto": (32, {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}),
    "vit_tiny_patch16_224": (32, {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 2}),
    "swin_tiny_patch4_window7_224": (
        32,
        {"img_size": 32, "window_size": 2, "embed_dim": 12, "depths": (1, 2), "num_heads": (2, 2)},
    ),
    "mlp_mixer.MlpMixer": (32, {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_blocks": 2}),
}


def architectures() -> dict[str, Callable[[], Case]]:
    """{name: maker of (model, inputs, targets, loss)}; a maker of a missing package is not there."""
    found: dict[str, Callable[[], Case]] = {f"torch/{make.__name__}": make for make in PLAIN}
    if importlib.util.find_spec("timm") is not None:
        found |= {f"timm/{name}": functools.partial(image_model, name) for name in IMAGE_MODELS}
    if importlib.util.find_spec("transformers") is not None:
        found |= {f"transformers/{make.__name__}": make for make in LANGUAGE_MODELS}
    return found


# timm


class _Named(type):
    """A class whose attributes are their own names: members of an enumeration, in place of one."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return name


class _Stub(ModuleType):
    """A module in which every name is a class without content."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Named(name, (nn.Module,), {})
        setattr(self, name, made)
        return made


class _StubFinder:
    """Finds `torchvision` and all below it as stubs."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, _StubFinder, is_package=True)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        return None


@functools.cache
def timm() -> Any:
    """The package timm. It imports torchvision for its data, which its models do not need: a stub stands in.

    torchvision itself is never imported: a build for another torch would fail. The stub is gone afterwards, so that no
    other library takes it for torchvision.
    """
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "torchvision"}
    for name in kept:
        del sys.modules[name]
    sys.meta_path.insert(0, _StubFinder)  # type: ignore[arg-type]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("timm")
    finally:
        sys.meta_path.remove(_StubFinder)  # type: ignore[arg-type]
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.modules.update(kept)


def image_model(name: str) -> Case:
    """A model of timm on random pictures of CLASSES classes."""
    pixels, options = IMAGE_MODELS[name]
    module, _, cls = name.rpartition(".")
    create = getattr(getattr(timm().models, module), cls) if module else functools.partial(timm().create_model, name)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = create(num_classes=CLASSES, **options)
    x, y = pictures(pixels)
    settled(model, x)
    head = model.get_classifier().weight
    with torch.no_grad():  # some begin with outputs of 0, some of 20, where the softmax knows one class only
        if not head.any():
            head.normal_(std=head.shape[1] ** -0.5)
        head.div_(max(1.0, float(model(x).std())))
    return model, x, y, "cross_entropy"


# Transformers


def bert() -> Case:
    """BERT with a head for sentences, padded texts and their mask."""
    from transformers import BertConfig, BertForSequenceClassification

    return _text_classifier(BertForSequenceClassification, BertConfig, intermediate_size=32, num_hidden_layers=2)


def distilbert() -> Case:
    """DistilBERT with a head for sentences."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    return _text_classifier(DistilBertForSequenceClassification, DistilBertConfig, dim=24, hidden_dim=32, n_layers=2)


def gpt2() -> Case:
    """GPT-2 as a language model; its last layer is its table of words."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return _language_model(GPT2LMHeadModel, GPT2Config, n_embd=24, n_layer=2, n_head=2, n_positions=16)


def llama() -> Case:
    """Llama as a language model: RMSNorm, rotary positions, gated layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return _language_model(LlamaForCausalLM, LlamaConfig, **sizes, num_key_value_heads=1)


def vit() -> Case:
    """ViT with a head for pictures."""
    from transformers import ViTConfig, ViTForImageClassification

    return _picture_classifier(ViTForImageClassification, ViTConfig, image_size=32, patch_size=16, **_attention())


def resnet() -> Case:
    """ResNet with basic blocks and a head for pictures."""
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    return _picture_classifier(ResNetForImageClassification, ResNetConfig, **sizes)


LANGUAGE_MODELS = (bert, distilbert, gpt2, llama, vit, resnet)


def _attention() -> dict[str, Any]:
    return {"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}


def _made(model: Any, config: Any, **sizes: Any) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: nn.Module = model(config(**sizes))
    return made.eval()


def _text_classifier(model: Any, config: Any, **sizes: Any) -> Case:
    few = {"vocab_size": WORDS, "num_labels": CLASSES, "hidden_size": 24, "num_attention_heads": 2}
    named = {"vocab_size": WORDS, "num_labels": CLASSES, "n_heads": 2} if "dim" in sizes else few
    network = _made(model, config, max_position_embeddings=16, initializer_range=0.2, **named, **sizes)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, WORDS, (SAMPLES, 8), generator=generator)
    mask = (torch.arange(8) < torch.randint(4, 9, (SAMPLES, 1), generator=generator)).long()
    return network, {"input_ids": tokens * mask, "attention_mask": mask}, labels(), "cross_entropy"


def _language_model(model: Any, config: Any, **sizes: Any) -> Case:
    network = _made(model, config, vocab_size=WORDS, use_cache=False, bos_token_id=0, eos_token_id=0, **sizes)
    tokens = torch.randint(0, WORDS, (SAMPLES, 9), generator=torch.Generator().manual_seed(1))
    return network, {"input_ids": tokens[:, :-1]}, tokens[:, 1:].contiguous(), "next_token"


def _picture_classifier(model: Any, config: Any, **sizes: Any) -> Case:
    x, y = pictures(32)
    return settled(_made(model, config, num_labels=CLASSES, **sizes), x), x, y, "cross_entropy"


# Plain torch


def mlp() -> Case:
    """Three dense layers."""
    return _of(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, CLASSES)), (6,)
    )


def lstm() -> Case:
    """Two layers of LSTM over a sequence, read at its end."""
    return _of(lambda: _Recurrent(nn.LSTM(6, 8, num_layers=2, batch_first=True), 8), (4, 6))


def gru() -> Case:
    """GRU in both directions."""
    return _of(lambda: _Recurrent(nn.GRU(6, 8, batch_first=True, bidirectional=True), 16), (4, 6))


def encoder() -> Case:
    """Two encoder layers of torch, with GELU."""

    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, activation="gelu", batch_first=True)
        stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        return nn.Sequential(stack, _Mean(), nn.Linear(12, CLASSES))

    return _of(build, (4, 12))


def products() -> Case:
    """Matrices that are parameters of their own: `x @ w` and `einsum`."""
    return _of(_Products, (6,))


def weight_norm() -> Case:
    """Layers whose weight is computed from a length and a direction."""
    norm = nn.utils.parametrizations.weight_norm
    return _of(lambda: nn.Sequential(norm(nn.Linear(6, 8)), nn.ReLU(), norm(nn.Linear(8, CLASSES))), (6,))


def tied() -> Case:
    """One weight used twice."""
    return _of(_Tied, (6,))


def segmentation() -> Case:
    """A U of convolutions with a class for every pixel."""
    torch.manual_seed(0)
    images = torch.randn(SAMPLES, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    classes = torch.randint(0, CLASSES, (SAMPLES, 8, 8), generator=torch.Generator().manual_seed(2))
    return settled(_UNet(), images), images, classes, "cross_entropy"


PLAIN = (mlp, lstm, gru, encoder, products, weight_norm, tied, segmentation)


class _Recurrent(nn.Module):
    def __init__(self, cells: nn.Module, width: int) -> None:
        super().__init__()
        self.cells, self.head = cells, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.cells(x)[0][:, -1])
        return made


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class _Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(6, 8) / 3), nn.Parameter(torch.randn(CLASSES, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nj,cj->nc", torch.relu(x @ self.first), self.second)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(torch.relu(self.inner(torch.relu(self.inner(x)))))
        return made


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.norm, self.up = nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.head = nn.Conv2d(12, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.relu(self.down(x))
        deep = torch.relu(self.norm(self.inner(wide)))
        made: Tensor = self.head(torch.cat([wide, torch.relu(self.up(deep))], dim=1))
        return made


def _of(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> Case:
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(1))
    return settled(build(), x), x, labels(), "cross_entropy"


# Shared


def settled(model: nn.Module, inputs: Any) -> nn.Module:
    """In eval mode, with BatchNorm as after training: random scales and shifts, statistics near those of the inputs."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    generator = torch.Generator().manual_seed(3)

    def uniform(like: Tensor, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(like.shape, generator=generator)

    model.eval()
    with torch.no_grad():
        for module in norms:
            module.momentum = 1.0  # the statistics of the last batch
            module.weight.copy_(uniform(module.weight, 0.6, 1.4))
            module.bias.copy_(uniform(module.bias, -0.2, 0.2))
            module.train()
        if norms:
            model(**inputs) if isinstance(inputs, dict) else model(inputs)
        for module in norms:
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.add_(uniform(module.running_mean, -0.2, 0.2))
            module.running_var.mul_(uniform(module.running_var, 0.7, 1.4)).clamp_(min=0.1)
            module.momentum = 0.1
    return model.eval()


def pictures(pixels: int) -> tuple[Tensor, Tensor]:
    """Random pictures with their labels."""
    return torch.randn(SAMPLES, 3, pixels, pixels, generator=torch.Generator().manual_seed(1)), labels()


def outputs(raw: Any) -> Tensor:
    """The logits of whatever a model returns."""
    found: Tensor = getattr(raw, "logits", raw)
    return found


def labels() -> Tensor:
    """Every class at least once."""
    return torch.arange(SAMPLES) % CLASSES
