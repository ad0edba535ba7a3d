"""Modules of torch that several tests train, freeze, tie and refuse."""

import torch
from torch import nn


class Masked(nn.Module):
    """Tied weights, a frozen layer, a mask of -inf in the saved state, a cache outside of it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 3)
        self.frozen = nn.Linear(3, 1).requires_grad_(False)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf))
        self.register_buffer("cache", torch.zeros(7), persistent=False)
        self.register_buffer("positions", torch.arange(4))

    def forward(self, inputs):
        return self.head(self.second(self.first(inputs).tanh()))


def normalized():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
