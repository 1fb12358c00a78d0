"""Networks and starting weights: the papers' parameter counts, shapes, tracing, seeds."""

import math

import pytest
import torch
from torch import fx, nn

from flatscope.errors import InputError, UnknownNameError
from flatscope.isolation import private_randomness
from flatscope.training.initialization import initialize, schemes, set_skeleton
from flatscope.training.models import available, build, lenet5, mlp, model_options

torch.set_num_threads(1)


def n_parameters(model):
    return sum(p.numel() for p in model.parameters())


def layers(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}


def n_weights(model):
    return sum(layer.weight.numel() for layer in layers(model).values())


def n_folded(model):
    """Parameters once every BatchNorm is folded: each layer with one bias per output channel."""
    return n_weights(model) + sum(layer.weight.shape[0] for layer in layers(model).values())


PRINTED_COUNTS = [
    ("all_conv", {}, 9_370),
    ("all_conv", {"input_shape": (1, 28, 28)}, 9_082),
    ("all_conv", {"channels": 38}, 50_664),
    ("mlp_1x512", {}, 1_209_866),
    ("small_alexnet", {}, 1_387_786),
    ("small_alexnet", {"lrn": False}, 1_387_786),
    ("small_inception", {}, 1_649_402),
    ("small_inception", {"batchnorm": False}, 1_649_402),
    ("wide_resnet", {}, 8_949_210),
    ("vgg", {"batchnorm": False}, 4_953_162),
    ("mlp_10x1000", {}, 9_804_010),
    ("mlp_10x1000", {"bias": False}, 9_794_000),
    ("mnist_mlp", {"bias": False}, 46_000),
    ("lenet5", {}, 62_006),
    ("lenet5", {"input_shape": (1, 28, 28)}, 61_706),
    ("plainnet18", {"batchnorm": False, "bias": False}, 10_992_320),
    ("plainnet18", {"batchnorm": False}, 10_992_330 + 3_904),
    ("plainnet34", {"batchnorm": False, "bias": False}, 21_093_056),
    *[("two_layer", {"hidden": h}, 795 * h + 10) for h in (8, 32, 512)],
    *[("all_conv", {"channels": c}, 34 * c * c + 41 * c + 10) for c in (1, 2, 64)],
]


@pytest.mark.parametrize(("name", "options", "count"), PRINTED_COUNTS)
def test_parameter_counts_are_those_of_the_papers(name, options, count):
    assert n_parameters(build(name, **options)) == count


def test_counts_of_the_networks_with_batchnorm():
    vgg = build("vgg")
    assert (n_weights(vgg), n_folded(vgg)) == (4_950_720, 4_953_162)
    assert n_folded(build("vgg", preset="companion")) == 4_953_162
    plain = build("plainnet18")
    hidden = sum(layer.weight.shape[0] for name, layer in layers(plain).items() if name != "fc")
    assert (n_weights(plain), hidden, n_folded(plain) - hidden) == (10_992_320, 3_904, 10_992_330)
    stages = [sum(name.startswith(f"stage{i}.") for name in layers(build("plainnet34"))) for i in (1, 2, 3, 4)]
    assert stages == [6, 8, 12, 6]
    assert len(layers(build("wide_resnet"))) == 1 + 36 + 3 + 1  # stem, blocks, shortcuts, dense


SHAPES = {
    "mlp": (1, 4, 4),
    "mnist_mlp": (1, 28, 28),
    "two_layer": (1, 28, 28),
    "mlp_1x512": (3, 28, 28),
    "mlp_10x1000": (1, 28, 28),
    "small_alexnet": (3, 28, 28),
    "small_inception": (3, 28, 28),
    "wide_resnet": (3, 28, 28),
}


@pytest.mark.parametrize("name", list(available()))
def test_every_network_takes_images_and_can_be_traced(name):
    model = build(name, **({"widths": (16, 5, 10)} if name == "mlp" else {})).eval()
    x = torch.randn(2, *SHAPES.get(name, (3, 32, 32)), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = model(x)
        assert out.shape == (2, 10)
        assert torch.equal(fx.symbolic_trace(model)(x), out)
    assert not out.requires_grad
    assert out.isfinite().all()


@pytest.mark.parametrize("name", [name for name in available() if name != "mlp"])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_networks_fit_the_data_they_are_built_for(name, shape):
    assert "input_shape" in model_options(name)
    model = build(name, input_shape=shape, classes=7).eval()
    with torch.no_grad():
        assert model(torch.zeros(1, *shape)).shape == (1, 7)


def test_layer_names_tell_what_they_are():
    assert list(layers(lenet5())) == ["conv1", "conv2", "fc1", "fc2", "fc3"]
    assert list(layers(build("plainnet18")))[:3] == ["conv1", "stage1.conv1", "stage1.conv2"]
    assert "group2.block1.shortcut" in layers(build("wide_resnet"))
    assert "stack4.conv2" in layers(build("vgg"))
    assert mlp((2, 3, 1), activation="tanh").tanh1(torch.ones(1)) == math.tanh(1.0)


def test_scale_of_the_inception_batchnorm_is_fixed_at_one():
    norm = build("small_inception").stem.bn
    assert [name for name, _ in norm.named_parameters()] == ["bias"]
    assert torch.equal(norm.weight, torch.ones(96))


def test_build_is_reproducible_and_leaves_the_global_state_alone():
    before = torch.get_rng_state()
    one, two, other = (build("lenet5", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.fc3.weight, two.fc3.weight)
    assert not torch.equal(one.fc3.weight, other.fc3.weight)


def test_wrong_names_and_options_are_refused_with_the_nearest():
    with pytest.raises(UnknownNameError, match="lenet5"):
        build("lenet")
    with pytest.raises(UnknownNameError, match="channels"):
        build("all_conv", channel=3)
    with pytest.raises(UnknownNameError, match="relu"):
        mlp((2, 2), activation="rellu")
    with pytest.raises(UnknownNameError, match="companion"):
        build("vgg", preset="companions")
    with pytest.raises(InputError, match="widths"):
        build("mlp")
    with pytest.raises(InputError, match="16×16"):
        build("lenet5", input_shape=(1, 8, 8))
    with pytest.raises(InputError, match="depth"):
        build("wide_resnet", depth=39)
    with pytest.raises(InputError, match="widths"):
        mlp((4,))
    with pytest.raises(InputError, match="channel"):
        build("all_conv", channels=0)


EXPECTED_SPREAD = {  # variance of the weights of a 300-200 layer
    "xavier_normal": 2 / 500,
    "kaiming_uniform": 2 / 300,
    "uniform": 0.1**2 / 3,
    "normal": 0.1,
    "torch": 1 / (3 * 300),
}


@pytest.mark.parametrize("scheme", schemes())
def test_initialisations_have_their_variance(scheme):
    layer = initialize(nn.Linear(300, 200, dtype=torch.float64), scheme, seed=5)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    n, variance = weight.numel(), EXPECTED_SPREAD[scheme]
    # a uniform or normal law has a fourth moment of at most 3 σ⁴, so the sample variance errs by √(2/n) at most
    assert abs(float(weight.mean())) < 5 * math.sqrt(variance / n)
    assert float(weight.var()) == pytest.approx(variance, rel=5 * math.sqrt(2 / n))
    if scheme == "torch":
        assert 0 < float(bias.abs().max()) <= 1 / math.sqrt(300)
    else:
        assert not bias.any()


def test_uniform_and_kaiming_stay_within_their_bounds():
    assert (initialize(nn.Linear(300, 200), "uniform", bound=0.1).weight.abs() <= 0.1).all()
    assert (initialize(nn.Linear(300, 200), "kaiming_uniform").weight.abs() <= math.sqrt(6 / 300)).all()


@pytest.mark.parametrize("scheme", schemes())
def test_initialisation_depends_on_the_seed_alone(scheme):
    before = torch.get_rng_state()
    one, two, other = (initialize(lenet5(), scheme, seed=seed) for seed in (3, 3, 4))
    torch.set_rng_state(before)
    initialize(one, scheme, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.conv1.weight, other.conv1.weight)


def test_torch_scheme_is_what_torch_itself_draws():
    model = build("lenet5", seed=11)
    again = initialize(build("lenet5", seed=0), "torch", seed=11)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_scale_multiplies_weights_and_biases():
    plain, large = (initialize(lenet5(), "torch", seed=2, scale=scale) for scale in (1.0, 10.0))
    for a, b in zip(plain.parameters(), large.parameters(), strict=True):
        assert torch.equal(10 * a, b)


def test_normalisation_layers_start_afresh():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LayerNorm(4))
    model(torch.randn(5, 3))
    nn.init.constant_(model[1].weight, 3.0)
    initialize(model, "xavier_normal")
    assert torch.equal(model[1].weight, torch.ones(4))
    assert torch.equal(model[1].running_mean, torch.zeros(4))


def test_skeleton_is_cyclic_at_the_centre():
    wide, narrow = nn.Conv2d(2, 5, 3), nn.Conv2d(5, 2, 3)
    for conv, taps in [
        (wide, [(0, 0), (1, 1), (2, 0), (3, 1), (4, 0)]),
        (narrow, [(0, 0), (1, 1), (0, 2), (1, 3), (0, 4)]),
    ]:
        set_skeleton(conv)
        ones = (conv.weight == 1).nonzero().tolist()
        assert sorted(ones) == sorted([o, i, 1, 1] for o, i in taps)


def test_skeleton_behind_a_flatten_counts_channels():
    model = initialize(lenet5(), "uniform", seed=0, skeleton=1.0)
    ones = (model.fc1.weight == 1).nonzero().tolist()
    assert ones == [[u, (u % 16) * 25 + 12] for u in range(120)]
    assert int((model.fc2.weight == 1).sum()) == 120
    even = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(2 * 16, 2))
    assert (set_skeleton(even)[2].weight == 1).nonzero().tolist() == [[0, 10], [1, 26]]


def test_skeleton_of_plainnet_has_one_chain_of_ones_per_unit():
    model = initialize(build("plainnet18"), "kaiming_uniform", skeleton=1.0)
    for layer in layers(model).values():
        weight = layer.weight.detach()
        assert int((weight == 1).sum()) == max(weight.shape[:2])
        assert (weight.flatten(2) == 1).any(2).any(1).all() if weight.dim() == 4 else True


def test_what_cannot_be_initialised_is_refused():
    with pytest.raises(UnknownNameError, match="xavier_normal"):
        initialize(nn.Linear(2, 2), "xavier")
    with pytest.raises(InputError, match="Embedding"):
        initialize(nn.Sequential(nn.Embedding(3, 2)), "torch")
    with pytest.raises(InputError, match="scale"):
        initialize(nn.Linear(2, 2), "torch", scale=0.0)


def test_private_randomness_puts_the_state_back_even_after_an_error():
    before = torch.get_rng_state()
    drawn = []

    def draw_and_fail():
        with private_randomness(7):
            drawn.append(torch.rand(3))
            raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            draw_and_fail()
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*drawn)
