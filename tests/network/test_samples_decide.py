"""Networks in which samples decide what is computed, or parameters are copied for each of them, against dense Hessians.

What the first samples show of such a network need not hold for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_any_network import built
from test_written_otherwise import Net, numbers
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

import flatscope as fs
from flatscope import auditing
from flatscope.network.interception import FunctionChangedError
from flatscope.network.tracing import trace

torch.set_num_threads(1)
Batches = list[tuple[Any, Tensor]]
N = 13
# Rows of a sample: the first two have as many, and so has the mean sample, but not each.
LENGTHS = torch.tensor([2, 2, 1, 3, 1, 3, 2, 2, 1, 3, 2, 2, 2])


class TextNet(Net):
    """A module that takes a dictionary."""

    def forward(self, x: Tensor) -> Tensor:
        return self._run(self, x)


def early_exit(m: Any, x: Tensor) -> Tensor:
    """The first samples leave by a linear head, some others by a curved one."""
    h = functional.relu(m.a(x))
    out, late = m.exit(h), x[:, 0] > 0.3
    if late.any():
        out = out.clone()
        out[late] = m.head(torch.tanh(m.b(h[late])))
    return out


def packed(m: Any, x: Tensor) -> Tensor:
    """Only rows that are there are computed, one behind the other."""
    there = x[..., 0] != 0
    out = x.new_zeros(*there.shape, 5)
    out[there] = functional.relu(m.a(x[there]))
    return m.head(out.sum(1))


def experts(m: Any, x: Tensor) -> Tensor:
    """One of two experts for each sample; the first samples all go to one of them."""
    h, second = functional.relu(m.a(x)), x[:, 0] > 0.3
    out = torch.zeros_like(h)
    for chosen, expert in ((~second, m.b), (second, m.c)):
        if chosen.any():
            out[chosen] = expert(h[chosen])
    return m.head(out)


def queries(m: Any, x: Tensor) -> Tensor:
    """Attention of learned queries, which every sample gets a copy of."""
    q = m.q(m.latent.expand(len(x), -1, -1))
    shares = torch.softmax(q @ m.k(x).transpose(1, 2), -1)
    return m.head((shares @ m.v(x)).flatten(1))


def slices(m: Any, x: Tensor) -> Tensor:
    """Positions are mixed by as much of a matrix as the batch is long."""
    return m.head(functional.relu(m.mix[:, : x.shape[1]] @ functional.relu(m.a(x))).flatten(1))


def padded(x: Tensor, lengths: Tensor) -> Tensor:
    return x * (torch.arange(x.shape[1]) < lengths[:, None]).to(x)[..., None]


def by_first_entry(x: Tensor) -> Tensor:
    return x[x[:, 0].argsort()]


def heads(**parts: Any) -> dict[str, Any]:
    return built(a=nn.Linear(4, 5), head=nn.Linear(5, 3), **parts)


def texts(lengths: tuple[int, ...]) -> Batches:
    return [({"x": numbers(4, length, 4)}, torch.arange(4) % 3) for length in lengths]


def classes(n: int) -> Tensor:
    return torch.arange(n) % 3


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Batches]]] = {
    "early exit": lambda: (
        Net(early_exit, **heads(exit=nn.Linear(5, 3), b=nn.Linear(5, 5))),
        [(by_first_entry(2 * numbers(N, 4)), classes(N))],
    ),
    "packed rows": lambda: (Net(packed, **heads()), [(padded(numbers(N, 3, 4), LENGTHS), classes(N))]),
    "experts": lambda: (
        Net(experts, **heads(b=nn.Linear(5, 5), c=nn.Linear(5, 5))),
        [(by_first_entry(2 * numbers(N, 4)), classes(N))],
    ),
    "learned queries": lambda: (
        Net(
            queries,
            latent=numbers(2, 5),
            **built(q=nn.Linear(5, 5), k=nn.Linear(4, 5), v=nn.Linear(4, 5), head=nn.Linear(10, 3)),
        ),
        [(numbers(N, 3, 4), classes(N))],
    ),
    "slices, longest first": lambda: (TextNet(slices, mix=numbers(2, 6), **wide()), texts((6, 4, 5))),
    "slices, shortest first": lambda: (TextNet(slices, mix=numbers(2, 6), **wide()), texts((4, 6, 5))),
}


def wide() -> dict[str, Any]:
    return built(a=nn.Linear(4, 5), head=nn.Linear(10, 3))


def dense_blocks(model: nn.Module, batches: Batches) -> dict[str, Tensor]:
    """The Hessian of the mean loss with respect to each parameter."""
    params = {name: value.detach() for name, value in model.named_parameters()}

    def loss(name: str, vector: Tensor) -> Tensor:
        here = {**params, name: vector.reshape(params[name].shape)}
        total = torch.zeros((), dtype=torch.float64)
        for x, y in batches:
            outputs = functional_call(model, here, (), x) if isinstance(x, dict) else functional_call(model, here, (x,))
            total = total + functional.cross_entropy(outputs, y, reduction="sum")
        return total / sum(len(y) for _, y in batches)

    return {
        name: torch.autograd.functional.hessian(lambda v, name=name: loss(name, v), value.reshape(-1))
        for name, value in params.items()
    }


@pytest.mark.parametrize("batch_size", [3, 100])
@pytest.mark.parametrize("name", NETWORKS)
def test_layers_are_those_of_a_dense_hessian(name: str, batch_size: int) -> None:
    model, batches = NETWORKS[name]()
    train = batches[0] if len(batches) == 1 else batches
    problem = fs.Problem(model.eval(), train=train, batch_size=batch_size)
    names = ["hessian_trace", "layer_trace", "kappa_trace_sum", "layer_max_eigenvalue"]
    table = fs.measure(problem, names, precision=0)
    blocks, params = dense_blocks(model, batches), dict(model.named_parameters())
    assert table["hessian_trace"] == pytest.approx(sum(float(block.trace()) for block in blocks.values()), rel=1e-9)
    layers = {key: key.removesuffix(".weight") for key, value in params.items() if value.ndim > 1 and key != "latent"}
    assert set(table.layer("layer_trace")) == set(layers.values())
    for key, layer in layers.items():
        block = blocks[key]
        assert table.layer("layer_trace")[layer] == pytest.approx(float(block.trace()), rel=1e-9), layer
        top = float(torch.linalg.eigvalsh(block)[-1])
        assert table.layer("layer_max_eigenvalue")[layer] == pytest.approx(top, rel=1e-3), layer
    total = sum(float(blocks[key].trace()) * float(params[key].detach().square().sum()) for key in layers)
    assert table["kappa_trace_sum"] == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("name", NETWORKS)
def test_gauss_newton_does_not_depend_on_batches(name: str) -> None:
    model, batches = NETWORKS[name]()
    values = []
    for size in (1, 3, 100):
        train = batches[0] if len(batches) == 1 else batches
        problem = fs.Problem(model.eval(), train=train, batch_size=size)
        values.append(fs.measure(problem, "kappa_trace", precision=0, curvature="gauss_newton").layer("kappa_trace"))
    for other in values[1:]:
        assert other == pytest.approx(values[0], rel=1e-9)


def test_a_matrix_copied_for_every_sample_is_a_layer_or_is_named() -> None:
    """Whether the copies take memory or not."""
    x, y = numbers(7, 4, 3), classes(7)

    def trained(copy: Callable[[Tensor, int], Tensor]) -> fs.Problem:
        model = Net(
            lambda m, x: m.head(functional.relu(x @ copy(m.w, len(x))).mean(1)),
            w=numbers(3, 5),
            **built(head=nn.Linear(5, 3)),
        )
        return fs.Problem(model.eval(), train=(x, y))

    viewed = fs.measure(trained(lambda w, n: w.expand(n, 3, 5)), "kappa_trace*", precision=0)
    plain = fs.measure(trained(lambda w, n: w), "kappa_trace*", precision=0)
    assert viewed.layer("kappa_trace") == pytest.approx(plain.layer("kappa_trace"), rel=1e-9)
    assert viewed["kappa_trace_sum"] == pytest.approx(plain["kappa_trace_sum"], rel=1e-9)
    assert "w (read by" in fs.measure(trained(lambda w, n: w.repeat(n, 1, 1)), "kappa_trace_sum").reason(
        "kappa_trace_sum"
    )


def test_one_kernel_for_all_channels() -> None:
    """A weight of several channels that are one: the trace is that of the parameter, κ that of the weight that acts."""
    model = Net(
        lambda m, x: m.head(functional.relu(functional.conv2d(x, m.kernel.expand(2, 1, 3, 3), groups=2)).flatten(1)),
        kernel=numbers(1, 1, 3, 3),
        **built(head=nn.Linear(8, 3)),
    )
    x, y = numbers(6, 2, 4, 4), classes(6)
    table = fs.measure(fs.Problem(model.eval(), train=(x, y)), ["hessian_trace", "kappa_trace"], precision=0)
    blocks = dense_blocks(model, [(x, y)])
    assert table["hessian_trace"] == pytest.approx(sum(float(block.trace()) for block in blocks.values()), rel=1e-9)
    written = Net(
        lambda m, x: m.head(functional.relu(functional.conv2d(x, m.kernel, groups=2)).flatten(1)),
        kernel=model.kernel.detach().expand(2, 1, 3, 3).clone(),
        head=model.head,
    )
    other = fs.measure(fs.Problem(written.eval(), train=(x, y)), "kappa_trace", precision=0)
    assert table.layer("kappa_trace") == pytest.approx(other.layer("kappa_trace"), rel=1e-9)


def complex_filter(m: Any, x: Tensor) -> Tensor:
    """A layer in the frequencies, as of a Fourier neural operator."""
    filtered = torch.einsum("nk,kj->nj", torch.fft.rfft(m.a(x)), torch.complex(m.real, m.imaginary))
    return m.head(functional.relu(torch.fft.irfft(filtered, n=4)))


def ensemble(m: Any, x: Tensor) -> Tensor:
    """Several networks at once by vmap."""
    return vmap(lambda w: functional.relu(m.a(x)) @ w)(m.stack).mean(0)


@pytest.mark.parametrize("name", ["complex", "vmap"])
def test_what_is_not_read_is_measured_as_a_whole(name: str) -> None:
    parts = {
        "complex": lambda: Net(
            complex_filter,
            real=numbers(3, 3),
            imaginary=numbers(3, 3, seed=1),
            **built(a=nn.Linear(4, 4), head=nn.Linear(4, 3)),
        ),
        "vmap": lambda: Net(ensemble, stack=numbers(3, 5, 3), **built(a=nn.Linear(4, 5))),
    }
    model, x, y = parts[name](), numbers(N, 4), classes(N)
    table = fs.measure(fs.Problem(model.eval(), train=(x, y)), ["hessian_trace", "kappa_trace_sum"], precision=0)
    expected = sum(float(block.trace()) for block in dense_blocks(model, [(x, y)]).values())
    assert table["hessian_trace"] == pytest.approx(expected, rel=1e-9)
    assert table["kappa_trace_sum"] != table["kappa_trace_sum"]
    assert ("read by" if name == "complex" else "no layer") in table.reason("kappa_trace_sum")


class _Chosen(nn.Module):
    """Experts of which the samples choose: the first two of them take the same one."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.way, self.first, self.last = way, nn.Linear(3, 4), nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h, chosen = self.first(x).relu(), (2 * x[:, 0]).round().long().clamp(-2, 1) + 2
        if self.way not in ("rows", "one by one"):
            every = torch.stack([expert(h) for expert in self.experts], 1)
        units = x.repeat(1, 2)[:, :4] > 0
        match self.way:
            case "gather":
                picked = every.gather(1, chosen[:, None, None].expand(-1, 1, 4))[:, 0]
            case "take_along_dim":
                picked = every.take_along_dim(chosen[:, None, None], 1)[:, 0]
            case "index":
                picked = every[torch.arange(len(x)), chosen]
            case "masked":
                picked = sum(every[:, e].masked_fill((chosen != e)[:, None], 0.0) for e in range(4))
            case "constants for samples":
                picked = every[:, 0].masked_fill((x[:, 1] > 0)[:, None], 1.0)
            case "zeros for units":
                picked = every[:, 0] * 1.0
                picked[units] = 0.0
            case "rows":
                picked = torch.zeros_like(h)
                for e, expert in enumerate(self.experts):
                    if (mine := chosen == e).any():
                        picked[mine] = expert(h[mine])
            case _:
                picked = torch.stack([self.experts[int(e)](row) for e, row in zip(chosen, h, strict=True)])
        return self.last(picked)


_WAYS = (
    "gather", "take_along_dim", "index", "masked", "constants for samples", "zeros for units", "rows", "one by one"
)  # fmt: skip


@pytest.mark.parametrize("way", _WAYS)
def test_scales_and_units_are_those_of_all_samples(way: str) -> None:
    """Read off two samples, networks with other functions passed for rescaled copies."""
    model, x = _Chosen(way).double().eval(), torch.randn(24, 3, generator=torch.Generator().manual_seed(0)).double()
    x[:2] = torch.tensor([0.5, 0.4, -0.3])
    for by in ("unit", "layer", "permutation"):
        assert torch.allclose(fs.rescale(model, x, by=by, seed=3)(x), model(x), atol=1e-12)
    found = fs.audit(fs.Problem(model, train=(x, torch.arange(24) % 3)), ["psi_trace", "rho_sum"], by="unit", trials=1)
    assert {found.verdict(name, "unit_scaling") for name in ("psi_trace", "rho_sum")} == {"invariant"}


def test_weights_that_no_traced_sample_meets_stop_every_scale() -> None:
    model, x = _Chosen("rows").double().eval(), torch.full((4, 3), 0.5, dtype=torch.float64)
    graph = trace(model, x)
    assert graph.n_classes == 0
    assert "samples take different ways" in next(iter(graph.walls))


def test_an_audit_refuses_a_rewriting_that_does_not_hold_for_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.cat([torch.full((2, 3), 0.5), torch.randn(22, 3, generator=torch.Generator().manual_seed(0))]).double()
    problem = fs.Problem(_Chosen("rows").double().eval(), train=(x, torch.arange(24) % 3))
    wrong = trace(
        _Chosen("one by one").double(), x[:1].repeat(2, 1), idle=[n for n, _ in problem.model.named_parameters()]
    )
    monkeypatch.setattr(auditing, "graph_of_problem", lambda *_, **__: wrong)
    with pytest.raises(FunctionChangedError, match="audit by unit"):
        fs.audit(problem, ["rho_sum"], by="unit", trials=1)
