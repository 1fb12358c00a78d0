"""The version, in one place: read by the build, the tables and the report."""

__version__ = "0.3.0"
