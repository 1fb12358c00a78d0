"""Whatever is in a pass beside listed operations leaves a doubt, and then numbers decide about second derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

import flatscope as fs
from flatscope.context import Context
from flatscope.curvature import second_derivative
from flatscope.curvature.checked_pass import SharedPass
from flatscope.isolation import own_settings

torch.set_num_threads(1)


class Marked(torch.autograd.Function):
    """x³, whose backward may be differentiated once; in place where that is asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, in_place: bool = False) -> Tensor:
        ctx.save_for_backward(x.clone())
        if not in_place:
            return x**3
        ctx.mark_dirty(x)
        return x.pow_(3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return g * 3 * x**2, None


def in_a_view(h: Tensor) -> Tensor:
    """The node of what was done to the view is not in the graph by itself."""
    h = h.clone()
    Marked.apply(h[:, :2], True)
    return h


def slope_of_cube(kept: Tensor) -> Callable[..., Tensor]:
    return lambda g, *_: g * 3 * kept.detach() ** 2 / 2


def with_hook(h: Tensor) -> Tensor:
    result = h * 2
    if result.requires_grad:
        result.register_hook(slope_of_cube(h))
    return result + (h**3 - 2 * h).detach()


def with_hook_on_the_node(h: Tensor) -> Tensor:
    result = h**2
    if result.requires_grad:
        result.grad_fn.register_prehook(lambda g: (g[0] * (1 + h.detach()),))
    return result


def kept_coarsely(h: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda t: t.round(decimals=1), lambda t: t):
        return h**3


def without_gradient(h: Tensor) -> Tensor:
    with torch.no_grad():
        size = h.norm(dim=-1, keepdim=True)
    return h**3 / size


def written_over(h: Tensor) -> Tensor:
    result = h**3
    result.data = result.detach() * 2
    return result


# What is doubtful, and what is said of it.
DOUBTFUL: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a function of one's own": (lambda h: Marked.apply(h), "Marked"),
    "the same in a view": (in_a_view, "CopySlices"),
    "a hook": (with_hook, "a hook"),
    "a hook on a node": (with_hook_on_the_node, "a hook"),
    "hooks on what is kept": (kept_coarsely, "kept for the backward pass"),
    "detach": (lambda h: h * (h**2).detach(), "detach"),
    "no_grad": (without_gradient, "norm"),
    "other data": (written_over, "set"),
    "a number of Python": (lambda h: h**3 + 0 * float(h.sum()), "float"),
    "an operation that is not listed": (lambda h: h * torch.linalg.vector_norm(h, dim=1, keepdim=True), "VectorNorm"),
    "complex numbers": (lambda h: torch.polar(h.abs(), h).abs() + h, "abs"),
}
RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "cube": lambda h: h**3,
    "a constant under no_grad": lambda h: h**3 * without_gradient(torch.ones(4)).sum(),
    "normalised": lambda h: functional.layer_norm(torch.tanh(h), (4,)),
    "attention": lambda h: functional.scaled_dot_product_attention(*[h.reshape(-1, 2, 2)] * 3).flatten(1),
}


class Net(nn.Module):
    """Two layers and a function between them."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.function = nn.Linear(3, 4), nn.Linear(4, 2), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def problem_of(model: nn.Module, **options: Any) -> fs.Problem:
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return fs.Problem(model.double().eval(), train=(x, torch.arange(12) % 2), **options)


def has_doubts(problem: fs.Problem) -> list[bool]:
    """What both passes say: the small one, and that of the sweep's check."""
    context = Context(problem)
    with own_settings():
        return [second_derivative._has_doubts(context, shared) for shared in (None, SharedPass(context))]


@pytest.mark.parametrize("name", DOUBTFUL)
def test_whatever_else_is_in_a_pass_leaves_a_doubt(name: str) -> None:
    function, said = DOUBTFUL[name]
    problem = problem_of(Net(function))
    assert has_doubts(problem) == [True, True]
    with own_settings():
        doubts = SharedPass(Context(problem)).run.doubts
    assert any(said in words for words in (*doubts.suspects, *doubts.others))


@pytest.mark.parametrize("name", RIGHT)
def test_listed_operations_leave_none(name: str) -> None:
    assert has_doubts(problem_of(Net(RIGHT[name]))) == [False, False]


@pytest.mark.parametrize("name", ["a function of one's own", "the same in a view", "a hook", "a hook on a node"])
def test_what_is_doubtful_and_wrong_is_refused(name: str) -> None:
    problem = problem_of(Net(DOUBTFUL[name][0]))
    frame = fs.measure(problem, ["hessian_trace", "layer_trace"]).to_frame()
    assert frame["value"].isna().all()
    assert "second derivative" in frame["reason"].iloc[0]


def test_a_loss_of_ones_own_is_looked_through_too() -> None:
    def cubed(outputs: Tensor, targets: Tensor) -> Tensor:
        result: Tensor = Marked.apply(outputs - targets[:, None]).square().sum(1)
        return result

    def plain(outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs - targets[:, None]) ** 3).square().sum(1)

    assert has_doubts(problem_of(Net(torch.tanh), loss=cubed)) == [True, True]
    assert has_doubts(problem_of(Net(torch.tanh), loss=plain)) == [False, False]
    assert math.isnan(fs.measure(problem_of(Net(torch.tanh), loss=cubed), "hessian_trace")["hessian_trace"])


def test_embeddings_whose_gradient_is_scaled_leave_a_doubt() -> None:
    """Torch forgets the scale when it differentiates the gradient."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words, self.last = nn.Parameter(torch.randn(5, 4)), nn.Linear(4, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            found = functional.embedding(tokens, self.words, scale_grad_by_freq=True)
            return self.last(torch.tanh(found.sum(1)))

    tokens = torch.randint(0, 5, (12, 3), generator=torch.Generator().manual_seed(0))
    problem = fs.Problem(Scaled().double().eval(), train=(tokens, torch.arange(12) % 2))
    assert has_doubts(problem) == [True, True]


def test_where_samples_decide_a_few_do_not_show_all() -> None:
    class Decided(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.last(torch.tanh(h) if bool(x.sum() > -100) else Marked.apply(h))

    assert has_doubts(problem_of(Decided(torch.tanh))) == [True, True]


def test_a_module_with_a_hook_on_its_way_back_leaves_a_doubt() -> None:
    model = Net(torch.tanh)
    model.last.register_full_backward_hook(lambda *_: None)
    assert has_doubts(problem_of(model)) == [True, True]
