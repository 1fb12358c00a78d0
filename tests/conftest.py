"""What every test runs under."""

from __future__ import annotations

import torch


def pytest_configure() -> None:
    # One thread per process: several workers on few cores get in each other's way, and sums add in one order.
    torch.set_num_threads(1)
