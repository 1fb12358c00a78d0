"""Which of these checkpoints is flatter, and is one of them another one in disguise?

python examples/compare_checkpoints.py             three networks on the digits; writes comparison.html
python examples/compare_checkpoints.py --quick     smaller networks, fewer samples
"""

import argparse

import flatscope as fs
from flatscope.inputs import load
from flatscope.training import TrainConfig, build, train

# Some of each kind: margin, curvature, norms, relative flatness, robustness. None instead would be every quick measure.
NAMES = ["margin", "hessian_trace", "l2_norm", "*path_norm", "kappa_trace_sum", "rho_*", "perturbation_robustness"]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--quick", action="store_true")
quick = parser.parse_args().quick

data = load("digits", train_size=150 if quick else 500, flatten=True)
models = {}
for batch in (16, 128):
    model = build("mlp", seed=0, widths=(64, 16, 10) if quick else (64, 32, 10))
    # The same loss for both: curvature of cross-entropy vanishes with the loss.
    settings = TrainConfig(lr=0.05, momentum=0.9, batch_size=batch, epochs=500, stop_loss=0.02)
    train(model, data, settings, show_progress=False)
    models[f"batch {batch}"] = model.eval()

# The first network with every hidden unit rescaled: other weights, the same function.
models["disguised"] = fs.rescale(models["batch 16"], data.train[0][:2], by="unit", seed=1)

found = fs.compare(models, data.train, NAMES, test=data.test)

print(found.summary())
print("\nKendall's tau between the rankings of comparable measures:\n", found.agreement().round(2).to_string())
print("\nhessian_trace:", found.verdict("hessian_trace").reason)
print("\nPage:", fs.report([found, found.tables], "comparison.html"))
