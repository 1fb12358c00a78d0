"""The version, in one place: read by the build, the tables and the report."""

VERSION = "0.1.0"
