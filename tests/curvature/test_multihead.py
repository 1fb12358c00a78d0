"""Torch's attention, and layers with the samples in another axis: swept like any other, with the values written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import references
import torch
from networks import Tiny, _built
from test_gauss_newton import Written, expected_of
from torch import Tensor, nn

import flatscope as fs
from flatscope.context import Context, Effort
from flatscope.curvature import columns, sweep
from flatscope.curvature.coverage import not_covered_by_uses
from flatscope.curvature.route import reached_at_curved_operations
from flatscope.curvature.sweep import sweep_pass
from flatscope.limits import STANDARD
from flatscope.network import structure
from flatscope.network.expansions import EXPANSIONS
from flatscope.network.interception import relative_difference

NAMES = {"trace": "layer_trace", "rho": "rho_unit", "relative_flatness": "relative_flatness"}
Run = Callable[[nn.MultiheadAttention, Tensor, Tensor], Tensor]


def of_itself(attend: nn.MultiheadAttention, z: Tensor, x: Tensor) -> Tensor:
    return attend(z, z, z, need_weights=False)[0].mean(1)


def second_axis(attend: nn.MultiheadAttention, z: Tensor, x: Tensor) -> Tensor:
    turned = z.transpose(0, 1)
    return attend(turned, turned, turned)[0].mean(0)


def of_others(attend: nn.MultiheadAttention, z: Tensor, x: Tensor) -> Tensor:
    return attend(z[:, :2], z[:, 1:], z[:, 1:])[0].mean(1)


def of_three(attend: nn.MultiheadAttention, z: Tensor, x: Tensor) -> Tensor:
    found, shares = attend(z[:, :2], z, torch.tanh(z), average_attn_weights=False)
    return (shares.mean(1)[:, :, :3] @ z).mean(1) + found.mean(1)


def masked(attend: nn.MultiheadAttention, z: Tensor, x: Tensor) -> Tensor:
    later = torch.triu(torch.ones(3, 3, dtype=torch.bool), 1)
    padding = torch.stack([x[:, 0, 0] > 0.5, x[:, 1, 0] > 9, x[:, 2, 0] > 0.5], dim=1)  # a first query may see nothing
    return attend(z, z, z, key_padding_mask=padding, attn_mask=later, need_weights=False)[0].mean(1)


def of_other_widths(attend: nn.MultiheadAttention, z: Tensor, x: Tensor) -> Tensor:
    return attend(z, x, z[:, :, :2])[0].mean(1)


class Attends(nn.Module):
    def __init__(self, run: Run, **settings: Any) -> None:
        super().__init__()
        self.first, self.last, self.run = nn.Linear(3, 4), nn.Linear(4, 3), run
        self.attend = nn.MultiheadAttention(4, 2, **settings)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.run(self.attend, torch.tanh(self.first(x)), x))
        return found


class Encodes(nn.Module):
    """A whole layer of a transformer, with the samples first or second throughout."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.first, self.last, self.axis = nn.Linear(3, 4), nn.Linear(4, 3), 1 if batch_first else 0
        self.block = nn.TransformerEncoderLayer(4, 2, 5, activation="gelu", batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.axis else x.transpose(0, 1)
        found: Tensor = self.last(self.block(self.first(x)).mean(self.axis))
        return found


def attends(run: Run, packed: bool = True, **settings: Any) -> Tiny:
    own = ["in_proj_weight"] if packed else ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
    layers = ("first", *(f"attend.{name}" for name in own), "attend.out_proj", "last")
    return _built("attends", Attends(run, **settings), (3, 3), 3, layers, n=6, chain=False, piecewise_linear=False)


def encodes(batch_first: bool = False) -> Tiny:
    inner = ("self_attn.in_proj_weight", "self_attn.out_proj", "linear1", "linear2")
    layers = ("first", *(f"block.{name}" for name in inner), "last")
    model = Encodes(batch_first)
    return _built("encodes", model, (3, 3), 3, layers, n=6, chain=False, piecewise_linear=False)


BUILDERS: dict[str, Callable[[], Tiny]] = {
    "itself": lambda: attends(of_itself, batch_first=True),
    "second axis": lambda: attends(second_axis, bias=False),
    "others": lambda: attends(of_others, batch_first=True),
    "three, and the shares": lambda: attends(of_three, batch_first=True, add_zero_attn=True),
    "masked": lambda: attends(masked, batch_first=True, add_bias_kv=True),
    "other widths": lambda: attends(of_other_widths, packed=False, batch_first=True, kdim=3, vdim=2),
    "encoder, second axis": encodes,
}
variants = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)


@pytest.fixture(autouse=True)
def _however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(STANDARD), "few_unreached", 0)
    monkeypatch.setitem(vars(STANDARD), "dense_weights", 0)
    monkeypatch.setattr(columns, "noisier_by_columns", lambda *_: {})  # columns, however noisy


def twins(tiny: Tiny, measure: str) -> dict[str, Tensor]:
    found = getattr(references, measure)(references.Dense(tiny))
    return {layer: torch.as_tensor(value, dtype=torch.float64).reshape(-1) for layer, value in found.items()}


@variants
def test_columns_give_every_layers_hessian(build: Callable[[], Tiny]) -> None:
    tiny = build()
    ctx = Context(tiny.problem().plain)
    places, outside = ctx.cached(reached_at_curved_operations)
    assert places
    assert {layer.name: layer.uses for layer in ctx.network} == dict.fromkeys(tiny.layers, 1)
    assert not {layer.weight for layer in ctx.network} & outside.keys()
    assert all("norm" in name or "bias_" in name for name in outside)
    found = sweep_pass(ctx, range(128), outside, places=places)
    for quantity, measure in NAMES.items():
        expected = twins(tiny, measure)
        for layer in ctx.network:
            mean, true = found.of(layer.weight, quantity), expected[layer.name]
            assert mean is not None
            z = (mean.value.reshape(-1) - true) / mean.stderr.reshape(-1).clamp_min(1e-9 * true.abs().max())
            assert float(z.abs().max()) < 4.5, (layer.name, quantity)


@variants
def test_all_columns_are_the_gauss_newton_matrix(build: Callable[[], Tiny]) -> None:
    tiny = build()
    written = Written(tiny)
    table = fs.measure(tiny.problem(), list(NAMES.values()), curvature="gauss_newton", precision=0)
    assert table.to_frame()["exact"].all()
    assert not table.to_frame()["reason"].str.contains("products|axis").any()
    for (measure, layer), rows in table.to_frame().groupby(["measure", "layer"]):
        expected = expected_of(measure, written, layer).reshape(-1)
        np.testing.assert_allclose(rows["value"], expected, rtol=1e-9, atol=1e-13)


@variants
def test_rows_are_exact_or_by_draws(build: Callable[[], Tiny]) -> None:
    tiny = build()
    exact, drawn = (fs.measure(tiny.problem(), ["layer_trace"], precision=precision) for precision in (0, 0.9))
    expected = {layer: float(value) for layer, value in twins(tiny, "layer_trace").items()}
    assert exact.layer("layer_trace") == pytest.approx(expected, rel=1e-9, abs=1e-13)
    assert drawn.to_frame()["reason"].str.contains("draws").all()
    assert not drawn.to_frame()["reason"].str.contains("products").any()


def reason_of_the_trace(tiny: Tiny) -> str:
    """Beside the layers' traces: alone it may go by products of the whole."""
    return fs.measure(tiny.problem(), ["hessian_trace", "layer_trace"], precision=0.9).reason("hessian_trace")


def test_written_otherwise_they_are_left_to_products(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delitem(EXPANSIONS, "multi_head_attention_forward")
        not_covered = not_covered_by_uses(Context(BUILDERS["itself"]().problem().plain))
        assert {"attend.in_proj_weight", "attend.out_proj.weight"} <= not_covered.keys()
        assert "4 parameter tensors by products" in reason_of_the_trace(BUILDERS["itself"]())
    assert "products" not in reason_of_the_trace(BUILDERS["itself"]())
    monkeypatch.setattr(structure, "axis_of_samples", lambda *_: 0)
    not_covered = not_covered_by_uses(Context(encodes().problem().plain))
    assert "first axis" in not_covered["first.weight"]


def test_samples_first_or_second_is_one_network() -> None:
    first, second = (encodes(batch_first) for batch_first in (True, False))
    assert relative_difference(first.model, second.model, first.x) < 1e-12
    one, other = (Context(tiny.problem().plain) for tiny in (first, second))
    assert not one.network.axes
    assert other.network.axes.keys() == {"first.weight", "block.linear1.weight", "block.linear2.weight"}
    assert one.network.layers == other.network.layers, "shapes are those of one sample"
    names = ["layer_trace", "rho_unit", "relative_flatness"]
    frames = [fs.measure(t.problem(), names, curvature="gauss_newton").to_frame() for t in (first, second)]
    np.testing.assert_allclose(frames[0]["value"], frames[1]["value"], rtol=1e-9, atol=1e-13)


def test_draws_are_a_samples_own_in_whatever_axis() -> None:
    """The same whatever samples are taken together, and whatever axis they stand in."""
    found = []
    for batch_first, memory in ((True, None), (False, None), (False, 20_000)):
        ctx = Context(encodes(batch_first).problem().plain, effort=Effort(memory=memory))
        places, outside = ctx.cached(reached_at_curved_operations)
        assert places
        assert (sweep.sweep_plan(ctx, 8, True).samples < 6) == (memory is not None)
        means = sweep_pass(ctx, range(4), outside, places=places).means
        found.append({key: mean.value for key, mean in means.items()})
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-9, atol=1e-12)


def test_lengths_of_a_sequence_are_no_number_of_samples() -> None:
    """As many positions as samples, and the weight of a layer in two axes."""

    class Both(Encodes):
        def forward(self, x: Tensor) -> Tensor:
            turned = self.first(x.transpose(0, 1)).transpose(0, 1)
            found: Tensor = self.last(torch.relu(turned + self.first(x)).mean(1))
            return found

    for n in (2, 3, 6):
        tiny = _built("encodes", Encodes(False), (3, 3), 3, ("first",), n=n, piecewise_linear=False)
        axes = Context(tiny.problem().plain).network.axes
        assert axes == {"first.weight": 1, "block.linear1.weight": 1, "block.linear2.weight": 1}
    tiny = _built("both", Both(True), (3, 3), 3, ("first", "last"), n=6)
    ctx = Context(tiny.problem().plain)
    assert not ctx.network.axes
    assert "first axis" in not_covered_by_uses(ctx)["first.weight"]


def test_time_steps_of_a_recurrent_network_may_come_first() -> None:
    class Recurs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRU(3, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.head(self.cell(x.transpose(0, 1))[0][-1])
            return found

    tiny = _built("recurs", Recurs(), (3, 3), 3, ("cell.weight_ih_l0", "cell.weight_hh_l0", "head"), n=6, chain=False)
    assert not_covered_by_uses(Context(tiny.problem().plain)) == {}
    written, table = Written(tiny), fs.measure(tiny.problem(), "layer_trace", curvature="gauss_newton")
    for layer, value in table.layer("layer_trace").items():
        np.testing.assert_allclose(value, expected_of("layer_trace", written, layer), rtol=1e-9)
