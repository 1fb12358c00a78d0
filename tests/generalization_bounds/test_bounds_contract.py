"""Every bound of the registry keeps the contract that its declaration makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import checks_bounds as checks
import pytest
import torch
from networks import Tiny, _built, attending, batchnorm_conv, binary, lenet_like, mlp, regression, residual, smooth
from references import Dense
from torch import nn

from flatscope.registry import SYMMETRIES, Declaration, declarations

pytestmark = pytest.mark.fast

BOUNDS = list(declarations("bound").values())
by_bound = pytest.mark.parametrize("entry", BOUNDS, ids=lambda entry: entry.name)


def labelled(tiny: Tiny) -> Tiny:
    """The network with the labels that it gives: every margin is positive, which some bounds ask for."""
    return replace(tiny, name=f"{tiny.name}, fitted", y=tiny.model(tiny.x).detach().argmax(1))


def fitted() -> Tiny:
    return labelled(mlp())


def fitted_binary() -> Tiny:
    return labelled(binary())


def fitted_convolution() -> Tiny:
    return labelled(lenet_like())


def without_biases() -> Tiny:
    """Two classes, and weights of one size, so that the bounds in path values say something."""
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False))
    tiny = _built("no biases", model, (3,), 2, ("0", "2"))
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(value.sign() * (0.8 + 0.4 * value.abs() / value.abs().max()))
    return labelled(tiny)


def small() -> Tiny:
    """Inputs, and incoming weights of hidden units, below one: where there are biases the constant one is larger."""
    tiny = binary()
    tiny.model[0].weight.data *= 0.1
    return labelled(replace(tiny, name="small", x=0.1 * tiny.x))


def tied_outputs() -> Tiny:
    """Inputs of zero without biases: all outputs are zero whatever the weights, which counts as an error."""
    tiny = far_apart()
    return replace(tiny, name="tied outputs", x=tiny.x * (torch.arange(40) % 4 > 0)[:, None])


def batchnorm_mlp() -> Tiny:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    return labelled(_built("batchnorm-mlp", model, (3,), 3, ("0", "3")))


def far_apart() -> Tiny:
    """Two clusters so far apart that small noise on the weights makes no error: estimates are exact there."""
    model = nn.Sequential(nn.Linear(6, 2, bias=False))
    tiny = _built("far apart", model, (6,), 2, ("0",), n=40)
    y = torch.arange(40) % 2
    model[0].weight.data = torch.tensor([[-0.5], [0.5]], dtype=torch.float64).expand(2, 6).clone()
    return replace(tiny, x=(2.0 * y[:, None] - 1) * 2 + 0.1 * tiny.x, y=y)


def three_far_apart() -> Tiny:
    """Three clusters: what a bound pays for more than two classes is not hidden by a small margin."""
    model = nn.Sequential(nn.Linear(6, 3))
    tiny = _built("three far apart", model, (6,), 3, ("0",), n=40)
    y = torch.arange(40) % 3
    centres = torch.eye(3, dtype=torch.float64).repeat_interleave(2, dim=1)  # two inputs for each class
    model[0].weight.data = 0.5 * centres + 0.01 * model[0].weight.detach()
    return replace(tiny, x=2 * centres[y] + 0.1 * tiny.x, y=y)


def far_apart_and_deep(normalised: bool = False) -> Tiny:
    """The same with a hidden layer and more samples: so many that bounds by margins are below what they always say."""
    middle = [nn.BatchNorm1d(2), nn.ReLU()] if normalised else [nn.ReLU()]
    model = nn.Sequential(nn.Linear(3, 2), *middle, nn.Linear(2, 2))
    layers = ("0", str(len(middle) + 1))
    tiny = _built("far apart and deep", model, (3,), 2, layers, n=4000)
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[0.7], [-0.6]]).expand(2, 3))
        model[-1].weight.copy_(torch.tensor([[-0.5, 0.6], [0.6, -0.5]]))
        model[0].bias.copy_(torch.tensor([0.01, 0.02]))
    y = torch.arange(4000) % 2
    return replace(tiny, x=(2.0 * y[:, None] - 1) + 0.01 * tiny.x, y=y)


def one_logit() -> Tiny:
    tiny = _built("one logit", nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)), (3,), 2, ("0", "2"))
    return replace(tiny, loss="bce")


def partly_frozen() -> Tiny:
    tiny = fitted()
    tiny.model[0].weight.requires_grad_(False)
    tiny.model[4].bias.requires_grad_(False)
    return replace(tiny, name="partly frozen")


def never_trained() -> Tiny:
    """Without test data and without the weights before training."""
    return replace(mlp(), name="never trained", xt=None, yt=None, initial={})


NETWORKS = (
    fitted,
    far_apart,
    three_far_apart,
    without_biases,
    fitted_binary,
    small,
    tied_outputs,
    mlp,
    fitted_convolution,
    batchnorm_mlp,
    batchnorm_conv,
    residual,
    smooth,
    regression,
    one_logit,
    partly_frozen,
    never_trained,
)
QUICK = (fitted, far_apart, three_far_apart, without_biases)
on_every_network = pytest.mark.parametrize(
    "build",
    [pytest.param(build, marks=() if build in QUICK else pytest.mark.slow) for build in NETWORKS],
    ids=lambda build: build.__name__,
)


@cache
def dense(build: Callable[[], Tiny]) -> Dense:
    return Dense(build())


# Another value of every option, on a network where it matters, beside other options where it does not matter alone.
EXACT_NOISE = {"alpha": (0.02, 0.05)}
OPTIONS: list[tuple[str, Callable[[], Tiny], str, Any, dict[str, Any]]] = [
    ("parameter_counting", fitted, "bits", 8, {}),
    ("covering", fitted, "radius", 2.0, {}),
    ("covering", fitted, "epsilon", 0.1, {}),
    ("multitask", fitted, "tasks", 3, {}),
    ("multitask", fitted, "bits", 8, {}),
    ("robustness", far_apart, "levels", 1, {}),
    ("norm_capacity", fitted, "norms", ("l1_inf_norm", "l2_norm"), {}),
    ("norm_capacity", fitted, "epsilon", 0.3, {}),
    ("margin_rademacher", fitted, "constant", 3.0, {}),
    ("margin_rademacher", fitted, "epsilon", 0.3, {}),
    ("pac_bayes", far_apart, "form", "maurer", EXACT_NOISE),
    ("pac_bayes", far_apart, "form", "eq6", EXACT_NOISE),
    ("pac_bayes", far_apart, "noise", "equal", EXACT_NOISE),
    ("pac_bayes", far_apart, "prior", "matched", EXACT_NOISE | {"noise": "equal"}),
    ("pac_bayes", far_apart, "prior_mean", "initial", EXACT_NOISE),
    ("pac_bayes", far_apart, "alpha", 0.03, {}),
    ("sharpness_theorem_1", fitted, "form", "simplified", {}),
    ("sharpness_theorem_1", fitted, "flip_delta", 0.3, {}),
    ("sharpness_theorem_1", fitted, "corrected", True, {}),
    ("sharpness_theorem_1", fitted, "corrected", True, {"form": "simplified"}),
    ("sharpness_theorem_1", fitted, "lipschitz", 3.0, {}),
    ("pac_bayes_optimised", far_apart, "prior", "zero", {}),
    ("pac_bayes_optimised", far_apart, "prior", "half", {}),
    ("pac_bayes_optimised", far_apart, "sampling", 0.5, {}),
    ("pac_bayes_optimised", without_biases, "prior_variance", 10.0, {}),  # not the first of its grid
    ("psi_theorem_5_1", without_biases, "rule", "cyclic", {}),
    ("psi_theorem_5_1", without_biases, "epsilon", 0.05, {}),
    ("psi_theorem_5_1", without_biases, "epsilon", 50.0, {"relative": False}),  # ψ is then not its first term
    ("psi_theorem_5_1", without_biases, "relative", False, {}),
    ("psi_theorem_5_1", without_biases, "depth_convention", "hidden_layers", {}),
    ("psi_theorem_5_1", without_biases, "lipschitz", 3.0, {}),
    ("psi_theorem_5_1_corrected", without_biases, "rule", "cyclic", {}),
    ("psi_theorem_5_1_corrected", without_biases, "epsilon", 0.05, {}),
    ("psi_theorem_5_1_corrected", without_biases, "relative", False, {}),
    ("psi_theorem_5_1_corrected", without_biases, "lipschitz", 3.0, {}),
    ("pac_bayes_psi", without_biases, "rule", "max_product", {}),
    ("pac_bayes_psi", far_apart, "sigma", 0.01, {}),
    ("pac_bayes_psi", far_apart, "prior_mean", "initial", {}),
    ("pac_bayes_psi", without_biases, "sign_penalty", False, {}),
    ("pac_bayes_psi", mlp, "loss", "clipped", {"sigma": 1.0}),
]


# Elsewhere the first is what it is for any weights, and the second is uncertain by more than a rescaling moves it.
SAY_SOMETHING = ("margin_l1", "pac_bayes")


@by_bound
def test_declares_itself(entry: Declaration) -> None:
    checks.declares_itself(entry)


@by_bound
@on_every_network
def test_equals_its_twin(entry: Declaration, build: Callable[[], Tiny]) -> None:
    checks.equals_its_twin(entry, dense(build))


@pytest.mark.parametrize("name", ["rademacher_l1", "margin_l1", "margin_rademacher"])
def test_margins_matter_where_there_are_enough_samples(name: str) -> None:
    """On few samples the best margin of margin_l1 is one that no sample reaches."""
    rows = checks.equals_its_twin(declarations("bound")[name], dense(far_apart_and_deep))
    if name == "margin_l1":
        [row] = rows.values()
        assert row.value < 1


@by_bound
def test_every_option_is_compared(entry: Declaration) -> None:
    compared = {option for name, _, option, _, _ in OPTIONS if name == entry.name}
    assert compared == checks.options_of(entry)


@pytest.mark.parametrize(
    ("name", "build", "option", "other", "beside"), OPTIONS, ids=lambda part: part if isinstance(part, str) else ""
)
def test_options_change_bound_and_twin_alike(
    name: str, build: Callable[[], Tiny], option: str, other: Any, beside: dict[str, Any]
) -> None:
    checks.moves_with(declarations("bound")[name], dense(build), option, other, beside)


@by_bound
@pytest.mark.parametrize(
    "check",
    [
        checks.is_marked_vacuous_from_one_up,
        checks.falls_with_delta,
        checks.same_for_any_batches_and_order,
        checks.seed_matters_only_to_estimates,
        checks.close_in_float32,
        checks.leaves_everything_untouched,
    ],
    ids=lambda check: check.__name__,
)
@pytest.mark.parametrize("build", [fitted, far_apart, batchnorm_conv, mlp], ids=lambda build: build.__name__)
@pytest.mark.slow
def test_keeps_the_contract(entry: Declaration, build: Callable[[], Tiny], check: Any) -> None:
    check(entry, dense(build).tiny)


@pytest.mark.slow
@by_bound
@pytest.mark.parametrize("symmetry", SYMMETRIES)
def test_keeps_its_symmetries(entry: Declaration, symmetry: str) -> None:
    tiny = dense(fitted).tiny
    if symmetry in ("attention_scaling", "norm_scaling"):
        tiny = dense(attending).tiny
    elif entry.name in SAY_SOMETHING:
        tiny = far_apart_and_deep(normalised=symmetry == "batchnorm_scaling")
    elif symmetry == "batchnorm_scaling":
        tiny = dense(batchnorm_mlp).tiny
    checks.keeps_its_symmetries(entry, tiny, symmetry)
