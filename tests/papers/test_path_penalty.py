"""The path regulariser against enumerated paths, in training."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from flatscope import Problem, measure
from flatscope.errors import InputError
from flatscope_papers.theory.loss_responses import loss_responses
from flatscope_papers.theory.path_penalties import network_sides, path_penalty


def small(bias: bool = True, seed: int = 0) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(
        nn.Linear(3, 4, bias), nn.ReLU(), nn.Sequential(nn.Linear(4, 3, bias), nn.ReLU()), nn.Linear(3, 1, bias)
    )
    for p in net.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return net


def batch(n: int = 12, d: int = 3, seed: int = 1) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def enumerated(net: nn.Sequential, x: Tensor) -> tuple[float, float]:
    """ŵᵀΛŵ and ŵᵀŵ, path by path."""
    first, second, third = net[0], net[2][0], net[3]
    h = first(x)
    k = second(h.clamp_min(0))
    active = everything = 0.0
    for i, a, b in itertools.product((None, 0, 1, 2), range(4), range(3)):
        edge = first.bias[a] if i is None else first.weight[a, i]
        path = float((edge * second.weight[b, a] * third.weight[0, b]) ** 2)
        everything += path
        active += path * float(((h[:, a] > 0) & (k[:, b] > 0)).double().mean())
    for b in range(3):
        path = float((second.bias[b] * third.weight[0, b]) ** 2)
        everything += path
        active += path * float((k[:, b] > 0).double().mean())
    last = float(third.bias**2)
    return active + last, everything + last


def test_penalty_is_the_sum_over_paths() -> None:
    net, x = small(), batch()
    with torch.no_grad():
        active, everything = enumerated(net, x)
    assert path_penalty(net, x).item() == pytest.approx(active, rel=1e-12)
    assert path_penalty(net, example=x).item() == pytest.approx(everything, rel=1e-12)
    assert active < everything


def test_convolutions_and_pools_are_the_dense_network() -> None:
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(2, 2, 2),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(2, 1),
    ).double()
    x = torch.randn(5, 1, 6, 6, generator=generator, dtype=torch.float64)
    found = float(path_penalty(net, x).detach())
    # By hand, sample by sample: gates of the first layer, switches of the pool, 1/4 per edge of the average, squared.
    total = 0.0
    for sample in x:
        first = net[0](sample[None])
        switched, where = nn.functional.max_pool2d(first.clamp_min(0), 2, return_indices=True)
        count = torch.zeros(first.shape, dtype=torch.float64)
        ones = nn.functional.conv2d(torch.ones_like(sample[None]), net[0].weight ** 2, net[0].bias ** 2, padding=1)
        count += ones * (first > 0)
        kept = count.flatten(2).gather(2, where.flatten(2)).view_as(switched)
        later = nn.functional.conv2d(kept, net[3].weight ** 2, net[3].bias ** 2)
        total += float(((later.sum((2, 3)) / 16) @ (net[6].weight ** 2).T + net[6].bias ** 2).detach())
    assert found == pytest.approx(total / 5, rel=1e-12)


def test_training_with_it_shortens_the_paths() -> None:
    x = batch(40)
    y = (x[:, 0] - 0.5 * x[:, 1]).clamp_min(0)
    sizes = []
    for rho_squared in (0.0, 0.3):
        net = small(seed=0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(400):
            optimizer.zero_grad()
            loss = (net(x)[:, 0] - y).square().mean() + rho_squared * path_penalty(net, x)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        sizes.append(float(path_penalty(net, example=x).detach()))
    assert sizes[1] < 0.8 * sizes[0]


def test_sides_of_the_sandwich_for_a_linear_model() -> None:
    net = nn.Sequential(nn.Linear(3, 1, bias=False)).double()
    x, y = batch(8), batch(8, 1, seed=3)[:, 0]
    sides = network_sides(net, x, y, 0.2)
    weight = net[0].weight.detach()[0]
    residual = y - x @ weight
    loss, length = float(residual.square().mean()), float(weight.norm())
    assert sides.robust == pytest.approx(float((residual.abs() + 0.2 * length).square().mean()), rel=1e-9)
    assert sides.ridge == pytest.approx(loss + 0.04 / 8 * length**2)
    assert sides.with_norm == pytest.approx(loss + 0.2 * length)
    assert sides.active_ridge == pytest.approx(8 * loss + 0.04 * length**2)
    deep = network_sides(small(), x, y, 0.1, c=0.5)
    assert deep.robust > (y - small()(x)[:, 0]).square().mean().item()


def test_stability_is_what_one_finds_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = batch(10), batch(10, 1, seed=2)
    model = nn.Linear(3, 1, bias=False).double()
    new = (torch.randn(3, generator=generator).double(), torch.randn(1, generator=generator).double())
    found = loss_responses(model, nn.functional.mse_loss, x, y, replaced=4, by=new, tau=0.1)
    w = model.weight.detach()[0]
    H, g = 2 * x.T @ x / 10, 2 * x.T @ (x @ w - y[:, 0]) / 10
    swap = ((new[0] @ w - new[1]) ** 2 - (x[4] @ w - y[4]) ** 2) / 10
    assert found.loss_after_swap == pytest.approx(float(swap))
    assert found.gradient == pytest.approx(float(g.norm()))
    expected = 2 * (new[0] * (new[0] @ w - new[1]) - x[4] * (x[4] @ w - y[4])) / 10
    assert found.gradient_after_swap == pytest.approx(float(expected.norm()))
    assert found.gradient_after_scaling == pytest.approx(float((0.1 * H @ w).norm()))  # quadratic: exact
    assert found.first_order == pytest.approx(found.gradient_after_scaling)
    assert found.loss_after_scaling == pytest.approx(float(0.1 * g @ w + 0.005 * w @ H @ w))
    assert found.as_printed == pytest.approx(0.1 * float(g.norm()))
    assert abs(found.as_printed - found.first_order) > 0.05 * found.first_order  # the printed form is another number


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="linear maps, ReLUs"):
        path_penalty(nn.Sequential(nn.Linear(2, 2), nn.Sigmoid()), torch.ones(1, 2))
    with pytest.raises(InputError, match="either inputs or an example"):
        path_penalty(small())
    pair = (torch.ones(3), torch.ones(1))
    with pytest.raises(InputError, match="a sample from 0 to 2"):
        loss_responses(
            nn.Linear(3, 1), nn.functional.mse_loss, torch.ones(3, 3), torch.ones(3, 1), replaced=3, by=pair, tau=0.1
        )


def test_all_paths_are_those_of_the_path_norm_measure() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    value = measure(Problem(net, train=(batch(), torch.arange(12) % 2)), "l2_path_norm")["l2_path_norm"]
    assert path_penalty(net, example=batch()).item() == pytest.approx(value**2, rel=1e-12)


class Skipping(nn.Module):
    """A skip, a ReLU as a function, one in place, a mean over positions, BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.head = (
            nn.Conv1d(2, 3, 1),
            nn.Conv1d(3, 3, 3, padding=1, bias=False),
            nn.Linear(3, 2),
        )
        self.norm, self.relu = nn.BatchNorm1d(3), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = self.relu(x + self.norm(self.inner(x)))
        return self.head(x.mean(2))


def test_any_network_has_a_penalty() -> None:
    """All paths: the square of the path norm measure. Open paths: those of the affine network that each sample sees."""
    generator = torch.Generator().manual_seed(0)
    net = Skipping().double().eval()
    net.norm.running_mean += 0.3
    net.norm.running_var *= 1.7
    x = torch.randn(6, 2, 4, generator=generator, dtype=torch.float64)
    value = measure(Problem(net, train=(x, torch.arange(6) % 2)), "l2_path_norm")["l2_path_norm"]
    assert path_penalty(net, example=x).item() == pytest.approx(value**2, rel=1e-10)
    found = path_penalty(net, x)
    total = 0.0
    with torch.no_grad():
        scale = net.norm.weight / (net.norm.running_var + net.norm.eps).sqrt()
        shift = net.norm.bias - net.norm.running_mean * scale
        for sample in x:
            first = net.stem(sample[None])
            inner = net.norm(net.inner(first.clamp_min(0)))
            squares = nn.functional.conv1d(torch.ones(1, 2, 4).double(), net.stem.weight**2, net.stem.bias**2)
            squares = squares * (first > 0)
            branch = nn.functional.conv1d(squares, net.inner.weight**2, padding=1)
            branch = branch * scale[:, None] ** 2 + shift[:, None] ** 2
            squares = (squares + branch) * (first.clamp_min(0) + inner > 0)
            total += float((squares.sum(2) / 16 @ (net.head.weight**2).T + net.head.bias**2).sum())
    assert found.item() == pytest.approx(total / 6, rel=1e-12)
    found.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in net.parameters())
    with pytest.raises(InputError, match="statistics of the batch"):
        path_penalty(net.train(), x)
