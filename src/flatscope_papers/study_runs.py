"""Run a study: what the store has is not run again, what it lacks goes to an engine, then the verdicts."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

from flatscope import FlatscopeError, InputError, __version__
from flatscope.extend import usable_device
from flatscope.files import figure_bytes
from flatscope.inputs import available
from flatscope.training import Store, run_units
from flatscope_papers.claims import finding_of_claim
from flatscope_papers.contradiction_notes import answers_with_reasons
from flatscope_papers.declaration import Analysis, Runs, Stage, Study, check_scale, importable_name
from flatscope_papers.one_by_one import portions_of_stages, stages_that_read_trials_of
from flatscope_papers.read_only_store import ReadOnlyStore
from flatscope_papers.study_registry import find_study
from flatscope_papers.study_result import StudyResult

STORE_VARIABLE = "FLATSCOPE_STORE"
DPI = 110  # small files: a page shows some fifty of them


def study(
    name: str,
    scale: str = "small",
    *,
    engine: str = "local",
    workers: int | None = None,
    address: str | None = None,
    store: str | os.PathLike[str] | Store | None = None,
    device: str | None = None,
    drop_weights: bool = False,
    later: Iterable[Stage] = (),
    show_progress: bool = True,
) -> StudyResult:
    """Re-run a figure or table of a paper and judge its claims.

    A store that has every trial is analysed again, also where its weights were not kept; the result says so. What looks
    at a network is run right after it was trained: what was stored when a run is broken off is of use by itself.

    Args:
        name: of the study, "petzka2019-fig1"; `flatscope study list` shows them.
        scale: "smoke" (seconds, never judged), "small" (minutes on two cores) or "paper" (the paper's setting).
        engine: "local" (processes here) or "ray".
        workers: how many units run at once; 0 runs them in this process, as a local smoke run does by default.
        address: of a running Ray cluster.
        store: where trained networks and measurements are kept and found again; by default the folder that
            FLATSCOPE_STORE names, else ~/.cache/flatscope/studies.
        device: "cpu", "cuda", ...; the GPU where there is one, by default.
        drop_weights: remove the weights of a network from the store once nothing of this study looks at it any more.
        later: stages of studies that are run after this one: what looks at its networks is done at once, and weights
            that the rest of them looks at are kept all the same.
        show_progress: bars on terminals.

    Example:
        >>> import flatscope as fs
        >>> fs.study("petzka2019-fig1", scale="smoke").save("results/petzka2019-fig1/smoke")  # doctest: +SKIP
    """
    check_scale(scale)
    declared = find_study(name)
    place = usable_device(device or _default_device())
    kept = _as_writable_store(store)
    begun = time.perf_counter()
    workers = _default_workers(scale, place) if workers is None and engine == "local" else workers
    stages = [_stage_on_device(stage, str(place)) for stage in declared.stages(scale)]
    configs = [config for stage in stages for config in stage.configs]
    tables = ReadOnlyStore(kept.root)
    missing = [config for config in configs if config not in kept]
    without_weights = bool(missing) and all(config in tables for config in configs)
    if not without_weights:
        if engine == "local":  # elsewhere other machines have the data
            _refuse_missing_data(missing, name)
        settings: dict[str, Any] = {"engine": engine, "workers": workers, "address": address}
        settings["show_progress"] = show_progress
        looks, needed = stages_that_read_trials_of(stages, [_stage_on_device(stage, str(place)) for stage in later])
        for step in portions_of_stages([*stages, *looks], units_trained_at_once(engine, workers, place)):
            gpus = step.stage.gpus if place.type == "cuda" else 0
            run_units(step.stage.units, importable_name(step.stage.work), kept, gpus=gpus, **settings)
            if drop_weights:
                _drop_weights(kept, step.finished, needed)
    source = tables if without_weights else kept
    analysis = declared.analyse(Runs(scale, stages, source))
    provenance = {
        **run_provenance(f'flatscope.study("{name}", "{scale}")', place),
        "seconds": round(time.perf_counter() - begun, 1),
        "configurations": len(configs),
        "of which run now": 0 if without_weights else len(missing),
        "stored on": _days_in_words(source.read(config).written for config in configs),
    }
    if without_weights:
        provenance["weights"] = "not kept"
    return judged_study_result(declared, scale, analysis, provenance)


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _as_writable_store(store: str | os.PathLike[str] | Store | None) -> Store:
    return store if isinstance(store, Store) else _writable_store(store or default_store())


def _default_workers(scale: str, place: torch.device) -> int | None:
    """0 where this process does the work: smoke trials end before a process starts, and one GPU is given to one."""
    return 0 if scale == "smoke" or (place.type == "cuda" and torch.cuda.device_count() == 1) else None


def _drop_weights(store: Store, finished: Iterable[Mapping[str, Any]], needed: AbstractSet[str]) -> None:
    """Remove the weights of finished trials, but for those whose keys are needed later."""
    for config in finished:
        if store.key(config) not in needed:
            store.drop_weights(config)


def units_trained_at_once(engine: str, workers: int | None, place: torch.device) -> int | None:
    """Number of units that are trained before those are looked at; None for all, where processes would start anew."""
    if engine != "local" or (place.type != "cuda" and workers != 0):
        return None
    return max(1, workers or 1)


def judged_study_result(declared: Study, scale: str, analysis: Analysis, provenance: Mapping[str, Any]) -> StudyResult:
    """The analysis with its verdicts and its figure; every claim must have been answered, and nothing else."""
    asked, answered = [claim.key for claim in declared.claims], list(analysis.answers)
    if sorted(asked) != sorted(answered):
        raise InputError(
            f"an answer to each claim ({', '.join(asked)})", ", ".join(answered) or "none", where=declared.name
        )
    reasons = declared.words.reasons_at(scale) | dict(analysis.reasons)
    answers = answers_with_reasons(analysis.answers, declared.claims, scale, reasons)
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    # Fixed names inside the file: the same figure gives the same bytes.
    with mpl.rc_context({"svg.hashsalt": declared.name, "svg.fonttype": "none", "font.size": 9}):
        analysis.draw(figure)
        kinds = ("svg",) if scale == "smoke" else ("svg", "png")  # pages show no smoke run
        drawn = {kind: figure_bytes(figure, kind, dpi=DPI) for kind in kinds}
    return StudyResult(
        name=declared.name,
        title=declared.title,
        paper=declared.paper,
        source=declared.figure,
        scale=scale,
        table=analysis.table,
        findings=tuple(finding_of_claim(claim, answers[claim.key], scale) for claim in declared.claims),
        svg=drawn["svg"].decode(),
        png=drawn.get("png", b""),
        deviations=tuple(declared.words.differs.get(scale, ())),
        notes=analysis.notes,
        provenance=provenance,
    )


def _refuse_missing_data(configs: Iterable[Mapping[str, Any]], name: str) -> None:
    """Data sets that trials need and that are not here, said before any of them begins."""
    described = [config["data"] for config in configs if isinstance(config.get("data"), Mapping)]
    needed = {str(data.get("name")) for data in described}
    for entry in available():
        if entry.name in needed and entry.status in ("absent", "incomplete"):
            fix = f"Run flatscope data fetch {entry.name}, or name the folder that has it in FLATSCOPE_DATA"
            raise InputError(f"the data set {entry.name}", entry.status, where=f"study {name}", fix=fix)


def default_store() -> Path:
    """Folder of the networks of studies unless one is named."""
    named = os.environ.get(STORE_VARIABLE)
    if named:
        return Path(named)
    try:
        return Path.home() / ".cache" / "flatscope" / "studies"
    except RuntimeError:
        fix = f"Name a folder with --store or in {STORE_VARIABLE}"
        raise FlatscopeError("a home folder for trained networks", "none", where="study", fix=fix) from None


def _writable_store(folder: str | os.PathLike[str]) -> Store:
    """The store in that folder, refused before any work where nothing could be kept in it."""
    kept = Store(folder)
    if Path(kept.root).is_absolute():  # an address of another kind says itself what is wrong
        try:
            Path(kept.root).mkdir(parents=True, exist_ok=True)
            writable = os.access(kept.root, os.W_OK)
        except OSError as problem:
            raise _store_error(folder, str(problem)) from problem
        if not writable:
            raise _store_error(folder, "one that may not be written to")
    return kept


def _store_error(folder: str | os.PathLike[str], got: str) -> InputError:
    fix = f"Name another folder with --store or in {STORE_VARIABLE}"
    return InputError("a folder for trained networks", got, where=f"store {os.fspath(folder)}", fix=fix)


def run_provenance(call: str, place: torch.device) -> dict[str, str]:
    """Which version ran where and when, and by which command or call."""
    return {
        "version": __version__,
        "command": command_line_or_call(call),
        "device": device_in_words(place),
        "torch": torch.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def device_in_words(place: torch.device) -> str:
    """The machine in a few words, without its name."""
    if place.type == "cuda":
        return torch.cuda.get_device_name(place)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def _days_in_words(written: Iterable[str]) -> str:
    """The day, or the first and the last, on which trials were stored."""
    days = sorted({moment[:10] for moment in written})
    return " to ".join(dict.fromkeys(days[:1] + days[-1:]))


def _stage_on_device(stage: Stage, device: str) -> Stage:
    """The stage with every configuration told where to run; where a trial runs is not part of its identity."""
    units: Sequence[Sequence[Mapping[str, Any]]] = [
        [{**config, "device": config.get("device", device)} for config in unit] for unit in stage.units
    ]
    return Stage(units, stage.work, stage.gpus)


def command_line_or_call(call: str) -> str:
    """The command line if this is one, else the call."""
    if Path(sys.argv[0]).name in ("flatscope", "__main__.py"):
        return shlex.join(["flatscope", *sys.argv[1:]])
    return call
