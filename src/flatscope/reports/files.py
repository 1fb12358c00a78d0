"""Files and folders that a report can be made of, told apart by what is in them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from flatscope.comparing import Comparison
from flatscope.errors import InputError
from flatscope.files import from_npz_bytes
from flatscope.interpolation import Simplex
from flatscope.landscapes import Surface
from flatscope.papers import from_papers
from flatscope.reports.items import is_history
from flatscope.reports.population import PopulationFrame, is_population, target_column
from flatscope.results import Result
from flatscope.symmetries.audit import Audit
from flatscope.table import Table

RESULTS: tuple[type[Result], ...] = (Audit, Comparison, Surface, Simplex, PopulationFrame, Table)
HISTORY_FILE, VERDICTS_FILE = "history.csv", "verdicts.json"
ACCEPTED = (
    "Accepted are tables and audits (.parquet, .json), comparisons (.json), surfaces and interpolations (.npz, "
    ".parquet, .json), populations and training histories (.parquet, .csv), and folders of a training run with "
    "history.csv or of a study with verdicts.json"
)
# What the names of files add to the name of the network: small-bounds.parquet belongs to small.parquet.
ASPECT = re.compile(r"[-_ ](bounds|measures|table|audit|landscape|surface|weights|psi|history)$")


def read_item(given: str, target: str = "", measures: Sequence[str] = ()) -> list[tuple[str, Any]]:
    """The things in one file or folder, each with the name of its network.

    Args:
        given: a path, or `name=path`.
        target: column of the generalization gap, for a population that does not call it so.
        measures: columns of its measures, for one that does not name them after declared measures.

    Raises:
        InputError: nothing there, or nothing that a report can show.
    """
    name, path = _named(given)
    if path.is_dir():
        return _folder(path, name or path.name)
    if not path.is_file():
        raise InputError("a file or folder", "nothing there", where=str(path), fix=ACCEPTED)
    readers = {".parquet": _parquet, ".json": _json, ".npz": _npz, ".csv": _csv}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise _unknown(path, f"a {path.suffix or 'file without ending'}")
    item = reader(path)
    if isinstance(item, pd.DataFrame):
        item = _frame(path, item, target, measures)
    return [(name or network_name(path), item)]


def network_name(path: Path) -> str:
    """A file's name without its ending and without what it says about its content."""
    return ASPECT.sub("", path.stem) or path.stem


def _named(given: str) -> tuple[str, Path]:
    name, equals, path = given.partition("=")
    return (name, Path(path)) if equals and not Path(given).exists() else ("", Path(given))


def _folder(path: Path, name: str) -> list[tuple[str, Any]]:
    """The result of a study; or a training run: its history, and what was measured into the same folder."""
    if (path / VERDICTS_FILE).is_file():
        return [(name, from_papers("load_result")(path))]
    if not (path / HISTORY_FILE).is_file():
        raise InputError(f"a folder with {HISTORY_FILE}", "a folder without", where=str(path), fix=ACCEPTED)
    history = _csv(path / HISTORY_FILE)
    if not is_history(history):
        raise _unknown(path / HISTORY_FILE, _columns_words(history))
    found: list[tuple[str, Any]] = [(name, history)]
    for file in sorted(path.iterdir()):
        if file.suffix == ".npz" or (file.suffix == ".parquet" and _written_as(file)):
            found.append((name, _npz(file) if file.suffix == ".npz" else _parquet(file)))
    return found


def _written_as(path: Path) -> type[Result] | None:
    """Which class of results wrote a Parquet file; None for a frame of somebody else."""
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (pa.ArrowException, OSError) as problem:
        raise InputError("a Parquet file that can be read", str(problem), where=str(path), fix=ACCEPTED) from problem
    return next((kind for kind in RESULTS if kind.parquet_key() in metadata), None)


def _parquet(path: Path) -> Any:
    kind = _written_as(path)
    return kind.load(path) if kind else pd.read_parquet(path)


def _json(path: Path) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise InputError("a JSON file that can be read", str(problem), where=str(path), fix=ACCEPTED) from problem
    for kind in RESULTS:
        if isinstance(content, dict) and f"flatscope_{kind.WORD}" in content:
            return kind.load(path)
    raise _unknown(path, "JSON of another kind")


def _npz(path: Path) -> Surface | Simplex:
    """A surface, or mixtures of networks, told apart by the arrays that they keep."""
    try:
        mixtures = "weights" in from_npz_bytes(path.read_bytes())
    except (OSError, ValueError) as problem:
        raise InputError("an .npz file that can be read", str(problem), where=str(path), fix=ACCEPTED) from problem
    return Simplex.load(path) if mixtures else Surface.load(path)


def _csv(path: Path) -> pd.DataFrame:
    try:
        return pd.read_csv(path)
    except (OSError, ValueError) as problem:  # what pandas cannot parse is a ValueError too
        raise InputError("a CSV file that can be read", str(problem), where=str(path), fix=ACCEPTED) from problem


def _frame(path: Path, frame: pd.DataFrame, target: str, measures: Sequence[str]) -> Any:
    if is_history(frame):
        return frame
    if target or measures or is_population(frame):
        return PopulationFrame(frame, target, tuple(measures), meta={"file": str(path)})
    if target_column(map(str, frame.columns)):
        fix = "Add a column named after each measure; a sweep (flatscope sweep run, then export) has them"
        raise InputError("a population with measures", "a gap, but no column of a measure", where=str(path), fix=fix)
    fix = "Name the column of the generalization gap with --target, and the measures with --measure. " + ACCEPTED
    raise InputError("a training history or a population", _columns_words(frame), where=str(path), fix=fix)


def _columns_words(frame: pd.DataFrame) -> str:
    shown = ", ".join(map(str, frame.columns[:6]))
    return f"columns {shown}{', …' if len(frame.columns) > 6 else ''}"


def _unknown(path: Path, got: str) -> InputError:
    return InputError("something that a report can show", got, where=str(path), fix=ACCEPTED)
