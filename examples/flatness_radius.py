"""How far is it to the edge of the flat region? Table 1 of Zhang et al. (2017), on true and on random labels.

A perceptron with 512 hidden units is trained on 2,000 images, once with their labels and once with random ones, until
its loss is 0.001. Then its weights move in random directions until the loss, or the error, has changed by 0.05.

python examples/flatness_radius.py --data mnist --size 2000        the table, about two minutes on one core
python examples/flatness_radius.py                                 a quick look at the digits that come along
"""

import argparse
import math

import torch

import flatscope as fs
from flatscope.inputs import load
from flatscope.training import TrainConfig, build, random_labels, train

# Of the paper, which names neither network nor objective: mean and deviation over minima.
PRINTED = {("natural", "all"): "45.4 ± 2.7", ("random", "all"): "6.9 ± 1.0"}
PRINTED |= {("natural", "top"): "15.0 ± 1.7", ("random", "top"): "3.0 ± 0.1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits", help="digits, mnist, fashion-mnist or cifar10")
    parser.add_argument("--size", type=int, default=150, help="training images")
    parser.add_argument("--hidden", type=int, default=0, help="hidden units; 512, and 64 for a quick look")
    parser.add_argument("--directions", type=int, default=100)
    parser.add_argument("--minima", type=int, default=1, help="networks trained from different starts")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--loss", type=float, default=1e-3, help="stop training here")
    parser.add_argument("--epochs", type=int, default=4000, help="or here")
    parser.add_argument("--seed", type=int, default=0)
    arguments, _ = parser.parse_known_args()
    hidden = arguments.hidden or (64 if arguments.data == "digits" else 512)

    data = load(arguments.data, train_size=arguments.size, test_size=0, seed=arguments.seed, standardize=False)
    x, true = data.train
    print(f"{len(x)} images of {data.name}, {hidden} hidden units, {arguments.directions} directions, ε = 0.05")
    print(f"{'labels':<9} {'moves':<6} {'objective':<10} {'radius':>16}  Table 1, MNIST")
    for labels in ("natural", "random"):
        y = true if labels == "natural" else random_labels(true, data.n_classes, arguments.seed)
        tables = []
        for start in range(arguments.minima):
            model = build("two_layer", hidden=hidden, input_shape=data.input_shape, classes=data.n_classes, seed=start)
            config = TrainConfig(
                lr=arguments.lr, momentum=0.9, epochs=arguments.epochs, stop_loss=arguments.loss, evaluate_every=5
            )
            result = train(model, (x, y), config)
            if result.stopped_by != "loss":
                print(f"{labels}: stopped by {result.stopped_by} at loss {result.history['train_loss'].iloc[-1]:.2g}")
            problem = fs.Problem(model, train=(x, y))
            tables.append({key: radius(problem, arguments.directions, *key) for key in combinations()})
        for layers, objective in combinations():
            values = [table[layers, objective] for table in tables]
            mean = sum(value for value, _ in values) / len(values)
            spread = values[0][1]
            if len(values) > 1:  # over minima, as the paper's
                spread = math.sqrt(sum((value - mean) ** 2 for value, _ in values) / (len(values) - 1))
            printed = PRINTED[labels, layers] if arguments.data == "mnist" else ""
            print(f"{labels:<9} {layers:<6} {objective:<10} {mean:8.2f} ± {spread:5.2f}  {printed}", flush=True)


def combinations() -> list[tuple[str, str]]:
    return [(layers, objective) for layers in ("all", "top") for objective in ("loss", "error")]


def radius(problem: fs.Problem, directions: int, layers: str, objective: str) -> tuple[float, float]:
    """Mean and standard deviation over directions."""
    options = {"directions": directions, "objective": objective, "layers": None if layers == "all" else layers}
    row = fs.measure(problem, "flatness_radius", options={"flatness_radius": options}).to_frame().iloc[0]
    if "never cross" in row["reason"]:
        print(f"{layers}, {objective}: {row['reason']}")
    return row["value"], row["high"] - row["value"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
