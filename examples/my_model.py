"""A model file as a user would write it, for the command line.

flatscope measure --model examples/my_model.py:build --weights my-weights.safetensors --data digits
"""

import torch
from torch import nn


class SmallNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(8 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.conv(x)))
        x = torch.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)


def build() -> nn.Module:
    return SmallNet()
