"""`python -m benchmarks.side_by_side`: the trials of several studies in several processes on one GPU and one store.

One process leaves most of a large GPU idle on the networks of these studies. Each process takes the first piece of work
that nobody else is at and whose networks are there: a network is looked at right after it was trained, and its weights
are dropped once nothing more looks at it. What is interrupted goes on from its checkpoint. Processes share the GPU in
turns, and at the same time where NVIDIA's multi-process service runs: start it before them with
`nvidia-cuda-mps-control -d`. Four processes that train VGG on an H200 then do 1.8 times what one does, ten 1.9 times;
without it four do no more than one.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flatscope.training import Store, key_of
from flatscope.training.sweeps.unit_queue import at_most_every, attempt_unit
from flatscope_papers.declaration import Config, importable_name
from flatscope_papers.one_by_one import keys_within_configuration
from flatscope_papers.study_registry import find_study

ROOT = Path(__file__).parents[1]
WAIT = 1.0  # seconds until work that others are at is looked at again
SAID_EVERY = 20.0  # seconds between two lines on the same piece of work
TIME_IS_OVER = 3  # exit status of a process that left something
TO_END = 25.0  # seconds that an interrupted process has to keep what it did
BY_ITSELF = ("vgg", "small_inception", "wide_resnet", "plainnet18")  # large enough for a process of its own


@dataclass(frozen=True)
class Piece:
    """Trials that are done together, and those that they look at."""

    configs: tuple[Config, ...]
    work: str
    needs: tuple[Config, ...]

    def is_done(self, store: Store) -> bool:
        """True if the store has all of them."""
        return all(config in store for config in self.configs)


def pieces_of(names: Sequence[str], scale: str, device: str, *, single: bool) -> list[Piece]:
    """The work of some studies, each look right behind the last network that it needs, networks of most images first.

    What takes longest is begun first, so that no process is left alone with it at the end.

    Args:
        names: of the studies, the more urgent first.
        scale: of all of them.
        device: where trials run.
        single: whether large networks are taken out of the units in which they would train as a stack.
    """
    stages_of = [find_study(name).stages(scale) for name in names]
    wanted = [{key_of(config) for stage in stages for config in stage.configs} for stages in stages_of]
    stages = [stage for stages in stages_of for stage in stages]
    known = {key_of(config): config for stage in stages for config in stage.configs}
    pieces: list[Piece] = []
    place_of: dict[str, int] = {}  # of a trial's piece, by the key of the trial
    for stage in stages:
        for unit in stage.units:
            own = {key_of(config): {**config, "device": config.get("device", device)} for config in unit}
            new = [config for key, config in own.items() if key not in place_of]
            apart = single and all(_is_large(config) for config in new)
            for part in [[config] for config in new] if apart else [new] if new else []:
                place_of |= {key_of(config): len(pieces) for config in part}
                needs = {
                    key: known[key] for config in part for key in keys_within_configuration(config) if key in known
                }
                pieces.append(Piece(tuple(part), importable_name(stage.work), tuple(needs.values())))
    behind = [max((place_of[key_of(need)] for need in piece.needs), default=i) for i, piece in enumerate(pieces)]
    study = [min(number for number, keys in enumerate(wanted) if keys & set(map(key_of, p.configs))) for p in pieces]

    def urgency(place: int) -> tuple[int, int, int, int]:
        last = behind[place]
        return study[last], -_images(pieces[last].configs[0]), last, place

    return [pieces[place] for place in sorted(range(len(pieces)), key=urgency)]


def _images(config: Mapping[str, Any]) -> int:
    """Number of images that a network is trained on, where the trial names it; else 0."""
    network = config.get("network", config)
    return network.get("data", {}).get("train_size") or 0


def _is_large(config: Mapping[str, Any]) -> bool:
    network = config.get("network", config)
    return network.get("model", {}).get("name") in BY_ITSELF


def work(pieces: Sequence[Piece], store: Store, end: float) -> int:
    """Do pieces while there are any that can be done, until the end; 0 where all are done, 1 where one failed."""
    failed: set[int] = set()
    while time.time() < end:
        left = [place for place, piece in enumerate(pieces) if place not in failed and not piece.is_done(store)]
        if not left:
            break
        held = store.running()
        free = [place for place in left if not any(key_of(config) in held for config in pieces[place].configs)]
        for place in free:
            piece = pieces[place]
            if not all(config in store for config in piece.needs):
                continue
            words = f"{place + 1}/{len(pieces)} {piece.work.rpartition(':')[2]} {_words(piece.configs[0])}"
            begun = time.monotonic()
            outcome = attempt_unit(piece.work, piece.configs, store, at_most_every(_say(words), SAID_EVERY))
            if outcome.kind == "busy":
                continue
            print(f"{outcome.kind} {words}: {time.monotonic() - begun:.1f} s {outcome.details}", flush=True)
            if outcome.kind == "raised":
                failed.add(place)
            else:
                drop_weights(piece, pieces, store)
            break
        else:
            if set(left) == set(free) and all(_is_lost(pieces[place], pieces, failed) for place in left):
                break
            time.sleep(WAIT)
    return 1 if failed else 0 if all(piece.is_done(store) for piece in pieces) else TIME_IS_OVER


def drop_weights(done: Piece, pieces: Sequence[Piece], store: Store) -> None:
    """Remove the weights of a finished piece and of what it has looked at, where nothing else is to look at them."""
    for config in (*done.needs, *done.configs):
        key = key_of(config)
        others = [piece for piece in pieces if any(key_of(need) == key for need in piece.needs)]
        if all(piece.is_done(store) for piece in others):
            store.drop_weights(config)


def _is_lost(piece: Piece, pieces: Sequence[Piece], failed: set[int]) -> bool:
    """True if it looks at trials of a piece that failed."""
    needed = {key_of(config) for config in piece.needs}
    return any(key_of(config) in needed for place in failed for config in pieces[place].configs)


def _say(words: str) -> Any:
    return lambda fraction, note: print(f"  {words}: {fraction:.0%} {note}", flush=True)


def _words(config: Config) -> str:
    """A trial in a few words: network, images, labels, batch, seed."""
    network = config.get("network", config)
    if not isinstance(network, Mapping) or "train" not in network:
        return key_of(config)[:8]
    labels = network.get("labels") or {}
    shown = {
        "": network["model"]["name"],
        "n": network["data"].get("train_size", ""),
        **{name: labels[name] for name in ("random", "confusion") if name in labels},
        "batch": network["train"].get("batch_size", ""),
        "seed": network["train"].get("seed", 0),
    }
    return " ".join(f"{name} {value}".strip() for name, value in shown.items())


def run_together(names: Sequence[str], scale: str, store: Path, together: int, end: float, *, single: bool) -> int:
    """Run the trials in so many processes until the end, by `time.time()`; the worst of their exit statuses."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    threads = str(max(1, (os.cpu_count() or 1) // together))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": threads,
    }
    options = ["--scale", scale, "--store", str(store), "--until", str(end), *(["--single"] if single else [])]
    command = [sys.executable, "-m", "benchmarks.side_by_side", *names, *options]
    processes = [subprocess.Popen(command, env=environment, start_new_session=True) for _ in range(together)]
    try:
        while time.time() < end and any(process.poll() is None for process in processes):
            time.sleep(0.5)
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        last = time.time() + TO_END
        for process in processes:
            try:
                process.wait(max(0.0, last - time.time()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return max(abs(process.returncode) for process in processes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", nargs="+", help="the more urgent first")
    parser.add_argument("--scale", default="paper")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--together", type=int, help="processes to start; without it this is one of them")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which the processes are told to end")
    parser.add_argument("--until", type=float, help="the same as seconds since 1970")
    parser.add_argument("--single", action="store_true", help="large networks of a unit in processes of their own")
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores for what it starts behind itself
    end = given.until if given.until is not None else time.time() + 60 * given.minutes
    if given.together:
        return run_together(given.study, given.scale, given.store, given.together, end, single=given.single)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pieces = pieces_of(given.study, given.scale, device, single=given.single)
    try:
        return work(pieces, Store(given.store), end)
    except KeyboardInterrupt:
        return TIME_IS_OVER


if __name__ == "__main__":
    sys.exit(main())
