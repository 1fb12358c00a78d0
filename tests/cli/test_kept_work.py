"""What a person still has, and is told, where memory, a disk, a rank or a terminal ends the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from test_cli import Run
from test_cli import run as run  # a fixture
from test_results import small_data, small_network

import flatscope as fs
from flatscope import ranks
from flatscope.cli import output, run_compare
from flatscope.cli.run_compare import show_comparison
from flatscope.errors import InputError, Interrupted, lack_of_memory

NETWORK = [
    "measure",
    "--model",
    "mlp",
    "--model-option",
    "widths=64,8,10",
    "--data",
    "digits",
    "--train-size",
    20,
    "--flatten",
    "-m",
    "l2_norm",
]


@pytest.mark.parametrize(
    "problem",
    [
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 64000000000 bytes. Error code 12 (Cannot allocate memory)"
        ),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    ],
)
def test_too_little_memory_is_said_with_what_to_do(
    problem: Exception, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "the memory does not suffice" in lack_of_memory(problem)
    assert lack_of_memory(RuntimeError("another fault")) == ""

    def fail(*_: Any, **__: Any) -> None:
        raise problem

    monkeypatch.setattr("flatscope.cli.run_measure.load_problem", fail)
    found = run(*NETWORK)
    assert found.code == 1
    assert "The memory does not suffice" in found.err
    assert "--train-size" in found.err
    assert "--debug" not in found.err


def test_a_table_that_cannot_be_written_is_shown_before_that_is_said(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise InputError("a place that can be written to", "No space left on device", str(tmp_path / "t.json"))

    monkeypatch.setattr("flatscope.result.write_whole", full)
    found = run(*NETWORK, "--out", tmp_path / "t.json")
    assert found.code == 2
    assert "No space left" in found.err
    assert "l2_norm" in found.out


def test_chosen_bits_that_cannot_be_written_are_shown_before_that_is_said(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: object, path: Path) -> None:
        raise InputError("a place that can be written to", "No space left on device", str(path))

    monkeypatch.setattr("flatscope.decisions.allocation.Allocation.save", full)
    words = ["--bits", 8, "--sparsity", 0, "--mean-bits", 8, "--allocation-out", tmp_path / "a.json"]
    found = run("sensitivity", *NETWORK[1:-2], *words)
    assert found.code == 2
    assert "No space left" in found.err
    assert "8 bits a weight" in found.out
    assert "Rounded together" in found.out


def test_every_page_that_a_table_is_saved_as_lets_nothing_run(tmp_path: Path) -> None:
    fs.measure(fs.Problem(small_network(0), small_data()), ["l2_norm"]).save(tmp_path / "t.html")
    assert "Content-Security-Policy\" content=\"default-src 'none'" in (tmp_path / "t.html").read_text()


def test_a_comparison_of_many_networks_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    networks = {f"network {k}": small_network(k) for k in range(60)}
    found = fs.compare(networks, small_data(), ["l2_norm", "margin"])
    show_comparison(found)
    shown = capsys.readouterr()
    assert len(shown.out) < 5_000
    assert "60 networks are too many" in shown.err


@pytest.mark.parametrize(("waited", "words"), [(8.0, "ended before"), (301.0, "did not come within 0:05:00")])
def test_a_rank_that_ended_is_not_said_to_be_late(waited: float, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def lost(**_: Any) -> None:
        now[0] += waited
        raise RuntimeError("Connection closed by peer")

    for name, value in {
        "is_available": True,
        "is_initialized": True,
        "get_world_size": 2,
        "get_backend": "gloo",
    }.items():
        monkeypatch.setattr(ranks.dist, name, lambda value=value: value)
    monkeypatch.setattr(ranks.dist, "monitored_barrier", lost)
    monkeypatch.setattr("flatscope.ranks.time.monotonic", lambda: now[0])
    with pytest.raises(InputError, match=words):
        ranks.present_ranks()


def test_an_interrupt_without_words_has_a_name() -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted, match=r"^Interrupted: 1 of 2 measures are done"):
        fs.measure(fs.Problem(small_network(0), small_data()), ["l2_norm", "margin"], watch=stop)


def test_a_comparison_is_an_answer_one_table_and_few_remarks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Console(width=80)
    monkeypatch.setattr(output, "stdout_screen", lambda: screen)
    monkeypatch.setattr(run_compare, "stdout_screen", lambda: screen)
    found = fs.compare({name: small_network(k) for k, name in enumerate(("batch-16", "batch-512"))}, small_data())
    show_comparison(found)
    shown = capsys.readouterr()
    lines = [line for line in shown.out.splitlines() if line.strip()]
    assert max(map(len, lines)) <= 80
    last = next(n for n, line in enumerate(lines) if line.startswith("  parameter_count"))
    assert sum(line.startswith("  parameter_count") for line in lines) == 1
    remarks = " ".join(lines[last + 1 :] + shown.err.splitlines())
    assert len(remarks.split("To keep in mind")) <= 4
    assert "--out FILE or --report PAGE" in remarks
    assert "Ranks from and to" in found.summary()  # the rest is there, not in the terminal
