"""Test samples that are training samples decide nothing; repeats that new samples have as well are no leak."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flatscope as fs

Pair = tuple[Tensor, Tensor]


def clouds(n: int, seed: int = 0) -> Pair:
    """Two clouds of points far apart."""
    y = torch.arange(n) % 2
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed)) + 3.0 * (2 * y[:, None] - 1), y


def plane(slope: float) -> nn.Module:
    """A network whose second class is where the inputs are large, or small."""
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.copy_(slope * torch.tensor([[-1.0] * 4, [1.0] * 4]))
        model.bias.zero_()
    return model.eval()


def compared(train: Pair, test: object, budget: float | None = None) -> fs.Comparison:
    """A good and a poor network, which any test data tell apart."""
    networks = {"good": plane(1.0), "poor": plane(-1.0)}
    return fs.compare(networks, train, ["l2_norm"], test=test, budget=budget)


def mixed(again: int, n: int = 200) -> Pair:
    """Test samples of which so many are training samples."""
    (x, y), (new, labels) = clouds(300), clouds(n, seed=1)
    return torch.cat([x[:again], new[again:]]), torch.cat([y[:again], labels[again:]])


@pytest.mark.parametrize("budget", [None, 60.0])
def test_test_data_that_are_training_data_decide_nothing(budget: float | None) -> None:
    x, y = clouds(300)
    found = compared((x[:200], y[:200]), (x[1:201], y[1:201]), budget)
    assert found.decision.code == "hold out"
    first = "199 of 200 test samples are training samples: hold out others before you choose"
    assert found.headline.startswith(first)
    assert fs.Comparison.from_json(found.to_json()).headline == found.headline


@pytest.mark.parametrize(
    ("again", "code", "cautioned"), [(0, "keep", False), (12, "keep", True), (21, "hold out", False)]
)
def test_a_few_are_a_remark_and_more_than_a_tenth_a_reason(again: int, code: str, cautioned: bool) -> None:
    found = compared(clouds(300), mixed(again))
    assert found.decision.code == code
    assert (f"Caution: {again} of 200 test samples are training samples" in found.headline) is cautioned
    assert (f"{again} of 200 test samples are training samples" in found.headline) is bool(again)


def test_inputs_that_repeat_anyway_are_no_leak() -> None:
    """Of inputs with few values a new sample has those of a training sample as often as training samples do."""
    (x, y), (new, labels) = ((part.sign(), labels) for part, labels in (clouds(300), clouds(200, seed=1)))
    found = compared((x, y), (new, labels))
    assert found.decision.networks == ("good",)
    assert "Caution" not in found.headline
    assert "of 200 test samples have inputs of training samples, as " in found.headline


def test_a_shuffled_loader_of_many_samples_hides_no_leak() -> None:
    x, y = clouds(9_000)
    loader = DataLoader(TensorDataset(x, y), batch_size=500, shuffle=True)
    found = fs.compare([plane(1.0), plane(-1.0)], loader, ["l2_norm"], test=(x[8_000:8_400], y[8_000:8_400]))
    assert found.headline.startswith("400 of 400 test samples are training samples")


def test_one_network_is_told_of_a_leak_that_lies_behind_thousands_of_samples() -> None:
    (x, y), (new, labels) = clouds(9_000), clouds(3_000, seed=1)
    test = torch.cat([new[:2_600], x[-400:]]), torch.cat([labels[:2_600], y[-400:]])
    problem = fs.Problem(plane(1.0), train=(x, y), test=test)
    assert problem.remarks[0] == "400 of 3,000 test samples have the inputs of training samples: they are not held out"


def test_where_not_all_were_looked_at_it_is_said_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatscope.input_checks.MOST_HASHED", 150)
    problem = fs.Problem(plane(1.0), train=clouds(300), test=mixed(100))
    told = (
        "100 of 150 test samples have the inputs of training samples: 150 of 200 were looked at; they are not held out"
    )
    assert problem.remarks[0] == told


def test_the_report_says_so(tmp_path: Path) -> None:
    x, y = clouds(300)
    page = fs.report(compared((x[:200], y[:200]), (x[1:201], y[1:201])), tmp_path / "page.html")
    assert "199 of 200 test samples are training samples" in page.read_text(encoding="utf-8")
