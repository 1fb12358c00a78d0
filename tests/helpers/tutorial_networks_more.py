"""More small networks as tutorials write them; see `tutorial_networks`, whose collection they join."""

from __future__ import annotations

import math
from typing import Any

import torch
from rows_compared import Made
from torch import Tensor, nn
from torch.nn import functional
from tutorial_networks import N, made, net, numbers, settled, tutorial, whole


@tutorial
def mixture_density() -> Made:
    """Weights, centres and widths of three Gaussians; the loss is of its own."""

    def likelihood(outputs: Tensor, y: Tensor) -> Tensor:
        logits, centres, logs = outputs.chunk(3, 1)
        of_each = -0.5 * ((y - centres) / logs.exp()).square() - logs
        return -(logits.log_softmax(1) + of_each).logsumexp(1)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 7), nn.Tanh(), nn.Linear(7, 9)).double().eval()
    return Made(model, numbers(N, 2), numbers(N, 1, seed=2), loss=likelihood, smooth=True)


@tutorial
def coupling_flow() -> Made:
    """RealNVP: affine coupling layers, the likelihood by the change of variables."""

    def forward(m: Any, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        total = 0
        for layer in m.layers:
            scale, shift = layer(a).chunk(2, 1)
            scale = torch.tanh(scale)
            a, b = b * scale.exp() + shift, a
            total = total + scale.sum(1, keepdim=True)
        return torch.cat([a, b, total], 1)

    def likelihood(outputs: Tensor, y: Tensor) -> Tensor:
        return 0.5 * outputs[:, :-1].square().sum(1) - outputs[:, -1]

    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(2, 5), nn.SiLU(), nn.Linear(5, 4)) for _ in range(3)]
    model = net(forward, layers=nn.ModuleList(parts))
    return Made(model, numbers(N, 4), torch.zeros(N), loss=likelihood, smooth=True)


@tutorial
def sine_network() -> Made:
    """SIREN: sines of steep layers."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(torch.sin(3 * m.second(torch.sin(3 * m.first(x)))))

    torch.manual_seed(0)
    model = net(forward, first=nn.Linear(2, 7), second=nn.Linear(7, 6), head=nn.Linear(6, 2))
    return Made(model, numbers(N, 2), numbers(N, 2, seed=2), loss="mse", smooth=True)


@tutorial
def radial_basis() -> Made:
    """Distances to centres that are trained, written out."""

    def forward(m: Any, x: Tensor) -> Tensor:
        squares = (x[:, None] - m.centres).square().sum(2)
        return m.head((-squares * m.widths.exp()).exp())

    torch.manual_seed(0)
    centres = nn.Parameter(numbers(6, 3))
    model = net(forward, centres=centres, widths=nn.Parameter(torch.full((6,), -1.0)), head=nn.Linear(6, 3))
    return made(
        model,
        numbers(N, 3),
        smooth=True,
        no_layers=("centres",),
        refused={"*_max": "centres", "*_sum": "centres", "vc_dimension": "centres", "*": ""},
    )


@tutorial
def sentences() -> Made:
    """A classifier of texts by convolutions of several widths over words, and the maximum over time."""

    def forward(m: Any, tokens: Tensor) -> Tensor:
        h = m.words(tokens).transpose(1, 2)
        return m.head(torch.cat([torch.relu(conv(h)).amax(2) for conv in m.filters], 1))

    torch.manual_seed(0)
    filters = nn.ModuleList([nn.Conv1d(4, 3, 2), nn.Conv1d(4, 3, 3)])
    model = net(forward, words=nn.Embedding(9, 4), filters=filters, head=nn.Linear(6, 3))
    return made(model, whole(9, N, 6))


@tutorial
def sets_with_padding() -> Made:
    """Deep sets: a sum over the members that are there."""

    def forward(m: Any, x: Tensor, there: Tensor) -> Tensor:
        h = torch.relu(m.each(x)) * there[:, :, None]
        return m.head(torch.relu(m.all(h.sum(1))))

    torch.manual_seed(0)
    there = (torch.arange(5) < whole(5, N, 1) + 1).double()
    model = net(forward, each=nn.Linear(3, 6), all=nn.Linear(6, 5), head=nn.Linear(5, 3))
    return made(model, (numbers(N, 5, 3), there))


@tutorial
def factorised_ratings() -> Made:
    """Tables of users and of things, their product and biases."""

    def forward(m: Any, user: Tensor, thing: Tensor) -> Tensor:
        both = (m.users(user) * m.things(thing)).sum(1, keepdim=True)
        return both + m.of_user(user) + m.of_thing(thing)

    torch.manual_seed(0)
    tables = {"users": nn.Embedding(5, 4), "things": nn.Embedding(6, 4)}
    model = net(forward, **tables, of_user=nn.Embedding(5, 1), of_thing=nn.Embedding(6, 1))
    inputs = whole(5, 12), whole(6, 12, seed=2)
    return Made(model, inputs, numbers(12, 1), loss="mse", smooth=True)


@tutorial
def causal_convolutions() -> Made:
    """A temporal convolutional network: dilated, causal, with a skip."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.relu(m.first(functional.pad(x, (2, 0))))
        h = torch.relu(m.second(functional.pad(h, (4, 0)))) + m.short(x)
        return m.head(h[:, :, -1])

    torch.manual_seed(0)
    convolutions = {"first": nn.Conv1d(2, 4, 3), "second": nn.Conv1d(4, 4, 3, dilation=2), "short": nn.Conv1d(2, 4, 1)}
    return made(net(forward, **convolutions, head=nn.Linear(4, 3)), numbers(N, 2, 8))


@tutorial
def residual_pictures() -> Made:
    """A residual network with BatchNorm, a projection and depthwise convolutions."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.relu(m.norm1(m.stem(x)))
        inner = m.norm2(m.point(torch.relu(m.deep(h))))
        return m.head(torch.relu(inner + m.short(h)).mean((2, 3)))

    torch.manual_seed(0)
    x = numbers(5, 2, 6, 6)
    model = net(
        forward,
        stem=nn.Conv2d(2, 4, 3, padding=1, bias=False),
        norm1=nn.BatchNorm2d(4),
        deep=nn.Conv2d(4, 4, 3, 2, 1, groups=4),
        point=nn.Conv2d(4, 6, 1, bias=False),
        norm2=nn.BatchNorm2d(6),
        short=nn.Conv2d(4, 6, 1, 2, bias=False),
        head=nn.Linear(6, 3),
    )
    return made(settled(model, x), x)


@tutorial
def vision_transformer() -> Made:
    """Patches, a class token, torch's own encoder layer."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.patch(x).flatten(2).transpose(1, 2)
        h = torch.cat([m.token.expand(len(x), -1, -1), h], 1) + m.places
        return m.head(m.encoder(h)[:, 0])

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, activation="gelu", batch_first=True)
    model = net(
        forward,
        patch=nn.Conv2d(1, 6, 3, 3),
        token=nn.Parameter(numbers(1, 1, 6) / 2),
        places=nn.Parameter(numbers(1, 5, 6) / 2),
        encoder=layer,
        head=nn.Linear(6, 3),
    )
    return made(model, numbers(5, 1, 6, 6), smooth=True, no_layers=("token", "places"))


@tutorial
def fourier_features() -> Made:
    """Random features of coordinates, a constant, in front of a network with GELU."""

    def forward(m: Any, x: Tensor) -> Tensor:
        angles = 2 * math.pi * x @ m.frequencies
        return m.head(functional.gelu(m.inner(torch.cat([angles.sin(), angles.cos()], 1))))

    torch.manual_seed(0)
    model = net(forward, frequencies=numbers(2, 4) / 3, inner=nn.Linear(8, 6), head=nn.Linear(6, 1))
    return Made(model, numbers(N, 2), numbers(N, 1, seed=2), loss="mse", smooth=True)


@tutorial
def conditioned() -> Made:
    """FiLM: a condition scales and shifts the features."""

    def forward(m: Any, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = m.film(condition).chunk(2, 1)
        return m.head(torch.relu(m.stem(x) * (1 + scale) + shift))

    torch.manual_seed(0)
    model = net(forward, stem=nn.Linear(4, 6), film=nn.Linear(2, 12), head=nn.Linear(6, 3))
    return made(model, (numbers(N, 4), numbers(N, 2, seed=2)))


@tutorial
def long_memory() -> Made:
    """Two layers of torch's LSTM over a sequence."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(m.cells(x)[0][:, -1])

    torch.manual_seed(0)
    cells = nn.LSTM(3, 4, num_layers=2, batch_first=True)
    return made(net(forward, cells=cells, head=nn.Linear(4, 3)), numbers(N, 4, 3), smooth=True)


@tutorial
def highway() -> Made:
    """Gates that let the input pass."""

    def forward(m: Any, x: Tensor) -> Tensor:
        for change, gate in zip(m.changes, m.gates, strict=True):
            open_ = torch.sigmoid(gate(x))
            x = open_ * torch.tanh(change(x)) + (1 - open_) * x
        return m.head(x)

    torch.manual_seed(0)
    changes, gates = (nn.ModuleList([nn.Linear(5, 5) for _ in range(2)]) for _ in range(2))
    return made(net(forward, changes=changes, gates=gates, head=nn.Linear(5, 3)), numbers(N, 5), smooth=True)


@tutorial
def autoencoder() -> Made:
    """A decoder with the encoder's weights transposed."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.relu(m.encode(x))
        return functional.linear(h, m.encode.weight.T, m.shift)

    torch.manual_seed(0)
    x = numbers(N, 5)
    return Made(net(forward, encode=nn.Linear(5, 3), shift=nn.Parameter(numbers(5))), x, x, loss="mse")


@tutorial
def graph_in_sparse_form() -> Made:
    """The graph network of the first tutorials: a sparse matrix of links, kept as a buffer."""

    def forward(m: Any, node: Tensor) -> Tensor:
        h = torch.tanh(torch.sparse.mm(m.links, m.first(m.features)))
        return torch.sparse.mm(m.links, m.second(h))[node]

    torch.manual_seed(0)
    links = (numbers(9, 9) > 0.6).double() + torch.eye(9).double()
    links = (links / links.sum(1, keepdim=True)).to_sparse()
    model = net(forward, links=links, features=numbers(9, 4), first=nn.Linear(4, 5), second=nn.Linear(5, 3))
    return made(model, torch.arange(9), smooth=True, refused={"psi_*": "read constants"})


@tutorial
def learned_filter() -> Made:
    """A filter on Fourier coefficients whose complex weights are kept as pairs of real ones."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.head(torch.tanh(torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(m.filter), n=6) + m.shift))

    torch.manual_seed(0)
    filters = nn.Parameter(numbers(4, 2))
    model = net(forward, shift=nn.Parameter(numbers(1)), filter=filters, head=nn.Linear(6, 3))
    return made(model, numbers(N, 6), smooth=True, no_layers=("filter",))
