"""WBIC and the local learning coefficient: closed forms of quadratic losses, honest errors, remarks, symmetries."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import checks
import pytest
import torch
from networks import Tiny, attending, batchnorm_conv, lenet_like, mlp, regression
from test_pac_bayes import least_squares
from torch import nn

import flatscope as fs
from flatscope.errors import InputError
from flatscope.measures import posterior_chains
from flatscope.measures.posterior_chains import PosteriorChains
from flatscope.registry import declarations

NAMES = ["local_learning_coefficient", "wbic"]


def rows(problem: fs.Problem, seed: int = 0, **options: Any) -> Any:
    return fs.measure(problem, NAMES, seed, dict.fromkeys(NAMES, options)).to_frame().set_index("measure")


def at_minimum(n: int = 40, d: int = 5) -> tuple[fs.Problem, torch.Tensor]:
    """Least squares at its minimum, and the eigenvalues of its Hessian."""
    problem, _ = least_squares(n, d)
    [(x, y)] = list(problem.train.batches())
    model = nn.Linear(d, 1, bias=False).double()
    model.weight.data = torch.linalg.lstsq(x, y).solution.T.contiguous()
    return fs.Problem(model, (x, y), loss="mse"), torch.linalg.eigvalsh(2 * x.T @ x / n)


def in_closed_form(n: int, eigenvalues: torch.Tensor, gamma: float) -> float:
    stiffness = n / math.log(n) * eigenvalues
    return float((stiffness / (stiffness + gamma)).sum()) / 2


@pytest.mark.parametrize(("gamma", "length"), [(0.0, 0.5), (10.0, 0.5), (100.0, 1.5)])
def test_a_quadratic_loss_has_the_closed_form(gamma: float, length: float) -> None:
    """Half the number of parameters without localisation, whatever the length of the steps."""
    problem, eigenvalues = at_minimum()
    exact = in_closed_form(40, eigenvalues, gamma)
    found = rows(problem, gamma=gamma, length=length, chains=32)
    value, stderr = found.loc[NAMES[0], ["value", "stderr"]]
    assert abs(value - exact) < 3.5 * stderr
    assert stderr < 0.04 * exact
    loss = fs.Context(problem).scores().loss
    assert found.loc["wbic", "value"] == pytest.approx(40 * loss + math.log(40) * value, rel=1e-9)
    assert found.loc["wbic", "stderr"] == pytest.approx(math.log(40) * stderr, rel=1e-9)
    if gamma == 0:
        assert exact == pytest.approx(2.5)
        for wrong in (2.25, 2.75):  # one half of a parameter would be noticed
            assert abs(value - wrong) > 3.5 * stderr


def test_the_standard_error_of_the_chains_covers_the_truth() -> None:
    """Sixteen times eight chains, which run at once."""
    problem, eigenvalues = at_minimum()
    exact, zs = in_closed_form(40, eigenvalues, 10.0), []
    settings = {**declarations()[NAMES[0]].options, "gamma": 10.0, "steps": 200, "chains": 128}
    found = posterior_chains.sample_chains(fs.Context(problem), **settings)
    for halves in found.halves.split(8):
        own = replace(found, halves=halves)
        zs.append((own.learning_coefficient - exact) / own.stderr)
    assert len(zs) == 16
    assert sum(abs(z) <= 2.4 for z in zs) >= 13  # seven degrees of freedom
    assert 0.4 < float(torch.tensor(zs).std()) < 1.8


def closed_form_of(n: int) -> tuple[fs.Problem, float]:
    """Five weights of least squares at their minimum, and the value at the default γ."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + 0.5 * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(5, 1, bias=False).double()
    model.weight.data = torch.linalg.lstsq(x, y).solution.T.contiguous()
    return fs.Problem(model, (x, y), loss="mse"), in_closed_form(n, torch.linalg.eigvalsh(2 * x.T @ x / n), 100.0)


@pytest.mark.parametrize("n", [60_000])
def test_the_noise_of_batches_does_not_heat_the_chains(n: int) -> None:
    """With plain gradients of batches of 64 this is 16 times too large at 60,000 samples."""
    problem, exact = closed_form_of(n)
    found = rows(problem)
    value, stderr, reason = found.loc[NAMES[0], ["value", "stderr", "reason"]]
    assert abs(value - exact) < 3.5 * stderr
    assert stderr < 0.05 * exact
    assert "batches of" in reason
    assert found.loc["wbic", "stderr"] == pytest.approx(math.log(n) * stderr, rel=1e-9)


class Product(nn.Module):
    """f(x) = abx: the loss around a = b = 0 is that of a²b², which no quadratic resembles."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a * self.b * x


class RankOne(nn.Module):
    """f(x) = bacᵀx with three inputs and two outputs, at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 1, bias=False), nn.Linear(1, 2, bias=False)
        for parameter in self.parameters():
            parameter.data.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def singular(build: Callable[[], nn.Module], n: int, inputs: int, outputs: int) -> tuple[fs.Problem, float]:
    """Targets that go with no input, inputs of covariance I: the loss rises by |a|²|b|², and the rest is one integral.

    Over b, given r = |a|: its density is normal of precision 2nβr² + γ in each of its coordinates.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, inputs, generator=generator, dtype=torch.float64)
    x = torch.linalg.solve(torch.linalg.cholesky(x.T @ x / n), x.T).T
    y = torch.randn(n, outputs, generator=generator, dtype=torch.float64)
    y = y - x @ (x.T @ y) / n
    r, stiffness = torch.linspace(0, 1.2, 200_001, dtype=torch.float64), n / math.log(n)
    precision = 2 * stiffness * r**2 + 100
    density = r ** (inputs - 1) * (-50 * r**2).exp() * precision ** (-outputs / 2)
    rise = outputs * stiffness * r**2 / precision
    return fs.Problem(build().double(), (x, y), loss="mse"), float((density * rise).sum() / density.sum())


@pytest.mark.long
@pytest.mark.parametrize(("build", "inputs", "outputs"), [(Product, 1, 1), (RankOne, 3, 2)])
def test_singular_minima_have_the_value_of_the_integral(build: Any, inputs: int, outputs: int) -> None:
    """At zero the curvature vanishes, and the chains meet far more on their way than there is where they begin."""
    problem, exact = singular(build, 10_000, inputs, outputs)
    value, stderr = rows(problem).loc[NAMES[0], ["value", "stderr"]]
    assert abs(value - exact) < 3.5 * stderr
    assert stderr < 0.35 * exact


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "n", "seeds"),
    [
        *(("regular", n, 12) for n in (400, 2_000, 10_000, 60_000)),
        *(("rank", n, 6) for n in (400, 60_000)),
        *(("product", n, 6) for n in (400, 10_000)),
    ],
)
def test_the_standard_error_holds_over_seeds(kind: str, n: int, seeds: int) -> None:
    makers: dict[str, Callable[[], tuple[fs.Problem, float]]] = {
        "regular": lambda: closed_form_of(n),
        "product": lambda: singular(Product, n, 1, 1),
        "rank": lambda: singular(RankOne, n, 3, 2),
    }
    problem, exact = makers[kind]()
    found = [rows(problem, seed).loc[NAMES[0], ["value", "stderr"]] for seed in range(seeds)]
    zs = [float((value - exact) / stderr) for value, stderr in found]
    assert math.sqrt(sum(z * z for z in zs) / seeds) < 1.2 * (1 + 2 / math.sqrt(2 * seeds))
    assert abs(sum(zs) / seeds) < 3 / math.sqrt(seeds)


def test_batches_come_from_a_stream_and_one_by_one_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, exact = closed_form_of(1_000)
    plain = rows(problem, steps=16, chains=2).loc[NAMES[0], "value"]
    monkeypatch.setattr(posterior_chains, "can_stack_weights_and_samples", lambda ctx: False)
    assert rows(problem, steps=16, chains=2).loc[NAMES[0], "value"] == pytest.approx(plain, rel=1e-6)
    monkeypatch.setattr(posterior_chains, "samples_as_one_batch", lambda ctx: None)
    value, stderr = rows(problem, steps=100, chains=3).loc[NAMES[0], ["value", "stderr"]]
    assert abs(value - exact) < 4 * stderr


def test_precision_0_takes_all_samples() -> None:
    problem, exact = closed_form_of(400)
    row = fs.measure(problem, NAMES[0], precision=0.0).to_frame().iloc[0]
    assert "batches" not in row["reason"]
    assert abs(row["value"] - exact) < 3.5 * row["stderr"]


def test_a_weak_gamma_takes_more_steps_and_says_where_they_do_not_suffice() -> None:
    problem, exact = closed_form_of(60)
    row = rows(problem, gamma=0.5, steps=20).loc[NAMES[0]]
    assert int(row["reason"].split(" of ")[1].split()[0].replace(",", "")) > 40
    assert "remember" in rows(problem, gamma=1e-6, steps=8).loc[NAMES[0], "reason"]
    assert exact > 0


def test_flat_directions_count_nothing() -> None:
    """Three inputs that are always zero add three parameters and nothing else."""
    problem, eigenvalues = at_minimum()
    [(x, y)] = list(problem.train.batches())
    wide = nn.Linear(8, 1, bias=False).double()
    wide.weight.data = torch.cat([problem.params["weight"], torch.zeros(1, 3).double()], 1)
    padded = fs.Problem(wide, (torch.cat([x, torch.zeros(40, 3).double()], 1), y), loss="mse")
    value, stderr = rows(padded, gamma=1.0, chains=32).loc[NAMES[0], ["value", "stderr"]]
    assert abs(value - in_closed_form(40, eigenvalues, 1.0)) < 3.5 * stderr
    assert abs(value - 4.0) > 5 * stderr


@cache
def fitted(build: Callable[[], Tiny], n: int = 30) -> Tiny:
    """The network at a minimum, of the squared error on outputs of its own; made once, and so are its chains."""
    tiny = build()
    x = torch.randn(n, *tiny.x.shape[1:], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return replace(tiny, x=x, y=tiny.model(x).detach(), xt=None, yt=None, loss="mse", initial={})


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("symmetry", "build"),
    [
        ("layer_scaling", lenet_like),
        ("unit_scaling", lenet_like),
        ("batchnorm_scaling", batchnorm_conv),
        ("attention_scaling", attending),
        ("norm_scaling", attending),
        ("output_scaling", mlp),
        ("permutation", mlp),
    ],
)
def test_rescaling_moves_them_at_a_minimum(name: str, symmetry: str, build: Any) -> None:
    checks.keeps_its_symmetries(declarations()[name], fitted(build), symmetry)


def test_the_row_says_when_the_chains_are_not_to_be_trusted() -> None:
    assert "no minimum" in rows(regression().problem(), steps=80).loc["wbic", "reason"]
    assert "no minimum" not in rows(at_minimum()[0], steps=80).loc["wbic", "reason"]
    noise = 0.01 * torch.randn(8, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert PosteriorChains(1 + noise, 1.0, 8).remark() == "8 chains of 8 steps"
    assert "still drift" in PosteriorChains(1 + noise + torch.tensor([0.0, 0.1]), 1.0, 8).remark()
    assert "disagree" in PosteriorChains(1 + noise + torch.arange(8.0)[:, None], 1.0, 8).remark()


def test_the_remarks_are_rare_where_all_is_well() -> None:
    generator = torch.Generator().manual_seed(1)
    many = [
        PosteriorChains(1 + 0.1 * torch.randn(8, 2, generator=generator, dtype=torch.float64), 1.0, 8)
        for _ in range(2000)
    ]
    said = [chains.remark() != "8 chains of 8 steps" for chains in many]
    assert sum(said) <= 12  # two tests at 1 in 1,000 each


def test_wrong_options_and_too_few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({"gamma": -1.0}, {"chains": 1}, {"steps": 4}, {"length": 2.0}, {"batch": 0}):
        with pytest.raises(InputError):
            rows(mlp().problem(), **options)
    tiny = mlp()
    two = fs.measure(tiny.problem(train=(tiny.x[:2], tiny.y[:2])), "wbic").to_frame()
    assert "at least 3 samples" in two["reason"].iloc[0]
    monkeypatch.setattr(posterior_chains, "time_is_over", lambda ctx: True)
    assert "time was up" in rows(mlp().problem()).loc["wbic", "reason"]
