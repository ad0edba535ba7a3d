"""LoRA on a frozen model: roles of Shakespeare adapt a transformer that was trained before.

    aqg run --problem examples/lora.py:problem --data-dir DIR

Data: as in shakespeare.py. The base is trained here, without any federation, on the other plays for
some twenty seconds; then it is frozen. Clients are the largest roles of five tragedies. What they
train, and all that travels, is two thin matrices beside the linear layers of the attention (Hu and
others, "LoRA: Low-Rank Adaptation of Large Language Models", 2021).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from shakespeare import LENGTH, alphabet_of, read_roles, text_windows  # the example beside
from torch import nn

from aqg.models.nets import Transformer, token_cross_entropy
from aqg.sim.problem import Problem

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

TRAGEDIES = ("hamlet", "lear", "macbeth", "othello", "romeo_and_juliet")
NUM_ROLES = 20
BASE_STEPS = 300
SETTINGS = {
    "rounds": 60,
    "recipe": "auto",
    "batch_size": 16,
    "local_steps": 2,
    "participation": 0.5,
    "optimizer": "adam",
    "alpha": 0.01,
    "eval_every": 20,
}


class LoRA(nn.Module):
    """A frozen linear layer plus ``x A B``, where ``B`` starts at zero."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer
        self.lora_a = nn.Parameter(torch.randn(layer.in_features, rank) / layer.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(rank, layer.out_features))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what the layer returns, with the correction."""
        outputs: Tensor = self.layer(inputs) + inputs @ self.lora_a @ self.lora_b
        return outputs


def train_base(model: nn.Module, texts: tuple[np.ndarray, np.ndarray], num_steps: int) -> None:
    """Train on all windows together, the ordinary way."""
    inputs, targets = map(torch.from_numpy, texts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(num_steps):
        batch = torch.randint(len(inputs), (32,))
        optimizer.zero_grad()
        token_cross_entropy(model(inputs[batch]), targets[batch]).backward()
        optimizer.step()


def add_lora(model: Transformer) -> Transformer:
    """Freeze the model and put a correction beside each linear layer of its blocks."""
    model.requires_grad_(False)
    for block in model.blocks:
        block.attention = LoRA(block.attention)
        block.projection = LoRA(block.projection)
    return model


def problem(data_dir: Path, dtype: str = "float32", fraction: float = 1.0) -> Problem:
    """Make a client for each of the largest tragic roles; ``fraction`` shortens everything."""
    roles = read_roles(data_dir)
    alphabet = alphabet_of(roles)
    is_tragic = {role: role.split("__")[0] in TRAGEDIES for role in roles}
    texts = [text_windows(roles[role], alphabet) for role in roles if not is_tragic[role]]
    base = Transformer(len(alphabet), LENGTH)
    inputs, targets = (np.concatenate(part) for part in zip(*texts, strict=True))
    train_base(base, (inputs, targets), max(10, round(fraction * BASE_STEPS)))

    tragic = [role for role in roles if is_tragic[role]]
    tragic.sort(key=lambda role: -sum(map(len, roles[role])))
    clients, tests = [], []
    for role in tragic[: max(2, round(fraction * NUM_ROLES))]:
        last = len(roles[role]) - len(roles[role]) // 10
        clients.append(text_windows(roles[role][:last], alphabet))
        tests.append(text_windows(roles[role][last:], alphabet))
    return Problem.from_module(
        add_lora(base),
        clients=clients,
        test=tuple(map(np.concatenate, zip(*tests, strict=True))),
        metrics="accuracy,perplexity",
        dtype=dtype,
    )
