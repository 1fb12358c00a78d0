"""Where one network stands: its size, its losses and errors, and whether it can be rescaled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flatscope.context import Context
from flatscope.errors import FlatscopeError
from flatscope.guards import own_settings
from flatscope.network.tracing import trace
from flatscope.params import norm
from flatscope.problem import Problem

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
    """

    architecture: str
    parameters: int
    loss: float
    error: float
    test_loss: float
    test_error: float
    rescalable: bool
    gradient_norm: float = math.nan

    @classmethod
    def of(cls, context: Context, folded: Problem | None = None) -> Standing:
        """That of the network of a context.

        Args:
            context: the network as given.
            folded: the same network without BatchNorm, where it has any.
        """
        problem, plainer = context.problem, folded or context.problem
        with own_settings(problem.generators):
            train = context.scores()
            test = None if problem.test is None else context.scores("test")
            try:
                rescalable = trace(plainer.model, plainer.example()).n_classes > 0
            except FlatscopeError:
                rescalable = True  # a network that cannot be read may well be one that can be rescaled
        classes = problem.classification
        return cls(
            architecture=str(plainer.model),
            parameters=sum(problem.params[name].numel() for name in problem.trainable),
            loss=train.loss,
            error=train.error if classes else math.nan,
            test_loss=math.nan if test is None else test.loss,
            test_error=math.nan if test is None or not classes else test.error,
            rescalable=rescalable,
            gradient_norm=gradient_norm(context),
        )

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


def gradient_norm(context: Context) -> float:
    """Length of the gradient of the mean training loss; NaN where the network cannot be differentiated."""
    try:
        return norm(context.gradient())
    except Warning:  # raised only where the user turned warnings into errors
        raise
    except Exception:  # what cannot be differentiated loses nobody a table
        return math.nan
