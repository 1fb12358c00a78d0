"""Gradient descent sharpens until its step size can bear no more: the edge of stability, recorded live.

Full-batch gradient descent with a learning rate η stays where η·λ_max is 2 (Cohen et al. 2021); with a quarter of that
rate the same network never comes near. With --batch it is SGD, whose batch sharpness settles at 2/η. Seconds on the
embedded digits; the check on 5,000 images of CIFAR-10 is the same file with other numbers:

    python examples/edge_of_stability.py --data cifar10 --train-size 5000 --widths 32 32 --lr 0.0125 0.011 --steps 1400
    python examples/edge_of_stability.py --data cifar10 --train-size 1000 --lr 0.05 --batch 16 --steps 30000 --every 500
"""

import argparse

import torch

import flatscope as fs
from flatscope.inputs import load
from flatscope.training import build

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--quick", action="store_true")
parser.add_argument("--data", default="digits")
parser.add_argument("--train-size", type=int, default=500)
parser.add_argument("--widths", type=int, nargs="+", default=[32, 32])
parser.add_argument("--lr", type=float, nargs="+", default=[0.09, 0.02], help="one training each")
parser.add_argument("--batch", type=int, default=None, help="of SGD; all samples by default")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--every", type=int, default=5, help="steps between two records")
parser.add_argument("--noise", type=int, default=10, help="records between two gradient-noise scales; 0 for none")
parser.add_argument("--densities", type=int, default=15, help="records between two spectral densities; 0 for none")
parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the order of batches")
parser.add_argument("--device", default="cpu", help="cpu or cuda")
parser.add_argument("--out", default="edge-of-stability")
given = parser.parse_args()
steps = 150 if given.quick else given.steps

x, y = (part.to(given.device) for part in load(given.data, train_size=given.train_size, flatten=True).train)
runs: dict[str, fs.Stability] = {}
for lr in given.lr:
    model = build("mlp", seed=given.seed, widths=(x[0].numel(), *given.widths, 10), activation="tanh")
    model.to(given.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    recorder = fs.StabilityRecorder(
        (x, y), given.every, batch=given.batch, loss="mse", noise_every=given.noise, density_every=given.densities
    )
    order = torch.Generator().manual_seed(given.seed)
    targets = torch.nn.functional.one_hot(y, 10).to(x.dtype)
    for step in range(steps + 1):
        if recorder.due(step):
            recorder.record(model, step, optimizer=optimizer)  # leaves the training as it would have been
        chosen = slice(None) if given.batch is None else torch.randperm(len(x), generator=order)[: given.batch]
        optimizer.zero_grad()
        (model(x[chosen]) - targets[chosen]).square().sum(1).mean().backward()
        optimizer.step()
    name = f"η = {lr:g}" + (f", batches of {given.batch}" if given.batch else "")
    runs[name] = recorder.stability
    runs[name].save(f"{given.out}-{lr:g}.json")
    print(f"{name}: {' '.join(runs[name].sentences())}", flush=True)
page = fs.report(runs, f"{given.out}.html")
print("\nPage:", page)
