"""Conditions C1 to C3 against hand cases, brute force and random networks."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from networks import Tiny, lenet_like, mlp, residual
from torch import Tensor, nn

import flatscope as fs
from flatscope.measures.interactions import (
    all_triples,
    interaction_ratios,
    largest_slope_of_distribution,
    product_norms,
    relu_chain,
)
from flatscope_papers.theory.sharpness_lemmas import switching_curve


def network(*widths: int, n: int = 3, bias: bool = False, seed: int = 0) -> Tiny:
    """A ReLU chain with Gaussian weights of He's size."""
    generator = torch.Generator().manual_seed(seed)
    modules: list[nn.Module] = []
    for below, above in pairwise(widths):
        layer = nn.Linear(below, above, bias=bias)
        layer.weight.data = torch.randn(above, below, generator=generator) * math.sqrt(2 / below)
        modules += [layer, nn.ReLU()]
    x = torch.randn(n, widths[0], generator=generator, dtype=torch.float64)
    y = torch.arange(n) % widths[-1]
    names = tuple(str(2 * i) for i in range(len(widths) - 1))
    return Tiny("chain", nn.Sequential(*modules[:-1]).double(), x, y, names)


def value(tiny: Tiny, name: str, **options: object) -> float:
    return fs.measure(tiny.problem(), name, options={name: options})[name]


def test_two_matrices_by_hand() -> None:
    """W_1 = diag(3, 4) with both units on, W_2 = (1, 1), x = (1, 1)."""
    tiny = network(2, 2, 2, n=1)
    first, second = tiny.model[0], tiny.model[2]
    first.weight.data = torch.diag(torch.tensor([3.0, 4.0])).double()
    second.weight.data = torch.tensor([[1.0, 1.0], [0.0, 0.0]]).double()
    tiny.x.fill_(1.0)
    ctx = fs.Context(tiny.problem())
    found = dict(zip(all_triples(2), interaction_ratios(ctx, samples=1)[0].tolist(), strict=True))
    root = math.sqrt(2)
    assert found == pytest.approx(
        {
            (0, 0, 1): root * 5 / (5 * root),  # √h_0 ‖W_1x‖ / (‖W_1‖ ‖x‖)
            (0, 0, 2): root * 7 / (5 * root),  # W_2W_1 = (3, 4)
            (0, 1, 2): root * 7 / (root * 5),  # √h_1 ‖f‖ / (‖W_2‖ ‖W_1x‖)
            (1, 1, 2): root * 5 / (root * 5),
        }
    )


@pytest.mark.parametrize(("depth", "count"), [(1, 1), (2, 4), (11, 286)])
def test_number_of_triples(depth: int, count: int) -> None:
    assert len(all_triples(depth)) == count == math.comb(depth + 2, 3)


def test_products_without_the_units_that_are_off_equal_full_ones() -> None:
    tiny = network(6, 9, 8, 7, 4, bias=True, seed=2)
    chain = relu_chain(fs.Context(tiny.problem()), samples=3)
    for sample in range(3):
        m = [chain.inputs[sample][:, None]]
        m += [chain.pattern(i + 1, sample).double()[:, None] * w for i, w in enumerate(chain.weights)]
        for (a, b), norm in product_norms(chain, sample):
            whole = m[a]
            for factor in m[a + 1 : b + 1]:
                whole = factor @ whole
            assert norm == pytest.approx(float(whole.norm()), rel=1e-12)


def test_ratio_ignores_the_scale_of_inputs_and_layers_but_not_of_units() -> None:
    tiny = network(6, 9, 8, 4, seed=1)
    base = value(tiny, "condition_c1_mu")
    assert value(Tiny("scaled", tiny.model, 7 * tiny.x, tiny.y, tiny.layers), "condition_c1_mu") == pytest.approx(base)
    layers, units = (tiny.with_model(fs.rescale(tiny.model, tiny.x, by=by, seed=1)) for by in ("layer", "unit"))
    assert value(layers, "condition_c1_mu") == pytest.approx(base, rel=1e-10)
    assert value(units, "condition_c1_mu") != pytest.approx(base, rel=1e-2)


def test_wide_random_networks_are_well_conditioned() -> None:
    ctx = fs.Context(network(250, *[300] * 4, 200).problem())
    inverse = 1 / interaction_ratios(ctx, samples=3)
    assert float(inverse.min()) > 0.7
    assert float(inverse.max()) < 1.5


def test_inner_and_edge_triples_make_up_all() -> None:
    tiny = network(6, 9, 8, 7, 4)
    inner, edge = (value(tiny, "condition_c1_mu", triples=t) for t in ("inner", "edge"))
    assert value(tiny, "condition_c1_mu") == min(inner, edge)


def test_steepest_slope_is_at_a_jump_and_above_any_grid() -> None:
    sizes = torch.randn(4, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64).abs()
    for floor in (0.0, 0.1):
        found = largest_slope_of_distribution(sizes, floor)
        for row, top in zip(sizes, found.tolist(), strict=True):
            jumps = [float(s) for s in row if s >= floor] + ([floor] if floor else [])
            assert top == pytest.approx(max(float((row <= d).double().mean()) / d for d in jumps), rel=1e-12)
            grid = torch.linspace(max(floor, 1e-3), 3, 2000, dtype=torch.float64)
            assert all(float((row <= d).double().mean() / d) <= top + 1e-12 for d in grid)


def test_without_absolute_values_half_of_the_units_would_count() -> None:
    tiny = network(200, 400, 2)
    chain = relu_chain(fs.Context(tiny.problem()), samples=3)
    assert float((chain.signals[0] <= 1e-9).double().mean()) == pytest.approx(0.5, abs=0.05)
    curve = switching_curve(fs.Context(tiny.problem()), torch.tensor([1e-6, 1.0, 100.0]))["0"]
    assert curve[0] < 0.01
    assert float(curve[1]) == pytest.approx(0.6827, abs=0.05)  # a Gaussian within one standard deviation
    assert curve[2] == 1


def test_floor_and_units_of_c2() -> None:
    tiny = network(20, 30, 2)
    louder = Tiny("scaled", tiny.model, 10 * tiny.x, tiny.y, tiny.layers)
    assert value(tiny, "condition_c2", floor=0.0) >= value(tiny, "condition_c2")
    assert value(louder, "condition_c2") == pytest.approx(value(tiny, "condition_c2"))
    raw = [value(t, "condition_c2", units="raw") for t in (tiny, louder)]
    assert raw[0] == pytest.approx(10 * raw[1])


def test_both_readings_of_c3() -> None:
    tiny = network(6, 9, 8, 4)
    ctx = fs.Context(tiny.problem())
    table = fs.measure(tiny.problem(), "condition_c3")
    chain = relu_chain(ctx, samples=3)
    for level, (name, constant) in enumerate(table.layer("condition_c3").items(), start=1):
        weight = chain.weights[level - 1]
        for sample in range(3):
            on: Tensor = chain.pattern(level, sample).double()[:, None] * weight
            assert float(weight.norm()) <= constant * float(on.norm()) * (1 + 1e-12), name
    rows = chain.weights[1].norm(dim=1)
    figure = fs.measure(tiny.problem(), "condition_c3", options={"condition_c3": {"reading": "figure"}})
    assert figure.layer("condition_c3")["2"] == pytest.approx(float(rows.max() / rows.mean()))


def test_dead_products_are_counted_and_left_out() -> None:
    tiny = network(4, 5, 3, n=2)
    signs = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0])[:, None]
    tiny.model[0].weight.data = signs * tiny.model[0].weight.data.abs()
    tiny.model[2].weight.data[:, :3] = 0.0  # nothing reads the units that the second sample turns on
    tiny.x[0], tiny.x[1] = -tiny.x[0].abs(), tiny.x[1].abs()
    row = fs.measure(tiny.problem(), "condition_c1_mu").to_frame().iloc[0]
    assert row["value"] > 0
    assert "2 of 8 products are zero" in row["reason"]


def test_layers_that_are_off_are_counted_and_left_out() -> None:
    tiny = network(4, 5, 3, n=2)
    tiny.model[0].weight.data.abs_()
    tiny.x[0], tiny.x[1] = -tiny.x[0].abs(), tiny.x[1].abs()
    frame = fs.measure(tiny.problem(), "condition_c3").to_frame()
    assert frame["value"].notna().all()
    assert frame["reason"].iloc[0].startswith("1 times a sample has every unit of a layer off")


@pytest.mark.parametrize("build", [lenet_like, residual])
def test_other_networks_are_refused_with_the_reason(build) -> None:  # type: ignore[no-untyped-def]
    frame = fs.measure(build().problem(), ["condition_c*"]).to_frame()
    assert frame["value"].isna().all()
    assert all("needs a chain of dense layers" in reason for reason in frame["reason"])


def test_a_leaky_relu_is_refused() -> None:
    tiny = mlp()
    model = nn.Sequential(tiny.model[0], nn.LeakyReLU(0.2), tiny.model[2], nn.ReLU(), tiny.model[4])
    [reason] = fs.measure(tiny.with_model(model).problem(), "condition_c1_mu").to_frame()["reason"]
    assert "other operations" in reason


def test_samples_at_random_are_called_an_estimate() -> None:
    tiny = network(6, 9, 4, n=20)
    frame = fs.measure(tiny.problem(), "condition_c1_mu", options={"condition_c1_mu": {"samples": 5}}).to_frame()
    assert not frame["exact"].iloc[0]
    assert frame["value"].iloc[0] >= value(tiny, "condition_c1_mu")
