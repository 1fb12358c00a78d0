"""The answer comes first: headlines of every kind of result, and what a table says of one network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn

import flatscope as fs
from flatscope.errors import UnknownNameError
from flatscope.registry import CORE
from flatscope.result import MOST_LINES, Result


def trained(steps: int = 2000, seed: int = 0, n: int = 60) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """A small network on two clouds of points, after so many steps of gradient descent."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(n) % 2
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64) + 1.5 * (2 * y[:, None] - 1)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval(), (x, y)


def problem(steps: int = 2000, held_out: bool = True) -> fs.Problem:
    model, (x, y) = trained(steps)
    return fs.Problem(model, (x[:40], y[:40]), test=(x[40:], y[40:]) if held_out else None)


def population() -> fs.PopulationFrame:
    rows = range(12)
    return fs.PopulationFrame(pd.DataFrame({"lr": [0.1, 0.2] * 6, "margin": [-r for r in rows], "gap": [*rows]}))


def atlas() -> fs.Atlas:
    frame = pd.DataFrame([{"network": k, "epoch": e, "gap": k % 5, "margin": k * e} for k in range(12) for e in (1, 2)])
    return fs.atlas(frame, kinds=["kendall"], resamples=100)


KINDS: dict[str, Callable[[], Result]] = {
    "table": lambda: fs.measure(problem()),
    "bounds": lambda: fs.bounds(problem(), "parameter_counting"),
    "audit": lambda: fs.audit(problem(), ["l2_norm", "margin"], trials=1),
    "comparison": lambda: fs.compare([trained(2000)[0], trained(2000, 1)[0]], trained()[1]),
    "surface": lambda: fs.landscape(problem(), grid=5),
    "interpolation": lambda: fs.interpolate([trained(9)[0], trained(9, 1)[0]], trained()[1], resolution=4),
    "density": lambda: fs.spectral_density(problem(), draws=2),
    "eigenpairs": lambda: fs.eigenpairs(problem(), top=2),
    "leaderboard": lambda: fs.benchmark("margin"),
    "sensitivity": lambda: fs.sensitivity(problem()),
    "forecast": lambda: fs.forecast(problem(), trained(9)[0]),
    "population": population,
    "atlas": atlas,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_result_begins_with_at_most_five_plain_lines(kind: str) -> None:
    found = KINDS[kind]()
    lines = found.headline.splitlines()
    assert 1 <= len(lines) <= MOST_LINES
    assert all(line == line.strip() and line.endswith(".") and "nan" not in line.split() for line in lines), lines
    assert repr(found).startswith(found.headline)
    assert found.summary().startswith(found.headline)
    assert found.headline.split("\n")[0].split(" ")[0] in found._repr_html_()


def test_a_network_still_in_training_is_said_to_be_no_minimum_first() -> None:
    early, late = fs.measure(problem(2)).headline, fs.measure(problem(20_000)).headline
    assert early.startswith("No minimum: one step down the gradient lowers the training loss from ")
    assert "train on" in early.lower()
    assert late.startswith(("At a minimum", "Nearly at a minimum"))
    assert "Train on" not in late


def test_one_network_alone_is_neither_flat_nor_sharp() -> None:
    headline = fs.measure(problem()).headline
    assert "neither flat nor sharp" in headline
    assert "fs.compare" in headline
    assert "hessian_trace" in headline.partition("not to be compared alone: ")[2].splitlines()[0]
    assert "rho_sum" in headline.partition("Unchanged by rescaling: ")[2].splitlines()[0]


def test_a_network_of_which_nothing_can_be_rescaled_is_not_warned_of_rescaling() -> None:
    torch.manual_seed(0)
    smooth = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    headline = fs.measure(fs.Problem(smooth, train=(torch.randn(30, 4), torch.arange(30) % 3))).headline
    assert "hessian_trace" in headline.partition("No unit of this network can be rescaled")[2].splitlines()[0]
    assert "not to be compared" not in headline


def test_a_value_that_is_noise_is_not_given_as_one() -> None:
    table = fs.measure(problem())
    rows = table.to_frame()
    for stderr, words in ((0.016, "rho_sum not resolved (0.002 ± 0.016)"), (0.0009, "rho_sum 0.00200 ± 0.00090")):
        rows.loc[rows["measure"] == "rho_sum", ["value", "stderr", "exact"]] = [0.002, stderr, False]
        assert words in fs.Table(rows, table.meta).headline


def test_a_caution_about_the_data_stands_in_the_headline() -> None:
    model, (x, y) = trained()
    told = fs.measure(fs.Problem(model, (x, y), test=(x, y))).headline
    assert "Caution: the test samples are the training samples" in told
    assert told.splitlines()[-1].startswith("Next: ")


def test_vacuous_bounds_guarantee_nothing_and_a_certificate_says_what() -> None:
    table = fs.bounds(problem(), "parameter_counting")
    assert table.headline.startswith("Nothing is guaranteed: ")
    sure = table.to_frame().assign(value=0.2, vacuous=False)
    assert "at most 0.2, with probability 95 %" in fs.Table(sure).headline.splitlines()[0]
    ordered = sure.assign(assumptions="NOT CERTIFIED: the order of the gap")
    assert "1 of them below 1 and not certified" in fs.Table(ordered).headline


def test_the_core_set_is_the_default_and_layers_say_which_call_gives_them() -> None:
    table = fs.measure(problem())
    assert table.names == list(CORE)
    with pytest.raises(UnknownNameError, match=r"fs\.measure\(problem, \['kappa_trace'\]\)\.layer\('kappa_trace'\)"):
        table.layer("kappa_trace")
    with pytest.raises(UnknownNameError, match=r"\['l2_norm'\]\)\['l2_norm'\] gives it"):
        table["l2_norm"]


def test_an_eigenvalue_that_is_not_resolved_is_no_saddle() -> None:
    def words(low: float, high: float) -> str:
        rows = fs.measure(problem(20_000), ["gradient_norm", "hessian_max_eigenvalue"]).to_frame()
        row = rows.iloc[[1]].assign(measure="hessian_min_eigenvalue", value=high, low=low, high=high, exact=False)
        return fs.Table(pd.concat([rows, row])).headline

    assert "curves down" not in words(-1.0, -1e-9)
    assert "curves down somewhere" in words(-1.0, -0.99)


@pytest.mark.parametrize("name", ["page.pdf", "page", "page.png"])
def test_a_report_is_a_web_page_and_no_other_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(fs.InputError, match=r"\.html"):
        fs.report(fs.measure(problem(), "margin"), tmp_path / name)
    assert not list(tmp_path.iterdir())
