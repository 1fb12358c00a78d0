"""Gauss-Newton by choice: every measure of curvature against the matrix written out, on any network."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from networks import BUILDERS, Tiny, _built, attention, mlp, smooth
from test_sampled import texts
from torch import Tensor, nn
from torch.func import functional_call

import flatscope as fs
from flatscope.context import Context, Effort
from flatscope.curvature import estimators
from flatscope.curvature.coverage import not_covered_by_uses
from flatscope.curvature.route import find_not_covered
from flatscope.curvature.sweep import sweep_pass
from flatscope.curvature.trace_by_products import probed
from flatscope.limits import STANDARD, MemoryShare

GAUSS_NEWTON = Effort(curvature="gauss_newton")
NAMES = ["hessian_trace", "layer_trace", "rho_unit", "relative_flatness", "layer_max_eigenvalue"]


class Recurrent(nn.Module):
    """A layer that is used at every step, with tanh, and a convolution that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.conv, self.head = nn.Linear(4, 4), nn.Conv1d(2, 2, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(torch.tanh(self.conv(x))))
        state = x[:, 0]
        for _ in range(3):
            state = torch.tanh(self.step(state) + x[:, 1])
        return self.head(state)


class Tied(nn.Module):
    """A weight that a layer uses, and once more where no layer is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.sigmoid(self.first(x))) + (x * self.first.weight.exp().sum(1)) ** 2


class Flattened(nn.Module):
    """Layers that are given the positions of all samples as rows, as GPT-2's are."""

    def __init__(self, smooth: bool) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 5), nn.Linear(5, 4, bias=False), nn.Linear(4, 3)
        self.bend = torch.tanh if smooth else torch.relu

    def forward(self, x: Tensor) -> Tensor:
        rows = self.second(self.bend(self.first(x.reshape(-1, 3))))
        return self.head(self.bend(rows.reshape(len(x), -1, 4)).sum(1))


def flattened() -> Tiny:
    return _built("flat", Flattened(True), (6, 3), 3, ("first", "second", "head"), piecewise_linear=False)


def recurrent() -> Tiny:
    return _built("recurrent", Recurrent(), (2, 4), 3, ("conv", "step", "head"), chain=False, piecewise_linear=False)


def tied() -> Tiny:
    return _built("tied", Tied(), (3,), 3, ("first", "second"), chain=False, piecewise_linear=False)


class Written:
    """mean Jᵀ (∇²ℓ) J, from autograd's own Jacobians and Hessians."""

    def __init__(self, tiny: Tiny) -> None:
        problem = tiny.problem()
        self.params = {name: value.detach() for name, value in tiny.model.named_parameters()}
        outputs = tiny.model(tiny.x).detach()
        self._blocks = []
        for i in range(len(tiny.x)):
            one = slice(i, i + 1)

            def loss(z: Tensor, one: slice = one) -> Tensor:
                return problem.loss(z[None], tiny.y[one])[0]

            width = outputs[i].numel()
            self._blocks.append(torch.autograd.functional.hessian(loss, outputs[i]).reshape(width, width))
        self._tiny = tiny

    def matrix(self, names: list[str]) -> Tensor:
        tiny = self._tiny

        def run(*values: Tensor) -> Tensor:
            return functional_call(tiny.model, dict(zip(names, values, strict=True)), (tiny.x,))

        jacobians = torch.autograd.functional.jacobian(run, tuple(self.params[name] for name in names))
        width = len(self._blocks[0])
        joined = torch.cat([part.reshape(len(tiny.x), width, -1) for part in jacobians], dim=2)  # (n, C, p)
        return torch.stack([j.T @ h @ j for j, h in zip(joined, self._blocks, strict=True)]).mean(0)


def expected_of(measure: str, written: Written, layer: str) -> Tensor:
    name = layer if layer in written.params else f"{layer}.weight"
    block, weight = written.matrix([name]), written.params[name]
    if measure == "layer_trace":
        return block.trace()
    if measure == "layer_max_eigenvalue":
        return torch.linalg.eigvalsh(block)[-1]
    if measure == "rho_unit":
        columns = []
        for j in range(weight.shape[1]):
            column = torch.zeros_like(weight)
            column[:, j] = weight[:, j]
            columns.append(column.flatten() @ block @ column.flatten())
        return torch.stack(columns)
    rows = weight.flatten(1)
    blocks = block.reshape(len(rows), rows.shape[1], len(rows), rows.shape[1])
    return torch.einsum("st,siti->", rows @ rows.T, blocks)


NETWORKS = [smooth, attention, recurrent, tied, flattened, mlp, texts]


@pytest.mark.parametrize("measure", NAMES)
@pytest.mark.parametrize("build", NETWORKS, ids=lambda build: build.__name__)
def test_every_measure_is_that_of_the_matrix_written_out(build, measure: str) -> None:  # type: ignore[no-untyped-def]
    tiny = build()
    written = Written(tiny)
    table = fs.measure(tiny.problem(), measure, curvature="gauss_newton")
    assert table.to_frame()["exact"].all()
    assert table.to_frame()["reason"].str.contains("of the Gauss-Newton matrix").all()
    assert (table.to_frame()["value"] >= -1e-12).all()
    if measure == "hessian_trace":
        assert table[measure] == pytest.approx(float(written.matrix(list(written.params)).trace()), rel=1e-9)
        return
    for layer in tiny.layers:
        expected = expected_of(measure, written, layer)
        found = table.units(measure, layer) if measure == "rho_unit" else table.layer(measure)[layer]
        found = torch.as_tensor(found, dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=1e-6 if "eigen" in measure else 1e-9, atol=1e-12)


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_both_matrices_agree_by_layer_on_piecewise_linear_networks(build) -> None:  # type: ignore[no-untyped-def]
    tiny = build()
    if not tiny.piecewise_linear:
        return
    names = ["layer_trace", "kappa_trace", "rho_unit", "relative_flatness", "hessian_trace"]
    one, other = (fs.measure(tiny.problem(), names, curvature=how).to_frame() for how in ("hessian", "gauss_newton"))
    np.testing.assert_allclose(one["value"], other["value"], rtol=1e-9, atol=1e-14)
    assert other["reason"].str.contains("here the same as the Hessian's").all()
    assert not one["reason"].str.contains("Gauss").any()


def test_the_whole_spectrum_is_that_of_gauss_newton() -> None:
    tiny = recurrent()
    eigenvalues = torch.linalg.eigvalsh(Written(tiny).matrix(list(dict(tiny.model.named_parameters()))))
    names = ["hessian_max_eigenvalue", "hessian_min_eigenvalue"]
    table = fs.measure(tiny.problem(), names, curvature="gauss_newton")
    assert table[names[0]] == pytest.approx(float(eigenvalues[-1]), rel=1e-4)
    assert table[names[1]] == pytest.approx(float(eigenvalues[0]), abs=1e-3 * float(eigenvalues[-1]))
    assert table.to_frame()["reason"].str.startswith("of the Gauss-Newton matrix").all()


def test_weights_used_several_times_are_covered_and_hidden_uses_found() -> None:
    assert not_covered_by_uses(Context(recurrent().problem())) == {}
    assert not_covered_by_uses(Context(smooth().problem())) == {}
    assert not_covered_by_uses(Context(tied().problem())).keys() == {"first.weight"}
    assert not_covered_by_uses(Context(attention().problem())).keys() == {"norm.weight", "norm.bias"}


def test_sequences_flattened_into_rows_are_covered() -> None:
    assert not_covered_by_uses(Context(flattened().problem())) == {}
    tiny = _built("flat", Flattened(False), (6, 3), 3, ("first", "second", "head"))
    names = ["hessian_trace", "layer_trace", "rho_unit", "relative_flatness", "layer_max_eigenvalue"]
    table = fs.measure(tiny.problem(), names)
    assert table.to_frame()["exact"].all()
    assert not table.to_frame()["reason"].str.contains("products|axis").any()
    written = Written(tiny)
    for name in names[1:]:
        for layer in tiny.layers:
            found = table.units(name, layer) if name == "rho_unit" else table.layer(name)[layer]
            expected = expected_of(name, written, layer)
            torch.testing.assert_close(
                torch.as_tensor(found, dtype=torch.float64),
                expected,
                rtol=1e-6 if "eigen" in name else 1e-9,
                atol=1e-12,
            )


class Crossed(nn.Module):
    """Rows in another order: position by position, all samples of each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.relu(self.first(x.transpose(0, 1).reshape(-1, 3)))
        return self.head(rows.reshape(-1, len(x), 4).sum(0))


def test_rows_in_another_order_are_not_taken_for_samples() -> None:
    tiny = _built("crossed", Crossed(), (6, 3), 3, ("first", "head"))
    assert "first.weight" in not_covered_by_uses(Context(tiny.problem()))
    written = Written(tiny)
    table = fs.measure(tiny.problem(), "layer_trace")
    for layer in tiny.layers:
        assert table.layer("layer_trace")[layer] == pytest.approx(float(expected_of("layer_trace", written, layer)))


def test_float32_is_checked_with_a_tolerance_that_fits() -> None:
    for build in (recurrent, smooth, mlp):
        assert not_covered_by_uses(Context(build().problem(dtype=torch.float32))) == {}
    assert not_covered_by_uses(Context(tied().problem(dtype=torch.float32))).keys() == {"first.weight"}


def test_sampled_columns_of_a_smooth_network_cover() -> None:
    ctx = Context(recurrent().problem(), effort=GAUSS_NEWTON)
    not_covered = find_not_covered(ctx)
    exact = sweep_pass(ctx, None, not_covered)
    zs: dict[str, list[float]] = {}
    for seed in range(200):
        ctx.seed = seed
        for (name, quantity), mean in sweep_pass(ctx, range(4), not_covered).means.items():
            true, error = exact.means[name, quantity].value.reshape(-1), mean.stderr.reshape(-1)
            top = int(true.argmax())
            level = "unit" if quantity == "rho" else "layer" if name else "network"
            zs.setdefault(level, []).append(float((mean.value.reshape(-1)[top] - true[top]) / error[top]))
    for level, found in zs.items():
        covered = np.mean(np.abs(found) <= 1.96)
        assert 0.88 <= covered <= 0.99, f"{level}: {covered:.1%}"


@pytest.mark.long
@pytest.mark.parametrize("curvature", ["hessian", "gauss_newton"])
@pytest.mark.parametrize("sketch", [False, True], ids=["plain", "sketch"])
@pytest.mark.parametrize("quantity", ["trace", "rho"])
def test_products_cover_for_network_layers_and_units(
    curvature: str, sketch: bool, quantity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything by products: the errors of 200 estimates, with the sketch forced or left out."""
    width = 40 if sketch else 6
    model = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 3))
    tiny = _built("products", model, (width,), 3, ("0", "2"), n=40 if sketch else 4, piecewise_linear=False)
    ctx = Context(tiny.problem(), effort=replace(GAUSS_NEWTON, curvature=curvature, precision=0.2 if sketch else 1.0))
    everything = dict.fromkeys(tiny.problem().trainable, "by hand")
    for finder in ("coverage.not_covered_by_columns", "coverage.not_covered_by_uses"):
        for options in ((), (("lookups", True),)):
            ctx.problem.facts._known[f"flatscope.curvature.{finder}", options] = everything
    exact = probed(ctx, quantity)
    assert exact.exact
    monkeypatch.setitem(vars(STANDARD), "few_directions", 0)
    monkeypatch.setitem(vars(STANDARD), "dense_weights", 0)
    monkeypatch.setattr(estimators, "cheaper_one_by_one", lambda *given: False)
    if not sketch:
        monkeypatch.setitem(vars(STANDARD), "kept_memory", MemoryShare(0.0, 0.0, 0))
    zs: dict[str, list[float]] = {}
    for seed in range(200):
        ctx.seed = seed
        found = probed(ctx, quantity, most_products=48)
        assert not found.exact
        assert found.products >= (32 if sketch and found.products > 16 else 16)
        for key, values in found.values.items():
            top = int(exact.values[key].abs().argmax())
            level = "unit" if key[1] == "rho" else "layer" if key[0] else "network"
            error, distance = float(found.stderrs[key][top]), float(values[top] - exact.values[key][top])
            if error > 1e-12 * abs(float(values[top])):
                zs.setdefault(level, []).append(distance / error)
            else:  # spanned by the sketch
                assert abs(distance) < 1e-9
    for level, scores in zs.items():
        covered = np.mean(np.abs(scores) <= 2.1)  # Student's quantile for the fifteen degrees of freedom of 16 draws
        assert 0.87 <= covered <= 0.995, f"{level}: {covered:.1%}"
        assert abs(np.mean(scores)) < 0.5, level
