"""Columns at curved operations: the true Hessian's values of every layer, without bias, with errors that cover."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from networks import Tiny, _built, attention
from test_sampled import indefinite
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

import flatscope as fs
from flatscope.context import Context, Effort
from flatscope.curvature import checked_pass, columns, hessian_check
from flatscope.curvature.columns import column_sweep
from flatscope.curvature.curved_operations import CurvedCall, CurvedColumns, Places, find_curved_places
from flatscope.curvature.layer_directions import DIRECTIONS
from flatscope.curvature.operators import Hessian
from flatscope.curvature.route import reached_at_curved_operations
from flatscope.curvature.sweep import sweep_pass
from flatscope.curvature.sweep_result import Curvature
from flatscope.isolation import own_settings
from flatscope.limits import STANDARD
from flatscope.network.expansions import attention_in_parts
from flatscope.sampling import errors_within_reach


class Gated(nn.Module):
    """Products of activations, a quotient, a normalisation, a residual sum, positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.gelu(self.first(x))
        h = h + self.norm(h) * torch.sigmoid(self.gate(h))
        out: Tensor = self.last(h / (1 + h.square().mean(-1, keepdim=True))).mean(1)
        return out


def gated(n: int = 12) -> Tiny:
    return _built("gated", Gated(), (2, 4), 3, ("first", "gate", "last"), chain=False, piecewise_linear=False, n=n)


def convolutional() -> Tiny:
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.SiLU(), nn.Conv2d(3, 2, 2), nn.Softplus(), nn.Flatten(), nn.Linear(8, 3)
    )
    return _built("smooth convolutions", model, (1, 5, 5), 3, ("0", "2", "5"), piecewise_linear=False)


def drawn(ctx: Context, draws: int) -> Curvature:
    places, outside = ctx.cached(reached_at_curved_operations)
    assert places
    return sweep_pass(ctx, range(draws), outside, True, places)


@pytest.fixture(autouse=True)
def _however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(STANDARD), "few_unreached", 0)
    monkeypatch.setitem(vars(STANDARD), "dense_weights", 0)
    monkeypatch.setattr(columns, "noisier_by_columns", lambda *_: {})  # columns, however noisy


def exact(ctx: Context, quantity: str, name: str) -> Tensor:
    """One product for each direction."""
    layer = next(layer for layer in ctx.network if layer.weight == name)
    some = DIRECTIONS[quantity](ctx.params[name], layer)
    vectors = some.embed(torch.eye(some.count, dtype=torch.float64))
    values = (vectors * (Hessian(ctx, [name]) @ vectors)).sum(0)
    return values if quantity.startswith("rho") else values.sum()[None]


@pytest.mark.parametrize("build", [gated, convolutional, attention])
def test_every_layer_is_reached_and_without_bias(build: Callable[[], Tiny]) -> None:
    ctx = Context(build().problem().plain)
    found = drawn(ctx, 256)
    weights = [layer.weight for layer in ctx.network if layer.weight not in found.not_covered]
    assert len(weights) == len(ctx.network.layers)
    for name in weights:
        for quantity in ("trace", "rho", "rho_rows", "relative_flatness"):
            mean, true = found.of(name, quantity), exact(ctx, quantity, name)
            assert mean is not None
            z = (mean.value.reshape(-1) - true) / mean.stderr.reshape(-1).clamp_min(1e-9 * true.abs().max())
            assert float(z.abs().max()) < 4.5, (name, quantity)


BENT: dict[str, tuple[Callable[..., Tensor], int]] = {
    "entry by entry": (functional.silu, 1),
    "softmax": (lambda x: torch.softmax(x, -1), 1),
    "normalisation": (lambda x: functional.layer_norm(x, x.shape[-1:]), 1),
    "product": (torch.mul, 2),
    "matrix product": (lambda x, y: x[:, :, None] @ y[:, None, :], 2),
    "quotient": (lambda x, y: x / (1 + y.square()), 2),
}


@pytest.mark.parametrize("operation", BENT)
def test_the_mean_over_all_signs_is_the_operations_hessian(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, n_inputs = BENT[operation]
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(2, 4, generator=generator, dtype=torch.float64) for _ in range(n_inputs)]
    own = [(1 * leaf.requires_grad_()) for leaf in leaves]
    output = function(*own)
    slopes = torch.randn(output.shape, generator=generator, dtype=torch.float64).pow(3)  # of very different sizes
    places, axes = [("", 0, number) for number in range(len(own))], [0] * len(own)
    edges, entrywise = [get_gradient_edge(output)], operation == "entry by entry"
    bend = CurvedCall(lambda inputs: [function(*inputs)], own, edges, entrywise, places, axes)
    columns = CurvedColumns([bend], (output * slopes).sum(), torch.arange(2), seed=0)
    every = torch.tensor(list(itertools.product([1.0, -1.0], repeat=4 * n_inputs)), dtype=torch.float64)
    signs = [part[:, None].expand(-1, 2, -1) for part in every.split(4, dim=1)]
    monkeypatch.setattr(columns, "_signs", lambda *_, inputs: signs[:inputs])
    found = torch.cat(columns.drawn(range(len(every))), dim=2).reshape(len(every), 2, 2, -1)
    squares = torch.einsum("dpni,dpnj->pnij", found, found) / len(every)
    for i in range(2):
        arguments = torch.cat([leaf.detach()[i] for leaf in leaves])
        hessian = torch.autograd.functional.hessian(
            lambda z, i=i: (function(*[part[None] for part in z.split(4)]) * slopes[i]).sum(), arguments
        )
        torch.testing.assert_close(squares[0, i] - squares[1, i], hessian, rtol=1e-9, atol=1e-9)
    if operation in ("product", "matrix product"):  # nothing at all for a layer that moves one factor
        first, second = found[:, 0].square() - found[:, 1].square(), found.abs().amax((0, 1, 2))
        assert float(first.abs().max()) < 1e-12 * float(second.max()) ** 2


class Attending(nn.Module):
    """Heads that attend, in one function of torch or in its parts."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.first, self.queries, self.keys, self.values, self.last = (nn.Linear(6, 6) for _ in range(5))
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        heads = [part(x).unflatten(-1, (2, 3)).transpose(1, 2) for part in (self.queries, self.keys, self.values)]
        attend = functional.scaled_dot_product_attention if self.fused else attention_in_parts
        out: Tensor = self.last(attend(*heads, is_causal=True).transpose(1, 2).flatten(2)).mean(1)
        return out


@own_settings()  # fused kernels cannot be differentiated twice
def test_attention_is_taken_in_its_parts() -> None:
    """The same draws whether a network calls torch's function or writes it out."""
    means = []
    for fused in (True, False):
        tiny = _built("attending", Attending(fused), (5, 6), 6, ("first", "last"), chain=False)
        ctx = Context(tiny.problem())
        means.append(drawn(ctx, 64))
        for name in ("first.weight", "queries.weight", "keys.weight", "values.weight"):
            mean, true = means[-1].of(name, "trace"), exact(ctx, "trace", name)
            assert mean is not None
            assert abs(float(mean.value - true)) < 4.5 * float(mean.stderr)
    for key, mean in means[0].means.items():
        torch.testing.assert_close(means[1].means[key].value, mean.value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"mask": bool}, {"mask": float}])
def test_attention_in_parts_is_torchs(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, length, 4, generator=generator, dtype=torch.float64) for length in (5, 6, 6))
    if kind := options.pop("mask", None):
        mask = torch.randn(5, 6, generator=generator, dtype=torch.float64)
        options["attn_mask"] = mask > -0.5 if kind is bool else mask
    expected = functional.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(attention_in_parts(q, k, v, **options), expected)
    few = [part[:, :1] for part in (k, v)]
    expected = functional.scaled_dot_product_attention(q, *few, enable_gqa=True, **options)
    torch.testing.assert_close(attention_in_parts(q, *few, enable_gqa=True, **options), expected)
    assert attention_in_parts(q, k, v, dropout_p=0.1) is NotImplemented
    blind = torch.ones(5, 6, dtype=torch.bool).index_fill(0, torch.tensor([2]), False)  # one query sees nothing
    expected = functional.scaled_dot_product_attention(q, k, v, blind)
    torch.testing.assert_close(attention_in_parts(q, k, v, blind), expected)


class Factors(nn.Module):
    """Products of one number for each sample, of rows of all positions, and with positions in the first axis."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))  # (n, 2, 5)
        rows = (self.second(h).flatten(0, 1) * h.flatten(0, 1)).unflatten(0, (-1, 2))
        turned = h.transpose(0, 1) * rows.mean(1)
        scalar = h.mean((1, 2)) * rows.mean((1, 2))  # (n,)
        out: Tensor = self.last(turned.sum(0)) * (1 + scalar)[:, None]
        return out


def test_factors_of_any_shape() -> None:
    ctx = Context(_built("factors", Factors(), (2, 4), 3, ("first", "second", "last"), chain=False).problem())
    found = drawn(ctx, 256)
    for name in {"first.weight", "second.weight", "last.weight"} - found.not_covered.keys():
        mean, true = found.of(name, "trace"), exact(ctx, "trace", name)
        assert mean is not None
        assert abs(float(mean.value - true)) < 4.5 * float(mean.stderr)


def test_a_loss_with_curvature_of_both_signs() -> None:
    ctx = Context(fs.Problem(gated().model, (gated().x, gated().y), loss=indefinite))
    found = drawn(ctx, 256)
    for name in ("first.weight", "last.weight"):
        mean, true = found.of(name, "trace"), exact(ctx, "trace", name)
        assert mean is not None
        assert abs(float(mean.value - true)) < 4.5 * float(mean.stderr)


@pytest.mark.long
def test_standard_errors_cover() -> None:
    problem = gated(6).problem()
    zs = []
    ctx = Context(problem)
    places, outside = ctx.cached(reached_at_curved_operations)
    true = {name: exact(ctx, "trace", name) for name in ("first.weight", "gate.weight")}
    for seed in range(100):
        ctx.seed = seed
        found = sweep_pass(ctx, range(8), outside, False, places)
        for name, value in true.items():
            mean = found.of(name, "trace")
            assert mean is not None
            zs.append(float((mean.value - value) / mean.stderr))
    assert 0.88 <= np.mean(np.abs(zs) <= 1.96) <= 1.0
    assert abs(np.mean(zs)) < 0.25


def test_batches_change_nothing() -> None:
    problem = gated().problem()
    whole = drawn(Context(problem), 3)
    parts = drawn(Context(problem, effort=Effort(memory=1)), 3)  # sample by sample
    for key, mean in whole.means.items():
        torch.testing.assert_close(parts.means[key].value, mean.value, rtol=1e-9, atol=1e-12)


def test_measures_use_them_and_say_how_precise_they_are() -> None:
    problem = gated().problem()
    table = fs.measure(problem, ["layer_trace", "hessian_trace"], precision=0.1).to_frame()
    precise = fs.measure(problem, ["layer_trace", "hessian_trace"], precision=0).to_frame()
    assert precise["exact"].all()
    layers = table[table["measure"] == "layer_trace"]
    assert not layers["exact"].any()
    assert (layers["data_stderr"] > 0).all()
    assert (abs(table["value"] - precise["value"]) < 4.5 * table["stderr"]).all()


class InPlace(nn.Module):
    """An operation that writes to its input, which something else may read before or afterwards."""

    def __init__(self, read_again: bool) -> None:
        super().__init__()
        self.first, self.last, self.read_again = nn.Linear(3, 4), nn.Linear(4, 2), read_again

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        bent = functional.silu(h, inplace=True).tanh_()
        out: Tensor = self.last(bent + h if self.read_again else bent)
        return out


def test_operations_that_overwrite_their_input() -> None:
    tiny = _built("in place", InPlace(False), (3,), 2, ("first", "last"), piecewise_linear=False)
    ctx = Context(tiny.problem())
    mean, true = drawn(ctx, 256).of("first.weight", "trace"), exact(ctx, "trace", "first.weight")
    assert mean is not None
    assert abs(float(mean.value - true)) < 4.5 * float(mean.stderr)
    tiny = _built("read again", InPlace(True), (3,), 2, ("first", "last"), piecewise_linear=False)
    assert find_curved_places(Context(tiny.problem())) is None, "left to products"


def test_only_values_that_are_less_precise_than_asked_for_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(STANDARD), "most_draws", 64)
    names = ["hessian_trace", "layer_trace", "kappa_trace*", "relative_flatness", "rho_sum"]
    frame = fs.measure(gated(n=40).problem(), names, precision=0.05).to_frame()
    less = frame["stderr"] > 0.05 * frame["value"].abs()
    assert less.any()
    assert not less.all()
    assert (frame["reason"].str.contains("asked for 0.05 relative") == less).all()


def test_values_out_of_reach_are_not_waited_for() -> None:
    names = ["hessian_trace", "layer_trace"]
    frame = fs.measure(gated().problem(), names, precision=1e-4).to_frame()
    assert frame["reason"].str.contains(f"sampled, {STANDARD.surrender_draws} draws").any()
    stopped = (
        f"(stopped after {STANDARD.surrender_draws} draws: 256 draws, the most allowed, are too few for most values)"
    )
    assert frame["reason"].str.contains(stopped, regex=False).any()
    assert errors_within_reach([0.3, 0.11, 0.08, math.inf], 16, 0.02, 256) == [0.08]
    assert errors_within_reach([0.9], 16, 0.05, 2048) == [0.9], "it may be larger than it looks"


def test_it_goes_on_where_most_imprecise_values_are_within_reach() -> None:
    problem = gated().problem()
    errors = sorted(
        drawn(Context(problem), STANDARD.surrender_draws).relative_errors(
            1.0, ("trace", "kappa_trace", "relative_flatness")
        )
    )
    assert len(errors) > 4
    share = math.sqrt(STANDARD.surrender_draws / STANDARD.most_draws)
    reach = [share * error / (1 + 2 * error) for error in errors]  # the precision from which on each can be had
    few = (reach[0] + reach[1]) / 2
    assert column_sweep(Context(problem), precision=few).draws == STANDARD.surrender_draws
    assert column_sweep(Context(problem), precision=1.01 * reach[-1]).draws > STANDARD.surrender_draws


class Branched(nn.Module):
    """Convolution, BatchNorm, two dense layers, and a share of something curved beside the last but one."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.conv, self.norm, self.mid, self.last = (
            nn.Conv2d(1, 3, 2),
            nn.BatchNorm2d(3),
            nn.Linear(12, 5),
            nn.Linear(5, 3),
        )
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        h = self.mid(torch.relu(self.norm(self.conv(x))).flatten(1))
        out: Tensor = self.last(torch.relu(h) + self.share * torch.tanh(h))
        return out


def together(ctx: Context, directions: dict[str, Tensor], places: Places | None) -> bool:
    """Whether both ways agree along one direction of all parameters."""
    shared = checked_pass.SharedPass(ctx, places or Places())
    run = shared.run
    return hessian_check._agree_together(hessian_check._Swept(ctx, run, directions), shared.as_it_runs(run), directions)


@pytest.mark.parametrize(("share", "agrees"), [(0.0, True), (1e-5, False), (1.0, False)])
def test_one_direction_of_all_parameters_shows_what_was_misread(share: float, agrees: bool) -> None:
    tiny = _built("branched", Branched(share), (1, 3, 3), 3, ("conv", "mid", "last"), chain=False)
    ctx = Context(tiny.problem())
    directions = {
        name: checked_pass.random_direction(ctx.params[name], ctx.generator("test")) for name in ctx.problem.trainable
    }
    assert together(ctx, directions, None) == agrees
    places = ctx.cached(find_curved_places)
    assert together(ctx, directions, places), "with its bends it does"


class Tanh(torch.autograd.Function):
    """By a function of the user's, as sparsemax and many kernels are: its own operations are run without gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return slope * (1 - y * y)


class ByFunction(nn.Module):
    def __init__(self, tanh: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.tanh = tanh
        self.inner, self.middle, self.outer = nn.Linear(6, 30), nn.Linear(30, 30), nn.Linear(30, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.tanh(self.middle(torch.sigmoid(self.inner(x)))))


def test_what_a_function_of_the_users_computes_inside_is_no_curved_operation() -> None:
    x, y = torch.randn(40, 6, generator=torch.Generator().manual_seed(8)).double(), torch.arange(40) % 3
    found, wanted = (
        fs.measure(
            fs.Problem(ByFunction(tanh).double(), train=(x, y)), ["hessian_trace", "rho_sum"], precision=precision
        )
        for tanh, precision in ((Tanh.apply, 0.02), (torch.tanh, 0))
    )
    frame = found.to_frame().set_index("measure")
    for name in ("hessian_trace", "rho_sum"):
        error = float(frame.loc[name, "stderr"])
        assert abs(found[name] - wanted[name]) <= max(4 * error, 1e-9 * abs(wanted[name])), name
