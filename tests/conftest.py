"""What every test runs under."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flatscope

gc.disable()  # until all tests are collected: imports leave little behind
# Processes that tests start, and the next run, find compiled what this one has compiled, whatever the shell says.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
LAST: list[Path | None] = [None]  # file of the last test
SOURCE, TESTS = str(Path(flatscope.__file__).parents[1]), Path(__file__).parent
# All folders of tests: what is imported from another one is found, whichever of them runs.
FOLDERS = [str(folder) for folder in (TESTS, *sorted(TESTS.rglob("*/"))) if folder.name != "__pycache__"]
sys.path += [folder for folder in FOLDERS if folder not in sys.path]

CHROMIUM_OPTIONS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--no-first-run",
)  # fmt: skip


def pytest_configure() -> None:
    # One thread per process: several workers on few cores get in each other's way, and sums add in one order.
    torch.set_num_threads(1)
    # A shell ignores Ctrl-C for what it runs in the background, and children inherit that; some tests send it.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Processes that a test starts use the flatscope of the test, whatever is installed, and find its files.
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, (SOURCE, *FOLDERS, *known))))


def pytest_collection_finish() -> None:
    # A million objects of modules and collected tests, which every collection of garbage would look through.
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    # What the file before has left (modules that it imported, results that its fixtures keep) is looked through once
    # here, and not again by each of the collections that follow an interrupt or a failed measure.
    if item.path != LAST[0]:
        LAST[0] = item.path
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The contract measure by measure: what one test has measured is at hand for the next.
    kept = [n for n, item in enumerate(items) if item.path.stem == "test_contract"]
    for n, item in zip(kept, sorted((items[n] for n in kept), key=_measure), strict=True):
        items[n] = item


def _measure(item: pytest.Item) -> str:
    return str(getattr(item, "callspec").params["entry"].name)  # noqa: B009, as no plain item has one


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=chromium, args=list(CHROMIUM_OPTIONS))
        yield opened
        opened.close()
