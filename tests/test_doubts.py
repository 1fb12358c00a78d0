"""Remarks on what is allowed and hardly meant; none on ordinary networks and data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatscope as fs

INPUTS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
LABELS = (INPUTS @ WEIGHT.T).argmax(1)


def sure() -> nn.Module:
    """A network that is right on all samples."""
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Identity())
    model[0].weight.data = WEIGHT.clone()
    return model


def remarks(labels: Tensor = LABELS, model: nn.Module | None = None, names: Any = "gradient_norm", **more: Any) -> str:
    problem = fs.Problem(sure() if model is None else model, train=(INPUTS, labels), **more)
    found = fs.measure(problem, names).meta.get("remarks", [])
    return "; ".join(text for text in found if not text.startswith("still on a slope"))


def test_an_ordinary_network_is_left_in_peace() -> None:
    test = torch.randn(60, 4, generator=torch.Generator().manual_seed(2))
    assert remarks(test=(test, (test @ WEIGHT.T).argmax(1))) == ""
    assert remarks(LABELS.float()[:, None] / 4, nn.Linear(4, 1), loss="mse") == ""
    frozen = sure().requires_grad_(False)
    assert remarks(model=frozen) == "no weight requires a gradient: all are measured as if they did"


@pytest.mark.parametrize("step", [1, -1])
def test_labels_that_are_off_by_one_inside_the_range(step: int) -> None:
    found = remarks((LABELS + step).clamp(0, 4))
    assert "labels off by one?" in found
    assert f"class label {'−' if step > 0 else '+'} 1" in found


def test_labels_of_no_order_are_not_taken_for_that() -> None:
    shuffled = LABELS[torch.randperm(60, generator=torch.Generator().manual_seed(3))]
    found = remarks(shuffled)
    assert "are these the inputs that the network was trained on?" in found
    assert "off by one" not in found
    assert remarks(shuffled, names="parameter_count") == "", "nothing was run, and nothing is now"


def test_a_test_set_that_is_the_training_set_in_another_order() -> None:
    order = torch.randperm(60, generator=torch.Generator().manual_seed(4))
    words = "the test samples are the training samples"
    assert words in remarks(test=(INPUTS[order], LABELS[order]))
    other = INPUTS.clone()
    other[0] += 1e-3
    assert words not in remarks(test=(other, LABELS))


def test_one_class_only_and_classes_as_numbers() -> None:
    assert "all training samples are of one class, 2" in remarks(torch.full_like(LABELS, 2))
    assert "mse compares the outputs with vectors" in remarks(loss="mse")
    assert "vectors of zeros" not in remarks(nn.functional.one_hot(LABELS, 5).float(), loss="mse")


def test_frozen_layers_are_counted() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5))
    model[0].requires_grad_(False)
    found = remarks(model=model)
    assert "40 of 85 parameters are held fixed" in found
    assert "of the other 45" in found


def test_passes_for_remarks_are_not_charged_to_measures() -> None:
    problem = fs.Problem(sure(), train=(INPUTS, LABELS))
    assert fs.measure(problem, "gradient_norm").meta["passes"] == {"forward": 1, "backward": 1}


class Held(nn.Module):
    """Holds values back from the gradient, or only seems to."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.how, self.inner, self.outer = how, nn.Linear(4, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        if self.how == "straight through":
            return self.outer(h + (torch.round(4 * h) / 4 - h).detach())
        if self.how == "stopped":
            return self.outer(h * torch.sigmoid(h.detach()))
        if self.how == "no_grad":
            with torch.no_grad():
                gate = torch.sigmoid(self.inner(x))
            return self.outer(h * gate)
        self.seen = h.detach().mean()  # looked at, and not used
        return self.outer(torch.relu(h))


@pytest.mark.parametrize("how", ["straight through", "stopped", "no_grad"])
def test_values_held_back_from_the_gradient_are_said(how: str) -> None:
    words = "the gradient is not that of the function"
    assert words in remarks(model=Held(how))
    assert words not in remarks(model=Held(how), names="margin"), "which needs no gradient"


def test_a_value_that_is_only_looked_at_is_no_doubt() -> None:
    assert "gradient" not in remarks(model=Held("logged"))
