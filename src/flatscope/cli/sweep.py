"""`flatscope sweep run|resume|status|export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatscope.cli.output import check_place, show_grid, show_note
from flatscope.errors import InputError, UnknownNameError
from flatscope.formatting import numbered

if TYPE_CHECKING:
    from flatscope.sweeps.plan import Sweep
    from flatscope.sweeps.store import Store

# What loads torch is imported inside the commands: their help, and a slip in one, should not take seconds.

app = typer.Typer(help="Many trials, each trained and measured once; kills lose nothing.", no_args_is_help=True)

StoreRoot = Annotated[str, typer.Option("--store", help="Folder of the results, or an address (s3://…).")]
Engine = Annotated[str, typer.Option(help="local (processes here) or ray.")]
Workers = Annotated[int | None, typer.Option(help="Units at once; 0 runs them in this process.")]
Address = Annotated[str | None, typer.Option(help="Of a running Ray cluster.")]
Cpus = Annotated[float, typer.Option(help="Cores for each unit.")]
Gpus = Annotated[float, typer.Option(help="GPUs for each unit; a fraction shares one.")]
Name = Annotated[str | None, typer.Option(help="Which sweep, if the store has several.")]


@app.command("run")
def run(
    file: Annotated[Path, typer.Argument(help="TOML file that describes the sweep.")],
    store: StoreRoot,
    engine: Engine = "local",
    workers: Workers = None,
    address: Address = None,
    cpus: Cpus = 1,
    gpus: Gpus = 0,
) -> None:
    """Run what the store does not have; run the same command again, or `resume`, after a kill."""
    from flatscope.sweeps.plan import TRAIN_AND_MEASURE, Sweep
    from flatscope.sweeps.store import Store
    from flatscope.sweeps.work import check_configs

    sweep = Sweep.from_file(file)
    if sweep.work == TRAIN_AND_MEASURE:  # only of it is known what it needs
        check_configs(sweep.configs(), str(file))
    kept = Store(store)
    _note_changes(sweep, kept)
    kept.remember(sweep.name, sweep.to_dict())
    _run(sweep, kept, engine, workers, address, cpus, gpus)


@app.command("resume")
def resume(
    store: StoreRoot,
    name: Name = None,
    engine: Engine = "local",
    workers: Workers = None,
    address: Address = None,
    cpus: Cpus = 1,
    gpus: Gpus = 0,
) -> None:
    """Go on with a sweep that the store remembers."""
    from flatscope.sweeps.store import Store

    kept = Store(store)
    _run(_remembered(kept, name), kept, engine, workers, address, cpus, gpus)


@app.command("status")
def status(store: StoreRoot) -> None:
    """How far the sweeps of a store are; exit code 1 if trials failed."""
    from flatscope.sweeps.store import Store

    kept = Store(store)
    running, failures = kept.running(), kept.failures()
    rows = []
    for plan in _plans(kept).values():
        keys = {kept.key(config): config in kept for config in plan.configs()}
        left = {key for key, done in keys.items() if not done}
        failed, busy = left & failures.keys() - running, left & running
        counts = [len(keys), len(keys) - len(left), len(busy), len(failed), len(left - busy - failed)]
        rows.append([plan.name, *map(str, counts)])
    show_grid(["sweep", "trials", "done", "running", "failed", "waiting"], rows)
    for key, error in failures.items():
        show_note(f"{key[:8]} failed: {error.splitlines()[0]}")
    if failures:
        raise typer.Exit(code=1)


@app.command("export")
def export(
    out: Annotated[Path, typer.Argument(help="File to write: .parquet or .csv.")],
    store: StoreRoot,
) -> None:
    """Write all results of a store to one table: a row per trial, its settings and its metrics."""
    from flatscope.sweeps.store import Store

    check_place(out, (".parquet", ".csv"))
    kept = Store(store)
    kept.export(out)
    show_note(f"{numbered(len(kept.frame()), 'trial')} in {out}")


def _run(
    sweep: Sweep, store: Store, engine: str, workers: int | None, address: str | None, cpus: float, gpus: float
) -> None:
    from flatscope.sweeps.engines import run as run_units

    units = sweep.units()
    trials = [config for unit in units for config in unit]
    there = sum(config in store for config in trials)
    if there:
        verb = "is" if len(trials) == 1 else "are"
        show_note(f"{there} of {numbered(len(trials), 'trial')} {verb} done already")
    frame = run_units(units, sweep.work, store, engine=engine, workers=workers, address=address, cpus=cpus, gpus=gpus)
    show_grid(["sweep", "trials", "done"], [[sweep.name, str(len(trials)), str(len(frame))]])
    show_note(f"results in {store.root}; `flatscope sweep export OUT.parquet --store {store.root}` writes one table")


def _note_changes(sweep: Sweep, store: Store) -> None:
    """A file that was changed under the same name replaces the plan; trials that are no longer in it stay stored."""
    from flatscope.sweeps.plan import Sweep

    known = store.plans().get(sweep.name)
    before = {store.key(config) for config in Sweep.from_dict(known).configs()} if known else set()
    dropped = before - {store.key(config) for config in sweep.configs()}
    if dropped:
        verb = "is" if len(dropped) == 1 else "are"
        trials = numbered(len(dropped), "trial")
        show_note(f"{trials} of the {sweep.name!r} that was run here before {verb} no longer in it")


def _plans(store: Store) -> dict[str, Sweep]:
    from flatscope.sweeps.plan import Sweep

    plans = {name: Sweep.from_dict(plan, f"plan {name}") for name, plan in store.plans().items()}
    if not plans:
        fix = "Run one: flatscope sweep run FILE.toml --store DIR"
        raise InputError("a store with a sweep", "none there", where=f"store {store.root}", fix=fix)
    return plans


def _remembered(store: Store, name: str | None) -> Sweep:
    plans = _plans(store)
    if name is None and len(plans) > 1:
        raise InputError("the name of one of its sweeps", ", ".join(plans), f"store {store.root}", "Give --name")
    chosen = name if name is not None else next(iter(plans))
    if chosen not in plans:
        raise UnknownNameError.among(chosen, plans, "sweep")
    return plans[chosen]
