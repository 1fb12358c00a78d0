"""Plans, budgets, and what is left behind when a measure fails or is interrupted."""

from __future__ import annotations

import gc
import io
import math
import re
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from networks import mlp
from rich.console import Console
from scipy.sparse.linalg import LinearOperator
from torch import Tensor, nn

import flatscope as fs
from flatscope import measuring, planning, progress, registry
from flatscope.context import Context, make_effort
from flatscope.curvature.columns import column_sweep
from flatscope.errors import NotApplicable
from flatscope.limits import STANDARD
from flatscope.measures.psi_flatness import path_coordinates
from flatscope.network import singular_values
from flatscope.planning import estimated_forward_passes, make_schedule
from flatscope.registry import Declaration, Value, declarations, select
from flatscope.training.sweeps.work import tables_of

WORDS: dict[str, Any] = {"symbol": "x", "paper": "flatscope", "equation": "none"}


@pytest.fixture
def _forget() -> Iterator[None]:
    """What a test declares is gone after it."""
    before = dict(registry._REGISTRY)
    yield
    registry._REGISTRY.clear()
    registry._REGISTRY.update(before)


def declare(name: str, function: Any, **words: Any) -> None:
    function.__name__, function.__doc__ = name, "Something."
    registry.measure(**(WORDS | words))(function)


class Clock:
    """A clock that only stands still or is put forward: no test hangs on how busy the machine is."""

    now = 1000.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now

    def __deepcopy__(self, memo: object) -> Clock:
        return self  # copies of a network share it


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "monotonic", found)
    monkeypatch.setattr(time, "perf_counter", found)
    return found


class Slow(nn.Module):
    """A network of which a forward pass takes a while."""

    def __init__(self, clock: Clock, classes: int) -> None:
        super().__init__()
        self.layer, self.seconds, self.clock, self.always = nn.Linear(4, classes), 0.0, clock, False

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 2 or self.always:
            self.clock.now += self.seconds
        found: Tensor = self.layer(x)
        return found


def slow_problem(clock: Clock, seconds: float = 0.02, n: int = 40, classes: int = 3) -> fs.Problem:
    torch.manual_seed(0)
    problem = fs.Problem(Slow(clock, classes), (torch.randn(n, 4), torch.arange(n) % classes))
    problem.model.seconds, problem.model.clock = seconds, clock  # type: ignore[assignment]
    return problem


def test_every_measure_and_bound_has_an_estimate() -> None:
    for kind in ("measure", "bound"):
        for entry in declarations(kind).values():
            assert estimated_forward_passes(entry, 9) >= 0
            assert set(entry.typical or {}) <= {*planning.WEIGHTS, *planning.SHARED, "column", "output", "sample"}
    by_cost = {entry.name: estimated_forward_passes(entry, 9) for entry in declarations().values()}
    assert by_cost["parameter_count"] == 0
    assert by_cost["expected_flatness"] > by_cost["functional_margin"]
    assert by_cost["psi_trace"] > by_cost["hessian_trace"]


def test_a_plan_counts_shared_work_once_and_names_what_is_left_out() -> None:
    ctx = Context(mlp().problem())
    plan = make_schedule(ctx, select(["hessian_trace", "layer_trace"]))
    first, second = plan.entries
    assert plan.units == plan.cost(first, set()) > 1
    assert plan.cost(second, planning.shared_work(first)) == 0
    text = str(measuring.plan_of_measures(ctx))
    assert text.startswith(f"{len(select(None))} measures, about ")
    assert f"{len(declarations()) - len(select(None))} others are not in the core set" in text


def test_a_plan_is_near_the_truth(clock: Clock) -> None:
    """Of a network whose forward pass dominates all: a plan is the count of its passes."""
    problem = slow_problem(clock, 0.03, n=100)  # so many that perturbed networks run one by one
    plan = measuring.plan_of_measures(Context(problem), "expected_flatness")
    assert plan.seconds is not None
    assert plan.seconds == pytest.approx(0.03, rel=0.01)
    begun = time.monotonic()
    fs.measure(problem, "expected_flatness", options={"expected_flatness": {"draws": 64}}, precision=0)
    assert 0.3 < plan.units * plan.seconds / (time.monotonic() - begun) < 3


def test_a_budget_is_kept_and_what_is_not_begun_says_so(clock: Clock) -> None:
    problem = slow_problem(clock, n=100)
    names = ["hessian_min_eigenvalue", "sharpness", "expected_flatness", "functional_margin"]
    options = {"expected_flatness": {"draws": 2000, "sigma": 1e-4}}
    begun = time.monotonic()
    table = fs.measure(problem, ["geometric_margin", *names], options=options, budget=1.5, precision=0)
    assert time.monotonic() - begun < 1.5 + 0.5
    frame = table.to_frame().drop_duplicates("measure").set_index("measure")
    assert list(frame.index) == ["geometric_margin", *names]  # in the order of the call
    assert math.isfinite(frame.loc["functional_margin", "value"])  # the cheap one came first
    assert "of 2,000 draws: the time was up" in frame.loc["expected_flatness", "reason"]
    assert frame.loc["expected_flatness", "stderr"] > 0
    assert frame.loc["geometric_margin", "reason"].startswith("not begun: would take about ")


def test_whether_it_is_a_minimum_is_looked_at_before_what_takes_all_the_time(clock: Clock) -> None:
    names = ["margin", "hessian_trace", "hessian_max_eigenvalue", "expected_flatness"]
    options = {"expected_flatness": {"draws": 2000}}
    table = fs.measure(slow_problem(clock, n=100), names, options=options, budget=1.0, precision=0)
    assert "the time was up" in table.reason("expected_flatness")
    assert table.meta["standing"]["fall"] > 0
    assert table.headline.startswith(("No minimum", "Not trained"))


def test_a_budget_too_short_to_look_for_a_minimum_says_so(clock: Clock) -> None:
    table = fs.measure(slow_problem(clock, n=100), ["margin", "hessian_trace"], budget=0.15)
    assert "fall" not in table.meta.get("standing", {}) or table.meta["standing"]["fall"] is None
    assert any("larger budget" in remark for remark in table.meta["remarks"])
    long = fs.measure(slow_problem(clock, n=100), ["margin", "hessian_trace"])
    assert not any("larger budget" in remark for remark in long.meta.get("remarks", ()))


def test_a_sweep_by_draws_begins_where_all_columns_would_take_too_long(clock: Clock) -> None:
    """And what was not begun has paid for nothing: the next measure of the same sweep is not begun either."""
    names = ["layer_trace", "kappa_trace"]
    for precision, begins in ((0.02, True), (0.0, False)):
        problem = slow_problem(clock, n=400, classes=200)
        frame = fs.measure(problem, names, budget=1.0, precision=precision).to_frame()
        assert frame["value"].notna().all() == begins
        assert frame["reason"].str.startswith("not begun").all() != begins


@pytest.mark.usefixtures("_forget")
def test_what_cannot_stop_is_not_begun_without_time(clock: Clock) -> None:
    declare("endless_one", lambda ctx: pytest.fail("was begun"), typical={"forward": 10_000})
    table = fs.measure(slow_problem(clock), ["endless_one", "parameter_count"], budget="2s")
    reason = table.reason("endless_one")
    assert reason.startswith("not begun: would take about ")
    assert reason.endswith(("min", "s", "h"))
    assert math.isnan(table.to_frame().iloc[0]["value"])
    assert table["parameter_count"] == 15


def test_a_search_ends_in_time_and_says_so(clock: Clock) -> None:
    problem = slow_problem(clock, 0.03)
    table = fs.measure(problem, "epsilon_flatness", budget=2.0, options={"epsilon_flatness": {"steps": 1000}})
    assert "ended early, the time was up" in table.reason("epsilon_flatness")


@pytest.mark.parametrize("kind", ["measure", "bound"])
def test_every_measure_and_bound_keeps_a_budget(clock: Clock, kind: str) -> None:
    """Each alone, of a second: estimates end soon after it, and what has no value by then says so."""
    call = fs.measure if kind == "measure" else fs.bounds
    for entry in select("all", kind):
        if {"test", "initial"} & entry.needs:
            continue
        problem = slow_problem(clock, 0.05, n=12)
        begun = time.monotonic()
        table = call(problem, entry.name, budget=1.0)
        assert time.monotonic() - begun < 1.0 + 2.0, entry.name
        assert all(row["reason"] or math.isfinite(row["value"]) for row in table.to_frame().to_dict("records"))


def test_a_sweep_that_is_not_done_at_the_end_of_the_call_gives_up(clock: Clock) -> None:
    problem = slow_problem(clock, 0.05, n=64)
    ctx = Context(problem, effort=make_effort(budget=1.0, memory=1))
    problem.model.always = True  # sample by sample
    with pytest.raises(NotApplicable, match="time"):
        ctx.cached(column_sweep)
    assert clock.now < 1000 + 1.5


def batches(problem: fs.Problem, size: int) -> fs.Problem:
    problem.batch_size = size
    return problem


def test_a_call_whose_time_is_up_still_gives_its_table(clock: Clock) -> None:
    """Also where what is looked at besides the measures, whether the labels fit, has no time left."""
    problem = batches(slow_problem(clock, 0.1, n=40), 4)
    problem.model.layer.weight.data.zero_()  # type: ignore[union-attr, operator]
    problem.model.layer.bias.data.copy_(torch.tensor([0.0, 1.0, 2.0]))  # type: ignore[union-attr, operator, arg-type]
    for budget in (0.3, 0.8, 1.2, 2.0, 3.0):  # passes take a second
        begun = time.monotonic()
        table = fs.measure(problem, ["gradient_norm", "functional_margin"], budget=budget)
        assert time.monotonic() - begun < 1.5 * budget + 1
        assert {*table.to_frame()["measure"]} == {"gradient_norm", "functional_margin"}


def test_compare_says_in_time_that_a_budget_is_too_short_for_the_losses(clock: Clock) -> None:
    problems = [batches(slow_problem(clock, 0.1, n=40), 4) for _ in range(2)]
    begun = time.monotonic()
    with pytest.raises(fs.InputError, match="time for the losses of all networks on 40 samples"):
        fs.compare(problems, names=["l2_norm"], budget=1.0)
    assert time.monotonic() - begun < 2.5


def test_compare_knows_all_losses_before_it_takes_a_gradient(clock: Clock) -> None:
    problems = [batches(slow_problem(clock, 0.04, n=40), 4) for _ in range(2)]  # 0.4 s a pass
    begun = time.monotonic()
    found = fs.compare(problems, names=["l2_norm"], budget=1.2)
    assert time.monotonic() - begun < 1.5 * 1.2 + 1
    assert all(math.isfinite(stands.loss) and math.isnan(stands.gradient_norm) for stands in found.networks.values())
    assert "whether network 1, network 2 are at a minimum was not looked for." in str(found.headline)
    assert math.isfinite(fs.compare(problems, names=["l2_norm"], budget=40).networks["network 1"].gradient_norm)


def test_compare_says_in_time_that_a_budget_is_too_short_for_the_search_for_copies(clock: Clock) -> None:
    problems = [batches(slow_problem(clock, 0.0, n=40), 4) for _ in range(6)]
    for problem in problems:
        problem.model.always, problem.model.seconds = True, 0.015  # samples with noise come one by one
    begun = time.monotonic()
    with pytest.raises(fs.InputError, match="to see which are one function"):
        fs.compare(problems, names=["l2_norm"], budget=1.0)
    assert time.monotonic() - begun < 2.5


@pytest.mark.usefixtures("_forget")
def test_what_is_taken_over_a_budget_does_not_grow_with_the_networks_compared(clock: Clock) -> None:
    def slow(ctx: Context) -> Value:
        clock.now += 0.2
        return Value(1.0)

    names = ["slow_weights", "more_weights"]
    for name in names:
        declare(name, slow, cost="light")
    problems = [slow_problem(clock, 0.0) for _ in range(20)]
    begun = time.monotonic()
    found = fs.compare(problems, names=names, budget=1.0)
    assert time.monotonic() - begun < 1.5 * 1.0 + 1
    reasons = [found.tables[name].reason("slow_weights") for name in found.names]
    assert reasons[0] == ""
    assert reasons[-1] == "not begun: the time was up"
    assert "Out of time: 2 of 2 measures were not done for all networks" in found.summary()
    assert "Out of time" not in fs.compare(problems[:2], names=names, budget=100.0).summary()


def test_a_pass_for_each_class_is_priced_by_all_classes_and_ends_in_time(clock: Clock) -> None:
    entry = declarations()["local_linear_margin"]
    assert estimated_forward_passes(entry, columns=64, outputs=10_000) > 100 * estimated_forward_passes(
        entry, columns=64
    )
    problem = slow_problem(clock, 0.02, classes=200)
    schedule = make_schedule(Context(problem, effort=make_effort(budget=60)), [entry])
    assert schedule.columns < 199
    assert schedule.units == estimated_forward_passes(entry, columns=199)
    with pytest.raises(NotApplicable, match="time was up"):
        entry.function(Context(problem, effort=make_effort(budget=0.5)))
    assert clock.now < 1000 + 1.5
    half = batches(slow_problem(clock, 0.02, classes=10), 20)  # 20 forward passes of 0.02 s in all
    result = entry.function(Context(half, effort=make_effort(budget=0.3)))
    assert result.reason == "the first 20 of 40 samples: the time was up"
    assert len(result.value) == 20


def test_path_coordinates_are_given_up_between_their_parts(clock: Clock) -> None:
    problem, entry = slow_problem(clock, 0.0), declarations()["psi_balance"]
    for function in (entry.function, path_coordinates):
        ctx = Context(problem, effort=make_effort(budget=5))
        options = {} if function is entry.function else {"rule": "max_product"}
        function(ctx, **options)
        ctx.effort = replace(ctx.effort, end=clock.now - 1)
        with pytest.raises(NotApplicable, match="time was up"):
            function(ctx, **options)


def test_a_search_for_a_norm_is_given_up_between_products(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    side = STANDARD.decomposed_matrix + 10

    def slow_operator(shape: tuple[int, int], matvec: Any, dtype: Any) -> LinearOperator:
        def product(vector: Any) -> Any:
            clock.now += 0.5
            return matvec(vector)

        return LinearOperator(shape, matvec=product, dtype=dtype)

    model = nn.Sequential(nn.Linear(side, side), nn.ReLU(), nn.Linear(side, 3))
    problem = fs.Problem(model, (torch.randn(6, side), torch.arange(6) % 3))
    monkeypatch.setattr(singular_values, "LinearOperator", slow_operator)
    for reshape in (False, True):
        begun = time.monotonic()
        table = fs.measure(problem, ["spectral_norm"], budget=2, options={"spectral_norm": {"reshape": reshape}})
        assert "the time was up" in table.reason("spectral_norm")
        assert time.monotonic() - begun < 1.5 * 2 + 1


@pytest.mark.parametrize("budget", [3.0, 8.0])
@pytest.mark.parametrize("call", ["sensitivity", "forecast"])
def test_what_a_change_costs_is_measured_as_far_as_there_is_time(call: str, budget: float, clock: Clock) -> None:
    problem = batches(slow_problem(clock, 0.1, n=40), 4)
    begun = time.monotonic()
    if call == "sensitivity":
        found = fs.sensitivity(problem, bits=(8, 2), sparsity=(), budget=budget).to_frame()
    else:
        weights = {name: value + 0.1 for name, value in problem.model.state_dict().items()}
        found = fs.forecast(problem, weights, budget=budget).to_frame()
    assert (found["measured"].notna() | (found["reason"] != "")).all()
    assert time.monotonic() - begun < 1.5 * budget + 1


@pytest.mark.usefixtures("_forget")
def test_a_measure_that_refuses_its_input_ends_no_table() -> None:
    def picky(ctx: Context, *, size: int = 3) -> float:
        raise fs.InputError("a larger one", str(size), where="size")

    declare("picky", picky)
    table = fs.measure(mlp().problem(), ["picky", "parameter_count"])
    assert math.isnan(table.to_frame().iloc[0]["value"])
    assert "a larger one" in table.reason("picky")
    assert table["parameter_count"] > 0
    with pytest.raises(fs.InputError, match="picky, size"):  # an option that somebody chose is theirs to put right
        fs.measure(mlp().problem(), "picky", options={"picky": {"size": 2}})


def test_without_a_budget_nothing_is_timed() -> None:
    table = fs.measure(mlp().problem(), "parameter_count")
    assert table.meta["passes"] == {}


@pytest.mark.parametrize("call", ["measure", "bounds", "compare", "eigenpairs", "audit", "tables"])
def test_what_was_computed_is_gone_at_the_end_of_a_call(call: str) -> None:
    """Without the garbage collector: a GPU's memory would be full before it comes."""
    model, data = mlp().model, (torch.randn(30, 4), torch.arange(30) % 3)
    calls: dict[str, Any] = {
        "measure": lambda problem: fs.measure(problem),
        "bounds": lambda problem: fs.bounds(problem),
        "compare": lambda problem: fs.compare({"a": problem, "b": problem}),
        "eigenpairs": lambda problem: fs.eigenpairs(problem, top=1),
        "audit": lambda problem: fs.audit(problem, ["kappa", "psi_trace", "hessian_max_eigenvalue"]),
        "tables": lambda problem: tables_of(problem, {"measures": ["kappa"], "bounds": ["covering"]}),
    }
    calls[call](fs.Problem(model, data))  # what torch itself keeps of a first time is not looked at
    problem = fs.Problem(model, data)
    gc.collect()
    before = {id(one) for one in gc.get_objects() if type(one) is Context}  # kept by other tests
    gc.disable()
    try:
        result = calls[call](problem)
        if call == "measure":
            assert result.headline  # until somebody asks, a small network on a CPU is held
        held = weakref.ref(problem)
        del problem
        assert held() is None
        assert {id(one) for one in gc.get_objects() if type(one) is Context} <= before
    finally:
        gc.enable()
    assert result


@pytest.mark.usefixtures("_forget")
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
def test_a_measure_that_fails_holds_no_memory(kind: type[Exception]) -> None:
    held: list[weakref.ref[Tensor]] = []

    def failing(ctx: Context) -> float:
        large = torch.zeros(1000)
        held.append(weakref.ref(large))
        return ctx.cached(lambda _: _deeper(large))

    def _deeper(large: Tensor) -> float:
        copy = large.clone()
        held.append(weakref.ref(copy))
        try:
            raise ValueError("first")
        except ValueError as first:
            raise kind("too large") from first

    declare("failing_one", failing)
    context = Context(mlp().problem())
    known = set(context._cache)
    with pytest.warns(RuntimeWarning, match="failing_one failed"):
        table = fs.measure(context.problem, ["failing_one", "parameter_count"], context=context)
    assert table.reason("failing_one").startswith(f"failed: {kind.__name__}: too large")
    assert all(reference() is None for reference in held)
    assert set(context._cache) <= known | {key for key in context._cache if "failing" not in str(key)}
    assert math.isfinite(fs.measure(context.problem, "hessian_trace", context=context)["hessian_trace"])


class BrokenBackward(torch.autograd.Function):
    """Fails in the backward pass of more than two samples, and counts how often."""

    tried = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if len(grad) <= 2:
            return grad
        BrokenBackward.tried += 1
        raise ZeroDivisionError("no derivative here")


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.mended = nn.Linear(4, 5), nn.Linear(5, 3), False

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        found: Tensor = self.last(hidden if self.mended else BrokenBackward.apply(hidden))
        return found


@pytest.mark.filterwarnings("ignore:.* failed:RuntimeWarning")
def test_a_sweep_that_crashes_is_tried_once_in_a_call() -> None:
    torch.manual_seed(0)
    problem = fs.Problem(Broken().eval(), (torch.randn(9, 4), torch.arange(9) % 3))
    names = ["gradient_norm", "hessian_trace", "layer_trace", "kappa_trace", "rho_sum", "fisher_rao_norm", "sharpness"]
    context = Context(problem)
    fs.measure(problem, "l2_norm", context=context)  # reads the network, and needs no derivative
    for _ in range(2):  # the next call tries again
        BrokenBackward.tried = 0
        table = fs.measure(problem, [*names, "margin", "l2_norm"], context=context)
        assert BrokenBackward.tried == 4  # the gradient, the sweep of four of them, two passes of their own
        frame = table.to_frame().set_index("measure")
        for name in names:
            assert frame.loc[[name], "value"].isna().all()
            assert frame.loc[[name], "reason"].str.startswith("failed: ZeroDivisionError: no derivative here").all()
        assert math.isfinite(table["margin"])
        assert math.isfinite(table["l2_norm"])
    assert context.effort.crashes is None
    for _ in range(2):  # outside of a call whoever asks is answered anew
        BrokenBackward.tried = 0
        with pytest.raises(ZeroDivisionError):
            context.gradient()
        assert BrokenBackward.tried == 1
    problem.model.mended = True  # type: ignore[assignment]
    assert fs.measure(problem, names, context=context).to_frame()["value"].notna().all()


@pytest.mark.usefixtures("_forget")
def test_an_interrupted_measure_holds_no_memory_while_its_traceback_is_kept() -> None:
    held: list[weakref.ref[Tensor]] = []

    def interrupted(ctx: Context) -> float:
        large = torch.zeros(1000)
        held.append(weakref.ref(large))
        raise KeyboardInterrupt

    declare("interrupted_one", interrupted)
    context = Context(mlp().problem())
    with pytest.raises(KeyboardInterrupt) as kept:
        fs.measure(context.problem, "interrupted_one", context=context)
    assert kept.tb is not None
    assert held[0]() is None
    assert fs.measure(context.problem, "parameter_count", context=context)["parameter_count"] > 0


def test_products_that_fail_keep_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eigensolver stays in the context for the other end of the spectrum; its graphs must not."""
    from flatscope.curvature.operators import Hessian
    from flatscope.measures.weight_flatness import whole_matrix_and_search

    torch.manual_seed(0)
    problem = fs.Problem(
        nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3)), (torch.randn(30, 20), torch.arange(30) % 3)
    )
    context, plain, calls = Context(problem), Hessian._stacked, [0]

    def sometimes(self: Any, products: list[Tensor]) -> Tensor:
        calls[0] += 1
        if calls[0] == 3:
            raise RuntimeError("broken")
        return plain(self, products)

    monkeypatch.setattr(Hessian, "_stacked", sometimes)
    with pytest.warns(RuntimeWarning, match="broken"):
        fs.measure(problem, "hessian_max_eigenvalue", context=context)
    gc.collect()
    assert context.cached(whole_matrix_and_search)[0]._kept == []
    again = fs.measure(problem, "hessian_max_eigenvalue", context=context)["hessian_max_eigenvalue"]
    assert again == pytest.approx(fs.measure(problem, "hessian_max_eigenvalue")["hessian_max_eigenvalue"], rel=1e-3)


def test_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.05)
    monkeypatch.delenv("RANK", raising=False)
    written = io.StringIO()
    console = Console(file=written, force_terminal=False)
    with progress.progress_bar("Measuring", 4, console=console, lines=True) as advance:
        time.sleep(0.1)
        advance(1)
        advance(0, note="sharpness (2 of 4)", coming=1)
        progress.tell(1, 100, "draws")
        time.sleep(0.3)
    lines = [line for line in written.getvalue().splitlines() if "sharpness" in line]
    assert lines
    assert re.search(r"Measuring:.* after 0 s.*: sharpness \(2 of 4\), 1 of about 100 draws", lines[-1])
    with progress.progress_bar("Quiet", 4, console=console) as advance:
        advance(1)
        time.sleep(0.1)
    assert "Quiet" not in written.getvalue()


def test_time_left_is_said_where_it_is_known_and_nothing_where_it_is_not(clock: Clock) -> None:
    work = progress.Work(10.0)
    work.advance(0, "first", coming=2.0, slow="take the other")
    clock.now += 30
    assert work.words(clock.now) == " after 30 s: first"  # nothing is known: no share of the work either
    work.tell(25, 100, "draws")  # a quarter in 30 s: 90 s more, and eight further steps of 60 s
    assert work.left(clock.now) == pytest.approx(90 + 8 * 60)
    assert work.words(clock.now) == " 5% after 30 s, about 10 min left: first, 25 of about 100 draws"
    work.tell(25, 1000, "draws")  # the estimate is worse than it seemed: the share falls, and that is said
    assert work.left(clock.now) == pytest.approx(1170 + 8 * 600)
    clock.now += 30
    work.advance(2)
    work.advance(0, "second", coming=1.0, slow="take the other")
    assert work.left(clock.now) == pytest.approx(8 * 30)
    clock.now += 29
    assert work.left(clock.now) == pytest.approx(8 * 30 - 29)
    clock.now += 2  # longer than it was expected to take: how long is not known, and no "99 %" either
    assert work.left(clock.now) is None
    assert work.share(clock.now) is None
    work.spend(1.5)
    assert work.words(clock.now) == " after 91 s: second, take the other"
    work.tell(7, 3, "draws")
    assert "7 draws" in work.words(clock.now)
    assert work.share(clock.now) is None


def test_a_part_of_the_work_tells_the_whole_and_draws_no_bar_of_its_own() -> None:
    with progress.progress_bar("Measuring", 2) as advance:
        advance(0, note="margin (1 of 2)", coming=1)
        with progress.progress_bar("Attacks", 4) as inner:
            inner(3)
            told = progress._work.get()
            assert told is not None
            assert told.inner == "75 % of Attacks"
            assert told.done == 0
    assert progress._work.get() is None


def test_draws_tell_how_many_there_are_and_seem_to_be_needed() -> None:
    told: list[tuple[float, float | None, str]] = []
    context = Context(mlp().problem(), effort=make_effort(precision=0.001))
    with progress.progress_bar("Measuring", 1) as advance:
        advance(0, coming=1)
        work = progress._work.get()
        assert work is not None
        work.tell = lambda *words: told.append(words)  # type: ignore[method-assign]
        fs.measure(context.problem, "perturbation_robustness", context=context)
    assert told
    draws = [(taken, needed) for taken, needed, unit in told if unit == "draws"]
    assert draws
    assert all(needed is not None and needed >= taken > 0 for taken, needed in draws)


def test_results_can_be_watched_as_they_come() -> None:
    seen: list[str] = []

    def watch(entry: Declaration, rows: list[dict[str, Any]]) -> None:
        seen.append(entry.name)
        assert all(row["measure"] == entry.name for row in rows)

    fs.measure(mlp().problem(), ["layer_trace", "margin"], watch=watch)
    assert seen == ["layer_trace", "margin"]


@pytest.mark.usefixtures("_forget")
def test_a_measure_that_takes_longer_than_expected_is_given_up_between_batches(clock: Clock) -> None:
    def walk(ctx: Context) -> Value:
        for _ in range(1000):
            for inputs, _targets in ctx.batches(size=10):
                ctx.forward(inputs)
        return Value(1.0)

    declare("long_walk", walk, typical={"forward": 1})
    problem = slow_problem(clock, seconds=0.05)
    begun = time.monotonic()
    table = fs.measure(problem, ["long_walk"], budget=2.0)
    assert time.monotonic() - begun < 1.5 * 2.0 + 1
    assert "the time was up before it was done" in table.reason("long_walk")
    assert math.isnan(table.to_frame().iloc[0]["value"])


@pytest.mark.usefixtures("_forget")
def test_what_costs_no_pass_is_not_begun_either_once_all_time_is_over(clock: Clock) -> None:
    def slow(ctx: Context) -> Value:
        clock.now += 3.0
        return Value(1.0)

    for name in ("slow_weights", "more_weights", "other_weights"):
        declare(name, slow, cost="light")
    problem = slow_problem(clock)
    begun = time.monotonic()
    table = fs.measure(problem, ["slow_weights", "more_weights", "other_weights"], budget=2.0)
    assert time.monotonic() - begun < 1.5 * 2.0 + 1
    assert [bool(value == value) for value in table.to_frame()["value"]] == [True, False, False]
