"""Errors under input noise, input gradients and their bound, and robustness on partitions, against closed forms."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import pytest
import torch
from networks import batchnorm_conv, lenet_like, mlp, residual, sequences, smooth
from torch import Tensor, nn

import flatscope as fs
from flatscope.generalization_bounds.classical import spread_by_sample
from flatscope.measures.robustness import _noise_of_samples, errors_under_noise
from flatscope_papers.theory.input_changes import input_change_bound
from flatscope_papers.theory.partitions import Grid, NearestCentre, greedy_cover, k_means, partition_robustness


def linear_binary() -> tuple[fs.Problem, Tensor, Tensor, Tensor]:
    """A linear classifier with outputs ±f/2: margin y f(x), f = w·x + b."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(400, 5, generator=generator, dtype=torch.float64)
    w, b = torch.randn(5, generator=generator, dtype=torch.float64), 0.3
    model = nn.Linear(5, 2).double().eval()
    model.weight.data, model.bias.data = torch.stack([-w, w]) / 2, torch.tensor([-b, b], dtype=torch.float64) / 2
    y = (torch.rand(400, generator=generator) < 0.6).long()
    return fs.Problem(model, train=(x, y)), (2 * y - 1) * (x @ w + b), w, x


def test_noise_of_a_linear_classifier_has_the_closed_form() -> None:
    problem, signed, w, _ = linear_binary()
    frame = fs.measure(problem, "perturbation_robustness").to_frame()
    assert len(frame) == 6
    for row, gamma in zip(frame.itertuples(), (0, 0.05, 0.1, 0.2, 0.5, 1), strict=True):
        if gamma == 0:
            assert row.exact
            assert row.value == float((signed <= 0).double().mean())
            continue
        expected = float(torch.special.ndtr(-signed / (gamma * w.norm())).mean())
        assert abs(row.value - expected) < 4 * row.stderr
        assert row.low < row.value < row.high


@pytest.mark.parametrize("size", [1, 3, 5, 16, 48, 50])
def test_the_first_draws_are_the_same_however_many_follow(size: int) -> None:
    x = torch.randn(7, size)
    ctx = fs.Context(fs.Problem(nn.Linear(size, 2), (x, torch.arange(7) % 2)))
    for draws in (2, 6, 10):
        stream = ctx.generator("perturbation_robustness").initial_seed().to_bytes(8, "big")
        digest = hashlib.blake2b(x[3].numpy().tobytes(), key=stream, digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        whole = torch.randn(draws, size, generator=generator)
        for first in range(1, draws + 1):
            assert torch.equal(_noise_of_samples(ctx, x, draws, first)[:, 3], whole[:first])


def test_standard_error_is_that_of_repetition() -> None:
    problem, signed, w, _ = linear_binary()
    expected = float(torch.special.ndtr(-signed / (0.5 * w.norm())).mean())
    options = {"perturbation_robustness": {"gammas": 0.5, "draws": 4}}
    rows = [
        fs.measure(problem, "perturbation_robustness", seed=s, options=options).to_frame().iloc[0] for s in range(60)
    ]
    zs = torch.tensor([(row["value"] - expected) / row["stderr"] for row in rows])
    assert 0.7 < float(zs.std()) < 1.3
    assert float((zs.abs() < 2).double().mean()) > 0.85
    inside = [row["low"] <= expected <= row["high"] for row in rows]
    assert sum(inside) >= 56  # Wilson's interval is wide where samples differ in their rate


def test_noise_belongs_to_the_sample_and_is_shared_by_the_levels() -> None:
    tiny = mlp()
    both = errors_under_noise(fs.Context(tiny.problem()), gammas=(0.2, 0.5), draws=6)
    one = errors_under_noise(fs.Context(tiny.problem(batch_size=3)), gammas=(0.5,), draws=6)
    assert torch.equal(both[1:], one)
    other = errors_under_noise(fs.Context(tiny.problem(), seed=1), gammas=(0.2, 0.5), draws=6)
    assert not torch.equal(both, other)


@pytest.mark.parametrize("gammas", [-1.0, (0.1, 0.1), (), "much", (True,), (math.inf,)])
def test_wrong_noise_levels_are_refused(gammas: object) -> None:
    with pytest.raises(fs.InputError):
        fs.measure(mlp().problem(), "perturbation_robustness", options={"perturbation_robustness": {"gammas": gammas}})


def test_one_draw_has_no_standard_error() -> None:
    with pytest.raises(fs.InputError, match=r"draws: .* at least 2"):
        fs.measure(mlp().problem(), "perturbation_robustness", options={"perturbation_robustness": {"draws": 1}})


def written_out(tiny, output: int, sample: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # type: ignore[no-untyped-def]
    """W₁, x, ∂f/∂x and ∂f/∂W₁ of one output at one sample, by autograd."""
    x = tiny.x[sample : sample + 1].clone().requires_grad_()
    weight = next(p for p in tiny.model.parameters() if p.ndim == 2)
    by_input, by_weight = torch.autograd.grad(tiny.model(x)[0, output], (x, weight))
    return weight.detach(), x.detach()[0], by_input[0], by_weight


@pytest.mark.parametrize("build", [mlp, residual, smooth])
def test_input_gradient_is_the_first_layers(build) -> None:  # type: ignore[no-untyped-def]
    """∂f/∂x = W₁ᵀ (∂f/∂W₁) x / ‖x‖², and the bound that follows; the measure says the same of all outputs."""
    tiny = build()
    frame = fs.measure(tiny.problem(), "input_sensitivity").to_frame()
    for sample in range(len(tiny.x)):
        squares, bounds = 0.0, 0.0
        for output in range(3):
            W, x, by_input, by_weight = written_out(tiny, output, sample)
            assert (by_input - W.T @ by_weight @ x / x.dot(x)).abs().max() < 1e-12 * (1 + by_input.abs().max())
            bound = float(torch.linalg.matrix_norm(W, 2) * by_weight.norm() / x.norm())
            assert float(by_input.norm()) <= bound * (1 + 1e-12)
            squares, bounds = squares + float(by_input.square().sum()), bounds + bound**2
        assert frame["value"][sample] == pytest.approx(math.sqrt(squares), rel=1e-12)
        assert frame["high"][sample] == pytest.approx(math.sqrt(bounds), rel=1e-12)


class Past(nn.Module):
    """The input has a second way to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x))) + 0.5 * x


class Scaled(Past):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(3 * x)))


def test_no_bound_where_the_identity_does_not_hold() -> None:
    for tiny, words in ((lenet_like(), "not dense"), (sequences(), "many positions"), (batchnorm_conv(), "not dense")):
        frame = fs.measure(tiny.problem(), "input_sensitivity").to_frame()
        assert frame["high"].isna().all()
        assert words in frame["reason"][0]
        assert (frame["value"] > 0).any()
    tiny = mlp()
    for model, words in ((Past(), "past the first layer"), (Scaled(), "changed")):
        frame = fs.measure(fs.Problem(model.double().eval(), train=(tiny.x, tiny.y)), "input_sensitivity").to_frame()
        assert frame["high"].isna().all()
        assert words in frame["reason"][0]


def test_a_convolution_can_hide_its_input_gradient_from_its_weights() -> None:
    """Two equal patches with opposite signals: ∂f/∂W₁ = 0 and ∂f/∂x ≠ 0, so that no such bound can hold."""
    x = torch.tensor([[[1.0, 2.0, 1.0, 2.0]]], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[[0.5, -1.0]]], dtype=torch.float64, requires_grad=True)
    output = torch.conv1d(x, weight, stride=2)[0, 0]
    by_input, by_weight = torch.autograd.grad(output[0] - output[1], (x, weight))
    assert by_weight.norm() == 0
    assert by_input.norm() > 1


def test_tokens_have_no_input_gradient() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 3)).eval()
    problem = fs.Problem(model, train=(torch.arange(12).reshape(4, 3) % 5, torch.tensor([0, 1, 2, 0])))
    for name in ("input_sensitivity", "perturbation_robustness"):
        row = fs.measure(problem, name).to_frame().iloc[0]
        assert math.isnan(row["value"])
        assert "real numbers" in row["reason"]


def test_the_completed_statement_bounds_the_change_of_the_output() -> None:
    """δ' from the change of f over a ball of weights bounds the change of f over inputs of the same linear region."""
    generator = torch.Generator().manual_seed(6)
    W = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    v = torch.randn(4, generator=generator, dtype=torch.float64)
    x = torch.randn(3, generator=generator, dtype=torch.float64)
    pattern = (W @ x > 0).double()

    def f(W: Tensor, x: Tensor) -> float:
        return float(v @ (pattern * (W @ x)))  # one linear region; linear in W, so that M = 0

    gradient = torch.outer(v * pattern, x)
    r = 1e-2
    delta = r * float(gradient.norm())  # the largest change of f within r of W₁
    for _ in range(50):
        step = torch.randn(3, generator=generator, dtype=torch.float64)
        step *= 1e-3 / step.norm()
        bound = input_change_bound(float(torch.linalg.matrix_norm(W, 2)), float(x.norm()), delta, r, 0.0, 1e-3)
        assert abs(f(W, x + step) - f(W, x)) <= bound * (1 + 1e-9)
    assert input_change_bound(2.0, 4.0, 0.1, 0.5, 3.0, 0.2) == pytest.approx(0.2 * 2 * (0.2 + 0.75) / 4)
    with pytest.raises(fs.InputError):
        input_change_bound(1.0, 0.0, 0.1, 0.1, 0.0, 0.1)


def test_spread_within_cells_by_hand() -> None:
    cell = torch.tensor([0, 0, 1, 2, 0, 1])  # four training samples, two others
    losses = torch.tensor([1.0, 4.0, 2.0, 9.0, 6.0, 2.5], dtype=torch.float64)
    assert spread_by_sample(cell, losses, 4).tolist() == [5.0, 3.0, 0.5, 0.0]


def brute_force(problem: fs.Problem, partition) -> float:  # type: ignore[no-untyped-def]
    samples = []
    for part in ("train", "test"):
        for x, y in problem.batches(part):
            losses = problem.loss(problem.forward(x), y)
            for row, label, loss in zip(x.flatten(1), y.tolist(), losses.tolist(), strict=True):
                samples.append((tuple(partition.cells(row[None]).reshape(-1).tolist()), label, loss))
    pairs = [(s, z) for s in samples[: problem.n_train] for z in samples if s[:2] == z[:2]]
    return max(abs(s[2] - z[2]) for s, z in pairs)


def test_partition_robustness_by_comparing_all_pairs() -> None:
    tiny = mlp()
    problem = tiny.problem()
    vectors = tiny.xt
    for partition, cells in (
        (Grid(1.0, -3.0, 3.0), 6**4 * 3),
        (NearestCentre(vectors[:2]), 2 * 3),
        (k_means(vectors, 3), 3 * 3),
        (greedy_cover(vectors, 1e9), 1 * 3),
    ):
        found = partition_robustness(fs.Context(problem), partition)
        assert found.cells == cells
        assert found.spread == pytest.approx(brute_force(problem, partition), rel=1e-12)
        assert 0 <= found.mean_spread <= found.spread
        assert 1 <= found.occupied <= min(cells, 11)
    coarse, fine = (partition_robustness(fs.Context(problem), NearestCentre(vectors[:k])) for k in (1, 7))
    assert coarse.cells < fine.cells
    assert coarse.alone <= fine.alone
    clipped = partition_robustness(fs.Context(problem), NearestCentre(vectors[:1]), largest=0.5)
    assert clipped.spread <= 0.5


def test_partition_robustness_is_what_the_bound_uses() -> None:
    """With a single centre every input is in one cell, whichever test input the bound takes."""
    tiny = mlp()
    one_cell = partition_robustness(fs.Context(tiny.problem()), NearestCentre(tiny.xt[:1]), largest=1.0)
    table = fs.bounds(tiny.problem(), "robustness", delta=0.05, options={"robustness": {"levels": 1}})
    cells, spread = (float(part.split("=")[1]) for part in table.to_frame()["reason"][0].split(",")[:2])
    assert cells == one_cell.cells == 3
    assert spread == pytest.approx(one_cell.spread, rel=1e-3)


def test_covers_cover_and_grids_tile() -> None:
    x = torch.rand(200, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for radius in (0.1, 0.3, 0.6):
        cover = greedy_cover(x, radius)
        distances = torch.cdist(x, cover.centres)
        assert float(distances.amin(1).max()) <= radius
        between = torch.cdist(cover.centres, cover.centres) + 9 * torch.eye(len(cover.centres))
        assert float(between.min()) > radius
    grid = Grid(0.25)
    assert grid.count(3) == 64
    assert grid.cells(x).max() == 3
    assert grid.cells(torch.tensor([[1.0, -5.0, 0.25]])).tolist() == [[3, 0, 1]]
    assert Grid(2**-5).count(784) == math.inf
    for wrong in (lambda: Grid(0.0), lambda: greedy_cover(x, -1.0), lambda: k_means(x, 0)):
        with pytest.raises(fs.InputError):
            wrong()


def test_regression_has_no_cells_of_labels() -> None:
    problem = replace(mlp(), y=torch.zeros(11, 3, dtype=torch.float64), loss="mse", xt=None, yt=None).problem()
    with pytest.raises(fs.FlatscopeError, match="class labels"):
        partition_robustness(fs.Context(problem), Grid(0.5))
