"""Public operators, eigenpairs and spectral densities against dense matrices, SciPy and exact histograms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from networks import BUILDERS, attention, mlp, smooth
from references import dense
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn

import flatscope as fs
from flatscope.curvature import spectrum
from flatscope.curvature.operators import Hessian
from flatscope.curvature.symmetric_operator import SymmetricOperator
from flatscope.errors import InputError, NotApplicable, NumericalWarning, UnknownNameError
from flatscope.limits import STANDARD, MemoryShare
from flatscope.reports.items import read_item
from flatscope.reports.page import save_figures


@pytest.fixture
def iterated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny matrices take the way of large ones."""
    monkeypatch.setitem(vars(STANDARD), "dense_matrix", 0)


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
@pytest.mark.usefixtures("iterated")
def test_eigenpairs_are_those_of_the_dense_matrix(build: Any) -> None:
    reference = dense(build.__name__, build)
    values, vectors = torch.linalg.eigh(reference.hessian)
    pairs = fs.eigenpairs(reference.tiny.problem(), top=2, bottom=1, tolerance=1e-6)
    expected = torch.stack([values[-1], values[-2], values[0]])
    width = float(values[-1] - values[0])
    torch.testing.assert_close(pairs.values, expected, rtol=0, atol=1e-6 * width)
    assert bool(pairs.converged.all())
    operator = fs.hessian(reference.tiny.problem())
    for value, residual, vector in zip(pairs.values, pairs.residuals, pairs.vectors, strict=True):
        flat = operator.flatten(vector).double()
        assert float(flat.norm()) == pytest.approx(1.0, rel=1e-9)
        left = float((reference.hessian @ flat - value * flat).norm())
        assert left == pytest.approx(float(residual), abs=1e-9 * width)
    if float(values[-1] - values[-2]) > 1e-3 * width:
        assert abs(float(operator.flatten(pairs.vectors[0]).double() @ vectors[:, -1])) == pytest.approx(1, abs=1e-6)


@pytest.mark.usefixtures("iterated")
def test_eigenpairs_agree_with_arpack_through_the_scipy_form() -> None:
    problem = smooth().problem()
    for make, curvature in ((fs.hessian, "hessian"), (fs.gauss_newton, "gauss_newton")):
        expected = np.sort(eigsh(make(problem).to_scipy(), k=3, which="LA", return_eigenvectors=False))[::-1]
        found = fs.eigenpairs(problem, 3, curvature=curvature, tolerance=1e-6)
        np.testing.assert_allclose(found.values.numpy(), expected, rtol=1e-5)


def test_operators_of_a_layer_and_the_way_between_vectors_and_parameters() -> None:
    problem = mlp().problem()
    whole, block = fs.hessian(problem), fs.hessian(problem, layer="2")
    assert block.names == ("2.weight",)
    place = whole.layout["2.weight"]
    assert place.stop - place.start == block.shape[0]
    identity = torch.eye(whole.size, dtype=torch.float64)
    torch.testing.assert_close(
        (whole @ identity)[place, place], block @ torch.eye(block.size, dtype=torch.float64), rtol=1e-10, atol=1e-14
    )
    vector = torch.arange(whole.size, dtype=torch.float64)
    parts = whole.unflatten(vector)
    assert {name: part.shape for name, part in parts.items()} == {
        name: value.shape for name, value in problem.params.items()
    }
    assert torch.equal(whole.flatten(dict(reversed(parts.items()))), vector)
    torch.testing.assert_close(fs.gauss_newton(problem, "2") @ vector[place], block @ vector[place])


def test_what_is_wrong_is_refused() -> None:
    problem = mlp().problem()
    with pytest.raises(UnknownNameError, match="layer"):
        fs.hessian(problem, layer="two")
    with pytest.raises(UnknownNameError, match="curvature"):
        fs.eigenpairs(problem, curvature="fisher")
    with pytest.raises(InputError, match="between 1 and"):
        fs.eigenpairs(problem, top=0)
    with pytest.raises(InputError, match="tolerance"):
        fs.eigenpairs(problem, tolerance=0.0)
    with pytest.raises(InputError, match="at least 1"):
        fs.spectral_density(problem, draws=0)
    with pytest.raises(InputError, match="a tensor of vectors"):
        fs.hessian(problem) @ np.ones(3)  # type: ignore[operator]
    with pytest.raises(InputError, match="none for"):
        fs.hessian(problem).flatten({})
    with pytest.raises(InputError, match="at least two draws"):
        fs.spectral_density(problem, draws=1).band()


@pytest.mark.usefixtures("iterated")
def test_too_few_products_say_so() -> None:
    with pytest.warns(NumericalWarning, match="not converged"):
        pairs = fs.eigenpairs(mlp().problem(), top=2, tolerance=1e-9, most_products=3)
    assert not bool(pairs.converged.all())
    assert "not converged" in repr(pairs)


@pytest.mark.parametrize("build", [mlp, attention], ids=lambda build: build.__name__)
def test_kept_graphs_change_nothing_and_are_dropped(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = build().problem(batch_size=4)
    generator = torch.Generator().manual_seed(0)
    kept, streamed = Hessian(fs.Context(problem)), Hessian(fs.Context(problem))
    kept._batch_size = streamed._batch_size = 3
    vectors = torch.randn(4, kept.size, generator=generator, dtype=torch.float64)
    first = [kept @ vector for vector in vectors]
    assert len(kept._kept) > 1
    monkeypatch.setitem(vars(STANDARD), "kept_memory", MemoryShare(0.0, 0.0, 0))
    second = [streamed @ vector for vector in vectors]
    assert streamed._kept == []
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(kept @ vectors.T, torch.stack(first, dim=1), rtol=1e-9, atol=1e-13)
    kept.release()
    assert kept._kept == []


def test_a_loader_that_shuffles_gives_the_same_products() -> None:
    tiny = mlp()
    data = torch.utils.data.TensorDataset(tiny.x, tiny.y)
    generator = torch.Generator().manual_seed(0)
    loader = torch.utils.data.DataLoader(data, batch_size=3, shuffle=True, generator=generator)
    shuffled, plain = fs.hessian(fs.Problem(tiny.model, train=loader)), fs.hessian(tiny.problem())
    shuffled._batch_size = 3
    vector = torch.ones(plain.size, dtype=torch.float64)
    for _ in range(3):
        torch.testing.assert_close(shuffled @ vector, plain @ vector, rtol=1e-10, atol=1e-14)


def test_a_product_that_does_not_fit_is_tried_with_smaller_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = mlp().problem()
    operator, plain = fs.hessian(problem), fs.hessian(problem)
    original, sizes = Hessian._product_of, []

    def scarce(self: Hessian, batch: Any) -> Any:
        sizes.append(len(batch[1]))
        if len(batch[1]) > 2:
            raise torch.OutOfMemoryError("no room")
        return original(self, batch)

    vector = torch.ones(plain.size, dtype=torch.float64)
    expected = plain @ vector
    monkeypatch.setattr(Hessian, "_product_of", scarce)
    torch.testing.assert_close(operator @ vector, expected, rtol=1e-10, atol=1e-14)
    assert sizes[0] > 2 >= sizes[-1]


@pytest.mark.long
def test_density_against_the_exact_histogram() -> None:
    """Blurred alike, the estimate meets the true density within its band, on a spectrum with a cloud and outliers."""
    reference = dense("smooth", smooth)
    true = torch.linalg.eigvalsh(reference.hessian)
    density = fs.spectral_density(reference.tiny.problem(), draws=100, steps=40)
    width = float(true.max() - true.min()) / 40
    grid = torch.linspace(float(true.min()) - 4 * width, float(true.max()) + 4 * width, 121, dtype=torch.float64)
    bumps = torch.exp(-0.5 * ((grid[:, None] - true[None, :]) / width).square()) / (width * (2 * torch.pi) ** 0.5)
    expected = bumps.mean(1)
    low, high = density.band(grid, width, confidence=0.999)
    covered = (low <= expected + 1e-12) & (expected <= high + 1e-12)
    assert float(covered.double().mean()) > 0.95
    assert float((density.smoothed(grid, width) - expected).abs().max()) < 0.15 * float(expected.max())
    assert float(torch.trapezoid(density.smoothed(grid, width), grid)) == pytest.approx(1.0, abs=2e-3)
    trace, error = density.trace
    assert abs(trace - float(true.sum())) < 4 * error
    for place in (-0.3 * width, 0.0, 2 * width):
        share = density.share_below(place)
        assert share.low <= float((true < place).double().mean()) <= share.high
    assert float(density.outliers[0]) == pytest.approx(float(true[-1]), rel=1e-3)


def test_the_error_of_the_trace_covers() -> None:
    reference = dense("mlp", mlp)
    true, zs, problem = float(reference.hessian.trace()), [], reference.tiny.problem()
    for seed in range(40):
        value, error = fs.spectral_density(problem, draws=15, steps=2, seed=seed).trace
        zs.append((value - true) / error)
    assert np.mean(np.abs(zs) <= 2.14) >= 0.85  # Student's quantile for 15 draws
    assert abs(np.mean(zs)) < 0.6


@pytest.mark.long
def test_the_error_of_the_trace_covers_from_few_draws_where_few_eigenvalues_dominate() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    inputs = torch.randn(20, 6, dtype=torch.float64) * torch.tensor([5.0, 1, 1, 1, 1, 1], dtype=torch.float64)
    problem = fs.Problem(model, (inputs, torch.arange(20) % 3))
    true = fs.measure(problem, "hessian_trace", precision=0)["hessian_trace"]
    found = [fs.spectral_density(problem, draws=3, steps=12, seed=seed).trace for seed in range(100)]
    apart = np.array([(value - true) / error for value, error in found])
    assert np.mean(np.abs(apart) <= 1.96) >= 0.9
    assert np.mean(np.abs(apart)) > 0.4  # the error is not too large either


# Shares of the spectrum


class Written(SymmetricOperator):
    """A matrix that is written out."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__(len(matrix))
        self.matrix = matrix

    def __matmul__(self, vectors: Tensor) -> Tensor:
        return self.matrix @ vectors


def density_of(matrix: Tensor, draws: int, steps: int, seed: int = 0, moved: float = 1e-13) -> fs.SpectralDensity:
    generator = torch.Generator().manual_seed(seed)
    found = spectrum.lanczos_quadrature(Written(matrix), generator, steps=steps, draws=draws)
    draw = torch.cat([torch.full((len(each.nodes),), n) for n, each in enumerate(found)])
    rule = [torch.cat([getattr(each, name) for each in found]) for name in ("nodes", "weights", "residuals")]
    return fs.SpectralDensity(draw, *rule, len(matrix), "", "hessian", {"rounding": moved})


def near_zero_cloud(size: int, positive: float) -> Tensor:
    """A Hessian near a minimum: outliers, and a cloud of which few are negative and most a hair right of zero."""
    generator = torch.Generator().manual_seed(1)
    values = 1e-6 * torch.rand(size, generator=generator, dtype=torch.float64)
    values[int(positive * size) :] *= -1e3
    values[:10] = torch.linspace(0.2, 2, 10, dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    return basis @ torch.diag(values) @ basis.T


@pytest.mark.parametrize("steps", [12, 40])
@pytest.mark.parametrize("draws", [1, 10])
def test_shares_of_a_cloud_near_zero_lie_in_their_intervals(draws: int, steps: int) -> None:
    """Ritz values a hair left of zero are no negative eigenvalues, however many draws find them there."""
    matrix = near_zero_cloud(300, 0.91)
    true, missed = torch.linalg.eigvalsh(matrix), 0
    for seed in range(20):
        density = density_of(matrix, draws, steps, seed)
        for share, expected in (
            (density.negative(), (true < -density.radius).double().mean()),
            (density.near_zero(), (true.abs() <= density.radius).double().mean()),
            (density.share_below(0.0), (true < 0).double().mean()),
        ):
            assert 0 <= share.low <= share.value <= share.high <= 1
            missed += int(not share.low <= float(expected) <= share.high)
    assert missed <= 6  # of 60, at 95 %
    assert density.share_below(0.0).high - density.share_below(0.0).low < 0.2 or steps == 12


def test_a_spectrum_that_one_start_knows_whole_leaves_only_the_draws_open() -> None:
    basis = torch.linalg.qr(torch.randn(400, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    values = torch.tensor([-1.0, 0.0, 2.0, 3.0], dtype=torch.float64).repeat_interleave(100)
    found = [density_of(basis @ torch.diag(values) @ basis.T, 5, 30, seed).negative() for seed in range(100)]
    assert all(share.high - share.low < 0.09 for share in found)  # of 5 · 402 / 2 as good as independent eigenvalues
    covered = sum(share.low <= 0.25 <= share.high for share in found)
    assert 88 <= covered <= 100
    assert found[0].low > 0.2


def test_what_rounding_may_have_moved_is_left_open() -> None:
    matrix = torch.diag(torch.cat([torch.full((50,), -1e-7), torch.ones(50)])).double()
    assert density_of(matrix, 4, 20).share_below(0.0).low > 0.3
    assert density_of(matrix, 4, 20, moved=1e-5).share_below(0.0).low < 0.01
    assert density_of(matrix, 4, 20, moved=1e-5).share_below(0.0).high > 0.4


def test_one_draw_gives_intervals_and_an_error() -> None:
    problem = mlp().problem()
    density = fs.spectral_density(problem, draws=1)
    assert 0 < density.trace[1] < float("inf")
    assert density.negative().high > density.negative().low
    assert "nan" not in str(density.cells()).lower()
    assert "below" in str(density.cells())
    with pytest.raises(InputError, match="from 0 up"):
        density.negative(-1.0)


def test_second_derivatives_that_are_missing_are_refused_with_the_reason() -> None:
    def margins(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.multi_margin_loss(outputs, targets, reduction="none")

    data = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    problem = fs.Problem(nn.Linear(4, 3, bias=False), train=data, loss=margins)
    for look in (
        lambda: fs.hessian(problem) @ torch.ones(12),
        lambda: fs.eigenpairs(problem, top=1),
        lambda: fs.spectral_density(problem, draws=1),
    ):
        with pytest.raises(NotApplicable, match="differentiated twice"):
            look()


def test_products_that_are_no_numbers_are_refused() -> None:
    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.abs().pow(1.5)

    problem = fs.Problem(Steep(), train=(torch.ones(3, 2), torch.tensor([0, 1, 2])))
    for look in (lambda: fs.eigenpairs(problem, top=1), lambda: fs.spectral_density(problem, draws=1)):
        with pytest.raises(NotApplicable, match="NaN or infinity"):
            look()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "bool", "float16", "float32", "float64", "longdouble"])
def test_the_scipy_form_takes_vectors_of_every_kind(dtype: str) -> None:
    problem = mlp().problem()
    operator = fs.hessian(problem)
    array = (np.arange(operator.size) % 3).astype(dtype)
    expected = operator @ torch.from_numpy(array.astype(np.float64))
    np.testing.assert_allclose(operator.to_scipy().matvec(array), expected.numpy(), rtol=1e-12)
    turned = operator.to_scipy().matvec(1j * array + array)
    np.testing.assert_allclose(turned, (1 + 1j) * expected.numpy(), rtol=1e-12)


def test_products_take_whole_numbers_and_refuse_complex_ones() -> None:
    operator = fs.hessian(mlp().problem())
    ones = torch.ones(operator.size, dtype=torch.int8)
    torch.testing.assert_close(operator @ ones, operator @ ones.double())
    with pytest.raises(InputError, match="real vectors"):
        operator @ ones.to(torch.complex64)


def test_seeds_and_curvatures() -> None:
    problem = smooth().problem()
    a, b, c = (fs.spectral_density(problem, draws=2, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(a.nodes, b.nodes)
    assert not torch.equal(a.nodes, c.nodes)
    assert fs.spectral_density(problem, draws=2, curvature="gauss_newton").range[0] > -1e-10
    assert fs.spectral_density(problem, draws=2, layer="0").size == problem.params["0.weight"].numel()


@pytest.mark.parametrize("ending", [".npz", ".parquet", ".json"])
def test_files_give_spectra_back(ending: str, tmp_path: Path) -> None:
    problem = mlp().problem()
    pairs, density = fs.eigenpairs(problem, top=3, bottom=1), fs.spectral_density(problem, draws=2)
    pairs.save(tmp_path / f"pairs{ending}")
    again = fs.Eigenpairs.load(tmp_path / f"pairs{ending}")
    assert again == pairs
    if ending == ".npz":
        assert all(torch.equal(again.vectors[1][name], value) for name, value in pairs.vectors[1].items())
    density.save(tmp_path / f"net-spectrum{ending}")
    assert fs.SpectralDensity.load(tmp_path / f"net-spectrum{ending}") == density
    [(name, read)] = read_item(str(tmp_path / f"net-spectrum{ending}"))
    assert name == "net"
    assert read == density
    assert isinstance(read_item(str(tmp_path / f"pairs{ending}"))[0][1], fs.Eigenpairs)


def test_pictures_and_the_page(tmp_path: Path) -> None:
    problem = smooth().problem()
    pairs, density = fs.eigenpairs(problem, top=3), fs.spectral_density(problem, draws=3)
    assert "<svg" in density._repr_html_()
    assert "<table" in pairs._repr_html_()
    density.save(tmp_path / "d.png")
    pairs.save(tmp_path / "p.svg")
    page = fs.report({"net": [density, pairs, fs.measure(problem, "hessian_trace")]}, tmp_path / "r.html").read_text()
    assert "density of eigenvalues" in page
    assert "95 % band over draws" in page
    saved = save_figures({"net": [density, pairs]}, tmp_path / "figures")
    assert len(saved) == 2


def test_a_network_without_curvature() -> None:
    """All eigenvalues zero: nothing to divide by."""
    problem = fs.Problem(nn.Linear(2, 1, bias=False), train=(torch.zeros(3, 2), torch.zeros(3)), loss="mse")
    density = fs.spectral_density(problem, draws=2)
    assert density.range == (0.0, 0.0)
    assert density.smoothed().isfinite().all()
    assert fs.eigenpairs(problem, top=1).values.tolist() == [0.0]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from flatscope.cli import main

    def run(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["flatscope", "spectrum", "--data", "digits", "--train-size", "60", *words])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code in (0, None), capsys.readouterr().err
        return capsys.readouterr().out

    model = ["--model", "mlp", "--model-option", "widths=[64,8,10]", "--flatten"]
    page, pairs = tmp_path / "r.html", tmp_path / "pairs.npz"
    words = [*model, "--top", "2", "--bottom", "1", "--draws", "2", "--steps", "10"]
    text = run(*words, "--out", str(page), "--pairs-out", str(pairs))
    assert "eigenvalue" in text
    assert "trace" in text
    told = page.read_text()
    assert "density of eigenvalues" in told
    assert "network 1" not in told, "one network under two names"
    assert '<p class="conclusion">network, eigenvalues: Largest eigenvalue of the Hessian' in told
    found = json.loads(run(*words, "--json"))
    values = [row["value"] for row in found["eigenpairs"]["rows"]]
    assert values == pytest.approx(fs.Eigenpairs.load(pairs).values.tolist(), rel=1e-6)
    assert values == sorted(values, reverse=True)
    assert len(found["density"]["rows"]) == 20


def test_directions_downhill_say_where_to_look_whether_training_goes_on() -> None:
    """Of weights that were never trained: the loss curves down along some of their directions."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).eval()
    problem = fs.Problem(model, (torch.randn(60, 4), torch.arange(60) % 3))
    density = fs.spectral_density(problem, draws=3)
    assert density.negative().low > 0
    assert "fs.measure" in density.headline.splitlines()[0]
    assert fs.measure(problem, "rho_sum").headline.startswith(("No minimum", "Not trained"))
