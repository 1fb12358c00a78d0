"""`python -m benchmarks.large_training epochs|seeds [NETWORK ...]`: training of the papers' larger networks on a GPU.

`epochs` times an epoch of 50,000 images of the shape of CIFAR-10, evaluation of 60,000 included, in float32, in bf16
and in bf16 after `torch.compile`, one JSON line each. `seeds` trains five networks in float32 and in bf16 on CIFAR-10
(FLATSCOPE_DATA) from the same starts and compares their test accuracies.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from typing import Any

import torch

from benchmarks.timing import machine
from flatscope.inputs import load
from flatscope.training import TrainConfig, build, gpu_steps, train

SIDES = {"vgg": 32, "plainnet18": 32, "small_alexnet": 28, "small_inception": 28, "wide_resnet": 28}
IMAGES, TESTS = 50_000, 10_000


def say(**row: Any) -> None:
    """One line of JSON."""
    print(json.dumps(row), flush=True)


def random_data(side: int) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Images of noise; they take the same time as those of CIFAR-10."""
    generator = torch.Generator("cuda").manual_seed(0)
    pairs = [
        (
            torch.randn(n, 3, side, side, generator=generator, device="cuda"),
            torch.randint(10, (n,), generator=generator, device="cuda"),
        )
        for n in (IMAGES, TESTS)
    ]
    return pairs[0], pairs[1]


def epoch_seconds(name: str, precision: str, compiled_after: int | None, epochs: int) -> dict[str, float]:
    """Median time of an epoch before and after the network is compiled, and what compiling took."""
    data = random_data(SIDES[name])
    model = build(name, input_shape=(3, SIDES[name], SIDES[name]), seed=0).cuda()
    marks = [time.perf_counter()]
    never = 10**12
    gpu_steps.COMPILE_AFTER, gpu_steps.COMPILE_FOR = (never if compiled_after is None else compiled_after * IMAGES), 0
    config = TrainConfig(lr=0.01, momentum=0.9, batch_size=128, epochs=epochs, precision=precision)
    train(model, data, config, after_epoch=lambda *_: marks.append(time.perf_counter()), show_progress=False)
    times = [later - earlier for earlier, later in itertools.pairwise(marks)]
    if compiled_after is None:
        return {"epoch_s": statistics.median(times[1:]), "first_s": times[0]}
    after = times[compiled_after + 1 :]
    return {
        "epoch_s": statistics.median(times[1:compiled_after]),
        "compiled_epoch_s": statistics.median(after),
        "compiling_s": times[compiled_after] - statistics.median(after),
    }


def seeds(name: str, epochs: int, count: int = 5) -> None:
    """Test accuracies in float32 and bf16 of the same seeds, and their difference with a 95 % interval."""
    data = load("cifar10", crop=SIDES[name]) if SIDES[name] != 32 else load("cifar10")
    errors: dict[str, list[float]] = {"float32": [], "bf16": []}
    for seed in range(count):
        for precision, found in errors.items():
            model = build(name, input_shape=(3, SIDES[name], SIDES[name]), seed=seed).cuda()
            config = TrainConfig(
                lr=0.01,
                momentum=0.9,
                batch_size=128,
                epochs=epochs,
                evaluate_every=epochs,
                augmentation="crop-flip",
                precision=precision,
                seed=seed,
            )
            begun = time.perf_counter()
            result = train(model, data, config, show_progress=False)
            found.append(float(result.history["test_error"].iloc[-1]))
            seconds = time.perf_counter() - begun
            say(network=name, seed=seed, precision=precision, test_accuracy=1 - found[-1], seconds=seconds)
    differences = [a - b for a, b in zip(errors["float32"], errors["bf16"], strict=True)]
    half = 2.776 * statistics.stdev(differences) / count**0.5 if count == 5 else float("nan")
    deviations = {precision: statistics.stdev(found) for precision, found in errors.items()}
    say(network=name, bf16_minus_float32=statistics.mean(differences), half_width_95=half, deviations=deviations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["epochs", "seeds"])
    parser.add_argument("network", nargs="*")
    parser.add_argument("--epochs", type=int, default=10)
    given = parser.parse_args()
    say(machine=machine())
    for name in given.network or list(SIDES):
        if given.what == "seeds":
            seeds(name, given.epochs)
            continue
        say(network=name, precision="bf16", **epoch_seconds(name, "bf16", 4, given.epochs))
        say(network=name, precision="float32", **epoch_seconds(name, "float32", None, 3))


if __name__ == "__main__":
    main()
