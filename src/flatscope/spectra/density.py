"""SpectralDensity: how the eigenvalues of a matrix are spread, an estimate with its uncertainty."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor

from flatscope.charts import label_powers, resized_figure
from flatscope.curvature import brackets
from flatscope.errors import InputError
from flatscope.formatting import readable_number
from flatscope.result import DrawnResult, checked_columns
from flatscope.significance import checked_confidence, wilson
from flatscope.spectra.eigenpairs import finite_differences_in_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GRID = 801
FIGURE = (6.0, 3.4)  # inches
CAPTION, CAPTION_SIZE = 64, 8.0  # letters of a line above a picture of that width, and their points
BLUR = 1 / 200  # default width of a bump, as a share of the spectrum's range
CONVERGED = 1e-3
OUTSIDE = 0.05
RESOLUTION = 1e-3  # of the largest eigenvalue in size: nearer to zero than that is called near zero
MATRIX_WORDS = {"hessian": "Hessian", "gauss_newton": "Gauss-Newton matrix"}


class Share(NamedTuple):
    """A share of the eigenvalues and its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """The interval in per cent; one number where its ends are hardly apart."""
        low, high = (readable_number(100 * end, 2 if end < 0.995 else 3) for end in (self.low, self.high))
        return f"{low} %" if low == high else f"{low} % to {high} %"


@dataclass(frozen=True, eq=False, repr=False)
class SpectralDensity(DrawnResult):
    """Density of the eigenvalues of a Hessian or a Gauss-Newton matrix, from random starts of a Lanczos process.

    Attributes:
        draw: number of the random start that each node belongs to, (m,).
        nodes: places on the axis of eigenvalues, (m,), float64.
        weights: share of the eigenvalues near each node by its own start, (m,); those of a start sum to one.
        residuals: within this distance of a node there is an eigenvalue, (m,).
        size: number of eigenvalues, p.
        layer: the layer whose block it is; empty for all trainable parameters.
        curvature: "hessian" or "gauss_newton".
        meta: provenance: seed, steps, versions, passes, seconds.

    Example:
        >>> import torch, flatscope as fs
        >>> problem = fs.Problem(torch.nn.Linear(3, 2), train=(torch.eye(3), torch.tensor([0, 1, 0])))
        >>> density = fs.spectral_density(problem, draws=2)
        >>> density.size, round(float(density.weights[density.draw == 0].sum()), 6)
        (8, 1.0)
    """

    draw: Tensor
    nodes: Tensor
    weights: Tensor
    residuals: Tensor
    size: int
    layer: str
    curvature: str
    meta: dict[str, Any] = field(default_factory=dict)

    WORD = "density"
    COLUMNS = {"draw": "int64", "node": "float64", "weight": "float64", "residual": "float64"}  # noqa: RUF012

    @property
    def draws(self) -> int:
        """Number of random starts."""
        return int(self.draw.max()) + 1

    @property
    def range(self) -> tuple[float, float]:
        """Smallest and largest node."""
        return float(self.nodes.min()), float(self.nodes.max())

    @property
    def width(self) -> float:
        """Default width of the bump that each node is blurred to: a 200th of the range."""
        low, high = self.range
        return (high - low) * BLUR or max(abs(high), 1.0) * BLUR

    @cached_property
    def outliers(self) -> Tensor:
        """Eigenvalues that stand out and were met by the process (to 0.1 % of the largest in size), falling."""
        first = self.draw == 0
        nodes, residuals = self.nodes[first], self.residuals[first]
        largest = float(nodes.abs().max())
        return nodes[(residuals <= CONVERGED * largest) & (nodes.abs() >= OUTSIDE * largest)].sort(descending=True)[0]

    @property
    def trace(self) -> tuple[float, float]:
        """Trace of the matrix and its standard error, from the same products.

        Where few eigenvalues dominate, few draws seldom meet them and then spread too little. The error is therefore at
        least that of a uniform direction v: vᵀHv has the variance 2 (|H|² - tr²/p) / (p (p + 2)), with the Frobenius
        norm |H|, in which the outliers are known.
        """
        each = self.size * self._per_draw(self.nodes[:, None])[:, 0]  # (draws,)
        squares = self.size * float(self._per_draw(self.nodes.square()[:, None]).mean())
        squares = max(squares, float(self.outliers.square().sum()))
        variance = 2 * self.size / (self.size + 2) * max(0.0, squares - float(each.mean()) ** 2 / self.size)
        spread = float(each.var()) if len(each) > 1 else 0.0
        return float(each.mean()), math.sqrt(max(spread, variance) / len(each))

    @property
    def radius(self) -> float:
        """Largest size of an eigenvalue that counts as near zero: a thousandth of the largest."""
        return RESOLUTION * max(map(abs, self.range))

    def negative(self, radius: float | None = None, *, confidence: float = 0.95) -> Share:
        """Share of the eigenvalues below −radius, with its interval.

        Args:
            radius: nearer to zero the sign is left open, as most eigenvalues of large networks are there; by default
                that of `radius`.
            confidence: of the interval.
        """
        return self.share_below(-self._checked_radius(radius), confidence=confidence)

    def near_zero(self, radius: float | None = None, *, confidence: float = 0.95) -> Share:
        """Share of the eigenvalues from −radius to radius, with its interval.

        Args:
            radius: by default that of `radius`.
            confidence: of the interval.
        """
        reach = self._checked_radius(radius)
        inner, outer = self._share_bounds_by_draw(-reach), self._share_bounds_by_draw(reach)
        least = (outer[:, 0] - inner[:, 1]).clamp_min(0)
        return self._share_with_interval(least, outer[:, 1] - inner[:, 0], confidence)

    def share_below(self, value: float, *, confidence: float = 0.95) -> Share:
        """Share of the eigenvalues below a place, with its interval.

        A process of some products leaves open how much lies below a place, more so inside of a dense cloud; the
        interval is what it leaves open for any spectrum, wider by what random starts differ. That is known from the
        share itself: a random vector's square in a share f of all directions has the variance 2 f (1 − f) / (p + 2).

        Args:
            value: the place.
            confidence: of the interval.
        """
        bounds = self._share_bounds_by_draw(value)
        return self._share_with_interval(bounds[:, 0], bounds[:, 1], confidence)

    def _checked_radius(self, radius: float | None) -> float:
        if radius is not None and not 0 <= radius < math.inf:
            raise InputError("a number from 0 up", str(radius), where="radius")
        return self.radius if radius is None else radius

    def _share_bounds_by_draw(self, place: float) -> Tensor:
        """Least and largest share of every start below a place, which rounding may have moved, (draws, 2)."""
        moved, shares = float(self.meta.get("rounding", 0.0)), []
        for draw in range(self.draws):
            of_draw = self.draw == draw
            rule = self.nodes[of_draw], self.weights[of_draw], self.residuals[of_draw]
            low, high = (brackets.share_below(*rule, place + side * moved) for side in (-1, 1))
            shares.append([low[0], high[1]])
        return torch.tensor(shares, dtype=torch.float64)

    def _share_with_interval(self, least: Tensor, most: Tensor, confidence: float) -> Share:
        checked_confidence(confidence)
        low, high, count = float(least.mean()), float(most.mean()), (self.size + 2) * self.draws / 2
        inside, outside = (wilson(share * count, count, confidence=confidence) for share in (low, high))
        return Share((low + high) / 2, inside[0], outside[1])

    def grid(self, points: int = GRID) -> Tensor:
        """Places from just below the smallest to just above the largest node."""
        low, high = self.range
        return torch.linspace(low - 5 * self.width, high + 5 * self.width, points, dtype=torch.float64)

    def smoothed(self, grid: Tensor | None = None, width: float | None = None) -> Tensor:
        """The density on a grid, each node blurred to a Gaussian of that width; it integrates to one.

        Args:
            grid: places (g,); by default those of `grid()`.
            width: standard deviation of the Gaussians; by default a 200th of the range.
        """
        return self._smooth_draws(grid, width).mean(0)

    def band(
        self, grid: Tensor | None = None, width: float | None = None, *, confidence: float = 0.95
    ) -> tuple[Tensor, Tensor]:
        """Lower and upper end of a confidence interval of the blurred density at each place, over the draws.

        Student's interval of the mean over draws, cut at zero: how much random starts leave open, place by place.

        Args:
            grid: places (g,).
            width: of the Gaussians.
            confidence: between 0 and 1.
        """
        if not 0 < confidence < 1:
            raise InputError("a confidence between 0 and 1", str(confidence), where="band")
        each = self._smooth_draws(grid, width)  # (draws, g)
        if len(each) < 2:
            raise InputError("at least two draws", "one", where="band", fix="Take more with spectral_density(draws=…)")
        half = float(stats.t.ppf((1 + confidence) / 2, len(each) - 1)) * each.std(0) / math.sqrt(len(each))
        return (each.mean(0) - half).clamp_min(0), each.mean(0) + half

    def plot(self, ax: Axes | None = None, *, grid: Tensor | None = None, width: float | None = None) -> Any:
        """Draw the density on a logarithmic scale with its 95 % band; outliers as triangles on the axis.

        Args:
            ax: where to draw; a figure of its own without any.
            grid: places (g,).
            width: of the Gaussians.
        """
        if ax is None:
            return self.figure()
        places = self.grid() if grid is None else grid
        density = self.smoothed(places, width)
        floor = self.floor(density)
        ax.plot(places.numpy(), density.clamp_min(floor).numpy(), color="#0072B2", linewidth=1.3)
        if self.draws > 1:
            low, high = (end.clamp_min(floor).numpy() for end in self.band(places, width))
            ax.fill_between(places.numpy(), low, high, color="#0072B2", alpha=0.2, linewidth=0)
        marks = self.outliers.numpy()
        ax.plot(marks, np.full(len(marks), floor), "v", color="#D55E00", markersize=5, clip_on=False, linestyle="")
        ax.set_yscale("log")
        label_powers(ax.yaxis)
        ax.set_ylim(floor, None)
        ax.axvline(0, color="0.6", linewidth=0.8, zorder=0)
        ax.set_xlabel("eigenvalue")
        ax.set_ylabel("density")
        ax.spines[["top", "right"]].set_visible(False)
        return ax

    def figure(self, *, width: float | None = None, font_size: float | None = None, caption: bool = True) -> Figure:
        """The density with its band and outliers.

        Args:
            width: inches, such as the width of a column of a paper; the height follows.
            font_size: points of labels, such as those of the paper.
            caption: whether to say above it what it shows.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=FIGURE, layout="constrained")
        ax = figure.add_subplot()
        self.plot(ax)
        resized_figure(figure, width, font_size)
        if caption:
            size = font_size or CAPTION_SIZE
            letters = CAPTION * figure.get_size_inches()[0] / FIGURE[0] * CAPTION_SIZE / size
            ax.set_title("\n".join(wrap(self.caption(), max(12, int(letters)))), loc="left", fontsize=size)
        return figure

    def caption(self) -> str:
        """Caption of the picture: the matrix, the band, the marks."""
        of = f" of layer {self.layer}" if self.layer else ""
        band = ", band: 95 %" if self.draws > 1 else ""
        marks = f", triangles: {len(self.outliers)} that stand out" if len(self.outliers) else ""
        return f"{self.size:,} eigenvalues of the {MATRIX_WORDS[self.curvature]}{of}{band}{marks}"

    def floor(self, density: Tensor) -> float:
        """The lowest density worth drawing: a third of one eigenvalue's bump, at most a millionth of the peak."""
        one = 1 / (self.size * self.width * math.sqrt(2 * math.pi))
        return min(one / 3, 1e-6 * float(density.max()))

    def headline_lines(self) -> list[str]:
        """Sentences on negative curvature, on how few directions hold the curvature, and what to make of it."""
        negative, flat, (low, high) = self.negative(), self.near_zero(), self.range
        if negative.low > 0:
            down = (
                f"The loss curves down along {negative} of the directions: this is a saddle or training goes on; "
                "the first line of fs.measure says which."
            )
        elif low < -self.radius:
            down = f"The loss curves down somewhere (to {readable_number(low, 3)}), along {negative} of the directions."
        else:
            down = (
                f"No direction with clearly negative curvature was met (the lowest node is {readable_number(low, 3)})."
            )
        lines = [down] if self.curvature == "hessian" else []
        lines.append(
            f"{flat} of the eigenvalues are near zero; {len(self.outliers)} stand out, "
            f"up to {readable_number(high, 3)}."
        )
        worth = "Eigenvalues belong to the weights as written, and change with a rescaling that changes no output."
        stable = high > 0 and not self.layer
        use = (
            f"Gradient descent from here is stable up to a rate of about {readable_number(2 / high, 2)}."
            if stable
            else ""
        )
        differences = self.meta.get("finite_difference")
        return [
            line for line in (*lines, finite_differences_in_words(differences) if differences else worth, use) if line
        ]

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Numbers of the spectrum, a row each."""
        trace, error = self.trace
        low, high = self.range
        kind = MATRIX_WORDS[self.curvature]
        standing_out = ", ".join(readable_number(float(value)) for value in self.outliers[:10])
        return ["spectral density", ""], [
            ["matrix", f"{kind}, {self.size:,} eigenvalues" + (f", layer {self.layer}" if self.layer else "")],
            ["from", f"{self.draws} random starts, {len(self.nodes) / self.draws:.0f} products each"],
            ["smallest and largest", f"{readable_number(low)} … {readable_number(high)}"],
            ["outliers", standing_out + (" …" if len(self.outliers) > 10 else "")],
            ["trace", f"{readable_number(trace)} ± {readable_number(error, 2)}"],
            ["negative", f"{self.negative()}, below {readable_number(-self.radius, 2)}"],
            ["near zero", f"{self.near_zero()}, within ±{readable_number(self.radius, 2)}"],
        ]

    def to_frame(self) -> pd.DataFrame:
        """One row per node: draw, node, weight, residual."""
        columns = (self.draw, self.nodes, self.weights, self.residuals)
        return pd.DataFrame({name: c.numpy() for name, c in zip(self.COLUMNS, columns, strict=True)})

    def _head(self) -> dict[str, Any]:
        return {"size": self.size, "layer": self.layer, "curvature": self.curvature, "meta": self.meta}

    @classmethod
    def _from_rows(cls, frame: pd.DataFrame, head: Any) -> Self:
        frame = checked_columns(frame, cls.COLUMNS, cls.WORD)
        draw, nodes, weights, residuals = (torch.tensor(frame[name].to_numpy()) for name in cls.COLUMNS)
        return cls(draw, nodes, weights, residuals, head["size"], head["layer"], head["curvature"], head["meta"])

    def _per_draw(self, values: Tensor) -> Tensor:
        """Weighted sums of (m, g) over each start's own nodes: (draws, g)."""
        sums = values.new_zeros(self.draws, values.shape[1])
        return sums.index_add(0, self.draw, self.weights[:, None] * values)

    def _smooth_draws(self, grid: Tensor | None, width: float | None) -> Tensor:
        places = self.grid() if grid is None else grid.double()
        blur = self.width if width is None else width
        if not blur > 0:
            raise InputError("a width above 0", str(width), where="smoothed")
        scaled = (places[None, :] - self.nodes[:, None]) / blur  # (m, g)
        return self._per_draw(torch.exp(-0.5 * scaled.square()) / (blur * math.sqrt(2 * math.pi)))
