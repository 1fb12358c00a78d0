"""Sensitivity against dense twins: rounding by hand, blocks of the Hessian written out, losses one by one."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from decision_networks import LOSSES, NETWORKS, dense_block, lora, merged_lora, sample_losses, tied
from pieces import Cube
from scipy.special import ndtri, stdtrit
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flatscope as fs
from flatscope.decisions.allocation import allocate

STEPS = {"bits": (4, 2), "sparsity": (0.5,)}


def problem_of(name: str) -> tuple[fs.Problem, nn.Module, Tensor, Tensor]:
    model, x, y = NETWORKS[name]()
    return fs.Problem(model, train=(x, y), loss=LOSSES.get(name, "cross_entropy")), model, x, y


def rounded_by_hand(weight: Tensor, bits: int, rows: int = 0) -> Tensor:
    """Loops over the output rows (axis `rows`), one number after the other."""
    result, levels = weight.clone(), 2 ** (bits - 1) - 1
    for row in result.unbind(rows):
        flat = row.reshape(-1)
        top = max(abs(float(value)) for value in flat)
        if top:
            row.copy_(
                torch.tensor(
                    [round(float(v) / (top / levels)) * (top / levels) for v in flat], dtype=row.dtype
                ).reshape(row.shape)
            )
    return result


@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in ("attention", "merged lora", "transposed")])
def test_every_number_is_its_dense_twin(name: str) -> None:
    problem, model, x, y = problem_of(name)
    frame = fs.sensitivity(problem, **STEPS, precision=0).to_frame()
    assert len(frame) == 4 * frame["layer"].nunique()
    params = {key: value.detach() for key, value in model.named_parameters()}
    before = sample_losses(name, model, x, y)
    for row in frame[frame["what"] != "50 % pruned by OBD"].to_dict("records"):
        weight = row["weight"].partition("[")[0]
        value, moved = params[weight], params[weight].clone()
        if row["what"] == "50 % pruned":
            order = value.abs().reshape(-1).argsort(stable=True)
            moved.reshape(-1)[order[: round(0.5 * value.numel())]] = 0
        else:
            moved = rounded_by_hand(value, row["bits"], rows=1 if weight == "w" else 0)
        step = (moved - value).reshape(-1)
        gradient, hessian = dense_block(name, model, x, y, weight)
        rises = (sample_losses(name, model, x, y, {weight: moved}) - before).detach()
        where = f"{row['layer']}, {row['what']}"
        assert row["measured"] == pytest.approx(float(rises.detach().mean()), rel=1e-9, abs=1e-12), where
        assert row["measured_stderr"] == pytest.approx(float(rises.std()) / len(x) ** 0.5, rel=0.2, abs=1e-12), where
        assert row["predicted"] == pytest.approx(
            float(gradient @ step + 0.5 * step @ hessian @ step), rel=1e-8, abs=1e-12
        )
        trace = float(hessian.trace())
        assert row["by_trace"] == pytest.approx(0.5 * trace / len(step) * float(step @ step), rel=1e-8, abs=1e-12), (
            where
        )
        end = dense_slope(name, model, x, y, weight, moved)
        assert row["by_trapezoid"] == pytest.approx(float(0.5 * (gradient + end) @ step), rel=1e-8, abs=1e-12), where


def dense_slope(name: str, model: nn.Module, x: Tensor, y: Tensor, weight: str, at: Tensor) -> Tensor:
    leaf = at.clone().requires_grad_()
    loss = sample_losses(name, model, x, y, {weight: leaf}).mean()
    return torch.autograd.grad(loss, leaf)[0].reshape(-1)


def test_errors_are_those_of_the_paired_samples() -> None:
    problem, model, x, y = problem_of("mlp")
    frame = fs.sensitivity(problem, bits=(3,), sparsity=()).to_frame()
    row = frame.iloc[0]
    weight = dict(model.named_parameters())["0.weight"].detach()
    moved = {"0.weight": rounded_by_hand(weight, 3)}
    rises = (sample_losses("mlp", model, x, y, moved) - sample_losses("mlp", model, x, y)).detach()
    widened = float(rises.std()) / len(x) ** 0.5 * stdtrit(len(x) - 1, 0.975) / ndtri(0.975)  # as Student's are
    assert row["measured_stderr"] == pytest.approx(widened, rel=1e-12)
    assert row["measured_stderr"] < 1.2 * float(rises.std()) / len(x) ** 0.5
    apart = [float(sample_losses("mlp", model, x, y, m).detach().std()) for m in ({}, moved)]
    unpaired = math.hypot(*apart) / len(x) ** 0.5
    assert row["measured_stderr"] < unpaired


def test_a_loader_that_shuffles_gives_the_same_pairs() -> None:
    _, model, x, y = problem_of("mlp")
    loader = DataLoader(TensorDataset(x, y), batch_size=5, shuffle=True)
    shuffled = fs.sensitivity(fs.Problem(model, train=loader), bits=(3,), sparsity=()).to_frame()
    plain = fs.sensitivity(fs.Problem(model, train=(x, y)), bits=(3,), sparsity=()).to_frame()
    for name in ("predicted", "predicted_stderr", "measured", "measured_stderr", "by_trapezoid_stderr"):
        np.testing.assert_allclose(shuffled[name], plain[name], rtol=1e-9, atol=1e-14)


def test_batches_do_not_matter() -> None:
    for name in ("lenet-like", "attention"):
        model, x, y = NETWORKS[name]()
        one, other = (
            fs.sensitivity(fs.Problem(model, train=(x, y), batch_size=size), bits=(3,), sparsity=(0.5,)).to_frame()
            for size in (3, 64)
        )
        for column in ("predicted", "by_trace", "by_trapezoid", "measured", "measured_stderr", "error_change"):
            np.testing.assert_allclose(one[column], other[column], rtol=1e-8, atol=1e-12)


def test_transposed_convolutions_round_output_rows() -> None:
    problem, model, x, y = problem_of("transposed")
    row = fs.sensitivity(problem, bits=(2,), sparsity=(), layers=["0"]).to_frame().iloc[0]
    weight = model[0].weight.detach()
    moved = weight.clone()
    for group in (slice(0, 2), slice(2, 4)):
        moved[group] = rounded_by_hand(weight[group], 2, rows=1)
    rises = (sample_losses("", model, x, y, {"0.weight": moved}) - sample_losses("", model, x, y)).detach()
    assert row["measured"] == pytest.approx(float(rises.detach().mean()), rel=1e-9)
    gradient, hessian = dense_block("transposed", model, x, y, "0.weight")
    step = (moved - weight).reshape(-1)
    assert row["predicted"] == pytest.approx(float(gradient @ step + 0.5 * step @ hessian @ step), rel=1e-8)


def test_scales_by_tensor_and_by_group() -> None:
    problem, model, x, y = problem_of("mlp")
    weight = dict(model.named_parameters())["2.weight"].detach()
    by_hand = {"tensor": rounded_by_hand(weight.reshape(1, -1), 3).reshape(weight.shape)}
    parts = [rounded_by_hand(part, 3) for part in torch.split(weight, 3, dim=1)]
    by_hand["group:3"] = torch.cat(parts, dim=1)  # the last group is shorter
    for rounding, moved in by_hand.items():
        row = fs.sensitivity(problem, bits=(3,), sparsity=(), rounding=rounding, layers=["2"]).to_frame().iloc[0]
        rise = (sample_losses("mlp", model, x, y, {"2.weight": moved}) - sample_losses("mlp", model, x, y)).detach()
        assert row["measured"] == pytest.approx(float(rise.mean()), rel=1e-9), rounding


def test_obd_prunes_what_the_gauss_newton_diagonal_says() -> None:
    problem, model, x, y = problem_of("mlp")
    row = fs.sensitivity(problem, bits=(), sparsity=(0.5,), layers=["0"]).to_frame().iloc[1]
    weight = dict(model.named_parameters())["0.weight"].detach()
    diagonal = dense_block("mlp", model, x, y, "0.weight")[1].diagonal().reshape(weight.shape)
    moved = weight.clone().reshape(-1)
    moved[(0.5 * diagonal * weight.square()).reshape(-1).argsort()[: weight.numel() // 2]] = 0
    rise = sample_losses("mlp", model, x, y, {"0.weight": moved.reshape(weight.shape)})
    assert row["what"] == "50 % pruned by OBD"
    assert row["measured"] == pytest.approx(float((rise - sample_losses("mlp", model, x, y)).detach().mean()), rel=1e-9)


def test_frozen_weights_are_rounded_like_the_others() -> None:
    model, x, y = lora()
    frame = fs.sensitivity(fs.Problem(model, train=(x, y)), bits=(3,), sparsity=()).to_frame()
    assert list(frame["layer"]) == ["0.base", "0.down", "0.up", "2.base", "2.down", "2.up"]
    assert frame[["predicted", "measured", "by_trace"]].notna().all(axis=None)
    assert not model[0].base.weight.requires_grad


def test_a_computed_weight_is_measured_and_not_applied() -> None:
    model, x, y = merged_lora()
    s = fs.sensitivity(fs.Problem(model, train=(x, y)), bits=(3,), sparsity=())
    first = s.to_frame().iloc[0]
    weight = (model[0].weight + model[0].b @ model[0].a).detach()
    twin = copy.deepcopy(model)
    twin[0] = nn.Linear(5, 6, bias=False).double()
    twin[0].weight.data = rounded_by_hand(weight, 3)
    rises = sample_losses("", twin, x, y) - sample_losses("", model, x, y)
    assert first["measured"] == pytest.approx(float(rises.detach().mean()), rel=1e-9)
    with pytest.raises(fs.InputError, match="a weight that is a parameter"):
        s.apply(model, {first["layer"]: 3})


def test_applying_rounds_views_and_tied_tables_in_place() -> None:
    model, x, y = tied()
    before = copy.deepcopy(model.state_dict())
    problem = fs.Problem(model, train=(x, y))
    s = fs.sensitivity(problem, bits=(4, 2), sparsity=())
    chosen = dict.fromkeys(s.layers, 2)
    rounded = s.apply(model, chosen)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    state = rounded.state_dict()
    torch.testing.assert_close(state["w"], rounded_by_hand(before["w"], 2, rows=1))
    torch.testing.assert_close(state["table.weight"], rounded_by_hand(before["table.weight"], 2))
    joint = (sample_losses("", rounded.model, x, y) - sample_losses("", model, x, y)).mean()
    assert rounded.rise.value == pytest.approx(float(joint.detach()), rel=1e-9)
    assert rounded.loss == pytest.approx(float(sample_losses("", rounded.model, x, y).detach().mean()), rel=1e-9)
    assert rounded.sum_of_rises == pytest.approx(s.to_frame().query("bits == 2")["measured"].sum())
    assert torch.equal(rounded(x), rounded.model(x))
    assert "one by one" in rounded.headline


class Sliced(nn.Module):
    """Layers that are parts of one parameter, a vector that is cut and bent, a transposed and a computed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.second = nn.Parameter(torch.randn(9, 4)), nn.Parameter(torch.randn(4, 5))
        self.flat = nn.Parameter(torch.randn(45))
        self.a, self.b = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(nn.functional.linear(x, self.both[:4])) + torch.relu(nn.functional.linear(x, self.both[5:]))
        x = torch.relu(x @ self.second)
        x = torch.relu(nn.functional.linear(x, self.flat[:20].view(4, 5)))
        x = torch.relu(x @ self.flat[25:].view(4, 5))
        return nn.functional.linear(x, self.a @ self.b)


def test_a_file_says_where_a_weight_stands_in_the_users_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, y = Sliced().double(), torch.randn(20, 4).double(), torch.randint(3, (20,))
    s = fs.sensitivity(fs.Problem(model, train=(x, y)), bits=(3,), sparsity=())
    places = ["both[:4]", "both[5:]", "second[:].T", "flat[:20].view(4, 5)", "flat[25:].view(4, 5).T", ""]
    assert list(s.to_frame()["weight"]) == places
    layers = s.layers[:5]
    s.allocate(3, layers=layers).save(tmp_path / "a.json")
    assert fs.Allocation.load(tmp_path / "a.json").weights == dict(zip(layers, places, strict=False))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for layer in json.loads((tmp_path / "a.json").read_text())["layers"].values():
        weight = eval(f"whole{layer['part']}", {"whole": state[layer["weight"]]})
        weight.copy_(rounded_by_hand(weight, 3))
    rounded = s.apply(model, dict.fromkeys(layers, 3)).state_dict()
    for name, value in state.items():
        torch.testing.assert_close(rounded[name], value, rtol=1e-12, atol=0)


def small_frame(rises: dict[tuple[str, int], float], sizes: dict[str, int], stderr: float = 0.0) -> fs.Sensitivity:
    rows = [
        {
            **dict.fromkeys(
                [name for name in fs.Sensitivity.COLUMNS if name.startswith(("predicted", "by", "error"))], math.nan
            ),
            "layer": layer, "weight": f"{layer}.weight", "parameters": sizes[layer], "what": f"{bits} bits",
            "bits": bits, "sparsity": 0.0, "measured": rise, "measured_stderr": stderr, "way": "", "reason": "",
        }
        for (layer, bits), rise in rises.items()
    ]  # fmt: skip
    return fs.Sensitivity(pd.DataFrame(rows), {"rounding": "channel", "dtype_bits": 32})


def test_the_allocation_is_the_best_of_all() -> None:
    generator = np.random.default_rng(0)
    for trial in range(10):
        sizes = {f"l{n}": int(size) for n, size in enumerate(generator.integers(10, 500, 4))}
        drawn = {layer: np.sort(generator.exponential(size=3) * 4.0 ** -np.array([8, 4, 2])) for layer in sizes}
        rises = {(layer, b): float(r) for layer in sizes for b, r in zip((8, 4, 2), drawn[layer], strict=True)}
        total, best = sum(sizes.values()), math.inf
        for choice in np.ndindex(4, 4, 4, 4):
            picked = {layer: (8, 4, 2, 32)[c] for layer, c in zip(sizes, choice, strict=True)}
            if sum(picked[layer] * sizes[layer] for layer in sizes) / total <= 5:
                best = min(best, sum(rises.get((layer, bits), 0.0) for layer, bits in picked.items()))
        found = small_frame(rises, sizes).allocate(5)
        assert found.mean_bits <= 5 + 1e-9, trial
        assert found.sum_of_rises == pytest.approx(best, rel=1e-9), trial


def test_fewer_bits_never_count_as_better_than_more() -> None:
    rises = {("a", 8): 0.002, ("a", 4): 0.01, ("a", 2): 0.0005, ("b", 8): 0.0, ("b", 2): 0.3}
    frame = small_frame(rises, {"a": 100, "b": 100}).to_frame()
    frame["measured_stderr"] = [0.001, 0.002, 0.004, 0.0, 0.01]  # 2 bits of `a` are not told from none
    sure = fs.Sensitivity(frame, {"rounding": "channel", "dtype_bits": 32})
    assert dict(sure.allocate(8)) == {"a": 8, "b": 8}
    assert dict(sure.allocate(6)) == {"a": 4, "b": 8}  # not 2 bits, which count as 0.01 too
    assert dict(sure.allocate(5)) == {"a": 2, "b": 8}


def test_what_is_expected_decides_between_rises_that_count_the_same() -> None:
    rises = {(layer, bits): 0.001 for layer in "abc" for bits in (8, 4, 2)}
    frame = small_frame(rises, dict.fromkeys("abc", 100), stderr=0.01).to_frame()
    predicted = {("a", 2): 0.03, ("b", 2): 0.004, ("c", 2): 0.02, ("b", 4): 0.003, ("c", 4): 0.0, ("a", 4): 0.001}
    frame["predicted"] = [predicted.get((row.layer, row.bits), 0.0) for row in frame.itertuples()]
    by_prediction = fs.Sensitivity(frame, {"rounding": "channel", "dtype_bits": 32})
    assert dict(by_prediction.allocate(10 / 3)) == {"a": 4, "b": 2, "c": 4}
    assert dict(by_prediction.allocate(16 / 3)) == {"a": 4, "b": 8, "c": 4}  # and none for b
    assert dict(by_prediction.allocate(20 / 3)) == {"a": 8, "b": 8, "c": 4}
    frame["measured"] = [0.05 if (row.layer, row.bits) == ("b", 2) else 0.001 for row in frame.itertuples()]
    frame["measured_stderr"] = 0.06  # not told from none, but more than was predicted
    by_both = fs.Sensitivity(frame, {"rounding": "channel", "dtype_bits": 32})
    assert dict(by_both.allocate(10 / 3)) == {"a": 4, "b": 4, "c": 2}
    assert dict(by_prediction.allocate(8)) == dict.fromkeys("abc", 8)  # more bits where the size allows them


def test_more_bits_are_taken_by_the_smallest_of_layers_too() -> None:
    rises = {(layer, bits): 0.0 for layer in ("large", "tiny") for bits in (8, 4, 2)}
    frame = small_frame(rises, {"large": 10_000_000, "tiny": 10})
    assert dict(frame.allocate(8.00001)) == {"large": 8, "tiny": 8}
    assert dict(frame.allocate(8.001)) == {"large": 8, "tiny": 32}


def test_rises_below_their_error_are_none_and_sizes_are_kept() -> None:
    noisy = small_frame({("a", 8): 0.01, ("a", 4): 0.05, ("b", 8): 0.0, ("b", 4): 2.0}, {"a": 100, "b": 100}, 0.1)
    assert dict(noisy.allocate(6)) == {"a": 4, "b": 8}
    with pytest.raises(fs.InputError, match="at least 4 bits a weight"):
        noisy.allocate(3)
    assert dict(noisy.allocate(40)) == {"a": 32, "b": 32}  # as it is
    assert dict(noisy.allocate(16, unchanged_bits=16)) == {"a": 16, "b": 16}
    assert dict(noisy.allocate(4, layers=["a"])) == {"a": 4}


def test_a_layer_that_breaks_the_loss_is_left_as_it_is() -> None:
    broken = small_frame({("a", 4): math.nan, ("b", 4): 0.1, ("a", 8): 0.0}, {"a": 10, "b": 10})
    assert dict(allocate(broken.to_frame(), 20, 32, None, "channel")) == {"a": 8, "b": 32}


@pytest.mark.parametrize("ending", [".json", ".parquet", ".npz"])
def test_files_give_back_what_was_saved(tmp_path: Path, ending: str) -> None:
    problem, model, _x, _y = problem_of("mlp")
    s = fs.sensitivity(problem, bits=(4,), sparsity=(0.5,))
    s.save(tmp_path / f"s{ending}")
    again = fs.Sensitivity.load(tmp_path / f"s{ending}")
    assert again == s
    with pytest.raises(fs.InputError, match="a problem to measure on"):
        again.apply(model, again.allocate(8))
    assert again.apply(model, again.allocate(8), problem=problem).rise == s.apply(model, s.allocate(8)).rise


def test_allocations_and_rounded_copies_go_to_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    problem, model, _, _ = problem_of("mlp")
    s = fs.sensitivity(problem, bits=(8, 4), sparsity=())
    allocation = s.allocate(4)
    allocation.save(tmp_path / "a.json")
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["bits"] == {"0": 4, "2": 4, "4": 4}
    assert content["layers"]["0"]["weight"] == "0.weight"
    again = fs.Allocation.load(tmp_path / "a.json")
    assert dict(again) == dict(allocation)
    assert again.mean_bits == allocation.mean_bits
    rounded = s.apply(model, again)
    rounded.save(tmp_path / "r.safetensors")
    state = load_file(tmp_path / "r.safetensors")
    assert all(torch.equal(state[name], value) for name, value in rounded.state_dict().items())
    (tmp_path / "b.json").write_text("[1]")
    with pytest.raises(fs.InputError, match="an allocation that flatscope saved"):
        fs.Allocation.load(tmp_path / "b.json")


def test_a_plain_loop_over_the_file_gives_the_rounded_weights(tmp_path: Path) -> None:
    problem, model, _, _ = problem_of("mlp")
    s = fs.sensitivity(problem, bits=(8, 4, 2), sparsity=())
    sizes = s.allocate(8).sizes
    allocation = fs.Allocation({"0": 2, "2": 64, "4": 8}, sizes, weights=s.allocate(8).weights, unchanged=["2"])
    allocation.save(tmp_path / "a.json")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for layer in json.loads((tmp_path / "a.json").read_text())["layers"].values():
        if layer["bits"] is not None:
            weight = state[layer["weight"]]
            rows = weight.reshape(len(weight), -1)
            scale = rows.abs().amax(1, keepdim=True) / (2 ** (layer["bits"] - 1) - 1)
            state[layer["weight"]] = ((rows / scale).round() * scale).reshape(weight.shape)
    rounded = s.apply(model, fs.Allocation.load(tmp_path / "a.json")).state_dict()
    assert all(torch.equal(state[name], value) for name, value in rounded.items())
    assert torch.equal(state["2.weight"], model.state_dict()["2.weight"])
    assert not torch.equal(state["0.weight"], model.state_dict()["0.weight"])


def many_classes(alike: bool = False) -> fs.Problem:
    """Sixty classes; all samples the same one if `alike`, so that none of the error is over them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 60)).double()
        x, y = torch.randn(40, 6).double(), torch.randint(60, (40,))
    return fs.Problem(model, train=(x[:1].repeat(40, 1), y[:1].repeat(40)) if alike else (x, y))


def test_draws_add_little_to_the_error_over_samples() -> None:
    problem = many_classes()
    exact = fs.sensitivity(problem, bits=(2,), sparsity=(), precision=0).to_frame()
    assert exact["way"].str.startswith("exact").all()
    gaps = []
    for seed in range(20):
        drawn = fs.sensitivity(problem, bits=(2,), sparsity=(), seed=seed, trapezoid=False).to_frame()
        assert drawn["way"].str.startswith("sampled").all()
        np.testing.assert_allclose(drawn["predicted_stderr"], exact["predicted_stderr"], rtol=0.25)
        gaps.append((drawn["predicted"] - exact["predicted"]) / drawn["predicted_stderr"])
        assert (abs(drawn["by_trace"] - exact["by_trace"]) < 5 * drawn["by_trace_stderr"]).all()
    apart = np.stack(gaps)
    assert 0.01 < apart.std() < 0.35  # a quarter of the error is what they may add
    assert abs(apart.mean()) < 4 * 0.25 / len(gaps) ** 0.5


def test_all_columns_are_taken_where_draws_would_cost_more() -> None:
    found = fs.sensitivity(many_classes(alike=True), bits=(3,), sparsity=(), precision=0.01).to_frame()
    assert found["way"].str.startswith("exact").all()


def test_traces_of_curved_layers_come_from_random_signs() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 30), nn.GELU(), nn.Linear(30, 30), nn.GELU(), nn.Linear(30, 3)).double()
        x, y = torch.randn(200, 20).double(), torch.randint(3, (200,))
    problem = fs.Problem(model, train=(x, y))
    given = {"bits": (4,), "sparsity": (), "trapezoid": False}
    exact = fs.sensitivity(problem, **given, precision=0).to_frame().iloc[:2]
    gaps, ratios = [], []
    for seed in range(40):
        drawn = fs.sensitivity(problem, **given, seed=seed).to_frame().iloc[:2]
        np.testing.assert_allclose(drawn["predicted"], exact["predicted"], rtol=1e-9)
        ratios.append(drawn["by_trace"] / exact["by_trace"])
        gaps.append((drawn["by_trace"] - exact["by_trace"]) / drawn["by_trace_stderr"])
    apart = np.stack(gaps)
    assert 0.3 < apart.std() < 2
    assert np.stack(ratios).mean() == pytest.approx(1, abs=0.2)


def test_zero_layers_huge_weights_and_half_precision() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
        x, y = torch.randn(20, 4), torch.randint(3, (20,))
    with torch.no_grad():
        model[2].weight.zero_()
        model[0].weight[0, 0] = 1e4
        model[4].weight[0] = 0.0
    frame = fs.sensitivity(fs.Problem(model, train=(x, y)), bits=(8, 2), sparsity=(0.5,)).to_frame()
    assert (frame[frame["layer"] == "2"]["measured"] == 0).all()  # a layer of zeros has no grid and stays
    assert frame["measured"].notna().all()
    for dtype in (torch.bfloat16, torch.float16):
        half = copy.deepcopy(model).to(dtype)
        s = fs.sensitivity(fs.Problem(half, train=(x, y)), bits=(4,), sparsity=())
        assert set(s.allocate(16).values()) == {16}  # as it is, in its own sixteen bits
        assert s.apply(half, s.allocate(4)).model[0].weight.dtype == dtype


def test_a_network_that_breaks_when_rounded_says_so() -> None:
    class Divides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) / self.fc.weight[0, 0]

    model = Divides()
    with torch.no_grad():
        model.fc.weight.copy_(torch.tensor([[0.01, 1.0, 1.0], [1.0, 0.5, 1.0]]))
    x, y = torch.randn(8, 3), torch.tensor([0, 1] * 4)
    frame = fs.sensitivity(fs.Problem(model, train=(x, y)), bits=(2,), sparsity=()).to_frame()
    assert math.isnan(frame["measured"][0])
    assert "no number" in frame["reason"][0]


def test_nothing_of_the_user_changes() -> None:
    _, model, x, y = problem_of("batchnorm")
    problem = fs.Problem(model, train=(x, y))
    state, grads = copy.deepcopy(model.state_dict()), [p.grad for p in model.parameters()]
    random = torch.get_rng_state()
    s = fs.sensitivity(problem, bits=(3,), sparsity=(0.5,))
    s.apply(model, s.allocate(3))
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert grads == [p.grad for p in model.parameters()]
    assert problem.trainable == tuple(dict(model.named_parameters()))


def test_no_time_gives_rows_that_say_so() -> None:
    problem, _, _, _ = problem_of("mlp")
    frame = fs.sensitivity(problem, bits=(3,), sparsity=(), budget=1e-6).to_frame()
    assert frame["measured"].isna().all()
    assert frame["reason"].str.contains("time").all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bits": (1,)}, "whole numbers of bits from 2 to 16"),
        ({"bits": (4.5,)}, "whole numbers of bits"),
        ({"bits": (), "sparsity": ()}, "bits or sparsity"),
        ({"sparsity": (0.0,)}, "shares of the weights"),
        ({"sparsity": (1.5,)}, "shares of the weights"),
        ({"rounding": "row"}, '"channel", "tensor"'),
        ({"rounding": "group:0"}, '"channel", "tensor"'),
        ({"layers": ["fc9"]}, "a known layer"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], words: str) -> None:
    problem, _, _, _ = problem_of("mlp")
    with pytest.raises(fs.InputError, match=words):
        fs.sensitivity(problem, **options)


def test_wrong_allocations_are_refused() -> None:
    problem, model, _, _ = problem_of("mlp")
    s = fs.sensitivity(problem, bits=(8, 4), sparsity=())
    with pytest.raises(fs.InputError, match="bits that were measured"):
        s.apply(model, {"0": 5})
    with pytest.raises(fs.InputError, match="a known layer"):
        s.apply(model, {"conv": 4})
    with pytest.raises(fs.InputError, match=r"0\.weight of shape"):
        s.apply(nn.Sequential(nn.Linear(9, 9)).double(), {"0": 4})
    for wrong in (0, -1, math.nan, "4"):
        with pytest.raises(fs.InputError, match="a positive number of bits"):
            s.allocate(wrong)


def test_the_headline_and_the_picture() -> None:
    problem, _, _, _ = problem_of("lenet-like")
    s = fs.sensitivity(problem, bits=(8, 4, 3, 2), sparsity=())
    assert s.headline.startswith("At 4 bits, ")
    assert len(s.headline.splitlines()) <= 5
    heat, sizes = s.figure().axes[:2]
    assert [label.get_text() for label in heat.get_yticklabels()] == s.layers
    assert sizes.get_xlabel() == "mean bits a weight"
    assert s.sizes()["rise"].iloc[0] >= s.sizes()["rise"].iloc[-1] - 1e-12


def test_loaders_with_generators_of_their_own_are_put_back() -> None:
    _, model, x, y = problem_of("mlp")
    generator = torch.Generator().manual_seed(4)
    problem = fs.Problem(model, train=DataLoader(TensorDataset(x, y), 5, shuffle=True, generator=generator))
    before = generator.get_state()
    s = fs.sensitivity(problem, bits=(4,), sparsity=(0.5,))
    s.apply(model, s.allocate(4))
    fs.diagonal(problem)
    fs.forecast(problem, s.apply(model, s.allocate(4)).model)
    assert torch.equal(before, generator.get_state())


def test_a_model_in_training_mode_is_rounded_as_it_is_used() -> None:
    problem, model, _, _ = problem_of("batchnorm")
    s = fs.sensitivity(problem, bits=(3,), sparsity=())
    plain = s.apply(model, s.allocate(3)).rise
    assert s.apply(model.train(), s.allocate(3)).rise == plain
    assert model.training
    model.eval()


def test_rounded_rows_have_no_more_values_than_their_bits_allow() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model, x, y = NETWORKS["lenet-like"]()
        model = model.to(dtype)
        s = fs.sensitivity(fs.Problem(model, train=(x.float(), y)), bits=(3,), sparsity=())
        rounded = s.apply(model, s.allocate(3))
        for name, value in rounded.state_dict().items():
            if value.ndim > 1:
                assert all(len(row.unique()) <= 7 for row in value.flatten(1)), name
        assert len(rounded.allocation) == len(s.layers)


def test_judged_on_other_samples_the_single_rises_are_of_these() -> None:
    problem, model, x, y = problem_of("mlp")
    s = fs.sensitivity(problem, bits=(2,), sparsity=())
    other = fs.Problem(model, train=(x[:5], y[:5]), test=(x[5:], y[5:]))
    rounded = s.apply(model, s.allocate(2), other)
    on_them = fs.sensitivity(other, bits=(2,), sparsity=()).to_frame()["measured"].sum()
    assert rounded.sum_of_rises == pytest.approx(on_them)
    assert rounded.test_rise.value == pytest.approx(
        float((sample_losses("", rounded.model, x[5:], y[5:]) - sample_losses("", model, x[5:], y[5:])).detach().mean())
    )


def test_recurrent_layers_have_slopes_too() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cell(x)[0][:, -1])

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x, y = Reads().double(), torch.randn(20, 4, 3).double(), torch.randint(2, (20,))
    frame = fs.sensitivity(fs.Problem(model, train=(x, y)), bits=(8, 4), sparsity=()).to_frame()
    assert len(frame) == 6
    for row in frame[frame["bits"] == 8].to_dict("records"):  # so short a step that all formulas agree
        assert row["predicted"] == pytest.approx(row["measured"], rel=0.02)
        assert row["by_trapezoid"] == pytest.approx(row["measured"], rel=0.02)


def test_what_cannot_be_predicted_is_measured_all_the_same() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(Cube.apply(self.one(x)))

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x, y = Net().double(), torch.randn(20, 3).double(), torch.randint(2, (20,))
    problem = fs.Problem(model, train=(x, y))
    first = fs.sensitivity(problem, bits=(3,), sparsity=()).to_frame().iloc[0]
    assert math.isnan(first["predicted"])
    assert first["reason"]
    moved = {"one.weight": rounded_by_hand(model.one.weight.detach(), 3)}
    rise = (sample_losses("", model, x, y, moved) - sample_losses("", model, x, y)).detach().mean()
    assert first["measured"] == pytest.approx(float(rise), rel=1e-9)
    found = fs.forecast(problem, {**model.state_dict(), **moved})
    assert math.isnan(found.predicted.value)
    assert found.measured.value == pytest.approx(float(rise), rel=1e-9)
    assert found.to_frame()["reason"][0]


def test_an_allocation_is_a_dictionary() -> None:
    problem, _, _, _ = problem_of("mlp")
    allocation = fs.sensitivity(problem, bits=(4,), sparsity=()).allocate(4)
    assert json.loads(json.dumps(allocation)) == allocation == {"0": 4, "2": 4, "4": 4}


def test_names_and_allocations_of_another_kind_are_read_or_refused() -> None:
    problem, model, _, _ = problem_of("mlp")
    s = fs.sensitivity(problem, bits=(4,), sparsity=(), trapezoid=False)
    assert list(s.allocate(4, layers="2")) == ["2"]
    assert fs.sensitivity(problem, bits=4, sparsity=(), layers="2").layers == ["2"]
    with pytest.raises(fs.InputError, match="known layer"):
        fs.sensitivity(problem, layers="02")
    with pytest.raises(fs.InputError, match="names of layers, got none"):
        fs.sensitivity(problem, layers=[])
    with pytest.raises(fs.InputError, match="names of layers, got none"):
        s.allocate(4, layers=())
    with pytest.raises(fs.InputError, match=r"\{layer: bits\}, got list"):
        s.apply(model, [4])  # type: ignore[arg-type]
    for option in ("bits", "sparsity"):
        with pytest.raises(fs.InputError, match=f"{option}: expected numbers, got None"):
            fs.sensitivity(problem, **{option: None})  # type: ignore[arg-type]
        with pytest.raises(fs.InputError, match=f"{option}: expected numbers, got 'four'"):
            fs.sensitivity(problem, **{option: "four"})  # type: ignore[arg-type]


def test_one_sample_resolves_nothing() -> None:
    _, model, x, y = problem_of("mlp")
    s = fs.sensitivity(fs.Problem(model, train=(x[:1], y[:1])), bits=(2,), sparsity=())
    assert s.to_frame()["measured"].max() > 0
    assert s.headline.startswith("At 2 bits, 3 of 3 layers cost nothing that these samples resolve")
    assert len(s.figure().axes[0].texts) == 3


class _Routed(nn.Module):
    """Two experts of which no sample reaches the second, and a product with axes in another order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.experts = nn.ModuleList(nn.Linear(4, 5) for _ in range(2))
        self.last = nn.Parameter(torch.randn(5, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 1e6).long()
        h = x.new_zeros(len(x), 5)
        for number, expert in enumerate(self.experts):
            if (mine := chosen == number).any():
                h[mine] = expert(x[mine])
        return torch.einsum("bhk,hkc->bc", torch.stack([h, -h], 2).relu(), self.last)


def test_weights_that_are_in_no_layer_are_told_first() -> None:
    """An expert that no sample reaches was left out of all numbers without a word."""
    x, y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)).double(), torch.arange(12) % 3
    found = fs.sensitivity(fs.Problem(_Routed().double().eval(), train=(x, y)), bits=(4,), sparsity=())
    assert found.meta["left_out"] == {"experts.1.weight": 20}
    first = found.headline.splitlines()[0]
    assert first.startswith(f"{100 * 20 / 70:.2g} % of the weights are in no layer")
    assert "experts.1.weight" in first


@pytest.mark.parametrize("rounding", ["channel", "tensor"])
def test_a_weight_whose_axes_are_read_in_another_order_is_rounded_in_its_place(rounding: str) -> None:
    """Was refused as one that is computed from several."""
    model = _Routed().double().eval()
    x, y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)).double(), torch.arange(12) % 3
    found = fs.sensitivity(fs.Problem(model, train=(x, y)), bits=(3,), sparsity=(), rounding=rounding)
    rounded = found.apply(model, {"last": 3})
    weight = rounded.state_dict()["last"]
    rows = weight.reshape(10, 3).T if rounding == "channel" else weight.reshape(1, -1)
    assert all(len(row.unique()) <= 7 for row in rows)  # 2³ − 1 levels for each output
    assert not torch.equal(weight, model.last)
    losses = [nn.functional.cross_entropy(net(x), y).item() for net in (model, rounded.model)]
    assert rounded.rise.value == pytest.approx(losses[1] - losses[0], rel=1e-9)
    assert rounded.sum_of_rises == pytest.approx(rounded.rise.value, rel=1e-9)
