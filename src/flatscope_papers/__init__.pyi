"""Public names, each with the module that has it: what type checkers read, and what is loaded when it is asked for."""

from flatscope_papers.study_registry import find_study as find_study
from flatscope_papers.study_registry import studies as studies
from flatscope_papers.study_result import load_result as load_result
from flatscope_papers.study_runs import study as study
