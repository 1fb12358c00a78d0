"""Every row of a network's table against its own computation: served, sampled or refused, none passed over."""

from __future__ import annotations

import copy
import fnmatch
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas
import torch
from forms_of_measures import FORMS
from own_double import OwnDouble
from own_measures import MEASURES, Subject
from own_norms import kink_free
from own_probes import estimates
from torch import Tensor, nn

import flatscope as fs
from flatscope.registry import declarations

DEFAULT = [d.name for d in declarations().values() if d.kind == "measure" and d.cost != "long"]
# What has a value on every network, but for those that a case names with the reason.
EVERYWHERE = """
gradient_norm hessian_trace layer_trace layer_max_eigenvalue hessian_max_eigenvalue hessian_min_eigenvalue kappa kappa_*
rho rho_* relative_flatness psi_trace m_sharpness pac_bayes_kl fisher_rao_norm parameter_count l2_norm spectral_norm
l1_inf_norm group_norm fan_in_l1 gradient_noise gradient_noise_scale batch_sharpness
"""
SEARCHED = ("*_eigenvalue", "kappa", "kappa_max", "kappa_sum")  # to 1e-3 of the largest
SEARCH = 1.5e-3
# Of weights that are computed from parameters, as they act.
OF_MADE = (
    "layer_* kappa* rho* relative_flatness l1_* l2_* spectral_norm* group_norm* fan_in_l1 path_* psi_* m_sharpness"
)
OF_MADE = (*OF_MADE.split(), "pac_bayes_kl", "lipschitz_linf")
BOUNDS = ("lipschitz_l2", "certified_radius", "psi_activation_radius")  # checked as bounds where not otherwise
LARGE = 2500  # parameters from which the own values are estimates too
SIGMAS = 4.0
CHANCES = 40  # draws of noise of the own computation


@dataclass
class Made:
    """A network that is ready to be measured.

    Attributes:
        smooth: whether the gradient is differentiable everywhere, so that differences have to agree with it.
        input_first: parameters that are multiplied as `x @ w`; with a minus, embeddings that are multiplied transposed.
        no_layers: patterns of trainable matrices that multiply nothing: positions, tokens, scales.
        layers: {layer in the table: parameter}, where the names do not say.
        refused: {pattern of measures: what the reason has to say} of what has no value here.
        unchecked: {pattern of measures: why nothing independent was computed}.
        groups: for weights (groups, outputs, inputs) of products side by side how many there are.
        written: the same function with each weight that is computed as a parameter; layer rows are of these.
        exact: relative agreement of exact rows.
    """

    model: nn.Module
    inputs: Any
    targets: Tensor
    loss: Any = "cross_entropy"
    smooth: bool = False
    input_first: tuple[str, ...] = ()
    no_layers: tuple[str, ...] = ()
    layers: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    unchecked: Mapping[str, str] = field(default_factory=dict)
    written: nn.Module | None = None
    initial: dict[str, Tensor] | None = None
    groups: Mapping[str, int] = field(default_factory=dict)
    exact: float = 1e-6
    dtype: torch.dtype = torch.float64
    train: Any = None  # what the problem gets where it is not (inputs, targets)


@dataclass
class Outcome:
    """What became of the rows of one table."""

    agreed: int = 0
    sampled: list[float] = field(default_factory=list)  # differences over combined standard errors
    bounds: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    unchecked: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    worst: float = 0.0  # relative, of exact rows
    seconds: float = 0.0
    of_gradient: float = math.nan  # gradient against differences of the loss
    of_products: float = math.nan  # products against differences of the gradient

    @property
    def rms(self) -> float:
        return math.sqrt(sum(z * z for z in self.sampled) / len(self.sampled)) if self.sampled else math.nan

    def __str__(self) -> str:
        return (
            f"{self.agreed} exact rows (worst {self.worst:.1e}), {len(self.sampled)} sampled (rms z {self.rms:.2f}), "
            f"{self.bounds} bounds, {len(self.refused)} measures refused, {len(self.unchecked)} unchecked; "
            f"gradient {self.of_gradient:.1e}, products {self.of_products:.1e} from differences; {self.seconds:.0f} s"
        )


def matching(name: str, patterns: Any) -> str | None:
    return next((pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)), None)


def compared(made: Made, names: list[str] | None = None) -> Outcome:
    """Measure a network and compare every row."""
    problem = fs.Problem(
        made.model, train=made.train or (made.inputs, made.targets), loss=made.loss, initial=made.initial
    )
    begun = time.process_time()
    frame = _table(problem, names)
    found = Outcome(seconds=time.process_time() - begun)
    own = OwnDouble(made.model, made.inputs, made.targets, made.loss, made.dtype)
    _check_derivatives(made, own, found)
    twin = own
    if made.written is not None:
        twin = OwnDouble(made.written, made.inputs, made.targets, made.loss, made.dtype)
        torch.testing.assert_close(twin.outputs(), own.outputs())
    layers = _named(made, twin, frame, "layer_trace", found)
    acting = _named(made, twin, frame, "l2_norm", found)
    for name in twin.params if made.written is None else ():
        if twin.params[name].ndim > 1 and name not in layers.values() and not matching(name, made.no_layers):
            found.wrong.append(f"matrix {name} has no layer row")
    subject = Subject(own, layers, acting, made.input_first, made.initial, made.groups)
    of_made = subject if twin is own else Subject(twin, layers, acting, made.input_first)
    for name in frame["measure"].unique():
        rows = frame[frame["measure"] == name]
        _compare(name, rows, made, of_made if matching(name, OF_MADE) else subject, found)
    return found


def _table(problem: fs.Problem, names: list[str] | None) -> pandas.DataFrame:
    """The rows of these measures, or of all by default and of their forms, which have names of their own here."""
    if names is not None:
        return fs.measure(problem, names).to_frame()
    ctx = fs.Context(problem)
    frames = [fs.measure(problem, DEFAULT, context=ctx).to_frame()]
    for form in FORMS:
        found = fs.measure(problem, form.name, options={form.name: form.given}, context=ctx)
        frames.append(found.to_frame().assign(measure=form.twin))
    return pandas.concat(frames, ignore_index=True)


def _check_derivatives(made: Made, own: OwnDouble, found: Outcome) -> None:
    if made.dtype == torch.float64:
        found.of_gradient, found.of_products = own.error_of_gradient(), own.error_of_products()
        if made.smooth and not found.of_products < 1e-6:
            found.wrong.append(f"own double backward is {found.of_products:.1e} from differences of the gradient")
        if made.smooth and not found.of_gradient < 1e-6:
            found.wrong.append(f"own gradient is {found.of_gradient:.1e} from differences of the loss")


def _named(made: Made, own: OwnDouble, frame: pandas.DataFrame, measure: str, found: Outcome) -> dict[str, str]:
    """{layer: parameter} of the rows of a measure."""
    named = {}
    for layer in frame[frame["measure"] == measure]["layer"].unique():
        options = made.layers.get(layer), layer, f"{layer}.weight"
        name = next((one for one in options if one in own.everything), None)
        if name is not None:
            named[layer] = name
        elif layer:
            found.wrong.append(f"layer {layer} of {measure} has no parameter")
    return named


def _compare(name: str, rows: pandas.DataFrame, made: Made, subject: Subject, found: Outcome) -> None:
    missing = rows[rows["value"].isna()]
    for layer, reason in zip(missing["layer"], missing["reason"], strict=True):
        found.refused[name] = reason
        allowed = matching(name, made.refused)
        if "failed" in reason or "Error" in reason or len(reason) < 15:
            found.wrong.append(f"{name} {layer}: {reason}")
        elif allowed is not None and not re.search(made.refused[allowed], reason):
            found.wrong.append(f"{name} {layer} is refused for another reason: {reason}")
        elif allowed is None and matching(name, EVERYWHERE.split()) and (layer or matching(name, ("*_norm",)) is None):
            found.wrong.append(f"{name} {layer} is refused: {reason}")
    rows = rows[rows["value"].notna()]
    if not len(rows):
        return
    if matching(name, made.unchecked):
        return
    if name == "perturbation_robustness":
        _compare_noise(rows, subject, found)
    elif name in BOUNDS:
        _compare_bound(name, rows, subject, found)
    elif (truth := _truth(name, subject)) is None:
        if name == "lipschitz_linf":
            _compare_bound(name, rows, subject, found)
        else:
            found.unchecked.append(name)
    else:
        scale = max((abs(value) for value, _ in truth.values()), default=0.0)
        if name == "hessian_min_eigenvalue":
            scale = max(scale, *(abs(one) for one, _ in _truth("hessian_max_eigenvalue", subject).values()))
        for layer, own_rows in rows.groupby("layer", sort=False):
            several = len(own_rows) > 1 or (layer, -1) not in truth
            for number, row in enumerate(own_rows.itertuples()):
                key = (str(layer), number if several else -1)
                if key not in truth:
                    found.wrong.append(f"{name} {key}: no such value in the own computation")
                else:
                    _compare_value(name, key, row, truth[key], scale, made, found)


def _truth(name: str, subject: Subject) -> dict[tuple[str, int], tuple[float, float]] | None:
    """The own values with their standard errors; 0 but for networks that are too large."""
    if subject.own.size > LARGE and (found := estimates(name, subject)) is not None:
        return found
    exact = MEASURES[name](subject)
    return None if exact is None else {key: (value, 0.0) for key, value in exact.items()}


def _compare_value(
    name: str, key: Any, row: Any, own: tuple[float, float], scale: float, made: Made, found: Outcome
) -> None:
    truth, error = own
    difference, searched = abs(row.value - truth), matching(name, SEARCHED)
    if row.stderr > 0 or error > 0:
        z = (row.value - truth) / math.hypot(row.stderr, error, 1e-9 * scale)
        found.sampled.append(z)
        if abs(z) > SIGMAS:
            found.wrong.append(f"{name} {key}: {row.value:.6g} ± {row.stderr:.2g}, own {truth:.6g}, z = {z:.1f}")
        return
    relative = difference / max(abs(truth), 1e-3 * scale, 1e-300)
    allowed = SEARCH * scale / max(abs(truth), 1e-3 * scale, 1e-300) if searched else made.exact
    if relative > allowed and difference > 1e-14:
        found.wrong.append(f"{name} {key}: {row.value:.9g}, own {truth:.9g}, {relative:.1e} apart ({row.reason})")
    elif not searched:
        found.worst = max(found.worst, relative)
    found.agreed += 1


def _compare_bound(name: str, rows: pandas.DataFrame, subject: Subject, found: Outcome) -> None:
    """A Lipschitz constant is at least the norm of each sample's Jacobian, a certified radius at most what the margin
    over that norm says; within a radius of activations the outputs have no kink along any line."""
    value = float(rows["value"].iloc[0])
    if name == "psi_activation_radius":
        found.bounds += 1
        if not kink_free(subject, value):
            found.wrong.append(f"{name}: within {value:.6g} an activation changes")
        return
    order = 2 if name != "lipschitz_linf" else math.inf
    steepest = float(torch.linalg.matrix_norm(subject.own.jacobians, order).max())
    holds = value >= steepest * (1 - 1e-9)
    if name == "certified_radius":
        holds = value <= subject.margin / math.sqrt(2) / steepest * 2 * (1 + 1e-9)
    found.bounds += 1
    if not holds:
        found.wrong.append(f"{name}: {value:.6g} is no bound; the steepest sample has {steepest:.6g}")


def _compare_noise(rows: pandas.DataFrame, subject: Subject, found: Outcome) -> None:
    """Error rates under noise against more draws of other noise, each sample's apart."""
    own, generator = subject.own, torch.Generator().manual_seed(99)
    for row, gamma in zip(rows.itertuples(), (0, 0.05, 0.1, 0.2, 0.5, 1), strict=True):
        draws = CHANCES if gamma else 1
        wrong = torch.zeros(own.n, dtype=torch.float64)
        for _ in range(draws):
            noise = torch.randn(own.inputs.shape, generator=generator, dtype=torch.float64).to(own.dtype)
            moved = Subject(copy.copy(own), {})
            moved.own.inputs = own.inputs + gamma * noise
            with torch.no_grad():
                wrong += moved.margins <= 0
        rates = (wrong + 0.5) / (draws + 1)
        truth = float(wrong.mean() / draws)
        if gamma == 0:
            if abs(row.value - truth) > 1e-12:
                found.wrong.append(f"{name_of(row)}: error {row.value}, own {truth}")
            found.agreed += 1
            continue
        variance = float((rates * (1 - rates)).sum()) / own.n**2
        taken = 10 if row.reason == "10 draws" else int(row.reason.split()[0])
        z = (row.value - truth) / math.sqrt(variance / taken + variance / draws)
        found.sampled.append(z)
        if abs(z) > SIGMAS:
            found.wrong.append(f"{name_of(row)} at {gamma}: {row.value:.4g}, own {truth:.4g}, z = {z:.1f}")


def name_of(row: Any) -> str:
    return str(row.measure)


Maker = Callable[[], Made]
