"""A user's own data and losses on the command line: as they are, from arrays, data sets, loaders and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from test_cli import Run
from test_cli import run as run  # a fixture

import flatscope as fs
from flatscope import Table
from flatscope.inputs.data_set import DataSource
from flatscope.inputs.loading import load, load_or_read

FILE = '''
import collections
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from flatscope.loss import next_tokens

torch.manual_seed(0)
x, y = torch.randn(20, 4) * 3 + 1, torch.arange(20) % 3
Named = collections.namedtuple("Named", ["labels", "values"])

class Samples(Dataset):
    def __len__(self): return 20
    def __getitem__(self, i): return x[i], y[i]

class Plain:
    """Samples by number, not derived from torch's class."""
    def __len__(self): return 20
    def __getitem__(self, i):
        if i >= 20: raise IndexError
        return {"values": x[i], "label": y[i]}

def arrays(): return x, y
def both(): return (x, y), (x[:5], y[:5])
def data_set(): return Samples()
def loader(): return DataLoader(Samples(), batch_size=7, shuffle=True)
def two_loaders(): return DataLoader(Samples(), batch_size=7), DataLoader(TensorDataset(x[:5], y[:5]))
def mixed(): return Samples(), (x[:5], y[:5])
def by_name(): return {"train": Samples(), "test": DataLoader(Samples())}
def batches(): return [(x[:8], y[:8]), (x[8:14], y[8:14]), (x[14:], y[14:])]
def named(): return [Named(y, x)]
def one_dict(): return {"values": x, "labels": y}
def dicts(): return DataLoader(Plain(), batch_size=6)
def two_dicts(): return [{"values": x[:9], "labels": y[:9]}, {"values": x[9:], "labels": y[9:]}]
def plain_class(): return Plain()
def keyword_pair(): return {"values": x}, y
def several(): return (x[:, :2], x[:, 2:]), y
def texts(): return {"input_ids": ids, "labels": next_tokens(ids)}
def texts_unmoved(): return {"input_ids": ids, "labels": ids}
def labels(): return x, torch.stack([y == 0, y != 1], 1)
def one_hot(): return x, nn.functional.one_hot(y, 3)
def binary(): return x, y % 2
def number(): return 3
def words(): return "x", "y"

ids = torch.arange(24).reshape(6, 4) * 5 % 7

class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()
    def forward(self, values): return {"logits": self.net(values)}

class TwoInputs(ByName):
    def forward(self, a, b): return self.net(torch.cat([a, b], 1))

class Texts(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)
    def forward(self, input_ids): return self.head(self.words(input_ids))

def net(outputs=3):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, outputs))
def by_keyword(): return ByName()
def two_inputs(): return TwoInputs()
def language_model():
    torch.manual_seed(1)
    return Texts()
def compiled(): return torch.compile(net(), backend="eager")

def my_loss(outputs, targets): return 2 * nn.functional.cross_entropy(outputs, targets, reduction="none")
def scalar_loss(outputs, targets): return outputs.sum()
'''


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return str(path)


@pytest.fixture
def measured(run: Run, mine: str) -> Any:
    """The value of a measure for a model and data of the file."""

    def call(model: str, data: str, *more: object, name: str = "gradient_norm") -> float:
        outcome = run("measure", "--model", f"{mine}:{model}", "--data", f"{mine}:{data}", "-m", name, "--json", *more)
        assert outcome.code == 0, outcome.err
        return Table.from_json(outcome.out)[name]

    return call


WAYS = ["both", "data_set", "loader", "two_loaders", "mixed", "by_name", "batches", "named"]


@pytest.mark.parametrize("data", WAYS)
def test_data_of_every_kind_give_the_numbers_of_the_arrays(measured: Any, data: str) -> None:
    assert measured("net", data) == pytest.approx(measured("net", "arrays"), rel=1e-5)


@pytest.mark.parametrize("data", ["one_dict", "two_dicts", "dicts", "plain_class", "keyword_pair"])
def test_batches_by_keyword(measured: Any, data: str) -> None:
    assert measured("by_keyword", data) == pytest.approx(measured("net", "arrays"), rel=1e-5)


def test_several_inputs_and_wrapped_models(measured: Any) -> None:
    expected = measured("net", "arrays")
    assert measured("two_inputs", "several") == pytest.approx(expected, rel=1e-5)
    assert measured("compiled", "arrays") == pytest.approx(expected, rel=1e-5)


def test_test_parts_are_taken_and_left_out(mine: str) -> None:
    for name in ("both", "two_loaders", "mixed", "by_name"):
        loaded = load_or_read(f"{mine}:{name}")
        assert loaded.test is not None
        assert isinstance(loaded, DataSource) == (name != "both")
        assert load_or_read(f"{mine}:{name}", test_size=0).test is None


def test_sources_become_arrays_where_samples_are_drawn_or_changed(mine: str) -> None:
    arrays = load(f"{mine}:arrays")
    for name in ("data_set", "mixed", "batches"):
        assert torch.equal(load(f"{mine}:{name}").train[0], arrays.train[0])
        drawn = load_or_read(f"{mine}:{name}", train_size=6)
        assert not isinstance(drawn, DataSource)
        assert drawn.train[1].bincount().tolist() == [2, 2, 2]
        assert load_or_read(f"{mine}:{name}", standardize=True).how == "standardised"
    for name in ("dicts", "several"):
        with pytest.raises(fs.InputError, match=r"one tensor each.*in the function itself"):
            load_or_read(f"{mine}:{name}", train_size=6)


@pytest.mark.parametrize("data", ["number", "words"])
def test_what_is_no_data_is_refused(run: Run, mine: str, data: str) -> None:
    outcome = run("measure", "--model", f"{mine}:net", "--data", f"{mine}:{data}", "-m", "margin")
    assert outcome.code == 2
    assert "a Dataset, a DataLoader" in outcome.err


def test_losses_by_name_and_by_function(measured: Any, run: Run, mine: str) -> None:
    plain = measured("net", "arrays", "--no-standardize")
    assert measured("net", "arrays", "--loss", f"{mine}:my_loss") == pytest.approx(2 * plain, rel=1e-5)
    assert measured("net", "one_hot") == pytest.approx(plain, rel=1e-5)
    assert measured("language_model", "texts", "--loss", "next_token") > 0
    assert measured("net", "labels", "--loss", "bce", "--model-option", "outputs=2") > 0
    one = measured("net", "binary", "--loss", "bce", "--model-option", "outputs=1", "-m", "margin", name="margin")
    assert np.isfinite(one)
    for words, said in (
        (["--loss", f"{mine}:scalar_loss"], "one loss per sample"),
        (["--loss", f"{mine}:my_los"], "Did you mean my_loss"),
        (["--loss", "crossentropy"], "Did you mean cross_entropy"),
        (["--model-option", "outputs=1"], "--loss bce"),
    ):
        outcome = run("measure", "--model", f"{mine}:net", "--data", f"{mine}:binary", "-m", "margin", *words)
        assert outcome.code == 2
        assert said in " ".join(outcome.err.split()), outcome.err
    classes = run("measure", "--model", f"{mine}:net", "--data", f"{mine}:arrays", "--loss", "mse", "-m", "margin")
    assert classes.code == 0
    assert "labels are classes" in " ".join(classes.out.split())
    outcome = run(
        "measure", "--model", f"{mine}:language_model", "--data", f"{mine}:texts_unmoved", "--loss", "next_token"
    )
    assert outcome.code == 0
    assert "moved by one" in " ".join((outcome.out + outcome.err).split())


def test_other_commands_take_them_as_well(run: Run, mine: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    paths = []
    for index in range(2):
        state = {"0.weight": torch.randn(6, 4), "0.bias": torch.zeros(6), "2.weight": torch.randn(3, 6)}
        wrapped = {f"_orig_mod.{name}": value for name, value in state.items()} | {"_orig_mod.2.bias": torch.zeros(3)}
        paths.append(tmp_path / f"w{index}.safetensors")
        save_file(wrapped, paths[-1])
    given = ["--model", f"{mine}:net", "--data", f"{mine}:loader", "--loss", f"{mine}:my_loss"]
    compared = run("compare", *paths, *given, "-m", "hessian_trace", "-m", "rho_sum")
    assert compared.code == 0, compared.err
    audited = run("audit", *given, "--weights", paths[0], "-m", "gradient_norm", "--trials", "1")
    assert audited.code == 0, audited.err
    drawn = run("landscape", *given, "--weights", paths[0], "--grid", "3", "--out", tmp_path / "plane.npz")
    assert drawn.code == 0, drawn.err
    trained = run(
        "train", "--model", f"{mine}:net", "--data", f"{mine}:loader", "--epochs", "1", "--out", tmp_path / "t"
    )
    assert trained.code == 0, trained.err


def test_own_files_are_measured_as_they_are(run: Run, mine: str, tmp_path: Path) -> None:
    rng = np.random.RandomState(0)
    x = (rng.randn(40, 4) * 5 + 2).astype(np.float32)
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=np.arange(40) % 3)
    given = ["measure", "--model", f"{mine}:net", "--data", tmp_path / "mine.npz", "-m", "gradient_norm", "--json"]
    outcome = run(*given)
    assert "40 training samples, as they are: loss" in outcome.err
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3)).eval()
    plain = fs.measure(fs.Problem(model, (torch.from_numpy(x), torch.arange(40) % 3)), "gradient_norm")["gradient_norm"]
    assert Table.from_json(outcome.out)["gradient_norm"] == pytest.approx(plain, rel=1e-5)
    changed = run(*given, "--standardize")
    assert "standardised: loss" in changed.err
    assert Table.from_json(changed.out)["gradient_norm"] != pytest.approx(plain, rel=1e-2)


def test_pixels_as_targets_in_a_file(tmp_path: Path) -> None:
    x, y = np.zeros((6, 2, 3, 3), np.float32), np.arange(54).reshape(6, 3, 3) % 3
    y[0, 0] = -100
    np.savez(tmp_path / "pixels.npz", x_train=x, y_train=y)
    loaded = load(tmp_path / "pixels.npz")
    assert torch.equal(loaded.train[1], torch.from_numpy(y))
    assert loaded.classes == ()


@pytest.mark.parametrize("place", ["", "weights.safetensors", "checkpoint"])
def test_a_training_error_far_above_the_saved_one_is_said(run: Run, tmp_path: Path, place: str) -> None:
    out = tmp_path / "run"
    common = [
        "--model",
        "mlp",
        "--model-option",
        "widths=64,16,10",
        "--data",
        "digits",
        "--train-size",
        "200",
        "--flatten",
    ]
    assert run("train", *common, "--epochs", "20", "--lr", "0.1", "--out", out).code == 0
    given = ["measure", *common, "--weights", out / place, "-m", "gradient_norm"]
    same = run(*given)
    assert same.code == 0
    assert "when these weights were saved" not in same.out
    other = run(*given, "--no-standardize", "--json")
    (remark,) = [text for text in Table.from_json(other.out).meta["remarks"] if "slope" not in text]
    saved = float(pd.read_csv(out / "history.csv")["train_error"].iloc[-1])
    assert f"was {100 * saved:.2f} % when these weights were saved" in remark
    assert "the training error is" in " ".join(run(*given, "--no-standardize").out.lower().split())
