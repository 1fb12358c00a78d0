"""What all results share: files give them back, and they show themselves."""

from __future__ import annotations

import functools
import io
import math
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import flatscope as fs
from flatscope.result import Result
from flatscope.training.populations.population_frame import PopulationFrame

pytestmark = pytest.mark.fast

CLASSES: dict[str, type[Result]] = {
    "table": fs.Table,
    "bounds": fs.Table,
    "audit": fs.Audit,
    "comparison": fs.Comparison,
    "surface": fs.Surface,
    "simplex": fs.Simplex,
}


def small_data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(12, 3), torch.arange(12) % 2


def small_network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


@functools.cache
def made(name: str) -> Result:
    """A small result of every kind."""
    data = small_data()
    problem = fs.Problem(small_network(0), train=data)
    if name == "table":
        return fs.measure(problem, ["margin", "kappa_trace", "l2_norm", "rho_unit", "distance_from_initialization"])
    if name == "bounds":
        return fs.bounds(problem, ["norm_capacity", "covering"])
    if name == "audit":
        return fs.audit(problem, ["l2_norm", "l1_path_norm", "margin"], by=("unit", "batchnorm"), trials=1)
    if name == "comparison":
        return fs.compare({"one": small_network(0), "two": small_network(1)}, data, names=["margin", "l2_norm"])
    if name == "surface":
        return fs.landscape(problem, grid=3)
    return fs.interpolate([small_network(0), small_network(1)], data, resolution=3)


def results() -> dict[str, Result]:
    found = {name: made(name) for name in CLASSES}
    frame = pd.DataFrame({"lr": [0.1, 0.1, 0.2, 0.2], "margin": [1.0, 2.0, math.nan, 4.0], "gap": [0.4, 0.3, 0.2, 0.1]})
    return found | {"population": PopulationFrame(frame, meta={"from": "a test"})}


@pytest.mark.parametrize("name", ["table", "bounds", "audit", "comparison", "surface", "simplex", "population"])
def test_every_readable_file_gives_the_result_back_and_every_other_is_refused(name: str, tmp_path: Path) -> None:
    result = results()[name]
    for ending in result.ENDINGS:
        path = tmp_path / f"result{ending}"
        result.save(path)
        assert path.stat().st_size > 40
        if ending in result.READABLE:
            assert type(result).load(path) == result
        else:
            with pytest.raises(fs.InputError, match="load"):
                type(result).load(path)
    with pytest.raises(fs.InputError, match="ending in"):
        result.save(tmp_path / "result.docx")


@pytest.mark.parametrize("name", ["table", "audit", "surface", "simplex", "population"])
def test_a_changed_number_or_other_metadata_is_another_result(name: str) -> None:
    result = results()[name]
    frame, head = result.to_frame(), result._head()
    assert type(result)._from_rows(frame, head) == result
    column = next(name for name in frame if frame[name].dtype == "float64" and frame[name].notna().any())
    changed = frame.copy()
    changed.loc[changed[column].first_valid_index(), column] += 1e-9
    assert type(result)._from_rows(changed, head) != result
    other = dict(head) | ({"meta": {"seed": 77}} if "meta" in head else {"seed": 77})
    assert type(result)._from_rows(frame, other) != result
    assert result != frame


@pytest.mark.parametrize("name", ["table", "audit", "comparison", "surface", "simplex", "population"])
def test_results_show_themselves(name: str) -> None:
    result, text = results()[name], io.StringIO()
    result.show(text)
    assert text.getvalue() == f"{result!r}\n"
    header, rows = result.cells()
    assert {len(row) for row in rows} == {len(header)}
    assert result.to_markdown().count("\n") >= len(rows) + 1
    assert "<" in result._repr_html_()


def test_a_population_writes_its_frame_and_cannot_be_read_from_it(tmp_path: Path) -> None:
    data = small_data()
    population = fs.train_population(lambda trial: small_network(0), [{"epochs": 1, "lr": 0.1}] * 2, data)
    population.save(tmp_path / "population.csv")
    assert len(pd.read_csv(tmp_path / "population.csv")) == 2
    population.save(tmp_path / "population.parquet")
    with pytest.raises(fs.InputError, match="population"):
        fs.Population.load(tmp_path / "population.parquet")
    assert population == population
    assert population != fs.train_population(lambda trial: small_network(0), [{"epochs": 1, "lr": 0.1}] * 2, data)
