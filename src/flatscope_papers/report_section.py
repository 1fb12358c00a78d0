"""What a report can show thanks to this package: results of studies. Light, since every page asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatscope.extend import Kind, PagePart


def _is_study(item: object) -> bool:
    """By its parts: the class stands on Matplotlib, for which a page of tables should not wait."""
    return all(hasattr(item, part) for part in ("findings", "rows", "svg", "scale", "provenance"))


def _scale_of_study(study: Any) -> str:
    return f"{study.scale} scale"


def _studies_section(studies: Mapping[str, Any], colours: Mapping[str, int]) -> PagePart:
    from flatscope_papers.pages.section import report_section

    return report_section(studies, colours)


def _read_study_folder(folder: Path) -> Any:
    from flatscope_papers.study_result import load_result

    return load_result(folder)


KINDS: dict[str, Kind] = {
    "studies": Kind(
        "the result of a study",
        _is_study,
        lambda item: str(item.name),
        _studies_section,
        _scale_of_study,
        folder_file="verdicts.json",
        read_folder=_read_study_folder,
    )
}
