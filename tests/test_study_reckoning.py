"""Costs reckoned from networks that were timed: by multiply-adds, steps, images and epochs, and never silently."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flatscope.cli.app import app
from flatscope.errors import InputError
from flatscope.studies import reckoning
from flatscope.studies.cost import TRAINING, Cost, CostRow, load_costs
from flatscope.studies.pieces import pieces_of
from flatscope.studies.reckoning import reckoned_costs
from flatscope.studies.study import Stage

GPU = {"device": "one GPU", "date": "2026-01-01"}
WORK = "flatscope.sweeps.work:train_and_measure"


def config(widths: list[int], batch: int = 20, epochs: int = 10, images: int = 100, seed: int = 0) -> dict[str, Any]:
    return {
        "data": {"name": "digits", "train_size": images, "test_size": 50, "flatten": True},
        "model": {"name": "mlp", "options": {"widths": widths, "bias": False}, "seed": seed},
        "train": {"lr": 0.1, "batch_size": batch, "epochs": epochs, "seed": seed},
    }


SMALL, WIDE = [64, 10, 10], [64, 40, 10]
LENET = {
    **config(SMALL),
    "data": {"name": "flatscope.studies.smoke_data:digits_as_cifar10", "train_size": 100, "test_size": 50},
    "model": {"name": "lenet5", "seed": 0},
}
PLANS = {
    "timed": [Stage([[config(SMALL)]], WORK)],
    "wide": [Stage([[config(WIDE, epochs=3, images=200)]], WORK)],
    "tiny": [Stage([[config([64, 5, 10])]], WORK)],
    "stack": [Stage([[config(SMALL, seed=seed) for seed in range(4)]], WORK)],
    "small batches": [Stage([[config(SMALL, batch=5)]], WORK)],
    "convolutions": [Stage([[LENET]], WORK)],
}


@pytest.fixture(autouse=True)
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reckoning, "declared_studies", lambda: PLANS)
    monkeypatch.setattr(reckoning, "_pieces", lambda name, scale: pieces_of(PLANS[name], "cpu"))


def timed_cost(name: str = "timed", each: float = 2.0, device: str = "one GPU") -> dict[str, Cost]:
    [piece] = pieces_of(PLANS[name], "cpu")
    row = CostRow(TRAINING, piece.what, 1, each=each, total=20.0, epochs=10, images=100, timed_on=50, kind=piece.kind)
    return {name: Cost(name, "paper", (row,), 20.0, provenance={**GPU, "device": device})}


def multiply_adds(widths: list[int]) -> int:
    return sum(a * b for a, b in itertools.pairwise(widths))


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("timed", 1.0),
        # 200 images in place of 100, 3 epochs in place of 10, more arithmetic in each
        ("wide", 2 * 0.3 * multiply_adds(WIDE) / multiply_adds(SMALL)),
        ("tiny", 1.0),  # less arithmetic: nothing is taken off
        ("stack", 4.0),
        ("small batches", 4.0),  # four times as many steps
    ],
)
def test_times_grow_with_arithmetic_steps_images_and_epochs(name: str, factor: float) -> None:
    [cost] = reckoned_costs([name], timed_cost())
    [row] = cost.rows
    assert row.total == pytest.approx(20.0 * factor, rel=1e-3)
    assert row.like == ("" if name == "timed" else "1 mlp (widths 64-10-10, bias False) on digits in batches of 20")
    assert ("reckoned from 1 mlp" in cost.text()) == (name != "timed")
    assert cost.text().startswith("at most" if name == "timed" else "about")  # what is reckoned bounds nothing


def test_a_network_with_convolutions_is_not_reckoned_from_one_without() -> None:
    [cost] = reckoned_costs(["convolutions"], timed_cost())
    assert cost.untimed
    assert "no kin was timed" in cost.text()
    [other] = reckoned_costs(["wide"], timed_cost("convolutions"))
    assert other.untimed


def test_what_was_reckoned_is_no_kin_and_times_of_other_devices_do_not_count(tmp_path: Path) -> None:
    saved = timed_cost()
    [wide] = reckoned_costs(["wide"], saved)
    [again] = reckoned_costs(["small batches"], saved | {"wide": wide})
    assert again.rows[0].like == saved["timed"].rows[0].what
    elsewhere = timed_cost("small batches", each=99.0, device="a CPU")
    both = reckoned_costs(["small batches", "wide"], saved | {"wide": wide} | elsewhere)
    assert both[0] == elsewhere["small batches"]  # it keeps what it has
    assert both[1].rows[0].like == saved["timed"].rows[0].what
    with pytest.raises(InputError, match="saved times"):
        reckoned_costs(["wide"], {})
    wide.save(tmp_path)
    assert load_costs(tmp_path)["wide"] == wide


def test_the_command_says_what_to_do_without_times(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(app, ["study", "cost", "zhang2017-fig25", "--reckon", "--out", str(tmp_path)])
    assert outcome.exit_code != 0
    assert not list(tmp_path.iterdir())
