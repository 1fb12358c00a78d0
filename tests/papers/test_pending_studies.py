"""What waits for a GPU is declared, and goes on where a call ended: `python -m benchmarks.pending_studies`."""

from __future__ import annotations

import json
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks are no part of the package

from benchmarks import pending_studies as pending  # noqa: E402
from benchmarks.pending_studies import PENDING, VGG, ended, listed, pack, run_all, unpack  # noqa: E402
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


def test_the_rate_of_dropout_goes_into_the_settings_of_the_vggs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids, store = tmp_path / "src" / "grids.toml", tmp_path / "store"
    grids.parent.mkdir()
    store.mkdir()
    grids.write_text(pending.GRIDS.read_text())
    monkeypatch.setattr(pending, "GRIDS", grids)
    monkeypatch.setattr(pending, "ROOT", tmp_path)
    for rate in (0.2, 0.5):
        (store / pending.DROPOUT).write_text(json.dumps({"dropout": rate}))
        assert pending.probed(store, 0.0) == 0
        model = tomllib.loads(grids.read_text())["label_networks"]["paper"]["model"]
        assert model == {"name": "vgg", "options": {"dropout": rate}}
    assert len(VGG.findall(grids.read_text())) == 1
