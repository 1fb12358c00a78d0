"""Every measure of the registry keeps the contract that its declaration makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import checks
import pytest
from forms_of_measures import FORMS
from networks import (
    BUILDERS,
    Tiny,
    attending,
    batchnorm_conv,
    lenet_like,
    mlp,
    residual,
    smooth,
    walled,
    walled_batchnorm,
)
from references import Dense, dense

from flatscope.registry import SYMMETRIES, Declaration, declarations

pytestmark = pytest.mark.fast

MEASURES = [*declarations().values(), *FORMS]
by_measure = pytest.mark.parametrize("entry", MEASURES, ids=lambda entry: getattr(entry, "twin", entry.name))
on_every_network = pytest.mark.parametrize(
    "build",
    [pytest.param(build, marks=() if build is mlp else pytest.mark.slow) for build in BUILDERS],
    ids=lambda build: build.__name__,
)


def shared(build: Callable[[], Tiny]) -> Tiny:
    """The network that the twin was written out for: what was measured on it once is not measured again."""
    return dense(build.__name__, build).tiny


MLP, BATCHNORM, SMOOTH, ATTENDING = (shared(build) for build in (mlp, batchnorm_conv, smooth, attending))
on_three_networks = pytest.mark.parametrize("tiny", [MLP, BATCHNORM, SMOOTH], ids=lambda tiny: tiny.name)
BY_SYMMETRY = {"batchnorm_scaling": [BATCHNORM], "output_scaling": [MLP]}
BY_SYMMETRY |= {"attention_scaling": [ATTENDING], "norm_scaling": [ATTENDING]}
WALLED, WALLED_BATCHNORM = walled(), walled_batchnorm()
BY_SYMMETRY_WITH_WALLS = BY_SYMMETRY | {"batchnorm_scaling": [WALLED_BATCHNORM], "output_scaling": [WALLED, ATTENDING]}
HOLD_WITHOUT_WALLS = (("psi_balance", "output_scaling"),)  # and are not declared for that
RESCALED = [shared(lenet_like), shared(residual)]  # the first ends in what the MLP is


# One exact problem for each sample and class: two samples of the right class and one of another are as good as eleven.
COSTLY_TWINS = ("geometric_margin",)
# What a rescaling does to them shows at a minimum only, which these networks are not in: test_learning_coefficient.py.
MOVE_AT_MINIMA = ("local_learning_coefficient", "wbic")


def few(tiny: Tiny) -> Tiny:
    margins = Dense(tiny).margins
    right, wrong = (found.nonzero().flatten().tolist() for found in (margins > 0, margins <= 0))
    kept = [*wrong[:1], *right[:1], *right[1:][-1:]]
    return replace(tiny, x=tiny.x[kept], y=tiny.y[kept])


def applies(entry: Declaration, tiny: Tiny) -> bool:
    return not ("classes" in entry.needs and tiny.loss == "mse")


@by_measure
def test_declares_itself(entry: Declaration) -> None:
    checks.declares_itself(entry)


@by_measure
@on_every_network
def test_equals_its_twin(entry: Declaration, build: Callable[[], Tiny]) -> None:
    written_out = dense(build.__name__, build)
    if entry.name in COSTLY_TWINS:
        written_out = dense(f"{build.__name__}, few samples", lambda: few(build()))
    if applies(entry, written_out.tiny):
        checks.equals_its_twin(entry, written_out)


@pytest.mark.slow
@by_measure
@on_three_networks
@pytest.mark.parametrize(
    "check",
    [
        checks.same_alone_and_in_a_table,
        checks.same_for_any_batches,
        checks.same_for_any_order,
        checks.same_for_repeated_data,
        checks.seed_matters_only_to_estimates,
        checks.costs_what_it_declares,
        checks.close_in_float32,
    ],
    ids=lambda check: check.__name__,
)
def test_keeps_the_contract(entry: Declaration, tiny: Tiny, check) -> None:  # type: ignore[no-untyped-def]
    if applies(entry, tiny):
        check(entry, tiny)


@pytest.mark.slow
@by_measure
def test_leaves_everything_untouched(entry: Declaration) -> None:
    for tiny in (MLP, BATCHNORM):
        checks.leaves_everything_untouched(entry, tiny)


@pytest.mark.slow
@by_measure
@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_keeps_its_symmetries(entry: Declaration, symmetry: str) -> None:
    elsewhere = entry.name in MOVE_AT_MINIMA and symmetry not in entry.invariant_under
    behind_a_wall = (entry.name, symmetry) in HOLD_WITHOUT_WALLS
    for tiny in [WALLED] if behind_a_wall else BY_SYMMETRY.get(symmetry, RESCALED):
        if applies(entry, tiny) and not elsewhere:
            checks.keeps_its_symmetries(entry, tiny, symmetry)


@pytest.mark.slow
@by_measure
@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_keeps_what_it_declares_where_scales_stop(entry: Declaration, symmetry: str) -> None:
    """A symmetry of the function is one of every network: not only of those in which each unit has a free scale."""
    for tiny in BY_SYMMETRY_WITH_WALLS.get(symmetry, [WALLED]):
        if symmetry in entry.invariant_under and applies(entry, tiny):
            checks.keeps_its_symmetries(entry, tiny, symmetry)
