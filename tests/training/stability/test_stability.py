"""The edge of stability: its measures, thresholds, warm starts and verdicts, and a training that gets there."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from networks import mlp, smooth
from references import dense
from references_radius import batch_sharpness as batch_twin
from test_live import lightning, lightning_training, network, plain_loop, same_bits, trainer_training  # noqa: F401
from torch import Tensor, nn

import flatscope as fs
from flatscope import stats
from flatscope.inputs.loading import load
from flatscope.reports.page import page_text
from flatscope.training import callbacks as live
from flatscope.training.callbacks import Recorder, optimizer_settings
from flatscope.training.models import build
from flatscope.training.stability.sharpness_record import edge_standing
from flatscope.training.stability.update_rule import UpdateRule

# Measures


@pytest.mark.parametrize(("batch", "weight_decay"), [(2, 0.0), (3, 0.3), (11, 0.1)])
def test_batch_sharpness_over_all_batches_is_that_of_dense_hessians(batch: int, weight_decay: float) -> None:
    written_out = dense("smooth", smooth)
    options = {"batch": batch, "weight_decay": weight_decay, "draws": 200}
    row = fs.measure(smooth().problem(), "batch_sharpness", options={"batch_sharpness": options}).to_frame().iloc[0]
    assert row["exact"]
    assert row["value"] == pytest.approx(batch_twin(written_out, batch, weight_decay), rel=1e-9)


def test_batch_sharpness_of_drawn_batches_is_right_within_its_error() -> None:
    expected = batch_twin(dense("mlp", mlp), 2)
    options = {"batch_sharpness": {"batch": 2, "draws": 50}}  # of 55 sets
    row = fs.measure(mlp().problem(), "batch_sharpness", 1, options, precision=0).to_frame().iloc[0]
    assert not row["exact"]
    assert 0 < row["stderr"] < 0.2 * expected
    assert abs(row["value"] - expected) < 4 * row["stderr"]
    assert row["reason"] == "50 mini-batches"
    whole = mlp().problem()
    value = fs.measure(whole, "batch_sharpness", options={"batch_sharpness": {"batch": 11}})["batch_sharpness"]
    assert value <= fs.measure(whole, "hessian_max_eigenvalue")["hessian_max_eigenvalue"]


def noise_and_square(rows: torch.Tensor) -> tuple[float, float]:
    """The mean of products of different samples' gradients is the squared gradient without their own noise."""
    n = len(rows)
    square = float((rows.sum(0).square().sum() - rows.square().sum()) / (n * (n - 1)))
    return float(rows.var(0).sum()), square


def unbiased_scale(problem: fs.Problem) -> pd.Series:
    options = {"gradient_noise_scale": {"unbiased": True}}
    found: pd.Series = fs.measure(problem, "gradient_noise_scale", options=options).to_frame().iloc[0]
    return found


def linear_gradients(gradients: torch.Tensor) -> fs.Problem:
    """A problem whose samples have these gradients: the loss is the output, which is linear in the weights."""
    model = nn.Linear(gradients.shape[1], 1, bias=False).double()
    y = torch.zeros(len(gradients), 1, dtype=torch.float64)
    return fs.Problem(model, (gradients, y), loss=lambda outputs, targets: outputs[:, 0] + 0 * targets[:, 0])


def test_the_unbiased_noise_scale_by_hand() -> None:
    rows = 1.5 + torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise, square = noise_and_square(rows)
    each = [noise_and_square(torch.cat([rows[:i], rows[i + 1 :]])) for i in range(12)]
    covariance = 11 * np.cov(np.array(each).T, bias=True)
    expected = noise / square / (1 + covariance[1, 1] / square**2 - covariance[0, 1] / (noise * square))
    assert unbiased_scale(linear_gradients(rows))["value"] == pytest.approx(expected, rel=1e-9)
    weak = unbiased_scale(linear_gradients(rows - 1.45))  # a squared gradient below twice its error
    assert math.isnan(weak["value"])
    assert "more than these samples can tell" in weak["reason"]


@pytest.mark.long
def test_the_unbiased_noise_scale_is_right_on_average() -> None:
    """Of 100 samples with a true scale of 10.8 the ratio of two unbiased parts is 3 to 10 % too large."""
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(600):
        rows = torch.randn(100, 20, generator=generator, dtype=torch.float64)
        rows[:, 0] += math.sqrt(20 / 10.8)
        found.append(unbiased_scale(linear_gradients(rows))["value"])
    assert np.mean(found) == pytest.approx(10.8, abs=4 * np.std(found) / math.sqrt(600))
    assert np.std(found) / math.sqrt(600) < 0.01 * 10.8


def test_a_vanishing_gradient_has_neither_direction_nor_noise_scale() -> None:
    model = nn.Linear(2, 1, bias=False).double()
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]], dtype=torch.float64)
    y = model(x).detach()
    table = fs.measure(fs.Problem(model, train=(x, y), loss="mse"), ["batch_sharpness", "gradient_noise_scale"])
    frame = table.to_frame().set_index("measure")
    assert frame["value"].isna().all()
    assert "is zero" in frame.loc["batch_sharpness", "reason"]
    assert "is zero" in frame.loc["gradient_noise_scale", "reason"]


@pytest.mark.parametrize("options", [{"batch": 0}, {"batch": 12}, {"draws": 1}, {"weight_decay": -1.0}])
def test_batch_sharpness_refuses_what_is_no_batch(options: dict[str, Any]) -> None:
    with pytest.raises(fs.InputError, match=next(iter(options))):
        fs.measure(mlp().problem(), "batch_sharpness", options={"batch_sharpness": options})


# Thresholds


RULES = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.5, "dampening": 0.3},
    {"momentum": 0.9, "nesterov": True},
    {"weight_decay": 2.0},
]


@pytest.mark.parametrize("settings", RULES, ids=str)
def test_a_quadratic_diverges_above_the_threshold_and_not_below(settings: dict[str, Any]) -> None:
    rule = UpdateRule.of({"name": "SGD", "lr": 0.1} | settings)
    for factor, grows in ((0.98, False), (1.02, True)):
        w = torch.ones(1, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=0.1, **settings)
        curvature = factor * rule.threshold - rule.weight_decay
        for _ in range(2000):
            optimizer.zero_grad()
            (curvature * w.square().sum() / 2).backward()
            optimizer.step()
            if not 1e-30 < abs(float(w.detach())) < 1e30:
                break
        assert (abs(float(w.detach())) > 1) == grows


def test_optimizers_without_a_known_threshold_say_so() -> None:
    model = nn.Linear(2, 2)
    adam = UpdateRule.of(optimizer_settings(torch.optim.AdamW(model.parameters(), lr=0.1)))
    assert math.isnan(adam.threshold)
    assert "AdamW" in adam.unknown
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}]
    assert "groups" in UpdateRule.of(optimizer_settings(torch.optim.SGD(groups, lr=0.1))).unknown
    rule = UpdateRule.of(optimizer_settings(torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5), momentum=0.5)))
    assert (rule.lr, rule.threshold) == (0.5, 6.0)
    for wrong in ({"lr": -1.0}, {"lr": math.nan}, {"lr": 0.1, "momentum": 1.0}, {"lr": 0.1, "weight_decay": math.inf}):
        with pytest.raises(fs.InputError, match=list(wrong)[-1]):
            UpdateRule.of({"name": "SGD"} | wrong)


def digits_training(lr: float, steps: int, every: int, **settings: Any) -> tuple[fs.StabilityRecorder, nn.Module]:
    """Full-batch gradient descent on 300 digits."""
    x, y = load("digits", train_size=300, flatten=True).train
    model = build("mlp", seed=0, widths=(64, 32, 32, 10), activation="tanh")
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    recorder = fs.StabilityRecorder((x, y), every, loss="mse", noise_every=0, **settings)
    for step in range(steps + 1):
        if recorder.due(step):
            recorder.record(model, step, optimizer=optimizer)
        optimizer.zero_grad()
        (model(x) - nn.functional.one_hot(y, 10)).square().sum(1).mean().backward()
        optimizer.step()
    return recorder, model


@pytest.mark.long
def test_gradient_descent_settles_at_the_edge_and_with_a_smaller_rate_below_it() -> None:
    at_edge = digits_training(0.09, 320, 5)[0].stability
    found = at_edge.sharpness
    assert found.where == "edge"
    assert 1.8 < found.mean.value < 2.3
    assert at_edge.sentences()[0].startswith(f"From step {found.start} on η·λ_max stays at {found.mean.value:.2f}")
    control = digits_training(0.02, 100, 10)[0].stability
    assert control.sharpness.where == "below"
    assert control.rows["normalized_sharpness"].max() < 1.5
    assert "below the edge" in control.sentences()[0]


def test_every_record_has_the_eigenvalue_that_a_search_from_scratch_has() -> None:
    recorder, model = digits_training(0.09, 0, 1)
    x, y = recorder.data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15)  # far above the edge: the top direction changes quickly
    for step in range(1, 8):
        (model(x) - nn.functional.one_hot(y, 10)).square().sum(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        recorder.record(model, step, optimizer=optimizer)
        scratch = fs.measure(fs.Problem(copy.deepcopy(model).eval(), (x, y), loss="mse"), "hessian_max_eigenvalue")
        assert recorder.tables[step]["hessian_max_eigenvalue"] == pytest.approx(
            scratch["hessian_max_eigenvalue"], rel=2e-3
        )
    rows = recorder.stability.rows
    assert rows["reach"].notna().all()
    assert (rows["reach"] <= 1.1e-3 * rows["lambda_max"].abs()).all()


# Nothing of the training changes


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 6, generator=generator)
    return x, (x[:, 0] + x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()


def test_a_recorded_training_ends_at_the_same_bits(data: tuple[Tensor, Tensor]) -> None:
    recorder = fs.StabilityRecorder(data, batch=16, density_every=2)
    untouched = plain_loop(data, lambda model, epoch: None)
    recorded = plain_loop(data, lambda model, epoch: recorder.record(model, epoch, lr=0.1, momentum=0.9))
    assert same_bits(untouched, recorded)
    found = recorder.stability
    assert list(found.densities) == [1, 3]
    assert found.rows["step"].tolist() == [1, 2, 3, 4]
    assert found.rows["threshold"].tolist() == pytest.approx([38.0] * 4)
    assert found.rows["normalized_batch"].isna().all()
    assert "no threshold" in found.rows["remark"].iloc[0]


def test_lightning_gives_the_recorder_its_optimizer(
    lightning: Any,  # noqa: F811
    data: tuple[Tensor, Tensor],
    tmp_path: Path,
) -> None:
    untouched = lightning_training(lightning, data, tmp_path, [])
    callback = live.FlatscopeCallback(fs.StabilityRecorder(data, 2), network=lambda module: module.inner)
    assert same_bits(untouched, lightning_training(lightning, data, tmp_path, [callback]))
    found = callback.recorder.stability
    assert found.rows["step"].tolist() == [0, 6, 12]
    assert found.rule == UpdateRule("SGD", 0.1, 0.9)
    with pytest.raises(fs.InputError, match="both"):
        live.FlatscopeCallback(fs.StabilityRecorder(data), every=2)


@pytest.mark.long
@pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
def test_the_trainer_gives_the_recorder_its_optimizer(data: tuple[Tensor, Tensor], tmp_path: Path, optim: str) -> None:
    """Its schedule begins and ends at a rate of 0: such a step bears any curvature."""
    x, y = data
    settings = {"optim": optim, "warmup_steps": 3, "lr_scheduler_type": "linear"}
    untouched = trainer_training(data, tmp_path, [], **settings)
    callback = live.FlatscopeTrainerCallback(fs.StabilityRecorder(({"x": x}, y), 2, batch=16, density_every=1))
    assert same_bits(untouched, trainer_training(data, tmp_path, [callback], **settings))
    rows = callback.recorder.stability.rows
    assert rows["step"].tolist() == [0, 6, 12]
    assert rows["lr"].tolist() == pytest.approx([0.0, 0.05 * 6 / 9, 0.0])
    assert rows["lambda_max"].notna().all()
    if optim == "sgd":
        assert rows["threshold"].tolist() == pytest.approx([math.inf, 2 / (0.05 * 6 / 9), math.inf])
        expected = [0.0, rows["lambda_max"][1] * 0.05 * 6 / 9, 0.0]
        assert rows["normalized_sharpness"].tolist() == pytest.approx(expected)
        assert rows["normalized_batch"].tolist()[::2] == [0.0, 0.0]
        callback.recorder.stability.save(tmp_path / "run.json")
        assert fs.Stability.load(tmp_path / "run.json") == callback.recorder.stability
        page_text(callback.recorder.stability)
    else:
        assert rows["remark"].str.contains("AdamW").all()


def test_lightning_with_a_schedule_from_zero(
    lightning: Any,  # noqa: F811
    data: tuple[Tensor, Tensor],
    tmp_path: Path,
) -> None:
    callback = live.FlatscopeCallback(fs.StabilityRecorder(data, 2, batch=16), network=lambda module: module.inner)

    def rising(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: epoch / 4)

    untouched = lightning_training(lightning, data, tmp_path, [], schedule=rising)
    logger = lightning.loggers.CSVLogger(tmp_path)
    recorded = lightning_training(lightning, data, tmp_path, [callback], logger, schedule=rising)
    assert same_bits(untouched, recorded)
    assert callback.recorder.stability.rows["lr"].tolist() == pytest.approx([0.0, 0.05, 0.1])


def test_a_training_with_two_optimizers_is_refused_before_its_first_step(data: tuple[Tensor, Tensor]) -> None:
    class Trainer:
        is_global_zero, current_epoch, global_step, loggers, optimizers = True, 0, 0, (), [1, 2]

    callback = live.FlatscopeCallback(fs.StabilityRecorder(data))
    with pytest.raises(fs.InputError, match="several optimizers"):
        callback.on_train_start(Trainer(), network())


def test_what_was_recorded_stays_where_sending_it_fails(data: tuple[Tensor, Tensor]) -> None:
    def lost(table: fs.Table, step: int) -> None:
        raise ConnectionError

    recorder = fs.StabilityRecorder(data, send=lost)
    with pytest.raises(ConnectionError):
        recorder.record(network(), 3, lr=0.1)
    assert recorder.stability.rows["step"].tolist() == [3]


def test_a_plain_recorder_keeps_the_settings_of_the_optimizer(data: tuple[Tensor, Tensor]) -> None:
    model = network()
    table = Recorder(data, "margin").record(model, 1, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert table is not None
    assert (table.meta["optimizer"]["name"], table.meta["optimizer"]["lr"]) == ("SGD", 0.1)


def test_wrong_settings_are_refused(data: tuple[Tensor, Tensor]) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(fs.InputError, match="neither"):
        fs.StabilityRecorder(data).record(model, 0)
    with pytest.raises(fs.InputError, match="both"):
        fs.StabilityRecorder(data).record(model, 0, optimizer=optimizer, lr=0.1)
    with pytest.raises(fs.InputError, match="above 0"):
        fs.StabilityRecorder(data).record(model, 0, lr=0.0)
    with pytest.raises(fs.InputError, match="batch"):
        fs.StabilityRecorder(data, batch=100).record(model, 0, lr=0.1)
    for wrong in ({"batch": 0}, {"noise_every": -1}, {"density_every": 1.5}, {"tolerance": 2.0}, {"every": 0}):
        with pytest.raises(fs.InputError):
            fs.StabilityRecorder(data, **wrong)


# Verdicts


def test_a_series_stands_where_the_rule_says() -> None:
    rising = [0.5 + 0.05 * k for k in range(30)]
    swinging = [2 + 0.1 * (-1) ** k for k in range(20)]
    steps = list(range(0, 1000, 10))

    def where(values: list[float]) -> str:
        return edge_standing(steps[: len(values)], values).where

    at_edge = edge_standing(steps[:50], rising + swinging)
    assert (at_edge.where, at_edge.start) == ("edge", 300)
    assert at_edge.mean.low < 2 < at_edge.mean.high
    for begun in ([3.9, 1.6, 1.7], [2.1, 1.5, 1.6]):  # the first weights may be above, or there by chance
        assert edge_standing(steps[:63], begun + rising[20:] + swinging * 2 + swinging[:10]).start == 130
    assert where(rising) == "moving"
    assert where([0.4] * 12) == "below"
    assert where([2.5] * 12) == "above"
    assert where(rising + swinging[:9]) == "moving"  # too few records to call it settled
    assert where(rising + swinging + [1.0] * 20) == "below"  # left again
    assert where([2.0, 1.9]) == "moving"
    drifting = np.linspace(2.04, 1.75, 21).tolist()  # through the band, and on its way out
    assert where(rising + drifting) == "moving"
    assert where(rising + drifting[:4] * 5) == "edge"
    assert "too few records (2)" in edge_standing(steps[:2], [0.8, 0.8]).words("η·λ_max")  # nor that it has not settled
    assert where([math.nan, math.nan]) == where([]) == "unknown"
    assert edge_standing(steps[:50], [math.nan, *rising[1:], *swinging]).mean.n == 20


def test_the_interval_of_a_correlated_series_covers_its_mean() -> None:
    rng, covered, wider = np.random.default_rng(0), [], []
    for _ in range(200):
        values = np.zeros(160)
        for k in range(1, 160):
            values[k] = 0.7 * values[k - 1] + rng.normal()
        found = stats.mean_of_series(values[60:])
        covered.append(found.low <= 0 <= found.high)
        wider.append((found.high - found.low) / (2 * 1.96 * values[60:].std() / 10))
    assert 0.9 < np.mean(covered) <= 0.99
    assert min(wider) >= 1.0
    assert np.median(wider) > 2  # √((1 + 0.7) / (1 − 0.7)) is 2.4
    assert math.isnan(stats.mean_of_series([1.0, 2.0]).low)
    trend = stats.mean_of_series(np.arange(30.0))  # is not settled: nothing is known of where it goes
    assert trend.low < 0
    assert trend.high > 30
    assert math.isnan(stats.mean_of_series([math.nan]).value)
    assert stats.mean_of_series([2.0] * 9).low == 2.0


# As a result


@pytest.fixture(scope="module")
def recorded(data: tuple[Tensor, Tensor]) -> fs.Stability:
    recorder = fs.StabilityRecorder(data, batch=8, density_every=3)
    plain_loop(data, lambda model, epoch: recorder.record(model, epoch, lr=0.1, weight_decay=0.01))
    return recorder.stability


@pytest.mark.parametrize("ending", [".json", ".parquet"])
def test_files_give_it_back(recorded: fs.Stability, ending: str, tmp_path: Path) -> None:
    recorded.save(tmp_path / f"run{ending}")
    again = fs.Stability.load(tmp_path / f"run{ending}")
    assert again == recorded
    assert again.rule == recorded.rule
    assert again.densities[1] == recorded.densities[1]
    assert again.summary() == recorded.summary()


def test_the_page_answers_first_and_draws_all(recorded: fs.Stability, tmp_path: Path) -> None:
    page = page_text({"run": recorded})
    assert "Is this training at the edge of stability?" in page
    assert recorded.sentences()[0] in page
    assert "the spectrum as it moves" in page
    assert "batch sharpness against the edge" in page
    recorded.save(tmp_path / "run.json")
    assert "against the edge" in page_text([("a", recorded), ("b", fs.Stability.load(tmp_path / "run.json"))])


def test_without_a_threshold_there_is_no_verdict(data: tuple[Tensor, Tensor]) -> None:
    model = network()
    recorder = fs.StabilityRecorder(data, batch=47)  # 48 batches in all
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        recorder.record(model, step, optimizer=optimizer)
    found = recorder.stability
    assert "no threshold is known here for Adam" in found.sentences()[0]
    assert found.sharpness.where == "unknown"
    assert found.rows["lambda_max"].notna().all()
    page = page_text(found)
    assert "Sharpness λ_max" in page
