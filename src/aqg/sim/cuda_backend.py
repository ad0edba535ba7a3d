"""CUDA graphs: the fixed part of a round, recorded once and replayed with one launch.

With a small model a GPU computes a round's gradients and statistics in less time than Python needs
to ask for them. All of it has the same shape in every round in which all clients are present, so it
is recorded. Rounds with absent clients take the plain path of `TorchBackend`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from aqg.core.mirror import Memory
from aqg.core.quantizers import GridQuantizer
from aqg.sim.torch_backend import TorchBackend, read_statistics, statistics

if TYPE_CHECKING:
    from collections.abc import Callable

    from aqg.core.grids import Grid
    from aqg.core.innovation import Innovation
    from aqg.core.quantizers import Quantizer
    from aqg.core.types import IntArray
    from aqg.sim.problem import Problem

Tensor = torch.Tensor

_WARM_UP_CALLS = 3
"""Libraries allocate and choose algorithms in their first calls, which cannot be recorded."""


class Recording:
    """A function without arguments whose kernels are replayed; its outputs stay in place."""

    def __init__(self, compute: Callable[[], tuple[Tensor, ...]]) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_CALLS):
                compute()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.outputs = compute()

    def replay(self) -> tuple[Tensor, ...]:
        """Compute again from what the inputs hold now; overwrites the same outputs."""
        self._graph.replay()
        return self.outputs


class CudaBackend(TorchBackend):
    """A `TorchBackend` that replays what does not change from round to round."""

    def __init__(self, problem: Problem, device: str) -> None:
        super().__init__(problem, device)
        self._everyone = problem.num_clients
        self._params: Tensor = self.put(problem.initial_params)
        self._gradient_recording: Recording | None = None
        self._innovation_recording: Recording | None = None
        self._recorded_for: tuple[Any, ...] = ()

    def losses_and_gradients(self, params: Tensor, clients: IntArray) -> tuple[Tensor, Tensor]:
        """Replay the gradients of all clients."""
        if len(clients) < self._everyone or not self._objective.stackable:
            return super().losses_and_gradients(params, clients)
        self._params.copy_(params)
        if self._gradient_recording is None:
            plain = super().losses_and_gradients
            self._gradient_recording = Recording(lambda: plain(self._params, clients))
        losses, gradients = self._gradient_recording.replay()
        return losses, gradients

    def innovations(
        self,
        memory: Memory,
        quantizer: Quantizer,
        gradients: Tensor,
        held: Tensor,
        clients: IntArray,
    ) -> tuple[Tensor, Innovation]:
        """Replay the statistics of recorded gradients."""
        recording = self._gradient_recording
        is_recorded = recording is not None and gradients is recording.outputs[1]
        if not is_recorded or not isinstance(quantizer, GridQuantizer):
            return super().innovations(memory, quantizer, gradients, held, clients)
        grid, max_width = quantizer.grid, quantizer.max_width
        wanted = (memory, grid, max_width, held.data_ptr())
        if self._recorded_for != wanted:
            self._innovation_recording = Recording(
                lambda: _compare(memory, grid, max_width, gradients, held)
            )
            self._recorded_for = wanted
        assert self._innovation_recording is not None
        deltas, table = self._innovation_recording.replay()
        return deltas, read_statistics(table.cpu().numpy(), max_width)


def _compare(
    memory: Memory, grid: Grid, max_width: int, gradients: Tensor, held: Tensor
) -> tuple[Tensor, Tensor]:
    deltas = gradients
    if memory is Memory.INNOVATION:
        deltas = gradients - held
    elif memory is Memory.FEEDBACK:
        deltas = gradients + held
    return deltas, statistics(deltas, grid, max_width)
