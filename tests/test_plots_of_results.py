"""Every result is drawn, shown and saved in the same way, in the size that a paper asks for."""

from __future__ import annotations

import contextlib
import io
import math
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib import rcParams
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text
from torch import nn

import flatscope as fs
from flatscope.charts import Bars, Curves, figure_of_chart
from flatscope.result import DRAWN, DrawnResult, Result


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


DATA = (torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2)


def problem() -> fs.Problem:
    return fs.Problem(network(), train=DATA)


def stability() -> fs.Stability:
    model, recorder = network(), fs.StabilityRecorder(DATA)
    for step in range(3):
        recorder.record(model, step, lr=0.1)
    return recorder.stability


def population() -> fs.PopulationFrame:
    frame = {"lr": [0.1, 0.1, 0.2, 0.2], "margin": [1.0, 2.0, math.nan, 4.0], "gap": [0.4, 0.3, 0.2, 0.1]}
    return fs.PopulationFrame(pd.DataFrame(frame))


def atlas() -> fs.Atlas:
    draw = np.random.default_rng(0).normal
    rows = [
        {"network": k, "epoch": e, "gap": g, "margin": (5 - e) * g + draw()}
        for k, g in enumerate(draw(size=20))
        for e in (1, 9)
    ]
    return fs.atlas(pd.DataFrame(rows), kinds=["spearman"], resamples=100)


def rounded() -> fs.Rounded:
    found = fs.sensitivity(problem(), bits=(8, 4), sparsity=())
    return found.apply(network(), found.allocate(mean_bits=6))


MADE: dict[type[Any], Callable[[], Any]] = {
    fs.Table: lambda: fs.measure(problem(), ["margin", "l2_norm", "rho"]),
    fs.Audit: lambda: fs.audit(problem(), ["l2_norm", "margin"], by=("unit",), trials=1),
    fs.Comparison: lambda: fs.compare({"a": network(), "b": network(1)}, DATA, names=["l2_norm", "gradient_norm"]),
    fs.Surface: lambda: fs.landscape(problem(), grid=3),
    fs.Simplex: lambda: fs.interpolate([network(), network(1)], DATA, resolution=3),
    fs.SpectralDensity: lambda: fs.spectral_density(problem(), draws=2),
    fs.Eigenpairs: lambda: fs.eigenpairs(problem(), 2),
    fs.Explanation: lambda: fs.explain(problem()),
    fs.Leaderboard: lambda: fs.benchmark(["l2_path_norm", "l2_norm"]),
    fs.Stability: stability,
    fs.PopulationFrame: population,
    fs.Population: lambda: fs.train_population(lambda trial: network(), [{"epochs": 1, "lr": 0.1}] * 2, DATA),
    fs.Atlas: atlas,
    fs.Sensitivity: lambda: fs.sensitivity(problem(), bits=(8, 4), sparsity=()),
    fs.Forecast: lambda: fs.forecast(problem(), network(1)),
    fs.Diagonal: lambda: fs.diagonal(problem()),
    fs.Allocation: lambda: fs.sensitivity(problem(), bits=(8, 4), sparsity=()).allocate(mean_bits=6),
    fs.Rounded: rounded,
}
EACH = pytest.mark.parametrize("kind", MADE, ids=lambda kind: kind.__name__)


def below(kind: type[Any]) -> set[type[Any]]:
    return {kind}.union(*(below(child) for child in kind.__subclasses__()))


def test_the_list_has_every_class_of_results() -> None:
    own = {kind for kind in below(Result) if kind.__module__.startswith("flatscope.")}
    assert own - {Result, DrawnResult} == set(MADE)


@EACH
def test_a_result_is_drawn_shown_and_saved_as_all_are(kind: type[Any], tmp_path: Path) -> None:
    result = MADE[kind]()
    assert isinstance(result, kind)
    assert isinstance(result.plot(), Figure)
    own = Figure()
    result.plot(own.subplots())
    assert own.axes[0].has_data() or own.axes[0].get_children()
    text = io.StringIO()
    result.show(text)
    assert text.getvalue() == f"{result!r}\n"
    assert set(DRAWN) <= set(kind.ENDINGS)
    result.save(tmp_path / "wide.png")
    result.save(tmp_path / "column.png", width=3.3, font_size=8)
    assert imread(tmp_path / "column.png").shape[1] == 660  # 3.3 inches of 200 dots
    result.save(tmp_path / "column.pdf", width=3.3)
    data = next(ending for ending in kind.ENDINGS if ending not in DRAWN)
    with pytest.raises(fs.InputError, match="a picture"):
        result.save(tmp_path / f"numbers{data}", width=3.3)
    with pytest.raises(fs.InputError, match=r"ending in .*\.png"):
        result.save(tmp_path / "result.docx")


@pytest.mark.parametrize("size", [6.0, 12.0])
def test_letters_have_the_size_that_was_asked_for(size: float) -> None:
    figure = fs.measure(problem(), ["margin", "l2_norm"]).figure(width=4.0, font_size=size)
    figure.canvas.draw()
    ax = figure.axes[0]
    assert figure.get_size_inches()[0] == 4.0
    assert {ax.xaxis.label.get_fontsize(), *(text.get_fontsize() for text in ax.get_yticklabels())} == {size}
    assert {text.get_fontsize() for text in figure.findobj(Text) if text.get_text()} == {size}


def test_a_spectrum_has_letters_of_one_size_exponents_and_caption_included(tmp_path: Path) -> None:
    found = fs.spectral_density(problem(), draws=2, steps=6)
    figure = found.figure(width=3.3, font_size=8)
    figure.canvas.draw()
    shown = [text for text in figure.findobj(Text) if text.get_text()]
    assert {text.get_fontsize() for text in shown} == {8}
    assert not [text.get_text() for text in shown if "$" in text.get_text()]  # a formula has small exponents
    # The caption is not cut off.
    assert figure.axes[0]._left_title.get_window_extent().x1 <= figure.bbox.x1  # type: ignore[attr-defined]
    found.save(tmp_path / "column.pdf", width=3.3, font_size=8)
    assert sizes_in(tmp_path / "column.pdf") == {8.0}


def sizes_in(pdf: Path) -> set[float]:
    """Sizes of the letters that a PDF sets."""
    sizes: set[float] = set()
    for part in re.findall(rb"stream\r?\n(.*?)endstream", pdf.read_bytes(), re.DOTALL):
        with contextlib.suppress(zlib.error):
            sizes |= {float(size) for size in re.findall(rb"/F\d+ ([\d.]+) Tf", zlib.decompress(part))}
    return sizes


@pytest.mark.parametrize("kind", ["plane", "line", "spectrum", "table", "simplex"])
def test_pictures_for_papers_embed_no_type_3_font(kind: str, tmp_path: Path) -> None:
    at, other = problem(), network(1)
    found: Any = {
        "plane": lambda: fs.landscape(at, grid=3),
        "line": lambda: fs.landscape(at, dimensions=1, grid=3),
        "spectrum": lambda: fs.spectral_density(at, draws=2, steps=6),
        "table": lambda: fs.measure(at, ["margin", "l2_norm"]),
        "simplex": lambda: fs.interpolate([at.model, other], DATA, resolution=2),
    }[kind]()
    before = rcParams["pdf.fonttype"]
    found.save(tmp_path / "sized.pdf", width=3.25, font_size=7)
    found.save(tmp_path / "plain.pdf")
    for name in ("sized.pdf", "plain.pdf"):
        content = (tmp_path / name).read_bytes()
        assert b"/Type3" not in content
        assert b"/CIDFontType2" in content
    assert rcParams["pdf.fonttype"] == before


@pytest.mark.parametrize(("name", "value"), [("width", 0), ("width", 1000), ("font_size", -1), ("font_size", "8")])
def test_sizes_that_make_no_sense_are_refused(name: str, value: Any) -> None:
    with pytest.raises(fs.InputError, match=name):
        fs.measure(problem(), "margin").figure(**{name: value})


def test_charts_show_what_they_are_given() -> None:
    ax = figure_of_chart(Bars(["one", "two"], {"a": [1.0, 1000.0], "b": [math.nan, math.inf]}, {"a": [0.1, 1]})).axes[0]
    assert ax.get_xscale() == "log"
    assert [text.get_text() for text in ax.get_yticklabels()] == ["one", "two"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b"]
    curves = figure_of_chart(Curves({"a": ([1, 2], [3.0, 4.0])}, "step", "loss", {"edge": 2.0})).axes[0]
    assert (curves.get_xlabel(), curves.get_ylabel(), len(curves.get_lines())) == ("step", "loss", 2)


def test_a_density_marks_zero_and_says_what_it_shows() -> None:
    density = fs.spectral_density(problem(), draws=2)
    ax = density.figure().axes[0]
    assert any(np.allclose(np.asarray(line.get_xdata(), dtype=float), 0) for line in ax.get_lines())
    assert ax.get_title(loc="left").replace("\n", " ") == density.caption()
    assert not density.figure(caption=False).axes[0].get_title(loc="left")
    assert "26 eigenvalues of the" in density.caption()
