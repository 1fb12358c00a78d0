"""Networks by the names that people have them by: folders of `save_pretrained`, timm, folders of checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.modules.module import _global_module_registration_hooks, _global_parameter_registration_hooks

from flatscope.cli.run_compare import _weight_files
from flatscope.cli.sources import load_model
from flatscope.errors import InputError
from flatscope.inputs import hub_models
from flatscope.inputs.hub_models import is_hub_model


def test_a_folder_that_save_pretrained_wrote_is_that_network(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=20, num_labels=3
    )
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "bert")
    loaded = load_model(f"hf:{tmp_path / 'bert'}")
    assert type(loaded) is type(model)
    assert not loaded.training
    tokens = torch.arange(8).reshape(2, 4)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    (tmp_path / "bert" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "bert" / "pytorch_model.bin")
    with pytest.raises(InputError, match="safetensors"):
        load_model(f"hf:{tmp_path / 'bert'}")


def test_what_is_no_such_folder_is_refused_with_what_to_do(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(InputError, match="no such folder"):
        load_model(f"hf:{tmp_path / 'nothing'}")
    with pytest.raises(InputError, match=r"config\.json"):
        load_model(f"hf:{tmp_path}")


def test_weights_that_the_folder_does_not_hold_are_not_drawn_without_a_word(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(**sizes, vocab_size=30)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    held = {name: value for name, value in load_file(path).items() if "classifier" not in name}
    save_file(held, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"none of classifier\.bias, classifier\.weight"):
        load_model(f"hf:{tmp_path}")


@pytest.mark.parametrize("named", [[5], ["os.system"], ["\x1b[2J"], ["pipeline"], []])
def test_a_config_that_names_no_model_is_refused(named: list[object], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": named}))
    with pytest.raises(InputError, match=r"whose class transformers has|config\.json"):
        load_model(f"hf:{tmp_path}")


@pytest.mark.parametrize("weights", ["of the folder", "of a file"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 10**9}, r"at most 2,000 modules.*config\.json"),
        ({"vocab_size": 10**5}, r"fit in the memory of .* GiB"),
        ({"hidden_size": -4}, "."),
    ],
)
def test_a_config_that_asks_for_a_model_without_end_is_refused(
    change: dict[str, int], words: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(hub_models, "MOST_MODULES", 2000)
    monkeypatch.setattr(hub_models, "_memory_bytes", lambda: 10**6)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, vocab_size=30)).save_pretrained(
        tmp_path
    )
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    hooks = len(_global_parameter_registration_hooks), len(_global_module_registration_hooks)
    given = tmp_path / "model.safetensors" if weights == "of a file" else None
    with pytest.raises(InputError, match=words):
        load_model(f"hf:{tmp_path}", given)
    assert (len(_global_parameter_registration_hooks), len(_global_module_registration_hooks)) == hooks


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(InputError, match="pip install timm torchvision"):
        load_model("timm:resnet18")


def test_only_names_of_hubs_are_taken_for_them() -> None:
    assert is_hub_model("hf:owner/name")
    assert is_hub_model("timm:resnet18")
    assert not is_hub_model("my_model.py:build")
    assert not is_hub_model("mlp")
    assert not is_hub_model("timm:")


def test_a_folder_of_checkpoints_stands_for_those_inside_in_their_order(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        torch.save(nn.Linear(2, 2).state_dict(), tmp_path / f"epoch-{number}.pt")
    (tmp_path / "notes.txt").write_text("not one of them")
    assert [path.name for path in _weight_files([tmp_path])] == ["epoch-1.pt", "epoch-2.pt", "epoch-10.pt"]
    both = [tmp_path / "epoch-1.pt", tmp_path / "epoch-2.pt"]
    assert _weight_files(both) == both
