"""Bounds against hand numbers, the inequalities that they come from, and each other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from forms_of_measures import value_of
from networks import batchnorm_conv, binary, lenet_like, mlp, regression
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

import flatscope as fs
from flatscope.errors import InputError, NotApplicable, UnknownNameError
from flatscope.generalization_bounds.classical import (
    TriedPartition,
    best_gap,
    log_covering_number,
    log_weight,
    multitask_gap,
    robust_gap,
    sample_complexity,
    spread_by_sample,
)
from flatscope.generalization_bounds.norm_based import L1Class, l1_class, local_margin_bound, margin_bound
from flatscope.generalization_bounds.pac_bayes import complexity_term, gaussian_kl
from flatscope.training.checkpoint import TrainConfig, epoch_order
from flatscope.training.loop import train
from flatscope_papers.theory.sample_sizes import (
    approximation_and_estimation_error,
    dudley_entropy_bound,
    dyadic_grid,
    explored_radius,
    least_total_error,
    number_of_units_with_least_error,
    size_ratio,
    smooth_entropy,
)
from flatscope_papers.theory.sharpness_lemmas import unit_prior_kl

pytestmark = pytest.mark.fast

SEEDED = torch.Generator().manual_seed(0)


def row(problem: fs.Problem, name: str, delta: float = 0.05, **options: Any) -> Any:
    return fs.bounds(problem, name, delta=delta, options={name: options}).to_frame().iloc[0]


def separable(n: int = 400, seed: int = 0) -> fs.Problem:
    """Two far clusters and a linear model without bias that tells them apart with room to spare."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (n,), generator=generator)
    x = (2.0 * y[:, None] - 1) * 2 + 0.3 * torch.randn(n, 2, generator=generator, dtype=torch.float64)
    model = nn.Linear(2, 2, bias=False).double()
    model.weight.data = torch.tensor([[-0.5, -0.5], [0.5, 0.5]], dtype=torch.float64)
    return fs.Problem(model, train=(x, y), test=(x[:64] + 0.01, y[:64]), initial=nn.Linear(2, 2, bias=False).double())


# PAC-Bayes


@pytest.mark.parametrize("n", [2, 100, 50_000])
@pytest.mark.parametrize("kl", [0.0, 1.0, 5.0, 1e4])
@pytest.mark.parametrize("delta", [0.001, 0.05, 0.5])
def test_printed_forms_against_the_theorems_they_come_from(n: int, kl: float, delta: float) -> None:
    assert complexity_term(kl, n, delta, "eq5") >= complexity_term(kl, n, delta, "mcallester")
    printed, proved = math.sqrt((kl + math.log(1 / delta)) / n), complexity_term(kl, n, delta, "maurer")
    if kl + math.log(1 / delta) >= math.log(2 * math.sqrt(n)):
        assert complexity_term(kl, n, delta, "eq6") == pytest.approx(printed, rel=1e-14)
        assert printed >= proved
    else:
        assert printed < proved
        with pytest.raises(NotApplicable, match="known to hold only"):
            complexity_term(kl, n, delta, "eq6")


def test_divergences_of_gaussians() -> None:
    w, sigma = torch.randn(50, generator=SEEDED).double(), torch.rand(50, generator=SEEDED).double() + 0.1
    expected = kl_divergence(Normal(w, sigma), Normal(torch.zeros_like(w), 0.7)).sum()
    assert gaussian_kl({"w": w}, {"w": sigma}, 0.7) == pytest.approx(float(expected), rel=1e-12)
    assert gaussian_kl({"w": w}, {"w": sigma}, {"w": sigma}) == pytest.approx(float((w / sigma).square().sum() / 2))
    expected = kl_divergence(Normal(w, 0.3), Normal(torch.zeros_like(w), 1.0)).sum()
    assert unit_prior_kl({"w": w}, 0.3) == pytest.approx(float(expected), rel=1e-12)


def test_divergence_by_simulation() -> None:
    w, sigma, prior = torch.tensor([1.0, -0.5]).double(), torch.tensor([0.5, 0.2]).double(), 0.8
    draws = w + sigma * torch.randn(200_000, 2, generator=SEEDED).double()
    ratio = (Normal(w, sigma).log_prob(draws) - Normal(torch.zeros(2).double(), prior).log_prob(draws)).sum(1)
    error = float(ratio.std()) / math.sqrt(len(ratio))
    assert abs(float(ratio.mean()) - gaussian_kl({"w": w}, {"w": sigma}, prior)) <= 4 * error


def test_bound_on_an_easy_problem_is_not_vacuous_and_holds() -> None:
    found = row(separable(), "pac_bayes")
    assert not found["vacuous"]
    assert found["high"] > found["value"] > 0
    assert found["confidence"] == 0.95
    assert "0/1 error" in found["assumptions"]


def test_the_bound_by_noise_ends_when_it_is_precise_or_late_and_pays_for_fewer_draws() -> None:
    problem, options = separable(), {"pac_bayes": {"draws": 128}}
    every, precise, late = (
        fs.bounds(problem, "pac_bayes", options=options, **effort).to_frame().iloc[0]
        for effort in ({"precision": 0}, {"precision": 0.5}, {"budget": 1e-3})
    )
    assert "128 draws" in every["reason"]
    assert "16 of 128 draws" in precise["reason"]
    assert abs(precise["value"] - every["value"]) < 4 * precise["stderr"] + 1e-9
    assert precise["high"] - precise["value"] == pytest.approx(math.sqrt(128 / 16) * (every["high"] - every["value"]))
    assert math.isnan(late["value"]) or late["high"] - late["value"] > precise["high"] - precise["value"]


def test_bound_falls_with_samples_and_rises_with_confidence() -> None:
    values = [row(separable(n), "pac_bayes")["value"] for n in (100, 400, 1600)]
    assert values == sorted(values, reverse=True)
    strict, loose = (row(separable(), "pac_bayes", delta=d)["value"] for d in (0.001, 0.5))
    assert strict > loose


@pytest.mark.parametrize(
    "options",
    [
        {"form": "maurer"},
        {"noise": "equal"},
        {"noise": "equal", "prior": "matched", "alpha": (0.03, 0.1, 0.3)},
        {"prior_mean": "initial"},
        {"alpha": 0.03},
    ],
)
def test_variants_of_the_bound_hold_on_the_easy_problem(options: dict[str, Any]) -> None:
    found = row(separable(), "pac_bayes", **options)
    assert 0 < found["value"] < 1.5, found["reason"]
    if options == {"form": "maurer"}:
        assert found["value"] <= row(separable(), "pac_bayes")["value"]


def test_prior_that_looks_at_the_weights_is_refused() -> None:
    found = row(separable(), "pac_bayes", prior="matched")
    assert math.isnan(found["value"])
    assert "would depend on the trained weights" in found["reason"]
    found = row(separable(4), "pac_bayes", noise="equal", prior="matched", form="eq6", alpha=1e3)
    assert not math.isnan(found["value"])  # delta alone is enough with four samples


def test_batchnorm_is_folded_and_has_no_initial_weights_then() -> None:
    assert row(batchnorm_conv().problem(), "pac_bayes")["value"] > 0
    assert "no BatchNorm" in row(batchnorm_conv().problem(), "pac_bayes", prior_mean="initial")["reason"]


# Counting


def test_counting_parameters_gives_the_memo_s_numbers() -> None:
    assert sample_complexity(0.1, 0.05, 8, 9370) == pytest.approx(10_392_401, abs=1)
    assert sample_complexity(0.1, 0.05, 32, 9370) == pytest.approx(41_567_388, abs=1)


def test_a_packing_is_smaller_than_the_covering_bound() -> None:
    points = torch.rand(4000, 2, generator=SEEDED) * 2 - 1
    points, kept = points[points.norm(dim=1) <= 1], torch.zeros(0, 2)
    for point in points:
        if not len(kept) or float((kept - point).norm(dim=1).min()) > 0.3:
            kept = torch.cat([kept, point[None]])
    assert 20 < len(kept) <= math.exp(log_covering_number(1.0, 0.3, 2)) == pytest.approx(100)


def test_covering_takes_the_distance_from_the_start_or_a_radius() -> None:
    problem = mlp().problem()
    distance = fs.measure(problem, "distance_from_initialization")["distance_from_initialization"]
    p = fs.measure(problem, "parameter_count")["parameter_count"]
    assert row(problem, "covering")["value"] == pytest.approx(math.sqrt(p * math.log(3 * distance / 0.01) / 11))
    assert row(problem, "covering", radius=2.0)["value"] == pytest.approx(math.sqrt(p * math.log(600) / 11))
    assert "0 < epsilon < radius" in row(problem, "covering", epsilon=50.0)["reason"]
    assert "before training" in row(mlp().problem(initial=None), "covering")["reason"]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_sum_of_all_steps_is_the_displacement(momentum: float) -> None:
    """Zhang et al. (2017), eq 15: ‖Σ γ_t ∇V‖ by hand, in the history and in the bound; with momentum, of updates."""
    tiny = mlp()
    start = {name: value.clone() for name, value in tiny.model.state_dict().items()}
    config = TrainConfig(lr=0.05, momentum=momentum, batch_size=4, epochs=3, lr_decay=0.7, seed=2)
    steps = {name: torch.zeros_like(p) for name, p in tiny.model.named_parameters()}
    velocity, w = dict(steps), {name: p.detach().clone() for name, p in tiny.model.named_parameters()}
    for epoch in range(3):
        order = epoch_order(len(tiny.x), 2, epoch)
        for first in range(0, len(order), 4):
            batch = order[first : first + 4]
            leaves = {name: value.clone().requires_grad_() for name, value in w.items()}
            outputs = torch.func.functional_call(tiny.model, leaves, (tiny.x[batch],))
            gradients = torch.autograd.grad(nn.functional.cross_entropy(outputs, tiny.y[batch]), list(leaves.values()))
            for (name, value), gradient in zip(w.items(), gradients, strict=True):
                velocity[name] = momentum * velocity[name] + gradient
                update = 0.05 * 0.7**epoch * velocity[name]
                steps[name], w[name] = steps[name] + update, value - update
    accumulated = math.sqrt(sum(float(value.square().sum()) for value in steps.values()))
    history = train(tiny.model, (tiny.x, tiny.y), config, show_progress=False).history
    assert history["distance"].iloc[-1] == pytest.approx(accumulated, rel=1e-10)
    problem = fs.Problem(tiny.model, train=(tiny.x, tiny.y), initial=start)
    expected = row(problem, "covering", radius=accumulated, epsilon=1e-4)["value"]
    assert row(problem, "covering", epsilon=1e-4)["value"] == pytest.approx(expected, rel=1e-10)


def test_gradient_descent_stays_in_the_explored_ball() -> None:
    """‖f_T − f_0‖ ≤ Σ γ ‖∇‖ ≤ R√T for γ = R/(L√T) on |w|, which is 1-Lipschitz."""
    w, start, steps = 3.0, 3.0, 50
    for _ in range(steps):
        w -= start / math.sqrt(steps) * math.copysign(1.0, w)
    assert abs(w - start) <= explored_radius(start, steps)


def test_sharing_layers_gains_up_to_the_root_of_the_tasks() -> None:
    alone, together = (multitask_gap(100, tasks, 5, 50, 0.05) for tasks in (1, 1000))
    assert alone / together == pytest.approx(3.4, abs=0.05)
    alone, together = (multitask_gap(100, tasks, 0, 50, 0.05) for tasks in (1, 100))
    assert alone / together == pytest.approx(10)
    assert row(mlp().problem(), "multitask", tasks=1)["value"] > row(mlp().problem(), "multitask")["value"]


# Robustness


def test_multinomial_tail_behind_robustness() -> None:
    """Bretagnolle, Huber and Carol: the ℓ1 distance of frequencies exceeds the root with probability δ at most."""
    n, cells, delta = 200, 8, 0.1
    p = torch.rand(cells, generator=SEEDED)
    counts = torch.stack(
        [torch.bincount(torch.multinomial(p, n, True, generator=SEEDED), minlength=cells) for _ in range(2000)]
    )
    distance = (counts / n - p / p.sum()).abs().sum(1)
    assert float((distance > robust_gap(0.0, cells, 1.0, n, delta)).double().mean()) <= delta


def test_robust_gap_by_hand_and_weights_of_partitions() -> None:
    assert robust_gap(0.1, 4, 2.0, 100, 0.05) == pytest.approx(
        0.1 + 2 * math.sqrt((8 * math.log(2) + 2 * math.log(20)) / 100)
    )
    assert sum(math.exp(-log_weight(k)) for k in range(1, 20_000)) == pytest.approx(1, abs=1e-4)
    partitions = [TriedPartition(1, 2, 0.9), TriedPartition(2, 8, 0.1), TriedPartition(3, 10_000, 0.0)]
    value, best = best_gap(partitions, 1.0, 100, 0.05)
    assert best.index == 2
    assert value == pytest.approx(0.1 + math.sqrt((16 * math.log(2) + 2 * (math.log(20) + log_weight(2))) / 100))
    assert dyadic_grid(3, 2, 10) == pytest.approx(640)
    assert dyadic_grid(10, 784) == math.inf


def test_spread_of_losses_in_cells_by_brute_force() -> None:
    cell = torch.randint(0, 4, (30,), generator=SEEDED)
    losses = torch.rand(30, generator=SEEDED).double()
    pairs = [abs(float(losses[i] - losses[j])) for i in range(20) for j in range(30) if cell[i] == cell[j]]
    assert float(spread_by_sample(cell, losses, 20).max()) == pytest.approx(max(pairs))


def test_robustness_prefers_fine_cells_only_where_samples_allow() -> None:
    assert "partition 1" in row(mlp().problem(), "robustness")["reason"]
    assert row(separable(1600), "robustness")["value"] < 1
    assert "needs test data" in row(fs.Problem(mlp().model, train=(mlp().x, mlp().y)), "robustness")["reason"]


# Rademacher complexity


def test_complexity_of_a_linear_class_by_simulation() -> None:
    """The supremum over ‖w‖_1 ≤ B is B max_j |Σ σ_i x_ij| / n."""
    n = 50
    for d in (1, 10):
        x = torch.rand(n, d, generator=SEEDED).double() * 2 - 1
        signs = torch.randint(0, 2, (4000, n), generator=SEEDED).double() * 2 - 1
        simulated = 3 * float((signs @ x / n).abs().amax(1).mean())
        assert 0 < simulated <= L1Class((3.0,), d).rademacher(n)
    signs = torch.randint(0, 2, (40_000, n), generator=SEEDED).double() * 2 - 1
    single = signs.mean(1).abs()  # one input that is always one: the printed log d would bound this by zero
    assert float(single.mean()) == pytest.approx(0.112, abs=0.003)
    assert L1Class((1.0,), 1).rademacher(n) == pytest.approx(math.sqrt(2 * math.log(2) / n))


def test_twice_the_complexity_is_equation_57() -> None:
    own = L1Class((2.0, 3.0), 10)
    assert 2 * own.rademacher(100) == pytest.approx(math.sqrt(2 * math.log(20)) * 24 / 10)
    found = row(binary().problem(), "rademacher_l1")
    ctx = fs.Context(binary().problem())
    assert found["value"] == pytest.approx(2 * l1_class(ctx).rademacher(11) + math.sqrt(math.log(20) / 22))


def test_no_output_exceeds_the_supremum_of_the_class() -> None:
    tiny = binary()
    outputs: Tensor = tiny.model(tiny.x).detach()
    assert float((outputs[:, 1] - outputs[:, 0]).abs().max()) <= l1_class(fs.Context(tiny.problem())).supremum


def test_margin_bound_needs_the_binary_logarithm() -> None:
    expected = 0.1 + 4 / 0.5 * 0.02 + math.sqrt(math.log(math.log2(8)) / 100) + math.sqrt(math.log(20) / 200)
    assert margin_bound(0.1, 0.02, 0.5, 1.0, 100, 0.05) == pytest.approx(expected)
    assert math.isfinite(margin_bound(0.0, 0.02, 2.0, 1.0, 100, 0.05))  # the natural one fails above 4C/e
    with pytest.raises(InputError):
        margin_bound(0.0, 0.02, 2.1, 1.0, 100, 0.05)


def test_best_margin_is_not_beaten_by_another() -> None:
    problem = separable()
    ctx, found = fs.Context(problem), row(problem, "margin_l1")["value"]
    margins, own = ctx.scores().margins, l1_class(ctx)
    for gamma in torch.linspace(0.01, 2 * own.supremum, 200).tolist():
        fraction = float((margins < gamma).double().mean())
        assert found <= margin_bound(fraction, own.rademacher(400), gamma, own.supremum, 400, 0.025) + 1e-12


def test_local_margin_bound_is_linear_in_its_unknown_constant() -> None:
    expected = 1.01 * 0.1 + 3 * (2 * math.log(100) ** 3 / 0.25 * 4e-4 + 2 * math.log(math.log(8) / 0.05) / 100)
    assert local_margin_bound(0.1, 0.02, 0.5, 1.0, 100, 0.05, 3.0) == pytest.approx(expected)
    one, two, three = (row(separable(), "margin_rademacher", constant=float(k))["value"] for k in (1, 2, 3))
    assert three - two == pytest.approx(two - one)
    assert "positive margin" in row(binary().problem(), "margin_rademacher")["reason"]


def test_more_than_two_classes_cost_twice_their_number() -> None:
    """Kuznetsov, Mohri and Syed (2015): 4K/γ times the complexity of an output at one γ, twice that at all of them."""
    tiny = mlp()
    own, problem = l1_class(fs.Context(tiny.problem())), tiny.problem()
    outputs = tiny.model(tiny.x).detach()
    assert own.classes == problem.n_outputs == 3
    assert float(outputs.abs().max()) <= own.supremum
    expected = 4 * 3 * own.rademacher(11) + math.sqrt(math.log(20) / 22)
    assert row(problem, "rademacher_l1")["value"] == pytest.approx(expected)
    gamma = 2 * own.supremum  # as large as can be: every margin is below, and the complexity counts least
    expected = 1 + 8 * 3 / gamma * own.rademacher(11) + math.sqrt(math.log(40) / 22)
    assert row(problem, "margin_l1")["value"] <= expected + 1e-12
    labelled = tiny.problem(train=(tiny.x, outputs.argmax(1)))
    assert row(labelled, "margin_rademacher")["value"] > 0
    assert (
        "two outputs" in row(regression().problem(), "margin_l1")["reason"]
        or "class" in (row(regression().problem(), "margin_l1")["reason"])
    )


def test_complexity_of_margins_by_simulation() -> None:
    """Three linear outputs with ‖w_k‖_1 ≤ 1: no weights found by ascent reach above the bound, and some come near."""
    n, d, classes = 40, 3, 3
    x = torch.rand(n, d, generator=SEEDED).double() * 2 - 1
    y = torch.randint(0, classes, (n,), generator=SEEDED)
    corners = torch.cat([torch.eye(d), -torch.eye(d)]).double()  # the corners of the ℓ1 ball
    outputs = corners @ x.T  # (2d, n)
    choices = torch.cartesian_prod(*[torch.arange(2 * d)] * classes)  # a corner for each class
    scores = outputs[choices]  # (choices, classes, n)
    own = scores.gather(1, y.expand(len(scores), 1, n))[:, 0]
    others = scores.masked_fill(torch.nn.functional.one_hot(y, classes).T.bool(), -math.inf).amax(1)
    signs = torch.randint(0, 2, (500, n), generator=SEEDED).double() * 2 - 1
    simulated = float((signs @ (own - others).T / n).amax(1).mean())
    bound = L1Class((1.0,), d, 1.0, classes)
    assert L1Class((1.0,), d).rademacher(n) / 2 < simulated <= bound.margin_complexity(n) == 6 * bound.rademacher(n)


def test_entropy_integral_scales_as_it_should() -> None:
    def entropy(radius: float) -> float:
        return 20 * math.log(3 / radius)

    few, many = (dudley_entropy_bound(entropy, 1.0, n) for n in (10**6, 10**8))
    assert few / many == pytest.approx(10, rel=0.05)
    assert smooth_entropy(0.1, 8, 2.0) == pytest.approx(1e4)
    assert smooth_entropy(0.1, 8, 2.0, locality=2) == pytest.approx(80)


# Norms


def test_norm_capacities_are_those_of_the_measures_over_samples() -> None:
    problem = separable()
    frame = fs.bounds(problem, "norm_capacity").to_frame()
    x, largest = problem.train, 0.0
    for inputs, _ in x.batches():
        largest = max(largest, float(inputs.norm(dim=1).max()))
    capacity = value_of(problem, "l2_norm_capacity")
    assert frame["value"].iloc[0] == pytest.approx(largest * math.sqrt(capacity / 400))
    assert list(frame["options"]) == [
        f'{{"norm": "{n}"}}' for n in ("l2_norm", "l1_path_norm", "l2_path_norm", "spectral_norm")
    ]
    assert frame["assumptions"].str.contains("NOT CERTIFIED").all()


def test_norm_capacity_does_not_change_with_the_units_of_the_inputs() -> None:
    problem = separable()
    [(x, y)] = list(problem.train.batches())
    model = nn.Linear(2, 2, bias=False).double()
    model.weight.data = problem.params["weight"] / 10
    other = fs.Problem(model, train=(10 * x, y))
    one, two = (fs.bounds(p, "norm_capacity").to_frame()["value"].to_numpy() for p in (problem, other))
    assert one == pytest.approx(two)


def test_norm_capacity_without_a_margin_says_why() -> None:
    frame = fs.bounds(mlp().problem(), "norm_capacity").to_frame()
    assert frame["value"].isna().all()
    assert frame["vacuous"].all()
    assert frame["reason"].str.contains("positive margin").all()


# Deep against shallow


@pytest.mark.parametrize("kind", ["shallow", "deep"])
@pytest.mark.parametrize("rate", ["memo", "sqrt"])
def test_numeric_optimum_scales_with_the_predicted_exponents(kind: str, rate: str) -> None:
    n, m, slopes = 8, 3.0, []
    for samples in (1e10, 1e14):
        found = minimize_scalar(
            lambda t, s=samples: approximation_and_estimation_error(math.exp(t), n, m, s, kind, rate),
            bounds=(-5, 60),
            method="bounded",
            options={"xatol": 1e-10},
        )
        slopes.append(
            (
                found.x,
                math.log(found.fun),
                number_of_units_with_least_error(n, m, samples, kind, rate),
                least_total_error(n, m, samples, kind, rate),
            )
        )
    (r1, e1, u1, l1), (r2, e2, u2, l2) = slopes
    assert r2 - r1 == pytest.approx(math.log(u2 / u1), rel=1e-3)
    assert e2 - e1 == pytest.approx(math.log(l2 / l1), rel=1e-3)
    assert 0.3 < math.exp(e1) / l1 < 3  # the order includes the factor n, which (30) leaves out


def test_missing_factor_of_equation_30() -> None:
    """At m = 2 the two terms are equal: the sum is 2n times what is printed."""
    n, m, samples = 8, 2.0, 1e12
    printed = (1 / math.sqrt(samples)) ** (m / (m + 2))
    assert approximation_and_estimation_error(
        number_of_units_with_least_error(n, m, samples, "deep"), n, m, samples, "deep"
    ) == pytest.approx(2 * n * printed)


def test_ratio_of_sizes() -> None:
    assert size_ratio(0.1, 8, 1.0) == pytest.approx(1e-8)
    assert size_ratio(0.1, 8, 1.0, "sizes") == pytest.approx(7e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: complexity_term(-1.0, 10, 0.05),
        lambda: complexity_term(1.0, 1, 0.05),
        lambda: complexity_term(1.0, 10, 0.0),
        lambda: complexity_term(1.0, 10, 0.05, "eq7"),
        lambda: unit_prior_kl({"w": torch.ones(2)}, 0.0),
        lambda: log_covering_number(1.0, 1.0, 3),
        lambda: log_covering_number(1.0, 0.5, 0),
        lambda: explored_radius(1.0, 0),
        lambda: multitask_gap(10, 0, 1, 1, 0.05),
        lambda: robust_gap(-0.1, 2, 1, 10, 0.05),
        lambda: log_weight(0),
        lambda: dyadic_grid(0, 2),
        lambda: best_gap([], 1.0, 10, 0.05),
        lambda: L1Class((1.0,), 0).rademacher(10),
        lambda: local_margin_bound(0.0, 0.1, 2.0, 1.0, 10, 0.05, 1.0),
        lambda: dudley_entropy_bound(lambda r: 1.0, 0.0, 10),
        lambda: smooth_entropy(0.0, 1, 1.0),
        lambda: size_ratio(1.5, 8, 1.0),
        lambda: size_ratio(0.5, 8, 1.0, "other"),
        lambda: approximation_and_estimation_error(0.0, 8, 1.0, 100, "deep"),
        lambda: number_of_units_with_least_error(8, 1.0, 100, "wide"),
        lambda: least_total_error(8, 0.0, 100, "deep"),
        lambda: fs.bounds(separable(), "pac_bayes", options={"pac_bayes": {"draws": 1}}),
        lambda: fs.bounds(separable(), "pac_bayes", options={"pac_bayes": {"form": "eq9"}}),
        lambda: fs.bounds(separable(), "robustness", options={"robustness": {"levels": 0}}),
        lambda: fs.bounds(separable(), "norm_capacity", options={"norm_capacity": {"norms": ("l7",)}}),
    ],
)
def test_domains_are_refused_and_never_give_nan(wrong) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises((InputError, UnknownNameError)):
        wrong()


@pytest.mark.parametrize("build", [mlp, binary, lenet_like, batchnorm_conv, regression])
def test_every_bound_has_a_value_or_a_reason(build) -> None:  # type: ignore[no-untyped-def]
    quick = {"pac_bayes_optimised": {"steps": 20, "draws": 20}}
    frame = fs.bounds(build().problem(), "all", options=quick).to_frame()
    assert (frame["value"].notna() | (frame["reason"] != "")).all()
    assert not frame["reason"].str.startswith("failed").any()
    assert (frame["assumptions"] != "").all()
