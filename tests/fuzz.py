"""Changed files of every kind that flatscope reads: `make fuzz` for as long as one likes, some of them in the tests.

One seeded change is made to the bytes of a file. What flatscope wrote must then be refused with an error of its own, or
be read as it was; what a stranger wrote must be refused with an error of its own, or be read. In place of a file there
may also be what is none: a pipe, a device, a folder, a link that leads nowhere. That is refused as well, or done
without, and nothing waits for it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from fuzz_kinds import Kind, kinds

from flatscope.errors import FlatscopeError


def change(content: bytes, seed: int) -> bytes:
    """The bytes with one change: a flipped bit or byte, a part cut, doubled, set to zero or put elsewhere."""
    rng = random.Random(seed)
    data = bytearray(content)
    place = rng.randrange(len(data))
    length = min(len(data) - place, rng.choice((1, 4, 16, 64)))
    kind = rng.choice(("bit", "bit", "byte", "byte", "zero", "cut", "double", "end", "move"))
    if kind == "bit":
        data[place] ^= 1 << rng.randrange(8)
    elif kind == "byte":
        data[place] = rng.randrange(256)
    elif kind == "zero":
        data[place : place + length] = bytes(length)
    elif kind == "cut":
        del data[place : place + length]
    elif kind == "double":
        data[place:place] = data[place : place + length]
    elif kind == "end":
        del data[place:]
    else:
        part = data[place : place + length]
        del data[place : place + length]
        data[(at := rng.randrange(len(data) + 1)) : at] = part
    return bytes(data)


def attack(kind: Kind, folder: Path, seed: int) -> str:
    """What became of one change: "refused", "unchanged", "same" or "read"; anything else is raised."""
    if not folder.exists():
        folder.mkdir(parents=True)
        kind.write(folder)
    before = kind.read(folder) if kind.own else ""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    target = files[seed % len(files)]
    content = target.read_bytes()
    changed = change(content, seed)
    if changed == content:
        return "unchanged"
    target.write_bytes(changed)
    try:
        after = kind.read(folder)
    except FlatscopeError:
        return "refused"
    finally:
        target.write_bytes(content)
    if kind.own and after != before:
        raise AssertionError(f"{target.name}, seed {seed}: other content was taken without a word")
    return "same" if kind.own else "read"


SPECIAL: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a device without end": lambda path: path.symlink_to("/dev/zero"),
    "an empty device": lambda path: path.symlink_to("/dev/null"),
    "a folder": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "an empty file": lambda path: path.write_bytes(b"") and None,
}
MEMORY = "/dev/shm"  # files that are written and read a hundred thousand times need no disk
PATIENCE = 20  # seconds that a reader may take with what is no file


def replace_file(kind: Kind, folder: Path, seed: int) -> str:
    """What became of something else in the place of a file: "refused" or "done without"; anything else is raised."""
    if not folder.exists():
        folder.mkdir(parents=True)
        kind.write(folder)
    before = kind.read(folder) if kind.own else ""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    target = files[seed % len(files)]
    name = [*SPECIAL][seed // len(files) % len(SPECIAL)]
    aside = target.with_name(f"{target.name}.aside")
    target.rename(aside)
    signal.signal(signal.SIGALRM, _out_of_patience)
    signal.alarm(PATIENCE)
    try:
        SPECIAL[name](target)
        after = kind.read(folder)
    except FlatscopeError:
        return "refused"
    finally:
        signal.alarm(0)
        shutil.rmtree(target, ignore_errors=True) if target.is_dir() and not target.is_symlink() else target.unlink()
        aside.rename(target)
    if kind.own and after != before:
        raise AssertionError(f"{name} in the place of {target.name}, seed {seed}: other content without a word")
    return "done without"


def _out_of_patience(*_: object) -> None:
    raise TimeoutError(f"no end after {PATIENCE} s")


def bits_of(folder: Path) -> int:
    """How many bits the files of a kind have."""
    return 8 * sum(path.stat().st_size for path in _files(folder))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def flip(kind: Kind, folder: Path, place: int, before: str) -> str:
    """What became of one flipped bit, by its place in all files of the kind: "refused", "same" or "read"."""
    bit = place
    for target in _files(folder):
        if bit < (size := target.stat().st_size * 8):
            break
        bit -= size
    whole = target.read_bytes()
    content = bytearray(whole)
    content[bit // 8] ^= 1 << bit % 8
    target.write_bytes(content)
    try:
        after = kind.read(folder)
    except FlatscopeError:
        return "refused"
    finally:
        target.write_bytes(whole)
    if kind.own and after != before:
        raise AssertionError(f"{target.name}, bit {bit}: read as something else without a word")
    return "same" if kind.own else "read"


def main() -> None:
    """Attack all kinds in turn until the time is over, and say what happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first change")
    parser.add_argument("--bits", type=int, default=0, help="flip so many single bits, and nothing else")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    end, seed, counts = time.monotonic() + 60 * given.minutes, given.seed, {}
    with tempfile.TemporaryDirectory(dir=MEMORY if os.path.isdir(MEMORY) else None) as folder:
        if given.bits:
            raise SystemExit(flip_bits(Path(folder), given.bits, given.seed, end))
        everything = kinds()
        while time.monotonic() < end:
            for name, kind in everything.items():
                try:
                    outcome = (replace_file if seed % 8 == 7 else attack)(kind, Path(folder) / name, seed)
                except Exception as problem:
                    outcome = "FAILED"
                    print(f"{name}, seed {seed}: {type(problem).__name__}: {problem}")
                counts[outcome] = counts.get(outcome, 0) + 1
            seed += 1
    print(
        f"{sum(counts.values())} changed files of {len(everything)} kinds, seeds {given.seed} to {seed - 1}: {counts}"
    )
    raise SystemExit("FAILED" in counts)


CHUNK = 250  # bits that one child flips
KINDS: dict[str, Kind] = {}  # of the parent, which its children have as well


def flip_bits(folder: Path, count: int, seed: int, end: float) -> bool:
    """Flip so many single bits of the files that flatscope writes, no bit twice; whether one passed without a word.

    Every kind has the same share of them, or all its bits where it has fewer. Children do the work, in folders of their
    own: what would end one of them or would not end is a failure of the bits it was at.
    """
    KINDS.update({name: kind for name, kind in kinds().items() if kind.own})
    before, places = {}, {}
    for name, kind in KINDS.items():
        (folder / name).mkdir(parents=True)
        kind.write(folder / name)
        before[name] = kind.read(folder / name)
        places[name] = bits_of(folder / name)
    shares = _shares(places, count)
    jobs = [
        (name, chunk)
        for name, share in shares.items()
        for chunk in _chunks(random.Random(seed).sample(range(places[name]), share))
    ]
    random.Random(seed).shuffle(jobs)  # where time ends early, every kind has had its part
    counts = {name: Counter[str]() for name in KINDS}
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
        waiting = {pool.submit(_flip_chunk, folder, name, chunk, before[name], end): name for name, chunk in jobs}
        for job in as_completed(waiting):
            try:
                outcomes, words = job.result()
            except BrokenProcessPool:
                outcomes, words = Counter(FAILED=1), ["a child died"]
            counts[waiting[job]] += outcomes
            for line in words:
                print(f"{waiting[job]}: {line}", flush=True)
    for name, outcomes in counts.items():
        print(f"{name}: {places[name]:,} bits, {dict(outcomes)}")
    total = sum(counts.values(), Counter[str]())
    print(f"{sum(total.values()):,} single flipped bits over {len(KINDS)} kinds of files, none twice: {dict(total)}")
    return "FAILED" in total


def _shares(places: dict[str, int], count: int) -> dict[str, int]:
    """How many bits of each kind: as many of one as of another, as far as it has them."""
    shares: dict[str, int] = {}
    for name in sorted(places, key=lambda name: places[name]):
        shares[name] = min(places[name], -(-(count - sum(shares.values())) // (len(places) - len(shares))))
    return shares


def _chunks(bits: list[int]) -> Iterator[list[int]]:
    for first in range(0, len(bits), CHUNK):
        yield bits[first : first + CHUNK]


def _flip_chunk(folder: Path, name: str, bits: list[int], before: str, end: float) -> tuple[Counter[str], list[str]]:
    """What became of some bits of a kind, in a copy of its files."""
    counts, words = Counter[str](), []
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _out_of_patience)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        copy = Path(own) / name
        shutil.copytree(folder / name, copy)
        for bit in bits:
            if time.monotonic() > end:
                break
            signal.alarm(PATIENCE)
            try:
                counts[flip(KINDS[name], copy, bit, before)] += 1
            except Exception as problem:
                counts["FAILED"] += 1
                words.append(f"bit {bit}: {type(problem).__name__}: {problem}")
            finally:
                signal.alarm(0)
    return counts, words


if __name__ == "__main__":
    main()
