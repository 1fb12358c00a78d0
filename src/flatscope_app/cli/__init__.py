"""The command line: `flatscope COMMAND --help` tells each command's options."""

from flatscope_app.cli.app import main

__all__ = ["main"]
