"""CUDA graphs: the fixed part of a round, recorded once, and replayed before it is asked for.

With a small model a GPU computes a round's gradients and statistics in less time than Python needs
to ask for them. All of it has the same shape in every round in which all clients are present, so it
is recorded. And its inputs are known as soon as the server has taken its step: the GPU begins the
next round while Python still finishes the last. One copy brings back all that Python needs to
decide. Rounds with absent clients take the plain path of `TorchBackend`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aqg.core.mirror import Memory
from aqg.core.quantizers import GridQuantizer
from aqg.sim.torch_backend import TorchBackend, read_statistics, statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aqg.core.grids import Grid
    from aqg.core.innovation import Innovation
    from aqg.core.messages import AnyUpload
    from aqg.core.quantizers import Quantizer
    from aqg.core.types import Float64Array, IntArray
    from aqg.sim.problem import Problem

Tensor = torch.Tensor

_WARM_UP_CALLS = 3
"""Libraries allocate and choose algorithms in their first calls, which cannot be recorded."""
_FEW_UPLOADS = 3
"""So many mirrors are moved one by one: indices of more must first be brought to the device."""


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

    def replay(self) -> None:
        """Compute again from what the inputs hold now; overwrites the same outputs."""
        self._graph.replay()


class CudaBackend(TorchBackend):
    """A `TorchBackend` that replays what does not change from round to round."""

    is_asynchronous = True

    def __init__(self, problem: Problem, device: str) -> None:
        super().__init__(problem, device)
        self._everyone = np.arange(problem.num_clients)
        self._params: Tensor = self.put(problem.initial_params)
        self._squared_norm = torch.zeros((), dtype=torch.float64, device=self.device)
        self._recording: Recording | None = None
        self._recorded_for: tuple[Any, ...] = ()
        self._report = torch.empty(0)
        """What the recording computed, in memory that the GPU writes to by itself."""
        self._report_values: Float64Array = self._report.numpy()
        self._step_recording: Recording | None = None
        self._step_recorded_for: tuple[Any, ...] = ()
        self._last_step: tuple[Any, ...] = ()
        self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._is_ahead = False
        """Whether the recording was replayed for the parameters as they are."""

    def foresee(self, params: Tensor, memory: Memory, quantizer: Quantizer, held: Tensor) -> None:
        """Replay gradients and statistics of all clients, and send for the results."""
        if not isinstance(quantizer, GridQuantizer) or not self._objective.stackable:
            return
        if params is not self._params:
            return
        wanted = (memory, quantizer, held.data_ptr())
        if self._recorded_for != wanted:
            self._record(memory, quantizer.grid, quantizer.max_width, held)
            self._recorded_for = wanted
        assert self._recording is not None
        self._recording.replay()
        self._report.copy_(self._recording.outputs[2], non_blocking=True)
        self._arrival.record()
        self._is_ahead = True

    def _record(self, memory: Memory, grid: Grid, max_width: int, held: Tensor) -> None:
        plain = super().losses_and_gradients

        def compute() -> tuple[Tensor, ...]:
            losses, gradients = plain(self._params, self._everyone)
            deltas, table = _compare(memory, grid, max_width, gradients, held)
            report = torch.cat([table.view(-1), losses, self._squared_norm.view(1)])
            return gradients, deltas, report

        self._recording = Recording(compute)
        self._report = torch.empty(
            self._recording.outputs[2].shape, dtype=torch.float64, pin_memory=True
        )
        self._report_values = self._report.numpy()

    def get(self, array: Any) -> Any:
        """Copy from the device, unless it came with the report."""
        return array if isinstance(array, np.ndarray) else super().get(array)

    def losses_and_gradients(self, params: Tensor, clients: IntArray) -> tuple[Any, Tensor]:
        """Return what was foreseen, if it was this; the losses are there after the statistics."""
        num_clients = len(self._everyone)
        if not self._is_ahead or params is not self._params or len(clients) < num_clients:
            return super().losses_and_gradients(params, clients)
        assert self._recording is not None
        return self._report_values[-1 - num_clients : -1], self._recording.outputs[0]

    def innovations(
        self,
        memory: Memory,
        quantizer: Quantizer,
        gradients: Tensor,
        held: Tensor,
        clients: IntArray,
    ) -> tuple[Tensor, Innovation]:
        """Wait for the statistics that were foreseen, if they were these."""
        recording = self._recording
        is_foreseen = recording is not None and gradients is recording.outputs[0]
        if recording is None or not (is_foreseen and isinstance(quantizer, GridQuantizer)):
            return super().innovations(memory, quantizer, gradients, held, clients)
        self._arrival.synchronize()
        table = self._report_values[: -1 - len(clients)].reshape(len(clients), -1).copy()
        return recording.outputs[1], read_statistics(table, quantizer.max_width)

    def advance(
        self,
        memory: Memory,
        mirrors: Tensor,
        total: Tensor,
        clients: IntArray,
        uploads: Sequence[AnyUpload],
        weights: Float64Array,
    ) -> None:
        """Take the same steps, without waiting for the device."""
        if memory is not Memory.INNOVATION or len(clients) > _FEW_UPLOADS:
            super().advance(memory, mirrors, total, clients, uploads, weights)
            return
        dtype = np.dtype(str(mirrors.dtype).removeprefix("torch.")).type
        for client, upload, weight in zip(clients.tolist(), uploads, weights.tolist(), strict=True):
            mirror = mirrors[client]
            old = mirror.to(torch.float64, copy=True)
            mirror += torch.from_numpy(upload.values(dtype)).to(self.device, non_blocking=True)
            total += weight * (mirror.double() - old)

    def take_step(
        self, params: Tensor, update: Tensor, direction: Tensor, step_size: float
    ) -> tuple[Tensor, Tensor]:
        """Take the step in the memory that the recording reads; replay it where it can be."""
        self._is_ahead = False
        if params is not self._params:
            self._params.copy_(params)
        wanted = (update.data_ptr(), direction.data_ptr(), step_size)

        def compute() -> tuple[Tensor, ...]:
            change = (step_size * update).to(self._params.dtype)
            torch.sub(self._params, change, out=self._params)
            torch.dot(direction, direction, out=self._squared_norm)
            return self._params, self._squared_norm

        if self._step_recorded_for == wanted and self._step_recording is not None:
            self._step_recording.replay()
        elif self._last_step == wanted and self._step_recording is None:
            before = self._params.clone()
            self._step_recording = Recording(compute)
            self._step_recorded_for = wanted
            self._params.copy_(before)
            self._step_recording.replay()
        else:
            compute()
        self._last_step = wanted
        return self._params, self._squared_norm

    def number(self, scalar: Tensor) -> float:
        """Wait for a scalar; it comes with the statistics if these were foreseen."""
        if not self._is_ahead:
            return super().number(scalar)
        self._arrival.synchronize()
        return float(self._report_values[-1])


def _compare(
    memory: Memory, grid: Grid, max_width: int, gradients: Tensor, held: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ``Δ`` of every client and the table of its `statistics`."""
    if (fused := _fused_statistics()) is not None:
        fused_deltas, table = fused.compare(memory, grid, max_width, gradients, held)
        return fused_deltas, table
    deltas = gradients
    if memory is Memory.INNOVATION:
        deltas = gradients - held
    elif memory is Memory.FEEDBACK:
        deltas = gradients + held
    return deltas, statistics(deltas, grid, max_width)


@functools.cache
def _fused_statistics() -> Any:
    """Return the module with kernels of our own, or None where Triton is missing."""
    try:
        from aqg.sim import triton_statistics
    except ImportError:  # more launches, the same numbers
        return None
    return triton_statistics
