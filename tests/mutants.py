"""Changes to the source that a test must notice: `make mutants` makes each of them and runs the test that must fail.

mutants.toml lists them: a file, a text in it that occurs once, the text to put in its place, and the test. A text that
is gone is an error, as is a test that fails without any change: neither may pass for a killed mutant. Every change is
made to a copy of the source in a temporary folder.

    python tests/mutants.py [words of names]
"""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("mutants.toml")
WORKERS = 2
FAILED, PASSED = 1, 0  # what pytest returns; anything else is no verdict


@dataclass(frozen=True)
class Mutant:
    """One change and the test that must notice it.

    Attributes:
        name: what is wrong with the changed source, in a few words.
        file: path from the root of the repository.
        old: a text that occurs once in the file.
        new: what takes its place.
        test: the test that must fail, as pytest names it.
    """

    name: str
    file: str
    old: str
    new: str
    test: str

    def changed(self, text: str) -> str:
        """The text of the file with the change; refused where the old text is not there exactly once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: the old text is {text.count(self.old)} times in {self.file}, not once")
        return text.replace(self.old, self.new)


def mutants(path: Path = LIST) -> list[Mutant]:
    """All of them."""
    return [Mutant(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]]


def run_tests(source: Path, tests: Iterable[str]) -> tuple[int, str]:
    """What pytest returned and said about these tests, with the package from the folder `source`."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    command += ["-o", "pythonpath=", *tests]  # not the source of this checkout
    env = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    return done.returncode, done.stdout + done.stderr


def verdict(mutant: Mutant, source: Path) -> str:
    """ "killed", "survived" or what went wrong; the source is as before afterwards."""
    path = source.parent / mutant.file
    original = path.read_text(encoding="utf-8")
    try:
        path.write_text(mutant.changed(original), encoding="utf-8")
        code, said = run_tests(source, [mutant.test])
    except ValueError as problem:
        return f"error: {problem}"
    finally:
        path.write_text(original, encoding="utf-8")
    return {FAILED: "killed", PASSED: "survived"}.get(code, f"error: pytest returned {code}\n{said}")


def main(words: list[str]) -> int:
    """Run those whose names have one of the words; 1 if any survives or cannot be tried."""
    chosen = [one for one in mutants() if not words or any(word in one.name for word in words)]
    if not chosen:
        print("error: no mutant has such a name")
        return 1
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(WORKERS) as pool:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(WORKERS):
            shutil.copytree(ROOT / "src", Path(folder) / str(number) / "src")
            copies.put(Path(folder) / str(number) / "src")
        code, said = run_tests(Path(folder) / "0" / "src", sorted({one.test for one in chosen}))
        if code != PASSED:
            print(f"error: the tests fail without any change\n{said}")
            return 1

        def tried(mutant: Mutant) -> str:
            source = copies.get()
            try:
                return verdict(mutant, source)
            finally:
                copies.put(source)

        wrong = 0
        for mutant, found in zip(chosen, pool.map(tried, chosen), strict=True):
            wrong += found != "killed"
            print(f"{found:<9} {mutant.name}  ({mutant.test})", flush=True)
    print(f"{len(chosen) - wrong} of {len(chosen)} killed")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
