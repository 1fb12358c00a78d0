"""Networks that are the same function: which of several are, and how one was written from the other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatscope.comparing.verdicts import SameFunction
from flatscope.errors import FlatscopeError
from flatscope.isolation import own_settings
from flatscope.params import norm
from flatscope.problem import Problem
from flatscope.samples import Inputs, map_inputs, rows_of_inputs, tensors_of_inputs
from flatscope.symmetries.basis_paths import BasisPaths

# Weights stored in float32 and multiplied by random factors change the outputs by some 1e-6 of the largest one; moving
# one weight of a small network by a few per cent, by more than 1e-5.
TOLERANCE = 1e-5
FARTHER = 10  # by which they may differ more where nobody measures them: around the samples
NEAR = 0.1  # of the length of the weights: rounding to four bits moves them by about that
NOISE = (0.3, 1.0, 3.0, 10.0)  # sizes around the samples, in standard deviations of their entries
MOST_SAMPLES = 2_000
OTHERWISE = "rewritten"
_SAME_PATH = 1e-4  # relative: a path value is a product and quotient of as many stored weights as there are layers


def find_copies(
    problems: Mapping[str, Problem],
    tolerance: float = TOLERANCE,
    given: Mapping[str, Problem] | None = None,
    check: Callable[[], None] | None = None,
) -> list[SameFunction]:
    """Pairs of networks whose outputs agree on the training samples, up to 2,000 of them, and with noise around them.

    Args:
        problems: the networks by name, without BatchNorm and in float64, on the same data.
        tolerance: largest difference of the outputs, relative to the largest output; ten times that around the samples.
        given: the networks as they came, with BatchNorm where they have it.
        check: called before every pass; raises where there is no time for it.
    """
    at, around = _Gaps(problems), {size: _Gaps(problems) for size in NOISE}
    reader, generator, samples = next(iter(problems.values())), torch.Generator().manual_seed(0), 0
    modules = {name: str(problem.model) for name, problem in (given or problems).items()}
    with own_settings(reader.generators), torch.no_grad():
        # The batches of one of them for all: loaders that shuffle would give every network another order.
        for inputs, targets in reader.batches():
            if check is not None:
                check()
            at.add(inputs)
            for first, (size, gaps) in enumerate(around.items()):
                some = rows_of_inputs(inputs, torch.arange(len(targets))[(first - samples) % len(NOISE) :: len(NOISE)])
                if any(part.is_floating_point() for part in tensors_of_inputs(some)):
                    if check is not None:
                        check()
                    noisy = partial(_noisy_samples, size=size, generator=generator)
                    gaps.add(map_inputs(some, noisy), skip=True)
            samples += len(targets)
            if samples >= MOST_SAMPLES:
                break
    pairs = []
    for one, other in itertools.combinations(problems, 2):
        gap, far = at.relative(one, other), max(gaps.relative(one, other) for gaps in around.values())
        if gap <= tolerance and far <= FARTHER * tolerance:
            how = _way_between_copies(problems[one], problems[other]) if modules[one] == modules[other] else OTHERWISE
            looked = any(gaps.looked for gaps in around.values())
            pairs.append(SameFunction(one, other, gap, samples, how, around=looked))
    return pairs


def find_near_copies(problems: Mapping[str, Problem]) -> list[list[Any]]:
    """Pairs of networks of one form with nearly equal weights, and how far apart: 0.1 is a tenth of their length.

    A rounded, pruned or briefly fine-tuned network and the one it was made of are such a pair.
    """
    pairs = []
    for one, other in itertools.combinations(problems, 2):
        base, moved = problems[one].params, problems[other].params
        if {name: value.shape for name, value in base.items()} != {name: value.shape for name, value in moved.items()}:
            continue
        apart, length = norm({name: moved[name] - value for name, value in base.items()}), norm(base)
        if 0 < apart <= NEAR * length:
            pairs.append([one, other, apart / length])
    return pairs


def _noisy_samples(part: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """Samples moved by noise of this size relative to how much their entries differ."""
    if not part.is_floating_point() or not part.numel():
        return part
    spread = float(part.std(correction=0)) or float(part.abs().mean()) or 1.0
    return part + size * spread * torch.randn(part.shape, generator=generator, dtype=torch.float64).to(part)


class _Gaps:
    """Differences of the outputs of every pair, over some inputs."""

    def __init__(self, problems: Mapping[str, Problem]) -> None:
        self.problems, self.looked = problems, False
        self._largest = dict.fromkeys(problems, 0.0)
        self._gaps = dict.fromkeys(itertools.combinations(problems, 2), 0.0)

    def add(self, inputs: Inputs, skip: bool = False) -> None:
        """Look at some inputs; where told to skip, not at those on which some network fails or has no finite output."""
        try:
            outputs = {name: problem.forward(inputs).double().cpu() for name, problem in self.problems.items()}
        except Exception:
            if not skip:
                raise
            return
        if skip and not all(bool(values.numel()) and bool(values.isfinite().all()) for values in outputs.values()):
            return
        self.looked = True
        for name, values in outputs.items():
            self._largest[name] = max(self._largest[name], float(values.abs().max()))
        for pair in self._gaps:
            one, other = (outputs[name] for name in pair)
            gap = float((one - other).abs().max()) if one.shape == other.shape else math.inf
            self._gaps[pair] = max(self._gaps[pair], gap if math.isfinite(gap) else math.inf)  # NaN: with nothing

    def relative(self, *pair: str) -> float:
        """Largest difference of two networks, relative to the largest output."""
        one, other = pair
        return self._gaps[one, other] / (max(self._largest[one], self._largest[other]) or 1.0)


def _way_between_copies(one: Problem, other: Problem) -> str:
    """The way from one network to the other, where their path values tell it."""
    layout = {name: value.shape for name, value in one.params.items()}
    if str(one.model) != str(other.model) or layout != {name: value.shape for name, value in other.params.items()}:
        return OTHERWISE
    if all(_equal_to_rounding(one.params[name], other.params[name]) for name in layout):
        return "equal weights"
    try:
        paths = BasisPaths(one.model, one.example())
        # On the skeleton of the first: two of nearly equal strength may be chosen differently after rounding.
        if _path_values_agree(paths.values().double(), paths.values_of(other.params)):
            return "units rescaled"
        if _path_values_agree(_sorted_values(paths), _sorted_values(BasisPaths(other.model, other.example()))):
            return "units rescaled and exchanged"
    except FlatscopeError:
        pass  # a zero weight on every way through a unit, or a network that cannot be traced: no path values
    return OTHERWISE


def _equal_to_rounding(one: Tensor, other: Tensor) -> bool:
    """Equal up to what folding a BatchNorm in float32 leaves."""
    return not one.numel() or float((one - other).abs().max()) <= 1e-6 * float(one.abs().max())


def _sorted_values(paths: BasisPaths) -> Tensor:
    return paths.values().double().sort().values


def _path_values_agree(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=_SAME_PATH, atol=0.0)
