"""A high loss is no proof that a network learnt nothing: test errors that are better than a constant's decide."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import flatscope as fs

pytestmark = pytest.mark.fast
CENTRES = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])


def data(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Four clouds that overlap."""
    y = torch.arange(n) % 4
    return 1.1 * CENTRES[y] + 0.75 * torch.randn(n, 2, generator=torch.Generator().manual_seed(seed)), y


TRAIN, TEST = data(400, 0), data(800, 1)


def right(scale: float) -> nn.Module:
    """The best classifier of these clouds, with outputs of any scale."""
    model = nn.Linear(2, 4)
    with torch.no_grad():
        model.weight.copy_(scale * CENTRES)
        model.bias.zero_()
    return model.eval()


def drawn(seed: int) -> nn.Module:
    """A network with random weights."""
    torch.manual_seed(seed)
    return nn.Linear(2, 4).eval()


def compared(test: tuple[Tensor, Tensor] | None = TEST, **networks: nn.Module) -> fs.Comparison:
    return fs.compare(networks, TRAIN, ["rho_sum"], test=test)


def test_an_overconfident_network_is_kept_by_its_test_error() -> None:
    found = compared(trained=right(30.0), random=drawn(3))
    assert all(summary.untrained for summary in found.networks.values()), "the losses are no better than a constant's"
    assert (found.decision.code, found.decision.networks) == ("keep", ("trained",))
    assert "Overconfident: the training loss is no better than 1.39" in found.headline
    assert "(trained 2.9" in found.decision.sentence
    assert "Train first" not in found.headline
    assert "random is not trained and the training loss of trained is no better" in found.headline
    again = fs.Comparison.from_json(found.to_json())
    assert (again.headline, again.decision) == (found.headline, found.decision)


def test_a_network_that_is_right_with_tiny_outputs_is_not_called_overconfident() -> None:
    found = compared(trained=right(0.003), random=drawn(3))
    assert found.decision.networks == ("trained",)
    assert "Outputs of the wrong scale" in found.headline
    assert "verconfident" not in found.headline


def test_overconfident_networks_that_err_equally_often_are_kept_and_not_trained_on() -> None:
    found = compared(trained=right(30.0), other=right(40.0))
    assert all(summary.on_a_slope for summary in found.networks.values())
    assert (found.decision.code, found.decision.networks) == ("either", ("trained", "other"))
    assert found.headline.count("Overconfident") == 1


def test_networks_that_are_no_better_than_a_constant_are_told_their_losses_and_test_errors() -> None:
    mostly_first = [(x, torch.where(torch.arange(len(y)) % 10 < 4, y, 0)) for x, y in (TRAIN, TEST)]
    networks = {"one": right(0.0), "other": right(0.0)}
    for name, shift in (("one", 0.0), ("other", 0.02)):
        with torch.no_grad():
            networks[name].get_parameter("bias").copy_(torch.tensor([2.0 + shift, 0.0, 0.0, 0.0]))
    found = fs.compare(networks, mostly_first[0], ["rho_sum"], test=mostly_first[1])
    first = found.headline.splitlines()[0]
    assert found.decision.code == "train on"
    error = 100 * found.networks["one"].test_error
    assert error < 50, "the class that most samples are of is no hard guess"
    assert f"; test errors: one {error:.1f} ± " in first
    assert "the training loss is no better than" in first


@pytest.mark.parametrize("test", [None, TRAIN])
def test_without_held_out_data_only_the_loss_is_said_to_be_no_better(test: tuple[Tensor, Tensor] | None) -> None:
    found = compared(test, trained=right(30.0), random=drawn(3))
    first = found.headline.splitlines()[0]
    assert found.decision.code == "train on"
    assert "the training loss is no better than 1.39, that of outputs that ignore the inputs (trained 2.9" in first
    assert "test errors" not in first
