"""Studies as elements of a page: verdicts by paper, and a card per study with its figure and its claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from flatscope.extend import element
from flatscope_papers.claims import (
    CONTRADICTED,
    ERRATUM,
    HOLDS,
    INCONCLUSIVE,
    NOT_JUDGED,
    REMARK,
    SIGNS,
    UNTESTABLE,
)
from flatscope_papers.pages.markdown import capitalised
from flatscope_papers.study_result import StudyResult
from flatscope_papers.toml_files import FOUR_PAPERS

BADGES = {HOLDS: "good", CONTRADICTED: "poor", INCONCLUSIVE: "fair", UNTESTABLE: "", NOT_JUDGED: ""}
FEW = 3  # more studies than that are counted by paper and can be filtered
LEAD = (
    "Claims of papers, each with the range in which it holds; slips of the printed texts and remarks are not counted, "
    "and what was changed once results were known stands among the differences from the paper."
)


def counts_by_paper(studies: Mapping[str, StudyResult]) -> dict[str, Counter[str]]:
    """Number of claims of every verdict, by paper; the four papers first."""
    counts: dict[str, Counter[str]] = {}
    for study in studies.values():
        verdicts = (finding.verdict for finding in study.findings if finding.counts)
        counts.setdefault(study.paper, Counter()).update(verdicts)
    return {paper: counts[paper] for paper in (*FOUR_PAPERS, *counts) if paper in counts}


def shown_verdicts(counts: Mapping[str, Counter[str]]) -> list[str]:
    """Verdicts that at least one claim got."""
    return [verdict for verdict in BADGES if any(count[verdict] for count in counts.values())]


def summary_of_studies(studies: Mapping[str, StudyResult]) -> Markup:
    """Verdicts by paper with links to the studies; of few studies a line each."""
    start = element("h3", "Studies") + element("p", LEAD, class_="lead")
    if len(studies) <= FEW:
        lines = (f"{study.title} ({study.scale} scale): {study.counts}." for study in studies.values())
        return start + element("ul", *(element("li", line) for line in lines), class_="findings")
    counts = counts_by_paper(studies)
    links = [
        element("div", element("dt", _paper_title(paper)), element("dd", Markup(", ").join(_links(paper, studies))))
        for paper in counts
    ]
    return start + _table_of_verdicts(counts) + element("dl", *links, class_="contents")


def study_cards(studies: Mapping[str, StudyResult], pictures: Mapping[str, Markup | str]) -> Markup:
    """A card per study; above more than a few, what filters them."""
    tools = _filter_by_paper_and_verdict(counts_by_paper(studies)) if len(studies) > FEW else Markup("")
    return tools + Markup("").join(_card(name, study, pictures[name]) for name, study in studies.items())


def _paper_title(paper: str) -> str:
    return capitalised(FOUR_PAPERS.get(paper, paper))


def _anchor(study: StudyResult) -> str:
    return f"{study.name}-{study.scale}"


def _links(paper: str, studies: Mapping[str, StudyResult]) -> list[Markup]:
    """Links to the studies of a paper."""
    return [
        element(
            "a",
            study.source if paper in FOUR_PAPERS else study.title,
            href=f"#{_anchor(study)}",
            title=f"{study.title}: {study.counts}",
        )
        for study in studies.values()
        if study.paper == paper
    ]


def _scrolling_table(label: str, class_: str, titles: Sequence[object], rows: Sequence[Markup]) -> Markup:
    """Table in a frame that scrolls where the window is narrow."""
    head = element("thead", element("tr", *(element("th", title, scope="col") for title in titles)))
    content = element("table", head, element("tbody", *rows), class_=class_)
    return element("div", content, class_="scroll", role="region", aria_label=label, tabindex=0)


def _table_of_verdicts(counts: Mapping[str, Counter[str]]) -> Markup:
    """Number of claims of each paper, in all and by verdict."""
    verdicts = shown_verdicts(counts)
    titles = [element("span", verdict, class_="word") for verdict in verdicts]
    heads = [Markup("{} {}").format(SIGNS[verdict], title) for verdict, title in zip(verdicts, titles, strict=True)]
    rows = [
        element(
            "tr",
            element("th", _paper_title(paper), scope="row"),
            element("td", count.total()),
            *(element("td", count[verdict]) for verdict in verdicts),
        )
        for paper, count in counts.items()
    ]
    return _scrolling_table("Verdicts by paper", "plain verdicts", ["Paper", "Claims", *heads], rows)


def _filter_by_paper_and_verdict(counts: Mapping[str, Counter[str]]) -> Markup:
    """Two choices and the number of studies shown; hidden until the script of the page shows them."""
    choices = {
        "Paper": {paper: _paper_title(paper) for paper in counts},
        "Verdict": {verdict: verdict for verdict in shown_verdicts(counts)},
    }
    labels = []
    for label, values in choices.items():
        options = [element("option", text, value=value) for value, text in {"": "all", **values}.items()]
        labels.append(element("label", f"{label} ", element("select", *options, data_by=label.lower())))
    return element("div", *labels, element("p", role="status"), class_="tools", id="studies-tools", hidden=True)


def _card(name: str, study: StudyResult, picture: Markup | str) -> Markup:
    """A study: its figure, the verdict on every claim, how it was run and how it differs from the paper."""
    paper = FOUR_PAPERS.get(study.paper, study.paper)
    alt = f"Figure of the study {name}: {study.title}. Its claims are in the table below."
    image = element("img", class_="paper", alt=alt, src=picture)
    titles = ["Verdict", "Claim", "Paper", "Here"]
    differs = ", and how it differs from the paper’s setting" if study.deviations else ""
    return element(
        "article",
        element("h3", study.title),
        element("p", f"{paper}, {study.source}; {study.scale} scale: {study.counts}.", class_="quiet"),
        element("figure", image, class_="card", tabindex=0) if picture else "",
        _scrolling_table(f"Claims of {name}", "claims", titles, [_claim_row(row) for row in study.rows()]),
        element(
            "details",
            element("summary", f"How it was run{differs}"),
            element("p", f"{study.how}. ", element("code", study.command)),
            _labelled_list("How this differs from the paper’s setting", study.deviations),
            _labelled_list("Also seen", study.notes),
            class_="quiet",
        ),
        class_="study",
        id=_anchor(study),
        data_paper=study.paper,
    )


def _claim_row(row: Mapping[str, str]) -> Markup:
    """A claim: verdict, statement, the paper's number, ours."""
    verdict, runs = row["verdict"], "run" if row["runs"] == "1" else "runs"
    mark = element("span", f"{SIGNS.get(verdict, '')} {verdict}", class_=f"badge {BADGES.get(verdict, '')}".strip())
    remarks = [_quiet(row["in_part"])] if row["in_part"] else []
    if row["kind"] in (ERRATUM, REMARK):
        remarks.append(_quiet(f"{row['kind']}, not counted"))
    note = f"; {row['note']}" if row["note"] else ""
    return element(
        "tr",
        element("td", mark, *remarks),
        element("th", row["statement"], _quiet(f"{row['where']}: {row['number']}"), scope="row"),
        element("td", row["reported"], _quiet(row["rule"]), data_label="Paper"),
        element("td", row["found"], _quiet(f"{row['runs']} {runs}{note}"), data_label="Here"),
        data_verdict=verdict,
    )


def _quiet(text: str) -> Markup:
    return element("small", text, class_="quiet")


def _labelled_list(label: str, texts: Sequence[str]) -> Markup:
    """Texts as a list under a label; nothing for none."""
    if not texts:
        return Markup("")
    return element("p", f"{label}:", class_="label") + element("ul", *(element("li", text) for text in texts))
