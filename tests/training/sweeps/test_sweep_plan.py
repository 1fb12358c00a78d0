"""Sweeps from files, and the commands that run, resume, watch and export them."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from trial_work import completions, log_of

from flatscope.cli import main
from flatscope.errors import InputError
from flatscope.training.sweeps.configuration import Sweep
from flatscope.training.sweeps.store import Store

FILE = """
work = "trial_work:square_or_raise"
group_by = ["model.depth"]
group_size = 2

[base]
model = { name = "mlp", depth = 2 }
x = 1

[grid]
x = [5, 6, 7]
"model.depth" = [2, 3]
"""


def test_grid_trials_and_groups(tmp_path: Path) -> None:
    (tmp_path / "rates.toml").write_text(FILE)
    sweep = Sweep.from_file(tmp_path / "rates.toml")
    assert sweep.name == "rates"
    assert [(config["x"], config["model"]["depth"]) for config in sweep.configs()] == [
        (5, 2), (5, 3), (6, 2), (6, 3), (7, 2), (7, 3),
    ]  # fmt: skip
    assert sweep.configs()[0] == {"model": {"name": "mlp", "depth": 2}, "x": 5}
    assert [[config["x"] for config in unit] for unit in sweep.units()] == [[5, 6], [7], [5, 6], [7]]
    assert Sweep.from_dict(sweep.to_dict()) == sweep
    assert sweep.base["x"] == 1  # what the trials change is a copy

    nested = {"name": "a", "base": {"train": {"lr": 1, "seed": 0}}, "trials": [{"train": {"lr": 2}}, {"train.seed": 3}]}
    assert Sweep.from_dict(nested).configs() == [{"train": {"lr": 2, "seed": 0}}, {"train": {"lr": 1, "seed": 3}}]
    both = Sweep.from_dict({**nested, "grid": {"train": {"epochs": [1, 2]}, "new.place": [0]}})
    assert len(both.configs()) == 4
    assert both.configs()[3] == {"train": {"lr": 1, "seed": 3, "epochs": 2}, "new": {"place": 0}}
    assert [len(unit) for unit in both.units()] == [1, 1, 1, 1]
    twice = Sweep.from_dict({"name": "a", "grid": {"x": [1, 1.0, 2]}})
    assert [config["x"] for config in twice.configs()] == [1.0, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gird": {"x": [1]}}, "grid"),
        ({"name": ""}, "a name"),
        ({"grid": {"x": 1}}, "list with at least one value"),
        ({"grid": {"x": []}}, "list with at least one value"),
        ({"grid": {}}, "neither"),
        ({"trials": {"x": 1}}, "tables"),
        ({"trials": [1]}, "tables"),
        ({"base": 3}, "a table"),
        ({"group_by": "x"}, "list of names"),
        ({"group_by": ["y"]}, "group_by"),
        ({"group_size": 0}, "at least 1"),
        ({"base": {"x": 1}, "grid": {"x.y": [1]}}, "put 'y' into"),
    ],
)
def test_mistakes_in_a_plan(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Sweep.from_dict({"name": "a", "grid": {"x": [1]}, **change}).units()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[base.data]", "[data]", "one of name, group_by, group_size, work, base, grid, trials"),
        ("epochs = 5", "epochs = 5\nlrr = 1", "'lrr'. Did you mean lr"),
        ("train.lr", "train.lrr", "'lrr'. Did you mean lr"),
        ("[0.05, 0.1, 0.2]", "[0.05, 0.1, -0.2]", "trial 8, "),
        ('"l2_path_norm"', '"l2_path_nrom"', "l2_path_norm"),
        ('name = "mlp"', 'name = "mpl"', "Did you mean mlp"),
        ('name = "mlp"', 'name = "absent.py:net"', "no such file"),
        ("widths =", "width =", "Did you mean widths"),
        ('"digits"', '"digit"', "Did you mean digits"),
        ("test_size = 200", "test_size = 400", "a number of samples from 1 to 360"),
        ("flatten = true", "flat = true", "one of name, root, train_size"),
        ("[base.train]", "[base.trian]\n[base.train]", "one of data, labels, model"),
        ("[base.train]", '[base.init]\nscheme = "xavierr"\n[base.train]', "xavier"),
        ("[base.train]", "[base.labels]\nconfusion = 3\nsize = 4\n[base.train]", "true_size"),
        ("[base.train]", "[base.measure_options.l2_path_norm]\nq = 2\n[base.train]", "option of l2_path_norm"),
    ],
)
def test_a_slip_in_a_sweep_is_one_error_before_any_trial(
    old: str,
    new: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (Path(__file__).parents[3] / "examples" / "sweep.toml").read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "slip.toml").write_text(text.replace(old, new), encoding="utf-8")
    code, out, err = call(monkeypatch, capsys, "run", tmp_path / "slip.toml", "--store", tmp_path / "store")
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())
    assert str(tmp_path / "slip.toml") in err
    assert err.count("Error") == 1
    assert not (tmp_path / "store").exists()


def test_files_that_are_no_plan(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        Sweep.from_file(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("[grid\n")
    with pytest.raises(InputError, match="expected TOML"):
        Sweep.from_file(tmp_path / "bad.toml")


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(sys, "argv", ["flatscope", "sweep", *map(str, words)])
    code: Any = 0
    try:
        main()
    except SystemExit as leaving:
        code = leaving.code
    said = capsys.readouterr()
    return code or 0, said.out, said.err


def numbers(out: str) -> list[list[str]]:
    """Cells of the printed table, without its header."""
    rows = [line.split() for line in out.splitlines() if line.strip()]
    return rows[2:]  # below the titles and their line


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file, folder = tmp_path / "rates.toml", tmp_path / "store"
    store = Store(folder)
    file.write_text(FILE.replace("[5, 6, 7]", "[5, 2, 7]"))  # x = 2 is refused by the work function

    code, out, err = call(monkeypatch, capsys, "status", "--store", folder)
    assert (code, out) == (2, "")
    assert "a store with a sweep" in err

    code, out, err = call(monkeypatch, capsys, "run", file, "--store", folder, "--workers", 0)
    assert code == 1
    assert "two is not allowed" in err
    assert "Traceback" not in err
    code, out, err = call(monkeypatch, capsys, "status", "--store", folder)
    assert code == 1
    assert numbers(out) == [["rates", "6", "4", "0", "2", "0"]]
    assert err.count("two is not allowed") == 2

    monkeypatch.setattr("trial_work.square_or_raise", __import__("trial_work").square)  # the mistake is mended
    with store.claim({"model": {"name": "mlp", "depth": 2}, "x": 2}) as mine:
        assert mine
        _, out, _ = call(monkeypatch, capsys, "status", "--store", folder)
        assert numbers(out) == [["rates", "6", "4", "1", "1", "0"]]
    file.unlink()  # the store remembers the plan
    code, out, err = call(monkeypatch, capsys, "resume", "--store", folder, "--workers", 0)
    assert code == 0
    assert "4 of 6 trials are done already" in err
    assert numbers(out) == [["rates", "6", "6"]]
    assert len(completions(store)) == len(set(completions(store))) == 6
    assert numbers(call(monkeypatch, capsys, "status", "--store", folder)[1]) == [["rates", "6", "6", "0", "0", "0"]]

    log = log_of(store).read_text()
    assert call(monkeypatch, capsys, "resume", "--store", folder)[0] == 0  # finished: not even a worker is started
    assert log_of(store).read_text() == log

    out_file = tmp_path / "all.parquet"
    assert call(monkeypatch, capsys, "export", out_file, "--store", folder)[0] == 0
    pd.testing.assert_frame_equal(pd.read_parquet(out_file), store.frame(), check_dtype=False)
    nowhere = tmp_path / "all.csv", "--store", tmp_path / "nowhere"
    code, _, err = call(monkeypatch, capsys, "export", *nowhere)
    assert code != 0
    assert "expected a store with finished trials" in err
    assert not nowhere[0].exists()
    assert not nowhere[2].exists()
    code, _, err = call(monkeypatch, capsys, "export", tmp_path / "all.xls", "--store", folder)
    assert code == 2
    assert ".parquet" in err

    (tmp_path / "other.toml").write_text('work = "trial_work:square"\n[grid]\nx = [1]\n')
    code, _, _ = call(monkeypatch, capsys, "run", tmp_path / "other.toml", "--store", folder, "--workers", 0)
    assert code == 0
    code, _, err = call(monkeypatch, capsys, "resume", "--store", folder)
    assert code == 2
    assert "other, rates" in err
    assert call(monkeypatch, capsys, "resume", "--store", folder, "--name", "rates")[0] == 0
    code, _, err = call(monkeypatch, capsys, "resume", "--store", folder, "--name", "rate")
    assert code == 2
    assert "Did you mean rates" in err
    (tmp_path / "other.toml").write_text('work = "trial_work:square"\n[grid]\nx = [3]\n')
    _, _, err = call(monkeypatch, capsys, "run", tmp_path / "other.toml", "--store", folder, "--workers", 0)
    assert "1 trial of the 'other' that was run here before is no longer" in err
    code, _, err = call(monkeypatch, capsys, "run", tmp_path / "other.toml", "--store", folder, "--engine", "rey")
    assert code == 2
    assert "ray" in err
