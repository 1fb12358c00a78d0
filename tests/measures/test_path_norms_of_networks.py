"""Path norms of VGG, PlainNet-18 and WRN-40-4: dense matrices on narrow copies, unit rescaling at full size."""

from __future__ import annotations

import copy

import pytest
import torch
from forms_of_measures import value_of
from torch import Tensor, nn

import flatscope as fs
from flatscope.training.models import build
from flatscope.training.vision_models import _PreActivationBlock

NARROW = 3
# Sides of images for the narrow copy and for the whole network, whose channels, not pixels, are what is rescaled.
SIDES = {"vgg": (8, 8), "plainnet18": (8, 8), "wide_resnet": (4, 8)}
by_network = pytest.mark.parametrize("name", SIDES)


def narrow(model: nn.Module, most: int = NARROW) -> nn.Module:
    """The same network with no more than three channels, or `most`, anywhere."""

    def few(n: int) -> int:
        return min(n, most)

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Conv2d):
                given = {"stride": child.stride, "padding": child.padding, "bias": child.bias is not None}
                new: nn.Module = nn.Conv2d(few(child.in_channels), few(child.out_channels), child.kernel_size, **given)
            elif isinstance(child, nn.Linear):
                new = nn.Linear(few(child.in_features), few(child.out_features), child.bias is not None)
            elif isinstance(child, nn.modules.batchnorm._BatchNorm):
                new = type(child)(few(child.num_features))
            else:
                continue
            setattr(parent, name, new)
    return model


def seeded(model: nn.Module) -> nn.Module:
    """Double precision, BatchNorm with statistics of its own."""
    generator = torch.Generator().manual_seed(0)
    for module in model.double().eval().modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for value, low in ((module.running_var, 0.5), (module.weight, 0.5), (module.running_mean, -0.5)):
                value.data = torch.rand(value.shape, generator=generator, dtype=torch.float64) + low
            module.bias.data = torch.randn(module.bias.shape, generator=generator, dtype=torch.float64) / 3
    return model


def unrolled(layers: list[nn.Module], shape: torch.Size) -> tuple[Tensor, Tensor, torch.Size]:
    """Affine layers as one matrix and one vector, from what they make of every unit vector and of zero."""
    columns = torch.eye(shape.numel(), dtype=torch.float64).reshape(-1, *shape)
    with torch.no_grad():
        images, zero = nn.Sequential(*layers)(columns), nn.Sequential(*layers)(torch.zeros(1, *shape).double())
    return (images - zero).flatten(1).T, zero.flatten(), zero.shape[1:]


def affine(layers: list[nn.Module], sums: Tensor, p: float) -> Tensor:
    matrix, shift, shape = unrolled(layers, sums.shape)
    return (matrix.abs() ** p @ sums.flatten() + shift.abs() ** p).reshape(shape)


def largest(sums: Tensor, pooling: str) -> Tensor:
    """2×2 max-pooling: the largest of four sums over paths, or all four."""
    windows = sums.reshape(sums.shape[0], sums.shape[1] // 2, 2, sums.shape[2] // 2, 2)
    return windows.amax((2, 4)) if pooling == "max" else windows.sum((2, 4))


def through(layers: list[nn.Module], sums: Tensor, p: float, pooling: str) -> Tensor:
    """Sums over paths to the power p, layer by layer; a BatchNorm behind a layer is one affine map with it."""
    position = 0
    while position < len(layers):
        layer, following = layers[position], layers[position + 1 : position + 2]
        position += 1
        if isinstance(layer, nn.Conv2d | nn.Linear):
            folded = [m for m in following if isinstance(m, nn.modules.batchnorm._BatchNorm)]
            position += len(folded)
            sums = affine([layer, *folded], sums, p)
        elif isinstance(layer, nn.BatchNorm2d | nn.AvgPool2d):
            sums = affine([layer], sums, p)
        elif isinstance(layer, nn.MaxPool2d):
            sums = largest(sums, pooling)
        elif isinstance(layer, nn.Sequential):
            sums = through(list(layer), sums, p, pooling)
        elif isinstance(layer, nn.Flatten):
            sums = sums.flatten()
        elif isinstance(layer, _PreActivationBlock):
            active = affine([layer.bn1], sums, p)
            kept = sums if layer.shortcut is None else affine([layer.shortcut], active, p)
            sums = kept + affine([layer.conv2], affine([layer.conv1, layer.bn2], active, p), p)
        else:
            assert isinstance(layer, nn.ReLU | nn.Dropout), type(layer)
    return sums


@by_network
@pytest.mark.parametrize("p", [1.0, 2.0])
@pytest.mark.parametrize("pooling", ["max", "sum"])
def test_one_pass_equals_products_of_dense_matrices(name: str, p: float, pooling: str) -> None:
    torch.manual_seed(0)
    shape = (3, SIDES[name][0], SIDES[name][0])
    model = seeded(narrow(build(name, input_shape=shape)))
    outputs = through(list(model.children()), torch.ones(shape, dtype=torch.float64), p, pooling)
    problem = fs.Problem(model, train=(torch.randn(2, *shape).double(), torch.tensor([0, 1])))
    found = value_of(problem, "l2_path_norm", p=p, pooling=pooling)
    assert found == pytest.approx(float(outputs.sum()) ** (1 / p), rel=1e-12)


@pytest.mark.long
@by_network
def test_unit_rescaling_changes_no_path_norm_of_the_full_network(name: str) -> None:
    torch.manual_seed(0)
    shape = (3, SIDES[name][1], SIDES[name][1])
    x = torch.randn(2, *shape, dtype=torch.float64)
    model = seeded(build(name, input_shape=shape))
    other = fs.rescale(copy.deepcopy(model), x[:1], by="unit", low=0.2, high=5.0, seed=1)
    names, y = ["l1_path_norm", "l2_path_norm", "l2_norm"], torch.tensor([0, 1])
    before, after = (fs.measure(fs.Problem(m, train=(x, y)), names) for m in (model, other))
    for path_norm in names[:2]:
        assert after[path_norm] == pytest.approx(before[path_norm], rel=1e-10)
    layers = before.layer("l2_norm"), after.layer("l2_norm")
    moved = max(abs(layers[1].get(layer, value) / value - 1) for layer, value in layers[0].items())
    assert moved > 0.1  # the weights did change


def test_a_network_that_takes_a_derivative_is_refused_by_its_name() -> None:
    """As physics-informed networks do."""

    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.clone().requires_grad_()
                return torch.autograd.grad(self.body(x).sum(), x, create_graph=True)[0]

    problem = fs.Problem(Slope().eval(), train=(torch.randn(5, 2), torch.randn(5, 2)), loss="mse")
    reason = fs.measure(problem, "lipschitz_linf").to_frame()["reason"][0]
    assert reason.startswith("grad:"), reason
