"""What `explain` says of a network: its layers and units, the way of every parameter, what is left out."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import flatscope as fs
from flatscope.cli.app import app
from flatscope.curvature.route import route_of
from flatscope.errors import InputError
from flatscope.explaining import DROPPED, FROZEN
from flatscope.forms import plain_context

torch.set_num_threads(1)


class Two(nn.Module):
    """Two heads, of which one is run and dropped; a gate, a frozen layer, a matrix that no layer has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen, self.body, self.gated = nn.Linear(4, 6).requires_grad_(False), nn.Linear(6, 8), nn.Linear(8, 5)
        self.head, self.other, self.table = nn.Linear(5, 3), nn.Linear(5, 9), nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Samples (n, 4)."""
        h = torch.tanh(self.gated(torch.relu(self.body(self.frozen(x)))))
        self.other(h)
        return self.head(h) @ torch.linalg.matrix_exp(self.table)


def problem_of(model: nn.Module, features: int = 4) -> fs.Problem:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, features, generator=generator)
    return fs.Problem(model.eval(), (x, torch.arange(30) % 3))


def test_every_parameter_has_the_way_that_is_taken() -> None:
    problem = problem_of(Two())
    frame = fs.explain(problem).to_frame().set_index("parameter")
    assert set(frame.index[frame["way"] == FROZEN]) == {"frozen.weight", "frozen.bias"}
    assert set(frame.index[frame["way"] == DROPPED]) == {"other.weight", "other.bias"}
    context = plain_context(fs.Context(problem))
    ways = route_of(context).ways
    for name, row in frame.iterrows():
        if row["way"] not in (FROZEN, DROPPED):
            assert (row["way"], row["reason"]) == (ways[name].kind, ways[name].reason)
    assert "tanh" in frame.loc["body.weight", "reason"]


def test_units_that_cannot_be_rescaled_have_the_reason() -> None:
    frame = fs.explain(problem_of(Two())).to_frame().set_index("parameter")
    assert tuple(frame.loc["body.weight", ["units", "rescalable"]]) == (8, 8)
    assert tuple(frame.loc["gated.weight", ["units", "rescalable"]]) == (5, 0)
    assert "tanh" in frame.loc["gated.weight", "not_rescaled"]


def test_a_network_of_relus_is_free() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    found = fs.explain(problem_of(model))
    assert "all 6 hidden units" in found.headline.lower()
    assert set(found.to_frame()["way"]) == {"exact columns"}
    assert len(found.headline.splitlines()) <= 5


def test_a_matrix_that_no_layer_has_is_named() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.mix = nn.Linear(4, 3), nn.Parameter(torch.eye(3))

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            return h + (h[:, :, None] * self.mix).sum(1)

    found = fs.explain(problem_of(Outer()))
    assert found.meta["not_covered"].keys() == {"mix"}
    assert "mix" in found.headline
    assert torch.isnan(torch.tensor(fs.measure(problem_of(Outer()), "rho_sum")["rho_sum"]))


def test_nothing_changes_and_it_can_be_kept(tmp_path) -> None:  # type: ignore[no-untyped-def]
    problem = problem_of(Two())
    before = {name: value.clone() for name, value in problem.params.items()}
    found = fs.explain(problem, ["hessian_trace"], precision=0)
    assert all(torch.equal(problem.params[name], value) for name, value in before.items())
    found.save(tmp_path / "explained.json")
    assert fs.Explanation.load(tmp_path / "explained.json") == found
    assert "1 measure" in found.headline


def test_wrong_arguments() -> None:
    with pytest.raises(InputError, match="a Problem"):
        fs.explain(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(InputError):
        fs.explain(problem_of(Two()), "no_such_measure")


def test_the_command_says_the_same() -> None:
    command = [
        "explain",
        "--model",
        "mlp",
        "--model-option",
        "widths=64,8,10",
        "--data",
        "digits",
        "--flatten",
        "--train-size",
        "40",
    ]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert "hidden units can be rescaled" in " ".join(shown.output.split())
    rows = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)["rows"]
    assert {row["way"] for row in rows} == {"exact columns"}
