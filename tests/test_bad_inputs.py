"""Every wrong input that was thought of, with the words its error must have; test_problem.py has what must work."""

from __future__ import annotations

import gzip
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import flatscope as fs
from flatscope.cli.output import check_output_file
from flatscope.cli.sources import load_model, parse_dtype, parse_model_options, parse_options
from flatscope.inputs.factories import find_factory
from flatscope.inputs.loading import load
from flatscope.inputs.weight_files import load_weights
from flatscope.training.checkpoint import TrainConfig
from flatscope.training.loop import train

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 3
NAN, INF = float("nan"), float("inf")


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).eval()


def problem(model: Any = None, train: Any = (X, Y), **more: Any) -> fs.Problem:
    return fs.Problem(net() if model is None else model, train, **more)


def changed(tensor: Tensor, row: int, value: float) -> Tensor:
    return tensor.index_fill(0, torch.tensor([row]), value)


def with_weight(name: str, value: float) -> nn.Module:
    model = net()
    model.get_parameter(name).data.view(-1)[-1] = value
    return model


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Augments every sample that it is asked for."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index] + 0.1 * torch.randn(4), Y[index]


def mixing(batch: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = (torch.stack(column) for column in zip(*batch, strict=True))
    return x * torch.rand(1), y


class OneShot:
    """A loader of the user's that gives the same iterator every time."""

    def __init__(self) -> None:
        self.batches = iter([(X, Y)])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.batches


class OneShotStream(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.samples = iter(list(zip(X, Y, strict=True)))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.samples


class Calling(nn.Module):
    """A layer followed by any function."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(4, 3), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.fc(x))


class Malicious:
    """Unpickled carelessly, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@dataclass(frozen=True)
class Case:
    name: str
    words: tuple[str, ...]
    act: Callable[[Path], Any]


CASES: list[Case] = []


def bad(name: str, *words: str) -> Callable[[Callable[[Path], Any]], None]:
    """Declare a wrong input: what it is, words that the error must have, and the call."""
    return lambda act: CASES.append(Case(name, words, act))


def given(name: str, *words: str, **arguments: Any) -> None:
    bad(name, *words)(lambda _: problem(**arguments))


def measured(name: str, *words: str, names: Any = "margin", **arguments: Any) -> None:
    bad(name, *words)(lambda _: fs.measure(problem(), names, **arguments))


measured("unknown measure", "measure", "'hesian_trace'", "Did you mean hessian_trace", names="hesian_trace")
measured("capitals", "'Margin'", "Did you mean margin", names="Margin")
measured("a name like no other", "'train_error'", "Known: adaptive_sharpness", names="train_error")
measured("glob without a match", "known measure", "'kapa*'", "Did you mean kappa", names=["margin", "kapa*"])
measured("names that are no names", "names of measures", "3", names=3)
measured("unknown option", "option of margin", "'epsilo'", "epsilon", options={"margin": {"epsilo": 1}})
measured("option of an unknown measure", "'marg'", "margin", options={"marg": {"epsilon": 1}})
measured("unknown option elsewhere", "option of hessian_trace", options={"hessian_trace": {"draws": 1}})
measured("option of another kind", "margin, epsilon", "a number", "'a'", options={"margin": {"epsilon": "a"}})
measured("option out of range", "margin", "(0, 1]", "1.5", options={"margin": {"epsilon": 1.5}})
measured("options that are none", "options of margin", "dictionary", "0.1", options={"margin": 0.1})
measured("seed", "seed", "whole number", "'a'", seed="a")
bad("a model for a problem", "a Problem", "Sequential", "Problem(model")(lambda _: fs.measure(net(), "margin"))  # type: ignore[arg-type]
bad("delta", "delta", "0 < delta < 1", "2")(lambda _: fs.bounds(problem(), delta=2))
bad("delta of one bound", "options of covering", "options of its own", "{'delta': 0.1}")(
    lambda _: fs.bounds(problem(), options={"covering": {"delta": 0.1}})
)

given("label too large", "train", "labels from 0 to 2", "3 outputs", "from 0 to 7", train=(X, changed(Y, 5, 7)))
given("late label too large", "labels from 0 to 2", "from 0 to 7", train=(X, changed(Y, 39, 7)))
given("negative label", "labels from 0 to 2", "from -1 to 1", train=(X, Y - 1))
given("negative label, mse", "labels from 0 to 2", "from -1 to 1", train=(X, Y - 1), loss="mse")
given("label too large in test", "test", "labels from 0 to 2", test=(X, Y + 1))
given("float labels", "train", "class numbers", "float32", "y.long()", train=(X, Y.float()))
given("boolean labels", "class numbers", "bool", train=(X, Y > 0))
given("labels as columns", "cross_entropy", "class numbers of shape (32,)", "(32, 1)", train=(X, Y[:, None]))
given("regression targets of another shape", "mse", "(32, 3)", "(32, 2)", train=(X, X[:, :2]), loss="mse")
given("labels that are words", "array of numbers", "<U1", train=(X.numpy(), np.array(["a"] * 40)))

given("NaN weight", "2.weight", "finite weights", "diverge", model=with_weight("2.weight", NAN))
given("infinite bias", "0.bias", "finite weights", model=with_weight("0.bias", INF))
given("NaN data", "train", "finite data", "inputs", train=(changed(X, 1, NAN), Y))
given("late infinite data", "train", "finite data", "inputs", train=(changed(X, 39, INF), Y))
given("NaN targets", "finite data", "targets", train=(X, changed(X, 39, NAN)), loss="mse")
given("NaN test data", "test", "finite data", test=(changed(X, 39, NAN), Y))
given("infinite outputs", "finite outputs", "NaN or infinity", "did not diverge", model=Calling(torch.Tensor.log))
given("infinite loss", "loss <lambda>", "finite losses", loss=lambda o, t: (0 * o[:, 0]).log())

given("wrong input shape", "layer 0", "(32, 3)", "input shape", train=(X[:, :3], Y))
given("bytes as inputs", "layer 0", "Byte", "dtype", train=(X.to(torch.uint8), Y))
given("fewer inputs than targets", "as many inputs", "(30, 4)", "(40,)", train=(X[:30], Y))
given("test data of another shape", "test", "samples of shape (4,)", "(40, 2)", test=(X[:, :2], Y))
given("test targets of another shape", "mse", "(32, 3)", "(32, 2)", train=(X, X[:, :3]), test=(X, X[:, :2]), loss="mse")
given("batches of two shapes", "samples of shape (4,)", "(40, 5)", train=[(X, Y), (X.repeat(1, 2)[:, :5], Y)])
given("a batch without labels", "labels", "keys x", train=[{"x": X}])
given("a bare tensor", "(x, y)", "Tensor", train=X)
given("three tensors", "Several inputs go into a tuple", train=(X, X, Y))
given("lists of numbers", "tensors or arrays", "list", train=[(X.tolist(), Y)])

for kind, nothing in {
    "tensors": (X[:0], Y[:0]),
    "data set": TensorDataset(X[:0], Y[:0]),
    "loader": DataLoader(TensorDataset(X, Y), batch_size=64, drop_last=True),
    "list": [],
}.items():
    given(f"empty {kind}", "train", "at least one sample", "none", "not empty", train=nothing)
given("empty test data", "test", "at least one sample", test=(X[:0], Y[:0]))
given("generator", "more than once", "generator", "used up by one pass", train=(pair for pair in [(X, Y)]))
given("one-shot loader", "more than once", "used up by one pass", "DataLoader", train=OneShot())
given("one-shot stream", "more than once", "used up by one pass", train=DataLoader(OneShotStream(), batch_size=8))

augmented = ("train", "the same on every pass", "augmentation", "shuffling is fine")
given("augmenting data set", *augmented, train=Noisy())
given("augmenting and shuffling", *augmented, train=DataLoader(Noisy(), batch_size=8, shuffle=True))
given("augmenting collate", *augmented, train=DataLoader(TensorDataset(X, Y), batch_size=8, collate_fn=mixing))
given("augmenting test data", "test", *augmented[1:], test=Noisy())
replaced = DataLoader(TensorDataset(X, Y), sampler=RandomSampler(X, replacement=True))
given("sampler with replacement", "same samples on every pass", "replacement", train=replaced)
dropping = DataLoader(TensorDataset(X, Y), batch_size=16, drop_last=True, shuffle=True)
given("drop_last with shuffle", "same samples on every pass", "drop_last=False", train=dropping)


def left_training(layer: nn.Module) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), layer)
    return model.train()


given("dropout left on", "1", "dropout", "training mode", "model.eval()", model=left_training(nn.Dropout(0.5)))
given("BatchNorm left on", "1", "running statistics", "model.eval()", model=left_training(nn.BatchNorm1d(3)))
stateless = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)).eval()
given("BatchNorm without statistics", "1", "running statistics", "track_running_stats=False", model=stateless)
always_on = Calling(lambda x: nn.functional.dropout(x, 0.5, training=True))
given("functional dropout always on", "same outputs", "differ", "dropout", model=always_on)
given("outputs that see the batch", "their own sample", "other samples", "eval", model=Calling(lambda x: x - x.mean(0)))

given("no parameters", "model", "parameters", "none", model=nn.ReLU())
given("no module", "torch.nn.Module", "function", model=lambda x: x)
given("lazy module", "weight", "weights with values", "lazy", model=nn.LazyLinear(3))
given("meta device", "weight", "weights with values", "load its weights", model=nn.Linear(4, 3, device="meta"))
given("output that is no tensor", "tensor or has .logits", "list", "Wrap", model=Calling(lambda x: [x]))
given("one output for all", "one output row per sample (32)", "()", model=Calling(torch.Tensor.sum))
given(
    "scalar loss",
    "one loss per sample",
    "shape ()",
    "reduction='none'",
    "name one of cross_entropy",
    loss=lambda outputs, targets: nn.functional.cross_entropy(outputs, targets),
)
given("loss that fails", "loss <lambda>", "(32, 3)", "int64", loss=lambda o, t: o.missing)
given("unknown loss", "loss", "'cross_entrop'", "cross_entropy", loss="cross_entrop")
given("loss under the name of its class", "'MSELoss'", "Known: bce, cross_entropy, mse, next_token.", loss="MSELoss")
given("weights for a model", "torch.nn.Module", "OrderedDict", "with its weights loaded", model=net().state_dict())
given("initial weights with other keys", "initial, 0.weight", "(5, 4)", "no tensor", initial={"a": X})
given(
    "initial weights of another shape", "initial, 0.weight", "(5, 4)", "(3, 4)", initial=nn.Sequential(nn.Linear(4, 3))
)
given("NaN initial weights", "initial, 2.weight", "finite", initial=with_weight("2.weight", NAN))
given("initial weights as a path", "initial", "state dict", "str", initial="before.pt")
given("integer dtype", "dtype", "float32 or torch.float64", "int32", dtype=torch.int32)
given("half precision", "dtype", "float32 or torch.float64", "float16", dtype=torch.float16)
given("device word", "device", "'cdua'", "Use cpu", device="cdua")
given("batch size zero", "batch_size", "at least 1", "0", batch_size=0)
given("fractional batch size", "batch_size", "whole number", "2.5", batch_size=2.5)

bad("dtype word", "dtype", "'float8'", "float32", "float64")(lambda _: parse_dtype("float8"))
bad("option without a measure", "--option", "measure.option=value", "'epsilon=1'")(
    lambda _: parse_options(["epsilon=1"])
)
bad("option without a value", "--option", "margin.epsilon=0.1", "'a.b'")(lambda _: parse_options(["a.b"]))
bad("model option without a value", "--model-option", "'widths'")(lambda _: parse_model_options(["widths"]))
bad("unknown model", "model", "'lenet'", "lenet5", "file.py:factory")(lambda _: load_model("lenet"))
bad("missing model file", "no.py", "no such file")(lambda tmp: load_model(f"{tmp}/no.py:build"))
bad("missing module", "no_such_module", "imported", "path/to/file.py")(lambda _: find_factory("no_such_module:build"))
bad("no module at all", "file.py:factory", "':build'")(lambda _: find_factory(":build"))


def user_file(folder: Path, text: str) -> str:
    (folder / "mine.py").write_text(text)
    return str(folder / "mine.py")


@bad("missing factory", "'buid'", "Did you mean build?", "mine.py")
def _(tmp: Path) -> None:
    load_model(user_file(tmp, "def build(): ...") + ":buid")


@bad("model file that fails", "mine.py", "SyntaxError", "line 1")
def _(tmp: Path) -> None:
    load_model(user_file(tmp, "def build(:") + ":build")


@bad("factory with parameters", "--model", "missing a required argument: 'width'", "--model-option")
def _(tmp: Path) -> None:
    load_model(user_file(tmp, "def build(width): ...") + ":build")


@bad("factory of something else", "--model", "torch.nn.Module", "int")
def _(tmp: Path) -> None:
    load_model(user_file(tmp, "def build(): return 3") + ":build")


@bad("truncated data file", "train-images-idx3-ubyte", "47040016")
def _(tmp: Path) -> None:
    folder = tmp / "mnist"
    folder.mkdir()
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"):
        (folder / name).write_bytes(b"\0\0\x08\x03" + bytes(100))
    load("mnist", tmp)


@bad("wrong data file", "train-images-idx3-ubyte.gz", "47040016 bytes, sha256", "content differs", "data fetch mnist")
def _(tmp: Path) -> None:
    folder = tmp / "mnist"
    folder.mkdir()
    with gzip.open(folder / "train-images-idx3-ubyte.gz", "wb", compresslevel=1) as file:
        file.write(b"\0\0\x08\x03" + (60_000).to_bytes(4, "big") + (28).to_bytes(4, "big") * 2 + bytes(47_040_000))
    (folder / "train-labels-idx1-ubyte").touch()
    load("mnist", tmp)


@bad("function that returns no batches", "mine.py:load", "a DataLoader or batches", "an empty list")
def _(tmp: Path) -> None:
    load(user_file(tmp, "def load(): return []") + ":load")


@bad("npz without the arrays", "mine.npz", "x_train, y_train", "x_train, y_train missing")
def _(tmp: Path) -> None:
    np.savez(tmp / "mine.npz", images=X.numpy())
    load(tmp / "mine.npz")


@bad("unknown data set", "data set", "'minst'", "mnist")
def _(tmp: Path) -> None:
    load("minst", tmp)


def saved(folder: Path, **changes: Tensor | None) -> Path:
    state = {name: value for name, value in (net().state_dict() | changes).items() if value is not None}
    save_file(state, folder / "weights.safetensors")
    return folder / "weights.safetensors"


@bad("state dict with a missing key", "weights.safetensors", "missing 2.bias")
def _(tmp: Path) -> None:
    load_weights(net(), saved(tmp, **{"2.bias": None}))


@bad("state dict with an extra key", "weights.safetensors", "not in the model head.weight")
def _(tmp: Path) -> None:
    load_weights(net(), saved(tmp, **{"head.weight": X}))


@bad("state dict with another shape", "0.weight (40, 4) for (5, 4)", "same architecture")
def _(tmp: Path) -> None:
    load_weights(net(), saved(tmp, **{"0.weight": X}))


@bad("pickle that would run code", "weights.pt", "nothing in it was run", "state_dict()")
def _(tmp: Path) -> None:
    (tmp / "weights.pt").write_bytes(pickle.dumps({"0.weight": Malicious(tmp / "ran")}))
    try:
        load_weights(net(), tmp / "weights.pt")
    finally:
        assert not (tmp / "ran").exists(), "the pickle was run"


@bad("checkpoint that would run code", "weights.pt", "nothing in it was run")
def _(tmp: Path) -> None:
    torch.save({"0.weight": Malicious(tmp / "ran")}, tmp / "weights.pt")
    try:
        load_weights(net(), tmp / "weights.pt")
    finally:
        assert not (tmp / "ran").exists(), "the pickle was run"


@bad("data where weights belong", "data.npz", "--data", "state_dict()")
def _(tmp: Path) -> None:
    np.savez(tmp / "data.npz", x_train=X.numpy(), y_train=Y.numpy())
    load_weights(net(), tmp / "data.npz")


@bad("data that torch saved", "data.pt", "numpy.savez", "file.py:function")
def _(tmp: Path) -> None:
    torch.save((X, Y), tmp / "data.pt")
    load(str(tmp / "data.pt"))


@bad("a model file that is not there", "nowhere.py", "no such file", "Check the path")
def _(tmp: Path) -> None:
    load_model(f"{tmp}/nowhere.py:build")


def below_a_file(folder: Path) -> Path:
    """A place where nobody can write, not even root, who may write where permissions forbid it."""
    (folder / "file").write_text("in the way")
    return folder / "file" / "folder"


@bad("table in an unwritable folder", "file/folder/t.json", "can be written to", "Choose another path")
def _(tmp: Path) -> None:
    fs.measure(problem(), "margin").save(below_a_file(tmp) / "t.json")


@bad("report in an unwritable folder", "file/folder/r.html", "can be written to", "Choose another path")
def _(tmp: Path) -> None:
    fs.report(fs.measure(problem(), "margin"), below_a_file(tmp) / "r.html")


@bad("checkpoint in an unwritable folder", "file/folder", "can be written to")
def _(tmp: Path) -> None:
    train(net(), (X, Y), TrainConfig(epochs=1), checkpoint=below_a_file(tmp))


@bad("output found unwritable in time", "file/folder/t.json", "is not a folder", "Choose another path")
def _(tmp: Path) -> None:
    check_output_file(below_a_file(tmp) / "t.json", fs.Table.ENDINGS)


@bad("table of an unknown kind", "ending in .parquet, .json", "t.xlsx")
def _(tmp: Path) -> None:
    check_output_file(tmp / "t.xlsx", fs.Table.ENDINGS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused_with_what_was_expected_what_came_where_and_what_to_do(case: Case, tmp_path: Path) -> None:
    with pytest.raises(fs.InputError) as caught:
        case.act(tmp_path)
    error = caught.value
    assert error.expected
    assert error.got
    assert error.where
    for word in case.words:
        assert word in str(error), f"{word!r} is not in: {error}"
    assert "\n" not in str(error)
