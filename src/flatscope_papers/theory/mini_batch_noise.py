"""The noise of SGD at fixed weights: its covariance, its temperature, and how Gaussian it is.

Zhang et al. 2017, eq (7): the gradient of a mini-batch is that of the whole training set plus ξ. Over all mini-batches
E ξ = 0; its covariance is S/b with replacement and S (n − b) / (b (n − 1)) without, S that of single samples; with
replacement its excess kurtosis in each component is κ/b, κ that of single samples. `mini_batches` draws such gradients
to be looked at, as Figure 5 does; all else here is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor
from torch.func import jvp

from flatscope import Context, InputError
from flatscope.errors import UnknownNameError
from flatscope.extend import count_scalars, flatten, unflatten
from flatscope.measures.gradient_noise import batch_factor, sample_gradients

TESTS = ("dagostino", "ks", "anderson")
CORRECTIONS = ("holm", "benjamini-hochberg", "none")
KEPT_NUMBERS = 2**26  # per-sample gradients up to this size are held and multiplied out
DRAWN_NUMBERS = 2**24  # of one block of mini-batches


@dataclass(frozen=True)
class GradientNoise:
    """Per-sample gradients at fixed weights: their mean, the trace of their covariance, and chosen components.

    Attributes:
        mean: gradient of the training loss (p,).
        trace: tr S.
        components: places in the flattened trainable parameters (m,).
        values: per-sample gradients in those places (n, m), float64.
        variance: diagonal of S (p,).
        fourth: fourth central moment of every component (p,).
    """

    mean: Tensor
    trace: float
    components: Tensor
    values: Tensor
    variance: Tensor
    fourth: Tensor

    @property
    def n(self) -> int:
        """Number of samples."""
        return len(self.values)

    def covariance_trace(self, batch: int = 1, *, replacement: bool = True) -> float:
        """Trace of the covariance of a mini-batch gradient."""
        return batch_factor(self.n, batch, replacement) * self.trace

    def covariance(self, batch: int = 1, *, replacement: bool = True) -> Tensor:
        """Covariance of the chosen components of a mini-batch gradient: (m, m)."""
        centred = self.values - self.values.mean(0)
        return batch_factor(self.n, batch, replacement) * (centred.T @ centred) / self.n

    def kurtosis(self, batch: int = 1, *, replacement: bool = True) -> Tensor:
        """Excess kurtosis of every component of a mini-batch gradient (p,); NaN where a component does not vary.

        With replacement κ/b. Without, by the moments of a sum over a simple random sample.
        """
        m2, m4 = self.variance, self.fourth
        if replacement:
            batch_factor(self.n, batch, True)
            return (m4 / m2.square() - 3) / batch
        n, b = self.n, batch
        if not 1 <= b < n or n < 4:
            raise InputError(f"a batch from 1 to {n - 1}, of at least 4 samples", str(b), where="kurtosis")
        # Moments of the sum of b of n centred numbers drawn without replacement, by inclusion probabilities.
        p1 = b / n
        p2 = p1 * (b - 1) / (n - 1)
        p3 = p2 * (b - 2) / (n - 2)
        p4 = p3 * (b - 3) / (n - 3)
        one, two = n * m4, (n * m2).square()  # Σ a⁴ and (Σ a²)²
        fourth = one * (p1 - 7 * p2 + 12 * p3 - 6 * p4) + 3 * two * (p2 - 2 * p3 + p4)
        second = n * m2 * (p1 - p2)
        return fourth / second.square() - 3

    def temperature(self, lr: float, batch: int, *, replacement: bool = True, momentum: float = 0.0) -> float:
        """T = γ s² / (2 (1 − β)), s² the mean variance of a component: that of SGD if its noise were isotropic.

        Only noise that is the same at all weights and in all directions makes SGD visit regions like exp(−U/T). At
        a minimum that fits every sample the noise vanishes, and so does T.
        """
        if not (0 < lr < math.inf and 0 <= momentum < 1):
            raise InputError("a positive lr and momentum in [0, 1)", f"{lr}, {momentum}", where="temperature")
        per_component = self.covariance_trace(batch, replacement=replacement) / len(self.mean)
        return lr * per_component / (2 * (1 - momentum))

    def mini_batches(self, batch: int, draws: int, *, replacement: bool = True, seed: int = 0) -> Tensor:
        """The chosen components of the gradients of random mini-batches: (draws, m)."""
        batch_factor(self.n, batch, replacement)
        generator, rows = torch.Generator().manual_seed(seed), []
        block = max(1, DRAWN_NUMBERS // max(1, (batch if replacement else self.n) * self.values.shape[1]))
        for start in range(0, draws, block):
            k = min(block, draws - start)
            if replacement:
                chosen = torch.randint(self.n, (k, batch), generator=generator)
            else:
                chosen = torch.rand(k, self.n, generator=generator).argsort(1)[:, :batch]
            rows.append(self.values[chosen].mean(1))
        return torch.cat(rows)

    def normality(
        self,
        batch: int,
        draws: int = 1000,
        *,
        replacement: bool = True,
        test: str = "dagostino",
        correction: str = "holm",
        level: float = 0.05,
        seed: int = 0,
    ) -> Normality:
        """Test whether the chosen components of mini-batch gradients look Gaussian, over random mini-batches.

        Args:
            batch: samples of a mini-batch.
            draws: mini-batches, at least 20.
            replacement: how their samples are drawn.
            test: "dagostino" (skewness and kurtosis), "ks" (Kolmogorov-Smirnov against the exact mean and variance),
                or "anderson" (Anderson-Darling, mean and variance estimated).
            correction: for many components: "holm" (no false alarm in all), "benjamini-hochberg" (few among the
                alarms), or "none".
            level: of the corrected tests.
            seed: of the mini-batches.
        """
        if test not in TESTS or correction not in CORRECTIONS:
            known, word = (TESTS, test) if test not in TESTS else (CORRECTIONS, correction)
            raise UnknownNameError.among(word, known, "test or correction of normality")
        if draws < 20 or not 0 < level < 1:
            raise InputError("at least 20 draws and a level in (0, 1)", f"{draws}, {level}", where="normality")
        drawn = self.mini_batches(batch, draws, replacement=replacement, seed=seed).numpy()
        centre = self.values.mean(0).numpy()
        scale = self.covariance(batch, replacement=replacement).diagonal().sqrt().numpy()
        p_values = [_p_value(test, *column) for column in zip(drawn.T, centre, scale, strict=True)]
        p = torch.tensor(p_values, dtype=torch.float64)
        adjusted = adjusted_p_values(p, correction)
        seen = torch.from_numpy(np.array([_excess_kurtosis(column) for column in drawn.T]))
        predicted = self.kurtosis(batch)[self.components] if replacement else None
        return Normality(p, adjusted, adjusted < level, seen, predicted)


@dataclass(frozen=True)
class Normality:
    """Tests of the chosen components; NaN, and not rejected, where a component does not vary.

    Attributes:
        p_values: of each test (m,).
        adjusted: corrected for their number.
        rejected: whether the corrected test rejects a Gaussian.
        kurtosis: excess kurtosis of the drawn mini-batches.
        predicted: κ/b; None without replacement.
    """

    p_values: Tensor
    adjusted: Tensor
    rejected: Tensor
    kurtosis: Tensor
    predicted: Tensor | None

    @property
    def share_rejected(self) -> float:
        """Fraction of components that do not look Gaussian, among those that vary."""
        varies = ~self.p_values.isnan()
        return float(self.rejected[varies].double().mean()) if bool(varies.any()) else math.nan


def adjusted_p_values(p: Tensor, correction: str = "holm") -> Tensor:
    """P-values corrected for how many there are; NaN stay NaN and are not counted."""
    if correction not in CORRECTIONS:
        raise UnknownNameError.among(correction, CORRECTIONS, "correction")
    result, real = p.clone(), ~p.isnan()
    m = int(real.sum())
    if correction == "none" or not m:
        return result
    ordered, order = p[real].sort()
    if correction == "holm":
        raised = (ordered * torch.arange(m, 0, -1)).cummax(0).values
    else:
        raised = (ordered * m / torch.arange(1, m + 1)).flip(0).cummin(0).values.flip(0)
    corrected = torch.empty_like(ordered)
    corrected[order] = raised.clamp(max=1)
    result[real] = corrected
    return result


def _p_value(test: str, values: np.ndarray[Any, Any], centre: float, scale: float) -> float:
    if not values.std() > 1e-12 * max(abs(values).max(), 1e-300):
        return math.nan
    if test == "dagostino":
        return float(stats.normaltest(values).pvalue)
    if test == "ks":
        return float(stats.kstest(values, "norm", args=(centre, scale)).pvalue)
    return _anderson_p_value(values)


def _anderson_p_value(values: np.ndarray[Any, Any]) -> float:
    """Anderson-Darling with estimated mean and variance; p by the formulas of D'Agostino and Stephens 1986."""
    n, ordered = len(values), np.sort(values)
    z = (ordered - values.mean()) / values.std(ddof=1)
    i = np.arange(1, n + 1)
    squared = -n - np.mean((2 * i - 1) * (stats.norm.logcdf(z) + stats.norm.logsf(z[::-1])))
    a = squared * (1 + 0.75 / n + 2.25 / n**2)
    if a >= 0.6:
        return float(math.exp(1.2937 - 5.709 * a + 0.0186 * a**2)) if a < 13 else 0.0
    if a >= 0.34:
        return float(math.exp(0.9177 - 4.279 * a - 1.38 * a**2))
    if a >= 0.2:
        return float(1 - math.exp(-8.318 + 42.796 * a - 59.938 * a**2))
    return float(1 - math.exp(-13.436 + 101.14 * a - 223.73 * a**2))


def _excess_kurtosis(values: np.ndarray[Any, Any]) -> float:
    centred = values - values.mean()
    second = float(np.mean(centred**2))
    return float(np.mean(centred**4)) / second**2 - 3 if second > 0 else math.nan


def noise_at(ctx: Context, components: int | Sequence[int] = 100) -> GradientNoise:
    """The gradient noise at a point: two passes over the data, memory bounded by a chunk of per-sample gradients.

    Args:
        ctx: the network at fixed weights.
        components: how many components to keep, drawn at random by the context's seed; or their places in the
            flattened trainable parameters.
    """
    p, device = count_scalars(ctx.trainable.values()), ctx.problem.device
    if isinstance(components, int):
        if components < 1:
            raise InputError("at least one component", str(components), where="components")
        chosen = torch.randperm(p, generator=ctx.generator("gradient_noise components"))[:components].sort().values
    else:
        chosen = torch.tensor(list(components), dtype=torch.int64)
        if not len(chosen) or int(chosen.min()) < 0 or int(chosen.max()) >= p:
            raise InputError(f"places from 0 to {p - 1}", repr(components), where="components")
    mean = flatten(ctx.gradient()).to(device)
    second, fourth = torch.zeros_like(mean), torch.zeros_like(mean)
    kept = []
    for gradients in sample_gradients(ctx):
        kept.append(gradients[:, chosen.to(device)].double().cpu())
        squares = gradients.sub_(mean.to(gradients)).square_()
        second += squares.sum(0, dtype=torch.float64)
        fourth += squares.double().square_().sum(0)  # in single precision fourth powers of small gradients vanish
    n, ranks = ctx.problem.n_train, ctx.problem.ranks
    variance, fourth = ((total / n).cpu() for total in ranks.summed([second, fourth]))
    return GradientNoise(mean.cpu(), float(variance.sum()), chosen, ranks.joined(torch.cat(kept)), variance, fourth)


def noise_spectrum(ctx: Context, k: int = 10) -> Tensor:
    """The k largest eigenvalues of the covariance S of per-sample gradients, in descending order.

    From the Gram matrix of the centred gradients where they fit in memory; else by Lanczos on products with S, each of
    one forward derivative (g_i·u for all samples) and one gradient of a weighted loss.
    """
    n, p = ctx.problem.n_train, count_scalars(ctx.trainable.values())
    if not 1 <= k <= min(n, p):
        raise InputError(f"1 to {min(n, p)} eigenvalues", str(k), where="noise_spectrum")
    if n * p <= KEPT_NUMBERS:
        rows = ctx.problem.ranks.joined(torch.cat([chunk.double().cpu() for chunk in sample_gradients(ctx)]))
        rows -= rows.mean(0)
        gram = (rows @ rows.T if n <= p else rows.T @ rows) / n
        largest: Tensor = torch.linalg.eigvalsh(gram).flip(0)[:k].clamp(min=0)
        return largest
    if k >= p - 1:
        raise InputError(f"fewer than {p - 1} eigenvalues of so large a network", str(k), where="noise_spectrum")
    mean = flatten(ctx.gradient()).cpu()

    def product(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        u = torch.from_numpy(np.ascontiguousarray(array)).reshape(p).double()
        return (_second_moment_product(ctx, u) - mean * (mean @ u)).numpy()

    start = torch.randn(p, generator=ctx.generator("gradient_noise spectrum"), dtype=torch.float64).numpy()
    operator = LinearOperator((p, p), matvec=product, dtype=np.float64)
    values = eigsh(operator, k=k, which="LA", v0=start, return_eigenvectors=False, tol=1e-6)
    return torch.from_numpy(np.sort(values)[::-1].copy())


def _second_moment_product(ctx: Context, u: Tensor) -> Tensor:
    """(1/n) Σ g_i (g_i·u), float64 on the CPU."""
    names = list(ctx.trainable)
    direction = {n: v.to(ctx.params[n]) for n, v in unflatten(u, ctx.trainable).items()}
    total = torch.zeros_like(u)
    for inputs, targets in ctx.share():

        def losses(params: dict[str, Tensor], inputs: Any = inputs, targets: Tensor = targets) -> Tensor:
            return ctx.problem.loss(ctx.forward(inputs, {**ctx.params, **params}), targets)

        leaves = {name: ctx.params[name].detach().requires_grad_() for name in names}
        with torch.enable_grad():
            along = jvp(losses, ({n: v.detach() for n, v in leaves.items()},), (direction,))[1].detach()  # (n,)
            weighted = (losses(leaves) * along).sum()
            parts = torch.autograd.grad(weighted, list(leaves.values()), materialize_grads=True)
        total += flatten(dict(zip(names, parts, strict=True))).double().cpu()
    n = ctx.problem.n_train
    ctx.charge_passes("forward", 2 * n)
    ctx.charge_passes("backward", n)
    return ctx.problem.ranks.summed([total])[0] / n
