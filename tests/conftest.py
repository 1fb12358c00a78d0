"""What every test runs under."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import flatscope

# Files that `make test-fast` runs; the others train, start processes, open a browser, or search for long.
# fmt: off
FAST = {
    "bounds", "cli_bounds", "comparing_words", "contract", "effort", "errors_of_sums", "factors", "folding", "golden",
    "graph", "labels", "layout", "losses", "mutants", "operators", "probabilities", "problem", "registry",
    "relative_flatness", "results", "samples", "scaling", "sharpness_theorem", "store", "sweep", "table", "targets",
    "verdicts", "walls",
}
# fmt: on
SOURCE, TESTS = str(Path(flatscope.__file__).parents[1]), str(Path(__file__).parent)


def pytest_configure() -> None:
    # One thread per process: several workers on few cores get in each other's way, and sums add in one order.
    torch.set_num_threads(1)
    # A shell ignores Ctrl-C for what it runs in the background, and children inherit that; some tests send it.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Processes that a test starts use the flatscope of the test, whatever is installed, and find its files.
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, (SOURCE, TESTS, *known))))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "papers" or item.path.stem.removeprefix("test_") not in FAST:
            item.add_marker("slow")
