"""The report: one self-contained page, and the same figures for papers."""

from flatscope.reports.page import report, save_figures
from flatscope.reports.population_frame import PopulationFrame

__all__ = ["PopulationFrame", "report", "save_figures"]
