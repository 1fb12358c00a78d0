"""`python -m flatscope`, for machines where the package is not installed but lies on the path."""

from flatscope.parts import command_line

command_line()()
