"""Flatness of all networks of a stack at once: the numbers of `measure` on each network alone."""

import math

import pytest
import torch
from torch import nn

import flatscope as fs
from flatscope.errors import InputError, UnknownNameError
from flatscope.training import stacked_measures
from flatscope.training.stacked_measures import BY_EIGENVALUES, MEASURES

torch.set_num_threads(1)

NAMES = list(MEASURES)
WITHOUT_EIGENVALUES = [name for name in NAMES if name not in BY_EIGENVALUES]


def samples(shape, classes=3, n=25, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, *shape, generator=generator, dtype=torch.float64), torch.arange(n) % classes


class Joined(nn.Module):
    """A residual sum, written in place, in front of the last layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 2, 3, padding=1, stride=2), nn.BatchNorm2d(2)
        self.left, self.right, self.out = nn.Linear(18, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 3)

    def forward(self, x):
        x = torch.relu_(self.norm(self.conv(x))).flatten(1)
        x = self.left(x)
        x += torch.relu_(self.right(torch.relu(x)))
        return self.out(x.relu_())


CASES = {
    "lenet5": ("lenet5", (1, 16, 16), "cross_entropy", ["fc2", "fc3"]),
    "mlp": ("mlp", (6,), "mse", ["fc1", "fc2"]),
    "joined": (lambda trial: Joined(), (1, 6, 6), "cross_entropy", ["out", "left", "right"]),
}


def measured_after(case, names, layers, epoch=2, trials=None, data=None, **settings):
    """What the view gives after an epoch, and the population."""
    build, shape, loss, _ = CASES[case]
    found = []

    def after_epoch(done, view):
        if done == epoch:
            found.append(view.measure(names, layers, **settings))

    options = {"model_options": {"widths": (6, 5, 3)}} if build == "mlp" else {}
    trials = trials or [{"lr": 0.02 * (seed + 1), "seed": seed} for seed in range(3)]
    trials = [{"epochs": epoch, "batch_size": 6, "loss": loss, **options, **trial} for trial in trials]
    given = {"dtype": torch.float64, "stacked": True, "after_epoch": after_epoch}
    population = fs.train_population(build, trials, data or samples(shape), **given)
    return found[0], population


def assert_as_measured_alone(frame, population, names, rtol, pair=None):
    for trial, rows in frame.groupby("trial"):
        problem = population.problem(trial, pair)
        sharp = {name: {"tolerance": 1e-9} for name in names if name in BY_EIGENVALUES}
        table = fs.measure(problem, names, precision=0, options=sharp)
        for name in names:
            expected = table.layer(name)
            for layer, value in zip(rows["layer"], rows[name], strict=True):
                assert value == pytest.approx(expected[layer], rel=rtol)


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_each_network_alone(case):
    layers = CASES[case][3]
    frame, population = measured_after(case, NAMES, layers)
    assert frame["trial"].tolist() == [trial for trial in range(3) for _ in layers]
    assert frame["layer"].tolist() == layers * 3
    assert set(frame["epoch"]) == {2}
    assert_as_measured_alone(frame, population, NAMES, 1e-6)
    for name in NAMES:
        assert frame[name].nunique() == len(frame)


@pytest.mark.parametrize("case", ["lenet5", "joined"])
def test_convolutions_have_all_but_eigenvalues(case):
    frame, population = measured_after(case, WITHOUT_EIGENVALUES, None)
    assert frame["layer"][0].startswith("conv")
    assert_as_measured_alone(frame, population, WITHOUT_EIGENVALUES, 1e-9)
    with pytest.raises(InputError, match="dense layers"):
        measured_after(case, NAMES, None)


def test_small_parts_of_memory_own_samples_and_labels_change_nothing(monkeypatch):
    monkeypatch.setattr(stacked_measures, "BATCH_BYTES", {"cpu": 20_000})
    monkeypatch.setattr(stacked_measures, "KEPT_BYTES", {"cpu": 20_000})
    trials = [{"seed": seed, "lr": 0.05, "train_size": 20, "labels": {"random": 0.5}} for seed in range(3)]
    frame, population = measured_after("lenet5", NAMES, ["fc3"], trials=trials)
    assert_as_measured_alone(frame, population, NAMES, 1e-6)


def test_first_samples_some_trials_and_other_weights():
    some, population = measured_after("mlp", NAMES, ["fc2"], trials=None, samples=10)
    x, y = population.data(0)
    assert_as_measured_alone(some, population, NAMES, 1e-6, (x[:10], y[:10]))
    found = {}

    def after_epoch(epoch, view):
        weights = {name: value[[2, 0]] for name, value in view.weights().items()}
        found["plain"] = view.measure(NAMES, ["fc2"], trials=[2, 0])
        for name, factor in (("fc1.weight", 0.25), ("fc1.bias", 0.25), ("fc2.weight", 4.0)):
            weights[name] = weights[name] * factor  # the same functions
        found["twins"] = view.measure(NAMES, ["fc2"], trials=[2, 0], weights=weights)
        with pytest.raises(InputError, match="a trial of this group"):
            view.measure(NAMES, ["fc2"], trials=[7])

    trials = [{"epochs": 1, "seed": seed, "model_options": {"widths": (6, 5, 3)}} for seed in range(3)]
    fs.train_population("mlp", trials, samples((6,)), dtype=torch.float64, after_epoch=after_epoch)
    plain, twins = found["plain"], found["twins"]
    assert plain["trial"].tolist() == [0, 2]
    for name in NAMES:
        factor = 1 / 16 if name.startswith("layer_") else 1.0
        assert twins[name].tolist() == pytest.approx((factor * plain[name]).tolist(), rel=1e-6)


def test_a_diverged_network_has_no_values_and_leaves_the_others_theirs():
    trials = [{"lr": lr, "seed": seed} for seed, lr in enumerate((0.02, 1e200, 0.02))]
    frame, population = measured_after("lenet5", NAMES, ["fc3"], epoch=1, trials=trials)
    assert frame[NAMES].isna().all(axis=1).tolist() == [False, True, False]
    assert_as_measured_alone(frame[frame["trial"] != 1], population, NAMES, 1e-6)


def test_what_cannot_be_measured_is_refused_with_the_reason():
    with pytest.raises(UnknownNameError, match="kappa_trace"):
        measured_after("mlp", ["kappa_trase"], ["fc2"])
    with pytest.raises(UnknownNameError, match="fc2"):
        measured_after("mlp", ["kappa_trace"], ["fc9"])
    smooth = {"model_options": {"widths": (6, 5, 3), "activation": "tanh"}}
    frame, population = measured_after("mlp", NAMES, ["fc2"], trials=[{"seed": 0, **smooth}])
    assert_as_measured_alone(frame, population, NAMES, 1e-6)
    with pytest.raises(InputError, match="layer fc1"):
        measured_after("mlp", NAMES, ["fc1"], trials=[{"seed": 0, **smooth}])


def test_a_network_trained_by_itself_is_measured_by_itself():
    found = []

    def after_epoch(epoch, view):
        found.append(view.measure(["kappa_trace", "kappa"], ["2"]))

    trials, data = [{"epochs": 1, "seed": seed} for seed in range(2)], samples((6,))
    build = lambda trial: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))  # noqa: E731
    settings = {"dtype": torch.float64, "after_epoch": after_epoch}
    fs.train_population(build, trials, data, stacked=False, **settings)
    fs.train_population(build, trials, data, stacked=True, **settings)
    together = found[2]
    for alone in found[:2]:
        row = together[together["trial"] == alone["trial"][0]].iloc[0]
        for name in ("kappa_trace", "kappa"):
            assert math.isclose(alone[name][0], row[name], rel_tol=1e-6)
