"""Networks as people write them, against dense Hessians: routed, normalised, gated, checkpointed, branching."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_written_otherwise import Net, numbers
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import flatscope as fs
from flatscope.network.tracing import trace

torch.set_num_threads(1)
N = 13


def built(seed: int = 1, **parts: nn.Module) -> dict[str, nn.Module]:
    torch.manual_seed(seed)
    made = {}
    for name, part in parts.items():
        made[name] = part.double()
        for value in part.parameters():
            nn.init.normal_(value, std=0.5)
    return made


def routed(m: Any, x: Tensor) -> Tensor:
    """Each sample goes to one expert, by the sign of its first entry; the second expert sees few."""
    h = functional.relu(m.stem(x))
    out = x.new_zeros(len(x), 3)
    chosen = (x[:, 0] > 0.7).long()
    for number, expert in enumerate((m.first, m.second)):
        rows = (chosen == number).nonzero().flatten()
        if len(rows):
            out = out.index_add(0, rows, expert(h[rows]))
    return out


def domains(m: Any, x: Tensor) -> Tensor:
    """One head for each domain, picked by a mask."""
    h = functional.relu(m.stem(x))
    first = x[:, 0] > 0
    out = x.new_zeros(len(x), 3)
    out[first] = m.first(h[first])
    out[~first] = m.second(h[~first])
    return out


def gated(m: Any, x: Tensor) -> Tensor:
    """Squeeze and excite."""
    h = functional.relu(m.a(x))
    return m.head((h * torch.sigmoid(m.b(functional.relu(m.c(h.mean((2, 3), keepdim=True)))))).mean((2, 3)))


def dense_block(m: Any, x: Tensor) -> Tensor:
    h = functional.relu(m.a(x))
    h = torch.cat([h, functional.relu(m.b(h))], 1)
    return m.head(torch.cat([h, functional.relu(m.c(h))], 1).mean((2, 3)))


def split_scales(m: Any, x: Tensor) -> Tensor:
    """Res2Net: the second half reads the first."""
    one, two = functional.relu(m.a(x)).chunk(2, 1)
    one = functional.relu(m.b(one))
    return m.head(torch.cat([one, functional.relu(m.c(two + one))], 1).mean((2, 3)))


def image_parts(**more: nn.Module) -> dict[str, nn.Module]:
    return built(a=nn.Conv2d(2, 4, 3, padding=1), **more)


def vector_parts() -> dict[str, nn.Module]:
    return built(stem=nn.Linear(4, 5), first=nn.Linear(5, 3), second=nn.Linear(5, 3))


def with_norm(norm: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    parts = image_parts(norm=norm(), head=nn.Linear(4, 3))
    model = Net(lambda m, x: m.head(functional.relu(m.norm(m.a(x))).mean((2, 3))), **parts)
    return model, numbers(N, 2, 4, 4)


def with_curve(curve: Callable[[Tensor], Tensor]) -> tuple[nn.Module, Tensor]:
    parts = built(a=nn.Linear(4, 5), head=nn.Linear(5, 3))
    return Net(lambda m, x: m.head(curve(3 * m.a(x))), **parts), 2 * numbers(N, 4)


def checkpointed(reentrant: bool) -> tuple[nn.Module, Tensor]:
    parts = built(a=nn.Linear(4, 5), b=nn.Linear(5, 5), head=nn.Linear(5, 3))

    def forward(m: Any, x: Tensor) -> Tensor:
        h = functional.relu(m.a(x))
        return m.head(checkpoint(lambda v: torch.tanh(m.b(v)), h, use_reentrant=reentrant))

    return Net(forward, **parts), numbers(N, 4)


def hard_sigmoid_plain(x: Tensor) -> Tensor:
    return torch.clamp(x / 6 + 0.5, 0, 1)


Made = tuple[nn.Module, Tensor]
NETWORKS: dict[str, Callable[[], Made]] = {
    "routed experts": lambda: (Net(routed, **vector_parts()), 2 * numbers(N, 4)),
    "one head a domain": lambda: (Net(domains, **vector_parts()), numbers(N, 4)),
    "group norm": lambda: with_norm(lambda: nn.GroupNorm(2, 4)),
    "instance norm": lambda: with_norm(lambda: nn.InstanceNorm2d(4, affine=True)),
    "layer norm over channels": lambda: with_norm(lambda: nn.GroupNorm(1, 4)),
    "hardsigmoid": lambda: with_curve(functional.hardsigmoid),
    "hardswish": lambda: with_curve(functional.hardswish),
    "silu": lambda: with_curve(functional.silu),
    "relu6": lambda: with_curve(functional.relu6),
    "prelu": lambda: (
        Net(lambda m, x: m.head(m.act(m.a(x))), **built(a=nn.Linear(4, 5), act=nn.PReLU(5), head=nn.Linear(5, 3))),
        numbers(N, 4),
    ),
    "tied": lambda: (
        Net(
            lambda m, x: m.head(functional.relu(m.b(functional.relu(m.b(functional.relu(m.a(x))))))),
            **built(a=nn.Linear(4, 5), b=nn.Linear(5, 5), head=nn.Linear(5, 3)),
        ),
        numbers(N, 4),
    ),
    "squeeze and excite": lambda: (
        Net(gated, **image_parts(b=nn.Conv2d(3, 4, 1), c=nn.Conv2d(4, 3, 1), head=nn.Linear(4, 3))),
        numbers(N, 2, 4, 4),
    ),
    "DenseNet": lambda: (
        Net(
            dense_block,
            **image_parts(b=nn.Conv2d(4, 2, 3, padding=1), c=nn.Conv2d(6, 2, 1), head=nn.Linear(8, 3)),
        ),
        numbers(N, 2, 4, 4),
    ),
    "Res2Net": lambda: (
        Net(split_scales, **image_parts(b=nn.Conv2d(2, 2, 1), c=nn.Conv2d(2, 2, 3, padding=1), head=nn.Linear(4, 3))),
        numbers(N, 2, 4, 4),
    ),
    "RepVGG": lambda: (
        Net(
            lambda m, x: m.head(
                functional.relu(m.bn1(m.b(h := functional.relu(m.a(x)))) + m.c(h) + m.bn2(h)).mean((2, 3))
            ),
            **image_parts(
                b=nn.Conv2d(4, 4, 3, padding=1),
                c=nn.Conv2d(4, 4, 1),
                bn1=nn.BatchNorm2d(4),
                bn2=nn.BatchNorm2d(4),
                head=nn.Linear(4, 3),
            ),
        ),
        numbers(N, 2, 4, 4),
    ),
    "pre-activation": lambda: (
        Net(
            lambda m, x: m.head((h + m.b(functional.relu(m.bn(h)))).mean((2, 3)) if (h := m.a(x)) is not None else x),
            **image_parts(b=nn.Conv2d(4, 4, 3, padding=1), bn=nn.BatchNorm2d(4), head=nn.Linear(4, 3)),
        ),
        numbers(N, 2, 4, 4),
    ),
    "samples behind time": lambda: (
        Net(
            lambda m, x: m.head(functional.relu(m.b(functional.relu(m.a(x.transpose(0, 1))))).sum(0)),
            **built(a=nn.Linear(4, 3), b=nn.Linear(3, 5), head=nn.Linear(5, 3)),
        ),
        numbers(N, 6, 4),
    ),
    "positions in the batch": lambda: (
        Net(
            lambda m, x: m.head(functional.relu(m.a(x.reshape(-1, 4))).reshape(len(x), -1)),
            **built(a=nn.Linear(4, 2), head=nn.Linear(6, 3)),
        ),
        numbers(N, 3, 4),
    ),
    "checkpoint": lambda: checkpointed(False),
    "checkpoint, reentrant": lambda: checkpointed(True),
}
# Where torch itself lacks or gets wrong a derivative, the dense computation uses the function written out.
WRITTEN_OUT: dict[str, Callable[[], Made]] = {
    "hardsigmoid": lambda: with_curve(hard_sigmoid_plain),
    "hardswish": lambda: with_curve(lambda x: x * hard_sigmoid_plain(x)),
    "checkpoint": lambda: (
        Net(
            lambda m, x: m.head(torch.tanh(m.b(functional.relu(m.a(x))))),
            **built(a=nn.Linear(4, 5), b=nn.Linear(5, 5), head=nn.Linear(5, 3)),
        ),
        numbers(N, 4),
    ),
}
WRITTEN_OUT["checkpoint, reentrant"] = WRITTEN_OUT["checkpoint"]


def dense_traces(name: str) -> dict[str, float]:
    """Trace of the Hessian of the mean loss with respect to each parameter."""
    model, x = WRITTEN_OUT.get(name, NETWORKS[name])()
    params = {key: value.detach() for key, value in model.eval().named_parameters()}
    y = torch.arange(N) % 3

    def loss(key: str, vector: Tensor) -> Tensor:
        outputs = functional_call(model, {**params, key: vector.reshape(params[key].shape)}, (x,))
        return functional.cross_entropy(outputs, y)

    return {
        key: float(torch.autograd.functional.hessian(lambda v, key=key: loss(key, v), value.reshape(-1)).trace())
        for key, value in params.items()
    }


@pytest.mark.parametrize("batch_size", [4, 100])
@pytest.mark.parametrize("name", NETWORKS)
def test_traces_are_those_of_a_dense_hessian_whatever_the_batches(name: str, batch_size: int) -> None:
    model, x = NETWORKS[name]()
    problem = fs.Problem(model.eval(), train=(x, torch.arange(N) % 3), batch_size=batch_size)
    table = fs.measure(problem, ["hessian_trace", "layer_trace", "kappa_trace_sum"], precision=0)
    expected = dense_traces(name)
    assert table["hessian_trace"] == pytest.approx(sum(expected.values()), rel=1e-9)
    params = dict(model.named_parameters())
    matrices = {key for key, value in params.items() if value.ndim > 1}
    found = table.layer("layer_trace")
    assert {f"{layer}.weight" for layer in found} == matrices
    for layer, value in found.items():
        assert value == pytest.approx(expected[f"{layer}.weight"], rel=1e-9, abs=1e-14), layer
    total = sum(expected[key] * float(params[key].detach().square().sum()) for key in matrices)
    assert table["kappa_trace_sum"] == pytest.approx(total, rel=1e-9)


def test_blank_images_in_front_change_nothing() -> None:
    """What is linear is read off the program, not off the first samples."""
    model, x = NETWORKS["instance norm"]()
    blank, y = torch.zeros(3, 2, 4, 4, dtype=torch.float64), torch.arange(N + 3) % 3
    first = fs.Problem(model.eval(), train=(torch.cat([blank, x]), y))
    last = fs.Problem(model, train=(torch.cat([x, blank]), torch.cat([y[3:], y[:3]])))
    values = [fs.measure(problem, "hessian_trace", precision=0)["hessian_trace"] for problem in (first, last)]
    assert values[0] == pytest.approx(values[1], rel=1e-9)


def test_an_expert_that_the_first_batch_does_not_use_is_a_layer() -> None:
    model, x = NETWORKS["routed experts"]()
    order = x[:, 0].argsort()
    problem = fs.Problem(model.eval(), train=(x[order], torch.arange(N) % 3), batch_size=2)
    assert list(fs.measure(problem, "layer_trace").layer("layer_trace")) == ["stem", "first", "second"]


def test_a_wall_beside_a_residual_sum_is_not_forgotten() -> None:
    """relu(a + b) ties a to b, and sigmoid(b) fixes b: then a is fixed as well, whichever comes first."""
    for late in (False, True):

        def forward(m: Any, x: Tensor, late: bool = late) -> Tensor:
            a, b = m.a(x), m.b(x)
            gate = None if late else torch.sigmoid(b)
            h = functional.relu(a + b)
            gate = torch.sigmoid(b) if gate is None else gate
            return m.head(torch.cat([h, gate], 1))

        model = Net(forward, **built(a=nn.Linear(4, 5), b=nn.Linear(4, 5), head=nn.Linear(10, 3)))
        graph = trace(model.eval(), numbers(2, 4))
        assert graph.n_classes == 0
        assert graph.layer("a").outputs.tolist() == graph.layer("b").outputs.tolist() == [0] * 5


SLICED: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[int, ...], dict[str, tuple[Any, ...]]]] = {
    "blocks": (
        lambda m, x: functional.linear(torch.tanh(functional.linear(x, m.w[:5, :4], m.w[:5, 4])), m.w[5:, :5]),
        (8, 6),
        {"w[:5, :4]": (slice(5), slice(4)), "w[5:, :5]": (slice(5, None), slice(5))},
    ),
    "stacked": (
        lambda m, x: functional.linear(torch.tanh(functional.linear(x, m.w[0])), m.w[1]),
        (2, 4, 4),
        {"w[0]": (0,), "w[1]": (1,)},
    ),
    "one vector": (
        lambda m, x: functional.linear(torch.tanh(functional.linear(x, m.w[:20].view(5, 4))), m.w[20:].view(3, 5)),
        (35,),
        {"w[:20]": (slice(20),), "w[20:]": (slice(20, None),)},
    ),
    "columns": (
        lambda m, x: torch.tanh(x @ m.w[:, :4].T) @ m.w[:, 4:],
        (4, 8),
        {"w[:, :4]": (slice(None), slice(4)), "w[:, 4:]": (slice(None), slice(4, None))},
    ),
    "transposed": (lambda m, x: x @ m.w.T, (3, 4), {"w": (slice(None),)}),
}


@pytest.mark.parametrize("name", SLICED)
def test_the_row_of_a_part_names_the_part(name: str) -> None:
    """The second of two blocks was called `w[6:]`, and the first `w`."""
    forward, shape, parts = SLICED[name]
    weight = nn.Parameter(numbers(*shape, seed=2))
    model = Net(forward, w=weight).eval()
    x, y = numbers(N, 4), torch.arange(N) % 3
    table = fs.measure(fs.Problem(model, train=(x, y)), ["layer_trace"])

    def loss(w: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(model, {"w": w}, (x,)), y)

    hessian = torch.autograd.functional.hessian(loss, weight.detach()).reshape(weight.numel(), -1)
    diagonal = hessian.diagonal().reshape(shape)
    expected = {part: float(diagonal[place].sum()) for part, place in parts.items()}
    assert table.layer("layer_trace") == pytest.approx(expected)
