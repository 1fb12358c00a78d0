"""Does the number mean anything? An audit of measures, and the landscapes that show why.

python examples/audit_and_landscape.py             a network on the digits; writes audit.html
python examples/audit_and_landscape.py --quick     a smaller one, coarser pictures
"""

import argparse

import flatscope as fs
from flatscope.inputs import load
from flatscope.training import TrainConfig, build, train

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--quick", action="store_true")
quick = parser.parse_args().quick

data = load("digits", train_size=100 if quick else 500, test_size=0, flatten=True)
model = build("mlp", seed=0, widths=(64, 16, 10))
train(model, data, TrainConfig(lr=0.05, momentum=0.9, batch_size=32, epochs=10 if quick else 60), show_progress=False)
problem = fs.Problem(model.eval(), train=data.train)

# The same function written with other weights, by random factors per layer and per unit: which measures move?
names = ["hessian_trace", "l2_norm", "kappa_trace_sum", "rho_sum", "l1_path_norm", "psi_trace", "margin"]
audit = fs.audit(problem, names, by=("layer", "unit"), trials=1 if quick else 3)
print(audit.summary())

# The loss around the network in weight space, which rescaling distorts, and in path space, which it leaves alone.
grid = 7 if quick else 25
surfaces = [
    fs.landscape(problem, "weights", directions="filter", grid=grid),
    fs.landscape(problem, "psi", grid=grid, relative=True, noise=0.1),
]
for surface in surfaces:
    low, high = surface.heights
    print(f"{surface.space}: loss from {low:.3g} at the network to {high:.3g} on the plane")

print("\nPage:", fs.report([fs.measure(problem, names), audit, surfaces], "audit.html"))
