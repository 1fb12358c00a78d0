"""Queries against keys, and the scales of normalisations: the same function in every writing, refused elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from networks import attending, attention, mlp
from torch import Tensor, nn
from torch.nn import functional

import flatscope as fs
from flatscope.errors import InputError, NotApplicable
from flatscope.network.interception import FunctionChangedError, relative_difference
from flatscope.network.tied_labels import Ties
from flatscope.network.tracing import trace
from flatscope.symmetries.folding import fold_batchnorm
from flatscope.symmetries.scaling import network_with_weights, rescaled_params

X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # queries, keys, values (n, heads, length, d)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1) @ v


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.permute(0, 1, 3, 2))
    causal = torch.ones(q.shape[-2], k.shape[-2]).tril() == 0
    return torch.dropout(scores.masked_fill(causal, -torch.inf).softmax(-1), 0.5, False) @ v


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shares = torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k), dim=-1)
    return torch.einsum("bhij,bhjd->bhid", shares, v)


def by_batches(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n, heads = q.shape[:2]
    q, k, v = (part.reshape(n * heads, *part.shape[2:]) for part in (q, k, v))
    return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(2), v).unflatten(0, (n, heads))


def rotary(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    half = q.shape[-1] // 2
    angles = torch.arange(q.shape[-2])[:, None] * 0.5 ** torch.arange(half).double()
    cos, sin = (function(torch.cat([angles, angles], -1)) for function in (torch.cos, torch.sin))

    def turned(x: Tensor) -> Tensor:
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    return functional.scaled_dot_product_attention(turned(q), turned(k), v)


def shared_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads 0 and 1 read the keys and values of the first head, as in grouped-query attention."""
    k, v = (part[:, :1] for part in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def repeated_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n, _, length, d = k.shape
    k, v = (part[:, :1, None].expand(n, 1, 2, length, d).reshape(n, 2, length, d) for part in (k, v))
    return plain(q, k, v)


class Block(nn.Module):
    """A pre-norm block with two heads, and a way to attend."""

    def __init__(self, attend: Attend, norm: nn.Module | None = None, shared: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8) if norm is None else norm
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.key = self.query if shared else self.key
        self.head = nn.Linear(8, 3)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (part(h).view(*h.shape[:2], 2, 4).transpose(1, 2) for part in (self.query, self.key, self.value))
        x = x + self.out(self.attended(q, k, v).transpose(1, 2).flatten(2))
        return self.head(torch.relu(x).mean(1))

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q, k, v)


class Packed(nn.Module):
    """torch's own attention, of one signal or of two."""

    def __init__(self, crossed: bool = False, **settings: Any) -> None:
        super().__init__()
        self.norm, self.crossed = nn.LayerNorm(8), crossed
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True, **settings)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        other = h.flip(1) if self.crossed else h
        return self.head(self.attend(h, other, other)[0].mean(1))


class OwnNorm(nn.Module):
    """Root mean square over channels, a scale, and a shift added apart."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) + self.shift


class NormedHeads(Block):
    """Queries and keys are normalised: not their projections but the scales of the norms can be moved."""

    def __init__(self) -> None:
        super().__init__(plain)
        self.of_query, self.of_key = nn.RMSNorm(4), nn.RMSNorm(4)

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain(self.of_query(q), self.of_key(k), v)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "written out": lambda: Block(plain),
    "causal": lambda: Block(masked),
    "einsum": lambda: Block(by_einsum),
    "bmm": lambda: Block(by_batches),
    "sdpa": lambda: Block(functional.scaled_dot_product_attention),
    "rotary": lambda: Block(rotary),
    "grouped": lambda: Block(shared_keys),
    "repeated": lambda: Block(repeated_keys),
    "packed": Packed,
    "packed, two signals": lambda: Packed(crossed=True),
    "packed, three projections": lambda: Packed(kdim=8, vdim=8),
    "normed heads": NormedHeads,
    "root mean square": lambda: Block(plain, nn.RMSNorm(8)),
    "own norm": lambda: Block(plain, OwnNorm()),
}


def lively(build: Callable[[], nn.Module]) -> nn.Module:
    """The network in float64, with weights at which attention is far from even."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build().double().eval()
        for value in model.parameters():
            nn.init.normal_(value, std=0.7)
    return model


@pytest.mark.parametrize("by", ["attention", "norm"])
@pytest.mark.parametrize("name", BLOCKS)
def test_same_function_other_weights(name: str, by: str) -> None:
    model = lively(BLOCKS[name])
    before = copy.deepcopy(model.state_dict())
    twin = fs.rescale(model, X, by=by, low=1 / 25, high=25.0, seed=3)
    fresh = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    assert relative_difference(model, twin, fresh) < 1e-10  # not only on the example it was checked on
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    clean = dict(fold_batchnorm(model, X).named_parameters())
    moved = {key for key, value in twin.named_parameters() if not torch.allclose(value, clean[key])}
    own = ("query", "key", "in_proj", "q_proj", "k_proj", "of_query", "of_key")
    if by == "attention":
        assert moved
        assert all(any(word in key for word in own) for key in moved)
        assert name == "normed heads" or any("bias" in key for key in moved)
    else:
        assert any(key.startswith("norm.") for key in moved)


def factors_of(model: nn.Module, name: str, seed: int = 3) -> Tensor:
    """By what the rows of a weight were multiplied."""
    twin = fs.rescale(model, X, by="attention", seed=seed)
    ratio = (twin.get_parameter(name) / model.get_parameter(name)).detach()
    assert torch.allclose(ratio, ratio[:, :1].expand_as(ratio))
    return ratio[:, 0]


def test_what_multiplies_queries_divides_keys() -> None:
    model = lively(BLOCKS["sdpa"])
    query, key = (factors_of(model, f"{name}.weight") for name in ("query", "key"))
    assert torch.allclose(query * key, torch.ones(8, dtype=torch.float64))
    assert len(query.unique()) == 8  # one factor for each dimension of each head
    packed = factors_of(lively(BLOCKS["packed"]), "attend.in_proj_weight")
    assert torch.allclose(packed[:8] * packed[8:16], torch.ones(8, dtype=torch.float64))
    assert torch.equal(packed[16:], torch.ones(8, dtype=torch.float64))  # values are those of by="unit"


def test_rotations_tie_pairs_and_shared_keys_tie_heads() -> None:
    turned = factors_of(lively(BLOCKS["rotary"]), "query.weight").reshape(2, 4)
    assert torch.allclose(turned[:, :2], turned[:, 2:])
    assert len(turned[:, :2].unique()) == 4
    for name in ("grouped", "repeated"):
        model = lively(BLOCKS[name])
        query, key = (factors_of(model, f"{part}.weight").reshape(2, 4) for part in ("query", "key"))
        assert torch.allclose(query[0], query[1])
        assert torch.allclose(query[0] * key[0], torch.ones(4, dtype=torch.float64))
        assert torch.equal(key[1], torch.ones(4, dtype=torch.float64))  # computed, and read by nobody


def test_norms_by_hand() -> None:
    model, c = lively(BLOCKS["written out"]), torch.linspace(0.1, 25, 8, dtype=torch.float64)
    twin = fs.rescale(model, X, by="norm", factors={"norm.weight": c})
    for name in ("weight", "bias"):
        new, old = (net.get_parameter(f"norm.{name}") for net in (twin, model))
        assert torch.allclose(new, old * c, rtol=1e-14)
    for name in ("query", "key", "value"):
        assert torch.allclose(twin.get_parameter(f"{name}.weight"), model.get_parameter(f"{name}.weight") / c)
        assert torch.equal(twin.get_parameter(f"{name}.bias"), model.get_parameter(f"{name}.bias"))
    assert torch.equal(twin.get_parameter("out.weight"), model.get_parameter("out.weight"))


def test_factors_of_queries_are_inverse_for_keys() -> None:
    model = lively(BLOCKS["sdpa"])
    for factors in ({"query": 4.0}, {"key": 0.25}, {"query": 4.0, "key": 0.25}):
        twin = fs.rescale(model, X, by="attention", factors=factors)
        assert torch.allclose(twin.get_parameter("query.bias"), 4 * model.get_parameter("query.bias"))
        assert torch.allclose(twin.get_parameter("key.bias"), model.get_parameter("key.bias") / 4)
    with pytest.raises(InputError, match="a query and its key") as wrong:
        fs.rescale(model, X, by="attention", factors={"query": 4.0, "key": 4.0})
    assert "factor 0.25" in str(wrong.value)


@pytest.mark.parametrize("spared", ["query.bias", "query.weight", "key.weight", "norm.bias", "value.weight"])
def test_a_parameter_that_is_spared_is_noticed(spared: str) -> None:
    """All but a bias of keys: it adds the same number to all scores of a query, which the softmax takes away."""
    model = lively(BLOCKS["sdpa"])
    by = "norm" if spared in ("norm.bias", "value.weight") else "attention"
    changed = dict(fs.rescale(model, X, by=by).named_parameters())
    changed[spared] = model.get_parameter(spared)
    with pytest.raises(FunctionChangedError):
        network_with_weights(model, changed, X, "a test")


def test_one_head_with_the_factors_of_another_is_noticed() -> None:
    model = lively(BLOCKS["sdpa"])
    changed = dict(fs.rescale(model, X, by="attention").named_parameters())
    changed = {key: value.roll(4, 0) if key == "key.weight" else value for key, value in changed.items()}
    with pytest.raises(FunctionChangedError):
        network_with_weights(model, changed, X, "a test")


def test_powers_along_chains_of_joins() -> None:
    """Each label is the inverse of the next: however they are joined, powers alternate; an odd ring is fixed."""
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 0, 3, 1]):
        ties = Ties()
        ties.add(5)
        for start in order:
            ties.join(2 + start, 3 + start, "a product", power=-1)
        powers = [ties.power(label) for label in range(2, 7)]
        assert [power * powers[0] for power in powers] == [1, -1, 1, -1, 1]
        assert len({ties.find(label) for label in range(2, 7)}) == 1
        ties.join(2, 6, "the same scale")
        assert ties.reason(4) is None
        ties.join(2, 6, "a product", power=-1)
        assert ties.reason(4) == "a product with itself"


def test_there_and_back() -> None:
    model = lively(BLOCKS["packed"])
    base = fold_batchnorm(model, X)
    graph, params = trace(base, X, inner=True), dict(base.named_parameters())
    scales = torch.rand(graph.n_classes, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 24 + 0.1
    back = rescaled_params(graph, rescaled_params(graph, params, scales), 1 / scales)
    assert all(torch.allclose(back[name], value, rtol=1e-14, atol=0) for name, value in params.items())


def cosine(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).transpose(-2, -1)).softmax(-1) @ v


def distances(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (-torch.cdist(q, k)).softmax(-1) @ v


@pytest.mark.parametrize(
    ("build", "wall"),
    [
        (lambda: Block(cosine), "normalize"),
        (lambda: Block(distances), "cdist"),
        (lambda: Block(plain, shared=True), "with itself"),
        (lambda: mlp().model, "network output"),
    ],
    ids=["cosine", "distances", "one projection", "none"],
)
def test_what_is_not_a_product_of_two_projections_is_refused(build: Callable[[], nn.Module], wall: str) -> None:
    model = lively(build)
    x = X if isinstance(model, Block) else torch.randn(3, 4, dtype=torch.float64)
    with pytest.raises(NotApplicable, match=wall):
        fs.rescale(model, x, by="attention")


def test_a_norm_in_the_residual_stream_is_refused() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, norm_first=False)

    class PostNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.final, self.head = layer, nn.LayerNorm(8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.final(x + self.layer(x)))

    model = lively(PostNorm)
    graph = trace(fold_batchnorm(model, X), X, inner=True)
    free = {entry.name: entry.n_free for entry in graph if entry.kind == "norm"}
    assert free == {"layer.norm1.weight": 0, "layer.norm2.weight": 0, "final.weight": 8}
    twin = fs.rescale(model, X, by="norm")
    assert torch.equal(twin.get_parameter("layer.norm1.weight"), model.get_parameter("layer.norm1.weight"))


@pytest.mark.parametrize(
    "norm",
    [nn.GroupNorm(2, 4), nn.LayerNorm((4, 6, 6)), nn.InstanceNorm2d(4, affine=True)],
    ids=["group", "layer", "instance"],
)
def test_norms_in_front_of_a_convolution(norm: nn.Module) -> None:
    parts = [nn.Conv2d(2, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1), nn.ReLU(), nn.Flatten()]
    model = lively(lambda: nn.Sequential(*parts, nn.Linear(108, 2)))
    x = torch.randn(3, 2, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    twin = fs.rescale(model, x, by="norm", low=1 / 25, high=25.0)
    assert relative_difference(model, twin, torch.randn(2, 2, 8, 8, dtype=torch.float64)) < 1e-10
    assert not torch.allclose(twin[1].weight, model[1].weight)


def test_the_default_trace_knows_nothing_of_it() -> None:
    """Basis paths and unit scaling keep their classes: queries, keys and norms stay walls."""
    model = lively(BLOCKS["sdpa"])
    graph = trace(model, X)
    assert {layer.name: layer.n_free for layer in graph} == {"query": 0, "key": 0, "value": 8, "out": 0, "head": 0}
    assert all((layer.outputs >= 0).all() for layer in graph)


SURVIVE = {"rho_sum", "rho_unit", "margin", "adaptive_sharpness", "fisher_rao_norm", "input_sensitivity"}
QUICK = {"adaptive_sharpness": {"steps": 4, "restarts": 1}}


def test_which_measures_survive_on_a_transformer() -> None:
    names = [
        *SURVIVE,
        "hessian_trace",
        "layer_trace",
        "kappa_trace",
        "relative_flatness",
        "psi_balance",
        "l1_path_norm",
    ]
    found = fs.audit(attending().problem(), names, trials=1, options=QUICK)
    assert found.symmetries == ["layer_scaling", "unit_scaling", "attention_scaling", "norm_scaling"]
    for symmetry, more in (("attention_scaling", {"relative_flatness"}), ("norm_scaling", set())):
        verdicts = {name: found.verdict(name, symmetry) for name in names}
        assert {name for name, verdict in verdicts.items() if verdict == "invariant"} == SURVIVE | more
        assert verdicts["l1_path_norm"] == "not tested"
    assert found.disagrees.empty, found.disagrees


def test_one_factor_for_a_layer_spares_kappa() -> None:
    """κ is |W|² times a trace: it stands still when all queries have one factor, and moves when each has its own."""
    tiny = attending()
    one, own = (
        fs.rescale(tiny.model, tiny.x, by="attention", factors={"query": c}) for c in (5.0, [0.2, 5.0, 3.0, 0.5])
    )
    before, uniform, single = (
        fs.measure(tiny.with_model(model).problem(), "kappa_trace", precision=0).to_frame().set_index("layer")["value"]
        for model in (tiny.model, one, own)
    )
    assert uniform["query"] == pytest.approx(before["query"], rel=1e-6)
    assert abs(single["query"] / before["query"] - 1) > 0.1


def test_networks_without_attention_or_norms_have_two_symmetries() -> None:
    assert fs.audit(mlp().problem(), "margin", trials=1).symmetries == ["layer_scaling", "unit_scaling"]
    found = fs.audit(mlp().problem(), "margin", by=("attention", "norm"), trials=1)
    assert set(found.to_frame()["verdict"]) == {"not tested"}
    assert found.to_frame()["reason"].str.contains("rescaled by").all()


def test_a_packed_projection_agrees() -> None:
    names = [*SURVIVE, "hessian_trace", "layer_trace", "kappa_trace", "relative_flatness"]
    found = fs.audit(attention().problem(), names, by=("attention", "norm"), trials=1, options=QUICK)
    assert found.disagrees.empty, found.disagrees
    assert "not tested" not in set(found.to_frame()["verdict"])
