"""What waits for a GPU is declared, and goes on where a call ended: `python -m benchmarks.pending_studies`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks are no part of the package

from benchmarks import pending_studies as pending  # noqa: E402
from benchmarks.pending_studies import PENDING, ended, listed, pack, run_all, unpack  # noqa: E402
from benchmarks.side_by_side import TIME_IS_OVER, Piece, pieces_of, work  # noqa: E402
from flatscope.training import Store, key_of  # noqa: E402
from flatscope_papers import find_study  # noqa: E402
from flatscope_papers.claims import UNTESTABLE  # noqa: E402
from flatscope_papers.reproduction import load_results  # noqa: E402
from flatscope_papers.study_registry import studies  # noqa: E402

RESULTS = ROOT / "src" / "flatscope_papers" / "results"


@pytest.mark.filterwarnings("ignore:.*is gone")
def test_every_study_with_something_left_to_test_on_a_gpu_waits_and_is_declared() -> None:
    waiting = {name for group in PENDING for name in group.studies}
    assert len(waiting) == sum(len(group.studies) for group in PENDING)
    for name in waiting:
        assert find_study(name).stages("paper")
    saved = load_results(RESULTS)
    for name in studies():
        result = saved[name].get("paper")
        left = result is None or any(f.verdict == UNTESTABLE and f.counts for f in result.findings)
        assert not left or name in waiting, name


def test_packed_and_brought_again_is_the_same_and_what_is_too_large_stays(tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    files = {
        store / "key" / "metrics.json": b"1",
        out / "a-study" / "paper" / "verdicts.json": b"2",
        store / ".unfinished" / "u" / "state": bytes(5000),
    }
    for path, content in files.items():
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    pack(tmp_path / "all", store, out, 10_000)
    unpack(tmp_path / "all", tmp_path / "store2", tmp_path / "out2")
    for path, content in files.items():
        moved = tmp_path / str(path.relative_to(tmp_path)).replace("store/", "store2/").replace("out/", "out2/")
        assert moved.read_bytes() == content
    pack(tmp_path / "some", store, out, 4000)
    unpack(tmp_path / "some", tmp_path / "store3", tmp_path / "out3")
    assert (tmp_path / "store3" / "key" / "metrics.json").is_file()
    assert not (tmp_path / "store3" / ".unfinished").exists()
    unpack(tmp_path, tmp_path / "store4", tmp_path / "out4")  # nothing was packed: the first call
    assert not (tmp_path / "store4").exists()


def test_a_call_ends_in_time_and_done_studies_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[list[str]] = []

    def run(command: list[str], end: float) -> int | None:
        names = command[5 : command.index("--scale")]
        begun.append(names)
        for name in names[:1] if len(begun) == 2 else names:
            done = tmp_path / name / "smoke" / "verdicts.json"
            done.parent.mkdir(parents=True)
            done.write_text("{}")
        return None if len(begun) == 2 else 0

    monkeypatch.setattr(pending, "ended", run)
    groups = [pending.Pending((f"s{i}", f"t{i}"), 10, "") for i in range(3)]
    assert run_all(groups, "smoke", tmp_path, tmp_path, 0.0) == 3
    assert begun == [["s0", "t0"], ["s1", "t1"]]
    assert listed(groups, tmp_path, "smoke")[-1] == "20 s of one H200 are left"
    assert run_all(groups, "smoke", tmp_path, tmp_path, 0.0) == 0
    assert begun[2:] == [["t1"], ["s2", "t2"]]


def test_a_command_that_goes_on_is_told_to_end(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    code = f"import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    open({str(kept)!r}, 'w').close()"
    begun = time.monotonic()
    assert ended([sys.executable, "-c", code], begun + 2) is None
    assert time.monotonic() - begun < 20
    assert kept.exists()
    assert ended([sys.executable, "-c", "raise SystemExit(5)"], time.monotonic() + 20) == 5


def test_stored_trials_are_sound_and_of_studies_that_wait(tmp_path: Path) -> None:
    unpack(pending.STORED, tmp_path / "store", tmp_path / "out")
    store = Store(tmp_path / "store")
    assert not store.damaged()
    waiting = [name for group in PENDING for name in group.studies]
    known = {
        key_of(config) for name in waiting for stage in find_study(name).stages("paper") for config in stage.configs
    }
    of_a_seed_to_come = [trial for trial in store.stored() if trial.key not in known]
    assert all(trial.config.get("network", trial.config)["train"]["seed"] == 2 for trial in of_a_seed_to_come)
    assert pending.has_all(["zhang2017-table2", "zhang2017-fig17", "neyshabur2017-fig3"], "paper", tmp_path / "store")


def test_pieces_are_in_an_order_in_which_they_can_be_done_and_none_comes_twice() -> None:
    names = ["neyshabur2017-fig3", "neyshabur2017-fig1", "neyshabur2017-fig2", "zhang2017-table1"]
    pieces = pieces_of(names, "paper", "cpu", single=True)
    keys = [key_of(config) for piece in pieces for config in piece.configs]
    wanted = {
        key_of(config) for name in names for stage in find_study(name).stages("paper") for config in stage.configs
    }
    assert len(keys) == len(set(keys))
    assert set(keys) == wanted
    before: set[str] = set()
    for piece in pieces:
        assert {key_of(need) for need in piece.needs} <= before
        before |= {key_of(config) for config in piece.configs}
    vgg = [piece for piece in pieces if "vgg" in str(piece.configs[0])]
    assert {len(piece.configs) for piece in vgg} == {1}
    # A look comes right after its network: norms and perturbations, then the next network.
    assert [bool(piece.needs) for piece in vgg[:6]] == [False, True, True] * 2


def test_several_processes_do_every_trial_once_and_drop_weights_that_nothing_looks_at(tmp_path: Path) -> None:
    names = ["neyshabur2017-fig1", "neyshabur2017-fig2"]
    store, out = tmp_path / "store", tmp_path / "out"
    groups = [pending.Pending(tuple(names), 10, "")]
    assert pending.run_all(groups, "smoke", store, out, time.monotonic() + 120, 2) == 0
    assert all(pending.is_done(name, out, "smoke") for name in names)
    assert not list(store.rglob("weights.safetensors"))
    pieces = pieces_of(names, "smoke", "cpu", single=True)
    assert all(piece.is_done(Store(store)) for piece in pieces)
    assert work(pieces, Store(store), time.time() + 10) == 0
    assert work(pieces, Store(tmp_path / "empty"), 0.0) == TIME_IS_OVER


def test_what_looks_at_a_failed_network_is_not_waited_for(tmp_path: Path) -> None:
    def piece(name: str, does: str, *needs: dict[str, str]) -> Piece:
        return Piece(({"name": name},), f"tests.papers.test_pending_studies:{does}", needs)

    store = Store(tmp_path)
    pieces = [piece("a", "fails"), piece("b", "writes", {"name": "a"}), piece("c", "writes")]
    assert work(pieces, store, time.time() + 20) == 1
    assert [one.is_done(store) for one in pieces] == [False, False, True]
    assert work([piece("a", "writes"), pieces[1]], store, time.time() + 20) == 0  # and the next call tries again


def fails(configs: list[dict[str, str]], store: Store, report: object) -> None:
    raise ValueError("no")


def writes(configs: list[dict[str, str]], store: Store, report: object) -> None:
    for config in configs:
        store.write(config, {"one": 1}, weights={"w": torch.zeros(1)})
