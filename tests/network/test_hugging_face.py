"""Models of Hugging Face as they come: batches as dictionaries, `ModelOutput`, checkpointing, language models."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import flatscope as fs
from flatscope.loss import next_tokens
from flatscope.network.interception import relative_difference
from flatscope.network.tracing import trace
from flatscope.symmetries.folding import fold_batchnorm

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

IDS = torch.randint(1, 30, (6, 7), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(7) < torch.tensor([[7], [5], [4], [7], [6], [3]])).long()
Y = torch.arange(6) % 3
SMALL = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


def bert(**more: Any) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(vocab_size=30, max_position_embeddings=8, num_labels=3, **SMALL, **more)
    return BertForSequenceClassification(config).double().eval()


def gpt(**more: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "n_positions": 8, "n_embd": 12, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **more)
    return GPT2LMHeadModel(config).double().eval()


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(image_size=8, patch_size=4, num_labels=3, **SMALL)
    return ViTForImageClassification(config).double().eval()


@pytest.mark.parametrize("by", ["attention", "norm"])
@pytest.mark.parametrize(
    ("build", "example", "free"),
    [
        (bert, {"input_ids": IDS, "attention_mask": MASK}, {"attention": 2, "norm": 1}),  # post-norm: the last is free
        (gpt, {"input_ids": IDS}, {"attention": 2, "norm": 4}),  # the last one is read by the tied embedding
        (vit, torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)), {"attention": 2, "norm": 5}),
    ],
)
def test_queries_and_norms_can_be_rescaled(build: Any, example: Any, free: dict[str, int], by: str) -> None:
    model = build()
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(std=0.5)
    twin = fs.rescale(model, example, by=by, low=0.04, high=25.0)
    assert relative_difference(model, twin, example) < 1e-10
    graph = trace(fold_batchnorm(model, example), example, inner=True)
    numbers = {int(n) for layer in graph for n in layer.outputs}
    attended = {n for n in numbers if n > 0 and -n in numbers}
    normed = {int(n) for layer in graph for n in layer.outputs if layer.kind == "norm" and n}
    assert {"attention": len(attended) / 12, "norm": len(normed) / 12} == free


def numbers(model: nn.Module, train: Any, **more: Any) -> list[float]:
    table = fs.measure(fs.Problem(model, train, **more), ["gradient_norm", "hessian_max_eigenvalue"])
    return [
        table["gradient_norm"],
        table["hessian_max_eigenvalue"],
        fs.Context(fs.Problem(model, train, **more)).scores().loss,
    ]


class Encoded:
    """One text at a time, as `datasets` gives them with the format "torch"."""

    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= len(IDS):
            raise IndexError
        return {"input_ids": IDS[index], "attention_mask": MASK[index], "label": Y[index]}


BATCH = {"input_ids": IDS, "attention_mask": MASK}


def batch_encoding() -> Any:
    from transformers import BatchEncoding

    return BatchEncoding(BATCH | {"labels": Y})


FORMS: dict[str, Callable[[], Any]] = {
    "labels inside": lambda: BATCH | {"labels": Y},
    "labels as a list": lambda: (BATCH, Y.tolist()),
    "batch encoding": batch_encoding,
    "loader": lambda: DataLoader(Encoded(), batch_size=4, shuffle=True),
    "samples by number": Encoded,
    "padded to the longest of each batch": lambda: [
        {"input_ids": IDS[i : i + 1, : int(MASK[i].sum())], "labels": Y[i : i + 1]} for i in range(6)
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_batches_of_every_form_give_the_same_numbers(form: str) -> None:
    assert numbers(bert(), FORMS[form]()) == pytest.approx(numbers(bert(), (BATCH, Y)), rel=1e-6)


def test_texts_of_many_lengths_have_every_measure_of_curvature() -> None:
    """Batches of other lengths cannot be joined, and need not be."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 30)).double()
    batches = [(IDS[i : i + 2, : 4 + i], next_tokens(IDS[i : i + 2, : 4 + i])) for i in range(3)]
    whole = torch.cat([nn.functional.pad(x, (0, 7 - x.shape[1])) for x, _ in batches])
    targets = torch.cat([nn.functional.pad(y, (0, 7 - y.shape[1]), value=-100) for _, y in batches])
    names = ["hessian_trace", "layer_trace", "rho_sum", "relative_flatness", "layer_max_eigenvalue"]
    frames = [
        fs.measure(fs.Problem(ByKeyword(model), data, loss="next_token"), names, precision=0).to_frame()
        for data in ([({"input_ids": x}, y) for x, y in batches], ({"input_ids": whole}, targets))
    ]
    assert not frames[0]["reason"].str.startswith("failed").any()
    assert frames[0]["value"].notna().any()
    assert frames[0]["value"].to_numpy() == pytest.approx(frames[1]["value"].to_numpy(), rel=1e-6, nan_ok=True)


class ByKeyword(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, input_ids: Tensor) -> Tensor:
        found: Tensor = self.net(input_ids)
        return found


def test_pictures() -> None:
    x = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert numbers(vit(), {"pixel_values": x, "labels": Y}) == pytest.approx(numbers(vit(), (x, Y)), rel=1e-9)


@pytest.mark.parametrize("cache", [True, False])
def test_language_models_have_the_loss_of_the_library(cache: bool) -> None:
    model = gpt(use_cache=cache)
    labels = IDS.where(MASK.bool(), -100)
    problem = fs.Problem(model, BATCH | {"labels": next_tokens(labels)}, loss="next_token")
    found = fs.Context(problem).scores().losses
    with torch.no_grad():
        for i in range(6):  # one by one: the library averages over all tokens of a batch
            own = {name: value[i : i + 1] for name, value in (BATCH | {"labels": labels}).items()}
            assert float(found[i]) == pytest.approx(float(model(**own).loss), rel=1e-6)
    assert torch.equal(next_tokens(labels), next_tokens(IDS, MASK))
    unmoved = fs.Problem(model, BATCH | {"labels": labels}, loss="next_token")
    assert torch.equal(fs.Context(unmoved).scores().losses, found)
    assert any("moved by one" in remark for remark in unmoved.remarks)
    with pytest.raises(fs.InputError, match='loss="next_token"'):
        fs.Problem(model, BATCH | {"labels": next_tokens(labels)})


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("build", [bert, gpt])
def test_gradient_checkpointing_changes_no_number(build: Any, reentrant: bool) -> None:
    names = ("resid_pdrop", "embd_pdrop", "attn_pdrop") if build is gpt else ()
    names = names or ("hidden_dropout_prob", "attention_probs_dropout_prob")
    off = dict.fromkeys(names, 0.0)
    targets, loss = (Y, "cross_entropy") if build is bert else (next_tokens(IDS, MASK), "next_token")
    expected = numbers(build(**off), (BATCH, targets), loss=loss)
    model = build(**off)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()  # the library checkpoints in training mode only; without dropout that is the same function
    assert numbers(model, (BATCH, targets), loss=loss) == pytest.approx(expected, rel=1e-6)


def test_models_without_a_head_say_what_to_do() -> None:
    with pytest.raises(fs.InputError, match=r"has .logits.*Wrap the model"):
        fs.Problem(bert().bert, (BATCH, Y))


def test_batches_without_labels_and_with_words() -> None:
    with pytest.raises(fs.InputError, match=r"labels.*keys input_ids, attention_mask"):
        fs.Problem(bert(), [BATCH])
    with pytest.raises(fs.InputError, match="train, text"):
        fs.Problem(bert(), BATCH | {"text": ["a"] * 6, "labels": Y})


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_gradient_noise_of_texts_without_a_mask_is_that_with_one_of_ones(batch_size: int) -> None:
    """Without a mask a stacked pass runs until a weight cannot be told from a signal: then samples go one by one."""
    ids = torch.randint(0, 10, (8, 6), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": next_tokens(ids)}
    names = ["gradient_noise", "gradient_noise_scale"]
    masked = batch | {"attention_mask": torch.ones_like(ids)}
    found, wanted = (
        fs.measure(fs.Problem(gpt(), train, loss="next_token", batch_size=batch_size), names)
        for train in (batch, masked)
    )
    for name in names:
        assert found[name] == pytest.approx(wanted[name], rel=1e-5), name
