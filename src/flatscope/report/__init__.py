"""The report: one self-contained page, and the same figures for papers."""

from flatscope.report.figures import save_figures
from flatscope.report.page import report
from flatscope.report.population import PopulationFrame

__all__ = ["PopulationFrame", "report", "save_figures"]
