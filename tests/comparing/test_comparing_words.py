"""What a comparison says in words: names of checkpoints, shared places, networks not trained to the end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import flatscope as fs
from flatscope.cli.run_compare import _names_of_checkpoints
from flatscope.comparing.rankings import close_neighbours_in_words, places_in_words
from flatscope.comparing.verdicts import remarks_on_slopes
from flatscope.network_summary import NetworkSummary

pytestmark = pytest.mark.fast


def test_without_classes_the_loss_says_which_network_is_undertrained() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(40, 64, generator=generator), torch.randn(64, 1, generator=generator) / 8
    good, poor = nn.Linear(64, 1, bias=False), nn.Linear(64, 1, bias=False)
    with torch.no_grad():
        good.weight.copy_(weights.T * 0.9)
        poor.weight.copy_(weights.T * 0.5)
    problems = {n: fs.Problem(m, train=(x, x @ weights), loss="mse") for n, m in (("good", good), ("poor", poor))}
    warning, slope = fs.compare(problems, names="l2_norm").warnings()
    assert (warning.code, slope.code) == ("fit", "slope")
    assert warning.startswith("poor ")


def test_a_shared_first_place_is_said_in_words() -> None:
    frame = pd.DataFrame({"name": list("abcd"), "rank": [1.5, 1.5, 3.5, 3.5], "families_first": [2, 2, 0, 0]})
    assert places_in_words(frame) == ["tied first:", "tied first:", "tied for 3 to 4:", "tied for 3 to 4:"]
    frame = pd.DataFrame({"name": list("abc"), "rank": [1.0, 2.5, 2.5], "families_first": [2, 1, 1]})
    assert places_in_words(frame) == ["1.", "tied for 2 to 3:", "tied for 2 to 3:"]
    frame = pd.DataFrame({"name": list("abc"), "rank": [2.0] * 3, "families_first": [1] * 3})
    assert places_in_words(frame) == ["tied first:"] * 3


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["runs/small/weights.safetensors", "runs/large/weights.safetensors"], ["small", "large"]),
        (["a/x/last/w.pt", "b/y/last/w.pt"], ["a/x", "b/y"]),
        (["runs/one.pt", "other/two.safetensors"], ["one", "two"]),
        (["runs/run.1", "runs/run.2"], ["run.1", "run.2"]),
        (["runs/w.pt", "runs/w.safetensors"], ["runs/w.pt", "runs/w.safetensors"]),
        (["w.pt", "runs/w.pt"], ["w.pt", "runs/w.pt"]),
    ],
)
def test_checkpoints_are_called_by_what_tells_their_paths_apart(paths: list[str], names: list[str]) -> None:
    assert _names_of_checkpoints([Path(path) for path in paths], None) == names


def test_an_order_that_hangs_on_one_family_is_too_close_to_call() -> None:
    def voices(*ranks: tuple[float, ...]) -> dict[str, np.ndarray]:
        return {f"f{number}": np.array(given) for number, given in enumerate(ranks)}

    a, b, nearly = (1.0, 2.0), (2.0, 1.0), (1.4, 1.6)
    (text,) = close_neighbours_in_words(voices(a, a, b), ["a", "b"])
    assert text.startswith("a before b is too close to call: one family of measures more or less would turn it round.")
    assert text.endswith("Without f0 or f1, a would not be ahead.")
    (text,) = close_neighbours_in_words(voices(b, b, nearly, a, nearly, a), ["a", "b"])  # a leads by 0.4 of a family
    assert "Without f3 or f5" in text
    assert close_neighbours_in_words(voices(a, a, a, b), ["a", "b"]) == []  # ahead by two families
    assert close_neighbours_in_words(voices(a, a), ["a", "b"]) == []
    assert close_neighbours_in_words(voices(a, b), ["a", "b"]) == [], "a tie is said elsewhere"
    assert close_neighbours_in_words(voices(a), ["a", "b"]) == ["One family of measures alone (f0) makes this order."]
    third = close_neighbours_in_words(voices((1.0, 2.0, 3.0), (1.0, 3.0, 2.0), (1.0, 2.0, 3.0)), ["a", "b", "c"])
    assert [text.partition(" is too")[0] for text in third] == ["b before c"]


@pytest.mark.parametrize("left_out", [True, False])
def test_untrained_networks_are_on_a_slope_and_the_summary_says_what_its_ranks_mean(left_out: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 8, generator=generator), torch.arange(60) % 3
    networks: dict[str, nn.Module] = {}
    for name, seed in (("a", 1), ("b", 2)):
        network = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
        draws = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for value in network.parameters():
                value.copy_(torch.randn(value.shape, generator=draws) / 3)
        networks[name] = network.eval()
    if left_out:
        networks["copy"] = fs.rescale(networks["a"], x, seed=1)
    measures = ["gradient_norm", "margin", "*path_norm", "lipschitz_linf", "rho_sum"]
    found = fs.compare(networks, (x, y), measures)
    text, families = found.summary(), int(found.ranking()["families"].iloc[0])
    assert families == 2  # path norms and Lipschitz constants: margins and relative flatness have no record to count
    for row in found.ranking().itertuples():
        assert f"first in {row.families_first} of the {families} families of measures" in text
    assert "the places in 95 % of draws from the standard errors" in text
    assert "a value without ± counts as exact" in text
    assert ("copy is not ranked: it is the same function as a." in text) is left_out
    (slope,) = [remark for remark in found.warnings() if remark.code == "slope"]
    assert slope in text
    assert all(f"{name} (the training loss " in slope for name in ("a", "b"))
    assert slope.count("that of outputs that ignore the inputs") == 2 + left_out
    assert slope.count("one step lowers it to") == 2 + left_out
    shared = int(found.ranking()["families_first"].sum()) > families
    assert ("several share the first place" in text) is shared
    assert all(remark in text for remark in found.ranking_remarks())
    unasked = fs.compare(networks, (x, y), measures[1:])
    assert slope in unasked.warnings(), "the gradient is always looked at"
    assert (unasked.conclusion.code, "a and b are not trained" in str(unasked.conclusion)) == ("untold", True)
    alone = fs.compare(networks, (x, y), "l2_path_norm").summary()
    assert "mean rank 1.00, in the only family of measures; rank 1 to 1." in alone
    assert "One family of measures alone (path norms) makes this order." in alone
    assert "no ranking" in fs.compare(networks, (x, y), "margin").summary(), "margins ranked such pairs wrongly"


def summary(fall: float, decay: float = 0.0) -> NetworkSummary:
    nan = float("nan")
    return NetworkSummary("", 1, 0.1, 0.0, nan, nan, True, gradient_norm=1.0, fall=fall, constant=1.0, decay=decay)


def test_only_networks_on_a_slope_are_said_to_be() -> None:
    networks = {name: summary(fall) for name, fall in {"flat": 1e-7, "nearly": 1e-3, "steep": 0.05}.items()}
    networks |= {"unknown": summary(float("nan")), "held": summary(0.05, decay=0.01)}
    (text,) = remarks_on_slopes(networks)
    assert text.code == "slope"
    assert "steep (one step down the gradient lowers the training loss from 0.1 to 0.05)" in text
    assert not any(name in text for name in ("nearly", "unknown", "held"))
    assert remarks_on_slopes({"flat": summary(1e-7)}) == []


@pytest.mark.parametrize("names", [["hessian_trace"], ["rho_sum", "psi_trace"], ["gradient_norm", "hessian_trace"]])
def test_a_table_of_curvature_always_says_whether_this_is_a_minimum(names: list[str]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(60, 8), torch.arange(60) % 3
    network = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    problem = fs.Problem(network, train=(x, y))
    table = fs.measure(problem, names)
    loss = nn.functional.cross_entropy(network(x), y)
    length = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(network.parameters()))]).norm()
    assert table.meta["gradient_norm"] == pytest.approx(float(length), rel=1e-5)
    assert any(text.startswith("still on a slope") for text in table.meta["remarks"])
    assert "gradient_norm" not in fs.measure(problem, ["parameter_count"]).meta  # nothing that a slope would change


def test_a_minimum_is_not_called_a_slope() -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 8)
    network = nn.Linear(8, 2, bias=False)
    y = x @ torch.randn(8, 2)
    with torch.no_grad():
        network.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
    table = fs.measure(fs.Problem(network.eval(), train=(x, y), loss="mse"), "hessian_trace")
    assert table.meta["gradient_norm"] < 1e-4
    assert "remarks" not in table.meta
