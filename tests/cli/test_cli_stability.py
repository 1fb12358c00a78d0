"""`flatscope stability`: from a run that kept weights, from checkpoints by name, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_cli import Run
from test_cli import run as run  # a fixture

import flatscope as fs

NETWORK = ["--model", "mlp", "--data", "digits", "--flatten", "--train-size", "60"]
NETWORK += ["--model-option", "widths=64,8,10", "--model-option", "activation=tanh"]
SETTINGS = ["--loss", "mse", "--lr", "0.02", "--batch-size", "20", "--epochs", "6", "--lr-step", "4:0.5"]


@pytest.fixture
def trained(run: Run, tmp_path: Path) -> Path:
    done = run("train", *NETWORK, *SETTINGS, "--keep-every", "2", "--out", tmp_path / "run")
    assert done.code == 0, done.err
    return tmp_path / "run"


def test_a_run_that_kept_weights_is_read_with_its_settings(run: Run, trained: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "s.json", tmp_path / "s.html"
    done = run("stability", *NETWORK, "--weights", trained, "--out", out, "--report", page)
    assert done.code == 0, done.err
    found = fs.Stability.load(out)
    assert done.out.startswith(found.summary()[0])
    assert found.rows["step"].tolist() == [0, 6, 12, 18]
    assert found.rows["lr"].tolist() == [0.02, 0.02, 0.02, 0.01]
    assert (found.batch, found.meta["loss"]) == (20, "mse")
    assert found.summary()[0] in page.read_text()
    history = (trained / "history.csv").read_text().splitlines()
    loss = dict(zip(history[0].split(","), history[-1].split(","), strict=True))["train_loss"]
    assert found.rows["loss"].iloc[-1] == pytest.approx(float(loss), rel=1e-4)

    other = [*NETWORK]
    other[other.index("60")] = "50"
    file = ["--weights", str(trained / "weights.safetensors")]
    for words, given in {
        "expected --lr": [*NETWORK, *file],
        "Leave out --lr": [*NETWORK, "--weights", trained, "--lr", "0.1"],
        "trained on": [*other, "--weights", trained],
        "the loss of the run": [*NETWORK, "--weights", trained, "--loss", "bce"],
        "rising --step": [*NETWORK, *file, "--lr", "0.1", "--step", "1", "--step", "2"],
        "checkpoint/state.json": [*NETWORK, "--weights", tmp_path],
        "a number above 0": [*NETWORK, *file, "--lr", "0"],
    }.items():
        refused = run("stability", *given)
        assert refused.code == 2, given
        assert words in " ".join(refused.err.split())


def test_records_before_an_interrupt_are_kept(
    run: Run, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, out = fs.StabilityRecorder.record, tmp_path / "s.json"

    def stops(recorder: fs.StabilityRecorder, model: object, step: int, **rest: object) -> None:
        if step == 12:
            raise KeyboardInterrupt
        record(recorder, model, step, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(fs.StabilityRecorder, "record", stops)
    done = run("stability", *NETWORK, "--weights", trained, "--out", out)
    assert done.code == 130, done.err
    assert "2 of 4 checkpoints are done" in done.err
    assert not out.exists()
    assert fs.Stability.load(tmp_path / "s-unfinished.json").rows["step"].tolist() == [0, 6]


def test_checkpoints_by_name_take_the_settings_of_the_command_line(run: Run, trained: Path, tmp_path: Path) -> None:
    weights = sorted((trained / "kept").glob("*.safetensors"))[:2]
    each = [word for path in weights for word in ("--weights", path)]
    rule = ["--lr", "0.02", "--momentum", "0.9", "--loss", "mse", "--noise-every", "0"]
    done = run("stability", *NETWORK, *each, *rule, "--out", tmp_path / "s.parquet")
    assert done.code == 0, done.err
    assert "η·λ_max/(1 + β)" in done.out
    found = fs.Stability.load(tmp_path / "s.parquet")
    assert found.rows["step"].tolist() == [2, 4]  # the numbers in their names
    assert found.rows["threshold"].tolist() == pytest.approx([190.0, 190.0])


def test_a_run_of_adam_is_refused(run: Run, tmp_path: Path) -> None:
    assert run("train", *NETWORK, "--optimizer", "adam", "--keep-every", "5", "--out", tmp_path / "run").code == 0
    done = run("stability", *NETWORK, "--weights", tmp_path / "run")
    assert done.code != 0
    assert "adam" in done.err
