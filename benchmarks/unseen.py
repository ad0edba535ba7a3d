"""The problems that are set aside: made once, when the default recipe was final.

Their tasks, ``unseen-NAME`` of ``aqg compare``, are run from a checkout. Recurrences are written
with linear layers, since `torch.func.vmap`, by which clients train side by side on a GPU, does not
run those of PyTorch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from aqg.data import load_dataset, parse_partition
from aqg.objectives import make_objective
from aqg.sim.problem import Problem, Samples
from aqg.spec import load_file

_EXAMPLES = Path(__file__).parents[1] / "examples"
shakespeare = load_file(_EXAMPLES / "shakespeare.py").shakespeare
watch_problem = load_file(_EXAMPLES / "watch.py").watch_problem
_SYNTHETIC_STREAM = 0x5717
"""Keeps the samples apart from other random numbers of the same seed."""


def arms(data_dir: Path, dtype: str) -> Problem:
    """Make a client of each arm of eight persons, with a recurrent network; test as in `watch`."""
    return watch_problem(data_dir, dtype, MotionRecurrence(), by_arm=True)


def vision_transformer(data_dir: Path, seed: int, dtype: str, clients: int, images: int) -> Problem:
    """Split some of MNIST's images by Dirichlet(1) over labels, with a vision transformer."""
    data = load_dataset("mnist", data_dir)
    assert data.test_features is not None
    assert data.test_labels is not None
    step = len(data) // images
    data = replace(
        data, features=data.features[::step][:images], labels=data.labels[::step][:images]
    )
    parts = parse_partition("dirichlet:1.0").split(data, clients, seed)
    return Problem.from_module(
        VisionTransformer(),
        clients=[(data.features[part], data.labels[part]) for part in parts],
        test=(data.test_features, data.test_labels),
        dtype=dtype,
    )


def synthetic(seed: int, dtype: str, clients: int) -> Problem:
    """Draw Synthetic(1, 1) of Li et al. (2020), with a perceptron of one hidden layer.

    Every client labels samples of a distribution of its own by a linear model of its own. A tenth
    of its samples is in the test set.
    """
    random = np.random.default_rng([_SYNTHETIC_STREAM, seed])
    num_features, num_classes = 60, 10
    sizes = random.lognormal(4.0, 2.0, clients).astype(np.int64) + 50
    deviations = np.arange(1, num_features + 1) ** -0.6  # of variances j^-1.2
    parts, tests = [], []
    for size in sizes.tolist():
        model_mean, feature_mean = random.normal(size=2)
        weights = random.normal(model_mean, 1.0, (num_features, num_classes))
        bias = random.normal(model_mean, 1.0, num_classes)
        center = random.normal(feature_mean, 1.0, num_features)
        features = center + deviations * random.normal(size=(size, num_features))
        labels = (features @ weights + bias).argmax(axis=1)
        last = size - size // 10
        parts.append(Samples(features[:last].astype(dtype), labels[:last]))
        tests.append((features[last:].astype(dtype), labels[last:]))
    objective = make_objective("mlp:64", num_features, num_classes, l2=0.0, scaling="mean")
    return Problem(
        objective=objective,
        clients=tuple(parts),
        initial_params=objective.init_params(seed).astype(dtype),
        test=Samples(*(np.concatenate(part) for part in zip(*tests, strict=True))),
    )


def roles(data_dir: Path, dtype: str, clients: int, skip: int) -> Problem:
    """Make a client of each role, the ``skip`` largest left out, with an LSTM."""
    return shakespeare(data_dir, dtype, clients, skip=skip, make_net=LongShortTermMemory)


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
