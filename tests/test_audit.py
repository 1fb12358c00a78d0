"""The audit: what moves and what stands still when the same function is written with other weights."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
from networks import _built, attention, batchnorm_conv, lenet_like, mlp, residual, smooth
from torch import Tensor, nn
from typer.testing import CliRunner

import flatscope as fs
from flatscope import registry
from flatscope.audit_result import COLUMNS
from flatscope.auditing import _audit_row
from flatscope.cli.app import app
from flatscope.context import Context
from flatscope.registry import Value, declarations

EVERY = ("layer", "unit", "permutation", "batchnorm")
SOME = ["hessian_trace", "hessian_max_eigenvalue", "l2_norm", "kappa", "kappa_trace_sum", "rho_unit", "rho_sum"]
SOME += ["l1_path_norm", "margin", "functional_margin", "parameter_count"]


class Block(nn.Module):
    """A residual block with BatchNorm, its shortcut a convolution."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(n_in, n_out, 3, 2, 1, bias=False)
        self.second = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(n_out), nn.BatchNorm2d(n_out)
        self.shortcut = nn.Sequential(nn.Conv2d(n_in, n_out, 1, 2, bias=False), nn.BatchNorm2d(n_out))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.second(torch.relu(self.norm1(self.first(x)))))
        out += self.shortcut(x)
        return torch.relu(out)


def resnet_like() -> fs.Problem:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), Block(3, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    return _built("resnet-like", model, (2, 6, 6), 3, ()).problem()


def vgg_like() -> fs.Problem:
    model = nn.Sequential(
        *[nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout()],
        *[nn.Conv2d(4, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten()],
        *[nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)],
    )
    return _built("vgg-like", model, (2, 4, 4), 3, ()).problem()


def transformer() -> fs.Problem:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.TransformerEncoderLayer(8, 2, 12, activation="gelu", batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encode(x).mean(1))

    return _built("transformer", Encoder(), (4, 8), 3, ()).problem()


@pytest.fixture
def registered() -> Iterator[None]:
    """Measures declared inside a test disappear with it."""
    kept = dict(registry._REGISTRY)
    yield
    registry._REGISTRY.clear()
    registry._REGISTRY.update(kept)


def verdicts(found: fs.Audit, symmetry: str) -> dict[str, str]:
    return {name: found.verdict(name, symmetry) for name in found.measures}


def test_what_the_papers_say_about_their_measures() -> None:
    problem = mlp().problem()
    names = [*SOME, "epsilon_flatness", "expected_flatness"]
    strong = {"expected_flatness": {"sigma": 0.2, "draws": 400}}  # else the loss hardly changes on this network
    found = fs.audit(problem, names, by=("layer", "unit", "permutation"), options=strong)
    layer, unit = verdicts(found, "layer_scaling"), verdicts(found, "unit_scaling")
    for name in ("hessian_trace", "hessian_max_eigenvalue", "epsilon_flatness", "expected_flatness"):
        assert layer[name] == unit[name] == "moved"
    for name in ("rho_unit", "rho_sum", "l1_path_norm", "margin", "functional_margin", "parameter_count"):
        assert layer[name] == unit[name] == "invariant"
    for name in ("kappa", "kappa_trace_sum", "l2_norm"):
        assert (layer[name], unit[name]) == ("invariant", "moved")
    assert set(verdicts(found, "permutation").values()) == {"invariant"}
    assert found.disagrees.empty


def test_a_reason_that_holds_under_all_rescalings_is_said_once() -> None:
    problem = mlp().problem()
    problem.initial = None
    found = fs.audit(problem, ["margin", "distance_from_initialization", "l2_norm"], trials=1)
    notes = found.notes()
    assert list(notes.values()) == [["distance_from_initialization"]]
    assert next(iter(notes)).startswith("needs the weights before training")
    frame = found.to_frame()
    frame.loc[(frame["measure"] == "margin") & (frame["symmetry"] == "unit_scaling"), "reason"] = "unclear"
    assert fs.Audit(frame).notes() | notes == notes | {"unit_scaling: unclear": ["margin"]}


def test_the_frame_has_the_documented_columns_and_order() -> None:
    found = fs.audit(mlp().problem(), ["margin", "l2_norm"], trials=1)
    frame = found.to_frame()
    expected = "measure symmetry before after relative_change stderr verdict reason declared"
    assert list(frame.columns) == list(COLUMNS) == expected.split()
    assert frame["measure"].tolist() == ["margin", "margin", "l2_norm", "l2_norm"]
    assert frame["symmetry"].tolist() == ["layer_scaling", "unit_scaling"] * 2
    assert set(frame["symmetry"]) <= set(registry.SYMMETRIES)
    row = frame.iloc[3]
    assert row["relative_change"] == pytest.approx(abs(row["after"] - row["before"]) / row["before"])
    assert row["before"] == fs.measure(mlp().problem(), "l2_norm")["l2_norm"]


@pytest.mark.long
@pytest.mark.parametrize(
    "build", [vgg_like, resnet_like, lambda: batchnorm_conv().problem()], ids=["vgg", "resnet", "conv"]
)
def test_networks_with_batchnorm_are_folded_and_their_own_scales_tried(build) -> None:  # type: ignore[no-untyped-def]
    problem = build()
    found = fs.audit(problem, SOME, by=EVERY, trials=2)
    assert found.disagrees.empty, found.disagrees
    assert found.symmetries == ["layer_scaling", "unit_scaling", "permutation", "batchnorm_scaling"]
    for symmetry in found.symmetries:
        assert found.verdict("l1_path_norm", symmetry) == "invariant"
        assert found.verdict("hessian_trace", symmetry) == ("invariant" if symmetry == "permutation" else "moved")
    frame = found.to_frame().set_index(["measure", "symmetry"])
    folded = problem.with_model(fs.fold_batchnorm(problem.model, problem.example()))
    # The baseline is the folded network; for BatchNorm's own scales it is the network as it is.
    assert (
        frame.loc[("hessian_trace", "unit_scaling"), "before"] == fs.measure(folded, "hessian_trace")["hessian_trace"]
    )
    as_given = fs.measure(problem, "hessian_trace")["hessian_trace"]
    assert frame.loc[("hessian_trace", "batchnorm_scaling"), "before"] == as_given


def test_a_branching_network_has_no_product_of_norms_to_test() -> None:
    found = fs.audit(residual().problem(), ["l2_norm", "rho_sum"], trials=1)
    assert set(verdicts(found, "unit_scaling").items()) == {("l2_norm", "not tested"), ("rho_sum", "invariant")}
    frame = found.to_frame()
    assert "branching" in frame[frame["measure"] == "l2_norm"]["reason"].iloc[0]


@pytest.mark.parametrize(
    ("build", "wall"),
    [(transformer, "gelu"), (lambda: attention().problem(), "gelu"), (lambda: smooth().problem(), "tanh")],
    ids=["transformer", "attention", "smooth"],
)
def test_walls_are_named_and_nothing_fails(build, wall: str) -> None:  # type: ignore[no-untyped-def]
    found = fs.audit(build(), ["gradient_norm", "l2_norm", "l1_path_norm", "margin"], by=EVERY, trials=1)
    assert set(verdicts(found, "layer_scaling").values()) == {"not tested"}
    frame = found.to_frame()
    assert frame[frame["symmetry"] == "layer_scaling"]["reason"].str.contains(wall).all()
    if wall == "tanh":
        assert set(verdicts(found, "unit_scaling").values()) == {"not tested"}
    else:  # the values of attention can be rescaled against its output projection
        assert found.verdict("margin", "unit_scaling") == "invariant"
        assert found.verdict("gradient_norm", "unit_scaling") == "moved"
    assert found.verdict("margin", "permutation") == "invariant"
    assert found.verdict("l1_path_norm", "permutation") == "not tested"
    assert found.verdict("margin", "batchnorm_scaling") == "not tested"
    assert found.disagrees.empty
    assert "not tested" in found.summary()
    below = repr(found).splitlines()[1 + len(found.measures) :]  # what print shows names the wall
    assert any(line.startswith("layer_scaling: ") and wall in line for line in below)
    assert sum("permutation" in line.partition(":")[0] and "(l1_path_norm)" in line for line in below) == 1
    assert frame["stderr"].notna().all()


def test_a_partly_walled_network_is_tested_as_far_as_it_goes() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 3))
    found = fs.audit(_built("partly", model, (3,), 3, ()).problem(), ["l2_norm", "margin"], trials=1)
    assert found.verdict("l2_norm", "unit_scaling") == "moved"
    assert found.verdict("margin", "unit_scaling") == "invariant"
    assert found.to_frame()["reason"].str.contains(r"sigmoid \(3\)").all()


@pytest.mark.usefixtures("registered")
def test_a_wrong_declaration_is_flagged_in_both_directions() -> None:
    @registry.measure(symbol="w", paper="flatscope", equation="none", invariant_under=("unit_scaling",))
    def too_bold(ctx: Context) -> float:
        """Norm of all weights, declared to survive what it does not."""
        return float(sum(float(value.square().sum()) for value in ctx.params.values()))

    @registry.measure(symbol="f", paper="flatscope", equation="none")
    def too_modest(ctx: Context) -> float:
        """Training loss, which depends on the function alone."""
        return ctx.scores().loss

    found = fs.audit(mlp().problem(), ["too_*", "margin"], by="unit")
    wrong = found.disagrees
    assert dict(zip(wrong["measure"], wrong["verdict"], strict=True)) == {
        "too_bold": "moved",
        "too_modest": "invariant",
    }
    assert "too_bold under unit_scaling (moved)" in found.summary()
    flagged = {line[0][0] for line in found.lines() if any(bad for _, bad in line)}
    assert flagged == {"too_bold", "too_modest"}
    assert found.to_html().count(" !</td>") == 2
    assert "too_bold" in found._repr_html_()


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(("size", "verdict"), [(4.0, "invariant"), (40.0, "moved")])
def test_estimates_are_judged_by_their_standard_errors(size: float, verdict: str) -> None:
    @registry.measure(symbol="e", paper="flatscope", equation="none", exact=False)
    def too_noisy(ctx: Context) -> Value:
        """A number about which nothing can be said."""
        return Value(1.0, stderr=0.5)

    @registry.measure(symbol="e", paper="flatscope", equation="none", invariant_under=("unit_scaling",), exact=False)
    def noisy(ctx: Context) -> Value:
        """A number that jumps with the weights, with a standard error of 1."""
        jump = 0.0 if torch.equal(ctx.params["0.weight"], mlp().model[0].weight) else size
        return Value(100 + jump, stderr=1.0)

    found = fs.audit(mlp().problem(), "noisy", by="unit")
    assert found.verdict("noisy", "unit_scaling") == verdict
    assert found.to_frame()["stderr"].iloc[0] == pytest.approx(math.sqrt(2) / 100)
    assert len(found.disagrees) == (verdict == "moved")
    found = fs.audit(mlp().problem(), "too_noisy", by="unit", trials=1)
    assert found.verdict("too_noisy", "unit_scaling") == "not tested"
    assert "cannot tell" in found.summary() + found.to_frame()["reason"].iloc[0]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("values", "trials", "size", "verdict"),
    [
        (1, 1, 4.3, "invariant"),
        (1, 1, 4.6, "moved"),
        (1, 20, 4.6, "invariant"),  # the largest of many draws of noise is larger
        (1, 20, 5.3, "moved"),
        (2_000, 1, 4.6, "invariant"),
        (2_000, 1, 6.1, "moved"),
    ],
)
def test_many_looks_at_noise_are_no_change(values: int, trials: int, size: float, verdict: str) -> None:
    """The chance of a false alarm is that of a measure, over all its values and all trials (Bonferroni).

    ndtri(1 - 0.5e-5) = 4.42 for one look, 5.03 for 20 and 5.85 for 2,000.
    """

    @registry.measure(symbol="e", paper="flatscope", equation="none", per="sample", exact=False)
    def jumping(ctx: Context) -> Value:
        """One of its values jumps with the weights."""
        found = torch.full((values,), 100.0, dtype=torch.float64)
        found[0] += 0.0 if torch.equal(ctx.params["0.weight"], mlp().model[0].weight) else size * math.sqrt(2)
        return Value(found, stderr=1.0)

    entry = declarations()["jumping"]
    problem = mlp().problem()
    before = fs.measure(problem, "jumping")
    after = fs.measure(problem.with_model(fs.rescale(problem.model, problem.example(), seed=1)), "jumping")
    row = _audit_row(entry, "unit", before, [after] * trials, torch.float64, "")
    assert row["verdict"] == verdict
    assert row["relative_change"] == pytest.approx(size * math.sqrt(2) / 100, rel=0.1)


@pytest.mark.usefixtures("registered")
def test_a_searched_maximum_may_miss_a_little() -> None:
    def declare(name: str, jump: float) -> None:
        def searched(ctx: Context) -> Value:
            moved = not torch.equal(ctx.params["0.weight"], model[0].weight)
            return Value(1.0 + jump * moved, low=1.0, exact=False)

        searched.__name__, searched.__doc__ = name, "A lower bound by ascent."
        registry.measure(symbol="m", paper="flatscope", equation="none", exact=False, search="lower")(searched)

    model = mlp().model
    declare("near", 0.03)
    declare("far", 0.3)
    found = fs.audit(mlp().problem(), ["near", "far"], by="unit")
    assert verdicts(found, "unit_scaling") == {"near": "invariant", "far": "moved"}
    assert found.disagrees.empty  # 3 % is neither a clear standstill nor a move
    assert "searched maximum" in found.to_frame()["reason"].iloc[0]


def test_rounding_in_float32_does_not_pass_for_a_change() -> None:
    tiny = lenet_like()
    problem = fs.Problem(copy.deepcopy(tiny.model).float(), train=(tiny.x.float(), tiny.y))
    found = fs.audit(problem, ["rho_sum", "l1_path_norm", "hessian_trace"], by=("layer", "unit"))
    assert set(found.to_frame()[found.to_frame()["measure"] != "hessian_trace"]["verdict"]) == {"invariant"}
    assert found.to_frame()["relative_change"].min() < 1e-12
    assert problem.dtype == torch.float32


def test_the_same_seed_gives_the_same_audit_and_the_model_stays() -> None:
    tiny = mlp()
    before = copy.deepcopy(tiny.model.state_dict())
    state = torch.get_rng_state()
    first, again, other = (fs.audit(tiny.problem(), ["l2_norm"], seed=seed) for seed in (3, 3, 4))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in tiny.model.state_dict().items())
    assert first.to_frame().equals(again.to_frame())
    assert not first.to_frame().equals(other.to_frame())


def test_points_share_their_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many measures, each point of the audit is swept once, and the data is not checked again."""
    import flatscope.curvature.columns as columns

    calls = []
    plain = columns.column_sweep

    def counted(ctx: Context, **options: object) -> object:
        calls.append(ctx)
        return plain(ctx, **options)

    counted.__module__, counted.__qualname__ = plain.__module__, plain.__qualname__
    monkeypatch.setattr(columns, "column_sweep", counted)
    problem = mlp().problem()
    monkeypatch.setattr("flatscope.problem.checked_outputs", None)
    fs.audit(problem, ["hessian_trace", "rho_sum", "kappa_trace", "layer_trace"], trials=2)
    assert len(calls) == len({id(ctx) for ctx in calls}) == 1 + 2 * 2


def test_files_give_the_audit_back(tmp_path: Path) -> None:
    found = fs.audit(residual().problem(), ["l2_norm", "rho_sum"], trials=1)
    for ending in (".json", ".parquet"):
        found.save(tmp_path / f"audit{ending}")
        assert fs.Audit.load(tmp_path / f"audit{ending}") == found
    for ending in (".csv", ".md", ".html"):
        found.save(tmp_path / f"audit{ending}")
        assert "rho_sum" in (tmp_path / f"audit{ending}").read_text()
    for bad in ("audit.txt", "audit.csv"):
        with pytest.raises(fs.InputError):
            fs.Audit.load(tmp_path / bad)
    with pytest.raises(fs.InputError, match="ending in"):
        found.save(tmp_path / "audit.txt")
    for text in ("{}", "[]", "no", '{"meta": {}, "rows": [{"measure": 1}]}'):
        with pytest.raises(fs.InputError):
            fs.Audit.from_json(text)
    with pytest.raises(fs.InputError):
        fs.Audit.from_parquet(b"PAR1")
    with pytest.raises(fs.InputError, match="verdict"):
        fs.Audit(pd.DataFrame({"measure": ["a"]}))


def test_bad_arguments_are_named() -> None:
    problem = mlp().problem()
    with pytest.raises(fs.InputError, match="Problem"):
        fs.audit(mlp().model)  # type: ignore[arg-type]
    with pytest.raises(fs.InputError, match="unit"):
        fs.audit(problem, by="units")
    with pytest.raises(fs.InputError, match="trials"):
        fs.audit(problem, trials=0)
    with pytest.raises(fs.InputError, match="low"):
        fs.audit(problem, "margin", low=-1.0)
    with pytest.raises(fs.InputError, match="known measure"):
        fs.audit(problem, "margins")
    found = fs.audit(problem, "margin", trials=1)
    with pytest.raises(fs.InputError, match="measure in this audit"):
        found.verdict("l2_norm", "unit_scaling")
    with pytest.raises(fs.InputError, match="symmetry in this audit"):
        found.verdict("margin", "permutation")


def test_distance_from_the_initial_weights_is_not_lost() -> None:
    """The weights before training stay what they were: a distance from them moves."""
    found = fs.audit(mlp().problem(), "distance_from_initialization", by=("unit", "permutation"), trials=1)
    assert set(found.to_frame()["verdict"]) == {"moved"}


def test_the_command_line_prints_the_matrix_and_writes_it(tmp_path: Path) -> None:
    command = ["audit", "--model", "mlp", "--model-option", "widths=64,8,10", "--data", "digits", "--flatten"]
    command += ["--train-size", "40", "-m", "l2_norm", "-m", "l1_path_norm", "--trials", "1"]
    run = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "a.parquet")])
    assert run.exit_code == 0, run.output
    assert "layer scaling" in run.output
    assert "permutation" in run.output
    assert "batchnorm" not in run.output
    assert fs.Audit.load(tmp_path / "a.parquet").verdict("l2_norm", "unit_scaling") == "moved"
    run = CliRunner().invoke(app, [*command, "--by", "unit", "--json"])
    assert json.loads(run.stdout)["rows"][0]["symmetry"] == "unit_scaling"
    run = CliRunner().invoke(app, [*command, "--by", "units"])
    assert isinstance(run.exception, fs.InputError)


class Vectors(nn.Module):
    """Parameters that no layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.tensor([1.0, -0.5, 0.3, 2.0])), nn.Parameter(torch.tensor([0.4, -1.0, 0.7]))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w).sum(1, keepdim=True) * self.v


def test_an_audit_where_nothing_can_be_rescaled_says_so() -> None:
    audit = fs.audit(
        fs.Problem(Vectors(), train=(torch.eye(4), torch.arange(4) % 3)), ["fisher_rao_norm", "margin"], trials=1
    )
    frame = audit.to_frame()
    assert set(frame["verdict"]) == {"not tested"}
    assert frame["reason"].str.contains("that can be rescaled").all()
    assert audit.headline == "Nothing could be rescaled here: rescaling is no reason to doubt a measure."


@pytest.mark.usefixtures("registered")
def test_a_measure_that_fails_is_named_with_the_reason() -> None:
    @registry.measure(symbol="f", paper="flatscope", equation="none")
    def failing(ctx: Context) -> float:
        """Nothing: it fails."""
        raise AttributeError("no confidence")

    said = "Not tested: failing (failed: AttributeError: no confidence)."
    with pytest.warns(RuntimeWarning, match="no confidence"):
        assert fs.audit(mlp().problem(), "failing", trials=1).headline == said
    with pytest.warns(RuntimeWarning, match="no confidence"):
        both = fs.audit(mlp().problem(), ["failing", "margin"], trials=1).headline
    assert said in both
    assert "Unchanged, so fit to compare networks: margin." in both


def test_weights_that_are_computed_are_rescaled_as_they_act() -> None:
    """Of weight_norm it said that nothing can be rescaled."""
    torch.manual_seed(0)
    first = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
    model, x, y = nn.Sequential(first, nn.ReLU(), nn.Linear(5, 3)), torch.randn(9, 4), torch.arange(9) % 3
    found = fs.audit(fs.Problem(model, train=(x, y)), ["rho_sum", "hessian_trace"], by="unit", trials=1)
    assert [found.verdict(name, "unit_scaling") for name in ("rho_sum", "hessian_trace")] == ["invariant", "moved"]
    assert set(found.to_frame()["reason"]) == {"by the weights as they act, where they are computed from others"}
