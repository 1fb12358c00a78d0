"""`flatscope study list|run|show|export`."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import pandas as pd
import typer

from flatscope.cli.output import check_place, show_error, show_grid, show_note
from flatscope.errors import FlatscopeError, InputError, UnknownNameError
from flatscope.guards import whole_file, write_whole
from flatscope.registry import PAPERS
from flatscope.report.page import report

if TYPE_CHECKING:
    from flatscope.studies.result import StudyResult

# The studies are imported inside the commands: they load plots and statistics, which no other command should pay for.

app = typer.Typer(help="Figures and tables of the four papers, re-run with a verdict.", no_args_is_help=True)

Names = Annotated[list[str], typer.Argument(help="Studies by name or pattern, as in 'petzka2019-*'.")]
Results = Annotated[Path, typer.Option(help="Folder of saved results, one folder per study and scale.")]
EXPORTS = (".md", ".csv", ".parquet", ".html")


@app.command("list")
def list_studies(results: Results = Path("results")) -> None:
    """All studies, and the verdicts of those that have been run."""
    from flatscope.studies import studies
    from flatscope.studies.reproduction import latest, load_results

    saved = load_results(results)
    rows = []
    for name, entry in studies().items():
        result = latest(saved.get(name, {}))
        verdicts = ", ".join(finding.verdict for finding in result.findings) if result else "not run"
        rows.append([name, f"{PAPERS[entry.paper]}, {entry.figure}", entry.title, verdicts])
    show_grid(["study", "source", "what", "verdicts"], rows)


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

    failed = []
    for name in _matching(names):
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
        show_error(f"failed: {', '.join(failed)}")
        raise typer.Exit(code=1)


@app.command("show")
def show(name: str, results: Results = Path("results"), scale: str | None = None) -> None:
    """Claims and verdicts of a saved result; without one, what the study would do."""
    from flatscope.studies import find_study
    from flatscope.studies.reproduction import latest, load_results

    entry = find_study(name)
    saved = load_results(results).get(name, {})
    result = saved.get(scale) if scale else latest(saved) or saved.get("smoke")
    if result is None:
        typer.echo(f"{name}: {entry.title}\n\n{entry.description}\n")
        show_grid(
            ["where", "claim", "number", "paper"], [[c.where, c.statement, c.number, c.reported] for c in entry.claims]
        )
        show_note(f"no saved result in {results}; flatscope study run {name}")
        return
    _show(result)
    for words in (*result.deviations, *result.notes):
        show_note(words)


@app.command("export")
def export(
    out: Annotated[Path, typer.Argument(help="reproduction.md, claims.csv, claims.parquet or report.html.")],
    results: Results = Path("results"),
) -> None:
    """Write every claim with its verdict to one file."""
    from flatscope.studies.reproduction import claim_rows, latest, load_results, reproduction_markdown

    check_place(out, EXPORTS)
    saved = load_results(results)
    if out.suffix == ".md":
        write_whole(out, reproduction_markdown(saved).encode())
    elif out.suffix == ".html":
        found = [result for by_scale in saved.values() if (result := latest(by_scale))]
        if not found:
            raise InputError("at least one saved result", "none", where=str(results), fix="flatscope study run NAME")
        report(found, out, title="Reproduction of the four papers")
    else:
        frame = pd.DataFrame(claim_rows(saved))
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


def _show(result: StudyResult) -> None:
    rows = [[row["where"], row["statement"], row["reported"], row["found"], row["verdict"]] for row in result.rows()]
    title = f"{result.name} ({result.scale}, {result.provenance['seconds']} s, {result.provenance['device']})"
    show_grid(["where", "claim", "paper", "here", "verdict"], rows, title=title)
