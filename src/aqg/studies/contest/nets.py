"""Networks of the tasks that are set aside: recurrent ones, and a vision transformer.

Recurrences are written with linear layers, since `torch.func.vmap`, by which clients train side by
side on a GPU, does not run those of PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class GatedRecurrence(nn.Module):
    """A gated recurrent unit (Cho et al.); returns its state after the last step.

    >>> GatedRecurrence(24, 32)(torch.zeros(5, 25, 24)).shape
    torch.Size([5, 32])
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.from_input = nn.Linear(inputs, 3 * width)
        self.from_state = nn.Linear(width, 3 * width)

    def forward(self, steps: Tensor) -> Tensor:
        state = steps.new_zeros(*steps.shape[:-2], self.width)
        for given in self.from_input(steps).unbind(-2):
            reset, update, new = given.chunk(3, dim=-1)
            by_state = self.from_state(state).chunk(3, dim=-1)
            gate = torch.sigmoid(update + by_state[1])
            fresh = torch.tanh(new + torch.sigmoid(reset + by_state[0]) * by_state[2])
            state = gate * state + (1 - gate) * fresh
        return state


class MotionRecurrence(nn.Module):
    """Classify windows of motion with a gated recurrence over pieces of some samples each.

    >>> MotionRecurrence()(torch.zeros(5, 100, 6)).shape
    torch.Size([5, 7])
    """

    def __init__(
        self, channels: int = 6, piece: int = 4, width: int = 32, classes: int = 7
    ) -> None:
        super().__init__()
        self.piece = piece
        self.recurrence = GatedRecurrence(channels * piece, width)
        self.head = nn.Linear(width, classes)

    def forward(self, windows: Tensor) -> Tensor:
        *leading, length, channels = windows.shape
        pieces = windows.reshape(*leading, length // self.piece, self.piece * channels)
        logits: Tensor = self.head(self.recurrence(pieces))
        return logits


class LongShortTermMemory(nn.Module):
    """Predict the next token at every place (Hochreiter and Schmidhuber), one layer.

    >>> LongShortTermMemory(80)(torch.zeros(3, 20, dtype=torch.int64)).shape
    torch.Size([3, 20, 80])
    """

    def __init__(self, num_tokens: int, embedding: int = 32, width: int = 128) -> None:
        super().__init__()
        self.width = width
        self.tokens = nn.Embedding(num_tokens, embedding)
        self.from_input = nn.Linear(embedding, 4 * width)
        self.from_state = nn.Linear(width, 4 * width, bias=False)
        self.head = nn.Linear(width, num_tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        given = self.from_input(self.tokens(tokens))
        state = given.new_zeros(*given.shape[:-2], self.width)
        cell, states = state, []
        for at in given.unbind(-2):
            write, forget, read, new = (at + self.from_state(state)).chunk(4, dim=-1)
            # One more, so that it does not forget at first.
            cell = torch.sigmoid(forget + 1) * cell + torch.sigmoid(write) * torch.tanh(new)
            state = torch.sigmoid(read) * torch.tanh(cell)
            states.append(state)
        logits: Tensor = self.head(torch.stack(states, dim=-2))
        return logits


class VisionTransformer(nn.Module):
    """Classify images of 28×28 pixels in a row by attention among patches (Dosovitskiy et al.).

    >>> VisionTransformer()(torch.zeros(5, 784)).shape
    torch.Size([5, 10])
    """

    def __init__(
        self, side: int = 28, patch: int = 7, width: int = 48, layers: int = 2, heads: int = 4
    ) -> None:
        super().__init__()
        self.side, self.patch = side, patch
        self.embedding = nn.Linear(patch**2, width)
        self.places = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, width))
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        count = self.side // self.patch
        grid = images.reshape(*images.shape[:-1], count, self.patch, count, self.patch)
        patches = grid.transpose(-3, -2).flatten(-2).flatten(-3, -2)
        hidden = self.embedding(patches) + self.places
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden).mean(-2))
        return logits


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.attention(self.norm1(hidden)).chunk(3, dim=-1)
        query, key, value = (p.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for p in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        hidden = hidden + self.projection(mixed.transpose(-3, -2).flatten(-2))
        result: Tensor = hidden + self.perceptron(self.norm2(hidden))
        return result
