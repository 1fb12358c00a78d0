"""Training: the same bits as a plain torch loop, stop rules, resume after kills, files that cannot be trusted."""

import copy
import dataclasses
import json
import math
import os
import pickle
import signal
import subprocess
import sys
from types import SimpleNamespace

import pandas as pd
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional

from flatscope.errors import InputError, Interrupted, UnknownNameError, WeightsError
from flatscope.inputs.weight_files import load_weights, read_weights, save_weights
from flatscope.training import gpu_steps
from flatscope.training.checkpoint import TrainConfig, epoch_order, learning_rate, stream_seed
from flatscope.training.evaluation import evaluate
from flatscope.training.initialization import initialize
from flatscope.training.loop import crop_and_flip, train
from flatscope.training.models import build, mlp

torch.set_num_threads(1)


def blobs(n=60, classes=3, shape=(6,), seed=0, dtype=torch.float32):
    """Separable classes."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    centres = 3 * torch.randn(classes, *shape, generator=generator, dtype=dtype)
    return centres[y] + torch.randn(n, *shape, generator=generator, dtype=dtype), y


def small(seed=0, dtype=torch.float32):
    return initialize(mlp((6, 8, 3)).to(dtype), "torch", seed)


def noisy(seed=0):
    """Everything that carries state or chance: convolution, BatchNorm, dropout."""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.4), nn.Flatten(), nn.Linear(4 * 16, 3)
    )
    return initialize(model, "torch", seed)


def same_bits(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def stops_at(model, call, action):
    """Run `action` in the middle of training, at the given call of the model in train mode."""
    calls = 0

    def hook(module, _):
        nonlocal calls
        calls += module.training
        if module.training and calls == call:
            action()

    return model.register_forward_pre_hook(hook)


def without_seconds(result):
    return result.history.drop(columns="seconds")


RULES = {"sgd": (torch.optim.SGD, {"momentum": 0.9}), "adam": (torch.optim.Adam, {})}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_loop_takes_the_steps_of_a_plain_torch_loop(loss, rule):
    x, y = blobs(n=50, dtype=torch.float64)
    kind, own = RULES[rule]
    settings = {"weight_decay": 1e-3, "batch_size": 16, "epochs": 4, "lr_steps": ((2, 0.1),), "loss": loss, "seed": 7}
    config = TrainConfig(lr=0.05, optimizer=rule, **own, **settings)
    trained = train(small(dtype=torch.float64), (x, y), config).model

    model = small(dtype=torch.float64)
    optimizer = kind(model.parameters(), lr=0.05, weight_decay=1e-3, **own)
    for epoch in range(4):
        optimizer.param_groups[0]["lr"] = 0.05 if epoch < 2 else 0.05 * 0.1
        order = epoch_order(50, 7, epoch)
        for batch in order.split(16):
            out = model(x[batch])
            if loss == "mse":
                value = ((out - torch.eye(3, dtype=torch.float64)[y[batch]]) ** 2).sum(1).mean()
            else:
                value = functional.cross_entropy(out, y[batch])
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    assert same_bits(trained, model)


def test_order_is_a_permutation_that_seed_and_epoch_decide():
    orders = [tuple(epoch_order(40, seed, epoch).tolist()) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert all(sorted(order) == list(range(40)) for order in orders)
    assert len(set(orders)) == 6
    assert orders[1] == tuple(epoch_order(40, 0, 1).tolist())
    seeds = {stream_seed(s, e, name) for s in (0, 1) for e in (0, 1) for name in ("order", "dropout", "augmentation")}
    assert len(seeds) == 12


def test_without_shuffling_every_epoch_takes_the_order_of_the_data():
    x, y = blobs(n=50, dtype=torch.float64)
    config = TrainConfig(lr=0.05, batch_size=16, epochs=3, shuffle=False)
    trained = train(small(dtype=torch.float64), (x, y), config).model
    model = small(dtype=torch.float64)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        for batch in torch.arange(50).split(16):
            sgd.zero_grad()
            functional.cross_entropy(model(x[batch]), y[batch]).backward()
            sgd.step()
    assert same_bits(trained, model)
    assert TrainConfig.from_dict(config.to_dict()) == config


def test_global_random_state_is_neither_read_nor_moved():
    data = blobs(shape=(1, 6, 6))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = train(noisy(), data, TrainConfig(epochs=2, augmentation="crop-flip")).model
    assert not torch.equal(torch.get_rng_state(), before)  # building `noisy` draws; training must not
    torch.manual_seed(2)
    model = noisy()
    before = torch.get_rng_state()
    two = train(model, data, TrainConfig(epochs=2, augmentation="crop-flip")).model
    assert torch.equal(torch.get_rng_state(), before)
    assert same_bits(one, two)


def test_history_is_what_a_second_look_finds():
    data, test = blobs(), blobs(seed=1)
    start = small()
    result = train(small(), (data, test), TrainConfig(lr=0.1, epochs=6, evaluate_every=4, lr_decay=0.5))
    history = result.history
    assert history["epoch"].tolist() == [4, 6]  # every fourth, and the last
    assert history["lr"].tolist() == pytest.approx([0.1 * 0.5**3, 0.1 * 0.5**5])
    last = history.iloc[-1]
    with torch.no_grad():
        loss = functional.cross_entropy(result.model(data[0]), data[1]).item()
        error = (result.model(test[0]).argmax(1) != test[1]).float().mean().item()
    assert last["train_loss"] == pytest.approx(loss, rel=1e-6)
    assert last["test_error"] == pytest.approx(error, rel=1e-6)
    pairs = zip(result.model.parameters(), start.parameters(), strict=True)
    distance = torch.cat([(a - b).detach().flatten() for a, b in pairs]).norm().item()
    assert last["distance"] == pytest.approx(distance, rel=1e-5)
    assert history["gradient_norm"].isna().all()
    assert (result.stopped_by, result.epochs, result.diverged) == ("epochs", 6, False)
    assert not result.model.training
    assert all(p.grad is None for p in result.model.parameters())


def test_data_may_come_in_three_forms():
    pair, held_out = blobs(), blobs(seed=1)
    config = TrainConfig(epochs=1)
    results = [
        train(small(), pair, config, test=held_out),
        train(small(), (pair, held_out), config),
        train(small(), SimpleNamespace(train=pair, test=held_out), config),
    ]
    assert all(without_seconds(r).equals(without_seconds(results[0])) for r in results)
    assert train(small(), SimpleNamespace(train=pair, test=None), config).history["test_loss"].isna().all()


@pytest.mark.parametrize(
    ("rule", "stopped_by"),
    [({"stop_loss": 0.05}, "loss"), ({"stop_zero_error": True}, "zero_error"), ({"stop_gradient_norm": 0.02}, None)],
)
def test_stop_rules_end_the_run_at_the_first_epoch_that_fulfils_them(rule, stopped_by):
    result = train(small(), blobs(), TrainConfig(lr=0.1, momentum=0.9, epochs=200, batch_size=8, **rule))
    rows = result.history
    column = {"loss": "train_loss", "zero_error": "train_error"}.get(stopped_by, "gradient_norm")
    limit = next(iter(rule.values())) if stopped_by != "zero_error" else 1e-12
    assert result.stopped_by == (stopped_by or "gradient_norm")
    assert result.epochs < 200
    assert rows[column].iloc[-1] < limit
    assert (rows[column].iloc[:-1] >= limit).all()


def test_gradient_norm_is_that_of_the_whole_training_set_in_eval_mode():
    x, y = blobs(n=1100, shape=(1, 6, 6))
    result = train(noisy(), (x, y), TrainConfig(epochs=1, stop_gradient_norm=1e-9))
    model = result.model
    gradient = torch.autograd.grad(functional.cross_entropy(model(x), y), list(model.parameters()))
    expected = torch.cat([g.flatten() for g in gradient]).norm().item()
    assert result.history["gradient_norm"].iloc[-1] == pytest.approx(expected, rel=1e-4)


def test_learning_rate_steps_and_decay():
    config = TrainConfig(lr=2.0, lr_steps=((1, 0.5), (3, 0.1)), lr_decay=0.5)
    rates = [learning_rate(config, epoch) for epoch in range(4)]
    assert rates == pytest.approx([2.0, 0.5, 0.25, 2.0 * 0.125 * 0.05])


@pytest.mark.parametrize("batch_size", [60, 8])
def test_divergence_is_recorded_and_not_fatal(tmp_path, batch_size):
    """One huge step leaves finite weights and an overflowing loss; several leave weights that are not finite."""
    config = TrainConfig(lr=1e25, epochs=5, loss="mse", batch_size=batch_size)
    result = train(small(), blobs(), config, checkpoint=tmp_path)
    assert (result.diverged, result.stopped_by, result.epochs) == (True, "diverged", 1)
    assert not result.history["train_loss"].map(math.isfinite).any()
    again = train(small(), blobs(), config, checkpoint=tmp_path)
    assert again.diverged
    assert without_seconds(again).equals(without_seconds(result))
    json.loads((tmp_path / "state.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.mark.parametrize("make", [lambda: small(), lambda: noisy()])
def test_precision_changes_the_steps_and_not_what_is_kept(make, tmp_path):
    x, y = blobs(shape=(1, 6, 6)) if isinstance(make()[0], nn.Conv2d) else blobs()
    runs = {}
    for precision in ("float32", "tf32", "bf16"):
        config = TrainConfig(lr=0.05, momentum=0.9, epochs=4, batch_size=16, precision=precision)
        runs[precision] = train(make(), (x, y), config, checkpoint=tmp_path / precision)
        assert all(p.dtype == torch.float32 for p in runs[precision].model.parameters())
    assert same_bits(runs["float32"].model, runs["tf32"].model)  # there is none on a CPU
    assert not same_bits(runs["float32"].model, runs["bf16"].model)
    losses = [run.history["train_loss"].iloc[-1] for run in runs.values()]
    assert losses[2] == pytest.approx(losses[0], rel=0.2)
    saved = safetensors.torch.load_file(tmp_path / "bf16" / "weights.safetensors")
    assert {value.dtype for value in saved.values()} <= {torch.float32, torch.int64}
    with pytest.raises(InputError, match="precision 'float32' there, 'bf16' here"):
        train(make(), (x, y), config, checkpoint=tmp_path / "float32")
    with pytest.raises(InputError, match="float32 weights"):
        train(make().double(), (x.double(), y), TrainConfig(precision="bf16"))


class Own(nn.Sequential):
    """A module of the user's, whose forward pass may do anything."""


def test_only_what_is_the_same_in_every_step_becomes_a_graph():
    x, model = torch.ones(2, 1, 6, 6), noisy()
    before, state = copy.deepcopy(model), torch.get_rng_state()
    assert gpu_steps.step_is_the_same_every_time(model, x)
    assert same_bits(model, before)
    assert torch.equal(state, torch.get_rng_state())
    assert gpu_steps.step_is_the_same_every_time(build("vgg", input_shape=(1, 8, 8), classes=3), torch.ones(2, 1, 8, 8))
    assert not gpu_steps.step_is_the_same_every_time(Own(*noisy()), x)
    model[1].momentum = None  # averages over all batches, whose number it has to look at
    assert not gpu_steps.step_is_the_same_every_time(model, x)
    hooked = noisy()
    hooked[0].register_forward_hook(lambda *_: None)
    assert not gpu_steps.step_is_the_same_every_time(hooked, x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(
    ("name", "dtype", "precision", "epochs", "rtol"),
    [
        ("vgg", torch.float64, "float32", 4, 1e-9),
        ("small_alexnet", torch.float32, "float32", 4, 1e-4),
        # In these, weights that differ by 1e-7 have losses that differ by a fifth after three epochs, in the loop too.
        # A graph may take another kernel than the loop. TF32 has three bits more than bf16: an eighth of its room.
        ("vgg", torch.float32, "tf32", 1, 6e-3),
        ("vgg", torch.float32, "bf16", 1, 5e-2),
    ],
)
def test_on_a_gpu_a_graph_takes_the_steps_of_the_loop(name, dtype, precision, epochs, rtol, monkeypatch, tmp_path):
    """Dropout, BatchNorm, momentum, changing rates and a short last batch; interrupted and resumed in one of them."""
    x, y = blobs(n=70, shape=(3, 16, 16), dtype=dtype)
    config = TrainConfig(lr=0.02, momentum=0.9, weight_decay=1e-3, lr_decay=0.8, batch_size=16, epochs=4)
    config = dataclasses.replace(config, precision=precision, augmentation="crop-flip")

    def run(**settings):
        model = build(name, input_shape=(3, 16, 16), classes=3, seed=1).to("cuda", dtype)
        return train(model, (x, y), dataclasses.replace(config, **settings), checkpoint=tmp_path)

    run(epochs=2)
    by_graphs = run()
    assert by_graphs.resumed_from == 2
    assert all(p.is_contiguous() for p in by_graphs.model.parameters())
    for file in tmp_path.iterdir():
        file.unlink()
    monkeypatch.setattr(gpu_steps, "STEADY_PACKAGES", ())
    found, expected = (result.history[["train_loss", "distance"]][:epochs] for result in (by_graphs, run()))
    pd.testing.assert_frame_equal(found, expected, rtol=rtol)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_a_long_training_in_bf16_is_compiled_to_the_same_steps(monkeypatch):
    x, y = blobs(n=70, shape=(3, 16, 16))
    config = TrainConfig(lr=0.02, momentum=0.9, batch_size=16, epochs=2, precision="bf16")
    compiled = []
    monkeypatch.setattr(gpu_steps, "COMPILE_AFTER", len(x))  # from the second epoch on
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *given, **more: compiled.append(1) or original(*given, **more))

    def run(samples_to_come):
        monkeypatch.setattr(gpu_steps, "COMPILE_FOR", samples_to_come)
        return train(build("plainnet18", classes=3, seed=1, input_shape=(3, 16, 16)).cuda(), (x, y), config).history

    found, expected = (run(few)[["train_loss", "distance"]] for few in (0, 10**9))
    assert compiled == [1]
    pd.testing.assert_frame_equal(found, expected, rtol=5e-2)


@pytest.mark.parametrize(
    ("precision", "epoch", "expected"),
    [("bf16", 20, True), ("bf16", 19, False), ("bf16", 121, False), ("tf32", 20, False)],
)
def test_only_long_trainings_in_bf16_without_dropout_are_compiled(precision, epoch, expected, monkeypatch):
    monkeypatch.setattr(gpu_steps.importlib.util, "find_spec", lambda name: name)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    assert gpu_steps.is_worth_compiling(plain, precision, 50_000, epoch, 200) is expected
    dropping = nn.Sequential(plain, nn.Dropout())
    assert not gpu_steps.is_worth_compiling(dropping, precision, 50_000, epoch, 200)


def test_regression_on_real_targets():
    x, _ = blobs(n=40)
    y = x[:, 0]  # one output, targets without a second axis: must not broadcast to 40 × 40
    model = initialize(mlp((6, 1), bias=False), "torch", seed=0)
    result = train(model, (x, y), TrainConfig(lr=0.01, epochs=2000, loss="mse", stop_loss=1e-6))
    assert result.stopped_by == "loss"
    assert result.history["train_error"].isna().all()
    assert evaluate(result.model, x, y, "mse")[0] < 1e-6


def test_crop_and_flip_shifts_and_mirrors():
    image = torch.arange(12.0).reshape(1, 1, 3, 4) + 1
    centre, no, yes = torch.tensor([[4, 4]]), torch.tensor([False]), torch.tensor([True])
    assert torch.equal(crop_and_flip(image, centre, no), image)
    assert torch.equal(crop_and_flip(image, centre, yes), image.flip(3))
    moved = crop_and_flip(image, torch.tensor([[5, 2]]), no)[0, 0]
    assert moved.tolist() == [[0, 0, 5, 6], [0, 0, 9, 10], [0, 0, 0, 0]]
    many = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert crop_and_flip(many, torch.full((5, 2), 8), torch.ones(5, dtype=torch.bool)).shape == many.shape


CONFIG = TrainConfig(
    lr=0.05, momentum=0.9, weight_decay=1e-4, batch_size=16, epochs=6, augmentation="crop-flip", seed=3
)


@pytest.mark.parametrize("rule", ["sgd", "adam"])
@pytest.mark.parametrize("call", [2, 9, 24])
def test_resume_after_ctrl_c_is_bit_identical(tmp_path, call, rule):
    """Four steps an epoch: the interrupt comes in epoch 1, 3 or 6."""
    data = blobs(shape=(1, 6, 6)), blobs(shape=(1, 6, 6), seed=1)
    config = CONFIG if rule == "sgd" else dataclasses.replace(CONFIG, optimizer=rule, momentum=0.0)
    whole = train(noisy(), data, config)
    finished = (call - 1) // 4
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        model = noisy()
        stops_at(model, call, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(Interrupted, match="goes on from the last checkpoint") as caught:
            train(model, data, config, checkpoint=tmp_path)
    finally:
        signal.signal(signal.SIGINT, previous)
    result = caught.value.result
    assert (result.stopped_by, result.epochs, len(result.history)) == ("interrupted", finished, finished)
    short = dataclasses.replace(config, epochs=max(finished, 1))
    assert same_bits(model, train(noisy(), data, short).model if finished else noisy())

    resumed = train(noisy(seed=99), data, config, checkpoint=tmp_path)  # other weights: overwritten by the checkpoint
    if not finished:
        return  # nothing had been saved: a fresh start from the weights passed in
    assert resumed.resumed_from == finished
    assert same_bits(resumed.model, whole.model)
    assert without_seconds(resumed).equals(without_seconds(whole))


def test_interrupt_without_a_folder_says_that_nothing_was_saved():
    model = small()
    stops_at(model, 3, lambda: signal.raise_signal(signal.SIGINT))
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt, match="nothing was saved"):
            train(model, blobs(), TrainConfig(batch_size=30))
    finally:
        signal.signal(signal.SIGINT, previous)


CHILD = """
import os, time
import torch
torch.set_num_threads(1)
import test_loop
from flatscope.inputs import weight_files
from flatscope.training.loop import train

def wait():
    print("now", flush=True)
    time.sleep(120)

epochs_saved = 0
def saved(epoch, model):
    global epochs_saved
    epochs_saved = epoch

real_fsync = os.fsync
def fsync(descriptor):
    if {moment!r} == "while saving" and epochs_saved == 3:
        wait()
    real_fsync(descriptor)

weight_files.os.fsync = fsync
model = test_loop.noisy()
if {moment!r} == "in an epoch":
    test_loop.stops_at(model, 15, wait)
data = test_loop.blobs(shape=(1, 6, 6)), test_loop.blobs(shape=(1, 6, 6), seed=1)
train(model, data, test_loop.CONFIG, checkpoint={folder!r}, after_epoch=saved)
"""


@pytest.mark.long
@pytest.mark.parametrize("moment", ["in an epoch", "while saving"])
def test_resume_after_sigkill_is_bit_identical(tmp_path, moment):
    """Killed in the middle of epoch 4, or while its checkpoint is being written: epoch 3 is there whole."""
    script = CHILD.format(moment=moment, folder=str(tmp_path))
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline().strip() == "now"
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert child.returncode == -signal.SIGKILL
    data = blobs(shape=(1, 6, 6)), blobs(shape=(1, 6, 6), seed=1)
    resumed = train(noisy(seed=99), data, CONFIG, checkpoint=tmp_path)
    whole = train(noisy(), data, CONFIG)
    assert resumed.resumed_from == 3
    assert same_bits(resumed.model, whole.model)
    assert without_seconds(resumed).equals(without_seconds(whole))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.json", "weights.safetensors"]


def test_a_finished_run_returns_at_once_and_more_epochs_may_be_asked_for(tmp_path):
    data = blobs()
    first = train(small(), data, TrainConfig(epochs=2), checkpoint=tmp_path)
    model = small(seed=5)
    stops_at(model, 1, lambda: pytest.fail("trained again"))
    again = train(model, data, TrainConfig(epochs=2), checkpoint=tmp_path)
    assert same_bits(nn.Sequential(*again.model), nn.Sequential(*first.model))
    assert again.history.equals(first.history)
    longer = train(small(seed=5), data, TrainConfig(epochs=4), checkpoint=tmp_path)
    assert same_bits(longer.model, train(small(), data, TrainConfig(epochs=4)).model)


def test_other_settings_data_or_networks_are_not_resumed(tmp_path):
    train(small(), blobs(), TrainConfig(epochs=2), checkpoint=tmp_path)
    before = (tmp_path / "weights.safetensors").read_bytes()
    with pytest.raises(InputError, match=r"lr 0\.01 there, 0\.5 here; momentum 0\.0 there, 0\.9 here"):
        train(small(), blobs(), TrainConfig(epochs=2, lr=0.5, momentum=0.9), checkpoint=tmp_path)
    with pytest.raises(InputError, match="epochs 2 there, 1 here"):
        train(small(), blobs(), TrainConfig(epochs=1), checkpoint=tmp_path)
    with pytest.raises(InputError, match="training data"):
        train(small(), blobs(seed=4), TrainConfig(epochs=2), checkpoint=tmp_path)
    with pytest.raises(WeightsError, match="fc3"):
        train(mlp((6, 8, 8, 3)), blobs(), TrainConfig(epochs=2), checkpoint=tmp_path)
    assert (tmp_path / "weights.safetensors").read_bytes() == before


def test_torn_and_foreign_checkpoints_are_named_and_kept(tmp_path):
    train(small(), blobs(), TrainConfig(epochs=1), checkpoint=tmp_path)
    file = tmp_path / "weights.safetensors"
    whole = file.read_bytes()
    for damaged in (
        whole[: len(whole) // 2],
        b"",
        b"not a file of weights",
        safetensors.torch.save({"a": torch.ones(1)}),
    ):
        file.write_bytes(damaged)
        with pytest.raises(WeightsError, match=r"weights\.safetensors.*start over"):
            train(small(), blobs(), TrainConfig(epochs=1), checkpoint=tmp_path)
        assert file.read_bytes() == damaged


def test_unwritable_checkpoint_folder_is_found_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    model = small()
    stops_at(model, 1, lambda: pytest.fail("training began"))
    with pytest.raises(InputError, match="written to"):
        train(model, blobs(), TrainConfig(), checkpoint=tmp_path / "file" / "below")


def test_config_goes_through_json_and_refuses_what_it_does_not_know():
    config = TrainConfig(lr=0.1, lr_steps=((80, 0.1), (120, 0.1)), stop_loss=1e-4)
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(UnknownNameError, match="momentum"):
        TrainConfig.from_dict({"momentun": 0.9})


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": 0},
        {"lr": "0.1"},
        {"lr": float("nan")},
        {"momentum": -0.1},
        {"batch_size": 0},
        {"batch_size": 2.5},
        {"epochs": True},
        {"seed": -1},
        {"lr_steps": ((1, 0.5, 2),)},
        {"lr_steps": 3},
        {"lr_steps": ((0.5, 0.5),)},
        {"stop_loss": 0.0},
        {"stop_zero_error": 1},
        {"evaluate_every": 0},
        {"loss": "hinge"},
        {"augmentation": "cutout"},
        {"optimizer": "adamw"},
        {"optimizer": "adam", "momentum": 0.9},
    ],
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(InputError):
        TrainConfig(**wrong)


def test_data_that_do_not_fit_are_refused_before_training():
    x, y = blobs()
    refused = [
        (small(), (x, y[:-1]), {}, "as many targets"),
        (small(), (x[:0], y[:0]), {}, "at least one"),
        (small(), (x[:, :5], y), {}, "inputs that the model takes"),
        (small(), (x.double(), y), {}, "inputs that the model takes"),
        (small(), (x / 0, y), {}, "finite"),
        (small(), (x, y + 1), {}, "classes 0 to 2"),
        (small(), (x, y.float()), {}, "class number"),
        (small(), (x, x), {"loss": "mse"}, "target values"),
        (small(), (x, x[:, :3]), {"loss": "mse", "stop_zero_error": True}, "classes"),
        (small(), (x, y), {"augmentation": "crop-flip"}, "images"),
        (small(), x, {}, "Tensor"),
        (small(), ((x, y), x), {}, "test set"),
        (nn.Flatten(), (x, y), {}, "trainable"),
        (nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), (x, y), {"batch_size": 59}, "last batch"),
    ]
    for model, data, options, message in refused:
        with pytest.raises(InputError, match=message):
            train(model, data, TrainConfig(**options))


class Tied(nn.Module):
    """Two names for one tensor."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "w.pth"])
def test_weights_go_to_a_file_and_back(tmp_path, name):
    model = noisy(seed=1)
    save_weights(model, tmp_path / name)
    assert same_bits(load_weights(noisy(seed=2), tmp_path / name), model)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    tied = Tied()
    save_weights(tied, tmp_path / name)
    assert same_bits(load_weights(Tied(), tmp_path / name), tied)


def test_weights_of_a_training_run_can_be_loaded_from_its_folder(tmp_path):
    model = train(small(), blobs(), TrainConfig(epochs=1, momentum=0.9), checkpoint=tmp_path).model
    assert same_bits(load_weights(small(seed=3), tmp_path), model)
    assert same_bits(load_weights(small(seed=3), tmp_path / "weights.safetensors"), model)


def test_files_of_other_programs_can_be_loaded(tmp_path):
    model = small(seed=1)
    wrapped = {"state_dict": {f"module.{name}": t for name, t in model.state_dict().items()}, "epoch": 3}
    torch.save(wrapped, tmp_path / "wrapped.bin")
    assert same_bits(load_weights(small(), tmp_path / "wrapped.bin"), model)
    torch.save(model.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.warns(UserWarning, match="no checksum protects"):
        assert same_bits(load_weights(small(), tmp_path / "old.pt"), model)
    tied = Tied()
    safetensors.torch.save_file({"first.weight": tied.first.weight.detach()}, tmp_path / "tied.safetensors")
    assert same_bits(load_weights(Tied(), tmp_path / "tied.safetensors"), tied)
    torn = {"first.weight": torch.zeros(4, 4), "second.weight": torch.ones(4, 4)}
    safetensors.torch.save_file(torn, tmp_path / "torn.safetensors")
    with pytest.raises(WeightsError, match="shares"):
        load_weights(Tied(), tmp_path / "torn.safetensors")


def test_weights_that_do_not_fit_are_named_and_nothing_changes(tmp_path):
    save_weights(mlp((6, 9, 3)), tmp_path / "shape.safetensors")
    save_weights(mlp((6, 8, 3, 3)), tmp_path / "deeper.safetensors")
    save_weights(mlp((6, 8, 3), bias=False), tmp_path / "fewer.safetensors")
    model, untouched = small(), small()
    for name, message in [
        ("shape", r"of another shape fc1\.weight \(9, 6\) for \(8, 6\)"),
        ("deeper", r"not in the model fc3\.bias, fc3\.weight"),
        ("fewer", r"missing fc1\.bias, fc2\.bias"),
    ]:
        with pytest.raises(WeightsError, match=message):
            load_weights(model, tmp_path / f"{name}.safetensors")
    assert same_bits(model, untouched)


class Malicious:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def test_a_pickle_that_wants_to_run_code_is_refused_and_nothing_runs(tmp_path):
    trace = tmp_path / "trace"
    torch.save({"fc1.weight": Malicious(trace)}, tmp_path / "zip.pt")
    torch.save({"fc1.weight": Malicious(trace)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps(Malicious(trace)))
    torch.save(small(), tmp_path / "model.pt")
    # a name that promises safetensors changes nothing
    (tmp_path / "renamed.safetensors").write_bytes((tmp_path / "zip.pt").read_bytes())
    for name in ("zip.pt", "old.pt", "plain.pkl", "model.pt", "renamed.safetensors"):
        with pytest.raises(WeightsError, match="nothing in it was run"):
            load_weights(small(), tmp_path / name)
    assert not trace.exists()
    pickle.loads((tmp_path / "plain.pkl").read_bytes())
    assert trace.exists()  # the file does bite where it is trusted


def test_damaged_and_missing_weight_files_are_named(tmp_path):
    save_weights(small(), tmp_path / "w.pt")
    save_weights(small(), tmp_path / "w.safetensors")
    for name in ("w.pt", "w.safetensors"):
        whole = (tmp_path / name).read_bytes()
        for size in (0, 1, 5, 60, len(whole) - 40):
            (tmp_path / name).write_bytes(whole[:size])
            with pytest.raises(WeightsError, match=name):
                load_weights(small(), tmp_path / name)
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"fc1.weight": "text"}, tmp_path / "text.pt")
    for name in ("list.pt", "text.pt", "nowhere.pt", "."):
        with pytest.raises(WeightsError):
            read_weights(tmp_path / name)
    assert save_weights(small(), tmp_path / "new" / "folder.pt").is_file()
    with pytest.raises(InputError, match="a place that can be written to"):
        save_weights(small(), tmp_path / "list.pt" / "below-a-file.pt")


def test_lenet_learns_shapes_of_images():
    """End to end on a network of the papers."""
    x, y = blobs(n=48, shape=(1, 28, 28))
    model = initialize(build("lenet5", input_shape=(1, 28, 28), classes=3), "xavier_normal", seed=1)
    result = train(model, (x, y), TrainConfig(lr=0.02, momentum=0.9, batch_size=16, epochs=40, stop_zero_error=True))
    assert result.stopped_by == "zero_error"
