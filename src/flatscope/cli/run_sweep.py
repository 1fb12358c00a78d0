"""`flatscope sweep run|resume|status|export`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import typer

from flatscope.cli.options import EngineOptions
from flatscope.cli.output import check_output_file, show_grid, show_note
from flatscope.errors import InputError, refuse_unknown
from flatscope.formatting import first_of_names, numbered
from flatscope.training.sweeps.configuration import TRAIN_AND_MEASURE, Sweep
from flatscope.training.sweeps.engines import run_units
from flatscope.training.sweeps.store import Store
from flatscope.training.sweeps.work import check_configurations


def run_sweep_file(file: Path, given: EngineOptions) -> None:
    """Run what the store does not have of the sweep that a file describes."""
    sweep = Sweep.from_file(file)
    if sweep.work == TRAIN_AND_MEASURE:  # only of it is known what it needs
        check_configurations(sweep.configs(), str(file))
    kept = Store(given.store)
    _note_changed_sweep_file(sweep, kept)
    kept.remember(sweep.name, sweep.to_dict())
    _run_and_show_sweep(sweep, kept, given)


def resume_sweep(name: str | None, given: EngineOptions) -> None:
    """Go on with a sweep that the store remembers."""
    kept = Store(given.store)
    _run_and_show_sweep(_stored_sweep(kept, name), kept, given)


def show_sweep_status(store: str) -> None:
    """Print the progress of the sweeps of a store, and what is damaged in it."""
    kept = Store(store)
    show_grid(*sweep_status_rows(kept))
    failures = kept.failures()
    for key, error in failures.items():
        show_note(f"{key[:8]} failed: {error.splitlines()[0]}")
    damaged, damaged_sweeps = kept.damaged(), kept.damaged_sweeps()
    if damaged:
        count = numbered(len(damaged), "trial")
        show_note(f"{count} damaged ({first_of_names([key[:8] for key in damaged], 3)}): run the sweep again")
    for problem in damaged_sweeps.values():
        show_note(str(problem))
    if failures or damaged or damaged_sweeps:
        raise typer.Exit(code=1)


def sweep_status_rows(kept: Store) -> tuple[list[str], list[list[str]]]:
    """Header and rows: of every sweep how many trials are done, running, failed and waiting."""
    running, failures = kept.running(), kept.failures()
    rows = []
    for sweep in _stored_sweeps(kept).values():
        keys = {kept.key(config): config in kept for config in sweep.configs()}
        left = {key for key, done in keys.items() if not done}
        failed, busy = left & failures.keys() - running, left & running
        counts = [len(keys), len(keys) - len(left), len(busy), len(failed), len(left - busy - failed)]
        rows.append([sweep.name, *map(str, counts)])
    return ["sweep", "trials", "done", "running", "failed", "waiting"], rows


def export_sweep_results(out: Path, store: str) -> None:
    """All results of a store as one table."""
    check_output_file(out, (".parquet", ".csv"))
    kept = Store(store)
    if not kept.damaged() and not len(kept.frame()):
        fix = "Name the folder that the sweep was run with: --store DIR"
        raise InputError("a store with finished trials", "none there", f"store {kept.root}", fix)
    kept.export(out)
    show_note(f"{numbered(len(kept.frame()), 'trial')} in {out}")


def _run_and_show_sweep(sweep: Sweep, store: Store, given: EngineOptions) -> None:
    units = sweep.units()
    trials = [config for unit in units for config in unit]
    there = sum(config in store for config in trials)
    if there:
        verb = "is" if len(trials) == 1 else "are"
        show_note(f"{there} of {numbered(len(trials), 'trial')} {verb} done already")
    settings = {field.name: getattr(given, field.name) for field in fields(given) if field.name != "store"}
    frame = run_units(units, sweep.work, store, **settings)
    show_grid(["sweep", "trials", "done"], [[sweep.name, str(len(trials)), str(len(frame))]])
    show_note(f"results in {store.root}; `flatscope sweep export OUT.parquet --store {store.root}` writes one table")


def _note_changed_sweep_file(sweep: Sweep, store: Store) -> None:
    """A file that was changed under the same name replaces the sweep; trials that are no longer in it stay stored."""
    known = store.sweeps().get(sweep.name)
    before = {store.key(config) for config in Sweep.from_dict(known).configs()} if known else set()
    dropped = before - {store.key(config) for config in sweep.configs()}
    if dropped:
        verb = "is" if len(dropped) == 1 else "are"
        trials = numbered(len(dropped), "trial")
        show_note(f"{trials} of the {sweep.name!r} that was run here before {verb} no longer in it")


def _stored_sweeps(store: Store) -> dict[str, Sweep]:
    sweeps = {name: Sweep.from_dict(settings, f"sweep {name}") for name, settings in store.sweeps().items()}
    if not sweeps:
        for problem in store.damaged_sweeps().values():
            raise problem
        fix = "Run one: flatscope sweep run FILE.toml --store DIR"
        raise InputError("a store with a sweep", "none there", where=f"store {store.root}", fix=fix)
    return sweeps


def _stored_sweep(store: Store, name: str | None) -> Sweep:
    sweeps, damaged = _stored_sweeps(store), store.damaged_sweeps()
    if name in damaged:
        raise damaged[name]
    if name is None and len(sweeps) + len(damaged) > 1:
        raise InputError(
            "the name of one of its sweeps", ", ".join((*sweeps, *damaged)), f"store {store.root}", "Give --name"
        )
    chosen = name if name is not None else next(iter(sweeps))
    refuse_unknown(chosen, sweeps, "sweep")
    return sweeps[chosen]
