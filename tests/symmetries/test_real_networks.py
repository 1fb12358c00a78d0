"""Networks of real size and shape go all the way: rescaled, written in basis paths, audited."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_path_norms_of_networks import narrow
from torch import Tensor, nn

import flatscope as fs
from flatscope.symmetries.folding import has_batchnorm
from flatscope.training.models import build

pytestmark = pytest.mark.long

IMAGES = (3, 32, 32)


class Block(nn.Module):
    """A basic residual block; the shortcut projects where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.short = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(h + self.short(x))


def resnet18() -> nn.Module:
    """ResNet-18 with a quarter of the channels."""
    widths, layers, last = (16, 32, 64, 128), [], 16
    for i, width in enumerate(widths):
        layers += [Block(last, width, 1 if i == 0 else 2), Block(width, width, 1)]
        last = width
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*stem, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


class Transformer(nn.Module):
    """Patches, one encoder layer with GELU, a ReLU head."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 8, 8)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True)
        self.fc1, self.fc2 = nn.Linear(16, 24), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        return self.fc2(torch.relu(self.fc1(self.encoder(tokens).mean(1))))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: build("mlp", widths=(3072, 64, 32, 10)),
    "lenet5": lambda: build("lenet5"),
    "vgg with BatchNorm": lambda: narrow(build("vgg"), 48),  # of full width: test_path_norms_of_networks
    "plainnet18": lambda: narrow(build("plainnet18"), 32),  # its eleven million weights: test_basis_paths
    "resnet18-like": resnet18,
    "transformer": Transformer,
}


@pytest.fixture(params=NETWORKS, scope="module")
def network(request: pytest.FixtureRequest) -> nn.Module:
    """In float64 and eval mode, with BatchNorm statistics as training would leave them."""
    torch.manual_seed(0)
    model = NETWORKS[request.param]().double()
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(16, *IMAGES, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(3):  # running statistics near the data's own, so that 18 layers neither die nor explode
            model.train()(images)
    return model.eval()


def example(n: int = 3) -> Tensor:
    return torch.randn(n, *IMAGES, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize("by", ["unit", "layer", "permutation"])
def test_the_same_function_with_other_weights(network: nn.Module, by: str) -> None:
    images = example()
    twin = fs.rescale(network, images[:2], by=by, low=1 / 25, high=25.0, seed=3)  # type: ignore[arg-type]
    with torch.no_grad():
        before, after = network(images), twin(images)
    assert float((after - before).abs().max() / before.abs().max()) < 1e-10
    assert not has_batchnorm(twin)
    changed = {name: p for name, p in twin.named_parameters() if p.ndim > 1}
    original = dict(fs.fold_batchnorm(network, images[:2]).named_parameters())
    assert any(not torch.allclose(p, original[name], rtol=1e-3) for name, p in changed.items())


def test_basis_paths_and_back(network: nn.Module) -> None:
    images = example(2)
    paths = fs.BasisPaths(network, images)
    values = paths.values()
    folded = fs.fold_batchnorm(network, images)
    m = sum(p.numel() for p in folded.parameters())
    assert paths.count == len(values) == m - paths.n_classes
    with torch.no_grad():
        back = paths.to_model(values)
        torch.testing.assert_close(back(images), network(images), rtol=1e-10, atol=1e-12)
    for name, parameter in back.named_parameters():
        original = dict(folded.named_parameters())[name]
        torch.testing.assert_close(parameter, original, rtol=1e-12, atol=1e-14)
    twin = fs.rescale(network, images, by="unit", low=0.2, high=5.0, seed=5)
    logs, signs = paths.log_values()
    other_logs, other_signs = fs.BasisPaths(twin, images).log_values()
    alive = logs > -600  # a weight of exactly zero is a value of exactly zero
    torch.testing.assert_close(other_logs[alive], logs[alive], rtol=1e-9, atol=1e-9)
    assert torch.equal(signs, other_signs)


def test_the_audit_goes_through(network: nn.Module) -> None:
    images = example(4)
    with torch.no_grad():
        labels = network(images).argmax(1)
    problem = fs.Problem(network, train=(images, labels))
    found = fs.audit(problem, ["l2_norm", "l1_path_norm", "margin", "gradient_norm"], by=("layer", "unit"), trials=1)
    assert found.disagrees.empty, found.summary()
    assert found.verdict("margin", "unit_scaling") == "invariant"
    if not isinstance(network, Transformer):
        assert found.verdict("l1_path_norm", "unit_scaling") == "invariant"
        assert found.verdict("gradient_norm", "layer_scaling") == "moved"
    else:
        assert found.verdict("l1_path_norm", "unit_scaling") == "not tested"
