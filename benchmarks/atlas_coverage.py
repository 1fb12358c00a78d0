"""How often intervals of `fs.atlas` hold the correlation of the population: `python benchmarks/atlas_coverage.py`.

One line per distribution, kind and correlation; a share for each number of networks. Takes some minutes on one core.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from flatscope.training.populations.resampled import copies_in_resamples, correlation_intervals, weighted_correlation

NETWORKS, REPEATS, RESAMPLES, LEVEL = (10, 20, 40, 150), 400, 300, 0.95
TWINS = {"pearson": stats.pearsonr, "spearman": stats.spearmanr, "kendall": stats.kendalltau}


def drawn(generator: np.random.Generator, shape: str, n: int, rho: float) -> tuple[np.ndarray, np.ndarray]:
    """A pair of samples: normal, the first of them lognormal, or both with the tails of Student's t of 4."""
    x, other = generator.normal(size=(2, n))
    y = rho * x + math.sqrt(1 - rho**2) * other
    if shape == "lognormal":
        return np.exp(x), y
    tails = np.sqrt(generator.chisquare(4, n) / 4) if shape == "heavy tails" else 1.0
    return x / tails, y / tails


def covered(shape: str, kind: str, rho: float, n: int, true: float) -> float:
    generator, one, held = np.random.default_rng(n), np.zeros(n, dtype=np.int64), 0
    for repeat in range(REPEATS):
        found = weighted_correlation(
            *drawn(generator, shape, n, rho), copies_in_resamples(one, RESAMPLES, repeat), kind, one
        )
        reach = correlation_intervals(found[:, None], np.array([n]), np.array([1]), LEVEL).reach[0]
        held += abs(math.atanh(np.clip(found[0], -0.999999, 0.999999)) - math.atanh(true)) < reach
    return held / REPEATS


def main() -> None:
    print(f"{'':36}", *(f"{n:>6}" for n in NETWORKS))
    for shape in ("normal", "lognormal", "heavy tails"):
        for kind, twin in TWINS.items():
            for rho in (0.0, 0.5, 0.9):
                many = [twin(*drawn(np.random.default_rng(k), shape, 300_000, rho)).statistic for k in range(4)]
                shares = [covered(shape, kind, rho, n, float(np.mean(many))) for n in NETWORKS]
                print(f"{shape:12} {kind:10} {rho:4.1f}      ", *(f"{share:6.3f}" for share in shares), flush=True)


if __name__ == "__main__":
    main()
