"""ReLUs replaced by polynomials of degree 10, after Figures 21-24 of Zhang et al. (2017): does the network still learn?

python examples/polynomial_network.py                  9,370 parameters on 2,000 CIFAR-10 images; about three minutes
python examples/polynomial_network.py --data digits    the small digits of scikit-learn, nothing to download
python examples/polynomial_network.py --quick          one epoch on some digits, to see that it runs

Three networks start from the same weights: with ReLUs, with the polynomial fitted on [-R, R] and held constant beyond
it, and with the polynomial as it is. Beyond the interval a polynomial of degree 10 grows like the tenth power: 58 R at
1.5 R. So few pre-activations outside are enough to make the third useless, and the counts show whether there are any.
"""

import argparse
import copy

import torch
from torch import Tensor, nn

from flatscope.inputs import load
from flatscope.training import TrainConfig, build, evaluate, train
from flatscope_papers.theory.polynomial import PolynomialTwin, polynomial_twin

TWO_POINTS = 0.02


def outside(twin: PolynomialTwin | None, x: Tensor) -> str:
    """Share of pre-activations outside the interval of the fit, layer by layer."""
    if twin is None:
        return ""
    return " ".join(f"{share:.2%}" for share in twin.outside_share(x).values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--samples", type=int, default=2000, help="training images")
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--radius", type=float, default=5.0, help="R")
    parser.add_argument("--degree", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one epoch on some digits")
    given = parser.parse_args()
    if given.quick:
        given.data, given.samples, given.epochs = "digits", 200, 1
    test_size = None if given.data == "digits" else 5000
    kinds = ("ReLU", "polynomial, clipped", "polynomial")
    errors: dict[str, list[float]] = {kind: [] for kind in kinds}
    for seed in range(given.seeds):
        samples = None if given.data == "digits" and not given.quick else given.samples
        data = load(given.data, train_size=samples, test_size=test_size, seed=seed)
        assert data.test is not None
        x = data.train[0]
        first = build("all_conv", seed=seed, input_shape=tuple(x.shape[1:]), classes=data.n_classes)
        count = sum(p.numel() for p in first.parameters())
        print(f"\n{data.name}, seed {seed}: {len(x)} images, {count} parameters, {given.epochs} epochs")
        print(f"{'':<21} train error  test error  outside [-R, R] before training; after, layer by layer")
        for kind in kinds:
            model: nn.Module = copy.deepcopy(first)
            twin = None
            if kind != "ReLU":
                beyond = "clip" if "clipped" in kind else "polynomial"
                twin = polynomial_twin(model, x[:100], degree=given.degree, radius=given.radius, outside=beyond)
                model = twin.model
            before = outside(twin, x)
            settings = TrainConfig(lr=given.lr, momentum=0.9, batch_size=100, epochs=given.epochs, seed=seed)
            run = train(model, data.train, settings, show_progress=False)
            fit, error = (evaluate(model, *part)[1] for part in (data.train, data.test))
            errors[kind].append(error)
            state = "diverged" if run.diverged else ""
            print(f"{kind:<21} {fit:11.3f} {error:11.3f}  {before}; {outside(twin, x)} {state}".rstrip("; "))
    mean = {kind: float(torch.tensor(values).mean()) for kind, values in errors.items()}
    print(f"\nmean test error over {given.seeds} seeds: " + ", ".join(f"{k} {v:.3f}" for k, v in mean.items()))
    for kind in kinds[1:]:
        apart = mean[kind] - mean["ReLU"]
        verdict = "within" if abs(apart) <= TWO_POINTS else "NOT within"
        print(f"{kind}: {apart:+.3f} against ReLU, {verdict} two points")


if __name__ == "__main__":
    main()
