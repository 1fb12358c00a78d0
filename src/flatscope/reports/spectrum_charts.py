"""Spectra on the page: the density of eigenvalues with its band, and those that were found one by one."""

from __future__ import annotations

from collections.abc import Mapping

from flatscope.formatting import number, written
from flatscope.reports.charts import Chart, Colours, Key, PlotLine, line_plot
from flatscope.reports.markup import Part, Section, fragment
from flatscope.spectra.density import SpectralDensity
from flatscope.spectra.pairs import Eigenpairs

GRID = 301
FALLBACK = 6  # colour of a network that no table of the page is about
MATRIX_WORDS = {"hessian": "Hessian", "gauss_newton": "Gauss-Newton matrix"}


def spectra_part(spectra: Mapping[str, SpectralDensity | Eigenpairs], colours: Colours) -> Part:
    """One figure per density or list of eigenvalues."""
    charts, notes = [], []
    for name, found in spectra.items():
        if isinstance(found, SpectralDensity):
            charts.append(_density_chart(name, found, colours))
            notes.append((name, _density_words(found)))
        else:
            charts.append(_pairs_chart(name, found, colours))
            notes.append((name, _pairs_words(found)))
    body = fragment("charts.html", charts=charts, wide=False)
    provenance = {f"{name}, spectrum": found.meta for name, found in spectra.items()}
    summary = fragment("spectrum_summary.html", notes=notes)
    return Part(summary, [Section("spectrum", "Spectrum", body)], provenance)


def _density_words(density: SpectralDensity) -> str:
    trace, error = density.trace
    negative, _ = density.share_below(0.0)
    low, high = density.range
    return (
        f"{density.size:,} eigenvalues of the {MATRIX_WORDS[density.curvature]} from {number(low)} to {number(high)}; "
        f"{len(density.outliers)} of them stand out; trace {number(trace)} ± {number(error, 2)}; "
        f"{100 * negative:.3g} % below zero."
    )


def _pairs_words(pairs: Eigenpairs) -> str:
    missing = int((~pairs.converged).sum())
    return f"largest eigenvalue of the {MATRIX_WORDS[pairs.curvature]} {number(float(pairs.values[0]))}" + (
        f"; {missing} of {len(pairs)} not found to the accuracy asked for." if missing else "."
    )


def _density_chart(name: str, density: SpectralDensity, colours: Colours) -> Chart:
    """Mean over draws, the ends of its band dashed, outliers as dots on the floor of the plot."""
    grid = density.grid(GRID)
    middle = density.smoothed(grid)
    floor, colour = density.floor(middle), colours.get(name, FALLBACK)
    lines = [PlotLine(grid.tolist(), middle.clamp_min(floor).tolist(), f"line c{colour}")]
    legend = [Key("density", colour)]
    if density.draws > 1:
        ends = density.band(grid)
        lines += [PlotLine(grid.tolist(), end.clamp_min(floor).tolist(), f"line c{colour} dashed") for end in ends]
        legend.append(Key("95 % band over draws", colour, dashed=True))
    marked = (colour + 1) % (FALLBACK + 1)
    if len(density.outliers):
        legend.append(Key("eigenvalues that stand out", marked))
        lines += [PlotLine([value], [floor], f"line c{marked}", dotted=True) for value in density.outliers.tolist()]
    return Chart(
        title=name,
        caption=f"Density of eigenvalues, logarithmic scale, each blurred by {number(density.width, 2)}. "
        + _density_words(density),
        legend=legend,
        body=line_plot(lines, f"Density of eigenvalues of {name}. {_density_words(density)}", log_y=True),
        header=["what", "value"],
        rows=[[what, words] for what, words in density.cells()[1]],
    )


def _pairs_chart(name: str, pairs: Eigenpairs, colours: Colours) -> Chart:
    """Eigenvalues by their number, residuals as error bars."""
    values, colour = pairs.values.tolist(), colours.get(name, FALLBACK)
    numbers = list(range(1, len(pairs) + 1))
    line = PlotLine(numbers, values, f"line c{colour}", dotted=True, errors=pairs.residuals.tolist())
    return Chart(
        title=f"{name}: eigenvalues",
        caption=f"By their number, {pairs.products} products. {_pairs_words(pairs).capitalize()}",
        legend=[],
        body=line_plot([line], f"Eigenvalues of {name}. {_pairs_words(pairs)}"),
        header=["number", "eigenvalue", "residual"],
        rows=[
            [str(place), written(value), written(residual)]
            for place, value, residual in zip(numbers, values, pairs.residuals.tolist(), strict=True)
        ],
    )
