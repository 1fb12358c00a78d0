"""What an operation does, observed by running its uses (operation_examples.py), without asking the table.

Numbers are multiples of small powers of two, so that differences, rescalings by powers of two and casts to short types
are exact.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from operation_examples import SAMPLES, Use
from torch import Tensor

from flatscope.network.interception import tensors_in

Unit = tuple[int, int]  # place of the signal, channel


def grid(use: Use) -> float:
    """Distance of the numbers that are drawn: all entries differ by it at least, and from every kink by half of it."""
    entries = SAMPLES * sum(math.prod(shape) for shape in use.shapes)
    return 4.0 / max(32, 2 ** math.ceil(math.log2(entries + 2)))


def drawn(use: Use, seed: int) -> list[Tensor]:
    """Signals with distinct entries of both signs, below 4."""
    step, generator = grid(use), torch.Generator().manual_seed(seed)
    sizes = [SAMPLES * math.prod(shape) for shape in use.shapes]
    numbers = (torch.randperm(int(4 / step) - 1, generator=generator)[: sum(sizes)].double() + 0.5) * step
    numbers *= 2.0 * torch.randint(0, 2, numbers.shape, generator=generator) - 1
    return [part.reshape(SAMPLES, *shape) for part, shape in zip(numbers.split(sizes), use.shapes, strict=True)]


@functools.cache
def extremes(use: Use) -> list[list[Tensor]]:
    """Draws in which every entry is the largest once, once the smallest, and once near zero."""
    n, step, found = sum(SAMPLES * math.prod(shape) for shape in use.shapes), grid(use), []
    for place in range(n):
        flat = flattened(drawn(use, place))
        for value in (4 - step / 2, step / 2 - 4, 2.25 * step):
            flat[place] = value
            found.append(shaped(use, flat.clone()))
    return found


@functools.cache
def steepest_chord(use: Use) -> float:
    """Largest change of the result over that of the first entry, from one number of the grid to the next.

    Slopes are taken between kinks and do not see that a value jumps there; this does.
    """
    step, flat = grid(use), flattened(drawn(use, 0))
    results = []
    for value in torch.arange(step / 2 - 4, 4, step, dtype=flat.dtype):
        flat[0] = value
        made = [part for part in tensors_in(use(*shaped(use, flat.clone()))) if part.is_floating_point()]
        results.append(torch.cat([part.detach().double().flatten() for part in made]))
    if len({len(result) for result in results}) > 1:
        return 0.0
    return float((torch.stack(results[1:]) - torch.stack(results[:-1])).norm(dim=1).max()) / step


def flattened(signals: list[Tensor]) -> Tensor:
    return torch.cat([signal.flatten() for signal in signals])


def shaped(use: Use, flat: Tensor) -> list[Tensor]:
    sizes = [SAMPLES * math.prod(shape) for shape in use.shapes]
    return [part.reshape(SAMPLES, *shape) for part, shape in zip(flat.split(sizes), use.shapes, strict=True)]


@dataclass(frozen=True)
class Observed:
    """What one use of an operation does.

    Attributes:
        slopes: (draws, outputs, inputs) differences over steps.
        constant: (outputs,) what it gives for zeros.
        curved: by the tensors that change together: whether it is curved in them.
        linear_paths: whether f(x) − f(0) is piecewise linear and positively homogeneous.
            by_truth: whether it gives truth values.
        is_first: whether the result is the first signal.
        is_fixed: whether the result is the same whatever the signals.
        moves: whether it commutes with every function of single entries.
        mirrors: whether it does the same to every channel.
    """

    slopes: Tensor
    constant: Tensor
    curved: dict[tuple[int, ...], bool]
    linear_paths: bool
    by_truth: bool
    is_first: bool
    is_fixed: bool
    moves: bool
    mirrors: bool


@functools.cache
@torch.no_grad()
def observed(use: Use) -> Observed:
    """Everything that can be seen of a use by running it."""
    draws = [*(drawn(use, seed) for seed in range(5)), *extremes(use)]
    results, zero = [use(*x) for x in draws], use(*[torch.zeros_like(part) for part in draws[0]])
    larger = [use(*[4 * part for part in x]) for x in draws]
    slopes = torch.stack([differences(use, x) for x in draws[:5] + draws[5::3] + draws[6::3]])
    made = use.function(*draws[0], *([] if use.weight is None else [use.weight]))
    of_its_shape = isinstance(made, Tensor) and made.shape == draws[0][0].shape
    one_tensor = of_its_shape and len(use.shapes) == 1
    bent = [use(*map(bend, x)) for x in draws]
    swapped = [use(*[part.flip(1) for part in x]).reshape(made.shape).flip(1) for x in draws] if one_tensor else []
    alone = one_tensor and bool((slopes - slopes.diagonal(dim1=1, dim2=2).diag_embed() == 0).all())
    curved = curvatures(use)
    homogeneous = all(torch.allclose(4 * (y - zero), z - zero, atol=1e-9) for y, z in zip(results, larger, strict=True))
    return Observed(
        slopes,
        zero.flatten(),
        curved,
        homogeneous and not curved[tuple(range(len(use.shapes)))],
        any(tensor.dtype == torch.bool for tensor in tensors_in(made)),
        of_its_shape and all(torch.equal(y, x[0].flatten(1)) for x, y in zip(draws, results, strict=True)),
        all(torch.equal(y, zero) for y in results),
        all(torch.equal(bend(y), z) for y, z in zip(results, bent, strict=True)),
        alone and all(torch.equal(y, z.flatten(1)) for y, z in zip(results, swapped, strict=True)),
    )


def bend(x: Tensor) -> Tensor:
    """A function of single entries that is 0 at 0, neither monotone nor odd, and exact in short types."""
    return torch.where(x > 1, -x, torch.where(x < -1, x / 2, 2 * x))


def differences(use: Use, x: list[Tensor]) -> Tensor:
    """(outputs, inputs) change of the results over a step of each entry that crosses no kink."""
    step, flat = grid(use) / 8, flattened(x)
    before = use(*x).flatten()
    moved = [
        use(*shaped(use, flat + step * unit)).flatten() - before for unit in torch.eye(len(flat), dtype=flat.dtype)
    ]
    return torch.stack(moved, 1) / step


def tensors_and_directions(use: Use) -> list[tuple[Tensor, Tensor]]:
    """Signals and weight, each with a direction in which no kink is near."""
    given = [*drawn(use, 0), *([] if use.weight is None else [use.weight])]
    generator = torch.Generator().manual_seed(1)
    steps = [torch.randint(1, 7, tensor.shape, generator=generator) for tensor in given]
    steps = [torch.where(step > 3, 3 - step, step).double() for step in steps]  # 1, 2, 3 of either sign
    return [(tensor, grid(use) / 8 * step) for tensor, step in zip(given, steps, strict=True)]


def subsets(use: Use) -> list[tuple[int, ...]]:
    """Each tensor alone, all signals together, and everything together."""
    n, total = len(use.shapes), len(use.shapes) + (use.weight is not None)
    return list(dict.fromkeys([*((place,) for place in range(total)), tuple(range(n)), tuple(range(total))]))


def curvatures(use: Use) -> dict[tuple[int, ...], bool]:
    """For sets of tensors that move on a line together: whether second differences of the results are not zero."""
    found = {}
    for chosen in subsets(use):
        at = [
            use(*[t + (h * d if place in chosen else 0) for place, (t, d) in enumerate(tensors_and_directions(use))])
            for h in (-1, 0, 1)
        ]
        size = float((at[2] - at[0]).abs().max()) + 1e-9
        found[chosen] = float((at[2] - 2 * at[1] + at[0]).abs().max()) > 1e-9 * size
    return found


@functools.cache
def free_components(use: Use) -> int:
    """How many sets of units can be rescaled: units are in one set if an entry of the result depends on both."""
    seen = observed(use)
    slopes = seen.slopes
    if not slopes.any() and not seen.is_fixed and not seen.by_truth:
        return 0  # a number that does not depend on scales is taken for a constant
    units = [(place, unit) for place, shape in enumerate(use.shapes) for unit in range(shape[0])]
    depends = (slopes != 0).any(0).reshape(SAMPLES, -1, slopes.shape[-1]).any(0)  # (columns, inputs)
    reads = {unit: depends[:, flattened(scaled(use, {unit}, like=0.0)) != 0].any(1) for unit in units}  # (columns,)
    sets = {unit: {unit} for unit in units}
    for one in units:
        for other in units:
            if bool((reads[one] & reads[other]).any()):
                joined = sets[one] | sets[other]
                sets |= dict.fromkeys(joined, joined)
    return sum(can_be_scaled(use, set(chosen), reads) for chosen in {frozenset(found) for found in sets.values()})


def scaled(use: Use, units: set[Unit], like: float = 1.0) -> list[Tensor]:
    """Factors for the signals: 4 for these units (place of the signal, channel), `like` for the others."""
    factors = [torch.full((SAMPLES, *shape), like, dtype=torch.float64) for shape in use.shapes]
    for place, unit in units:
        factors[place][:, unit] = 4.0
    return factors


def can_be_scaled(use: Use, units: set[Unit], reads: dict[Unit, Tensor]) -> bool:
    """Whether exactly those entries of the result that read the units follow when all of them are scaled."""
    factors = scaled(use, units)
    columns = 1.0 + 3.0 * torch.stack([reads[unit] for unit in units]).any(0)
    for x in extremes(use):
        if not torch.allclose(use(*[f * part for f, part in zip(factors, x, strict=True)]), columns * use(*x)):
            return False
    return True
