"""Basis paths: counts by rank, values by hand, the inverse both ways, and what no rescaling may change."""

from __future__ import annotations

import itertools
import math
import time

import pytest
import torch
from networks import BUILDERS, batchnorm_conv, lenet_like, mlp, residual
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev, vmap

import flatscope as fs
from flatscope.errors import InputError, NotApplicable, NumericalWarning
from flatscope.symmetries.basis_paths import BasisPaths
from flatscope.symmetries.path_skeleton import RULES
from flatscope_papers.theory.path_matrix import (
    all_paths,
    basis_paths,
    lemma_exponents,
    path_matrix,
    path_sum,
    path_values,
)

WIDTHS = [(2, 3, 2), (3, 2, 4, 2), (2, 2, 3, 2), (4, 2, 5, 3, 1), (1, 3, 1), (3, 3, 3, 3)]


def plain(*widths: int, bias: bool = False, seed: int = 0) -> nn.Sequential:
    modules: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        modules += [nn.Linear(a, b, bias=bias), nn.ReLU()]
    return randomised(nn.Sequential(*modules[:-1]), seed)


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for value in model.double().eval().parameters():
        drawn = torch.rand(value.shape, generator=generator, dtype=torch.float64)
        value.data = (drawn + 0.3) * torch.randint(0, 2, value.shape, generator=generator).mul(2).sub(1)
    return model


def inputs(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def params(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in model.named_parameters()}


def rank(matrix: Tensor) -> int:
    return int(torch.linalg.matrix_rank(matrix))


class Res(nn.Module):
    """m = 36; 13 hidden nodes in 7 scale classes. With `on_input` the stream is the input itself."""

    def __init__(self, n: int = 2, on_input: bool = False, slope: float = 0.0) -> None:
        super().__init__()
        self.on_input, self.slope = on_input, slope
        self.stem = nn.Linear(n, 3, bias=False)
        self.inner, self.outer = nn.Linear(3, 4, bias=False), nn.Linear(4, 3, bias=False)
        self.head = nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.on_input else nn.functional.leaky_relu(self.stem(x), self.slope)
        x = x + self.outer(nn.functional.leaky_relu(self.inner(x), self.slope))
        return self.head(nn.functional.leaky_relu(x, self.slope))


class Branches(nn.Module):
    """Two branches concatenated, a grouped and a depthwise convolution, a flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(1, 2, 2), nn.Conv2d(1, 2, 2, bias=False)
        self.grouped, self.depthwise = nn.Conv2d(4, 4, 2, groups=2), nn.Conv2d(4, 4, 1, groups=4)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.leaky_relu(torch.cat([self.left(x), self.right(x)], 1), 0.2)
        x = nn.functional.leaky_relu(self.grouped(x), 0.2)
        x = nn.functional.leaky_relu(self.depthwise(x), 0.3)
        return self.head(nn.functional.avg_pool2d(x, 1).flatten(1))


def spec_conv(slope: float = 0.2) -> nn.Sequential:
    """Convolution, pooling, flatten, dense: m = 228, H = 10."""
    act = nn.LeakyReLU(slope)
    return randomised(
        nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1), act, nn.MaxPool2d(2), nn.Conv2d(3, 4, 3, padding=1), act,
            nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4, 3), act, nn.Linear(3, 11),
        )
    )  # fmt: skip


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("widths", WIDTHS)
def test_path_matrix_has_rank_m_minus_h(widths: tuple[int, ...], bias: bool) -> None:
    model = plain(*widths, bias=bias)
    found = BasisPaths(model, inputs(3, widths[0]))
    m, hidden = sum(value.numel() for value in found.params.values()), sum(widths[1:-1])
    paths = all_paths(found.graph, found.params)
    if not bias:
        assert len(paths) == math.prod(widths)
    assert rank(path_matrix(paths, found.params)) == m - hidden == found.count


def test_paths_are_those_of_a_loop_over_units() -> None:
    model = plain(3, 2, 4, 2)
    found = BasisPaths(model, inputs(3, 3))
    expected = set()
    for i, a, b, k in itertools.product(range(3), range(2), range(4), range(2)):
        expected.add((("0.weight", a * 3 + i), ("2.weight", b * 2 + a), ("4.weight", k * 4 + b)))
    assert set(all_paths(found.graph, found.params)) == expected


@pytest.mark.parametrize("rule", ["max_product", "cyclic"])
@pytest.mark.parametrize(
    "model",
    [plain(3, 2, 4, 2, bias=True), plain(4, 2, 5, 3, 1), randomised(Res()), lenet_like().model],
    ids=["mlp with biases", "mlp", "residual", "lenet"],
)
def test_basis_paths_are_paths_and_a_basis(model: nn.Module, rule: str) -> None:
    first = next(model.parameters())
    x = inputs(3, first.shape[1], *([6, 6] if first.ndim == 4 else []))
    paths = BasisPaths(model, x, rule)
    found = paths
    basis, every = basis_paths(found), set(all_paths(found.graph, found.params))
    assert len(basis) == len(set(basis)) == paths.count
    assert set(basis) <= every
    matrix = path_matrix(basis, found.params)
    assert rank(matrix) == paths.count == rank(path_matrix(sorted(every), found.params))
    torch.testing.assert_close(path_values(basis, found.params), paths.values(), rtol=1e-12, atol=0)
    skeleton = {
        (found.graph.layers[int(way.layer[u])].weight, int(way.entry[u]))
        for way in (found.prefix, found.suffix)
        for u in range(1, paths.n_classes + 1)
    }
    for path in basis:
        assert sum(edge not in skeleton for edge in path) <= 1
    keep = torch.cat([~found.is_frozen(block.name).flatten() for block in found.blocks])
    block = matrix[:, keep]  # square; its determinant is 1 up to the order of the rows
    assert abs(abs(float(torch.linalg.det(block))) - 1) < 1e-6


def test_literal_reading_of_the_skeleton_method_is_dependent() -> None:
    """'At most one skeleton weight' as printed: 24 and 60 paths of rank 15 and 21; with 'non-' exactly that many."""
    for layers, literal, expected in ((2, 24, 15), (3, 60, 21)):
        found = BasisPaths(plain(*[3] * (layers + 1)), inputs(3, 3), "diagonal")
        every = all_paths(found.graph, found.params)
        on_diagonal = [sum(entry % 4 == 0 for _, entry in path) for path in every]
        as_printed = [path for path, n in zip(every, on_diagonal, strict=True) if n <= 1]
        as_meant = [path for path, n in zip(every, on_diagonal, strict=True) if layers - n <= 1]
        assert (len(as_printed), rank(path_matrix(as_printed, found.params))) == (literal, expected)
        assert set(as_meant) == set(basis_paths(found))
        assert len(as_meant) == expected


def test_frozen_set_is_admissible_exactly_if_it_is_a_spanning_tree() -> None:
    widths = (2, 3, 2, 2)
    found = BasisPaths(plain(*widths), inputs(3, 2))
    matrix = path_matrix(all_paths(found.graph, found.params), found.params)
    edges = []  # (tail, head), hidden nodes 1..5, ground 0
    for layer in found.graph.layers:
        edges += [(int(t), int(h)) for h, t in itertools.product(layer.outputs, layer.inputs)]
    generator = torch.Generator().manual_seed(0)
    seen = {True: 0, False: 0}
    for _ in range(400):
        chosen = torch.randperm(len(edges), generator=generator)[: sum(widths[1:-1])].tolist()
        group = list(range(6))
        for e in chosen:
            a, b = (group[node] for node in edges[e])
            group = [b if g == a else g for g in group]
        tree = len(set(group)) == 1
        others = [e for e in range(len(edges)) if e not in chosen]
        assert (rank(matrix[:, others]) == len(others)) == tree
        seen[tree] += 1
    assert min(seen.values()) > 20


@pytest.mark.parametrize("rule", ["max_product", "cyclic"])
@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_inverse_both_ways(build, rule: str) -> None:  # type: ignore[no-untyped-def]
    tiny = build()
    paths = BasisPaths(tiny.model, tiny.x, rule)
    values = paths.values()
    assert values.shape == (paths.count,)
    assert values.dtype == torch.float64
    m = sum(value.numel() for value in paths.model.parameters())
    assert paths.count == m - paths.n_classes
    back = params(paths.to_model(values))
    for name, value in params(paths.model).items():
        torch.testing.assert_close(back[name], value, rtol=1e-12, atol=0)
    moved = values * (1 + 0.3 * inputs(paths.count))
    other = params(paths.to_model(moved))
    torch.testing.assert_close(paths.values_of(other), moved, rtol=1e-12, atol=0)
    for name, entries in paths.frozen.items():
        assert torch.equal(other[name].flatten()[entries], params(paths.model)[name].flatten()[entries])
    assert sum(len(entries) for entries in paths.frozen.values()) == paths.n_classes


def test_inverse_is_the_papers_on_equal_widths() -> None:
    """Equations (20) and (21), with no denominator for the first layer's non-skeleton weights."""
    model = plain(3, 3, 3, 3)
    paths = BasisPaths(model, inputs(4, 3), "diagonal")
    v = paths.values()
    shift = 0.05 * inputs(paths.count) * v.abs()
    found = params(paths.to_model(v + shift))
    layout, w = paths.split(shift), params(model)
    value = paths.split(v)
    expected = {name: weight.clone() for name, weight in w.items()}
    first = torch.zeros(3, dtype=torch.float64)
    for i in range(3):
        expected["0.weight"][i, i] = w["0.weight"][i, i] * (1 + layout["0.weight"][i, i] / value["0.weight"][i, i])
        first[i] = (expected["0.weight"][i, i] - w["0.weight"][i, i]) / w["0.weight"][i, i]
    for name in ("0.weight", "2.weight", "4.weight"):
        for j, i in itertools.product(range(3), range(3)):
            if i != j:
                moved = w[name][j, i] * (1 + layout[name][j, i] / value[name][j, i])
                expected[name][j, i] = moved if name == "0.weight" else moved / (1 + first[i])
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-12, atol=0)


def test_zero_weights_that_are_no_skeleton_are_values_like_others() -> None:
    model = plain(3, 4, 2, bias=True)
    model[0].weight.data[0, 1] = 0.0
    model[0].bias.data[:] = 0.0
    paths = BasisPaths(model, inputs(3, 3))
    values = paths.values()
    assert int((values == 0).sum()) == 5
    back = params(paths.to_model(values))
    for name, weight in params(model).items():
        torch.testing.assert_close(back[name], weight, rtol=1e-12, atol=0)


@pytest.mark.parametrize("rule", ["max_product", "cyclic"])
def test_lemma_5_1(rule: str) -> None:
    for model, x in ((plain(3, 2, 4, 2), inputs(3, 3)), (randomised(Res()), inputs(3, 2))):
        found = BasisPaths(model, x, rule)
        paths = all_paths(found.graph, found.params)
        exponents = lemma_exponents(found, paths)
        assert (exponents.sum(1) == 1).all()
        log, sign = found.log_values()
        predicted = (exponents.double() @ log).exp() * torch.where(exponents % 2 == 1, sign, 1.0).prod(1)
        torch.testing.assert_close(predicted, path_values(paths, found.params), rtol=1e-12, atol=0)


def test_path_sum_is_the_forward_pass() -> None:
    for bias in (False, True):
        model, x = plain(3, 2, 4, 2, bias=bias), inputs(7, 3)
        torch.testing.assert_close(path_sum(BasisPaths(model, x), x), model(x).detach())


def test_flipping_signs_keeps_path_values_and_changes_the_function() -> None:
    model, x = plain(3, 3, 3, 3), inputs(20, 3)
    flipped = plain(3, 3, 3, 3)
    flipped[0].weight.data[1] *= -1
    flipped[2].weight.data[:, 1] *= -1
    one, other = (BasisPaths(net, x, "diagonal").values() for net in (model, flipped))
    torch.testing.assert_close(one, other)
    assert (model(x) - flipped(x)).abs().max() > 1e-3


@pytest.mark.parametrize("by", ["unit", "layer", "permutation"])
@pytest.mark.parametrize("tiny", [mlp(), lenet_like(), residual(), batchnorm_conv()], ids=lambda tiny: tiny.name)
def test_values_and_the_loss_as_their_function_are_invariant(tiny, by: str) -> None:  # type: ignore[no-untyped-def]
    twin = fs.rescale(tiny.model, tiny.x, by=by, low=0.04, high=25, seed=2)
    for rule in ("max_product", "cyclic"):
        before, after = BasisPaths(tiny.model, tiny.x, rule), BasisPaths(twin, tiny.x, rule)
        one, other = before.values(), after.values()
        if by == "permutation":
            gap = (one.sort().values - other.sort().values).abs().max()
            assert gap <= 1e-12 if rule == "max_product" else gap > 1e-2
            continue
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
        moved = one * (1 + 0.2 * inputs(len(one)))
        torch.testing.assert_close(
            before.to_model(moved)(tiny.x), after.to_model(moved)(tiny.x), rtol=1e-10, atol=1e-10
        )


def test_diagonal_rule_is_invariant_and_no_rule_goes_by_the_largest_weight() -> None:
    model, x = plain(3, 3, 3, 3, bias=True), inputs(5, 3)
    twin = fs.rescale(model, x, by="unit", seed=1)
    torch.testing.assert_close(
        BasisPaths(model, x, "diagonal").values(), BasisPaths(twin, x, "diagonal").values(), rtol=1e-12, atol=0
    )
    assert RULES == ("max_product", "cyclic", "diagonal")


def test_max_product_takes_the_strongest_path_through_every_unit() -> None:
    found = BasisPaths(plain(3, 2, 4, 2), inputs(3, 3))
    paths = all_paths(found.graph, found.params)
    values = path_values(paths, found.params).abs()
    for number in range(1, found.n_classes + 1):
        rows = [
            int(entry) // found.params[layer.weight].shape[1]
            for layer in found.graph.layers[:2]
            for entry in [(layer.outputs == number).nonzero().flatten()[:1].sum() * found.params[layer.weight].shape[1]]
            if (layer.outputs == number).any()
        ]
        layer = next(layer for layer in found.graph.layers if (layer.outputs == number).any())
        width = found.params[layer.weight].shape[1]
        through = [any(name == layer.weight and entry // width == rows[0] for name, entry in p) for p in paths]
        assert float(values[torch.tensor(through)].max()) == pytest.approx(float(found.unit_values[number - 1]))


@pytest.mark.parametrize(
    ("model", "x", "m", "h"),
    [
        (Res(6, slope=0.2), inputs(60, 6), 48, 7),
        (Res(3, on_input=True, slope=0.2), inputs(60, 3), 30, 4),
        (Branches(), inputs(120, 1, 4, 4), 113, 12),
        (spec_conv(), inputs(80, 2, 4, 4), 228, 10),
    ],
    ids=["residual", "residual on the input", "branches", "conv"],
)
def test_count_is_the_number_of_directions_that_change_the_function(
    model: nn.Module, x: Tensor, m: int, h: int
) -> None:
    """Rank of the outputs' Jacobian: no paths in it, so that ties and walls are checked from outside."""
    found = []
    for seed in range(12):  # units that are dead on these inputs lower the rank; the generic one is the largest
        model = randomised(model, seed)
        paths = BasisPaths(model, x)
        used = {block.name for block in paths.blocks}
        assert sum(value.numel() for name, value in params(model).items() if name in used) == m
        assert (paths.n_classes, paths.count) == (h, m - h)
        jacobian = jacrev(lambda w: functional_call(model, w, (x,)).flatten())(params(model))  # noqa: B023
        found.append(rank(torch.cat([jacobian[name].flatten(1) for name in params(model)], dim=1)))
        in_values = jacrev(lambda v: functional_call(model, paths.params_of(v), (x,)).flatten())  # noqa: B023
        assert rank(in_values(paths.values())) == found[-1]
        if found[-1] == paths.count:
            break
    assert max(found) == m - h


def test_walls_end_paths_and_what_cannot_be_rescaled_is_its_own_value() -> None:
    model = randomised(
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2), nn.PReLU())
    )
    paths = BasisPaths(model, inputs(3, 3))
    assert paths.n_classes == 4
    assert paths.count == sum(value.numel() for value in model.parameters()) - 4
    layout = paths.split(paths.values())
    torch.testing.assert_close(layout["4.weight"], model[4].weight.detach())
    torch.testing.assert_close(layout["5.weight"], model[5].weight.detach())
    twin = fs.rescale(model, inputs(3, 3), by="unit", seed=5)
    torch.testing.assert_close(BasisPaths(twin, inputs(3, 3)).values(), paths.values())


@pytest.mark.parametrize("cut", ["", "2", "4"])
def test_which_edges_are_frozen_does_not_matter_to_the_function(cut: str) -> None:
    model, x = plain(4, 3, 5, 2, bias=True), inputs(9, 4)
    reference, other = BasisPaths(model, x, "cyclic"), BasisPaths(model, x, "cyclic", cut=cut)
    moved = reference.values() * (1 + 0.2 * inputs(reference.count))
    torch.testing.assert_close(reference.values(), other.values())
    torch.testing.assert_close(reference.to_model(moved)(x), other.to_model(moved)(x))
    weights = params(other.to_model(moved))
    held = [u for u in range(1, other.n_classes + 1) if other.held_by_input[u]]
    assert len(held) == {"": 0, "2": 3, "4": 8}[cut]
    for unit in held:
        name = other.graph.layers[int(other.prefix.layer[unit])].weight
        entry = int(other.prefix.entry[unit])
        torch.testing.assert_close(weights[name].flatten()[entry], params(model)[name].flatten()[entry])

    def loss(paths: BasisPaths, v: Tensor) -> Tensor:
        return functional_call(model, paths.params_of(v), (x,)).square().sum(1).mean()

    traces = [hessian(lambda v, p=p: loss(p, v))(reference.values()).trace() for p in (reference, other)]
    assert float(abs(traces[0] - traces[1])) <= 1e-9 * float(abs(traces[0]))


def test_inverse_can_be_differentiated_twice_and_vectorised() -> None:
    tiny = residual()
    paths = BasisPaths(tiny.model, tiny.x)
    v = paths.values().requires_grad_()

    def loss(values: Tensor) -> Tensor:
        return functional_call(paths.model, paths.params_of(values), (tiny.x,)).square().mean()

    assert torch.autograd.gradcheck(loss, v)
    assert torch.autograd.gradgradcheck(loss, v)
    stacked = v.detach() * (1 + 0.1 * inputs(5, paths.count))
    together = vmap(loss)(stacked)
    torch.testing.assert_close(together, torch.stack([loss(row) for row in stacked]))
    forward = vmap(paths.values_of)(vmap(paths.params_of)(stacked))
    torch.testing.assert_close(forward, stacked)


def test_deep_networks_keep_their_digits_as_logarithms() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(34) for layer in (nn.Linear(64, 64, bias=False), nn.ReLU())]
    paths = BasisPaths(nn.Sequential(*layers[:-1]), torch.ones(2, 64), "cyclic")
    log, sign = paths.log_values()
    assert log.isfinite().all()
    assert float(log.median()) / math.log(10) < -38
    assert set(sign.tolist()) == {-1.0, 1.0}
    with pytest.warns(NumericalWarning, match="float64 model"):
        paths.values()
    double = BasisPaths(nn.Sequential(*layers[:-1]).double(), torch.ones(2, 64), "cyclic")
    values = double.values()
    back = params(double.to_model(values))
    assert max(float((back[k] - w).abs().max()) for k, w in params(double.model).items()) < 1e-12


def test_dead_units_are_refused_by_name() -> None:
    model, x = plain(3, 4, 2), inputs(3, 3)
    model[0].weight.data[2] = 0
    with pytest.raises(NotApplicable, match=r"layer 0, unit 2.*incoming weights that are all zero"):
        BasisPaths(model, x)
    with pytest.raises(NotApplicable, match=r"layer 0, unit 2, weight from input 2.*zero"):
        BasisPaths(model, x, "cyclic")
    model = plain(3, 4, 2)
    model[2].weight.data[:, 3] = 0
    with pytest.raises(NotApplicable, match=r"layer 2, input 3.*outgoing weights that are all zero"):
        BasisPaths(model, x)
    model[2].weight.data[0, 3] = math.nan
    with pytest.raises(NotApplicable, match=r"layer 2, unit 0.*finite"):
        BasisPaths(model, x)


def test_wrong_use_is_refused() -> None:
    model, x = plain(3, 4, 2), inputs(3, 3)
    with pytest.raises(InputError, match="rule for basis paths"):
        BasisPaths(model, x, "argmax")
    with pytest.raises(InputError, match=r"layer 0.*cyclic"):
        BasisPaths(model, x, "diagonal")
    paths = BasisPaths(model, x)
    for wrong in (torch.ones(3), paths.values() * math.nan, [1.0]):
        with pytest.raises(InputError, match=f"{paths.count} finite values"):
            paths.to_model(wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="Module"):
        BasisPaths(lambda x: x, x)  # type: ignore[arg-type]


def test_nothing_is_touched() -> None:
    tiny = batchnorm_conv()
    before = {name: value.clone() for name, value in tiny.model.state_dict().items()}
    state = torch.get_rng_state()
    paths = BasisPaths(tiny.model, tiny.x)
    twin = paths.to_model(paths.values() * 1.1)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in tiny.model.state_dict().items())
    assert not any(isinstance(module, nn.BatchNorm2d) for module in twin.modules())
    torch.testing.assert_close(paths.to_model(paths.values())(tiny.x), tiny.model(tiny.x))


@pytest.mark.long
def test_eleven_million_weights() -> None:
    from flatscope.training.models import build

    torch.manual_seed(0)
    model = build("plainnet18").eval()
    begun = time.perf_counter()
    paths = BasisPaths(model, torch.randn(2, 3, 32, 32))
    values = paths.values()
    twin = paths.to_model(values)
    assert time.perf_counter() - begun < 30
    assert (paths.count, paths.n_classes) == (10_992_330, 3_904)
    gap = max(
        float((a - b).detach().abs().max()) for a, b in zip(twin.parameters(), paths.model.parameters(), strict=True)
    )
    assert gap < 1e-6
