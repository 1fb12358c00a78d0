"""The networks of libraries are what they are said to be: made the same twice, and accepted as they come."""

from __future__ import annotations

import sys

import pytest
import torch
from architectures import architectures, outputs

import flatscope as fs


@pytest.mark.long
@pytest.mark.parametrize("name", architectures())
def test_networks_of_libraries_are_made_the_same_twice_and_accepted(name: str) -> None:
    make = architectures()[name]
    (model, inputs, targets, loss), (again, same, _, _) = make(), make()
    with torch.no_grad():
        one, two = (outputs(net(**x) if isinstance(x, dict) else net(x)) for net, x in ((model, inputs), (again, same)))
    assert torch.equal(one, two)
    assert one.isfinite().all()
    assert 0.01 < float(one.std()) < 10
    problem = fs.Problem(model, (inputs, targets), loss=loss)
    assert problem.n_train == len(targets)
    assert "torchvision" not in sys.modules


def test_there_are_enough_of_them() -> None:
    """Packages that are installed must be found: nothing below may skip unnoticed."""
    names = [name.split("/")[0] for name in architectures()]
    pytest.importorskip("transformers")
    assert names.count("transformers") >= 5
    assert names.count("torch") >= 5
    assert names.count("timm") == 0 or names.count("timm") >= 12
