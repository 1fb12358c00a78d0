"""Geometric margins: closed forms, exact values against a dense scan, and the order lower ≤ exact ≤ found."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from networks import attention, lenet_like, mlp
from torch import Tensor, nn

import flatscope as fs
from flatscope.context import Context, Effort
from flatscope.limits import Limits
from flatscope.measures.geometric_margin import SURE, _pair_constants, local_linear_margin
from flatscope.measures.margin_exact import as_shallow, exact_margins
from flatscope.measures.margin_search import estimated_distances, linear_distances, nearest_changes, other_classes


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_weights(model: nn.Module, seed: int = 0) -> nn.Module:
    for number, parameter in enumerate(model.parameters()):
        parameter.data = normals(*parameter.shape, seed=100 * seed + number) / parameter[0].numel() ** 0.5
    return model.double().eval()


def hidden_layer(d: int, units: int, classes: int, seed: int = 0) -> nn.Sequential:
    return with_weights(nn.Sequential(nn.Linear(d, units), nn.ReLU(), nn.Linear(units, classes)), seed)  # type: ignore[return-value]


def labelled(model: nn.Module, x: Tensor) -> fs.Problem:
    with torch.no_grad():
        return fs.Problem(model, train=(x, model(x).argmax(1)))


def margins(problem: fs.Problem, **options: object) -> tuple[Tensor, Tensor, Tensor, bool]:
    table = fs.measure(problem, "geometric_margin", options={"geometric_margin": options})
    frame = table.to_frame()
    low, high = (torch.tensor(frame[name].to_numpy(dtype="float64")) for name in ("low", "high"))
    return table.samples("geometric_margin"), low, high, bool(frame["exact"].all())


def searched(model: nn.Module, x: Tensor, y: Tensor, restarts: int = 10) -> Tensor:
    return nearest_changes(model, x, y, restarts, torch.Generator().manual_seed(0)).distances


@pytest.mark.parametrize("classes", [2, 5])
def test_linear_models_have_the_closed_form(classes: int) -> None:
    model, x = with_weights(nn.Linear(6, classes)), normals(60, 6)
    problem = labelled(model, x)
    W, outputs = model.weight.detach(), model(x).detach()
    y = outputs.argmax(1)
    expected, nearest_is_second = [], []
    for row, label in zip(outputs, y.tolist(), strict=True):
        ratios = {j: float((row[label] - row[j]) / (W[label] - W[j]).norm()) for j in range(classes) if j != label}
        expected.append(min(ratios.values()))
        second = max((j for j in ratios), key=lambda j: float(row[j]))
        nearest_is_second.append(min(ratios, key=ratios.__getitem__) == second)
    found, low, high, exact = margins(problem)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    assert exact
    assert torch.equal(low, found)
    assert torch.equal(high, found)
    torch.testing.assert_close(searched(model, x, y), found, rtol=1e-6, atol=0)  # the search alone comes as near
    linear = fs.measure(problem, "local_linear_margin").samples("local_linear_margin")
    torch.testing.assert_close(linear, found, rtol=1e-10, atol=0)
    assert all(nearest_is_second) == (classes == 2)  # of more than two, the runner-up is not always the nearest


def test_exact_values_agree_with_a_scan_of_all_directions() -> None:
    """In the plane: the first change of class on each of 720 rays, found on a grid of radii."""
    for seed in range(3):
        model, x = hidden_layer(2, 6, 3, seed), 2 * normals(6, 2, seed=seed)
        found, _, _, exact = margins(labelled(model, x))
        assert exact
        angles = torch.arange(720, dtype=torch.float64) * 2 * math.pi / 720
        rays = torch.stack([angles.cos(), angles.sin()], dim=1)
        for point, value in zip(x, found.tolist(), strict=True):
            if math.isinf(value) or value > 30:
                continue
            step = 1e-3 * value
            radii = torch.arange(1, 1101, dtype=torch.float64) * step
            with torch.no_grad():
                classes = model(point + radii[:, None, None] * rays).argmax(2)
                changed = (classes != model(point).argmax()).any(1)
            first = float(radii[changed.nonzero()[0, 0]])
            assert value <= first + 1e-9
            assert first - value <= 2 * step  # one step of the radius, and the cosine of half a step of the angle


@pytest.mark.parametrize(("d", "units", "classes"), [(3, 5, 2), (6, 10, 3), (20, 8, 4)])
def test_lower_end_exact_value_and_search_are_in_order(d: int, units: int, classes: int) -> None:
    model, x = hidden_layer(d, units, classes), normals(40, d, seed=5)
    problem = labelled(model, x)
    ctx = fs.Context(problem)
    shallow = as_shallow(ctx)
    assert shallow is not None
    assert len(shallow.first) == units
    y = model(x).argmax(1)
    np.testing.assert_allclose(shallow(x.numpy()), model(x).detach().numpy(), atol=1e-12)
    exact = torch.from_numpy(exact_margins(shallow, x.numpy(), y.numpy()))
    found = searched(model, x, y, restarts=20)
    reached = found.isfinite() & exact.isfinite()
    assert bool(reached.any())
    assert bool((found >= exact * (1 - 1e-9)).all())
    ratio = (found / exact)[reached]
    assert float((ratio < 1.0004).double().mean()) >= 0.8  # the rest ended where it is nearest near by only
    assert float(ratio.max()) < 1.1
    constants = _pair_constants(ctx)
    assert isinstance(constants, Tensor)
    gaps = (model(x).gather(1, y[:, None]) - model(x)).detach()
    low = (gaps / constants[y]).scatter(1, y[:, None], math.inf).amin(1)
    assert bool((low <= exact).all())
    assert bool((low > 0).all())
    spectral = math.prod(float(torch.linalg.matrix_norm(model[i].weight.detach(), ord=2)) for i in (0, 2))
    plain = gaps.scatter(1, y[:, None], math.inf).amin(1) / (math.sqrt(2) * spectral)
    assert bool((low >= plain - 1e-12).all())  # a pair of classes by itself is never worse


def test_what_is_found_does_change_the_class() -> None:
    tiny = lenet_like()
    model = tiny.model
    y = model(tiny.x).argmax(1)

    def network(flat: Tensor) -> Tensor:
        result: Tensor = model(flat.reshape(-1, 1, 6, 6))
        return result

    found = nearest_changes(network, tiny.x.flatten(1), y, 10, torch.Generator().manual_seed(0))
    outputs = network(found.points)
    own = outputs.gather(1, y[:, None])[:, 0]
    assert bool((outputs.scatter(1, y[:, None], -math.inf).amax(1) >= own).all())
    torch.testing.assert_close((found.points - tiny.x.flatten(1)).norm(dim=1), found.distances)


def test_an_equivalent_network_has_the_same_margins() -> None:
    for model in (hidden_layer(4, 7, 3), with_weights(nn.Sequential(*mlp().model))):
        x = normals(12, 4, seed=2)
        problem = labelled(model, x)
        twin = fs.rescale(model, x, by="unit", low=0.2, high=5.0, seed=1)
        before, after = margins(problem)[0], margins(labelled(twin, x))[0]
        torch.testing.assert_close(before, after, rtol=1e-6, atol=1e-9)


def test_misclassified_samples_and_options() -> None:
    tiny = mlp()
    problem = tiny.problem()
    with torch.no_grad():
        wrong = tiny.model(tiny.x).argmax(1) != tiny.y
    found, low, high, exact = margins(problem)
    assert not exact  # two hidden layers
    assert torch.equal(found == 0, wrong)
    assert bool(wrong.any())
    assert bool((low <= found).all())
    assert torch.equal(high, found)
    assert len(margins(problem, samples=4)[0]) == 4
    tested, *_ = margins(problem, part="test")
    assert len(tested) == len(tiny.xt)
    assert torch.equal(margins(problem, samples=4)[0], found[:4])
    with pytest.raises(fs.InputError, match="part of geometric_margin"):
        margins(problem, part="validation")
    with pytest.raises(fs.InputError, match="restarts"):
        margins(problem, restarts=0)


def test_where_no_constant_is_known_the_lower_end_is_missing() -> None:
    tiny = attention()
    table = fs.measure(tiny.problem(), "geometric_margin", options={"geometric_margin": {"restarts": 1}})
    assert "no certified lower end" in table.reason("geometric_margin")
    assert table.to_frame()["low"].isna().all()
    assert bool(table.samples("geometric_margin").isfinite().all())


def test_a_network_that_never_changes_its_mind() -> None:
    model = hidden_layer(3, 4, 2)
    model[2].weight.data[1] = model[2].weight.data[0]
    model[2].bias.data = torch.tensor([1.0, 0.0], dtype=torch.float64)
    x = normals(5, 3)
    problem = fs.Problem(model, train=(x, torch.zeros(5, dtype=torch.long)))
    assert bool(margins(problem)[0].isinf().all())
    assert bool(fs.measure(problem, "local_linear_margin").samples("local_linear_margin").isinf().all())


def test_only_networks_that_are_shallow_are_called_exact() -> None:
    class Around(nn.Module):
        """The output does not come through the ReLUs that are computed."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            torch.relu(self.a(x))
            return self.b(x)

    x = normals(6, 3)
    around = as_shallow(fs.Context(labelled(with_weights(Around()), x)))
    assert around is not None
    assert around.affine  # what does not reach the outputs is no part of the network
    assert as_shallow(fs.Context(labelled(hidden_layer(3, 11, 2), x))) is None
    deep = with_weights(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)))
    assert as_shallow(fs.Context(labelled(deep, x))) is None
    tanh = with_weights(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)))
    assert as_shallow(fs.Context(labelled(tanh, x))) is None


def test_of_many_classes_those_are_tried_that_seem_nearest() -> None:
    """All classes, and the chosen ones: the same values here, and what is kept below them holds."""
    model, x = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 300)).double(), normals(30, 40)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn(value.shape, generator=generator, dtype=torch.float64) / value.shape[-1] ** 0.5)
        y = model(x).argmax(1)
        y[:3] = (y[:3] + 1) % 300  # misclassified
    problem = fs.Problem(model, train=(x, y))
    every, chosen = (fs.measure(problem, "local_linear_margin", precision=precision) for precision in (0, 0.02))
    expected, frame = every.samples("local_linear_margin"), chosen.to_frame()
    frame = frame[frame["measure"] == "local_linear_margin"]
    low, value = (torch.tensor(frame[name].to_numpy(dtype="float64")) for name in ("low", "value"))
    assert every.to_frame()["exact"].all()
    assert not frame["exact"].any()
    assert bool((value >= expected * (1 - 1e-12)).all())
    assert float((value > expected * (1 + 1e-9)).double().mean()) <= 0.05
    assert bool((low <= expected).all())
    assert bool((value[:3] == 0).all())
    assert frame["passes"].iloc[0] < 0.5 * every.to_frame()["passes"].max()
    classes = other_classes(model(x).detach(), y)
    signs = torch.where(torch.rand(64, 30, 40, generator=generator) < 0.5, -1.0, 1.0).double()
    estimated = estimated_distances(model, x, y, classes, signs)
    true = linear_distances(model, x, y, classes)
    ratio = estimated[3:] / true[3:]
    assert bool((ratio < SURE).all())
    assert 0.9 < float(ratio.median()) < 1.1
    beyond = Context(problem, effort=Effort(limits=Limits(nearest_classes=1)))
    few = local_linear_margin(beyond)
    assert few.low is not None
    assert bool((torch.as_tensor(few.low) <= expected).all())
    assert bool((torch.as_tensor(few.low) < torch.as_tensor(few.value)).any())  # others may be as near
