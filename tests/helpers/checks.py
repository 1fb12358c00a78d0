"""The contract that every measure keeps, as functions that raise AssertionError; driven by its declaration."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import references_information
import references_margins  # noqa: F401
import references_norms  # noqa: F401
import references_pac_bayes  # noqa: F401
import references_psi  # noqa: F401
import references_radius  # noqa: F401
import torch
from forms_of_measures import Form
from networks import Tiny
from references import TWINS, Dense
from references_sharpness import SEARCH, STRONG_OPTIONS
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flatscope as fs
from flatscope.context import make_effort
from flatscope.registry import DIRECTIONS, LEVELS, Declaration

EXACT = 1e-9
EIGENVALUE = 1e-6


Values = dict[tuple[str, Any, Any], tuple[float, float, bool]]


def _ragged(tiny: Tiny) -> fs.Problem:
    return tiny.problem(train=DataLoader(TensorDataset(tiny.x, tiny.y), batch_size=4))


def _twice(tiny: Tiny) -> fs.Problem:
    return tiny.problem(train=(torch.cat([tiny.x, tiny.x]), torch.cat([tiny.y, tiny.y])))


def _order(tiny: Tiny) -> Tensor:
    return torch.randperm(len(tiny.x), generator=torch.Generator().manual_seed(5))


# Fewer steps and draws where a value is compared with itself: the comparison is as sharp.
QUICK: dict[str, dict[str, Any]] = {
    "sharpness": {"steps": 100},
    "geometric_margin": {"restarts": 3},
    "expected_sharpness": {"draws": 100},
    "flatness_radius": {"directions": 20},
    "psi_expected": {"draws": 20},
    "perturbation_robustness": {"draws": 4},
    "feature_robustness": {"steps": 8},
    "psi_epsilon": {"steps": 8},
    "epsilon_flatness": {"steps": 8},
    "adaptive_sharpness": {"steps": 8},
    "local_learning_coefficient": {"steps": 40},
    "wbic": {"steps": 40},
}
ALL_STEPS = ("local_learning_coefficient", "wbic")  # shorter chains do not see what a rescaling does
ONE_STEP = ("m_sharpness",)  # a lower bound by a formula, not by a search
# A tenth of its steps, beside its steps from corner to corner, has to come as high as the twin.
AGAINST_TWINS: dict[str, dict[str, Any]] = {"sharpness": {"steps": 200}}


# The same data in other ways, by which no measure may change.
VARIANTS: dict[str, Callable[[Tiny], fs.Problem]] = {
    "as given": lambda tiny: tiny.problem(),
    "batches of 5 and a ragged one of 1": lambda tiny: tiny.problem(batch_size=5),
    "a loader with a ragged batch": _ragged,
    "another order of the samples": lambda tiny: tiny.problem(train=(tiny.x[_order(tiny)], tiny.y[_order(tiny)])),
    "repeated data": _twice,
    "float32": lambda tiny: tiny.problem(dtype=torch.float32),
}
_CONTEXTS: dict[tuple[int, str, int, int], tuple[Tiny, fs.Context]] = {}
_VALUES: dict[tuple[Any, ...], tuple[Any, Values]] = {}


def context_of(tiny: Tiny, variant: str = "as given", seed: int = 0, number: int = 0) -> fs.Context:
    """A context of the network, made once: measures share its sweeps, as they do in a table.

    Args:
        tiny: the network.
        variant: how it gets its data.
        seed: of the context.
        number: another context of the same kind shares nothing with the first.
    """
    key = id(tiny), variant, seed, number
    if key not in _CONTEXTS:  # the network is kept with it, so that no other one gets its id
        _CONTEXTS[key] = tiny, fs.Context(VARIANTS[variant](tiny), seed=seed)
    return _CONTEXTS[key][1]


def _given(entry: Declaration, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """These options of a measure, and those that make it one of its forms."""
    return {entry.name: {**(entry.given if isinstance(entry, Form) else {}), **options}}


def values_of(entry: Declaration, place: fs.Problem | fs.Context | Tiny, **options: Any) -> Values:
    """{(layer, options, unit or sample): (value, stderr, exact)} of all rows that have a value.

    Of a problem they are computed from the beginning; of a context with its sweeps, once; of a network in its context.
    """
    if isinstance(place, fs.Problem):
        return _values(fs.measure(place, entry.name, options=_given(entry, options)))
    ctx = context_of(place) if isinstance(place, Tiny) else place
    key = id(ctx), id(entry.function), str(_given(entry, options))
    if key not in _VALUES:
        found = fs.measure(ctx.problem, entry.name, options=_given(entry, options), context=ctx)
        _VALUES[key] = (ctx, entry.function), _values(found)
    return _VALUES[key][1]


def with_all_draws(entry: Declaration, tiny: Tiny, options: dict[str, Any]) -> Values:
    """Values of a measure that does not stop before the draws that the options ask for; computed once."""
    key = id(tiny), "all draws", id(entry.function), str(_given(entry, options))
    if key not in _VALUES:
        place = id(tiny), "all draws", 0, 0
        if place not in _CONTEXTS:
            _CONTEXTS[place] = tiny, fs.Context(tiny.problem(), effort=make_effort(precision=0))
        ctx = _CONTEXTS[place][1]
        found = fs.measure(ctx.problem, entry.name, options=_given(entry, options), context=ctx)
        _VALUES[key] = (tiny, entry.function), _values(found)
    return _VALUES[key][1]


def alone(entry: Declaration, tiny: Tiny, options: dict[str, Any]) -> tuple[Values, fs.Context]:
    """Values of a measure on a network that nothing else has measured, and the context that knows its cost."""
    key = id(tiny), "alone", id(entry.function), str(_given(entry, options))
    if key not in _VALUES:
        ctx = fs.Context(tiny.problem())
        found = fs.measure(ctx.problem, entry.name, options=_given(entry, options), context=ctx)
        _VALUES[key] = (tiny, entry.function, ctx), _values(found)
    return _VALUES[key][1], _VALUES[key][0][2]


def quick(entry: Declaration, place: fs.Problem | fs.Context | Tiny) -> Values:
    """Values of a measure with the options that make it quick."""
    return values_of(entry, place, **QUICK.get(entry.name, {}))


def _values(table: fs.Table) -> Values:
    frame, found = table.to_frame(), {}
    columns = ("layer", "options", "unit", "sample", "value", "stderr", "exact")
    for layer, options, unit, sample, value, stderr, exact in zip(*(frame[c].tolist() for c in columns), strict=True):
        if not math.isnan(value):
            place = -1 if unit is pd.NA and sample is pd.NA else sample if unit is pd.NA else unit
            assert (layer, options, place) not in found, f"two rows of {layer}, {options}, {place}"
            found[layer, options, place] = value, stderr, exact
    return found


def assert_same(one: dict[Any, Any], other: dict[Any, Any], tolerance: float, what: str) -> None:
    """Equal keys and values equal relative to the largest of them."""
    assert one.keys() == other.keys(), f"{what}: rows {sorted(one)} against {sorted(other)}"
    scale = max([abs(v[0]) for v in one.values()] or [1.0]) or 1.0
    for key, (value, *_) in one.items():
        assert abs(value - other[key][0]) <= tolerance * scale, f"{what}: {key}: {value} against {other[key][0]}"


def tolerance_of(entry: Declaration) -> float:
    return EIGENVALUE if "eigenvalue" in entry.name or entry.name == "kappa" else EXACT


def search_of(entry: Declaration) -> float:
    """How much of a maximum a search may miss: it may end on another hill when a rounding or a random start differs."""
    return SEARCH if entry.search and entry.name not in ONE_STEP else 0.0


def equals_its_twin(entry: Declaration, dense: Dense) -> None:
    name = entry.twin if isinstance(entry, Form) else entry.name
    assert name in TWINS, f"{name} has no naive twin in tests/helpers/references.py"
    tiny = dense.tiny
    expected = TWINS[name](dense)
    if isinstance(expected, Tensor):
        expected = {("", i): float(v) for i, v in enumerate(expected)}
    elif isinstance(expected, dict):
        flat: dict[tuple[str, int], float] = {}
        for layer, value in expected.items():
            if isinstance(value, Tensor):
                flat |= {(layer, i): float(v) for i, v in enumerate(value)}
            else:
                flat[layer, -1] = float(value)
        expected = flat
    else:
        expected = {("", -1): float(expected)}
    options = AGAINST_TWINS.get(entry.name, {})
    found = {(layer, place): rest for (layer, _, place), rest in values_of(entry, tiny, **options).items()}
    assert found.keys() == expected.keys(), f"rows {sorted(found)} against {sorted(expected)}"
    scale = max([abs(v) for v in expected.values()] or [1.0]) or 1.0
    for key, (value, stderr, exact) in found.items():
        if exact:
            assert stderr == 0.0, f"{key}: exact, yet with a standard error {stderr}"
            assert abs(value - expected[key]) <= tolerance_of(entry) * scale + 1e-13, (
                f"{key}: {value} against {expected[key]}"
            )
        else:  # a maximum that both only search: neither may be far above the other
            allowed = 4.5 * stderr + tolerance_of(entry) * scale + search_of(entry) * abs(expected[key])
            assert abs(value - expected[key]) <= allowed, f"{key}: {value} ± {stderr} against {expected[key]}"


def same_alone_and_in_a_table(entry: Declaration, tiny: Tiny) -> None:
    """What other measures computed before changes nothing."""
    found, _ = alone(entry, tiny, QUICK.get(entry.name, {}))
    assert_same(found, quick(entry, tiny), tolerance_of(entry), "measured alone")


def same_for_any_batches(entry: Declaration, tiny: Tiny) -> None:
    for variant in ("batches of 5 and a ragged one of 1", "a loader with a ragged batch"):
        found = quick(entry, context_of(tiny, variant))
        assert_same(quick(entry, tiny), found, tolerance_of(entry), variant)


def same_for_any_order(entry: Declaration, tiny: Tiny) -> None:
    variant, order = "another order of the samples", _order(tiny)
    moved = quick(entry, context_of(tiny, variant))
    if entry.per == "sample":
        moved = {(layer, o, int(order[i])): v for (layer, o, i), v in moved.items()}
    assert_same(quick(entry, tiny), moved, tolerance_of(entry), variant)


def same_for_repeated_data(entry: Declaration, tiny: Tiny) -> None:
    """Averages over samples do not change when every sample comes twice."""
    if entry.per == "sample" or entry.name in references_information.GROW_WITH_SAMPLES:
        return
    twice = quick(entry, context_of(tiny, "repeated data"))
    assert_same(quick(entry, tiny), twice, tolerance_of(entry), "repeated data")


def seed_matters_only_to_estimates(entry: Declaration, tiny: Tiny) -> None:
    first, again = (quick(entry, context_of(tiny, seed=1, number=number)) for number in (0, 1))
    other = quick(entry, tiny)  # of seed 0
    assert first == again, "the same seed gives other numbers"
    for key, (value, stderr, exact) in first.items():
        if exact:
            tolerance = tolerance_of(entry) * max(abs(v[0]) for v in first.values())
            assert abs(value - other[key][0]) <= tolerance, f"{key} is called exact but changes with the seed"
        else:
            spread = (stderr**2 + other[key][1] ** 2) ** 0.5
            assert abs(value - other[key][0]) <= 5 * spread + search_of(entry) * abs(value), (
                f"{key}: two seeds differ by more than their error"
            )


_OWNED: dict[int, tuple[Tiny, nn.Module, torch.Generator, fs.Context]] = {}


def _owned(tiny: Tiny) -> tuple[Tiny, nn.Module, torch.Generator, fs.Context]:
    """A user's model with gradients, read by a shuffling loader of its own; whoever measures it shares its sweeps."""
    if id(tiny) not in _OWNED:
        model = copy.deepcopy(tiny.model)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.25)
        generator = torch.Generator().manual_seed(9)
        loader = DataLoader(TensorDataset(tiny.x, tiny.y), batch_size=4, shuffle=True, generator=generator)
        before = _state(model, generator)
        problem = fs.Problem(model, train=loader, test=(tiny.xt, tiny.yt), loss=tiny.loss, initial=tiny.initial)
        _same_state(before, _state(model, generator))
        _OWNED[id(tiny)] = tiny, model, generator, fs.Context(problem)
    return _OWNED[id(tiny)]


def leaves_everything_untouched(entry: Declaration, tiny: Tiny) -> None:
    _, model, generator, ctx = _owned(tiny)
    before = _state(model, generator)
    fs.measure(ctx.problem, entry.name, options=_given(entry, QUICK.get(entry.name, {})), context=ctx)
    _same_state(before, _state(model, generator))


def _same_state(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name, value in before.items():
        same = torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name]
        assert same, f"{name} was changed"


def _state(model: nn.Module, generator: torch.Generator) -> dict[str, Any]:
    numpy_state = np.random.get_state()
    state: dict[str, Any] = {"python rng": random.getstate(), "numpy rng": (numpy_state[1].tobytes(), numpy_state[2])}
    state |= {"torch rng": torch.get_rng_state(), "loader rng": generator.get_state()}
    state |= {f"mode of {name}": module.training for name, module in model.named_modules()}
    state |= {f"grad of {name}": p.grad.clone() for name, p in model.named_parameters()}
    state |= {f"requires_grad of {name}": p.requires_grad for name, p in model.named_parameters()}
    return state | {name: value.clone() for name, value in model.state_dict().items()}


def costs_what_it_declares(entry: Declaration, tiny: Tiny) -> None:
    if entry.passes is None:
        return
    _, context = alone(entry, tiny, {})
    for kind, spent in context.passes.items():
        assert spent <= entry.passes.get(kind, 0) + 1e-9, f"{spent} {kind} passes, declared {dict(entry.passes)}"


def close_in_float32(entry: Declaration, tiny: Tiny) -> None:
    double = quick(entry, tiny)
    scale = max([abs(v[0]) for v in double.values()] or [1.0]) or 1.0
    noise = max([v[1] for v in double.values()] or [0.0]) / scale  # rounding well below it harms no estimate
    allowed = 2e-3 + 0.1 * noise + search_of(entry)
    assert_same(double, quick(entry, context_of(tiny, "float32")), allowed, "float32 against float64")


def declares_itself(entry: Declaration) -> None:
    assert entry.symbol, "no symbol"
    assert entry.equation, "no equation"
    assert entry.conventions, "no conventions"
    assert entry.per in LEVELS
    assert entry.direction in DIRECTIONS
    assert len(entry.summary) <= 120, "first docstring line too long"
    doc = entry.function.__doc__ or ""
    for option in entry.options:
        assert f"{option}:" in doc, f"option {option} is not documented"


def scaled_output(tiny: Tiny, factor: float = 1.7) -> Tiny:
    """Every weight of a chain times c, the bias of layer i times c^i: outputs times c^d. With walls the last layer."""
    model = copy.deepcopy(tiny.model)
    modules = dict(model.named_modules())
    for depth, name in enumerate(tiny.layers if tiny.piecewise_linear else tiny.layers[-1:], start=1):
        modules[name].weight.data *= factor
        if modules[name].bias is not None:
            modules[name].bias.data *= factor**depth
    return tiny.with_model(model)


_TRANSFORMED: dict[tuple[int, str], tuple[Tiny, Tiny]] = {}


def transformed(tiny: Tiny, symmetry: str) -> Tiny:
    """The same network after one fixed strong transformation of that kind; made once."""
    key = id(tiny), symmetry
    if key not in _TRANSFORMED:
        _TRANSFORMED[key] = tiny, _transform(tiny, symmetry)
    return _TRANSFORMED[key][1]


def _transform(tiny: Tiny, symmetry: str) -> Tiny:
    if symmetry == "output_scaling":
        return scaled_output(tiny)
    if symmetry == "batchnorm_scaling":
        return _batchnorm_scaled(tiny)
    if symmetry in ("attention_scaling", "norm_scaling"):
        return _attention_scaled(tiny, symmetry)
    from flatscope.symmetries.scaling import rescale

    by = {"layer_scaling": "layer", "unit_scaling": "unit", "permutation": "permutation"}[symmetry]
    return tiny.with_model(rescale(tiny.model, tiny.x, by=by, low=0.2, high=5.0, seed=4))


def _batchnorm_scaled(tiny: Tiny) -> Tiny:
    """gamma and beta of each channel times c, the next layer's input channels divided by c; needs BN, ReLU, layer."""
    model = copy.deepcopy(tiny.model)
    modules = list(model)
    generator = torch.Generator().manual_seed(6)
    for i, module in enumerate(modules):
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            factors = torch.rand(module.num_features, generator=generator, dtype=torch.float64) * 3 + 0.3
            module.weight.data *= factors
            module.bias.data *= factors
            following = next(m for m in modules[i + 1 :] if isinstance(m, nn.Linear | nn.Conv2d))
            per_input = factors.repeat_interleave(following.weight.shape[1] // len(factors))
            following.weight.data /= per_input.reshape(1, -1, *[1] * (following.weight.ndim - 2))
    return tiny.with_model(model)


def _attention_scaled(tiny: Tiny, symmetry: str) -> Tiny:
    """Rows of queries times c, of keys divided by c; or scale and shift of the norm times c, what reads it divided."""
    model = copy.deepcopy(tiny.model)
    factors = torch.tensor([0.1, 10.0, 5.0, 0.3], dtype=torch.float64)
    up, down = ("query", "key") if symmetry == "attention_scaling" else ("norm", "")
    for name, value in model.named_parameters():
        if name.startswith(f"{up}."):
            value.data *= factors[:, None] if value.ndim == 2 else factors
        elif down and name.startswith(f"{down}."):
            value.data /= factors[:, None] if value.ndim == 2 else factors
        elif not down and name in ("query.weight", "key.weight", "value.weight"):
            value.data /= factors
    assert torch.allclose(model(tiny.x), tiny.model(tiny.x), rtol=1e-10)
    return tiny.with_model(model)


def keeps_its_symmetries(entry: Declaration, tiny: Tiny, symmetry: str) -> None:
    """A declared symmetry leaves every value unchanged (up to a permutation of units); an undeclared one moves it."""
    other = transformed(tiny, symmetry)
    options = STRONG_OPTIONS.get((entry.name, symmetry), {})
    # With fewer draws the error is larger, and so is the move that has to be seen.
    whole = symmetry in entry.invariant_under or entry.name in ALL_STEPS
    enough = (AGAINST_TWINS if whole else QUICK).get(entry.name, {})
    before, after = (
        with_all_draws(entry, network, options) if options else values_of(entry, network, **enough)
        for network in (tiny, other)
    )
    if entry.per == "network":  # a product over layers may stand still while its factors move
        before = {key: value for key, value in before.items() if key[0] == ""}
    if not before:  # no value on such a network, and nothing to say about it
        return
    if symmetry == "permutation" and entry.per == "unit":
        before, after = _sorted_units(before), _sorted_units(after)
    scale = max([abs(v[0]) for v in before.values()] or [1.0]) or 1.0
    change = max([abs(v[0] - after[k][0]) / scale for k, v in before.items()] or [0.0])
    noise = max([(v[1] ** 2 + after[k][1] ** 2) ** 0.5 / scale for k, v in before.items()] or [0.0])
    if symmetry in entry.invariant_under:
        assert change <= 100 * tolerance_of(entry) + 4.5 * noise + search_of(entry), (
            f"declared invariant under {symmetry}, moved by {change:.2g}"
        )
    else:
        assert change > 1e-3 + 4.5 * noise + search_of(entry), (
            f"not declared invariant under {symmetry}, yet moved by {change:.2g} only"
        )


def _sorted_units(values: dict[Any, Any]) -> dict[Any, Any]:
    by_layer: dict[Any, list[Any]] = {}
    for (layer, options, _), value in values.items():
        by_layer.setdefault((layer, options), []).append(value)
    return {(*key, i): v for key, found in by_layer.items() for i, v in enumerate(sorted(found))}


def standard_error_covers(entry: Declaration, tiny: Tiny, exact: float, seeds: int = 60, **options: Any) -> None:
    """About 95 % of intervals of two standard errors contain the true value, and they are not absurdly wide."""
    inside, zs = 0, []
    for seed in range(seeds):
        ctx = fs.Context(tiny.problem(), seed=seed)
        [(value, stderr, is_exact)] = values_of(entry, ctx, **options).values()
        assert not is_exact, "an exact value has no interval to cover"
        zs.append((value - exact) / stderr)
        inside += abs(zs[-1]) <= 2
    assert inside >= 0.85 * seeds, f"two standard errors cover the true value in {inside} of {seeds} runs only"
    assert np.std(zs) > 0.5, f"standard errors are {1 / np.std(zs):.1f} times too large"
