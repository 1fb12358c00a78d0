"""Losses by name: their values beside naive loops, and the closed form of their output Hessian beside autograd."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from test_factors import output_columns
from torch import Tensor, nn
from torch.nn import functional

import flatscope as fs
from flatscope.context import Context
from flatscope.loss import Loss, as_loss, next_tokens

pytestmark = pytest.mark.fast

IGNORED = -100


def draw(*shape: int, scale: float = 2.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64) * scale


def classes(*shape: int, below: int) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(len(shape)))


def with_ignored(targets: Tensor) -> Tensor:
    targets = targets.clone()
    targets.view(len(targets), -1)[0, :2] = IGNORED
    return targets


# name of the loss, outputs, targets
CASES: dict[str, tuple[str, Tensor, Tensor]] = {
    "class numbers": ("cross_entropy", draw(5, 3), classes(5, below=3)),
    "probabilities": ("cross_entropy", draw(5, 3), draw(5, 3).softmax(1)),
    "segmentation": ("cross_entropy", draw(4, 3, 2, 2), with_ignored(classes(4, 2, 2, below=3))),
    "probabilities of pixels": ("cross_entropy", draw(4, 3, 2, 2), draw(4, 3, 2, 2).softmax(1)),
    "a sequence of classes": ("cross_entropy", draw(4, 3, 5), classes(4, 5, below=3)),
    "tokens": ("next_token", draw(4, 5, 3), with_ignored(classes(4, 5, below=3))),
    "one logit": ("bce", draw(6), classes(6, below=2)),
    "one logit in a column": ("bce", draw(6, 1), classes(6, below=2).bool()),
    "labels": ("bce", draw(6, 3), classes(6, 3, below=2).double()),
    "label probabilities": ("bce", draw(6, 3), draw(6, 3).sigmoid()),
    "labels of pixels": ("bce", draw(4, 2, 3, 1), classes(4, 2, 3, 1, below=2)),
    "numbers": ("mse", draw(5, 3), draw(5, 3) + 1),
    "class numbers as vectors": ("mse", draw(5, 3), classes(5, below=3)),
}
every_case = pytest.mark.parametrize("case", CASES)


def naive(name: str, outputs: Tensor, targets: Tensor) -> list[float]:
    """The loss of each sample by loops over positions and classes."""
    found = []
    for z, t in zip(outputs, targets, strict=True):
        if name == "mse":
            t = t if t.ndim else torch.tensor([float(c == t) for c in range(len(z))])
            found.append(float(((z - t) ** 2).sum()))
        elif name == "bce":
            per_label = z.numel() if z.ndim < 2 else z.shape[0]
            terms = [
                float(b) * math.log(1 + math.exp(-float(a))) + (1 - float(b)) * math.log(1 + math.exp(float(a)))
                for a, b in zip(z.reshape(-1), t.reshape(-1), strict=True)
            ]
            found.append(sum(terms) * per_label / len(terms))
        else:
            rows = z if name == "next_token" else z.reshape(z.shape[0], -1).T  # (P, C)
            soft = t.reshape(z.shape[0], -1).T if t.is_floating_point() else None
            terms = []
            for p, row in enumerate(rows):
                logs = [float(value) - math.log(sum(math.exp(float(other)) for other in row)) for value in row]
                if soft is not None:
                    terms.append(-sum(float(w) * log for w, log in zip(soft[p], logs, strict=True)))
                elif int(t.reshape(-1)[p]) != IGNORED:
                    terms.append(-logs[int(t.reshape(-1)[p])])
            found.append(sum(terms) / len(terms))
    return found


@every_case
def test_values_are_those_of_a_naive_loop(case: str) -> None:
    name, outputs, targets = CASES[case]
    assert as_loss(name)(outputs, targets).tolist() == pytest.approx(naive(name, outputs, targets), rel=1e-12)


@every_case
def test_factors_multiply_to_the_hessian_of_the_loss(case: str) -> None:
    name, outputs, targets = CASES[case]
    loss = as_loss(name)
    columns = output_columns(loss, outputs, targets)
    assert columns.column_signs is None
    flat = columns.values.reshape(len(columns.values), len(outputs), -1)
    products = torch.einsum("kni,knj->nij", flat, flat)
    for i in range(len(outputs)):

        def of_one(z: Tensor, i: int = i) -> Tensor:
            return loss(z[None], targets[i : i + 1]).sum()

        expected = torch.func.hessian(of_one)(outputs[i]).reshape(flat.shape[2], -1)
        torch.testing.assert_close(products[i], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0] != "mse"])
def test_positions_carry_the_whole_loss(case: str) -> None:
    """Logits and weights alone give the Hessian; ignored positions weigh nothing, the others the same."""
    name, outputs, targets = CASES[case]
    loss = as_loss(name)
    logits, weights = loss.positions(outputs, targets)
    assert logits.shape[:2] == weights.shape
    per_sample = {"labels": 3.0, "label probabilities": 3.0, "labels of pixels": 2.0}.get(case, 1.0)
    torch.testing.assert_close(weights.sum(1), torch.full_like(weights[:, 0], per_sample))
    ignored = (targets == IGNORED).reshape(len(targets), -1) if weights.shape[1] == targets[0].numel() else None
    if ignored is not None:
        assert torch.equal(weights == 0, ignored)
    torch.testing.assert_close(loss.to_outputs(logits, outputs.shape), outputs, rtol=0, atol=0)
    stacked = torch.stack([logits, 2 * logits])
    torch.testing.assert_close(loss.to_outputs(stacked, outputs.shape)[1], 2 * outputs, rtol=0, atol=0)


def test_sure_logits_keep_their_digits_in_float32() -> None:
    outputs, targets = torch.tensor([40.0, -40.0]), torch.tensor([1, 0])
    found = as_loss("bce")(outputs, targets)
    assert found.tolist() == pytest.approx([math.exp(-40)] * 2, rel=1e-4)
    curvature = output_columns(as_loss("bce"), outputs, targets).values.square().sum(0)
    assert curvature.tolist() == pytest.approx([math.exp(-40)] * 2, rel=1e-4)


def test_one_sample_of_a_vmapped_batch() -> None:
    """Sweeps evaluate losses under vmap: nothing may depend on the values of the targets."""
    for name, outputs, targets in CASES.values():
        loss = as_loss(name)
        found = torch.vmap(lambda z, t, loss=loss: loss(z[None], t[None])[0])(outputs, targets)
        torch.testing.assert_close(found, loss(outputs, targets))


def test_the_next_tokens_of_texts() -> None:
    tokens = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    assert next_tokens(tokens).tolist() == [[6, 7, 8, IGNORED], [6, 0, 0, IGNORED]]
    assert next_tokens(tokens, mask).tolist() == [[6, 7, 8, IGNORED], [6, IGNORED, IGNORED, IGNORED]]


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "words"),
    [
        ("cross_entropy", draw(5, 1), classes(5, below=2), ["at least two logits", 'loss="bce"']),
        ("cross_entropy", draw(5), classes(5, below=2), ["at least two logits", 'loss="bce"']),
        ("cross_entropy", draw(5, 4, 3), classes(5, 4, below=3), ["next_token"]),
        ("cross_entropy", draw(5, 3), classes(5, 3, below=2), ["as floats", 'loss="bce"']),
        ("cross_entropy", draw(5, 3), classes(5, 1, below=2), ["(5,)", "(5, 1)"]),
        ("next_token", draw(5, 3), classes(5, below=3), ["(n, T, vocabulary)", "next token"]),
        ("next_token", draw(5, 4, 3), draw(5, 4), ["token numbers", "float64"]),
        ("bce", draw(5, 3), classes(5, below=3), ["(5, 3)", "cross_entropy"]),
        ("bce", draw(5, 3), draw(5, 2), ["(5, 3)", "(5, 2)"]),
        ("mse", draw(5, 3), draw(5, 2), ["(5, 3)", "(5, 2)"]),
    ],
)
def test_what_does_not_fit_is_told_what_to_do(name: str, outputs: Tensor, targets: Tensor, words: list[str]) -> None:
    with pytest.raises(fs.InputError) as refusal:
        as_loss(name)(outputs, targets)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_a_function_of_the_users_has_no_closed_form() -> None:
    def bce(outputs: Tensor, targets: Tensor) -> Any:
        return outputs.square().sum(1)

    mine = as_loss(bce)
    assert (mine.name, mine.kind) == ("own bce", "own")
    assert isinstance(as_loss(mine), Loss)
    with pytest.raises(fs.InputError, match="softmax or logistic"):
        mine.positions(draw(2, 2), draw(2, 2))


def confident(times: float) -> tuple[nn.Module, Tensor, Tensor]:
    """A trained classifier of digits whose last layer is multiplied: the surer, the smaller the loss."""
    data = load_digits()
    x, y = torch.tensor(data.data[:200] / 16, dtype=torch.float32), torch.tensor(data.target[:200])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(300):
        optimizer.zero_grad()
        functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        net[2].weight.mul_(times), net[2].bias.mul_(times)
    return net.eval(), x, y


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def over_one_position(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs[:, :, None], targets[:, None], reduction="none").sum(1)


@pytest.mark.parametrize("loss", ["cross_entropy", own_loss, over_one_position])
@pytest.mark.parametrize("times", [1.0, 3.0])
def test_derivatives_keep_their_digits_in_float32_where_the_loss_is_tiny(loss: Any, times: float) -> None:
    """The gradient has a factor 1 − p, of which float32 has no digit left at a loss of 1e-8."""
    net, x, y = confident(times)
    names = ["gradient_norm", "fisher_rao_norm", "gradient_noise", "hessian_max_eigenvalue", "hessian_trace"]
    single, double = (
        fs.measure(fs.Problem(net, train=(x, y), loss=loss, dtype=dtype), names)
        for dtype in (torch.float32, torch.float64)
    )
    assert times == 1.0 or Context(fs.Problem(net, train=(x, y))).scores().loss < 1e-6
    for name in names:
        assert single[name] == pytest.approx(double[name], rel=2e-5), name


def test_the_surprise_of_a_class_is_its_cross_entropy_however_large_the_logits() -> None:
    logits = (draw(40, 6) * 200).requires_grad_()
    targets = classes(40, below=6)
    ours, torchs = (
        as_loss("cross_entropy")(logits, targets),
        functional.cross_entropy(logits, targets, reduction="none"),
    )
    assert ours.tolist() == pytest.approx(torchs.tolist(), rel=1e-12, abs=1e-12)
    assert torch.autograd.gradgradcheck(
        lambda z: as_loss("cross_entropy")(z, targets[:5]), (logits[:5].detach() / 100).requires_grad_()
    )


def test_a_loss_below_zero_is_asked_for_its_sign() -> None:
    """As where the log-likelihood is taken for the loss."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3), torch.randn(30, 4), torch.arange(30) % 3
    for sign in (1, -1):

        def loss(outputs: Tensor, targets: Tensor, sign: int = sign) -> Tensor:
            return sign * nn.functional.cross_entropy(outputs, targets, reduction="none")

        table = fs.measure(fs.Problem(model, (x, y), loss=loss), "rho_sum")
        assert any("minus the logarithm" in remark for remark in table.meta.get("remarks", ())) == (sign < 0)
