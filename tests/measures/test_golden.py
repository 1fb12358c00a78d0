"""No number moves unnoticed: every measure on the tiny networks against the stored values."""

from __future__ import annotations

import warnings

import pandas as pd
import pytest
from golden import COLUMNS, GOLDEN, current

from flatscope.errors import NumericalWarning

pytestmark = pytest.mark.fast


def test_numbers_are_those_on_file() -> None:
    stored = pd.read_csv(GOLDEN, keep_default_na=True, dtype={"layer": str, "options": str}).fillna(
        {"layer": "", "options": ""}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)
        found = current()
    keys = COLUMNS[:4]
    both = stored.merge(found, on=keys, how="outer", suffixes=("_stored", "_found"), indicator=True)
    unmatched = both[both["_merge"] != "both"][[*keys, "_merge"]]
    assert unmatched.empty, f"run `make golden` and read the diff:\n{unmatched}"
    for _, row in both.iterrows():
        expected = pytest.approx(row["value_stored"], rel=1e-6, abs=1e-12, nan_ok=True)
        assert row["value_found"] == expected, f"{row['network']} {row['measure']} {row['layer']} {row['options']}"
