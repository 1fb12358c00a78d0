"""The commands put together, and what a user sees when something goes wrong.

Exit codes: 0 done, 1 the run failed, 2 wrong usage or input, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
import traceback
import warnings
from pathlib import Path

import typer

from flatscope.cli.commands import ALONE, Commands
from flatscope.cli.output import show_error, show_warning
from flatscope.errors import FlatscopeError, InputError, lack_of_memory
from flatscope.formatting import printable_text
from flatscope.version import __version__

app = typer.Typer(
    name="flatscope",
    cls=Commands,
    help="How flat is the minimum of a trained network, does that number mean anything, and what does it say?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"flatscope {__version__}")
        raise typer.Exit


@app.callback()
def _program_options(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Show the version."),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
) -> None:
    """Options of every command."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "TORCHELASTIC_RUN_ID" in os.environ
    if several and context.invoked_subcommand in ALONE:
        got = f"{os.environ['WORLD_SIZE']} that torchrun started"
        fix = "Start it without torchrun; measure, compare and audit share their work over ranks"
        raise InputError("one process", got, where=f"flatscope {context.invoked_subcommand}", fix=fix)


def main() -> None:
    """Run the command line; a traceback is shown only with --debug."""
    debug = "--debug" in sys.argv
    if debug:
        # Accepted anywhere on the line, since people add it to the end of the command that failed.
        sys.argv = [sys.argv[0], *[word for word in sys.argv[1:] if word != "--debug"]]
    warnings.showwarning = show_warning
    told_to_end: list[int] = []

    def end(number: int, _: object) -> None:
        told_to_end.append(number)
        by = " by torchrun, as it does where another rank has ended" if "TORCHELASTIC_RUN_ID" in os.environ else ""
        raise KeyboardInterrupt(f"Terminated{by}")  # as Ctrl-C: what is finished is kept, and said

    signal.signal(signal.SIGTERM, end)
    try:
        app()
    except FlatscopeError as problem:
        _exit_with_error(problem, debug, code=2 if isinstance(problem, InputError) else 1)
    except (KeyboardInterrupt, SystemExit) as leaving:
        interrupt = _interrupt_behind_exit(leaving)
        if interrupt is None:
            raise
        show_error(str(interrupt) or "Interrupted.")
        sys.exit(128 + (told_to_end or [signal.SIGINT])[0])
    except Exception as problem:
        _exit_with_error(problem, debug, code=1)


def _interrupt_behind_exit(leaving: BaseException | None) -> KeyboardInterrupt | None:
    """The Ctrl-C that typer turned into an exit, losing what it said (where training can be taken up again)."""
    while leaving is not None and not isinstance(leaving, KeyboardInterrupt):
        leaving = leaving.__cause__ or leaving.__context__
    return leaving


def _exit_with_error(problem: Exception, debug: bool, code: int) -> None:
    if debug:
        sys.stderr.write(printable_text("".join(traceback.format_exception(problem))))
    elif isinstance(problem, FlatscopeError):
        show_error(str(problem))
    elif words := lack_of_memory(problem):
        show_error(f"{words[0].upper()}{words[1:]}.")
    else:
        show_error(f"{type(problem).__name__}: {problem}{_users_source_line(problem)} (--debug shows more)")
    sys.exit(code)


def _users_source_line(problem: Exception) -> str:
    """The innermost line of a file that is not installed, such as that of a user's own factory."""
    installed = [sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")]
    passed_over = (*installed, str(Path(__file__).parents[2] / "flatscope"), "<")  # this package and those beside it
    lines = [line for line in traceback.extract_tb(problem.__traceback__) if not line.filename.startswith(passed_over)]
    return f", in {lines[-1].filename} line {lines[-1].lineno}" if lines else ""
