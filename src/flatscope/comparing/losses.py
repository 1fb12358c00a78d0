"""Training losses of several networks, and what they leave to be said about curvature.

The curvature of cross-entropy is p (1 − p) in the outputs: near interpolation it vanishes in proportion to the loss, so
a network that was trained further is flatter for that alone. `RULES` says what is done about it. Other losses: nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from flatscope.comparing.remarks import Remark
from flatscope.formatting import readable_number
from flatscope.network_summary import NetworkSummary


class LossRule(NamedTuple):
    """Rule for networks whose largest training loss is up to a given multiple of the smallest.

    Attributes:
        up_to: factor between the losses up to which this holds.
        says: whether the losses are said beside the answer.
        ranks: whether measures of curvature rank the networks. Where they do, a network is flatter by them only where
            its lead is larger than the factor by which its own loss is lower: `head_start`.
    """

    up_to: float
    says: bool
    ranks: bool


RULES = (LossRule(1.5, says=False, ranks=True), LossRule(3.0, says=True, ranks=True), LossRule(math.inf, True, False))
CROSS_ENTROPIES = {"cross_entropy", "bce", "next_token"}
LOSS_DECIDES = "curvature of cross-entropy falls with the loss"
AT_EQUAL_LOSS = "compare checkpoints at about the same loss"


def is_cross_entropy(loss: str) -> bool:
    """True for the name of a cross-entropy of any kind: of classes, labels or tokens, also weighted or smoothed."""
    return loss.partition(" ")[0] in CROSS_ENTROPIES


def loss_rule(networks: Mapping[str, NetworkSummary], loss: str) -> LossRule:
    """The rule for networks at these training losses; the first one for other losses than a cross-entropy."""
    if not is_cross_entropy(loss):
        return RULES[0]
    return next(rule for rule in RULES if loss_factor(networks) <= rule.up_to)


def loss_factor(networks: Mapping[str, NetworkSummary]) -> float:
    """Largest training loss over the smallest."""
    losses = [network.loss for network in networks.values()]
    return max(losses) / min(losses) if min(losses) > 0 else math.inf if max(losses) > 0 else 1.0


def head_start(losses: Mapping[str, float], one: str, other: str) -> float:
    """Factor in curvature that the lower loss of the first explains; 1 where it is not lower or nobody asks."""
    if not losses or losses[one] >= losses[other]:
        return 1.0
    return losses[other] / losses[one] if losses[one] > 0 else math.inf


def loss_remark(networks: Mapping[str, NetworkSummary], loss: str) -> list[Remark]:
    """A sentence where curvature differs, or may differ, because the losses do."""
    rule = loss_rule(networks, loss)
    if not rule.says:
        return []
    losses = ", ".join(f"{name} {readable_number(network.loss)}" for name, network in networks.items())
    text = f"The training losses are a factor of {readable_number(loss_factor(networks), 3)} apart ({losses})"
    if rule.ranks:
        text += f": {LOSS_DECIDES}, so part of a difference in curvature is theirs."
    else:
        text += (
            f", more than {RULES[-2].up_to:g}: curvature of cross-entropy vanishes with the loss, so measures of "
            f"curvature are left out of the ranking. {AT_EQUAL_LOSS.capitalize()}."
        )
    return [Remark("loss", text)]
