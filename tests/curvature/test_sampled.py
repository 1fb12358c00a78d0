"""Random columns: without bias, with errors that cover, the same whatever the batches; exact where that is cheaper."""

from __future__ import annotations

import gc
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from networks import BUILDERS, Tiny, _built, lenet_like, mlp
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import flatscope as fs
from flatscope.context import Context, Effort
from flatscope.curvature import memory, output_hessian, sweep
from flatscope.curvature.columns import column_sweep, swept
from flatscope.curvature.random_signs import Signs
from flatscope.curvature.route import find_not_covered
from flatscope.curvature.sweep import sweep_pass
from flatscope.curvature.sweep_result import Curvature, Mean
from flatscope.limits import STANDARD, MemoryShare

NAMES = ["hessian_trace", "layer_trace", "kappa_trace*", "rho*", "relative_flatness"]


def drawn(ctx: Context, draws: int, rows: bool = True) -> Curvature:
    """A pass with some random columns."""
    return sweep_pass(ctx, range(draws), find_not_covered(ctx), rows)


def every_column(ctx: Context) -> Curvature:
    return sweep_pass(ctx, None, find_not_covered(ctx), rows=True)


def many_classes(classes: int, n: int = 40, own: bool = False) -> Tiny:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, classes))
    tiny = _built("many", model, (4,), classes, ("0", "2"), n=n)
    return replace(tiny, loss=indefinite) if own else tiny


def indefinite(outputs: Tensor, targets: Tensor) -> Tensor:
    """Eigenvalues of both signs."""
    return torch.tanh(functional.cross_entropy(outputs, targets, reduction="none")) + 0.1 * outputs.square().sum(1)


def texts(n: int = 9) -> Tiny:
    """Softmax at each of five positions, some of them ignored."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 6))
    tiny = _built("texts", model, (5, 3), 6, ("0", "2"), n=n)
    y = torch.randint(0, 6, (n, 5), generator=torch.Generator().manual_seed(1))
    y[0, 2:] = -100
    return replace(tiny, y=y, loss="next_token", xt=None, yt=None, initial={})


def labels() -> Tiny:
    tiny = mlp()
    y = torch.randint(0, 2, (len(tiny.x), 3), generator=torch.Generator().manual_seed(1)).double()
    return replace(tiny, y=y, loss="bce", xt=None, yt=None, initial={})


KINDS = [*BUILDERS, texts, labels, lambda: many_classes(5, 11, own=True), lambda: many_classes(70, 5, own=True)]


@pytest.mark.parametrize("build", KINDS, ids=lambda build: build().name)
def test_the_sampled_value_meets_the_exact_one_on_every_network(build) -> None:  # type: ignore[no-untyped-def]
    ctx = Context(build().problem())
    exact, sampled = every_column(ctx), drawn(ctx, 64)
    assert exact.means.keys() == sampled.means.keys()
    for key, mean in sampled.means.items():
        distance = (mean.value - exact.means[key].value).abs()
        assert float(exact.means[key].stderr.sum()) == 0.0
        assert bool((distance <= 5 * mean.stderr + 1e-12).all()), key
        assert bool((mean.stderr < 0.5 * exact.means[key].value.abs().max() + 1e-12).all()), key
        # The spread over samples is that of the exact values, without the noise of the draws.
        assert bool(((mean.data_stderr - exact.means[key].data_stderr).abs() <= 4 * mean.stderr + 1e-12).all()), key


@pytest.mark.long
@pytest.mark.parametrize(
    "build", [mlp, lenet_like, texts, lambda: many_classes(5, 11, own=True)], ids=lambda build: build().name
)
def test_standard_errors_cover_for_network_layers_and_units(build) -> None:  # type: ignore[no-untyped-def]
    ctx = Context(build().problem())
    exact = every_column(ctx)
    zs: dict[str, list[float]] = {}
    for seed in range(200):
        ctx.seed = seed
        found = drawn(ctx, 2).joined(sweep_pass(ctx, range(2, 6), exact.not_covered, rows=True))
        for (name, quantity), mean in found.means.items():
            true = exact.means[name, quantity].value.reshape(-1)
            top = int(true.abs().argmax())
            level = "unit" if quantity in ("rho", "rho_rows") else "layer" if name else "network"
            error = float(mean.stderr.reshape(-1)[top])
            if error > 1e-9 * float(true[top].abs()):
                zs.setdefault(level, []).append((float(mean.value.reshape(-1)[top]) - float(true[top])) / error)
    for level, found_zs in zs.items():
        covered = np.mean(np.abs(found_zs) <= 1.96)
        assert 0.88 <= covered <= 0.99, f"{level}: 95 % intervals cover {covered:.1%}"
        assert abs(np.mean(found_zs)) < 0.35, level
    assert zs.keys() == {"network", "layer", "unit"}


def test_a_mean_of_draws_has_the_errors_of_its_two_sources() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(50, generator=generator, dtype=torch.float64) * 3 + 10
    means, errors, spreads = [], [], []
    for _ in range(300):
        together: Mean | None = None
        for draws in (2, 2, 4):
            noise = torch.randn(50, draws, generator=generator, dtype=torch.float64) * (values[:, None].abs() / 2)
            samples, one = values[:, None] + noise, Mean(draws=draws)
            for part in (slice(0, 20), slice(20, 50)):
                one.add(samples[part].sum(1), samples[part].square().sum(1))
            together = one if together is None else together.joined(one)
        assert together is not None
        means.append(float(together.value))
        errors.append(float(together.stderr) ** 2)
        spreads.append(float(together.data_stderr) ** 2)
    assert np.mean(means) == pytest.approx(float(values.mean()), rel=5e-3)
    assert np.mean(errors) == pytest.approx(np.var(means), rel=0.25)
    assert np.mean(spreads) == pytest.approx(float(values.var()) / 50, rel=0.1)


def test_signs_belong_to_sample_and_draw() -> None:
    signs = Signs(3, "test")
    every = signs.draw(torch.arange(50), range(6), 130, torch.float64)
    assert every.shape == (6, 50, 130)
    assert every.abs().eq(1).all()
    part = signs.draw(torch.tensor([7, 30]), range(2, 5), 130, torch.float64)
    assert torch.equal(part, every[2:5][:, [7, 30]])
    assert torch.equal(signs.draw(torch.arange(50), range(6), 70, torch.float64), every[:, :, :70])
    flat = signs.draw(torch.arange(400), range(8), 64, torch.float64).reshape(-1, 64)  # (3200, 64)
    assert float(flat.mean().abs()) < 4 / flat.numel() ** 0.5
    correlations = (flat.T @ flat / len(flat)).fill_diagonal_(0)
    assert float(correlations.abs().max()) < 5 / len(flat) ** 0.5
    across = flat[1:] * flat[:-1]
    assert float(across.mean().abs()) < 4 / across.numel() ** 0.5
    for other in (Signs(4, "test"), Signs(3, "other")):
        agreement = float((other.draw(torch.arange(50), range(6), 130, torch.float64) * every).mean().abs())
        assert agreement < 4 / every.numel() ** 0.5


def test_batches_do_not_change_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = many_classes(40).problem()
    expected = drawn(Context(problem), 6)
    monkeypatch.setitem(vars(STANDARD), "sweep_memory", MemoryShare(1.0, 0.5, 1))
    monkeypatch.setitem(vars(STANDARD), "most_columns_together", 2)
    found = drawn(Context(problem), 6)
    for key, mean in expected.means.items():
        torch.testing.assert_close(found.means[key].value, mean.value, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(found.means[key].stderr, mean.stderr, rtol=1e-9, atol=1e-15)


def test_one_rule_for_exact_and_sampled() -> None:
    few, many = many_classes(17, n=200).problem(), many_classes(300, n=200).problem()
    assert Context(few).cached(column_sweep).draws == 0, "sixteen columns are always taken all"
    sampled = Context(many, effort=Effort(precision=0.05)).cached(column_sweep)
    assert 0 < sampled.draws < 150
    assert max(sampled.relative_errors(0.05)) <= 0.05
    exact = Context(many).cached(column_sweep, precision=0.0)
    assert exact.draws == 0
    assert Context(many, effort=Effort(precision=1e-4)).cached(column_sweep).draws == 0, "so many draws cost more"
    for key, mean in sampled.means.items():
        assert bool(((mean.value - exact.means[key].value).abs() <= 5 * mean.stderr + 1e-12).all()), key


def test_rows_say_that_they_are_sampled() -> None:
    problem = many_classes(300, n=200).problem()
    frame = fs.measure(problem, NAMES, precision=0.05).to_frame()
    assert not frame["exact"].any()
    assert (frame["stderr"] > 0).all()
    assert frame["reason"].str.fullmatch(r"sampled, \d+ draws").all()
    units = frame[frame["measure"] == "rho_unit"]
    assert units["stderr"].nunique() == len(units), "every unit has its own error"
    rest = frame[~frame["measure"].isin(["rho_unit"])]
    assert (rest["stderr"] <= 0.05 * rest["value"]).all()
    exact = fs.measure(problem, NAMES, precision=0).to_frame()
    assert exact["exact"].all()
    assert (exact["stderr"] == 0).all()
    assert ((frame["value"] - exact["value"]).abs() <= 5 * frame["stderr"]).all()


def test_a_time_limit_ends_the_draws() -> None:
    problem = many_classes(300, n=200).problem()
    late = Context(problem, effort=Effort(precision=0.03, deadline=0.0)).cached(column_sweep)
    assert late.draws == STANDARD.first_columns
    assert "time limit" in late.missed


class Positions(nn.Module):
    """Dense layers on a few positions of every sample, each wider than there are positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in ((4, 16), (16, 32), (32, 16), (16, 3)))

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(len(x), 3, 4)
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        out: Tensor = self.layers[-1](x.mean(1))
        return out


def test_the_plan_counts_all_that_columns_bring_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = Context(_built("positions", Positions(), (12,), 3, ("layers.0",), n=10, chain=False).problem())
    bytes_back: list[int] = []
    backward = sweep.stacked_backward

    def noted(*given: list[Tensor]) -> list[Tensor | None]:
        found = backward(*given)
        bytes_back.append(sum(part.numel() * part.element_size() for part in found if part is not None))
        return found

    monkeypatch.setattr(sweep, "stacked_backward", noted)
    draws = 8
    drawn(ctx, draws, rows=False)
    assert 0.7 < sum(bytes_back) / (10 * draws * sweep.sweep_shape(ctx).per_column) <= 1


@pytest.mark.long
def test_memory_does_not_grow_with_the_square_of_the_classes() -> None:
    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            for value in result if isinstance(result, tuple | list) else [result]:
                if isinstance(value, Tensor):
                    Largest.most = max(Largest.most, value.untyped_storage().nbytes())
            return result

    classes, n = 2000, 20
    problem = many_classes(classes, n=n).problem()
    for effort in (Effort(memory=2**20), Effort(memory=2**20, precision=0.0)):
        ctx = Context(problem, effort=effort)
        Largest.most = 0
        with Largest():
            if effort.precision:
                drawn(ctx, 4, rows=False)
            else:
                next(_some_blocks(ctx))
        assert Largest.most < 8 * classes * classes / 2, "not even for one sample"


def _some_blocks(ctx: Context):  # type: ignore[no-untyped-def]
    """The first blocks of all columns of the first batch that the plan takes."""
    plan = sweep.sweep_plan(ctx, sweep.sweep_shape(ctx).columns)
    batch = next(iter(ctx.share(size=plan.samples)))
    yield [
        flow.weight
        for flows in sweep.backpropagated(ctx, batch, torch.arange(len(batch[1])), {}, plan.columns)
        for flow in flows
    ]


class Injected:
    """`torch.autograd.grad` that runs out of memory at some calls, as a GPU does."""

    def __init__(self, chance: float, seed: int = 0, most: float = np.inf) -> None:
        self._random, self._chance, self._plain = random.Random(seed), chance, torch.autograd.grad
        self._most, self.failures = most, 0

    def __call__(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        found = self._plain(*args, **kwargs)
        if self.failures < self._most and self._random.random() < self._chance:
            self.failures += 1
            raise torch.OutOfMemoryError("injected")
        return found


@pytest.mark.parametrize("seed", range(5))
def test_running_out_of_memory_changes_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = many_classes(40).problem()
    ctx = Context(problem)
    expected = drawn(ctx, 6)
    monkeypatch.setitem(vars(STANDARD), "sweep_memory", MemoryShare(1.0, 0.5, 2**18))  # several batches
    failing = Injected(0.4, seed, most=3)
    monkeypatch.setattr(torch.autograd, "grad", failing)
    found = drawn(ctx, 6)
    assert failing.failures > 0
    for key, mean in expected.means.items():
        torch.testing.assert_close(found.means[key].value, mean.value, rtol=1e-12, atol=1e-15)
        assert found.means[key].n == mean.n


def test_what_cannot_fit_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = many_classes(40).problem()
    ctx = Context(problem)
    expected = drawn(ctx, 2)
    gc.collect()
    before = _live_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "grad", Injected(1.0))
        with pytest.raises(torch.OutOfMemoryError, match="one column of one sample"):
            drawn(ctx, 2)
        with pytest.warns(RuntimeWarning, match="OutOfMemoryError"):
            table = fs.measure(problem, "relative_flatness")
    assert np.isnan(table.to_frame()["value"]).all()
    del table
    gc.collect()
    assert _live_bytes() <= before + 1024
    again = drawn(ctx, 2)
    for key, mean in expected.means.items():
        torch.testing.assert_close(again.means[key].value, mean.value, rtol=1e-12, atol=1e-15)


def _live_bytes() -> int:
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def test_other_errors_are_not_taken_for_missing_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        memory.fitted(broken)


def test_a_plan_halves_samples_and_then_columns() -> None:
    plan, seen = memory.Plan(5, 4), []
    while (plan.samples, plan.columns) != (1, 1):
        plan = plan.smaller()
        seen.append((plan.samples, plan.columns))
    assert seen == [(2, 4), (1, 4), (1, 2), (1, 1)]
    with pytest.raises(torch.OutOfMemoryError):
        plan.smaller()


def test_the_memory_asked_for_decides_how_much_goes_together() -> None:
    problem = many_classes(40).problem()
    sizes = [
        sweep.sweep_plan(Context(problem, effort=Effort(memory=memory_bytes)), 39)
        for memory_bytes in (1, 2**16, 2**19, 2**30)
    ]
    held = [plan.samples * plan.columns for plan in sizes]
    assert held == sorted(held)
    assert (sizes[0].samples, sizes[0].columns) == (1, 1)
    assert (sizes[-1].samples, sizes[-1].columns) == (40, STANDARD.most_columns_together)


@pytest.mark.parametrize(
    "build", [mlp, texts, labels, lambda: many_classes(5, 11, own=True), lambda: many_classes(70, 5, own=True)]
)
def test_forms_are_the_squares_along_all_columns(build) -> None:  # type: ignore[no-untyped-def]
    tiny = build()
    problem, outputs = tiny.problem(), tiny.model(tiny.x).detach()
    root = output_hessian.output_root(problem.loss, outputs, tiny.y)
    columns = root.exact(0, root.count)
    change = torch.randn(outputs.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    squares = (columns.values * change).flatten(2).sum(2).square()  # (k, n)
    expected = (squares if columns.column_signs is None else squares * columns.column_signs).sum(0)
    torch.testing.assert_close(root.forms(change), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("many", [3, 100])
def test_columns_of_a_loss_of_many_outputs_multiply_to_its_hessian(many: int) -> None:
    outputs = torch.randn(4, many, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = torch.zeros(4, dtype=torch.long)
    loss = fs.Problem(nn.Linear(2, many), train=(torch.ones(4, 2), targets), loss=indefinite).loss
    root = output_hessian.output_root(loss, outputs, targets)
    parts = [root.exact(start, start + 7) for start in range(0, root.count, 7)]
    values = torch.cat([part.values for part in parts])
    assert all(part.column_signs is not None for part in parts)
    signs = torch.cat([part.column_signs for part in parts if part.column_signs is not None])
    found = torch.einsum("kni,kn,knj->nij", values, signs, values)
    for i in range(4):
        expected = torch.autograd.functional.hessian(lambda z, i=i: loss(z[None], targets[i : i + 1])[0], outputs[i])
        torch.testing.assert_close((found[i] + found[i].T) / 2, expected, rtol=1e-9, atol=1e-12)


def long_texts() -> Tiny:
    """A trace is the sum over thirty positions, of which a unit's share of one is not."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 40))
    tiny = _built("long texts", model, (30, 3), 40, ("0", "2"), n=8)
    y = torch.randint(0, 40, (8, 30), generator=torch.Generator().manual_seed(1))
    return replace(tiny, y=y, loss="next_token", xt=None, yt=None, initial={})


def test_draws_end_by_traces_where_nothing_else_is_asked_for() -> None:
    problem, effort = long_texts().problem(), Effort(precision=0.1)
    alone, together = Context(problem, effort=effort), Context(problem, effort=effort)
    traces = fs.measure(problem, "layer_trace", context=alone)
    fs.measure(problem, ["layer_trace", "rho_unit"], context=together)
    assert 2 * alone.passes["backward"] < together.passes["backward"]
    few, many = alone.cached(column_sweep, quantities=("trace",)), together.cached(column_sweep)
    assert 0 < 2 * few.draws < many.draws, "the units ask for more"
    exact = fs.measure(problem, "layer_trace", precision=0).layer("layer_trace")
    for (_, row), value in zip(traces.to_frame().iterrows(), exact.values(), strict=True):
        assert row["stderr"] <= effort.precision * row["value"]
        assert row["value"] == pytest.approx(value, abs=4 * row["stderr"])


def test_a_sweep_that_ended_by_traces_is_not_taken_for_one_that_did_not() -> None:
    problem, effort = many_classes(200, 24).problem(), Effort(precision=0.1)
    ctx = Context(problem, effort=effort)
    fs.measure(problem, "layer_trace", context=ctx)
    units = fs.measure(problem, "rho_unit", context=ctx)
    alone = fs.measure(problem, "rho_unit", context=Context(problem, effort=effort))
    assert units.to_frame()["value"].tolist() == alone.to_frame()["value"].tolist()
    again, both = fs.measure(problem, "layer_trace", context=ctx), fs.measure(problem, "layer_trace", context=ctx)
    assert again.layer("layer_trace") == both.layer("layer_trace")
    ctx.effort = replace(effort, quantities=("trace",))
    assert swept(ctx) is ctx.cached(column_sweep), "the longer one serves both"
