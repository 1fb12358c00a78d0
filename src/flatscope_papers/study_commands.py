"""`flatscope study list|run|join|judge|show|export`."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flatscope import FlatscopeError, InputError
from flatscope.cli.output import check_output_file, show_error, show_grid, show_note, show_text
from flatscope.errors import DataFileError, UnknownNameError
from flatscope.extend import numbered

if TYPE_CHECKING:
    from flatscope_papers.claims import Claim
    from flatscope_papers.study_result import StudyResult

# Inside the commands is imported what they need: help and slips must not wait for torch, plots and statistics.

app = typer.Typer(help="Figures and tables of the four papers, re-run with a verdict.", no_args_is_help=True)

Names = Annotated[list[str], typer.Argument(help="Studies by name or pattern, as in 'petzka2019-*'.")]
FOLDER = Path("results")
SHIPPED = Path(__file__).parent / "results"  # ours, which come with the package
Out = Annotated[Path, typer.Option(help="Folder of saved results, one folder per study and scale.")]
# None unless it was named: that nothing has been saved where results go by default is no slip.
Results = Annotated[
    Path | None,
    typer.Option(
        help="Folder of saved results, one folder per study and scale.",
        show_default=f"{FOLDER}, else those that come with flatscope",
    ),
]
UNREADABLE = "unreadable"
EXPORTS = (".md", ".csv", ".parquet", ".html")


@app.command("list")
def list_studies(results: Results = None) -> None:
    """All studies, and the verdicts of those that have been run."""
    from flatscope_papers.claims import verdict_counts_in_words
    from flatscope_papers.reproduction import claim_entries, load_results, result_at_largest_scale
    from flatscope_papers.study_registry import studies

    damaged: dict[tuple[str, str], DataFileError] = {}
    saved = load_results(_saved_folder(results), damaged)
    rows = []
    for name, entry in studies().items():
        scales = [scale for study, scale in damaged if study == name]
        rows.append(
            [
                name,
                entry.figure,
                entry.title,
                str(len(entry.claims)),
                *_scale_and_verdict_cells(saved.get(name, {}), scales),
            ]
        )
    show_grid(["study", "source", "what", "claims", "scale", "verdicts"], rows)
    claims = [entry for entry in claim_entries(saved) if entry.finding.counts]
    lost = {name for name, _ in damaged if result_at_largest_scale(saved.get(name, {})) is None}
    known = [entry.finding.verdict for entry in claims if entry.study.name not in lost]
    others = f", {len(claims) - len(known)} {UNREADABLE}" if len(known) < len(claims) else ""
    show_note(f"all claims: {verdict_counts_in_words(known)}{others}")
    for problem in damaged.values():
        show_note(str(problem))


@app.command("run")
def run(
    names: Names,
    scale: Annotated[str, typer.Option(help="smoke (never judged), small (two cores) or paper (a GPU).")] = "small",
    engine: Annotated[str, typer.Option(help="local or ray.")] = "local",
    workers: Annotated[int | None, typer.Option(help="Units at once; 0 runs them in this process.")] = None,
    address: Annotated[str | None, typer.Option(help="Of a running Ray cluster.")] = None,
    store: Annotated[str | None, typer.Option(help="Folder of trained networks; else FLATSCOPE_STORE.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …; the GPU where there is one.")] = None,
    drop_weights: Annotated[bool, typer.Option(help="Keep no weights of networks that none of these look at.")] = False,
    out: Out = FOLDER,
) -> None:
    """Run studies and save table, figure and verdicts; what was trained before is not trained again."""
    from flatscope_papers.declaration import check_scale
    from flatscope_papers.study_registry import find_study
    from flatscope_papers.study_result import VERDICTS_FILE, load_result
    from flatscope_papers.study_runs import study

    check_scale(scale)
    failed = []
    chosen = _study_names_matching(names)
    for name in chosen:
        check_output_file(out / name / scale / VERDICTS_FILE, (".json",))
    _warn_without_gpu(chosen, scale, device)
    how: dict[str, Any] = {"engine": engine, "workers": workers, "address": address, "store": store, "device": device}
    for place, name in enumerate(chosen):
        later = [stage for other in chosen[place + 1 :] for stage in find_study(other).stages(scale)]
        try:
            result = study(name, scale, **how, drop_weights=drop_weights, later=later)
        except FlatscopeError as problem:
            if isinstance(problem, InputError) and len(names) == 1:
                raise
            show_error(f"{name}: {problem}")
            failed.append(name)
            continue
        folder = out / name / scale
        if (folder / VERDICTS_FILE).is_file():
            with contextlib.suppress(DataFileError):  # what cannot be read is written anew
                result = result.with_run_facts_of(load_result(folder))
        result.save(folder)
        _print_result(result)
        show_note(f"table, figure and verdicts in {folder}")
    if failed:
        if len(chosen) > 1:
            show_error(f"{len(failed)} of {len(chosen)} failed: {', '.join(failed)}")
        raise typer.Exit(code=1)


@app.command("join")
def join(
    store: Annotated[str, typer.Argument(help="The store that is to have them all; made if it is not there.")],
    others: Annotated[list[str], typer.Argument(help="Stores of other machines, which stay as they are.")],
) -> None:
    """Join stores of several machines: every trial that one of them has, and the first does not."""
    from flatscope.training import Store

    for other in others:
        if not Path(other).is_dir():
            raise InputError("a folder of trials", "nothing there", where=f"store {other}")
    for other in others:
        joined = Store(store).take_from(Store(other))
        show_note(f"{other}: {numbered(len(joined.taken), 'trial')} taken, {len(joined.known)} known")
        for keys, words in ((joined.differing, "with other numbers: kept as they were"), (joined.damaged, "damaged")):
            if keys:
                show_note(f"{other}: {numbered(len(keys), 'trial')} {words} ({', '.join(key[:8] for key in keys[:5])})")


@app.command("judge")
def judge(
    names: Names,
    results: Annotated[Path, typer.Option(help="Folder of saved results, rewritten there.")] = FOLDER,
) -> None:
    """Judge saved results by the claims of this version, from their tables: nothing is trained."""
    from flatscope_papers.rejudging import result_with_current_claims
    from flatscope_papers.reproduction import load_results
    from flatscope_papers.study_registry import find_study

    chosen = _study_names_matching(names)
    saved = load_results(_saved_folder(results))
    for name in chosen:
        for scale, before in saved.get(name, {}).items():
            tables = {other: at[scale].table for other, at in saved.items() if scale in at}
            after = result_with_current_claims(find_study(name), before, tables)
            same_claims = _stored_claims(after) == _stored_claims(before)
            rewritten = (after.rows(), after.deviations, after.notes)
            if same_claims and rewritten == (before.rows(), before.deviations, before.notes):
                continue
            after.save(results / name / scale)
            verdicts = {finding.claim.key: finding.verdict for finding in before.findings}
            for finding in after.findings:
                old, new = verdicts.get(finding.claim.key, "new"), finding.verdict
                if old != new:
                    show_text(f"{name} at {scale} scale, {finding.claim.key}: {old} → {new}")


def _stored_claims(result: StudyResult) -> list[Claim]:
    """The claims without the words that pages take from the declaration."""
    return [replace(finding.claim, headline="", quantity="") for finding in result.findings]


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="A study, or a paper, as in petzka2019; all papers without one.")] = "",
    results: Results = None,
    scale: Annotated[str | None, typer.Option(help="Which of the saved results; the largest by default.")] = None,
) -> None:
    """Show what holds of the papers or of one; claims and verdicts of a study, or what it would do."""
    from flatscope_papers.declaration import check_scale
    from flatscope_papers.reproduction import load_results, result_at_largest_scale, results_by_scale
    from flatscope_papers.study_registry import find_study
    from flatscope_papers.toml_files import FOUR_PAPERS

    if not name or name in FOUR_PAPERS:
        _print_headline_claims(load_results(_saved_folder(results), {}), [name] if name else list(FOUR_PAPERS))
        return
    entry, folder = find_study(name), _saved_folder(results)
    if scale is not None:
        check_scale(scale)
    damaged: dict[tuple[str, str], DataFileError] = {}
    saved = load_results(folder, damaged).get(name, {})
    damaged_scales = {other: problem for (study, other), problem in damaged.items() if study == name}
    again = f"flatscope study run {name} --scale {scale or 'small'}{'' if results is None else f' --out {folder}'}"
    _refuse_missing_scale(scale, list(saved), damaged_scales, folder / name, again)
    result = saved.get(scale) if scale else result_at_largest_scale(saved) or saved.get("smoke")
    typer.echo(f"{entry.title}\n{FOUR_PAPERS[entry.paper]}, {entry.figure}\n\n{entry.description}\n")
    if result is None:
        claims = [[claim.where, claim.statement, claim.number, claim.reported] for claim in entry.claims]
        show_grid(["where", "claim", "number", "paper"], claims)
        _print_list("At paper scale", [entry.words.at_paper_scale])
        show_note(f"no saved result in {folder}; {again}")
        return
    _print_result(result)
    _print_result_details(result, [other for other in results_by_scale(saved) if other is not result])
    _print_list("At paper scale", [entry.words.at_paper_scale])
    for problem in damaged_scales.values():
        show_note(str(problem))


@app.command("export")
def export(
    out: Annotated[Path, typer.Argument(help="reproduction.md, claims.csv, claims.parquet or report.html.")],
    results: Results = None,
) -> None:
    """Write every claim with its verdict to one file; as Markdown, with a folder of pages beside it."""
    from flatscope import report
    from flatscope.extend import write_whole
    from flatscope.files import csv_bytes, frame_bytes
    from flatscope_papers.pages.page_files import write_pages
    from flatscope_papers.reproduction import claim_frame, load_results, result_at_largest_scale
    from flatscope_papers.study_registry import studies

    check_output_file(out, EXPORTS)
    folder = _saved_folder(results)
    saved = load_results(folder)
    shown = [result for name in studies() if (result := result_at_largest_scale(saved.get(name, {})))]
    if not shown:
        got = "smoke runs only, which are never judged" if saved else "none: nothing has been run"
        fix = "Run studies first, as in flatscope study run 'petzka2019-*'; flatscope study list names them"
        raise InputError("at least one saved result", got, where=str(folder), fix=fix)
    if out.suffix == ".md":
        write_pages(saved, out)
    elif out.suffix == ".html":
        report(shown, out, title="Reproduction of the four papers")
    else:
        frame = claim_frame(saved)
        as_csv = out.suffix == ".csv"
        write_whole(out, csv_bytes(frame) if as_csv else frame_bytes(frame), with_sum=as_csv)
    show_note(f"wrote {out}")


def _saved_folder(results: Path | None) -> Path:
    """Folder of saved results: as named (it has to be there), here, or those that come with the package."""
    if results is not None and not results.is_dir():
        got = "a file" if results.is_file() else "nothing there"
        fix = "Name the folder that flatscope study run --out wrote"
        raise InputError("a folder of saved results", got, where=f"--results {results}", fix=fix)
    return results or (FOLDER if FOLDER.is_dir() or not SHIPPED.is_dir() else SHIPPED)


def _scale_and_verdict_cells(saved: Mapping[str, StudyResult], damaged: list[str]) -> tuple[str, str]:
    """The scale and the verdicts to show for a study, of what was saved of it and the scales that cannot be read."""
    from flatscope_papers.claims import NOT_RUN
    from flatscope_papers.reproduction import result_at_largest_scale

    result = result_at_largest_scale(saved)
    if result is not None:
        return result.scale, result.counts + (f" ({', '.join(damaged)} {UNREADABLE})" if damaged else "")
    if damaged:
        return ", ".join(damaged), UNREADABLE
    return ("smoke", "smoke, never judged") if "smoke" in saved else ("", NOT_RUN)


def _study_names_matching(patterns: list[str]) -> list[str]:
    from flatscope_papers.study_registry import studies

    known = list(studies())
    chosen: dict[str, None] = {}
    for pattern in patterns:
        names = [name for name in known if pattern == "all" or fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise UnknownNameError.among(pattern, known, "study")
        chosen.update(dict.fromkeys(names))
    return list(chosen)


def _warn_without_gpu(names: list[str], scale: str, device: str | None) -> None:
    """Before days of work: what the paper scale trains, where there is no GPU for it."""
    import torch

    from flatscope_papers.study_registry import find_study

    if scale != "paper" or ((device or "cuda").startswith("cuda") and torch.cuda.is_available()):
        return
    for name in names:
        words = find_study(name).words.at_paper_scale
        show_note(f"{name} at paper scale is meant for a GPU, and none is used here. On one: {words or 'not known'}")


def _print_result(result: StudyResult) -> None:
    header = ["where", "claim", "paper", "here", "runs", "verdict"]
    keys = ("where", "statement", "reported", "found", "runs", "verdict")
    show_grid(header, [[row[key] for key in keys] for row in result.rows()], title=f"{result.name}, {result.how}")
    counting = sum(finding.counts for finding in result.findings)
    counted = f"{numbered(counting, 'claim')} that {'counts' if counting == 1 else 'count'}"
    show_text(f"{counted}: {result.counts}" if counting else "no claims that count")
    if result.scale == "smoke":
        show_note("smoke scale shows that the study runs and judges nothing: --scale small, or flatscope study show")


def _refuse_missing_scale(
    scale: str | None, saved: list[str], damaged: Mapping[str, DataFileError], place: Path, again: str
) -> None:
    """Refuse a scale that was not run or cannot be read; without a scale, a study that cannot be read at all."""
    if scale in damaged or (damaged and not saved and scale is None):
        raise damaged[scale or next(iter(damaged))]
    if scale and saved and scale not in saved:
        got = f"results at {' and '.join(saved)} scale only"
        raise InputError(f"a result at {scale} scale", got, where=str(place), fix=f"Run it: {again}")


def _print_result_details(result: StudyResult, others: Iterable[StudyResult]) -> None:
    """Print below the verdicts: results at other scales, numbers, remarks, deviations and how it was run."""
    _print_list("Other scales", [f"{other.scale} ({other.counts}): --scale {other.scale}" for other in others])
    _print_list("Numbers", [f"{f.claim.statement}: {f.claim.number}" for f in result.findings])
    _print_list("Remarks", [f"{f.claim.statement}: {f.answer.note}" for f in result.findings if f.answer.note])
    _print_list("Differs from the paper", result.deviations)
    _print_list("Also seen", result.notes)
    _print_list("Run", [f"{result.how}; {result.command}"])


def _print_headline_claims(saved: Mapping[str, Mapping[str, StudyResult]], papers: list[str]) -> None:
    """Print the headline claims of each paper and their verdicts."""
    from flatscope_papers.claims import SIGNS, judged_verdict_counts
    from flatscope_papers.pages.markdown import number_with_meaning
    from flatscope_papers.pages.overview import headline_claims_by_verdict, judged_studies_badge
    from flatscope_papers.reproduction import claim_entries
    from flatscope_papers.toml_files import FOUR_PAPERS, paper_words

    for paper in papers:
        entries = [entry for entry in claim_entries(saved) if entry.study.paper == paper]
        chosen = [entry for part in headline_claims_by_verdict(entries).values() for entry in part]
        rows = [
            [
                f"{SIGNS[entry.finding.verdict]} {entry.finding.verdict}",
                entry.finding.claim.headline,
                entry.finding.claim.reported,
                number_with_meaning(entry.finding),
                entry.scale,
                entry.study.name,
            ]
            for entry in chosen
        ]
        typer.echo(f"{FOUR_PAPERS[paper]}: {paper_words(paper).title}\n{paper_words(paper).says}")
        show_grid(["verdict", "claim", "paper", "here", "scale", "study"], rows)
        show_text(f"{judged_studies_badge(entries)}: {judged_verdict_counts(entry.finding for entry in entries)}\n")


def _print_list(title: str, entries: Iterable[str]) -> None:
    """A heading with one entry per line below, where there are any."""
    lines = [entry for entry in entries if entry]
    if lines:
        show_text("\n".join(["", title, *(f"  {line}" for line in lines)]))
