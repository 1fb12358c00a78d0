"""Many networks at once: each as plain training gives it, stopped and diverged ones apart, resumed to the same bits."""

import math
import signal
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional

import flatscope
from flatscope.errors import InputError, Interrupted, UnknownNameError, WeightsError
from flatscope.training import stack, stacked_layers
from flatscope.training.checkpoint import TrainConfig, epoch_order, learning_rate
from flatscope.training.label_noise import corrupt_labels
from flatscope.training.loop import train
from flatscope.training.models import build
from flatscope.training.population import train_population
from flatscope.training.stacked_layers import NotStackable, StackedNetwork
from flatscope.training.trials import CONFIG_KEYS, build_model, read_trials

torch.set_num_threads(1)

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def blobs(n=60, classes=3, shape=(6,), seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    centres = torch.randn(classes, *shape, generator=generator, dtype=dtype)
    return centres[y] + torch.randn(n, *shape, generator=generator, dtype=dtype), y


class Residual(nn.Module):
    """What a stacked network may do besides calling layers one after the other."""

    def __init__(self, classes=3):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.left = nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")
        self.right = nn.ConvTranspose2d(4, 2, 3, padding=1)
        self.group = nn.GroupNorm(2, 6)
        self.hidden, self.layer_norm = nn.Linear(6, 5), nn.LayerNorm(5)
        self.vector_norm = nn.BatchNorm1d(5)
        self.out = nn.Linear(5, classes)

    def forward(self, x):
        x = functional.relu(self.norm1(self.stem(x)))
        x = x + self.norm2(self.left(x))
        x = self.group(torch.cat([x, self.right(x)], dim=1))
        for step in range(len(x.shape) - 2):  # any Python code
            x = functional.threshold(functional.avg_pool2d(x, 2 - step), 0.01, 0.0)
        x = x.mean((2, 3))
        x = torch.relu(self.vector_norm(self.layer_norm(self.hidden(x))))
        return self.out(x.view(x.size(0), -1))


def conv_batchnorm(trial=None):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )


def residual(trial=None):
    return Residual()


def alone(build_from, trial, data, test=None, dtype=torch.float64, n_classes=None):
    """The same trial by the plain loop; labels and subset are the caller's affair."""
    [read] = read_trials([trial], build_from)
    x, y = data
    model = build_model(build_from, read, x, int(y.max()) + 1 if n_classes is None else n_classes).to(dtype)
    return train(model, (x, y), read.config, test=test)


def largest_difference(model, state, without=()):
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert own.keys() == state.keys()
    compared = own.keys() - set(without)
    return max(float((own[name].detach().double() - state[name].double()).abs().max()) for name in compared)


def same_history(a, b, rtol=1e-9, skip=("seconds",)):
    pd.testing.assert_frame_equal(a.drop(columns=list(skip)), b.drop(columns=list(skip)), rtol=rtol, atol=rtol)


FAMILIES = {
    "mlp": ("mlp", {"model_options": {"widths": (36, 8, 3)}}, (1, 6, 6)),
    "tanh": ("mlp", {"model_options": {"widths": (36, 8, 8, 3), "activation": "tanh", "bias": False}}, (1, 6, 6)),
    "lenet5": ("lenet5", {}, (1, 16, 16)),
    "all_conv": ("all_conv", {"model_options": {"channels": 4}}, (1, 16, 16)),
    "conv_batchnorm": (conv_batchnorm, {}, (1, 6, 6)),
    "residual": (residual, {}, (1, 6, 6)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_trial_of_a_group_is_what_plain_training_gives(family):
    build_from, settings, shape = FAMILIES[family]
    data, test = blobs(n=50, shape=shape), blobs(n=30, shape=shape, seed=1)
    common = {"batch_size": 8, "epochs": 8, **settings}  # 7 steps an epoch, the last on two samples
    trials = [
        {"lr": 0.05, **common},
        {"lr": 0.02, "momentum": 0.9, "seed": 1, **common},
        {"lr": 0.01, "momentum": 0.5, "weight_decay": 0.01, "lr_steps": [[3, 0.1]], "seed": 2, **common},
        {"lr": 0.1, "lr_decay": 0.9, "init": "xavier_normal", "init_scale": 0.5, "model_seed": 9, **common},
        {"lr": 0.05, "epochs": 3, "evaluate_every": 2, "seed": 3, "shuffle": False, **{**common, "epochs": 3}},
    ]
    population = train_population(build_from, trials, data, test=test, dtype=torch.float64, stacked=True)
    assert population.groups == [[0, 1, 2, 3, 4]]
    for i, trial in enumerate(trials):
        expected = alone(build_from, trial, data, test)
        assert largest_difference(expected.model, population.state(i)) < 1e-9
        assert largest_difference(expected.model, dict(population.model(i).state_dict())) < 1e-9
        same_history(expected.history, population.histories[i])
        assert population.frame()["stopped_by"][i] == expected.stopped_by == "epochs"
        assert population.frame()["epochs"][i] == expected.epochs
        assert not population.model(i).training
    spread = [population.state(i)[next(iter(population.state(0)))] for i in range(5)]
    assert all(not torch.equal(a, b) for k, a in enumerate(spread) for b in spread[:k])


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("family", ["mlp", "conv_batchnorm"])
def test_adam_takes_the_steps_of_torchs_own(family, busy, stacked, monkeypatch):
    """Beside one that diverges, one with momentum and one that stops early; also each by itself."""
    if busy:
        monkeypatch.setitem(stack.BUSY, "cpu", 0.0)
    build_from, settings, shape = FAMILIES[family]
    x, y = blobs(n=50, shape=shape)
    common = {"batch_size": 8, "epochs": 6, **settings}
    trials = [
        {"optimizer": "adam", "lr": 0.01, **common},
        {"optimizer": "adam", "lr": 1e308, "seed": 9, **common},
        {"optimizer": "adam", "lr": 0.003, "weight_decay": 0.1, "lr_steps": [[3, 0.1]], "seed": 1, **common},
        {"lr": 0.02, "momentum": 0.9, "seed": 2, **common},
        {"optimizer": "adam", "lr": 0.01, "seed": 3, **{**common, "epochs": 2}},
    ]
    population = train_population(build_from, trials, (x, y), dtype=torch.float64, stacked=stacked)
    assert population.groups == ([[0, 1, 2, 4], [3]] if stacked else [[i] for i in range(5)])
    assert population.frame()["diverged"].tolist() == [False, True, False, False, False]
    assert population.frame()["optimizer"].tolist() == ["adam", "adam", "adam", "sgd", "adam"]
    for i in (0, 2, 4):
        [read] = read_trials([trials[i]], build_from)
        model = build_model(build_from, read, x, 3).double().train()
        adam = torch.optim.Adam(model.parameters(), weight_decay=read.config.weight_decay)
        for epoch in range(read.config.epochs):
            adam.param_groups[0]["lr"] = learning_rate(read.config, epoch)
            for batch in epoch_order(50, read.config.seed, epoch).split(8):
                adam.zero_grad()
                functional.cross_entropy(model(x[batch]), y[batch]).backward()
                adam.step()
        assert largest_difference(model, population.state(i)) < 1e-9
    assert largest_difference(alone(build_from, trials[3], (x, y)).model, population.state(3)) < 1e-9


def test_labels_subsets_and_losses_are_each_trials_own():
    x, y = blobs(n=60)
    common = {"lr": 0.05, "epochs": 5, "batch_size": 8, "model_options": {"widths": (6, 8, 3)}}
    trials = [
        {"train_size": 30, "seed": 4, **common},
        {"train_size": 30, "seed": 5, "labels": {"random": 1.0, "seed": 3}, **common},
        {"train_size": 30, "labels": {"random": 0.5, "exclude_true": True}, **common},
        {"loss": "mse", **common},
        {"labels": {"random": 0.2}, **common},
        {"augmentation": "none", **common},
    ]
    population = train_population("mlp", trials, (x, y), dtype=torch.float64, stacked=True)
    assert population.groups == [[0, 1, 2], [3], [4, 5]]
    for i, trial in enumerate(trials):
        own = population.data(i)
        plain = {key: value for key, value in trial.items() if key not in ("train_size", "labels")}
        expected = alone("mlp", plain, own, n_classes=3)
        assert largest_difference(expected.model, population.state(i)) < 1e-9
    assert torch.equal(population.data(4)[1], corrupt_labels(y, 0.2, 3, 0)[0])
    assert torch.equal(population.data(3)[1], y)
    half = population.data(2)
    place = {tuple(row.tolist()): k for k, row in enumerate(x)}
    true = y[[place[tuple(row.tolist())] for row in half[0]]]
    assert int((true != half[1]).sum()) == 15
    assert torch.bincount(true).tolist() == [10, 10, 10]
    problem = population.problem(1)
    assert problem.n_train == 30
    assert problem.initial is not None
    assert flatscope.measure(problem, "distance_from_initialization")["distance_from_initialization"] > 0


def test_augmented_images_and_pairs_of_each_trial_are_those_of_the_plain_loop():
    data = blobs(n=40, shape=(1, 8, 8))
    other = blobs(n=40, shape=(1, 8, 8), seed=7)
    common = {"lr": 0.05, "epochs": 4, "batch_size": 8, "augmentation": "crop-flip"}
    trials = [{"seed": 0, **common}, {"seed": 1, "other": True, **common}, {"seed": 2, **common}]

    def make(trial):
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 3))

    def pairs(trial):
        return other if trial.get("other") else data

    population = train_population(make, trials, data, pairs=pairs, dtype=torch.float64, stacked=True)
    assert len(population.groups) == 1
    for i, trial in enumerate(trials):
        expected = alone(make, trial, pairs(trial))
        assert largest_difference(expected.model, population.state(i)) < 1e-9
        same_history(expected.history, population.histories[i])


def test_regression_targets_train_in_a_stack():
    x, _ = blobs(n=30)
    y = x[:, :2].sin()
    trials = [{"loss": "mse", "lr": lr, "epochs": 4, "model_options": {"widths": (6, 5, 2)}} for lr in (0.01, 0.02)]
    population = train_population("mlp", trials, (x, y), dtype=torch.float64, stacked=True)
    for i, trial in enumerate(trials):
        expected = alone("mlp", trial, (x, y), n_classes=0)
        assert largest_difference(expected.model, population.state(i)) < 1e-9
        same_history(expected.history, population.histories[i])


def test_gaps_are_in_the_frame_where_there_is_something_to_compare():
    x, y = blobs(n=30)
    settings = {"epochs": 2, "model_options": {"widths": (6, 5, 3)}}
    frame = train_population("mlp", [settings], (x[:20], y[:20]), test=(x[20:], y[20:])).frame()
    assert frame["loss_gap"][0] == pytest.approx(frame["test_loss"][0] - frame["train_loss"][0])
    assert frame["error_gap"][0] == pytest.approx(frame["test_error"][0] - frame["train_error"][0])
    untested = train_population("mlp", [settings], (x, y)).frame()
    assert not {"loss_gap", "error_gap"} & set(untested)
    values = x[:, :3].sin()
    pairs = {"data": (x[:20], values[:20]), "test": (x[20:], values[20:])}
    regression = train_population("mlp", [{"loss": "mse", **settings}], **pairs)
    assert "loss_gap" in regression.frame()
    assert "error_gap" not in regression.frame()


def test_float32_curves_stay_together():
    data = blobs(n=64, dtype=torch.float32)
    common = {"batch_size": 16, "momentum": 0.9, "model_options": {"widths": (6, 16, 3)}}
    for epochs, tolerance in ((1, 1e-6), (20, 1e-3)):
        trials = [{"lr": 0.02, "seed": seed, "epochs": epochs, **common} for seed in range(4)]
        population = train_population("mlp", trials, data, stacked=True)
        for i, trial in enumerate(trials):
            expected = alone("mlp", trial, data, dtype=torch.float32)
            assert population.state(i)["fc1.weight"].dtype == torch.float32
            assert largest_difference(expected.model, population.state(i)) < tolerance
            same_history(expected.history, population.histories[i], rtol=10 * tolerance)


def test_stop_rules_are_each_trials_own_and_a_stopped_trial_no_longer_changes():
    data = blobs(n=60)
    common = {"lr": 0.1, "momentum": 0.9, "batch_size": 8, "epochs": 40, "model_options": {"widths": (6, 16, 3)}}
    trials = [
        {"stop_loss": 0.5, **common},
        {"stop_zero_error": True, "seed": 1, **common},
        {"stop_gradient_norm": 0.05, "seed": 2, **common},
        {"seed": 3, **common},
        {"stop_loss": 0.1, "seed": 4, "evaluate_every": 3, **common},
    ]
    seen = {}

    def watch(epoch, view):
        for i in view.trials:
            seen.setdefault(i, []).append((epoch, view.stopped_by(i), view.state(i), view.row(i)))
        stacked = view.weights()
        assert all(len(value) == len(view.active) for value in stacked.values())
        for k, i in enumerate(view.active):
            assert torch.equal(stacked["fc1.weight"][k], view.state(i)["fc1.weight"])

    population = train_population("mlp", trials, data, dtype=torch.float64, stacked=True, after_epoch=watch)
    ends = []
    for i, trial in enumerate(trials):
        expected = alone("mlp", trial, data)
        assert largest_difference(expected.model, population.state(i)) < 1e-9
        same_history(expected.history, population.histories[i])
        assert population.frame()["stopped_by"][i] == expected.stopped_by
        ends.append((expected.stopped_by, expected.epochs))
        later = [state for epoch, stopped, state, _ in seen[i] if stopped]
        assert len(later) == 40 - expected.epochs + 1
        assert all(torch.equal(state["fc1.weight"], population.state(i)["fc1.weight"]) for state in later)
        assert seen[i][-1][3]["epoch"] == expected.epochs
    assert {name for name, _ in ends} == {"loss", "zero_error", "gradient_norm", "epochs"}
    assert len({epochs for _, epochs in ends}) > 2


@pytest.mark.parametrize("family", ["mlp", "lenet5", "conv_batchnorm"])
def test_a_diverged_trial_leaves_the_others_alone(family):
    build_from, settings, shape = FAMILIES[family]
    data = blobs(n=48, shape=shape)
    common = {"momentum": 0.9, "batch_size": 8, "epochs": 6, **settings}
    good = [{"lr": 0.02, "seed": seed, **common} for seed in range(3)]
    bad = {"lr": 1e200, "seed": 9, "name": "bad", **common}
    population = train_population(build_from, [good[0], bad, *good[1:]], data, dtype=torch.float64, stacked=True)
    without = train_population(build_from, good, data, dtype=torch.float64, stacked=True)
    frame = population.frame()
    assert frame["diverged"].tolist() == [False, True, False, False]
    assert frame["epochs"][1] < 6
    assert population.histories[1]["train_loss"].isna().iloc[-1]
    for i, j in ((0, 0), (2, 1), (3, 2)):
        assert largest_difference(without.model(j), population.state(i)) < 1e-12
        assert all(bool(value.isfinite().all()) for value in population.state(i).values())
    assert alone(build_from, bad, data).stopped_by == "diverged"


def test_a_diverged_trial_is_kept_apart_where_convolutions_mix_neighbours(monkeypatch):
    """Some kernels read a neighbour's channels times zero, which is not zero once these are not finite."""

    def mixing(x, weight, bias, **settings):
        leak = 0 * (x.sum() + weight.sum())
        return functional.conv2d(x, weight, bias, **settings) + leak

    monkeypatch.setitem(stacked_layers.CONVOLUTIONS, "conv2d", mixing)
    data, test = blobs(n=48, shape=(1, 6, 6)), blobs(n=20, shape=(1, 6, 6), seed=1)
    common = {"momentum": 0.9, "batch_size": 8, "epochs": 5, "stop_gradient_norm": 1e-9}
    trials = [{"lr": 1e200 if seed == 2 else 0.02, "seed": seed, **common} for seed in range(5)]
    trials[3] = {**trials[3], "momentum": 0.0}
    trials += [{**trials[0], "seed": 5, "lr_steps": [[3, 1e205]]}, {**trials[0], "seed": 6, "epochs": 2}]
    settings = {"test": test, "dtype": torch.float64, "stacked": True}
    leaked = train_population(conv_batchnorm, trials, data, **settings)
    assert leaked.frame()["diverged"].all()  # the stand-in does mix
    monkeypatch.setattr(stack, "MIXING_DEVICES", {"cpu"})
    population = train_population(conv_batchnorm, trials, data, **settings)
    for i, trial in enumerate(trials):
        expected = alone(conv_batchnorm, trial, data, test)
        assert population.frame()["stopped_by"][i] == expected.stopped_by
        assert population.frame()["epochs"][i] == expected.epochs
        same_history(expected.history, population.histories[i])
        if i not in (2, 5):
            assert largest_difference(expected.model, population.state(i)) < 1e-9
    assert population.frame()["diverged"].tolist() == [i in (2, 5) for i in range(7)]


def test_what_is_not_finite_does_not_travel_from_neighbour_to_neighbour(monkeypatch):
    """Only trials that one step's forward and backward pass can reach from a diverged one are trained again."""

    def mixing_neighbours(x, weight, bias, stride, padding, dilation, groups):
        per_trial = 0 * (x.reshape(len(x), groups, -1).sum((0, 2)) + weight.reshape(groups, -1).sum(1))
        beside = per_trial + per_trial.roll(1)
        result = functional.conv2d(x, weight, bias, stride, padding, dilation, groups)
        return result + beside.repeat_interleave(result.shape[1] // groups)[:, None, None]

    monkeypatch.setitem(stacked_layers.CONVOLUTIONS, "conv2d", mixing_neighbours)
    monkeypatch.setattr(stack, "MIXING_DEVICES", {"cpu"})
    passes = []
    one_pass = stack.Stack._train_pass

    def counted(self, epoch, advance):
        passes.append((epoch, len(self.trials)))
        return one_pass(self, epoch, advance)

    monkeypatch.setattr(stack.Stack, "_train_pass", counted)
    data = blobs(n=48, shape=(1, 6, 6))
    trials = [{"lr": 1e200 if seed == 3 else 0.02, "seed": seed, "batch_size": 8, "epochs": 2} for seed in range(10)]
    population = train_population(conv_batchnorm, trials, data, dtype=torch.float64, stacked=True)
    assert population.frame()["diverged"].tolist() == [seed == 3 for seed in range(10)]
    assert passes[:2] == [(0, 10), (0, 6)]
    assert passes[-1] == (1, 9)
    for i in (2, 4, 9):
        assert largest_difference(alone(conv_batchnorm, trials[i], data).model, population.state(i)) < 1e-9


def test_groups_of_several_architectures_and_batch_sizes_come_back_in_the_order_of_the_trials():
    data = blobs(n=48)
    trials = [
        {"lr": 0.05, "epochs": 3, "seed": k, "batch_size": size, "model_options": {"widths": (6, width, 3)}}
        for k, (width, size) in enumerate([(8, 16), (5, 16), (8, 16), (8, 12), (5, 16)])
    ]
    population = train_population("mlp", trials, data, dtype=torch.float64)
    assert population.groups == [[0, 2], [1, 4], [3]]
    for i, trial in enumerate(trials):
        assert largest_difference(alone("mlp", trial, data).model, population.state(i)) < 1e-9
    assert len(population) == len(list(population)) == 5
    assert [model.fc1.out_features for model in population] == [8, 5, 8, 8, 5]
    assert population[-1].fc1.out_features == 5
    assert len(population[1:3]) == 2
    frame, history = population.frame(), population.history
    assert frame["trial"].tolist() == [0, 1, 2, 3, 4]
    assert frame["max_epochs"].tolist() == [3] * 5
    assert history.groupby("trial").size().tolist() == [3] * 5
    assert list(history.columns[:3]) == ["trial", "name", "epoch"]
    assert "5 networks in 3 groups" in repr(population)
    assert "<table" in population._repr_html_()
    with pytest.raises(IndexError, match="population of 5"):
        population.model(5)


def dropping(trial):
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


class Forked(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(x) if bool(x.sum() > 0) else self.fc(-x)


class Mixing(nn.Module):
    """Subtracts the mean over the batch: nothing in the trace is unknown, yet samples are not treated apart."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(x - x.mean(0))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.scale = nn.Linear(6, 3), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.fc(x) * self.scale


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (dropping, "draws masks"),
        (lambda trial: Forked(), "looks at values"),
        (lambda trial: Mixing(), "other outputs"),
        (lambda trial: Scaled(), "scale outside of a layer"),
        (lambda trial: nn.Sequential(nn.Linear(6, 3), nn.PReLU()), "1.weight outside of a layer"),
    ],
)
def test_networks_that_cannot_be_stacked_are_trained_one_by_one_and_said_to_be(make, reason, tmp_path):
    data, test = blobs(n=40), blobs(n=20, seed=1)
    trials = [{"lr": 0.05, "epochs": 3, "seed": seed, "name": f"n{seed}"} for seed in range(2)]
    seen = []
    with pytest.warns(UserWarning, match=reason) as said:
        population = train_population(
            make,
            trials,
            data,
            test=test,
            dtype=torch.float64,
            checkpoint=tmp_path,
            after_epoch=lambda epoch, view: seen.append((epoch, *view.active)),
        )
    assert "trials n0, n1 are trained one by one" in str(said[0].message)
    assert population.groups == [[0], [1]]
    assert seen == [(epoch, i) for i in (0, 1) for epoch in (1, 2, 3)]
    for i, trial in enumerate(trials):
        expected = alone(make, trial, data, test)
        assert largest_difference(expected.model, population.state(i)) == 0
        same_history(expected.history, population.histories[i], rtol=0)
    with pytest.raises(InputError, match=reason):
        train_population(make, trials, data, dtype=torch.float64, stacked=True)
    with pytest.raises(InputError, match="only stacks have noise"):
        train_population(make, [{**trials[0], "noise_temperature": 0.1}], data, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asked = train_population(make, trials, data, dtype=torch.float64, stacked=False)
    assert largest_difference(asked.model(0), population.state(0)) == 0


def test_mistakes_are_named_before_anything_is_trained(tmp_path):
    data = blobs()
    widths = {"model_options": {"widths": (6, 4, 3)}}
    cases = [
        (UnknownNameError, "learning_rate", "mlp", [{"learning_rate": 0.1, **widths}], data),
        (UnknownNameError, "known model", "lenet6", [{}], data),
        (InputError, "one per network", "mlp", [], data),
        (InputError, "one per network", "mlp", {"lr": 0.1}, data),
        (InputError, "dictionary", "mlp", [3], data),
        (InputError, "lr", "mlp", [{"lr": -1.0, **widths}], data),
        (InputError, "different name", "mlp", [{"name": "a", **widths}, {"name": "a", **widths}], data),
        (InputError, "share from 0 to 1", "mlp", [{"labels": {"random": 2.0}, **widths}], data),
        (UnknownNameError, "labels", "mlp", [{"labels": {"share": 0.2}, **widths}], data),
        (InputError, "train_size", "mlp", [{"train_size": 1000, **widths}], data),
        (InputError, "options of initialize", "mlp", [{"init_options": {"width": 2}, **widths}], data),
        (InputError, "noise_temperature", "mlp", [{"noise_temperature": -1, **widths}], data),
        (InputError, "sgd", "mlp", [{"noise_temperature": 1.0, "optimizer": "adam", **widths}], data),
        (InputError, "torch.nn.Module", lambda trial: 3, [{}], data),
        (InputError, "inputs that the model takes", "mlp", [{"model_options": {"widths": (5, 3)}}], data),
        (InputError, "classes 0 to 1", "mlp", [{"model_options": {"widths": (6, 2)}}], data),
        (InputError, r"\(x, y\)", "mlp", [widths], 5),
    ]
    for kind, words, build_from, trials, given in cases:
        with pytest.raises(kind, match=words):
            train_population(build_from, trials, given, dtype=torch.float64)
    with pytest.raises(InputError, match="stacked"):
        train_population("mlp", [widths], data, stacked="yes")
    with pytest.raises(InputError, match="pair of tensors"):
        train_population("mlp", [widths], data, pairs=lambda trial: 3)


def test_keys_of_ones_own_reach_the_build_function_and_the_frame():
    data = blobs()
    trials = [{"width": width, "epochs": 1, "seed": 5} for width in (4, 6)]
    received = []

    def make(trial):
        received.append(dict(trial))
        return nn.Sequential(nn.Linear(6, trial["width"]), nn.Linear(trial["width"], 3))

    torch.manual_seed(0)
    before = torch.get_rng_state()
    population = train_population(make, trials, data, dtype=torch.float64)
    assert torch.equal(torch.get_rng_state(), before)
    assert received[1] == {"width": 6, "epochs": 1, "seed": 5, "name": "1", "model_seed": 5}
    assert population.frame()["width"].tolist() == [4, 6]
    assert population.trials[0]["width"] == 4


def comparable(population):
    return [population.state(i) for i in range(len(population))], population.history.drop(columns="seconds")


def assert_same_bits(a, b):
    (states, history), (others, other_history) = comparable(a), comparable(b)
    for state, other in zip(states, others, strict=True):
        assert all(torch.equal(state[name], other[name]) for name in state)
    assert history.equals(other_history)


RESUMED = [
    {"lr": 0.05, "momentum": 0.9, "epochs": 6, "seed": 0},
    {"lr": 0.05, "epochs": 3, "seed": 1},
    {"lr": 0.02, "epochs": 6, "seed": 2, "labels": {"random": 0.5}, "noise_temperature": 1e-4},
    {"lr": 0.02, "momentum": 0.5, "epochs": 6, "seed": 3, "batch_size": 20},
    {"optimizer": "adam", "lr": 0.01, "epochs": 6, "seed": 4},
    {"optimizer": "adam", "lr": 0.02, "epochs": 4, "seed": 5},
]


@pytest.mark.parametrize("stop_at", [1, 3, 4, 8, 15, 17])
def test_resumed_populations_end_with_the_same_bits(tmp_path, stop_at):
    data, test = blobs(n=50, shape=(1, 6, 6)), blobs(n=30, shape=(1, 6, 6), seed=1)
    undisturbed = train_population(conv_batchnorm, RESUMED, data, test=test, dtype=torch.float64)
    calls = 0

    def kill(epoch, view):
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise RuntimeError("killed")

    settings = {"test": test, "dtype": torch.float64, "checkpoint": tmp_path}
    with pytest.raises(RuntimeError, match="killed"):
        train_population(conv_batchnorm, RESUMED, data, after_epoch=kill, **settings)
    first = train_population(conv_batchnorm, RESUMED, data, **settings)
    assert_same_bits(first, undisturbed)
    again = train_population(conv_batchnorm, RESUMED, data, after_epoch=kill, **settings)  # nothing left to train
    assert_same_bits(again, undisturbed)
    assert torch.equal(again.initial(2)["0.weight"], undisturbed.initial(2)["0.weight"])


def test_checkpoints_of_other_trials_or_data_are_refused(tmp_path):
    data = blobs(n=50, shape=(1, 6, 6))
    settings = {"dtype": torch.float64, "checkpoint": tmp_path, "stacked": True}
    trials = RESUMED[:3]
    train_population(conv_batchnorm, trials, data, **settings)
    changed = [trials[0], {**trials[1], "lr": 0.06}, trials[2]]
    with pytest.raises(InputError, match=r"lr 0\.05 there, 0\.06 here"):
        train_population(conv_batchnorm, changed, data, **settings)
    with pytest.raises(InputError, match="training data"):
        train_population(conv_batchnorm, trials, blobs(n=50, shape=(1, 6, 6), seed=3), **settings)
    with pytest.raises(InputError, match="3 there, 2 here"):
        train_population(conv_batchnorm, trials[:2], data, **settings)
    (tmp_path / "group-000.safetensors").write_bytes(b"not one")
    with pytest.raises(WeightsError, match="whole checkpoint"):
        train_population(conv_batchnorm, trials, data, **settings)


def test_control_c_leaves_every_trial_at_its_last_finished_epoch(tmp_path):
    data = blobs(n=50, shape=(1, 6, 6))
    reached = {}

    def stop(epoch, view):
        reached.update({i: view.state(i) for i in view.active})
        if epoch == 4:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted, match="goes on from the last checkpoint") as caught:
        train_population(conv_batchnorm, RESUMED, data, dtype=torch.float64, checkpoint=tmp_path, after_epoch=stop)
    result = caught.value.result
    assert result.frame()["stopped_by"].tolist() == ["interrupted", "epochs", *["interrupted"] * 4]
    assert result.frame()["epochs"].tolist() == [4, 3, 4, 0, 0, 0]
    for i in range(3):
        assert all(torch.equal(value, result.state(i)[name]) for name, value in reached[i].items())
    assert torch.equal(result.state(3)["0.weight"], result.initial(3)["0.weight"])
    rest = train_population(conv_batchnorm, RESUMED, data, dtype=torch.float64, checkpoint=tmp_path)
    assert_same_bits(rest, train_population(conv_batchnorm, RESUMED, data, dtype=torch.float64))


def test_control_c_within_an_epoch_undoes_that_epoch(monkeypatch):
    from flatscope.training.stack import Stack

    data, steps = blobs(n=50, shape=(1, 6, 6)), 0
    step = Stack._step

    def interrupted(self, turn, size):
        nonlocal steps
        steps += 1
        if steps == 10:
            raise KeyboardInterrupt
        step(self, turn, size)

    trials = [{"lr": 0.05, "epochs": 3, "batch_size": 8, "seed": seed} for seed in range(2)]
    monkeypatch.setattr(Stack, "_step", interrupted)
    with pytest.raises(Interrupted, match="nothing was saved") as caught:
        train_population(conv_batchnorm, trials, data, dtype=torch.float64)
    monkeypatch.undo()
    one = train_population(conv_batchnorm, [{**trial, "epochs": 1} for trial in trials], data, dtype=torch.float64)
    for i in range(2):
        assert largest_difference(one.model(i), caught.value.result.state(i)) == 0


KILLED = """
import os, signal, sys, torch
torch.set_num_threads(1)
from test_population import RESUMED, blobs, conv_batchnorm
from flatscope.training.population import train_population

def kill(epoch, view):
    if epoch == 5 and 4 in view.trials:  # the second group, of Adam
        os.kill(os.getpid(), signal.SIGKILL)

train_population(conv_batchnorm, RESUMED, blobs(n=50, shape=(1, 6, 6)), dtype=torch.float64,
                 checkpoint=sys.argv[1], after_epoch=kill)
"""


@pytest.mark.long
def test_a_killed_process_loses_nothing_that_it_had_saved(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    data = blobs(n=50, shape=(1, 6, 6))
    resumed = train_population(conv_batchnorm, RESUMED, data, dtype=torch.float64, checkpoint=tmp_path)
    assert_same_bits(resumed, train_population(conv_batchnorm, RESUMED, data, dtype=torch.float64))


def test_noise_has_the_variance_of_its_temperature_and_leaves_the_silent_trials_alone():
    """On a loss that is nearly flat, k steps of noise without momentum add up to variance k·2γT per weight."""
    x = torch.zeros(16, 40, dtype=torch.float64)
    y = torch.arange(16) % 3
    common = {"lr": 0.01, "batch_size": 4, "epochs": 5, "model_options": {"widths": (40, 200, 3)}}
    trials = [
        {"seed": 0, "noise_temperature": 0.3, **common},
        {"seed": 0, **common},
        {"seed": 1, "noise_temperature": 1.2, **common},
        {"seed": 2, "noise_temperature": 0.3, "model_seed": 0, **common},
        {"seed": 0, "momentum": 0.8, "noise_temperature": 0.3, **{**common, "epochs": 200}},
    ]
    population = train_population("mlp", trials, (x, y), dtype=torch.float64, stacked=True)
    assert largest_difference(alone("mlp", trials[1], (x, y)).model, population.state(1)) < 1e-9
    moved = [population.state(i)["fc1.weight"] - population.initial(i)["fc1.weight"] for i in range(5)]
    n = moved[0].numel()
    for i, temperature in ((0, 0.3), (2, 1.2), (3, 0.3)):  # inputs are zero: these weights have no gradient
        expected = 20 * 2 * 0.01 * temperature
        assert float(moved[i].var()) == pytest.approx(expected, rel=4 * math.sqrt(2 / n))
    # With momentum β the noise of one step, √(2γ(1−β)T), grows to 1/(1−β) of itself: diffusion 2γT/(1−β) per step.
    steps, beta = 800, 0.8
    reach = [(1 - beta**k) / (1 - beta) for k in range(1, steps + 1)]
    expected = 2 * 0.01 * (1 - beta) * 0.3 * sum(value**2 for value in reach)
    assert float(moved[4].var()) == pytest.approx(expected, rel=4 * math.sqrt(2 / n))
    correlation = float(torch.corrcoef(torch.stack([moved[0].flatten(), moved[3].flatten()]))[0, 1])
    assert abs(correlation) < 4 / math.sqrt(n)


def test_data_may_be_an_object_with_train_and_test():
    pair, held_out = blobs(), blobs(n=30, seed=1)
    trials = [{"epochs": 1, "model_options": {"widths": (6, 3)}}]
    first = train_population("mlp", trials, pair, test=held_out, dtype=torch.float64)
    second = train_population("mlp", trials, SimpleNamespace(train=pair, test=held_out), dtype=torch.float64)
    assert_same_bits(first, second)
    assert first.problem(0).test.n == 30


@pytest.mark.parametrize("name", ["wide_resnet", "small_inception", "small_alexnet", "plainnet18"])
def test_built_in_networks_stack(name):
    options = {"depth": 10, "widen": 1} if name == "wide_resnet" else {}
    StackedNetwork(build(name, input_shape=(1, 8, 8), classes=3, **options), torch.ones(2, 1, 8, 8))


def test_vgg_says_that_its_dropout_keeps_it_from_stacking():
    with pytest.raises(NotStackable, match="draws masks"):
        StackedNetwork(build("vgg", input_shape=(1, 8, 8), classes=3), torch.ones(2, 1, 8, 8))
    StackedNetwork(build("vgg", input_shape=(1, 8, 8), classes=3, dropout=0.0), torch.ones(2, 1, 8, 8))


def test_busy_steps_are_taken_trial_by_trial_with_the_same_result(monkeypatch):
    data, test = blobs(n=50, shape=(1, 6, 6)), blobs(n=30, shape=(1, 6, 6), seed=1)
    trials = [
        {"lr": 0.02 * (seed + 1), "momentum": 0.9, "batch_size": 8, "epochs": 3, "seed": seed} for seed in range(5)
    ]
    trials = [{**trial, "stop_gradient_norm": 1e-9, "augmentation": "crop-flip"} for trial in trials]
    runs = []
    for busy in (1e12, 0.0):  # all at once, one by one
        monkeypatch.setitem(stack.BUSY, "cpu", busy)
        runs.append(train_population(residual, trials, data, test=test, dtype=torch.float64, stacked=True))
    products = 36 * (4 * 9 + 4 * 4 * 9 + 4 * 2 * 9) + 6 * 5 + 5 * 3
    assert StackedNetwork(residual().double(), data[0]).products == products
    for i in range(5):
        assert largest_difference(runs[0].model(i), runs[1].state(i)) < 1e-9
        same_history(runs[0].histories[i], runs[1].histories[i])


def test_trials_of_one_precision_are_stacked():
    data = blobs(n=40, dtype=torch.float32)
    settings = {"lr": 0.1, "epochs": 3, "model_options": {"widths": (6, 16, 3)}}
    trials = [{**settings, "precision": precision} for precision in ("bf16", "float32", "bf16")]
    population = train_population("mlp", trials, data)
    assert population.groups == [[0, 2], [1]]
    frame = population.frame()
    assert frame["precision"].tolist() == ["bf16", "float32", "bf16"]
    assert frame["train_loss"][0] == frame["train_loss"][2] != frame["train_loss"][1]
    assert frame["train_loss"][0] == pytest.approx(frame["train_loss"][1], rel=0.1)
    assert all(value.dtype == torch.float32 for value in population.state(0).values())
    alone_too = train_population("mlp", trials[:1], data, stacked=False)
    assert alone_too.frame()["train_loss"][0] == pytest.approx(frame["train_loss"][0], rel=0.05)


def test_config_keys_cover_all_settings_of_plain_training():
    assert set(TrainConfig().to_dict()) == set(CONFIG_KEYS)


@cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu_every_trial_is_what_plain_training_gives(family, tmp_path):
    build_from, settings, shape = FAMILIES[family]
    data = blobs(n=50, shape=shape)
    common = {"batch_size": 8, "epochs": 8, **settings}
    trials = [
        {"lr": 0.02, "momentum": 0.9, "seed": 1, **common},
        {"lr": 0.01, "momentum": 0.5, "weight_decay": 0.01, "lr_steps": [[3, 0.1]], "seed": 2, **common},
        {"lr": 1e200, "seed": 3, **common},
        {"lr": 0.05, "seed": 3, **{**common, "epochs": 3}},
        {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.01, "seed": 4, **common},
    ]
    given = {"device": "cuda", "dtype": torch.float64, "stacked": True}
    population = train_population(build_from, trials, data, checkpoint=tmp_path, **given)
    assert population.frame()["diverged"][2] == alone(build_from, trials[2], data).diverged
    for i in (0, 1, 3, 4):
        expected = alone(build_from, trials[i], data)
        assert not population.frame()["diverged"][i]
        # A bias in front of a BatchNorm has no gradient but rounding, which Adam turns into steps of the full rate.
        drifts = (family, i) == ("residual", 4)
        adrift = ("layer_norm.bias", "vector_norm.running_mean") if drifts else ()
        assert largest_difference(expected.model, population.state(i), without=adrift) < 1e-8
        # Losses in eval mode see it too: the running mean follows that bias with a delay.
        seen = ("distance", "train_loss", "train_error", "test_loss", "test_error") if drifts else ()
        skipped = ("seconds", *seen)
        same_history(expected.history, population.histories[i], rtol=1e-8, skip=skipped)
    assert (
        largest_difference(
            population.model(0), train_population(build_from, trials, data, checkpoint=tmp_path, **given).state(0)
        )
        == 0
    )


@cuda
@pytest.mark.parametrize("family", ["lenet5", "all_conv", "conv_batchnorm"])
def test_on_a_gpu_what_is_not_finite_stays_in_its_trial(family):
    build_from, settings, shape = FAMILIES[family]
    data = blobs(n=64, shape=shape, dtype=torch.float32)
    common = {"batch_size": 8, "epochs": 1, "momentum": 0.9, **settings}
    runs = []
    for lr in (0.01, 1e38):  # the same number of trials, so that the same kernels run
        trials = [{"lr": lr if seed == 3 else 0.01, "seed": seed, **common} for seed in range(8)]
        runs.append(train_population(build_from, trials, data, device="cuda", stacked=True))
    assert runs[1].frame()["diverged"].tolist() == [seed == 3 for seed in range(8)]
    for i in (0, 1, 2, 4, 5, 6, 7):
        assert largest_difference(runs[0].model(i), runs[1].state(i)) < 1e-5


@cuda
def test_on_a_gpu_noise_is_drawn_anew_in_every_replay():
    x, y = torch.zeros(16, 40), torch.arange(16) % 3
    trials = [{"lr": 0.01, "batch_size": 4, "epochs": 5, "noise_temperature": 0.3, "seed": k} for k in range(2)]
    trials = [{**trial, "model_options": {"widths": (40, 200, 3)}} for trial in trials]
    population = train_population("mlp", trials, (x, y), device="cuda", stacked=True)
    moved = population.state(0)["fc1.weight"] - population.initial(0)["fc1.weight"]
    assert float(moved.var()) == pytest.approx(20 * 2 * 0.01 * 0.3, rel=4 * math.sqrt(2 / moved.numel()))
