"""Intervals of the outermost eigenvalues hold as often as they say, whatever the spectrum, however few products."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from pieces import DiagonalOperator
from sklearn.datasets import load_digits
from torch import Tensor, nn

import flatscope as fs
from flatscope.curvature.brackets import UNSEEN, ends, log_least_part, rounding
from flatscope.curvature.lanczos import Krylov
from flatscope.curvature.spectrum import Search, Wanted, extreme_eigenpairs
from flatscope.formatting import number_within_interval
from flatscope.limits import STANDARD
from flatscope.measures import weight_flatness
from flatscope.planning import make_schedule
from flatscope.registry import declarations

SIZE = 800


def with_values(bulk: Tensor, *others: float) -> Tensor:
    """A spectrum with some of its eigenvalues replaced."""
    made = bulk.clone()
    made[: len(others)] = torch.tensor(others, dtype=torch.float64)
    return made


SPECTRA = {
    "even": torch.linspace(-1, 1, SIZE, dtype=torch.float64),
    "a cloud and outliers": with_values(torch.linspace(-1e-4, 1e-3, SIZE, dtype=torch.float64), 1.0, 0.9, -0.01),
    "one just above the bulk": with_values(torch.linspace(-1, 1, SIZE, dtype=torch.float64), 1.02, -1.001),
    "close pairs": with_values(torch.linspace(-0.5, 0.5, SIZE, dtype=torch.float64), 1.0, 0.9999, -1.0, -0.9999),
    "few distinct": torch.tensor([0.0, 1.0, 3.0, -2.0], dtype=torch.float64).repeat(SIZE // 4),
    "never negative": with_values(torch.zeros(SIZE, dtype=torch.float64), *torch.logspace(-9, 0, 60).tolist()),
}


def random_space(values: Tensor, products: int, seed: int) -> Krylov:
    generator = torch.Generator().manual_seed(seed)
    space = Krylov(torch.randn(len(values), generator=generator, dtype=torch.float64), products, generator)
    while not (space.full or space.closed):
        space.take(values * space.newest)
    return space


@pytest.mark.parametrize("products", [3, 8, 20, 50])
@pytest.mark.parametrize("name", SPECTRA)
def test_both_ends_are_enclosed_from_all_but_few_starts(name: str, products: int) -> None:
    values, starts = SPECTRA[name], 150
    lowest, highest = float(values.min()), float(values.max())
    slack, missed = rounding(max(abs(lowest), abs(highest)), torch.float64), 0
    for seed in range(starts):
        space = random_space(values, products, seed)
        low, high = ends(space, SIZE)
        ritz = space.ritz()[0]
        assert lowest - slack <= float(ritz[0]), "a Ritz value is never outside of the spectrum"
        assert float(ritz[-1]) <= highest + slack
        missed += int(lowest < low - slack) + int(highest > high + slack)
    # Two ends of 150 starts: 3 misses are expected where the bound is sharp, 10 have a chance of one in a thousand.
    assert missed <= 9


def test_the_chance_is_used_up_where_a_direction_is_alone() -> None:
    """The bound is no looser than it need be: a part as small as is let go is as rare as it says."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randn(40_000, SIZE, generator=generator, dtype=torch.float32)
    parts = (starts[:, 0].double() / starts.double().norm(dim=1)).square()
    share = float((parts < math.exp(log_least_part(SIZE))).double().mean())
    assert share == pytest.approx(UNSEEN, abs=4 * math.sqrt(UNSEEN / len(parts)))


def test_intervals_become_narrow_and_stay_right_over_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = SPECTRA["one just above the bulk"]
    for width in (20, 128):
        monkeypatch.setitem(vars(STANDARD), "krylov_vectors", width)
        found, missed = [], 0
        for seed in range(25):
            search = Search(SIZE, torch.Generator().manual_seed(seed), Wanted(1, 1, 1e-4))
            (top,) = extreme_eigenpairs(DiagonalOperator(values), search, Wanted(1, 0, 1e-3))
            (bottom,) = extreme_eigenpairs(DiagonalOperator(values), search, Wanted(0, 1, 1e-3))
            assert top.converged
            assert bottom.converged
            assert top.high - top.low <= 1e-3 * top.value
            missed += int(not top.low - 1e-12 <= 1.02 <= top.high + 1e-12)
            missed += int(not bottom.low - 1e-12 <= -1.001 <= bottom.high + 1e-12)
            found.append(search.products)
        assert missed <= 4
        assert min(found) > (20 if width == 20 else 0), "this width is restarted"


def test_a_search_that_met_the_second_largest_goes_on() -> None:
    """A start with next to nothing of the largest: its residual alone would say that all is found."""
    values = with_values(torch.linspace(-0.5, 0.5, SIZE, dtype=torch.float64), 1.0, 0.97)
    generator = torch.Generator().manual_seed(0)
    search = Search(SIZE, generator, Wanted())
    assert search._space is not None
    start = torch.randn(SIZE, generator=generator, dtype=torch.float64)
    start[0] = 1e-3 * start.norm() / math.sqrt(SIZE) * 20  # a fiftieth of what is usual
    search._space = Krylov(start, 100, generator)
    search.newest = search._space.newest
    (pair,) = extreme_eigenpairs(DiagonalOperator(values), search, Wanted())
    assert pair.low <= 1.0 <= pair.high


def test_a_search_that_ends_at_once_has_an_interval() -> None:
    (pair,) = extreme_eigenpairs(
        DiagonalOperator(SPECTRA["even"]), torch.Generator().manual_seed(0), Wanted(), expired=lambda: True
    )
    assert pair.products == 1
    assert not pair.converged
    assert pair.low == pair.value <= 1.0 <= pair.high < math.inf


def test_a_measure_whose_time_is_up_has_the_interval_it_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eigenvalue of a large network begins where there is some time, and ends with what it has."""
    name, problem = "hessian_max_eigenvalue", next(networks())[1]
    found = fs.measure(problem, name).to_frame().iloc[0]
    monkeypatch.setattr(weight_flatness, "time_is_over", lambda ctx: True)
    late = fs.measure(problem, name).to_frame().iloc[0]
    assert late["low"] <= found["value"] <= late["high"] < math.inf
    assert late["high"] - late["low"] > 10 * (found["high"] - found["low"])
    assert late["reason"].startswith("out of time; ")
    assert not late["exact"]
    entry = declarations()[name]
    assert make_schedule(fs.Context(problem), [entry]).stops(entry)


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (-1.017e-4, -1.91e-3, -1.017e-4, "> -0.002, not resolved"),
        (1e-5, -1.91e-3, 1e-5, "> -0.002, not resolved"),
        (-0.00159, -0.001601, -0.00159, "-0.00159"),
        (2.907693, 2.907693, 2.907875, "2.908"),
        (2.907693, 2.907693, 2.93, "2.9"),
        (1.106, 1.106, 1.351, "1.106 to 1.351"),
        (-0.5, -0.77777, -0.5, "-0.7778 to -0.5"),
        (12.3, 12.3, 40.2, "12 … 41, not resolved"),
        (0.004, 0.004, 35.0, "< 40, not resolved"),
        (40.13, 40.13, 40.13, "40.13"),
        (0.0, -1e-14, 1e-14, "> -1e-14, not resolved"),
        (12.3, 12.3, math.inf, "12.3"),
    ],
)
def test_no_more_digits_are_shown_than_an_interval_allows(value: float, low: float, high: float, text: str) -> None:
    assert number_within_interval(value, low, high) == text


def networks() -> Iterator[tuple[str, fs.Problem]]:
    """Twenty networks on digits: five architectures, from untrained to near a minimum, some in float32."""
    digits = load_digits()
    x, y = torch.tensor(digits.data) / 16, torch.tensor(digits.target)
    architectures: dict[str, Callable[[], list[nn.Module]]] = {
        "relu": lambda: [nn.Linear(64, 14), nn.ReLU(), nn.Linear(14, 10)],
        "tanh": lambda: [nn.Linear(64, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 10)],
        "gelu": lambda: [nn.Linear(64, 12), nn.GELU(), nn.Linear(12, 10)],
        "deep": lambda: [nn.Linear(64, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10)],
        "conv": lambda: [
            *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(5, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 10)),
        ],
    }
    for name, layers in architectures.items():
        for seed, steps in enumerate((0, 15, 100, 400)):
            torch.manual_seed(seed)
            model, part = nn.Sequential(*layers()).double(), slice(150 * seed, 150 * seed + 150)
            optimizer = torch.optim.Adam(model.parameters(), 5e-3)
            for _ in range(steps):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[part]), y[part]).backward()
                optimizer.step()
            dtype = torch.float32 if seed % 2 else torch.float64
            yield f"{name}, {steps} steps", fs.Problem(model.to(dtype).eval(), (x[part].to(dtype), y[part]))


@pytest.mark.long
def test_intervals_hold_on_twenty_networks() -> None:
    """The ends of the spectrum, the share of negative eigenvalues and that near zero, against the dense Hessian."""
    lines = []
    with torch.random.fork_rng():
        for name, problem in networks():
            double = fs.hessian(problem.in_double())
            dense = double @ torch.eye(double.size, dtype=torch.float64)
            true = torch.linalg.eigvalsh((dense + dense.T) / 2)
            rows = fs.measure(problem, ["hessian_max_eigenvalue", "hessian_min_eigenvalue"]).to_frame()
            for (_, row), expected in zip(rows.iterrows(), (float(true[-1]), float(true[0])), strict=True):
                right = row["low"] <= expected <= row["high"]
                lines.append((name, row["measure"], expected, row["low"], row["high"], right))
            found = fs.spectral_density(problem, draws=2)
            for what, share, inside in (
                ("negative", found.negative(), true < -found.radius),
                ("near zero", found.near_zero(), true.abs() <= found.radius),
            ):
                expected = float(inside.double().mean())
                lines.append((name, what, expected, share.low, share.high, share.low <= expected <= share.high))
    print(*(f"{n:18} {w:24} {e:10.4g} in [{a:.4g}, {b:.4g}] {r}" for n, w, e, a, b, r in lines), sep="\n")
    kinds = {what: [line for line in lines if line[1] == what] for what in dict.fromkeys(line[1] for line in lines)}
    assert [len(found) for found in kinds.values()] == [20, 20, 20, 20]
    for what, found in kinds.items():
        assert sum(line[-1] for line in found) >= 19, what
    for line in kinds["hessian_min_eigenvalue"]:  # size and sign
        assert line[4] < 0
        assert line[4] - line[3] <= 0.1 * abs(line[2]), line
