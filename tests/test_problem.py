"""Problem: what looks odd but must work, what is left as it was, and what is looked at before measuring."""

from __future__ import annotations

import copy
import random
from collections import UserDict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import flatscope as fs
from flatscope import isolation
from flatscope.errors import InputError
from flatscope.loss import as_loss

pytestmark = pytest.mark.fast

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 3
NAMES = ["parameter_count", "gradient_norm", "hessian_trace", "margin"]


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).eval()


def numbers(model: nn.Module, train: Any, **more: Any) -> dict[str, float]:
    table = fs.measure(fs.Problem(model, train, **more), NAMES)
    return {name: table[name] for name in NAMES}


def same_as_plain(train: Any, model: nn.Module | None = None) -> None:
    """The same numbers as from plain tensors, to rounding of float32 sums in another order."""
    assert numbers(net() if model is None else model, train) == pytest.approx(numbers(net(), (X, Y)), rel=1e-4)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.net(torch.cat([left, right], 1))


class LikeATransformer(nn.Module):
    """Called by keyword; answers with an object that has `.logits`, or with a mapping."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.net, self.answer = net(), answer

    def forward(self, *, values: Tensor, attention_mask: Tensor | None = None) -> Any:
        return self.answer(logits=self.net(values), loss=None)


class ByKey(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"values": X[index], "attention_mask": torch.ones(2, dtype=torch.bool), "labels": Y[index]}


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(X, Y, strict=True))


PAIRS = TensorDataset(X, Y)
GOOD_DATA = {
    "shuffling loader": DataLoader(PAIRS, batch_size=8, shuffle=True),
    "ragged last batch": DataLoader(PAIRS, batch_size=7),
    "single samples": DataLoader(PAIRS, batch_size=1, shuffle=True),
    "drop_last that drops nothing": DataLoader(PAIRS, batch_size=8, shuffle=True, drop_last=True),
    "own batch sampler": DataLoader(PAIRS, batch_sampler=[[0, 1, 2], list(range(3, 40))]),
    "a loader that does not batch": DataLoader(TensorDataset(X.view(4, 10, 4), Y.view(4, 10)), batch_size=None),
    "stream": DataLoader(Stream(), batch_size=16),
    "data set": PAIRS,
    "list of batches": [(X[:15], Y[:15]), (X[15:], Y[15:])],
    "batches of several kinds": [(X[:15], Y[:15]), [X[15:].numpy(), Y[15:].numpy()]],
    "an empty batch among others": [(X[:20], Y[:20]), (X[:0], Y[:0]), (X[20:], Y[20:])],
    "arrays": (X.numpy(), Y.numpy()),
    "a list of labels": (X, Y.tolist()),
    "float64 inputs": (X.double(), Y),
    "int32 labels": (X, Y.int()),
    "uint8 labels": (X.numpy(), Y.numpy().astype("uint8")),
    "inputs that are not contiguous": (X.repeat(1, 2).T.contiguous().T[:, :4], Y),
    "inputs that require gradients": (X.clone().requires_grad_(), Y),
}


@pytest.mark.parametrize("kind", GOOD_DATA)
def test_data_of_any_kind_give_the_same_numbers(kind: str) -> None:
    same_as_plain(GOOD_DATA[kind])


def test_read_only_and_reversed_arrays() -> None:
    locked = X.numpy().copy()
    locked.flags.writeable = False
    same_as_plain((locked, Y.numpy()))
    same_as_plain((X.numpy()[::-1], Y.numpy()[::-1]))


def test_collating_that_drops_or_multiplies_samples_is_counted() -> None:
    def every_other(batch: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        x, y = (torch.stack(column) for column in zip(*batch[::2], strict=True))
        return x, y

    problem = fs.Problem(net(), DataLoader(PAIRS, batch_size=8, collate_fn=every_other))
    assert problem.n_train == 20
    expected = numbers(net(), (X[::2], Y[::2]))
    assert fs.measure(problem, "gradient_norm")["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-4)


@pytest.mark.parametrize("answer", [SimpleNamespace, UserDict, dict], ids=lambda kind: kind.__name__)
def test_batches_by_key_and_outputs_with_logits(answer: Any) -> None:
    same_as_plain(DataLoader(ByKey(), batch_size=8, shuffle=True), LikeATransformer(answer))
    same_as_plain({"values": X, "labels": Y}, LikeATransformer(answer))
    same_as_plain(({"values": X}, Y), LikeATransformer(answer))


def test_several_inputs() -> None:
    left, right = X[:, :1], X[:, 1:]
    same_as_plain(((left, right), Y), TwoInputs())
    same_as_plain(DataLoader(TensorDataset(left, right, Y), batch_size=7), TwoInputs())


def test_training_mode_without_dropout_or_batchnorm() -> None:
    model = net().train()
    same_as_plain((X, Y), model)
    assert all(module.training for module in model.modules())
    same_as_plain((X, Y), nn.Sequential(*net(), nn.Dropout(0.0)).train())


def test_in_place_activations() -> None:
    first, _, last = net()
    same_as_plain((X, Y), nn.Sequential(first, nn.ReLU(inplace=True), last))


class Unused(nn.Module):
    """One layer is never called, one parameter never read."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.spare, self.scale = net(), nn.Linear(7, 2), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def test_unused_parameters_count_and_curve_nothing() -> None:
    found, plain = numbers(Unused(), (X, Y)), numbers(net(), (X, Y))
    assert found.pop("parameter_count") == plain.pop("parameter_count") + 16 + 3
    assert found == pytest.approx(plain, rel=1e-4)


def test_frozen_parameters_are_constants() -> None:
    model = net()
    model[0].requires_grad_(False)
    found = numbers(model, (X, Y))
    assert found["parameter_count"] == 18
    (remark,) = fs.Problem(model, (X, Y)).remarks  # which is shown with every table
    assert "0.weight, 0.bias" in remark
    assert 0 < found["hessian_trace"] < numbers(net(), (X, Y))["hessian_trace"]


def test_a_network_frozen_for_inference_is_measured_whole() -> None:
    same_as_plain((X, Y), net().requires_grad_(False))
    assert len(fs.Problem(net().requires_grad_(False), (X, Y)).remarks) == 1
    assert not fs.Problem(net(), (X, Y)).remarks


class Tied(nn.Module):
    """One matrix used twice, the second time transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4, bias=False)
        self.two = nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


def test_shared_parameters_count_once_and_get_the_sum_of_their_gradients() -> None:
    torch.manual_seed(2)
    model = Tied().eval()
    found = numbers(model, (X, Y))
    assert found["parameter_count"] == 16
    loss = nn.functional.cross_entropy(model(X), Y)
    gradient = torch.autograd.grad(loss, model.one.weight)[0]
    assert found["gradient_norm"] == pytest.approx(float(gradient.norm()), rel=1e-5)


def test_infinite_masks_in_buffers_are_meant() -> None:
    model = net()
    model.register_buffer("mask", torch.full((3,), -torch.inf))
    same_as_plain((X, Y), model)
    model.register_buffer("running_scale", torch.full((3,), torch.inf))
    with pytest.raises(fs.InputError, match="running_scale: expected finite"):
        fs.Problem(model, (X, Y))


def test_half_precision_weights_are_measured_in_float32() -> None:
    rounded = net().bfloat16()
    problem = fs.Problem(rounded, (X.bfloat16(), Y))
    assert problem.dtype == torch.float32
    assert fs.measure(problem, "margin").to_frame()["dtype"].tolist() == ["float32"]
    assert next(rounded.parameters()).dtype == torch.bfloat16


def test_dtype_and_batch_size_are_taken() -> None:
    problem = fs.Problem(net(), (X, Y), dtype=torch.float64, batch_size=7, test=(X[:9], Y[:9]))
    assert [len(targets) for _, targets in problem.batches()] == [7, 7, 7, 7, 7, 5]
    assert [len(targets) for _, targets in problem.batches("test", 8)] == [8, 1]
    assert {inputs.dtype for inputs, _ in problem.batches()} == {torch.float64}
    assert problem.params["0.weight"].dtype == torch.float64
    assert (problem.n_train, problem.test.n, problem.n_outputs, problem.classification) == (40, 9, 3, True)
    with pytest.raises(fs.InputError, match="train or test"):
        problem.part("validation")


def test_training_further_does_not_reach_the_problem() -> None:
    model = net()
    problem = fs.Problem(model, (X, Y), initial=model)
    before = {name: value.clone() for name, value in problem.params.items()}
    value = fs.measure(problem, "hessian_trace")["hessian_trace"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    model.train()
    for kept in (problem.params, problem.initial, dict(problem.model.named_parameters())):
        assert all(torch.equal(kept[name], before[name]) for name in before)
    assert fs.measure(problem, "hessian_trace")["hessian_trace"] == value


def states(model: nn.Module, generator: torch.Generator) -> list[Any]:
    kept: list[Any] = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    kept += [generator.get_state().tolist(), [module.training for module in model.modules()]]
    kept += [value.tolist() for value in model.state_dict().values()]
    return kept + [None if p.grad is None else p.grad.tolist() for p in model.parameters()]


def test_random_states_loaders_and_model_are_left_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).eval()
    model[0].weight.grad = torch.ones(5, 4)
    generator = torch.Generator().manual_seed(3)
    loaders = [DataLoader(PAIRS, batch_size=8, shuffle=True, generator=generator) for _ in range(2)]
    before = states(model, generator)
    problem = fs.Problem(model, loaders[0], test=loaders[1])
    assert states(model, generator) == before
    fs.measure(problem, NAMES)
    assert states(model, generator) == before


def test_a_loss_of_the_users_may_have_our_names() -> None:
    """Curvature in closed form must not be taken by the name: this is half the squared error."""

    def mse(outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * (outputs - targets).square().sum(1)

    targets = X[:, :3]
    own, ours = (fs.Problem(net(), (X, targets), loss=loss) for loss in (mse, "mse"))
    values = [fs.measure(problem, "hessian_trace")["hessian_trace"] for problem in (own, ours)]
    assert values[0] == pytest.approx(values[1] / 2, rel=1e-4)
    assert as_loss(mse).name != "mse"
    assert as_loss(nn.functional.cross_entropy).name != "cross_entropy"


def test_integers_that_only_the_users_loss_understands() -> None:
    def ignoring(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, ignore_index=-100, reduction="none")

    problem = fs.Problem(net(), (X, torch.where(Y == 2, -100, Y)), loss=ignoring)
    assert not problem.classification
    table = fs.measure(problem, ["margin", "gradient_norm"])
    assert np.isnan(table["margin"])
    assert "class labels" in table.reason("margin")
    assert table["gradient_norm"] > 0


def test_labels_may_be_fewer_than_outputs() -> None:
    assert fs.Problem(net(), (X, torch.zeros(40, dtype=torch.int64))).classification


def test_one_sample() -> None:
    assert (
        fs.measure(fs.Problem(net(), (X[:1], Y[:1])), "margin")["margin"]
        == fs.measure(fs.Problem(net(), (X[:1], Y[:1])), "functional_margin").samples("functional_margin").item()
    )


def test_weights_of_the_initial_network_may_come_as_module_or_state_dict() -> None:
    start = net()
    for initial in (start, start.state_dict(), {**start.state_dict(), "extra": X}):
        problem = fs.Problem(net(), (X, Y), initial=initial, dtype=torch.float64)
        assert problem.initial.keys() == problem.params.keys()
        assert problem.initial["0.weight"].dtype == torch.float64


def test_another_module_of_the_same_function_shares_the_data() -> None:
    problem = fs.Problem(net(), (X, Y), initial=net())
    other_model = copy.deepcopy(net())
    with torch.no_grad():
        other_model[0].weight.mul_(2)
        other_model[0].bias.mul_(2)
        other_model[2].weight.div_(2)
    other = problem.with_model(other_model)
    assert other.train is problem.train
    assert torch.allclose(other.forward(X), problem.forward(X), atol=1e-6)
    assert not torch.equal(other.params["0.weight"], problem.params["0.weight"])
    assert (other.initial, problem.initial is None) == (None, False)


def test_gradients_of_tables_are_those_of_the_loss_whatever_the_batches() -> None:
    tokens, y = torch.tensor([[0, 1], [0, 0], [2, 0]]), torch.tensor([0, 1, 0])
    values = []
    for frequent, size in ((False, 3), (True, 3), (True, 1)):
        torch.manual_seed(0)
        table = torch.nn.Embedding(3, 2, scale_grad_by_freq=frequent)
        model = torch.nn.Sequential(table, torch.nn.Flatten(), torch.nn.Linear(4, 2))
        values.append(
            fs.measure(fs.Problem(model, train=(tokens, y), batch_size=size), "gradient_norm")["gradient_norm"]
        )
        assert table.scale_grad_by_freq == frequent
    assert values[1:] == pytest.approx(2 * values[:1])


def test_a_table_that_the_forward_pass_writes_to_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(3, 2, max_norm=0.5), torch.nn.Flatten(), torch.nn.Linear(4, 2))
    with pytest.raises(InputError, match="max_norm"):
        fs.Problem(model, train=(torch.tensor([[0, 1], [1, 2]]), torch.tensor([0, 1])))


def test_a_network_is_checked_in_full_precision_within_coarse_products_too() -> None:
    seen = []

    class Watching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(isolation._coarse.get())
            return super().forward(x)

    with isolation.coarse_products():
        fs.Problem(Watching(4, 3), train=(X, Y))
        assert isolation._coarse.get()
    assert set(seen) == {False}
