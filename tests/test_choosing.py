"""Layers of smooth networks go by random columns or by products, whichever tells more for the same work."""

from __future__ import annotations

import pytest
from networks import Tiny, attending, attention
from references import TWINS, Dense

import flatscope as fs
from flatscope.context import Context, Effort
from flatscope.curvature import choosing, estimators, sweep
from flatscope.curvature.choosing import REASON, better_by_products
from flatscope.curvature.estimators import ProductDraws
from flatscope.curvature.layer_directions import LayerDirections
from flatscope.curvature.signs import Signs
from flatscope.curvature.sums import Curvature
from flatscope.guards import own_settings


@pytest.fixture(autouse=True)
def _however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "FEW_DIRECTIONS", 0)
    monkeypatch.setattr(estimators, "FEW", 0)
    monkeypatch.setattr(estimators, "cheaper_one_by_one", lambda *_: False)


def by_columns(ctx: Context, draws: int) -> Curvature:
    bends, left_out = ctx.sweep(sweep.reached_by_bends)
    return sweep._pass(ctx, range(draws), left_out, bends=bends)


@pytest.mark.parametrize("build", [attending, attention])
def test_the_less_noisy_of_both_is_chosen(build: type[Tiny]) -> None:
    """Against the spread of many draws of either kind; layers for which both are much alike may go either way."""
    ctx = Context(build().problem(), effort=Effort(precision=1e-3))
    found, moved = by_columns(ctx, 256), better_by_products(ctx, by_columns(ctx, 8), 1e-3)
    seen = 0
    for layer in ctx.network:
        mean = found.of(layer.weight, "trace")
        if mean is None:
            continue
        products = ProductDraws(LayerDirections(ctx, "trace", [layer.weight]), Signs(1, "t"), 16, bool)
        products.take(256)
        share = (float(products.spread.stderrs[layer.weight, "trace"]) / float(mean.stderr)) ** 2
        if not choosing.DRAW / 4 < share < choosing.DRAW * 4:
            assert (layer.weight in moved) == (share < choosing.DRAW), f"{layer.name}: {share:.2g}"
            seen += 1
    assert seen >= 1


def test_precise_layers_stay_with_the_columns() -> None:
    ctx = Context(attending().problem())
    assert better_by_products(ctx, by_columns(ctx, 2), 100.0) == {}


@pytest.mark.parametrize("build", [attending, attention])
def test_values_are_right_and_say_how(build: type[Tiny], monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, names = build(), ["hessian_trace", "layer_trace", "rho_sum", "relative_flatness"]
    monkeypatch.setattr(choosing, "DRAW", 1e9)  # all that is slow by columns
    table = fs.measure(tiny.problem(), names, precision=0.05)
    assert table.to_frame()["reason"].str.contains(REASON).any()
    with own_settings():  # attention's fused kernels cannot be differentiated twice
        dense = Dense(tiny)
        expected = {name: TWINS[name](dense) for name in ("hessian_trace", "layer_trace", "relative_flatness")}
    assert abs(table["hessian_trace"] - expected.pop("hessian_trace")) < 4.5 * table.stderr("hessian_trace")
    frame = table.to_frame().set_index(["measure", "layer"])
    for name, values in expected.items():
        for layer, value in values.items():
            row = frame.loc[name, layer]
            assert abs(row["value"] - float(value)) <= 4.5 * row["stderr"] + 1e-9, f"{name} of {layer}"
    again = fs.measure(tiny.problem(), ["layer_trace"], precision=0.05)
    assert again.layer("layer_trace") == table.layer("layer_trace"), "whatever else is measured"
