"""How far images are from another class: certified intervals for a LeNet-5, and how good they are where exact is known.

python examples/geometric_margins.py                   LeNet-5 on 5,000 CIFAR-10 images, 1,000 test images; minutes
python examples/geometric_margins.py --data digits     the small digits of scikit-learn, nothing to download
python examples/geometric_margins.py --quick           a few digits, to see that it runs
"""

import argparse
import time

import torch
from torch import Tensor, nn

import flatscope as fs
from flatscope.inputs import Data, load
from flatscope.measures.margin_search import nearest_changes
from flatscope.training import TrainConfig, build, evaluate, mlp, train

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)


def quantiles(name: str, values: Tensor) -> None:
    shown = torch.quantile(values.double(), torch.tensor(LEVELS, dtype=torch.float64))
    print(f"  {name:<34}" + "".join(f"{float(value):11.4g}" for value in shown))


def network(data: Data, seed: int) -> nn.Module:
    """LeNet-5, or a network with two convolutions where images are too small for it."""
    shape = tuple(data.train[0].shape[1:])
    if min(shape[1:]) >= 16:
        return build("lenet5", seed=seed, input_shape=shape, classes=data.n_classes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        parts = [nn.Conv2d(shape[0], 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU()]
        return nn.Sequential(*parts, nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, data.n_classes))


def intervals(data: Data, epochs: int, samples: int, restarts: int, seed: int) -> None:
    model = network(data, seed)
    settings = TrainConfig(lr=0.02, momentum=0.9, batch_size=50, epochs=epochs, seed=seed)
    train(model, data, settings, show_progress=False)
    assert data.test is not None
    error = evaluate(model, *data.test)[1]
    print(f"\n{data.name}: {len(data.train[1])} training images, {epochs} epochs, test error {error:.3f}")
    problem = fs.Problem(model, train=data.train, test=data.test)
    begun = time.perf_counter()
    options = {"samples": samples, "part": "test"}
    names = ["geometric_margin", "local_linear_margin"]
    table = fs.measure(problem, names, options={names[0]: {**options, "restarts": restarts}, names[1]: options})
    frame = table.to_frame()
    rows = frame[frame["measure"] == "geometric_margin"]
    low, high = (torch.tensor(rows[name].to_numpy(dtype="float64")) for name in ("low", "high"))
    right = high > 0
    seconds = float(rows["seconds"].iloc[0])
    print(f"{len(high)} test images, {int(right.sum())} classified correctly; {seconds:.0f} s for the intervals,")
    print(f"{time.perf_counter() - begun:.0f} s in all. Quantiles over the correct ones:")
    print(f"  {'':<34}" + "".join(f"{level:>11.0%}" for level in LEVELS))
    quantiles("certified: no change of class below", low[right])
    quantiles("found: a change of class at", high[right])
    linear = table.samples("local_linear_margin")[right]
    quantiles("if the network were linear", linear)
    ratio = linear / high[right]
    print(f"linear estimate within 1 % of what was found: {float(((ratio - 1).abs() < 0.01).double().mean()):.0%},")
    print(f"above it: {float((ratio > 1.01).double().mean()):.0%}, below: {float((ratio < 0.99).double().mean()):.0%}")
    assert bool((low <= high).all())


def agreement(units: int, samples: int, restarts: int, seed: int) -> None:
    """One hidden layer of up to ten ReLUs on the digits: the search against exact values."""
    data = load("digits", train_size=1000, test_size=samples, flatten=True, seed=seed)
    assert data.test is not None
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = mlp((64, units, 10)).double()
    as_double = [(x.double(), y) for x, y in (data.train, data.test)]
    train(model, as_double[0], TrainConfig(lr=0.05, momentum=0.9, batch_size=50, epochs=30), show_progress=False)
    problem = fs.Problem(model, train=as_double[0], test=as_double[1])
    begun = time.perf_counter()
    table = fs.measure(problem, "geometric_margin", options={"geometric_margin": {"samples": samples, "part": "test"}})
    exact, seconds = table.samples("geometric_margin"), time.perf_counter() - begun
    assert bool(table.to_frame()["exact"].all())
    right = exact > 0
    x, y = as_double[1][0][:samples][right], as_double[1][1][:samples][right]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    found = nearest_changes(model, x, y, restarts, torch.Generator().manual_seed(seed)).distances
    ratio = found / exact[right]
    print(
        f"  {units:2d} units: {len(ratio)} images, {seconds:.0f} s; search/exact: largest {float(ratio.max()):.6f}, "
        f"within 0.04 %: {float((ratio < 1.0004).double().mean()):.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10", help="cifar-10, mnist, digits, ...")
    parser.add_argument("--samples", type=int, default=1000, help="test images")
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few digits")
    given = parser.parse_args()
    if given.quick:
        given.data, given.samples, given.restarts, given.epochs = "digits", 20, 2, 2
    print("Networks with one hidden layer on the digits, whose margins are computed exactly:")
    for units in (5,) if given.quick else (5, 10):
        agreement(units, min(given.samples, 300), given.restarts, given.seed)
    sizes = {} if given.data == "digits" else {"train_size": 5000, "test_size": 2000}
    intervals(load(given.data, seed=given.seed, **sizes), given.epochs, given.samples, given.restarts, given.seed)


if __name__ == "__main__":
    main()
