"""Bounds on the command line: named as measures are, with options, and none left out without a word."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from flatscope.cli.app import app
from flatscope.errors import InputError
from flatscope.registry import declarations, select

pytestmark = pytest.mark.fast

MEASURE = ["measure", "--model", "mlp", "--model-option", "widths=64,4,10", "--data", "digits", "--flatten"]
MEASURE += ["--train-size", "30", "--test-size", "20", "-m", "margin"]
QUICK = [entry.name for entry in select(None, "bound")]
LONG = [name for name in declarations("bound") if name not in QUICK]
# What makes the long ones short.
FEW = ["pac_bayes.draws=2"]


def run(*words: str) -> Result:
    return CliRunner().invoke(app, [*MEASURE, *words], catch_exceptions=False)


def rows(*words: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(run(*words, "--json").stdout)["bounds"]["rows"]
    return found


def test_long_bounds_that_were_not_evaluated_are_named() -> None:
    assert LONG
    shown = run("--bounds")
    said = next(line for line in shown.stderr.splitlines() if "take long" in line)
    assert all(name in said for name in LONG)
    assert "--bound all" in said
    assert "take long" not in run("--bound", "covering").stderr  # who names bounds knows which


def test_bounds_are_named_one_by_one_and_by_pattern() -> None:
    assert {row["measure"] for row in rows("--bound", "covering")} == {"covering"}
    assert {row["measure"] for row in rows("--bound", "*_l1")} == {"margin_l1", "rademacher_l1"}
    both = rows("--bounds", "--bound", "pac_bayes", *(word for entry in FEW for word in ("--option", entry)))
    assert [row["measure"] for row in both if row["measure"] not in QUICK] == ["pac_bayes"]
    assert {row["measure"] for row in both} == {*QUICK, "pac_bayes"}


def test_options_and_delta_reach_the_bounds() -> None:
    (plain,) = rows("--bound", "covering")
    (given,) = rows("--bound", "covering", "--option", "covering.radius=3", "--delta", "0.1")
    assert given["options"] == '{"radius": 3}'
    assert (plain["confidence"], given["confidence"]) == (0.95, 0.9)
    beside = rows("--bounds", "--option", "covering.radius=3", "--option", "margin.epsilon=0.2")
    assert [row["options"] for row in beside if row["measure"] == "covering"] == ['{"radius": 3}']


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-m", "pac_bayes"], "--bound pac_bayes"),
        (["-m", "rademacher*"], "--bound rademacher"),
        (["--bound", "covring"], "Did you mean covering"),
        (["--bounds", "--option", "covring.radius=3"], "covering"),
        (["--bounds", "--option", "covering.radios=3"], "radius"),
        (["--bounds", "--option", "covering.delta=0.1"], "--delta"),
        (["--option", "covering.radius=3"], "--bound covering"),
        (["--bounds", "--delta", "1"], "--delta"),
    ],
)
def test_slips_are_refused_before_data_are_read(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatscope.cli.sources.load", lambda *_, **__: pytest.fail("data were read first"))
    with pytest.raises(InputError, match=message):
        run(*words)


@pytest.mark.parametrize("command", ["audit", "compare"])
def test_other_commands_say_where_bounds_are(command: str) -> None:
    words = [command, "a.pt", "b.pt"] if command == "compare" else [command]
    with pytest.raises(InputError, match="measure --bound pac_bayes"):
        CliRunner().invoke(
            app, [*words, "--model", "mlp", "--data", "digits", "-m", "pac_bayes"], catch_exceptions=False
        )
