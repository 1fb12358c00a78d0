"""`flatscope train --population`: one file describes many networks; each ends in a folder of its own."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from test_cli import Run
from test_cli import run as run  # a fixture

from flatscope.cli.run_train import expand_training_grid
from flatscope.errors import InputError, UnknownNameError
from flatscope.inputs.loading import load
from flatscope.training.checkpoint import TrainConfig
from flatscope.training.loop import train
from flatscope.training.models import build

ROOT = Path(__file__).parents[2]
FILE = """
[data]
name = "digits"
train_size = 60
test_size = 20
flatten = true

[model]
name = "mlp"
widths = [64, 8, 10]

[train]
lr = 0.05
epochs = {epochs}
batch_size = 16

[grid]
seed = [0, 1]
lr = [0.1, 0.2]
labels.random = [0.0, 1.0]
"""


def test_a_grid_is_trained_saved_and_resumed(run: Run, tmp_path: Path) -> None:
    path, out = tmp_path / "many.toml", tmp_path / "out"
    path.write_text(FILE.format(epochs=2))
    outcome = run("train", "--population", path, "--out", out)
    assert outcome.code == 0, outcome.err
    assert "8 networks" in outcome.out
    frame = pd.read_parquet(out / "frame.parquet")
    assert frame[["seed", "lr", "labels.random"]].drop_duplicates().shape == (8, 3)
    assert frame["name"].tolist() == [str(k) for k in range(8)]
    assert frame["stopped_by"].eq("epochs").all()
    data = load("digits", train_size=60, test_size=20, flatten=True, standardize_by="all")
    chosen = frame[(frame["seed"] == 1) & (frame["lr"] == 0.2) & (frame["labels.random"] == 0.0)].iloc[0]
    model = build("mlp", seed=1, widths=(64, 8, 10))
    expected = train(model, data, TrainConfig(lr=0.2, epochs=2, batch_size=16, seed=1))
    saved = load_file(out / "trials" / chosen["name"] / "weights.safetensors")
    assert all(torch.allclose(saved[name], value, atol=1e-5) for name, value in model.state_dict().items())
    start = load_file(out / "trials" / chosen["name"] / "initial.safetensors")
    fresh = build("mlp", seed=1, widths=(64, 8, 10)).state_dict()
    assert all(torch.equal(start[name], value) for name, value in fresh.items())
    history = pd.read_csv(out / "trials" / chosen["name"] / "history.csv")
    assert history["train_loss"].tolist() == pytest.approx(expected.history["train_loss"].tolist(), rel=1e-4)
    before = pd.read_csv(out / "frame.csv")
    again = run("train", "--population", path, "--out", out)  # finished: nothing is trained again, not even the clock
    assert again.code == 0
    assert pd.read_csv(out / "frame.csv").equals(before)
    path.write_text(FILE.format(epochs=3))
    other = run("train", "--population", path, "--out", out)
    assert other.code == 2
    assert "epochs 2 there, 3 here" in other.err


def test_a_factory_and_listed_trials(run: Run, tmp_path: Path) -> None:
    path, out = tmp_path / "many.toml", tmp_path / "out"
    factory = ROOT / "examples" / "my_model.py"
    path.write_text(
        f'[data]\nname = "digits"\ntrain_size = 40\n[model]\nname = "{factory}:build"\n[train]\nepochs = 1\n'
        '[[trials]]\nname = "slow"\nlr = 0.01\n[[trials]]\nname = "wild"\nlr = 1e30\n'
    )
    outcome = run("train", "--population", path, "--out", out)
    assert outcome.code == 0, outcome.err
    assert "diverged: wild" in outcome.err
    assert (out / "trials" / "slow" / "weights.safetensors").exists()


def test_the_example_runs_and_the_model_may_be_written_as_in_a_sweep(run: Run, tmp_path: Path) -> None:
    example, out = ROOT / "examples" / "population.toml", tmp_path / "example"
    outcome = run("train", "--population", example, "--out", out)
    assert outcome.code == 0, outcome.err
    frame = pd.read_csv(out / "frame.csv")
    assert len(frame) == 8
    assert frame["error_gap"].tolist() == pytest.approx((frame["test_error"] - frame["train_error"]).tolist())
    path, starts = tmp_path / "many.toml", []
    beside = FILE.format(epochs=1)
    nested = beside.replace("widths = [64, 8, 10]", "options = { widths = [64, 8, 10] }\nseed = 1")
    for name, text in (("beside", beside), ("nested", nested)):
        path.write_text(text)
        assert run("train", "--population", path, "--out", tmp_path / name).code == 0
        starts.append([load_file(tmp_path / name / "trials" / f"{k}" / "initial.safetensors") for k in range(8)])
    first, same = starts[0][-1], starts[1]  # seed 1 is the last of the grid, and model.seed of all
    assert all(torch.equal(first[name], start[name]) for start in same for name in first)
    path.write_text(nested.replace("seed = 1", "bias = false"))
    mixed = run("train", "--population", path, "--out", tmp_path / "mixed")
    assert mixed.code == 2
    assert "bias beside them" in mixed.err


def test_what_the_file_does_not_say_well_is_named(run: Run, tmp_path: Path) -> None:
    path, out = tmp_path / "many.toml", tmp_path / "out"
    good = FILE.format(epochs=1)
    cases = [
        ("[data", "TOML"),
        (good.replace("[grid]", "[greed]"), "one of data, model, train, trials, grid, got 'greed'"),
        (good.replace('name = "mlp"', ""), "[model] with a name"),
        (good.replace("train_size = 60", "train_sise = 60"), "one of name, train_size"),
        (good.replace("batch_size", "batch_sise"), "batch_sise"),
        (good.replace("[0, 1]", "0"), "list with at least one value"),
        (good[: good.index("[grid]")], "[[trials]] or [grid]"),
        (good + '\n[[trials]]\nname = "../up"', "names a folder"),
    ]
    for text, words in cases:
        path.write_text(text)
        outcome = run("train", "--population", path, "--out", out)
        assert outcome.code == 2, text
        assert words in outcome.err
    path.write_text(good)
    assert run("train", "--population", tmp_path / "none.toml", "--out", out).code == 2
    beside = run("train", "--population", path, "--out", out, "--lr", "0.3")
    assert beside.code == 2
    assert "--lr on the command line" in beside.err
    alone = run("train", "--data", "digits", "--out", out)
    assert alone.code == 2
    assert "--model" in alone.err
    assert not out.exists()


def test_own_settings_of_a_trial_come_before_the_grid_and_the_grid_before_the_defaults() -> None:
    content = {
        "train": {"lr": 1.0, "epochs": 5, "labels": {"random": 0.5, "seed": 3}},
        "grid": {"lr": [2.0, 3.0], "labels": {"random": [0.1]}},
        "trials": [{"name": "a"}, {"name": "b", "lr": 4.0}],
    }
    trials = expand_training_grid(content, "here")
    assert [trial["lr"] for trial in trials] == [2.0, 3.0, 4.0, 4.0]
    assert [trial["name"] for trial in trials] == ["a-0", "a-1", "b-2", "b-3"]
    assert trials[0]["labels"] == {"random": 0.1, "seed": 3}
    with pytest.raises(InputError, match="tables"):
        expand_training_grid({"trials": 3}, "here")
    with pytest.raises(UnknownNameError, match="rate"):
        expand_training_grid({"trials": [{"rate": 3}]}, "here")
