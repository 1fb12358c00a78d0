"""Is it a minimum? Networks of which it is known, rescaled copies of them, and targets in other units.

The limits were chosen on 37 networks of the digits and the diabetes data; these are others, on other data.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_iris, load_wine
from torch import Tensor, nn

import flatscope as fs
from flatscope.context import Context
from flatscope.network_summary import NetworkSummary
from flatscope.summarising import summary_of

Loss = Callable[[Tensor, Tensor], Tensor]
CE, MSE = nn.functional.cross_entropy, nn.functional.mse_loss


def table(load: Callable[..., tuple[object, object]]) -> tuple[Tensor, Tensor]:
    x, y = (torch.as_tensor(part) for part in load(return_X_y=True))
    x = x.double()
    return ((x - x.mean(0)) / x.std(0)).float(), y


WINE, IRIS, CANCER = table(load_wine), table(load_iris), table(load_breast_cancer)
NOISE = torch.Generator().manual_seed(3)
NOISY = torch.where(torch.rand(569, generator=NOISE) < 0.3, 1 - CANCER[1], CANCER[1])
SUM = CANCER[0][:, :3].sum(1, keepdim=True) + torch.randn(569, 1, generator=NOISE)


def net(*widths: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(1)
    pairs = list(itertools.pairwise(widths))
    layers = [part for pair in pairs for part in (nn.Linear(*pair), act())]
    return nn.Sequential(*layers[:-1])


def few_epochs(model: nn.Module, x: Tensor, y: Tensor, epochs: int, rate: float, loss: Loss = CE) -> nn.Module:
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model.eval()


def to_the_end(model: nn.Module, x: Tensor, y: Tensor, loss: Loss = CE, decay: float = 0.0) -> nn.Module:
    """Down to a minimum, by L-BFGS in float64."""
    model.double()
    x, y = x.double(), y.double() if y.is_floating_point() else y
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=1500, max_eval=3000, line_search_fn="strong_wolfe", tolerance_change=1e-14
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(model(x), y) + decay / 2 * sum(p.square().sum() for p in model.parameters() if p.ndim > 1)
        value.backward()
        return value

    optimizer.step(closure)
    return model.float().eval()


def stands(model: nn.Module, x: Tensor, y: Tensor, loss: object = "cross_entropy") -> NetworkSummary:
    return summary_of(Context(fs.Problem(model, train=(x, y), loss=loss)))  # type: ignore[arg-type]


@functools.cache
def fitted() -> nn.Module:
    return to_the_end(net(30, 3, 1, act=nn.Tanh), CANCER[0], SUM, MSE)


MINIMA = {
    "wine, interpolated": lambda: (to_the_end(net(13, 8, 3), *WINE), *WINE, CE),
    "iris, linear": lambda: (to_the_end(net(4, 3), *IRIS), *IRIS, CE),
    "noisy labels, linear": lambda: (to_the_end(net(30, 2), CANCER[0], NOISY), CANCER[0], NOISY, CE),
    "noisy labels, narrow": lambda: (to_the_end(net(30, 2, 2, act=nn.Tanh), CANCER[0], NOISY), CANCER[0], NOISY, CE),
    "regression, linear": lambda: (to_the_end(net(30, 1), CANCER[0], SUM, MSE), CANCER[0], SUM, MSE),
    "regression": lambda: (fitted(), CANCER[0], SUM, MSE),
    "wine, many epochs": lambda: (few_epochs(net(13, 16, 3), *WINE, 600, 0.05), *WINE, CE),
    "cancer, three layers": lambda: (few_epochs(net(30, 16, 16, 2), *CANCER, 300, 0.05), *CANCER, CE),
}
SLOPES = {
    "wine, not trained": lambda: (net(13, 8, 3), *WINE, CE),
    "wine, one epoch": lambda: (few_epochs(net(13, 8, 3), *WINE, 1, 0.05), *WINE, CE),
    "iris, three epochs": lambda: (few_epochs(net(4, 8, 3), *IRIS, 3, 0.02), *IRIS, CE),
    "iris, linear, ten epochs": lambda: (few_epochs(net(4, 3), *IRIS, 10, 0.01), *IRIS, CE),
    "noisy labels, two epochs": lambda: (few_epochs(net(30, 8, 2), CANCER[0], NOISY, 2, 0.02), CANCER[0], NOISY, CE),
    "noisy labels, rate too large": lambda: (
        few_epochs(net(30, 2, 2), CANCER[0], NOISY, 40, 0.5), CANCER[0], NOISY, CE
    ),
    "regression, two epochs": lambda: (few_epochs(net(30, 8, 1), CANCER[0], SUM, 2, 0.002, MSE), CANCER[0], SUM, MSE),
    "diverged": lambda: (few_epochs(net(13, 8, 3), *WINE, 3, 3.0), *WINE, CE),
}  # fmt: skip
Made = Callable[[], tuple[nn.Module, Tensor, Tensor, Loss]]


def named(loss: Loss) -> object:
    return "cross_entropy" if loss is CE else nn.MSELoss()


@pytest.mark.parametrize("made", MINIMA.values(), ids=MINIMA.keys())
def test_trained_to_the_end_is_a_minimum_however_it_is_written(made: Made) -> None:
    model, x, y, loss = made()
    assert stands(model, x, y, named(loss)).minimum[0] == "yes"
    if isinstance(model, nn.Sequential) and len(model) > 1 and isinstance(model[1], nn.ReLU):
        twin = fs.rescale(model, x[:4], by="unit", low=0.05, high=20.0, seed=3)
        assert stands(twin, x, y, named(loss)).minimum[0] == "yes"


@pytest.mark.parametrize("made", SLOPES.values(), ids=SLOPES.keys())
def test_a_training_that_was_broken_off_is_none_however_it_is_written(made: Made) -> None:
    model, x, y, loss = made()
    found = stands(model, x, y, named(loss))
    assert found.minimum[0] == "no"
    assert found.on_a_slope
    if isinstance(model, nn.Sequential) and len(model) > 1 and isinstance(model[1], nn.ReLU):
        twin = stands(fs.rescale(model, x[:4], by="unit", low=0.05, high=20.0, seed=3), x, y, named(loss))
        assert twin.minimum[0] == "no"


@pytest.mark.parametrize("factor", [1e-3, 1e3])
@pytest.mark.parametrize("name", ["regression", "regression, two epochs"])
def test_units_of_the_targets_change_nothing(name: str, factor: float) -> None:
    model, x, y, _ = (MINIMA | SLOPES)[name]()
    before = stands(model, x, y, nn.MSELoss())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in list(twin.parameters())[-2:]:
            parameter *= factor
    after = stands(twin, x, y * factor, nn.MSELoss())
    assert after.minimum[0] == before.minimum[0]
    assert after.constant == pytest.approx(before.constant * factor**2, rel=1e-3)
    assert after.gradient_norm > 3 * before.gradient_norm or after.gradient_norm < before.gradient_norm / 3


def test_weight_decay_that_holds_the_gradient_up_is_found() -> None:
    model = to_the_end(net(13, 8, 3), *WINE, decay=0.01)
    found = stands(model, *WINE)
    assert found.decay == pytest.approx(0.01, rel=0.02)
    assert found.minimum[0] == "yes"
    assert not found.on_a_slope
    assert stands(few_epochs(net(13, 8, 3), *WINE, 1, 0.05), *WINE).decay == 0.0


def test_dead_units_are_at_rest_and_have_learnt_nothing() -> None:
    model = net(13, 8, 3)
    with torch.no_grad():
        model[0].bias -= 1e3
    problem = fs.Problem(to_the_end(model, *WINE), train=WINE)
    found = summary_of(Context(problem))
    assert found.minimum[0] == "open"
    assert found.untrained
    headline = fs.measure(problem, ["gradient_norm", "rho_sum"]).headline
    assert headline.startswith(
        "Not trained: the training loss 1.09 is no better than 1.09, that of outputs that ignore"
    )
    assert "Train it before flatness is read" in headline
    assert "Next: train on" in headline
    assert "at a minimum" not in headline.lower()


@pytest.mark.parametrize("target", [torch.full((178, 1), 2.0), torch.randn(178, 1, generator=NOISE)])
def test_a_regression_with_nothing_to_learn_leaves_the_question_open(target: Tensor) -> None:
    model = net(13, 1)
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(float(target.mean()))
    x = torch.zeros_like(WINE[0])
    found = stands(model, x, target, "mse")
    assert found.minimum[0] == "open"
    assert not found.untrained
    assert not found.on_a_slope
    headline = fs.measure(fs.Problem(model, train=(x, target), loss="mse"), ["gradient_norm", "rho_sum"]).headline
    assert headline.startswith("No better than a constant: ")
    assert "at a minimum" not in headline.lower()


def test_the_words_say_from_what_to_what_and_against_what_it_is_judged() -> None:
    def words(loss: float, fall: float, error: float = 0.0, constant: float = 2.3) -> tuple[str, str]:
        return NetworkSummary("", 1, loss, error, math.nan, math.nan, True, fall=fall, constant=constant).minimum

    level, text = words(0.00182, 0.00098)
    assert level == "nearly"
    assert "lowers the training loss from 0.00182 to 0.00084: 0.043 % of 2.3, the loss of outputs that ignore" in text
    assert "up to 0.02 % is a minimum" in text
    assert "54 % of its own loss" in text
    assert "compare at equal loss" in text
    assert "equal loss" not in words(0.00182, 0.0001)[1]
    assert "equal loss" not in words(0.6, 0.2)[1], "where to train on is what to do"
    assert "equal loss" not in words(0.00182, 0.00098, math.nan)[1], "a squared error's curvature stays"
    assert words(0.0178, 1e-7)[1].startswith("one step down the gradient lowers the training loss 0.0178 by 1×10⁻⁷: ")
    assert "% of it (" in words(0.0178, 1e-4, constant=math.nan)[1]
    assert "no step" in words(0.0178, 0.0)[1]


def entropy(shares: Tensor) -> float:
    return float(-(shares * shares.log()).sum())


def test_the_constant_output_is_the_best_one() -> None:
    shares = torch.bincount(WINE[1]) / len(WINE[1])
    assert stands(net(13, 3), *WINE).constant == pytest.approx(entropy(shares), rel=1e-5)
    assert stands(net(30, 1), CANCER[0], SUM, "mse").constant == pytest.approx(float(SUM.var(correction=0)), rel=1e-5)
    y = CANCER[1].float()
    both = entropy(torch.tensor([y.mean(), 1 - y.mean()]))
    assert stands(net(30, 1), CANCER[0], y[:, None], "bce").constant == pytest.approx(both, rel=1e-5)
    pixels = nn.Conv2d(1, 3, 1)
    classes = torch.randint(0, 3, (6, 4, 4), generator=torch.Generator().manual_seed(0))
    shares = torch.bincount(classes.flatten()) / classes.numel()
    assert stands(pixels.eval(), torch.randn(6, 1, 4, 4), classes).constant == pytest.approx(entropy(shares), rel=1e-5)
    own = stands(net(30, 1), CANCER[0], SUM, lambda o, t: (o - t).abs().sum(1))
    assert own.constant == pytest.approx(float((SUM - SUM.mean()).abs().mean()), rel=1e-5)


def test_a_loss_below_zero_has_nothing_to_be_measured_against() -> None:
    found = stands(net(30, 1), CANCER[0], SUM, lambda o, t: (o - t).square().sum(1) - 50)
    assert found.minimum[0] == "unknown"
    assert math.isnan(found.fall)
    assert not found.on_a_slope


def test_the_fall_is_one_that_a_step_has() -> None:
    """Never more than can be had along the two directions, and most of it."""
    model, x, y, _ = SLOPES["iris, three epochs"]()
    found = stands(model, x, y)
    gradients = torch.autograd.grad(CE(model(x), y), list(model.parameters()))
    lowest = found.loss
    for scaled in (False, True):
        for step in torch.logspace(-3, 3, 241):
            moved = copy.deepcopy(model)
            with torch.no_grad():
                for weight, slope in zip(moved.parameters(), gradients, strict=True):
                    weight -= step * slope * (weight.square() if scaled else 1)
                lowest = min(lowest, float(CE(moved(x), y)))
    best = found.loss - lowest
    assert 0.6 * best < found.fall <= best * (1 + 1e-3)


def test_nothing_is_changed_and_no_random_number_drawn() -> None:
    model = net(13, 8, 3)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    stands(model, *WINE)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
