"""Declarations: what they must say, how they are chosen, what they tell about themselves."""

from __future__ import annotations

import copy
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from networks import mlp
from torch import nn

import flatscope as fs
from flatscope import registry
from flatscope.cli.measure_text import measure_page
from flatscope.context import Context
from flatscope.errors import InputError, UnknownNameError
from flatscope.registry import (
    CORE,
    FAMILY_NAMES,
    Value,
    bound,
    declarations,
    family_name,
    measure,
    select,
)

pytestmark = pytest.mark.fast

WORDS: dict[str, Any] = {"symbol": "x", "paper": "flatscope", "equation": "none"}


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """What a test declares is gone after it."""
    registry._load_own_families()  # once: modules that are loaded declare nothing again
    before = copy.copy(registry._REGISTRY)
    yield
    registry._REGISTRY.clear()
    registry._REGISTRY.update(before)


@pytest.fixture
def problem() -> fs.Problem:
    torch.manual_seed(0)
    return fs.Problem(nn.Linear(3, 2), (torch.eye(3), torch.tensor([0, 1, 0])))


def declare(name: str, value: Any = 1.0, **words: Any) -> None:
    def function(
        ctx: Context, *, draws: int = 3, alpha: float = 1, rule: str = "a", each: tuple[int, ...] = (1,)
    ) -> Any:
        """Something."""
        return value(ctx, draws, alpha, each) if callable(value) else value

    function.__name__ = name
    measure(**(WORDS | words))(function)


def names(chosen: list[registry.Declaration]) -> list[str]:
    return [entry.name for entry in chosen]


@pytest.mark.parametrize(
    ("word", "value", "near"),
    [
        ("per", "layers", "layer"),
        ("direction", "low", "lower"),
        ("invariant_under", {"layer_scale"}, "layer_scaling"),
        ("needs", {"tests"}, "test"),
        ("cost", "longer", "long"),
        ("paper", "petzka2018", "petzka2019"),
    ],
)
def test_words_outside_the_vocabulary_are_refused(word: str, value: Any, near: str) -> None:
    with pytest.raises(UnknownNameError, match=f"{word} of wrong_one.*{near}"):
        declare("wrong_one", **{word: value})
    assert "wrong_one" not in declarations()


def test_a_measure_without_a_docstring_is_refused() -> None:
    with pytest.raises(InputError, match=r"test_registry:\d+: expected a docstring"):
        measure(**WORDS)(lambda ctx: 1.0)


def test_a_name_that_is_taken_is_refused_with_both_places() -> None:
    def margin(ctx: Context) -> float:
        """Another margin."""
        return 0.0

    known = declarations()["margin"]
    with pytest.raises(InputError, match=r"test_registry:\d+: .*flatscope.measures.margins:\d+"):
        measure(**WORDS)(margin)
    with pytest.raises(InputError, match="not taken"):
        bound(**WORDS, assumptions=())(margin)
    assert declarations()["margin"] is known


# Imports the library anew after each way to begin: what it needs itself, which takes seconds, is loaded once.
ANEW = """
import sys
for first in sys.argv[1:]:
    for name in [name for name in sys.modules if name.partition(".")[0].startswith("flatscope")]:
        del sys.modules[name]
    exec(first)
    from flatscope.registry import measure, declarations
    try:
        @measure(symbol="x", paper="flatscope", equation="none")
        def margin(ctx):
            "Another margin."
    except Exception as problem:
        print(type(problem).__name__, declarations()["margin"].source, end=" ")
    print(*declarations("bound"), *declarations())
"""
BEGINNINGS = ("import flatscope.registry", "import flatscope.generalization_bounds.psi")


@pytest.mark.slow
def test_the_list_is_complete_whatever_was_imported_before() -> None:
    """And a name of ours is refused to others before it is loaded."""
    done = subprocess.run([sys.executable, "-c", ANEW, *BEGINNINGS], capture_output=True, text=True, check=True)
    refused = ["InputError", declarations()["margin"].source]
    expected = [*refused, *declarations("bound"), *declarations()]
    assert [line.split() for line in done.stdout.splitlines()] == [expected] * len(BEGINNINGS)


def test_declaring_the_same_function_again_replaces_it() -> None:
    for _ in range(2):  # as when a module is reloaded
        declare("again")
    assert names(select("again")) == ["again"]


def test_names_and_globs_choose_in_the_order_of_declaration() -> None:
    for name in ("zz_one", "zz_two", "zz_three"):
        declare(name)
    assert names(select("zz_*")) == ["zz_one", "zz_two", "zz_three"]
    assert names(select(["zz_three", "zz_o*", "zz_three"])) == ["zz_three", "zz_one"]
    assert names(select(name for name in ("zz_two",))) == ["zz_two"]
    assert select([]) == []
    for unknown in ("zz_", "ZZ_ONE", ["zz_one", "zz_four"]):
        with pytest.raises(UnknownNameError, match="zz_"):
            select(unknown)


def test_long_measures_are_left_out_unless_asked_for() -> None:
    declare("zz_long", cost="long")
    declare("zz_sweep", cost="sweep")
    assert names(select(None)) == list(CORE)
    assert names(select(["standard"])) == names(select("standard"))
    assert "zz_sweep" in names(select("standard"))
    assert "zz_long" not in names(select("standard"))
    assert names(select("all")) == names(select(["all"])) == list(declarations())
    assert names(select("zz_long")) == ["zz_long"]


def test_bounds_and_measures_are_chosen_apart() -> None:
    @bound(**WORDS, assumptions=("one", "two"))
    def zz_bound(ctx: Context, *, delta: float) -> Value:
        """A bound."""
        return Value(0.5)

    assert names(select("zz_bound", "bound")) == ["zz_bound"]
    assert "zz_bound" not in declarations()
    with pytest.raises(UnknownNameError):
        select("zz_bound")


def test_a_declaration_is_read_from_its_function() -> None:
    declare("zz_read", per="layer", needs={"test"})
    entry = declarations()["zz_read"]
    assert entry.summary == "Something."
    assert entry.family == "test registry"
    assert entry.options == {"draws": 3, "alpha": 1, "rule": "a", "each": (1,)}
    page = measure_page(entry)
    for words in ("zz_read", "Something.", "beyond the papers, none", "draws = 3", "rule = 'a'", "test data"):
        assert words in page


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"draws": 2.5}, "draws: expected a whole number, got 2.5"),
        ({"draws": True}, "draws: expected a whole number, got True"),
        ({"alpha": "x"}, "alpha: expected a number, got 'x'"),
        ({"alpha": (1.0, 2.0)}, "alpha: expected a number"),
        ({"rule": 3}, "rule: expected a word, got 3"),
        ({"rules": "a"}, "option of zz_options.*Did you mean rule"),
    ],
)
def test_options_are_checked_in_name_and_kind(options: dict[str, Any], expected: str, problem: fs.Problem) -> None:
    declare("zz_options")
    with pytest.raises(InputError, match=expected):
        fs.measure(problem, "zz_options", options={"zz_options": options})


def test_options_reach_the_function_and_the_table(problem: fs.Problem) -> None:
    def computed(ctx: Context, draws: int, alpha: float, each: tuple[int, ...]) -> float:
        return ctx.cached(lambda c, each: draws * alpha + sum(each), each=each)

    declare("zz_computed", computed)
    table = fs.measure(problem, "zz_computed", options={"zz_computed": {"draws": 3, "alpha": 2, "each": [1, 2]}})
    assert table["zz_computed"] == 9.0  # the list came as a tuple, which can be a key
    assert table.to_frame()["options"].tolist() == ['{"alpha": 2, "each": [1, 2]}']  # draws is the default


def test_results_of_every_form_become_rows(problem: fs.Problem) -> None:
    declare("zz_number", torch.tensor(2.0))
    declare("zz_layers", {"": 3.0, "0": Value(1.0, stderr=0.1, exact=False)}, per="layer")
    declare("zz_units", {"0": torch.tensor([1.0, 2.0])}, per="unit")
    declare("zz_samples", Value(torch.tensor([1.0, 2.0]), low=torch.tensor([0.0, 1.0])), per="sample")
    declare("zz_several", [Value(1.0, options={"alpha": 1}), Value(2.0, options={"alpha": 2})])
    table = fs.measure(problem, "zz_*")
    assert table["zz_number"] == 2.0
    assert (table["zz_layers"], table.layer("zz_layers"), table.stderr("zz_layers", "0")) == (3.0, {"0": 1.0}, 0.1)
    assert table.units("zz_units", "0").tolist() == [1.0, 2.0]
    assert table.samples("zz_samples").tolist() == [1.0, 2.0]
    frame = table.to_frame().set_index("measure")
    assert frame.loc["zz_samples", "low"].tolist() == [0.0, 1.0]
    assert frame.loc["zz_several", "options"].tolist() == ['{"alpha": 1}', '{"alpha": 2}']


@pytest.mark.parametrize(
    ("need", "reason"), [("test", "needs test data"), ("initial", "before training"), ("classes", "class labels")]
)
def test_what_a_measure_needs_and_is_not_there_gives_a_reason(need: str, reason: str) -> None:
    declare("zz_needy", needs={need})
    table = fs.measure(
        fs.Problem(nn.Linear(3, 2), (torch.eye(3), torch.ones(3, 2)), loss="mse"), ["zz_needy", "l2_norm"]
    )
    assert table["zz_needy"] != table["zz_needy"]
    assert reason in table.reason("zz_needy")
    assert table["l2_norm"] > 0  # the rest of the table is there


def test_bounds_say_whether_they_are_vacuous(problem: fs.Problem) -> None:
    for name, value in (("zz_good", 0.5), ("zz_bad", 1.5), ("zz_none", float("nan"))):

        def function(ctx: Context, *, delta: float, value: float = value) -> Value:
            """A bound."""
            return Value(value, reason="why" if value != value else "")

        function.__name__ = name
        bound(**WORDS, assumptions=("one", "two"))(function)
    frame = fs.bounds(problem, "zz_*", delta=0.1).to_frame().set_index("measure")
    assert frame["vacuous"].to_dict() == {"zz_good": False, "zz_bad": True, "zz_none": True}
    assert set(frame["assumptions"]) == {"one; two"}
    assert set(frame["confidence"]) == {0.9}


def test_a_measure_that_breaks_does_not_lose_the_others() -> None:
    @measure(symbol="x", paper="flatscope", equation="none", conventions="breaks on purpose")
    def broken(ctx: Context) -> float:
        """Divides by zero."""
        return 1 / 0

    with pytest.warns(RuntimeWarning, match="broken failed: ZeroDivisionError"):
        table = fs.measure(mlp().problem(), ["parameter_count", "broken", "gradient_norm"])
    assert math.isnan(table["broken"])
    assert "division by zero" in table.reason("broken")
    assert table["gradient_norm"] > 0


@pytest.mark.parametrize("size", [1e8, 1e12])
def test_a_network_that_diverged_gives_no_row_without_a_number_and_a_reason(size: float) -> None:
    """Outputs of 1e35 are finite, their squares are not."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)]
    with torch.no_grad():
        for value in nn.Sequential(*layers).parameters():
            value.mul_(size)
    diverged = fs.Problem(nn.Sequential(*layers), (torch.randn(40, 6), torch.arange(40) % 3))
    frame = fs.measure(diverged).to_frame()
    without = frame[frame["value"].isna()]
    assert (without["reason"] != "").all()
    assert not without["exact"].any()
    endless = frame[frame["value"].abs() == math.inf]
    assert set(endless[endless["reason"] == ""]["measure"]) <= {"psi_balance", "local_linear_margin"}
    overflowing = set(without[without["reason"].str.startswith("not a number")]["measure"])
    assert ("hessian_trace" in overflowing) == (size == 1e12)


@pytest.mark.parametrize(("name", "option"), [("flatness_radius", "kind"), ("l2_path_norm", "outputs")])
def test_an_option_of_given_words_takes_no_other(name: str, option: str) -> None:
    with pytest.raises(UnknownNameError, match=f"{option} of {name}"):
        declarations()[name].checked_options({option: "sideways"})


def test_names_for_people_are_of_families_that_exist() -> None:
    known = {entry.family for kind in ("measure", "bound") for entry in declarations(kind).values()}
    assert set(FAMILY_NAMES) <= known
    assert (family_name("psi flatness"), family_name("norms")) == ("PSI flatness", "norms")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("kappa_max", "It is kappa with form='max': options={'kappa': {'form': 'max'}}, --option kappa.form=max"),
        ("l2_norm_over_margin", "It is l2_norm with form='over_margin'"),
        ("path_norm_capacity", "l2_path_norm with form='capacity'"),
        ("vc_dimension", "It is parameter_count with form='vc_dimension'"),
        ("lipschitz_l2", "It is spectral_norm with form='lipschitz_l2'"),
        ("path_norm", "Did you mean l2_path_norm"),
    ],
)
def test_a_name_that_an_option_has_is_explained(name: str, told: str) -> None:
    with pytest.raises(UnknownNameError, match=re.escape(told)):
        select(name)
    with pytest.raises(UnknownNameError, match=re.escape(told)):
        fs.measure(mlp().problem(), "margin", options={name: {"log": True}})


def test_a_form_is_one_of_a_few_words() -> None:
    for name, word in (("l2_norm", "capcity"), ("kappa", "least"), ("rho", "sum"), ("parameter_count", "vc")):
        with pytest.raises(UnknownNameError, match="form"):
            declarations()[name].checked_options({"form": word})


def test_options_of_the_norm_and_of_its_forms_are_listed_and_explained() -> None:
    entry = declarations()["l2_path_norm"]
    assert list(entry.options) == ["form", "p", "pooling", "outputs", "biases", "log", "epsilon", "with_4d", "width"]
    assert entry.options["form"] == "norm"
    assert (entry.function.__doc__ or "").count("Args:") == 1
