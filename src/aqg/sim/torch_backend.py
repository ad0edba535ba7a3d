"""Torch tensors on a GPU: gradients and statistics there, only the senders' vectors come back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from aqg.core.grids import MAX_RADIUS, MIN_STEP, Grid
from aqg.core.innovation import Innovation
from aqg.core.mirror import Memory
from aqg.core.quantizers import GridQuantizer

if TYPE_CHECKING:
    from aqg.core.messages import DenseUpload, Upload
    from aqg.core.quantizers import Quantizer
    from aqg.core.types import Float64Array, IntArray
    from aqg.sim.problem import Problem

Tensor = torch.Tensor


class TorchBackend:
    """Everything of a client's round but the quantizing of what is sent stays on the device."""

    def __init__(self, problem: Problem, device: str) -> None:
        self.device = torch.device(device)
        self._objective = problem.objective
        self._features = [self.put(samples.features) for samples in problem.clients]
        self._labels = [self.put(samples.labels) for samples in problem.clients]
        sizes = {len(samples.labels) for samples in problem.clients}
        if len(sizes) == 1:  # one product for all; single clients are views of the stack
            self._stack = torch.stack(self._features), torch.stack(self._labels)
            self._features = list(self._stack[0])
            self._labels = list(self._stack[1])
        self._stacked = len(sizes) == 1

    def put(self, array: Any) -> Tensor:
        """Copy to the device."""
        return torch.tensor(array, device=self.device)

    def get(self, array: Tensor) -> Any:
        """Copy from the device."""
        return array.cpu().numpy()

    def losses(self, params: Tensor, clients: IntArray) -> Float64Array:
        """Return the loss of each of these clients."""
        if not len(clients):
            return np.empty(0)
        if self._stacked and len(clients) == len(self._features):
            losses = self._objective.losses(params, *self._stack)
        else:
            losses = torch.stack(
                [
                    self._objective.losses(params, self._features[m], self._labels[m])
                    for m in clients
                ]
            )
        result: Float64Array = self.get(losses.double())
        return result

    def losses_and_gradients(
        self, params: Tensor, clients: IntArray
    ) -> tuple[Float64Array, Tensor]:
        """Return the loss and the gradient of each of these clients."""
        if self._stacked and len(clients) == len(self._features):
            losses, gradients = self._objective.losses_and_gradients(params, *self._stack)
        else:
            pairs = [
                self._objective.losses_and_gradients(params, self._features[m], self._labels[m])
                for m in clients
            ]
            losses = torch.stack([loss for loss, _ in pairs])
            gradients = torch.stack([gradient for _, gradient in pairs])
        return self.get(losses.double()), gradients

    def samples(self, client: int) -> tuple[Tensor, Tensor]:
        """Return a client's features and labels."""
        return self._features[client], self._labels[client]

    def stack(self, rows: list[Tensor]) -> Tensor:
        """Copy into one tensor."""
        return torch.stack(rows)

    def subtract(self, rows: Tensor, table: Tensor, clients: IntArray) -> Tensor:
        """Subtract."""
        return rows - self._rows(table, clients)

    def add(self, rows: Tensor, table: Tensor, clients: IntArray) -> Tensor:
        """Add."""
        return rows + self._rows(table, clients)

    def store(self, table: Tensor, clients: IntArray, rows: Any) -> None:
        """Set rows."""
        table[torch.as_tensor(clients, device=self.device)] = torch.as_tensor(
            rows, device=self.device
        )

    def measure(self, quantizer: Quantizer, rows: Tensor) -> Innovation:
        """Measure on the device where the quantizer is a grid or needs the norm only."""
        if isinstance(quantizer, GridQuantizer):
            return measure_rows(rows, quantizer.grid, quantizer.max_width)
        if quantizer.num_errors == 0:
            return measure_rows(rows, Grid.MIDTREAD, 0)
        return quantizer.measure(self.get(rows))

    def advance(
        self,
        memory: Memory,
        mirrors: Tensor,
        total: Tensor,
        client: int,
        upload: Upload | DenseUpload,
        weight: float,
    ) -> None:
        """Take the same step as the state machines: exact values, one rounding."""
        if not memory.keeps_mirror:
            total += weight * self.put(upload.values(np.float64))
            return
        dtype = np.dtype(str(mirrors.dtype).removeprefix("torch.")).type
        values = self.put(upload.values(dtype))
        old = mirrors[client]
        new = old + values if memory is Memory.INNOVATION else values
        total += weight * (new.double() - old.double())
        mirrors[client] = new

    def descend(self, params: Tensor, update: Tensor, step_size: float) -> Tensor:
        """Take the step in the precision of the parameters."""
        return params - (step_size * update).to(params.dtype)

    def squared_norm(self, direction: Tensor) -> float:
        """Return ``‖direction‖²``."""
        return float(direction @ direction)

    def _rows(self, table: Tensor, clients: IntArray) -> Tensor:
        if len(clients) == len(table):
            return table
        return table[torch.as_tensor(clients, device=self.device)]


def measure_rows(rows: Tensor, grid: Grid, max_width: int) -> Innovation:
    """Compute `aqg.core.innovation.measure` with torch; one transfer brings all results back."""
    magnitude = rows.abs()
    radius = magnitude.amax(dim=1).double()
    mean_abs = magnitude.mean(dim=1, dtype=torch.float64)
    columns = [radius, rows.square().sum(dim=1, dtype=torch.float64)]
    for width in range(1, max_width + 1):
        step = _round_up_to_bfloat16(_raw_step(grid, width, radius, mean_abs))
        values = _quantized_values(rows, grid, width, step)
        columns += [step, (values - rows).square().sum(dim=1, dtype=torch.float64)]
        if width == max_width:
            columns.append(values.square().sum(dim=1, dtype=torch.float64))
    table = torch.stack(columns, dim=1).cpu().numpy()
    in_range = table[:, 0] <= MAX_RADIUS  # False for NaN and infinity too
    return Innovation(
        in_range=in_range,
        squared_norm=table[:, 1],
        steps=table[:, 2 : 2 + 2 * max_width : 2],
        errors=table[:, 3 : 3 + 2 * max_width : 2],
        quantized_norm=table[:, -1],
    )


def _raw_step(grid: Grid, width: int, radius: Tensor, mean_abs: Tensor) -> Tensor:
    if grid is Grid.MIDRISE:
        return 2 * radius / ((1 << width) - 1)
    if width == 1:
        return mean_abs
    return radius / ((1 << (width - 1)) - 1)


def _round_up_to_bfloat16(values: Tensor) -> Tensor:
    """Do for tensors what `aqg.core.grids.round_up_to_bfloat16` does for a number."""
    mantissa, exponent = torch.frexp(values)
    rounded = torch.ldexp(torch.ceil(mantissa * 256), exponent - 8)
    return torch.where(values > 0, rounded.clamp(min=MIN_STEP), torch.zeros_like(values))


def _quantized_values(rows: Tensor, grid: Grid, width: int, step: Tensor) -> Tensor:
    column = step.to(rows.dtype)[:, None]
    # Never above the true inverse, as in `aqg.core.kernels.inverses_below`.
    inverse = torch.where(step > 0, 1.0 / step, torch.zeros_like(step)).to(rows.dtype)
    inverse = torch.nextafter(inverse, torch.zeros_like(inverse))[:, None]
    if grid is Grid.MIDRISE:
        return (torch.floor(rows * inverse) + 0.5) * column
    if width == 1:
        return torch.where(rows >= 0, column, -column)
    return torch.round(rows * inverse) * column
