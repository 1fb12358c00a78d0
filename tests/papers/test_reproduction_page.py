"""The papers' pages: complete, short where it can be, and readable as Markdown."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from markdown_it import MarkdownIt

from flatscope.formatting import typeset
from flatscope_papers import find_study, studies
from flatscope_papers.claims import COUNTED, ERRATUM, HOLDS, SIGNS, Answer, finding_of_claim, range_text
from flatscope_papers.neyshabur2017.complexity import NORMS
from flatscope_papers.pages.lists import costs_page, errata_page, scales_page
from flatscope_papers.pages.markdown import brief_number, escaped_words
from flatscope_papers.pages.overview import overview_page, summary_in_three_lines
from flatscope_papers.pages.page_files import pages_by_file_name, write_pages
from flatscope_papers.pages.paper_page import paper_page
from flatscope_papers.reproduction import (
    AT_PAPER_SCALE,
    REDUCED,
    claim_entries,
    claim_entries_of_study,
    claim_frame,
    load_results,
    verdict_counts_by_group,
)
from flatscope_papers.study_result import StudyResult
from flatscope_papers.toml_files import paper_words

NAME = "zhang2017-fig1"
RESULTS = Path(__file__).parents[2] / "src" / "flatscope_papers" / "results"
FACTS = {"seconds": 12.5, "device": "a CPU", "date": "2026-01-01", "command": "x"}


def result(name: str, value: float = 0.0, scale: str = "small", **changes: object) -> StudyResult:
    entry = find_study(name)
    findings = tuple(
        finding_of_claim(claim, Answer(value, value, value, note="seen so"), scale) for claim in entry.claims
    )
    made = StudyResult(
        name, entry.title, entry.paper, entry.figure, scale, pd.DataFrame(), findings, "", b"", (), (), FACTS
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def section(page: str, name: str) -> str:
    return page.split(f'<a id="{name}"></a>')[1].split("<a id=")[0]


def test_every_claim_is_on_the_page_of_its_paper() -> None:
    written = pages_by_file_name({})
    for name, entry in studies().items():
        part = section(written[f"{entry.paper}.md"], name)
        for claim in entry.claims:
            assert escaped_words(claim.statement) in part
            assert escaped_words(claim.number) in part


def test_every_link_between_the_pages_has_its_place() -> None:
    found = {NAME: {"small": result(NAME, 100.0)}}
    written = {"../reproduction.md": overview_page(found), **pages_by_file_name(found)}
    for page in written.values():
        for target in re.findall(r"\]\(([^)]+)\)", page):
            file, _, anchor = target.removeprefix("papers/").partition("#")
            if not file.endswith(".png"):
                there = written[file] if file else page
                assert not anchor or f'<a id="{anchor}">' in there, target


def test_tables_are_tables_and_signs_mean_nothing() -> None:
    odd = ("A < b | c * d ~ e $x$ [1] & `code`", "second")
    page = paper_page("zhang2017", {NAME: {"small": result(NAME, deviations=odd)}})
    shown = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(page)
    assert "A &lt; b | c * d ~ e $x$ [1] &amp; `code`" in shown
    assert shown.count("<tr>") > sum(len(e.claims) for e in studies().values() if e.paper == "zhang2017")
    assert "| ---" not in shown


def test_counts_keep_kinds_and_scales_apart() -> None:
    found = {NAME: {"paper": result(NAME, 0.05, "paper")}, "zhang2017-fig2": {"small": result("zhang2017-fig2")}}
    counts = verdict_counts_by_group(claim_entries(found))
    own = Counter(
        finding_of_claim(c, Answer.exact(0.05), "paper").verdict for c in find_study(NAME).claims if c.kind in COUNTED
    )
    assert counts["zhang2017", AT_PAPER_SCALE] == own
    assert counts["zhang2017", REDUCED].total() == len(find_study("zhang2017-fig2").claims)
    everything = sum(claim.kind in COUNTED for entry in studies().values() for claim in entry.claims)
    assert sum(count.total() for count in counts.values()) == everything
    line = next(line for line in overview_page(found).splitlines() if AT_PAPER_SCALE in line and line.startswith("|"))
    shown = [cell.strip() for cell in line.split("|")[3:-1]]
    assert sorted(filter(None, shown)) == sorted(str(number) for number in own.values())
    first, header = (
        (line.split("|")[1:-1]) for line in (overview_page(found).splitlines()[number] for number in (4, 2))
    )
    assert first[0].strip() == "experiments at the papers' own scale"
    told = {name.split()[-1]: int(cell or 0) for name, cell in zip(header[1:], map(str.strip, first[1:]), strict=True)}
    assert told["holds"] == own[HOLDS]
    assert sum(told.values()) == own.total()


def test_a_card_says_what_holds_and_what_does_not_with_numbers() -> None:
    page = overview_page({NAME: {"small": result(NAME, 0.25)}})
    chosen = [claim for claim in find_study(NAME).claims if claim.headline]
    assert chosen
    for claim in chosen:
        line = next(line for line in page.splitlines() if escaped_words(claim.headline) in line)
        assert SIGNS[finding_of_claim(claim, Answer.exact(0.25), "small").verdict] in line
        assert "0.25" in line
        assert f"to hold: {typeset(range_text(claim.holds))}" in line
        assert "reduced scale" in line
    assert "*(reduced scale)*" not in overview_page({NAME: {"paper": result(NAME, 0.25, "paper")}})


def test_what_was_found_of_a_paper_rests_on_its_findings() -> None:
    """The lines at the top are written by hand: a verdict that turns must bring them down, a number must be today's."""
    found = claim_entries(load_results(RESULTS))
    verdicts = {f"{entry.study.name} {entry.finding.claim.key} {entry.finding.verdict}" for entry in found}
    page = overview_page(load_results(RESULTS))
    for paper in {study.paper for study in studies().values()}:
        words = paper_words(paper)
        assert words.rests_on
        assert verdicts.issuperset(words.rests_on)
        lines = summary_in_three_lines(paper, found)
        assert [line.split("**")[1] for line in lines][:1] == ["Holds."]
        assert all(line in page for line in lines)
        assert not any("{" in line for line in lines)
        assert summary_in_three_lines(paper, []) == []
        turned = words.rests_on[0].split()
        others = [e for e in found if (e.study.name, e.finding.claim.key) != (turned[0], turned[1])]
        assert summary_in_three_lines(paper, others) == []
    entry = next(e for e in found if (e.study.name, e.finding.claim.key) == ("yi2019-balance", "balance_set"))
    assert escaped_words(brief_number(entry.finding.answer)) in summary_in_three_lines("yi2019", found)[0]
    other = replace(entry, finding=replace(entry.finding, answer=Answer(0.5, 0.25, 0.75)))
    assert "0.5 \\[0.25, 0.75\\]" in summary_in_three_lines("yi2019", [other if e is entry else e for e in found])[0]


def test_figures_that_are_written_by_hand_are_those_of_the_results() -> None:
    found = load_results(RESULTS)
    notes = {(e.study.name, e.finding.claim.key): e.finding.answer for e in claim_entries(found)}
    zhang = paper_words("zhang2017")
    assert "3 % of components pass a test at 100, 62 % at 1,000" in zhang.depends
    gaussian, larger = (notes["zhang2017-fig5", key].value for key in ("gaussian", "large_batch"))
    assert (round(gaussian, 2), round(gaussian - larger, 2)) == (0.03, 0.62)
    assert "training by 0.89, test by 0.39" in zhang.depends
    looks = found["petzka2019-fig1"]["paper"].table
    last = looks[(looks["kind"] == "look") & (looks["variant"] == "plain") & (looks["epoch"] == 500)]
    last = last[last["init"] != "wide_normal"]  # the reading of its variance that is not judged
    assert f"{(last['train_loss'] > 0.1).sum()} of {len(last)} networks" in paper_words("petzka2019").depends
    told = paper_words("petzka2019").fails + paper_words("petzka2019").depends
    for key, words in (("trace", "losses −0.63)"), ("trace_last_epoch", "(errors: −0.82)")):
        assert notes["petzka2019-fig1", key].note.endswith(words.strip("()").split()[-1].replace("−", "-"))
        assert words in told
    met = looks[(looks["measure"] == "kappa_trace/fc3") & (looks["target"] == "gap")]
    met = met[met["exclusion"] == "accuracy of at least 15 %"].set_index("rule")["pearson"]
    assert all(abs(met[f"mini-batch loss {loss}"]) < 0.05 for loss in ("1", "0.5", "0.3"))
    at = [f"{met[f'mini-batch loss {loss}']:.2f} at {loss}" for loss in ("0.2", "0.1", "0.03")]
    assert ", ".join(at[:2]) in told
    few = "of 41 and 40 networks 0.80 at 0.03, 0.22 at 0.01"
    assert (few in told) == (f"{met['mini-batch loss 0.03']:.2f} {met['mini-batch loss 0.01']:.2f}" == "0.80 0.22")
    assert few in told
    pairs = found["neyshabur2017-fig1"]["paper"].table.pivot(index=["size", "seed"], columns="labels")
    ratios = pd.concat([pairs[name]["random"] / pairs[name]["true"] for name in NORMS])
    assert f"{ratios.min():.0f} to {ratios.max():.0f} times as high" in paper_words("neyshabur2017").holds
    networks = found["neyshabur2017-fig2"]["paper"].table
    sharp = networks[networks["kind"] == "network"].pivot(index=["size", "seed"], columns="labels", values="sharpness")
    share = sharp["random"] / sharp["true"]
    assert (
        f"{share.min():.2f} to {share.max():.2f} times as high in {len(share)} pairs"
        in paper_words("neyshabur2017").depends
    )
    beyond = 10 ** notes["neyshabur2017-fig4", "spectral_beyond_512"].value
    assert f"falls by {1 - beyond:.0%}".replace("%", " %") in paper_words("neyshabur2017").fails
    assert "r = 0.67 before, 0.26 after" in notes["petzka2019-fig2", "trace_drops"].note
    assert "from 0.67 to 0.26" in paper_words("petzka2019").holds
    random = found["zhang2017-fig2"]["paper"].table
    errors = {n: random.loc[random["n"] == n, "train_error"] for n in (500, 1000, 2000, 5000)}
    fitted = sum((errors[n] <= 0.01).sum() for n in (500, 1000, 2000))
    assert f"up to 2,000 samples {fitted} of 15 networks" in zhang.depends
    assert f"({errors[5000].min():.2f} to {errors[5000].max():.2f})" in zhang.depends
    assert any("training error -0.892, test error -0.392" in n for n in found["zhang2017-fig15"]["paper"].notes)


def test_what_weighs_against_a_paper_is_on_its_card_with_numbers() -> None:
    """Every contradicted claim that the lines at the top rest on can be checked below them, its wider range too."""
    results = load_results(RESULTS)
    page = overview_page(results)
    for entry in claim_entries(results):
        claim, key = entry.finding.claim, f"{entry.study.name} {entry.finding.claim.key} contradicted"
        if key in paper_words(entry.study.paper).rests_on:
            begins = f"- ✗ {escaped_words(claim.headline or claim.statement)}:"
            line = next(line for line in page.splitlines() if line.startswith(begins))
            assert escaped_words(brief_number(entry.finding.answer)) in line
            assert claim.quantity
            assert ("holds in part" in line) == entry.finding.holds_in_wider_range


def test_what_was_set_after_results_is_marked_in_the_lines_at_the_top() -> None:
    lines = " ".join(summary_in_three_lines("yi2019", claim_entries(load_results(RESULTS))))
    assert lines.count("**†") == 4


def test_the_answers_come_before_the_numbers_and_those_are_folded() -> None:
    page = overview_page(load_results(RESULTS))
    shown = re.sub(r"<details.*?</details>", "", page, flags=re.DOTALL)
    before = shown.split('<a id="legend">')[0]
    captions = [line for line in before.splitlines() if re.fullmatch(r"\*[^*].*\*", line)]
    assert len(captions) == 8  # of each paper its thesis, and what is seen in its figure
    assert all(len(caption.split()) < 40 for caption in captions)
    rest = len(before.split()) - sum(len(caption.split()) for caption in captions[1::2])
    assert rest < 1_165  # with tables and marks: three lines a paper are read in two to three minutes
    assert not re.search(r"^- [✓✗?–]", before, flags=re.MULTILINE)
    assert "Κ_τ" not in page  # a Greek symbol has no capital


def test_all_that_is_contradicted_is_shown_and_the_lines_at_the_top_say_how_much_they_leave_out() -> None:
    results = load_results(RESULTS)
    page, found = overview_page(results), claim_entries(results)
    for paper in {study.paper for study in studies().values()}:
        against = [
            e for e in found if e.study.paper == paper and e.finding.counts and e.finding.verdict == "contradicted"
        ]
        for entry in against:
            assert f"- ✗ {escaped_words(entry.finding.claim.headline or entry.finding.claim.statement)}:" in page
        named = paper_words(paper).rests_on
        left = sum(f"{e.study.name} {e.finding.claim.key} contradicted" not in named for e in against)
        line = summary_in_three_lines(paper, found)[1]
        assert (f"{left} more, listed below" in line) if left else ("more, listed below" not in line)
        assert f"**Does not hold** ({len(against)} of {len(against)} claims shown)" in page


def test_identities_and_own_tests_are_not_called_paper_scale() -> None:
    page = pages_by_file_name(load_results(RESULTS))["yi2019.md"]
    assert "0 of 1 experiments judged at paper scale, not Figure 3" in page
    assert "· paper scale" not in page
    assert "of 5 inconclusive and 0 of 3 not tested claims shown" in overview_page(load_results(RESULTS))


def test_every_paper_has_headlines() -> None:
    for paper in {entry.paper for entry in studies().values()}:
        number = sum(bool(c.headline) for e in studies().values() if e.paper == paper for c in e.claims)
        assert 2 <= number <= 12


def test_verdicts_that_turned_are_shown_with_both_numbers() -> None:
    both = {"small": result(NAME, 0.25), "paper": result(NAME, 0.0, "paper")}
    page = scales_page({NAME: both})
    turned = [
        entry
        for entry in claim_entries_of_study(find_study(NAME), {NAME: both})
        if entry.turned and entry.finding.counts
    ]
    assert turned
    for entry in turned:
        row = next(line for line in page.splitlines() if escaped_words(entry.finding.claim.statement) in line)
        assert row.index("0.25, ") < row.index("0, ")
    assert f"{len(turned)} verdicts differ" in page
    assert "small scale: 0.25" in section(paper_page("zhang2017", {NAME: both}), NAME)
    assert "small scale" not in section(paper_page("zhang2017", {NAME: {"paper": both["paper"]}}), NAME)


def test_slips_have_their_page_and_no_count() -> None:
    page = errata_page({})
    slips = [claim for entry in studies().values() for claim in entry.claims if claim.kind == ERRATUM]
    for claim in slips:
        assert escaped_words(claim.statement) in page
        assert escaped_words(claim.comment)[1:].rstrip(".") in page
    assert page.count("\n| [") == len(slips)


def test_what_an_earlier_study_says_is_not_said_again() -> None:
    words = ("fewer images than in the paper", "another network")
    page = paper_page("zhang2017", {n: {"small": result(n, deviations=words)} for n in (NAME, "zhang2017-fig2")})
    assert page.count("Fewer images than in the paper.") == 1
    assert "As told above" in section(page, "zhang2017-fig2")


def test_costs_and_commands_are_apart() -> None:
    page = costs_page({NAME: {"paper": result(NAME, 0.5, "paper")}})
    assert f"`flatscope study run {NAME} --scale paper`" in page
    for entry in studies().values():
        assert escaped_words(entry.words.at_paper_scale) in page


def test_the_pages_are_written_with_their_pictures(tmp_path: Path) -> None:
    found = {NAME: {"small": result(NAME, png=b"a picture")}, "zhang2017-fig2": {"small": result("zhang2017-fig2")}}
    kept = tmp_path / "papers" / "images" / "zhang2017-fig2.png"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"kept")
    write_pages(found, tmp_path / "all.md")
    assert (tmp_path / "all.md").read_text(encoding="utf-8") == overview_page(found)
    assert {path.name for path in (tmp_path / "papers").glob("*.md")} == set(pages_by_file_name(found))
    assert (kept.parent / f"{NAME}.png").read_bytes() == b"a picture"
    assert kept.read_bytes() == b"kept"  # a result that was kept without its picture


def test_the_frame_has_answers_and_ranges_as_numbers() -> None:
    entry = find_study(NAME)
    wide = Answer(0.3, 0.2, 0.4)
    findings = tuple(finding_of_claim(claim, wide, "small") for claim in entry.claims)
    frame = claim_frame({NAME: {"small": result(NAME, findings=findings)}})
    own = frame[frame["study"] == NAME]
    assert (own["interval_low"] == 0.2).all()
    assert own["holds_high"].tolist() == [claim.holds[1] for claim in entry.claims]
    assert len(frame) == sum(len(other.claims) for other in studies().values())
    assert frame[frame["study"] != NAME]["value"].isna().all()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(-0.804, -0.91, -0.58), "−0.8 [−0.91, −0.58]"),
        (Answer(-1.131, -1.146, -1.116), "−1.13 [−1.15, −1.12]"),
        (Answer(3.5e-15, 1e-15, 3.5e-15, 20, seen="networks"), "3.5×10⁻¹⁵ (largest of 20)"),
        (Answer(0.5, 0.5, 0.9, 20, seen="networks"), "0.5 (smallest of 20)"),
        (Answer.exact(43758), "43,758"),
        (Answer(0.12345), "0.12 (one run, no interval)"),
        (Answer(math.nan), "—"),
    ],
)
def test_numbers_in_brief(answer: Answer, words: str) -> None:
    assert brief_number(answer) == words
