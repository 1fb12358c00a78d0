"""The commands sensitivity, forecast and diagonal, their files, and their sections of the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import flatscope as fs
from flatscope.cli.app import app
from flatscope.errors import InputError
from flatscope.inputs.weight_files import save_weights
from flatscope.reports.items import read_item

MODEL = """
import torch
from torch import nn

def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))

def samples():
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(30, 4, generator=generator), torch.arange(30) % 3), None
"""


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    torch.manual_seed(1)
    save_weights(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), tmp_path / "old.safetensors")
    save_weights(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), tmp_path / "new.safetensors")
    return ["--model", "net.py:small", "--data", "net.py:samples", "--weights", "old.safetensors"]


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_sensitivity_chooses_rounds_and_writes(network: list[str], tmp_path: Path) -> None:
    files = ["--out", "s.json", "--allocation-out", "a.json", "--rounded-out", "r.safetensors", "--report", "s.html"]
    shown = run("sensitivity", *network, "--bits", "8", "--bits", "3", "--sparsity", "0.5", "--mean-bits", "3", *files)
    assert shown.startswith("At 8 bits, ")
    assert "one by one their rises add up" in shown
    found = fs.Sensitivity.load("s.json")
    assert set(found.to_frame()["what"]) == {"8 bits", "3 bits", "50 % pruned", "50 % pruned by OBD"}
    assert dict(fs.Allocation.load("a.json")) == {"0": 3, "2": 3}
    old, rounded = load_file("old.safetensors"), load_file("r.safetensors")
    scale = old["0.weight"].abs().amax(1, keepdim=True) / 3
    torch.testing.assert_close(rounded["0.weight"], (old["0.weight"] / scale).round() * scale)
    assert torch.equal(rounded["0.bias"], old["0.bias"])
    assert "Sensitivity" in (tmp_path / "s.html").read_text()


def test_json_is_alone_on_standard_output(network: list[str]) -> None:
    content = json.loads(run("sensitivity", *network, "--bits", "4", "--sparsity", "0", "--json"))
    assert len(content["rows"]) == 2
    content = json.loads(run("forecast", *network, "--to", "new.safetensors", "--json"))
    assert [row["layer"] for row in content["rows"]] == ["", "0", "2"]


def test_forecast_and_diagonal_write_what_the_functions_give(network: list[str], tmp_path: Path) -> None:
    shown = run("forecast", *network, "--to", "new.safetensors", "--out", "f.npz", "--report", "f.html")
    assert shown.startswith("The new weights change this loss by ")
    assert "Forecast" in (tmp_path / "f.html").read_text()
    run("diagonal", *network, "--matrix", "empirical_fisher", "--out", "d.safetensors")
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    model.load_state_dict(load_file("old.safetensors"))
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 4, generator=generator), torch.arange(30) % 3
    twin = fs.diagonal(fs.Problem(model, train=(x, y)), "empirical_fisher")
    torch.testing.assert_close(fs.Diagonal.load("d.safetensors")["0.weight"], twin["0.weight"])


def test_reports_read_both_from_every_kind_of_file(network: list[str], tmp_path: Path) -> None:
    for ending in ("json", "parquet", "npz"):
        run("sensitivity", *network, "--bits", "4", "--sparsity", "0", "--out", f"s.{ending}")
        run("forecast", *network, "--to", "new.safetensors", "--out", f"f.{ending}")
        assert isinstance(read_item(f"s.{ending}")[0][1], fs.Sensitivity)
        assert isinstance(read_item(f"f.{ending}")[0][1], fs.Forecast)
    fs.report([fs.Sensitivity.load("s.npz"), fs.Forecast.load("f.npz")], "both.html")
    page = (tmp_path / "both.html").read_text()
    assert "mean bits a weight" in page
    assert "predicted share" in page


def test_slips_are_refused_before_any_work(network: list[str]) -> None:
    for words, said in (
        (["sensitivity", *network, "--allocation-out", "a.json"], "--mean-bits"),
        (["sensitivity", *network, "--out", "s.txt"], "ending in"),
        (["diagonal", *network, "--out", "d.json"], "ending in"),
        (["diagonal", *network, "--out", "d.safetensors", "--matrix", "fisher"], "--matrix"),
        (["forecast", *network, "--to", "nothing.safetensors"], "weight file"),
    ):
        with pytest.raises(InputError, match=said):
            CliRunner().invoke(app, words, catch_exceptions=False)


@pytest.mark.parametrize("size", ["2.9", "-1", "nan"])
def test_a_size_that_no_choice_reaches_is_refused_before_data_are_read(
    network: list[str], size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatscope.cli.run_decisions.load_problem", lambda _: pytest.fail("data were read"))
    words = ["sensitivity", *network, "--bits", "4", "--bits", "3", "--mean-bits", size]
    with pytest.raises(InputError, match="--mean-bits"):
        CliRunner().invoke(app, words, catch_exceptions=False)
