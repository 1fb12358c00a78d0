"""Where one network stands: its size, its losses and errors, and whether it can be rescaled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flatscope.formatting import written

# Falls of the loss by one step down the gradient, as shares of the loss of the best constant output, up to which a
# network counts as settled, and as nearly so; beyond, training stopped on a slope. True minima had less than 1e-6,
# those whose training was broken off more than 2e-3 (tests of descents).
SETTLED, NEARLY = 2e-4, 2e-3
HOPEFUL = 0.98  # share of the loss of a constant output above which a network has learnt nothing
NOT_LOOKED = "not looked for"
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
        fall: of the training loss by one step down the gradient; NaN where it was not looked for.
        constant: training loss of the best output that does not depend on the inputs; NaN where it is not known.
        decay: weight decay that explains what is left of the gradient; 0 where none does.
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
    fall: float = math.nan
    constant: float = math.nan
    decay: float = 0.0

    @property
    def share(self) -> float:
        """The fall as a share of what a constant output has to lose; of the loss itself where that is not known."""
        whole = self.loss if math.isnan(self.constant) else self.constant
        return self.fall / whole if whole > 0 else self.fall

    @property
    def tells_nothing(self) -> bool:
        """Whether the training loss is no better than that of a constant output."""
        return self.loss > HOPEFUL * self.constant

    @property
    def on_a_slope(self) -> bool:
        """Whether training stopped where the loss still falls clearly; False where that is not known."""
        return self.share > NEARLY and not self.decay

    @property
    def minimum(self) -> tuple[str, str]:
        """Whether this is a minimum, "yes", "nearly", "no" or "unknown", and the words that say so."""
        if math.isnan(self.fall):
            return "unknown", NOT_LOOKED
        loss, below = written(self.loss, 3), written(max(self.loss - self.fall, 0.0), 3)
        level = "yes" if self.share <= SETTLED or self.decay else "no" if self.on_a_slope else "nearly"
        if self.tells_nothing:
            known = (
                f"the training loss {loss} is no better than that of a constant output ({written(self.constant, 3)})"
            )
            return level, f"{known}, and one step down the gradient lowers it to {below}"
        if self.decay:
            held = f"a weight decay of about {written(self.decay, 2)} explains it"
            return level, f"the gradient is not zero, but {held}; the training loss is {loss}"
        if level == "no":
            return level, f"one step down the gradient lowers the training loss from {loss} to {below}"
        return level, f"one step down the gradient wins {written(self.fall, 2)} of the training loss {loss}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values; NaN as None."""
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Standing:
        """What `to_dict` gave."""
        filled: dict[str, Any] = {name: math.nan if value is None else value for name, value in given.items()}
        return cls(**filled)
