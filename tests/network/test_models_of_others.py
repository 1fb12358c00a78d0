"""Networks that nobody here wrote: every row of the default table against a computation of its own, or a refusal.

`make models` installs their packages and runs this file; a test whose package is not there is skipped.
"""

from __future__ import annotations

import networks_of_packages_more
import pytest
import torch
from networks_of_packages import PACKAGES
from rows_compared import Maker, compared
from trained_networks import TRAINED

import flatscope as fs
from flatscope.errors import FlatscopeError

pytestmark = pytest.mark.long

torch.set_num_threads(1)
REFUSED = networks_of_packages_more.REFUSED
SERVED: dict[str, Maker] = {**TRAINED, **PACKAGES}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SERVED)
def test_every_row_is_right(name: str) -> None:
    found = compared(SERVED[name]())
    print(f"{name}: {found}")
    assert not found.wrong, "\n".join(found.wrong)
    assert not found.unchecked
    assert found.agreed > 20
    assert found.rms < 2 or len(found.sampled) < 5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_measured_is_refused_with_a_reason(name: str) -> None:
    make, reason = REFUSED[name]
    made = make()
    try:
        problem = fs.Problem(made.model, train=(made.inputs, made.targets), loss=made.loss)
        said = fs.measure(problem, "hessian_trace").to_frame()["reason"][0]
        assert fs.measure(problem, "hessian_trace").to_frame()["value"].isna().all()
    except FlatscopeError as problem:
        said = str(problem)
    print(f"{name}: {said}")
    assert "failed" not in said
    assert any(word in said for word in reason.split("|")), said
