"""How a training moves its weights, and the curvature that it can bear."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flatscope.errors import InputError


@dataclass(frozen=True)
class UpdateRule:
    """Update rule of a training, as far as it decides which curvature is stable.

    Attributes:
        name: of the optimizer's class in torch.
        lr: learning rate.
        momentum: β of v ← βv + (1 − dampening)·g, w ← w − lr·v.
        dampening: see momentum.
        nesterov: w ← w − lr·(g + βv) instead.
        weight_decay: added to the Hessian's diagonal.
        unknown: why no threshold is known; empty where one is.

    Example:
        >>> UpdateRule("SGD", lr=0.1).threshold, round(UpdateRule("SGD", lr=0.1, momentum=0.9).threshold, 6)
        (20.0, 38.0)
    """

    name: str
    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    unknown: str = ""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("lr", 0, math.inf),
            ("momentum", 0, 1),
            ("dampening", 0, 1),
            ("weight_decay", 0, math.inf),
        ):
            value = getattr(self, name)
            good = isinstance(value, int | float) and not isinstance(value, bool) and least <= value < most
            if not self.unknown and not good:
                raise InputError(f"a number from 0 up{' to 1' if most == 1 else ''}", repr(value), where=name)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> UpdateRule:
        """From what `live.optimizer_settings` gives; plain SGD is all that has a threshold here."""
        name, lr = str(settings.get("name", "SGD")), settings.get("lr", math.nan)
        known = {key: settings[key] for key in ("momentum", "dampening", "nesterov", "weight_decay") if key in settings}
        if name != "SGD" or settings.get("maximize"):
            why = f"no threshold is known here for {name}"
        elif any(isinstance(value, list) for value in (lr, *known.values())):
            why = "no threshold is known where groups of parameters have different settings"
        else:
            return cls(name, lr, **known)
        return cls(name, lr if isinstance(lr, int | float) else math.nan, unknown=why)

    @property
    def threshold(self) -> float:
        """The curvature above which a step overshoots by more than it came from; NaN where it is not known.

        Infinite where the learning rate is 0, as schedules have it at their beginning or end.
        """
        if self.unknown:
            return math.nan
        if not self.lr:
            return math.inf
        beta = self.momentum
        if not beta:
            return 2 / self.lr
        allowed = (2 + 2 * beta) / (1 + 2 * beta) if self.nesterov else 2 * (1 + beta)
        return allowed / (self.lr * (1 - self.dampening))

    @property
    def symbol(self) -> str:
        """Symbol of the quantity that is 2 at the edge."""
        factor = "" if not self.weight_decay else "(λ_max + weight decay)"
        symbol = f"η·{factor or 'λ_max'}"
        if not self.momentum:
            return symbol
        return f"{symbol}·(1 + 2β)/(1 + β)" if self.nesterov else f"{symbol}/(1 + β)"
