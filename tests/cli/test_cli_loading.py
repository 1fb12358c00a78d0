"""Help, version, completion and slips come at once: nothing that takes seconds to import is loaded for them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import pytest

import flatscope as fs
from flatscope.cli.commands import command_names, declared_command, help_line, load_command
from flatscope.cli.options import (
    CheckpointsOptions,
    CompareCommand,
    DataOptions,
    EffortOptions,
    MeasureOptions,
    NetworkOptions,
    ProblemOptions,
    TrainCommand,
)
from flatscope.comparing.copies import TOLERANCE
from flatscope.inputs.loading import load
from flatscope.training.checkpoint import TrainConfig

HEAVY = {"torch", "numpy", "pandas", "scipy", "pyarrow", "matplotlib", "sklearn"}
# Runs the command line and writes what it has imported below what it says.
LOADED = """
import atexit, sys
atexit.register(lambda: print("loaded:", *sorted({name.split(".")[0] for name in sys.modules}), file=sys.stderr))
sys.argv = ["flatscope", *sys.argv[1:]]
from flatscope.cli import main
main()
"""


def run(*words: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    command = [sys.executable, "-c", LOADED, *words]
    environment = {**os.environ, "COLUMNS": "100", **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return done, set(done.stderr.rpartition("loaded:")[2].split()) & HEAVY


@pytest.mark.parametrize(
    ("words", "code", "shown"),
    [
        (["--help"], 0, "Usage: flatscope [OPTIONS] COMMAND"),
        (["--version"], 0, fs.__version__),
        (["measure", "--help"], 0, "Usage: flatscope measure [OPTIONS]"),
        (["train", "-h"], 0, "Usage: flatscope train [OPTIONS]"),
        (["sweep", "run", "-h"], 0, "Usage: flatscope sweep run [OPTIONS]"),
        (["study", "run", "-h"], 0, "Usage: flatscope study run [OPTIONS]"),
        (["mesure"], 2, "Did you mean 'measure'"),
        (["measure", "--modle", "x"], 2, "--model"),
        (["audit", "--model", "x"], 2, "--data"),
    ],
)
def test_nothing_heavy_is_loaded_for_help_and_slips(words: list[str], code: int, shown: str) -> None:
    done, heavy = run(*words)
    assert done.returncode == code, done.stderr
    assert shown in done.stdout + done.stderr
    assert heavy == set()


def test_the_check_above_sees_what_a_command_loads() -> None:
    done, heavy = run("data", "list")
    assert done.returncode == 0, done.stderr
    assert "torch" in heavy


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("flatscope mea", ["measure", "measures"]),
        ("flatscope sweep r", ["run", "resume"]),
        ("flatscope measure --data-", ["--data-root", "--data-seed"]),
    ],
)
def test_the_shell_completes_commands_and_options(typed: str, offered: list[str]) -> None:
    place = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    done, heavy = run(_FLATSCOPE_COMPLETE="complete_bash", **place)
    assert done.stdout.split() == offered
    assert heavy == set()


@pytest.mark.parametrize("name", command_names())
def test_the_list_of_commands_says_what_each_says_of_itself(name: str) -> None:
    command = load_command(name)
    assert command.name == name
    assert command.help.splitlines()[0] == help_line(name)


def test_defaults_written_out_for_the_help_are_the_real_ones() -> None:
    given = {field.name: field.default for field in fields(TrainCommand)}
    shared = [name for name in TrainConfig().to_dict() if name in given]
    assert {"lr", "optimizer", "momentum", "batch_size", "epochs", "augmentation"} <= set(shared)
    assert {name: given[name] for name in shared} == {name: getattr(TrainConfig(), name) for name in shared}
    assert next(field.default for field in fields(CompareCommand) if field.name == "tolerance") == TOLERANCE


BUNDLES = (NetworkOptions, CheckpointsOptions, MeasureOptions, EffortOptions)


def test_a_field_of_a_bundle_is_all_that_a_new_option_needs() -> None:
    """Every field of the data's bundle reaches `load`, every one of the problem's reaches `Problem`."""
    given = NetworkOptions(model="m", data="digits", flatten=True, data_seed=3, loss="mse", batch_size=7)
    assert inspect.signature(load).bind(**given.load_arguments()).arguments["seed"] == 3
    assert set(given.load_arguments()) <= set(inspect.signature(load).parameters)
    assert len(given.load_arguments()) == len(fields(DataOptions))
    assert (
        inspect.signature(fs.Problem).bind(None, train=None, **given.problem_arguments()).arguments["batch_size"] == 7
    )
    assert len(given.problem_arguments()) == len(fields(ProblemOptions))


@pytest.mark.parametrize("name", ["measure", "audit", "compare", "landscape", "train"])
def test_commands_have_the_options_of_the_bundles_and_declare_none_of_them_again(name: str) -> None:
    options = {parameter.name for parameter in load_command(name).params}
    assert {field.name for field in fields(DataOptions)} | {"model", "model_option", "seed"} <= options
    bundle = next(kind for kind in get_type_hints(declared_command(name)).values() if is_dataclass(kind))
    bundled = {field.name for bundle in BUNDLES for field in fields(bundle)}
    # Training has a batch size and a device of its own (one changes values, the other is the CPU unless told), a
    # precision of its steps instead of estimates, and needs neither model nor data where a file describes them.
    own = {"loss", "batch_size", "device", "model", "data", "precision"} if name == "train" else set()
    assert bundled & set(vars(bundle)["__annotations__"]) <= own


# What one process sees that loads public names, then begins anew with modules from inside, and goes on to all names.
FRESH = """
import json, random, sys, flatscope as fs
before, found = random.getstate(), {}
fs.measure, fs.report
found["drawn"] = before != random.getstate()
for name in [name for name in sys.modules if name.partition(".")[0].startswith("flatscope")]:
    del sys.modules[name]
import flatscope.generalization_bounds.psi, flatscope.reports.page, flatscope.landscapes
import inspect, flatscope as fs
import flatscope.inputs.loading
found["data"] = [name for name in ("pooch", "sklearn", "requests") if name in sys.modules]
import flatscope.training.callbacks
flatscope.training.callbacks.Recorder
found["live"] = [name for name in ("lightning", "transformers", "mlflow", "tensorboard") if name in sys.modules]
found["missing"] = [name for name in fs.__all__ if not hasattr(fs, name)]
assert fs.stats.__name__ == "flatscope.stats" and set(fs.__all__) <= set(dir(fs))
from flatscope import *
assert report is fs.report and Problem is fs.Problem and bounds is fs.bounds
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def fresh() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_public_names_are_there_whatever_is_imported_first(fresh: dict[str, Any]) -> None:
    assert fresh["missing"] == []
    with pytest.raises(AttributeError, match="no attribute 'mesure'"):
        _ = fs.mesure


def test_reading_data_needs_neither_pooch_nor_scikit_learn(fresh: dict[str, Any]) -> None:
    assert fresh["data"] == []


def test_no_framework_is_loaded_before_it_is_asked_for(fresh: dict[str, Any]) -> None:
    assert fresh["live"] == []


def test_loading_the_package_draws_no_random_number(fresh: dict[str, Any]) -> None:
    assert not fresh["drawn"]


@pytest.mark.parametrize("name", [name for name in fs.__all__ if callable(getattr(fs, name))])
def test_a_public_name_is_one_thing(name: str) -> None:
    """No module hides behind a function: what is imported by its name and what is called is one object."""
    spec = importlib.util.find_spec(f"flatscope.{name}")
    if spec is not None:
        assert getattr(fs, name) is importlib.import_module(f"flatscope.{name}")


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = f"import sys, flatscope; print(*({HEAVY} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
