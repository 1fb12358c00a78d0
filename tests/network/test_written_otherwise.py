"""Networks without `nn.Linear`, or with wrapped weights: every weight that acts is a layer, however it is written."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
import pytest
import torch
from forms_of_measures import table_of
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, prune

import flatscope as fs
from flatscope.errors import NotApplicable

torch.set_num_threads(1)
Matrix = Callable[[Tensor], Tensor]
LAYER_MEASURES = ("layer_trace", "kappa_trace", "relative_flatness", "layer_max_eigenvalue")


class Net(nn.Module):
    """A module made of named parts and a function of (parts, input)."""

    def __init__(self, forward: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self._run = forward
        for name, part in parts.items():
            if isinstance(part, Tensor):
                self.register_parameter(name, nn.Parameter(part))
            else:
                self.add_module(name, part)

    def forward(self, *args: Tensor) -> Tensor:
        return self._run(self, *args)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 97 * seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) / max(1, shape[-1]) ** 0.5


def same(weight: Tensor) -> Tensor:
    return weight


def turned(weight: Tensor) -> Tensor:
    return weight.transpose(-2, -1)


@dataclass(frozen=True)
class Case:
    """A network, its data, and its layers: the parameter (or what computes the weight), and how it is a matrix.

    Attributes:
        layers: {name in the table: (parameter name, function from it to the matrix (out, in))}; a parameter that starts
            with "=" is computed: then `acting` gives it, and the network can be run with another in its place.
        wrap: what makes the first weight, where something does.
        masks: by layer, zeros where an entry is held at zero.
    """

    model: nn.Module
    x: Any
    layers: dict[str, tuple[str, Matrix]]
    classes: int = 3
    acting: dict[str, Callable[[nn.Module], Tensor]] = field(default_factory=dict)
    run_with: Callable[[nn.Module, dict[str, Tensor], Any], Tensor] | None = None
    twin: nn.Module | None = None
    wrap: str = ""
    masks: dict[str, Tensor] = field(default_factory=dict)

    @property
    def y(self) -> Tensor:
        return torch.arange(len(self.x)) % self.classes


def mlp_twin(first: Tensor, second: Tensor, b1: Tensor | None = None, b2: Tensor | None = None) -> nn.Sequential:
    twin = nn.Sequential(
        nn.Linear(first.shape[1], len(first), bias=b1 is not None),
        nn.ReLU(),
        nn.Linear(second.shape[1], len(second), bias=b2 is not None),
    ).double()
    with torch.no_grad():
        twin[0].weight.copy_(first)
        twin[2].weight.copy_(second)
        if b1 is not None and b2 is not None:
            twin[0].bias.copy_(b1)
            twin[2].bias.copy_(b2)
    return twin.eval()


def wrapped(wrap: Callable[[nn.Linear], Any]) -> Case:
    """A perceptron whose first weight is computed; the plain one beside it has the weight that acts."""
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    torch.manual_seed(3)
    for value in net.parameters():
        nn.init.normal_(value, std=0.7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old-style weight_norm is deprecated, and in use
        wrap(net[0])
        net.eval()
        net(numbers(2, 4))
    first = net[0]
    assert isinstance(first, nn.Linear)
    twin = mlp_twin(first.weight, net[2].weight, first.bias, net[2].bias)  # type: ignore[arg-type]
    layers = {"0": ("=", same), "2": ("2.weight", same)}
    return Case(net, numbers(13, 4), layers, twin=twin, wrap=getattr(wrap, "__name__", ""))


def old_weight_norm(layer: nn.Linear) -> None:
    torch.nn.utils.weight_norm(layer)


def two_matrices(forward: Callable[..., Tensor], first: Tensor, second: Tensor, how: tuple[Matrix, Matrix]) -> Case:
    """x ↦ second · relu(first · x) written in some way, without biases."""
    model = Net(forward, first=first, second=second).eval()
    layers = {"first": ("first", how[0]), "second": ("second", how[1])}
    return Case(model, numbers(11, 4), layers, twin=mlp_twin(how[0](first), how[1](second)))


A, B = numbers(5, 4, seed=1), numbers(3, 5, seed=2)


def pruned() -> Case:
    """A parameter with a fixed mask: its layer is that of the parameter, whose masked entries move nothing."""
    case = wrapped(lambda layer: prune.random_unstructured(layer, "weight", amount=0.3))
    mask = case.model.get_buffer("0.weight_mask")
    return replace(case, layers={"0": ("0.weight_orig", same), "2": ("2.weight", same)}, masks={"0": mask})


def low_rank() -> Case:
    u, v = numbers(5, 2), numbers(2, 4)
    model = Net(lambda m, x: functional.relu(x @ (m.u @ m.v).T) @ m.out.T, u=u, v=v, out=B).eval()
    return Case(model, numbers(11, 4), {"u+v": ("=", same), "out": ("out", same)}, twin=mlp_twin(u @ v, B))


def lora() -> Case:
    model = Net(
        lambda m, x: m.out(functional.relu(functional.linear(x, m.base) + x @ m.a.T @ m.b.T)),
        base=A,
        a=numbers(2, 4),
        b=numbers(5, 2),
        out=nn.Linear(5, 3).double(),
    ).eval()
    model.base.requires_grad_(False)
    return Case(model, numbers(11, 4), {"a": ("a", same), "b": ("b", same), "out": ("out.weight", same)})


def embedding() -> Case:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    tokens = torch.randint(0, 7, (11, 3), generator=torch.Generator().manual_seed(1))
    return Case(
        model.eval(), tokens, {"0.weight": ("0.weight", turned), "2": ("2.weight", same), "4": ("4.weight", same)}
    )


def table_by_index() -> Case:
    model = Net(lambda m, x: m.out(functional.relu(m.table[x].flatten(1))), table=numbers(7, 4), out=nn.Linear(8, 3))
    tokens = torch.randint(0, 7, (11, 2), generator=torch.Generator().manual_seed(1))
    return Case(model.double().eval(), tokens, {"table": ("table", turned), "out": ("out.weight", same)})


def in_time(kind: type[nn.RNNBase], **options: Any) -> Case:
    torch.manual_seed(1)
    cell = kind(3, 4, batch_first=True, **options).double()
    ways = 2 if options.get("bidirectional") else 1
    out = nn.Linear(4 * ways, 3).double()
    model = Net(lambda m, x: m.out(m.cell(x)[0][:, -1]), cell=cell, out=out).eval()
    names = [name for name, _ in cell.named_parameters() if name.startswith("weight")]
    layers = {f"cell.{name}": (f"cell.{name}", same) for name in names}
    return Case(model, numbers(7, 3, 3), {**layers, "out": ("out.weight", same)})


def bilinear() -> Case:
    torch.manual_seed(1)
    model = Net(
        lambda m, x: m.out(functional.relu(m.form(x[:, :3], x[:, 3:]))),
        form=nn.Bilinear(3, 2, 4).double(),
        out=nn.Linear(4, 3).double(),
    ).eval()
    layers: dict[str, tuple[str, Matrix]] = {
        "form.weight": ("form.weight", lambda w: w.flatten(1)),
        "out": ("out.weight", same),
    }
    return Case(model, numbers(9, 5), layers)


def heads() -> Case:
    """One matrix per head: a grouped product."""
    model = Net(
        lambda m, x: torch.einsum("bhi,hio->bho", functional.relu(x), m.own).flatten(1) @ m.out.T,
        own=numbers(2, 3, 4),
        out=numbers(3, 8),
    ).eval()
    return Case(model, numbers(9, 2, 3), {"own": ("own", lambda w: turned(w).reshape(8, 3)), "out": ("out", same)})


def cross_attention() -> Case:
    torch.manual_seed(1)
    model = Net(
        lambda m, x: m.out(m.attend(x[:, :2], x[:, 2:], x[:, 2:], need_weights=False)[0].flatten(1)),
        attend=nn.MultiheadAttention(4, 2, batch_first=True).double(),
        out=nn.Linear(8, 3).double(),
    ).eval()
    layers = {
        "attend.in_proj_weight": ("attend.in_proj_weight", same),
        "attend.out_proj": ("attend.out_proj.weight", same),
        "out": ("out.weight", same),
    }
    return Case(model, numbers(7, 5, 4), layers)


def tied() -> Case:
    torch.manual_seed(1)
    model = Net(
        lambda m, x: m.out(functional.relu(functional.linear(functional.relu(m.code(x)), m.code.weight.t()))),
        code=nn.Linear(4, 3).double(),
        out=nn.Linear(4, 3).double(),
    ).eval()
    return Case(model, numbers(9, 4), {"code": ("code.weight", same), "out": ("out.weight", same)})


def unfolded_convolution() -> Case:
    """A convolution by patches and a matrix product."""
    model = Net(
        lambda m, x: m.out(functional.relu(x.unfold(2, 3, 1).permute(0, 2, 1, 3).flatten(2) @ m.kernel).flatten(1)),
        kernel=numbers(6, 4),
        out=nn.Linear(16, 3).double(),
    ).eval()
    return Case(model, numbers(7, 2, 6), {"kernel": ("kernel", turned), "out": ("out.weight", same)})


CASES: dict[str, Callable[[], Case]] = {
    "weight_norm": lambda: wrapped(parametrizations.weight_norm),
    "weight_norm of old": lambda: wrapped(old_weight_norm),
    "spectral_norm": lambda: wrapped(parametrizations.spectral_norm),
    "pruned": pruned,
    "orthogonal": lambda: wrapped(parametrizations.orthogonal),
    "low rank": low_rank,
    "x @ w": lambda: two_matrices(
        lambda m, x: functional.relu(x @ m.first) @ m.second, A.T.clone(), B.T.clone(), (turned, turned)
    ),
    "w @ x": lambda: two_matrices(
        lambda m, x: (m.second @ functional.relu(m.first @ x.T)).T, A.clone(), B.clone(), (same, same)
    ),
    "x @ w.T": lambda: two_matrices(
        lambda m, x: torch.matmul(functional.relu(x.matmul(m.first.T)), m.second.t()),
        A.clone(),
        B.clone(),
        (same, same),
    ),
    "F.linear": lambda: two_matrices(
        lambda m, x: functional.linear(functional.relu(functional.linear(x, m.first)), m.second),
        A.clone(),
        B.clone(),
        (same, same),
    ),
    "einsum": lambda: two_matrices(
        lambda m, x: torch.einsum("oi,bi->bo", m.second, functional.relu(torch.einsum("bi,oi->bo", x, m.first))),
        A.clone(),
        B.clone(),
        (same, same),
    ),
    "mm, addmm, tensordot": lambda: two_matrices(
        lambda m, x: torch.tensordot(functional.relu(torch.mm(x, m.first)), m.second, dims=([1], [1])),
        A.T.clone(),
        B.clone(),
        (turned, same),
    ),
    "one vector": lambda: two_matrices(
        lambda m, x: torch.stack([functional.relu(x @ m.first.T) @ m.second, x.sum(1), x[:, 0]], dim=1),
        A.clone(),
        B[0].clone(),
        (same, lambda w: w[None]),
    ),
    "lora": lora,
    "embedding": embedding,
    "table[index]": table_by_index,
    "lstm": lambda: in_time(nn.LSTM),
    "lstm, two layers, both ways": lambda: in_time(nn.LSTM, num_layers=2, bidirectional=True),
    "gru": lambda: in_time(nn.GRU),
    "rnn": lambda: in_time(nn.RNN, nonlinearity="relu"),
    "bilinear": bilinear,
    "heads": heads,
    "cross attention": cross_attention,
    "tied transpose": tied,
    "patches @ w": unfolded_convolution,
}


def dense_hessian(case: Case, name: str) -> Tensor:
    """The Hessian of the mean loss with respect to one parameter, written out."""
    params = {key: value.detach() for key, value in case.model.named_parameters()}

    def loss(vector: Tensor) -> Tensor:
        given = {**params, name: vector.reshape(params[name].shape)}
        return functional.cross_entropy(functional_call(case.model, given, (case.x,)), case.y)

    at = params[name].reshape(-1)
    if "weight_norm" in case.wrap:  # whose second derivative is wrong in torch
        slopes = [
            [
                torch.autograd.grad(loss(leaf), leaf)[0]
                for leaf in ((at + move).requires_grad_(), (at - move).requires_grad_())
            ]
            for move in 1e-5 * torch.eye(len(at), dtype=at.dtype)
        ]
        return torch.stack([(up - down) / 2e-5 for up, down in slopes])
    with sdpa_kernel(SDPBackend.MATH):
        return torch.autograd.functional.hessian(loss, at, vectorize=True)


def dense_values(matrix: Tensor, hessian: Tensor, index: Tensor) -> dict[str, Any]:
    """What the measures of a layer are, from its Hessian; `index`: where entry (o, i) lies in the parameter."""
    flat = index.reshape(-1)
    h = hessian[flat][:, flat].reshape(*matrix.shape, *matrix.shape)  # (o, i, o', i')
    n_out = len(matrix)
    trace = torch.einsum("oioi->", h)
    relative = sum(
        (matrix[s] @ matrix[t]) * torch.einsum("ii->", h[s, :, t, :]) for s in range(n_out) for t in range(n_out)
    )
    columns = torch.stack(
        [torch.einsum("o,op,p->", matrix[:, j], h[:, j, :, j], matrix[:, j]) for j in range(matrix.shape[1])]
    )
    return {
        "layer_trace": float(trace),
        "kappa_trace": float(trace * matrix.square().sum()),
        "relative_flatness": float(relative),
        "layer_max_eigenvalue": float(torch.linalg.eigvalsh(hessian).max()),
        "rho_unit": columns,
        "l2_norm": float(matrix.norm()),
        "spectral_norm": float(torch.linalg.matrix_norm(matrix, 2)),
    }


@pytest.mark.parametrize("name", CASES)
def test_every_weight_is_a_layer_with_the_values_of_a_dense_computation(name: str) -> None:
    case = CASES[name]()
    problem = fs.Problem(case.model, train=(case.x, case.y))
    table = fs.measure(
        problem, [*LAYER_MEASURES, "rho_unit", "l2_norm", "spectral_norm", "kappa_trace_sum"], precision=0
    )
    assert list(table.layer("kappa_trace")) == list(case.layers) or set(table.layer("kappa_trace")) == set(case.layers)
    params = dict(case.model.named_parameters())
    total = 0.0
    for layer, (parameter, how) in case.layers.items():
        if parameter == "=":
            assert case.twin is not None
            plain = Case(case.twin, case.x, {})
            weight = case.twin[0].weight.detach()
            expected = dense_values(
                weight, dense_hessian(plain, "0.weight"), torch.arange(weight.numel()).reshape(weight.shape)
            )
        else:
            weight = params[parameter].detach()
            index = how(torch.arange(weight.numel()).reshape(weight.shape))
            held = case.masks.get(layer, torch.ones_like(weight))
            expected = dense_values(how(weight * held), dense_hessian(case, parameter), index)
        total += expected["kappa_trace"]
        if name == "heads" and layer == "own":  # ρ has a value for each input of each head
            expected["spectral_norm"] = float(torch.linalg.matrix_norm(weight, 2).max())
            for measure in ("rho_unit", "relative_flatness"):
                expected.pop(measure)
        for measure, value in expected.items():
            if measure == "rho_unit":
                torch.testing.assert_close(table.units(measure, layer), value, rtol=1e-9, atol=1e-12)
            else:
                assert table.layer(measure)[layer] == pytest.approx(value, rel=1e-9, abs=1e-12), (layer, measure)
    assert table["kappa_trace_sum"] == pytest.approx(total, rel=1e-9)
    frame = table.to_frame()
    assert frame[frame["value"].notna()]["exact"].all()


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name]().twin is not None and name != "one vector"])
def test_the_same_function_written_plainly_has_the_same_values(name: str) -> None:
    case = CASES[name]()
    names = ["kappa*", "rho*", "relative_flatness", "*path_norm", "psi_trace", "psi_balance", "lipschitz*", "l2_norm"]
    names += ["spectral_norm", "l1_inf_norm", "group_norm", "margin", "certified_radius", "sharpness"]
    if case.masks:  # the twin may move entries that a mask holds
        names = [
            measure for measure in names if measure not in ("kappa*", "relative_flatness", "psi_trace", "sharpness")
        ]
    odd, plain = (
        fs.measure(fs.Problem(m, train=(case.x, case.y)), names, precision=0) for m in (case.model, case.twin)
    )
    one, other = odd.to_frame(), plain.to_frame()
    assert list(one["measure"]) == list(other["measure"])
    for column in ("value", "stderr"):
        left, right = torch.tensor(one[column].to_numpy()), torch.tensor(other[column].to_numpy())
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12, equal_nan=True)
    assert not one["value"].isna().all()


@pytest.mark.parametrize("name", CASES)
def test_the_trace_over_all_parameters_is_that_of_the_parameters_as_given(name: str) -> None:
    case = CASES[name]()
    free = [key for key, value in case.model.named_parameters() if value.requires_grad]
    expected = sum(float(dense_hessian(case, key).trace()) for key in free)
    found = fs.measure(fs.Problem(case.model, train=(case.x, case.y)), "hessian_trace", precision=0)
    assert found["hessian_trace"] == pytest.approx(expected, rel=1e-7 if case.wrap else 1e-9)


@pytest.mark.parametrize("name", CASES)
def test_rescaling_leaves_the_function_of_every_case(name: str) -> None:
    case = CASES[name]()
    try:
        twin = fs.rescale(case.model, case.x, by="unit", seed=1)
    except NotApplicable:
        return
    with torch.no_grad():
        torch.testing.assert_close(twin(case.x), case.model(case.x), rtol=1e-9, atol=1e-11)


DISGUISED: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "a product entry by entry, then a sum": lambda: (
        Net(lambda m, x: (functional.relu(m.a(x))[:, None] * m.w).sum(-1), a=nn.Linear(4, 5).double(), w=B.clone()),
        numbers(9, 4),
    ),
    "an operation that cannot be followed": lambda: (
        Net(lambda m, x: Hidden.apply(functional.relu(m.a(x)), m.w), a=nn.Linear(4, 5).double(), w=B.clone()),
        numbers(9, 4),
    ),
    "a product of three": lambda: (
        Net(lambda m, x: torch.einsum("bi,bi,oi->bo", x, x, m.w), w=numbers(3, 4)),
        numbers(9, 4),
    ),
}


class Hidden(torch.autograd.Function):
    """A matrix product that no watcher sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w, grad.T @ x


@pytest.mark.parametrize("name", DISGUISED)
def test_what_is_not_recognised_is_named_and_nothing_is_summed_without_it(name: str) -> None:
    model, x = DISGUISED[name]()
    names = ["kappa_trace_sum", "kappa_max", "kappa_sum", "kappa_trace_max", "rho_sum", "rho_max", "l2_norm"]
    problem = fs.Problem(model.eval(), train=(x, torch.arange(9) % 3))
    frame = pd.concat([table_of(problem, name).to_frame() for name in [*names, "spectral_norm"]])
    network = frame[frame["layer"] == ""]
    assert len(network) == len(names) + 1
    assert network["value"].isna().all()
    assert network["reason"].str.contains("w", regex=False).all()
    assert not network["exact"].any()


def test_a_network_without_layers_has_no_flatness() -> None:
    model = Net(lambda m, x: x * m.scale + m.shift, scale=numbers(3), shift=numbers(3, seed=4)).eval()
    table = fs.measure(
        fs.Problem(model, train=(numbers(9, 3), torch.arange(9) % 3)), ["kappa*", "rho*", "layer*", "l2_norm"]
    )
    assert table.to_frame()["value"].isna().all()
    assert table.to_frame()["reason"].str.contains("no layer").all()


def test_positions_that_are_added_and_scales_are_no_layers_and_hide_none() -> None:
    model = Net(
        lambda m, x: m.out((functional.relu(m.a(x)) * m.scale + m.positions).flatten(1)),
        a=nn.Linear(4, 5).double(),
        out=nn.Linear(15, 3).double(),
        positions=numbers(1, 3, 5),
        scale=numbers(5),
    ).eval()
    problem = fs.Problem(model, train=(numbers(9, 3, 4), torch.arange(9) % 3))
    table = fs.measure(problem, ["kappa_trace", "kappa_trace_sum"])
    assert list(table.layer("kappa_trace")) == ["a", "out"]
    assert table["kappa_trace_sum"] == pytest.approx(sum(table.layer("kappa_trace").values()))


def test_a_module_that_is_passed_twice_stays_a_layer_beside_a_weight_that_is_computed() -> None:
    torch.manual_seed(0)
    shared = nn.Linear(6, 6)
    parts = nn.Linear(6, 6), nn.Tanh(), shared, nn.Tanh(), shared, parametrizations.spectral_norm(nn.Linear(6, 3))
    model = nn.Sequential(*parts).double().eval()
    x = numbers(11, 6)
    problem = fs.Problem(model, train=(x, torch.arange(11) % 3))
    table = fs.measure(problem, ["layer_trace", "hessian_trace"], precision=0)
    expected = float(dense_hessian(Case(model, x, {}), "2.weight").trace())
    assert list(table.layer("layer_trace")) == ["0", "2", "5"]
    assert table.layer("layer_trace")["2"] == pytest.approx(expected, rel=1e-9)
    assert all(isinstance(value, nn.Parameter) for value in problem.model.parameters())
