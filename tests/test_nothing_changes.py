"""Whatever the network and wherever a call is broken off, what belongs to the user is afterwards as it was before."""

from __future__ import annotations

import inspect
import random
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import flatscope as fs
from flatscope.training.benchmarking.leaderboard import value_of


class InPlace(nn.Module):
    """Its forward changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.mul_(2.0)).relu_())


class Counting(InPlace):
    """Its forward changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.last(self.first(x).relu())


class Drawing(InPlace):
    """Its forward moves every random state, and has a setting of its own."""

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3), np.random.rand(2), random.random()
        torch.backends.cuda.matmul.allow_tf32 = True
        return self.last(self.first(x).relu())


class Interrupted(InPlace):
    """Its forward is Ctrl-C once it has been called often enough; copies of it count on."""

    left = 10**9

    def forward(self, x: Tensor) -> Tensor:
        type(self).left -= 1
        if type(self).left < 0:
            raise KeyboardInterrupt
        torch.rand(1)
        return self.last(self.first(x).relu())


def zero() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def equal() -> nn.Module:
    model = zero()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model


ODD = {"zero": zero, "equal": equal, "in place": InPlace, "counting": Counting, "drawing": Drawing}
NAMES = ["gradient_norm", "kappa_trace", "hessian_max_eigenvalue", "expected_flatness", "psi_balance"]
CALLS: dict[str, Callable[[nn.Module, Any], object]] = {
    "measure": lambda model, data: fs.measure(fs.Problem(model, data), NAMES),
    "bounds": lambda model, data: fs.bounds(fs.Problem(model, data), ["pac_bayes", "covering"]),
    "audit": lambda model, data: fs.audit(fs.Problem(model, data), ["l2_norm", "kappa_trace"], trials=1),
    "explain": lambda model, data: fs.explain(fs.Problem(model, data)),
    "compare": lambda model, data: fs.compare({"a": model, "b": model}, data, names=["margin", "l2_norm"]),
    "landscape": lambda model, data: fs.landscape(fs.Problem(model, data), grid=3),
    "interpolate": lambda model, data: fs.interpolate([model, model], data, resolution=2),
    "rescale": lambda model, data: fs.rescale(model, data[0]),
    "fold_batchnorm": lambda model, data: fs.fold_batchnorm(model, data[0]),
    "eigenpairs": lambda model, data: fs.eigenpairs(fs.Problem(model, data), top=2),
    "spectral_density": lambda model, data: fs.spectral_density(fs.Problem(model, data), draws=2),
    "hessian": lambda model, data: fs.hessian(fs.Problem(model, data)) @ torch.ones(43),
    "record": lambda model, data: recorder(data).record(model, 0, lr=0.1),
    "stability": lambda model, data: recorded(model, data).stability.summary(),
    "atlas": lambda model, data: fs.atlas(FRAME, ["margin"], kinds=["spearman"], by=["batch"], resamples=100),
    "benchmark": lambda model, data: fs.benchmark("l2_path_norm", networks=8),
    "benchmark of a function": lambda model, data: value_of("own", own_measure, fs.Problem(model, data)),
}
WITHOUT_MODEL = ("atlas", "benchmark")
FRAME = pd.DataFrame(
    [{"network": k, "epoch": e, "gap": k, "batch": k % 2, "margin": k * e + k % 3} for k in range(24) for e in (0, 1)]
)


def recorder(data: Any) -> fs.StabilityRecorder:
    return fs.StabilityRecorder(data, batch=8, noise_every=2, density_every=2)


def recorded(model: nn.Module, data: Any) -> fs.StabilityRecorder:
    found = recorder(data)
    for step in range(3):
        found.record(model, step, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    return found


def own_measure(ctx: fs.Context) -> float:
    """A measure that moves random states, as somebody's own may."""
    torch.rand(1), np.random.rand(1), random.random()
    return sum(float(value.abs().sum()) for value in ctx.gradient().values())


def state(model: nn.Module, data: tuple[Tensor, Tensor]) -> list[object]:
    """Everything of the user's that a call could have changed."""
    kept: list[object] = [value.clone() for value in (*data, *model.state_dict().values())]
    kept += [model.training, FRAME.copy()]
    kept += [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]
    kept += [[parameter.requires_grad for parameter in model.parameters()]]
    kept += [sorted(vars(module)) for module in model.modules()]
    kept += [[len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]]
    kept += [random.getstate(), str(np.random.get_state()), torch.get_rng_state()]
    kept += [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()]
    kept += [torch.get_default_dtype(), torch.get_default_device(), torch.get_deterministic_debug_mode()]
    kept += [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.get_num_threads()]
    kept += [torch.backends.mha.get_fastpath_enabled(), torch.backends.cuda.flash_sdp_enabled(), np.geterr()]
    return kept


def differing(before: list[object], after: list[object]) -> list[int]:
    def same(a: object, b: object) -> bool:
        if isinstance(a, pd.DataFrame) and isinstance(b, pd.DataFrame):
            return a.equals(b)
        return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b

    return [place for place, pair in enumerate(zip(before, after, strict=True)) if not same(*pair)]


def made(build: Callable[[], nn.Module]) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    model = build().eval()
    for parameter in list(model.parameters())[::2]:
        parameter.grad = torch.ones_like(parameter)
    return model, (torch.randn(9, 4), torch.arange(9) % 3)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ODD)
def test_nothing_of_the_users_changes(name: str, call: str) -> None:
    model, data = made(ODD[name])
    torch.backends.cuda.matmul.allow_tf32 = False
    before = state(model, data)
    with warnings.catch_warnings(), suppress(fs.InputError):  # refused or not: the question is what was left behind
        warnings.simplefilter("ignore")
        CALLS[call](model, data)
    assert differing(before, state(model, data)) == []


@pytest.mark.parametrize("call", [name for name in CALLS if name not in WITHOUT_MODEL])
def test_an_interrupt_in_any_forward_pass_leaves_nothing_behind(call: str) -> None:
    model, data = made(Interrupted)
    before = state(model, data)
    Interrupted.left = 10**9
    CALLS[call](model, data)
    needed = 10**9 - Interrupted.left
    assert needed > 0
    for left in sorted({0, 1, needed - 1, *random.Random(call).sample(range(needed), min(needed, 2))}):
        Interrupted.left = left
        with pytest.raises(KeyboardInterrupt):
            CALLS[call](model, data)
        assert differing(before, state(model, data)) == [], f"interrupted in forward pass {left} of {needed}"


@cache
def _counts(code: CodeType) -> bool:
    """Whether a call of this is one of ours, and not of what puts things back."""
    ours = code.co_filename.startswith(OURS) and not code.co_filename.endswith("isolation.py")
    return ours and not code.co_flags & inspect.CO_GENERATOR


class CtrlC:
    """Counts calls of our functions, and is an interrupt at one of them; what puts things back is left to do so."""

    def __init__(self, at: int) -> None:
        self.calls, self.at = 0, at

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event != "call" or not _counts(frame.f_code):
            return
        self.calls += 1
        if self.calls > self.at:
            sys.setprofile(None)
            raise KeyboardInterrupt

    def __enter__(self) -> CtrlC:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


OURS = str(Path(fs.__file__).parent)


@pytest.mark.parametrize(
    ("call", "training"), [*((name, False) for name in CALLS), ("record", True), ("stability", True)]
)
def test_an_interrupt_anywhere_leaves_nothing_behind(call: str, training: bool) -> None:
    model, data = made(Drawing)
    model.train(training)
    CALLS[call](model, data)  # what is made once is made
    torch.backends.cuda.matmul.allow_tf32 = False
    before = state(model, data)
    with CtrlC(10**9) as counted:
        CALLS[call](model, data)
    assert counted.calls > 0
    for at in sorted({0, counted.calls - 1, *random.Random(call).sample(range(counted.calls), 4)}):
        with pytest.raises(KeyboardInterrupt), CtrlC(at):
            CALLS[call](model, data)
        assert differing(before, state(model, data)) == [], f"interrupted in call {at} of {counted.calls}"


def test_a_recorder_goes_on_after_an_interrupt_as_if_there_had_been_none() -> None:
    """A record is whole or not there, in whatever part of it the interrupt came."""
    model, data = made(Interrupted)
    whole, ends = recorder(data), [0]
    Interrupted.left = 10**9
    for step in range(3):
        whole.record(model, step, lr=0.1)
        ends.append(10**9 - Interrupted.left)
    for left in [place for end, last in pairwise(ends) for place in ((end + last) // 2, last - 1)]:
        interrupted = recorder(data)
        Interrupted.left = left
        for _ in range(4):
            try:
                interrupted.record(model, len(interrupted.tables), lr=0.1)
            except KeyboardInterrupt:
                Interrupted.left = 10**9
            assert set(interrupted.tables) == set(interrupted.steps) == set(interrupted.rules)
        assert len(interrupted.tables) == 3
        pd.testing.assert_frame_equal(interrupted.stability.rows, whole.stability.rows)
        assert list(interrupted.densities) == list(whole.densities), f"interrupted in forward pass {left}"


def test_an_input_changed_in_place_gives_the_numbers_of_one_that_is_not() -> None:
    model, data = made(InPlace)

    class Twice(InPlace):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(2.0 * x).relu())

    other = Twice().eval()
    other.load_state_dict(model.state_dict())
    ours, theirs = (fs.measure(fs.Problem(network, data), NAMES).to_frame()["value"] for network in (model, other))
    assert ours.to_numpy() == pytest.approx(theirs.to_numpy(), rel=1e-6, nan_ok=True)
