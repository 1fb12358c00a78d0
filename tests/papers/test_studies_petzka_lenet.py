"""Figures 1 and 2 of Petzka et al. (2019): their numbers on networks whose verdict is known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from flatscope_papers import find_study
from flatscope_papers.claims import NOT_REPRODUCED, REPRODUCED, judge
from flatscope_papers.petzka2019.correlations import settings_note, stronger
from flatscope_papers.petzka2019.lenet import missing_notes
from flatscope_papers.petzka2019.reparameterized import factors_note, reparameterized_found

FIRST = {claim.key: claim for claim in find_study("petzka2019-fig1").claims}
SECOND = {claim.key: claim for claim in find_study("petzka2019-fig2").claims}
MEASURES = ("kappa", "kappa_trace", "layer_trace", "layer_max_eigenvalue", "norm")


def two_measures(of_trace: float, of_top: float, n: int = 200) -> pd.DataFrame:
    """κ_τ and κ of the output matrix as multiples of the gap, with noise of size one."""
    generator = np.random.default_rng(0)
    gap = generator.normal(size=n)
    columns = {"kappa_trace": of_trace, "kappa": of_top}
    noisy = {f"before/{name}/fc3": slope * gap + generator.normal(size=n) for name, slope in columns.items()}
    return pd.DataFrame({**noisy, "gap": gap})


@pytest.mark.parametrize(
    ("of_trace", "of_top", "due"),
    [
        (3.0, 0.5, REPRODUCED),
        (3.0, -0.5, REPRODUCED),
        (0.5, 3.0, NOT_REPRODUCED),
        (0.5, -3.0, NOT_REPRODUCED),
        (-0.5, -3.0, NOT_REPRODUCED),  # the less negative of two is not the stronger
        (-3.0, -0.5, NOT_REPRODUCED),  # nor is the stronger one in the wrong direction
    ],
)
def test_the_stronger_correlation_is_one_in_the_papers_direction(of_trace: float, of_top: float, due: str) -> None:
    found = stronger(two_measures(of_trace, of_top), "fc3")
    assert judge(FIRST["stronger"], found, "paper").verdict == due


def test_what_the_training_loss_and_the_batches_make_of_a_correlation_is_told() -> None:
    generator = np.random.default_rng(0)
    batch = np.repeat([4, 32, 512], 40)
    loss = generator.normal(size=120)
    points = pd.DataFrame({"batch": batch, "train_loss": loss})
    noise = 0.01 * generator.normal(size=(2, 120))
    points["gap"] = -loss + noise[0]
    points["by_loss"] = -loss + noise[1]  # nothing but the training loss
    points["by_batch"] = np.where(batch == 512, points["gap"], generator.normal(size=120))  # one batch size alone
    assert points["by_loss"].corr(points["gap"]) > 0.99
    by_loss = settings_note(points, "by_loss")
    assert abs(float(by_loss.split("held fixed ")[1].split()[0])) < 0.3
    assert "(the gap against the training loss -1.00)" in by_loss
    by_batch = settings_note(points, "by_batch")
    assert "512: 1.00" in by_batch
    assert abs(float(by_batch.split("without batch size 512 ")[1].split(";")[0])) < 0.3


def test_an_initialisation_of_which_nothing_is_judged_is_told() -> None:
    trained = [{"init": "normal"}] * 3 + [{"init": "uniform"}] * 2
    (note,) = missing_notes(pd.DataFrame({"init": ["uniform"]}), trained)
    assert "none of the 3 networks with the initialisation 'normal'" in note
    assert missing_notes(pd.DataFrame({"init": ["uniform", "normal"]}), trained) == ()


def rewritten(hidden_change: float, scramble: bool, slope: float = 1.0, n: int = 200) -> pd.DataFrame:
    """Networks before and after: κ of the hidden matrix moves by a share, measures of the Hessian are scrambled."""
    generator = np.random.default_rng(0)
    gap = generator.random(n)
    frame = pd.DataFrame({"gap": gap})
    factors = np.where(np.arange(n) % 2, 5.0, 0.2)
    for layer in ("fc3", "fc2"):
        for name in MEASURES:
            before = 2 + slope * gap + 0.1 * generator.normal(size=n)
            after = before.copy()
            if name.startswith("layer") and scramble:
                after = generator.permutation(before)
            frame[f"before/{name}/{layer}"], frame[f"after/{name}/{layer}"] = before, after
    frame["after/kappa/fc2"] *= 1 + hidden_change
    frame["after/norm/fc3"] *= factors
    return frame


def verdicts(frame: pd.DataFrame) -> dict[str, str]:
    found = reparameterized_found(frame)
    return {key: judge(SECOND[key], answer, "paper").verdict for key, answer in found.items()}


def test_measures_that_only_the_hessian_makes_are_seen_to_fail() -> None:
    given = verdicts(rewritten(0.0, scramble=True))
    assert set(given) == set(SECOND)
    assert set(given.values()) == {REPRODUCED}


def test_a_hidden_matrix_that_moves_or_a_hessian_that_does_not_is_seen() -> None:
    moved = verdicts(rewritten(0.1, scramble=True))
    assert {key for key, verdict in moved.items() if verdict == NOT_REPRODUCED} == {"invariant"}
    still = verdicts(rewritten(0.0, scramble=False))
    hessian = {key for key in SECOND if key.startswith("hessian") or key.endswith("drops")}
    assert {key for key, verdict in still.items() if verdict == NOT_REPRODUCED} == hessian


def test_what_there_was_to_lose_is_told() -> None:
    assert "before it" not in reparameterized_found(rewritten(0.0, True))["trace_drops"].note
    assert "wrong sign" in reparameterized_found(rewritten(0.0, True, slope=-1.0))["trace_drops"].note
    assert "little to take away" in reparameterized_found(rewritten(0.0, True, slope=0.0))["hessian_eigenvalue"].note


def test_which_matrices_were_scaled_is_told() -> None:
    note = factors_note(rewritten(0.0, True, n=20))
    assert "output matrix in 20 of 20 networks (norm times 0.20 to 5)" in note
    assert "last hidden matrix in 0 of 20 networks" in note
