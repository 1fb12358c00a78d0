"""The exact sweep on every kind of layer and loss, against dense Hessians; and what it refuses to call exact."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from networks import BUILDERS, Tiny, _built, lenet_like, mlp, smooth
from references import TWINS, Dense, dense
from test_factors import output_columns
from torch import Tensor, nn
from torch.nn import functional

import flatscope as fs
from flatscope.context import Context
from flatscope.curvature import layer_products as blocks
from flatscope.curvature.columns import column_sweep
from flatscope.curvature.coverage import not_covered_by_columns
from flatscope.curvature.layer_directions import LayerDirections
from flatscope.curvature.operators import GaussNewton
from flatscope.curvature.route import find_not_covered
from flatscope.limits import STANDARD, MemoryShare
from flatscope.loss import as_loss
from flatscope.network.operations import PIECES, TABLE

pytestmark = pytest.mark.fast


class Twice(nn.Module):
    """One weight used twice, an unused one, and a parameter that is no layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.shared, self.unused, self.head = (nn.Linear(*s) for s in ((3, 4), (4, 4), (2, 2), (4, 3)))
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(self.shared(torch.relu(self.shared(x))))
        return self.head(x * self.gain)


class InPlace(nn.Module):
    """In-place activations overwrite the layers' outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc, self.act = nn.Conv2d(1, 2, 2), nn.Linear(8, 3), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.act(self.conv(x)).flatten(1))


class Hidden(nn.Module):
    """A weight that is also used where no layer is: every operation is linear in it, and yet the layer is not all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))) + x * self.first.weight.diagonal()


def _convs() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    head = lambda size: [nn.ReLU(), nn.Flatten(), nn.Linear(size, 3)]  # noqa: E731
    return {
        "3-D": (nn.Sequential(nn.Conv3d(1, 2, 2, stride=(1, 2, 1), padding=(0, 1, 0)), *head(16)), (1, 3, 3, 3)),
        "same padding": (nn.Sequential(nn.Conv2d(1, 2, (3, 2), padding="same", dilation=(1, 2)), *head(18)), (1, 3, 3)),
        "depthwise": (nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.ReLU(), nn.Conv2d(4, 2, 1), *head(8)), (2, 3, 3)),
        "transposed": (nn.Sequential(nn.ConvTranspose2d(2, 3, 2, stride=2, padding=1), *head(48)), (2, 3, 3)),
        "grouped transposed": (nn.Sequential(nn.ConvTranspose1d(4, 6, 3, groups=2), *head(30)), (4, 3)),
        "few positions": (nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 8, 2), *head(16)), (1, 2, 3)),
    }


@pytest.mark.parametrize("name", _convs())
@pytest.mark.parametrize(
    "measure", ["layer_trace", "rho_unit", "relative_flatness", "hessian_trace", "layer_max_eigenvalue"]
)
def test_every_kind_of_convolution(name: str, measure: str) -> None:
    model, shape = _convs()[name]
    layers = tuple(n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd))
    tiny = _built(name, model, shape, 3, layers, n=5)
    if "transposed" in name and measure in ("rho_unit", "relative_flatness"):
        return _transposed_by_alpha(tiny)
    expected = TWINS[measure](Dense(tiny))
    table = fs.measure(tiny.problem(), measure)
    assert bool(table.to_frame()["exact"].all())
    if measure == "hessian_trace":
        assert table[measure] == pytest.approx(expected, rel=1e-9)
    for layer in layers if isinstance(expected, dict) else ():
        found = table.units(measure, layer) if measure == "rho_unit" else table.layer(measure)[layer]
        torch.testing.assert_close(
            torch.as_tensor(found, dtype=torch.float64),
            torch.as_tensor(expected[layer], dtype=torch.float64),
            rtol=1e-6 if "eigen" in measure else 1e-9,
            atol=1e-12,
        )
    return None


def _transposed_by_alpha(tiny: Tiny) -> None:
    """ρ(j) is the second derivative of the loss when input channel j of the layer is scaled by 1 + α."""
    model, problem = tiny.model, tiny.problem()
    weight = model[0].weight.detach()

    def loss(alpha: Tensor) -> Tensor:
        scaled = weight * (1 + alpha).reshape(-1, *[1] * (weight.ndim - 1))
        outputs = torch.func.functional_call(model, {"0.weight": scaled}, (tiny.x,))
        return functional.cross_entropy(outputs, tiny.y)

    hessian = torch.autograd.functional.hessian(loss, torch.zeros(len(weight), dtype=torch.float64))
    found = fs.measure(problem, "rho_unit").units("rho_unit", "0")
    torch.testing.assert_close(found, hessian.diagonal(), rtol=1e-9, atol=1e-12)
    alone = _by_products_alone(problem)
    by_hessian = LayerDirections(alone, "relative_flatness", find_not_covered(alone))
    found = by_hessian.read(torch.cat(list(by_hessian.diagonal(16)))[:, None])
    for layer, value in fs.measure(problem, "relative_flatness").layer("relative_flatness").items():
        assert value == pytest.approx(float(found[f"{layer}.weight", "relative_flatness"]), rel=1e-9)


def _by_products_alone(problem: fs.Problem) -> fs.Context:
    """A context that thinks that the columns give nothing."""
    ctx = fs.Context(problem)
    facts, finder = ctx.problem.facts._known, f"{not_covered_by_columns.__module__}.not_covered_by_columns"
    facts[finder, ()] = facts[finder, (("lookups", True),)] = dict.fromkeys(problem.trainable, "by hand")
    return ctx


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_row_reading_of_rho(build) -> None:  # type: ignore[no-untyped-def]
    written_out = dense(build.__name__, build)
    table = fs.measure(written_out.tiny.problem(), "rho_unit", options={"rho_unit": {"reading": "row"}})
    for layer, expected in TWINS["rho_unit"](written_out, reading="row").items():
        torch.testing.assert_close(table.units("rho_unit", layer), expected, rtol=1e-8, atol=1e-12)


def test_rows_of_a_layer_are_columns_of_the_next_without_biases() -> None:
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 3, bias=False))
    problem = _built("no biases", model, (4,), 3, ("0", "2")).problem()
    rows = fs.measure(problem, "rho_unit", options={"rho_unit": {"reading": "row"}}).units("rho_unit", "0")
    columns = fs.measure(problem, "rho_unit").units("rho_unit", "2")
    torch.testing.assert_close(rows, columns, rtol=1e-9, atol=1e-14)


def test_weights_used_twice_unused_and_free_parameters() -> None:
    tiny = _built("twice", Twice(), (3,), 3, ("stem", "shared", "head"))
    curvature = fs.Context(tiny.problem()).cached(column_sweep)
    assert (
        "used 2 times" in curvature.not_covered["shared.weight"] or "itself" in curvature.not_covered["shared.weight"]
    )
    assert "gain" in curvature.not_covered
    table = fs.measure(tiny.problem(), ["hessian_trace", "layer_trace"])
    assert table["hessian_trace"] == pytest.approx(TWINS["hessian_trace"](Dense(tiny)), rel=1e-9)
    for layer, expected in TWINS["layer_trace"](Dense(tiny)).items():
        assert table.layer("layer_trace")[layer] == pytest.approx(expected, rel=1e-9)


def test_in_place_activations() -> None:
    tiny = _built("in place", InPlace(), (1, 3, 3), 3, ("conv", "fc"))
    for layer, expected in TWINS["layer_trace"](Dense(tiny)).items():
        assert fs.measure(tiny.problem(), "layer_trace").layer("layer_trace")[layer] == pytest.approx(
            expected, rel=1e-9
        )


def test_a_weight_that_is_used_elsewhere_is_seen() -> None:
    tiny = _built("hidden", Hidden(), (3,), 3, ("first", "second"))
    assert "first.weight" in fs.Context(tiny.problem()).cached(column_sweep).not_covered
    table = fs.measure(tiny.problem(), "hessian_trace")
    assert table["hessian_trace"] == pytest.approx(TWINS["hessian_trace"](Dense(tiny)), rel=1e-9)


def test_the_probe_finds_what_the_table_of_operations_misreads(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = smooth()
    expected = TWINS["hessian_trace"](Dense(tiny))
    monkeypatch.setitem(TABLE, "tanh", replace(TABLE["tanh"], linear=PIECES))
    curved = fs.Context(tiny.problem()).cached(column_sweep).not_covered
    assert "Gauss-Newton" in curved["0.weight"]
    assert fs.measure(tiny.problem(), "hessian_trace")["hessian_trace"] == pytest.approx(expected, rel=1e-9)


def test_the_probe_is_not_fooled_by_blank_samples_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blank samples have no second derivative; where they stand must not matter."""
    tiny = smooth()
    monkeypatch.setitem(TABLE, "tanh", replace(TABLE["tanh"], linear=PIECES))
    blank = torch.zeros(60, 3, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False)).double().eval()
    y = torch.zeros(60, dtype=torch.int64)
    for x, targets in (
        (torch.cat([blank, tiny.x]), torch.cat([y, tiny.y])),
        (torch.cat([tiny.x, blank]), torch.cat([tiny.y, y])),
    ):
        curved = fs.Context(fs.Problem(model, train=(x, targets))).cached(column_sweep).not_covered
        assert "0.weight" in curved


def test_frozen_layers_are_constants() -> None:
    tiny = mlp()
    tiny.model[0].requires_grad_(False)
    table = fs.measure(tiny.problem(), ["hessian_trace", "layer_trace", "parameter_count"])
    names = [name for name, p in tiny.model.named_parameters() if p.requires_grad]
    assert table["hessian_trace"] == pytest.approx(float(Dense(tiny).hessian_of(names).trace()), rel=1e-9)
    assert list(table.layer("layer_trace")) == ["2", "4"]


def _saturating(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss whose output Hessian has eigenvalues of both signs."""
    return torch.tanh(functional.cross_entropy(outputs, targets, reduction="none")) + 0.1 * outputs.square().sum(1)


@pytest.mark.parametrize(
    "measure", ["layer_trace", "rho_unit", "relative_flatness", "layer_max_eigenvalue", "hessian_trace"]
)
def test_a_loss_with_indefinite_output_hessian(measure: str) -> None:
    tiny = replace(mlp(), loss=_saturating)
    expected = TWINS[measure](Dense(tiny))
    table = fs.measure(tiny.problem(), measure)
    if measure == "hessian_trace":
        assert table[measure] == pytest.approx(expected, rel=1e-9)
        return
    for layer, value in expected.items():
        found = table.units(measure, layer) if measure == "rho_unit" else table.layer(measure)[layer]
        torch.testing.assert_close(
            torch.as_tensor(found, dtype=torch.float64),
            torch.as_tensor(value, dtype=torch.float64),
            rtol=1e-6,
            atol=1e-11,
        )


@pytest.mark.parametrize("scale", [1.0, 1e-10, 1e10])
def test_a_scaled_loss_scales_everything(scale: float) -> None:
    def scaled(outputs: Tensor, targets: Tensor) -> Tensor:
        return scale * functional.cross_entropy(outputs, targets, reduction="none")

    tiny = mlp()
    names = ["hessian_trace", "hessian_max_eigenvalue", "layer_trace", "layer_max_eigenvalue"]
    plain, other = (fs.measure(replace(tiny, loss=loss).problem(), names) for loss in ("cross_entropy", scaled))
    for name in names[:2]:
        assert other[name] == pytest.approx(scale * plain[name], rel=1e-6)
    for layer, value in plain.layer("layer_max_eigenvalue").items():
        assert other.layer("layer_max_eigenvalue")[layer] == pytest.approx(scale * value, rel=1e-6)


@pytest.mark.parametrize("gain", [60.0, 100.0, 200.0])
def test_near_interpolation_in_float32_keeps_its_digits(gain: float) -> None:
    tiny = _built("near", nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), (4,), 3, ("0", "2"), n=40)
    with torch.no_grad():
        tiny.model[2].weight.mul_(gain)
        top = tiny.model(tiny.x).topk(2)
    sure = (top.values[:, 0] - top.values[:, 1]) > 12
    near = replace(tiny, x=tiny.x[sure], y=top.indices[sure, 0], xt=None, yt=None, initial={})
    assert len(near.x) >= 3
    assert 0 < float(Dense(near).loss()) < 1e-5
    single = fs.measure(near.problem(dtype=torch.float32), ["layer_trace", "hessian_trace"])
    double = fs.measure(near.problem(), ["layer_trace", "hessian_trace"])
    assert bool(single.to_frame()["exact"].all())
    assert single["hessian_trace"] == pytest.approx(double["hessian_trace"], rel=1e-3)
    for layer, expected in TWINS["layer_trace"](Dense(near)).items():
        assert single.layer("layer_trace")[layer] == pytest.approx(expected, rel=1e-3)


def test_softmax_columns_multiply_to_the_hessian() -> None:
    outputs = torch.randn(7, 5, dtype=torch.float64) * torch.tensor([1.0, 5.0, 20.0, 0.1, 0.0, 3.0, 50.0])[:, None]
    columns = output_columns(as_loss("cross_entropy"), outputs, torch.zeros(7, dtype=torch.long)).values
    p = outputs.softmax(1)
    expected = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    torch.testing.assert_close(torch.einsum("kni,knj->nij", columns, columns), expected, rtol=1e-12, atol=1e-15)


def test_many_columns_go_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fs.measure(mlp().problem(), ["layer_trace", "rho_unit"]).to_frame()
    monkeypatch.setitem(vars(STANDARD), "most_columns_together", 1)
    monkeypatch.setitem(vars(STANDARD), "gradient_bytes", 1)
    monkeypatch.setitem(vars(STANDARD), "sweep_memory", MemoryShare(1.0, 0.5, 1))
    found = fs.measure(mlp().problem(), ["layer_trace", "rho_unit"]).to_frame()
    torch.testing.assert_close(torch.tensor(found["value"]), torch.tensor(expected["value"]), rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("loss", ["cross_entropy", _saturating], ids=["positive", "indefinite"])
@pytest.mark.parametrize("build", [mlp, lenet_like], ids=lambda build: build.__name__)
def test_layer_blocks_kept_written_out_and_streamed_agree(build, loss, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    problem = replace(build(), loss=loss).problem()
    kept = fs.measure(problem, "layer_max_eigenvalue").layer("layer_max_eigenvalue")
    monkeypatch.setitem(vars(STANDARD), "kept_memory", MemoryShare(0.0, 0.0, 0))
    written_out = fs.measure(problem, "layer_max_eigenvalue").layer("layer_max_eigenvalue")
    monkeypatch.setitem(vars(STANDARD), "dense_weights", 0)
    streamed = fs.measure(problem, "layer_max_eigenvalue").layer("layer_max_eigenvalue")
    monkeypatch.setitem(vars(STANDARD), "columns_per_layer", 0)
    one_by_one = fs.measure(problem, "layer_max_eigenvalue").layer("layer_max_eigenvalue")
    assert kept == pytest.approx(written_out, rel=1e-8)
    assert streamed == pytest.approx(written_out, rel=1e-8)
    assert one_by_one == pytest.approx(written_out, rel=1e-8)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 6, 3, padding=1, groups=2),
        nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2),
        nn.Sequential(nn.Flatten(2), nn.LazyLinear(7)),
    ],
    ids=["grouped", "transposed", "sequence"],
)
@pytest.mark.parametrize("positions", [1, 16])
def test_pieces_of_all_kinds_of_layers_multiply_like_gauss_newton(layer: nn.Module, positions: int) -> None:
    """Kept are inputs and columns where they are few against weights (of the sequence these grow), else gradients."""
    generator, pooled = torch.Generator().manual_seed(0), nn.AdaptiveAvgPool2d(round(positions**0.5))
    layers = [nn.Conv2d(2, 4, 1), nn.ReLU(), pooled, copy.deepcopy(layer), nn.Flatten(), nn.LazyLinear(3)]
    net = nn.Sequential(*layers).double()
    x = torch.randn(5, 2, 4, 4, generator=generator, dtype=torch.float64)
    net(x)
    ctx = Context(fs.Problem(net, train=(x, torch.arange(5) % 3)))
    found = blocks.LayerBlocks(ctx)
    name = next(name for name in found.sizes if name.startswith("3"))
    assert (found._kept[name][0].inputs is None) is ((positions > 1) is not isinstance(layer, nn.Sequential))
    vectors = {
        name: torch.randn(size, 2, generator=generator, dtype=torch.float64) for name, size in found.sizes.items()
    }
    for name, product in found.products(vectors).items():
        torch.testing.assert_close(product, GaussNewton(ctx, [name]) @ vectors[name], rtol=1e-10, atol=1e-13)


def test_spread_over_samples() -> None:
    tiny = mlp()
    each = [
        float(Dense(replace(tiny, x=tiny.x[i : i + 1], y=tiny.y[i : i + 1])).layer_hessian("2").trace())
        for i in range(len(tiny.x))
    ]
    expected = torch.tensor(each).std() / len(each) ** 0.5
    frame = fs.measure(tiny.problem(), "layer_trace").to_frame().set_index("layer")
    assert frame.loc["2", "data_stderr"] == pytest.approx(float(expected), rel=1e-6)
