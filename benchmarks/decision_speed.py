"""Predicted rises of all layers at four widths: flatscope beside products of the Hessian, layer by layer.

    python -m benchmarks.decision_speed [NAME …]     resnet18 (needs timm), cnn, lenet5, vit, gpt; one thread

The products are gᵀΔ + ½ΔᵀHΔ of one layer and width by double backward: plainly, a pass for each of them, and as well as
one can write them, all from one graph of the whole data. Neither has an error over samples, a trace or a check that the
second derivative is right; flatscope's time has them. Times of plain products are those of one width, times four.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import flatscope as fs
from benchmarks.decision_models import LanguageModel, VisionTransformer
from flatscope.context import Context
from flatscope.decisions.block_quadratics import Predicted, predicted_rises
from flatscope.decisions.changes import Rounding
from flatscope.isolation import own_settings
from flatscope.training import build

WIDTHS = (8, 4, 3, 2)
STEPS = 60  # of training, so that curvature is not that of random weights alone
Network = tuple[nn.Module, Tensor, Tensor, str]


def _images(n: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    """Noise around one image for each class."""
    centres, y = torch.randn(classes, 3, size, size), torch.randint(classes, (n,))
    return 0.5 * centres[y] + torch.randn(n, 3, size, size), y


def _resnet18() -> Network:
    import timm

    model = timm.create_model("resnet18", num_classes=1000, zero_init_last=False)
    return (model.eval(), *_images(32, 64, 1000), "cross_entropy")


def _cnn() -> Network:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 16), (16, 32), (32, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] * (inputs == outputs)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 10))
    return (model, *_images(500, 32, 10), "cross_entropy")


def _lenet5() -> Network:
    return (build("lenet5", input_shape=(3, 32, 32), classes=10), *_images(500, 32, 10), "cross_entropy")


def _vit() -> Network:
    return (VisionTransformer(3, 32, 4, 48, 4), *_images(64, 32, 10), "cross_entropy")


def _gpt() -> Network:
    tokens = torch.randint(64, (64, 1)) + torch.arange(33) * torch.randint(1, 4, (64, 1))
    return LanguageModel(64, 32, 48, 4), tokens[:, :-1] % 64, tokens[:, 1:] % 64, "next_token"


NETWORKS: dict[str, Callable[[], Network]] = {
    "resnet18": _resnet18, "cnn": _cnn, "lenet5": _lenet5, "vit": _vit, "gpt": _gpt,
}  # fmt: skip


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Sum over samples, of the mean over positions."""
    if outputs.ndim == 2:
        return functional.cross_entropy(outputs, targets, reduction="sum")
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum") / outputs.shape[1]


def _trained(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        some = torch.randperm(len(y))[:64]
        optimizer.zero_grad()
        (_loss(model(x[some]), y[some]) / len(some)).backward()
        optimizer.step()
    return model.eval()


def _seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    found = work()
    return time.perf_counter() - begun, found


def _one_graph(model: nn.Module, x: Tensor, y: Tensor, steps: dict[tuple[str, int], Tensor]) -> dict[Any, float]:
    leaves = {name: value.detach().requires_grad_() for name, value in model.named_parameters()}
    names = sorted({name for name, _ in steps})
    loss = _loss(functional_call(model, leaves, (x,)), y) / len(x)
    found = torch.autograd.grad(loss, [leaves[name] for name in names], create_graph=True)
    gradients, rises = dict(zip(names, found, strict=True)), {}
    for (name, bits), step in steps.items():
        (product,) = torch.autograd.grad(gradients[name], leaves[name], step, retain_graph=True)
        rises[name, bits] = float((gradients[name].detach() * step).sum() + 0.5 * (product * step).sum())
    return rises


def _one_by_one(model: nn.Module, x: Tensor, y: Tensor, steps: dict[tuple[str, int], Tensor]) -> dict[Any, float]:
    rises: dict[Any, float] = {}
    for key, step in steps.items():
        rises |= _one_graph(model, x, y, {key: step})
    return rises


def _measured(name: str) -> None:
    torch.manual_seed(0)
    model, x, y, loss = NETWORKS[name]()
    if name != "resnet18":
        _trained(model, x, y)
    with torch.no_grad():
        forward = min(_seconds(lambda: model(x))[0] for _ in range(3))
    problem = fs.Problem(model, train=(x, y), loss=loss)
    ctx = Context(problem.plain)
    rounding, params = Rounding.named("channel"), dict(model.named_parameters())
    steps = {
        (layer.weight, bits): (rounding.rounded(value, layer, bits) - value).detach()
        for layer in ctx.network
        for bits in WIDTHS
        for value in [params[layer.weight]]
    }
    given = {key: {key[0]: step} for key, step in steps.items()}

    def predictions(ctx: Context) -> Predicted:
        with own_settings():
            return predicted_rises(ctx, given, 0.05)

    first, found = _seconds(lambda: predictions(ctx))
    again = statistics.median(_seconds(lambda: predictions(Context(problem.plain)))[0] for _ in range(3))
    all_of_it, _ = _seconds(
        lambda: fs.sensitivity(fs.Problem(model, train=(x, y), loss=loss), WIDTHS, (), trapezoid=False)
    )
    one_width = {key: step for key, step in steps.items() if key[1] == 4}
    with own_settings():
        graph, products = _seconds(lambda: _one_graph(model, x, y, steps))
        plain = len(WIDTHS) * _seconds(lambda: _one_by_one(model, x, y, one_width))[0]
    apart = max(abs(found.rises[key].value - rise) / found.rises[key].stderr for key, rise in products.items())
    cells = [name, f"{len(one_width)}", f"{forward:.3f} s", f"{first:.2f} s", f"{again:.2f} s", f"{all_of_it:.2f} s"]
    cells += [f"{plain:.1f} s", f"{graph:.1f} s", f"{plain / first:.1f}×", f"{plain / again:.1f}×"]
    cells += [f"{graph / first:.1f}×", f"{graph / again:.1f}×", f"{apart:.2f}"]
    print("| " + " | ".join(cells) + " |", flush=True)


HEAD = (
    "network", "layers", "a forward pass", "predictions", "again on the same problem", "with measured rises",
    "products one by one", "from one graph", "one by one / first", "/ again", "one graph / first", "/ again",
    "largest difference in standard errors",
)  # fmt: skip

if __name__ == "__main__":
    names = sys.argv[1:] or list(NETWORKS)
    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|", flush=True)
    for name in names:
        _measured(name)
