"""The command line as its users meet it: what goes to stdout, what to stderr, exit codes, and nothing lost."""

from __future__ import annotations

import inspect
import json
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from rich.text import Text
from safetensors.torch import load_file, save_file
from test_public_sets import put
from test_public_sets import tiny_cifar as tiny_cifar  # a fixture

import flatscope.cli.run_demo as demonstration
from flatscope import Table, __version__
from flatscope.cli import commands, main
from flatscope.cli.commands import command_names, load_command
from flatscope.inputs.factories import find_factory
from flatscope.inputs.loading import load
from flatscope.registry import declarations, select
from flatscope.training.checkpoint import TrainConfig

ROOT = Path(__file__).parents[2]
MODEL = f"{ROOT / 'examples' / 'my_model.py'}:build"
SMALL = ["--model", MODEL, "--data", "digits", "--train-size", "60", "--test-size", "20"]


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process, as the installed script does."""
    for name in ("FORCE_COLOR", "FLATSCOPE_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # put back what main replaces

    def call(*words: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["flatscope", *map(str, words)])
        capfd.readouterr()
        code: object = 0
        try:
            main()
        except SystemExit as leaving:
            code = leaving.code or 0
        out, err = capfd.readouterr()
        assert isinstance(code, int)
        return Outcome(code, out, err)

    return call


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("weights") / "mine.safetensors"
    save_file(find_factory(MODEL)().state_dict(), path)
    return path


@pytest.mark.parametrize(
    "command", [[], ["demo"], ["measure"], ["train"], ["measures"], ["data"], ["data", "list"], ["data", "fetch"]]
)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_command_has_help(run: Run, command: list[str], flag: str) -> None:
    outcome = run(*command, flag)
    assert outcome.code == 0
    assert "Usage: " in outcome.out
    assert outcome.err == ""


def test_version_and_no_command(run: Run) -> None:
    assert run("--version").out == f"flatscope {__version__}\n"
    assert run().code == 2


def test_list_of_measures_names_all(run: Run) -> None:
    shown = run("measures", "--all").out
    assert all(name in shown for name in [*declarations(), *declarations("bound")])
    screen = run("measures").out
    assert len(screen.splitlines()) <= 30
    short = list(declarations())
    assert [name for name in [*short, *declarations("bound")] if name not in screen] == []


def test_measures_and_bounds_are_explained(run: Run) -> None:
    outcome = run("measures", "margin", "parameter_*")
    titles = [line for line in outcome.out.splitlines() if line and not line.startswith(" ")]
    assert titles == ["margin", "parameter_count", "parameter_counting"]
    for words in ("Neyshabur et al. 2017", "epsilon = 0.05", "Usual values", "Unchanged by", "loss in [0, 1]"):
        assert words in outcome.out
    unknown = run("measures", "margn")
    assert (unknown.code, unknown.out) == (2, "")
    assert "Did you mean margin" in unknown.err


def test_json_is_all_that_stdout_carries(run: Run, weights: Path) -> None:
    outcome = run("measure", *SMALL, "--weights", weights, "-m", "margin", "-m", "rho", "--json")
    assert outcome.code == 0
    table = Table.from_json(outcome.out)  # raises if anything else was printed
    assert table.names == ["margin", "rho"]
    assert list(table.layer("rho")) == ["conv", "fc1", "fc2"]
    assert table.meta["data"] == "digits"
    assert table.meta["command"].startswith("flatscope measure --model ")
    assert "60 training samples, standardised: loss " in outcome.err
    assert "error " in outcome.err


def test_bounds_come_beside_the_measures(run: Run, weights: Path, tmp_path: Path) -> None:
    common = ["measure", *SMALL, "--weights", weights, "-m", "margin", "--bounds"]
    quick = [entry.name for entry in select(None, "bound")]
    both = json.loads(run(*common, "--json", "--out", tmp_path / "t.json").out)
    assert {name: Table.from_json(json.dumps(part)).names for name, part in both.items()} == {
        "measures": ["margin"],
        "bounds": quick,
    }
    assert Table.load(tmp_path / "t-bounds.json").names == quick
    assert "vacuous" in run(*common).out


PICTURES = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}  # what their files begin with


@pytest.mark.parametrize("ending", Table.ENDINGS)
def test_table_goes_to_a_file_of_any_kind(run: Run, weights: Path, tmp_path: Path, ending: str) -> None:
    path = tmp_path / "new" / f"t{ending}"
    outcome = run("measure", *SMALL, "--weights", weights, "-m", "parameter_count", "--out", path)
    assert outcome.code == 0
    assert "parameter_count" in outcome.out
    assert "4538" in outcome.out
    if ending in (".json", ".parquet"):
        assert Table.load(path)["parameter_count"] == 4538
    elif ending in PICTURES:
        assert path.read_bytes().startswith(PICTURES[ending])
    else:
        assert "parameter_count" in path.read_text(encoding="utf-8")
    beside = [path.with_name(f"{path.name}.b2sum")] if ending == ".csv" else []
    assert sorted(path.parent.iterdir()) == [path, *beside]


def test_report_is_written(run: Run, weights: Path, tmp_path: Path) -> None:
    outcome = run("measure", *SMALL, "--weights", weights, "-m", "margin", "-m", "rho", "--report", tmp_path / "r.html")
    assert outcome.code == 0
    assert f"report written to {tmp_path / 'r.html'}" in outcome.err
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "flatscope measure --model" in page


def test_options_data_and_precision_are_taken(run: Run, weights: Path) -> None:
    common = ["measure", *SMALL, "--weights", weights, "-m", "margin", "--json"]
    plain = Table.from_json(run(*common).out)
    other = Table.from_json(run(*common, "--option", "margin.epsilon=0.5", "--dtype", "float64").out)
    assert other["margin"] > plain["margin"]
    assert other.to_frame().loc[0, ["options", "dtype"]].tolist() == ['{"epsilon": 0.5}', "float64"]
    raw = run(*common, "--no-standardize", "--seed", "1", "--batch-size", "7")
    assert "divided by 16: loss" in raw.err
    assert Table.from_json(raw.out)["margin"] != plain["margin"]


def test_built_in_models_take_options(run: Run) -> None:
    common = ["measure", "--model", "mlp", "--data", "digits", "--train-size", "30", "-m", "parameter_count"]
    outcome = run(*common, "--model-option", "widths=64,5,10", "--flatten")
    assert outcome.code == 0
    assert str(64 * 5 + 5 + 50 + 10) in outcome.out
    assert "no --weights were given" in outcome.err
    assert "--model-option" in run(*common).err


def test_modules_are_found_from_where_one_stands(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from torch import nn\ndef build(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))"
    (tmp_path / "at_hand.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    common = ["--data", "digits", "--train-size", "30", "-m", "parameter_count"]
    assert "650" in run("measure", "--model", "at_hand:build", *common).out
    assert str(tmp_path) not in sys.path
    del sys.modules["at_hand"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["measure", "--model", "nope", "--data", "digits"], "'nope'"),
        (["measure", *SMALL, "-m", "margn"], "Did you mean margin"),
        (["measure", *SMALL, "--weights", "none.pt"], "none.pt: expected a readable weight file"),
        (["measure", *SMALL, "--option", "margin"], "--option: expected measure.option=value"),
        (["measure", *SMALL, "--option", "margin.epsilon=x"], "margin, epsilon: expected a number"),
        (["measure", *SMALL, "--dtype", "float8"], "dtype"),
        (["measure", *SMALL, "--device", "cdua"], "device"),
        (["measure", *SMALL, "--loss", "hinge"], "loss"),
        (["measure", *SMALL, "--out", "t.xlsx"], "ending in .parquet"),
        (["measure", *SMALL, "--report", "t.pdf"], "ending in .html"),
        (["measure", *SMALL, "--train-size", "0"], "number of samples from 1"),
        (["measure", "--model", MODEL, "--data", "minst"], "mnist"),
        (["train", *SMALL, "--out", "run", "--lr-step", "3"], "--lr-step: expected epoch:factor"),
        (["train", *SMALL, "--out", "run", "--epochs", "0"], "epochs"),
        (["train", *SMALL, "--out", "run", "--device", "cdua"], "device"),
        (["data", "verify", "minst"], "mnist"),
        (["measure", "--data", "digits"], "--model"),
        (["measure", *SMALL, "--unknown"], "--unknown"),
        (["measur"], "measure"),
    ],
)
def test_wrong_usage_is_2_without_a_traceback(
    run: Run, words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run(*words)
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback_wherever_it_stands(run: Run) -> None:
    for words in (["--debug", "measures", "margn"], ["measures", "margn", "--debug"]):
        outcome = run(*words)
        assert outcome.code == 2
        assert "Traceback" in outcome.err
        assert "UnknownNameError" in outcome.err


def test_a_failed_run_is_1(run: Run, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def build(): raise RuntimeError('out of luck')")
    outcome = run("measure", "--model", f"{tmp_path / 'broken.py'}:build", "--data", "digits")
    assert (outcome.code, outcome.out) == (1, "")
    assert f"RuntimeError: out of luck, in {tmp_path / 'broken.py'} line 1 (--debug shows more)" in outcome.err
    diverged = run("train", *SMALL, "--out", tmp_path / "run", "--lr", "1e20", "--epochs", "3")
    assert diverged.code == 1
    assert "stopped by diverged" in diverged.out


def test_places_are_checked_before_the_work(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatscope.cli.sources.load", lambda *_, **__: pytest.fail("data were read first"))
    monkeypatch.setattr(demonstration, "load", lambda *_, **__: pytest.fail("data were read first"))
    (tmp_path / "file").touch()
    for words in (
        ["measure", *SMALL, "--out", tmp_path / "file" / "t.json"],
        ["measure", *SMALL, "--report", tmp_path / "file" / "r.html"],
        ["demo", "--out", tmp_path / "file"],
    ):
        outcome = run(*words)
        assert outcome.code == 2
        assert "is not a folder" in outcome.err


def test_train_resume_measure(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    common = ["train", *SMALL, "--out", folder, "--lr", "0.1"]
    first = run(*common, "--epochs", "2")
    assert (first.code, "stopped by epochs" in first.out) == (0, True)
    names = ["checkpoint", "history.csv", "history.csv.b2sum", "initial.safetensors", "weights.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == names
    initial = (folder / "initial.safetensors").read_bytes()

    again = run(*common, "--epochs", "4")
    assert (again.code, "resumed after epoch 2" in again.err) == (0, True)
    assert pd.read_csv(folder / "history.csv")["epoch"].tolist() == [1, 2, 3, 4]
    trained = load_file(folder / "weights.safetensors")

    refused = run(*common, "--epochs", "4", "--seed", "5")
    assert (refused.code, "seed 0 there, 5 here" in refused.err) == (2, True)
    assert (folder / "initial.safetensors").read_bytes() == initial  # a refused command changes nothing
    assert all(torch.equal(value, trained[name]) for name, value in load_file(folder / "weights.safetensors").items())

    whole = run("train", *SMALL, "--out", tmp_path / "whole", "--lr", "0.1", "--epochs", "4")
    assert whole.code == 0
    assert (tmp_path / "whole" / "initial.safetensors").read_bytes() == initial  # the factory draws by the seed
    assert (tmp_path / "whole" / "weights.safetensors").read_bytes() == (folder / "weights.safetensors").read_bytes()

    for place in (folder / "weights.safetensors", folder / "checkpoint"):
        words = ["--weights", place, "--initial", folder / "initial.safetensors", "-m", "margin", "--json"]
        measured = run("measure", *SMALL, *words)
        assert measured.code == 0
        last = pd.read_csv(folder / "history.csv").iloc[-1]
        assert f"loss {last['train_loss']:.4g}, error {100 * last['train_error']:.2f} %" in measured.err


def test_a_run_folder_brings_its_weights_before_training(run: Run, tmp_path: Path) -> None:
    folder, name = tmp_path / "run", "distance_from_initialization"
    assert run("train", *SMALL, "--epochs", "1", "--out", folder).code == 0
    alone = run("measure", *SMALL, "--weights", folder / "weights.safetensors", "-m", name)
    assert "on the command line --initial" in " ".join(alone.out.split())
    given = ["--initial", folder / "initial.safetensors"]
    named = run("measure", *SMALL, "--weights", folder / "weights.safetensors", *given, "-m", name, "--json")
    found = run("measure", *SMALL, "--weights", folder, "-m", name, "--json")
    assert found.code == named.code == 0
    assert Table.from_json(found.out)[name] == Table.from_json(named.out)[name] > 0
    assert f"before training are those in {folder / 'initial.safetensors'}" in found.err
    assert "before training are" not in named.err
    start = run("measure", *SMALL, "--weights", folder, "--initial", folder, "-m", name, "--json")
    assert Table.from_json(start.out)[name] == 0  # what is named comes before what is found
    for words in (["--weights", folder], ["--weights", folder / "weights.safetensors", *given]):
        audited = run("audit", *SMALL, *words, "-m", name, "--by", "layer", "--trials", "1")
        assert audited.code == 0, audited.err
        assert "moved" in audited.out


@pytest.mark.filterwarnings("always:the model's outputs")
def test_what_hardly_fits_together_is_said(run: Run, weights: Path, tmp_path: Path) -> None:
    untrained = run("measure", *SMALL, "--weights", weights, "-m", "margin")
    assert "are these the inputs" in " ".join(untrained.out.split())
    assert "are these the inputs" not in run("measure", *SMALL, "-m", "margin").out  # no weights: no wonder
    assert run("train", *SMALL, "--out", tmp_path / "run", "--lr", "0.1", "--epochs", "40").code == 0
    trained = run("measure", *SMALL, "--weights", tmp_path / "run", "-m", "margin")
    assert "are these the inputs" not in trained.out
    (tmp_path / "soft.py").write_text(
        "from torch import nn\ndef build(): return nn.Sequential(nn.Linear(64, 10), nn.Softmax(1))"
    )
    soft = run("measure", "--model", f"{tmp_path / 'soft.py'}:build", "--data", "digits", "--flatten", "-m", "margin")
    assert soft.err.count("cross_entropy takes logits") == 1
    assert soft.out.count("Caution: the model's outputs are probabilities") == 1


def test_a_factory_called_with_the_wrong_name_says_what_it_takes(run: Run, tmp_path: Path) -> None:
    refused = run("measure", *SMALL, "--model-option", "width=3")
    assert refused.code == 2
    assert ", got an unexpected keyword argument 'width'. Its parameters are ()" in refused.err


def test_data_sets_are_listed_and_verified(run: Run, tmp_path: Path, tiny_cifar: dict[str, bytes]) -> None:
    put(tmp_path / "cifar-10", tiny_cifar)
    listed = run("data", "list", "--data-root", tmp_path)
    assert listed.code == 0
    words = [line.split() for line in listed.out.splitlines()]
    status = {row[0]: row[1] for row in words if row and row[0] in ("digits", "mnist", "fashion-mnist", "cifar10")}
    assert status == {"digits": "embedded", "mnist": "absent", "fashion-mnist": "absent", "cifar10": "complete"}
    assert str(tmp_path) in listed.err

    good = run("data", "verify", "cifar10", "--data-root", tmp_path)
    assert (good.code, good.out.count(" ok ")) == (0, 6)
    damaged = tmp_path / "cifar-10" / "test_batch.bin"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x07")
    found = run("data", "verify", "cifar10", "--data-root", tmp_path)
    assert (found.code, found.out.count(" ok "), found.out.count("damaged")) == (1, 5, 1)
    missing = run("data", "verify", "mnist", "--data-root", tmp_path)
    assert missing.code == 1
    assert "train-images-idx3-ubyte" in missing.out
    for command in ("verify", "fetch"):
        embedded = run("data", command, "digits")
        assert (embedded.code, "embedded" in embedded.err) == (0, True)


@pytest.mark.long
def test_demo_writes_all_that_it_promises(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demonstration, "load", lambda *a, **k: load(*a, **k, train_size=60, test_size=30))
    until = {"momentum": 0.9, "epochs": 400, "stop_loss": 0.2}
    runs = {f"batch {size}": TrainConfig(batch_size=size, lr=0.02, **until) for size in (16, 60)}
    monkeypatch.setattr(demonstration, "RUNS", runs)
    for name, value in {
        "GRID": 5,
        "DRAWS": 1,
        "AUDITED": ("rho_sum", "margin"),
        "MEASURED": ("rho_sum", "margin"),
    }.items():
        monkeypatch.setattr(demonstration, name, value)
    outcome = run("demo", "--out", tmp_path)
    assert outcome.code == 0
    found = [Table.load(tmp_path / f"batch-{size}.parquet") for size in (16, 60)]
    assert all(f"{table['rho_sum']:.4g}" in outcome.out for table in found)
    assert "flatscope compare" in outcome.out.splitlines()[-2]  # the next command comes last
    assert str(tmp_path / "report.html") in outcome.out
    files = sorted(path.name for path in tmp_path.iterdir())
    expected = [f"batch-{size}.{ending}" for size in (16, 60) for ending in ("parquet", "safetensors")]
    assert files == [*expected, "figures", "report.html"]
    assert list((tmp_path / "figures").glob("*.png"))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the digits' shape, in a file that takes a new process less to read than those."""
    path = tmp_path_factory.mktemp("images") / "images.npz"
    pixels = np.random.default_rng(0).random((60, 1, 8, 8), dtype=np.float32)
    np.savez(path, x_train=pixels, y_train=np.arange(60) % 10)
    return path


@pytest.mark.long
def test_whoever_reads_the_first_line_still_gets_the_files(weights: Path, images: Path, tmp_path: Path) -> None:
    files = ["--out", tmp_path / "t.json", "--report", tmp_path / "r.html"]
    words = ["measure", "--model", MODEL, "--data", images, "--weights", weights, "-m", "parameter_count", *files]
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` does once it has seen enough
    done = subprocess.run(
        [sys.executable, "-m", "flatscope", *map(str, words)],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert "Traceback" not in done.stderr
    assert Table.load(tmp_path / "t.json").names == ["parameter_count"]
    assert (tmp_path / "r.html").is_file()
    assert all(f"written to {path}" in done.stderr for path in files[1::2])


def test_every_function_that_is_a_command_is_in_the_help(run: Run) -> None:
    shown = run("--help").out
    assert all(f" {name} " in shown for name in command_names())
    others = {
        "handing_options_to",
        "spread_option_bundles",
        "command_names",
        "help_line",
        "declared_command",
        "load_command",
    }
    functions = {
        name for name, function in inspect.getmembers(commands, inspect.isfunction)
        if function.__module__ == commands.__name__ and not name.startswith("_")
    }  # fmt: skip
    parts_of_groups = {name for name in functions if name.startswith(("sweep_", "data_"))}
    assert functions - parts_of_groups - others <= set(command_names())


SLOW_MODEL = """
import time
from torch import nn

class Slow(nn.Flatten):
    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)

def build():
    return nn.Sequential(Slow(), nn.Linear(64, 10))
"""


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is sent as a POSIX signal")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_training_keeps_its_checkpoint_and_says_how_to_go_on(
    images: Path, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "slow.py").write_text(SLOW_MODEL)
    words = ["--model", f"{tmp_path / 'slow.py'}:build", "--data", str(images)]
    command = [sys.executable, "-m", "flatscope", "train", *words, "--out", str(tmp_path / "run"), "--epochs", "100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    saved = tmp_path / "run" / "checkpoint" / "weights.safetensors"
    for _ in range(1200):
        if saved.exists() or process.poll() is not None:
            break
        time.sleep(0.1)
    process.send_signal(number)
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 128 + number, err
    assert "goes on from the last checkpoint" in err
    assert "Traceback" not in err
    assert out == ""
    assert load_file(saved)["model.1.weight"].shape == (10, 64)


STOPPED_MODEL = """
import inspect, os
from torch import nn

class Stops(nn.Flatten):
    def forward(self, x):
        if any(frame.filename.endswith("sharpness.py") for frame in inspect.stack(0)):
            os.kill(os.getpid(), int(os.environ["STOP_BY"]))
        return super().forward(x)

def build():
    return nn.Sequential(Stops(), nn.Linear(64, 10))
"""


@pytest.mark.skipif(os.name != "posix", reason="signals are sent as POSIX has them")
@pytest.mark.parametrize(("command", "number"), [("measure", signal.SIGTERM), ("compare", signal.SIGINT)])
def test_what_was_measured_before_a_signal_is_kept(
    tmp_path: Path, command: str, number: signal.Signals, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net.py").write_text(STOPPED_MODEL)
    words = [command, "--model", f"{tmp_path / 'net.py'}:build", "--data", "digits", "--train-size", "30"]
    words += ["-m", "l2_norm", "-m", "sharpness", "--out", f"{tmp_path / 'found.json'}"]
    if command == "compare":
        saved = {"1.weight": torch.randn(10, 64), "1.bias": torch.zeros(10)}
        for name in "ab":
            save_file(saved, tmp_path / f"{name}.safetensors")
            words.insert(1, str(tmp_path / f"{name}.safetensors"))
    (tmp_path / "found.json").write_text("of an earlier run")
    monkeypatch.setenv("STOP_BY", str(int(number)))
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = run(*words)
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    assert done.code == 128 + number, done.err
    assert "Traceback" not in done.err
    assert (tmp_path / "found.json").read_text() == "of an earlier run"
    found = json.loads((tmp_path / "found-unfinished.json").read_text())
    tables = [found] if command == "measure" else [found["tables"][name] for name in "ba"]
    rows = [{row["measure"]: row for row in table["rows"]} for table in tables]
    assert float(rows[0]["l2_norm"]["value"]) > 0
    assert all(math.isnan(float(row["sharpness"]["value"])) for row in rows)
    assert all("interrupted" in row["sharpness"]["reason"] for row in rows)
    assert "l2_norm" in done.out


def _commands(group: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.items():
        if hasattr(command, "commands"):
            yield from _commands(command.commands, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


def test_no_help_is_eaten_as_markup() -> None:
    found = dict(_commands({name: load_command(name) for name in command_names()}))
    assert {"train", "sweep run"} <= set(found)
    for name, command in found.items():
        for words in [command.help, *(getattr(parameter, "help", None) for parameter in command.params)]:
            assert words is None or Text.from_markup(words).plain == words, name
