"""The packages that come with the library, and how it finds what they add to it.

`flatscope` measures trained networks. Packages beside it, its parts, train them (`flatscope_training`), are what a
person sees (`flatscope_app`: the command line and the page), and repeat the studies of papers (`flatscope_papers`). The
library imports none of them. Each announces itself by an entry point of the group `flatscope.parts` and has an `OFFER`:
a table of names, so that nothing is loaded before it is asked for.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from flatscope.errors import InputError

GROUP = "flatscope.parts"
# Found by these names where the source runs without being installed.
PACKAGES = ("flatscope_training", "flatscope_app", "flatscope_papers")


@dataclass(frozen=True)
class Offer:
    """What a package adds to the library. Places are written "module:name", the module below the package.

    Attributes:
        package: its name.
        names: public names of `flatscope`, each with its place.
        main: place of what runs the command line.
        commands: commands to add to it, each with its line in the help and its place: a function or a `typer.Typer`.
        kinds: place of kinds of things to add to a report, {name: `flatscope_app.reports.kinds.Kind`}.
        former: modules that moved here, by their earlier name: stored sweeps still call functions by it.
    """

    package: str
    names: Mapping[str, str] = field(default_factory=dict)
    main: str = ""
    commands: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    kinds: str = ""
    former: Mapping[str, str] = field(default_factory=dict)

    def load(self, place: str) -> Any:
        """What is at a place: a module, or a name in it."""
        module, _, name = place.partition(":")
        found = importlib.import_module(f"{self.package}.{module}")
        return getattr(found, name) if name else found

    def attribute(self, name: str) -> Any:
        """A public name, as the `__getattr__` of the package gives it."""
        if name not in self.names:
            raise AttributeError(f"module {self.package!r} has no attribute {name!r}")
        return self.load(self.names[name])


@functools.cache
def parts() -> tuple[Offer, ...]:
    """The parts that are installed."""
    announced = (point.module for point in entry_points(group=GROUP))
    found: list[Offer] = []
    for package in dict.fromkeys((*PACKAGES, *announced)):
        try:
            found.append(importlib.import_module(package).OFFER)
        except ModuleNotFoundError as missing:
            if missing.name != package:
                raise
    return tuple(found)


def public_name(name: str) -> Any:
    """What a part offers under a public name of `flatscope`.

    Raises:
        InputError: its part is not installed.
    """
    for part in parts():
        if name in part.names:
            return part.load(part.names[name])
    raise missing_part(f"flatscope.{name}")


def command_line() -> Callable[[], None]:
    """What runs the commands.

    Raises:
        InputError: the part that has them is not installed.
    """
    for part in parts():
        if part.main:
            main: Callable[[], None] = part.load(part.main)
            return main
    raise missing_part("python -m flatscope")


def offered_kinds() -> Iterator[tuple[str, Any]]:
    """Kinds of things that a report can show thanks to parts."""
    for part in parts():
        if part.kinds:
            yield from part.load(part.kinds).items()


def present_module(name: str) -> str:
    """Where a module is now that was called so."""
    return next((part.former[name] for part in parts() if name in part.former), name)


def missing_part(where: str) -> InputError:
    """The error that says what to install."""
    installed = {part.package for part in parts()}
    absent = " and ".join(package for package in PACKAGES if package not in installed)
    fix = f"Install the whole of flatscope (pip install flatscope), which brings {absent}"
    return InputError(f"the package {absent}", "not installed", where=where, fix=fix)
