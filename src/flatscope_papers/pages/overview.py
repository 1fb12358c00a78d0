"""The first page: what holds of each paper, what does not and what depends on what, in three lines; then how often."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from flatscope.extend import typeset
from flatscope_papers.claims import (
    CONTRADICTED,
    ERRATUM,
    EXPERIMENT,
    HOLDS,
    IDENTITY,
    INCONCLUSIVE,
    NOT_RUN,
    OWN,
    SIGNS,
    UNTESTABLE,
    range_text,
)
from flatscope_papers.pages.markdown import (
    AFTER,
    brief_number,
    capitalised,
    escaped_words,
    figure_link,
    number_with_meaning,
    table_lines,
)
from flatscope_papers.reproduction import (
    AT_PAPER_SCALE,
    GROUPS,
    REDUCED,
    Entry,
    Results,
    claim_entries,
    result_at_largest_scale,
    verdict_counts_by_group,
)
from flatscope_papers.study_registry import studies
from flatscope_papers.toml_files import FOUR_PAPERS, paper_words

PARTS = {"Holds": (HOLDS,), "Does not hold": (CONTRADICTED,), "Open": (INCONCLUSIVE, UNTESTABLE), "Not run": (NOT_RUN,)}
OPEN_WORDS = {INCONCLUSIVE: "inconclusive", UNTESTABLE: "not tested"}
LEGEND = f"""\
Every figure and table of the four papers is a study here, every statement about it a claim: a number, and the range in
which it holds ("to hold: above 0"), fixed before its study ran unless marked {AFTER}: claim or range set after first
results were seen.
**{SIGNS[HOLDS]} holds**: the whole 95 % interval of what was found lies in the range. **{SIGNS[CONTRADICTED]}
contradicted**: none of it does. **{SIGNS[INCONCLUSIVE]} inconclusive**: it lies on both sides, or no interval could be
had; noise around zero is inconclusive whatever its sign. *Holds in part*, beside {SIGNS[CONTRADICTED]} or
{SIGNS[INCONCLUSIVE]}: the whole interval lies in a wider range that the claim has as well (mostly: the right sign,
another size). **{SIGNS[UNTESTABLE]} cannot be tested here**: the number could not be had, mostly because our training
fell short or was of a smaller network or fewer images; the reason is beside it. Where single cases are checked
("largest of 20"), the worst one is judged. A verdict at a reduced scale may turn either way at the paper's own; cards
and counts keep the scales apart.
A *gap of the errors* is test minus training error: it widens while the test error falls, where the training error falls
faster. A *gap of the losses* is test minus training loss: what Petzka et al. call the generalization error. One may
rise while the other falls.
*Sharp* is the opposite of flat: the larger the sharper."""
KIND_WORDS = {
    IDENTITY: "identities and theorems",
    AT_PAPER_SCALE: "experiments at the papers' own scale",
    REDUCED: "experiments at a reduced scale",
    OWN: "our own tests of statements",
    NOT_RUN: "not run",
}
LINES = ("Holds", "Does not hold", "Depends")
BELOW = """\
*Identity or theorem*: checked by numbers, no scale to be short of. *Paper scale*: the paper's data, network sizes and
training, as far as it states them; where CIFAR-10's pixels are rounded to 33 levels, it says so (the machine that
trained took no larger files; LeNet-5 on 5,000 images has a test error of 0.562 ± 0.016 on these, of 0.568 ± 0.021 on
the original ones). *Reduced scale*: smaller networks or fewer images, minutes on two CPU cores. *Our own test*: of a
statement for which the paper ran nothing, mostly on the 1,797 embedded digits. Slips of the printed texts are outside
these counts, and so are numbers that are reported but not judged: those that could not come out otherwise, were chosen
by their results, or are counted elsewhere."""
PLACE = re.compile(r"\{([\w-]+) ([\w/-]+)\}")


def overview_page(results: Results, folder: str = "papers") -> str:
    """The page as Markdown.

    Args:
        results: by study and scale.
        folder: of the other pages, as seen from this one.
    """
    entries = claim_entries(results)
    papers = [paper for paper in FOUR_PAPERS if any(entry.study.paper == paper for entry in entries)]
    parts = {p: _paper_section(p, [e for e in entries if e.study.paper == p], entries, results, folder) for p in papers}
    errata = sum(entry.finding.claim.kind == ERRATUM for entry in entries)
    turned = sum(bool(entry.turned) and entry.finding.counts for entry in entries)
    links = [
        f"[Errata]({folder}/errata.md): {errata} slips of the printed texts, with their corrections",
        f"[What the scale changes]({folder}/scales.md): {turned} verdicts that turned between small and paper scale",
        f"[Costs and commands]({folder}/costs.md): how every study was run, and runs again",
        f"[Coverage]({folder}/coverage.md): every item of the papers, where it is here, and what checks it",
    ]
    lines = ["# What holds of the four papers", "", *verdict_counts_by_kind_of_claim(entries), ""]
    lines += [f"[How to read it](#legend). {AFTER} claim or range set after first results were seen.", ""]
    lines += itertools.chain.from_iterable(parts.values())
    lines += ['<a id="legend"></a>', "", "## How to read it", "", LEGEND, "", BELOW, "", "## How often", ""]
    lines += [*_verdict_counts_table(entries, folder), "", *(f"- {link}" for link in links)]
    return "\n".join(lines)


def verdict_counts_by_kind_of_claim(entries: Iterable[Entry]) -> list[str]:
    """One table: kinds of claims of the papers by what became of them."""
    counts: dict[str, Counter[str]] = {}
    for (_, group), verdicts in verdict_counts_by_group(entries).items():
        counts.setdefault(group, Counter()).update(verdicts)
    shown = [verdict for verdict in SIGNS if any(verdicts[verdict] for verdicts in counts.values())]
    rows = [[KIND_WORDS[g], *(counts[g][verdict] or "" for verdict in shown)] for g in GROUPS if g in counts]
    return table_lines(["claims", *(f"{SIGNS[verdict]} {verdict}" for verdict in shown)], rows)


def summary_in_three_lines(paper: str, entries: Sequence[Entry]) -> list[str]:
    """Sentences on claims that hold, that do not, and that depend on the setting; none where results say otherwise."""
    words, by_claim = paper_words(paper), {(e.study.name, e.finding.claim.key): e.finding for e in entries}
    if not _verdict_names(entries).issuperset(words.rests_on):
        return []

    def number(place: re.Match[str]) -> str:
        finding = by_claim[place[1], place[2]]
        return f"**{escaped_words(brief_number(finding.answer))}**{AFTER if finding.claim.after_results else ''}"

    more = _number_of_other_contradicted_claims((e for e in entries if e.study.paper == paper), words.rests_on)
    fails = f"{words.fails} Contradicted as well: {more} more, listed below." if more else words.fails
    parts = zip(LINES, (words.holds, fails, words.depends), strict=True)
    return [f"**{label}.** {PLACE.sub(number, escaped_words(said))}" for label, said in parts if said]


def headline_claims_by_verdict(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """The claims that a paper is read for, by what became of them."""
    chosen = [entry for entry in entries if entry.finding.claim.headline]
    ordered = sorted(chosen, key=lambda entry: list(GROUPS).index(entry.group))
    return {part: [e for e in ordered if e.finding.verdict in verdicts] for part, verdicts in PARTS.items()}


def judged_studies_badge(entries: Sequence[Entry]) -> str:
    """Number of studies of a paper's experiments that are judged at its scale, and which are not, in a few words.

    Identities and our own tests have no scale to be short of and are no part of it.
    """
    counted = [entry for entry in entries if entry.finding.counts]
    experiments = [entry for entry in counted if entry.finding.claim.kind == EXPERIMENT]
    judged = {e.study.name for e in experiments if e.scale == "paper" and e.finding.verdict != UNTESTABLE}
    others = list(dict.fromkeys(e.study.figure for e in experiments if e.study.name not in judged))
    names = f", not {', '.join(others)}" if others else ""
    every = {entry.study.name for entry in experiments}
    return f"{len(judged)} of {len(every)} experiments judged at paper scale{names}"


def _paper_section(
    paper: str, own: Sequence[Entry], entries: Sequence[Entry], results: Results, folder: str
) -> list[str]:
    """Thesis, three lines, figure; the claims that it is read for behind a fold."""
    words = paper_words(paper)
    lines = [
        f'<a id="{paper}"></a>',
        "",
        f"## {capitalised(FOUR_PAPERS[paper])}",
        "",
        f"*{escaped_words(words.says)}*",
        "",
    ]
    lines += [*(f"- {line}" for line in summary_in_three_lines(paper, entries)), ""]
    if result_at_largest_scale(results.get(words.figure, {})):
        declared = studies()[words.figure]
        lines += [figure_link(f"{folder}/images/{words.figure}.png", declared.figure), ""]
        lines += [f"*{escaped_words(words.caption)}*", ""]
    chosen = headline_claims_by_verdict(own)
    chosen["Does not hold"] += _contradicted_claims_without_headline(own)
    number = sum(map(len, chosen.values()))
    lines += [f'<details markdown="1"><summary>{number} claims with their numbers</summary>', ""]
    for part, claims in chosen.items():
        if claims:
            lines += [f"**{part}** ({_shown_of_all(part, claims, own)})", "", *map(_claim_list_item, claims), ""]
    return [*lines, "</details>", "", f"[Every study]({folder}/{paper}.md) · *{judged_studies_badge(own)}*", ""]


def _number_of_other_contradicted_claims(entries: Iterable[Entry], rests_on: Iterable[str]) -> int:
    """Number of contradicted claims that the three lines do not rest on."""
    against = _verdict_names(e for e in entries if e.finding.counts and e.finding.verdict == CONTRADICTED)
    return len(against.difference(rests_on))


def _contradicted_claims_without_headline(own: Iterable[Entry]) -> list[Entry]:
    """Contradicted claims that are no headlines: all that is held against a paper is shown."""
    counted = [entry for entry in own if entry.finding.counts and not entry.finding.claim.headline]
    return [entry for entry in counted if entry.finding.verdict == CONTRADICTED]


def _shown_of_all(part: str, shown: Sequence[Entry], own: Sequence[Entry]) -> str:
    """Number of claims that are shown of all with these verdicts; of several verdicts one by one."""
    every = Counter(entry.finding.verdict for entry in own if entry.finding.counts)
    seen = Counter(entry.finding.verdict for entry in shown)
    if len(PARTS[part]) == 1:
        return f"{len(shown)} of {every[PARTS[part][0]]} claims shown"
    words = (f"{seen[verdict]} of {every[verdict]} {OPEN_WORDS[verdict]}" for verdict in PARTS[part] if every[verdict])
    return f"{' and '.join(words)} claims shown"


def _verdict_names(entries: Iterable[Entry]) -> set[str]:
    """Study, key and verdict of claims, as `rests_on` names them."""
    return {f"{entry.study.name} {entry.finding.claim.key} {entry.finding.verdict}" for entry in entries}


def _claim_list_item(entry: Entry) -> str:
    claim = entry.finding.claim
    scales = {REDUCED: " *(reduced scale)*", IDENTITY: " *(theorem or identity)*", OWN: " *(our own test)*"}
    scale = scales.get(entry.group, "")
    mark = AFTER if claim.after_results else ""
    number, sign = escaped_words(number_with_meaning(entry.finding)), SIGNS[entry.finding.verdict]
    why = f" (not tested: {escaped_words(entry.finding.answer.note)})" if entry.finding.verdict == UNTESTABLE else ""
    rule = f"to hold: {typeset(range_text(claim.holds))}{mark}"
    if entry.finding.holds_in_wider_range and claim.partly:
        rule = f"holds in part: {typeset(range_text(claim.partly))}; {rule}"
    said, reported = escaped_words(claim.headline or claim.statement), escaped_words(claim.reported)
    return f"- {sign} {said}: **{number}**; {rule}; paper: {reported}{scale}{why}"


def _verdict_counts_table(entries: Sequence[Entry], folder: str) -> list[str]:
    counts = verdict_counts_by_group(entries)
    shown = [verdict for verdict in SIGNS if any(row[verdict] for row in counts.values())]
    rows, before = [], ""
    for paper, group in itertools.product(FOUR_PAPERS, GROUPS):
        if (paper, group) in counts:
            name = "" if paper == before else f"[{capitalised(escaped_words(FOUR_PAPERS[paper]))}]({folder}/{paper}.md)"
            rows.append([name, GROUPS[group], *(counts[paper, group][verdict] or "" for verdict in shown)])
            before = paper
    return table_lines(["paper", "kind", *(f"{SIGNS[verdict]} {verdict}" for verdict in shown)], rows)
