"""Functions of eight variables that are binary trees of functions of two, and networks for them: Proposition 1.

Zhang et al. (2017), Sections 8.4 and 9.1: a network with the tree of the function needs fewer samples than a shallow
one of as many weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

VARIABLES, HIDDEN = 8, 8


def compositional_target(seed: int) -> Callable[[Tensor], Tensor]:
    """A function of inputs (n, 8): tanh(aᵀ(u, v) + buv) at every node of the tree, drawn by the seed."""
    generator = torch.Generator().manual_seed(seed)
    factors = 1.5 * torch.randn(VARIABLES - 1, 3, generator=generator)

    def value(x: Tensor) -> Tensor:
        node = 0
        while x.shape[1] > 1:
            left, right = x[:, ::2], x[:, 1::2]
            a = factors[node : node + left.shape[1]]
            node += left.shape[1]
            x = torch.tanh(a[:, 0] * left + a[:, 1] * right + a[:, 2] * left * right)
        return x[:, 0]

    return value


class TreeNetwork(nn.Module):
    """A small ReLU network at every node of a binary tree of eight inputs: 7 (4h + 1) weights.

    Args:
        seed: of the starting weights.
        hidden: h, units of each node.
    """

    def __init__(self, seed: int, hidden: int = HIDDEN) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            nodes = [nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, 1)) for _ in range(VARIABLES - 1)]
        self.nodes = nn.ModuleList(nodes)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (n, 1) of inputs (n, 8)."""
        node = 0
        while x.shape[1] > 1:
            pairs = x.reshape(len(x), -1, 2)
            x = torch.cat([self.nodes[node + i](pairs[:, i]) for i in range(pairs.shape[1])], dim=1)
            node += pairs.shape[1]
        return x


def shallow_of_size(seed: int, hidden: int = HIDDEN) -> nn.Sequential:
    """One hidden layer on all eight inputs with as many weights as the tree network, to within ten."""
    weights = (VARIABLES - 1) * (4 * hidden + 1)
    units = (weights - 1) // (VARIABLES + 2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(VARIABLES, units), nn.ReLU(), nn.Linear(units, 1))
