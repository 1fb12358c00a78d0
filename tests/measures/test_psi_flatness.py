"""Flatness in path space: what the contract does not cover. Closed forms, poles, certificates, estimators."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from networks import Tiny, attention, lenet_like, mlp, residual
from references import Dense
from references_psi import InPathSpace, psi_activation_radius, psi_trace
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev, vmap

import flatscope as fs
from flatscope.context import Context
from flatscope.errors import InputError, NumericalWarning
from flatscope.measures import path_curvature
from flatscope.measures.path_curvature import PathHessian
from flatscope.measures.psi_flatness import path_coordinates
from flatscope.symmetries.path_certificate import ActivationCertificate


def normals(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def value(tiny: Tiny, name: str, **options: object) -> float:
    return fs.measure(tiny.problem(), name, options={name: options})[name]


@pytest.mark.parametrize("rule", ["cyclic", "max_product"])
@pytest.mark.parametrize("tiny", [mlp(), lenet_like(), residual()], ids=lambda tiny: tiny.name)
def test_trace_for_every_rule(tiny: Tiny, rule: str) -> None:
    expected = psi_trace(Dense(tiny), rule)
    assert value(tiny, "psi_trace", rule=rule) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("tiny", [mlp(), lenet_like(), residual()], ids=lambda tiny: tiny.name)
def test_trace_from_overlaps_of_positions_or_from_gradients(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ways to the same sum of squares, also where gains differ by many orders of magnitude."""
    model = fs.rescale(tiny.model, tiny.x, by="unit", low=1e-9, high=1e9, seed=3)
    for network in (tiny, tiny.with_model(model)):
        for overlaps in (True, False):
            monkeypatch.setattr(path_curvature, "overlaps_are_cheaper", lambda *given, chosen=overlaps: chosen)
            assert value(network, "psi_trace") == pytest.approx(psi_trace(Dense(tiny), "max_product"), rel=1e-8)


def test_trace_of_the_diagonal_rule() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)).double()
    tiny = Tiny("equal", model, normals(9, 3), torch.arange(9) % 3, ("0", "2", "4"))
    assert value(tiny, "psi_trace", rule="diagonal") == pytest.approx(psi_trace(Dense(tiny), "diagonal"), rel=1e-9)


def test_skeleton_rule_matters_and_cyclic_moves_under_permutation() -> None:
    tiny = mlp()
    twin = tiny.with_model(fs.rescale(tiny.model, tiny.x, by="permutation", seed=4))
    for name in ("psi_trace", "psi_epsilon", "psi_expected"):
        before, after = (value(t, name, rule="cyclic") for t in (tiny, twin))
        assert abs(before - after) > 1e-2 * abs(before)
        one, other = (value(t, name) for t in (tiny, twin))
        assert one == pytest.approx(other, rel=1e-9)
    assert value(tiny, "psi_trace", rule="cyclic") != pytest.approx(value(tiny, "psi_trace"), rel=1e-2)


@pytest.mark.parametrize("name", ["psi_trace", "psi_epsilon", "psi_expected", "psi_balance", "psi_activation_radius"])
def test_same_number_for_the_same_function(name: str) -> None:
    for tiny, by in itertools.product((mlp(), lenet_like(), residual()), ("unit", "layer")):
        twin = tiny.with_model(fs.rescale(tiny.model, tiny.x, by=by, low=0.1, high=10, seed=8))
        assert value(tiny, name) == pytest.approx(value(twin, name), rel=1e-9)


def test_weight_flatness_moves_where_this_does_not() -> None:
    tiny = mlp()
    twin = tiny.with_model(fs.rescale(tiny.model, tiny.x, by="unit", low=0.1, high=10, seed=8))
    assert abs(value(twin, "hessian_trace") / value(tiny, "hessian_trace") - 1) > 0.5


def test_second_derivative_has_a_gradient_term() -> None:
    """∇²_v l = JᵀHJ + Σ g_k ∇²_v w_k, and the second part is not small away from a minimum."""
    tiny = mlp()
    space = InPathSpace(Dense(tiny))
    names = list(space.dense.params)

    def weights(v: Tensor) -> Tensor:
        found = space.paths.params_of(v)
        return torch.cat([found[name].flatten() for name in names])

    jacobian, second = jacrev(weights)(space.v), hessian(weights)(space.v)
    gradient = torch.autograd.functional.jacobian(lambda w: space.dense.loss_of(w, names), space.dense.vector(names))
    through = (jacobian.T @ space.dense.hessian @ jacobian).trace()
    bent = torch.einsum("k,kij->ij", gradient, second).trace()
    assert value(tiny, "psi_trace") == pytest.approx(float(through + bent), rel=1e-9)
    assert abs(bent) > 1e-3 * abs(through)


def test_operator_is_the_dense_hessian() -> None:
    tiny = residual()
    ctx = Context(tiny.problem())
    paths = path_coordinates(ctx, "cyclic")
    space = InPathSpace(Dense(tiny), "cyclic")
    dense = torch.autograd.functional.hessian(space.loss, space.v, vectorize=True)
    found = PathHessian(ctx, paths, torch.arange(paths.count)) @ torch.eye(paths.count, dtype=torch.float64)
    torch.testing.assert_close(found, dense, rtol=1e-9, atol=1e-9 * float(dense.abs().max()))


@pytest.mark.filterwarnings("ignore::flatscope.errors.NumericalWarning")  # relative to a total near zero
def test_estimated_trace_agrees_within_its_standard_error() -> None:
    tiny = attention()
    exact = psi_trace(Dense(tiny))
    multiplied_out = fs.measure(tiny.problem(), "psi_trace")
    assert multiplied_out.to_frame()["exact"].all()
    assert "by products, one for each: " in multiplied_out.reason("psi_trace")
    assert "not piecewise linear" in multiplied_out.reason("psi_trace")
    options = {"psi_trace": {"most_products": 96, "precision": 0.5}}
    for seed in range(4):
        table = fs.measure(tiny.problem(), "psi_trace", seed=seed, options=options)
        assert not table.to_frame()["exact"].any()
        assert 0 < table.stderr("psi_trace") < 1
        assert abs(table["psi_trace"] - exact) <= 4.5 * table.stderr("psi_trace")


def test_no_hidden_unit_no_symmetry_weight_flatness() -> None:
    """Equality in max ≈ ε² tr(H) / 2d for H a multiple of the identity; printed without the 2."""
    layer = nn.Linear(4, 1, bias=False).double()
    x = 2 * torch.eye(4, dtype=torch.float64)
    problem = fs.Problem(layer, train=(x, layer(x).detach()), loss="mse")
    table = fs.measure(problem, "psi*", options={"psi_epsilon": {"epsilon": 0.3, "relative": False}})
    trace = table["psi_trace"]
    assert trace == pytest.approx(8.0)
    assert table["psi_epsilon"] == pytest.approx(0.3**2 * trace / (2 * 4), rel=1e-6)
    assert fs.measure(problem, "hessian_trace")["hessian_trace"] == pytest.approx(trace)


def test_ordering_of_the_three_at_a_minimum() -> None:
    """PSI-ε (1 + l) ≥ ε² tr(H) / 2d and ≥ PSI-expected in the same ball, at a minimum that does not interpolate."""
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    model[0].weight.data, model[0].bias.data = normals(3, 2, seed=3), torch.full((3,), 9.0, dtype=torch.float64)
    x, y = normals(60, 2), normals(60, 1, seed=2)
    # All units are on, and three of them give every affine function: the best one is a minimum in all weights.
    features = torch.cat([model[:2](x).detach(), torch.ones(60, 1, dtype=torch.float64)], dim=1)
    best = torch.linalg.lstsq(features, y, driver="gelsd").solution
    model[2].weight.data, model[2].bias.data = best[:3].T.clone(), best[3].clone()
    problem = fs.Problem(model, train=(x, y), loss="mse")
    table = fs.measure(problem, ["psi*", "gradient_norm"])
    assert table["gradient_norm"] < 1e-12
    paths = fs.BasisPaths(model, x)
    radius = 0.1 * paths.nearest_pole
    rise = table["psi_epsilon"] * (1 + float((model(x) - y).detach().square().mean()))
    assert rise >= 0.99 * radius**2 * table["psi_trace"] / (2 * paths.count)
    assert rise >= table["psi_expected"]


def test_first_layer_radius_is_exact() -> None:
    """One hidden layer, one sample: the nearest flip is at |z_i| / ‖x‖ with outgoing skeleton weights ±1."""
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False)).double()
    model[2].weight.data += 3 * torch.eye(2, dtype=torch.float64).repeat(1, 2)
    model[0].weight.data = normals(4, 3)
    model[0].weight.data[1] = torch.tensor([1.0, 1.0, 0.2], dtype=torch.float64)
    x = torch.tensor([[1.0, -1.0, 0.1]], dtype=torch.float64)
    tiny = Tiny("one", model, x, torch.tensor([0]), ("0", "2"))
    scale = model[2].weight.detach().abs().amax(0)  # |S(u)|
    z = (model[0](x)[0].detach() * scale).abs()
    assert value(tiny, "psi_activation_radius") == pytest.approx(float(z.min() / x.norm()), rel=1e-9)
    space = InPathSpace(Dense(tiny))
    unit = int(z.argmin())
    direction = space.paths.split(torch.zeros_like(space.v))
    sign = float((model[0](x)[0, unit].detach() * space.paths.suffix.sign[unit + 1]).sign())
    direction["0.weight"][unit] = -sign * x[0] / x.norm()
    for factor, same in ((0.999, True), (1.001, False)):
        step = factor * float(z.min() / x.norm()) * space.paths.join(direction)
        moved = space.paths.params_of(space.v + step)["0.weight"]
        assert bool(((x @ moved.T).sign() == model[0](x).sign()).all()) == same


def test_an_input_of_exactly_zero_that_can_move_leaves_no_radius() -> None:
    """Whatever the radius: the first run tells. Where it cannot move, another unit decides."""
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False)).double()
    model[0].weight.data[1] = torch.tensor([1.0, 1.0, 0.2], dtype=torch.float64)
    for x, share in ((torch.tensor([[1.0, -1.0, 0.0]]), 0.0), (torch.zeros(1, 3), 1.0)):
        ctx = Context(Tiny("zero", model, x.double(), torch.tensor([0]), ("0", "2")).problem())
        certificate = ActivationCertificate(ctx.problem, path_coordinates(ctx, "max_product"))
        high = 0.5 * certificate.limit
        assert certificate.radius(x, high) == (share * high, 1)


def hidden_states(model: nn.Module, params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Inputs of all ReLUs of an MLP, (n, units)."""
    found, h = [], x
    for name, module in model.named_children():
        if isinstance(module, nn.Linear):
            h = h @ params[f"{name}.weight"].T + params[f"{name}.bias"]
            found.append(h)
        else:
            h = module(h)
    return torch.cat(found[:-1], dim=1)


def test_certified_radius_is_never_broken() -> None:
    tiny = mlp()
    space = InPathSpace(Dense(tiny))
    radius = value(tiny, "psi_activation_radius")
    model, before = tiny.model, hidden_states(tiny.model, dict(tiny.model.named_parameters()), tiny.x).detach().sign()

    def signs(v: Tensor) -> Tensor:
        return hidden_states(model, space.paths.params_of(v), tiny.x)

    draws = normals(10_000, space.paths.count)
    draws = draws / draws.norm(dim=1, keepdim=True)
    with torch.no_grad():
        flips = dict.fromkeys((1.0, 60.0), 0)
        for factor, part in itertools.product(flips, draws.split(2500)):
            part = part if factor == 1.0 else part[:500]
            after = vmap(signs)(space.v + factor * radius * part).sign()
            flips[factor] += int((after != before).flatten(1).any(1).sum())
    assert flips[1.0] == 0
    assert flips[60.0] > 0
    for sample, unit in itertools.product(range(len(tiny.x)), range(before.shape[1])):
        v = space.v.clone()
        for _ in range(3):  # the step that moves this unit most, from the sphere's centre
            gradient = jacrev(lambda v, s=sample, u=unit: signs(v)[s, u])(v)
            v = space.v - before[sample, unit] * radius * gradient / gradient.norm().clamp_min(1e-300)
            assert bool((signs(v).detach().sign() == before).all())


def test_radius_by_another_rule_equals_its_twin() -> None:
    for tiny in (mlp(), residual()):
        expected = psi_activation_radius(Dense(tiny), "cyclic")[""]
        assert value(tiny, "psi_activation_radius", rule="cyclic") == pytest.approx(expected, rel=1e-9)


def test_loss_grows_without_bound_near_a_pole() -> None:
    """Towards P(u) S(u) = 0 the outputs, and with them the loss of wrong samples, grow like 1 / distance."""
    tiny = mlp()
    space = InPathSpace(Dense(tiny))
    found = space.paths
    ratios = []
    for unit in range(1, found.n_classes + 1):
        layout = found.split(torch.zeros_like(space.v))
        layer = found.graph.layers[int(found.first[0][unit])]
        layout[layer.weight].view(-1)[int(found.first[1][unit])] = 1.0
        direction = found.join(layout)
        at = float((space.v * direction).sum())
        largest = []
        for distance in (1e-4, 1e-5):
            params = space.paths.params_of(space.v + direction * (at * distance - at))
            largest.append(float(functional_call(tiny.model, params, (tiny.x,)).detach().abs().max()))
        ratios.append(largest[1] / largest[0])
    assert max(ratios) == pytest.approx(10, rel=1e-2)


def test_gaussian_draws_are_warned_about() -> None:
    with pytest.warns(NumericalWarning, match="infinite unless the loss is bounded"):
        assert value(mlp(), "psi_expected", law="gaussian") > 0
    assert value(mlp(), "psi_expected", law="sphere") > 0


def test_wrong_options_are_refused() -> None:
    for name, options in (
        ("psi_epsilon", {"epsilon": 1.0}),
        ("psi_epsilon", {"epsilon": -0.1}),
        ("psi_epsilon", {"steps": 0}),
        ("psi_expected", {"draws": 3}),
        ("psi_expected", {"law": "cauchy"}),
        ("psi_trace", {"rule": "argmax"}),
    ):
        with pytest.raises(InputError):
            value(mlp(), name, **options)


def test_zero_weights() -> None:
    tiny = mlp()
    tiny.model[0].weight.data[0, 0] = 0
    assert value(tiny, "psi_balance") == float("inf")
    tiny.model[0].weight.data[1] = 0
    frame = fs.measure(tiny.problem(), "psi*").to_frame()
    assert frame["value"].isna().all()
    assert frame["reason"].str.contains("layer 0, unit 1").all()


def test_units_beside_frozen_layers_are_not_rescaled() -> None:
    tiny = mlp()
    tiny.model[0].weight.requires_grad_(False)
    frame = fs.measure(tiny.problem(), "psi_trace").to_frame()
    assert frame["value"].notna().all()
    assert frame["reason"].str.contains("0.weight, which is frozen").all()


PSI = ("psi_trace", "psi_balance", "psi_epsilon", "psi_expected")


@pytest.mark.parametrize("between", [[nn.GELU()], [nn.LayerNorm(8), nn.ReLU()]], ids=["gelu", "layer_norm"])
def test_where_no_unit_can_be_rescaled_path_space_is_weight_space_and_says_so(between: list[nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), *between, nn.Linear(8, 3)).double()
    problem = fs.Problem(model, (normals(40, 6), torch.arange(40) % 3))
    same_ball = {"epsilon": 0.1, "relative": False}
    same_law = {"sigma": 0.1 / (sum(v.numel() for v in model.parameters()) + 2) ** 0.5, "law": "ball"}
    weights = {"epsilon_flatness": same_ball, "expected_flatness": same_law, "hessian_trace": {}}
    table = fs.measure(problem, [*PSI, *weights], options=weights)
    wall = "gelu (1)" if len(between) == 1 else "layer_norm (1)"
    for name in PSI:
        assert f"no unit can be rescaled; scales stop at {wall}; equals" in table.reason(name)
    assert table["psi_trace"] == pytest.approx(table["hessian_trace"], rel=1e-9)
    assert table["psi_epsilon"] == pytest.approx(table["epsilon_flatness"], rel=0.02)
    error = math.hypot(table.stderr("psi_expected"), table.stderr("expected_flatness"))
    assert table["psi_expected"] == pytest.approx(table["expected_flatness"], abs=5 * error)
    if len(between) == 1:  # a fresh LayerNorm has biases of zero
        sizes = torch.cat([value.detach().abs().flatten() for value in model.parameters()])
        assert table["psi_balance"] == pytest.approx(float(sizes.max() / sizes.min()), rel=1e-9)


def test_units_without_a_scale_are_counted_and_a_relu_network_needs_no_remark() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.GELU(), nn.Linear(5, 3)).double()
    table = fs.measure(fs.Problem(model, (normals(40, 6), torch.arange(40) % 3)), list(PSI))
    for name in PSI:
        assert table.reason(name).endswith("8 of 13 hidden units can be rescaled; scales stop at gelu (3)")
    for tiny in (mlp(), residual()):
        table = fs.measure(tiny.problem(), list(PSI))
        assert not any("rescaled" in table.reason(name) for name in PSI)
        assert table.reason("psi_trace") == table.reason("psi_balance") == ""


def test_many_classes_are_sampled_and_the_standard_error_covers() -> None:
    """Of 400 classes random columns give the Gauss-Newton part; what remains is exact on a chain."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 4, generator=generator), torch.randint(0, 400, (60,), generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 400))
    problem = fs.Problem(model, train=(x, y))
    exact = fs.measure(problem, "psi_trace", precision=0)
    assert exact.stderr("psi_trace") == 0
    scores = []
    for seed in range(24):
        found = fs.measure(problem, "psi_trace", seed=seed, precision=0.05)
        assert "sampled" in found.reason("psi_trace")
        assert not found.to_frame()["exact"].any()
        assert 0 < found.stderr("psi_trace") <= 0.05 * found["psi_trace"]
        scores.append((found["psi_trace"] - exact["psi_trace"]) / found.stderr("psi_trace"))
    assert sum(abs(z) <= 1.96 for z in scores) >= 0.79 * len(scores)
    assert abs(sum(scores) / len(scores)) < 0.6
