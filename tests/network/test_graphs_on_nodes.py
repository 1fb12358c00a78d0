"""Weights that multiply constants: graphs that a module holds, embeddings of classes, branches without an input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import flatscope as fs

torch.set_num_threads(1)
N_NODES = 12


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed), dtype=torch.float64)


def adjacency() -> Tensor:
    links = (torch.rand(N_NODES, N_NODES, generator=torch.Generator().manual_seed(1)) > 0.6).double()
    return links / links.sum(1, keepdim=True).clamp(min=1)


class Net(nn.Module):
    """Two layers, a table, constants, and a function of them and the input."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor], nodes: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.c1, self.c2 = nn.Linear(5, 6).double(), nn.Linear(6, 3).double()
        self.w1, self.w2 = nn.Parameter(draw(5, 6) / 2), nn.Parameter(draw(6, 3) / 2)
        self.table = nn.Parameter(draw(N_NODES, 5, seed=3))
        self.register_buffer("x", draw(N_NODES, 5, seed=4))
        self.register_buffer("a", adjacency())
        self.register_buffer("edges", torch.randint(0, N_NODES, (2, 40), generator=torch.Generator().manual_seed(5)))
        self.register_buffer("classes", draw(3, 5, seed=6))
        self.way, self.nodes = way, nodes

    def forward(self, inputs: Tensor) -> Tensor:
        return self.way(self, inputs)

    def passed(self, x: Tensor) -> Tensor:
        """Message passing along the edges."""
        sent = x.index_select(0, self.edges[0])
        return torch.zeros(N_NODES, x.shape[1], dtype=x.dtype).index_add(0, self.edges[1], sent)


def scattered(m: Net, x: Tensor) -> Tensor:
    sent = x.index_select(0, m.edges[0])
    place = m.edges[1][:, None].expand_as(sent)
    return torch.zeros(N_NODES, x.shape[1], dtype=x.dtype).scatter_add(0, place, sent)


def convolved(m: Net, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As PyG's GCNConv does it: messages are added up in place, and what is no layer's bias is added."""
    sent = (x @ weight).index_select(0, m.edges[0])
    place = m.edges[1].view(-1, 1).expand_as(sent)
    return sent.new_zeros(N_NODES, sent.shape[1]).scatter_add_(0, place, sent) + bias


def mean_of_neighbours(m: Net, x: Tensor) -> Tensor:
    return torch.cat([x, m.a @ x], dim=1)


NODES: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "A @ lin(x)": lambda m, i: (m.a @ m.c2(torch.relu(m.a @ m.c1(m.x))))[i],
    "lin(A @ x)": lambda m, i: m.c2(m.a @ torch.relu(m.c1(m.a @ m.x)))[i],
    "A @ x @ w": lambda m, i: (m.a @ torch.relu(m.a @ m.x @ m.w1) @ m.w2)[i],
    "tanh": lambda m, i: (m.a @ m.c2(torch.tanh(m.a @ m.c1(m.x))))[i],
    "index_add": lambda m, i: m.passed(m.c2(torch.relu(m.passed(m.c1(m.x)))))[i],
    "scatter_add": lambda m, i: scattered(m, m.c2(torch.relu(scattered(m, m.c1(m.x)))))[i],
    "scatter_add_ and biases": lambda m, i: convolved(
        m, torch.relu(convolved(m, m.x, m.w1, m.c1.bias)), m.w2, m.c2.bias
    )[i],
    "index_select at the end": lambda m, i: (m.a @ m.c2(torch.relu(m.a @ m.c1(m.x)))).index_select(0, i),
    "embedding at the end": lambda m, i: functional.embedding(i, m.a @ m.c2(torch.relu(m.a @ m.c1(m.x)))),
    "gather at the end": lambda m, i: (m.a @ m.c2(torch.relu(m.a @ m.c1(m.x)))).gather(0, i[:, None].expand(-1, 3)),
    "one-hot at the end": lambda m, i: (
        functional.one_hot(i, N_NODES).to(m.x.dtype) @ (m.a @ m.c2(torch.relu(m.a @ m.c1(m.x))))
    ),
    "a layer after the choice": lambda m, i: m.c2(torch.relu(m.a @ m.c1(m.x))[i]),
    "learned nodes": lambda m, i: (m.a @ m.c2(torch.relu(m.a @ m.c1(m.table))))[i],
    "learned nodes, only looked up": lambda m, i: m.c2(torch.relu(m.c1(m.table[i]))),
}
X = draw(14, 5, seed=9)
SIGNALS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "embeddings of the classes": lambda m, x: torch.tanh(m.c1(x)) @ torch.tanh(m.classes @ m.w1).T,
    "embeddings of the classes by a layer": lambda m, x: torch.tanh(x @ m.w1) @ m.c1(m.classes).T,
    "similarity to prototypes": lambda m, x: (
        functional.normalize(m.c1(x), dim=1) @ functional.normalize(m.c1(m.classes), dim=1).T
    ),
    "a branch without an input": lambda m, x: m.c2(torch.tanh(m.c1(x))) + m.c2(torch.tanh(m.classes @ m.w1)).mean(0),
    "a gate without an input": lambda m, x: m.c2(torch.tanh(m.c1(x)) * torch.sigmoid(m.classes @ m.w1).mean(0)),
    "projected positions": lambda m, x: m.c2(torch.tanh(m.c1(x[:, None] * m.classes) + m.classes @ m.w1).mean(1)),
    "positions by a layer": lambda m, x: torch.tanh((x[:, None] * m.classes) @ m.w1 + m.c1(m.classes)).mean(1) @ m.w2,
    "a weight of a product with constants": lambda m, x: m.c2(torch.tanh(x @ (m.x.T @ m.x @ m.w1 / 20))),
    "learned queries": lambda m, x: m.c2(
        torch.softmax((m.table[:3] @ m.w1)[None] @ torch.tanh(m.c1(x))[:, :, None] @ x.new_ones(1, 2), 1)[..., :1].mean(
            1
        )
        * torch.tanh(m.c1(x))
    ),
    "a constant for every sample": lambda m, x: m.c2(torch.tanh(m.c1(x) + x.new_ones(len(x), 5) @ m.w1)),
    "an outer product": lambda m, x: torch.einsum("ni,ci->nc", torch.tanh(m.c1(x)), torch.tanh(m.classes @ m.w1)),
}


def problem_of(name: str) -> tuple[Net, fs.Problem, Tensor, Tensor]:
    nodes = name in NODES
    model = Net(NODES[name] if nodes else SIGNALS[name], nodes).eval()
    inputs = torch.arange(N_NODES) if nodes else X
    targets = torch.arange(len(inputs)) % 3
    return model, fs.Problem(model, train=(inputs, targets)), inputs, targets


def hessian_of(model: nn.Module, name: str, inputs: Tensor, targets: Tensor) -> Tensor:
    value = model.get_parameter(name).detach()

    def loss(vector: Tensor) -> Tensor:
        given = {name: vector.reshape(value.shape)}
        return functional.cross_entropy(functional_call(model, given, (inputs,)), targets)

    return torch.autograd.functional.hessian(loss, value.reshape(-1))


@pytest.mark.parametrize("curved", ["hessian", "gauss_newton"])
@pytest.mark.parametrize("name", [*NODES, *SIGNALS])
def test_every_row_is_that_of_its_parameter_or_says_what_its_weight_is_computed_from(name: str, curved: str) -> None:
    model, problem, inputs, targets = problem_of(name)
    names = ["layer_trace", "kappa_trace", "rho_layer_sum", "layer_max_eigenvalue", "hessian_trace", "kappa_trace_sum"]
    options = {"layer_max_eigenvalue": {"tolerance": 1e-9}}
    table = fs.measure(problem, names, precision=0, options=options, curvature=curved)
    frame, total = table.to_frame(), 0.0
    whole = {key: hessian_of(model, key, inputs, targets) for key in dict(model.named_parameters())}
    if curved == "hessian":
        trace = sum(float(block.trace()) for block in whole.values())
        assert table["hessian_trace"] == pytest.approx(trace, rel=1e-9)
    told = ""
    for _, row in frame[frame["measure"] == "layer_trace"].iterrows():
        layer = row["layer"]
        if "computed from" in row["reason"]:
            assert name not in NODES or "one-hot" in name or "learned" in name
            told += row["reason"]
            continue
        parameter = layer if layer in whole else f"{layer}.weight"
        told += f" {parameter} "
        if curved != "hessian":
            continue
        block, value = whole[parameter], model.get_parameter(parameter).detach()
        assert row["value"] == pytest.approx(float(block.trace()), rel=1e-9, abs=1e-12), layer
        norm = float(value.square().sum())
        assert table.layer("kappa_trace")[layer] == pytest.approx(norm * float(block.trace()), rel=1e-9, abs=1e-12)
        top = float(torch.linalg.eigvalsh(block)[-1])
        assert table.layer("layer_max_eigenvalue")[layer] == pytest.approx(top, rel=1e-6, abs=1e-9)
        total += norm * float(block.trace())
    summed = frame[frame["measure"] == "kappa_trace_sum"].iloc[0]
    for parameter, block in whole.items():
        if block.any() and model.get_parameter(parameter).ndim > 1:
            assert parameter in told or parameter in summed["reason"], parameter
    if curved == "hessian" and "computed from" not in told and summed["value"] == summed["value"]:
        assert summed["value"] == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("name", [*NODES, *SIGNALS])
def test_no_measure_crashes_where_weights_multiply_constants(name: str) -> None:
    _, problem, _, _ = problem_of(name)
    names = ["psi_trace", "*path_norm", "lipschitz*", "l2_norm", "spectral_norm", "gradient_noise", "fisher_rao_norm"]
    frame = fs.measure(problem, [*names, "relative_flatness", "input_sensitivity", "sharpness"]).to_frame()
    assert not frame["reason"].str.startswith("failed").any()
    if name in NODES and name not in ("learned nodes, only looked up", "a layer after the choice"):
        refused = frame[frame["measure"] == "psi_trace"].iloc[0]
        assert "constants" in refused["reason"] or refused["value"] == refused["value"]


@pytest.mark.parametrize("name", ["A @ lin(x)", "index_add", "A @ x @ w"])
def test_gradients_of_nodes_are_those_of_a_plain_computation(name: str) -> None:
    model, problem, inputs, targets = problem_of(name)
    rows = []
    for i in range(len(inputs)):
        loss = functional.cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1])
        slopes = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
        rows.append(torch.cat([slope.reshape(-1) for slope in slopes]))
    table = fs.measure(problem, ["gradient_norm", "gradient_noise"], precision=0)
    assert table["gradient_norm"] == pytest.approx(float(torch.stack(rows).mean(0).norm()), rel=1e-9)
