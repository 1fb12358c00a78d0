"""What `flatscope measure` prints: fit and gap first, a choice of measures, then all of them by family."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from forms_of_measures import NORMS
from rich.console import Console
from typer.testing import CliRunner

import flatscope as fs
import flatscope.cli.output as output
import flatscope.cli.run_measure as summary
from flatscope.cli.app import app
from flatscope.cli.run_measure import Fit, show_measured
from flatscope.context import Context, make_effort
from flatscope.inputs.loading import load
from flatscope.registry import declarations
from flatscope.reports.measured import MANY, captions_by_measure
from flatscope.summarising import summary_of

WIDTHS = ["--model", "mlp", "--model-option", "widths=64,8,10", "--data", "digits", "--flatten", "--train-size", "60"]


def test_every_headline_is_a_measure_with_a_value_for_the_network() -> None:
    known = declarations()
    assert [name for name in captions_by_measure() if known[name].per != "network"] == []
    assert len({known[name].family for name in captions_by_measure()}) >= 7
    assert next(iter(captions_by_measure())) == "gradient_norm"  # whether it is a minimum at all comes first


@pytest.fixture(scope="module")
def measured() -> tuple[fs.Table, Fit, Context]:
    data = load("digits", train_size=60, test_size=40, flatten=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.ReLU(), torch.nn.Linear(8, 10))
    problem = fs.Problem(model, train=data.train, test=data.test)
    context = Context(problem)
    names = [entry.name for entry in declarations().values() if entry.cost != "long"]
    options: dict[str, dict[str, Any]] = {"expected_sharpness": {"draws": 4}}
    options |= {name: {"form": "over_margin"} for name in NORMS}
    table = fs.measure(problem, [*names, "expected_sharpness"], options=options, context=context)
    return table, Fit.of(context, data), context


def printed(monkeypatch: pytest.MonkeyPatch, table: fs.Table, fit: Fit, width: int = 100) -> str:
    screen = Console(width=width, record=True, file=io.StringIO())
    for module in (summary, output):
        monkeypatch.setattr(module, "stdout_screen", lambda: screen)
    show_measured(table, fit)
    return screen.export_text().replace("\N{NO-BREAK SPACE}", " ")


def test_fit_and_gap_are_those_of_the_network(measured: tuple[fs.Table, Fit, Context]) -> None:
    _, fit, context = measured
    model, problem = context.problem.model, context.problem
    losses, errors = [], []
    for part in ("train", "test"):
        x, y = next(iter(problem.batches(part, 1000)))
        outputs = model(x).detach()
        losses.append(float(torch.nn.functional.cross_entropy(outputs, y)))
        errors.append(float((outputs.argmax(1) != y).double().mean()))
    found = fit.summary
    assert (found.loss, found.test_loss) == pytest.approx(losses, rel=1e-5)
    assert (found.error, found.test_error) == pytest.approx(errors)
    assert (fit.n_train, fit.n_test, found.parameters) == (60, 40, 64 * 8 + 8 + 80 + 10)


def test_the_summary_comes_first_and_fits_a_hundred_columns(
    measured: tuple[fs.Table, Fit, Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, fit, _ = measured
    text = printed(monkeypatch, table, fit)
    assert max(map(len, text.splitlines())) <= 100
    head, _, rest = text.partition("measures by family")
    assert "60 training and 40 test samples, standardised; 610 parameters" in head
    train, test = fit.summary.error, fit.summary.test_error
    assert f"{100 * train:.2f} %" in head
    assert f"{100 * (test - train):.2f} %" in head
    shown = [line.split()[0] for line in head.splitlines() if line.split() and line.split()[0] in captions_by_measure()]
    assert shown == [name for name in captions_by_measure() if name in table.names]
    assert re.search(r"hessian_trace +[\d.]+ +— +— ", head)
    assert re.search(r"kappa_trace_sum +[\d.]+ +✓ +— ", head)
    assert re.search(r"rho_sum +[\d.]+ +✓ +✓ ", head)
    assert re.search(r"expected_sharpness +≈ \S+ ± \S+ ", head)
    assert "alpha=0.001" in head
    assert re.search(r"l2_path_norm +n/a ", head)  # untrained: no positive margin
    for name in table.names:
        assert name in rest, name


def test_no_name_is_broken_at_eighty_columns(
    measured: tuple[fs.Table, Fit, Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, fit, _ = measured
    text = printed(monkeypatch, table, fit, width=80)
    assert max(map(len, text.splitlines())) <= 80
    words = set(text.split())
    assert {line[0] for line in table.lines() if " " not in line[0]} <= words


def test_columns_that_do_not_fit_come_as_another_table(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(width=40, record=True, file=io.StringIO())
    monkeypatch.setattr(output, "stdout_screen", lambda: screen)
    names = ["a_name_of_twenty_one_", "another_of_nineteen"]
    output.show_grid(["measure", *names, "what it is"], [["l2_path_norm", "1.5", "2.5", "some words to be wrapped"]])
    text = screen.export_text()
    assert all(name in text for name in names)
    assert text.count("l2_path_norm") == 3


def test_the_full_table_has_a_heading_per_family_and_says_a_reason_once(
    measured: tuple[fs.Table, Fit, Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, fit, _ = measured
    rest = printed(monkeypatch, table, fit).partition("measures by family")[2]
    families = {declarations()[name].family for name in table.names}
    headings = [line.strip() for line in rest.splitlines() if re.match(r"  [A-Z][\w -]*$", line.rstrip())]
    assert len(headings) == len(families)
    assert {"Weight flatness", "Relative flatness", "PAC-Bayes", "PSI flatness"} <= set(headings)
    # Each line once, under its own family.
    first = rest.index("Relative flatness")
    assert first < rest.index("kappa_trace_sum") < rest.index("rho_sum")
    joined = " ".join(rest.split())
    assert joined.count("Norms are compared with the margin") == 1
    numbers = re.findall(r"_norm\S* +n/a +\[(\d+)\]", rest)
    assert len(numbers) > 3
    assert len(set(numbers)) == 1
    assert f"[{numbers[0]}] expected a positive margin" in joined


def test_a_table_without_the_long_measures_is_not_called_all(
    measured: tuple[fs.Table, Fit, Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, fit, context = measured
    known = declarations()
    assert len(table.names) < len(known)
    title = f"{len(table.names)} of {len(known)} measures by family; the long ones with -m all"
    assert title in printed(monkeypatch, table, fit)
    kept = [name for name in table.names if known[name].cost == "light"]
    some = printed(monkeypatch, fs.measure(context.problem, kept, context=context), fit)
    assert f"{len(kept)} of {len(known)} measures by family\n" in re.sub(" +\n", "\n", some)
    monkeypatch.setattr(summary, "declarations", lambda kind="measure": {name: known[name] for name in table.names})
    assert f"All {len(table.names)} measures by family" in printed(monkeypatch, table, fit)


def test_few_measures_are_not_said_twice(
    measured: tuple[fs.Table, Fit, Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, fit, context = measured
    few = fs.measure(context.problem, ["hessian_trace", "margin"], context=context)
    text = printed(monkeypatch, few, fit)
    assert len([line for line in text.splitlines() if line.split()[:1] == ["hessian_trace"]]) == 1
    assert len(few.lines()) <= MANY


def test_remarks_on_core_values_stand_once_below_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which matrix they are, and in how many layers: on a screen of 25 lines and 80 columns."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.GELU(), torch.nn.Linear(9, 3))
    x, y = torch.randn(40, 6), torch.randint(3, (40,))
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(200):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    problem = fs.Problem(model.eval(), train=(x, y))
    context = Context(problem, effort=make_effort(curvature="gauss_newton"))
    fit = Fit("mine", "as they are", 40, 0, summary_of(context))
    text = printed(monkeypatch, fs.measure(problem, context=context), fit, width=80)
    below = " ".join(text.partition("l2_path_norm")[2].split())
    of_both, layers = "hessian_trace, hessian_max_eigenvalue", "kappa_trace_sum, rho_sum (1 of 2 layers)"
    assert f"Of the Gauss-Newton matrix: {of_both}; {layers}" in below
    assert below.count("Gauss-Newton") == 1
    assert "✓: stays when layers or units are rescaled" in below
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) <= 25, text


def test_regression_without_test_data_has_a_loss_and_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(20, 3)
    context = Context(fs.Problem(torch.nn.Linear(3, 1), train=(x, x.sum(1)), loss="mse"))
    fit = Fit("mine", "as they are", 20, 0, summary_of(context))
    text = printed(monkeypatch, fs.measure(context.problem, "parameter_count", context=context), fit)
    assert "20 training samples" in text
    assert "error" not in text
    assert "gap" not in text


def test_machine_readable_output_is_the_table_alone(tmp_path: Path) -> None:
    runner = CliRunner()
    names = ["-m", "hessian_trace", "-m", "kappa*"]
    shown = runner.invoke(app, ["measure", *WIDTHS, *names, "--json"], catch_exceptions=False)
    rows = json.loads(shown.stdout[shown.stdout.index("{") : shown.stdout.rindex("}") + 1])["rows"]
    for ending in ("csv", "json", "md"):
        command = ["measure", *WIDTHS, *names, "--out", str(tmp_path / f"t.{ending}")]
        assert runner.invoke(app, command, catch_exceptions=False).exit_code == 0
    assert "gap" not in (tmp_path / "t.csv").read_text()
    assert [row["value"] for row in json.loads((tmp_path / "t.json").read_text())["rows"]] == [
        row["value"] for row in rows
    ]
    assert (tmp_path / "t.md").read_text().startswith("| measure | layer | value |")


def test_the_report_begins_with_the_invariant_headlines(
    measured: tuple[fs.Table, Fit, Context], tmp_path: Path
) -> None:
    table, _, _ = measured
    page = fs.report(table, tmp_path / "r.html").read_text()
    head = page[page.index('id="answer"') : page.index('id="measures"')]
    invariant = [
        n for n in captions_by_measure() if {"layer_scaling", "unit_scaling"} <= declarations()[n].invariant_under
    ]
    shown = re.findall(r'class="name">(.*?)</span>', head.replace("<wbr>", ""))
    assert shown
    shown = [name.partition("[")[0] for name in shown]
    assert shown == [name for name in invariant if name in table.names][: len(shown)]
