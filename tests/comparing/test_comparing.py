"""Comparisons: what may rank networks, what may not and why; copies of one function are recognised, near ones not."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flatscope as fs
from flatscope.cli import main
from flatscope.comparing.verdicts import Quantity
from flatscope.errors import InputError, NotApplicable
from flatscope.inputs.loading import load
from flatscope.inputs.weight_files import save_weights
from flatscope.registry import declarations
from flatscope.reports.items import by_kind
from flatscope.training.checkpoint import TrainConfig
from flatscope.training.loop import train
from flatscope.training.models import build

SOME = ["margin", "hessian_trace", "l1_path_norm", "l2_norm", "rho_sum", "parameter_count", "perturbation_robustness"]
WIDTHS = (64, 12, 10)
Data = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def data() -> Data:
    loaded = load("digits", train_size=100, test_size=0, flatten=True).train
    assert isinstance(loaded, tuple)
    return loaded


def trained(data: Data, seed: int, epochs: int = 25) -> nn.Module:
    model = build("mlp", seed=seed, widths=WIDTHS)
    train(model, data, TrainConfig(lr=0.05, momentum=0.9, batch_size=20, epochs=epochs), show_progress=False)
    return model.eval()


@pytest.fixture(scope="module")
def pair(data: Data) -> dict[str, nn.Module]:
    return {"one": trained(data, 0), "two": trained(data, 1)}


@pytest.fixture(scope="module")
def found(pair: dict[str, nn.Module], data: Data) -> fs.Comparison:
    twin = fs.rescale(pair["one"], data[0][:2], by="unit", seed=4)
    return fs.compare({**pair, "twin": twin}, data, SOME)


def test_a_rescaled_copy_is_recognised_and_what_differs_is_named(found: fs.Comparison) -> None:
    (same,) = found.same_function
    assert (same.first, same.second, same.how, same.samples) == ("one", "twin", "units rescaled", 100)
    assert same.difference < 1e-6
    assert found.distinct == ["one", "two"]
    moved = found.moved_between_copies()
    assert {"hessian_trace", "l2_norm"} <= set(moved)
    assert not {"margin", "l1_path_norm", "rho_sum"} & set(moved)
    assert found.verdict("hessian_trace").word == "not comparable"
    assert found.verdict("hessian_trace").code == "copy"
    assert {"margin", "l1_path_norm", "rho_sum"} <= set(found.comparable)
    assert found.verdict("parameter_count").word == "no direction"
    assert [remark.code for remark in found.warnings()] == ["copy", "moved"]
    assert all(remark in found.summary() for remark in found.warnings())
    assert {"twin", "one"} <= set(found.warnings()[0].split())


@pytest.mark.parametrize("ways", [["permutation"], ["unit", "permutation"]], ids="+".join)
def test_exchanged_units_are_recognised(pair: dict[str, nn.Module], data: Data, ways: list[str]) -> None:
    twin = pair["one"]
    for way in ways:
        twin = fs.rescale(twin, data[0][:2], by=way, seed=1)
    found = fs.compare({"one": pair["one"], "twin": twin}, data, "margin")
    assert [same.how for same in found.same_function] == ["units rescaled and exchanged"]
    assert "nothing to rank" in found.summary()
    with pytest.raises(NotApplicable, match="copies of one"):
        found.ranking()


def test_equal_weights_are_called_that(pair: dict[str, nn.Module], data: Data) -> None:
    found = fs.compare({"one": pair["one"], "again": copy.deepcopy(pair["one"])}, data, "margin")
    assert [same.how for same in found.same_function] == ["equal weights"]


@pytest.mark.parametrize("layer", [0, 2])
def test_a_copy_with_one_weight_changed_is_not_one(pair: dict[str, nn.Module], data: Data, layer: int) -> None:
    twin = fs.rescale(pair["one"], data[0][:2], by="unit", seed=4)
    weights = [value for name, value in twin.named_parameters() if name.endswith("weight")]
    weight = weights[layer // 2]
    with torch.no_grad():
        weight.view(-1)[weight.abs().argmax()] *= 1.05
    found = fs.compare({"one": pair["one"], "twin": twin}, data, "margin")
    assert found.same_function == []
    assert "same function" not in found.summary()


def with_batchnorm(seed: int, x: Tensor) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    net(x)  # running statistics
    return net.eval()


def test_copies_are_looked_for_without_batchnorm() -> None:
    x, y = torch.randn(40, 5, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
    net = with_batchnorm(0, x)
    folded = fs.fold_batchnorm(net, x)
    found = fs.compare({"as given": net, "folded": folded, "again": net}, (x, y), ["margin", "hessian_trace"])
    assert {(same.first, same.second): same.how for same in found.same_function} == {
        ("as given", "folded"): "rewritten",
        ("as given", "again"): "equal weights",
        ("folded", "again"): "rewritten",
    }
    assert found.verdict("hessian_trace").code == "copy"  # it counts the parameters of BatchNorm
    assert any(isinstance(module, nn.BatchNorm1d) for module in net.modules())


def test_a_comparison_has_the_numbers_that_measure_gives_with_batchnorm_too() -> None:
    x, y = torch.randn(40, 5, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
    networks = {name: with_batchnorm(seed, x) for name, seed in (("a", 1), ("b", 2))}
    names = ["hessian_trace", "kappa_trace_sum", "rho_sum", "gradient_norm", "parameter_count", "l2_norm", "psi_trace"]
    found = fs.compare(networks, (x, y), names)
    for name, network in networks.items():
        table = fs.measure(fs.Problem(network, train=(x, y), dtype=torch.float64), names)
        assert found.tables[name].one_each() == pytest.approx(table.one_each(), rel=1e-9)
        assert found.networks[name].parameters == sum(value.numel() for value in network.parameters())


def test_without_a_copy_declarations_alone_keep_measures_out(pair: dict[str, nn.Module], data: Data) -> None:
    found = fs.compare(pair, data, SOME)
    assert found.same_function == []
    for name in ("hessian_trace", "l2_norm"):
        verdict = found.verdict(name)
        assert (verdict.word, verdict.code) == ("not comparable", "rescaling")
        # That rescaling whole layers does no harm is said of the product of norms alone.
        assert ("layers" in verdict.reason) == (name == "l2_norm")


def test_a_network_in_which_nothing_can_be_rescaled_may_be_ranked_by_curvature(data: Data) -> None:
    def linear(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Linear(64, 10)

    found = fs.compare({"a": linear(0), "b": linear(1)}, data, ["hessian_trace"])
    assert not any(network.rescalable for network in found.networks.values())
    assert found.verdict("hessian_trace").word == "comparable"


def test_losses_far_apart_are_said_and_curvature_does_not_rank(pair: dict[str, nn.Module], data: Data) -> None:
    early = trained(data, 0, epochs=2)
    found = fs.compare({**pair, "early": early}, data, ["rho_sum", "l1_path_norm"])
    assert found.verdict("rho_sum").word == "not comparable"
    assert found.verdict("l1_path_norm").word == "comparable"
    warning, undertrained, slope = found.warnings()
    assert (warning.code, undertrained.code, slope.code) == ("loss", "fit", "slope")
    assert undertrained.startswith("early ")
    assert f"training error {found.networks['early'].error:.3g} against 0)" in undertrained
    assert undertrained in found.summary()
    assert all(f"{name} " in warning for name in found.names)
    losses = [network.loss for network in found.networks.values()]
    assert f"factor of {max(losses) / min(losses):.3g}" in warning
    assert [remark.code for remark in fs.compare(pair, data, ["rho_sum"]).warnings()] == []


FUNCTION_ONLY = {name for name, entry in declarations().items() if entry.function_only}


def test_derivatives_and_rises_of_the_loss_are_declared_as_such() -> None:
    falling = {name for name, entry in declarations().items() if entry.falls_with_loss}
    assert falling >= {"hessian_trace", "kappa_trace_sum", "rho_sum", "psi_trace", "sharpness", "expected_sharpness"}
    assert falling.isdisjoint({"l1_path_norm", "psi_balance", "margin", "spectral_norm", "pac_bayes_kl"})
    assert {"margin"} <= FUNCTION_ONLY


def split_unit(model: nn.Module) -> nn.Module:
    """The same function with one unit more: the first hidden unit twice, with half its outgoing weights each."""
    first, last = [module for module in model.modules() if isinstance(module, nn.Linear)]
    wide, read = (
        nn.Linear(first.in_features, first.out_features + 1),
        nn.Linear(last.in_features + 1, last.out_features),
    )
    with torch.no_grad():
        wide.weight.copy_(torch.cat([first.weight, first.weight[:1]]))
        wide.bias.copy_(torch.cat([first.bias, first.bias[:1]]))
        read.weight.copy_(torch.cat([last.weight, last.weight[:, :1]], dim=1))
        read.weight[:, [0, -1]] /= 2
        read.bias.copy_(last.bias)
    return nn.Sequential(wide, nn.ReLU(), read).eval()


def test_other_architectures_are_ranked_by_their_function_alone(pair: dict[str, nn.Module], data: Data) -> None:
    wider = split_unit(pair["one"])
    found = fs.compare({**pair, "wider": wider}, data, SOME)
    assert [(same.second, same.how) for same in found.same_function] == [("wider", "rewritten")]
    ranking = {label.partition("[")[0] for label in found.comparable}
    assert ranking <= FUNCTION_ONLY
    assert "margin" in ranking
    assert "architecture" in {remark.code for remark in found.warnings()}
    for name in FUNCTION_ONLY:  # what is said to depend on the function alone does
        rows = found.to_frame()
        rows = rows[rows["measure"] == name].pivot(index="options", columns="network", values="value")
        assert np.allclose(rows["one"], rows["wider"], rtol=1e-6), name


def test_ranking_directions_and_uncertainty(found: fs.Comparison) -> None:
    higher, lower = found.ranking("margin"), found.ranking("l1_path_norm")
    assert higher["value"].is_monotonic_decreasing
    assert lower["value"].is_monotonic_increasing
    assert set(higher["name"]) == {"one", "two"}
    noisy = found.ranking("perturbation_robustness[gamma=1.0]")
    assert (noisy["stderr"] > 0).all()
    whole = found.ranking()
    assert whole["families"].iloc[0] == len({declarations()[n.partition("[")[0]].family for n in found.counting})
    assert math.isclose(whole["probability_best"].sum(), 1.0)
    assert math.isclose(whole["mean_rank"].sum(), 3.0)
    with pytest.raises(NotApplicable, match="neither lower nor higher"):
        found.ranking("parameter_count")
    with pytest.raises(fs.InputError, match="margin"):
        found.ranking("margn")


def test_noise_in_the_values_is_seen_in_the_order(found: fs.Comparison) -> None:
    from flatscope.comparing.rankings import consensus_ranking, order_in_words, ranking_of_networks

    entry = declarations()["margin"]

    def quantity(gap: float) -> Quantity:
        zero = {"a": 0.0, "b": 0.0}
        value, stderr = {"a": 1.0 + gap, "b": 1.0}, {"a": 0.1, "b": 0.1}
        return Quantity("margin", "", entry, value, stderr, zero, zero, zero, {"a": False, "b": False})

    assert order_in_words(ranking_of_networks(quantity(1.0), ["a", "b"])) == "a > b"
    assert order_in_words(ranking_of_networks(quantity(0.05), ["a", "b"])) == "a ≳ b"
    assert order_in_words(ranking_of_networks(quantity(0.0), ["a", "b"])) == "a = b"
    unsure = consensus_ranking([quantity(0.05)], ["a", "b"]).set_index("name")
    # Normal errors of 0.1 each: Φ(0.05 / 0.1414) = 0.638.
    assert abs(unsure.loc["a", "probability_best"] - 0.638) < 0.03
    assert (unsure["rank_low"] == 1).all()
    assert (unsure["rank_high"] == 2).all()


def test_agreement_is_kendalls_tau_over_distinct_functions(data: Data) -> None:
    torch.manual_seed(3)
    nets = {f"net {i}": build("mlp", seed=i, widths=WIDTHS).eval() for i in range(5)}
    found = fs.compare(nets, data, ["margin", "l1_path_norm", "lipschitz_linf", "hessian_trace"])
    matrix = found.agreement(everything=True)
    frame = found.to_frame().pivot(index="network", columns="measure", values="value")
    for one, other in itertools.combinations(matrix.index, 2):
        a = frame[one] * (-1 if one == "margin" else 1)
        b = frame[other] * (-1 if other == "margin" else 1)
        signs = [
            np.sign((a.iloc[i] - a.iloc[j]) * (b.iloc[i] - b.iloc[j])) for i, j in itertools.combinations(range(5), 2)
        ]
        assert math.isclose(matrix.loc[one, other], np.mean(signs), abs_tol=1e-12)
    assert "hessian_trace" not in found.agreement().index
    assert sum(map(len, found.orders().values())) == len(found.comparable)


def test_a_comparison_survives_its_file_and_shows_itself(found: fs.Comparison, tmp_path: Path) -> None:
    for ending in fs.Comparison.ENDINGS:
        found.save(tmp_path / f"found{ending}")
    again = fs.Comparison.load(tmp_path / "found.json")
    assert again == found
    assert again.table.equals(found.table)
    assert again.same_function == found.same_function
    page = found._repr_html_()
    assert "<table" in page
    assert "same function" in page
    assert "hessian_trace" in repr(found)
    assert "| margin |" in found.to_markdown()
    assert list(by_kind(found)["comparisons"]) == ["comparison"]
    written = fs.report([found, found.tables], tmp_path / "page.html").read_text()
    assert str(found.warnings()[0]).rstrip(".") in written
    with pytest.raises(fs.InputError, match="file name ending"):
        found.save(tmp_path / "found.parquet")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(fs.InputError, match="comparison"):
        fs.Comparison.load(tmp_path / "other.json")


def test_models_and_random_state_are_left_alone(pair: dict[str, nn.Module], data: Data) -> None:
    before = {name: copy.deepcopy(model.state_dict()) for name, model in pair.items()}
    state = torch.get_rng_state()
    fs.compare(pair, data, ["margin"])
    assert torch.equal(torch.get_rng_state(), state)
    for name, model in pair.items():
        assert all(torch.equal(value, before[name][key]) for key, value in model.state_dict().items())
        assert all(value.grad is None for value in model.parameters())


def test_bad_inputs_are_named(pair: dict[str, nn.Module], data: Data) -> None:
    one, two = pair.values()
    x, y = data
    with pytest.raises(fs.InputError, match="at least two"):
        fs.compare([one], data)
    with pytest.raises(fs.InputError, match="data for models"):
        fs.compare([one, two])
    with pytest.raises(fs.InputError, match="Problem or a torch"):
        fs.compare([one, "two"], data)  # type: ignore[list-item]
    problem, other = fs.Problem(one, train=(x, y)), fs.Problem(two, train=(x.flip(0), y))
    with pytest.raises(fs.InputError, match="same training samples"):
        fs.compare([problem, other])
    with pytest.raises(fs.InputError, match="models where data"):
        fs.compare([problem, problem], data)
    with pytest.raises(fs.InputError, match="one loss"):
        fs.compare([problem, fs.Problem(two, train=data, loss="mse")])
    with pytest.raises(fs.InputError, match="known measure"):
        fs.compare([one, two], data, "margn")
    wide = nn.Sequential(nn.Linear(x.shape[1], 8), nn.ReLU(), nn.Linear(8, 12)).eval()
    told = r"got \(12,\), and \(10,\) for network 1: they answer different questions"
    with pytest.raises(fs.InputError, match=told):
        fs.compare([one, wide], data)


def test_the_command_ranks_checkpoints_and_recognises_the_copy(
    pair: dict[str, nn.Module],
    data: Data,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    twin = fs.rescale(pair["one"], data[0][:2], by="unit", seed=4)
    files = [save_weights(m, tmp_path / f"{n}.safetensors") for n, m in {**pair, "twin": twin}.items()]

    def run(*words: object) -> tuple[int, str, str]:
        common = ["--model", "mlp", "--model-option", "widths=64,12,10", "--data", "digits", "--flatten"]
        sizes = ["--train-size", "100", "--test-size", "0", "-m", "margin", "-m", "hessian_trace", "-m", "*path_norm"]
        monkeypatch.setattr(sys, "argv", ["flatscope", "compare", *map(str, words), *common, *sizes])
        try:
            main()
            code: object = 0
        except SystemExit as leaving:
            code = leaving.code or 0
        out, err = capsys.readouterr()
        assert isinstance(code, int)
        return code, out, err

    code, out, err = run(*files[:2])
    assert code == 0, err
    assert "same function" not in out
    assert "hessian_trace" in out
    code, out, err = run(*files, "--out", tmp_path / "found.json", "--report", tmp_path / "found.html")
    assert code == 0, err
    loaded = fs.Comparison.load(tmp_path / "found.json")
    assert loaded.distinct == ["one", "two"]
    assert loaded.warnings()[0].code == "copy"
    assert "units rescaled" in loaded.warnings()[0]
    assert " ".join(loaded.warnings()[0].split()) in " ".join(out.split())
    assert (tmp_path / "found.html").stat().st_size > 10_000
    code, out, err = run(*files, "--json")
    assert fs.Comparison.from_json(out).names == ["one", "two", "twin"]
    code, out, err = run(files[0])
    assert (code, out) == (2, "")
    assert "at least two checkpoints" in err
    code, out, err = run(*files, "--model", "mlp")
    assert (code, out) == (2, "")
    assert "once, or 3 times" in err


def test_checkpoints_of_two_architectures_have_a_model_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    factory = "from torch import nn\ndef build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, {0}), "
    factory += "nn.ReLU(), nn.Linear({0}, 10))\n"
    words: list[str] = []
    for width in (4, 6):
        (tmp_path / f"net{width}.py").write_text(factory.format(width))
        torch.manual_seed(width)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        words += [
            str(save_weights(model, tmp_path / f"w{width}.pt")),
            "--model",
            f"{tmp_path / f'net{width}.py'}:build",
        ]
    sizes = ["--data", "digits", "--train-size", "60", "--test-size", "0", "-m", "margin", "-m", "l1_path_norm"]
    monkeypatch.setattr(sys, "argv", ["flatscope", "compare", *words, *sizes, "--json"])
    with contextlib.suppress(SystemExit):
        main()
    found = fs.Comparison.from_json(capsys.readouterr().out)
    assert [network.parameters for network in found.networks.values()] == [64 * 4 + 4 + 50, 64 * 6 + 6 + 70]
    assert found.comparable == ["margin"]
    assert "architectures differ" in found.verdict("l1_path_norm").reason


@pytest.mark.parametrize(("n", "size"), [(1, 1), (2, 2), (9, 8), (10, 8), (6, 1)])
def test_batches_of_one_or_two_samples_are_compared(n: int, size: int) -> None:
    """As the last one of a loader is; every distance around the samples is looked at, whatever the size of batches."""
    samples = TensorDataset(torch.randn(n, 3), torch.arange(n) % 2)
    nets = {name: torch.nn.Linear(3, 2) for name in ("first", "second")}
    found = fs.compare(nets, DataLoader(samples, batch_size=size), names=["parameter_count"])
    assert found.same_function == []
    twin = copy.deepcopy(nets["first"])
    again = fs.compare({"a": nets["first"], "b": twin}, DataLoader(samples, batch_size=size), names=["l2_norm"])
    assert [(pair.samples, pair.around) for pair in again.same_function] == [(n, True)]


class Bent(nn.Linear):
    """Linear up to entries of 5 and bent beyond, where no sample is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x.abs().amax(1, keepdim=True) - 5).relu()


@pytest.mark.parametrize("size", [1, 2, 16])
def test_networks_that_differ_far_from_the_samples_alone_are_told_apart(size: int) -> None:
    torch.manual_seed(0)
    straight, bent = nn.Linear(3, 2), Bent(3, 2)
    bent.load_state_dict(straight.state_dict())
    samples = TensorDataset(torch.randn(16, 3).clamp(-2, 2), torch.arange(16) % 2)
    loader = DataLoader(samples, batch_size=size)
    assert fs.compare({"straight": straight, "bent": bent}, loader, names=["l2_norm"]).same_function == []


def test_outputs_that_are_no_numbers_are_not_the_same_function(data: Data) -> None:
    from flatscope.comparing.copies import find_copies

    problem = fs.Problem(build("mlp", seed=0, widths=WIDTHS).eval(), train=data)
    broken = copy.copy(problem)
    broken.forward = lambda *_: torch.full((100, 10), torch.nan)  # type: ignore[method-assign]
    assert len(find_copies({"one": problem, "two": copy.copy(problem)})) == 1
    assert find_copies({"one": problem, "two": broken}) == []


def test_effort_is_passed_on_to_the_measures(pair: dict[str, nn.Module], data: Data) -> None:
    curved = fs.compare(pair, data, ["kappa_trace_sum"], curvature="gauss_newton")
    assert all("Gauss-Newton" in table.reason("kappa_trace_sum") for table in curved.tables.values())
    hurried = fs.compare(pair, data, ["psi_epsilon", "sharpness"], budget=1e-3)
    assert all(table.to_frame()["value"].isna().all() for table in hurried.tables.values())
    with pytest.raises(InputError, match="budget"):
        fs.compare(pair, data, ["margin"], budget="soon")


def _with_a_dead_unit(weight: float) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        model[0].weight[2], model[0].bias[2] = 1.0, -12.0  # samples stay below 3 in each entry
        model[2].weight[:, 2] += weight * torch.arange(3)
    return model


def test_a_unit_that_is_dead_on_the_data_tells_networks_apart() -> None:
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(1)).double().clamp(-3, 3)
    nets = {"one": _with_a_dead_unit(0.0), "other": _with_a_dead_unit(9.0)}
    assert torch.equal(nets["one"](x), nets["other"](x))
    far = 6 * torch.ones(1, 3).double()
    assert float((nets["one"](far) - nets["other"](far)).detach().abs().max()) > 20
    found = fs.compare(nets, (x, nets["one"](x).argmax(1)), ["l1_path_norm"])
    assert found.same_function == []
    copies = {"one": nets["one"], "copy": fs.rescale(nets["one"], x, seed=3)}
    [pair] = fs.compare(copies, (x, nets["one"](x).argmax(1)), ["l1_path_norm"]).same_function
    assert pair.around
    assert "and around them" in str(pair)


def test_inputs_on_which_noise_makes_no_sense_are_compared_as_they_are() -> None:
    class Roots(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.last, self.factor = nn.Linear(3, 2), factor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(x.sqrt() * self.factor)

    x = torch.rand(30, 3, generator=torch.Generator().manual_seed(1))
    x[:, 0] = 0.0  # any noise makes some of them negative
    labels = torch.arange(30) % 2
    [pair] = fs.compare([Roots(1.0), Roots(1.0)], (x, labels), ["margin"]).same_function
    assert not pair.around
    assert fs.compare([Roots(1.0), Roots(1.1)], (x, labels), ["margin"]).same_function == []


def test_a_form_that_has_one_value_of_the_network_is_compared() -> None:
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(3))
    nets = {}
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        nets[name] = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    names = ["kappa", "rho", "l2_path_norm"]
    found = fs.compare(nets, (x, torch.arange(40) % 3), names, options={"kappa": {"form": "max"}})
    assert set(found.to_frame()["measure"]) == {"kappa", "l2_path_norm"}
    assert found.verdict("kappa[form=max]").word == "not comparable"


def test_a_rounded_network_is_called_nearly_equal_and_another_training_is_not(
    pair: dict[str, nn.Module], data: Data
) -> None:
    rounded = copy.deepcopy(pair["one"])
    with torch.no_grad():
        for value in rounded.parameters():
            scale = value.abs().max() / 127
            value.copy_((value / scale).round() * scale)
    compared = fs.compare({**pair, "rounded": rounded, "again": copy.deepcopy(pair["one"])}, data, "l2_norm")
    ((one, other, apart),) = compared.meta["near_copies"]
    length = math.sqrt(sum(float(value.detach().square().sum()) for value in pair["one"].parameters()))
    moved = math.sqrt(
        sum(
            float((a - b).detach().square().sum())
            for a, b in zip(pair["one"].parameters(), rounded.parameters(), strict=True)
        )
    )
    assert (one, other) == ("one", "rounded")
    assert apart == pytest.approx(moved / length, rel=1e-5)
    (remark,) = [remark for remark in compared.warnings() if remark.code == "near"]
    assert "forecast" in remark
    assert fs.Comparison.from_json(compared.to_json()).warnings() == compared.warnings()
