"""Losses of torch taken as they are: of all training samples they have torch's own value, gradient and Hessian."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import flatscope as fs
from flatscope.context import Context
from flatscope.errors import InputError
from flatscope.loss import LOSSES

N, C = 12, 4
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 5, generator=GENERATOR, dtype=torch.float64)
CLASSES = torch.arange(N) % C
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64)
IGNORING = CLASSES.where(CLASSES != 2, -100)
IGNORING_255 = CLASSES.where(CLASSES != 2, 255)
SOFT = torch.rand(N, C, generator=GENERATOR, dtype=torch.float64).softmax(1)
LABELS = (torch.rand(N, C, generator=GENERATOR, dtype=torch.float64) < 0.4).double()
NUMBERS = torch.randn(N, C, generator=GENERATOR, dtype=torch.float64)
PIXELS = torch.randint(0, C, (N, 3), generator=GENERATOR)
HOLED = PIXELS.where(torch.rand(N, 3, generator=GENERATOR) > 0.3, -100)
HOLED[0] = -100


def network(outputs: int = C, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, outputs)).double().eval()


def pixels() -> nn.Module:
    return nn.Sequential(network(3 * C), nn.Unflatten(1, (C, 3))).eval()


CASES: dict[str, tuple[Any, Tensor, Any]] = {
    "cross entropy": (nn.CrossEntropyLoss(), CLASSES, network),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHTS), CLASSES, network),
    "smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), CLASSES, network),
    "weights and smoothing": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2), CLASSES, network),
    "ignored": (nn.CrossEntropyLoss(), IGNORING, network),
    "ignored, of another number": (nn.CrossEntropyLoss(ignore_index=255), IGNORING_255, network),
    "a class ignored, weights, smoothing": (
        nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=1, label_smoothing=0.3),
        CLASSES,
        network,
    ),
    "probabilities": (nn.CrossEntropyLoss(), SOFT, network),
    "probabilities, weights, smoothing": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2), SOFT, network),
    "pixels": (nn.CrossEntropyLoss(), PIXELS, pixels),
    "pixels, ignored": (nn.CrossEntropyLoss(), HOLED, pixels),
    "pixels, ignored, weights": (nn.CrossEntropyLoss(weight=WEIGHTS), HOLED, pixels),
    "nll": (nn.NLLLoss(weight=WEIGHTS), CLASSES, lambda: nn.Sequential(network(), nn.LogSoftmax(1)).eval()),
    "mse of one output": (nn.MSELoss(), NUMBERS[:, :1], partial(network, 1)),
    "mse": (nn.MSELoss(), NUMBERS, network),
    "huber": (nn.HuberLoss(delta=0.5), NUMBERS, network),
    "smooth l1": (nn.SmoothL1Loss(beta=0.7), NUMBERS, network),
    "poisson": (nn.PoissonNLLLoss(), NUMBERS.abs().round(), network),
    "bce of one logit": (nn.BCEWithLogitsLoss(), LABELS[:, :1], partial(network, 1)),
    "bce": (nn.BCEWithLogitsLoss(), LABELS, network),
    "bce, positive weights": (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), LABELS, network),
    "bce, both weights": (nn.BCEWithLogitsLoss(weight=WEIGHTS.flip(0), pos_weight=WEIGHTS), LABELS, network),
    "bce of one logit, positive weight": (
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0], dtype=torch.float64)),
        LABELS[:, :1],
        partial(network, 1),
    ),
}


def dense(model: nn.Module, targets: Tensor, loss: Any) -> tuple[float, Tensor, Tensor]:
    """Value, gradient and Hessian of torch's own loss of all samples in one batch."""
    names = dict(model.named_parameters())

    def value(flat: Tensor) -> Tensor:
        parts = flat.split([p.numel() for p in names.values()])
        state = {name: part.reshape(p.shape) for (name, p), part in zip(names.items(), parts, strict=True)}
        return loss(torch.func.functional_call(model, state, (X,)), targets)

    flat = torch.cat([p.detach().reshape(-1) for p in names.values()])
    gradient = torch.autograd.functional.jacobian(value, flat)
    return value(flat).item(), gradient, torch.autograd.functional.hessian(value, flat)


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_loss_of_torch_over_all_samples(name: str) -> None:
    loss, targets, build = CASES[name]
    model = build()
    problem = fs.Problem(model, (X, targets), loss=loss, batch_size=5)
    context = Context(problem)
    value, gradient, hessian = dense(model, targets, loss)
    assert context.scores().loss == pytest.approx(value, rel=1e-9)
    table = fs.measure(problem, ["hessian_trace", "gradient_norm", "hessian_max_eigenvalue"], precision=0)
    assert table["gradient_norm"] == pytest.approx(float(gradient.norm()), rel=1e-8)
    assert table["hessian_trace"] == pytest.approx(float(hessian.trace()), rel=1e-7)
    assert table["hessian_max_eigenvalue"] == pytest.approx(float(torch.linalg.eigvalsh(hessian)[-1]), rel=2e-3)


@pytest.mark.parametrize(
    ("given", "same"),
    [
        (nn.CrossEntropyLoss(), "cross_entropy"),
        (nn.CrossEntropyLoss, "cross_entropy"),
        (functional.cross_entropy, "cross_entropy"),
        (nn.CrossEntropyLoss(reduction="none"), "cross_entropy"),
    ],
)
def test_what_is_one_of_ours_has_its_name(given: Any, same: str) -> None:
    problem = fs.Problem(network(), (X, CLASSES), loss=given)
    assert problem.loss is LOSSES[same]
    assert problem.classification
    assert problem.remarks == ()


@pytest.mark.parametrize("weight", [None, WEIGHTS])
def test_nll_of_log_probabilities_has_the_gauss_newton_matrix_of_cross_entropy(weight: Tensor | None) -> None:
    """Linear in the outputs, it had one of zeros: no effective dimension, no trace."""
    model = nn.Sequential(network(), nn.LogSoftmax(1)).eval()
    labels = torch.where(torch.arange(len(CLASSES)) == 2, -100, CLASSES)
    tables = [
        fs.measure(fs.Problem(model, (X, labels), loss=loss), names, precision=0, curvature="gauss_newton")
        for loss in (nn.NLLLoss(weight), nn.CrossEntropyLoss(weight))
        for names in (["effective_dimension", "hessian_trace", "rho_sum"],)
    ]
    nll, cross_entropy = (table.to_frame().value.tolist() for table in tables)
    assert nll == pytest.approx(cross_entropy, rel=1e-10)
    assert min(nll) > 0.01


def test_functions_of_torch_have_their_options() -> None:
    smooth = fs.Problem(network(), (X, CLASSES), loss=partial(functional.cross_entropy, label_smoothing=0.1))
    module = fs.Problem(network(), (X, CLASSES), loss=nn.CrossEntropyLoss(label_smoothing=0.1))
    assert Context(smooth).scores().loss == Context(module).scores().loss
    huber = fs.Problem(network(), (X, NUMBERS), loss=functional.huber_loss)
    assert Context(huber).scores().loss == pytest.approx(functional.huber_loss(network()(X), NUMBERS).item())
    with pytest.raises(InputError, match="label_smooth"):
        fs.Problem(network(), (X, CLASSES), loss=partial(functional.cross_entropy, label_smooth=0.1))


def test_factors_are_said() -> None:
    (mean,) = fs.Problem(network(), (X, NUMBERS), loss=nn.MSELoss()).remarks
    assert '"mse" is their sum, 4 times as much' in mean
    assert fs.Problem(network(1), (X, NUMBERS[:, :1]), loss=nn.MSELoss()).remarks == ()
    (total,) = fs.Problem(network(), (X, NUMBERS), loss=nn.MSELoss(reduction="sum")).remarks
    assert "without the factor n" in total
    (weighted,) = fs.Problem(network(), (X, CLASSES), loss=nn.CrossEntropyLoss(weight=WEIGHTS)).remarks
    assert "divided by the mean weight of the training samples" in weighted


def test_a_sum_is_averaged_over_samples() -> None:
    for loss, targets in ((nn.CrossEntropyLoss(reduction="sum"), CLASSES), (nn.HuberLoss(reduction="sum"), NUMBERS)):
        problem = fs.Problem(network(), (X, targets), loss=loss)
        assert Context(problem).scores().loss == pytest.approx(loss(network()(X), targets).item() / N)


def test_one_column_of_targets_does_not_broadcast() -> None:
    model, targets = network(1), NUMBERS[:, 0]
    for loss in (nn.MSELoss(), nn.HuberLoss(), nn.BCEWithLogitsLoss()):
        y = targets if not isinstance(loss, nn.BCEWithLogitsLoss) else LABELS[:, 0]
        problem = fs.Problem(model, (X, y), loss=loss)
        assert Context(problem).scores().loss == pytest.approx(loss(model(X), y[:, None]).item())


def test_weighted_losses_keep_errors_and_margins() -> None:
    table = fs.measure(fs.Problem(network(), (X, CLASSES), loss=nn.CrossEntropyLoss(weight=WEIGHTS)), ["margin"])
    assert table["margin"] == table["margin"]
    left_out = fs.measure(fs.Problem(network(), (X, IGNORING), loss=nn.CrossEntropyLoss()), ["margin"])
    assert left_out["margin"] != left_out["margin"], "a sample that is ignored has no margin"


def test_a_loss_with_parameters_and_an_unknown_reduction_are_refused() -> None:
    class Learnt(nn.MSELoss):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

    with pytest.raises(InputError, match="parameters of its own"):
        fs.Problem(network(), (X, NUMBERS), loss=Learnt())
    odd = nn.MSELoss()
    odd.reduction = "median"
    with pytest.raises(InputError, match="median"):
        fs.Problem(network(), (X, NUMBERS), loss=odd)


def test_the_users_loss_is_not_changed_nor_looked_at_later() -> None:
    loss = nn.HuberLoss()
    problem = fs.Problem(network(), (X, NUMBERS), loss=loss)
    before = Context(problem).scores().loss
    assert loss.reduction == "mean"
    loss.delta = 9.0
    assert Context(problem).scores().loss == before


def test_float32_networks_have_losses_to_float32() -> None:
    model = network().float()
    problem = fs.Problem(model, (X.float(), CLASSES), loss=nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1))
    torch_loss = nn.CrossEntropyLoss(weight=WEIGHTS.float(), label_smoothing=0.1)
    expected = torch_loss(model(X.float()), CLASSES).item()
    assert Context(problem).scores().loss == pytest.approx(expected, rel=1e-5)
    assert fs.measure(problem, "hessian_trace")["hessian_trace"] > 0


@pytest.mark.parametrize(("loss", "said"), [(nn.L1Loss(), True), (nn.HuberLoss(), False), (nn.MSELoss(), False)])
def test_a_loss_without_curvature_says_so(loss: nn.Module, said: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    x = torch.randn(8, 3, dtype=torch.float64)
    table = fs.measure(fs.Problem(model, train=(x, model(x).detach() + 0.1 * x[:, :1]), loss=loss), "hessian_trace")
    assert (table["hessian_trace"] == 0) == said
    assert any("no curvature in the outputs" in remark for remark in table.meta.get("remarks", [])) == said
