"""Studies of Petzka et al. (2019): they run through at smoke size, and their analyses give the verdict that is due."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import flatscope as fs
from flatscope.studies import intervals, study
from flatscope.studies.claims import NOT_JUDGED, NOT_REPRODUCED, PARTLY, REPRODUCED, judge
from flatscope.studies.petzka2019_correlations import CLAIMS_1
from flatscope.studies.petzka2019_lenet import RULE, at_rule, correlations, stages
from flatscope.studies.petzka2019_theory import minimum, remarks
from flatscope.studies.tail_curvature import tail_curvature
from flatscope.training.data import load
from flatscope.training.models import build

NAMES = ["fig1", "fig2", "fig3", "fig4", "fig5", "fig6", "ridge", "feature-robustness"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::UserWarning")  # eight networks: SciPy warns about such short samples
def test_smoke(name: str, store: Path) -> None:
    result = study(f"petzka2019-{name}", "smoke", workers=0, store=store, device="cpu")
    assert {finding.verdict for finding in result.findings} == {NOT_JUDGED}
    assert len(result.table)
    assert "<svg" in result.svg
    assert all(math.isfinite(finding.estimate.value) for finding in result.findings)


@pytest.mark.parametrize("layers", ["fc2", "fc3"])
def test_closed_forms_equal_the_sweep(layers: str) -> None:
    x, y = load("flatscope.studies.smoke_data:digits_as_cifar10", train_size=60, test_size=0).train
    model = build("lenet5", seed=3).double().eval()
    found = tail_curvature(model, x.double())
    names = ["layer_trace", "layer_max_eigenvalue", "kappa", "kappa_trace"]
    table = fs.measure(fs.Problem(model, train=(x.double(), y)), names)
    for name in names:
        assert found[f"{name}/{layers}"] == pytest.approx(table.layer(name)[layers], rel=1e-9)


def test_the_paper_scale_is_the_papers_grid() -> None:
    configs = [config for config in stages("paper")[0].configs if config["variant"] == "momentum"]
    assert len(configs) == 144
    assert {(c["train"]["batch_size"], c["train"]["lr"]) for c in configs} == {
        (4, 0.001),
        (32, 0.008),
        (64, 0.02),
        (512, 0.1),
    }
    assert {c["init"] for c in configs} == {"xavier_normal", "kaiming_uniform", "uniform", "normal"}


def planted(slope: float, noise: float, n: int = 400) -> pd.DataFrame:
    """Networks whose gap depends on κ_τ with a known strength; half of them never reach the rule."""
    generator = np.random.default_rng(0)
    kappa = 4 * generator.random(size=n)
    gap = slope * kappa + noise * generator.normal(size=n)
    rows: list[dict[str, Any]] = []
    for i in range(n):
        base = {"network": i, "variant": "momentum", "learned": True, "gap": gap[i], "before/kappa_trace/fc3": kappa[i]}
        if i % 2:
            rows.append({**base, "rule": RULE})
        rows.append({**base, "rule": "end"} | ({"gap": 1e9} if i % 2 else {}))
    return pd.DataFrame(rows)


def test_each_network_is_taken_where_the_rule_stops_it() -> None:
    points = at_rule(planted(1.0, 0.0), RULE)
    assert len(points) == 400
    assert points["network"].is_unique
    assert (points["gap"] < 1e9).all()  # the end is taken only where the rule never held


@pytest.mark.parametrize(
    ("slope", "noise", "verdict"), [(1.0, 0.52, REPRODUCED), (1.0, 2.0, PARTLY), (-1.0, 0.5, NOT_REPRODUCED)]
)
def test_a_planted_correlation_gets_its_verdict(slope: float, noise: float, verdict: str) -> None:
    points = at_rule(planted(slope, noise), RULE)
    found = intervals.correlation(points["before/kappa_trace/fc3"], points["gap"])
    assert judge(CLAIMS_1[0], found, "paper").verdict == verdict


def test_correlations_cover_every_rule() -> None:
    along = correlations(planted(1.0, 0.1).query("gap < 1e9"))
    assert set(along["rule"]) == {RULE, "end"}
    assert (along["pearson"] > 0.9).all()


def test_the_stronger_of_two_correlations_is_seen() -> None:
    generator = np.random.default_rng(1)
    gap = generator.normal(size=100)
    clear, blurred = gap + 0.1 * generator.normal(size=100), gap + 2 * generator.normal(size=100)
    frame = pd.DataFrame({"clear": clear, "blurred": blurred, "gap": gap})
    better = intervals.lead_of_correlations(frame, "clear", ["blurred"], "gap")
    assert better.low is not None
    assert better.low > 0
    worse = intervals.lead_of_correlations(frame, "blurred", ["clear"], "gap")
    assert worse.value == pytest.approx(-better.value)


def test_the_regression_is_at_its_minimum() -> None:
    model, x, y = minimum(200, 6, seed=1)
    loss = torch.nn.functional.cross_entropy(model(x), y)
    gradient = torch.autograd.grad(loss, model.weight)[0]
    assert float(gradient.norm()) < 1e-12
    assert float(model.weight.detach().norm()) < 1e3  # finite, since the classes overlap


def test_remarks_of_the_appendix() -> None:
    found = remarks(0)
    assert found["separating_norm"] == pytest.approx(1.41423, abs=1e-5)
    assert found["convolution_error"] < 1e-12
