"""Table: its accessors, what people read, and files that give the same table back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from flatscope import InputError, Table
from flatscope.errors import UnknownNameError
from flatscope.formatting import readable_number

pytestmark = pytest.mark.fast

HOSTILE = '<img src=x onerror="alert(1)">|a\nb & "c"'
DESIGN_COLUMNS = [
    *("measure", "options", "layer", "unit", "sample", "value", "stderr", "data_stderr", "low", "high", "exact"),
    *("folded", "reason", "passes", "seconds", "seed", "dtype", "version"),
]


def row(measure: str, value: float = 1.0, **more: Any) -> dict[str, Any]:
    base = {
        "measure": measure,
        "options": "",
        "layer": "",
        "unit": None,
        "sample": None,
        "value": value,
        "stderr": 0.0,
        "data_stderr": math.nan,
        "low": math.nan,
        "high": math.nan,
        "exact": True,
        "folded": False,
        "reason": "",
        "passes": 1.0,
        "seconds": 0.25,
        "seed": 7,
        "dtype": "float64",
        "version": "0.1.0",
    }
    return base | more


def full() -> Table:
    rows = [
        row("trace", 2.5, stderr=0.125, exact=False),
        row("count", 12.0),
        row("kappa", 1.0, layer="fc1"),
        row("kappa", math.inf, layer="conv", stderr=0.5),
        *[row("rho_unit", value, layer="fc1", unit=place) for place, value in ((1, 0.2), (0, 0.1), (2, math.nan))],
        row("rho_unit", -math.inf, layer="conv", unit=0),
        *[row("gamma", value, sample=place) for place, value in ((2, 3.0), (0, 1e-320), (1, -0.0))],
        row("missing", math.nan, exact=False, reason="needs test data"),
        row("kl", 1.0, options='{"alpha": 0.1}'),
        row("kl", 2.0, options='{"alpha": 0.2}'),
        row("odd", 0.1 + 0.2, layer=HOSTILE, reason=HOSTILE),
    ]
    return Table(rows, {"seed": 7, "passes": {"forward": 2.0}, "command": HOSTILE, "path": Path("a/b")})


def bound_table() -> Table:
    more = {"vacuous": True, "assumptions": "one; two", "confidence": 0.95}
    return Table([row("counting", 11.5, **more), row("margin_bound", 0.5, **(more | {"vacuous": False}))])


TABLES = {"full": full(), "bounds": bound_table(), "empty": Table([]), "without meta": Table([row("a")])}


def test_columns_are_those_of_the_design() -> None:
    for table in (full(), Table([])):
        assert list(table.to_frame().columns) == DESIGN_COLUMNS
    assert list(bound_table().to_frame().columns) == [*DESIGN_COLUMNS, "vacuous", "assumptions", "confidence"]


def test_values_by_name() -> None:
    table = full()
    assert (table["trace"], table["count"], len(table)) == (2.5, 12.0, 15)
    assert math.isnan(table["missing"])
    assert table.layer("kappa") == {"fc1": 1.0, "conv": math.inf}  # in the order of the rows
    units = table.units("rho_unit", layer="fc1")
    assert (units.dtype, units[:2].tolist(), bool(units[2].isnan())) == (torch.float64, [0.1, 0.2], True)
    assert table.samples("gamma").tolist() == [1e-320, 0.0, 3.0]
    assert (table.stderr("trace"), table.stderr("count"), table.stderr("kappa", layer="conv")) == (0.125, 0.0, 0.5)
    assert (table.reason("missing"), table.reason("trace")) == ("needs test data", "")
    assert table.names == ["trace", "count", "kappa", "rho_unit", "gamma", "missing", "kl", "odd"]
    assert ("trace" in table, "tract" in table) == (True, False)


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda t: t["tract"], "measure in this table.*Did you mean trace"),
        (lambda t: t["kappa"], r"network-wide value of kappa.*\.layer\(name\)"),
        (lambda t: t.layer("trace"), "value per layer of trace"),
        (lambda t: t.units("kappa", "fc1"), "value per unit of kappa"),
        (lambda t: t.units("rho_unit", "fc"), "layer of rho_unit.*Did you mean fc1"),
        (lambda t: t.samples("trace"), "value per sample of trace"),
        (lambda t: t.stderr("kappa", "fc9"), "layer fc9 of kappa"),
        (lambda t: t.layer("missing"), "needs test data"),  # the reason is told instead of the way out
        (lambda t: t["kl"], 'one value of kl, got 2 .*"alpha": 0.1}; {"alpha": 0.2.*to_frame'),
    ],
)
def test_what_is_not_there_is_told(read: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(full())
    assert issubclass(UnknownNameError, KeyError)  # so that `table["x"]` fails as a mapping does


def test_several_options_of_one_place_are_not_mixed() -> None:
    options = ['{"p": 1}', '{"p": 2}']
    layers = Table([row("a", layer="fc", options=option) for option in options])
    units = Table([row("a", layer="fc", unit=0, options=option) for option in options])
    samples = Table([row("a", sample=0, options=option) for option in options])
    for read in (
        lambda: layers.layer("a"),
        lambda: layers.stderr("a", "fc"),
        lambda: units.units("a", "fc"),
        lambda: samples.samples("a"),
    ):
        with pytest.raises(InputError, match="one value of a, got 2"):
            read()


@pytest.mark.parametrize("name", TABLES)
def test_equal_after_json_and_parquet(name: str, tmp_path: Path) -> None:
    table = TABLES[name]
    assert Table.from_json(table.to_json()) == table
    assert Table.from_parquet(table.to_parquet()) == table
    for ending in (".json", ".parquet", ".PARQUET"):
        table.save(tmp_path / f"t{ending}")
        again = Table.load(tmp_path / f"t{ending}")
        assert again == table
        assert again.meta == table.meta
        pd.testing.assert_frame_equal(again.to_frame(), table.to_frame(), check_exact=True)


def test_equality_sees_every_difference() -> None:
    table = full()
    frame = table.to_frame()
    for column, value in (("value", 2.5000001), ("reason", "x"), ("unit", 3), ("exact", True)):
        changed = frame.copy()
        changed.loc[0, column] = value
        assert Table(changed, table.meta) != table, column
    assert Table(frame, {"seed": 8}) != table
    assert Table(frame, table.meta) == table
    assert table != "a table"


def test_json_is_json_for_everyone() -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    table = full()
    table.meta["bad"] = math.nan
    content = json.loads(table.to_json(), parse_constant=refuse)
    assert [entry["value"] for entry in content["rows"]][:4] == [2.5, 12.0, 1.0, "inf"]
    assert content["rows"][0]["unit"] is None
    assert content["meta"]["path"] == "a/b"


@pytest.mark.parametrize("rows", ["3", "[1]", '[{"value": "x"}]', ""])
def test_other_json_is_no_table(rows: str, tmp_path: Path) -> None:
    text = f'{{"rows": {rows}, "meta": {{}}}}' if rows else "[]"
    with pytest.raises(InputError, match="a flatscope table as JSON"):
        Table.from_json(text)
    (tmp_path / "t.parquet").write_bytes(text.encode())
    with pytest.raises(InputError, match="a flatscope table as Parquet"):
        Table.load(tmp_path / "t.parquet")


def test_parquet_of_others_and_missing_columns(tmp_path: Path) -> None:
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "t.parquet")
    with pytest.raises(InputError, match="a flatscope table as Parquet"):
        Table.load(tmp_path / "t.parquet")
    with pytest.raises(InputError, match=r"none called .*stderr"):
        Table([{"measure": "a", "value": 1.0}])


def test_endings(tmp_path: Path) -> None:
    for name in ("t.xlsx", "t", "json"):
        with pytest.raises(InputError, match=f"ending in {', '.join(Table.ENDINGS)}, got"):
            full().save(tmp_path / name)
    for name in ("t.csv", "t.md", "t.html"):
        full().save(tmp_path / name)
        with pytest.raises(InputError, match=r"parquet or \.json table"):
            Table.load(tmp_path / name)
    with pytest.raises(InputError, match=r"can be read.*No such file"):
        Table.load(tmp_path / "none.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.csv", "t.csv.b2sum", "t.html", "t.md"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "new" / "t.json"
    full().save(target)
    before = target.read_bytes()

    def full_disk(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(InputError, match="No space left on device"):
        bound_table().save(target)
    assert target.read_bytes() == before
    assert list(target.parent.iterdir()) == [target]


def test_markdown_keeps_its_columns_whatever_the_names() -> None:
    lines = full().to_markdown().splitlines()
    assert all(line.replace("\\|", "").count("|") == 7 for line in lines)
    assert len(lines) == 2 + 11
    assert "<img" not in "\n".join(lines)
    assert "| kl[alpha=0.1] |  | 1 |  | exact |  |" in lines
    assert "| rho_unit | fc1 | 0.1 … 0.2 (3 values) |  | exact |  |" in lines
    assert "| gamma |  | 0 … 3 (3 samples) |  | exact |  |" in [line.replace("-0 …", "0 …") for line in lines]
    assert "| missing |  | n/a |  |  | needs test data |" in lines
    assert "| trace |  | 2.5 | 0.125 | estimate |  |" in lines


def test_html_shows_names_as_text_and_remarks_whole(tmp_path: Path) -> None:
    long = "a reason that goes on " * 8 + "to its end"
    table = Table([row("a", reason=long, layer=HOSTILE)])
    html = table.to_html()
    assert html == table.to_html()
    assert table._repr_html_().endswith(html)
    assert "<img" not in html
    assert "&lt;img" in html
    assert long in html
    table.save(tmp_path / "t.html")
    written = (tmp_path / "t.html").read_text(encoding="utf-8")
    assert written.startswith('<!doctype html><meta charset="utf-8">')  # or ± would be read as two letters
    assert "± s.e." in written


def test_bounds_show_that_they_are_vacuous() -> None:
    remarks = {line[0]: line[5] for line in bound_table().lines()}
    assert remarks == {"counting": "vacuous", "margin_bound": ""}


def test_a_frame_is_a_copy() -> None:
    table = full()
    frame = table.to_frame()
    frame.loc[0, "value"] = 99.0
    assert table["trace"] == 2.5
    assert "trace" in repr(table)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((3.0, "3"), (0.0, "0"), (123456.0, "123456"), (1e12, "1e+12"), (1 / 3, "0.3333"), (1e-9, "1e-09")),
        *((math.nan, "n/a"), (math.inf, "inf"), (-math.inf, "-inf")),
    ],
)
def test_numbers_for_people(value: float, text: str) -> None:
    assert readable_number(value) == text
