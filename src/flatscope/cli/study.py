"""`flatscope study list|run|show|cost|export`."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatscope.cli.output import check_place, show_error, show_grid, show_note
from flatscope.errors import FlatscopeError, InputError, UnknownNameError

if TYPE_CHECKING:
    from flatscope.studies.result import StudyResult

# Inside the commands is imported what they need: help and slips must not wait for torch, plots and statistics.

app = typer.Typer(help="Figures and tables of the four papers, re-run with a verdict.", no_args_is_help=True)

Names = Annotated[list[str], typer.Argument(help="Studies by name or pattern, as in 'petzka2019-*'.")]
Results = Annotated[Path, typer.Option(help="Folder of saved results, one folder per study and scale.")]
EXPORTS = (".md", ".csv", ".parquet", ".html")


@app.command("list")
def list_studies(results: Results = Path("results")) -> None:
    """All studies, and the verdicts of those that have been run."""
    from flatscope.studies import studies
    from flatscope.studies.claims import NOT_RUN, counted
    from flatscope.studies.reproduction import claim_rows, latest, load_results

    saved = load_results(results)
    rows = []
    for name, entry in studies().items():
        result = latest(saved.get(name, {}))
        counts, scale = (result.counts, result.scale) if result else (NOT_RUN, "")
        rows.append([name, entry.figure, entry.title, str(len(entry.claims)), scale, counts])
    show_grid(["study", "source", "what", "claims", "scale", "verdicts"], rows)
    show_note(f"all claims: {counted(row['verdict'] for row in claim_rows(saved))}")


@app.command("run")
def run(
    names: Names,
    scale: Annotated[str, typer.Option(help="smoke (never judged), small (two cores) or paper (a GPU).")] = "small",
    engine: Annotated[str, typer.Option(help="local or ray.")] = "local",
    workers: Annotated[int | None, typer.Option(help="Units at once; 0 runs them in this process.")] = None,
    address: Annotated[str | None, typer.Option(help="Of a running Ray cluster.")] = None,
    store: Annotated[str | None, typer.Option(help="Folder of trained networks; else FLATSCOPE_STORE.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …; the GPU where there is one.")] = None,
    out: Results = Path("results"),
) -> None:
    """Run studies and save table, figure and verdicts; what was trained before is not trained again."""
    from flatscope.studies import study
    from flatscope.studies.result import VERDICTS_FILE
    from flatscope.studies.study import check_scale

    check_scale(scale)
    failed = []
    chosen = _matching(names)
    for name in chosen:
        check_place(out / name / scale / VERDICTS_FILE, (".json",))
    _warn_without_gpu(chosen, scale, device, out)
    for name in chosen:
        try:
            result = study(name, scale, engine=engine, workers=workers, address=address, store=store, device=device)
        except FlatscopeError as problem:
            if isinstance(problem, InputError) and len(names) == 1:
                raise
            show_error(f"{name}: {problem}")
            failed.append(name)
            continue
        folder = result.save(out / name / scale)
        _show(result)
        show_note(f"table, figure and verdicts in {folder}")
    if failed:
        if len(chosen) > 1:
            show_error(f"{len(failed)} of {len(chosen)} failed: {', '.join(failed)}")
        raise typer.Exit(code=1)


@app.command("show")
def show(name: str, results: Results = Path("results"), scale: str | None = None) -> None:
    """Claims and verdicts of a saved result; without one, what the study would do."""
    from flatscope.registry import PAPERS
    from flatscope.studies import find_study
    from flatscope.studies.cost import load_costs
    from flatscope.studies.reproduction import by_size, latest, load_results

    entry = find_study(name)
    saved = load_results(results).get(name, {})
    if scale and saved and scale not in saved:
        raise UnknownNameError.among(scale, saved, f"scale among the saved results of {name}")
    result = saved.get(scale) if scale else latest(saved) or saved.get("smoke")
    typer.echo(f"{entry.title}\n{PAPERS[entry.paper]}, {entry.figure}\n\n{entry.description}\n")
    costs = load_costs(results)
    cost = costs[name].text() if name in costs else entry.paper_cost
    if result is None:
        show_grid(
            ["where", "claim", "number", "paper"], [[c.where, c.statement, c.number, c.reported] for c in entry.claims]
        )
        _list("At paper scale", [cost])
        show_note(f"no saved result in {results}; flatscope study run {name}")
        return
    _show(result)
    others = [other for other in by_size(saved) if other is not result]
    _list("Other scales", [f"{other.scale} ({other.counts}): --scale {other.scale}" for other in others])
    _list("Numbers", [f"{f.claim.statement}: {f.claim.number}" for f in result.findings])
    _list("Remarks", [f"{f.claim.statement}: {f.estimate.note}" for f in result.findings if f.estimate.note])
    _list("Differs from the paper", result.deviations)
    _list("Also seen", result.notes)
    _list("Run", [f"{result.how}; {result.command}"])
    _list("At paper scale", [cost])


@app.command("cost")
def cost(
    names: Names,
    scale: Annotated[str, typer.Option(help="smoke, small or paper.")] = "paper",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …; the GPU where there is one.")] = None,
    budget: Annotated[float, typer.Option(help="Seconds after which no further kind of work is timed.")] = 300,
    reckon: Annotated[
        bool, typer.Option("--reckon", help="Time nothing: take saved times, other networks by their multiply-adds.")
    ] = False,
    out: Results = Path("results"),
) -> None:
    """Time shortened epochs and measurements, and say what whole studies take; no network is kept.

    Saved times from the same device stand until they are taken again, and what has none yet is timed first.
    """
    from flatscope.studies.cost import MEASURING, TRAINING, cost_file, duration, load_costs, untimed_kinds
    from flatscope.studies.costing import study_costs
    from flatscope.studies.reckoning import reckoned_costs

    chosen = _matching(names)
    for name in chosen:
        check_place(out / name / cost_file(scale), (".json",))
    saved = load_costs(out, scale)
    if reckon:
        costs = reckoned_costs(chosen, saved, scale)
    else:
        costs = study_costs(chosen, scale, device=device, budget=budget, saved=saved)
    rows = []
    for found in costs:
        found.save(out)
        timed = f"{len(found.rows) - len(found.untimed)} of {len(found.rows)}"
        parts = (found.seconds, found.part(TRAINING), found.part(MEASURING), found.additional)
        rows.append([found.name, timed, *(duration(seconds) for seconds in parts)])
    header = ["study", "kinds with a time", "in all", "training", "measuring", "more than those above"]
    show_grid(header, rows, title=f"Cost at {scale} scale on one {costs[0].provenance['device']}")
    typer.echo(f"all of them together: {duration(sum(found.additional for found in costs))}")
    for problem, kinds in untimed_kinds(costs).items():
        show_note(f"not timed: {kinds}: {problem}")
    show_note(f"one {cost_file(scale)} per study in {out}; stop rules may end training before the epochs counted here")


@app.command("export")
def export(
    out: Annotated[Path, typer.Argument(help="reproduction.md, claims.csv, claims.parquet or report.html.")],
    results: Results = Path("results"),
) -> None:
    """Write every claim with its verdict to one file."""
    from flatscope.guards import whole_file, write_whole
    from flatscope.report.page import report
    from flatscope.studies import studies
    from flatscope.studies.cost import load_costs
    from flatscope.studies.reproduction import claim_frame, latest, load_results
    from flatscope.studies.reproduction_page import reproduction_markdown

    check_place(out, EXPORTS)
    saved = load_results(results)
    if out.suffix == ".md":
        figures = Path(os.path.relpath(results, out.parent)).as_posix()
        write_whole(out, reproduction_markdown(saved, load_costs(results), figures).encode())
    elif out.suffix == ".html":
        found = [result for name in studies() if (result := latest(saved.get(name, {})))]
        if not found:
            raise InputError("at least one saved result", "none", where=str(results), fix="flatscope study run NAME")
        report(found, out, title="Reproduction of the four papers")
    else:
        frame = claim_frame(saved)
        with whole_file(out) as temporary:
            frame.to_csv(temporary, index=False) if out.suffix == ".csv" else frame.to_parquet(temporary)
    show_note(f"wrote {out}")


def _matching(patterns: list[str]) -> list[str]:
    from flatscope.studies import studies

    known = list(studies())
    chosen: dict[str, None] = {}
    for pattern in patterns:
        found = [name for name in known if pattern == "all" or fnmatch.fnmatchcase(name, pattern)]
        if not found:
            raise UnknownNameError.among(pattern, known, "study")
        chosen.update(dict.fromkeys(found))
    return list(chosen)


def _warn_without_gpu(names: list[str], scale: str, device: str | None, results: Path) -> None:
    """Before days of work: what the paper scale takes, where there is no GPU for it."""
    import torch

    from flatscope.studies import find_study
    from flatscope.studies.cost import load_costs

    if scale != "paper" or ((device or "cuda").startswith("cuda") and torch.cuda.is_available()):
        return
    costs = load_costs(results)
    for name in names:
        words = costs[name].text() if name in costs else find_study(name).paper_cost
        show_note(f"{name} at paper scale is meant for a GPU, and none is used here. On one: {words or 'not known'}")


def _show(result: StudyResult) -> None:
    header = ["where", "claim", "paper", "here", "runs", "verdict"]
    keys = ("where", "statement", "reported", "found", "runs", "verdict")
    show_grid(header, [[row[key] for key in keys] for row in result.rows()], title=f"{result.name}, {result.how}")
    typer.echo(f"{len(result.findings)} claim{'s' * (len(result.findings) != 1)}: {result.counts}")


def _list(title: str, entries: Iterable[str]) -> None:
    """A heading with one entry per line below, where there are any."""
    lines = [entry for entry in entries if entry]
    if lines:
        typer.echo("\n".join(["", title, *(f"  {line}" for line in lines)]))
