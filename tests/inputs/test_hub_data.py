"""Data sets as Hugging Face's `datasets` writes them: `--data hf:PLACE`, read without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flatscope.errors import DataFileError, InputError
from flatscope.inputs.data_set import Data, DataSource
from flatscope.inputs.loading import load, load_or_read

LABELS = [0, 1, 2, 0, 1, 2]
CLASSES = ["cat", "dog", "cow"]


def saved(folder: Path, rows: dict[str, list[Any]], classes: list[str] | None = None) -> Path:
    """A folder as `Dataset.save_to_disk` writes it."""
    folder.mkdir(parents=True)
    table = pa.table(rows)
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    features = {"label": {"names": classes, "_type": "ClassLabel"}} if classes else {}
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return folder


def several(folder: Path, **parts: dict[str, list[Any]]) -> Path:
    """A folder as `DatasetDict.save_to_disk` writes it."""
    for part, rows in parts.items():
        saved(folder / part, rows)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(parts)}))
    return folder


def tokenizer() -> Callable[..., Any]:
    """Words by their length, padded with 0."""

    def made(*texts: list[str], **_: Any) -> dict[str, Any]:
        rows = [[len(word) for word in " ".join(pair).split()] for pair in zip(*texts, strict=True)]
        longest = max(map(len, rows))
        tokens = np.array([row + [0] * (longest - len(row)) for row in rows])
        return {"input_ids": tokens, "attention_mask": (tokens > 0).astype(int)}

    return made


def as_data(place: Path | str, **options: Any) -> Data:
    found = load_or_read(f"hf:{place}", **options)
    assert isinstance(found, Data)
    return found


def as_tokens(place: Path | str, **options: Any) -> DataSource:
    found = load_or_read(f"hf:{place}", **options)
    assert isinstance(found, DataSource)
    return found


def test_numbers_of_a_saved_folder_are_its_inputs(tmp_path: Path) -> None:
    place = saved(tmp_path / "d", {"a": [1.0, 2, 3, 4, 5, 6], "b": [0, 1, 0, 1, 0, 1], "label": LABELS}, CLASSES)
    found = as_data(place)
    assert found.train[0].tolist()[1] == [2.0, 1.0]
    assert found.train[1].tolist() == LABELS
    assert found.classes == tuple(CLASSES)
    assert len(as_data(place, train_size=3).train[1]) == 3


def test_lists_are_one_input_of_their_shape(tmp_path: Path) -> None:
    place = saved(tmp_path / "d", {"x": np.arange(24.0).reshape(6, 2, 2).tolist(), "idx": [9] * 6, "label": LABELS})
    assert as_data(place).input_shape == (2, 2)


@pytest.mark.parametrize("ending", [".parquet", ".jsonl", ".json", ".csv", ".arrow"])
def test_single_files_are_read(tmp_path: Path, ending: str) -> None:
    rows, path = {"a": [1.5, 2.5, 3.5], "b": [1, 2, 3], "label": [0, 1, 0]}, tmp_path / f"d{ending}"
    records = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
    if ending == ".parquet":
        pq.write_table(pa.table(rows), path)
    elif ending == ".arrow":
        with pa.ipc.new_file(str(path), pa.table(rows).schema) as file:
            file.write_table(pa.table(rows))
    else:
        lines = [json.dumps(record) for record in records]
        text = {
            ".jsonl": "\n".join(lines),
            ".json": json.dumps(records),
            ".csv": "a,b,label\n" + "\n".join(",".join(map(str, record.values())) for record in records),
        }[ending]
        path.write_text(text)
    found = as_data(path)
    assert found.train[0].tolist() == [[1.5, 1], [2.5, 2], [3.5, 3]]
    assert found.train[1].tolist() == [0, 1, 0]


def test_files_with_a_part_in_their_names_are_these_parts(tmp_path: Path) -> None:
    rows = {"a": [1.0, 2, 3, 4, 5, 6], "b": [0.0] * 6, "label": LABELS}
    for name in ("train-00000", "train-00001", "validation-00000"):
        pq.write_table(pa.table(rows), tmp_path / f"{name}.parquet")
    found = as_data(tmp_path)
    assert found.test is not None
    assert (len(found.train[1]), len(found.test[1])) == (12, 6)
    assert as_data(tmp_path, test_size=0).test is None


def test_a_test_part_without_labels_is_passed_over(tmp_path: Path) -> None:
    rows = {"a": [1.0] * 6, "label": LABELS}
    place = several(tmp_path / "d", train=rows, test={**rows, "label": [-1] * 6}, validation={**rows, "a": [7.0] * 6})
    found = as_data(place)
    assert found.test is not None
    assert found.test[0].unique().tolist() == [7.0]


def test_pictures_are_images_with_their_channels_first(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    rows = []
    for number in range(3):
        file = tmp_path / f"{number}.png"
        image.fromarray(np.full((4, 5, 3), (number, 10, 20), np.uint8)).save(file)
        rows.append({"bytes": file.read_bytes(), "path": None})
    found = as_data(saved(tmp_path / "d", {"image": rows, "label": [0, 1, 2]}))
    assert found.input_shape == (3, 4, 5)
    assert np.allclose(found.train[0][2, :, 0, 0] * 255, [2, 10, 20])
    assert found.scale == 255


def test_texts_become_tokens_by_the_tokenizer_of_the_model(tmp_path: Path) -> None:
    texts = ["a bb", "ccc", "a a a", "bb", "a", "ccc a"]
    place = saved(tmp_path / "d", {"text": texts, "label": LABELS})
    found = as_tokens(place, tokenizer=tokenizer)
    assert found.train["input_ids"].tolist()[:2] == [[1, 2, 0], [3, 0, 0]]
    assert found.train["labels"].tolist() == LABELS
    drawn = as_tokens(place, tokenizer=tokenizer, train_size=3)
    assert sorted(drawn.train["labels"].tolist()) == [0, 1, 2]  # from every class, as other samples are drawn
    with pytest.raises(InputError, match="a tokenizer"):
        load_or_read(f"hf:{place}")


def test_tokens_without_labels_are_their_own_and_padding_does_not_count(tmp_path: Path) -> None:
    found = as_tokens(saved(tmp_path / "d", {"input_ids": [[5, 6, 7], [8, 9]]}))
    assert found.train["input_ids"].tolist() == [[5, 6, 7], [8, 9, 0]]
    assert found.train["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert found.train["labels"].tolist() == [[5, 6, 7], [8, 9, -100]]


def test_labels_of_tokens_are_left_where_next_tokens_are_asked_for(tmp_path: Path) -> None:
    place = saved(tmp_path / "d", {"text": ["a bb", "ccc"], "label": [0, 1]})
    found = as_tokens(place, tokenizer=tokenizer, columns={"label": "input_ids"})
    assert found.train["labels"].tolist() == [[1, 2], [3, -100]]


@pytest.mark.parametrize(
    ("rows", "columns", "said"),
    [
        ({"a": ["x"], "b": ["y"], "label": [0]}, {}, "--column input=a"),
        ({"text": ["x"], "label": ["good"]}, {"input": "text"}, "labels as numbers"),
        ({"a": [1.0], "label": [0]}, {"label": "lable"}, "Did you mean label"),
        ({"a": [1.0], "label": [0]}, {"inputs": "a"}, "Did you mean input"),
        ({"a": [1.0], "b": [2.0]}, {}, "--column label=NAME"),
        ({"a": [1.0, None], "label": [0, 1]}, {}, "1 empty"),
        ({"x": [[1.0], [1.0, 2.0]], "label": [0, 1]}, {}, "rows of one shape"),
        ({"text": ["x", None], "label": [0, 1]}, {}, "rows without any"),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_to_do(
    tmp_path: Path, rows: dict[str, list[Any]], columns: dict[str, str], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        load_or_read(f"hf:{saved(tmp_path / 'd', rows)}", columns=columns, tokenizer=tokenizer)


def test_damaged_and_missing_files_are_refused(tmp_path: Path) -> None:
    place = saved(tmp_path / "d", {"a": [1.0], "label": [0]})
    file = place / "data-00000-of-00001.arrow"
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(DataFileError, match=r"arrow"):
        load(f"hf:{place}")
    file.unlink()
    with pytest.raises(DataFileError, match=r"arrow"):
        load(f"hf:{place}")
    for name in (tmp_path / "nothing", "./nothing", "nothing.parquet"):
        with pytest.raises(InputError, match="no such file"):
            load(f"hf:{name}")
    with pytest.raises(InputError, match="save_to_disk"):
        load(f"hf:{tmp_path / 'd' / '..'}")


def test_a_file_of_a_saved_set_may_not_be_outside_of_its_folder(tmp_path: Path) -> None:
    saved(tmp_path / "secret", {"a": [1.0], "label": [0]})
    place = saved(tmp_path / "d", {"a": [2.0], "label": [0]})
    named = {"_data_files": [{"filename": "../secret/data-00000-of-00001.arrow"}]}
    (place / "state.json").write_text(json.dumps(named))
    assert as_data(place).train[0].tolist() == [[2.0]]


def test_a_name_needs_datasets_or_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets"):
        load("hf:owner/name")


def test_columns_are_for_data_of_a_hub_alone() -> None:
    with pytest.raises(InputError, match="--column"):
        load("digits", columns={"label": "a"})


def test_what_datasets_itself_writes_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(a=datasets.Value("float32"), label=datasets.ClassLabel(names=CLASSES))
    rows = datasets.Dataset.from_dict({"a": [1.0, 2, 3, 4, 5, 6], "label": LABELS}, features=features)
    datasets.DatasetDict(train=rows, test=rows.select(range(2))).save_to_disk(tmp_path / "both")
    found = as_data(tmp_path / "both")
    assert found.test is not None
    assert (found.train[1].tolist(), found.test[1].tolist(), found.classes) == (LABELS, [0, 1], tuple(CLASSES))
    rows.filter(lambda row: row["label"] == 1).save_to_disk(tmp_path / "some")
    assert as_data(tmp_path / "some").train[0].flatten().tolist() == [2.0, 5.0]
    rows.to_parquet(tmp_path / "rows.parquet")
    assert as_data(tmp_path / "rows.parquet").classes == tuple(CLASSES)
