"""The commands by name: each is imported when it is run, so that the others' packages need not load first."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from flatscope.cli.options import spread
from flatscope.papers import from_papers

# Where each command is, and its line in the list of commands, which a test holds to the command's own help.
# `papers:` stands for the package of the papers, wherever it is installed.
COMMANDS = {
    "demo": (
        "flatscope.cli.demo:demo",
        "Train two networks on the embedded digits, measure both, write a report. Needs no download.",
    ),
    "measure": ("flatscope.cli.measures:measure", "Measure a trained model and print the table."),
    "compare": (
        "flatscope.cli.compare:compare",
        "Rank checkpoints by every measure that may rank them, and name those that may not.",
    ),
    "audit": (
        "flatscope.cli.audit:audit",
        "Rewrite a network's weights without changing its function, and see which measures move.",
    ),
    "landscape": (
        "flatscope.cli.landscape:landscape",
        "Draw the loss around a network, in weight space or in path space, where rescaling cannot change the picture.",
    ),
    "spectrum": (
        "flatscope.cli.spectrum:spectrum",
        "Find the largest eigenvalues of a network's Hessian and how all of them are spread.",
    ),
    "train": (
        "flatscope.cli.train:train",
        "Train a model with SGD, or many at once; run the same command again to resume.",
    ),
    "report": (
        "flatscope.cli.report:report",
        "Make one self-contained HTML page from saved results, and figures for papers.",
    ),
    "measures": ("flatscope.cli.measures:measures", "List the measures and bounds, or explain some of them."),
    "sweep": ("flatscope.cli.sweep:app", "Many trials, each trained and measured once; kills lose nothing."),
    "data": ("flatscope.cli.data:app", "The data sets: what is here, get them, check them."),
    "study": ("papers:command", "Figures and tables of the four papers, re-run with a verdict."),
}

# Several processes of these would write the same files at once, and each would do all of the work.
ALONE = ("demo", "landscape", "train", "sweep", "study")


class Commands(TyperGroup):
    """A group that lists its commands from the table above, and imports the one that is to run."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands.update({name: TyperCommand(name, help=line) for name, (_, line) in COMMANDS.items()})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the words name, itself and not its entry in the list."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, load_command(str(name)), rest


def load_command(name: str) -> Any:
    """Import one of the commands."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    found: typer.Typer | Callable[..., None] = (
        from_papers(attribute) if module == "papers" else getattr(importlib.import_module(module), attribute)
    )
    if isinstance(found, typer.Typer):
        group = typer.main.get_group(found)
        group.name = name
        return group
    alone = typer.Typer(add_completion=False)
    alone.command(name)(spread(found))
    return typer.main.get_command(alone)
