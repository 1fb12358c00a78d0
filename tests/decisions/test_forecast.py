"""Forecasts against dense twins: the whole Hessian written out, losses at the new weights one by one."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from decision_networks import LOSSES, NETWORKS, lora, sample_losses
from torch import Tensor, nn

import flatscope as fs


def moved_copy(model: nn.Module, size: float = 0.05, only: str = "") -> nn.Module:
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, value in other.named_parameters():
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
            if not only or name.startswith(only):
                value += size * noise
    return other


def dense_shares(name: str, model: nn.Module, other: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """g, HΔ and g at the other end over all parameters, as vectors."""
    shapes = {key: value.detach() for key, value in model.named_parameters()}

    def loss(flat: Tensor) -> Tensor:
        params, start = {}, 0
        for key, value in shapes.items():
            params[key] = flat[start : start + value.numel()].reshape(value.shape)
            start += value.numel()
        return sample_losses(name, model, x, y, params).mean()

    here = torch.cat([value.reshape(-1) for value in shapes.values()])
    there = torch.cat([value.detach().reshape(-1) for value in other.parameters()])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        gradients = [torch.autograd.functional.jacobian(loss, point) for point in (here, there)]
        hessian = torch.autograd.functional.hessian(loss, here)
    return gradients[0], hessian @ (there - here), gradients[1]


@pytest.mark.parametrize("name", NETWORKS)
def test_every_number_is_its_dense_twin(name: str) -> None:
    model, x, y = NETWORKS[name]()
    other = moved_copy(model)
    frame = fs.forecast(fs.Problem(model, train=(x, y), loss=LOSSES.get(name, "cross_entropy")), other).to_frame()
    slope, product, end = dense_shares(name, model, other, x, y)
    old, new = dict(model.named_parameters()), dict(other.named_parameters())
    step = torch.cat([(new[key] - old[key]).detach().reshape(-1) for key in old])
    owner = [key.rpartition(".")[0] or key for key, value in old.items() for _ in range(value.numel())]
    for row in frame.to_dict("records"):
        inside = torch.tensor([not row["layer"] or layer == row["layer"] for layer in owner])
        first, curved, last = (float((v * step)[inside].sum()) for v in (slope, product, end))
        assert row["predicted"] == pytest.approx(first + 0.5 * curved, rel=1e-8, abs=1e-12)
        assert row["trapezoid"] == pytest.approx(0.5 * (first + last), rel=1e-8, abs=1e-12)
        assert row["slope"] == pytest.approx(first, rel=1e-8, abs=1e-12)
        names = [key for key in old if not row["layer"] or (key.rpartition(".")[0] or key) == row["layer"]]
        params = {key: new[key].detach() for key in names}
        rises = (sample_losses(name, model, x, y, params) - sample_losses(name, model, x, y)).detach()
        assert row["measured"] == pytest.approx(float(rises.mean()), rel=1e-9, abs=1e-13)
        assert row["measured_stderr"] == pytest.approx(float(rises.std()) / len(x) ** 0.5, rel=0.2)
    assert frame["predicted"][1:].sum() == pytest.approx(frame["predicted"][0], rel=1e-9)
    assert frame["trapezoid"][1:].sum() == pytest.approx(frame["trapezoid"][0], rel=1e-9)


def test_a_quadratic_loss_is_forecast_exactly() -> None:
    model = nn.Linear(4, 2).double()
    x, y = torch.randn(30, 4).double(), torch.randn(30, 2).double()
    found = fs.forecast(fs.Problem(model, train=(x, y), loss="mse"), moved_copy(model, 3.0))
    assert found.predicted.value == pytest.approx(found.measured.value, rel=1e-10)
    assert found.trapezoid.value == pytest.approx(found.measured.value, rel=1e-10)
    assert math.isnan(found.error_change.value)


def test_only_what_moves_has_a_row_frozen_or_not() -> None:
    model, x, y = lora()
    problem = fs.Problem(model, train=(x, y))
    assert list(fs.forecast(problem, moved_copy(model, only="0.")).to_frame()["layer"]) == [
        "",
        "0.base",
        "0.down",
        "0.up",
    ]
    nothing = fs.forecast(problem, copy.deepcopy(model))
    assert nothing.measured.value == 0
    assert nothing.predicted.value == 0
    assert "nothing moves" in nothing.headline


def test_a_state_dict_of_half_precision_and_wrapped_names() -> None:
    model, x, y = NETWORKS["mlp"]()
    problem, other = fs.Problem(model, train=(x, y)), moved_copy(model)
    plain = fs.forecast(problem, other).measured.value
    wrapped = {f"module._orig_mod.{name}": value for name, value in other.state_dict().items()}
    assert fs.forecast(problem, wrapped).measured.value == plain
    half = {name: value.to(torch.bfloat16) for name, value in other.state_dict().items()}
    assert fs.forecast(problem, half).measured.value == pytest.approx(plain, rel=0.2)


def test_statistics_that_moved_are_measured_and_named() -> None:
    model, x, y = NETWORKS["batchnorm"]()
    other = moved_copy(model)
    for module in other.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean += 0.3
    found = fs.forecast(fs.Problem(model, train=(x, y)), other)
    rise = float((sample_losses("", other, x, y) - sample_losses("", model, x, y)).detach().mean())
    assert found.measured.value == pytest.approx(rise, rel=1e-9)
    last = found.to_frame().iloc[-1]
    assert last["layer"] == "(buffers)"
    assert abs(last["measured"]) > 1e-6
    assert "Buffers also differ" in found.headline


def test_a_long_step_says_that_the_prediction_fails() -> None:
    model, x, y = NETWORKS["mlp"]()
    found = fs.forecast(fs.Problem(model, train=(x.repeat(9, 1), y.repeat(9))), moved_copy(model, 1.0))
    assert "too long" in found.headline


@pytest.mark.parametrize("ending", [".json", ".parquet", ".npz"])
def test_files_give_back_what_was_saved(tmp_path: Path, ending: str) -> None:
    model, x, y = NETWORKS["mlp"]()
    found = fs.forecast(fs.Problem(model, train=(x, y)), moved_copy(model))
    found.save(tmp_path / f"f{ending}")
    assert fs.Forecast.load(tmp_path / f"f{ending}") == found
    assert found.figure().axes[0].get_xlabel() == "rise of the loss"


def test_weights_that_do_not_fit_are_refused() -> None:
    model, x, y = NETWORKS["mlp"]()
    problem, state = fs.Problem(model, train=(x, y)), model.state_dict()
    with pytest.raises(fs.InputError, match="merge_and_unload"):
        fs.forecast(problem, {**state, "0.lora_a": torch.ones(2)})
    with pytest.raises(fs.InputError, match=r"none for 0\.weight"):
        fs.forecast(problem, {name: value for name, value in state.items() if name != "0.weight"})
    with pytest.raises(fs.InputError, match="finite weights"):
        fs.forecast(problem, {**state, "0.weight": state["0.weight"] * math.nan})
    with pytest.raises(fs.InputError, match=r"new_weights, 0\.weight"):
        fs.forecast(problem, {**state, "0.weight": torch.ones(2, 2)})
    with pytest.raises(fs.InputError, match="a module or a state dict"):
        fs.forecast(problem, [1])  # type: ignore[arg-type]


def test_nothing_of_the_user_changes() -> None:
    model, x, y = lora()
    problem, other = fs.Problem(model, train=(x, y)), moved_copy(model)
    states = [copy.deepcopy(each.state_dict()) for each in (model, other)]
    fs.forecast(problem, other)
    for each, state in zip((model, other), states, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in each.state_dict().items())
    assert problem.trainable == ("0.down.weight", "0.up.weight", "2.down.weight", "2.up.weight")


class LargestOfBag(nn.Module):
    """A table whose entries are joined by their maximum: torch has no second derivative of it, nor a forward one."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(8, 4, mode="max"), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.bag(tokens))


def test_what_cannot_be_predicted_is_measured_all_the_same() -> None:
    torch.manual_seed(0)
    model, x, y = LargestOfBag().double().eval(), torch.randint(8, (20, 3)), torch.randint(3, (20,))
    other = moved_copy(model)
    found = fs.forecast(fs.Problem(model, train=(x, y)), other)
    rise = nn.functional.cross_entropy(other(x), y) - nn.functional.cross_entropy(model(x), y)
    assert found.measured.value == pytest.approx(float(rise.detach()), rel=1e-9)
    assert math.isnan(found.predicted.value)
    assert "twice" in found.to_frame()["reason"][0]
    assert "; not predicted." in found.headline
