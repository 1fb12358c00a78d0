"""A measured network on a terminal: fit and gap, the measures to look at first, then all of them by family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.table import Table as Grid
from rich.text import Text

from flatscope.cli.output import console
from flatscope.context import Context
from flatscope.formatting import number, numbered
from flatscope.registry import Declaration, declarations
from flatscope.reports.measured import MANY, RESCALINGS, headline_words
from flatscope.table import Table
from flatscope.training.data import Data, Source

SHORT = 34  # letters of a remark that is not put below the table
NAMES = {"psi flatness": "PSI flatness", "pac bayes": "PAC-Bayes"}
MOST = 0.5
OTHERS = "others"  # measures that a table of another version has


@dataclass(frozen=True)
class Fit:
    """How well a network does on its data: (training, test), test None where there is none, errors in classes only."""

    data: str
    how: str
    n_train: int
    n_test: int
    parameters: int
    loss: tuple[float, float | None]
    error: tuple[float, float | None] | None

    @classmethod
    def of(cls, context: Context, data: Data | Source) -> Fit:
        """Loss and error of the network of a context."""
        problem = context.problem
        train, test = context.scores(), None if problem.test is None else context.scores("test")
        return cls(
            data=data.name,
            how=data.how,
            n_train=problem.n_train,
            n_test=0 if problem.test is None else problem.test.n,
            parameters=sum(problem.params[name].numel() for name in problem.trainable),
            loss=(train.loss, None if test is None else test.loss),
            error=(train.error, None if test is None else test.error) if problem.classification else None,
        )

    @property
    def fits(self) -> bool:
        """Whether the network gets most of its training samples right; regression has no such measure."""
        return self.error is None or self.error[0] <= MOST

    def doubt(self, saved: float | None) -> str:
        """What to say where the training error is far above the one that was saved with the weights; else nothing."""
        if saved is None or self.error is None:
            return ""
        noise = 4 * (max(saved, 1 / self.n_train) * (1 - saved) / self.n_train) ** 0.5  # of a draw of the samples
        if self.error[0] <= saved + 0.01 + noise:
            return ""
        return (
            f"the training error is {100 * self.error[0]:.2f} %, and was {100 * saved:.2f} % when these weights were "
            "saved: are these the inputs that the network was trained on? (--standardize and --no-standardize, "
            "--flatten, --data-seed)"
        )

    def __str__(self) -> str:
        """What shows at once that weights and data do not belong together."""
        error = "" if self.error is None else f", error {100 * self.error[0]:.2f} %"
        samples = numbered(self.n_train, "training sample")
        return f"{self.data}, {samples}, {self.how}: loss {self.loss[0]:.4g}{error}"


def show_measured(table: Table, fit: Fit) -> None:
    """The summary, and below it every number of the table."""
    screen, rows = console(), [_Row.of(line) for line in table.lines()]
    counts = f"{fit.n_train} training and {numbered(fit.n_test, 'test sample')}"
    samples = counts if fit.n_test else numbered(fit.n_train, "training sample")
    screen.print(Text(f"{fit.data}: {samples}, {fit.how}; {numbered(fit.parameters, 'parameter')}"))
    screen.print(_fit_grid(fit))
    for remark in table.meta.get("remarks", ()):
        screen.print(Text.assemble(("To keep in mind: ", "bold yellow"), f"{remark}\n"))
    if len(rows) > MANY:
        screen.print(Text("First of all (✓: stays when layers or units are rescaled; ≈: estimated, ± one s.e.)"))
        screen.print(_headline_grid(rows))
        screen.print(Text(_extent(table)))
    notes: dict[str, int] = {}
    screen.print(_family_grid(rows, notes))
    for remark, place in notes.items():
        screen.print(Text(f"[{place}] {remark}"))


def _extent(table: Table) -> str:
    """How many of the measures the table has, and how to get the others where only long ones are missing."""
    left = [entry for entry in declarations().values() if entry.name not in table.names]
    if not left:
        return f"All {len(table.names)} measures by family"
    others = "; the long ones with -m all" if all(entry.cost == "long" for entry in left) else ""
    return f"{len(declarations()) - len(left)} of {len(declarations())} measures by family{others}"


@dataclass(frozen=True)
class _Row:
    """One line of a table, with its error beside the value."""

    name: str
    layer: str
    value: str
    remark: str

    @classmethod
    def of(cls, line: list[str]) -> _Row:
        name, layer, value, stderr, exact, remark = line
        value, _, many = value.partition(" (")  # 0.1 … 0.3 (64 units)
        known = f"{value} ± {float(stderr):.2g}" if stderr else value
        remarks = "; ".join(words for words in (many.removesuffix(")"), remark) if words)
        return cls(name, layer, f"≈ {known}" if exact == "estimate" else known, remarks)

    @property
    def entry(self) -> Declaration | None:
        return (declarations() | declarations("bound")).get(self.name.partition("[")[0])


def _fit_grid(fit: Fit) -> Grid:
    grid = Grid(header_style="bold", box=SIMPLE)
    grid.add_column("")
    for name in ("train", "test", "gap") if fit.n_test else ("train",):
        grid.add_column(name, justify="right")
    grid.add_row("loss", *_with_gap(fit.loss, number))
    if fit.error is not None:
        grid.add_row("error", *_with_gap(fit.error, lambda share: f"{100 * share:.2f} %"))
    return grid


def _with_gap(values: tuple[float, float | None], shown: Callable[[float], str]) -> list[str]:
    train, test = values
    return [shown(train)] if test is None else [shown(train), shown(test), shown(test - train)]


def _headline_grid(rows: list[_Row]) -> Grid:
    """A line each, with a mark under every rescaling that leaves the number as it is."""
    grid = Grid(header_style="bold", box=SIMPLE)
    for name in ("measure", "value", *(key.removesuffix("_scaling") for key in RESCALINGS), "what it is"):
        grid.add_column(name, justify="right" if name == "value" else "left", no_wrap=name in ("measure", "value"))
    for name, words in headline_words().items():
        # Of several options the first: the others are in the table below.
        row = next((row for row in rows if row.name.partition("[")[0] == name and not row.layer), None)
        if row is not None:
            kept = row.entry.invariant_under if row.entry is not None else frozenset()
            marks = ["✓" if key in kept else "—" for key in RESCALINGS]
            options = row.name[len(name) :].strip("[]")
            grid.add_row(Text(name), Text(row.value), *marks, f"{words}, {options}" if options else words)
    return grid


def _family_grid(rows: list[_Row], notes: dict[str, int]) -> Grid:
    """Every line under the heading of its family; long remarks become `notes` with a number each."""
    families: dict[str, list[_Row]] = {}
    for row in rows:
        families.setdefault(OTHERS if row.entry is None else row.entry.family, []).append(row)
    grid = Grid(header_style="bold", box=SIMPLE)
    for name in ("measure", "layer", "value", "remark"):
        grid.add_column(name, justify="right" if name == "value" else "left", no_wrap=name in ("measure", "value"))
    for family, members in families.items():
        grid.add_row(Text(NAMES.get(family, family.capitalize()), style="bold"))
        for row in members:
            remark = row.remark
            if len(remark) > SHORT:
                remark = f"[{notes.setdefault(remark, len(notes) + 1)}]"
            grid.add_row(Text(f"  {row.name}"), Text(row.layer, overflow="fold"), Text(row.value), Text(remark))
        grid.add_section()
    return grid
