"""`flatscope study cost`: estimates of shortened runs against real ones, each kind timed once, nothing left behind."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flatscope.cli.app import app
from flatscope.errors import DataFileError, FlatscopeError, InputError
from flatscope.studies import pieces, studies, timing
from flatscope.studies.cost import MEASURING, TRAINING, Cost, CostRow, cost_file, duration, load_costs
from flatscope.studies.costing import costs_of, study_costs
from flatscope.studies.pieces import pieces_of
from flatscope.studies.study import Stage
from flatscope.studies.timing import Line, Repeated
from flatscope.sweeps import engines
from flatscope.sweeps.configuration import key_of
from flatscope.sweeps.store import Store

RUNNER = CliRunner()

# Work functions whose times are known: they sleep, and note what they were asked for.
PLANTED = """
import time

import torch

def note(configs, what):
    with open(configs[0]["log"], "a") as log:
        log.write(f"{what} {len(configs)}\\n")

def train(configs, store, report):
    note(configs, "train")
    data, settings = configs[0]["data"], configs[0]["train"]
    for epoch in range(1, settings["epochs"] + 1):
        time.sleep(0.02 + 1e-4 * data["train_size"] + (0.3 if epoch == 1 else 0))
        if epoch % settings["evaluate_every"] == 0:
            time.sleep(4e-5 * (data["train_size"] + data["test_size"]))
        report(epoch / settings["epochs"], f"epoch {epoch}")
    for config in configs:
        store.write(config, {"found": 1.0}, weights={"w": torch.ones(2)})

def silent(configs, store, report):
    note(configs, "silent")
    time.sleep(0.2 + 0.02 * configs[0]["train"]["epochs"])
    for config in configs:
        store.write(config, {"found": 1.0})

def look(configs, store, report):
    note(configs, f"look {configs[0]['draws']}")
    assert len(configs) == 1
    assert store.read(configs[0]["network"]).metrics["found"] == 1.0
    time.sleep(0.05 + 1e-3 * configs[0]["draws"])
    store.write(configs[0], {"seen": 2.0})

def slow(configs, store, report):
    time.sleep(0.3)

def broken(configs, store, report):
    raise RuntimeError("a planted fault\\nwith a second line")
"""


class Planted:
    """Stages of planted work, and the log of what was called."""

    def __init__(self, folder: Path) -> None:
        self.file, self.log = folder / "planted.py", folder / "log"
        self.file.write_text(PLANTED, encoding="utf-8")
        self.log.write_text("", encoding="utf-8")

    def work(self, name: str) -> str:
        return f"{self.file}:{name}"

    def network(self, seed: int, images: int = 4_000, **train: Any) -> dict[str, Any]:
        return {
            "data": {"name": "digits", "train_size": images, "test_size": 1_000},
            "model": {"name": "mlp", "seed": seed},
            "train": {"epochs": 100, "batch_size": 50, "seed": seed, "stop_loss": 0.1, **train},
            "log": str(self.log),
        }

    def stages(self, seeds: range, draws: int = 1_000) -> list[Stage]:
        networks = [self.network(seed) for seed in seeds]
        looks = [{"network": network, "draws": draws, "log": str(self.log)} for network in networks]
        return [Stage([networks], self.work("train")), Stage([[one] for one in looks], self.work("look"))]

    def calls(self) -> list[str]:
        return self.log.read_text(encoding="utf-8").splitlines()


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planted:
    found = Planted(tmp_path)
    monkeypatch.setitem(timing.REPEATED, found.work("look"), Repeated(("draws",), 10))  # type: ignore[attr-defined]
    return found


def test_times_of_planted_work_are_found(planted: Planted) -> None:
    [cost] = costs_of({"one": planted.stages(range(3))}, "paper", device="cpu")
    training, measuring = cost.rows
    # 0.02 s and 0.1 ms per image, and 40 µs per image evaluated after every epoch; the slow first one does not count.
    assert training.each == pytest.approx(0.02 + 0.4 + 4e-5 * 5_000, rel=0.25)
    assert training.total == pytest.approx(100 * (training.each or 0), rel=1e-3)
    assert (training.number, training.epochs, training.images) == (1, 100, 4_000)
    assert training.timed_on < 4_000
    assert measuring.each == pytest.approx(1.05, rel=0.25)
    assert (measuring.number, measuring.part) == (3, MEASURING)
    assert measuring.timed_on < 1
    assert all(int(call.split()[1]) < 1_000 for call in planted.calls() if call.startswith("look"))
    assert cost.seconds == pytest.approx(cost.part(TRAINING) + cost.part(MEASURING))
    assert cost.text().startswith("at most")
    assert "up to 100 epochs" in cost.text()


def test_evaluations_that_are_rare_count_less(planted: Planted) -> None:
    stages = [Stage([[planted.network(0, evaluate_every=10)]], planted.work("train"))]
    [cost] = costs_of({"one": stages}, "paper", device="cpu")
    assert cost.rows[0].each == pytest.approx(0.02 + 0.4 + 4e-6 * 5_000, rel=0.25)


def test_a_work_that_does_not_tell_of_its_epochs(planted: Planted) -> None:
    stages = [Stage([[planted.network(0, images=100)]], planted.work("silent"))]
    [cost] = costs_of({"one": stages}, "paper", device="cpu")
    assert cost.rows[0].total == pytest.approx(100 * 0.02, rel=0.25)


def test_what_two_studies_have_in_common_is_timed_and_paid_once(planted: Planted) -> None:
    costs_of({"one": planted.stages(range(2))}, "paper", device="cpu")
    alone = planted.calls()
    same, other = planted.stages(range(2)), planted.stages(range(2, 4))
    first, second, third = costs_of({"one": same, "two": same, "three": other}, "paper", device="cpu")
    assert len(planted.calls()) - len(alone) <= len(alone) + 1  # one more where sleeping took a little longer
    assert first.additional == first.seconds == second.seconds
    assert (second.additional, second.shared) == (0, ("one",))
    assert "nothing more once one has run" in second.text()
    assert (third.additional, third.shared) == (third.seconds, ())


def test_an_estimate_is_near_the_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MOMENT", 0.1)  # so that runs are shortened
    monkeypatch.setattr(timing, "LEAST_IMAGES", 100)
    monkeypatch.setattr(timing, "now", time.process_time)  # other processes on the machine do not count
    network = {
        "data": {"name": "digits", "train_size": 1_400, "test_size": 300},
        "model": {"name": "mlp", "options": {"widths": [64, 128, 128, 10]}},
        "measures": ["kappa_trace", "hessian_trace"],
    }
    units = [
        [{**network, "train": {"epochs": 10, "batch_size": size, "seed": seed}} for seed in range(3)]
        for size in (7, 20)
    ]
    stages = [Stage(units)]
    [cost] = costs_of({"one": stages}, "paper", device="cpu")
    assert [row.part for row in cost.rows] == [TRAINING, MEASURING, TRAINING]
    assert cost.rows[0].timed_on < 1_400
    begun = time.process_time()
    engines.run(units, stages[0].work, Store(tmp_path), workers=0, show_progress=False)
    real = time.process_time() - begun
    assert real / 3 < cost.seconds < 3 * real


def test_a_slow_and_a_broken_work_are_seen(planted: Planted) -> None:
    slow = Stage([[{"seed": number}] for number in range(4)], planted.work("slow"))
    broken = Stage([[{"size": 1}], [{"size": 2}]], planted.work("broken"))
    good, bad = costs_of({"good": [slow], "bad": [slow, broken]}, "paper", device="cpu")
    assert good.rows[0].total == pytest.approx(1.2, rel=0.25)
    assert good.text().startswith("about")
    fault = "RuntimeError: a planted fault"
    assert [row.problem for row in bad.untimed] == [fault, fault]
    assert bad.seconds == good.seconds
    assert bad.text().startswith("more than")
    assert "a planted fault" in bad.text()


def test_no_time_for_timing(planted: Planted) -> None:
    [cost] = costs_of({"one": planted.stages(range(2))}, "paper", device="cpu", budget=1e-9)
    assert {row.problem for row in cost.rows} == {timing.SPENT}
    assert cost.text() == f"not timed: {timing.SPENT} (2 kinds of work)"
    assert planted.calls() == []
    with pytest.raises(InputError, match="more than 0 seconds"):
        study_costs(["petzka2019-ridge"], budget=0)


def test_saved_times_stand_where_the_budget_ends(planted: Planted) -> None:
    [before] = costs_of({"one": planted.stages(range(2))}, "paper", device="cpu")
    calls = planted.calls()
    saved = {"one": before}
    [same] = costs_of({"one": planted.stages(range(2))}, "paper", device="cpu", budget=1e-9, saved=saved)
    assert (same.rows, same.additional) == (before.rows, before.additional)
    [more] = costs_of({"one": planted.stages(range(3))}, "paper", device="cpu", budget=1e-9, saved=saved)
    looks, before_looks = more.rows[1], before.rows[1]
    assert looks.number == 3
    assert looks.total == pytest.approx(1.5 * (before_looks.total or 0), rel=1e-3)
    assert planted.calls() == calls
    reckoned = replace(before, rows=tuple(replace(row, like="another") for row in before.rows))
    elsewhere = replace(before, provenance={**before.provenance, "device": "another"})
    for other in (reckoned, elsewhere):
        [none] = costs_of({"one": planted.stages(range(2))}, "paper", device="cpu", budget=1e-9, saved={"one": other})
        assert len(none.untimed) == 2


def test_what_has_no_time_yet_is_timed_first(planted: Planted) -> None:
    known = Stage([[planted.network(0)]], planted.work("train"))
    new = Stage([[planted.network(1, images=100)]], planted.work("silent"))
    [before] = costs_of({"one": [known]}, "paper", device="cpu")
    calls = planted.calls()
    [cost] = costs_of({"one": [known, new]}, "paper", device="cpu", saved={"one": before})
    assert not cost.untimed
    first = planted.calls()[len(calls)]
    assert first.startswith("silent"), planted.calls()


def test_missing_data_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATSCOPE_DATA", str(tmp_path))
    pieces.whole_sizes.cache_clear()
    with pytest.raises(FlatscopeError, match="mnist"):
        study_costs(["petzka2019-fig3"], device="cpu")
    ridge, figure = study_costs(["petzka2019-ridge", "petzka2019-fig3"], device="cpu")
    assert not ridge.untimed
    assert "mnist" in figure.rows[0].problem


def test_nothing_is_left_behind(planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch, own = tmp_path / "scratch", tmp_path / "own"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("FLATSCOPE_STORE", str(own))
    [cost] = costs_of({"one": planted.stages(range(2))}, "paper", device="cpu")
    assert not cost.untimed
    assert list(scratch.iterdir()) == []
    assert not own.exists()


def test_a_line_is_never_steeper_than_proportion_and_never_falls() -> None:
    assert Line.through(10, 2.0, 5, 1.5).at(20) == pytest.approx(3.0)
    assert Line.through(10, 2.0, 5, 0.1).at(20) == pytest.approx(4.0)
    assert Line.through(10, 2.0, 5, 2.5).at(20) == pytest.approx(2.0)
    assert Line.through(10, 2.0, 10, 2.0).at(20) == pytest.approx(4.0)


def test_every_measured_network_is_trained_in_the_same_study() -> None:
    for name, declared in studies().items():
        found = pieces_of(declared.stages("smoke"), "cpu")
        trained = {key for piece in found if piece.part == TRAINING for key in piece.keys}
        assert all(
            key_of(network) in trained for piece in found if piece.part == MEASURING for network in piece.networks
        )
        assert found, name


def test_a_cost_is_kept_beside_the_results(tmp_path: Path) -> None:
    rows = (CostRow(TRAINING, "2 vgg", 25, 12.0, 9e4, 500, 50_000, 4_000), CostRow(MEASURING, "norms", 3, problem="no"))
    cost = Cost("petzka2019-fig1", "paper", rows, 9e4, (), {"device": "NVIDIA H200"})
    assert cost.save(tmp_path) == tmp_path / "petzka2019-fig1" / "paper-cost.json"
    assert load_costs(tmp_path) == {"petzka2019-fig1": cost}
    assert load_costs(tmp_path, "small") == {}
    (tmp_path / "petzka2019-fig1" / cost_file("paper")).write_text("{}")
    with pytest.raises(DataFileError, match="study cost"):
        load_costs(tmp_path)
    assert [duration(seconds) for seconds in (0.05, 99, 119, 121, 7_300)] == [
        "0.05 s",
        "99 s",
        "119 s",
        "2.02 minutes",
        "2.03 hours",
    ]


def test_the_command(tmp_path: Path) -> None:
    names = ["petzka2019-fig3", "petzka2019-fig4", "petzka2019-ridge"]
    options = ["--scale", "smoke", "--device", "cpu", "--out", str(tmp_path)]
    done = RUNNER.invoke(app, ["study", "cost", *names, *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert all(name in done.output for name in names)
    costs = load_costs(tmp_path, "smoke")
    assert sorted(costs) == sorted(names)
    assert costs["petzka2019-fig4"].shared == ("petzka2019-fig3",)
    assert not any(cost.untimed for cost in costs.values())
    (tmp_path / names[0] / "smoke-cost.json").rename(tmp_path / names[0] / "paper-cost.json")
    shown = RUNNER.invoke(app, ["study", "show", names[0], "--results", str(tmp_path)], catch_exceptions=False).output
    assert "up to 20 epochs" in shown


def test_counts_of_repetitions_are_those_of_declared_studies() -> None:
    stages = [stage for declared in studies().values() for stage in declared.stages("smoke")]
    for work, repeated in timing.REPEATED.items():
        configs = [config for stage in stages if stage.work == work for config in stage.configs]
        for path in repeated.paths:
            assert any(timing.count_at(config, path) for config in configs), f"{work}, {path}"
