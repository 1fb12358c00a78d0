"""What the page of which measure works where is made of is current; the default table fails on no network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from architectures import architectures

import flatscope as fs
from flatscope.registry import select

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
CHEAP = ["parameter_count", "gradient_norm", "margin", "l2_norm", "l2_path_norm", "lipschitz_linf"]
# Small ones of every kind: on them the whole default table is run.
SMALL = [
    *("torch/mlp", "torch/lstm", "torch/gru", "torch/encoder", "torch/products", "torch/weight_norm", "torch/tied"),
    *("torch/segmentation", "transformers/bert", "transformers/distilbert", "transformers/gpt2", "transformers/llama"),
    *("transformers/vit", "transformers/resnet", "timm/vit_tiny_patch16_224"),
]


def failed(name: str, names: list[str] | str, budget: str) -> list[str]:
    """Rows of measures that raised an error, or that have neither a value nor a reason."""
    model, inputs, targets, loss = architectures()[name]()
    inputs = {key: value[:2] for key, value in inputs.items()} if isinstance(inputs, dict) else inputs[:2]
    problem = fs.Problem(model, (inputs, targets[:2]), loss=loss)
    frame = fs.measure(problem, names, precision=0.5, budget=budget).to_frame()
    assert isinstance(names, str) or set(frame["measure"]) == set(names)
    soon = [name for name in CHEAP if name != "lipschitz_linf"]  # which is attacked before it is given
    assert not frame.loc[frame["measure"].isin(soon), "reason"].str.startswith("not begun").any()
    wrong = frame["reason"].str.startswith("failed") | (frame["value"].isna() & (frame["reason"] == ""))
    return [f"{row.measure}: {row.reason}" for row in frame[wrong].itertuples()]


OTHERS = [name for name in architectures() if name not in SMALL]
NONE = pytest.param("", marks=pytest.mark.skip(reason="transformers and timm are not here"))


@pytest.mark.parametrize("name", OTHERS or [NONE])
def test_cheap_measures_fail_on_no_network(name: str) -> None:
    assert failed(name, CHEAP, "20s") == []


@pytest.mark.parametrize("name", [name for name in SMALL if name in architectures()])
def test_the_default_table_fails_on_no_network(name: str) -> None:
    assert failed(name, "standard", "2s") == []


def test_the_page_has_every_measure_and_every_network() -> None:
    known = json.loads((ROOT / "docs" / "networks.json").read_text(encoding="utf-8"))
    packages = {name.split("/")[0] for name in architectures()}  # those that are installed
    assert [name for name in known if name.split("/")[0] in packages] == list(architectures())
    measures = {entry.name for entry in select("standard", "measure")}
    assert {name: set(found) ^ measures for name, found in known.items()} == {name: set() for name in known}
    assert not [reason for found in known.values() for reason in found.values() if reason.startswith("failed")]
