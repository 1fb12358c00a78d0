"""Every certificate is attacked, on networks that compare, round, route and read, and on ordinary ones."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from certified_networks import Case, Gated, cases
from torch import Tensor, nn

import flatscope as fs
from flatscope.errors import NotApplicable
from flatscope.measures.psi_flatness import path_coordinates
from flatscope.network.interception import Operation
from flatscope.network.operations import TABLE
from flatscope.network.path_rules import Paths, same
from flatscope.network.stretch_rules import Stretches
from flatscope.symmetries.path_certificate import ActivationCertificate

CASES = cases()
BY_NORM = {"spectral_norm": 2.0, "lipschitz_linf": math.inf}
OPTIONS = {"spectral_norm": {"form": "lipschitz_l2"}}
CERTIFICATES = [*BY_NORM, "certified_radius", "geometric_margin", "psi_activation_radius"]
POINTS = 400

Function = Callable[[Tensor], Tensor]


def problem_of(case: Case) -> fs.Problem:
    labelled = []
    for batch in case.batches:
        outputs = case.model(**batch) if isinstance(batch, dict) else case.model(batch)
        labels = outputs.argmax(1)
        labelled.append({**batch, "labels": labels} if isinstance(batch, dict) else (batch, labels))
    return fs.Problem(case.model, labelled)


def functions(case: Case) -> Iterator[tuple[Function, Tensor]]:
    """For some samples the network as a function of the real numbers of its input, and the sample, (1, ...)."""
    for batch in case.batches:
        for place in {0, 1, len(next(iter(batch.values())) if isinstance(batch, dict) else batch) - 1}:
            if not isinstance(batch, dict):
                yield case.model, batch[place : place + 1]
                continue
            own = {name: value[place : place + 1] for name, value in batch.items()}

            def run(x: Tensor, own: dict[str, Tensor] = own) -> Tensor:
                rows = {name: value.expand(len(x), *value.shape[1:]) for name, value in own.items()}
                return case.model(**{**rows, "x": x})

            yield run, own["x"]


@torch.no_grad()
def quotient(case: Case, order: float) -> float:
    """The largest ratio of distances of outputs and inputs: over random pairs near and far, at places near and far."""
    best, generator = 0.0, torch.Generator().manual_seed(7)
    for run, x in functions(case):
        draws = torch.randn(POINTS, *x.shape[1:], generator=generator, dtype=x.dtype)
        moves = torch.randn(POINTS, *x.shape[1:], generator=generator, dtype=x.dtype)
        moves[POINTS // 2 :] = moves[POINTS // 2 :].sign()
        for size in (1e-3, 1.0, 5.0):
            for length in (1e-4, 1e-2, 0.3):
                start = x + size * draws
                change = (run(start + length * moves) - run(start)).flatten(1).norm(order, dim=1)
                best = max(best, float((change / (length * moves).flatten(1).norm(order, dim=1)).max()))
    return best


@torch.no_grad()
def change_within(case: Case, places: Tensor, radii: Tensor) -> Tensor:
    """Whether some point within its radius changes the class of a sample."""
    x, generator = case.batches[0], torch.Generator().manual_seed(8)
    assert isinstance(x, Tensor)
    found = []
    for place, radius in zip(places.tolist(), radii.tolist(), strict=True):
        directions = torch.randn(40 * POINTS, 2, generator=generator, dtype=x.dtype)
        directions /= directions.norm(dim=1, keepdim=True)
        shares = torch.rand(len(directions), 1, generator=generator, dtype=x.dtype) * (1 - 1e-9)
        near = case.model(x[place] + min(radius, 20.0) * shares * directions).argmax(1)
        found.append(bool((near != case.model(x[place : place + 1]).argmax(1)).any()))
    return torch.tensor(found)


@pytest.mark.parametrize("name", CASES)
def test_no_certificate_is_broken(name: str) -> None:
    case = CASES[name]
    problem = problem_of(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = fs.measure(problem, CERTIFICATES, options=OPTIONS)
    frame = table.to_frame().set_index("measure")
    assert not frame["reason"].str.contains("failed").any(), frame["reason"].to_list()
    one_tensor = isinstance(case.batches[0], Tensor)
    for measure, order in BY_NORM.items():
        value = table[measure]
        if case.served is not None:
            assert math.isnan(value) != case.served, f"{measure}: {table.reason(measure)}"
        assert not value < quotient(case, order) * (1 - 1e-9), f"{measure} says {value}"
    radius = table["certified_radius"]
    if case.served is False:
        assert math.isnan(radius), f"certified_radius says {radius}"
    if one_tensor and not math.isnan(radius):
        n = problem.n_train
        broken = change_within(case, torch.arange(n), torch.full((n,), radius))
        assert int(broken.sum()) <= 0.05 * n
    low = torch.tensor(frame.loc[["geometric_margin"], "low"].to_list(), dtype=torch.float64)
    if one_tensor and not low.isnan().any():
        assert case.served is not False
        assert not change_within(case, torch.arange(len(low)), low).any()
        assert bool((low <= table.samples("geometric_margin") * (1 + 1e-9)).all())


@pytest.mark.parametrize(("measure", "operation"), [*((name, "abs") for name in BY_NORM), ("certified_radius", "abs")])
def test_a_constant_that_does_not_hold_is_not_given(measure: str, operation: str) -> None:
    """As if the table were wrong: attacks do not look at it."""
    case = Case(Gated(torch.abs, 3), CASES["relu"].batches, True)
    entry = TABLE[operation]

    def shorter(known: Stretches, op: Operation, signals: list[Tensor], result: object) -> float:
        assert entry.stretch is not None
        return entry.stretch(known, op, signals, result) + math.log(0.2)

    def lighter(paths: Paths, op: Operation) -> tuple[object, float]:
        result, log_scale = same(paths, op)
        return result, log_scale + math.log(0.2)

    with mock.patch.dict(TABLE, {operation: replace(entry, stretch=shorter, paths=lighter)}):
        table = fs.measure(problem_of(case), [measure, "geometric_margin"], options=OPTIONS)
    assert math.isnan(table[measure])
    assert "two inputs whose outputs are" in table.reason(measure)
    assert "two inputs whose outputs are" in table.reason("geometric_margin")
    assert fs.measure(problem_of(case), measure, options=OPTIONS)[measure] > 0


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.served is False])
def test_states_behind_a_jump_have_no_radius(name: str) -> None:
    """Path values may move the jump, and with it the ReLUs behind it."""
    model = nn.Sequential(CASES[name].model, nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    table = fs.measure(problem_of(Case(model, CASES[name].batches, False)), "psi_activation_radius")
    assert math.isnan(table["psi_activation_radius"]), table["psi_activation_radius"]


class Reordered(nn.Module):
    """Hidden units change places, or one of them is written over, in several ways."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        """Samples (n, 3)."""
        h = self.between(torch.relu(self.first(x)))
        return self.last(torch.relu(self.inner(h)))


def written_over(h: Tensor) -> Tensor:
    """Unit 0 becomes three times unit 1, in place."""
    h = h * 1
    h[:, 0] = h[:, 1] * 3
    return h


def added_through_a_view(h: Tensor) -> Tensor:
    """Unit 0 gets five times unit 1 through a view of it."""
    h = h * 1
    h[:, :1].add_(h[:, 1:2] * 5)
    return h


WAYS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "by index": (lambda h: h[:, torch.tensor([2, 0, 3, 1])], lambda h: torch.stack([h[:, i] for i in (2, 0, 3, 1)], 1)),
    "written over": (written_over, lambda h: torch.cat([h[:, 1:2] * 3, h[:, 1:]], 1)),
    "through a view": (added_through_a_view, lambda h: torch.cat([h[:, :1] + h[:, 1:2] * 5, h[:, 1:]], 1)),
}


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_radius_holds_however_units_are_moved(way: str, seed: int) -> None:
    """Never larger than where the same function is written without indices and writes."""
    x = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    radii = []
    for between in WAYS[way]:
        problem = fs.Problem(Reordered(between).double().eval(), train=(x, torch.arange(20) % 2))
        certificate = ActivationCertificate(problem, path_coordinates(fs.Context(problem), "max_product"))
        radii.append(certificate.radius(x, 0.5 * certificate.limit)[0])
    assert 0.1 * radii[1] <= radii[0] <= radii[1] * (1 + 1e-9)
    assert way != "by index" or radii[0] == pytest.approx(radii[1], rel=1e-9)


def test_a_radius_at_which_a_relu_changes_is_not_given() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    problem = problem_of(Case(model, CASES["relu"].batches, True))
    radius = fs.measure(problem, "psi_activation_radius")["psi_activation_radius"]
    assert radius > 0
    ctx = fs.Context(problem)
    paths = path_coordinates(ctx, "max_product")
    certificate = ActivationCertificate(problem, paths)
    attack = functools.partial(certificate.refuse_if_broken, paths, problem.example(32))
    attack(radius, torch.Generator().manual_seed(0))
    with pytest.raises(NotApplicable, match="a perturbation of that length"):
        attack(0.9 * certificate.limit, torch.Generator().manual_seed(0))


def test_what_is_refused_is_named() -> None:
    named = {
        "jump relu": "gt",
        "quantised": "int",
        "table by argmax": "argmax",
        "item": "item",
        "order": "argsort",
        "how many": "gt",
    }
    for name, operation in named.items():
        table = fs.measure(problem_of(CASES[name]), list(BY_NORM), options=OPTIONS)
        for measure in BY_NORM:
            assert table.reason(measure).startswith(operation), table.reason(measure)
