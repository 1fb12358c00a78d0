"""A kind of result that an extension declares: its section in a report, what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from markupsafe import Markup
from networks import mlp

import flatscope as fs
from flatscope import extend
from flatscope.reports.items import read_item, shown_kinds
from flatscope.reports.kinds import ADDED_KINDS
from flatscope.reports.page import page_text

pytestmark = pytest.mark.fast


@dataclass(frozen=True, eq=False)
class Drift(extend.Result):
    """Distances of weights from where they were."""

    frame: pd.DataFrame
    meta: Mapping[str, Any] = field(default_factory=dict)

    WORD = "drift"

    def to_frame(self) -> pd.DataFrame:
        return self.frame

    def cells(self) -> tuple[list[str], list[list[str]]]:
        return ["layer", "distance"], [[row.layer, f"{row.distance:g}"] for row in self.frame.itertuples()]

    def headline_lines(self) -> list[str]:
        return [f"The weights moved by at most {self.frame['distance'].max():g}."]


def drifts_part(found: Mapping[str, Drift], colours: Mapping[str, int]) -> extend.PagePart:
    body = Markup("").join(Markup(drift.to_html()) for drift in found.values())
    answer = Markup("<p>{}</p>").format(" ".join(drift.headline for drift in found.values()))
    return extend.PagePart(
        answer, [extend.Section("drift", "Drift", body)], {name: each.meta for name, each in found.items()}
    )


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    ADDED_KINDS.clear()


def drift() -> Drift:
    return Drift(pd.DataFrame({"layer": ["0.weight"], "distance": [0.25]}), {"version": "1"})


def kind() -> extend.Kind:
    return extend.Kind("a Drift of weights", Drift, "network", drifts_part)


def test_a_section_of_an_extension_stands_where_it_was_put_and_is_read_from_files(tmp_path: Path) -> None:
    kind().register("drifts", before="bounds")
    assert list(shown_kinds()).index("drifts") == list(shown_kinds()).index("bounds") - 1
    page = page_text([fs.bounds(mlp().problem(), "pac_bayes"), ("net", drift())])
    assert "The weights moved by at most 0.25." in page
    assert 0 < page.index('id="drift"') < page.index('id="bounds"')
    for ending in (".parquet", ".json"):
        drift().save(tmp_path / f"net{ending}")
        ((name, again),) = read_item(str(tmp_path / f"net{ending}"))
        assert (name, again) == ("net", drift())


def test_without_it_the_result_is_refused_and_with_it_the_words_of_the_error_name_it() -> None:
    with pytest.raises(fs.InputError, match="got Drift"):
        page_text(drift())
    kind().register("drifts")
    assert list(shown_kinds())[-1] == "drifts"
    with pytest.raises(fs.InputError, match="a Drift of weights"):
        page_text(object())


@pytest.mark.parametrize(
    ("plural", "before", "word"),
    [("my drifts", "", "letters"), ("bounds", "", "no other kind"), ("drifts", "bonds", "bounds")],
)
def test_names_that_would_not_do_are_refused(plural: str, before: str, word: str) -> None:
    with pytest.raises(fs.FlatscopeError, match=word):
        kind().register(plural, before=before)
    assert not ADDED_KINDS
    page_text(fs.measure(mlp().problem(), "l2_norm"))


def test_a_result_without_a_picture_says_so(tmp_path: Path) -> None:
    for draw in (drift().plot, drift().figure, lambda: drift().save(tmp_path / "drift.png")):
        with pytest.raises(fs.InputError, match="picture"):
            draw()
    assert not list(tmp_path.iterdir())


def test_a_kind_is_registered_once() -> None:
    kind().register("drifts")
    with pytest.raises(fs.InputError, match="no other kind"):
        kind().register("drifts")
