"""BatchNorm folding: the same function to rounding, nothing of BatchNorm left, never folded where it is not exact."""

import copy

import pytest
import torch
from pieces import Net
from torch import Tensor, nn
from torch.nn import functional

from flatscope.errors import InputError
from flatscope.network.interception import relative_difference
from flatscope.network.tracing import trace
from flatscope.symmetries.folding import fold_batchnorm, has_batchnorm

pytestmark = pytest.mark.fast

torch.set_num_threads(1)
BatchNorm = nn.modules.batchnorm._BatchNorm


def prepared(model: nn.Module, seed: int = 0) -> nn.Module:
    """Float64, with running statistics and affine parameters that are not those of initialization."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, BatchNorm):
                shape = module.running_mean.shape
                module.running_mean.copy_(torch.randn(shape, generator=generator))
                module.running_var.copy_(0.5 + torch.rand(shape, generator=generator))
                if module.affine:
                    module.weight.copy_(torch.randn(shape, generator=generator))
                    module.bias.copy_(torch.randn(shape, generator=generator))
    return model.double().eval()


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def folded(model: nn.Module, x: Tensor) -> nn.Module:
    """Fold and check what holds for every network."""
    before = copy.deepcopy(model.state_dict())
    clean = fold_batchnorm(model, x)
    assert relative_difference(model, clean, x) < 1e-13
    assert not any(isinstance(module, BatchNorm) for module in clean.modules())
    assert not clean.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not {id(value) for value in clean.parameters()} & {id(value) for value in model.parameters()}
    copy.deepcopy(clean)
    return clean


def affine_layers(model: nn.Module) -> list[str]:
    """Depthwise 1×1 convolutions."""
    convolutions = ((n, m) for n, m in model.named_modules() if isinstance(m, nn.modules.conv._ConvNd))
    return [n for n, m in convolutions if m.groups == m.out_channels > 1 and set(m.kernel_size) == {1}]


BEHIND_A_LAYER = {
    "linear": (lambda: [nn.Linear(4, 6), nn.BatchNorm1d(6)], (3, 4)),
    "linear without bias": (lambda: [nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6)], (3, 4)),
    "no affine": (lambda: [nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6, affine=False)], (3, 4, 7, 7)),
    "conv": (lambda: [nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(6)], (3, 4, 7, 7)),
    "groups": (lambda: [nn.Conv2d(4, 6, 3, groups=2, dilation=2), nn.BatchNorm2d(6)], (3, 4, 7, 7)),
    "depthwise": (lambda: [nn.Conv2d(4, 8, 3, groups=4), nn.BatchNorm2d(8)], (3, 4, 7, 7)),
    "reflect": (lambda: [nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(6)], (3, 4, 7, 7)),
    "1-D": (lambda: [nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6)], (3, 4, 9)),
    "3-D": (lambda: [nn.Conv3d(4, 6, 2), nn.BatchNorm3d(6)], (3, 4, 4, 4, 4)),
    "transposed": (lambda: [nn.ConvTranspose2d(4, 6, 3, stride=2), nn.BatchNorm2d(6)], (3, 4, 5, 5)),
    "transposed groups": (lambda: [nn.ConvTranspose1d(4, 6, 3, groups=2, bias=False), nn.BatchNorm1d(6)], (3, 4, 5)),
    "two in a row": (lambda: [nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.BatchNorm2d(6)], (3, 4, 7, 7)),
    "dropout between": (lambda: [nn.Linear(4, 6), nn.Dropout(0.5), nn.BatchNorm1d(6)], (3, 4)),
}


@pytest.mark.parametrize("name", BEHIND_A_LAYER)
def test_into_the_layer_in_front(name):
    build, shape = BEHIND_A_LAYER[name]
    model = prepared(nn.Sequential(*build(), nn.ReLU()))
    clean = folded(model, inputs(*shape))
    assert not affine_layers(clean)
    assert clean[0].bias is not None
    assert isinstance(clean[-2], nn.Identity)
    torch.fx.symbolic_trace(clean)


IN_FRONT_OF_A_LAYER = {
    "linear": (lambda: [nn.BatchNorm1d(4), nn.Linear(4, 6, bias=False)], (3, 4)),
    "behind an activation": (lambda: [nn.ReLU(), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 6)], (3, 4)),
    "conv without padding": (lambda: [nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, groups=2)], (3, 4, 7, 7)),
    "valid": (lambda: [nn.BatchNorm1d(4), nn.Conv1d(4, 6, 3, padding="valid", stride=2)], (3, 4, 7)),
}


@pytest.mark.parametrize("name", IN_FRONT_OF_A_LAYER)
def test_into_the_layer_behind_where_that_is_exact(name):
    build, shape = IN_FRONT_OF_A_LAYER[name]
    clean = folded(prepared(nn.Sequential(*build(), nn.ReLU())), inputs(*shape))
    assert not affine_layers(clean)


LAYERS_OF_THEIR_OWN = {
    "padding": (lambda: [nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, padding=1)], (3, 4, 7, 7)),
    "same padding": (lambda: [nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, padding="same")], (3, 4, 7, 7)),
    "transposed behind": (lambda: [nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 6, 3)], (3, 4, 5, 5)),
    "pre-activation": (lambda: [nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3)], (3, 4, 7, 7)),
    "vectors": (lambda: [nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 6)], (3, 4)),
    "signals": (lambda: [nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 6, 3)], (3, 4, 7)),
    "volumes": (lambda: [nn.BatchNorm3d(4), nn.ReLU(), nn.Conv3d(4, 6, 2)], (3, 4, 3, 3, 3)),
    "linear on sequences": (lambda: [nn.Linear(5, 6), nn.BatchNorm1d(4), nn.ReLU()], (3, 4, 5)),
    "sequences into linear": (lambda: [nn.BatchNorm1d(4), nn.Linear(5, 6)], (3, 4, 5)),
    "no affine": (lambda: [nn.BatchNorm2d(4, affine=False), nn.ReLU(), nn.Conv2d(4, 6, 3)], (3, 4, 7, 7)),
}


@pytest.mark.parametrize("name", LAYERS_OF_THEIR_OWN)
def test_what_no_layer_can_absorb_becomes_a_layer(name):
    build, shape = LAYERS_OF_THEIR_OWN[name]
    clean = folded(prepared(nn.Sequential(*build())), inputs(*shape))
    [layer] = affine_layers(clean)
    assert layer in [entry.name for entry in trace(clean, inputs(*shape))]
    torch.fx.symbolic_trace(clean)


def test_scale_alone_may_pass_zero_padding():
    model = prepared(nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, padding=1, bias=False)))
    with torch.no_grad():
        model[0].running_mean.zero_()
        model[0].bias.zero_()
    clean = folded(model, inputs(3, 4, 7, 7))
    assert not affine_layers(clean)
    assert clean[1].bias is None


def test_one_batchnorm_may_go_into_several_layers_behind():
    def forward(m, x):
        x = m.bn(functional.relu(x))
        return m.a(x) + m.b(x)

    model = prepared(Net(forward, bn=nn.BatchNorm1d(4), a=nn.Linear(4, 3), b=nn.Linear(4, 3)))
    assert not affine_layers(folded(model, inputs(3, 4)))


SHARED = {
    "conv with two BatchNorms": (lambda m, x: m.bn(m.conv(x)) + m.other(m.conv(x)), ["bn", "other"]),
    "BatchNorm behind two convs": (lambda m, x: m.bn(m.conv(x)) + m.bn(m.conv2(x)), ["bn"]),
    "output read twice": (lambda m, x: functional.relu(m.bn(m.conv(x))) + m.conv(x).sum(), ["bn"]),
    "in-place change": (lambda m, x: m.bn(m.conv(x).add_(1.0)), ["bn"]),
    "skip around BatchNorm": (lambda m, x: (lambda y: m.bn(y) + y)(m.conv(x)), ["bn"]),
    "weight read elsewhere": (lambda m, x: m.bn(m.conv(x)) * m.conv.weight.sum(), ["bn"]),
    "BatchNorm output also returned": (lambda m, x: (lambda y: m.conv3(y) + y)(m.bn(functional.relu(x))), ["bn"]),
}


@pytest.mark.parametrize("name", SHARED)
def test_what_is_used_elsewhere_is_not_folded_wrongly(name):
    forward, expected = SHARED[name]
    parts = {key: nn.Conv2d(4, 4, 1) for key in ("conv", "conv2", "conv3")}
    model = Net(forward, bn=nn.BatchNorm2d(4), other=nn.BatchNorm2d(4), **parts)
    clean = folded(prepared(model), inputs(3, 4, 5, 5))
    assert [entry for entry in affine_layers(clean) if entry in expected] == expected


def test_one_module_under_two_names():
    norm = nn.BatchNorm1d(4)
    model = prepared(Net(lambda m, x: m.second(m.fc(x)), fc=nn.Linear(4, 4), first=norm, second=norm))
    folded(model, inputs(3, 4))


def test_names_stay_and_counts_fit():
    """Folding PlainNet-like stacks leaves one bias per convolution: m = weights + channels + the last bias."""
    stages = [
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
    ]
    model = prepared(nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)))
    clean = folded(model, inputs(2, 3, 9, 9))
    assert [name for name, _ in clean.named_parameters()] == [
        "0.weight",
        "0.bias",
        "3.weight",
        "3.bias",
        "8.weight",
        "8.bias",
    ]
    assert sum(value.numel() for value in clean.parameters()) == 27 * 8 + 72 * 8 + 40 + 16 + 5


def test_frozen_parameters_stay_frozen_and_double_backward_works():
    model = prepared(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)))
    clean = folded(model, inputs(3, 4))
    loss = clean(inputs(3, 4)).square().sum()
    [grad] = torch.autograd.grad(loss, [clean[0].weight], create_graph=True)
    [second] = torch.autograd.grad(grad.square().sum(), [clean[0].weight])
    assert second.abs().sum() > 0
    for value in model.parameters():
        value.requires_grad_(False)
    assert not any(value.requires_grad for value in fold_batchnorm(model, inputs(3, 4)).parameters())


def test_float32_and_training_mode_and_unreached_modules():
    body = prepared(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())).float()
    wrapped = Net(lambda m, x: m.body(x), body=body, aux=nn.BatchNorm1d(3), aux2=nn.BatchNorm3d(3)).train()
    counted = int(body[1].num_batches_tracked)
    clean = fold_batchnorm(wrapped, inputs(2, 3, 6, 6))
    assert wrapped.training
    assert int(body[1].num_batches_tracked) == counted
    assert next(clean.parameters()).dtype == torch.float32
    assert not any(isinstance(module, BatchNorm) for module in clean.modules())


def test_no_batchnorm_gives_a_copy():
    model = nn.Linear(3, 2)
    clean = fold_batchnorm(model, torch.ones(2, 3))
    assert clean is not model
    assert torch.equal(clean.weight, model.weight)


class _NormAndActivation(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


def test_what_cannot_be_folded_is_refused():
    statistics = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False))
    with pytest.raises(InputError, match="running statistics"):
        fold_batchnorm(statistics, torch.ones(2, 3))


def test_a_norm_with_a_built_in_activation_is_folded_and_the_activation_stays():
    """As in `timm`; the module stays, and its call of batch_norm is skipped."""
    model = prepared(nn.Sequential(nn.Conv2d(3, 4, 3), _NormAndActivation(4), nn.Conv2d(4, 2, 1)))
    clean = fold_batchnorm(model, inputs(2, 3, 5, 5))
    assert not has_batchnorm(clean)
    assert relative_difference(model.eval(), clean, inputs(7, 3, 5, 5)) < 1e-12
    graph = trace(clean, inputs(2, 3, 5, 5))
    assert [layer.name for layer in graph] == ["0", "2"]
    assert graph.n_classes == 4
    behind = prepared(nn.Sequential(nn.ReLU(), _NormAndActivation(3), nn.Conv2d(3, 2, 3, padding=1)))
    assert [layer.name for layer in trace(fold_batchnorm(behind, inputs(2, 3, 5, 5)), inputs(2, 3, 5, 5))] == ["1", "2"]


def test_batch_norm_called_as_a_function_is_folded():
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.out = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)
            self.register_buffer("mean", torch.rand(4, dtype=torch.float64))
            self.register_buffer("variance", torch.rand(4, dtype=torch.float64) + 0.5)
            self.scale = nn.Parameter(torch.rand(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            x = nn.functional.batch_norm(x, self.mean, self.variance, self.scale)
            return self.out(torch.relu(x))

    model = prepared(Functional())
    clean = folded(model, inputs(2, 3, 5, 5))
    assert next(layer.name for layer in trace(clean, inputs(2, 3, 5, 5))) == "conv"
    assert trace(clean, inputs(2, 3, 5, 5)).n_classes > 0


@pytest.mark.parametrize("pre_activation", [False, True])
def test_residual_networks(pre_activation):
    class Block(nn.Module):
        def __init__(self, n_in: int, n_out: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
            self.conv2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(n_in if pre_activation else n_out)
            self.bn2 = nn.BatchNorm2d(n_out)
            self.down = nn.Identity()
            if stride > 1:
                self.down = nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out))

        def forward(self, x: Tensor) -> Tensor:
            if pre_activation:
                y = self.conv2(torch.relu(self.bn2(self.conv1(torch.relu(self.bn1(x))))))
                return y + self.down(x)
            y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
            return torch.relu(y + self.down(x))

    body = [nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), Block(6, 6, 1), Block(6, 8, 2)]
    model = prepared(nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)))
    clean = folded(model, inputs(2, 3, 8, 8))
    assert affine_layers(clean) == (["3.bn1", "4.bn1"] if pre_activation else [])
