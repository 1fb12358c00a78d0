"""`python -m benchmarks.pending_studies`: the studies that wait for a GPU, one after another, as far as time goes.

For a machine that is lent for some minutes and starts bare every time:

    python -m benchmarks.pending_studies --list
    python -m benchmarks.pending_studies --minutes 9 --store STORE --out RESULTS --bring BROUGHT --pack TAKEN

takes up what BROUGHT holds of earlier calls (`benchmarks/stored_trials`, of earlier machines, without it), runs studies
in the order of what they decide for their seconds, one unit at a time and with `--drop-weights`, breaks off when the
minutes are over, and packs trials, checkpoints of unfinished ones and results into TAKEN, in files small enough to
travel. The next call with `--bring TAKEN` goes on where this one ended. Data are found where FLATSCOPE_DATA says. When
a study is done its results are in RESULTS; copy them to `src/flatscope_papers/results`, then `make reproduction`.
Stores of several machines become one with `flatscope study join`. With `--together N` the work of all chosen studies is
done by N processes on the one GPU and the one store (`benchmarks.side_by_side`), and each study is judged once all of
its trials are there.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.side_by_side import run_together
from flatscope.training import Store
from flatscope_papers.study_registry import find_study

ROOT = Path(__file__).parents[1]
STORED = ROOT / "benchmarks/stored_trials"  # packed: finished trials of studies that wait, without their weights
PIECE = 15 * 2**20  # bytes of a file that travels
TO_JUDGE = 60.0  # seconds at most, once all trials are there
ENDING = 40.0  # seconds that a run which is told to end may take, and packing


class Pending(NamedTuple):
    """Studies that share networks, run together."""

    studies: tuple[str, ...]
    seconds: int  # of one H200 by itself, reckoned from measured epochs
    decides: str


# Seconds of one H200 on which the multi-process service runs: several processes do 1.8 to 2 times what one does alone.
PENDING = (
    Pending(
        ("zhang2017-table2",),
        150,
        "whether the perceptron (99.7 % after 100 epochs) and Wide Resnet (99.7 % at a loss of 0.01) come to 100 %: "
        "the first with a slower fall, the second with a loss of 0.001",
    ),
    Pending(
        ("zhang2017-fig17", "zhang2017-fig16"),
        600,
        "four claims on starting weights ten times as large, which a falling rate leaves unfitted: with a constant one",
    ),
    Pending(
        ("neyshabur2017-fig1", "neyshabur2017-fig2"),
        600,
        "a third seed: set seeds to 3; six claims are left open by two, whose intervals are 12.7 standard errors wide",
    ),
    Pending(("zhang2017-fig2",), 800, "whether 2,000 and 5,000 random labels are fitted without error"),
    Pending(("neyshabur2017-fig3",), 350, "a third seed: set seeds to 3; 39 of its 54 trials are stored"),
    Pending(
        ("yi2019-fig3",),
        2000,
        "five claims on PlainNet-18 with a small and a large batch, and two if poles lie far enough",
    ),
    Pending(
        ("zhang2017-table1", "zhang2017-fig12", "zhang2017-fig11", "zhang2017-fig20"),
        1500,
        "four claims on minima of MNIST with random labels, trained three times as long",
    ),
    Pending(("zhang2017-fig24",), 1000, "whether as many parameters as samples are enough for polynomials"),
    Pending(
        ("zhang2017-fig23", "zhang2017-fig22", "zhang2017-fig21"),
        1400,
        "whether polynomials fit 2,000 and 5,000 random labels",
    ),
    Pending(
        ("petzka2019-fig3", "petzka2019-fig4", "petzka2019-fig5", "petzka2019-fig6"),
        400,
        "19 claims on MNIST, whose networks of batch 8,000 did not converge: with rates up to the printed 1.6",
    ),
    Pending(
        ("petzka2019-fig1", "petzka2019-fig2"),
        1700,
        "original pixels at a loss of 0.1, and the authors' inputs and order",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", nargs="*", help="some of them; all in their order without")
    parser.add_argument("--list", action="store_true", help="what waits, with its seconds, and what is done in --out")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which work is broken off")
    parser.add_argument("--scale", default="paper", help="smoke, to try all this in a minute")
    parser.add_argument("--store", type=Path, default=Path("gpu-store"))
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--bring", type=Path, help=f"folder that an earlier call packed; {STORED.name} without")
    parser.add_argument("--pack", type=Path, help="folder for what is to be brought again")
    parser.add_argument("--together", type=int, default=0, help="processes; one study after another without")
    parser.add_argument("--limit", type=float, default=60.0, help="MiB that may travel")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores for what it starts behind itself
    unknown = set(given.study) - {name for group in PENDING for name in group.studies}
    if unknown:
        parser.error(f"not waiting: {', '.join(sorted(unknown))}; --list names what is")
    chosen = [group for group in PENDING if not given.study or set(group.studies) & set(given.study)]
    if given.bring or not given.list:
        unpack(given.bring or STORED, given.store, given.out)
    if given.list:
        print("\n".join(listed(chosen, given.out, given.scale)))
        return 0
    end = time.monotonic() + 60 * given.minutes - ENDING
    status = run_all(chosen, given.scale, given.store, given.out, end, given.together)
    if given.pack:
        pack(given.pack, given.store, given.out, given.limit * 2**20)
    return status


def listed(groups: Iterable[Pending], out: Path, scale: str) -> list[str]:
    """A line for each group, then the sum of what is left."""
    lines, left = [], 0
    for group in groups:
        done = all(is_done(name, out, scale) for name in group.studies)
        left += 0 if done else group.seconds
        lines.append(f"{'done' if done else f'{group.seconds:5} s'}  {' '.join(group.studies)}: {group.decides}")
    return [*lines, f"{left} s of one H200 are left"]


def is_done(name: str, out: Path, scale: str) -> bool:
    return (out / name / scale / "verdicts.json").is_file()


def run_all(groups: Iterable[Pending], scale: str, store: Path, out: Path, end: float, together: int = 0) -> int:
    """The studies that are not done, until the time is over; 0 where all are, 3 where some wait, 1 where one failed."""
    failed, waiting = False, [[name for name in group.studies if not is_done(name, out, scale)] for group in groups]
    every = [name for names in waiting for name in names]
    if together and every:
        seconds = end - time.monotonic()
        failed |= run_together(every, scale, store, together, time.time() + seconds, single=True) not in (0, 3)
    for names in filter(None, waiting):
        if together and not has_all(names, scale, store):
            print(f"not all of {' '.join(names)}; the next call goes on from what is stored", flush=True)
            return 3
        options = ["--scale", scale, "--store", str(store), "--out", str(out), "--drop-weights"]
        last = max(end, time.monotonic() + TO_JUDGE) if together else end
        code = ended([sys.executable, "-m", "flatscope", "study", "run", *names, *options], last)
        if code is None:
            print(f"broken off: {' '.join(names)}; the next call goes on from its last checkpoint", flush=True)
            return 3
        failed |= code != 0
    return int(failed)


def has_all(names: Iterable[str], scale: str, store: Path) -> bool:
    """True if nothing of these studies is left but to judge them."""
    kept = Store(store)
    return all(config in kept for name in names for stage in find_study(name).stages(scale) for config in stage.configs)


def ended(command: Sequence[str], end: float) -> int | None:
    """The exit status; None where the time was over first, and the command was told to keep what it has."""
    print("$", " ".join(command[2:]), flush=True)
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(ENDING / 2)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return None


def pack(folder: Path, store: Path, out: Path, limit: float) -> None:
    """Results and trials, then checkpoints as far as there is room, as numbered pieces of one archive."""
    folder.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz", preset=1) as archive:
        room = limit
        for base, name in ((out, "results"), (store, "store")):
            files = sorted(path for path in base.rglob("*") if path.is_file())
            for path in sorted(files, key=lambda path: ".unfinished" in path.parts):
                room -= path.stat().st_size
                if room < 0:
                    print(f"left behind, too large to travel: {path}", flush=True)
                    room += path.stat().st_size
                    continue
                archive.add(path, f"{name}/{path.relative_to(base)}")
    data = content.getvalue()
    for old in folder.glob("piece-*"):
        old.unlink()
    for number, start in enumerate(range(0, len(data), PIECE)):
        (folder / f"piece-{number:02}").write_bytes(data[start : start + PIECE])
    print(f"packed {len(data) / 2**20:.1f} MiB into {folder}", flush=True)


def unpack(folder: Path, store: Path, out: Path) -> None:
    """What `pack` wrote, over what is there."""
    data = b"".join(piece.read_bytes() for piece in sorted(folder.glob("piece-*")))
    if not data:
        return
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:xz") as archive:
        for base, name in ((out, "results"), (store, "store")):
            for member in archive.getmembers():
                first, _, rest = member.name.partition("/")
                if first == name and rest:
                    member.name = rest
                    archive.extract(member, base, filter="data")


if __name__ == "__main__":
    sys.exit(main())
