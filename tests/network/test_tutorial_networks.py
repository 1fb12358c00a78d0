"""Networks of tutorials, written by hand: every row of the default table against a computation of its own.

Curvature is held against dense Hessians by double backward, and these, where the network is smooth, against differences
of the gradient; rows that are refused have a reason, and no row is passed over.
"""

from __future__ import annotations

import pytest
import torch
import tutorial_networks_more  # noqa: F401
from rows_compared import compared
from tutorial_networks import TUTORIALS

torch.set_num_threads(1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TUTORIALS)
def test_every_row_is_right(name: str) -> None:
    found = compared(TUTORIALS[name]())
    print(f"{name}: {found}")
    assert not found.wrong, "\n".join(found.wrong)
    assert not found.unchecked
    assert found.agreed > 20
    assert found.rms < 2 or len(found.sampled) < 5
