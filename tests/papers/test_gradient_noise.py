"""Gradient noise against full enumeration of mini-batches, dense covariances and SciPy's own tests."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from networks import attention, lenet_like, mlp, regression
from references import Dense
from references_radius import gradients_one_by_one
from scipy import stats
from torch import Tensor, nn

import flatscope as fs
from flatscope.measures.gradient_noise import can_vectorise_sample_gradients, sample_gradients
from flatscope_papers.theory.mini_batch_noise import (
    GradientNoise,
    _anderson_p_value,
    adjusted_p_values,
    noise_at,
    noise_spectrum,
)


def small(n: int = 5) -> tuple[fs.Context, Tensor]:
    """A tiny problem and its per-sample gradients (n, p), written out."""
    tiny = mlp()
    tiny = replace(tiny, x=tiny.x[:n], y=tiny.y[:n])
    return fs.Context(tiny.problem()), gradients_one_by_one(Dense(tiny))


def enumerated(rows: Tensor, batch: int, replacement: bool) -> Tensor:
    """The gradients of all mini-batches, each as often as it is drawn: (many, p)."""
    n = range(len(rows))
    every = itertools.product(n, repeat=batch) if replacement else itertools.permutations(n, batch)
    return torch.stack([rows[list(chosen)].mean(0) for chosen in every])


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_moments_of_the_noise_by_enumeration(batch: int, replacement: bool) -> None:
    ctx, rows = small()
    noise = noise_at(ctx, components=range(rows.shape[1]))
    xi = enumerated(rows, batch, replacement) - rows.mean(0)
    scale = float(rows.abs().max())
    assert xi.mean(0).abs().max() < 1e-12 * scale  # E ξ = 0
    assert (noise.mean - rows.mean(0)).abs().max() < 1e-12 * scale
    covariance = xi.T @ xi / len(xi)
    assert (noise.covariance(batch, replacement=replacement) - covariance).abs().max() < 1e-12 * scale**2
    trace = float(covariance.trace())
    assert noise.covariance_trace(batch, replacement=replacement) == pytest.approx(trace, rel=1e-12)
    options = {"gradient_noise": {"batch": batch, "replacement": replacement}}
    assert fs.measure(ctx.problem, "gradient_noise", options=options)["gradient_noise"] == pytest.approx(
        trace, rel=1e-12
    )
    varies = noise.variance > 1e-20
    kurtosis = (xi**4).mean(0)[varies] / (xi**2).mean(0)[varies] ** 2 - 3
    found = noise.kurtosis(batch, replacement=replacement)[varies]
    assert (found - kurtosis).abs().max() < 1e-10 * (1 + kurtosis.abs().max())


def test_a_batch_of_all_samples_without_replacement_has_no_noise() -> None:
    ctx, _ = small()
    assert noise_at(ctx, 3).covariance_trace(5, replacement=False) == 0.0
    with pytest.raises(fs.InputError, match="at most 5"):
        noise_at(ctx, 3).covariance_trace(6, replacement=False)
    with pytest.raises(fs.InputError, match="batch of at least 1"):
        fs.measure(ctx.problem, "gradient_noise", options={"gradient_noise": {"batch": 0}})


@pytest.mark.parametrize("build", [mlp, lenet_like, regression, attention])
def test_sample_gradients_are_those_of_single_samples(build) -> None:  # type: ignore[no-untyped-def]
    tiny = build()
    ctx = fs.Context(tiny.problem(batch_size=4))
    rows = torch.cat(list(sample_gradients(ctx)))
    assert torch.allclose(rows, gradients_one_by_one(Dense(tiny)), atol=1e-12)


class Looks(nn.Module):
    """Looks at values: no batching rule can run it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * (2.0 if float(x.detach().sum()) > 1e9 else 1.0)


def test_networks_that_do_not_vectorise_are_differentiated_one_by_one() -> None:
    tiny = mlp()
    model = Looks().double().eval()
    ctx = fs.Context(fs.Problem(model, train=(tiny.x, tiny.y)))
    plain = fs.Context(fs.Problem(model.a, train=(tiny.x, tiny.y)))
    assert not can_vectorise_sample_gradients(ctx)
    assert can_vectorise_sample_gradients(plain)
    one, other = (torch.cat(list(sample_gradients(c))) for c in (ctx, plain))
    assert torch.allclose(one, other, atol=1e-13)


def test_data_standard_error_covers_what_more_samples_show() -> None:
    """Of samples drawn anew, 95 % of traces lie within two standard errors of the mean trace."""
    model, generator = nn.Linear(3, 2).double().eval(), torch.Generator().manual_seed(3)
    zs = []
    x, y = torch.randn(40_000, 3, generator=generator, dtype=torch.float64), torch.arange(40_000) % 2
    whole = fs.measure(fs.Problem(model, train=(x, y)), "gradient_noise")["gradient_noise"]
    for part in range(100):
        own = slice(part * 400, (part + 1) * 400)
        row = fs.measure(fs.Problem(model, train=(x[own], y[own])), "gradient_noise").to_frame().iloc[0]
        zs.append((row["value"] - whole) / row["data_stderr"])
    assert np.mean(np.abs(zs) < 2) >= 0.85
    assert 0.7 < np.std(zs) < 1.4


@pytest.mark.parametrize("n", [5, 11])
def test_spectrum_by_memory_and_by_products(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, rows = small(n)
    centred = rows - rows.mean(0)
    expected = torch.linalg.eigvalsh(centred.T @ centred / n).flip(0)
    assert torch.allclose(noise_spectrum(ctx, 4), expected[:4], rtol=1e-10)
    assert float(noise_spectrum(ctx, n).sum()) == pytest.approx(noise_at(ctx, 1).trace, rel=1e-10)
    monkeypatch.setattr("flatscope_papers.theory.mini_batch_noise.KEPT_NUMBERS", 0)
    assert torch.allclose(noise_spectrum(ctx, 4), expected[:4], rtol=1e-6)
    with pytest.raises(fs.InputError, match="eigenvalues"):
        noise_spectrum(ctx, n + 1)


def test_temperature_is_that_of_the_white_sample_noise_of_the_potentials() -> None:
    """Isotropic noise of variance s² per sample: T = γ s² / (2b), as for SGD with replacement."""
    values = torch.tensor([[2.0, 2.0], [-2.0, 2.0], [2.0, -2.0], [-2.0, -2.0]], dtype=torch.float64)
    variance, fourth = values.square().mean(0), values.pow(4).mean(0)
    noise = GradientNoise(values.mean(0), float(variance.sum()), torch.arange(2), values, variance, fourth)
    assert noise.temperature(0.1, 8) == pytest.approx(0.1 * 4 / 8 / 2)
    assert noise.temperature(0.1, 8, momentum=0.5) == pytest.approx(0.1 * 4 / 8)
    assert noise.temperature(0.1, 4, replacement=False) == 0
    with pytest.raises(fs.InputError):
        noise.temperature(-1.0, 8)


def two_point(n: int = 400, m: int = 30, seed: int = 0, heavy: bool = False) -> GradientNoise:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, m, generator=generator, dtype=torch.float64)
    if heavy:
        values = values**5
    centred = values - values.mean(0)
    variance, fourth = centred.square().mean(0), centred.pow(4).mean(0)
    return GradientNoise(values.mean(0), float(variance.sum()), torch.arange(m), values, variance, fourth)


@pytest.mark.parametrize("test", ["dagostino", "ks", "anderson"])
def test_gaussian_noise_is_accepted_and_heavy_tails_are_not(test: str) -> None:
    assert two_point().normality(8, test=test).share_rejected == 0
    heavy = two_point(heavy=True)
    alone = heavy.normality(1, test=test)
    assert alone.share_rejected == 1
    assert alone.predicted is not None
    assert (alone.predicted > 5).all()
    many = heavy.normality(4000, 300, test=test)  # the central limit theorem
    assert many.share_rejected <= 0.1
    assert many.predicted is not None
    assert torch.allclose(many.predicted * 4000, alone.predicted)


def test_drawn_mini_batches_have_the_moments_of_the_formulas() -> None:
    noise = two_point(n=50, m=4, heavy=True)
    for replacement in (True, False):
        drawn = noise.mini_batches(10, 20_000, replacement=replacement, seed=1)
        centred = drawn - noise.values.mean(0)
        variance = noise.covariance(10, replacement=replacement).diagonal()
        spread = centred.square().std(0) / math.sqrt(len(drawn))
        assert ((centred.square().mean(0) - variance).abs() < 4.5 * spread).all()
        assert ((centred.mean(0)).abs() < 4.5 * (variance / len(drawn)).sqrt()).all()
    assert torch.equal(noise.mini_batches(3, 10, seed=5), noise.mini_batches(3, 10, seed=5))


def test_a_component_that_does_not_vary_is_not_tested() -> None:
    noise = two_point(m=3)
    values = noise.values.clone()
    values[:, 1] = 7.0
    found = replace(noise, values=values).normality(4)
    assert found.p_values.isnan().tolist() == [False, True, False]
    assert not found.rejected[1]
    assert found.share_rejected == 0


def test_corrections_against_scipy_and_by_hand() -> None:
    p = torch.tensor([0.01, 0.04, 0.03, 0.2, float("nan")], dtype=torch.float64)
    real = p[:4].numpy()
    assert adjusted_p_values(p, "benjamini-hochberg")[:4].numpy() == pytest.approx(stats.false_discovery_control(real))
    assert adjusted_p_values(p, "holm")[:4].tolist() == pytest.approx([0.04, 0.09, 0.09, 0.2])
    assert torch.equal(adjusted_p_values(p, "none")[:4], p[:4])
    assert adjusted_p_values(p)[4].isnan()
    with pytest.raises(fs.InputError, match="correction"):
        adjusted_p_values(p, "bonferoni")


def test_anderson_p_values_meet_scipys_critical_values() -> None:
    """At SciPy's critical value for 5 % the p-value is 5 %, whatever the sample."""
    generator = np.random.default_rng(2)
    p_values = []
    for _ in range(300):
        values = generator.normal(size=60) ** 3 if _ % 2 else generator.normal(size=60)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scipys = stats.anderson(values, "norm")
        critical = dict(zip(scipys.significance_level, scipys.critical_values, strict=True))[5.0]
        p = _anderson_p_value(values)
        p_values.append(p)
        if abs(scipys.statistic / critical - 1) > 0.03:
            assert (p < 0.05) == (scipys.statistic > critical)
    assert np.mean(np.array(p_values[::2]) < 0.05) < 0.11


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda noise: noise.normality(4, test="shapiro"), "normality"),
        (lambda noise: noise.normality(4, correction="x"), "normality"),
        (lambda noise: noise.normality(4, 5), "20 draws"),
        (lambda noise: noise.kurtosis(400, replacement=False), "batch from 1"),
    ],
)
def test_wrong_questions_are_refused(call, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(fs.InputError, match=words):
        call(two_point())


def test_wrong_components_are_refused() -> None:
    ctx, rows = small()
    for wrong in (0, [], [rows.shape[1]], [-1]):
        with pytest.raises(fs.InputError):
            noise_at(ctx, wrong)
