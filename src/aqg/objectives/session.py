"""A client's training within a round: minibatches through a module that may be random.

Dropout and other random layers draw from torch's generator, which is set from the key (seed,
client, round) and put back after every step, so that a round can be repeated to the bit. Buffers
that a step changes, such as running statistics, are there for the next step and handed over at the
end.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from aqg.objectives.layout import Buffers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from aqg.objectives.layout import ModelLayout

_STREAM = 0xD20F
"""Keeps torch's random numbers apart from others of the same seed."""


class Carrier(Protocol):
    """Keeps a model's buffers between rounds."""

    def start(self, client: int) -> Buffers:
        """Return the buffers that a client's training starts from."""

    def finish(self, client: int, buffers: Buffers) -> None:
        """Take the buffers after a client's training."""

    def evaluation(self) -> Buffers:
        """Return the buffers with which a model is measured."""

    def views(self) -> Sequence[AbstractContextManager[None]]:
        """Return contexts, one for each model that is to be measured: one, or one per client."""


class Session:
    """Gradients on minibatches of one client, one after the other.

    Args:
        gradient: from this session, ``θ``, features and labels, makes loss and gradient.
        key: (seed, client, round).

    Attributes:
        start: the buffers to start from; None: the module's own.
        state: buffers as the last step left them, and frozen parameters; None before the first.

    """

    def __init__(
        self, gradient: Callable[[Session, Any, Any, Any], tuple[Any, Any]], key: Sequence[int]
    ) -> None:
        self._gradient = gradient
        seed, client, round_number = key
        sequence = np.random.SeedSequence([seed, _STREAM, client, round_number])
        self._seed = int(sequence.generate_state(1, np.uint64)[0])
        self._random: tuple[Tensor, ...] = ()
        self.start: Buffers | None = None
        self.state: dict[str, Tensor] | None = None

    def losses_and_gradients(self, params: Any, features: Any, labels: Any) -> tuple[Any, Any]:
        """Return the loss of a batch and its gradient."""
        return self._gradient(self, params, features, labels)

    @contextmanager
    def drawing(self, device: torch.device) -> Iterator[None]:
        """Let torch's generators go on where this session left them, and put them back after."""
        before = _get(device)
        try:
            if self._random:
                _set(self._random, device)
            else:
                _seed(self._seed, device)
            yield
            self._random = _get(device)
        finally:
            _set(before, device)


def _get(device: torch.device) -> tuple[Tensor, ...]:
    if device.type == "cuda":
        return torch.get_rng_state(), torch.cuda.get_rng_state(device)
    return (torch.get_rng_state(),)


def _seed(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def _set(states: Sequence[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


def read_state(layout: ModelLayout, state: dict[str, Tensor]) -> Buffers:
    """Return the layout's buffers out of the state that calls left."""
    values = np.empty(layout.num_statistics)
    counts = np.empty(layout.num_counters, np.int64)
    for target, specs in ((values, layout.statistics), (counts, layout.counters)):
        for spec in specs:
            target[spec.place] = state[spec.name].detach().cpu().reshape(-1).numpy()
    return Buffers(values, counts)
