"""One function, two ways of writing it: its landscape in weight space changes, the one in path space does not.

python examples/landscape_invariance.py --full     the picture of the README, about a minute on one core
python examples/landscape_invariance.py            a quick look
"""

import argparse

import torch
from matplotlib.figure import Figure

import flatscope as fs
from flatscope import Surface
from flatscope.inputs import load
from flatscope.training import TrainConfig, build, train

TITLES = ("as trained", "units rescaled")
SPACES = {"weights": "weight space", "psi": "path space"}
HEADS = {"weights": "weight space: two pictures of one function", "psi": "path space: one picture"}


def trained(samples: int, epochs: int) -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """A small network on the digits, in double precision: what is equal should be seen to be equal."""
    data = load("digits", train_size=samples, test_size=0, flatten=True)
    model = build("mlp", seed=0, widths=(64, 24, 24, 10))
    train(model, data.train, TrainConfig(lr=0.05, momentum=0.9, batch_size=32, epochs=epochs), show_progress=False)
    x, y = data.train
    return model.double().eval(), (x.double(), y)


def pictures(samples: int, epochs: int, grid: int) -> dict[str, list[Surface]]:
    """Both landscapes of the network and of a twin that computes the same function with other weights."""
    model, (x, y) = trained(samples, epochs)
    twin = fs.rescale(model, x[:2], by="unit", low=0.2, high=5.0, seed=1)
    difference = float((model(x) - twin(x)).abs().max().detach())
    print(f"largest difference of the outputs: {difference:.1e}")
    problems = [fs.Problem(network, train=(x, y)) for network in (model, twin)]
    found = {
        "weights": [fs.landscape(problem, "weights", "gaussian", grid, 2.0) for problem in problems],  # raw steps
        "psi": [fs.landscape(problem, "psi", grid=grid, span=2.0, relative=True, noise=0.08) for problem in problems],
    }
    for space, (before, after) in found.items():
        change = float((before.loss - after.loss).abs().max())
        print(f"{SPACES[space]}: loss up to {before.heights[1]:.3g}, largest change {change:.1e}")
    return found


def draw(found: dict[str, list[Surface]], tall: bool = False) -> Figure:
    figure = Figure(figsize=(6.2, 6.6) if tall else (12.4, 3.3), layout="constrained")
    halves = figure.subfigures(2, 1) if tall else figure.subfigures(1, 2, wspace=0.04)
    for half, (space, surfaces) in zip(halves, found.items(), strict=True):
        low = min(surface.heights[0] for surface in surfaces)
        high = max(surface.heights[1] for surface in surfaces)
        panels = half.subplots(1, 2, sharex=True, sharey=True)
        for ax, surface, title in zip(panels, surfaces, TITLES, strict=True):
            drawn = surface.plot(ax, heights=(low, high), log=True)
            ax.set_title(title, fontsize=10)
        panels[1].set_ylabel("")
        half.colorbar(drawn, ax=list(panels), label="training loss", format="%.2g", pad=0.02, shrink=0.82)
        half.suptitle(HEADS[space], fontsize=11)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the picture of the README")
    parser.add_argument("--tall", action="store_true", help="one space above the other, for narrow screens")
    parser.add_argument("--output", default="landscapes.png")
    arguments, _ = parser.parse_known_args()
    found = pictures(1000, 60, 41) if arguments.full else pictures(100, 5, 5)
    assert float((found["psi"][0].loss - found["psi"][1].loss).abs().max()) < 1e-8
    draw(found, arguments.tall).savefig(arguments.output, dpi=130)


if __name__ == "__main__":
    main()
