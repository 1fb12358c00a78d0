"""Bounds in path space: hand-computed values, and never below what happens."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from networks import Tiny, lenet_like, mlp, regression
from references import Dense
from references_psi import InPathSpace
from scipy.stats import norm, t
from torch import nn

import flatscope as fs
from flatscope.context import Effort
from flatscope.errors import InputError
from flatscope.generalization_bounds.psi import (
    BALANCED,
    PathSpread,
    all_paths_of_chain,
    corrected_theorem_5_1_bound,
    pac_bayes_gap,
    pac_bayes_psi,
    psi_of_path_values,
    theorem_5_1_bound,
)
from flatscope_papers.theory.path_matrix import all_paths, non_basis_change, path_values


def spread_of(*values: float) -> PathSpread:
    sizes = [abs(value) for value in values]
    return PathSpread(math.log(max(sizes)), math.log(min(sizes)) if min(sizes) else -math.inf)


def network(widths: tuple[int, ...], bias: bool, seed: int) -> Tiny:
    """An MLP whose path values are of one order, so that the bounds have something to say."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b, bias=bias), nn.ReLU()]
    model = nn.Sequential(*layers[:-1]).double()
    for value in model.parameters():
        size = torch.rand(value.shape, generator=generator, dtype=torch.float64) * 0.4 + 0.8
        value.data = size * (torch.randint(0, 2, value.shape, generator=generator) * 2 - 1)
    x = torch.randn(6, widths[0], generator=generator, dtype=torch.float64)
    return Tiny("net", model, x, torch.randint(0, widths[-1], (6,), generator=generator), ())


def row(tiny: Tiny, name: str, **options: object) -> tuple[float, str]:
    frame = fs.bounds(tiny.problem(), name, options={name: options}).to_frame()
    [value], [reason] = frame["value"], frame["reason"]
    return float(value), str(reason)


def test_psi_by_hand() -> None:
    values = spread_of(0.5, -2.0, 1.0)
    assert psi_of_path_values(values, 0.1, 2) == pytest.approx(max(2.0**4, 0.1 * 2.0**3) / 0.5**4, rel=1e-12)
    assert psi_of_path_values(values, 0.1, 1) == pytest.approx(2.0**2 / 0.5**2, rel=1e-12)
    assert psi_of_path_values(values, 50.0, 2) == pytest.approx(50 * 2.0**3 / 0.5**4, rel=1e-12)
    ratios = [psi_of_path_values(spread_of(1.0, 1.0 / ratio), 0.01, 3) for ratio in (1, 2, 5, 20)]
    assert ratios == sorted(ratios)
    assert psi_of_path_values(spread_of(1.0, 0.0), 0.1, 2) == math.inf


def test_theorem_as_printed_by_hand() -> None:
    values = spread_of(0.5, -2.0, 1.0)
    psi = 2.0**4 / 0.5**4
    by_hand = 2 * 3.0 * math.sqrt(2) * 4 * 5**1 * 2 * (1 + 2 ** (10 / 2) * 1 * 5 * 2 * psi) * 0.1
    assert theorem_5_1_bound(values, 0.1, 2, (4, 5, 2), 3.0, math.sqrt(2)) == pytest.approx(by_hand, rel=1e-12)
    deeper = 2 * 3.0 * 1.0 * 4 * 5**2 * 2 * (1 + 2 ** (13 / 2) * 2 * 5 * 2 * (2.0**6 / 0.5**6)) * 0.1
    assert theorem_5_1_bound(values, 0.1, 3, (4, 5, 2), 3.0, 1.0) == pytest.approx(deeper, rel=1e-12)


def test_theorem_on_a_network_by_hand() -> None:
    tiny = network((3, 4, 2), bias=False, seed=0)
    paths = fs.BasisPaths(tiny.model, tiny.x)
    sizes = paths.values().abs()
    first, second = tiny.model[0].weight.detach(), tiny.model[2].weight.detach()
    scale = second.abs().amax(0)
    hidden = (torch.relu(tiny.x @ first.T) * scale).norm(dim=1).max()
    norm = max(float(tiny.x.norm(dim=1).max()), float(hidden))
    epsilon = 0.05 * float(sizes.min())
    for convention, depth in (("weight_layers", 2), ("hidden_layers", 1)):
        expected = theorem_5_1_bound(spread_of(*sizes.tolist()), epsilon, depth, (3, 4, 2), norm, math.sqrt(2))
        found, reason = row(tiny, "psi_theorem_5_1", epsilon=0.05, depth_convention=convention)
        assert found == pytest.approx(expected, rel=1e-9)
        assert "0.2679 inf|v| holds" in reason
    assert "does not hold" in row(tiny, "psi_theorem_5_1", epsilon=0.5)[1]
    with pytest.raises(InputError, match="depth_convention"):
        row(tiny, "psi_theorem_5_1", depth_convention="depth")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("widths", [(3, 5, 4, 2), (4, 2, 5, 3, 2), (3, 4, 2)])
def test_all_paths_without_writing_them_out(widths: tuple[int, ...], bias: bool) -> None:
    tiny = network(widths, bias, seed=1)
    found = fs.BasisPaths(tiny.model, tiny.x)
    paths = all_paths(found.graph, found.params)
    values, summary = path_values(paths, found.params), all_paths_of_chain(found)
    assert summary.count == len(paths)
    assert summary.norm == pytest.approx(float(values.norm()), rel=1e-12)
    assert summary.largest == pytest.approx(float(values.abs().max()), rel=1e-12)
    groups = math.prod(widths[1:-1])
    if bias:
        groups += sum(math.prod(widths[i:-1]) for i in range(1, len(widths) - 1)) + 1
    assert summary.groups == groups


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("widths", [(3, 4, 2), (3, 5, 4, 2)])
def test_corrected_bound_is_never_violated(widths: tuple[int, ...], bias: bool, seed: int) -> None:
    """Against random draws and against ascent, wherever the activations are certified to stay."""
    tiny = network(widths, bias, seed)
    space = InPathSpace(Dense(tiny))
    radius = fs.measure(tiny.problem(), "psi_activation_radius")["psi_activation_radius"]
    epsilon = min(0.9 * float(space.v.abs().min()), radius)
    found, reason = row(tiny, "psi_theorem_5_1_corrected", epsilon=epsilon, relative=False)
    assert "states unchanged: certified" in reason
    options = {"psi_epsilon": {"epsilon": epsilon, "relative": False, "restarts": 4}}
    loss = float(space.loss(space.v))
    by_ascent = fs.measure(tiny.problem(), "psi_epsilon", options=options)["psi_epsilon"] * (1 + loss)
    draws = torch.randn(200, len(space.v), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    moved = space.v + epsilon * draws / draws.norm(dim=1, keepdim=True)
    by_draws = max(float(space.loss(v)) for v in moved) - loss
    assert found >= by_ascent >= by_draws - 1e-9
    assert found >= by_draws

    # Path by path: the factor q of the corrected theorem, and (38) where its hypothesis holds.
    coordinates = space.paths
    paths = all_paths(coordinates.graph, coordinates.params)
    before = path_values(paths, coordinates.params)
    sizes = spread_of(*space.v.tolist())
    for share in (0.9, BALANCED):
        step = share * sizes.inf
        depth, r = len(widths) - 1, share
        q = (1 + r) ** depth / (1 - r) ** (depth - 1) - 1
        for v in space.v + step * draws[:10] / draws[:10].norm(dim=1, keepdim=True):
            change = (path_values(paths, space.paths.params_of(v)) - before).abs()
            assert bool((change <= q * before.abs() * (1 + 1e-9)).all())
            if share == BALANCED:
                assert float(change.max()) <= non_basis_change(sizes, step, depth - 1)


def test_corrected_bound_by_hand() -> None:
    tiny = network((3, 4, 2), bias=False, seed=0)
    found = fs.BasisPaths(tiny.model, tiny.x)
    summary, sizes = all_paths_of_chain(found), spread_of(*fs.BasisPaths(tiny.model, tiny.x).values().tolist())
    r = 0.1
    q = (1 + r) ** 2 / (1 - r) - 1
    epsilon = r * sizes.inf
    reach = min(q * summary.norm, epsilon + math.sqrt(24 - 16) * q * summary.largest)
    expected = math.sqrt(2) * float(tiny.x.norm(dim=1).max()) * 2 * reach
    assert row(tiny, "psi_theorem_5_1_corrected")[0] == pytest.approx(expected, rel=1e-9)
    assert corrected_theorem_5_1_bound(sizes, summary, found.count, 1.01 * sizes.inf, 2, 1.0) == math.inf


def test_one_zero_weight_makes_the_theorem_vacuous_not_wrong() -> None:
    tiny = mlp()
    tiny.model[0].weight.data[0, 0] = 0
    for name in ("psi_theorem_5_1", "psi_theorem_5_1_corrected"):
        assert row(tiny, name) == (math.inf, "a path value is zero: vacuous")
    tiny.model[0].weight.data[0] = 0  # now a skeleton weight
    assert row(tiny, "psi_theorem_5_1")[0] == math.inf


def test_where_the_theorem_does_not_apply() -> None:
    for name in ("psi_theorem_5_1", "psi_theorem_5_1_corrected"):
        value, reason = row(lenet_like(), name)
        assert math.isnan(value)
        assert "fully connected" in reason
        assert "Lipschitz" in row(regression(), name)[1]
        assert row(regression(), name, lipschitz=3.0)[0] > 0


def test_pac_bayes_by_hand() -> None:
    tiny = mlp()
    v = fs.BasisPaths(tiny.model, tiny.x, "cyclic").values()
    sigma, n = 1e-5, len(tiny.x)  # so small that no draw changes an error
    kl = float(v.square().sum()) / (2 * sigma**2)
    for penalty in (False, True):
        expected = 4 * math.sqrt((kl + penalty * 11 * math.log(2) + math.log(2 * n / 0.05)) / n)
        found, reason = row(tiny, "pac_bayes_psi", sigma=sigma, sign_penalty=penalty, draws=4)
        assert found == pytest.approx(expected, rel=1e-12)
        assert ("fixed before training" in reason) != penalty
    assert "NOT VALID" in row(tiny, "pac_bayes_psi", rule="max_product", draws=4)[1]


def test_pac_bayes_prior_at_the_initial_weights() -> None:
    tiny = mlp()
    paths = fs.BasisPaths(tiny.model, tiny.x, "cyclic")
    kl = float((paths.values() - paths.values_of(tiny.initial)).square().sum()) / (2 * 1e-5**2)
    expected = pac_bayes_gap(0.0, kl + 11 * math.log(2), len(tiny.x), 0.05)
    assert row(tiny, "pac_bayes_psi", sigma=1e-5, prior_mean="initial", draws=4)[0] == pytest.approx(
        expected, rel=1e-12
    )
    without = Tiny("none", tiny.model, tiny.x, tiny.y, tiny.layers)
    assert "before training" in row(without, "pac_bayes_psi", prior_mean="initial")[1]


def test_pac_bayes_stops_when_the_bound_is_precise_or_the_time_is_up() -> None:
    tiny, name = mlp(), "pac_bayes_psi"
    paths = fs.BasisPaths(tiny.model, tiny.x, "cyclic")
    kl = float(paths.values().square().sum()) / (2 * 0.5**2) + 11 * math.log(2)
    generator = fs.Context(tiny.problem()).generator(name)

    def wrong(v: torch.Tensor) -> float:
        outputs = paths.to_model(v)(tiny.x)
        return float((outputs.argmax(1) != tiny.y).double().mean())

    draws = [torch.randn(paths.count, generator=generator, dtype=torch.float64) for _ in range(200)]
    errors = [wrong(paths.values() + 0.5 * u) for u in draws]
    changes = torch.tensor(errors, dtype=torch.float64) - wrong(paths.values())

    def found(seen: int, **effort: Any) -> str:
        table = fs.bounds(tiny.problem(), name, options={name: {"sigma": 0.5, "draws": 200}}, **effort)
        [line] = table.to_frame().to_dict("records")
        expected = pac_bayes_gap(abs(float(changes[:seen].mean())), kl, len(tiny.x), 0.05)
        assert line["value"] == pytest.approx(expected, rel=1e-12)
        students = t.ppf(0.975, seen - 1) / norm.ppf(0.975)
        assert line["stderr"] == pytest.approx(students * float(changes[:seen].std()) / math.sqrt(seen), rel=1e-6)
        beyond = math.sqrt(math.log(200 * 200 / 0.05) / (2 * seen))
        assert line["high"] - line["value"] == pytest.approx(beyond, rel=1e-9)
        return str(line["reason"])

    assert "; 16 of 200 draws" in found(16)
    assert "; 200 draws" in found(200, precision=0)
    hurried = fs.Context(tiny.problem(), effort=Effort(precision=0, deadline=0.0))
    table = fs.bounds(hurried.problem, name, context=hurried)
    assert "not begun" in table.reason(name)
    late = pac_bayes_psi(hurried, delta=0.05)
    assert "; 2 of 100 draws: the time was up" in late.reason


def test_pac_bayes_with_path_values_beyond_a_float_is_infinite() -> None:
    tiny = mlp()
    with torch.no_grad():
        for parameter in tiny.model.parameters():
            parameter.mul_(1e60)
    assert row(tiny, "pac_bayes_psi") == (math.inf, "path values are more than a float holds: vacuous")


def test_divergence_is_that_of_two_gaussians() -> None:
    """‖v - v₀‖² / 2σ² against a Monte-Carlo mean of the log-ratio of densities."""
    generator = torch.Generator().manual_seed(0)
    v, sigma = torch.tensor([0.3, -0.7, 0.2], dtype=torch.float64), 0.4
    draws = v + sigma * torch.randn(200_000, 3, generator=generator, dtype=torch.float64)
    ratio = (draws.square().sum(1) - (draws - v).square().sum(1)) / (2 * sigma**2)
    exact = float(v.square().sum()) / (2 * sigma**2)
    assert abs(float(ratio.mean()) - exact) <= 4 * float(ratio.std()) / math.sqrt(len(ratio))


def test_pac_bayes_is_monotone() -> None:
    gaps = [pac_bayes_gap(0.0, 50.0, n, 0.05) for n in (10, 100, 1000, 10_000)]
    assert gaps == sorted(gaps, reverse=True)
    assert pac_bayes_gap(0.0, 50.0, 100, 0.01) > pac_bayes_gap(0.0, 50.0, 100, 0.1)
    tiny = mlp()
    by_sigma = [row(tiny, "pac_bayes_psi", sigma=sigma, draws=2)[0] for sigma in (1e-12, 1e-6, 1e-3)]
    assert by_sigma == sorted(by_sigma, reverse=True)
    assert by_sigma[0] > 1e10


def test_pac_bayes_needs_a_bounded_loss() -> None:
    tiny = regression()
    assert "clipped" in row(tiny, "pac_bayes_psi")[1]
    assert row(tiny, "pac_bayes_psi", loss="clipped", draws=4)[0] > 0
    for options in ({"sigma": 0.0}, {"loss": "mse"}, {"prior_mean": "mean"}, {"draws": 1}):
        with pytest.raises(InputError):
            row(tiny, "pac_bayes_psi", **options)


def test_bounds_are_invariant_under_rescaling() -> None:
    tiny = mlp()
    twin = tiny.with_model(fs.rescale(tiny.model, tiny.x, by="unit", seed=4))
    for name in ("psi_theorem_5_1", "psi_theorem_5_1_corrected", "pac_bayes_psi"):
        assert row(tiny, name)[0] == pytest.approx(row(twin, name)[0], rel=1e-9)


class Between(nn.Module):
    """Something between the layers or behind them."""

    def __init__(self, what: str, factor: float) -> None:
        super().__init__()
        self.what, self.factor = what, factor
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(x))
        if self.what == "hidden":
            h = self.factor * h
        elif self.what == "slope":
            h = nn.functional.leaky_relu(self.first(x), self.factor)
        out: torch.Tensor = self.last(h)
        return self.factor * out if self.what == "outputs" else out


@pytest.mark.parametrize(
    ("what", "factor"), [("hidden", 0.5), ("slope", 0.1), ("hidden", 1e5), ("slope", 3.0), ("outputs", 1e5)]
)
def test_what_enlarges_signals_is_refused_since_the_rise_can_be_above_the_bound(what: str, factor: float) -> None:
    plain = network((3, 4, 2), bias=True, seed=0)
    model = Between(what, factor).double()
    for value, own in zip(model.parameters(), plain.model.parameters(), strict=True):
        value.data = own.detach().clone()
    tiny = plain.with_model(model)
    paths = fs.BasisPaths(model, tiny.x)

    def loss(v: torch.Tensor) -> torch.Tensor:
        outputs = torch.func.functional_call(model, paths.params_of(v), (tiny.x,))
        return nn.functional.cross_entropy(outputs, tiny.y)

    v = paths.values()
    direction = torch.autograd.functional.jacobian(loss, v)
    step = 1e-3 * float(v.abs().min()) * direction / direction.norm()
    rise = float(loss(v + step) - loss(v))
    found, reason = row(tiny, "psi_theorem_5_1_corrected", epsilon=1e-3)
    if factor < 1:
        assert rise <= found
        return
    for said in (reason, row(tiny, "psi_theorem_5_1")[1]):
        assert "another operation" in said
    if factor > 10:
        assert rise > row(plain, "psi_theorem_5_1_corrected", epsilon=1e-3)[0], "what would have been said"
