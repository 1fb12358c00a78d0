"""Landscapes, unit profiles and the two criteria in the report and in its figures, without a browser."""

from __future__ import annotations

import base64
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from networks import mlp
from test_report import Page, row, table

import flatscope as fs
from flatscope.formatting import as_percent
from flatscope.landscapes.surface import Surface
from flatscope.reports.figures import measured_plots
from flatscope.reports.items import read_item
from flatscope.reports.page import page_text, save_figures
from flatscope.reports.surfaces import HOLE, Scale, height_scale, planes_by_network
from flatscope.table import Table

pytestmark = pytest.mark.long


def bowl(space: str = "weights", *, steep: float = 1.0, grid: int = 9, dimensions: int = 2) -> Surface:
    """A paraboloid of loss over an oblong plane; in path space the points with t₁ > 0.7 are beyond a pole."""
    axes = (torch.linspace(-1, 1, grid, dtype=torch.float64), torch.linspace(-2, 2, grid + 2, dtype=torch.float64))
    axes = axes[:dimensions]
    points = torch.meshgrid(*axes, indexing="ij")
    loss = 0.5 + steep * sum(point.square() for point in points)
    poles = points[0] > 0.7 if space == "psi" else torch.zeros_like(loss, dtype=torch.bool)
    loss[poles] = math.nan
    return Surface(loss, None, axes, 0.5, space, "gaussian", poles, {"seed": 7, "part": "train"})


def canvas(page: Page, n: int = 0) -> dict[str, str | None]:
    return page.all("canvas")[n]


def heights(attributes: dict[str, str | None]) -> np.ndarray:
    """What the script reads: losses by (row of t₂, column of t₁), NaN at holes."""
    raw = np.frombuffer(base64.b64decode(str(attributes["data-heights"])), dtype="<u2").astype(float)
    low, high, log = (float(part) for part in str(attributes["data-scale"]).split())
    places = np.where(raw == HOLE, math.nan, raw / (HOLE - 1))
    values = low * (high / low) ** places if log else low + (high - low) * places
    return values.reshape(-1, int(str(attributes["data-columns"])))


def test_the_script_gets_the_losses_in_their_places() -> None:
    surface = bowl()
    found = heights(canvas(Page(page_text({"net": surface}))))
    assert found.shape == (11, 9)  # rows of t₂, columns of t₁
    assert found == pytest.approx(surface.loss.T.numpy(), abs=1e-4)


def test_fine_grids_are_thinned_for_turning_and_the_page_says_so() -> None:
    surface = bowl(grid=121)
    page = Page(page_text({"net": surface}))
    found = heights(canvas(page))
    assert found.shape == (123, 61)  # 122 steps up have no divisor that would keep both ends and be coarse enough
    assert found[:, [0, -1]] == pytest.approx(surface.loss.T.numpy()[:, [0, -1]], abs=1e-4)
    assert "The surface is drawn with one in 2 points of an axis, the map with all." in page.text()


def test_spaces_share_one_height_scale_and_poles_are_said() -> None:
    items = {"a": [table(), bowl(), bowl("psi")], "b": [table(2.0), bowl(steep=9.0)]}
    text = page_text(items)
    page = Page(text)
    scales = {canvas(page, n)["data-scale"] for n in range(3)}
    assert len(scales) == 1
    low, high, log = (float(part) for part in str(scales.pop()).split())
    assert (low, high, log) == (0.5, pytest.approx(0.5 + 9 * 5), 1.0)
    assert np.isnan(heights(canvas(page, 1))).sum() == 2 * 11
    words = page.text()
    assert "22 % of the points are holes: no network has these path values" in words.replace("\u202f", " ")
    assert "Path space (PSI)" in words
    assert "All planes of this page share one height scale" in words
    assert "a, weight space, landscape" in words  # provenance
    maps = [str(svg["aria-label"]) for svg in page.all("svg") if "Contour map" in str(svg.get("aria-label"))]
    assert [label.partition(".")[0] for label in maps] == [
        "Contour map of a in weight space",  # the pair at the top, in the space that both have
        "Contour map of b in weight space",
        "Contour map of a in path space (PSI)",  # those at the top are not drawn again
    ]
    assert text.index("Contour map of b") < text.index("<canvas")
    assert "hole" in page.text("table")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("flat", lambda loss: loss.fill_(2.0)),
        ("nothing finite", lambda loss: loss.fill_(math.nan)),
        ("infinite", lambda loss: loss[0].fill_(math.inf)),
        ("zero at the bottom", lambda loss: loss.sub_(loss.nan_to_num(nan=9.0).min())),
        ("huge", lambda loss: loss.mul_(1e300)),
        ("negative", lambda loss: loss.sub_(100.0)),
    ],
)
def test_odd_surfaces_make_a_page_and_figures(name: str, change: object, tmp_path: Path) -> None:
    for dimensions in (1, 2):
        surface = bowl("psi", dimensions=dimensions)
        change(surface.loss)  # type: ignore[operator]
        Page(page_text({name: surface}))
        assert save_figures({name: surface}, tmp_path / str(dimensions))


def test_the_page_says_whether_the_network_is_the_lowest_point() -> None:
    surface = bowl()
    low, high = surface.heights
    lead = '<p class="conclusion">net, weight space: loss '
    assert lead in page_text({"net": surface})
    assert "lowest point" not in page_text({"net": surface})
    shifted = replace(surface, loss=surface.loss - 0.1 * (high - low))
    assert "The network is not at its lowest point." in page_text({"net": shifted})


def test_lines_break_at_poles() -> None:
    surface = bowl("psi", dimensions=1)
    surface.loss[3] = math.nan
    assert "Lines break at 3 points" in Page(page_text({"net": surface})).text()


def test_a_real_landscape_is_shown() -> None:
    problem = mlp().problem()
    surfaces = [fs.landscape(problem, grid=5), fs.landscape(problem, "psi", grid=5, noise=1e-4)]
    page = Page(page_text({"net": [fs.measure(problem, "margin"), surfaces]}))
    assert len(page.all("canvas")) == 2
    assert heights(canvas(page))[2, 2] == pytest.approx(surfaces[0].centre, rel=1e-3)


def test_height_scale_and_bands() -> None:
    group = planes_by_network({"n": bowl()})["n"]
    assert height_scale(group) == Scale(0.5, 5.5, False)
    steep = height_scale(planes_by_network({"n": bowl(steep=100.0)})["n"])
    assert steep.log
    assert steep.low <= steep.ticks()[0] < steep.ticks()[-1] <= steep.high
    places = Scale(0.5, 5.5)(np.array([[0.5, math.nan], [5.5, 3.0]]))
    assert np.array_equal(places, [[0.0, math.nan], [1.0, 0.5]], equal_nan=True)


def units_table(scale: float = 1.0, n: int = 40) -> Table:
    values = scale * np.geomspace(1e-3, 1, n)
    rows = [row("rho_unit", float(v), layer="fc1", unit=k) for k, v in enumerate(values)]
    return Table([*rows, row("rho_unit", 2.0, layer="fc2", unit=0)])


def test_unit_profiles() -> None:
    tables = {"a": units_table(), "b": units_table(3.0, n=1000)}
    plots = list(measured_plots(tables, {}))
    assert [plot.title for plot in plots] == ["rho_unit · fc1", "rho_unit · fc2"]
    ax, values = plots[0].make().axes[0], np.geomspace(1e-3, 1, 40)
    assert ax.get_yscale() == "log"
    assert np.array_equal(ax.lines[0].get_ydata(), values[::-1])
    ranks = np.asarray(ax.lines[1].get_xdata())
    assert len(ranks) <= 160
    assert (ranks[0], ranks[-1]) == (1, 1000)
    assert [line[1] for line in plots[0].rows] == ["40", "1000"]
    assert plots[0].rows[0][-1] == as_percent(values[-4:].sum() / values.sum())
    page = Page(page_text(tables))
    for title in ("rho_unit · fc1", "rho_unit · fc2"):
        assert title in page.text("p")  # both at the top, and only there
        assert title not in page.text("h3")
    assert "profiles" not in [section["id"] for section in page.all("section")]
    more = Page(page_text({"a": [*tables.values(), criteria_table()]}))
    assert "profiles" in [section["id"] for section in more.all("section")]


def criteria_table(scale: float = 1.0) -> Table:
    rows = []
    for alpha in (0.1, 0.01, 0.001):  # not in order
        rows.append(row("expected_sharpness", scale * alpha, options=f'{{"alpha": {alpha}, "draws": 9}}', stderr=1e-4))
        rows.append(row("pac_bayes_kl", 1 / alpha**2, options=f'{{"alpha": {alpha}}}'))
    return Table([*rows, row("expected_sharpness", math.nan, options='{"alpha": 1.0}', exact=False, reason="no")])


def test_the_two_criteria() -> None:
    (plot,) = measured_plots({"a": criteria_table(2.0)}, {})
    assert [line[1] for line in plot.rows] == ["0.001", "0.01", "0.1"]
    dots = plot.make().axes[0].lines[0]
    assert dots.get_xdata() == pytest.approx([1e6, 1e4, 1e2])
    assert dots.get_ydata() == pytest.approx([0.002, 0.02, 0.2])
    assert [line[-1] for line in plot.rows] == ["0.0001"] * 3
    page = Page(page_text({"a": criteria_table(), "b": criteria_table(2.0)}))
    assert "Expected sharpness against KL divergence" in page.text("p")  # at the top, and only there
    assert "sharpness-and-divergence" not in [plot.stem for plot in measured_plots({"a": table()}, {})]
    assert "KL divergence" not in Page(page_text(table())).text("h3")


def test_figures_of_all_of_it(tmp_path: Path) -> None:
    items = {"a": [criteria_table(), bowl(), bowl("psi"), bowl(dimensions=1)], "b": [units_table(), bowl(steep=4.0)]}
    saved = save_figures(items, tmp_path, ("pdf", "svg"))
    assert {path.stem for path in saved} >= {
        "sharpness-and-divergence", "units-rho_unit-fc1", "units-rho_unit-fc2", "landscape-a-weights",
        "landscape-a-psi", "relief-a-weights", "landscape-b-weights", "relief-b-weights", "landscape-lines",
    }  # fmt: skip
    assert all(path.stat().st_size > 1000 for path in saved)
    again = save_figures(items, tmp_path / "again", "pdf")
    assert {path.stem for path in again} == {path.stem for path in saved}


def test_mixtures_of_networks(tmp_path: Path) -> None:
    networks = [torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)) for _ in range(3)]
    data = (torch.eye(3), torch.tensor([0, 1, 0]))
    triangle, line = fs.interpolate(networks, data, resolution=6), fs.interpolate(networks[:2], data, resolution=6)
    text = page_text({"three": triangle, "two": line})
    page = Page(text)
    assert "interpolation" in [section["id"] for section in page.all("section")]
    assert "three: Loss" in page.text()
    assert "barrier" in page.text()
    saved = save_figures({"three": triangle, "two": line}, tmp_path)
    assert [path.name for path in saved] == ["interpolation-three.png", "interpolation-two.png"]
    triangle.save(tmp_path / "mixed.npz")
    assert isinstance(read_item(str(tmp_path / "mixed.npz"))[0][1], type(triangle))
    triangle.loss[5] = math.nan
    assert "some mixtures have no finite loss" in Page(page_text({"three": triangle})).text()
