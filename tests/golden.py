"""Every measure on the tiny networks, as stored numbers: `make golden` rewrites golden.csv, a person reads its diff."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from networks import batchnorm_conv, mlp, residual, smooth

import flatscope as fs
from flatscope.registry import declarations

GOLDEN = Path(__file__).with_name("golden.csv")
COLUMNS = ["network", "measure", "layer", "options", "value", "stderr", "exact"]


def current() -> pd.DataFrame:
    """One row per network, measure, layer and options; units and samples by their sum."""
    frames = []
    for tiny in (mlp(), batchnorm_conv(), residual(), smooth()):
        names = [name for name, entry in declarations().items() if entry.cost != "long"]
        frame = fs.measure(tiny.problem(), names).to_frame().assign(network=tiny.name)
        keys = ["network", "measure", "layer", "options"]
        grouped = frame.groupby(keys, sort=False).agg(
            value=("value", "sum"), stderr=("stderr", "max"), exact=("exact", "all")
        )
        grouped.loc[frame.groupby(keys, sort=False)["value"].apply(lambda v: v.isna().any()), "value"] = float("nan")
        frames.append(grouped.reset_index())
    return pd.concat(frames, ignore_index=True)[COLUMNS]


if __name__ == "__main__":
    current().to_csv(GOLDEN, index=False, float_format="%.9g")
