"""Studies on the page: a paper's figure beside what came out here, and a verdict on every claim."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files

from markupsafe import Markup

from flatscope.extend import PagePart, Section
from flatscope_papers.pages.study_cards import study_cards, summary_of_studies
from flatscope_papers.study_result import StudyResult

IN_ADDRESS = {"%": "%25", "#": "%23", "'": "%27", "//": "%2F%2F", "&": "&amp;"}
# What Matplotlib writes into a picture and nobody sees: names that nothing refers to, ten fonts for every word, blanks.
NAMES = re.compile(r' id="([^"]*)"')
FONTS = re.compile(r"'DejaVu Sans'(?:, '[^']*')+, sans-serif")
STYLES = re.compile(r'style="[^"]*"')
ALIKE = re.compile(r'<use [^>]*? style="([^"]*)"/>(?:<use [^>]*? style="\1"/>)+')
PLACES = re.compile(r'( (?:d|x|y|points)=")([^"]*)')
DECIMALS = re.compile(r"-?\d+\.\d{3,}(?!\d*e)")


def report_section(studies: Mapping[str, StudyResult], _: Mapping[str, int]) -> PagePart:
    """Verdicts in the summary; per study its figure, its claims and how its setting differs from the paper's."""
    pictures = {name: image_address_of_svg(study.svg) if study.svg else "" for name, study in studies.items()}
    return PagePart(
        summary_of_studies(studies),
        [Section("studies", "Studies", study_cards(studies, pictures), open=True)],
        {"studies": _common_provenance(studies)},
        style=_study_intro_text("studies.css"),
        script=_study_intro_text("studies.js"),
    )


def _study_intro_text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def image_address_of_svg(svg: str) -> Markup:
    """A picture as the address of an image, for an attribute in single quotes.

    As text, with positions to a hundredth of a point, it takes half of what base64 of the file would: a page may hold
    fifty of them.
    """
    text = svg[svg.find("<svg") :]
    for unseen in (r"<metadata>.*?</metadata>", r"<!--.*?-->"):
        text = re.sub(unseen, "", text, flags=re.DOTALL)
    text = " ".join(text.split()).replace("> <", "><")
    text = FONTS.sub("'DejaVu Sans', sans-serif", text)
    text = STYLES.sub(lambda match: match[0].replace("; ", ";").replace(": ", ":"), text)
    referenced = set(re.findall(r"#([\w-]+)", text))
    text = NAMES.sub(lambda match: match[0] if match[1] in referenced else "", text)
    text = PLACES.sub(lambda match: match[1] + _rounded_svg_positions(match[2]), text)
    text = ALIKE.sub(_marks_grouped_by_style, text)
    for sign, written in IN_ADDRESS.items():
        text = text.replace(sign, written)
    return Markup(f"data:image/svg+xml;charset=utf-8,{text}")


def _marks_grouped_by_style(marks: re.Match[str]) -> str:
    """Marks of one style as a group that has it."""
    style = f' style="{marks[1]}"'
    return f"<g{style}>{marks[0].replace(style, '')}</g>"


def _rounded_svg_positions(places: str) -> str:
    """Positions to a hundredth of a point, and no blanks around the letters of a path."""
    rounded = DECIMALS.sub(lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), places)
    return re.sub(r" ?([A-Za-z]) ?", r"\1", rounded)


def _common_provenance(studies: Mapping[str, StudyResult]) -> dict[str, str]:
    """Common provenance of the runs; each study tells below its claims how it was run."""
    values_by_key = {
        key: [study.provenance.get(key) for study in studies.values()] for key in ("version", "torch", "device")
    }
    return {
        key: ", ".join(dict.fromkeys(str(value) for value in values if value)) for key, values in values_by_key.items()
    }
