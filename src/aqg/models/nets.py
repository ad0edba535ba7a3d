"""Models that are torch modules, and the loss that suits the targets, where nobody names one."""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from aqg.errors import ConfigError, require
from aqg.models import DataShape
from aqg.settings import BELOW_1, require_choice

_MAX_CHANNELS = 4
"""An axis this short, first or last, is taken as the colors of an image."""


class Images(nn.Module):
    """Turn samples into images ``(n, channels, height, width)``.

    A sample may be an image with its colors first or last, one without colors, or the pixels of a
    square one in a row.
    """

    def __init__(self, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.colors_last = False
        side = math.isqrt(input_shape[0]) if len(input_shape) == 1 else 0
        match input_shape:
            case (pixels,) if side * side == pixels:
                self.shape = (1, side, side)
            case (height, width):
                self.shape = (1, height, width)
            case (channels, height, width) if channels <= _MAX_CHANNELS:
                self.shape = (channels, height, width)
            case (height, width, channels) if channels <= _MAX_CHANNELS:
                self.shape = (channels, height, width)
                self.colors_last = True
            case _:
                raise ConfigError(
                    f"samples of shape {input_shape} are no images; a model for images needs "
                    "(height, width), (colors, height, width), (height, width, colors) or the "
                    "pixels of a square"
                )

    def forward(self, samples: Tensor) -> Tensor:
        if self.colors_last:
            return samples.movedim(-1, 1)
        return samples.reshape(len(samples), *self.shape)


def make_cnn(shape: DataShape, width: int = 8) -> nn.Module:
    images = Images(shape.input_shape)
    channels, height, breadth = images.shape
    quarter = -(-height // 4) * -(-breadth // 4)
    _require_at_least("cnn", width=width)
    layers: list[tuple[str, nn.Module]] = [
        ("images", images),
        ("conv1", nn.Conv2d(channels, width, kernel_size=3, stride=2, padding=1)),
        ("tanh1", nn.Tanh()),
        ("conv2", nn.Conv2d(width, 2 * width, kernel_size=3, stride=2, padding=1)),
        ("tanh2", nn.Tanh()),
        ("flatten", nn.Flatten()),
        *_head("cnn", 2 * width * quarter, shape),
    ]
    return nn.Sequential(OrderedDict(layers))


def make_resnet8(shape: DataShape, norm: str = "group", width: int = 16) -> nn.Module:
    _require_at_least("resnet8", width=width)
    require_choice("norm of model 'resnet8'", norm, ("group", "batch"))
    images = Images(shape.input_shape)
    layers: list[tuple[str, nn.Module]] = [
        ("images", images),
        ("conv", nn.Conv2d(images.shape[0], width, kernel_size=3, padding=1, bias=False)),
        ("norm", _normalization(norm, width)),
        ("relu", nn.ReLU()),
        ("block1", ResidualBlock(width, width, 1, norm)),
        ("block2", ResidualBlock(width, 2 * width, 2, norm)),
        ("block3", ResidualBlock(2 * width, 4 * width, 2, norm)),
        ("pool", nn.AdaptiveAvgPool2d(1)),
        ("flatten", nn.Flatten()),
        *_head("resnet8", 4 * width, shape),
    ]
    return nn.Sequential(OrderedDict(layers))


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = _normalization(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = _normalization(norm, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, outputs, 1, stride, bias=False), _normalization(norm, outputs)
            )

    def forward(self, images: Tensor) -> Tensor:
        inner = functional.relu(self.norm1(self.conv1(images)))
        return functional.relu(self.norm2(self.conv2(inner)) + self.shortcut(images))


def _normalization(norm: str, channels: int) -> nn.Module:
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(math.gcd(8, channels), channels)


class Transformer(nn.Module):
    """A decoder that sees earlier places only; returns logits ``(n, length, tokens)``."""

    def __init__(
        self,
        num_tokens: int,
        length: int,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_tokens, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(AttentionBlock(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_tokens)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[-1], device=tokens.device)
        hidden = self.tokens(tokens) + self.places(places)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class AttentionBlock(nn.Module):
    """Causal self-attention and a perceptron, each beside a shortcut and behind a LayerNorm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.attention(self.norm1(hidden)).chunk(3, dim=-1)
        query, key, value = (p.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for p in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.dropout(self.projection(mixed.transpose(-3, -2).flatten(-2)))
        return hidden + self.dropout(self.perceptron(self.norm2(hidden)))


def make_transformer(
    shape: DataShape, width: int = 64, layers: int = 2, heads: int = 4, dropout: float = 0.0
) -> nn.Module:
    has_rows = len(shape.input_shape) == 1 and shape.target_shape in ((), shape.input_shape)
    if not (shape.num_tokens and has_rows):
        raise ConfigError(
            f"samples of shape {shape.input_shape} with targets of shape {shape.target_shape} are "
            "no sequences; model 'transformer' needs rows of token ids (whole numbers), and as "
            "targets the next token at every place"
        )
    _require_at_least("transformer", width=width, layers=layers, heads=heads)
    if width % heads:
        raise ConfigError(
            f"width of model 'transformer' is {width}, not a multiple of its {heads} heads"
        )
    require(dropout in BELOW_1, "dropout of model 'transformer'", dropout, str(BELOW_1))
    return Transformer(shape.num_tokens, shape.input_shape[0], width, layers, heads, dropout)


def _require_at_least(model: str, **counts: int) -> None:
    for name, count in counts.items():
        require(count >= 1, f"{name} of model {model!r}", count, "at least 1")


def _head(model: str, width: int, shape: DataShape) -> list[tuple[str, nn.Module]]:
    if shape.num_classes:
        return [("head", nn.Linear(width, shape.num_classes))]
    if len(shape.target_shape) > 1:
        raise ConfigError(
            f"targets of shape {shape.target_shape} are too much for model {model!r}; it predicts "
            "a class, or a row of numbers"
        )
    head = nn.Linear(width, math.prod(shape.target_shape))
    if shape.target_shape == ():
        return [("head", head), ("number", nn.Flatten(0))]  # (n, 1) becomes (n,)
    return [("head", head)]


def default_loss(targets: NDArray[Any]) -> Callable[[Any, Tensor], Tensor]:
    """Return the mean loss of a batch as a function of outputs and targets.

    Cross-entropy where targets are whole numbers: classes, or tokens at every place of a sequence.
    Binary cross-entropy where they are only 0.0 and 1.0, such as several labels at once. The mean
    squared error for other numbers.
    """
    if targets.dtype.kind in "iub":
        return token_cross_entropy
    if np.isin(targets, (0, 1)).all():
        return functional.binary_cross_entropy_with_logits
    return functional.mse_loss


def token_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, with classes on the last axis of ``(n, ..., classes)``."""
    if outputs.ndim > 2 and outputs.shape[:-1] == targets.shape:
        outputs, targets = outputs.flatten(0, -2), targets.flatten()
    return functional.cross_entropy(outputs, targets)
