"""Tables in which rows are looked up, alone or tied to the outputs, against products with every direction."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import flatscope as fs
from flatscope.context import Context, Effort
from flatscope.curvature.estimators import Asked, diagonal_sums
from flatscope.curvature.layer_directions import LayerDirections
from flatscope.curvature.random_signs import Signs
from flatscope.curvature.route import find_not_covered, route_of
from flatscope.curvature.sweep import sweep_pass

pytestmark = pytest.mark.fast

WORDS, WIDTH, LENGTH = 7, 5, 4


class Words(nn.Module):
    """A classifier of texts: looked up, mixed over positions by a layer, pooled."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, padding_idx=padding)
        self.layer, self.head = nn.Linear(WIDTH, 6), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.relu(self.layer(self.table(tokens))).sum(1))


class Twice(nn.Module):
    """A table that is looked up in twice, one of the times a single word."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(tokens).mean(1) + 2 * self.table(tokens[:, 0])))


class Tied(nn.Module):
    """A language model whose table is also the matrix of its outputs."""

    def __init__(self, width: int = WIDTH, bias: bool = False, padding: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width, padding_idx=padding)
        self.layer = nn.Linear(width, width)
        self.head = nn.Linear(width, WORDS, bias=bias)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        return self.head(x + torch.tanh(self.layer(x.cumsum(1))))


class Shrunk(nn.Module):
    """A table whose rows are shrunk to a length as they are looked up: torch changes the weights themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(WORDS, WIDTH)), nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(functional.embedding(tokens, self.table, scale_grad_by_freq=True).sum(1))


def problem_of(build: Callable[[], nn.Module]) -> fs.Problem:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, WORDS, (6, LENGTH + 1), generator=generator)
    tokens[0, :3] = 2  # a word that comes again
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build().double()
    if isinstance(model, Tied):
        return fs.Problem(model, train=(tokens[:, :-1], tokens[:, 1:]), loss="next_token", batch_size=4)
    return fs.Problem(model, train=(tokens[:, :-1], tokens[:, -1] % 3), batch_size=4)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "words": Words,
    "padding": lambda: Words(padding=2),
    "twice": Twice,
    "tied": Tied,
    "tied and wide": lambda: Tied(width=12),
    "tied with bias": lambda: Tied(bias=True),
    "tied with padding": lambda: Tied(padding=-5),
}


def by_every_direction(ctx: Context, quantity: str) -> dict[tuple[str, str], Tensor]:
    wanted = LayerDirections(ctx, quantity, ctx.problem.trainable)
    return diagonal_sums(wanted, Signs(0, ""), Asked(0.0, 10**6, few=10**6)).values


@pytest.mark.parametrize("name", NETWORKS)
def test_sweeps_give_what_products_with_every_direction_give(name: str) -> None:
    ctx = Context(problem_of(NETWORKS[name]), effort=Effort(curvature="gauss_newton", precision=0.0))
    assert not find_not_covered(ctx, lookups=True)
    assert not route_of(ctx).not_covered
    found = sweep_pass(ctx, None, {}, rows=True)
    for quantity in ("trace", "rho", "rho_rows", "relative_flatness"):
        known = by_every_direction(ctx, quantity)
        known.pop(("", "relative_flatness"), None)  # which the sweep leaves to the layers
        assert ("table.weight", quantity) in known
        for key, expected in known.items():
            torch.testing.assert_close(
                found.means[key].value.double().reshape(-1), expected.reshape(-1), rtol=1e-9, atol=1e-12, msg=str(key)
            )


def test_drawn_columns_have_the_same_mean() -> None:
    ctx = Context(problem_of(Tied), effort=Effort(curvature="gauss_newton"))
    drawn, exact = sweep_pass(ctx, range(400), {}), sweep_pass(ctx, None, {})
    for quantity in ("trace", "relative_flatness"):
        mean = drawn.means["table.weight", quantity]
        assert abs(float(mean.value) - float(exact.means["table.weight", quantity].value)) < 4 * float(mean.stderr)
        assert float(mean.stderr) < 0.1 * float(mean.value)


def test_the_hessian_of_a_table_behind_which_nothing_is_curved_is_swept() -> None:
    ctx = Context(problem_of(Words), effort=Effort(precision=0.0))
    assert "table.weight" not in route_of(ctx).not_covered
    found = sweep_pass(ctx, None, {})
    for key, expected in by_every_direction(ctx, "trace").items():
        assert float(found.means[key].value) == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize(("build", "curvature"), [(Tied, "hessian"), (Shrunk, "gauss_newton"), (Twice, "hessian")])
def test_what_the_sweep_does_not_give_goes_by_products(build: Callable[[], nn.Module], curvature: str) -> None:
    ctx = Context(problem_of(build), effort=Effort(curvature=curvature))
    (table,) = [name for name in ctx.problem.trainable if "table" in name]
    assert table in find_not_covered(ctx, lookups=True)


def test_others_that_read_flows_are_given_no_tables() -> None:
    for build in (Words, Tied):
        for curvature in ("hessian", "gauss_newton"):
            assert "table.weight" in find_not_covered(Context(problem_of(build)), curvature)
