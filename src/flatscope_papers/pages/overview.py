"""The first page: all four papers on one screen, what holds and what does not, and how often."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape

from flatscope.formatting import typeset
from flatscope.registry import PAPERS
from flatscope_papers.claims import (
    CONTRADICTED,
    ERRATUM,
    HOLDS,
    IDENTITY,
    INCONCLUSIVE,
    NOT_RUN,
    SIGNS,
    UNTESTABLE,
    range_text,
)
from flatscope_papers.known_studies import studies
from flatscope_papers.pages.markdown import AFTER, capital, table, text, told
from flatscope_papers.reproduction import AT_PAPER_SCALE, GROUPS, REDUCED, Entry, Results, entries, latest, matrix
from flatscope_papers.tables import paper_words

PARTS = {"Holds": (HOLDS,), "Does not hold": (CONTRADICTED,), "Open": (INCONCLUSIVE, UNTESTABLE), "Not run": (NOT_RUN,)}
LEGEND = f"""\
Every figure and table of the four papers is a study here, every statement about it a claim: a number, and the range in
which it holds ("to hold: above 0"), fixed before its study ran unless marked {AFTER}.
**{SIGNS[HOLDS]} holds**: the whole 95 % interval of what was found lies in the range. **{SIGNS[CONTRADICTED]}
contradicted**: none of it does. **{SIGNS[INCONCLUSIVE]} inconclusive**: it lies on both sides, or no interval could be
had; noise around zero is inconclusive whatever its sign. **{SIGNS[UNTESTABLE]} cannot be tested here**: the number
could not be had. Where single cases are checked ("largest of 20"), the worst one is judged. A verdict at a reduced
scale may turn either way at the paper's own; cards and counts keep the scales apart.
A *gap* is test minus training error: it widens while the test error falls, where the training error falls faster.
*Sharp* is the opposite of flat: the larger the sharper."""
LEAD = {
    IDENTITY: "identities and theorems",
    AT_PAPER_SCALE: "experiments at the papers' own scale",
    REDUCED: "at a reduced scale",
}
CARDS = (
    "The cards have the claims that each paper is read for: **what was found**, the range in which the claim holds, "
    f"what the paper reports. An interval is of 95 %; {AFTER} marks a range that was set after its study ran. "
    "[How to read it](#legend)."
)
BELOW = """\
*Identity or theorem*: checked by numbers, no scale to be short of. *Paper scale*: the paper's data, network sizes and
training, as far as it states them. *Reduced scale*: smaller networks or fewer images, minutes on two CPU cores.
Slips of the printed texts are outside these counts, and so are numbers that are reported but not judged: those that
could not come out otherwise, or are counted elsewhere."""


def overview(results: Results, folder: str = "papers") -> str:
    """The page as Markdown.

    Args:
        results: by study and scale.
        folder: of the other pages, as seen from this one.
    """
    found = entries(results)
    papers = [paper for paper in PAPERS if any(entry.study.paper == paper for entry in found)]
    cards = {paper: _card(paper, [e for e in found if e.study.paper == paper], results, folder) for paper in papers}
    own = cards.pop("flatscope", [])
    errata = sum(entry.finding.claim.kind == ERRATUM for entry in found)
    turned = sum(bool(entry.turned) and entry.finding.counts for entry in found)
    links = [
        f"[Errata]({folder}/errata.md): {errata} slips of the printed texts, with their corrections",
        f"[What the scale changes]({folder}/scales.md): {turned} verdicts that turned between small and paper scale",
        f"[Costs and commands]({folder}/costs.md): how every study was run, and runs again",
    ]
    lines = ["# What holds of the four papers", "", *in_short(found), lead(found), "", *_grid(cards.values())]
    lines += ['<a id="legend"></a>', "", "## How to read it", "", LEGEND, "", "## How often", ""]
    lines += [*_counts(found, folder), "", BELOW, "", *(f"- {link}" for link in links), ""]
    return "\n".join([*lines, "## Beyond the papers", "", *_grid([own])])


def lead(found: Iterable[Entry]) -> str:
    """How much holds, counted, and what the cards are: for somebody who reads no further."""
    counts: dict[str, Counter[str]] = {}
    for (paper, group), verdicts in matrix(found).items():
        if paper != "flatscope":
            counts.setdefault(group, Counter()).update(verdicts)
    parts = [
        f"of {verdicts.total()} {LEAD[group]} {verdicts[HOLDS]} hold and {verdicts[CONTRADICTED]} are contradicted, "
        f"{verdicts[INCONCLUSIVE]} are inconclusive, {verdicts[UNTESTABLE]} could not be tested"
        for group, verdicts in sorted(counts.items(), key=lambda item: list(GROUPS).index(item[0]))
        if group in LEAD
    ]
    counted = "; ".join(parts)
    return f"{capital(counted)}. {CARDS}" if parts else CARDS


def in_short(found: Sequence[Entry]) -> list[str]:
    """What became of each paper, in a sentence or two; nothing where these results do not bear it out."""
    verdicts = {f"{e.study.name} {e.finding.claim.key} {e.finding.verdict}" for e in found}
    words = {paper: paper_words(paper) for paper in PAPERS if paper != "flatscope"}
    lines = [
        f"- **{capital(PAPERS[p])}.** {text(w.found)}" for p, w in words.items() if verdicts.issuperset(w.rests_on)
    ]
    return [*lines, ""] if lines else []


def headlines(found: Iterable[Entry]) -> dict[str, list[Entry]]:
    """The claims that a paper is read for, by what became of them."""
    chosen = [entry for entry in found if entry.finding.claim.headline]
    ordered = sorted(chosen, key=lambda entry: list(GROUPS).index(entry.group))
    return {part: [e for e in ordered if e.finding.verdict in verdicts] for part, verdicts in PARTS.items()}


def badge(found: Sequence[Entry]) -> str:
    """At which scale the studies of a paper are judged, in a few words."""
    counted = [entry for entry in found if entry.finding.counts]
    judged = {e.study.name for e in counted if e.scale == "paper" and e.finding.verdict != UNTESTABLE}
    return f"{len(judged)} of {len({entry.study.name for entry in counted})} studies judged at paper scale"


def _grid(cards: Iterable[Sequence[str]]) -> list[str]:
    """Cards side by side on the documentation site; elsewhere a list."""
    return ['<div class="grid cards" markdown>', "", *itertools.chain.from_iterable(cards), "</div>", ""]


def _card(paper: str, found: Sequence[Entry], results: Results, folder: str) -> list[str]:
    words = paper_words(paper)
    lines = [f"**[{capital(PAPERS[paper])}]({folder}/{paper}.md)** · *{badge(found)}*", "", text(words.says), ""]
    if latest(results.get(words.figure, {})):
        alt = escape(f"{studies()[words.figure].figure}: {studies()[words.figure].title}")
        lines += [f'<img src="{folder}/images/{words.figure}.png" alt="{alt}" width="340">', ""]
    for part, chosen in headlines(found).items():
        if chosen:
            number = sum(entry.finding.verdict in PARTS[part] for entry in found if entry.finding.counts)
            lines += [f"**{part}** ({len(chosen)} of {number} claims)", "", *map(_item, chosen), ""]
    return ["-   " + lines[0], *(f"    {line}" if line else "" for line in lines[1:])]


def _item(entry: Entry) -> str:
    claim = entry.finding.claim
    scale = {REDUCED: " *(reduced scale)*", IDENTITY: " *(theorem or identity)*"}.get(entry.group, "")
    mark = AFTER if claim.after_results else ""
    number, sign = text(told(entry.finding)), SIGNS[entry.finding.verdict]
    why = f" ({text(entry.finding.answer.note)})" if entry.finding.verdict == UNTESTABLE else ""
    rule = f"to hold: {typeset(range_text(claim.holds))}{mark}"
    source = "expected" if entry.study.paper == "flatscope" else "paper"
    return f"- {sign} {text(claim.headline)}: **{number}**; {rule}; {source}: {text(claim.reported)}{scale}{why}"


def _counts(found: Sequence[Entry], folder: str) -> list[str]:
    counts = matrix(found)
    shown = [verdict for verdict in SIGNS if any(row[verdict] for row in counts.values())]
    rows, before = [], ""
    for paper, group in itertools.product(PAPERS, GROUPS):
        if (paper, group) in counts:
            name = "" if paper == before else f"[{capital(text(PAPERS[paper]))}]({folder}/{paper}.md)"
            rows.append([name, GROUPS[group], *(counts[paper, group][verdict] or "" for verdict in shown)])
            before = paper
    return table(["paper", "kind", *(f"{SIGNS[verdict]} {verdict}" for verdict in shown)], rows)
