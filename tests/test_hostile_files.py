"""Files that are none, damaged, or named to steer a terminal: said at once, in our words, with nothing left out."""

from __future__ import annotations

import csv
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fuzz
import fuzz_kinds
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from test_cli import Run
from test_cli import run as run  # a fixture
from torch import nn

import flatscope as fs
from flatscope.cli.run_population import read_table_of_looks
from flatscope.decisions.allocation import Allocation
from flatscope.disk import MOST_TEXT, read_file, whole_file, write_whole
from flatscope.errors import InputError, WeightsError
from flatscope.files import file_digest, foreign_parquet, frame_bytes, from_npz_bytes, parquet_metadata
from flatscope.formatting import printable_text
from flatscope.inputs.weight_files import read_weights
from flatscope.training.sweeps.configuration import Sweep, read_toml
from flatscope.training.sweeps.store import Store
from flatscope.training.sweeps.trial_files import DamagedTrial

KINDS = fuzz_kinds.kinds()
PLAN = """
name = "one"
work = "trial_work:square"
[grid]
x = [1, 2, 3, 4]
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_refused_or_done_without(kind: str, tmp_path: Path) -> None:
    for seed in range(len(fuzz.SPECIAL)):
        assert fuzz.replace_file(KINDS[kind], tmp_path / "files", 5 * seed) in ("refused", "done without")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [name for name, each in KINDS.items() if each.own])
def test_no_flipped_bit_is_read_as_something_else(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    KINDS[kind].write(folder)
    before = KINDS[kind].read(folder)
    for place in random.Random(0).sample(range(fuzz.bits_of(folder)), 40):
        assert fuzz.flip(KINDS[kind], folder, place, before) in ("refused", "same")


def test_a_file_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sweep.toml"
    with path.open("wb") as file:
        file.truncate(MOST_TEXT + 1)  # takes no room on the disk
    for read in (read_toml, lambda path: read_file(path, MOST_TEXT)):
        with pytest.raises(InputError, match="at most 268,435,456 bytes"):
            read(path)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="limits of memory as Linux has them")
def test_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    """Not as much as the largest file may have: where memory is not lent freely, nothing could be read."""
    path = tmp_path / "a.txt"
    path.write_text("words")
    program = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
    program += "from flatscope.disk import read_file; assert read_file(sys.argv[1]) == b'words'"
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr


def environment() -> dict[str, str]:
    """Of a process with the source of this checkout, and one thread, whose stacks take memory too."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="files as Linux has them")
def test_a_file_that_grows_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatscope.disk.CHUNK", 3)
    assert read_file("/proc/self/comm") == Path("/proc/self/comm").read_bytes()  # says that it has no bytes
    with pytest.raises(InputError, match="at most 4 bytes, got more"):
        read_file("/proc/self/maps", 4)


def sweep(folder: Path) -> tuple[Path, Store]:
    """A store with four trials of one sweep, and the sweep's file."""
    file = folder / "one.toml"
    file.write_text(PLAN)
    store = Store(folder / "store")
    planned = Sweep.from_file(file)
    for config in planned.configs():
        store.write(config, {"loss_gap": float(config["x"])}, weights={"w": torch.ones(2)})
    store.remember(planned.name, planned.to_dict())
    return file, store


def flipped(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_damaged_trials_are_counted_and_never_left_out_of_an_export(tmp_path: Path, run: Run) -> None:
    file, store = sweep(tmp_path)
    first, second, *_ = (store.key(config) for config in Sweep.from_file(file).configs())
    flipped(Path(store.root) / first / "config.json", -5)
    flipped(Path(store.root) / second / "metrics.json", 40)
    status = run("sweep", "status", "--store", store.root)
    assert status.code == 1
    assert status.out.split()[-6:] == ["one", "4", "2", "0", "0", "2"]
    assert "2 trials damaged" in status.err
    export = run("sweep", "export", tmp_path / "all.parquet", "--store", store.root)
    assert export.code == 2
    assert "2 of 4 trials damaged" in export.err
    assert "Run the sweep again" in export.err
    assert not (tmp_path / "all.parquet").exists()
    with pytest.warns(UserWarning, match="2 of 4 trials damaged"):
        assert len(store.frame()) == 2
    with pytest.raises(DamagedTrial):
        store.export(tmp_path / "all.csv")
    for config in Sweep.from_file(file).configs():
        store.write(config, {"loss_gap": float(config["x"])}, weights={"w": torch.ones(2)})
    assert run("sweep", "status", "--store", store.root).code == 0
    assert run("sweep", "export", tmp_path / "all.parquet", "--store", store.root).code == 0


@pytest.mark.parametrize("ending", [".parquet", ".csv"])
def test_every_flipped_byte_of_an_exported_table_is_noticed(ending: str, tmp_path: Path) -> None:
    _, store = sweep(tmp_path)
    path = tmp_path / f"all{ending}"
    store.export(path)
    whole, right = path.read_bytes(), read_table_of_looks(str(path))
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        try:
            found = read_table_of_looks(str(path))
        except InputError:
            continue
        pd.testing.assert_frame_equal(found, right)


@pytest.mark.parametrize("kind", ["one", "population"])
def test_every_csv_file_of_a_training_has_its_checksum(kind: str, tmp_path: Path, run: Run) -> None:
    words = [
        "--model",
        "mlp",
        "--model-option",
        "widths=64,8,10",
        "--data",
        "digits",
        "--train-size",
        "40",
        "--epochs",
        "1",
    ]
    if kind == "population":
        words = ["--population", Path(__file__).parent.parent / "examples" / "population.toml"]
    outcome = run("train", *words, "--out", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    written = sorted((tmp_path / "run").rglob("*.csv"))
    assert written
    for path in written:
        beside = path.with_name(f"{path.name}.b2sum").read_text().split()
        assert beside == [file_digest(path), path.name]


FORMULAS = ["=1+1", "@SUM(1+1)", "+1+1", "-1+1", '=HYPERLINK("http://a","b")', "\t=1", "\r=1", "'=1", "a,=1"]


def test_csv_files_hold_every_text_as_it_is(tmp_path: Path) -> None:
    """Also where a spreadsheet takes it for a formula, as SECURITY.md says; nothing is put before it or left out."""
    store, models = Store(tmp_path / "store"), {text: nn.Linear(2, 2) for text in FORMULAS}
    for text in FORMULAS:
        store.write({"x": text, text: 1}, {"loss_gap": 1.0}, weights={"w": torch.ones(2)})
    store.export(tmp_path / "all.csv")
    samples = torch.eye(2), torch.tensor([0, 1])
    fs.compare(models, samples, names=["parameter_count"]).save(tmp_path / "compared.csv")
    for name, column in {"all": "x", "compared": "network"}.items():
        with (tmp_path / f"{name}.csv").open(newline="") as file:
            head, *rows = csv.reader(file)
        texts = (
            FORMULAS if name == "all" else map(printable_text, FORMULAS)
        )  # names of networks are cleaned when they come
        assert {row[head.index(column)] for row in rows} == set(texts)
        assert (tmp_path / f"{name}.csv.b2sum").exists()
        assert name == "compared" or set(FORMULAS) < set(head)
    security = (Path(__file__).parent.parent / "SECURITY.md").read_text()
    assert all(f"`{first}`" in security for first in "=+-@")


def test_a_table_that_its_owner_changed_is_read_without_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    write_whole(path, b"lr,loss_gap\n0.1,1\n", with_sum=True)
    path.write_bytes(b"lr,loss_gap\n0.1,2\n")
    with pytest.raises(InputError, match=r"Remove mine\.csv\.b2sum if you changed"):
        read_table_of_looks(str(path))
    (tmp_path / "mine.csv.b2sum").unlink()
    assert read_table_of_looks(str(path))["loss_gap"].tolist() == [2]


def test_nullable_and_other_columns_come_back_as_they_were() -> None:
    frame = pd.DataFrame(
        {"n": pd.array([1, None], "Int64"), "s": ["a", "b"], "f": np.float32([1, 2]), "b": [True, False]}
    )
    again = foreign_parquet(frame_bytes(frame))
    pd.testing.assert_frame_equal(again, frame)
    assert b"flatscope_checksum" in parquet_metadata(frame_bytes(frame))


@pytest.mark.parametrize("change", ["edited", "[]", "null", "NaN", "a folder", "a loop", "without its checksum"])
def test_a_changed_plan_is_not_resumed(change: str, tmp_path: Path, run: Run) -> None:
    file, store = sweep(tmp_path)
    path = Path(store.root) / ".plans" / "one.json"
    text = path.read_text()
    path.unlink()
    if change == "a folder":
        path.mkdir()
    elif change == "a loop":
        path.symlink_to(path.name)
    elif change == "without its checksum":
        path.write_text("{" + text[: text.rindex(',\n"checksum"')].split("\n", 2)[2] + "}")
    else:
        path.write_text(text.replace("4", "5") if change == "edited" else change)
    for words in (["status"], ["resume", "--workers", 0], ["resume", "--name", "one", "--workers", 0]):
        found = run("sweep", *words, "--store", store.root)
        assert found.code in (1, 2)
        assert "one.json: expected the file that flatscope wrote" in found.err
    assert run("watch", store.root, "--once").code == 2
    if change == "a folder":
        path.rmdir()
    assert run("sweep", "run", file, "--store", store.root, "--workers", 0).code == 0
    assert path.read_text() == text  # written anew


@pytest.mark.parametrize("what", ["an empty file", "a link to itself", "a pipe"])
@pytest.mark.parametrize("place", ["the trial", "metrics.json", "config.json", "weights.safetensors"])
@pytest.mark.filterwarnings("ignore:.* damaged")
def test_what_stands_in_the_place_of_a_trial_gives_way(what: str, place: str, tmp_path: Path, run: Run) -> None:
    file, store = sweep(tmp_path)
    config = Sweep.from_file(file).configs()[0]
    path = Path(store.root) / store.key(config)
    path = path if place == "the trial" else path / place
    shutil.rmtree(path) if place == "the trial" else path.unlink()
    fuzz.SPECIAL[what](path)
    begun = time.monotonic()
    assert config not in store
    assert run("sweep", "status", "--store", store.root).code == 1
    assert run("sweep", "run", file, "--store", store.root, "--workers", 0).code == 0
    assert config in store
    assert store.is_sound(config)
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("folder", [".plans", ".claims", ".failed"])
def test_a_folder_of_a_store_that_is_a_loop_is_named(folder: str, tmp_path: Path, run: Run) -> None:
    _, store = sweep(tmp_path)
    shutil.rmtree(Path(store.root) / folder, ignore_errors=True)
    (Path(store.root) / folder).symlink_to(folder)
    found = run("sweep", "status", "--store", store.root)
    assert found.code == 2
    assert folder in found.err
    assert "--debug" not in found.err


@pytest.mark.parametrize("text", ["a = " + "[" * 20_000, "a = " + "1" * 6_000, 'a = "\x00"', "a = \xff"])
def test_hostile_toml_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(text.encode("latin1"))
    with pytest.raises(InputError, match="expected TOML"):
        read_toml(tmp_path / "a.toml")


def test_deep_json_in_a_run_folder_is_refused(tmp_path: Path, run: Run) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "state.json").write_text('{"state": ' + "[" * 20_000)
    found = run("watch", tmp_path, "--once")
    assert found.code == 2
    assert "nested too deeply" in found.err


def test_an_archive_that_says_it_is_empty_is_no_set_of_directions(tmp_path: Path) -> None:
    KINDS["directions"].write(tmp_path)
    path = tmp_path / "directions.npz"
    content = bytearray(path.read_bytes())
    content[-10] ^= 128  # of the size of the list of members: it seems to have none, and no checksum then
    path.write_bytes(content)
    with pytest.raises(InputError, match="directions of a landscape"):
        KINDS["directions"].read(tmp_path)


def test_a_pickle_in_the_place_of_arrays_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "directions.npz")
    with pytest.raises(ValueError, match="is no array"):
        from_npz_bytes((tmp_path / "directions.npz").read_bytes())
    with pytest.raises(InputError):
        fuzz_kinds._directions(tmp_path)


@pytest.mark.parametrize("change", ["a zero byte", "words"])
def test_a_history_whose_numbers_are_none_is_refused(change: str, tmp_path: Path, run: Run) -> None:
    tmp_path = tmp_path / "run"
    fuzz_kinds._run_folder(tmp_path)
    (tmp_path / "history.csv.b2sum").unlink()
    path = tmp_path / "history.csv"
    path.write_bytes(path.read_bytes().replace(b"0.25", b"0.2\x00" if change == "a zero byte" else b"low"))
    found = run("report", tmp_path, "--out", tmp_path / "page.html")
    assert found.code == 2
    assert "train_loss" in found.err
    assert "--debug" not in found.err


def test_a_state_dict_without_checksums_is_remarked_on(tmp_path: Path) -> None:
    fuzz_kinds._foreign_weights(tmp_path)
    with pytest.warns(UserWarning, match="no checksum protects"):
        read_weights(tmp_path / "old.pt")


ESCAPES = "evil\x1b]0;title\x1b\\\x1b[2J\x9b31m\u202ecod\r"


def with_a_hostile_layer(folder: Path) -> list[list[object]]:
    """Commands that show the names of a network's layers."""
    words = ["from torch import nn", "def build():", "    model = nn.Sequential(nn.Flatten())"]
    words += [f"    model.add_module({ESCAPES.replace('.', '')!r}, nn.Linear(64, 10))", "    return model"]
    (folder / "mine.py").write_text("\n".join(words))
    torch.save({}, folder / "none.pt")
    network = ["--model", f"{folder / 'mine.py'}:build", "--data", "digits", "--train-size", 20]
    return [
        ["measure", *network, "-m", "layer_trace", "-m", "l2_norm"],
        ["explain", *network],
        ["sensitivity", *network, "--bits", 4, "--sparsity", 0, "--mean-bits", 4],
        ["diagonal", *network, "--out", folder / "d.safetensors"],
        ["forecast", *network, "--to", folder / "none.pt"],
    ]


def test_no_name_in_a_file_reaches_the_terminal_raw(tmp_path: Path, run: Run) -> None:
    safetensors.torch.save_file({ESCAPES: torch.ones(2)}, tmp_path / "w.safetensors")
    np.savez(tmp_path / "x.npz", **{ESCAPES: np.ones(2)})
    rows = {ESCAPES: [0.1, 0.2, 0.3, 0.4], "loss_gap": [1.0, 2.0, 3.0, 4.0], "margin": [1.0, 2.5, 3.0, 3.5]}
    pd.DataFrame(rows).to_csv(tmp_path / "looks.csv", index=False)
    _, store = sweep(tmp_path)
    store.fail({"x": 9}, f"ValueError: {ESCAPES}")
    model = ["--model", "mlp", "--model-option", "widths=64,8,10"]
    network = ["measure", *model, "--data", "digits", "--train-size", 20, "--flatten", "-m", "margin"]
    seen = [
        run(*network, "--weights", tmp_path / "w.safetensors"),
        run("measure", "--model", "mlp", "--data", tmp_path / "x.npz", "-m", "margin"),
        run("atlas", tmp_path / "looks.csv", "--by", "nothing"),
        run("atlas", tmp_path / "looks.csv", "--target", ESCAPES, "-m", "margin"),
        run("sweep", "status", "--store", store.root),
        run("--debug", *network, "--weights", tmp_path / "w.safetensors"),
        run("stability", "--weights", tmp_path / "w.safetensors", *network[1:-2], "--lr", 0.1),
        *(run(*words) for words in with_a_hostile_layer(tmp_path)),
    ]
    assert "evil" in seen[0].err
    assert sum("evil" in each.out + each.err for each in seen) >= 8
    for each in seen:
        for text in (each.out, each.err):
            assert not set(text) & set("\x1b\x9b\u202e\r\x07")


def test_a_cleaned_text_keeps_its_length_and_its_lines() -> None:
    assert len(printable_text(ESCAPES)) == len(ESCAPES)
    assert printable_text("a\r\nb\tc") == "a\r\nb\tc"
    assert printable_text("שלום ‏") == "שלום ‏"


def test_a_planted_link_is_not_written_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f".r.txt.{os.getpid()}.part").symlink_to(victim)
    monkeypatch.setattr("flatscope.disk.secrets.token_hex", lambda _: "guessed")
    (tmp_path / f".s.txt.{os.getpid()}.guessed.part").symlink_to(victim)
    with whole_file(tmp_path / "r.txt") as path:
        path.write_text("new")
    with pytest.raises(InputError), whole_file(tmp_path / "s.txt") as path:
        path.write_text("new")
    assert victim.read_text() == "mine"
    assert not (tmp_path / "r.txt").is_symlink()
    assert (tmp_path / "r.txt").read_text() == "new"


def test_checkpoints_of_broken_off_work_go_once_its_trials_are_done(tmp_path: Path) -> None:
    store, configs = Store(tmp_path), [{"x": 1}, {"x": 2}]

    def broken_off() -> None:
        with store.unfinished(configs) as folder:
            assert folder is not None
            folder.mkdir(parents=True)
            (folder / "checkpoint").write_text("large")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    store.write(configs[0], {"loss": 1.0})
    store.clear_leftovers()
    assert any((tmp_path / ".unfinished").iterdir())  # may still be gone on with
    store.write(configs[1], {"loss": 1.0})
    store.clear_leftovers()
    assert not any((tmp_path / ".unfinished").iterdir())


def test_a_complete_store_on_a_disk_that_can_only_be_read_is_shown(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, store = sweep(tmp_path)

    def refuse(*_: Any) -> None:
        raise InputError("a place that can be written to", "a read-only one")

    monkeypatch.setattr("flatscope.training.sweeps.store.write_whole", refuse)
    assert run("sweep", "run", file, "--store", store.root, "--workers", 0).code == 0


@pytest.mark.filterwarnings("default")
def test_a_study_without_its_figure_says_so(tmp_path: Path, run: Run) -> None:
    fuzz_kinds._study(tmp_path / "s")
    (tmp_path / "s" / "figure.svg").unlink()
    found = run("report", tmp_path / "s", "--out", tmp_path / "page.html")
    assert found.code == 0
    assert "figure.svg of this study is gone" in found.err


def test_pipes_are_named_as_such(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.pt")
    with pytest.raises(WeightsError, match="expected a regular file, got a named pipe"):
        read_weights(tmp_path / "w.pt")


@pytest.mark.parametrize("head", ["[" * 100_000, "[]", "{}", '{"order": 5}', "1e999"])
def test_a_strangers_header_of_a_diagonal_is_refused(head: str, tmp_path: Path) -> None:
    path = tmp_path / "d.safetensors"
    safetensors.torch.save_file({"w": torch.ones(2)}, path, metadata={"flatscope_diagonal": head})
    with pytest.raises(InputError, match="diagonal that flatscope saved"):
        fs.Diagonal.load(path)


@pytest.mark.parametrize("text", ["[]", '{"layers": {}}', "[" * 100_000, "OTHER", "INF", "null"])
def test_an_allocation_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    whole = '{"layers": {"fc": {"parameters": 4, "weight": "w", "bits": 4}}, "sum_of_rises": 1, "rounding": "channel", '
    whole += '"bits": {"fc": 4}}'
    others = {"OTHER": whole.replace('"bits": {"fc"', '"bits": {"head"'), "INF": whole.replace(": 4}}", ": 1e999}}")}
    path.write_text(others.get(text, text))
    with pytest.raises(InputError, match="allocation that flatscope saved"):
        Allocation.load(path)
    path.write_text(whole)
    assert Allocation.load(path) == {"fc": 4}


@pytest.mark.parametrize("ending", [".parquet", ".npz"])
def test_a_result_whose_head_nests_too_deeply_is_refused(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"s{ending}"
    deep = "[" * 100_000
    if ending == ".npz":
        np.savez(path, head=np.array(deep))
    else:
        table = pa.table({"layer": ["a"]}).replace_schema_metadata({b"flatscope_sensitivity": deep.encode()})
        pq.write_table(table, path)
    with pytest.raises(InputError, match="sensitivity"):
        fs.Sensitivity.load(path)


def test_numbers_beyond_what_torch_counts_with_are_refused(run: Run) -> None:
    network = [
        "--model",
        "mlp",
        "--model-option",
        "widths=64,8,10",
        "--data",
        "digits",
        "--train-size",
        20,
        "--flatten",
    ]
    for words in (["explain", "--seed", 10**30], ["sensitivity", "--bits", 8, "--rounding", f"group:{10**30}"]):
        found = run(words[0], *network, *words[1:])
        assert found.code == 2
        assert "expected" in found.err
        assert "--debug" not in found.err
