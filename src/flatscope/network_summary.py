"""Summary of one network: its size, its losses and errors, and whether it can be rescaled."""

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
HOPEFUL = 0.98  # share of the loss of a constant output from which on a network has learnt nothing
STEEP = 0.1  # of the training loss: a step that takes more away moves the curvature of a classifier as well
NOT_LOOKED = "not looked for"
STANDING = "standing"  # key of a table's metadata that holds the summary of its network


@dataclass(frozen=True)
class NetworkSummary:
    """Size, losses and errors of one network.

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
        """True if the training loss is no better than that of a constant output."""
        return self.loss >= HOPEFUL * self.constant

    @property
    def untrained(self) -> bool:
        """True if the network tells nothing although there is something to learn: it errs, or the loss still falls."""
        return self.tells_nothing and (self.on_a_slope or self.error > 0)

    @property
    def on_a_slope(self) -> bool:
        """True if training stopped where the loss still falls clearly; False where that is not known."""
        return self.share > NEARLY and not self.decay

    @property
    def step(self) -> str:
        """Change of the training loss by one step down the gradient, in words."""
        loss, below = written(self.loss, 3), written(max(self.loss - self.fall, 0.0), 3)
        lowers = "one step down the gradient lowers the training loss"
        if not self.fall > 0:
            return f"no step down the gradient lowers the training loss {loss}"
        return f"{lowers} {loss} by {written(self.fall, 2)}" if loss == below else f"{lowers} from {loss} to {below}"

    @property
    def minimum(self) -> tuple[str, str]:
        """Word for how near the network is to a minimum, and the sentence.

        "yes", "nearly", "no"; "open" where the loss rests at that of a constant output; "unknown" where nobody looked.
        """
        if math.isnan(self.fall):
            return "unknown", NOT_LOOKED
        loss, constant = written(self.loss, 3), written(self.constant, 3)
        if self.tells_nothing:
            better = "no better" if self.loss >= self.constant or loss == constant else "hardly better"
            known = f"the training loss {loss} is {better} than {constant}, that of outputs that ignore the inputs"
            below = written(max(self.loss - self.fall, 0.0), 3)
            return ("no", f"{known}; one step lowers it to {below}") if self.on_a_slope else ("open", known)
        if self.decay:
            held = f"a weight decay of about {written(self.decay, 2)} explains it"
            return "yes", f"the gradient is not zero, but {held}; the training loss is {loss}"
        level = "yes" if self.share <= SETTLED else "no" if self.on_a_slope else "nearly"
        whole = "it" if math.isnan(self.constant) else f"{constant}, the loss of outputs that ignore the inputs"
        words = f"{self.step}: {written(100 * self.share, 2)} % of {whole} (up to {100 * SETTLED:g} % is a minimum)"
        if level != "no" and self.fall > STEEP * self.loss and not math.isnan(self.error):
            taken = f"{written(100 * self.fall / self.loss, 2)} % of its own loss"
            words += f"; that is {taken}, and curvature falls with it: compare at equal loss"
        return level, words

    @property
    def brief(self) -> str:
        """The words of `minimum` where several networks stand side by side: the share of the fall, and the limit."""
        if math.isnan(self.fall) or self.tells_nothing or self.decay:
            return self.minimum[1]
        whole = "" if math.isnan(self.constant) else " of a constant's"
        share = f"{written(100 * self.share, 2)} %{whole}"
        return f"one step lowers the loss by {share} (up to {100 * SETTLED:g} % is a minimum)"

    def to_dict(self) -> dict[str, Any]:
        """Plain values; NaN as None."""
        return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> NetworkSummary:
        """Summary from the dictionary that `to_dict` gave."""
        filled: dict[str, Any] = {name: math.nan if value is None else value for name, value in given.items()}
        return cls(**filled)
