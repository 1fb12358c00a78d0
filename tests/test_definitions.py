"""Every measure and bound says in words what it is: each symbol of its formula, what values say, when to doubt."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import flatscope as fs
from flatscope.context import Context
from flatscope.definitions import (
    WORDS,
    Definition,
    defined_names,
    definition_entry,
    explained_symbols,
    shared_symbols,
    typical_values,
    unexplained_symbols,
)
from flatscope.formulas import explained_and_unexplained_symbols, formula_as_text, formula_tokens
from flatscope.registry import Declaration, declarations, measure

ROOT = Path(__file__).parents[1]
ALL = [*declarations().values(), *declarations("bound").values()]
EACH = pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.name)


def faults(entry: Declaration) -> list[str]:
    """What is missing from a definition, or says more than the formula and the options have."""
    definition = entry.definition
    if definition is None:
        return ["no definition"]
    wrong = [f"nothing on {word}" for word in WORDS if not getattr(definition, word)]
    wrong += [f"{piece} is not explained" for piece in unexplained_symbols(entry.symbol, definition)]
    used = explained_symbols(entry.symbol, definition)
    for _, words in used:
        named = re.findall(r"`(\w+)`", " ".join(re.findall(r"\(options? ([^)]*)\)", words)))
        wrong += [f"{name} is no option" for name in named if name not in entry.options]
    if not typical_values(entry.name, entry.per):
        wrong.append("no typical value")
    return wrong


@EACH
def test_every_symbol_of_a_formula_is_explained_and_every_value_is_read(entry: Declaration) -> None:
    assert faults(entry) == []


@EACH
def test_nothing_is_explained_that_the_formula_does_not_have(entry: Declaration) -> None:
    own = definition_entry(entry.name).get("symbols", {})
    used = [symbol for symbol, _ in explained_symbols(entry.symbol, entry.definition)]
    assert [symbol for symbol in own if symbol not in used] == []


def test_the_files_define_what_is_declared_and_nothing_else() -> None:
    assert defined_names() == {entry.name for entry in ALL}
    symbols = {symbol for entry in ALL for symbol, _ in explained_symbols(entry.symbol, entry.definition)}
    assert [symbol for symbol in shared_symbols() if symbol not in symbols] == []


def test_the_check_finds_what_is_missing() -> None:
    @measure(symbol=r"\sum_i q_i \|w\|_F", paper="flatscope", equation="none")
    def zz_half_said(ctx: Context) -> float:
        """Half of it."""
        return 1.0

    known = declarations()["zz_half_said"]
    assert known.definition is None
    half = Definition(large="much", small="little", caution="", symbols={"q_i": "a thing (option `size`)"})
    try:
        measure(symbol=known.symbol, paper="flatscope", equation="none", definition=half)(zz_half_said)
        found = faults(declarations()["zz_half_said"])
    finally:
        from flatscope import registry

        del registry._REGISTRY["zz_half_said"]
    assert found == ["nothing on caution", "i is not explained", "size is no option", "no typical value"]


def test_a_definition_is_not_handed_on_to_what_is_derived() -> None:
    assert declarations()["rho"].definition != declarations()["rho_unit"].definition
    assert declarations()["kappa_trace_sum"].definition is not None


@EACH
def test_formulas_are_text_without_markup(entry: Declaration) -> None:
    text = formula_as_text(entry.symbol)
    assert not set(text) & set("\\$")
    assert text.count("(") == text.count(")")
    assert "  " not in text
    for symbol, _ in explained_symbols(entry.symbol, entry.definition):
        assert "\\" not in formula_as_text(symbol)


@pytest.mark.parametrize(
    ("formula", "text"),
    [
        (r"\rho^{\Sigma} = \sum_l \sum_j w^l(j)^\top H_l\, w^l(j)", "ρ^Σ = Σ_l Σ_j w^l(j)ᵀ H_l w^l(j)"),
        (r"\frac{\hat L(w+u) - \hat L(w)}{1 + \hat L(w)}", "(L̂(w + u) − L̂(w))/(1 + L̂(w))"),
        (r"\Big(\sum_{\mathrm{paths}} |W_i|^p\Big)^{1/p}", "(Σ[paths] |W_i|^p)^(1/p)"),
        (r"\prod_{i=c+1}^{b} D_iW_i", "Π[i = c + 1…b] D_i W_i"),
        (r"\ln\tfrac{2n}{\delta}", "ln((2n)/δ)"),
        (r"\lambda_{\max}(H_l)", "λ_max(H_l)"),
    ],
)
def test_formulas_read_as_people_write_them(formula: str, text: str) -> None:
    assert formula_as_text(formula) == text


def test_symbols_are_found_piece_by_piece() -> None:
    assert explained_and_unexplained_symbols(r"\hat L(w)", ["w"]) == (["w"], ["L"])
    assert explained_and_unexplained_symbols(r"w^l + w", ["w^l", "w"]) == (["w^l", "w"], [])
    assert explained_and_unexplained_symbols(r"\|w\|_{p,q}", ["w"]) == (["w"], [r"\|\cdot\|_{p,q}"])
    assert formula_tokens(r"\|W_i\|_{1,\infty}")[-1] == r"\|\cdot\|_{1,\infty}"


def test_typical_values_are_those_of_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Light measures of the first network of the demo, trained anew, have the values that the file says."""
    made = runpy.run_path(str(ROOT / "docs" / "generate" / "typical_values.py"))
    problem = made["demo_problem"]("batch 16")
    table = fs.measure(problem, ["gradient_norm", "margin", "l2_path_norm"])
    for name in ("gradient_norm", "margin", "l2_path_norm"):
        stored = made["json"].loads((ROOT / "src" / "flatscope" / "typical_values.json").read_text())["demo"][name]
        assert table[name] == pytest.approx(stored["batch 16"]["value"], rel=0.05)


def test_a_measure_of_ones_own_may_have_no_definition() -> None:
    torch.manual_seed(0)
    assert typical_values("of_my_own") == []
    problem = fs.Problem(nn.Linear(3, 2), (torch.eye(3), torch.tensor([0, 1, 0])))
    assert fs.measure(problem, "margin")["margin"] < 10
