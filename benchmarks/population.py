"""Many networks at once against the same networks one by one, through the plain loop of this package."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

import flatscope as fs
from benchmarks.timing import Row
from flatscope.training.data import load
from flatscope.training.loop import TrainConfig, train
from flatscope.training.models import build

NEEDS_DATA = False  # digits are embedded, and on the GPU random images of the same shape take the same time
NETWORKS = 36
DIGITS_WIDTHS = (64, 64, 32, 10)
GPU_TARGETS = {4: 20.0, 32: 20.0, 64: 20.0, 512: 1.0}  # at 512 one network alone fills the device: not slower
GPU_STEPS = {4: 500, 32: 200, 64: 150, 512: 40}  # per epoch
GPU_EPOCHS = 4

Pair = tuple[torch.Tensor, torch.Tensor]


def rows() -> Iterator[Row]:
    """36 networks on the embedded digits, to the end of training and with every evaluation."""
    data = load("digits", flatten=True)
    config: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "batch_size": 64, "epochs": 2}
    trials = [{**config, "seed": seed, "model_options": {"widths": DIGITS_WIDTHS}} for seed in range(NETWORKS)]
    begun = time.perf_counter()
    population = fs.train_population("mlp", trials, data, show_progress=False)
    ours = time.perf_counter() - begun
    begun, difference = time.perf_counter(), 0.0
    for i, seed in enumerate(range(NETWORKS)):
        model = build("mlp", seed=seed, widths=DIGITS_WIDTHS)
        train(model, data, TrainConfig(**config, seed=seed), show_progress=False)
        difference = max(difference, largest_difference(model, population.state(i)))
    peer = time.perf_counter() - begun
    note = f"weights differ by at most {difference:.1e} (float32)"
    met = peer / ours >= 3 and difference < 1e-3
    yield Row(
        "36 digits networks 64-64-32-10, batch 64, 2 epochs", ours, peer, "plain loop, one by one", "≥ 3×", met, note
    )


def gpu_rows() -> Iterator[Row]:
    """36 LeNet-5 on images of the shape of CIFAR-10; time per step without capture and evaluation."""
    for batch, target in GPU_TARGETS.items():
        n = batch * GPU_STEPS[batch]
        data = random_images(n, torch.float32)
        config: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "batch_size": batch, "epochs": GPU_EPOCHS}
        config["evaluate_every"] = GPU_EPOCHS
        trials = [{**config, "seed": seed} for seed in range(NETWORKS)]
        marks: list[float] = []
        fs.train_population(
            "lenet5", trials, data, show_progress=False, after_epoch=lambda *_, m=marks: m.append(time.perf_counter())
        )
        together = (marks[-2] - marks[0]) / ((GPU_EPOCHS - 2) * GPU_STEPS[batch])
        marks = []
        model = build("lenet5").cuda()
        mark = lambda *_, m=marks: m.append(time.perf_counter())  # noqa: E731
        train(model, data, TrainConfig(**config), show_progress=False, after_epoch=mark)
        alone = (marks[-2] - marks[0]) / ((GPU_EPOCHS - 2) * GPU_STEPS[batch])
        ratio = NETWORKS * alone / together
        note = (
            f"{1e3 * together:.2f} ms a step of 36, {1e3 * alone:.2f} ms a step of one; "
            f"{NETWORKS / together:,.0f} against {1 / alone:,.0f} network-steps a second"
        )
        what = f"1,000 steps of 36 LeNet-5, batch {batch}"
        peer = 1_000 * NETWORKS * alone
        wanted = f"≥ {target:.0f}×"
        yield Row(what, 1_000 * together, peer, "plain loop, one by one", wanted, ratio >= target, note)
    yield agreement()


def agreement() -> Row:
    """50 steps in float64 on the GPU; one trial of four diverges on purpose."""
    data = random_images(128 * 10, torch.float64)
    config: dict[str, Any] = {"momentum": 0.9, "batch_size": 128, "epochs": 5}
    trials = [{**config, "lr": lr, "seed": seed} for seed, lr in enumerate((0.01, 0.02, 1e200, 0.05))]
    begun = time.perf_counter()
    population = fs.train_population("lenet5", trials, data, dtype=torch.float64, show_progress=False)
    ours = time.perf_counter() - begun
    begun, difference = time.perf_counter(), 0.0
    for i in (0, 1, 3):
        model = build("lenet5", seed=i).double().cuda()
        settings = TrainConfig(**config, lr=trials[i]["lr"], seed=i)
        train(model, data, settings, show_progress=False)
        difference = max(difference, largest_difference(model, population.state(i)))
    peer = time.perf_counter() - begun
    met = difference < 1e-9 and population.frame()["diverged"].tolist() == [False, False, True, False]
    what = "the same weights after 50 steps, float64, with a diverged neighbour"
    return Row(what, ours, peer, "plain loop", "to 1e-9", met, f"largest difference {difference:.1e}")


def random_images(n: int, dtype: torch.dtype) -> Pair:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, 32, 32, generator=generator, dtype=dtype)
    return x.cuda(), (torch.arange(n) % 10).cuda()


def largest_difference(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> float:
    own = model.state_dict()
    return max(float((own[name].cpu().double() - state[name].double()).abs().max()) for name in own)
