"""Tables of samples as Hugging Face's `datasets` writes them, read with pyarrow alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.json
import pyarrow.parquet

from flatscope.disk import MOST_TEXT, open_file, read_file
from flatscope.errors import DataFileError, InputError, first_line
from flatscope.files import from_json_bytes

SOURCE = "hf"
FORMS = "a folder that save_to_disk wrote, or files .parquet, .json, .jsonl, .csv, .arrow"
OFFLINE = f"Without a connection name {FORMS}"
TRAIN, HELD_OUT = ("train", "training"), ("test", "validation", "valid", "dev", "eval")


@dataclass(frozen=True)
class HubTable:
    """The rows of one part of a data set.

    Attributes:
        rows: as pyarrow reads them.
        classes: names of the classes, by column; empty where the set does not name them.
        where: the place, for messages.
    """

    rows: pa.Table
    classes: dict[str, tuple[str, ...]]
    where: str


def is_hub_data(name: str) -> bool:
    """True if this names a data set of a hub, not a function of a module."""
    return name.startswith(f"{SOURCE}:") and len(name) > len(SOURCE) + 1


def hub_splits(name: str) -> dict[str, HubTable]:
    """The parts of the data set `hf:PLACE`, by their names."""
    place = name.partition(":")[2]
    path = Path(place).expanduser()
    if path.is_dir():
        parts = _tables_of_saved_data_set(path) or _tables_of_loose_files(path)
    elif path.exists():
        parts = {"train": _table_of_file(path)}
    elif place.startswith((".", "/", "~")) or path.suffix in READERS:
        raise InputError(FORMS, "no such file or folder", f"--data {name}")
    else:
        parts = _fetch_hub_tables(place)
    if not parts:
        raise InputError(FORMS, "a folder without any", str(path), "Write one with dataset.save_to_disk(FOLDER)")
    return parts


def training_split(parts: dict[str, HubTable], name: str) -> str:
    """Name of the part to train on: "train", or the only one."""
    split = next((part for part in TRAIN if part in parts), None)
    if split is None and len(parts) > 1:
        raise InputError("a part named train", ", ".join(parts), f"--data {name}", "Name the file of one part")
    return split or next(iter(parts))


def held_out_splits(parts: dict[str, HubTable], training: str) -> list[str]:
    """Names of the parts that may serve as test data, the best first."""
    known = [part for part in HELD_OUT if part in parts]
    return [*known, *(part for part in parts if part.startswith(HELD_OUT) and part not in known and part != training)]


def _tables_of_saved_data_set(folder: Path) -> dict[str, HubTable]:
    """Tables that `save_to_disk` wrote, by part; empty where the folder is not such a one."""
    if (folder / "dataset_dict.json").is_file():
        names = from_json_bytes(read_file(folder / "dataset_dict.json", MOST_TEXT)).get("splits", [])
        return {str(name): _table_of_split(folder / Path(str(name)).name) for name in names}
    return {"train": _table_of_split(folder)} if (folder / "state.json").is_file() else {}


def _table_of_split(folder: Path) -> HubTable:
    """One part: `state.json` names its files, `dataset_info.json` the classes."""
    try:
        state = from_json_bytes(read_file(folder / "state.json", MOST_TEXT))
        files = [folder / Path(entry["filename"]).name for entry in state["_data_files"]]
    except (OSError, KeyError, TypeError) as problem:
        raise DataFileError("a part that save_to_disk wrote", first_line(problem), str(folder / "state.json")) from None
    tables = [_read_table(file, _read_arrow_file) for file in files]
    if not tables:
        raise DataFileError("at least one file of samples", "none", str(folder))
    info = folder / "dataset_info.json"
    features = from_json_bytes(read_file(info, MOST_TEXT)).get("features") if info.is_file() else None
    return HubTable(pa.concat_tables(tables), _class_names_by_column(features or {}), str(folder))


def _tables_of_loose_files(folder: Path) -> dict[str, HubTable]:
    """Files with a part in their names (`train-00000.parquet`), or all of them as one part."""
    files = sorted(path for path in (*folder.iterdir(), *folder.glob("data/*")) if path.suffix in READERS)
    files = [path for path in files if path.name not in ("dataset_info.json", "dataset_infos.json", "state.json")]
    by_part: dict[str, list[Path]] = {}
    for file in files:
        stem = file.stem.lower()
        part = next((name for name in (*TRAIN, *HELD_OUT) if stem.startswith(name)), "")
        by_part.setdefault(part, []).append(file)
    if set(by_part) == {""} or not by_part:
        return {"train": _joined_tables([_table_of_file(file) for file in files], folder)} if files else {}
    by_part.pop("", None)
    return {part: _joined_tables([_table_of_file(file) for file in paths], folder) for part, paths in by_part.items()}


def _joined_tables(tables: list[HubTable], folder: Path) -> HubTable:
    try:
        rows = pa.concat_tables([table.rows for table in tables], promote_options="permissive")
    except pa.ArrowException as problem:
        raise DataFileError("files with the same columns", first_line(problem), str(folder)) from problem
    return HubTable(rows, tables[0].classes, str(folder) if len(tables) > 1 else tables[0].where)


def _table_of_file(path: Path) -> HubTable:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(FORMS, f"a file {path.suffix or 'without an ending'}", str(path))
    rows = _read_table(path, reader)
    kept = (rows.schema.metadata or {}).get(b"huggingface")  # how `Dataset.to_parquet` keeps the features
    try:
        features = json.loads(kept)["info"]["features"] if kept else {}
    except (ValueError, KeyError, TypeError):
        features = {}
    return HubTable(rows, _class_names_by_column(features), str(path))


def _read_table(path: Path, reader: Callable[[Any], pa.Table]) -> pa.Table:
    try:
        with open_file(path) as file:
            return reader(file)
    except OSError as problem:
        raise DataFileError("a readable file of samples", first_line(problem), str(path)) from problem
    except (pa.ArrowException, ValueError) as problem:
        got = f"one that cannot be read ({first_line(problem)})"
        raise DataFileError(f"a whole {path.suffix} file", got, str(path)) from problem


def _read_arrow_file(file: Any) -> pa.Table:
    try:
        return pa.ipc.open_stream(file).read_all()
    except pa.ArrowInvalid:
        file.seek(0)
        return pa.ipc.open_file(file).read_all()


def _read_json_table(file: Any) -> pa.Table:
    """One object a line, or a list of them."""
    head = file.read(64).lstrip()
    file.seek(0)
    if head.startswith(b"["):
        return pa.Table.from_pylist(json.load(file))
    return pa.json.read_json(file)


READERS: dict[str, Callable[[Any], pa.Table]] = {
    ".parquet": pa.parquet.read_table,
    ".arrow": _read_arrow_file,
    ".json": _read_json_table,
    ".jsonl": _read_json_table,
    ".csv": pa.csv.read_csv,
}


def _class_names_by_column(features: Any) -> dict[str, tuple[str, ...]]:
    """Names of the classes of every column that has them."""
    if not isinstance(features, dict):
        return {}
    kinds = {name: kind for name, kind in features.items() if isinstance(kind, dict)}
    return {
        name: tuple(map(str, kind.get("names") or ()))
        for name, kind in kinds.items()
        if kind.get("_type") == "ClassLabel"
    }


def _fetch_hub_tables(place: str) -> dict[str, HubTable]:
    """A data set of the hub; nothing of it is run."""
    where = f"--data {SOURCE}:{place}"
    try:
        import datasets
    except ImportError as problem:
        fix = f"pip install datasets to fetch it by name. {OFFLINE}"
        raise InputError("a folder or file, or the package datasets", first_line(problem), where, fix) from problem
    name, _, configuration = place.partition("@")
    try:
        sets = datasets.load_dataset(name, configuration or None)
    except Exception as problem:
        fix = f"{OFFLINE}; of several configurations name one: {SOURCE}:{name}@CONFIGURATION"
        raise InputError("a data set of the hub", first_line(problem), where, fix) from problem
    tables = {}
    for part, rows in sets.items():
        names = {
            column: tuple(kind.names) for column, kind in rows.features.items() if isinstance(kind, datasets.ClassLabel)
        }
        tables[str(part)] = HubTable(rows.with_format("arrow")[:], names, place)
    return tables
