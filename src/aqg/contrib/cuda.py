"""CUDA graphs: the fixed part of a round, recorded once, and replayed before it is asked for.

With a small model a GPU computes a round's gradients and statistics in less time than Python needs
to ask for them. All of it has the same shape in every round in which all clients are present, so it
is recorded; and its inputs are known as soon as the server has taken its step, so the GPU begins
the next round while Python still finishes the last. Rounds with absent clients take the plain path
of `TorchBackend`. The engine knows nothing of this: the backend learns from the calls of one round
what to begin with for the next, and every call returns finished numbers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from aqg.core.grids import Innovation
from aqg.core.messages import AnyUpload
from aqg.core.quantizers import GridQuantizer, Quantizer
from aqg.core.track import Memory
from aqg.core.types import Float64Array, IntArray
from aqg.sim.problem import Problem
from aqg.sim.torch_backend import TorchBackend, read_statistics, statistics

Tensor = torch.Tensor

_WARM_UP_CALLS = 3
"""Libraries allocate and choose algorithms in their first calls, which cannot be recorded."""
_FEW_UPLOADS = 3
"""So many mirrors are moved one by one: indices of more must first be brought to the device."""


class Report:
    """Numbers on their way from the GPU, in memory that it writes to by itself."""

    def __init__(self, length: int) -> None:
        self._numbers = torch.empty(length, dtype=torch.float64, pin_memory=True)
        self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.values: Float64Array = self._numbers.numpy()

    def request(self, source: Tensor) -> None:
        self._numbers.copy_(source, non_blocking=True)
        self._arrival.record()

    def wait(self) -> None:
        self._arrival.synchronize()


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

    def __init__(self, problem: Problem, device: str) -> None:
        super().__init__(problem, device)
        self._everyone = np.arange(problem.num_clients)
        self._params: Tensor = self.put(problem.initial_params)
        self._squared_norm = torch.zeros((), dtype=torch.float64, device=self.device)
        self._norm = Report(1)
        self._gradients: Tensor | None = None  # of all clients, in this round
        # What they were measured with: the next round will ask the same.
        self._wanted: tuple[GridQuantizer, Tensor | None] | None = None
        # What was recorded for it, all clients present: gradients, ``Δ`` and what Python needs to
        # know, which the report brings.
        self._recorded_for: tuple[GridQuantizer, Tensor | None] | None = None
        self._recording: Recording
        self._report: Report
        self._is_ahead = False  # whether the round that was begun is of the parameters as they are

    def _begin(self) -> None:
        """Begin with what the next round asks if all clients take part; wait for nothing."""
        if self._wanted is None:
            return
        if not self._is_recorded_for(*self._wanted):
            self._recording, self._recorded_for = self._record(*self._wanted), self._wanted
            self._report = Report(len(self._recording.outputs[2]))
        self._recording.replay()
        self._report.request(self._recording.outputs[2])
        self._is_ahead = True

    def _is_recorded_for(self, quantizer: Quantizer, mirrors: Tensor | None) -> bool:
        recorded = self._recorded_for
        return recorded is not None and recorded[0] == quantizer and recorded[1] is mirrors

    def _record(self, quantizer: GridQuantizer, mirrors: Tensor | None) -> Recording:
        plain = super().losses_and_gradients

        def compute() -> tuple[Tensor, ...]:
            losses, gradients = plain(self._params, self._everyone)
            deltas = gradients if mirrors is None else gradients - mirrors
            table = statistics(deltas, quantizer.grid, quantizer.max_width)
            return gradients, deltas, torch.cat([table.view(-1), losses])

        return Recording(compute)

    def get(self, array: Any) -> Any:
        """Copy from the device, unless it came with the report."""
        return array if isinstance(array, np.ndarray) else super().get(array)

    def losses_and_gradients(self, params: Tensor, clients: IntArray) -> tuple[Any, Tensor]:
        """Return what was foreseen, if it was this; the losses are there after the statistics."""
        num_clients = len(self._everyone)
        if not (self._is_ahead and params is self._params and len(clients) == num_clients):
            losses, gradients = super().losses_and_gradients(params, clients)
            self._gradients = gradients if len(clients) == num_clients else None
            return losses, gradients
        self._gradients = self._recording.outputs[0]
        return self._report.values[-num_clients:], self._gradients

    def measure(
        self, quantizer: Quantizer, vectors: Tensor, mirrors: Tensor | None, clients: IntArray
    ) -> tuple[Tensor, Innovation]:
        """Wait for the statistics that were foreseen, if they were these."""
        if not isinstance(quantizer, GridQuantizer) or vectors is not self._gradients:
            return super().measure(quantizer, vectors, mirrors, clients)
        if self._objective.stackable:
            self._wanted = quantizer, mirrors
        if not (self._is_ahead and self._is_recorded_for(quantizer, mirrors)):
            return super().measure(quantizer, vectors, mirrors, clients)
        self._report.wait()
        table = self._report.values[: -len(clients)].reshape(len(clients), -1).copy()
        return self._recording.outputs[1], read_statistics(table, quantizer.max_width)

    def move(
        self,
        memory: Memory,
        mirrors: Tensor,
        total: Tensor,
        clients: IntArray,
        uploads: Sequence[AnyUpload],
        weights: Float64Array,
    ) -> None:
        if memory is not Memory.INNOVATION or len(clients) > _FEW_UPLOADS:
            super().move(memory, mirrors, total, clients, uploads, weights)
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
        """Take the step in the memory that the recording reads, and begin the next round."""
        self._is_ahead, self._gradients = False, None
        if params is not self._params:
            self._params.copy_(params)
        torch.sub(self._params, (step_size * update).to(self._params.dtype), out=self._params)
        torch.dot(direction, direction, out=self._squared_norm)
        self._norm.request(self._squared_norm.view(1))
        self._begin()
        self._wanted = None
        return self._params, self._squared_norm

    def number(self, scalar: Tensor) -> float:
        """Wait for a scalar; the step's length is on its way before the next round begins."""
        if scalar is not self._squared_norm:
            return super().number(scalar)
        self._norm.wait()
        return float(self._norm.values[0])
