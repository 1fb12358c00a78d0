"""Closed forms for the measures that move weights, and the loss at many perturbed weights."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import checks
import pytest
import torch
from networks import BUILDERS, Tiny, batchnorm_conv, mlp
from references import Dense
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flatscope as fs
from flatscope import perturbation, registry
from flatscope.context import Context
from flatscope.errors import InputError
from flatscope.limits import STANDARD
from flatscope.measures import sharpness as family
from flatscope.params import Params, norm
from flatscope.perturbation import perturbed_gradients, perturbed_losses
from flatscope_papers.theory.rewritten_networks import shrink_layer


def linear_regression(n: int = 30, d: int = 4, at_minimum: bool = True, seed: int = 0) -> Tiny:
    """A linear model under squared error: the loss is exactly quadratic in the weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64) * torch.linspace(0.5, 1.5, d, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + torch.randn(n, 1, generator=generator, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(d, 1)).double().eval()
    solution = torch.linalg.lstsq(torch.cat([x, torch.ones(n, 1, dtype=torch.float64)], 1), y).solution.flatten()
    shift = 0.0 if at_minimum else 0.3
    model[0].weight.data = (solution[:-1] + shift)[None]
    model[0].bias.data = solution[-1:] - shift
    return Tiny("linear-regression", model, x, y, ("0",), loss="mse")


def measured(name: str, tiny: Tiny, seed: int = 0, **options: Any) -> float:
    return fs.measure(tiny.problem(), name, seed=seed, options={name: options})[name]


@pytest.mark.parametrize("relative", [True, False])
def test_the_ball_around_a_minimum_of_a_quadratic_is_highest_along_the_top_eigenvector(relative: bool) -> None:
    dense = Dense(linear_regression())
    top, loss = float(torch.linalg.eigvalsh(dense.hessian)[-1]), float(dense.loss())
    radius = 0.05 * (float(dense.vector(list(dense.params)).norm()) if relative else 1.0)
    found = measured("epsilon_flatness", dense.tiny, epsilon=0.05, relative=relative)
    assert found == pytest.approx(radius**2 * top / 2 / (1 + loss), rel=1e-6)


def test_the_ball_away_from_a_minimum_agrees_with_the_secular_equation() -> None:
    """Max of g·u + uᵀHu/2 on ‖u‖ = r: u = (μI − H)⁻¹g with μ > λ_max such that the norm is r."""
    dense = Dense(linear_regression(at_minimum=False))
    names = list(dense.params)
    g = torch.autograd.functional.jacobian(lambda v: dense.loss_of(v, names), dense.vector(names))
    values, vectors = torch.linalg.eigh(dense.hessian)
    low, high, radius = float(values[-1]), 1e6, 0.2
    for _ in range(200):
        mu = (low + high) / 2
        length = float(((vectors.T @ g) / (mu - values)).norm())
        low, high = (mu, high) if length > radius else (low, mu)
    u = vectors @ ((vectors.T @ g) / (mu - values))
    rise = float(g @ u + u @ dense.hessian @ u / 2) / (1 + float(dense.loss()))
    assert measured("epsilon_flatness", dense.tiny, epsilon=radius, relative=False) == pytest.approx(rise, rel=1e-6)


def test_the_maximum_is_at_least_the_mean_curvature() -> None:
    """Yi et al. 2019, section 5 with the missing ½: F_ε(1+l) ≥ ε² tr(H)/(2d), equal for H ∝ I."""
    dense = Dense(linear_regression())
    loss, trace, d = float(dense.loss()), float(dense.hessian.trace()), len(dense.hessian)
    found = measured("epsilon_flatness", dense.tiny, epsilon=0.1, relative=False)
    assert found * (1 + loss) > 0.01 * trace / (2 * d)
    x = torch.cat([torch.eye(2), -torch.eye(2)]).double()
    round_loss = replace(dense.tiny, model=nn.Sequential(nn.Linear(2, 1, bias=False)).double(), x=x, y=x[:, :1])
    round_loss.model[0].weight.data = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    dense = Dense(round_loss)
    found = measured("epsilon_flatness", round_loss, epsilon=0.1, relative=False)
    assert found == pytest.approx(0.01 * float(dense.hessian.trace()) / 4, rel=1e-9)


@pytest.mark.parametrize("scaled", [0.2, 0.02])
def test_shrinking_a_layer_raises_the_ball_to_the_loss_of_the_layer_removed(scaled: float) -> None:
    """Yi et al. 2019, theorem 3.2: same function, yet the ball of radius ε now holds the network without the layer."""
    tiny = mlp()
    optimizer = torch.optim.Adam(tiny.model.parameters(), 0.02)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(tiny.model(tiny.x), tiny.y).backward()
        optimizer.step()
    shrunk = tiny.with_model(shrink_layer(tiny.model, tiny.x, "0", scaled))
    dense = Dense(shrunk)
    biases_kept = {**dense.params, "0.weight": torch.zeros_like(dense.params["0.weight"])}
    removed, loss = float(dense.loss(biases_kept)), float(dense.loss())
    assert removed > loss, "the construction needs a layer that helps"
    found = measured("epsilon_flatness", shrunk, epsilon=scaled, relative=False)
    assert found >= (removed - loss) / (1 + loss)
    assert found > measured("epsilon_flatness", tiny, epsilon=scaled, relative=False)


@pytest.mark.parametrize("law", family.LAWS)
def test_expected_flatness_of_a_quadratic_is_half_the_trace(law: str) -> None:
    dense = Dense(linear_regression(at_minimum=False))
    exact = 0.05**2 * float(dense.hessian.trace()) / 2
    table = fs.measure(
        dense.tiny.problem(), "expected_flatness", options={"expected_flatness": {"sigma": 0.05, "law": law}}
    )
    assert abs(table["expected_flatness"] - exact) <= 4.5 * table.stderr("expected_flatness")
    assert 0 < table.stderr("expected_flatness") < 0.2 * exact


@pytest.mark.parametrize("law", family.LAWS)
def test_the_standard_error_covers(law: str) -> None:
    dense = Dense(linear_regression(at_minimum=False))
    exact = 0.05**2 * float(dense.hessian.trace()) / 2
    entry = registry.declarations()["expected_flatness"]
    checks.standard_error_covers(entry, dense.tiny, exact, sigma=0.05, law=law)


@pytest.mark.parametrize(("law", "radius"), [("ball", math.sqrt(5 + 2)), ("sphere", math.sqrt(5))])
def test_bounded_laws_stay_in_their_ball(law: str, radius: float) -> None:
    ctx = Context(linear_regression().problem())
    lengths = [norm(u) for u in family._mirrored_draws(ctx, 0.1, 200, law)]
    assert max(lengths) <= 0.1 * radius * (1 + 1e-12)
    assert (min(lengths) < 0.08 * radius) == (law == "ball")


def test_one_point_under_a_linear_classifier_has_its_worst_corner() -> None:
    """Cross-entropy falls with the margin, which is linear: every coordinate goes to its end of the box."""
    x = torch.tensor([[0.5, -1.0, 2.0]], dtype=torch.float64)
    tiny = Tiny("one point", nn.Sequential(nn.Linear(3, 2)).double(), x, torch.tensor([1]), ("0",))
    weight = torch.tensor([[0.1, -0.4, 0.3], [0.7, 0.2, -0.5]], dtype=torch.float64)
    bias = torch.tensor([0.1, -0.2], dtype=torch.float64)
    tiny.model[0].weight.data, tiny.model[0].bias.data = weight, bias
    alpha, margin = 0.01, float((weight[1] - weight[0]) @ x[0] + bias[1] - bias[0])
    shift = alpha * float(((weight.abs() + 1) @ x[0].abs()).sum() + (bias.abs() + 1).sum())
    loss, highest = math.log1p(math.exp(-margin)), math.log1p(math.exp(-margin + shift))
    assert measured("sharpness", tiny, alpha=alpha) == pytest.approx((highest - loss) / (1 + loss), rel=1e-9)
    assert measured("sharpness", tiny, alpha=alpha, normalised=False) == pytest.approx(highest - loss, rel=1e-9)


@pytest.mark.parametrize("at_minimum", [True, False])
def test_the_box_of_a_convex_quadratic_is_highest_in_one_of_its_corners(at_minimum: bool) -> None:
    previous = 0.0
    for alpha in (0.01, 0.03, 0.1):
        dense = Dense(linear_regression(d=6, at_minimum=at_minimum))
        names = list(dense.params)
        w, loss = dense.vector(names), float(dense.loss())
        corners = itertools.product((-1.0, 1.0), repeat=len(w))
        box = alpha * (w.abs() + 1)
        highest = max(float(dense.loss_of(w + torch.tensor(c, dtype=torch.float64) * box, names)) for c in corners)
        exact = (highest - loss) / (1 + loss)
        found = measured("sharpness", dense.tiny, alpha=alpha, restarts=8, steps=400)
        assert found == pytest.approx(exact, rel=1e-9)
        assert found > previous, "a larger box holds the smaller one"
        previous = found


def many(n: int = 150) -> Tiny:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return replace(mlp(), x=x, y=torch.randint(0, 3, (n,), generator=generator))


@pytest.mark.parametrize("random_start", [True, False])
def test_no_iterate_leaves_the_box(random_start: bool) -> None:
    ctx = Context(many().problem())
    box = {name: 1e-2 * (value.abs() + 1) for name, value in ctx.trainable.items()}
    generator = torch.Generator().manual_seed(1)
    iterates = list(family.stochastic_ascent(ctx, box, 60, 16, 0.5, 0.9, generator, random_start))
    corner = family.highest_corner(ctx, box, 3).top
    assert len(iterates) == 20
    for point in [*iterates, corner]:
        assert all(bool((value.abs() <= box[name]).all()) for name, value in point.items())
    assert all(torch.equal(value.abs(), box[name]) for name, value in corner.items() if bool(value.all()))


def test_a_single_step_of_a_random_walk_downhill_still_gives_no_negative_value() -> None:
    for name, options in (
        ("epsilon_flatness", {"steps": 1, "restarts": 1}),
        ("sharpness", {"steps": 1, "restarts": 0}),
    ):
        row = fs.measure(mlp().problem(), name, options={name: options}).to_frame().iloc[0]
        assert row["value"] >= 0
        assert row["low"] == row["value"]
        assert not row["exact"]
        assert row["reason"].startswith("lower bound")


def test_a_critical_point_is_left_by_random_starts() -> None:
    """Ascent along a zero gradient goes nowhere; Neyshabur et al.'s run from the minimum itself would report 0."""
    dense = Dense(linear_regression())
    box = {name: 0.01 * (value.abs() + 1) for name, value in dense.params.items()}
    ctx = Context(dense.tiny.problem())
    flat = perturbed_losses(ctx, family.stochastic_ascent(ctx, box, 20, 64, 0.01, 0.9, ctx.generator("x")))
    assert float(flat.max()) - float(dense.loss()) < 1e-12
    assert measured("sharpness", dense.tiny, alpha=0.01, steps=20) > 1e-4


def test_mini_batches_come_alike_from_tensors_and_loaders_and_from_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = many()
    problems = [tiny.problem(), tiny.problem(train=DataLoader(TensorDataset(tiny.x, tiny.y), batch_size=37))]
    options = {"sharpness": {"steps": 100, "batch": 32}}
    one, other = (fs.measure(problem, "sharpness", options=options)["sharpness"] for problem in problems)
    assert one == pytest.approx(other, rel=1e-9)
    assert fs.measure(problems[0], "sharpness", seed=5, options=options)["sharpness"] == pytest.approx(one, rel=0.02)
    monkeypatch.setitem(vars(STANDARD), "kept_data", 0)
    assert fs.measure(problems[1], "sharpness", options=options)["sharpness"] == pytest.approx(one, rel=0.02)


def test_every_epoch_of_mini_batches_holds_every_sample_at_most_once() -> None:
    ctx = Context(many(50).problem())
    drawn = perturbation.minibatches(ctx, 10, torch.Generator().manual_seed(0))
    epochs = [torch.cat([next(drawn)[0] for _ in range(5)]) for _ in range(2)]
    assert not torch.equal(*epochs)
    for epoch in epochs:
        assert torch.equal(epoch[:, 0].sort().values, ctx.problem.example(50)[:, 0].sort().values)


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("together", [True, False])
def test_losses_and_gradients_at_perturbed_weights(
    build: Callable[[], Tiny], together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = Dense(build())
    monkeypatch.setitem(vars(STANDARD), "stacked_samples", 64 if together else 0)
    ctx = Context(dense.tiny.problem(batch_size=5))
    generator = torch.Generator().manual_seed(2)
    stacked = {
        name: 0.1 * torch.randn(18, *value.shape, generator=generator, dtype=torch.float64)
        for name, value in dense.params.items()
    }
    losses, gradients = perturbed_gradients(ctx, stacked)
    rows = [{name: value[i] for name, value in stacked.items()} for i in range(18)]
    assert torch.allclose(perturbed_losses(ctx, rows), losses, rtol=1e-12)
    for i, row in enumerate(rows):
        leaves = {name: (dense.params[name] + value).requires_grad_() for name, value in row.items()}
        loss = dense.loss(leaves)
        assert float(losses[i]) == pytest.approx(loss.item(), rel=1e-12)
        expected = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        for name, gradient in zip(leaves, expected, strict=True):
            assert torch.allclose(gradients[name][i], gradient, atol=1e-12)
    assert ctx.passes["forward"] == pytest.approx(36)
    assert ctx.passes["backward"] == pytest.approx(18)


class Branching(nn.Module):
    """Looks at values: it cannot run on stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if float(self.first.weight.detach().sum()) > 1e3 else self.second(x)


def test_a_network_that_cannot_be_stacked_is_run_one_by_one() -> None:
    tiny = replace(mlp(), model=Branching().double().eval(), layers=("second",), initial={})
    ctx = Context(tiny.problem())
    assert not perturbation.can_stack_weights(ctx)
    dense, draw = Dense(tiny), {name: torch.ones_like(value) for name, value in ctx.trainable.items()}
    expected = float(dense.loss({name: value + 1 for name, value in dense.params.items()}).detach())
    assert perturbed_losses(ctx, [draw, draw]).tolist() == pytest.approx([expected] * 2, rel=1e-12)
    assert measured("expected_flatness", tiny, draws=8) > 0


def test_draws_are_read_a_block_at_a_time() -> None:
    ctx, alive = Context(mlp().problem()), []

    def draws() -> Iterator[Params]:
        for i in range(40):
            alive.append(i)
            if i == STANDARD.stacked_networks:
                assert ctx.passes["forward"] == pytest.approx(i), "drawn before the first block was evaluated"
            yield {name: torch.zeros_like(value) for name, value in ctx.trainable.items()}

    losses = perturbed_losses(ctx, draws())
    assert losses.tolist() == pytest.approx([ctx.scores().loss] * 40, rel=1e-12)
    assert len(alive) == 40
    assert perturbed_losses(ctx, []).shape == (0,)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("epsilon_flatness", {"epsilon": 0.0}),
        ("epsilon_flatness", {"restarts": 0}),
        ("expected_flatness", {"draws": 7}),
        ("expected_flatness", {"law": "cauchy"}),
        ("expected_flatness", {"sigma": -1.0}),
        ("sharpness", {"alpha": -1e-3}),
        ("sharpness", {"momentum": 1.0}),
        ("sharpness", {"batch": 0}),
    ],
)
def test_options_without_a_meaning_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        measured(name, mlp(), **options)


def test_a_loss_below_minus_one_has_no_relative_rise() -> None:
    tiny = replace(mlp(), loss=lambda outputs, targets: outputs.sum(1) * 0 - 2)
    row = fs.measure(tiny.problem(), "epsilon_flatness").to_frame().iloc[0]
    assert math.isnan(row["value"])
    assert "above -1" in row["reason"]


def test_batchnorm_is_folded_before_weights_are_moved() -> None:
    tiny = replace(batchnorm_conv(), initial={})
    folded = tiny.with_model(fs.fold_batchnorm(tiny.model, tiny.x))
    assert measured("sharpness", tiny, steps=20) == pytest.approx(measured("sharpness", folded, steps=20), rel=1e-9)
    assert bool(fs.measure(tiny.problem(), "epsilon_flatness").to_frame().iloc[0]["folded"])


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("epsilon_flatness", lambda right, ctx: right(ctx, epsilon=0.0105)),  # leaves the ball
        ("epsilon_flatness", lambda right, ctx: right(ctx, relative=False)),
        ("epsilon_flatness", lambda right, ctx: replace(right(ctx), value=0.95 * right(ctx).value)),  # stops early
        ("sharpness", lambda right, ctx: right(ctx, alpha=5.5e-4)),
        ("sharpness", lambda right, ctx: right(ctx, normalised=False)),
        ("expected_flatness", lambda right, ctx: right(ctx, sigma=0.02, draws=1000)),
    ],
)
def test_the_contract_rejects_a_wrong_search(
    name: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = registry.declarations()[name]
    checks.equals_its_twin(entry, Dense(mlp()))

    def called(ctx: Context, **options: Any) -> Any:
        return wrong(partial(entry.function, **options), ctx)

    called.__signature__ = inspect.signature(entry.function)  # type: ignore[attr-defined]
    monkeypatch.setitem(registry._REGISTRY, name, replace(entry, function=called))
    with pytest.raises(AssertionError):
        checks.equals_its_twin(registry.declarations()[name], Dense(mlp()))
