"""Measures and bounds of a user's file, on the command line."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_cli import SMALL, Run
from test_cli import run as run  # a fixture
from test_cli import weights as weights  # a fixture

from flatscope import registry
from flatscope.cli import extensions

OWN = '''
from flatscope.extend import Value, bound, measure


@measure(symbol="m", paper={paper}, equation="largest weight", conventions="all parameters")
def largest_weight(ctx, *, scale: float = 1.0):
    """Largest absolute weight of the network.

    Args:
        ctx: the network.
        scale: factor.
    """
    return Value(scale * max(float(value.abs().max()) for value in ctx.params.values()))


@bound(symbol="b", paper=None, equation="", assumptions=("none",))
def half(ctx, *, delta: float):
    """One half.

    Args:
        ctx: the network.
        delta: not used.
    """
    return Value(0.5)
'''


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Path]:
    registry.declarations()
    before, loaded = copy.copy(registry._REGISTRY), set(extensions._LOADED)
    file = tmp_path / "own.py"
    file.write_text(OWN.format(paper="'Keskar et al. 2017'"))
    yield file
    registry._REGISTRY.clear()
    registry._REGISTRY.update(before)
    extensions._LOADED.clear()
    extensions._LOADED.update(loaded)


def test_a_measure_and_a_bound_of_a_file_are_measured_by_name_with_options(run: Run, weights: Path, own: Path) -> None:
    network = (*SMALL, "--weights", weights)
    words = ("-m", "largest_weight", "--bound", "half", "--option", "largest_weight.scale=2", "--extension", own)
    done = run("measure", *network, *words)
    assert done.code == 0, done.err
    assert "largest_weight[scale=2" in done.out
    assert "half" in done.out
    again = run("audit", *network, "-m", "largest_weight", "--extension", own, "--extension", own)
    assert again.code == 0, again.err
    assert "largest_weight" in again.out


def test_the_list_of_measures_cites_the_paper_in_the_user_s_words(run: Run, own: Path) -> None:
    done = run("measures", "largest_weight", "--extension", own)
    assert "Keskar et al. 2017, largest weight" in done.out
    assert run("measures", "half").code == 0


def test_without_the_option_the_name_is_unknown(run: Run, weights: Path, own: Path) -> None:
    done = run("measure", *SMALL, "--weights", weights, "-m", "largest_weight")
    assert done.code == 2
    assert "largest_weight" in done.err


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("x = 1", "@measure"),
        ("1 / 0", "ZeroDivisionError"),
        (OWN.format(paper="'petzka2018'"), "petzka2019"),
        ("from flatscope.extend import measure\n@measure(symbol='m')\ndef f(ctx): 'It.'", "paper"),
    ],
)
def test_a_file_that_declares_nothing_or_fails_is_told_in_a_line(run: Run, own: Path, text: str, word: str) -> None:
    own.write_text(text)
    done = run("measures", "--extension", own)
    assert done.code == 2
    assert word in done.err
    assert "Traceback" not in done.err


def test_a_file_that_is_not_there_is_named(run: Run, tmp_path: Path) -> None:
    done = run("measures", "--extension", tmp_path / "no.py")
    assert done.code == 2
    assert "no.py" in done.err
