"""Networks of different training seeds are measured on the samples that they were trained on."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from flatscope.cli.app import app

RUNNER = CliRunner()
DATA = ["--model", "mlp", "--model-option", "widths=64,32,10", "--data", "digits", "--train-size", "60"]


def test_the_training_seed_chooses_no_samples(tmp_path: Path) -> None:
    for seed in ("0", "3"):
        rule = ["--lr", "0.1", "--momentum", "0.9", "--epochs", "300", "--stop-zero-error"]
        command = ["train", *DATA, *rule, "--seed", seed, "--out", str(tmp_path / seed)]
        assert RUNNER.invoke(app, command, catch_exceptions=False).exit_code == 0
        shown = RUNNER.invoke(
            app, ["measure", *DATA, "--weights", str(tmp_path / seed), "-m", "functional_margin", "--json"]
        )
        rows = json.loads(shown.stdout[shown.stdout.index("{") :])["rows"]
        assert len(rows) == 60
        # Trained to zero error: every margin is positive on its own samples, and not on others.
        assert min(row["value"] for row in rows) > 0


def test_another_draw_is_asked_for_by_name(tmp_path: Path) -> None:
    command = ["train", *DATA, "--epochs", "1", "--data-seed", "5", "--out", str(tmp_path / "run")]
    assert RUNNER.invoke(app, command, catch_exceptions=False).exit_code == 0
    same = [*DATA, "--weights", str(tmp_path / "run"), "-m", "gradient_norm", "--json"]
    first, second = (
        RUNNER.invoke(app, ["measure", *same, *more], catch_exceptions=False).stdout
        for more in ([], ["--data-seed", "5"])
    )
    values = [json.loads(text[text.index("{") :])["rows"][0]["value"] for text in (first, second)]
    assert values[0] != values[1]


def test_a_network_trained_on_all_samples_is_given_the_same_inputs_when_some_are_drawn(tmp_path: Path) -> None:
    whole = [word for word in DATA if word not in ("--train-size", "60")]
    assert RUNNER.invoke(app, ["train", *whole, "--epochs", "2", "--out", str(tmp_path)]).exit_code == 0

    def margins(*words: str) -> list[float]:
        command = [
            "measure",
            *words,
            "--weights",
            str(tmp_path),
            "-m",
            "functional_margin",
            "--dtype",
            "float64",
            "--json",
        ]
        shown = RUNNER.invoke(app, command, catch_exceptions=False).stdout
        return [round(row["value"], 9) for row in json.loads(shown[shown.index("{") :])["rows"]]

    known = set(margins(*whole))
    assert len(known) > 1000
    assert set(margins(*DATA)) <= known
    assert not set(margins(*DATA, "--standardize-by", "drawn")) & known
