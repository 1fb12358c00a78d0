"""The look at a table's network waits until somebody asks, and says then what it would have said at once."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flatscope as fs
from flatscope.context import Context
from flatscope.limits import STANDARD
from flatscope.looking import LaterLook

pytestmark = pytest.mark.fast
NAMES = ["layer_trace", "kappa_trace"]
TIMES = ("seconds", "time")


class Counted(nn.Module):
    """A network that counts its calls."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return self.last(torch.relu(self.first(x)))


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(30, 4, generator=torch.Generator().manual_seed(1)), torch.arange(30) % 3


def problem_of(train: Any = None, **options: Any) -> fs.Problem:
    return fs.Problem(Counted().eval(), train=data() if train is None else train, **options)


def measured(problem: fs.Problem, **options: Any) -> tuple[fs.Table, int]:
    """A table, and how often the network was called since."""
    table = fs.measure(problem, NAMES, **options)
    Counted.calls = 0
    return table, Counted.calls


def known(table: fs.Table) -> dict[str, Any]:
    return {key: value for key, value in table.meta.items() if key not in TIMES}


def at_once(monkeypatch: pytest.MonkeyPatch, problem: fs.Problem, **options: Any) -> fs.Table:
    with monkeypatch.context() as patch:
        patch.setattr(LaterLook, "is_possible", lambda _: False)
        return measured(problem, **options)[0]


@pytest.mark.parametrize("test", [None, data()])
def test_it_says_what_it_would_have_said_at_once(
    monkeypatch: pytest.MonkeyPatch, test: tuple[Tensor, Tensor] | None
) -> None:
    now = at_once(monkeypatch, problem_of(test=test))
    assert now.headline
    assert Counted.calls == 0
    table, _ = measured(problem_of(test=test))
    assert table.layer("kappa_trace") == now.layer("kappa_trace")
    assert Counted.calls == 0
    assert known(table) == known(now)
    assert Counted.calls > 4
    assert table.headline == now.headline
    assert "still on a slope" in " ".join(table.meta["remarks"])
    Counted.calls = 0
    assert table.headline
    assert Counted.calls == 0, "once is enough"


@pytest.mark.parametrize("way", ["print", "save", "pickle", "copy", "json", "equal"])
def test_whatever_keeps_or_shows_a_table_looks_first(way: str, tmp_path: Path) -> None:
    table, _ = measured(problem_of())
    ways: dict[str, Any] = {
        "print": lambda: repr(table),
        "save": lambda: (table.save(tmp_path / "t.parquet"), fs.Table.load(tmp_path / "t.parquet"))[1],
        "pickle": lambda: pickle.loads(pickle.dumps(table)),
        "copy": lambda: copy.deepcopy(table),
        "json": lambda: table.to_json(),
        "equal": lambda: table == copy.copy(table),
    }
    found = ways[way]()
    assert Counted.calls > 4
    if isinstance(found, fs.Table):
        assert known(found) == known(table)
        assert "standing" in found.meta


def test_what_is_written_to_the_metadata_stays() -> None:
    table, _ = measured(problem_of())
    table.meta |= {"epoch": 3}
    assert table.meta["epoch"] == 3
    assert "standing" in table.meta


@pytest.mark.parametrize("part", ["inputs", "targets", "array", "test"])
def test_data_that_were_changed_since_are_not_taken_for_those_that_were_measured(part: str) -> None:
    (x, y), test = data(), data()
    train = (x.numpy(), y.numpy()) if part == "array" else (x, y)
    table, _ = measured(problem_of(train, test=test))
    changed = {"inputs": x, "targets": y, "array": x, "test": test[0]}[part]
    if part == "array":
        np.multiply(train[0], 2, out=train[0])
    else:
        changed[3] = 1 if part == "targets" else 0.25
        changed[4] = 1 if part == "targets" else 0.25
    assert "standing" not in table.meta
    assert any("changed in place" in remark for remark in table.meta["remarks"])
    assert "At a minimum" not in table.headline
    assert Counted.calls == 0


def test_it_is_not_put_off_where_it_could_not_be_made_as_well() -> None:
    x, y = data()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=10)
    batches = [(x[:15], y[:15]), (x[15:], y[15:])]
    problem = problem_of()
    tables = [
        measured(problem_of(loader))[0],
        measured(problem_of(batches))[0],
        measured(problem, budget="1m")[0],
        measured(problem, context=Context(problem))[0],
    ]
    for table in tables:
        Counted.calls = 0
        assert "standing" in table.meta
        assert Counted.calls == 0


def test_a_large_network_is_not_held() -> None:
    context = Context(problem_of())
    assert LaterLook.is_possible(context)
    large = nn.Sequential(nn.Linear(4, STANDARD.waiting_network // 16), nn.Linear(STANDARD.waiting_network // 16, 1))
    assert not LaterLook.is_possible(Context(fs.Problem(large.eval(), train=(data()[0], data()[0][:, 0]), loss="mse")))


def test_a_table_that_was_looked_at_holds_no_problem() -> None:
    problem = problem_of()
    table, _ = measured(problem)
    held = weakref.ref(problem)
    gc.disable()
    try:
        del problem
        assert held() is not None
        assert table.headline
        assert held() is None
    finally:
        gc.enable()
