"""The network of the examples."""

import torch
from sklearn.datasets import load_iris

import flatscope as fs

# 150 flowers, four numbers each, three classes; 100 to train on. scikit-learn brings them along.
features, classes = load_iris(return_X_y=True)
x = torch.tensor(features, dtype=torch.float32)
x = (x - x.mean(0)) / x.std(0)
y = torch.tensor(classes)
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
train, test = (x[order[:100]], y[order[:100]]), (x[order[100:]], y[order[100:]])

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
before = {name: value.clone() for name, value in model.state_dict().items()}
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(300):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(train[0]), train[1]).backward()
    optimizer.step()

problem = fs.Problem(model.eval(), train=train, test=test, initial=before)
