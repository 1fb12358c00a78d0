"""A bound below 1 where every other one says nothing: trained noise around a network (Dziugaite and Roy 2017).

A network with one hidden layer learns to tell the digits 0 to 4 from 5 to 9 by plain SGD from a known start. Then the
bounds: each of the list, and the one whose noise is trained, with its prior at the start or from half of the data.

python examples/non_vacuous_bound.py                                  a quick look at the digits that come along
python examples/non_vacuous_bound.py --data mnist --prior initial     as in the paper; minutes on one core
"""

import argparse
import time
from pathlib import Path

import torch
from torch import nn

import flatscope as fs
from flatscope.extend import declarations
from flatscope.inputs import load
from flatscope.training import TrainConfig, train

NAME = "pac_bayes_optimised"


def start(inputs: int, hidden: int, seed: int) -> nn.Module:
    """The weights of the paper: normal, cut off at two deviations of 0.04; biases 0.1 and 0."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 2))
    with torch.no_grad():
        for layer, bias in ((model[0], 0.1), (model[2], 0.0)):
            nn.init.trunc_normal_(layer.weight, std=0.04, a=-0.08, b=0.08)
            layer.bias.fill_(bias)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits", help="digits or mnist")
    parser.add_argument("--hidden", type=int, default=600)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--prior", nargs="*", default=["initial", "half"], help="initial, zero, half")
    parser.add_argument("--others", action="store_true", help="all other bounds as well")
    parser.add_argument("--steps", type=int, default=0, help="of the trained noise; 8000, and 500 for a quick look")
    parser.add_argument("--draws", type=int, default=0, help="of its weights; 50000, and 2000 for a quick look")
    parser.add_argument("--network", type=Path, help="file to keep the trained network in, or to take it from")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seed", type=int, default=0)
    arguments, _ = parser.parse_known_args()
    quick = arguments.data == "digits"

    # Not standardized: the scaling of the inputs must not depend on the training data.
    data = load(arguments.data, standardize=False, flatten=True)
    place = arguments.device
    (x, y), (x_test, y_test) = (
        (inputs.to(place), (labels >= 5).long().to(place)) for inputs, labels in (data.train, data.test)
    )
    model = start(x.shape[1], arguments.hidden, arguments.seed).to(place)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if arguments.network and arguments.network.exists():
        model.load_state_dict(torch.load(arguments.network, weights_only=True))
    else:
        train(model, (x, y), TrainConfig(lr=0.01, momentum=0.9, batch_size=100, epochs=arguments.epochs))
        if arguments.network:
            torch.save(model.state_dict(), arguments.network)
    problem = fs.Problem(model.eval(), train=(x, y), test=(x_test, y_test), initial=before)
    errors = [1 - float((model(a).argmax(1) == b).float().mean()) for a, b in ((x, y), (x_test, y_test))]
    print(f"{len(x):,} images, the network itself: training error {errors[0]:.4f}, test error {errors[1]:.4f}")

    if arguments.others:
        names = [name for name in declarations("bound") if name != NAME]
        for row in fs.bounds(problem, names).to_frame().to_dict("records"):
            print(f"{row['measure']:<24} {row['value']:12.4g}  {row['options']} {row['reason']}")
    options = {"steps": arguments.steps or (500 if quick else 8000)}
    options |= {"draws": arguments.draws or (2000 if quick else 50_000)}
    for prior in arguments.prior:
        begun = time.process_time(), time.perf_counter()
        row = fs.bounds(problem, NAME, options={NAME: options | {"prior": prior}}).to_frame().iloc[0]
        seconds = f"{time.process_time() - begun[0]:.0f} CPU s, {time.perf_counter() - begun[1]:.0f} s in all"
        print(f"{NAME}, prior {prior}: {row['value']:.4f} ({seconds})\n  {row['reason']}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
