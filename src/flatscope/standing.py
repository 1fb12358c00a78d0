"""Where one network stands: its size, its losses and errors, and whether it can be rescaled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

# Gradient norms up to which a network counts as settled, and as nearly so; beyond, training stopped on a slope. Rules
# of thumb, and said to be: the gradient norm has no natural scale.
SETTLED, NEARLY = 1e-3, 1e-2
STANDING = "standing"  # key of a table's metadata under which commands keep where its network stands


@dataclass(frozen=True)
class Standing:
    """Where one network stands.

    Attributes:
        architecture: its modules as text, without BatchNorm.
        parameters: number of trainable parameters, as given.
        loss: mean training loss.
        error: share of training samples with the wrong class; NaN without classes.
        test_loss: mean loss on the test set; NaN without one.
        test_error: share of test samples with the wrong class; NaN without classes or a test set.
        rescalable: whether some unit can be rescaled without changing the function.
        gradient_norm: of the mean training loss, over the trainable parameters as given: is this a minimum at all?
        n_test: number of test samples; 0 without a test set.
    """

    architecture: str
    parameters: int
    loss: float
    error: float
    test_loss: float
    test_error: float
    rescalable: bool
    gradient_norm: float = math.nan
    n_test: int = 0

    @property
    def on_a_slope(self) -> bool:
        """Whether training stopped where the loss still falls clearly; False where the gradient is not known."""
        return self.gradient_norm > NEARLY

    def to_dict(self) -> dict[str, Any]:
        """Plain values; NaN as None."""
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Standing:
        """What `to_dict` gave."""
        filled: dict[str, Any] = {name: math.nan if value is None else value for name, value in given.items()}
        return cls(**filled)
