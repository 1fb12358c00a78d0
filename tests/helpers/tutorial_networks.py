"""Small networks as tutorials write them, by hand and without any package: makers by name in `TUTORIALS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pieces import Net
from rows_compared import Made, Maker
from torch import Tensor, nn
from torch.nn import functional

TUTORIALS: dict[str, Maker] = {}
N = 7


def tutorial(make: Maker) -> Maker:
    TUTORIALS[make.__name__.removeprefix("_")] = make
    return make


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(high: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def settled(model: nn.Module, *inputs: Any) -> nn.Module:
    """In float64 and eval mode, with statistics, scales and shifts in BatchNorm that do something."""
    generator = torch.Generator().manual_seed(3)
    model = model.double().train()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.momentum = 1.0
                module.weight += 0.3 * torch.rand(module.weight.shape, generator=generator).double()
                module.bias += 0.3 * torch.rand(module.bias.shape, generator=generator).double()
        model(*inputs)
    return model.eval()


def net(forward: Callable[..., Tensor], **parts: Any) -> nn.Module:
    return Net(forward, **parts).double().eval()


def made(model: nn.Module, x: Any, classes: bool = True, **more: Any) -> Made:
    """With labels that the network gives itself, so that margins are positive."""
    inputs = x if isinstance(x, tuple) else (x,)
    with torch.no_grad():
        targets = model(*inputs).argmax(1) if classes else more.pop("targets")
    return Made(model, x, targets, **more)


@tutorial
def variational_autoencoder() -> Made:
    """Noise comes with the samples; reconstruction and divergence in a loss of its own."""

    def forward(m: Any, x: Tensor, noise: Tensor) -> Tensor:
        h = torch.tanh(m.encode(x))
        mean, log_variance = m.mean(h), m.spread(h)
        z = mean + (0.5 * log_variance).exp() * noise
        return torch.cat([m.out(torch.tanh(m.decode(z))), mean, log_variance], 1)

    def elbo(outputs: Tensor, x: Tensor) -> Tensor:
        seen, mean, log_variance = outputs[:, :6], outputs[:, 6:8], outputs[:, 8:]
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)
        return (seen - x).square().sum(1) + divergence

    torch.manual_seed(0)
    parts = {"encode": nn.Linear(6, 8), "mean": nn.Linear(8, 2), "spread": nn.Linear(8, 2)}
    model = net(forward, **parts, decode=nn.Linear(2, 8), out=nn.Linear(8, 6))
    x = numbers(N, 6)
    return Made(model, (x, numbers(N, 2, seed=2)), x, loss=elbo, smooth=True)


@tutorial
def discriminator() -> Made:
    """That of a GAN: strided convolutions, BatchNorm, leaky ReLU, one logit."""
    torch.manual_seed(0)
    x = numbers(N, 1, 8, 8)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2),
        nn.Conv2d(4, 6, 4, 2, 1, bias=False),
        nn.BatchNorm2d(6),
        nn.LeakyReLU(0.2),
        nn.Conv2d(6, 1, 2, bias=False),
        nn.Flatten(),
    )
    model = settled(model, x)
    return Made(model, x, (model(x)[:, 0] > 0).double(), loss="bce")


@tutorial
def translation() -> Made:
    """Sequence to sequence: GRU cells, additive attention over the source, teacher forcing."""

    def forward(m: Any, source: Tensor, shown: Tensor) -> Tensor:
        h, seen = torch.zeros(len(source), 5, dtype=m.words.weight.dtype), []
        for word in m.words(source).unbind(1):
            h = m.reader(word, h)
            seen.append(h)
        memory, outputs = torch.stack(seen, 1), []
        for word in m.answers(shown).unbind(1):
            scores = m.score(torch.tanh(m.query(h)[:, None] + m.key(memory)))
            context = (scores.softmax(1) * memory).sum(1)
            h = m.writer(torch.cat([word, context], 1), h)
            outputs.append(m.head(h))
        return torch.stack(outputs, 1)

    torch.manual_seed(0)
    model = net(
        forward,
        words=nn.Embedding(7, 4),
        answers=nn.Embedding(6, 4),
        reader=nn.GRUCell(4, 5),
        writer=nn.GRUCell(9, 5),
        query=nn.Linear(5, 5, bias=False),
        key=nn.Linear(5, 5, bias=False),
        score=nn.Linear(5, 1, bias=False),
        head=nn.Linear(5, 6),
    )
    inputs = whole(7, N, 4), whole(6, N, 3, seed=2)
    return Made(model, inputs, whole(6, N, 3, seed=3), loss="next_token", smooth=True)


@tutorial
def u_net() -> Made:
    """A class for every pixel; a skip across."""

    def forward(m: Any, x: Tensor) -> Tensor:
        wide = torch.relu(m.down(x))
        deep = torch.relu(m.norm(m.inner(functional.max_pool2d(wide, 2))))
        return m.head(torch.cat([wide, m.up(deep)], 1))

    torch.manual_seed(0)
    x = numbers(4, 1, 6, 6)
    model = Net(
        forward,
        down=nn.Conv2d(1, 4, 3, padding=1),
        inner=nn.Conv2d(4, 5, 3, padding=1),
        norm=nn.BatchNorm2d(5),
        up=nn.ConvTranspose2d(5, 4, 2, 2),
        head=nn.Conv2d(8, 3, 1),
    )
    return Made(settled(model, x), x, whole(3, 4, 6, 6))


@tutorial
def siamese() -> Made:
    """One encoder on two pictures; their distance decides."""

    def forward(m: Any, one: Tensor, other: Tensor) -> Tensor:
        return m.head((m.encode(one) - m.encode(other)).abs())

    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 4))
    x = numbers(N, 5), numbers(N, 5, seed=2)
    return Made(net(forward, encode=encoder, head=nn.Linear(4, 1)), x, (torch.arange(N) % 2).double(), loss="bce")


@tutorial
def unrolled_equilibrium() -> Made:
    """A deep equilibrium network whose iterations autograd sees."""

    def forward(m: Any, x: Tensor) -> Tensor:
        z = x.new_zeros(len(x), 5)
        for _ in range(30):
            z = torch.tanh(0.5 * m.inner(z) + m.input(x))
        return m.head(z)

    torch.manual_seed(0)
    model = net(forward, inner=nn.Linear(5, 5), input=nn.Linear(4, 5), head=nn.Linear(5, 3))
    return made(model, numbers(N, 4), smooth=True)


@tutorial
def neural_ode() -> Made:
    """A vector field, four steps of Runge and Kutta."""

    def forward(m: Any, x: Tensor) -> Tensor:
        step = 0.25
        for k in range(4):

            def field(h: Tensor, t: float) -> Tensor:
                return m.outer(torch.tanh(m.inner(torch.cat([h, torch.full_like(h[:, :1], t)], 1))))

            a = field(x, k * step)
            b = field(x + step / 2 * a, (k + 0.5) * step)
            c = field(x + step / 2 * b, (k + 0.5) * step)
            d = field(x + step * c, (k + 1) * step)
            x = x + step / 6 * (a + 2 * b + 2 * c + d)
        return m.head(x)

    torch.manual_seed(0)
    model = net(forward, inner=nn.Linear(4, 6), outer=nn.Linear(6, 3), head=nn.Linear(3, 3))
    return made(model, numbers(N, 3), smooth=True)


@tutorial
def physics() -> Made:
    """A physics-informed network: the residual of u″ + u by autograd inside forward."""

    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            u = m.body(x)
            slope = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
            bend = torch.autograd.grad(slope.sum(), x, create_graph=True)[0]
        return torch.cat([bend + u, u], 1)

    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    x = numbers(N, 1)
    targets = torch.cat([torch.zeros_like(x), x.sin()], 1)
    return Made(net(forward, body=body), x, targets, loss="mse", smooth=True)


@tutorial
def hypernetwork() -> Made:
    """A network that writes the weights of another, for every sample its own."""

    def forward(m: Any, x: Tensor, task: Tensor) -> Tensor:
        made = m.write(torch.tanh(m.read(task)))
        first, second = made[:, :20].reshape(-1, 5, 4), made[:, 20:].reshape(-1, 3, 5)
        h = torch.tanh(torch.einsum("noi,ni->no", first, x))
        return torch.einsum("nco,no->nc", second, h)

    torch.manual_seed(0)
    model = net(forward, read=nn.Linear(3, 5), write=nn.Linear(5, 35))
    return made(model, (numbers(N, 4), numbers(N, 3, seed=2)), smooth=True)


@tutorial
def experts() -> Made:
    """Two of three experts for every sample, by the largest gates."""

    def forward(m: Any, x: Tensor) -> Tensor:
        gates, chosen = m.gate(x).softmax(1).topk(2, 1)
        gates = gates / gates.sum(1, keepdim=True)
        answers = torch.stack([expert(x) for expert in m.experts], 1)
        picked = answers.gather(1, chosen[:, :, None].expand(-1, -1, answers.shape[2]))
        return (gates[:, :, None] * picked).sum(1)

    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)) for _ in range(3)]
    return made(net(forward, gate=nn.Linear(4, 3), experts=nn.ModuleList(parts)), numbers(N, 4))


@tutorial
def recurrent_states() -> Made:
    """The recurrent network of the first tutorials: its state is made in forward, in torch's own type."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), 6)
        for step in x.unbind(1):
            h = torch.tanh(m.inner(torch.cat([step, h], 1)))
        return m.head(h)

    torch.manual_seed(0)
    model = Net(forward, inner=nn.Linear(9, 6), head=nn.Linear(6, 3)).eval()
    return made(model, numbers(N, 4, 3).float(), smooth=True, dtype=torch.float32, exact=1e-4)


@tutorial
def graph_of_nodes() -> Made:
    """Two graph convolutions on one graph, which is a constant; a sample is the number of a node."""

    def forward(m: Any, node: Tensor) -> Tensor:
        h = torch.relu(m.graph @ m.first(m.features))
        return (m.graph @ m.second(h))[node]

    torch.manual_seed(0)
    links = (numbers(12, 12) > 0.8).double()
    links = ((links + links.T) > 0).double() + torch.eye(12).double()
    root = links.sum(1).rsqrt()
    graph = root[:, None] * links * root
    model = net(forward, graph=graph, features=numbers(12, 4), first=nn.Linear(4, 5), second=nn.Linear(5, 3))
    return made(model, torch.arange(12), refused={"psi_*": "read constants"})


@tutorial
def two_heads() -> Made:
    """A network of two tasks, measured one head at a time; the other head is run as well."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.relu(m.stem(x))
        m.other(torch.sigmoid(m.side(h))).softmax(1)
        return m.head(h)

    torch.manual_seed(0)
    parts = {"side": nn.Linear(6, 4), "other": nn.Linear(4, 2), "head": nn.Linear(6, 3)}
    for name in ("side", "other"):
        parts[name].requires_grad_(False)
    stem, head = nn.Linear(4, 6), parts["head"]
    alone = net(lambda m, x: m.head(torch.relu(m.stem(x))), stem=stem, head=head)
    return made(net(forward, stem=stem, **parts), numbers(N, 4), written=alone)


@tutorial
def masked_autoencoder() -> Made:
    """MADE: masks make every output depend on the inputs before it alone."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.relu(functional.linear(x, m.first * m.into, m.shift))
        return functional.linear(h, m.second * m.out)

    torch.manual_seed(0)
    degrees = torch.arange(8) % 4
    into = (degrees[:, None] >= torch.arange(5)).double()
    out = (torch.arange(5)[:, None] > degrees).double()
    parts = {"first": numbers(8, 5) * into, "second": numbers(5, 8, seed=2) / 2 * out, "shift": numbers(8, seed=3) / 2}
    model = net(forward, into=into, out=out, **{name: nn.Parameter(value) for name, value in parts.items()})
    x = (numbers(N, 5, seed=4) > 0).double()
    return Made(model, x, x, loss="bce")


@tutorial
def low_rank_adapters() -> Made:
    """LoRA: frozen weights, and a product of two thin matrices beside them."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = nn.Parameter(torch.randn(2, base.in_features) / 2)
            self.up = nn.Parameter(torch.randn(base.out_features, 2) / 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + x @ self.down.T @ self.up.T

    torch.manual_seed(0)
    model = nn.Sequential(Adapted(nn.Linear(5, 6)), nn.ReLU(), Adapted(nn.Linear(6, 3))).double().eval()
    return made(model, numbers(N, 5))


@tutorial
def weight_norm() -> Made:
    """Lengths and directions of weights apart, as in WaveNet and TCN."""
    torch.manual_seed(0)
    norm = nn.utils.parametrizations.weight_norm
    model = nn.Sequential(norm(nn.Linear(5, 6)), nn.Tanh(), norm(nn.Linear(6, 3))).double().eval()
    with torch.no_grad():
        for module in (model[0], model[2]):
            module.parametrizations.weight.original0 *= 1.5
    written = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    written.load_state_dict({f"{k}.{name}": getattr(model[k], name) for k in (0, 2) for name in ("weight", "bias")})
    return made(model, numbers(N, 5), smooth=True, written=written)


@tutorial
def language_model() -> Made:
    """A causal transformer with tied embeddings, as in the shortest GPT."""

    def forward(m: Any, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        h = m.words(tokens) + m.places[:length]
        q, k, v = m.attend(m.norm(h)).chunk(3, 2)
        scores = q @ k.transpose(1, 2) / 2
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        h = h + m.project(scores.softmax(2) @ v)
        h = h + m.out(functional.gelu(m.inner(m.second(h))))
        return h @ m.words.weight.T

    torch.manual_seed(0)
    model = net(
        forward,
        words=nn.Embedding(6, 4),
        places=nn.Parameter(numbers(5, 4) / 2),
        norm=nn.LayerNorm(4),
        attend=nn.Linear(4, 12),
        project=nn.Linear(4, 4),
        second=nn.LayerNorm(4),
        inner=nn.Linear(4, 8),
        out=nn.Linear(8, 4),
    )
    tokens = whole(6, N, 6)
    first = ("-words.weight",)
    return Made(model, tokens[:, :-1], tokens[:, 1:], "next_token", True, first, no_layers=("places",))
