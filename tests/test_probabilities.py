"""A model that ends in softmax or sigmoid under cross-entropy: said once, in the table and in the report."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import flatscope as fs
from flatscope.input_checks import kind_of_probabilities

pytestmark = pytest.mark.fast

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 3


def network(*last: nn.Module, classes: int = 3) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, classes), *last).eval()


class ByHand(nn.Module):
    """Ends in probabilities that no softmax module makes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(self.inner(x).exp(), p=1, dim=1)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (network(nn.Softmax(1)), "after a softmax"),
        (network(nn.Linear(3, 3), nn.Softmax(1)).half(), "after a softmax"),
        (network(nn.Softmax(1), classes=3).double(), "after a softmax"),
        (ByHand().eval(), "after a softmax"),
        (network(nn.Sigmoid()), "after a sigmoid"),
        (nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Softmax(1)).eval(), "after a softmax"),
    ],
    ids=["softmax", "half", "double", "by hand", "sigmoid", "batchnorm"],
)
def test_probabilities_are_told_from_logits(model: nn.Module, words: str) -> None:
    with pytest.warns(UserWarning, match=f"{words}.*cross_entropy takes logits.*return what goes into") as said:
        problem = fs.Problem(model, train=(X, Y))
    assert len(said) == 1
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once: neither measuring nor a twin says it again
        table = fs.measure(problem, ["margin", "gradient_norm"])
        twin = fs.measure(problem.with_model(problem.model), "margin")
    assert words in table.meta["remarks"][0]
    assert table.meta["remarks"][0] == twin.meta["remarks"][0] == problem.remarks[0]


@pytest.mark.parametrize(
    ("model", "x", "y", "loss", "twice"),
    [
        (network(nn.Sigmoid(), classes=1), X, Y > 0, "bce", "sigmoid"),
        (network(nn.Sigmoid(), nn.Flatten(0), classes=1), X, Y > 0, "bce", "sigmoid"),
        (network(nn.Sigmoid()), X, functional.one_hot(Y, 3), "bce", "sigmoid"),
        (network(nn.Softmax(2)), X.reshape(10, 4, 6), Y.reshape(10, 4), "next_token", "softmax"),
        (
            nn.Sequential(nn.Conv1d(6, 3, 1), nn.Softmax(1)),
            X.reshape(10, 4, 6).mT,
            Y.reshape(10, 4),
            "cross_entropy",
            "softmax",
        ),
    ],
    ids=["one logit", "flat", "labels", "tokens", "pixels"],
)
def test_probabilities_under_other_losses(model: nn.Module, x: Tensor, y: Tensor, loss: str, twice: str) -> None:
    with pytest.warns(UserWarning, match=f"{loss} takes logits: it applies a {twice} once more"):
        fs.Problem(model, train=(x, y), loss=loss)
    plain = nn.Sequential(*(part for part in model if not isinstance(part, nn.Sigmoid | nn.Softmax)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fs.Problem(plain, train=(x, y), loss=loss)


def one_hot_logits() -> nn.Module:
    """Outputs that are 0 and 1 and sum to 1 at these weights only."""
    model = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(3))
    return model


def small_positive_logits() -> nn.Module:
    model = network()
    with torch.no_grad():
        model[2].weight.mul_(1e-3)
        model[2].bias.fill_(0.3)
    return model


def dead() -> nn.Module:
    model = network(nn.ReLU())
    with torch.no_grad():
        model[2].bias.fill_(-100.0)
    return model


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (network(), X),
        (network(nn.LogSoftmax(1)), X),  # the same loss, derivatives and margins as of the logits
        (network(nn.ReLU()), X),
        (one_hot_logits(), torch.eye(3).repeat(14, 1)[:40]),
        (small_positive_logits(), X),
        (dead(), X),
    ],
    ids=["logits", "log_softmax", "relu", "one-hot", "small and positive", "dead"],
)
def test_logits_and_log_probabilities_pass_in_silence(model: nn.Module, x: Tensor) -> None:
    problem = fs.Problem(model, train=(x, Y))  # warnings are errors here
    assert problem.remarks == ()
    assert "remarks" not in fs.measure(problem, "parameter_count").meta


def test_log_probabilities_have_the_curvature_and_margins_of_the_logits() -> None:
    names = ["hessian_trace", "hessian_max_eigenvalue", "margin", "kappa_trace_sum", "rho_sum"]
    logits, logs = (
        fs.measure(fs.Problem(model.double(), train=(X.double(), Y)), names)
        for model in (network(), network(nn.LogSoftmax(1)))
    )
    assert [logs[name] for name in names] == pytest.approx([logits[name] for name in names], rel=1e-9)


def negative_log(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.nll_loss(outputs.log(), targets, reduction="none")


def test_a_loss_that_takes_probabilities_is_taken_at_its_word() -> None:
    model = network(nn.Softmax(1))
    assert fs.Problem(model, train=(X, Y), loss=negative_log).remarks == ()
    (remark,) = fs.Problem(model, train=(X, Y), loss="mse").remarks  # the Brier score
    assert remark.startswith("labels are classes: mse compares")
    nll = fs.Problem(
        network(nn.LogSoftmax(1)), train=(X, Y), loss=lambda f, y: functional.nll_loss(f, y, reduction="none")
    )
    assert nll.remarks == ()


def test_regression_is_never_meant() -> None:
    model = network(nn.Softmax(1))
    assert fs.Problem(model, train=(X, torch.rand(40, 3)), loss="mse").remarks == ()


def test_nothing_random_is_touched() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with pytest.warns(UserWarning, match="softmax"):
        fs.Problem(network_without_seed(), train=(X, Y))
    assert torch.equal(torch.get_rng_state(), before)


def network_without_seed() -> nn.Module:
    state = torch.get_rng_state()
    model = network(nn.Softmax(1))
    torch.set_rng_state(state)
    return model


def test_the_report_says_it_in_the_summary(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="softmax"):
        problem = fs.Problem(network(nn.Softmax(1)), train=(X, Y))
    table = fs.measure(problem, ["margin", "gradient_norm"])
    table.save(tmp_path / "t.parquet")
    page = fs.report(fs.Table.load(tmp_path / "t.parquet"), tmp_path / "r.html").read_text()
    summary = page[: page.index('id="measures"')]
    assert "the model&#39;s outputs are probabilities, as after a softmax" in summary


def test_rows_are_judged_one_by_one() -> None:
    rows = torch.tensor([[0.2, 0.8], [0.5, 0.5]])
    assert "softmax" in kind_of_probabilities(rows)
    assert "sigmoid" in kind_of_probabilities(rows + torch.tensor([[0.0, 0.0], [0.1, 0.0]]))
    assert kind_of_probabilities(rows - 0.3) == ""
    assert kind_of_probabilities(rows + 0.7) == ""
    assert kind_of_probabilities(rows[:, :1]) == ""
    assert kind_of_probabilities(rows * torch.nan) == ""
