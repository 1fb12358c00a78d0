"""The page of all commands, from their own help."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flatscope.cli.commands import command_names, load_command

INTRODUCTION = """# Commands

Every command answers to `--help`; this page is that help. Where a command takes `--model`, `--weights` and `--data`,
they mean the same everywhere: [your own model](how-to/command-line.md).
"""


def page() -> str:
    """All commands with their options, in Markdown."""
    lines = [INTRODUCTION]
    for name in command_names():
        lines += _described(load_command(name), f"flatscope {name}", "##")
    return "\n".join(lines) + "\n"


def _described(command: Any, name: str, level: str) -> Iterator[str]:
    yield from (f"{level} `{name}`", "", _escaped((command.help or "").split("\f")[0]).strip(), "")
    below = getattr(command, "commands", {})
    for word, inner in below.items():
        yield from _described(inner, f"{name} {word}", level + "#")
    parameters = [entry for entry in command.params if not getattr(entry, "hidden", False) and entry.name != "help"]
    if below or not parameters:
        return
    yield from ("| option | what | default |", "|---|---|---|")
    for entry in parameters:
        argument = entry.param_type_name == "argument"
        shown = (entry.metavar or entry.name).upper() if argument else ", ".join([*entry.opts, *entry.secondary_opts])
        default = "" if entry.default in (None, False, ()) or callable(entry.default) else f"`{entry.default}`"
        default = "required" if entry.required else default
        yield f"| `{shown}` | {_escaped(getattr(entry, 'help', '') or '')} | {default} |"
    yield ""


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
