"""Wrong inputs as people make them, beside those of test_bad_inputs.py: refused with what to do, or remarked on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import flatscope as fs
from flatscope.cli.app import app
from flatscope.errors import FlatscopeError

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 3
FLOATS = torch.randn(40, 1, generator=torch.Generator().manual_seed(1))


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).eval()


class Ending(nn.Module):
    """A linear layer whose output goes through a function."""

    def __init__(self, end: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.end = nn.Linear(4, 3), end

    def forward(self, x: Tensor) -> Any:
        return self.end(self.layer(x))


def problem(train: Any = (X, Y), model: Any = None, **more: Any) -> fs.Problem:
    return fs.Problem(net() if model is None else model, train, **more)


def randomly(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none") * torch.rand(1)


def swapped(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def cut_off(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.detach(), targets, reduction="none")


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    # data
    "labels as texts in an array": (lambda: problem((X, np.array(["a", "b"] * 20))), "numpy.unique"),
    "labels as texts in a list": (lambda: problem((X, ["a", "b"] * 20)), "numpy.unique"),
    "a table as inputs": (lambda: problem((pd.DataFrame(X.numpy()), Y)), "to_numpy"),
    "a column as targets": (lambda: problem((X, pd.Series(Y.numpy()))), "to_numpy"),
    "a table and a column": (lambda: problem((pd.DataFrame(X.numpy()), pd.Series(Y.numpy()))), "to_numpy"),
    "a file's name": (lambda: problem("data.npz"), "Read the file first"),
    "a path": (lambda: problem(Path("data.npz")), "Read the file first"),
    "nothing": (lambda: problem(None), r"\(x, y\)"),
    "inputs alone": (lambda: problem(X), r"\(x, y\)"),
    "three tensors": (lambda: problem((X, Y, Y)), r"\(\(x1, x2\), y\)"),
    "a mapping by the wrong names": (lambda: problem({"x": X, "y": Y}), "by name: pass"),
    "no samples": (lambda: problem((X[:0], Y[:0])), "at least one sample"),
    "complex numbers": (lambda: problem((X.to(torch.complex64), Y)), "view_as_real"),
    "truth values": (lambda: problem((X > 0, Y)), r"x\.float\(\)"),
    "whole numbers": (lambda: problem((X.long(), Y)), r"x\.float\(\)"),
    "meta tensors": (lambda: problem((X.to("meta"), Y)), "data with values"),
    "infinite inputs": (lambda: problem((X.clone().fill_(torch.inf), Y)), "finite data"),
    "missing targets": (lambda: problem((X, FLOATS * torch.nan), nn.Linear(4, 1), loss="mse"), "in the targets"),
    "labels as truth values": (lambda: problem((X, Y > 0)), r"y\.long\(\)"),
    "labels in a column": (lambda: problem((X, Y[:, None])), r"y\[:, 0\]"),
    "labels from one": (lambda: problem((X, Y + 1)), "from 0 to 2"),
    "other test inputs": (lambda: problem(test=(X[:5, :3], Y[:5])), r"shape \(4,\)"),
    "other test labels": (lambda: problem(test=(X[:5], Y[:5] + 7)), "from 0 to 2"),
    # model
    "a class": (lambda: problem(model=nn.Linear), r"model = Linear\(…\)"),
    "a function": (lambda: problem(model=lambda x: x), "module"),
    "weights alone": (lambda: problem(model=net().state_dict()), "load_state_dict"),
    "a file of weights": (lambda: problem(model="model.pt"), "Build the module"),
    "several outputs": (lambda: problem(model=Ending(lambda o: (o, o))), "Wrap the model"),
    "outputs by another name": (lambda: problem(model=Ending(lambda o: {"out": o})), "logits"),
    "class numbers as outputs": (lambda: problem(model=Ending(lambda o: o.argmax(1))), "argmax"),
    "outputs averaged over the batch": (lambda: problem(model=Ending(lambda o: o.mean(0))), "one output row"),
    # loss
    "a misspelt loss": (lambda: problem(loss="crossentropy"), "Did you mean cross_entropy"),
    "a loss by its short name": (lambda: problem(loss="ce"), r"Did you mean cross_entropy\?"),
    "outputs and targets swapped": (lambda: problem(loss=lambda t, o: swapped(o, t)), r"loss\(outputs, targets\)"),
    "targets broadcast to all outputs": (
        lambda: problem((X, FLOATS[:, 0]), nn.Linear(4, 1), loss=lambda o, t: (o - t).square().mean(1)),
        r"reshape\(outputs\.shape\)",
    ),
    "a loss of pairs of the batch": (
        lambda: problem((X, FLOATS), nn.Linear(4, 1), loss=lambda o, t: (o - o.T).square().mean(1)),
        "each sample by itself",
    ),
    "a mean over samples": (lambda: problem(loss=lambda o, t: nn.functional.cross_entropy(o, t)), "leave out the mean"),
    "a number as a loss": (lambda: problem(loss=lambda o, t: 1.0), "one loss per sample"),
    "no value of a loss": (lambda: problem(loss=lambda o, t: None), "one loss per sample"),
    "a loss of one argument": (lambda: problem(loss=lambda o: o.sum(1)), "takes these outputs"),
    "a loss that is cut off": (lambda: problem(loss=cut_off), "detach"),
    "a loss with noise": (lambda: problem(loss=randomly), "at random"),
    "NLLLoss of logits": (lambda: problem(loss=nn.NLLLoss()), "CrossEntropyLoss"),
    "a loss of three tensors": (lambda: problem(loss=nn.TripletMarginLoss()), "takes these outputs"),
    "too many class weights": (lambda: problem(loss=nn.CrossEntropyLoss(weight=torch.ones(5))), "a weight for each"),
    "too few class weights": (lambda: problem(loss=nn.CrossEntropyLoss(weight=torch.ones(2))), "a weight for each"),
    "an absolute error of classes": (lambda: problem(loss=nn.L1Loss()), "outputs' shape"),
    "labels 0 to 2 for bce": (lambda: problem(loss=nn.BCEWithLogitsLoss()), "targets 0 or 1"),
    # settings
    "a dtype by name": (lambda: problem(dtype="float64"), r"torch\.float64, not its name"),
    "whole numbers as dtype": (lambda: problem(dtype=torch.int32), "dtype"),
    "a device that is none": (lambda: problem(device="gpu"), "Use cpu"),
    "a batch size as text": (lambda: problem(batch_size="32"), "whole number"),
    "weights before training as a path": (lambda: problem(initial="init.pt"), "module or a state dict"),
    # calls
    "no names": (lambda: fs.measure(problem(), []), "at least one name"),
    "a bound among measures": (lambda: fs.measure(problem(), "pac_bayes"), r"fs\.bounds\(problem, 'pac_bayes'\)"),
    "a regular expression": (lambda: fs.measure(problem(), "kappa.*"), "Did you mean kappa"),
    "a model in place of a problem": (lambda: fs.measure(net(), (X, Y)), "Make one: Problem"),  # type: ignore[arg-type]
    "options without their measure": (
        lambda: fs.measure(problem(), "margin", options={"epsilon": 0.1}),  # type: ignore[dict-item]
        "known measure",
    ),
    "an option of another name": (lambda: fs.measure(problem(), "margin", options={"margin": {"eps": 1}}), "epsilon"),
    "a share above one": (lambda: fs.measure(problem(), "margin", options={"margin": {"epsilon": 2}}), r"\(0, 1\]"),
    "a precision as text": (lambda: fs.measure(problem(), precision="1%"), "relative standard error"),  # type: ignore[arg-type]
    "a budget in words": (lambda: fs.measure(problem(), budget="ten minutes"), '"90s"'),
    "a memory in words": (lambda: fs.measure(problem(), memory="lots"), "8GiB"),
    "another curvature": (lambda: fs.measure(problem(), curvature="ggn"), "gauss_newton"),
    "a problem to compare": (lambda: fs.compare(problem(), (X, Y)), r"fs\.compare\(\{"),  # type: ignore[arg-type]
    "files to compare": (lambda: fs.compare({"a": "a.pt", "b": "b.pt"}, (X, Y)), "Build the module"),  # type: ignore[dict-item]
    "a set of networks": (lambda: fs.compare({net(), net()}, (X, Y)), "list or dictionary"),  # type: ignore[arg-type]
    "networks without data": (lambda: fs.compare([net(), net()]), r"data=\(x, y\)"),
    "a value that was not measured": (lambda: fs.measure(problem(), "margin")["rho_sum"], "was not asked for"),
    "layers that were not measured": (lambda: fs.measure(problem(), "margin").layer("kappa_trace"), "not asked for"),
    "a file of an unknown kind": (lambda: fs.measure(problem(), "margin").save("t.txt"), "ending in"),
    "a page as PDF": (lambda: fs.report(fs.measure(problem(), "margin"), "x.pdf"), r"\.html"),
    "an even grid": (lambda: fs.landscape(problem(), grid=10), "odd number"),
    "the test part without any": (lambda: fs.landscape(problem(), part="test", grid=3), "test"),
    "more eigenvalues than weights": (lambda: fs.eigenpairs(problem(), top=1000), "between 1 and 43"),
    "no eigenvalue": (lambda: fs.eigenpairs(problem(), top=0), "largest 0 and the smallest 0"),
    "a width in pixels": (lambda: fs.landscape(problem(), grid=3).save("x.pdf", width=330), "inches"),
    "a way in path space": (lambda: fs.landscape(problem(), space="psi", directions=net()), 'space="weights"'),
    "a layer by another name": (lambda: fs.eigenpairs(problem(), layer="fc1"), "Known: 0, 0.bias"),
    "a symmetry by another name": (lambda: fs.audit(problem(), ["margin"], by="units"), "Did you mean unit"),
    "factors the wrong way round": (lambda: fs.rescale(net(), X, low=5, high=0.2), "low ≤ high"),
    "another matrix": (lambda: fs.diagonal(problem(), "fisher"), "empirical_fisher"),
    "a study by another name": (lambda: fs.study("petzka-fig1"), "petzka2019-fig1"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_it_is_refused_with_what_to_do(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(FlatscopeError, match=said):
        call()


REMARKED: dict[str, tuple[Callable[[], Any], str]] = {
    "half of the test are training samples": (lambda: problem(test=(X[:20], Y[:20])), "20 of 20 test samples"),
    "a test set of one class": (lambda: problem(test=(X[Y == 0] + 1, Y[Y == 0])), "all test samples are of one class"),
    "inputs that are all the same": (lambda: problem((torch.zeros(40, 4), Y)), "all training inputs are the same"),
    "training samples of one class": (lambda: problem((X, Y * 0)), "all training samples are of one class"),
    "all weights frozen": (lambda: problem(model=net().requires_grad_(False)), "no weight requires a gradient"),
    "probabilities": (lambda: problem(model=Ending(lambda o: o.softmax(1))), "takes logits"),
    "test is training": (lambda: problem(test=(X, Y)), "nothing is held out"),
}


@pytest.mark.filterwarnings("ignore:the model's outputs")
@pytest.mark.parametrize(("make", "said"), REMARKED.values(), ids=REMARKED.keys())
def test_what_is_allowed_and_hardly_meant_is_said(make: Callable[[], fs.Problem], said: str) -> None:
    assert any(said in remark for remark in make().remarks)


def test_few_equal_rows_are_no_remark() -> None:
    """Tables repeat rows: one in forty says nothing."""
    test = torch.cat([X[:1], torch.randn(39, 4)]), Y
    assert problem(test=test).remarks == ()


def test_of_many_samples_the_first_are_looked_at() -> None:
    x, y = torch.randn(5000, 4, generator=torch.Generator().manual_seed(2)), torch.arange(5000) % 3
    assert problem((x, y), test=(x[:100] + 1, y[:100])).remarks == ()
    assert any("of 100 test samples" in remark for remark in problem((x, y), test=(x[:100], y[:100])).remarks)


def test_options_of_what_is_not_measured_are_said_to_have_no_effect() -> None:
    table = fs.measure(problem(), "margin", options={"sharpness": {"steps": 3}})
    assert "options of sharpness have no effect: it was not asked for" in table.meta["remarks"]
    assert "remarks" not in fs.measure(problem(), "parameter_count").meta


COMMANDS = {
    "a folder without data": (["measure", "--model", "mlp", "--data", "hf:."], "save_to_disk"),
    "a column without its role": (
        ["measure", "--model", "mlp", "--data", "hf:x.csv", "--column", "label"],
        "label=NAME",
    ),
    "columns of digits": (["measure", "--model", "mlp", "--data", "digits", "--column", "label=y"], "data of a hub"),
    "data that are not there": (["measure", "--model", "mlp", "--data", "nothing.npz"], "nothing.npz"),
    "data of another name": (["measure", "--model", "mlp", "--data", "digit"], "Did you mean digits"),
    "a model of another name": (["measure", "--model", "mpl", "--data", "digits"], "Did you mean mlp"),
    "a model's file alone": (["measure", "--model", "m.py", "--data", "digits"], "file.py:factory"),
    "a bound as a measure": (["measure", "--model", "mlp", "--data", "digits", "-m", "pac_bayes"], "--bound pac_bayes"),
    "a folder that is none": (["measure", "--model", "hf:./none", "--data", "digits"], "no such folder"),
    "one checkpoint": (["compare", "a.pt", "--model", "mlp", "--data", "digits"], "at least two"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "said"), COMMANDS.values(), ids=COMMANDS.keys())
def test_a_wrong_command_ends_in_one_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words, env={"COLUMNS": "400"})
    assert result.exit_code != 0
    assert said in result.output + str(result.exception)
    assert isinstance(result.exception, FlatscopeError | SystemExit)
