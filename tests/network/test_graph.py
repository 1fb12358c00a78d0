"""Tracing: classes checked by hand on small networks, ties and walls named, odd networks followed or refused."""

import copy
import random

import pytest
import torch
from pieces import Net
from torch import Tensor, nn
from torch.nn import functional

from flatscope.errors import InputError, UnknownNameError
from flatscope.network.interception import Operation, replay
from flatscope.network.tracing import trace

pytestmark = pytest.mark.fast

torch.set_num_threads(1)


def classes(model: nn.Module, example, *names: str) -> list[list[int]]:
    graph = trace(model.double(), example)
    return [getattr(graph.layer(name), side).tolist() for name in names for side in ("inputs", "outputs")]


def test_mlp_has_one_class_per_hidden_unit():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2))
    graph = trace(model, torch.ones(1, 2))
    assert [(layer.inputs.tolist(), layer.outputs.tolist()) for layer in graph] == [
        ([0, 0], [1, 2, 3]),
        ([1, 2, 3], [4, 5]),
        ([4, 5], [0, 0]),
    ]
    assert (graph.n_units, graph.n_classes, graph.chain) == (5, 5, True)
    assert graph.exchangeable == ((1, 2, 3), (4, 5))
    assert [layer.sources for layer in graph] == [("",), ("0",), ("2",)]
    assert graph.layer("4").walls == ("network output",)


def test_flatten_groups_columns_by_channel():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3))
    assert classes(model, torch.ones(2, 1, 6, 6), "0", "4") == [[0], [1, 2], [1] * 4 + [2] * 4, [0, 0, 0]]


def test_flatten_behind_channels_last_interleaves_columns():
    model = Net(
        lambda m, x: m.fc(torch.relu(m.conv(x)).permute(0, 2, 3, 1).flatten(1)),
        conv=nn.Conv2d(1, 2, 2),
        fc=nn.Linear(8, 1),
    )
    assert classes(model, torch.ones(2, 1, 3, 3), "fc")[0] == [1, 2] * 4


def test_residual_mlp_of_the_specification():
    """Width 3, two blocks with 2 inner units, 2 inputs and outputs: m = 36, H = 13, seven classes, m - H_eff = 29."""

    def forward(m, x):
        x = functional.relu(m.stem(x))
        x = functional.relu(x + m.b1(functional.relu(m.a1(x))))
        x = functional.relu(x + m.b2(functional.relu(m.a2(x))))
        return m.head(x)

    def dense(n_in, n_out):
        return nn.Linear(n_in, n_out, bias=False)

    model = Net(
        forward, stem=dense(2, 3), a1=dense(3, 2), b1=dense(2, 3), a2=dense(3, 2), b2=dense(2, 3), head=dense(3, 2)
    )
    graph = trace(model, torch.ones(2, 2))
    m = sum(value.numel() for value in model.parameters())
    assert (m, graph.n_units, graph.n_classes, m - graph.n_classes) == (36, 13, 7, 29)
    assert graph.layer("b2").outputs.tolist() == graph.layer("stem").outputs.tolist() == [1, 2, 3]
    assert not graph.chain
    assert graph.ties == {"add": 6}
    rank = torch.linalg.matrix_rank(_path_matrix(graph, model))
    assert int(rank) == 29


def _path_matrix(graph, model) -> Tensor:
    """0/1 matrix of all paths of the residual MLP above, by walking edges (a skip is an edge of no parameter)."""
    start, edges = 0, {}
    for layer in graph:
        shape = dict(model.named_parameters())[layer.weight].shape
        edges[layer.name] = [
            (int(o), int(i), start + int(o) * shape[1] + int(i)) for o in range(shape[0]) for i in range(shape[1])
        ]
        start += shape.numel()
    paths = {(node, ()) for node in range(2)}
    paths = {(o, (*path, e)) for node, path in paths for o, i, e in edges["stem"] if i == node}
    for inner, outer in (("a1", "b1"), ("a2", "b2")):
        through = {(o, (*path, e)) for node, path in paths for o, i, e in edges[inner] if i == node}
        paths |= {(o, (*path, e)) for node, path in through for o, i, e in edges[outer] if i == node}
    paths = {(o, (*path, e)) for node, path in paths for o, i, e in edges["head"] if i == node}
    rows = torch.zeros(len(paths), start, dtype=torch.float64)
    for row, (_, path) in zip(rows, paths, strict=True):
        row[list(path)] = 1
    return rows


def test_identity_skip_from_the_input_or_to_the_output_fixes_scales():
    model = Net(
        lambda m, x: m.c(functional.relu(x + m.b(functional.relu(m.a(x))))),
        a=nn.Linear(3, 2),
        b=nn.Linear(2, 3),
        c=nn.Linear(3, 3),
    )
    graph = trace(model, torch.ones(2, 3))
    assert graph.layer("a").outputs.tolist() == [1, 2]
    assert graph.layer("b").outputs.tolist() == [0, 0, 0]
    assert "add" in graph.layer("b").walls[0]
    assert "input" in graph.layer("b").walls[0]


def test_concatenation_chunk_and_channel_shuffle_are_followed_channel_by_channel():
    def forward(m, x):
        a, b = m.a(x), m.b(x)
        joined = functional.channel_shuffle(torch.cat([a, b], dim=1), 2)
        first, second = functional.relu(joined).chunk(2, dim=1)
        return m.c(first) + m.d(second)

    parts = {"a": nn.Conv2d(1, 2, 1), "b": nn.Conv2d(1, 2, 1), "c": nn.Conv2d(2, 1, 1), "d": nn.Conv2d(2, 1, 1)}
    found = classes(Net(forward, **parts), torch.ones(2, 1, 3, 3), "a", "b", "c", "d")
    assert found == [[0], [1, 2], [0], [3, 4], [1, 3], [0], [2, 4], [0]]


def test_pixel_shuffle_ties_the_channels_that_become_one():
    model = Net(
        lambda m, x: m.b(functional.pixel_shuffle(functional.relu(m.a(x)), 2)),
        a=nn.Conv2d(1, 8, 1),
        b=nn.Conv2d(2, 1, 3),
    )
    assert classes(model, torch.ones(2, 1, 4, 4), "a", "b") == [[0], [1] * 4 + [2] * 4, [1, 2], [0]]


def test_zero_padded_shortcut_ties_only_what_it_adds():
    """The parameter-free shortcut of the first ResNets: new channels are padded with zeros, which tie nothing."""

    def forward(m, x):
        x = functional.relu(m.a(x))
        shortcut = functional.pad(x, (0, 0, 0, 0, 1, 1))
        return m.c(functional.relu(shortcut + m.b(x)))

    model = Net(forward, a=nn.Conv2d(1, 2, 1), b=nn.Conv2d(2, 4, 1), c=nn.Conv2d(4, 1, 1))
    assert classes(model, torch.ones(2, 1, 3, 3), "a", "b", "c")[1:5:2] == [[1, 2], [3, 1, 2, 4]]


def test_grouped_and_depthwise_tie_no_scale_but_depthwise_channels_move_together():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 1),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, groups=4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 1, groups=2),
        nn.ReLU(),
        nn.Conv2d(4, 1, 1),
    )
    graph = trace(model, torch.ones(2, 1, 5, 5))
    assert graph.n_classes == 12
    assert graph.layer("2").input_units.tolist() == graph.layer("2").output_units.tolist()
    units = graph.layer("0").output_units.tolist(), graph.layer("4").output_units.tolist()
    halves = {frozenset(u[half]) for u in units for half in (slice(0, 2), slice(2, 4))}
    assert {frozenset(group) for group in graph.exchangeable} == halves  # only within a group of the grouped layer


WALLS = {
    "gelu": nn.GELU(),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "silu": nn.SiLU(),
    "hardtanh": nn.ReLU6(),
    "softmax": nn.Softmax(dim=-1),
    "layer_norm": nn.LayerNorm(4),
    "elu": nn.ELU(),
    "softplus": nn.Softplus(),
    "batch_norm": nn.BatchNorm1d(4),
}


@pytest.mark.parametrize("name", WALLS)
def test_walls_are_named(name):
    model = nn.Sequential(nn.Linear(3, 4), WALLS[name], nn.Linear(4, 2))
    graph = trace(model, torch.ones(2, 3))
    assert graph.layer("0").outputs.tolist() == [0] * 4
    assert graph.layer("0").walls[0].startswith(f"{name} (1)")
    assert name in graph.summary()


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x * (x > 0),
        lambda x: x.clamp(min=0),
        lambda x: torch.maximum(x, torch.zeros(())),
        lambda x: torch.where(x > 0, x, 0.1 * x),
        lambda x: functional.threshold(x, 0, 0),
        lambda x: (x + x.abs()) / 2,
        lambda x: 3 * functional.leaky_relu(-x),
        lambda x: functional.relu_(x + 0),
    ],
)
def test_every_spelling_of_relu_is_homogeneous(form):
    model = Net(lambda m, x: m.b(form(m.a(x))), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    assert trace(model, torch.randn(2, 3)).n_classes == 4


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x * x,
        lambda x: x + 1,
        lambda x: x.clamp(max=1),
        lambda x: x / x.norm(),
        lambda x: torch.exp(x),
        lambda x: x.clamp(0, 1),
        lambda x: x / (1 + x.abs()),
    ],
)
def test_what_only_looks_homogeneous_is_a_wall(form):
    model = Net(lambda m, x: m.b(form(m.a(x))), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    assert trace(model, torch.randn(2, 3)).n_classes == 0


def test_a_gate_keeps_the_scale_of_what_it_multiplies():
    """Squeeze and excitation: the sigmoid fixes its own layer, the gated channels stay free and move with it."""

    def forward(m, x):
        x = functional.relu(m.conv(x))
        gate = torch.sigmoid(m.up(functional.relu(m.down(x.mean((2, 3))))))
        return m.head((x * gate[:, :, None, None]).mean((2, 3)))

    model = Net(forward, conv=nn.Conv2d(1, 4, 3), down=nn.Linear(4, 2), up=nn.Linear(2, 4), head=nn.Linear(4, 2))
    graph = trace(model, torch.ones(2, 1, 5, 5))
    assert (graph.layer("conv").n_free, graph.layer("down").n_free, graph.layer("up").n_free) == (4, 2, 0)
    assert graph.layer("conv").output_units.tolist() == graph.layer("up").output_units.tolist()


def test_in_place_operations_are_seen_through_views():
    def forward(m, x):
        hidden = m.a(x)
        hidden.view(-1)[:] += 1.0  # a view: the labels of `hidden` must change with it
        return m.b(functional.relu(hidden))

    model = Net(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    assert trace(model, torch.ones(2, 3)).n_classes == 0

    def assembling(m, x):
        hidden = x.new_zeros(len(x), 5)
        hidden[:, 1:] = m.a(x)
        return m.b(hidden)

    model = Net(assembling, a=nn.Linear(3, 4), b=nn.Linear(5, 2))
    assert trace(model, torch.ones(2, 3)).layer("b").inputs.tolist() == [0, 1, 2, 3, 4]


def test_a_weight_used_twice_reads_and_writes_one_set_of_scales():
    model = Net(
        lambda m, x: m.c(functional.relu(m.b(functional.relu(m.b(functional.relu(m.a(x))))))),
        a=nn.Linear(2, 3),
        b=nn.Linear(3, 3),
        c=nn.Linear(3, 2),
    )
    graph = trace(model, torch.ones(2, 2))
    assert graph.layer("b").uses == 2
    assert graph.layer("a").outputs.tolist() == graph.layer("b").outputs.tolist() == [1, 2, 3]
    assert not graph.chain
    assert any("second use of b.weight" in tie for tie in graph.ties)


def test_tied_weights_read_by_something_else_are_fixed():
    model = Net(
        lambda m, x: m.b(functional.linear(functional.relu(m.a(x)), m.a.weight.t())),
        a=nn.Linear(3, 4),
        b=nn.Linear(3, 2),
    )
    graph = trace(model, torch.ones(2, 3))
    assert graph.n_classes == 0
    assert "also used by linear" in graph.layer("a").walls[0]


def test_shared_bias_ties_two_layers():
    a, b = nn.Linear(2, 3), nn.Linear(2, 3)
    b.bias = a.bias
    model = Net(
        lambda m, x: m.c(torch.cat([functional.relu(m.a(x)), functional.relu(m.b(x))], 1)), a=a, b=b, c=nn.Linear(6, 2)
    )
    graph = trace(model, torch.ones(2, 2))
    assert graph.layer("a").outputs.tolist() == graph.layer("b").outputs.tolist() == [1, 2, 3]


def test_unused_units_and_parameters():
    model = Net(
        lambda m, x: m.b(functional.relu(m.a(x))[:, :2]), a=nn.Linear(3, 4), b=nn.Linear(2, 2), unused=nn.Linear(2, 2)
    )
    graph = trace(model, torch.ones(2, 3))
    assert [layer.name for layer in graph] == ["a", "b"]
    assert graph.layer("a").outputs.tolist() == [1, 2, 0, 0]
    assert graph.layer("a").walls == ("read by no layer",)


def test_attention_is_followed_through_its_values_or_named():
    def forward(m, x):
        q, k, v = m.qkv(x).chunk(3, dim=-1)
        return m.out(functional.scaled_dot_product_attention(q, k, v))

    graph = trace(Net(forward, qkv=nn.Linear(4, 12), out=nn.Linear(4, 2)), torch.randn(2, 5, 4))
    assert graph.layer("qkv").outputs.tolist() == [0] * 8 + [1, 2, 3, 4]
    assert "softmax" in graph.layer("qkv").walls[0]
    by_hand = Net(
        lambda m, x: m.out(torch.softmax(m.q(x) @ m.k(x).mT, -1) @ m.v(x)),
        q=nn.Linear(4, 4),
        k=nn.Linear(4, 4),
        v=nn.Linear(4, 4),
        out=nn.Linear(4, 2),
    )
    graph = trace(by_hand, torch.randn(2, 5, 4))
    assert [graph.layer(name).n_free for name in "qkv"] == [0, 0, 4]
    packed = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="relu")
    graph = trace(packed, torch.randn(2, 5, 8))
    assert graph.layer("linear1").n_free == 16
    assert "self_attn.in_proj_weight" in graph.not_covered
    assert "multi_head_attention_forward" in graph.summary()


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_custom_autograd_functions_are_followed_inside():
    model = Net(lambda m, x: m.b(_Passed.apply(m.a(x))), a=nn.Linear(3, 4), b=nn.Linear(4, 4))
    assert trace(model, torch.ones(2, 3)).n_classes == 4


@pytest.mark.parametrize("unseen", [torch.vmap(lambda x: 2 * x), torch.func.grad(lambda x: x.square().sum())])
def test_what_cannot_be_seen_fixes_everything_before_it(unseen):
    model = Net(
        lambda m, x: m.c(functional.relu(m.b(unseen(m.a(x))))), a=nn.Linear(3, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 2)
    )
    graph = trace(model, torch.ones(2, 3))
    assert (graph.layer("a").n_free, graph.layer("b").n_free) == (0, 4)
    assert "cannot be followed" in graph.layer("a").walls[0]


def test_python_control_flow_simply_runs():
    def forward(m, x):
        for _ in range(len(x) - 1):
            x = m.a(x)
        if x.sum().item() > -1e9 and x.shape[0] % 2 == 0:
            x = functional.relu(m.b(x))
        return m.c(x.view(x.size(0), -1))

    model = Net(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 4), c=nn.Linear(4, 2))
    with pytest.raises(Exception, match=r"."):
        torch.fx.symbolic_trace(model)
    assert trace(model, torch.ones(2, 3)).layer("b").n_free == 4


def test_inputs_may_be_tuples_or_dictionaries():
    model = Net(
        lambda m, left, right: m.c(functional.relu(m.a(left) + m.b(right))),
        a=nn.Linear(2, 3),
        b=nn.Linear(4, 3),
        c=nn.Linear(3, 1),
    )
    for example in ((torch.ones(2, 2), torch.ones(2, 4)), {"right": torch.ones(2, 4), "left": torch.ones(2, 2)}):
        graph = trace(model, example)
        assert graph.layer("a").outputs.tolist() == graph.layer("b").outputs.tolist() == [1, 2, 3]
    tokens = Net(
        lambda m, ids: m.b(functional.relu(m.a(m.embed(ids).mean(1)))),
        embed=nn.Embedding(5, 3),
        a=nn.Linear(3, 4),
        b=nn.Linear(4, 2),
    )
    assert trace(tokens, {"ids": torch.zeros(2, 6, dtype=torch.int64)}).n_classes == 3 + 4


def test_constant_weights_mix_what_they_read():
    """A fixed blur in front of a layer: each channel keeps its own scale; a computed dense weight ties all."""

    class Blur(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kernel", torch.ones(2, 1, 2, 2) / 4)

        def forward(self, x):
            return functional.conv2d(x, self.kernel, groups=2)

    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), Blur(), nn.Conv2d(2, 1, 1))
    assert trace(model, torch.ones(2, 1, 4, 4)).layer("3").inputs.tolist() == [1, 2]
    normed = nn.Sequential(
        nn.Linear(2, 3), nn.ReLU(), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.ReLU(), nn.Linear(3, 1)
    )
    graph = trace(normed, torch.ones(2, 2))
    assert graph.layer("0").outputs.tolist() == [0, 0, 0]  # the computed layer has a bias, which nobody scales


def test_the_model_and_the_world_are_left_alone():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(), nn.Linear(4, 2)).train()
    model[0].weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    states = torch.get_rng_state(), random.getstate()
    trace(model, torch.randn(2, 3, generator=torch.Generator().manual_seed(1)))
    assert model.training
    assert not model[0].weight.requires_grad
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(value.grad is None for value in model.parameters())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()


def test_mistakes_are_explained():
    with pytest.raises(InputError, match="runs on the example"):
        trace(nn.Linear(3, 2), torch.ones(2, 4))
    with pytest.raises(InputError, match="parameters"):
        trace(nn.ReLU(), torch.ones(2, 4))
    with pytest.raises(InputError, match="example"):
        trace(nn.Linear(3, 2), "nonsense")
    with pytest.raises(UnknownNameError, match="fc1"):
        trace(Net(lambda m, x: m.fc1(x), fc1=nn.Linear(3, 2)), torch.ones(2, 3)).layer("fc")


def test_replay_runs_a_network_under_other_rules():
    """The ℓ1 path norm in one pass: absolute weights, ones at the input, the activations left out."""
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False)).double()
    names: list[str] = []

    def rule(op: Operation):
        names.append(op.place)
        return op.args[0] if op.name == "relu" else op.run()

    absolute = {name: value.abs() for name, value in model.named_parameters()}
    paths = replay(model, torch.ones(1, 3, dtype=torch.float64), rule, absolute).sum()
    expected = (model[2].weight.abs() @ model[0].weight.abs()).sum()
    assert torch.isclose(paths, expected, rtol=1e-14)
    assert [name for name in names if "(" in name] == ["linear (0)", "relu (1)", "linear (2)"]


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
def test_masks_and_indices_on_the_models_device(device):
    def forward(m, x):
        hidden = m.a(x)
        order = torch.tensor([3, 2, 1, 0], device=x.device)
        hidden = hidden[:, order].masked_fill(torch.zeros(4, dtype=torch.bool, device=x.device), 0.0)
        copied = torch.zeros_like(hidden)
        copied[:, order] = hidden.index_select(1, order)
        return m.b(torch.where(copied > 0, copied, 0.0))

    model = Net(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2)).to(device)
    assert trace(model, torch.randn(2, 3)).layer("b").inputs.tolist() == [4, 3, 2, 1]
