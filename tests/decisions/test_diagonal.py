"""Diagonals against dense matrices: Hessians and Gauss-Newton matrices written out, gradients sample by sample."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from decision_networks import LOSSES, NETWORKS, dense_block, sample_losses
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

import flatscope as fs
from flatscope.limits import STANDARD

NAMES = [name for name in NETWORKS if name != "transposed"]


def problem_of(name: str) -> tuple[fs.Problem, nn.Module, Tensor, Tensor]:
    model, x, y = NETWORKS[name]()
    return fs.Problem(model, train=(x, y), loss=LOSSES.get(name, "cross_entropy")), model, x, y


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_hessians_diagonal_is_that_of_the_dense_matrix(name: str) -> None:
    problem, model, x, y = problem_of(name)
    found = fs.diagonal(problem, "hessian", precision=0)
    assert list(found) == list(trained(model))
    for key, value in trained(model).items():
        twin = dense_block(name, model, x, y, key)[1].diagonal().reshape(value.shape)
        torch.testing.assert_close(found[key], twin, rtol=1e-9, atol=1e-10)
        assert not found.stderr[key].any()
    assert found.exact


def gauss_newton_diagonal(name: str, model: nn.Module, x: Tensor, y: Tensor, key: str) -> Tensor:
    """Mean over samples of the diagonal of Jᵀ (∇² loss) J, J written out."""
    value = dict(model.named_parameters())[key].detach()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        jacobian = torch.autograd.functional.jacobian(lambda v: functional_call(model, {key: v}, (x,)), value)
        outputs = functional_call(model, {}, (x,)).detach()
    rows = jacobian.reshape(*outputs.shape, -1)  # (n, C, p)
    if name == "regression":
        middle = 2 * torch.eye(outputs.shape[1], dtype=x.dtype).expand(len(outputs), -1, -1)
    else:
        p = outputs.softmax(1)
        middle = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    return torch.einsum("ncp,ncd,ndp->p", rows, middle, rows).reshape(value.shape) / len(outputs)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_gauss_newton_diagonal_is_that_of_the_dense_matrix(name: str) -> None:
    problem, model, x, y = problem_of(name)
    found = fs.diagonal(problem, "gauss_newton")
    for key in trained(model):
        twin = gauss_newton_diagonal(name, model, x, y, key)
        torch.testing.assert_close(found[key], twin, rtol=1e-9, atol=1e-12)
    assert found.exact


@pytest.mark.parametrize("name", NETWORKS)
def test_the_empirical_fisher_is_the_mean_of_squares(name: str) -> None:
    problem, model, x, y = problem_of(name)
    found = fs.diagonal(problem, "empirical_fisher")
    keys = list(trained(model))
    twin = {key: torch.zeros_like(value) for key, value in trained(model).items()}
    mean = {key: torch.zeros_like(value) for key, value in trained(model).items()}
    for i in range(len(x)):
        loss = sample_losses(name, model, x[i : i + 1], y[i : i + 1]).sum()
        gradients = torch.autograd.grad(loss, [dict(model.named_parameters())[key] for key in keys], allow_unused=True)
        for key, gradient in zip(keys, gradients, strict=True):
            if gradient is not None:
                twin[key] += gradient.square() / len(x)
                mean[key] += gradient / len(x)
    for key in keys:
        torch.testing.assert_close(found[key], twin[key], rtol=1e-9, atol=1e-13)
    square_of_mean = sum(float(value.square().sum()) for value in mean.values())
    assert found.trace > 1.5 * square_of_mean  # which is what it must not be


def many_classes() -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 60)).double()
        return model, torch.randn(40, 6).double(), torch.randint(60, (40,))


def test_draws_miss_the_exact_entries_by_their_errors() -> None:
    model, x, y = many_classes()
    problem = fs.Problem(model, train=(x, y))
    exact = fs.diagonal(problem, "gauss_newton", precision=0)
    ratios = []
    for seed in range(4):
        drawn = fs.diagonal(problem, "gauss_newton", precision=0.15, seed=seed)
        assert not drawn.exact
        for name, value in drawn.items():
            ratios.append(((value - exact[name]) / drawn.stderr[name]).reshape(-1))
    apart = torch.cat(ratios)
    apart = apart[apart.isfinite()]
    assert 0.6 < float(apart.square().mean().sqrt()) < 1.4
    assert float((apart.abs() > 3).double().mean()) < 0.05


def test_all_columns_are_taken_where_draws_would_cost_more() -> None:
    """Six draws tell that thousands are needed, of 59 columns."""
    model, x, y = many_classes()
    found = fs.diagonal(fs.Problem(model, train=(x, y)), "gauss_newton", precision=0.01)
    assert found.exact
    assert set(found.ways.values()) == {"exact: all columns"}


def test_probes_of_the_hessian_miss_by_their_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 3)).double()
        x, y = torch.randn(100, 20).double(), torch.randint(3, (100,))
    problem = fs.Problem(model, train=(x, y))
    exact = fs.diagonal(problem, precision=0)
    monkeypatch.setitem(vars(STANDARD), "few_entries", 100)
    drawn = fs.diagonal(problem, precision=0.3)
    assert "random vectors" in drawn.ways["0.weight"]
    apart = ((drawn["0.weight"] - exact["0.weight"]) / drawn.stderr["0.weight"]).abs()
    assert float((apart > 3).double().mean()) < 0.05
    assert float(apart.mean()) > 0.3


def test_own_losses_with_negative_curvature() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x, y = nn.Linear(3, 2).double(), torch.randn(10, 3).double(), torch.randn(10, 2).double()

    def saddle(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - targets[:, 0]) ** 2 - outputs[:, 1] ** 2 + outputs.prod(1)

    found = fs.diagonal(fs.Problem(model, train=(x, y), loss=saddle))
    flat = model.weight.detach().reshape(-1)
    hessian = torch.autograd.functional.hessian(
        lambda v: saddle(nn.functional.linear(x, v.reshape(2, 3), model.bias.detach()), y).mean(), flat
    )
    torch.testing.assert_close(found["weight"], hessian.diagonal().reshape(2, 3), rtol=1e-9, atol=1e-12)
    assert (found["weight"][1] < 0).all()
    assert "negative" in found.headline


def test_tokens_are_positions_of_one_sample() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(torch.relu(self.table(tokens)))

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, tokens = Tokens().double(), torch.randint(5, (6, 4))
    targets = torch.randint(5, (6, 4), generator=torch.Generator().manual_seed(1))
    found = fs.diagonal(fs.Problem(model, train=(tokens, targets), loss="next_token"), "empirical_fisher")
    twin = torch.zeros(5, 3, dtype=torch.float64)
    for row, target in zip(tokens, targets, strict=True):
        loss = nn.functional.cross_entropy(model(row[None])[0], target)
        twin += torch.autograd.grad(loss, model.head.weight)[0].square() / 6
    torch.testing.assert_close(found["head.weight"], twin, rtol=1e-9, atol=1e-13)


def test_batches_and_their_order_do_not_matter() -> None:
    for name in ("lenet-like", "attention"):
        model, x, y = NETWORKS[name]()
        loader = DataLoader(TensorDataset(x, y), batch_size=3, shuffle=True)
        for matrix in ("hessian", "gauss_newton", "empirical_fisher"):
            one = fs.diagonal(fs.Problem(model, train=(x, y)), matrix, precision=0)
            other = fs.diagonal(fs.Problem(model, train=loader), matrix, precision=0)
            for key in one:
                torch.testing.assert_close(one[key], other[key], rtol=1e-8, atol=1e-11)


def test_files_and_what_is_no_such_file(tmp_path: Path) -> None:
    model, x, y = many_classes()
    found = fs.diagonal(fs.Problem(model, train=(x, y)), "gauss_newton", precision=0.3)
    found.save(tmp_path / "d.safetensors")
    again = fs.Diagonal.load(tmp_path / "d.safetensors")
    assert list(again) == list(found)
    assert again.matrix == "gauss_newton"
    assert again.ways == found.ways
    for name in found:
        assert torch.equal(again[name], found[name])
        assert torch.equal(again.stderr[name], found.stderr[name])
    from safetensors.torch import load_file, save_file

    assert torch.equal(load_file(tmp_path / "d.safetensors")["0.weight"], found["0.weight"])
    save_file({"a": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(fs.InputError, match="a diagonal that flatscope saved"):
        fs.Diagonal.load(tmp_path / "other.safetensors")
    content = bytearray((tmp_path / "d.safetensors").read_bytes())
    content[-9] ^= 1
    (tmp_path / "d.safetensors").write_bytes(content)
    with pytest.raises(fs.InputError, match="checksum"):
        fs.Diagonal.load(tmp_path / "d.safetensors")
    with pytest.raises(fs.InputError, match="safetensors"):
        found.save(tmp_path / "d.json")


def test_nothing_of_the_user_changes_and_slips_are_refused() -> None:
    problem, model, _, _ = problem_of("batchnorm")
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    fs.diagonal(problem)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(value.grad is None for value in model.parameters())
    with pytest.raises(fs.InputError, match="a known matrix"):
        fs.diagonal(problem, "fisher")
    with pytest.raises(fs.InputError, match="a Problem"):
        fs.diagonal(model)  # type: ignore[arg-type]


def test_half_precision_weights_are_measured_in_float32() -> None:
    model, x, y = NETWORKS["mlp"]()
    found = fs.diagonal(fs.Problem(model.to(torch.bfloat16), train=(x.float(), y)))
    assert found["0.weight"].dtype == torch.float32
