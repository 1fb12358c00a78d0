"""Numbers at the edge of what floats hold, and data of odd shapes: the right value, or a refusal that says why.

`ODD_SHARE=1 pytest tests/test_odd_numbers.py` runs all cases instead of a fifth of them.
"""

from __future__ import annotations

import itertools
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import flatscope as fs

NAMES = ["parameter_count", "l2_norm", "l1_path_norm", "gradient_norm", "hessian_trace", "kappa_trace", "margin"]
Change = Callable[[nn.Module], object]


def each(change: Callable[[Tensor], Tensor]) -> Change:
    def changed(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(change(parameter))

    return changed


def one(value: float) -> Change:
    def changed(model: nn.Module) -> None:
        with torch.no_grad():
            model[0].weight[0, 0] = value  # type: ignore[index]

    return changed


def dead_unit(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight[1] = 0.0  # type: ignore[index]
        model[0].bias[1] = -1.0  # type: ignore[index]


WEIGHTS: dict[str, Change] = {
    "plain": lambda model: None,
    "zero": each(torch.zeros_like),
    "ones": each(torch.ones_like),
    "minus zero": each(lambda value: -torch.zeros_like(value)),
    "denormal": each(lambda value: value * 1e-40),
    "tiny": each(lambda value: value * 1e-20),
    "large": each(lambda value: value * 1e4),
    "huge": each(lambda value: value * 1e18),
    "infinite": one(math.inf),
    "not a number": one(math.nan),
    "one denormal": one(1e-42),
    "one huge": one(3e38),
    "float16": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "float64": lambda model: model.double(),
    "float64 beyond float32": lambda model: each(lambda value: value * 1e60)(model.double()),
    "signs": each(torch.sign),
    "dead unit": dead_unit,
    "frozen": lambda model: model[0].requires_grad_(False),  # type: ignore[index]
}
X, Y = torch.randn(9, 4, generator=torch.Generator().manual_seed(5)), torch.arange(9) % 3
DATA: dict[str, tuple[Any, Any]] = {
    "plain": (X, Y),
    "one sample": (X[:1], Y[:1]),
    "one class": (X, torch.zeros_like(Y)),
    "last class": (X, torch.full_like(Y, 2)),
    "equal samples": (X[:1].repeat(9, 1), Y),
    "zero": (torch.zeros_like(X), Y),
    "constant": (torch.ones_like(X), Y),
    "huge": (X * 1e30, Y),
    "denormal": (X * 1e-41, Y),
    "not a number": (torch.where(X > 1, math.nan, X), Y),
    "infinite": (torch.where(X > 1, math.inf, X), Y),
    "none": (X[:0], Y[:0]),
    "label out of range": (X, Y + 1),
    "negative label": (X, Y - 1),
    "labels of floats": (X, Y.float()),
    "bytes": ((X * 50).abs().byte(), Y),
    "float64": (X.double(), Y),
    "float16": (X.half(), Y),
    "probabilities": (X, torch.softmax(X[:, :3], 1)),
    "more labels than samples": (X, torch.cat([Y, Y])),
}
EVERY = list(itertools.product(WEIGHTS, DATA))
SHARE = int(os.environ.get("ODD_SHARE", "5"))


def network(weights: str) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).eval()
    WEIGHTS[weights](model)
    return model


def by_hand(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """Some of the measures, densely and in float64, which holds what float32 overflows on."""
    model = model.double()
    parameters = [p for p in model.parameters() if p.requires_grad]
    outputs = model(x.double())
    y = y.double() if y.is_floating_point() else y
    loss = cross_entropy(outputs, y)
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    trace = 0.0
    for k, entry in enumerate(flat):  # the diagonal of the Hessian
        row = torch.autograd.grad(entry, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
        trace += float(torch.cat([part.reshape(-1) for part in row])[k])
    return {
        "parameter_count": float(sum(p.numel() for p in parameters)),
        "l2_norm": float(model[0].weight.norm() * model[2].weight.norm()),  # type: ignore[index, operator, union-attr]
        "gradient_norm": float(flat.norm()),
        "hessian_trace": trace,
    }


def wrong(table: fs.Table, expected: dict[str, float], exactness: float) -> list[str]:
    """Rows that give a number that is not that of the reference, or none without a reason."""
    found = []
    for row in table.to_frame().to_dict("records"):
        name, value = row["measure"], float(row["value"])
        if not math.isfinite(value):
            found += [] if row["reason"] else [f"{name} is {value} without a reason"]
        elif name in expected and row["layer"] == "" and row["exact"]:
            right = expected[name]
            least = 2e-6 if name == "gradient_norm" else 2e-9  # sums of gradients cancel to their rounding
            if not math.isclose(value, right, rel_tol=exactness, abs_tol=least):
                found.append(f"{name} is {value}, and by hand {right}")
    return found


def outcome(weights: str, data: str) -> list[str]:
    """What is wrong with the case; nothing where it is refused in our words."""
    x, y = DATA[data]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            problem = fs.Problem(network(weights), train=(x.clone(), y.clone()))
            table = fs.measure(problem, NAMES, precision=0)
        except fs.InputError:
            return []
        failed = [f"{r.measure} {r.reason}" for r in table.to_frame().itertuples() if r.reason.startswith("failed")]
        exactness = {torch.float16: 3e-2, torch.bfloat16: 0.2}.get(problem.dtype, 2e-3)
        return failed + wrong(table, by_hand(network(weights), x, y), exactness)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_number_is_right_or_refused(weights: str) -> None:
    cases = [case for place, case in enumerate(EVERY) if case[0] == weights and place % SHARE == 0]
    assert {data: found for _, data in cases if (found := outcome(weights, data))} == {}


@pytest.mark.parametrize("weights", ["zero", "denormal", "huge", "infinite", "float16", "one huge", "dead unit"])
def test_odd_networks_are_compared_and_reported_or_refused(weights: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = fs.compare({"odd": network(weights), "plain": network("plain")}, (X, Y), names=NAMES)
        except fs.InputError:
            return
        found.save(tmp_path / "found.json")
        assert fs.Comparison.load(tmp_path / "found.json") == found
        assert fs.report([found, found.tables["odd"]], tmp_path / "page.html").stat().st_size > 1000
