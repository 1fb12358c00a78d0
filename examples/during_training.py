"""How flat is it on the way? Measures recorded while a network learns, by a plain loop.

python examples/during_training.py             30 epochs on the digits; writes during-training.html
python examples/during_training.py --quick     4 epochs

With `from flatscope.training import callbacks`, in Lightning: Trainer(callbacks=[callbacks.FlatscopeCallback(subset,
names, every=5)]); with Hugging Face:
Trainer(..., callbacks=[callbacks.FlatscopeTrainerCallback(subset, names, every=5)]).
"""

import argparse

import torch
from torch.nn.functional import cross_entropy

import flatscope as fs
from flatscope.inputs import load
from flatscope.training import Recorder, build

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--quick", action="store_true")
quick = parser.parse_args().quick
epochs, every = (4, 2) if quick else (30, 3)

torch.manual_seed(0)
x, y = load("digits", flatten=True).train
model = build("mlp", seed=0, widths=(64, 32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

# Always the same 200 samples: otherwise the curves would show the samples, not the network.
names = ["hessian_trace", "hessian_max_eigenvalue", "rho_sum", "l1_path_norm", "margin"]
recorder = Recorder((x[:200], y[:200]), names, every)
recorder.record(model, epoch=0)  # before the first step

for epoch in range(1, epochs + 1):
    model.train()
    for batch in torch.randperm(len(x)).split(64):
        optimizer.zero_grad()
        cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    if recorder.due(epoch):
        recorder.record(model, epoch)  # leaves model, gradients and random state as they are

print(recorder.history.drop(columns="step").to_string(index=False, float_format="%.4g"))
# Curvature rises before it falls, since cross-entropy's vanishes with the loss; path norms only grow.
page = fs.report({"mlp": [recorder.history, recorder.tables[epochs // every * every]]}, "during-training.html")
print("\nPage:", page)
