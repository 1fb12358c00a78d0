"""`python -m benchmarks.pending_studies`: the studies that wait for a GPU, one after another, as far as time goes.

For a machine that is lent for some minutes and starts bare every time:

    python -m benchmarks.pending_studies --list
    python -m benchmarks.pending_studies --minutes 9 --store STORE --out RESULTS --bring BROUGHT --pack TAKEN

takes up what BROUGHT holds of earlier calls, runs studies in the order of what they decide for their seconds, one unit
at a time and with `--drop-weights`, breaks off when the minutes are over, and packs trials, checkpoints of unfinished
ones and results into TAKEN, in files small enough to travel. The next call with `--bring TAKEN` goes on where this one
ended. Data are found where FLATSCOPE_DATA says. When a study is done its results are in RESULTS; copy them to
`src/flatscope_papers/results`, then `make reproduction`. Stores of several machines become one with
`flatscope study join`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parents[1]
GRIDS = ROOT / "src/flatscope_papers/neyshabur2017/grids.toml"
VGG = re.compile(r'model = \{ name = "vgg"(?:, options = \{ dropout = [\d.]+ \})? \}')
DROPOUT = "dropout.json"  # in the store: the rate that the probe found
RATES = (0.5, 0.2, 0.0)
PIECE = 15 * 2**20  # bytes of a file that travels
ENDING = 40.0  # seconds that a run which is told to end may take, and packing


class Pending(NamedTuple):
    """Studies that share networks, run together."""

    studies: tuple[str, ...]
    seconds: int  # of one H200 by itself, reckoned from measured epochs
    decides: str


PENDING = (
    Pending(("zhang2017-fig17", "zhang2017-fig16"), 100, "six claims on margins and norms of networks that fit"),
    Pending(("zhang2017-table2",), 600, "nine claims on the errors of four architectures"),
    Pending(("zhang2017-fig2",), 800, "whether 2,000 and 5,000 random labels are fitted without error"),
    Pending(
        ("neyshabur2017-fig1", "neyshabur2017-fig2"),
        2400,
        "18 claims on VGG with true and random labels, now at a reduced scale",
    ),
    Pending(("neyshabur2017-fig3",), 600, "eight claims on VGG with a confusion set, now at a reduced scale"),
    Pending(
        ("yi2019-fig3",), 2600, "seven claims on PlainNet-18 with a small and a large batch, now at a reduced scale"
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
    parser.add_argument("--bring", type=Path, help="folder that an earlier call packed")
    parser.add_argument("--pack", type=Path, help="folder for what is to be brought again")
    parser.add_argument("--probe", action="store_true", help="only find the rate of dropout of the VGGs")
    parser.add_argument("--limit", type=float, default=60.0, help="MiB that may travel")
    given = parser.parse_args()
    unknown = set(given.study) - {name for group in PENDING for name in group.studies}
    if unknown:
        parser.error(f"not waiting: {', '.join(sorted(unknown))}; --list names what is")
    chosen = [group for group in PENDING if not given.study or set(group.studies) & set(given.study)]
    if given.bring:
        unpack(given.bring, given.store, given.out)
    if given.list:
        print("\n".join(listed(chosen, given.out, given.scale)))
        return 0
    if given.probe:
        probe(given.store)
        return 0
    end = time.monotonic() + 60 * given.minutes - ENDING
    status = run_all(chosen, given.scale, given.store, given.out, end)
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


def run_all(groups: Iterable[Pending], scale: str, store: Path, out: Path, end: float) -> int:
    """The studies that are not done, until the time is over; 0 where all are, 3 where some wait, 1 where one failed."""
    failed = False
    for group in groups:
        names = [name for name in group.studies if not is_done(name, out, scale)]
        if not names:
            continue
        if any(name.startswith("neyshabur2017") for name in names) and scale == "paper":
            code = probed(store, end)
            if code:
                return code
        options = ["--scale", scale, "--store", str(store), "--out", str(out), "--drop-weights"]
        code = ended([sys.executable, "-m", "flatscope", "study", "run", *names, *options], end)
        if code is None:
            print(f"broken off: {' '.join(names)}; the next call goes on from its last checkpoint", flush=True)
            return 3
        failed |= code != 0
    return int(failed)


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


def probed(store: Path, end: float) -> int:
    """The rate of dropout of the VGGs, found once, into the settings: every later call must have the same."""
    kept = store / DROPOUT
    if not kept.is_file():
        code = ended([sys.executable, "-m", "benchmarks.pending_studies", "--probe", "--store", str(store)], end)
        if code is None:
            return 3
        if code:
            return code
    rate = json.loads(kept.read_text())["dropout"]
    GRIDS.write_text(VGG.sub(f'model = {{ name = "vgg", options = {{ dropout = {rate} }} }}', GRIDS.read_text()))
    print(f"dropout {rate}: {GRIDS.relative_to(ROOT)} says so; take the line over", flush=True)
    return 0


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


def probe(store: Path) -> None:
    """Train on 10,000 random labels with less and less dropout; the first rate that comes to the loss is kept."""
    from flatscope.training import Store, train_and_measure
    from flatscope_papers.neyshabur2017.label_networks import SIZES, label_network_config

    kept, size, device = Store(store), SIZES["paper"], "cuda" if torch.cuda.is_available() else "cpu"
    for rate in RATES:
        config = label_network_config(
            {**size, "model": {"name": "vgg", "options": {"dropout": rate}}}, min(size["samples"]), "random", 0
        )
        if config not in kept:
            train_and_measure([{**config, "device": device}], kept, lambda share, note: print(f"{share:.0%} {note}"))
        loss = kept.read(config).metrics["train_loss"]
        print(f"dropout {rate}: a loss of {loss:.2g} on {min(size['samples'])} random labels", flush=True)
        if loss <= size["train"]["stop_loss"]:
            break
    (store / DROPOUT).write_text(json.dumps({"dropout": rate, "loss": loss}))


if __name__ == "__main__":
    sys.exit(main())
