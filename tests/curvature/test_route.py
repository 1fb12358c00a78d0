"""Every parameter goes by the way that is cheapest for what is asked, and by the exact one where that costs no more."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pandas as pd
import pytest
import torch
from networks import Tiny, attending, attention, binary, smooth
from references import TWINS, Dense
from test_estimators import WrittenOut
from test_sampled import many_classes
from torch import Tensor, nn

import flatscope as fs
from flatscope.context import Context, Effort
from flatscope.curvature import estimators, trace_by_products
from flatscope.curvature.columns import column_sweep
from flatscope.curvature.estimators import TRACE, Asked, HutchinsonDraws
from flatscope.curvature.layer_directions import LayerDirections
from flatscope.curvature.operators import Hessian, sample_groups
from flatscope.curvature.random_signs import Signs
from flatscope.curvature.route import (
    LESS_NOISE,
    TRACE_ALONE,
    Route,
    curved_passes,
    find_not_covered,
    noisier_by_columns,
    product_passes,
    reached_at_curved_operations,
    route_of,
    trace_route,
)
from flatscope.curvature.sweep import sweep_pass
from flatscope.curvature.sweep_result import Curvature
from flatscope.curvature.trace_by_products import whole_trace
from flatscope.isolation import own_settings
from flatscope.limits import STANDARD, Limits
from flatscope.measures.layer_values import trace_of_everything


@pytest.fixture
def _however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("few_unreached", "few_directions", "dense_weights"):
        monkeypatch.setitem(vars(STANDARD), name, 0)
    monkeypatch.setattr(estimators, "cheaper_one_by_one", lambda *_: False)


def by_columns(ctx: Context, draws: int) -> Curvature:
    places, outside = ctx.cached(reached_at_curved_operations)
    return sweep_pass(ctx, range(draws), outside, places=places)


@pytest.mark.usefixtures("_however_small")
@pytest.mark.parametrize("build", [attending, attention])
def test_the_less_noisy_of_both_is_chosen(build: type[Tiny]) -> None:
    """Against the spread of many draws of either kind; layers for which both are much alike may go either way."""
    ctx = Context(build().problem(), effort=Effort(precision=1e-3))
    found, moved = by_columns(ctx, 256), noisier_by_columns(ctx, by_columns(ctx, 8), 1e-3)
    seen = 0
    for layer in ctx.network:
        mean = found.of(layer.weight, "trace")
        if mean is None:
            continue
        directions = LayerDirections(ctx, "trace", [layer.weight])
        products = HutchinsonDraws(directions, Signs(1, "t"), Asked(0.0, 256), STANDARD)
        products.draw_until(256)
        share = (float(products.spread.stderrs[layer.weight, "trace"]) / float(mean.stderr)) ** 2
        if not STANDARD.draw_cost / 4 < share < STANDARD.draw_cost * 4:
            assert (layer.weight in moved) == (share < STANDARD.draw_cost), f"{layer.name}: {share:.2g}"
            seen += 1
    assert seen >= 1


@pytest.mark.usefixtures("_however_small")
def test_precise_layers_stay_with_the_columns() -> None:
    ctx = Context(attending().problem())
    assert noisier_by_columns(ctx, by_columns(ctx, 2), 100.0) == {}


@pytest.mark.usefixtures("_however_small")
@pytest.mark.parametrize("build", [attending, attention])
def test_values_are_right_and_say_how(build: type[Tiny], monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, names = build(), ["hessian_trace", "layer_trace", "rho_sum", "relative_flatness"]
    monkeypatch.setitem(vars(STANDARD), "draw_cost", 1e9)  # all that is slow by columns
    table = fs.measure(tiny.problem(), names, precision=0.05)
    assert table.to_frame()["reason"].str.contains(LESS_NOISE).any()
    with own_settings():  # attention's fused kernels cannot be differentiated twice
        dense = Dense(tiny)
        expected = {name: TWINS[name](dense) for name in ("hessian_trace", "layer_trace", "relative_flatness")}
    assert abs(table["hessian_trace"] - expected.pop("hessian_trace")) < 4.5 * table.stderr("hessian_trace")
    frame = table.to_frame().set_index(["measure", "layer"])
    for name, values in expected.items():
        for layer, value in values.items():
            row = frame.loc[name, layer]
            assert abs(row["value"] - float(value)) <= 4.5 * row["stderr"] + 1e-9, f"{name} of {layer}"
    together = ["layer_trace", "relative_flatness"]
    again = fs.measure(tiny.problem(), together, precision=0.05)
    assert again.layer("layer_trace") == table.layer("layer_trace"), "whatever else is measured, beside traces alone"
    for _, row in fs.measure(tiny.problem(), "layer_trace", precision=0.05).to_frame().iterrows():
        assert abs(row["value"] - float(expected["layer_trace"][row["layer"]])) <= 4.5 * row["stderr"] + 1e-9


class SmallTransformer(nn.Module):
    """1,267 parameters where it is 8 wide; the head and the last dense layer stand before nothing curved."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, width), nn.Linear(width, 3)
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, 2 * width, **options) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x.mean(1))
        return out


def small_transformer(samples: int = 30, width: int = 8) -> fs.Problem:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = SmallTransformer(width).double()
        x = torch.randn(samples, 5, 4, dtype=torch.float64)
    return fs.Problem(model, train=(x, torch.arange(samples) % 3))


def test_a_small_smooth_network_is_exact_at_the_usual_precision() -> None:
    """Sampled, two of its layers took as long and had an error larger than their value."""
    problem = small_transformer()
    names = ["layer_trace", "hessian_trace", "relative_flatness", "rho_sum", "kappa_trace_sum"]
    table = fs.measure(problem, names)
    assert table.to_frame()["exact"].all()
    ctx = Context(problem)
    with own_settings():
        for layer, value in table.layer("layer_trace").items():
            weight = next(each.weight for each in ctx.network if each.name == layer)
            block = Hessian(ctx, [weight]) @ torch.eye(ctx.params[weight].numel(), dtype=torch.float64)
            assert value == pytest.approx(float(block.trace()), rel=1e-9, abs=1e-12), layer
        whole = Hessian(ctx) @ torch.eye(1267, dtype=torch.float64)
    assert table["hessian_trace"] == pytest.approx(float(whole.trace()), rel=1e-9)
    alone = fs.measure(problem, names[2:])  # without the blocks that the traces leave behind
    for name in names[2:]:
        pd.testing.assert_frame_equal(values(alone, name), values(table, name), rtol=1e-9)
    assert alone.to_frame()["exact"].all()


def values(table: fs.Table, name: str) -> pd.DataFrame:
    frame = table.to_frame()
    return frame[frame["measure"] == name][["layer", "value"]].reset_index(drop=True)


def kinds(route: Route) -> Counter[str]:
    return Counter(way.kind for way in route.ways.values())


def test_the_way_of_every_parameter() -> None:
    linear, smooth = Context(binary().problem()), Context(small_transformer())
    assert set(kinds(route_of(linear))) == {"exact columns"}
    assert kinds(route_of(smooth)) == {"dense block": 24, "exact columns": 4}
    assert set(kinds(route_of(smooth, 0.0))) == {"dense block", "exact columns"}
    found = kinds(route_of(smooth, curvature="gauss_newton"))
    assert found == {"exact columns": 20, "dense block": 8}, "scales and shifts of LayerNorm"
    many = Context(many_classes(300, n=20).problem())
    assert set(kinds(route_of(many))) == {"sampled columns"}
    assert set(kinds(route_of(many, 0.0))) == {"exact columns"}
    for name, way in route_of(smooth).ways.items():
        assert (name in route_of(smooth).not_covered) == (way.kind == "dense block")
        assert way.exact
        assert str(way).startswith(f"{way.kind}, about ")
        assert (": " in str(way)) == bool(way.reason)


@pytest.mark.parametrize(("width", "exact"), [(8, True), (32, False)])
def test_the_cheaper_way_is_taken(width: int, exact: bool) -> None:
    """Of a wider network products are dear, and columns at curved operations are taken."""
    ctx = Context(small_transformer(width=width), effort=Effort(limits=Limits(dense_weights=100_000)))
    route = route_of(ctx)
    directions = sum(ctx.params[name].numel() for name in find_not_covered(ctx))
    assert (product_passes(ctx, directions) <= curved_passes(ctx, 0.02, directions)) is exact
    layers = {layer.weight for layer in ctx.network}
    assert all(route.ways[name].exact for name in layers) is exact
    assert ("columns at curved operations" in kinds(route)) is not exact


def test_asked_for_little_precision_less_is_multiplied_out() -> None:
    rough, fine = (route_of(Context(small_transformer(width=12)), precision) for precision in (0.5, 0.005))
    assert "columns at curved operations" in kinds(rough)
    assert set(kinds(fine)) == {"dense block", "exact columns"}


def test_predicted_passes_are_those_that_are_made() -> None:
    for ctx in (Context(binary().problem()), Context(many_classes(300, n=20).problem(), effort=Effort(precision=0.0))):
        route, before = route_of(ctx), Counter(ctx.passes)
        ctx.cached(column_sweep)
        made = ctx.passes["forward"] - before["forward"] + 2.2 * (ctx.passes["backward"] - before["backward"])
        assert route.passes == pytest.approx(made)


@pytest.mark.parametrize("names", ["layer_trace", ["hessian_trace"]])
def test_what_explain_predicts_is_what_a_table_costs(names: str | list[str]) -> None:
    """By every exact way, on a network that is piecewise linear and on one that is not."""
    for problem in (binary().problem(), small_transformer()):
        frame = fs.explain(problem, names).to_frame().groupby("way")["passes"].first()
        ctx = Context(problem)
        fs.measure(problem, names, context=ctx)
        made = Counter(ctx.passes)
        assert made["curvature"] * STANDARD.product_passes == pytest.approx(frame.get("dense block", 0.0))
        assert 1 + STANDARD.column_passes * made["backward"] == pytest.approx(frame["exact columns"])


def test_explain_shows_the_way_of_what_is_asked() -> None:
    rough = small_transformer(width=12)
    alone, layers = (fs.explain(rough, name, 0.5).to_frame()["way"] for name in ("hessian_trace", "layer_trace"))
    assert set(alone) == {"products"}
    assert "columns at curved operations" in set(layers)


def test_fewer_products_than_directions_are_respected() -> None:
    frame = fs.measure(small_transformer(), "hessian_trace", options={"hessian_trace": {"most_products": 40}})
    (row,) = frame.to_frame().to_dict("records")
    assert not row["exact"]
    assert row["passes"] < 60
    assert "not reached within 40 products" in row["reason"]


def test_limits_of_an_effort_decide() -> None:
    effort = Effort(limits=Limits(few_unreached=0, dense_weights=0, few_directions=0, most_products=0))
    ctx = Context(small_transformer(), effort=effort)
    assert set(kinds(route_of(ctx))) == {"columns at curved operations", "products"}
    ctx = Context(many_classes(300, n=20).problem(), effort=Effort(limits=Limits(few_columns=299)))
    assert set(kinds(route_of(ctx))) == {"exact columns"}


# The trace of the whole network alone

SAMPLED = Limits(few_unreached=0, dense_weights=0, few_directions=0, cheap_products=0, least_group=4)


def test_a_trace_alone_goes_by_products_where_a_sweep_costs_more() -> None:
    """And by the layers' ways where these cost less, are exact, or are taken for other values already."""
    ctx = Context(small_transformer(), effort=Effort(limits=SAMPLED))
    alone, layers = trace_route(ctx), route_of(ctx)
    assert "columns at curved operations" in kinds(layers)
    assert kinds(alone) == {"products": len(layers.ways)}
    assert alone.passes < layers.passes
    cheap = Limits(column_passes=0.0, activation_cost=0.0, most_products=0, few_unreached=0, few_directions=0)
    ctx = Context(smooth().problem(), effort=Effort(limits=replace(cheap, cheap_products=0, dense_weights=0)))
    assert set(kinds(route_of(ctx))) == {"columns at curved operations"}
    assert trace_route(ctx) is route_of(ctx)
    for exact in (Context(small_transformer()), Context(binary().problem()), Context(many_classes(300).problem())):
        assert trace_route(exact) is route_of(exact)


def test_the_row_of_a_trace_alone_says_how() -> None:
    ctx = Context(small_transformer(samples=64), effort=Effort(limits=SAMPLED, precision=0.3))
    (row,) = fs.measure(ctx.problem, "hessian_trace", context=ctx).to_frame().to_dict("records")
    assert TRACE_ALONE in row["reason"]
    assert f"{ctx.passes['curvature']:.0f} products" in row["reason"]
    together = Context(ctx.problem, effort=ctx.effort)
    table = fs.measure(ctx.problem, ["hessian_trace", "layer_trace"], context=together)
    assert TRACE_ALONE not in table.reason("hessian_trace")
    again = fs.measure(ctx.problem, "hessian_trace", context=together)
    assert again["hessian_trace"] == table["hessian_trace"], "what the layers have paid for is read"


def test_a_trace_alone_that_products_miss_goes_by_the_layers() -> None:
    """Three products may be taken for what the columns at curved operations cost."""
    limits = replace(SAMPLED, most_products=0, least_group=1)
    effort = Effort(limits=limits, precision=0.05, trace_alone=True)
    passes = route_of(Context(smooth().problem(), effort=effort)).passes
    ctx = Context(smooth().problem(), effort=replace(effort, limits=replace(limits, product_passes=passes / 2.5)))
    assert set(kinds(trace_route(ctx))) == {"products"}
    value = trace_of_everything(ctx, None, 1024)
    assert ctx.passes["curvature"] >= 3
    assert TRACE_ALONE not in value.reason
    true = TWINS["hessian_trace"](Dense(smooth()))
    assert abs(float(value.value) - true) <= 4 * float(value.stderr)


@pytest.mark.long
@pytest.mark.parametrize("least_group", [5, 30])
def test_traces_alone_cover_the_dense_one(least_group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = Context(small_transformer(), effort=Effort(limits=replace(SAMPLED, least_group=least_group)))
    with own_settings():
        matrix = WrittenOut(Hessian(ctx, groups=sample_groups(ctx)))
    monkeypatch.setattr(trace_by_products, "curvature_operator", lambda *_: matrix)
    true, scores = float((matrix @ torch.eye(1267, dtype=torch.float64)).trace()), []
    for seed in range(150):
        found = whole_trace(Context(ctx.problem, seed=seed, effort=ctx.effort), 0.02, 64)
        scores.append((float(found.values[TRACE]) - true) / float(found.stderrs[TRACE]))
    z = torch.tensor(scores)
    assert float((z.abs() <= 1.96).double().mean()) >= 0.9
    assert 0.7 < float(z.square().mean().sqrt()) < 1.3
    assert abs(float(z.mean())) < 0.35


def test_groups_of_samples_are_small_where_samples_are_much_work() -> None:
    """64 groups of one would be allowed; a group has work enough, and more than its weights take once."""
    ctx = Context(small_transformer(samples=64), effort=Effort(limits=Limits(group_work=1.0, least_group=8)))
    assert sample_groups(ctx) == 64 // 2  # 5 positions multiply each weight nearly five times: two samples, at 8
    ctx = Context(small_transformer(samples=64))
    assert sample_groups(ctx) == 2
