"""The report: one self-contained page, and the same figures for papers."""

from flatscope.report.figures import save_figures
from flatscope.report.page import report

__all__ = ["report", "save_figures"]
