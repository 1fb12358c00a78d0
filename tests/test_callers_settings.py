"""Models and calls as people have them: wrapped, checkpointed, under settings that would change numbers."""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, Dataset

import flatscope as fs
from flatscope.inputs.weight_files import load_weights, save_weights
from flatscope.isolation import callers_defaults, own_settings

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(12) % 3
NAMES = ["gradient_norm", "hessian_trace", "layer_trace", "hessian_max_eigenvalue", "rho", "psi_trace", "sharpness"]


def plain() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3)).double().eval()


def curved() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()


def numbers(model: nn.Module, names: Any = NAMES) -> dict[tuple[str, str], float]:
    frame = fs.measure(fs.Problem(model, (X, Y)), names).to_frame()
    failed = frame[frame["reason"].str.startswith("failed")]
    assert failed.empty, failed[["measure", "reason"]].to_string()
    return {(row.measure, row.layer): row.value for row in frame.itertuples() if row.value == row.value}


@functools.cache
def numbers_of(build: Callable[[], nn.Module]) -> dict[tuple[str, str], float]:
    """Without any setting of the caller's; measured once."""
    return numbers(build())


class Checkpointed(nn.Module):
    """The same function as the sequence it is given, each block recomputed in the backward pass."""

    def __init__(self, inner: nn.Sequential, way: str) -> None:
        super().__init__()
        self.inner, self.way = inner, way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "sequential":
            found: Tensor = checkpoint_sequential(self.inner, 2, x, use_reentrant=False)
            return found
        for block in self.inner:
            if self.way == "of the module":  # looked up when called, and not when the model's file was imported
                x = checkpointing.checkpoint(block, x, use_reentrant=True)
            else:
                x = checkpoint(block, x, use_reentrant=self.way == "reentrant")
        return x


def renamed(found: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    return {(measure, layer.removeprefix("inner.")): value for (measure, layer), value in found.items()}


@pytest.mark.parametrize("way", ["reentrant", "non-reentrant", "sequential", "of the module"])
@pytest.mark.parametrize("build", [plain, curved], ids=["piecewise linear", "curved"])
def test_activation_checkpointing_changes_no_number(build: Callable[[], nn.Sequential], way: str) -> None:
    expected = numbers_of(build)
    assert len(expected) >= 10
    assert renamed(numbers(Checkpointed(build(), way))) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("way", ["reentrant", "non-reentrant"])
def test_a_context_of_its_own_is_not_checkpointed_either(way: str) -> None:
    gradients = [
        fs.Context(fs.Problem(model, (X, Y))).gradient() for model in (plain(), Checkpointed(plain(), way).eval())
    ]
    for name, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][f"inner.{name}"], value)


def test_checkpointing_is_put_back_even_after_an_error() -> None:
    before = checkpointing.CheckpointFunction, checkpointing._checkpoint_without_reentrant_generator

    @own_settings()
    def fails() -> None:
        assert before[0] is not checkpointing.CheckpointFunction
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert before == (checkpointing.CheckpointFunction, checkpointing._checkpoint_without_reentrant_generator)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "anomaly detection": torch.autograd.detect_anomaly,
    "default device": lambda: torch.device("meta"),
    "default float64": lambda: default_dtype(torch.float64),
    "default bfloat16": lambda: default_dtype(torch.bfloat16),
    "deterministic": deterministic,
}


def state() -> dict[str, Any]:
    return {
        "inference": torch.is_inference_mode_enabled(),
        "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "anomaly": torch.is_anomaly_enabled(),
        "device": torch.get_default_device(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "checkpoint": checkpointing.CheckpointFunction,
        "attention": torch.backends.mha.get_fastpath_enabled(),
        "rng": torch.get_rng_state().sum().item() if torch.get_default_device().type == "cpu" else 0,
    }


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_callers_settings_change_no_number_and_are_left_as_they_are(setting: str) -> None:
    model = curved()
    with SETTINGS[setting]():
        before = state()
        found = numbers(model)
        assert state() == before
    assert found == pytest.approx(numbers_of(curved), rel=1e-12)


class Things(NamedTuple):
    """What the public functions are given."""

    model: nn.Sequential
    other: nn.Sequential
    small: nn.Sequential
    normalised: nn.Sequential
    looks: pd.DataFrame


def things() -> Things:
    rows = [{"network": k, "epoch": e, "gap": k, "margin": k * e + k % 3} for k in range(12) for e in (0, 1)]
    model, other, small = plain(), plain(), plain().float()
    normalised = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double().eval()
    with torch.no_grad():
        other[0].weight.mul_(1.5)
    return Things(model, other, small, normalised, pd.DataFrame(rows))


def everything(given: Things, folder: Path) -> list[float]:
    model, other, small, normalised, looks = given
    problem = fs.Problem(model, (X, Y), test=(X[:6], Y[:6]))
    audit = fs.audit(problem, ["gradient_norm", "psi_trace"], trials=1).to_frame()
    surface = fs.landscape(problem, grid=3)
    explained = fs.explain(problem).to_frame()
    rounded = fs.sensitivity(problem, bits=(4,), sparsity=()).to_frame()
    forecast = fs.forecast(problem, other).to_frame()
    squares = fs.diagonal(problem, "gauss_newton")
    simplex = fs.interpolate([model, other], (X, Y), resolution=2)
    ranking = fs.compare({"one": model, "other": other}, (X, Y), ["hessian_trace", "margin"]).to_frame()
    twin = fs.rescale(model, X, seed=1)
    paths = fs.BasisPaths(model, X)
    bound = fs.bounds(problem, ["pac_bayes"], options={"pac_bayes": {"draws": 20}}).to_frame()
    back = paths.to_model(paths.values())
    folded = fs.fold_batchnorm(normalised, X)
    vector = torch.ones(73, dtype=torch.float64, device="cpu")
    trained = fs.train_population(lambda _: copy.deepcopy(small), [{"seed": 1, "epochs": 2}], (X.float(), Y))
    followed = fs.atlas(looks, ["margin"], kinds=["pearson"], resamples=100).to_frame()
    scores = fs.benchmark("l2_path_norm", networks=8).to_frame()
    recorder = fs.StabilityRecorder((X, Y), batch=11, density_every=1)  # twelve batches in all
    recorder.record(model, 0, lr=0.1)
    table = fs.measure(problem, ["l2_norm"])
    fs.report(table, folder / "page.html")
    return [
        *fs.eigenpairs(problem, top=2).values.tolist(),
        *fs.spectral_density(problem, draws=2).nodes.flatten().tolist(),
        *(fs.hessian(problem) @ vector).tolist(),
        *(fs.gauss_newton(problem) @ vector).tolist(),
        *(float(value.detach().double().sum()) for value in folded.parameters()),
        *trained.frame()["train_loss"].tolist(),
        *audit["after"].tolist(),
        *explained["rescalable"].tolist(),
        *rounded["measured"].tolist(),
        *forecast["measured"].tolist(),
        *(float(value.double().sum()) for value in squares.values()),
        *surface.loss.flatten().tolist(),
        *simplex.loss.tolist(),
        *ranking.select_dtypes("number").to_numpy().ravel().tolist(),
        *(float(value.detach().double().sum()) for value in (*twin.parameters(), *back.parameters())),
        *bound["value"].tolist(),
        *recorder.stability.rows.select_dtypes("number").iloc[0].tolist(),
        *(value for found in (followed, scores) for value in found["value"].dropna().tolist()),
    ]


@pytest.fixture(scope="module")
def numbers_of_everything(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Without any setting of the caller's."""
    functions = {name for name in fs.__all__ if name.islower() and inspect.isroutine(getattr(fs, name))} - {"study"}
    assert {name for name in functions if f"fs.{name}(" not in inspect.getsource(everything)} == set()
    return everything(things(), tmp_path_factory.mktemp("plain"))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_public_function_takes_the_callers_settings(
    setting: str, numbers_of_everything: list[float], tmp_path: Path
) -> None:
    given = things()
    with SETTINGS[setting]():
        found = everything(given, tmp_path)
    assert found == pytest.approx(numbers_of_everything, rel=1e-9, nan_ok=True)


def test_models_and_data_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model, x = plain(), X.clone()
        model.register_buffer("unused", torch.ones(2))
        problem = fs.Problem(model, (x, Y.clone()))
    found = fs.measure(problem, "hessian_trace")["hessian_trace"]
    assert found == pytest.approx(numbers(plain(), "hessian_trace")["hessian_trace", ""], rel=1e-12)


class MakesTensors(nn.Module):
    """Its forward pass makes tensors without saying of which dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(torch.addmm(torch.zeros(4), x, torch.eye(4)))
        return found


class LateNumbers(Dataset[tuple[Tensor, int]]):
    """Makes its samples when asked for them, in the default dtype."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor(X[index].tolist()), int(Y[index])


def test_models_and_data_that_count_on_the_default_dtype() -> None:
    expected = numbers(plain(), "gradient_norm")["gradient_norm", ""]
    model = MakesTensors()
    problem = fs.Problem(model, (X, Y))  # measured in float64 whatever the default
    assert fs.measure(problem, "gradient_norm")["gradient_norm"] == pytest.approx(expected, rel=1e-12)
    with default_dtype(torch.float64):
        problem = fs.Problem(model, DataLoader(LateNumbers()))
        assert fs.measure(problem, "gradient_norm")["gradient_norm"] == pytest.approx(expected, rel=1e-12)


def test_the_defaults_of_the_outermost_caller_count() -> None:
    with default_dtype(torch.float64), own_settings(), own_settings():
        assert torch.get_default_dtype() == torch.float32
        with callers_defaults():
            assert torch.get_default_dtype() == torch.float64
        assert torch.get_default_dtype() == torch.float32


class HalfCompiled(nn.Module):
    """A part of it is compiled, and shared."""

    def __init__(self) -> None:
        super().__init__()
        net = plain()
        self.first = torch.compile(net[:3], backend="eager")
        self.again, self.rest = self.first, net[3:]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.rest(self.first(x))
        return found


def called_compiled() -> nn.Module:
    model = plain()
    model.compile(backend="eager")
    return model


WRAPPED: dict[str, tuple[Callable[[], Any], str]] = {
    "compiled": (lambda: torch.compile(plain(), backend="eager"), "torch.compile"),
    "data parallel": (lambda: nn.DataParallel(plain()), "DataParallel"),
    "nested": (lambda: nn.DataParallel(torch.compile(plain(), backend="eager")), "DataParallel and torch.compile"),
    "compiled in place": (called_compiled, ""),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_wrappers_are_left_out_with_a_remark(kind: str, recwarn: pytest.WarningsRecorder) -> None:
    build, remark = WRAPPED[kind]
    model = build()
    problem = fs.Problem(model, (X, Y), initial=model)
    table = fs.measure(problem, [*NAMES, "distance_from_initialization"])
    assert not recwarn.list
    assert set(problem.params) == {name for name, _ in plain().named_parameters()}
    for name, value in numbers(plain()).items():
        assert (table.layer(name[0])[name[1]] if name[1] else table[name[0]]) == pytest.approx(value, rel=1e-9)
    assert table["distance_from_initialization"] == 0
    assert bool(remark) == bool(problem.remarks)
    assert all(f"wrapping by {remark}:" in words for words in problem.remarks)


def test_compiled_parts_are_measured_as_they_are_written() -> None:
    model = HalfCompiled().eval()
    problem = fs.Problem(model, (X, Y))
    assert problem.model.first is problem.model.again
    assert [name for name in problem.params if "weight" in name] == [
        "first.0.weight",
        "first.2.weight",
        "rest.4.weight",
    ]
    assert fs.measure(problem, "hessian_trace")["hessian_trace"] == pytest.approx(
        numbers(plain(), "hessian_trace")["hessian_trace", ""], rel=1e-9
    )
    assert type(model.first).__name__ == "OptimizedModule"  # the user's own is left alone


def test_distributed_data_parallel() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(plain())
        outer = nn.Sequential(nn.Identity(), wrapped)
        for model in (wrapped, outer):
            problem = fs.Problem(model, (X, Y))
            assert "DistributedDataParallel" in problem.remarks[0]
            assert fs.measure(problem, "hessian_trace")["hessian_trace"] == pytest.approx(
                numbers(plain(), "hessian_trace")["hessian_trace", ""], rel=1e-9
            )
    finally:
        torch.distributed.destroy_process_group()


def test_functions_of_models_take_wrapped_ones() -> None:
    wrapped = nn.DataParallel(plain())
    twin = fs.rescale(wrapped, X, factors={"0": 10.0})
    torch.testing.assert_close(twin[0].weight, 10 * plain()[0].weight)
    assert fs.BasisPaths(wrapped, X).count == fs.BasisPaths(plain(), X).count
    assert fs.interpolate([wrapped, plain()], (X, Y), resolution=2).loss.std() < 1e-12


@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, X)], ids=["script", "trace"])
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_script_modules_are_refused_with_what_to_do(make: Callable[[nn.Module], Any]) -> None:
    for model in (make(plain()), nn.Sequential(nn.Identity(), make(plain()))):
        with pytest.raises(fs.InputError, match=r"ScriptModule.*Pass the Python module"):
            fs.Problem(model, (X, Y))


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_weights_saved_from_wrapped_models_fit_the_plain_one(suffix: str, tmp_path: Any) -> None:
    for kind, (build, _) in WRAPPED.items():
        path = tmp_path / f"{kind}.{suffix}".replace(" ", "_")
        save_weights(build(), path)
        found = load_weights(copy.deepcopy(plain()).apply(_cleared), path)
        assert all(torch.equal(found.state_dict()[name], value) for name, value in plain().state_dict().items())
    save_weights(plain(), tmp_path / f"plain.{suffix}")
    wrapped = torch.compile(plain().apply(_cleared), backend="eager")
    load_weights(wrapped, tmp_path / f"plain.{suffix}")
    assert torch.equal(wrapped._orig_mod[0].weight, plain()[0].weight)


def _cleared(module: nn.Module) -> None:
    for value in module.parameters():
        value.data.zero_()
