"""Norms, their ratios to the margin and capacities, Lipschitz bounds: closed forms, dense matrices, inequalities."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import checks
import numpy as np
import pytest
import torch
from forms_of_measures import BY_NAME, table_of, value_of, values_of
from networks import Tiny, _built, attention, batchnorm_conv, lenet_like, mlp, residual, sequences
from references import Dense
from references_norms import top_singular_value, written_out
from torch import Tensor, nn
from torch.nn import functional

import flatscope as fs
from flatscope.limits import STANDARD
from flatscope.measures.lipschitz import weight_as_matrix
from flatscope.measures.margins import order_statistic, value_from_logarithm
from flatscope.measures.path_norms import log_output_path_norms
from flatscope.network.singular_values import operator_norm
from flatscope.registry import Declaration, declarations

CPU = torch.device("cpu")
NORMS = ("l2_norm", "spectral_norm", "l1_inf_norm", "group_norm", "l1_path_norm", "l2_path_norm")
FAMILY = [f"{norm}_{end}" for norm in NORMS for end in ("over_margin", "capacity")]


def declared(name: str) -> Declaration:
    """A measure, or a form of one."""
    return BY_NAME.get(name) or declarations()[name]


def folded(tiny: Tiny) -> fs.Problem:
    return tiny.with_model(fs.fold_batchnorm(tiny.model, tiny.x)).problem(initial=None)


@cache
def written(build: Callable[[], Tiny]) -> Dense:
    """The network on the labels it gives: every margin is positive, so that ratios to it exist. Made once."""
    return Dense(labelled_by_itself(build()))


def labelled_by_itself(tiny: Tiny) -> Tiny:
    return replace(tiny, y=tiny.model(tiny.x).argmax(1), yt=tiny.model(tiny.xt).argmax(1))


@pytest.mark.parametrize("name", [*FAMILY, "certified_radius"])
@pytest.mark.parametrize("build", [mlp, lenet_like, batchnorm_conv, residual, sequences, attention])
def test_ratios_to_a_positive_margin_equal_their_twins(name: str, build: Callable[[], Tiny]) -> None:
    entry, tiny = declared(name), written(build).tiny
    checks.equals_its_twin(entry, written(build))
    without_chain = tiny.name == "residual" and (name == "certified_radius" or name.endswith("path_norm_over_margin"))
    assert bool(checks.values_of(entry, tiny)) == (tiny.chain or without_chain)


@pytest.mark.parametrize("name", [*FAMILY, "certified_radius"])
@pytest.mark.parametrize("symmetry", ["layer_scaling", "unit_scaling", "permutation", "output_scaling"])
def test_ratios_to_a_positive_margin_keep_their_symmetries(name: str, symmetry: str) -> None:
    """Also w → cw with the margin along: the norms themselves do not keep still under that, their ratios do."""
    checks.keeps_its_symmetries(declared(name), written(mlp).tiny, symmetry)
    assert "output_scaling" in declared(name).invariant_under


@pytest.mark.parametrize("name", FAMILY)
def test_ratios_under_batchnorm_scaling_and_float32(name: str) -> None:
    tiny = written(batchnorm_conv).tiny
    checks.keeps_its_symmetries(declared(name), tiny, "batchnorm_scaling")
    checks.close_in_float32(declared(name), written(mlp).tiny)


@pytest.mark.parametrize("name", FAMILY)
def test_a_margin_that_is_not_positive_is_refused_with_the_reason(name: str) -> None:
    table = table_of(mlp().problem(), name)
    assert math.isnan(table[table.names[0]])
    assert "positive margin" in table.reason(table.names[0])


def test_the_options_of_a_ratio_are_those_of_its_norm_and_its_margin() -> None:
    tiny = labelled_by_itself(lenet_like())
    given = {"p": 2.0, "q": 2.0, "epsilon": 0.3, "with_4d": True}
    assert set(declarations()["group_norm"].options) == {"form", "p", "q", "log", "epsilon", "with_4d"}
    found = value_of(tiny.problem(), "group_norm_capacity", **given)
    assert found == pytest.approx(value_of(tiny.problem(), "l2_norm_capacity", epsilon=0.3), rel=1e-12)
    log = value_of(tiny.problem(), "group_norm_capacity", **given, log=True)
    assert math.exp(log) == pytest.approx(found, rel=1e-12)


def test_width_of_a_convolution_is_its_channels_or_its_units() -> None:
    tiny = labelled_by_itself(lenet_like())
    name = "spectral_norm_capacity"
    plain = values_of(tiny.problem(), name, "spectral_norm_over_margin")
    channels, units = 3 * 4 * 5 * 3, (3 * 36) * (4 * 4) * 5 * 3
    assert plain[name] == pytest.approx(channels * plain["spectral_norm_over_margin"], rel=1e-12)
    by_units = value_of(tiny.problem(), name, width="units", with_4d=True)
    assert by_units == pytest.approx(4**4 * units * plain["spectral_norm_over_margin"], rel=1e-12)
    with pytest.raises(fs.InputError, match="width"):
        value_of(tiny.problem(), name, width="channel")


def test_layer_norms_change_under_unit_scaling_and_capacities_under_none_of_their_own() -> None:
    """Neyshabur et al. (2017), section 2.2: path capacities survive unit scaling, products of layer norms do not."""
    tiny = labelled_by_itself(mlp())
    other = tiny.with_model(fs.rescale(tiny.model, tiny.x, by="unit", low=0.1, high=10.0, seed=1))
    names = ["l2_norm_capacity", "spectral_norm_capacity", "l1_path_norm_capacity", "l2_path_norm_capacity"]
    before, after = values_of(tiny.problem(), *names), values_of(other.problem(), *names)
    for name in names[:2]:
        assert after[name] > 2 * before[name]
    for name in names[2:]:
        assert after[name] == pytest.approx(before[name], rel=1e-11)


def test_inequalities_between_the_capacities() -> None:
    """Per output φ_1 ≤ Π‖W‖_{1,∞}; φ_1² ≤ Π h φ_2²; Π4‖W‖_F² ≤ Π4h‖W‖_2², which needs the factor 4."""
    for seed in range(5):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.ReLU(), nn.Linear(7, 4, bias=False)).double()
        x = torch.randn(20, 5, dtype=torch.float64)
        x = x[model(x).detach().abs().sum(1) > 0]  # without biases an input may switch off every unit
        problem = fs.Problem(model, train=(x, model(x).argmax(1)))
        table = values_of(problem, *NORMS, *FAMILY)
        assert table["l1_path_norm_capacity"] <= 5 * table["l2_path_norm_capacity"]
        assert table["l2_norm_capacity"] <= value_of(problem, "spectral_norm_capacity", with_4d=True)
        largest = value_of(problem, "l2_path_norm", p=1.0, outputs="max")
        assert largest <= table["l1_inf_norm"] * (1 + 1e-12)


def test_group_norms_have_their_special_cases() -> None:
    tiny = lenet_like()
    cases: dict[str, tuple[float, float, Callable[[Tensor], Tensor]]] = {
        "frobenius": (2.0, 2.0, lambda w: w.norm()),
        "largest row": (1.0, math.inf, lambda w: w.flatten(1).abs().sum(1).max()),
        "entrywise": (3.0, 3.0, lambda w: (w.abs() ** 3).sum() ** (1 / 3)),
        "largest entry": (math.inf, math.inf, lambda w: w.abs().max()),
    }
    for p, q, closed in cases.values():
        found = fs.measure(tiny.problem(), "group_norm", options={"group_norm": {"p": p, "q": q}}).layer("group_norm")
        for layer, value in found.items():
            weight = dict(tiny.model.named_modules())[layer].weight.detach()
            assert value == pytest.approx(float(closed(weight)), rel=1e-12)
    assert fs.measure(tiny.problem(), "l1_inf_norm").layer("l1_inf_norm") == pytest.approx(
        fs.measure(tiny.problem(), "group_norm", options={"group_norm": {"p": 1, "q": math.inf}}).layer("group_norm")
    )
    with pytest.raises(fs.InputError, match="at least 1"):
        fs.measure(tiny.problem(), "group_norm", options={"group_norm": {"p": 0.5}})


@pytest.mark.parametrize("m", [1, 7, 20, 100, 50_000])
@pytest.mark.parametrize("epsilon", [0.001, 0.05, 0.07, 0.1])
def test_the_margin_is_an_order_statistic(m: int, epsilon: float) -> None:
    exact = -(-round(epsilon * 1000) * m // 1000)
    assert order_statistic(epsilon, m) == max(exact, 1)
    margins = np.round(np.random.default_rng(m).normal(size=m), 1)  # with ties
    found = np.sort(margins)[order_statistic(epsilon, m) - 1]
    if exact == math.ceil(epsilon * m):  # where floating point does not get the ceiling wrong
        assert found == np.quantile(margins, epsilon, method="inverted_cdf")
    below = int((margins < found).sum())
    assert below < max(exact, 1) <= int((margins <= found).sum())


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("size", [6, 12])
def test_convolution_as_operator_against_the_written_out_matrix(stride: int, padding: int, size: int) -> None:
    torch.manual_seed(stride + 2 * padding)
    conv = nn.Conv2d(4, 5, 3, stride, padding, bias=False).double()
    assert (4 * size * size > STANDARD.decomposed_matrix) == (size == 12)  # both ways of computing it
    x = torch.randn(2, 4, size, size, dtype=torch.float64)
    model = nn.Sequential(conv, nn.Flatten())
    problem = fs.Problem(model, train=(x, torch.zeros(2, model(x).shape[1], dtype=torch.float64)), loss="mse")
    found = fs.measure(problem, "spectral_norm")["spectral_norm"]
    weight = conv.weight.detach()
    assert found == pytest.approx(top_singular_value(written_out(conv, weight, (4, size, size))), rel=1e-8)
    reshaped = fs.measure(problem, "spectral_norm", options={"spectral_norm": {"reshape": True}})["spectral_norm"]
    assert reshaped == pytest.approx(float(torch.linalg.matrix_norm(weight.flatten(1), 2)), rel=1e-12)
    assert reshaped <= found * (1 + 1e-10) <= math.ceil(3 / stride) * reshaped * (1 + 1e-9)


def test_circular_convolution_against_the_fourier_transform() -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 4, 3, 3, dtype=torch.float64)

    def circular(x: Tensor) -> Tensor:
        return functional.conv2d(functional.pad(x, (1, 1, 1, 1), mode="circular"), weight.to(x.dtype))

    for size in (8, 16):
        spectrum = torch.fft.fft2(weight, s=(size, size)).permute(2, 3, 0, 1)  # (frequency, frequency, out, in)
        expected = float(torch.linalg.svdvals(spectrum).max())
        assert operator_norm(circular, (4, size, size), CPU) == pytest.approx(expected, rel=1e-8)


def test_a_kernel_as_large_as_its_input_is_its_matrix() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 4), nn.Flatten())
    tiny = _built("full", model, (3, 4, 4), 5, ())
    for reshape in (False, True):
        table = fs.measure(tiny.problem(), "spectral_norm", options={"spectral_norm": {"reshape": reshape}})
        expected = torch.linalg.matrix_norm(tiny.model[0].weight.detach().flatten(1), 2)
        assert table["spectral_norm"] == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(4, 6, 3, 2, 1, groups=2), (4, 9)),
        (nn.Conv1d(3, 3, 1, groups=3), (3, 5)),
        (nn.Conv3d(2, 3, 2, dilation=2), (2, 4, 4, 4)),
        (nn.Conv2d(2, 4, 3, padding="same", dilation=2), (2, 5, 5)),
        (nn.Conv2d(4, 6, 1, 2, groups=2), (4, 5, 5)),
        (nn.ConvTranspose1d(4, 6, 3, 2, 1, output_padding=1, groups=2), (4, 5)),
        (nn.ConvTranspose2d(3, 2, 3, 2), (3, 4, 4)),
    ],
    ids=str,
)
def test_every_kind_of_convolution_against_its_jacobian(layer: nn.Module, shape: tuple[int, ...]) -> None:
    n_out = nn.Sequential(layer, nn.Flatten())(torch.zeros(1, *shape)).shape[1]
    tiny = _built("kinds", nn.Sequential(layer, nn.Flatten(), nn.ReLU(), nn.Linear(n_out, 3)), shape, 3, ())
    ctx = fs.Context(tiny.problem())
    jacobian = torch.autograd.functional.jacobian(lambda v: tiny.model[0](v[None]).flatten(), tiny.x[0]).flatten(1)
    found = fs.measure(ctx.problem, "spectral_norm", context=ctx).layer("spectral_norm")
    assert found["0"] == pytest.approx(top_singular_value(jacobian), rel=1e-9)
    # Incoming weights of a unit: the most that an output entry reads, where no border cuts them off.
    rows = weight_as_matrix(ctx, next(iter(ctx.network)))
    weight = tiny.model[0].weight.detach()
    assert len(rows) == n_out // math.prod(tiny.model[0](tiny.x).shape[2:])
    assert rows.square().sum() == pytest.approx(float(weight.square().sum()))
    reaching = fs.measure(tiny.problem(), "fan_in_l1").units("fan_in_l1", "0")
    read = jacobian.abs().sum(1).reshape(len(rows), -1).amax(1)
    assert bool((read <= reaching * (1 + 1e-12)).all())


@pytest.mark.parametrize("build", [mlp, lenet_like, batchnorm_conv, residual, sequences])
def test_jacobians_stay_below_the_lipschitz_bounds(build: Callable[[], Tiny]) -> None:
    tiny = build()
    table = values_of(tiny.problem(), "lipschitz_l2", "lipschitz_linf")
    x = 3 * torch.randn(1000, *tiny.x.shape[1:], dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    outputs = tiny.model(x.requires_grad_())  # of many inputs at once: none depends on another
    rows = [torch.autograd.grad(column.sum(), x, retain_graph=True)[0].flatten(1) for column in outputs.T]
    jacobians = torch.stack(rows, 1)  # (inputs, outputs, entries)
    seen_l2 = float(torch.linalg.matrix_norm(jacobians, 2).max())
    seen_linf = float(jacobians.abs().sum(2).max())
    gradients = jacobians.abs().sum(2).amax(0)
    assert bool(
        (
            gradients <= log_output_path_norms(fs.Context(folded(tiny)), p=1, biases=False)[0][0].exp() * (1 + 1e-12)
        ).all()
    )
    assert 0 < seen_l2 <= table["lipschitz_l2"]
    assert 0 < seen_linf <= table["lipschitz_linf"]


@pytest.mark.parametrize(
    ("pool", "size", "constant"),
    [
        (nn.MaxPool2d(2), 6, 1.0),
        (nn.MaxPool2d(3, 2), 7, 2.0),  # an entry in four windows
        (nn.MaxPool2d(3, 1, 1), 6, 3.0),
        (nn.AdaptiveMaxPool2d(3), 6, 1.0),
        (nn.AdaptiveMaxPool2d(2), 5, 2.0),
        (nn.AvgPool2d(2), 6, 1 / 2),
        (nn.AvgPool2d(4), 8, 1 / 4),
        (nn.AvgPool2d(2), 24, 1 / 2),
        (nn.AdaptiveAvgPool2d(1), 5, 1 / 5),
        (nn.Upsample(scale_factor=2), 5, 2.0),
        (nn.ZeroPad2d(1), 5, 1.0),
        (nn.LeakyReLU(0.3), 5, 1.0),
        (nn.LeakyReLU(-2.0), 5, 2.0),
        (nn.Tanh(), 5, 1.0),
        (nn.PReLU(init=3.0), 5, 3.0),
        (nn.Dropout(0.5), 5, 1.0),
    ],
    ids=str,
)
def test_constants_of_what_stands_between_layers(pool: nn.Module, size: int, constant: float) -> None:
    n = nn.Sequential(pool.eval(), nn.Flatten())(torch.zeros(2, 1, size, size)).shape[1]
    tiny = _built("between", nn.Sequential(pool, nn.Flatten(), nn.Linear(n, 2)), (1, size, size), 2, (), n=2)
    if isinstance(pool, nn.PReLU):
        pool.weight.data.fill_(3.0)
    table = values_of(tiny.problem(), "lipschitz_l2", "spectral_norm")
    assert table["lipschitz_l2"] == pytest.approx(constant * table["spectral_norm"], rel=1e-9)


def test_the_overlapping_maximum_attains_its_constant() -> None:
    """Raise the one entry that four windows share: the result moves by twice as much."""
    x = torch.zeros(1, 1, 7, 7)
    x[0, 0, 2, 2] = 1.0
    moved = functional.max_pool2d(x, 3, 2) - functional.max_pool2d(torch.zeros_like(x), 3, 2)
    assert float(moved.norm() / x.norm()) == 2.0


class Parts(nn.Module):
    """Branches added and put side by side, scaled, copied, in place and in a view."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.one(x), 0.5 * torch.relu(self.two(x)) / 2
        side = torch.cat([a - b, torch.maximum(a, b)], 1)
        view = side.view(-1, 2, 3)
        side += side.mean(1, keepdim=True)
        return self.head(view.transpose(1, 2).flatten(1) @ torch.eye(6, dtype=x.dtype))


def test_what_returns_its_input_or_writes_to_it_changes_nothing() -> None:
    modules = [nn.Flatten(), nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Dropout(), nn.Identity(), nn.Linear(5, 3)]
    table = values_of(_built("same", nn.Sequential(*modules), (4,), 3, ()).problem(), "lipschitz_l2", "spectral_norm")
    assert table["lipschitz_l2"] == pytest.approx(table["spectral_norm"], rel=1e-12)


def test_branches_are_bounded() -> None:
    tiny = _built("parts", Parts(), (4,), 2, (), chain=False)
    bound = value_of(tiny.problem(), "lipschitz_l2")
    one, two, head = (float(torch.linalg.matrix_norm(m.weight.detach(), 2)) for m in tiny.model.children())
    side = math.hypot(one + two / 4, math.hypot(one, two / 4))
    assert bound == pytest.approx(head * side * 2, rel=1e-12)  # a mean of six in six places adds 1/√6 · √6
    for x in tiny.x:
        jacobian = torch.autograd.functional.jacobian(lambda v: tiny.model(v[None])[0], x)
        assert float(torch.linalg.matrix_norm(jacobian, 2)) <= bound


class WrittenInPart(nn.Module):
    """Half of the units are made small, then the other half is added to them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        part = h[:, :2]
        part.mul_(0.01)
        part.add_(h[:, 2:])
        return self.last(h)


def test_a_part_that_was_written_to_twice_does_not_hide_the_rest() -> None:
    tiny = _built("written in part", WrittenInPart(), (4,), 2, ())
    with torch.no_grad():
        tiny.model.first.weight.copy_(10 * torch.eye(4))
        tiny.model.last.weight.copy_(torch.eye(2).repeat(1, 2))
    jacobian = torch.autograd.functional.jacobian(lambda x: tiny.model(x[None])[0], tiny.x[0])
    true = float(torch.linalg.matrix_norm(jacobian, 2))
    assert true <= value_of(tiny.problem(), "lipschitz_l2") <= 1.1 * true


@pytest.mark.parametrize("bad", [nn.LocalResponseNorm(2), nn.GroupNorm(1, 3), nn.Softmax(1)], ids=str)
def test_what_has_no_known_constant_is_refused_by_name(bad: nn.Module) -> None:
    tiny = _built("bad", nn.Sequential(nn.Conv2d(2, 3, 1), bad, nn.Flatten(), nn.Linear(12, 2)), (2, 2, 2), 2, ())
    for name in ("lipschitz_l2", "lipschitz_linf", "certified_radius"):
        table = table_of(tiny.problem(), name)
        assert math.isnan(table[table.names[0]])
        assert "(1)" in table.reason(table.names[0])


def test_inputs_within_the_certified_radius_keep_their_class() -> None:
    tiny = labelled_by_itself(mlp())
    radius = fs.measure(tiny.problem(), "certified_radius")["certified_radius"]
    assert radius > 0
    margins = fs.measure(tiny.problem(), "functional_margin").samples("functional_margin")
    directions = torch.randn(500, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    directions /= directions.norm(dim=-1, keepdim=True)
    moved = tiny.model(tiny.x + 0.999 * radius * directions).argmax(-1)
    assert bool((moved == tiny.y).all())
    assert float(margins.min()) == pytest.approx(radius * math.sqrt(2) * value_of(tiny.problem(), "lipschitz_l2"))


def test_products_over_many_layers_neither_overflow_nor_vanish() -> None:
    for size in (1e20, 1e-20):
        modules = list(itertools.chain.from_iterable((nn.Linear(3, 3, bias=False), nn.ReLU()) for _ in range(34)))
        model = nn.Sequential(*modules[:-1]).double()
        x = torch.eye(3, dtype=torch.float64)
        ctx = fs.Context(fs.Problem(model, train=(x, torch.tensor([0, 1, 2]))))
        ctx = ctx.at({name: size * torch.eye(3, dtype=torch.float64) for name in ctx.params})
        for name in ("spectral_norm", "lipschitz_l2", "lipschitz_linf"):
            plain = table_of(ctx.problem, name, ctx)
            assert plain[plain.names[0]] == (math.inf if size > 1 else 0.0)
            assert "beyond the range" in plain.reason(plain.names[0])
            assert value_of(ctx.problem, name, ctx, log=True) == pytest.approx(34 * math.log(size), rel=1e-12)
        assert table_of(ctx.problem, "spectral_norm", ctx).layer("spectral_norm")["0"] == pytest.approx(size)


def test_logarithms_become_numbers() -> None:
    assert value_from_logarithm(0.0).value == 1.0
    assert value_from_logarithm(-math.inf).value == 0.0
    assert value_from_logarithm(-math.inf).reason == ""
    assert value_from_logarithm(3.0, as_log=True).value == 3.0
    assert value_from_logarithm(800.0).value == math.inf
    assert value_from_logarithm(-800.0).value == 0.0


def test_zero_layers_and_networks_without_layers() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.Flatten(), nn.Linear(576, 2)).double()
    nn.init.zeros_(model[0].weight)
    x = torch.randn(3, 4, 12, 12, dtype=torch.float64)
    table = fs.measure(fs.Problem(model, train=(x, torch.tensor([0, 1, 0]))), ["spectral_norm", "l2_norm"])
    assert table["spectral_norm"] == table["l2_norm"] == 0.0

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    problem = fs.Problem(Scaled(), train=(torch.eye(2), torch.tensor([0, 1])))
    for name in ("spectral_norm", "spectral_norm_over_margin", "vc_dimension"):
        table = table_of(problem, name)
        assert "no layer" in table.reason(table.names[0])
    assert values_of(problem, "l1_path_norm", "lipschitz_l2") == {"l1_path_norm": 2.0, "lipschitz_l2": 1.0}


def test_layers_are_logarithms_too_where_a_matrix_is_in_no_layer() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2, bias=False)
            self.table = nn.Parameter(torch.ones(2, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + torch.cdist(x, self.table)

    problem = fs.Problem(Beside(), train=(torch.eye(3), torch.tensor([0, 1, 0])))
    plain = fs.measure(problem, "l2_norm")
    logs = fs.measure(problem, "l2_norm", options={"l2_norm": {"log": True}})
    assert "table" in plain.reason("l2_norm")
    assert logs.layer("l2_norm")["layer"] == pytest.approx(math.log(plain.layer("l2_norm")["layer"]))


def test_vc_dimension_in_both_forms() -> None:
    problem = mlp().problem()
    n = 4 * 6 + 6 + 6 * 5 + 5 + 5 * 3 + 3
    assert value_of(problem, "vc_dimension") == 3 * n
    assert value_of(problem, "vc_dimension", with_log=True) == pytest.approx(3 * n * math.log2(n))


def test_folding_leaves_outputs_and_removes_only_batchnorm() -> None:
    tiny = batchnorm_conv()
    folded = fs.fold_batchnorm(tiny.model, tiny.x)
    assert float((folded(tiny.x) - tiny.model(tiny.x)).detach().abs().max()) < 1e-12
    rows = fs.measure(tiny.problem(), "spectral_norm").to_frame()
    assert rows["folded"].all()
    assert fs.measure(tiny.problem(), "spectral_norm")["spectral_norm"] == pytest.approx(
        fs.measure(tiny.with_model(folded).problem(initial=None), "spectral_norm")["spectral_norm"], rel=1e-12
    )
