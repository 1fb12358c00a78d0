"""Path norms: one pass against walking every path, and what must and must not move them."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from forms_of_measures import value_of, values_of
from networks import _built, mlp
from references_norms import empty, inputs_of, joined, naive_path_norm, paths_of, power_sum, walk
from torch import Tensor, nn
from torch.nn import functional

import flatscope as fs
from flatscope.measures.path_norms import log_output_path_norms, log_path_norm

EXACT = 1e-12
RATIOS = ("over_margin", "capacity")
NETWORKS: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "mlp": lambda: (_mlp(4, 5, 3, 6, 3), (4,)),
    "mlp without biases": lambda: (_mlp(4, 5, 3, bias=False), (4,)),
    "convolution and maximum": lambda: (_conv(nn.MaxPool2d(2)), (2, 4, 4)),
    "overlapping maximum": lambda: (_conv(nn.MaxPool2d(2, 1), 9), (2, 4, 4)),
    "convolution and average": lambda: (_conv(nn.AvgPool2d(2)), (2, 4, 4)),
    "overlapping average": lambda: (_conv(nn.AvgPool2d(3, 1)), (2, 4, 4)),
    "stride, groups, dilation": lambda: (
        nn.Sequential(nn.Conv1d(2, 4, 3, 2, 1, groups=2), nn.ReLU(), nn.Conv1d(4, 2, 2, dilation=2), nn.Flatten()),
        (2, 7),
    ),
    "BatchNorm behind and in front": lambda: (
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.BatchNorm1d(3)),
        (3,),
    ),
}
by_network = pytest.mark.parametrize("name", NETWORKS)


def _mlp(*widths: int, bias: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(widths):
        layers += [nn.Linear(n_in, n_out, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _conv(pool: nn.Module, positions: int = 4) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), pool, nn.Flatten(), nn.Linear(3 * positions, 2, bias=False)
    )


class Pieces(nn.Module):
    """What architectures are made of besides layers in a row: skips, a pre-activation BatchNorm, concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.stem(x))
        y = self.inner(functional.relu(self.norm(x), inplace=False))
        y += x
        both = torch.cat([functional.adaptive_avg_pool2d(y, 1), y.amax((2, 3), keepdim=True)], 1)
        return self.head(torch.flatten(both, 1))


def built(model: nn.Module, shape: tuple[int, ...], classes: int = 2) -> fs.Context:
    return fs.Context(_built("seed of seven", model, shape, classes, ()).problem())


def separable(model: nn.Module, shape: tuple[int, ...]) -> fs.Problem:
    """The network on samples labelled as it labels them: every margin is positive."""
    tiny = _built("labelled by itself", model, shape, 2, ())
    outputs = tiny.model(tiny.x).detach()
    alive = outputs.amax(1) > outputs.amin(1)
    return tiny.problem(train=(tiny.x[alive], outputs[alive].argmax(1)), test=None)


@by_network
@pytest.mark.parametrize("p", [1, 2, 3.5])
@pytest.mark.parametrize("pooling", ["max", "sum"])
@pytest.mark.parametrize("biases", [True, False])
def test_one_pass_equals_walking_every_path(name: str, p: float, pooling: str, biases: bool) -> None:
    model, shape = NETWORKS[name]()
    ctx = built(model, shape)
    found = value_of(ctx.problem, "l2_path_norm", p=p, pooling=pooling, biases=biases)
    expected = naive_path_norm_of(ctx, shape, p, pooling, biases)
    assert found == pytest.approx(expected, rel=EXACT)


def naive_path_norm_of(ctx: fs.Context, shape: tuple[int, ...], p: float, pooling: str, biases: bool) -> float:
    paths = walk(list(ctx.problem.model), inputs_of(shape), p, pooling, biases)
    return sum(power_sum(entry, p) for entry in paths.flatten()) ** (1 / p)


@pytest.mark.parametrize("p", [1.0, 2.0])
@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_skips_affine_batchnorm_concatenation_and_pools_along_axes(p: float, pooling: str) -> None:
    ctx = built(Pieces(), (2, 3, 3))
    model = ctx.problem.model
    x = walk([model.stem], inputs_of((2, 3, 3)), p)
    y = joined(walk([model.norm, model.inner], x, p), x)
    both = empty((6,))
    for channel in range(3):
        entries = list(y[channel].flatten())
        both[channel] = [path / 9 for entry in entries for path in entry]
        largest = max(entries, key=lambda entry: power_sum(entry, p))
        both[3 + channel] = largest if pooling == "max" else [path for entry in entries for path in entry]
    expected = [power_sum(entry, p) ** (1 / p) for entry in walk([model.head], both, p)]
    # As measured: the BatchNorm in front of zero padding becomes a layer of its own, with the same edges.
    total = sum(value**p for value in expected) ** (1 / p)
    assert value_of(ctx.problem, "l2_path_norm", p=p, pooling=pooling) == pytest.approx(total, rel=EXACT)
    # And by the rule for a BatchNorm that nobody folded.
    found = log_output_path_norms(ctx, p=p, pooling=pooling)[0][0].exp()
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64), rtol=EXACT)


class Rewritten(nn.Module):
    """The same network as `_mlp(4, 5, 3)` with other operations for the same thing."""

    def __init__(self, way: int) -> None:
        super().__init__()
        self.one, self.two, self.way = nn.Linear(4, 5), nn.Linear(5, 3), way

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x) if self.way != 1 else x @ self.one.weight.T + self.one.bias
        x = [
            functional.relu,
            lambda v: v.clamp(min=0),
            lambda v: torch.maximum(v, torch.zeros_like(v)),
            lambda v: functional.threshold(v, 0.0, 0.0),
            lambda v: v.clamp_min(0).to(torch.float32),
            lambda v: functional.max_pool1d(functional.pad(v[..., None], (0, 1)), 2).squeeze(-1),
        ][self.way](x)
        if self.way == 2:
            filled = x.new_zeros(x.shape)
            filled[:, 1:] = x[:, 1:]
            filled[:, :1].add_(x[:, :1])
            x = filled
        if self.way == 3:
            left, right = (2 * x).chunk(2, dim=1)
            x = torch.cat([-left, right], 1).div(-2)
        return self.two(x.to(self.two.weight.dtype))


@pytest.mark.parametrize("way", range(6))
def test_the_same_network_written_otherwise(way: int) -> None:
    plain, other = _mlp(4, 5, 3), Rewritten(way)
    ctx = built(plain, (4,), 3)
    other.double().load_state_dict(
        {
            f"{key}.{end}": getattr(ctx.problem.model[i], end)
            for key, i in (("one", 0), ("two", 2))
            for end in ("weight", "bias")
        }
    )
    for p in (1.0, 2.0):
        expected = log_output_path_norms(ctx, p=p)[0][0].exp()
        found = log_output_path_norms(fs.Context(ctx.problem.with_model(other)), p=p)[0][0].exp()
        assert torch.allclose(found, expected, rtol=EXACT)


@pytest.mark.parametrize(
    ("pool", "n"),
    [
        (nn.AvgPool2d(3, 2, 1), 9),
        (nn.AvgPool2d(3, 2, 1, count_include_pad=False), 9),
        (nn.AvgPool2d(2, 2, ceil_mode=True), 9),
        (nn.AvgPool2d(2, divisor_override=3), 4),
        (nn.AdaptiveAvgPool2d((2, 3)), 6),
        (nn.AdaptiveMaxPool2d((2, 3)), 6),
        (nn.MaxPool2d(3, 2, 1), 9),
        (nn.MaxPool2d(2, 2, ceil_mode=True), 9),
        (nn.MaxPool2d(2, dilation=2, stride=1), 9),
        (nn.Upsample(scale_factor=2), 100),
        (nn.ReflectionPad2d(1), 49),
    ],
    ids=str,
)
def test_edges_of_every_pool_are_those_of_its_gradient(pool: nn.Module, n: int) -> None:
    """Behind a linear pool the entries of its Jacobian are the edges; behind a maximum all that can be chosen are 1."""
    x = torch.randn(1, 1, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    jacobian = torch.zeros(n, 25, dtype=torch.float64)
    if "Max" in type(pool).__name__:
        for entry in range(25):  # an entry that is the largest wins every window it is in
            spike = torch.zeros(25, dtype=torch.float64)
            spike[entry] = 1
            jacobian[:, entry] = pool(spike.reshape(1, 1, 5, 5)).flatten()
    else:
        jacobian = torch.autograd.functional.jacobian(lambda v: pool(v.reshape(1, 1, 5, 5)).flatten(), x.flatten())
    head = nn.Linear(n, 2, bias=False)
    ctx = built(nn.Sequential(pool, nn.Flatten(), head), (1, 5, 5))
    weight = ctx.problem.model[2].weight.detach()
    for p in (1.0, 2.0, 3.0):
        expected = (weight.abs() ** p @ (jacobian.abs() ** p).sum(1)) ** (1 / p)
        assert torch.allclose(log_output_path_norms(ctx, p=p, pooling="sum")[0][0].exp(), expected, rtol=1e-11)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (nn.LocalResponseNorm(2), "local_response_norm"),
        (nn.GELU(), "gelu"),
        (nn.Sigmoid(), "sigmoid"),
        (nn.GroupNorm(1, 3), "group_norm"),
        (nn.ReLU6(), "hardtanh"),
        (nn.Hardtanh(), "hardtanh"),
    ],
    ids=str,
)
def test_what_is_not_homogeneous_is_refused_by_name(bad: nn.Module, named: str) -> None:
    ctx = built(nn.Sequential(nn.Conv2d(2, 3, 1), bad, nn.Flatten(), nn.Linear(12, 2)), (2, 2, 2))
    table = fs.measure(ctx.problem, ["l1_path_norm", "l2_path_norm"])
    assert math.isnan(table["l1_path_norm"])
    assert f"{named} (1)" in table.reason("l1_path_norm")


def test_products_of_signals_and_token_ids_are_refused() -> None:
    class Gated(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * input

    table = fs.measure(built(Gated(2, 2), (2,)).problem, "l1_path_norm")
    assert "two signals" in table.reason("l1_path_norm")
    words = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    table = fs.measure(fs.Problem(words, train=(torch.tensor([[0, 1], [2, 3]]), torch.tensor([0, 1]))), "l1_path_norm")
    assert "inputs of real numbers" in table.reason("l1_path_norm")


def test_the_user_model_and_its_precision_stay() -> None:
    tiny = mlp()
    half = copy.deepcopy(tiny.model).float()
    before = copy.deepcopy(half.state_dict())
    problem = fs.Problem(half, train=(tiny.x.float(), tiny.y))
    assert fs.measure(problem, "l1_path_norm")["l1_path_norm"] == pytest.approx(
        fs.measure(tiny.problem(), "l1_path_norm")["l1_path_norm"], rel=1e-6
    )
    assert all(torch.equal(value, before[name]) for name, value in half.state_dict().items())
    assert next(problem.model.parameters()).dtype == torch.float32


def test_depth_neither_overflows_nor_vanishes() -> None:
    """Forty layers whose weights are all 1e30 or 1e-30: the logarithm is a sum, and ratios stay finite."""
    for size in (1e30, 1e-30):
        model = _mlp(*[2] * 41, bias=False).double()
        for value in model.parameters():
            nn.init.constant_(value, size)
        x = torch.eye(2, dtype=torch.float64)
        ctx = fs.Context(fs.Problem(_mlp(*[2] * 41, bias=False).double(), train=(x, torch.tensor([0, 1]))))
        ctx = ctx.at(dict(model.named_parameters()))
        # 2 inputs, 2^40 paths to both outputs together from each, each a product of 40 weights
        assert log_path_norm(ctx, p=1.0) == pytest.approx(41 * math.log(2) + 40 * math.log(size), rel=1e-12)
        table = fs.measure(ctx.problem, "l1_path_norm", context=ctx, options={"l1_path_norm": {"log": True}})
        assert table["l1_path_norm"] == log_path_norm(ctx, p=1.0)
        table = fs.measure(ctx.problem, "l1_path_norm", context=ctx)
        assert table["l1_path_norm"] == (math.inf if size > 1 else 0.0)
        assert "beyond the range" in table.reason("l1_path_norm")


def test_scales_of_two_branches_are_brought_together() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.small(x) + torch.relu(self.large(x))

    model = Apart().double()
    with torch.no_grad():
        model.small.weight.fill_(1e-9), model.small.bias.fill_(2e-9)
        model.large.weight.fill_(1e9), model.large.bias.fill_(3.0)
    ctx = fs.Context(fs.Problem(model, train=(torch.eye(2, dtype=torch.float64), torch.tensor([0, 1]))))
    expected = 2e9 + 3 + 4e-9
    assert torch.allclose(
        log_output_path_norms(ctx, p=1)[0][0].exp(), torch.full((2,), expected, dtype=torch.float64), rtol=1e-15
    )


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_greedy_rescaling_attains_the_largest_output_norm(p: float) -> None:
    """Neyshabur et al. (2017): the smallest product of ℓ_{p,∞} norms over rescalings; with outputs, their largest."""
    ctx = built(_mlp(4, 6, 5, 3, bias=False), (4,), 3)
    weights = [module.weight.detach().clone() for module in ctx.problem.model if isinstance(module, nn.Linear)]
    product = math.prod(float(w.norm(p, dim=1).max()) for w in weights)
    largest = float(log_output_path_norms(ctx, p=p)[0][0].max().exp())
    assert largest <= product * (1 + EXACT)
    for layer in range(len(weights) - 1):
        norms = weights[layer].norm(p, dim=1)
        weights[layer] /= norms[:, None]
        weights[layer + 1] *= norms
    assert math.prod(float(w.norm(p, dim=1).max()) for w in weights) == pytest.approx(largest, rel=EXACT)
    assert value_of(ctx.problem, "l2_path_norm", p=p, outputs="max") == pytest.approx(largest, rel=EXACT)


def test_capacities_as_printed() -> None:
    """Neyshabur et al. (2017), section 2.2: the products of 2W and of 4 h W² written out over the paths."""
    model = _mlp(3, 4, 5, 2, bias=False)
    problem = separable(model, (3,))
    norms = ("l1_path_norm", "l2_path_norm")
    table = values_of(problem, "margin", *norms, *(f"{name}_{form}" for name in norms for form in RATIOS))
    weights = [module.weight.detach() for module in problem.model if isinstance(module, nn.Linear)]
    doubled, spread = 0.0, 0.0
    for a in range(3):
        for b in range(4):
            for c in range(5):
                for d in range(2):
                    path = [float(weights[0][b, a]), float(weights[1][c, b]), float(weights[2][d, c])]
                    doubled += abs(math.prod(2 * w for w in path))
                    spread += math.prod(4 * h * w * w for h, w in zip((4, 5, 2), path, strict=True))
    gamma = table["margin"]
    assert gamma > 0
    assert table["l1_path_norm_capacity"] == pytest.approx(doubled**2 / gamma**2, rel=EXACT)
    assert table["l2_path_norm_capacity"] == pytest.approx(spread / gamma**2, rel=EXACT)
    assert table["l2_path_norm_over_margin"] == pytest.approx(spread / gamma**2 / (16 * 20 * 8), rel=EXACT)
    assert table["l1_path_norm_over_margin"] == pytest.approx((table["l1_path_norm"] / gamma) ** 2, rel=EXACT)
    assert table["l1_path_norm_capacity"] <= 3 * table["l2_path_norm_capacity"]  # Cauchy-Schwarz, h_0 = 3
    for form in RATIOS:
        general = value_of(problem, f"l2_path_norm_{form}", p=1.0)
        assert general == pytest.approx(table[f"l1_path_norm_{form}"], rel=EXACT)


def test_gradients_stay_below_the_norms_of_the_outputs() -> None:
    """‖∇f_o(x)‖_1 ≤ φ_1(o) without biases, on many inputs, with pooling and convolution."""
    ctx = built(_conv(nn.MaxPool2d(2)), (2, 4, 4))
    norms = log_output_path_norms(ctx, p=1, biases=False)[0][0].exp()
    for x in torch.randn(200, 1, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)):
        jacobian = torch.autograd.functional.jacobian(lambda v: ctx.problem.model(v)[0], x).flatten(1)
        assert bool((jacobian.abs().sum(1) <= norms * (1 + EXACT)).all())


def test_bad_options_are_named() -> None:
    problem = mlp().problem()
    for options, word in (
        ({"p": 0.5}, "at least 1"),
        ({"pooling": "mean"}, "pooling"),
        ({"outputs": "min"}, "outputs"),
    ):
        with pytest.raises(fs.InputError, match=word):
            value_of(problem, "l2_path_norm", **options)


def test_twins_know_what_they_do_not_walk() -> None:
    assert paths_of(nn.Sequential(nn.Tanh()), (3,), 1) is None
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    expected = float(model[0].weight.detach().abs().sum())
    assert naive_path_norm(model, (2,), 1) == pytest.approx(expected, rel=1e-6)


class MeanOverPlaces(nn.Module):
    """A dense layer on the mean of n places."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(x.mean(1))
        return made


def test_a_mean_has_edges_of_one_over_n_by_hand() -> None:
    """Each of 3 places reaches each weight by an edge of 1/3: Σ 3 (w/3)² = Σ w²/3, and Σ 3 |w|/3 = Σ |w|."""
    torch.manual_seed(0)
    model = MeanOverPlaces()
    table = fs.measure(
        fs.Problem(model, (torch.randn(5, 3, 4).double(), torch.arange(5) % 2)), ["l1_path_norm", "l2_path_norm"]
    )
    weight = model.head.weight.detach()
    assert table["l1_path_norm"] == pytest.approx(float(weight.abs().sum()))
    assert table["l2_path_norm"] == pytest.approx(float(weight.square().sum() / 3) ** 0.5)


@pytest.mark.parametrize("slope", [0.1, 1.0, 2.5])
def test_the_steeper_slope_of_a_leaky_unit_counts_by_hand(slope: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.LeakyReLU(slope), nn.Linear(4, 2, bias=False)).double()
    table = fs.measure(
        fs.Problem(model, (torch.randn(5, 3).double(), torch.arange(5) % 2)), ["l1_path_norm", "l2_path_norm"]
    )
    first, last = (model[i].weight.detach() for i in (0, 2))
    steep = max(1.0, slope)
    assert table["l1_path_norm"] == pytest.approx(steep * float((last.abs() @ first.abs()).sum()))
    assert table["l2_path_norm"] == pytest.approx(steep * float((last.square() @ first.square()).sum()) ** 0.5)
