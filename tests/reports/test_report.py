"""The report page, its formulas and its figures, without a browser."""

from __future__ import annotations

import math
import os
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from markupsafe import Markup
from matplotlib.figure import Figure
from networks import mlp

import flatscope as fs
from flatscope.auditing import audit
from flatscope.errors import InputError
from flatscope.formatting import with_error, written
from flatscope.headlines import minimum_verdict
from flatscope.network_summary import NOT_LOOKED, STANDING, NetworkSummary
from flatscope.registry import declarations
from flatscope.reports.figures import history_plots, measured_plots
from flatscope.reports.items import by_kind
from flatscope.reports.markup import element, formula_as_mathml
from flatscope.reports.measured import comparison_data, invariance_of_measure, measure_lines
from flatscope.reports.page import page_text, report, save_figures
from flatscope.reports.plots import Plot, figure_from_axes_function, svg_of_plot
from flatscope.table import Table

HOSTILE = "<script>alert('x')</script>\"&"
VOID = {"meta", "link", "input", "img", "br", "wbr", "hr"}


def row(measure: str, value: float, **changes: Any) -> dict[str, Any]:
    plain = {
        "options": "", "layer": "", "unit": None, "sample": None, "stderr": 0.0, "data_stderr": math.nan,
        "low": math.nan, "high": math.nan, "exact": True, "folded": False, "reason": "", "passes": 1.0,
        "seconds": 0.1, "seed": 0, "dtype": "float32", "version": "0",
    }  # fmt: skip
    return {"measure": measure, "value": value, **plain, **changes}


def table(scale: float = 1.0, layer: str = "fc1", **meta: Any) -> Table:
    rows = [
        row("gradient_norm", 2e-4 * scale),
        row("hessian_trace", 12.345 * scale, stderr=0.25, exact=False),
        row("margin", 2.0 / scale),
        row("l2_norm", 50.0 * scale),
        row("l2_norm", 10.0 * scale, layer=layer),
        row("l2_norm", 5.0 * scale, layer="fc2"),
        row("parameter_count", math.nan, exact=False, reason="nothing to count"),
        *(row("functional_margin", value * scale, sample=n) for n, value in enumerate(np.linspace(-1, 3, 50))),
    ]
    return Table(
        rows, {"torch": "2", "seed": 0, "n_train": 50, "loss": "cross_entropy", "passes": {"forward": 2.0}, **meta}
    )


def bounds_table() -> Table:
    return Table([row("parameter_counting", 13.6) | {"vacuous": True, "assumptions": "bits; luck", "confidence": 0.95}])


def history(scale: float = 1.0) -> pd.DataFrame:
    epochs = np.arange(1, 6)
    return pd.DataFrame(
        {"epoch": epochs, "lr": 0.1, "train_loss": scale * np.exp(-epochs.astype(float)), "test_loss": scale / epochs,
         "train_error": [0.5, 0.2, 0.1, 0.0, 0.0], "gradient_norm": math.nan}
    )  # fmt: skip


def figure(title: str = "a line") -> Figure:
    drawn = Figure(figsize=(2, 2))
    ax = drawn.add_subplot()
    ax.plot([1, 2])
    ax.set_title(title)
    ax.set_xlabel("epoch")
    ax.set_ylabel("loss")
    return drawn


class Page(HTMLParser):
    """The elements of a page, after checking that every one that opens also closes in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.words.setdefault(tag, []).append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def text(self, tag: str = "main") -> str:
        return " ".join("".join(self.words.get(tag, [])).split())


def test_an_attribute_ends_where_it_should_whatever_quotes_it_holds() -> None:
    for value in (HOSTILE, Markup("data:<svg a=\"1\" b='2'>")):
        (drawn,) = Page(str(element("img", src=value, hidden=True, title=None, open=False))).elements
        assert drawn == ("img", {"src": value, "hidden": None})


@pytest.fixture(scope="module")
def full_page() -> str:
    networks = {"small batch": [table(), bounds_table(), history()], "large batch": [table(3.0), history(2.0)]}
    return page_text([networks, ("our figure", figure())], title="Two networks", command="flatscope demo --seed 0")


def test_structure(full_page: str) -> None:
    page = Page(full_page)
    assert page.text("title") == page.text("h1") == "Two networks"
    assert [page.all(tag) != [] for tag in ("header", "nav", "main", "footer")] == [True] * 4
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = {str(a["href"])[1:] for a in page.all("a")}
    assert links <= set(ids)
    sections = [section["id"] for section in page.all("section")]
    assert sections == [
        "answer", "comparison", "measures", "profiles", "training", "bounds", "figures", "provenance",
    ]  # fmt: skip
    folded = [details for details in page.all("details") if details.get("class") == "section"]
    assert [("open" in details) for details in folded] == [False] * 5 + [True, False]  # only what others drew is open
    for _, attributes in page.elements:
        for reference in ("aria-labelledby", "aria-controls", "for"):
            assert attributes.get(reference) in (None, *ids)
    headings = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == 1
    assert all(b - a <= 1 for a, b in pairwise(headings))


def test_the_page_says_what_is_known(full_page: str) -> None:
    page = Page(full_page)
    words = page.text()
    assert "12.35 ± 0.25" in words  # value and error end with the same digit
    assert "nothing to count" in words
    assert "gradient norm 0.0002, which has no scale" in words
    assert "Yi et al. 2019" in words
    assert "flatscope demo --seed 0" in page.text("pre")
    assert "forward 2" in words
    assert "Vacuous: parameter_counting." in words
    assert len(page.all("math")) == 6  # one per measure; the bound is vacuous and only named
    sortable = [th for th in page.all("th") if "aria-sort" in th]
    assert len(sortable) == 6
    pictures = [svg for svg in page.all("svg") if svg.get("role") == "img"]
    assert all(svg["aria-label"] for svg in pictures)
    assert len(pictures) == 5  # each once: the ratios, a histogram, a layer profile, two training curves
    assert len({svg["aria-label"] for svg in pictures}) == 5
    assert [image["alt"] for image in page.all("img")] == ["our figure: loss over epoch"]


def test_the_page_says_each_thing_with_one_word(full_page: str) -> None:
    words = Page(full_page).text()
    assert "`" not in words
    assert "• 1." not in words
    for other in ("unchanged by", "stands still", "unmoved", "leaves alone", "0 of these 0"):
        assert other not in words.lower()


def test_nothing_is_loaded_from_elsewhere(full_page: str) -> None:
    page = Page(full_page)
    for _, attributes in page.elements:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            assert re.match(r"data:|#|$", attributes.get(name) or "")
    assert "http://" not in full_page
    assert "https://" not in full_page
    assert not re.search(r"@import|url\((?!#)", full_page)
    policy = next(m for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy")["content"]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_size_does_not_grow_with_samples() -> None:
    many = Table([row("functional_margin", float(v), sample=n) for n, v in enumerate(np.sin(np.arange(20_000)))])
    assert len(page_text(many)) < 80_000


def test_hostile_names_are_text(tmp_path: Path) -> None:
    items = {HOSTILE: [table(layer=HOSTILE, **{HOSTILE: HOSTILE}), history()], "other": table(2.0, layer=HOSTILE)}
    text = page_text([items, (HOSTILE, figure())], title=HOSTILE, command=HOSTILE)
    page = Page(text)
    assert len(page.all("script")) == 1
    assert page.text("title") == HOSTILE
    assert "<script>alert" not in text
    odd = Table([row(HOSTILE, 1.0, options='{"<b>": "<i>"}', reason=HOSTILE, exact=False, layer=HOSTILE)])
    assert "<script>alert" not in page_text(odd)
    assert all(path.parent == tmp_path for path in save_figures([items, ("../../up", figure())], tmp_path))


@pytest.mark.parametrize(
    "items",
    [
        Table([]),
        Table([row("margin", math.nan, exact=False, reason="no classes")]),
        Table([row("margin", math.inf), row("hessian_trace", -math.inf), row("unheard_of", 1.0)]),
        Table([row("functional_margin", 1.0, sample=0)]),
        Table([row("l2_norm", math.nan, layer="a"), row("l2_norm", -3.0, layer="b", stderr=1.0)]),
        history().set_index("epoch"),
        history().head(1),
        history().assign(train_loss=math.nan, test_loss=[1.0, math.inf, math.nan, 2.0, 3.0]),
        {str(n): table(1.0 + n) for n in range(9)},
    ],
    ids=["empty", "nan", "infinite", "one sample", "odd layers", "indexed", "one epoch", "diverged", "nine networks"],
)
def test_odd_contents_make_a_page(items: object) -> None:
    Page(page_text(items))


def test_one_network_without_gradient_says_so() -> None:
    words = Page(page_text(Table([row("margin", 1.0)]))).text()
    assert NOT_LOOKED in words
    assert "How flat is this minimum?" in words


@pytest.mark.parametrize(
    "items", [3, "table", [table(), object()], pd.DataFrame({"a": [1]}), table().to_frame(), [], {}]
)
def test_what_cannot_be_shown_is_refused(items: object, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Accepted .*a Table of measures; .*a Table of bounds; .* Matplotlib Figure"):
        report(items, tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "deep" / "report.html"
    assert report(table(), target) == target
    first = target.read_text(encoding="utf-8")
    assert first.startswith("<!doctype html>")
    monkeypatch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(InputError, match="disk full"):
        report(table(2.0), target)
    assert target.read_text(encoding="utf-8") == first
    assert list(target.parent.iterdir()) == [target]


def test_unwritable_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file" / "report.html", tmp_path):
        with pytest.raises(InputError):
            report(table(), place)
    assert sorted(os.listdir(tmp_path)) == ["file"]
    with pytest.raises(InputError):
        save_figures(table(), tmp_path / "file")


def test_items_are_sorted_and_named() -> None:
    kinds = by_kind([table(), table(), ("named", table()), table(name="mine"), bounds_table(), history(), figure("t")])
    assert list(kinds["measures"]) == ["network 1", "network 2", "named", "mine"]
    assert list(kinds["bounds"]) == ["network"]
    assert list(kinds["figures"]) == ["t"]
    assert len(by_kind([("a", table()), ("a", table()), ("a 2", table())])["measures"]) == 3  # none is lost


@pytest.mark.parametrize("kind", ["measure", "bound"])
def test_every_declared_symbol_becomes_mathml(kind: str) -> None:
    for entry in declarations(kind).values():
        assert str(formula_as_mathml(entry.symbol)).startswith("<math "), entry.name


@pytest.mark.parametrize(
    ("latex", "expected"),
    [
        (r"x_i^2", "<msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup>"),
        (r"\frac12", "<mfrac><mn>1</mn><mn>2</mn></mfrac>"),
        (r"\sum_{i=1}^n", "<mo>∑</mo><mrow><mi>i</mi><mo>=</mo><mn>1</mn></mrow><mi>n</mi>"),
        (r"\mathbb{R}", "<mi>ℝ</mi>"),
        (r"\mathcal L", "<mi>ℒ</mi>"),
        (r"\mathbf{w}", "<mi>𝐰</mi>"),
        (r"\varepsilon - 1", "<mi>ε</mi><mo>−</mo><mn>1</mn>"),
        (r"\text{</math><script>}", "&lt;/math&gt;&lt;script&gt;"),
    ],
)
def test_formula(latex: str, expected: str) -> None:
    found = str(formula_as_mathml(latex))
    assert expected in found
    assert found.startswith("<math alttext=")


@pytest.mark.parametrize("latex", [r"\unheardof{x}", "{x", "x}", "x^", r"\frac{1}", r"\text{\alpha}", r"\left x"])
def test_formula_falls_back_to_its_source(latex: str) -> None:
    assert str(formula_as_mathml(latex)).startswith('<code class="tex">')


@pytest.mark.parametrize("latex", [r"\href{javascript:alert(1)}{x}", r"\style{color:red}{y}", r"\class{a}{b}"])
def test_formulas_lead_nowhere(latex: str) -> None:
    found = str(formula_as_mathml(latex))
    assert all(f"{name}=" not in found.partition(">")[2] for name in ("href", "style", "class"))


def test_numbers_for_people() -> None:
    assert written(1.5e-7) == "1.5×10⁻⁷"
    assert written(-1234567.0) == "−1\u202f234\u202f567"
    assert written(math.inf) == "∞"
    assert written(math.nan) == "n/a"
    assert with_error(12.3456, 0.0) == ("12.35", "")
    assert with_error(12.3456, 0.271) == ("12.35", "0.27")
    assert with_error(1.23456e-9, 2.1e-11) == ("1.235×10⁻⁹", "2.1×10⁻¹¹")


def test_invariance_follows_the_declarations() -> None:
    known = declarations()
    assert invariance_of_measure(known["margin"]) == "all"
    assert invariance_of_measure(known["l2_norm"]) == "some"
    assert invariance_of_measure(known["hessian_trace"]) == "none"
    assert invariance_of_measure(None) == "unknown"


def verdict(rows: list[dict[str, Any]]) -> tuple[str, str]:
    table = Table(rows)
    return minimum_verdict(table.to_frame(), table.meta)


@pytest.mark.parametrize(("fall", "level"), [(1e-4, "yes"), (1e-3, "nearly"), (0.05, "no"), (math.nan, "unknown")])
def test_minimum_verdict(fall: float, level: str) -> None:
    stands = NetworkSummary("", 1, 0.3, 0.0, math.nan, math.nan, True, 1.0, fall=fall, constant=1.0)
    table = Table([row("gradient_norm", 1.0)], {STANDING: stands.to_dict()})
    found, words = minimum_verdict(table.to_frame(), table.meta)
    assert found == level
    assert ("lowers the training loss from 0.3 to 0.25" in words) is (level == "no")
    assert ("which has no scale" in words) is (level == "unknown")
    brief = minimum_verdict(table.to_frame(), table.meta, briefly=True)
    assert brief[0] == level
    assert len(brief[1]) < 90
    assert (f"{100 * fall:g} % of a constant's" in brief[1]) is (level != "unknown")


def test_minimum_verdict_sees_downward_curvature() -> None:
    def words(smallest: float) -> str:
        spectrum = [row("hessian_max_eigenvalue", 7.0), row("hessian_min_eigenvalue", smallest)]
        return verdict([row("gradient_norm", 1e-4), *spectrum])[1]

    assert "curves down somewhere (eigenvalue −0.05)" in words(-0.05)
    assert "curves down" not in words(-1e-6)  # rounding
    assert "curves down" not in words(0.1)


def test_options_are_lines_of_their_own() -> None:
    first = Table([row("margin", 1.0), row("margin", 2.0, options='{"epsilon": 0.1}')])
    second = Table([row("margin", 3.0)])
    found = measure_lines({"a": first, "b": second})
    assert [line.label for line in found] == ["margin", "margin[epsilon=0.1]"]
    assert found[1].cells[1] is None


def test_comparison_data() -> None:
    rows = [row("rho_sum", 4.0, stderr=0.4, exact=False), row("psi_trace", 2.0), row("l1_path_norm", 1.0),
            row("l2_path_norm", 3.0), row("parameter_count", 7.0), row("l2_norm", 1.0),
            row("margin", 1.0), row("margin", 5.0, options='{"epsilon": 0.1}'),
            *(row("perturbation_robustness", 1.0, options=f'{{"gamma": {g}}}') for g in (0.0, 0.1, 1.0))]  # fmt: skip
    factors = (2.0, 0.5, 3.0, 5.0, 1.0, 2.0, 9.0, 11.0, 6.0, 8.0, 7.0)
    second = [entry | {"value": entry["value"] * factor} for entry, factor in zip(rows, factors, strict=True)]
    data = comparison_data({"a": Table(rows), "b": Table(second)})
    assert (data.reference, data.networks) == ("a", ["b"])
    assert dict(zip(data.measures, data.factors, strict=True)) == {  # above 1 is better, whichever way that is
        "rho_sum": [1 / 2], "psi_trace": [2.0], "l1_path_norm": [1 / 3], "l2_path_norm": [1 / 5], "margin": [9.0],
        "perturbation_robustness[gamma=0.1]": [1 / 8],  # of a row for every noise level the middle, not the first
    }  # fmt: skip
    assert data.errors[0] == [pytest.approx(math.hypot(0.4 / 4, 0.4 / 8) / 2)]
    assert comparison_data({"a": table()}).measures == []
    kept = comparison_data({"a": Table(rows), "b": Table(second)}, left_out=["rho_sum", "psi_trace"]).measures
    assert kept == [name for name in data.measures if name not in ("rho_sum", "psi_trace")]


def plots_of(tables: dict[str, Table]) -> dict[str, Plot]:
    return {plot.stem: plot for plot in measured_plots(tables, {})}


def test_distributions() -> None:
    plots = plots_of({"a": table(), "b": table(2.0)})
    assert [stem for stem in plots if stem.startswith("distribution")] == ["distribution-functional_margin"]
    plot = plots["distribution-functional_margin"]
    drawn = [patch.get_data() for patch in plot.make().axes[0].patches]
    assert [data.values.sum() for data in drawn] == [pytest.approx(1.0)] * 4  # filled and outlined
    assert (drawn[0].edges[0], drawn[0].edges[-1]) == (-2.0, 6.0)
    numbers = {line[0]: line[1:] for line in plot.rows}
    assert numbers["median"] == ["1", "2"]
    assert numbers["share below zero"] == ["26\u202f%", "26\u202f%"]
    single = plots_of({"a": Table([row("m", 1.0, sample=0), row("n", math.nan, sample=0)])})
    assert list(single) == ["distribution-m"]
    assert len(single["distribution-m"].make().axes[0].patches[0].get_data().edges) == 2


def test_profiles_of_layers() -> None:
    plot = plots_of({"a": table(), "b": table(2.0, layer="conv")})["layers-l2_norm"]
    assert plot.rows == [["fc1", "10", "n/a"], ["fc2", "5", "10"], ["conv", "n/a", "20"]]
    two = plots_of({"n": Table([row("k", 1.0, layer="a"), row("k", 2.0, layer="a", options='{"x": 1}')])})
    assert {stem: plot.rows for stem, plot in two.items()} == {
        "layers-k": [["a", "1"]],
        "layers-k[x=1]": [["a", "2"]],
    }


def test_training_curves() -> None:
    plots = list(history_plots({"a": history().assign(step=range(5)), "b": history().set_index("epoch")}, {}))
    assert [plot.title for plot in plots] == ["loss", "error"]  # lr never changes, gradient_norm was not recorded
    assert [line[0] for line in plots[0].rows] == ["a, train", "a, test", "b, train", "b, test"]
    assert [plot.make().axes[0].get_yscale() for plot in plots] == ["log", "linear"]


def test_names_in_pictures_are_text_and_colours_follow_the_page() -> None:
    def draw(ax: Any) -> None:
        ax.plot([1, 2], color="#0072B2", label=f"$x_1$ {HOSTILE}")
        ax.legend()

    drawn = str(svg_of_plot(Plot("name", "title", "caption", figure_from_axes_function(draw))))
    assert "$x_1$ &lt;script&gt;" in drawn  # not read as a formula, and not as markup
    assert "var(--c0)" in drawn
    assert "style=" not in drawn
    assert "<style" not in drawn
    other = str(svg_of_plot(Plot("other", "title", "caption", figure_from_axes_function(draw))))
    names = [set(re.findall(r'id="([^"]+)"', text)) for text in (drawn, other)]
    assert names[0]
    assert not names[0] & names[1]


def test_save_figures(tmp_path: Path) -> None:
    items = [{"a": [table(), history()], "b": [table(2.0), history()]}, figure("same"), ("other", figure())]
    saved = save_figures(items, tmp_path / "figures", ("png", "svg"))
    assert [path.name for path in saved if path.suffix == ".png"] == [
        "comparison.png", "distribution-functional_margin.png", "layers-l2_norm.png", "training-loss.png",
        "training-error.png", "same.png", "other.png",
    ]  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in saved if path.suffix == ".png")
    assert sorted(path.name for path in saved) == sorted(os.listdir(tmp_path / "figures"))
    again = save_figures(table(), tmp_path / "again", "pdf") + save_figures(table(), tmp_path / "twice", "pdf")
    assert again[0].read_bytes() == again[2].read_bytes()
    with pytest.raises(InputError, match="png, svg, pdf"):
        save_figures(items, tmp_path, ("gif",))


def test_pyplot_is_left_alone(tmp_path: Path) -> None:
    from matplotlib import pyplot

    before = pyplot.get_fignums()
    save_figures(table(), tmp_path)
    page_text([table(), figure()])
    assert pyplot.get_fignums() == before


def test_an_audit_has_its_matrix(tmp_path: Path) -> None:
    problem = mlp().problem()
    found = audit(problem, ["hessian_trace", "rho_sum", "l2_norm"], by=("layer", "unit"), trials=1)
    text = page_text([{"net": fs.measure(problem, "rho_sum")}, {"net": found}])
    assert text.count(">invariant<") >= 3  # rho_sum twice, l2_norm under layer scaling
    assert text.count(">moved<") >= 3
    assert "against its declaration" not in text
