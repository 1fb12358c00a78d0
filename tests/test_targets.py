"""Targets of every kind: one logit, labels, one-hot and soft targets, pixels, tokens; each beside a naive twin."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import Tiny
from references import Dense
from torch import Tensor, nn
from torch.nn import functional

import flatscope as fs
from flatscope.loss import next_tokens

pytestmark = pytest.mark.fast

CURVATURE = ["hessian_trace", "layer_trace", "rho_unit", "relative_flatness", "hessian_max_eigenvalue"]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def dense_net(*widths: int) -> nn.Sequential:
    torch.manual_seed(5)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double().eval()


def conv_net(channels: int) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, channels, 1)).double().eval()


X, Y = draw(10, 4), torch.arange(10) % 3
PIXELS = torch.arange(6 * 9).reshape(6, 3, 3) % 3
PIXELS[0, 0] = -100
TOKENS = (torch.arange(6 * 5).reshape(6, 5) * 7 % 11) % 3
TOKENS[1, 3:] = -100


def of_pixels(outputs: Tensor, targets: Tensor) -> Tensor:
    sums = functional.cross_entropy(outputs, targets, reduction="none", ignore_index=-100).flatten(1).sum(1)
    return sums / (targets != -100).flatten(1).sum(1)


def of_tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    return of_pixels(outputs.mT, targets)


def of_labels(outputs: Tensor, targets: Tensor) -> Tensor:
    found = functional.binary_cross_entropy_with_logits(
        outputs, targets.to(outputs).reshape(outputs.shape), reduction="none"
    )
    return found.reshape(len(outputs), -1).sum(1)


CASES: dict[str, tuple[nn.Module, Tensor, Tensor, str, Callable[[Tensor, Tensor], Tensor]]] = {
    "pixels": (conv_net(3), draw(6, 2, 3, 3), PIXELS, "cross_entropy", of_pixels),
    "tokens": (dense_net(4, 5, 3), draw(6, 5, 4), TOKENS, "next_token", of_tokens),
    "labels": (dense_net(4, 5, 3), X, (draw(10, 3) > 0).long(), "bce", of_labels),
    "one logit": (dense_net(4, 5, 1), X, Y > 0, "bce", of_labels),
    "probabilities": (dense_net(4, 5, 3), X, draw(10, 3).softmax(1), "cross_entropy", of_pixels),
}
CASES["probabilities"] = (*CASES["probabilities"][:4], lambda o, t: -(o.log_softmax(1) * t).sum(1))


@pytest.mark.parametrize("case", CASES)
def test_curvature_of_every_loss_equals_the_dense_hessian(case: str) -> None:
    model, x, y, loss, naive = CASES[case]
    layers = tuple(name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d))
    dense = Dense(Tiny(case, model, x, y, layers, loss=naive))
    problem = fs.Problem(model, (x, y), loss=loss)
    table = fs.measure(problem, CURVATURE, precision=0)
    assert bool(table.to_frame()["exact"].all())
    whole = dense.hessian_of(list(dense.params))
    assert fs.Context(problem).scores().loss == pytest.approx(float(dense.loss()), rel=1e-12)
    assert table["hessian_trace"] == pytest.approx(float(whole.trace()), rel=1e-9)
    assert table["hessian_max_eigenvalue"] == pytest.approx(float(torch.linalg.eigvalsh(whole)[-1]), rel=1e-5)
    for layer in layers:
        expected = float(dense.hessian_of([f"{layer}.weight"]).trace())
        assert table.layer("layer_trace")[layer] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_the_same_loss_as_a_function_gives_the_same_numbers(case: str) -> None:
    model, x, y, loss, naive = CASES[case]
    names = [*CURVATURE, "gradient_norm", "gradient_noise", "sharpness", "expected_sharpness", "fisher_rao_norm"]
    tables = [fs.measure(fs.Problem(model, (x, y), loss=given), names, precision=0) for given in (loss, naive)]
    values = [table.to_frame()["value"].to_numpy() for table in tables]
    assert values[0] == pytest.approx(values[1], rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("targets", [Y > 0, (Y > 0).long(), (Y > 0).double(), (Y > 0).double()[:, None]])
@pytest.mark.parametrize("flat", [False, True], ids=["(n, 1)", "(n,)"])
def test_one_logit_is_the_network_with_outputs_zero_and_itself(targets: Tensor, flat: bool) -> None:
    one, two = dense_net(4, 5, 1), dense_net(4, 5, 2)
    with torch.no_grad():
        for name, value in one[0].named_parameters():
            two[0].get_parameter(name).copy_(value)
        for name, value in one[2].named_parameters():
            two[2].get_parameter(name).copy_(torch.cat([torch.zeros_like(value), value]))
    if flat:
        if targets.ndim > 1:
            return  # a column of targets has no place beside a vector of outputs
        one.append(nn.Flatten(0))
    names = ["margin", "functional_margin", "layer_trace", "rho_unit", "perturbation_robustness", "spectral_norm"]
    options = {"margin": {"epsilon": 1.0}, "spectral_norm": {"form": "lipschitz_l2"}}
    table = fs.measure(fs.Problem(one, (X, targets), loss="bce"), names, options=options)
    twin = fs.measure(fs.Problem(two, (X, (Y > 0).long())), names, options=options)
    assert table["margin"] == pytest.approx(twin["margin"], rel=1e-9)
    torch.testing.assert_close(table.samples("functional_margin"), twin.samples("functional_margin"))
    assert table.layer("layer_trace")["0"] == pytest.approx(twin.layer("layer_trace")["0"], rel=1e-9)
    torch.testing.assert_close(table.units("rho_unit", layer="2"), twin.units("rho_unit", layer="2"))
    scores = [
        fs.Context(problem).scores()
        for problem in (fs.Problem(one, (X, targets), loss="bce"), fs.Problem(two, (X, (Y > 0).long())))
    ]
    assert scores[0].error == scores[1].error
    assert scores[0].loss == pytest.approx(scores[1].loss, rel=1e-12)


def test_every_measure_and_bound_of_one_logit_has_a_value_or_a_reason() -> None:
    problem = fs.Problem(dense_net(4, 5, 1), (X, Y > 0), test=(X, Y > 0), loss="bce")
    frames = [fs.measure(problem, "all").to_frame(), fs.bounds(problem, "all").to_frame()]
    for frame in frames:
        assert not frame["reason"].str.startswith("failed").any()
        assert (frame["value"].notna() | (frame["reason"] != "")).all()
    refused = frames[0].set_index("measure").loc["local_linear_margin", "reason"]
    assert "one logit stands for two" in refused


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_one_hot_targets_are_class_numbers(loss: str, dtype: torch.dtype) -> None:
    names = [*CURVATURE, "margin", "gradient_norm"]
    tables = [
        fs.measure(fs.Problem(dense_net(4, 5, 3), (X, y), test=(X, y), loss=loss), names).to_frame()
        for y in (Y, functional.one_hot(Y, 3).to(dtype))
    ]
    assert tables[1]["value"].to_numpy() == pytest.approx(tables[0]["value"].to_numpy(), rel=1e-12)


def test_labels_that_look_one_hot_stay_labels() -> None:
    y = functional.one_hot(Y, 3).double()
    problem = fs.Problem(dense_net(4, 5, 3), (X, y), loss="bce")
    expected = of_labels(problem.forward(X), y).mean()
    assert fs.Context(problem).scores().loss == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("pixels", "many targets"),
        ("tokens", "many targets"),
        ("labels", "several labels"),
        ("probabilities", "probabilities"),
    ],
)
def test_measures_that_need_classes_say_why_there_are_none(case: str, reason: str) -> None:
    model, x, y, loss, _ = CASES[case]
    problem = fs.Problem(model, (x, y), loss=loss)
    frame = fs.measure(problem, "margin").to_frame()
    assert not problem.classification
    assert math.isnan(frame["value"][0])
    assert reason in frame["reason"][0]


def test_a_sample_counts_once_however_many_of_its_pixels_count() -> None:
    model = conv_net(3)
    x, y = draw(2, 2, 3, 3), PIXELS[:2].clone()
    y[0].fill_(-100)
    y[0, 1, 1] = 2
    found = fs.Context(fs.Problem(model, (x, y))).scores().losses
    logs = -model(x).detach().log_softmax(1)
    assert float(found[0]) == pytest.approx(float(logs[0, 2, 1, 1]), rel=1e-12)
    assert float(found[1]) == pytest.approx(float(logs[1].gather(0, y[1][None]).mean()), rel=1e-12)


class Texts(nn.Module):
    """Called by keyword, as language models are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.words, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return {"logits": self.head(torch.tanh(self.words(input_ids)))}


def test_every_measure_of_a_language_model_has_a_value_or_a_reason() -> None:
    ids = torch.arange(12).reshape(3, 4) % 7
    frame = fs.measure(
        fs.Problem(Texts(), {"input_ids": ids, "labels": next_tokens(ids)}, loss="next_token")
    ).to_frame()
    assert not frame["reason"].str.startswith("failed").any()
    assert (frame["value"].notna() | (frame["reason"] != "")).all()
    assert float(frame.set_index("measure").loc["hessian_trace", "value"]) > 0


def test_tokens_that_were_not_moved_by_one_are_moved_by_name_and_refused_elsewhere() -> None:
    ids = torch.arange(12).reshape(3, 4) % 7
    batch = {"input_ids": ids, "labels": ids}
    for labels in (ids, ids.where(ids > 2, -100)):
        unmoved = fs.Problem(Texts(), [batch | {"labels": labels}], loss="next_token")
        moved = fs.Problem(Texts(), [batch | {"labels": next_tokens(labels)}], loss="next_token")
        assert fs.Context(unmoved).scores().loss == fs.Context(moved).scores().loss
    with pytest.raises(fs.InputError, match=r"tokens of the inputs themselves.*next_tokens"):
        fs.Problem(Texts(), (ids, ids), loss="next_token")
    moved = fs.Problem(Texts(), batch | {"labels": next_tokens(ids)}, loss="next_token")
    expected = functional.cross_entropy(Texts()(ids)["logits"].detach()[:, :-1].mT, ids[:, 1:])
    assert fs.Context(moved).scores().loss == pytest.approx(float(expected), rel=1e-6)
    same = torch.full_like(ids, 5)  # the same token again and again: moving by one changes nothing
    assert fs.Problem(Texts(), {"input_ids": same, "labels": same}, loss="next_token").n_train == 3


@pytest.mark.parametrize(
    ("model", "y", "loss", "words"),
    [
        (dense_net(4, 1), Y % 2, "cross_entropy", ["at least two logits", 'loss="bce"', "--loss bce"]),
        (dense_net(4, 1), (Y % 2).double(), "cross_entropy", ["at least two logits", 'loss="bce"']),
        (nn.Sequential(dense_net(4, 1), nn.Flatten(0)), Y % 2, "cross_entropy", ["at least two logits"]),
        (dense_net(4, 3), torch.rand(10, 3).double(), "cross_entropy", ["probabilities", "other sums", "mse"]),
        (dense_net(4, 3), (draw(10, 3) > 0).double(), "cross_entropy", ["probabilities", 'loss="bce"']),
        (dense_net(4, 3), (draw(10, 3) > -9).long(), "cross_entropy", ["(10, 3)", 'loss="bce"']),
        (dense_net(4, 1), 2 * (Y % 2) - 1, "bce", ["0 or 1", "from -1 to 1", "(y + 1) / 2"]),
        (dense_net(4, 3), Y, "bce", ["from 0 to 2", "cross_entropy"]),
        (dense_net(4, 3), Y.where(Y > 0, -100), "cross_entropy", ["nothing but -100", "Leave such samples out"]),
        (conv_net(3), PIXELS[:, :, :1], "cross_entropy", ["(6, 3, 3)", "(6, 3, 1)"]),
        (conv_net(2), PIXELS, "cross_entropy", ["labels from 0 to 1", "from 0 to 2"]),
        (
            nn.Sequential(dense_net(4, 4), nn.Unflatten(1, (2, 2))),
            Y[:, None].expand(-1, 2),
            "next_token",
            ["labels from 0 to 1", "from 0 to 2"],
        ),
        (conv_net(3), torch.full_like(PIXELS, -100), "cross_entropy", ["nothing but -100"]),
    ],
)
def test_targets_that_the_loss_cannot_take(model: nn.Module, y: Tensor, loss: str, words: list[str]) -> None:
    x = X if len(y) == len(X) else draw(6, 2, 3, 3)
    with pytest.raises(fs.InputError) as refusal:
        fs.Problem(model, (x, y), loss=loss)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
