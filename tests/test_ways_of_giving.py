"""What can be given in ways that are easily refused by mistake, and words for what cannot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pandas
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import flatscope as fs
from flatscope.errors import NotApplicable
from flatscope.registry import declarations

INPUTS = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(12) % 3


def words(length: int) -> tuple[Tensor, Tensor]:
    """Four texts of so many words, with their classes."""
    return torch.randint(1, 9, (4, length), generator=torch.Generator().manual_seed(length)), torch.arange(4) % 3


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.out = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.table(input_ids).mean(1)))


NAMES = ["hessian_trace", "gradient_noise", "fisher_rao_norm", "rho_sum", "psi_trace", "hessian_max_eigenvalue"]


def test_batches_of_different_length_may_be_pairs() -> None:
    """As pairs, as dictionaries, and by hand: the mean over samples of one gradient and one Hessian each."""
    batches = [words(5), words(7), words(4)]
    as_pairs = fs.Problem(Bag(), train=batches, test=[words(6)])
    as_dictionaries = fs.Problem(Bag(), train=[{"input_ids": x, "labels": y} for x, y in batches])
    pairs, dictionaries = (fs.measure(problem, NAMES, precision=0) for problem in (as_pairs, as_dictionaries))
    for name in NAMES:
        assert pairs[name] == pytest.approx(dictionaries[name], rel=1e-9), name
    model = Bag().double()
    params = {name: value.detach() for name, value in model.named_parameters()}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        outputs = [torch.func.functional_call(model, weights, (x,)) for x, _ in batches]
        return functional.cross_entropy(torch.cat(outputs), torch.cat([y for _, y in batches]))

    blocks = torch.func.hessian(loss)(params)
    trace = sum(float(blocks[name][name].reshape(v.numel(), v.numel()).trace()) for name, v in params.items())
    assert pairs["hessian_trace"] == pytest.approx(trace, rel=1e-5)


class Copying(nn.Module):
    """Reads a text, and says it again token by token from what it has said so far."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table, self.out = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        return self.out(self.table(input_ids).mean(1, keepdim=True) + self.table(decoder_input_ids))


def test_an_encoder_and_decoder_may_learn_to_copy() -> None:
    text, _ = words(6)
    said = functional.pad(text[:, :-1], (1, 0))
    train = {"input_ids": text, "decoder_input_ids": said, "labels": text}
    assert fs.measure(fs.Problem(Copying(), train, loss="next_token"), "gradient_norm")
    with pytest.raises(fs.InputError, match="tokens of the inputs themselves"):
        fs.Problem(Copying(), {**train, "decoder_input_ids": text}, loss="next_token")


def test_a_batch_of_graphs_is_refused_with_what_to_do() -> None:
    batch = SimpleNamespace(x=INPUTS, edge_index=torch.zeros(2, 3), y=LABELS)
    with pytest.raises(fs.InputError, match=r"no row of its own.*to_dense_adj"):
        fs.Problem(nn.Linear(4, 3), train=[batch])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", [nn.Identity(), nn.LayerNorm(4)])  # nothing else, and something in floating point
def test_quantised_weights_are_refused_by_their_name(first: nn.Module) -> None:
    model = nn.Sequential(first, nn.Linear(4, 3)).eval()
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    with pytest.raises(fs.InputError, match=r"weights are quantised\. Pass the float model"):
        fs.Problem(quantised, train=(INPUTS, LABELS))


class Spectral(nn.Module):
    """A layer on Fourier coefficients, whose complex weight is kept as a real one: a neural operator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.out = nn.Linear(1, 3), nn.Linear(3, 1)
        self.weight = nn.Parameter(0.3 * torch.randn(3, 3, 4, 2))

    def forward(self, x: Tensor) -> Tensor:
        low = torch.fft.rfft(self.up(x[:, :, None]), dim=1)[:, :4]
        mixed = torch.einsum("nki,iok->nko", low, torch.view_as_complex(self.weight))
        return self.out(torch.tanh(torch.fft.irfft(functional.pad(mixed, (0, 0, 0, 1)), n=8, dim=1))).flatten(1)


def test_a_neural_operator_is_served_with_its_complex_weight_as_a_real_one() -> None:
    """Sums over layers are refused, since its spectral layer is none; traces of all weights have all of them."""
    x, y = torch.randn(10, 8), torch.randn(10, 8)
    model = Spectral()
    table = fs.measure(fs.Problem(model, (x, y), loss="mse"), ["hessian_trace", "psi_trace", "rho_sum"], precision=0)
    params = {name: value.detach().double() for name, value in model.named_parameters()}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return (torch.func.functional_call(model, weights, (x.double(),)) - y.double()).square().sum(1).mean()

    blocks = torch.func.hessian(loss)(params)
    trace = sum(float(blocks[name][name].reshape(v.numel(), v.numel()).trace()) for name, v in params.items())
    assert table["hessian_trace"] == pytest.approx(trace, rel=1e-5)
    assert table["psi_trace"] == pytest.approx(trace, rel=1e-5)  # no unit can be rescaled
    assert "weight" in table.to_frame().set_index("measure").loc["rho_sum", "reason"]


def hinge(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.multi_margin_loss(outputs, targets, reduction="none")


def alignment(outputs: Tensor, targets: Tensor) -> Tensor:
    """CTC of 4 outputs as 4 steps in time of one symbol and a blank."""
    logs = torch.stack([outputs, -outputs], 2).log_softmax(2).transpose(0, 1)
    lengths = torch.full((len(outputs),), outputs.shape[1]), torch.ones(len(outputs), dtype=torch.int64)
    return functional.ctc_loss(logs, torch.ones_like(targets[:, None]), *lengths, 0, "none")


class Segments(nn.Module):
    """The mean over pieces of its inputs, by an operation that torch differentiates once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(2, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        pieces = torch.tanh(self.inner(x.reshape(-1, 2)))
        return self.outer(torch.segment_reduce(pieces, "mean", lengths=torch.full((len(x),), 2)))


CASES: dict[str, tuple[nn.Module, Any]] = {
    "multi_margin_loss": (nn.Linear(4, 3), hinge),
    "ctc_loss": (nn.Linear(4, 4), alignment),
    "segment_reduce": (Segments(), "cross_entropy"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_torch_cannot_differentiate_twice_is_refused_in_words(name: str) -> None:
    model, loss = CASES[name]
    problem = fs.Problem(model, (INPUTS, LABELS), loss=loss)
    table = fs.measure(problem, ["gradient_norm", "hessian_trace", "hessian_max_eigenvalue"])
    assert table["gradient_norm"] > 0
    refused = table.to_frame().set_index("measure")["reason"][["hessian_trace", "hessian_max_eigenvalue"]]
    expected = f"operations that can be differentiated twice, got {name}"
    assert refused.str.contains(expected).all(), refused.tolist()
    for call in (lambda: fs.eigenpairs(problem, top=1), lambda: fs.spectral_density(problem, draws=2)):
        with pytest.raises(NotApplicable, match=expected):
            call()


class Line(nn.Module):
    """A network of one real number, given alone or as a row of one."""

    def __init__(self, bend: nn.Module, outputs: int, alone: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.bend, self.last, self.alone = nn.Linear(1, 5), bend, nn.Linear(5, outputs), alone

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.bend(self.first(x[:, None] if self.alone else x)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bend", [nn.ReLU(), nn.Tanh()])
@pytest.mark.parametrize(("outputs", "loss"), [(3, "cross_entropy"), (1, "mse")])
def test_samples_that_are_single_numbers_have_the_rows_of_rows_of_one(bend: nn.Module, outputs: int, loss: str) -> None:
    y = LABELS if outputs == 3 else INPUTS[:, 1:2]
    given = {True: INPUTS[:, 0], False: INPUTS[:, :1]}
    models = {alone: Line(bend, outputs, alone).eval() for alone in given}
    names = [d.name for d in declarations().values() if d.kind == "measure" and d.cost != "long"]
    frames = [
        fs.measure(fs.Problem(models[alone], train=(x, y), loss=loss, dtype=torch.float64), names).to_frame()
        for alone, x in given.items()
    ]
    one, other = (frame.set_index(["measure", "layer", "unit", "sample"]) for frame in frames)
    assert not one["reason"].str.contains("failed").any(), one["reason"][one["reason"].str.contains("failed")]
    pandas.testing.assert_series_equal(one["value"], other["value"], rtol=1e-6)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_buffers_in_a_layout_that_torch_cannot_copy_are_refused_with_what_to_do() -> None:
    model = nn.Linear(4, 3)
    model.register_buffer("links", torch.eye(3).to_sparse_csr())
    with pytest.raises(fs.InputError, match=r"model, links: .*sparse_csr.*Use \.to_sparse_coo\(\) for it"):
        fs.Problem(model, train=(INPUTS, LABELS))
