"""Measure the context coder on real MNIST uploads against zlib, zstd and the zero-order entropy.

python benchmarks/context_study.py --data-dir DIR

``DIR/mnist`` holds the four MNIST files as published (``AQG_DATA_DIR`` is the default). Uploads of
each setting are sampled over a whole run and cached in the system's temporary directory.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aqg.core.grids import Grid, affine, grid_step, num_levels

NUM_CLIENTS = 10
STEP_SIZE = 0.02
L2 = 0.01
MAX_WIDTH = 4
HISTORY = 10
MAX_STALENESS = 100


@dataclass(frozen=True)
class Setting:
    """One run to draw uploads from."""

    model: str
    rule: str
    split: str

    def __str__(self) -> str:
        return f"{self.model}-{self.rule}-{self.split}"


@dataclass(frozen=True)
class Sample:
    """One upload, with the levels of the same client's upload before it (empty if none)."""

    levels: NDArray[np.uint8]
    previous: NDArray[np.uint8]
    num_symbols: int
    round: int


SETTINGS = [
    Setting(model, rule, split)
    for model in ("softmax", "mlp")
    for rule in ("lean", "aqg-2", "laq")
    for split in ("iid", "one-digit")
]


def load_clients(
    folder: Path, split: str, per_client: int
) -> list[tuple[NDArray[np.float32], NDArray[np.int64]]]:
    """Return ``per_client`` training images and labels for each of ten clients."""
    with gzip.open(folder / "mnist" / "train-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 784)
    with gzip.open(folder / "mnist" / "train-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8).astype(np.int64)
    clients = []
    for m in range(NUM_CLIENTS):
        if split == "one-digit":
            chosen = np.flatnonzero(labels == m)[:per_client]
        else:
            chosen = np.arange(m * 6000, m * 6000 + per_client)
        clients.append((images[chosen].astype(np.float32) / np.float32(255), labels[chosen]))
    return clients


def layer_shapes(model: str) -> list[tuple[int, int]]:
    return [(784, 10)] if model == "softmax" else [(784, 200), (200, 10)]


def initial_parameters(model: str, seed: int) -> NDArray[np.float32]:
    """Glorot-uniform weights and zero biases, each layer as weights (inputs, outputs) then bias."""
    rng = np.random.default_rng(seed)
    parts = []
    for inputs, outputs in layer_shapes(model):
        bound = np.sqrt(6 / (inputs + outputs))
        parts += [rng.uniform(-bound, bound, inputs * outputs), np.zeros(outputs)]
    return np.concatenate(parts).astype(np.float32)


def gradient(
    theta: NDArray[np.float32], x: NDArray[np.float32], y: NDArray[np.int64], model: str
) -> NDArray[np.float32]:
    """Gradient of mean cross-entropy + L2/2 ‖θ‖² of softmax regression or a ReLU network."""
    layers, at = [], 0
    for inputs, outputs in layer_shapes(model):
        weights = theta[at : at + inputs * outputs].reshape(inputs, outputs)
        at += inputs * outputs
        layers.append((weights, theta[at : at + outputs]))
        at += outputs
    activations = [x]
    for i, (weights, bias) in enumerate(layers):
        z = activations[-1] @ weights + bias
        activations.append(np.maximum(z, 0) if i + 1 < len(layers) else z)
    logits = activations[-1] - activations[-1].max(axis=1, keepdims=True)
    p = np.exp(logits)
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    back = p / np.float32(len(y))
    parts: list[NDArray[np.float32]] = []
    for i in reversed(range(len(layers))):
        parts = [(activations[i].T @ back).ravel(), back.sum(axis=0), *parts]
        if i:
            back = (back @ layers[i][0].T) * (activations[i] > 0)
    return np.concatenate(parts) + np.float32(L2) * theta


def quantize(delta: NDArray[np.float32], grid: Grid, width: int) -> tuple[NDArray[np.uint8], float]:
    """Return levels and step of ``delta`` on ``grid``."""
    step = grid_step(grid, width, float(np.abs(delta).max()), float(np.abs(delta).mean()))
    top = num_levels(grid, width) - 1
    if width == 1 and grid is Grid.MIDTREAD:
        return (delta >= 0).astype(np.uint8), step
    levels = np.floor(delta.astype(np.float64) / step + top / 2 + 0.5)
    return np.clip(levels, 0, top).astype(np.uint8), step


def values_of(levels, grid, width, step, dtype):
    scale, offset, unit = affine(grid, width, step)
    return (levels.astype(np.int32) * scale - offset).astype(dtype) * dtype(unit)


def generate(setting: Setting, folder: Path, rounds: int, per_client: int) -> list[Sample]:
    """Run the algorithm and return every upload."""
    clients = load_clients(folder, setting.split, per_client)
    grid = Grid.MIDTREAD if setting.rule == "lean" else Grid.MIDRISE
    theta = initial_parameters(setting.model, seed=1)
    reference = np.zeros((NUM_CLIENTS, len(theta)), np.float32)
    stored_errors = np.zeros((NUM_CLIENTS, MAX_WIDTH + 1))
    silent = np.zeros(NUM_CLIENTS, int)
    last = [np.zeros(0, np.uint8)] * NUM_CLIENTS
    moves: list[float] = []
    samples = []
    for k in range(rounds):
        recent = moves[-HISTORY:]
        if setting.rule == "lean":
            movement = sum(recent) / len(recent) if recent else 0.0
        else:
            movement = sum(recent) / HISTORY
        movement /= STEP_SIZE**2 * NUM_CLIENTS**2
        for m, (x, y) in enumerate(clients):
            delta = gradient(theta, x, y, setting.model) - reference[m]
            coded: dict[int, Any] = {b: quantize(delta, grid, b) for b in range(1, MAX_WIDTH + 1)}
            values = {b: values_of(q, grid, b, s, np.float32) for b, (q, s) in coded.items()}
            errors = np.zeros(MAX_WIDTH + 1)
            for b, value in values.items():
                errors[b] = np.square(value - delta, dtype=np.float64).sum()
            forced = silent[m] >= MAX_STALENESS
            if setting.rule == "lean":
                width = 0
                if np.square(delta, dtype=np.float64).sum() > movement or forced:
                    good = [b for b in coded if errors[b] <= 0.5 * movement]
                    width = good[0] if good else MAX_WIDTH
            else:
                size = np.square(values[MAX_WIDTH], dtype=np.float64).sum()
                slack = 3 * (stored_errors[m] + errors)
                width = 0
                if size >= movement + slack[MAX_WIDTH] or forced:
                    full = setting.rule == "laq" or size >= movement + slack[1]
                    width = MAX_WIDTH if full else (MAX_WIDTH + 1) // 2
            silent[m] = 0 if width else silent[m] + 1
            if width:
                levels = coded[width][0]
                reference[m] += values[width]
                stored_errors[m] = errors
                samples.append(Sample(levels, last[m], num_levels(grid, width), k))
                last[m] = levels
        change = np.float32(STEP_SIZE) * reference.sum(axis=0)
        if not np.isfinite(change).all():
            break
        theta = theta - change
        moves.append(float(np.square(change, dtype=np.float64).sum()))
    return samples
