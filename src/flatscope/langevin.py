"""SGD with added noise as an optimizer: SGDL, eqs. (4), (5) and (9) of Zhang et al. (2017).

One step is v ← βv − γ(g + λw) + γ'ξ, w ← Π_K(w + v) with ξ standard normal; without momentum v is just the step.
Its temperature is T = γ'²/(2γ(1 − β)): for small steps and full gradients the weights visit regions like
exp(−U/T), where U is the loss plus λ‖w‖²/2. Mini-batches add noise of their own, which is not counted here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flatscope.errors import InputError

Projection = tuple[str, float] | tuple[str, float, float]
SETTINGS = ("lr", "momentum", "weight_decay", "noise_decay")


class SGLD(torch.optim.Optimizer):
    """Stochastic gradient descent with Langevin noise, at a given temperature or noise power.

    Every setting may differ between parameter groups. A given temperature is kept when a scheduler changes the
    learning rate (the noise follows it); a given noise is kept as it is (the temperature moves).

    Args:
        params: parameters or groups, as for any optimizer.
        lr: γ, the step length.
        temperature: T; the noise is then γ' = √(2γ(1 − β)T). Either this or `noise`; 0 is plain SGD.
        noise: γ', the standard deviation of what is added to each coordinate of the velocity.
        momentum: β, from 0 to below 1.
        weight_decay: λ; λw is added to the gradient.
        noise_decay: κ; step t = 0, 1, ... has the noise γ'(1 + t)^−κ. 0 is the constant power of Figure 6.
        projection: ("ball", radius) for the group's weights as one vector around 0, ("box", low, high) or
            ("torus", low, high) for every coordinate; None for no constraint.
        seed: of the noise, drawn by generators of the optimizer's own; their states are in `state_dict`.

    Example:
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = SGLD([w], lr=0.1, temperature=0.05, momentum=0.5)
        >>> round(optimizer.noise_powers()[0], 4), round(optimizer.temperatures()[0], 4)
        (0.0707, 0.05)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        temperature: float | None = None,
        *,
        noise: float | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        noise_decay: float = 0.0,
        projection: Projection | None = None,
        seed: int = 0,
    ) -> None:
        self.seed = seed
        self._generators: dict[str, torch.Generator] = {}
        defaults = {
            "lr": lr,
            "temperature": temperature,
            "noise": noise,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "noise_decay": noise_decay,
            "projection": projection,
            "steps": 0,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; a temperature or noise given in it takes the place of the other one's default."""
        group = dict(param_group)
        if (group.get("temperature") is None) != (group.get("noise") is None):
            group["noise" if group.get("noise") is None else "temperature"] = None
        _check_settings({**self.defaults, **group})
        super().add_param_group(group)

    def noise_powers(self) -> list[float]:
        """γ'_t of the next step, for each group."""
        return [_noise_power_of_group(group) for group in self.param_groups]

    def temperatures(self) -> list[float]:
        """T = γ'_t²/(2γ(1 − β)) of the next step, for each group; infinite where γ = 0 and there is noise."""
        return [
            self.temperature_of(_noise_power_of_group(group), group["lr"], group["momentum"])
            for group in self.param_groups
        ]

    @staticmethod
    def noise_of(temperature: float, lr: float, momentum: float = 0.0) -> float:
        """γ' = √(2γ(1 − β)T), the noise in the velocity that gives the temperature T."""
        return math.sqrt(2 * lr * (1 - momentum) * temperature)

    @staticmethod
    def temperature_of(noise: float, lr: float, momentum: float = 0.0) -> float:
        """T = γ'²/(2γ(1 − β)); infinite for noise without a gradient step."""
        if noise == 0:
            return 0.0
        return noise**2 / (2 * lr * (1 - momentum)) if lr > 0 else math.inf

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step for every parameter that has a gradient.

        Args:
            closure: evaluates the loss anew and returns it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            power = _noise_power_of_group(group)
            for weight in moved:
                if weight.grad.is_sparse or weight.is_complex():
                    raise InputError("dense real gradients", f"{weight.grad.layout}, {weight.dtype}", where="SGLD")
                self._move_parameter(weight, group, power)
            if group["projection"] is not None:
                project_onto_domain_in_place(moved, group["projection"])
            group["steps"] += 1
        return loss

    def _move_parameter(self, weight: Tensor, group: dict[str, Any], power: float) -> None:
        assert weight.grad is not None
        gradient = weight.grad
        if group["weight_decay"]:
            gradient = gradient.add(weight, alpha=group["weight_decay"])
        if group["momentum"]:
            velocity = self.state[weight].setdefault("velocity", torch.zeros_like(weight))
            velocity.mul_(group["momentum"]).add_(gradient, alpha=-group["lr"])
        else:
            velocity = gradient.mul(-group["lr"])
        if power:
            generator = self._noise_generator(weight.device)
            normal = torch.empty_like(weight).normal_(generator=generator)
            velocity.add_(normal, alpha=power)
        weight.add_(velocity)

    def _noise_generator(self, device: torch.device) -> torch.Generator:
        """The noise of a device; made when first needed, since parameters may move between devices."""
        name = str(device)
        if name not in self._generators:
            self._generators[name] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[name]

    def state_dict(self) -> dict[str, Any]:
        """As for any optimizer, and the states of the noise: a run that is resumed goes on with the same noise."""
        states = {name: generator.get_state() for name, generator in self._generators.items()}
        return {**super().state_dict(), "seed": self.seed, "generators": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of `state_dict`; one without noise states (of another optimizer) is refused."""
        if "generators" not in state_dict:
            raise InputError("a state of SGLD", f"keys {sorted(state_dict)}", where="SGLD.load_state_dict")
        super().load_state_dict(state_dict)
        self.seed, self._generators = state_dict["seed"], {}
        self._restore_noise_states(state_dict["generators"])

    def _restore_noise_states(self, states: dict[str, Tensor]) -> None:
        for name, state in states.items():
            if torch.device(name).type == "cuda" and not torch.cuda.is_available():
                continue  # a checkpoint of a GPU run, gone on with on the CPU: its noise starts from the seed
            self._noise_generator(torch.device(name)).set_state(state.cpu())

    def __getstate__(self) -> dict[str, Any]:
        states = {name: generator.get_state() for name, generator in self._generators.items()}
        return {**super().__getstate__(), "seed": self.seed, "generator_states": states}

    def __setstate__(self, state: dict[str, Any]) -> None:
        states = state.pop("generator_states", None)
        super().__setstate__(state)
        if states is not None:  # absent when `load_state_dict` calls this
            self._generators = {}
            self._restore_noise_states(states)


def project_onto_domain_in_place(tensors: Sequence[Tensor], projection: Projection) -> None:
    """Put tensors back into a set, in place: the nearest point of a ball or box, or the same point of a torus."""
    kind, *numbers = _checked_projection(projection)
    if kind == "ball":
        if tensors:
            norm = torch.stack([t.norm().to(tensors[0].device) for t in tensors]).norm()
            shrink = (numbers[0] / norm.clamp_min(numbers[0])).to(tensors[0].dtype)  # 1 inside the ball
            for tensor in tensors:
                tensor.mul_(shrink.to(tensor.device))
    elif kind == "box":
        for tensor in tensors:
            tensor.clamp_(numbers[0], numbers[1])
    else:
        for tensor in tensors:
            wrap_in_place(tensor, numbers[0], numbers[1])


def wrap_in_place(tensor: Tensor, low: float, high: float) -> Tensor:
    """Each coordinate modulo high − low, in [low, high), in place."""
    tensor.sub_(low).remainder_(high - low).add_(low)
    return tensor.masked_fill_(tensor >= high, low)  # a remainder of a tiny negative number rounds up to the length


def _noise_power_of_group(group: dict[str, Any]) -> float:
    power = group["noise"]
    if power is None:
        power = SGLD.noise_of(group["temperature"], group["lr"], group["momentum"])
    return float(power * (1 + group["steps"]) ** -group["noise_decay"])


def _check_settings(group: dict[str, Any]) -> None:
    """Refuse settings that no step could use."""
    for name in SETTINGS:
        if not (isinstance(group[name], int | float) and math.isfinite(group[name]) and group[name] >= 0):
            raise InputError(f"a number {name} >= 0", repr(group[name]), where="SGLD")
    if group["momentum"] >= 1:
        raise InputError("momentum below 1", f"{group['momentum']:g}", where="SGLD")
    given = [name for name in ("temperature", "noise") if group[name] is not None]
    if len(given) != 1:
        got = " and ".join(given) or "neither"
        raise InputError("either temperature or noise", got, where="SGLD", fix="Give temperature=0 for plain SGD")
    value = group[given[0]]
    if not (math.isfinite(value) and value >= 0):
        raise InputError(f"a finite {given[0]} >= 0", repr(value), where="SGLD")
    if group["projection"] is not None:
        _checked_projection(group["projection"])


def _checked_projection(projection: Projection) -> Projection:
    kind, *numbers = projection
    ball = kind == "ball" and len(numbers) == 1 and numbers[0] > 0
    interval = kind in ("box", "torus") and len(numbers) == 2 and numbers[0] < numbers[1]
    if not (ball or interval):
        expected = '("ball", radius), ("box", low, high) or ("torus", low, high)'
        raise InputError(expected, repr(projection), where="projection")
    return projection
