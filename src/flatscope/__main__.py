"""`python -m flatscope`, for machines where the package is not installed but lies on the path."""

from flatscope.cli import main

main()
