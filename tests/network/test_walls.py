"""A wall holds everything that is tied to it, in whatever order the network meets the wall and the tie."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import flatscope as fs

pytestmark = pytest.mark.fast


class Walled(nn.Module):
    """Two layers whose outputs are added, one of them read by a sigmoid too; beside them a layer that is free."""

    def __init__(self, walled: str, wall_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.free = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(4, 5)
        self.head, self.side, self.reader = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(5, 3)
        self._walled, self._wall_first = walled, wall_first

    def forward(self, x: Tensor) -> Tensor:
        one, two = torch.relu(self.one(x)), torch.relu(self.two(x))
        read = one if self._walled == "one" else two
        gate = torch.sigmoid(read) if self._wall_first else None
        both = one + two
        gate = torch.sigmoid(read) if gate is None else gate
        out: Tensor = self.head(both) + self.side(torch.relu(self.free(x))) + self.reader(gate)
        return out


@pytest.mark.parametrize("walled", ["one", "two"])
@pytest.mark.parametrize("wall_first", [True, False])
def test_what_is_added_to_a_walled_layer_is_walled(walled: str, wall_first: bool) -> None:
    model = Walled(walled, wall_first).double()
    x = torch.randn(20, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    twin = fs.rescale(model, x, by="unit", seed=0)
    assert torch.allclose(twin(x), model(x), rtol=1e-12, atol=1e-12)
    moved = {
        name
        for (name, old), new in zip(model.named_parameters(), twin.parameters(), strict=True)
        if not torch.equal(old, new)
    }
    assert moved == {"free.weight", "free.bias", "side.weight"}
