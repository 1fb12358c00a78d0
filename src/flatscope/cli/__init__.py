"""The command line: `flatscope COMMAND --help` tells each command's options."""

from flatscope.cli.app import main

__all__ = ["main"]
