"""Rescaling and permuting: the same function with other weights, on every kind of network, and refused elsewhere."""

import copy
from collections.abc import Callable

import pytest
import torch
from pieces import Net
from torch import Tensor, nn
from torch.nn import functional

import flatscope as fs
from flatscope.errors import InputError, NotApplicable, UnknownNameError
from flatscope.network.interception import FunctionChangedError, refuse_if_different, relative_difference
from flatscope.network.tracing import trace
from flatscope.params import named_parameters
from flatscope.symmetries.folding import fold_batchnorm
from flatscope.symmetries.scaling import random_scales, rescale, rescaled_params, scales_from_factors
from flatscope_papers.theory.rewritten_networks import shrink_layer

pytestmark = pytest.mark.fast

torch.set_num_threads(1)
BatchNorm = nn.modules.batchnorm._BatchNorm


class Block(nn.Module):
    """A residual block, with a projection where the width changes."""

    def __init__(self, n_in: int, n_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False), nn.BatchNorm2d(n_out)
        self.conv2, self.bn2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False), nn.BatchNorm2d(n_out)
        self.down: nn.Module = nn.Identity()
        if stride > 1 or n_in != n_out:
            self.down = nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out))

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(inner)) + self.down(x))


def head(n: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n, 4)]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.LeakyReLU(0.1), nn.Linear(6, 3))


def lenet() -> nn.Module:
    convolutions = [nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


def resnet() -> nn.Module:
    stem = [nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU()]
    return nn.Sequential(*stem, Block(6, 6), Block(6, 6), Block(6, 8, 2), Block(8, 8), *head(8))


def vgg() -> nn.Module:
    parts: list[nn.Module] = []
    for n_in, n_out in ((3, 4), (4, 6), (6, 8)):
        parts += [nn.Conv2d(n_in, n_out, 3, padding=1), nn.BatchNorm2d(n_out), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(
        *parts, nn.Flatten(), nn.Dropout(0.5), nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)
    )


def shuffle() -> nn.Module:
    def unit() -> nn.Module:
        def forward(m, x):
            left, right = x.chunk(2, dim=1)
            right = torch.relu(m.point(m.depth(torch.relu(m.first(right)))))
            return functional.channel_shuffle(torch.cat([left, right], dim=1), 2)

        depth = nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False)
        return Net(forward, first=nn.Conv2d(4, 4, 1), depth=depth, point=nn.Conv2d(4, 4, 1, groups=2))

    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), unit(), unit(), *head(8))


def inception() -> nn.Module:
    def forward(m, x):
        x = torch.relu(m.stem(x))
        parts = [m.one(x), m.three(torch.relu(m.reduce(x))), m.pooled(functional.max_pool2d(x, 3, 1, 1))]
        return m.head(torch.relu(torch.cat(parts, 1)).mean((2, 3)))

    parts = {"stem": nn.Conv2d(3, 4, 3), "one": nn.Conv2d(4, 2, 1), "reduce": nn.Conv2d(4, 2, 1)}
    more = {"three": nn.Conv2d(2, 3, 3, padding=1), "pooled": nn.Conv2d(4, 2, 1), "head": nn.Linear(7, 3)}
    return Net(forward, **parts, **more)


def functional_style() -> nn.Module:
    def forward(m, x):
        x = functional.max_pool2d(functional.relu(m.conv(x)), 2)
        y = torch.flatten(functional.dropout(x, training=m.training), 1)
        z = functional.relu(m.fc1(y)) + functional.relu(m.fc2(y))
        a, b = torch.split(z, [3, 3], dim=1)
        return m.out(torch.cat([2 * a, b / 3, a - b], dim=-1).view(x.size(0), -1))

    parts = {"fc1": nn.Linear(36, 6), "fc2": nn.Linear(36, 6), "out": nn.Linear(9, 2)}
    return Net(forward, conv=nn.Conv2d(1, 4, 3), **parts)


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    return Net(
        lambda m, x: m.head(m.layer(m.embed(x)).mean(1)), embed=nn.Linear(4, 8), layer=layer, head=nn.Linear(8, 3)
    )


def looping() -> nn.Module:
    """Python that no symbolic tracer follows: as many rounds as the data say."""

    def forward(m, x):
        rounds = 1 + int(float(x[0].abs().sum()) > 0)
        x = torch.relu(m.first(x))
        for _ in range(rounds if len(x) > 1 else 2):
            x = torch.relu(m.again(x))
        return m.out(x)

    return Net(forward, first=nn.Linear(5, 5), again=nn.Linear(5, 5), out=nn.Linear(5, 2))


def upsampling() -> nn.Module:
    down = [
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(4, 8, 3),
        nn.PReLU(),
    ]
    up = [
        nn.PixelShuffle(2),
        nn.ConvTranspose2d(2, 4, 3, stride=2, groups=2),
        nn.ReLU(),
        nn.Upsample(scale_factor=2, mode="bilinear"),
    ]
    return nn.Sequential(*down, *up, nn.Conv2d(4, 2, 3), nn.ReLU(), *head(2))


NETWORKS = {
    "mlp": (mlp, (4, 5)),
    "lenet": (lenet, (4, 1, 14, 14)),
    "resnet": (resnet, (3, 3, 8, 8)),
    "vgg": (vgg, (3, 3, 8, 8)),
    "shuffle": (shuffle, (3, 3, 6, 6)),
    "inception": (inception, (3, 3, 7, 7)),
    "functional": (functional_style, (3, 1, 8, 8)),
    "transformer": (transformer, (3, 5, 4)),
    "looping": (looping, (3, 5)),
    "upsampling": (upsampling, (2, 3, 6, 6)),
    "1-D": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3, dilation=2),
            nn.BatchNorm1d(4),
            nn.ReLU(),
            nn.AvgPool1d(2),
            nn.Flatten(),
            nn.Linear(12, 3),
        ),
        (3, 2, 10),
    ),
    "3-D": (
        lambda: nn.Sequential(
            nn.Conv3d(1, 3, 2),
            nn.ReLU(),
            nn.BatchNorm3d(3),
            nn.Conv3d(3, 4, 2),
            nn.ReLU(),
            nn.AdaptiveMaxPool3d(1),
            nn.Flatten(),
            nn.Linear(4, 2),
        ),
        (2, 1, 4, 4, 4),
    ),
    "sequences": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Flatten(), nn.Linear(15, 2)),
        (2, 3, 4),
    ),
}


def prepared(name: str) -> tuple[nn.Module, Tensor]:
    """The network in float64 with lively weights and running statistics, and a batch of inputs."""
    build, shape = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build()
        for module in model.modules():
            if isinstance(module, BatchNorm):
                nn.init.normal_(module.running_mean)
                nn.init.uniform_(module.running_var, 0.5, 2)
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
            elif getattr(module, "bias", None) is not None and isinstance(module.bias, Tensor):
                nn.init.normal_(module.bias)
        return model.double().eval(), torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("by", ["unit", "layer", "permutation"])
@pytest.mark.parametrize("name", NETWORKS)
def test_same_function_other_weights(name, by):
    model, x = prepared(name)
    before = copy.deepcopy(model.state_dict())
    twin = rescale(model, x, by=by, low=1 / 25, high=25.0, seed=3)
    assert relative_difference(model, twin, x) < 1e-10
    fresh = torch.randn(*x.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    assert relative_difference(model, twin, fresh) < 1e-10  # not only on the example it was checked on
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    clean = fold_batchnorm(model, x)
    moved = {key for key, value in twin.named_parameters() if not torch.allclose(value, clean.get_parameter(key))}
    graph = trace(clean, x)
    free = {layer.weight for layer in graph if layer.n_free}
    assert moved
    assert by != "unit" or free <= moved
    assert torch.equal(next(rescale(model, x, by, 1 / 25, 25.0, 3).parameters()), next(twin.parameters()))


def test_the_network_of_networks_is_what_we_think():
    """Free classes per network, so that a tie or wall that appears or disappears is noticed."""
    found = {}
    for name in NETWORKS:
        model, x = prepared(name)
        graph = trace(fold_batchnorm(model, x), x)
        found[name] = (graph.n_units, graph.n_classes)
    assert found == {
        "mlp": (13, 13),
        "lenet": (15, 15),
        "resnet": (6 * 5 + 8 * 5, 6 * 3 + 8 * 3),  # per stage: the stream and the inner channels of two blocks
        "vgg": (24, 24),
        "shuffle": (32, 32),
        "inception": (13, 13),
        "functional": (16, 4 + 3),  # fc1 + fc2, then a - b ties the two halves
        "transformer": (60, 20),
        "looping": (10, 5),
        "upsampling": (4 + 8 + 4 + 2, 4 + 2 + 4 + 2),
        "1-D": (4, 4),
        "3-D": (7, 7),
        "sequences": (11, 11),
    }


@pytest.mark.parametrize("name", ["mlp", "lenet", "resnet", "inception"])
def test_inverse_composition_and_layer_scaling_as_a_special_case(name):
    model, x = prepared(name)
    clean = fold_batchnorm(model, x)
    graph, params = trace(clean, x), named_parameters(clean)
    scales = random_scales(graph, low=0.04, high=25.0, seed=1)
    there = rescaled_params(graph, params, scales)
    back = rescaled_params(graph, there, 1 / scales)
    for key, value in params.items():
        assert torch.allclose(back[key], value, rtol=1e-14, atol=0)
    other = random_scales(graph, seed=2)
    twice = rescaled_params(graph, there, other)
    once = rescaled_params(graph, params, scales * other)
    assert all(torch.allclose(twice[key], once[key], rtol=1e-13, atol=0) for key in params)


def test_layer_scaling_multiplies_every_matrix_by_one_number():
    for name in ("mlp", "lenet", "resnet", "vgg", "inception", "functional"):
        model, x = prepared(name)
        clean = fold_batchnorm(model, x)
        graph, params = trace(clean, x), named_parameters(clean)
        changed = rescaled_params(graph, params, random_scales(graph, "layer", seed=4))
        for layer in graph:
            ratio = changed[layer.weight] / params[layer.weight]
            assert torch.allclose(ratio, ratio.flatten()[0].expand_as(ratio), rtol=1e-12), (name, layer.name)


def test_dinh_by_hand():
    """(W1, b1, W2) → (c W1, c b1, W2 / c), the biases of later layers untouched."""
    model, x = prepared("mlp")
    twin = rescale(model, x, factors={"0": 25.0})
    assert torch.allclose(twin[0].weight, 25 * model[0].weight, rtol=1e-14)
    assert torch.allclose(twin[0].bias, 25 * model[0].bias, rtol=1e-14)
    assert torch.allclose(twin[2].weight, model[2].weight / 25, rtol=1e-14)
    assert torch.equal(twin[2].bias, model[2].bias)
    assert torch.equal(twin[4].weight, model[4].weight)


def test_factors_per_unit_and_for_layers_that_share_a_scale():
    model, x = prepared("resnet")
    clean = fold_batchnorm(model, x)
    c = torch.linspace(0.1, 25, 6, dtype=torch.float64)
    twin = rescale(model, x, factors={"0": c, "3.conv1": [2.0] * 6})
    rows = c[:, None, None, None]
    assert torch.allclose(twin[0].weight, clean[0].weight * rows, rtol=1e-13)
    assert torch.allclose(twin[3].conv1.weight, clean[3].conv1.weight * 2 / c[:, None, None], rtol=1e-13)
    assert torch.allclose(twin[3].conv2.weight, clean[3].conv2.weight * rows / 2, rtol=1e-13)
    assert torch.allclose(twin[4].conv2.bias, clean[4].conv2.bias * c, rtol=1e-13)  # not named, but tied to "0"
    with pytest.raises(InputError, match=r"shares the scale.*4\.conv2|4\.conv2.*shares the scale"):
        rescale(model, x, factors={"0": c, "4.conv2": 2.0})


@pytest.mark.parametrize(("name", "layer"), [("mlp", "2"), ("lenet", "3"), ("vgg", "4"), ("upsampling", "6")])
def test_shrunk_layer_has_norm_epsilon(name, layer):
    model, x = prepared(name)
    twin = shrink_layer(model, x, layer, epsilon=1e-3)
    assert float(twin.get_parameter(f"{layer}.weight").detach().norm()) == pytest.approx(1e-3)
    assert relative_difference(model, twin, x) < 1e-10


def test_a_shrunk_layer_brings_the_zeroed_network_into_the_ball():
    """Theorem 3.2: within distance ε of the new weights lies the network whose layer is zero."""
    model, x = prepared("mlp")
    twin = shrink_layer(model, x, "0", epsilon=1e-3)
    zeroed, moved = copy.deepcopy(model), copy.deepcopy(twin)
    with torch.no_grad():
        zeroed[0].weight.zero_()
        moved[0].weight.zero_()
    assert relative_difference(zeroed, moved, x) < 1e-10
    assert float((moved[0].weight - twin[0].weight).detach().norm()) == pytest.approx(1e-3)


def test_unscaled_biases_change_the_function():
    model, x = prepared("mlp")
    twin = rescale(model, x, by="layer", seed=0)
    with torch.no_grad():
        twin[0].bias.copy_(model[0].bias)
    assert relative_difference(model, twin, x) > 1e-3


def test_sign_flips_are_refused_for_a_reason():
    model, x = prepared("mlp")
    graph, params = trace(model, x), named_parameters(model)
    for call in (
        lambda: rescale(model, x, factors={"0": -1.0}),
        lambda: rescale(model, x, low=-1.0),
        lambda: rescaled_params(graph, params, -torch.ones(graph.n_classes)),
        lambda: rescale(model, x, factors={"0": [1.0] * 6 + [0.0]}),
        lambda: rescale(model, x, factors={"0": float("inf")}),
    ):
        with pytest.raises(InputError, match="not -relu"):
            call()
    flipped = copy.deepcopy(model)
    with torch.no_grad():  # what was refused: every path value is kept, the function is not
        flipped[0].weight[0] *= -1
        flipped[0].bias[0] *= -1
        flipped[2].weight[:, 0] *= -1
    assert relative_difference(model, flipped, x) > 1e-3


def test_nothing_to_rescale_names_the_walls():
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)).double()
    x = torch.randn(3, 3, dtype=torch.float64)
    for by in ("unit", "layer"):
        with pytest.raises(NotApplicable, match=r"gelu \(1\)"):
            rescale(model, x, by=by)
    with pytest.raises(InputError, match="fixed by gelu"):
        rescale(model, x, factors={"0": 2.0})
    twin = rescale(model, x, by="permutation")  # a GELU fixes scales, not places
    assert sorted(twin[0].bias.tolist()) == sorted(model[0].bias.tolist())
    assert not torch.equal(twin[0].bias, model[0].bias)
    with pytest.raises(NotApplicable, match="change places"):
        rescale(nn.Linear(3, 2), torch.ones(2, 3), by="permutation")


def test_permutation_only_moves_entries():
    model, x = prepared("resnet")
    clean = fold_batchnorm(model, x)
    twin = rescale(model, x, by="permutation", seed=5)
    for key, value in clean.named_parameters():
        assert torch.equal(value.flatten().sort().values, twin.get_parameter(key).flatten().sort().values)
    assert not torch.equal(clean[0].weight, twin[0].weight)


def test_batchnorm_scaling_keeps_the_batchnorms():
    """(γ, β) × c and the next layer / c: the symmetry of the network as given, exact in both modes."""
    model, x = prepared("vgg")
    twin = rescale(model, x, by="batchnorm", seed=1)
    assert torch.equal(twin[0].weight, model[0].weight)
    ratio = twin[1].weight / model[1].weight
    assert torch.allclose(twin[1].bias / model[1].bias, ratio)
    assert torch.allclose(twin[4].weight, model[4].weight / ratio[None, :, None, None])
    training = [copy.deepcopy(m).train() for m in (model, twin)]
    for network in training:
        network[13].p = 0.0
    a, b = (network(x) for network in training)
    assert torch.allclose(a, b, rtol=1e-10)
    with pytest.raises(NotApplicable):
        rescale(*prepared("mlp"), by="batchnorm")


def test_float32_and_dictionaries_and_shared_batchnorm():
    model, x = prepared("resnet")
    twin = rescale(model.float(), x.float())
    assert relative_difference(model, twin, x) < 1e-4
    pair = Net(
        lambda m, left, right: m.c(torch.relu(m.a(left) + m.a(right))), a=nn.Linear(2, 3), c=nn.Linear(3, 1)
    ).double()
    example = {"right": torch.randn(4, 2), "left": torch.randn(4, 2)}
    twin = rescale(pair, example)
    assert not torch.equal(twin.a.weight, pair.a.weight)


def test_a_misread_network_is_caught_afterwards():
    model, x = prepared("mlp")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.mul_(1.001)
    with pytest.raises(FunctionChangedError, match="1e-10"):
        refuse_if_different(model, other, x, "test")


def test_mistakes_are_explained():
    model, x = prepared("mlp")
    graph = trace(model, x)
    with pytest.raises(InputError, match="one of layer, unit"):
        rescale(model, x, by="neuron")
    with pytest.raises(UnknownNameError):
        rescale(model, x, factors={"fc1": 2.0})
    with pytest.raises(InputError, match="7 units"):
        rescale(model, x, factors={"0": [1.0, 2.0]})
    with pytest.raises(InputError, match="network output"):
        scales_from_factors(graph, {"4": 2.0})
    with pytest.raises(InputError, match="13 scales"):
        rescaled_params(graph, named_parameters(model), torch.ones(3))
    with pytest.raises(InputError, match="no factors"):
        rescale(model, x, by="permutation", factors={"0": 2.0})
    with torch.no_grad():
        model[0].weight[1] = 0
    with pytest.raises(InputError, match="unit 1"):
        shrink_layer(model, x, "0", 1e-3)


def test_randomness_and_modes_are_left_alone():
    model, x = prepared("vgg")
    model.train()
    state = torch.get_rng_state()
    twin = rescale(model, x)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert not twin.training
    assert all(value.grad is None for value in model.parameters())
    assert torch.equal(rescale(model, x, seed=1)[0].weight, rescale(model, x, seed=1)[0].weight)
    assert not torch.equal(rescale(model, x, seed=1)[0].weight, twin[0].weight)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", NETWORKS)
def test_on_a_gpu(name):
    model, x = prepared(name)
    on_cpu = rescale(model, x, seed=2)
    on_gpu = rescale(model.cuda(), x, seed=2)  # the example follows the model
    for key, value in on_cpu.named_parameters():
        assert on_gpu.get_parameter(key).is_cuda
        assert torch.allclose(on_gpu.get_parameter(key).cpu(), value, rtol=1e-9)
    assert relative_difference(model, rescale(model, x.cuda(), by="permutation"), x) < 1e-10
    assert relative_difference(model.float(), rescale(model.float(), x), x) < 1e-4


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.register_buffer("mask", (torch.arange(20) % 3 > 0).reshape(5, 4).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.linear(x, self.first.weight * self.mask, self.first.bias).relu())


class _Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.randn(2, 4, 3)), nn.Parameter(torch.randn(3, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bhk,khc->bc", torch.einsum("bi,hik->bhk", x, self.first).relu(), self.last)


@pytest.mark.parametrize("by", ["unit", "permutation"])
@pytest.mark.parametrize(
    "build",
    [
        _Masked,
        _Products,
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.ReLU(), nn.Linear(5, 3)),
    ],
    ids=["mask", "products", "weight norm"],
)
def test_a_problem_of_a_rewritten_copy_is_of_its_function(build: Callable[[], nn.Module], by: str) -> None:
    """Weights that are computed became parameters in the copy, and a problem of it went back to what they were of."""
    torch.manual_seed(0)
    model, x, y = build().double().eval(), torch.randn(9, 4).double(), torch.arange(9) % 3
    twin = fs.rescale(model, x, by=by, seed=1)
    problem = fs.Problem(twin, train=(x, y))
    assert torch.allclose(problem.forward(x), model(x), atol=1e-12)
    given, found = (fs.measure(p, ["rho_sum", "margin"]) for p in (fs.Problem(model, train=(x, y)), problem))
    assert [found[name] for name in ("rho_sum", "margin")] == pytest.approx(
        [given[name] for name in ("rho_sum", "margin")], rel=1e-9
    )
