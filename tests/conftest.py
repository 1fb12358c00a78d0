"""What every test runs under."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import flatscope

SOURCE, TESTS = str(Path(flatscope.__file__).parents[1]), str(Path(__file__).parent)


def pytest_configure() -> None:
    # One thread per process: several workers on few cores get in each other's way, and sums add in one order.
    torch.set_num_threads(1)
    # Processes that a test starts use the flatscope of the test, whatever is installed, and find its files.
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, (SOURCE, TESTS, *known))))
