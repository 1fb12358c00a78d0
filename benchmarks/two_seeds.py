"""How far apart are two seeds of one setting by each measure of flatness? Where `compare` begins to call one flatter.

    python -m benchmarks.two_seeds [--networks 256]

Networks of the released population with right labels, trained once more from another seed and stopped at the same
losses; the factor between the two values of a measure, the larger over the smaller. Images of CIFAR-10 and
Fashion-MNIST are needed (`FLATSCOPE_DATA`).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from flatscope.training.benchmarking.recipe import (
    SETTINGS,
    STOPS,
    benchmark_networks,
    measure_networks,
    network_configuration,
    options_of,
    rows_as_dictionaries,
    train_missing_networks,
)
from flatscope.training.benchmarking.release import released_population
from flatscope.training.sweeps.store import Store

MEASURES = ("rho_sum", "psi_trace", "fisher_rao_norm", "hessian_trace")
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)


def chosen(most: int) -> pd.DataFrame:
    """So many networks of the population with right labels, drawn at random; a second seed of each."""
    clean = benchmark_networks()[lambda frame: frame["label_noise"] == 0]
    return clean.sample(most, random_state=0).sort_index()


def trained_again(rows: pd.DataFrame, folder: Path) -> pd.DataFrame:
    """Measures of these networks from a second seed: a row per network and stop."""
    store, first = Store(folder), len(benchmark_networks())
    again = rows.assign(seed=rows["seed"] + first)
    train_missing_networks(again, store, workers=1)
    asked = [
        {
            "network": network_configuration(row, stop),
            "measures": list(MEASURES),
            "options": options_of(MEASURES),
            "rescaled": False,
        }
        for row in rows_as_dictionaries(again)
        for stop in STOPS
    ]
    measure_networks(asked, store, lambda share, text: None)
    found = []
    for config in asked:
        trained, looked = store.read(config["network"]).metrics, store.read(config).metrics
        if trained["reached"]:
            plan = config["network"]["train"]
            loss = {"train_loss": trained["train_loss"]}
            found.append({"seed": plan["seed"] - first, "stop": plan["stop_loss"], **loss, **looked["measured"]})
    return pd.DataFrame(found)


def main() -> None:
    """Print the quantiles of the factor between two seeds, by measure and loss at which training stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", type=int, default=256)
    rows = chosen(parser.parse_args().networks)
    with tempfile.TemporaryDirectory() as folder:
        second = trained_again(rows, Path(folder))
    both = second.merge(released_population()[0], on=["seed", "stop"], suffixes=("", " of the first"))
    print("networks", len(rows), "settings varied:", ", ".join(name for name in SETTINGS if rows[name].nunique() > 1))
    for stop, part in both.groupby("stop"):
        for name in ("train_loss", *MEASURES):
            one, other = part[name], part[f"{name} of the first"]
            factor = np.exp(np.abs(np.log((one / other)[(one > 0) & (other > 0)])))
            quantiles = ", ".join(f"{q:.0%} {factor.quantile(q):.2f}" for q in QUANTILES)
            print(f"stopped at {stop:g}, {len(factor)} pairs, {name}: {quantiles}")


if __name__ == "__main__":
    main()
