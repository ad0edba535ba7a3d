"""Torch tensors on a GPU: gradients and statistics there, only the senders' vectors come back."""

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from aqg.core.grids import MAX_RADIUS, MIN_STEP, Grid, Innovation
from aqg.core.messages import AnyUpload
from aqg.core.quantizers import GridQuantizer, Quantizer
from aqg.core.space import NumpySpace, as_index
from aqg.core.track import Memory
from aqg.core.types import Float64Array, FloatArray, IntArray
from aqg.objectives.base import ClosedForm, Perceptron, Softmax
from aqg.sim.problem import Problem, Samples
from aqg.sim.training import Keys, LocalTraining

Tensor = torch.Tensor

_MOST_CUT = 256
"""So many clients of unequal size are cut into pieces; more would need a large table of owners."""


class TorchBackend(NumpySpace):
    """Everything of a client's round but the quantizing of what is sent stays on the device."""

    def __init__(self, problem: Problem, device: str) -> None:
        super().__init__(in_place=True)
        self.device = torch.device(device)
        self.host = NumpySpace(in_place=True)
        self._objective = problem.objective
        self._stack: list[Tensor] = []
        self._pieces: Pieces | None = None
        sizes = [len(samples.labels) for samples in problem.clients]
        self._starts, are_alike = [0, *accumulate(sizes[:-1])], len(set(sizes)) == 1
        is_cut = not are_alike and problem.num_clients <= _MOST_CUT
        if is_cut and isinstance(problem.objective, Softmax):
            self._pieces = cut(problem.clients, problem.objective.sample_weight, self.put)
            self._starts = self._pieces.starts
            self._in_one_row = [part.flatten(0, 1) for part in self._pieces[:2]]
        else:
            columns = zip(*problem.clients, strict=True)
            self._in_one_row = [torch.cat([self.put(part) for part in parts]) for parts in columns]
        spans = [slice(start, start + n) for start, n in zip(self._starts, sizes, strict=True)]
        self._features, self._labels = ([row[s] for s in spans] for row in self._in_one_row)
        if are_alike:  # one product for all
            self._stack = [row.unflatten(0, (len(sizes), sizes[0])) for row in self._in_one_row]

    def put(self, array: Any) -> Tensor:
        return torch.tensor(array, device=self.device)

    def get(self, array: Tensor) -> Any:
        return torch.as_tensor(array).cpu().numpy()

    def losses(self, params: Tensor, clients: IntArray) -> Float64Array:
        if not len(clients):
            return np.empty(0)
        if self._stack:
            losses = self._objective.losses(params, *self._members(clients))
        else:
            losses = torch.stack(self._one_by_one(self._objective.losses, params, clients))
        return self.get(losses.double())

    def losses_and_gradients(self, params: Tensor, clients: IntArray) -> tuple[Tensor, Tensor]:
        if self._stack:
            samples = self._members(clients)
            losses, gradients = self._objective.losses_and_gradients(params, *samples)
        elif self._pieces is not None and len(clients) == len(self._features):
            assert isinstance(self._objective, Softmax)
            losses, gradients = self._pieces.losses_and_gradients(self._objective, params)
        else:
            pairs = self._one_by_one(self._objective.losses_and_gradients, params, clients)
            losses, gradients = map(torch.stack, zip(*pairs, strict=True))
        return losses.double(), gradients

    def _one_by_one(self, function: Any, params: Tensor, clients: IntArray) -> list[Any]:
        return [function(params, self._features[m], self._labels[m]) for m in clients]

    def local_updates(
        self, local: LocalTraining, params: Tensor, clients: IntArray, keys: Keys
    ) -> tuple[Tensor, Tensor]:
        """Let all clients take each step together, where the objective allows it."""
        members = clients.tolist()
        if local.batch_size is not None and isinstance(self._objective, Softmax | Perceptron):
            features, labels = self._in_one_row
            own = [self._starts[m] for m in members], [len(self._labels[m]) for m in members]
            losses, updates = local.update_many(
                self._objective, params, features, labels, *own, keys
            )
            return losses.double(), updates
        pairs = [
            local.update(self._objective, params, self._features[m], self._labels[m], key)
            for m, key in zip(members, keys, strict=True)
        ]
        losses, updates = map(torch.stack, zip(*pairs, strict=True))
        return losses.double(), updates

    def zeros_like(self, array: Tensor) -> Tensor:
        return torch.zeros_like(array)

    def take(self, table: Tensor, clients: IntArray) -> Tensor:
        index = as_index(clients)
        if isinstance(index, slice):
            return table[index]
        return table[torch.as_tensor(index, device=self.device)]

    def rows(self, table: Tensor, clients: IntArray) -> Sequence[FloatArray]:
        return self.get(self.take(table, clients))

    def store(self, table: Tensor, clients: IntArray, rows: Any) -> Tensor:
        index = torch.as_tensor(clients, device=self.device)
        table[index] = torch.as_tensor(rows, device=self.device)
        return table

    def apart(self, rows: Tensor, vectors: Tensor) -> Tensor:
        is_shared = rows.untyped_storage().data_ptr() == vectors.untyped_storage().data_ptr()
        return rows.clone() if is_shared else rows

    def measure(
        self, quantizer: Quantizer, vectors: Tensor, mirrors: Tensor | None, clients: IntArray
    ) -> tuple[Tensor, Innovation]:
        """Measure on the device where the quantizer is a grid or needs the norm only."""
        deltas = vectors if mirrors is None else vectors - self.take(mirrors, clients)
        if isinstance(quantizer, GridQuantizer):
            return deltas, measure_rows(deltas, quantizer.grid, quantizer.max_width)
        if type(quantizer).measure is Quantizer.measure:
            return deltas, measure_rows(deltas, Grid.MIDTREAD, 0)
        return deltas, quantizer.measure(self.get(deltas))

    def add(self, vectors: Tensor, rows: Tensor) -> Tensor:
        return vectors + rows

    def blend(self, averages: Tensor, vectors: Tensor, weight: float) -> Tensor:
        if weight == 1.0:
            return vectors.clone()
        is_usable = vectors.abs().amax(dim=1, keepdim=True) <= MAX_RADIUS
        is_blended = is_usable & (averages != 0).any(dim=1, keepdim=True)
        return torch.where(is_blended, averages * (1.0 - weight) + vectors * weight, vectors)

    def distances(self, vectors: Tensor, earlier: Tensor) -> Float64Array:
        moved = measure_rows(vectors - earlier, Grid.MIDTREAD, 0).squared_norm
        return np.where(self.get((earlier != 0).any(dim=1)), moved, 0.0)

    def move(
        self,
        memory: Memory,
        mirrors: Tensor,
        total: Tensor,
        clients: IntArray,
        uploads: Sequence[AnyUpload],
        weights: Float64Array,
    ) -> None:
        """Move all at once: exact values, one rounding per mirror."""
        factors = self.put(weights)[:, None]
        dtype = np.dtype(str(mirrors.dtype).removeprefix("torch.")).type
        values = self.put(np.stack([upload.values(dtype) for upload in uploads]))
        indices = torch.as_tensor(clients, device=self.device)
        old = mirrors[indices]
        new = old + values if memory is Memory.INNOVATION else values
        total += (factors * (new.double() - old.double())).sum(dim=0)
        mirrors[indices] = new

    def add_values(
        self, total: Tensor, uploads: Sequence[AnyUpload], weights: Float64Array
    ) -> None:
        values = self.put(np.stack([upload.values(np.float64) for upload in uploads]))
        total += (self.put(weights)[:, None] * values).sum(dim=0)

    def cast(self, vector: Tensor, like: Tensor) -> Tensor:
        return vector.to(like.dtype)

    def take_step(
        self, params: Tensor, update: Tensor, direction: Tensor, step_size: float
    ) -> tuple[Tensor, Tensor]:
        return params - (step_size * update).to(params.dtype), direction @ direction

    def squared_norm(self, vector: Tensor) -> float:
        wide = vector.double()
        return float(wide @ wide)

    def root(self, vector: Tensor) -> Tensor:
        """Take it on the device; NumPy's on the CPU, as MKL's is off by a last bit now and then."""
        if vector.is_cpu:
            return torch.from_numpy(np.sqrt(vector.numpy()))
        return vector.sqrt()

    def _members(self, clients: IntArray) -> list[Tensor]:
        return [self.take(part, clients) for part in self._stack]


def measure_rows(rows: Tensor, grid: Grid, max_width: int) -> Innovation:
    """Compute `aqg.core.grids.measure` with torch; one transfer brings all results back."""
    return read_statistics(statistics(rows, grid, max_width).cpu().numpy(), max_width)


def statistics(rows: Tensor, grid: Grid, max_width: int) -> Tensor:
    """Return a table of all statistics of all rows, on the device.

    All widths go through each operation together, as ``(M, b_max, n)``: a GPU spends longer on
    starting an operation than on a few million numbers.
    """
    magnitude = rows.abs()
    columns = [
        magnitude.amax(dim=1, keepdim=True).double(),
        rows.square().sum(dim=1, keepdim=True, dtype=torch.float64),
    ]
    if max_width:
        mean_abs = magnitude.mean(dim=1, keepdim=True, dtype=torch.float64)
        steps = _grid_steps(grid, max_width, columns[0], mean_abs)
        values = _quantized_values(rows, grid, steps)
        errors = (values - rows[:, None]).square().sum(dim=2, dtype=torch.float64)
        quantized = values[:, -1].square().sum(dim=1, keepdim=True, dtype=torch.float64)
        columns += [quantized, steps, errors]
    return torch.cat(columns, dim=1)


def read_statistics(table: Float64Array, max_width: int) -> Innovation:
    """Return the columns of `statistics` by name."""
    return Innovation(
        in_range=table[:, 0] <= MAX_RADIUS,  # False for NaN and infinity too
        squared_norm=table[:, 1],
        steps=table[:, 3 : 3 + max_width],
        errors=table[:, 3 + max_width :],
        quantized_norm=table[:, 2] if max_width else np.zeros(len(table)),
    )


def _grid_steps(grid: Grid, max_width: int, radius: Tensor, mean_abs: Tensor) -> Tensor:
    """Return the steps of `aqg.core.grids` for all rows and widths, ``(M, b_max)``."""
    widths = range(1, max_width + 1)
    if grid is Grid.MIDRISE:
        counts = [(1 << width) - 1 for width in widths]
        raw = 2 * radius / _constants(tuple(counts), radius.device)
    else:
        counts = [(1 << (width - 1)) - 1 for width in widths[1:]]
        mean_abs = torch.where(mean_abs >= MIN_STEP, mean_abs, 0.0)
        raw = torch.cat([mean_abs, radius / _constants(tuple(counts), radius.device)], dim=1)
    # Rounded up to bfloat16: of a float64, 45 of the last bits must be zero.
    bits = (raw.view(torch.int64) + ((1 << 45) - 1)) & -(1 << 45)
    return torch.where(raw > 0, bits.view(torch.float64).clamp(min=MIN_STEP), 0.0)


@functools.lru_cache
def _constants(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def _quantized_values(rows: Tensor, grid: Grid, steps: Tensor) -> Tensor:
    """Return ``Q_b(Δ)`` for all widths, ``(M, b_max, n)``."""
    # Never above the true inverse, as in `aqg.core.grids._inverse_below`.
    inverses = torch.where(steps > 0, 1.0 / steps, 0.0).to(rows.dtype)
    inverses = torch.nextafter(inverses, torch.zeros_like(inverses))
    columns = steps.to(rows.dtype)[..., None]
    scaled = rows[:, None] * inverses[..., None]
    if grid is Grid.MIDRISE:
        return scaled.floor_().add_(0.5).mul_(columns)
    values = scaled.round_().mul_(columns)
    values[:, 0] = torch.where(rows >= 0, columns[:, 0], -columns[:, 0])
    return values


PIECE_LENGTH = 512
"""Longest piece: with ten classes, a product of so many samples keeps a share of a GPU busy."""


class Pieces(NamedTuple):
    """``P`` pieces of ``L`` samples, on a device."""

    features: Any  # ``(P, L, f)``; the pieces of a client follow each other
    labels: Any  # ``(P, L)``
    weights: Any  # what a sample counts in its client's loss, ``(P, L)``
    owners: Any  # 1 where a piece belongs to a client, ``(M, P)``
    starts: list[int]  # where each client begins, counted in samples

    def losses_and_gradients(self, objective: ClosedForm, params: Any) -> tuple[Any, Any]:
        losses, gradients = objective.weighted_losses_and_gradients(
            params, self.features, self.labels, self.weights
        )
        losses, gradients = self.owners @ losses, self.owners @ gradients
        if objective.l2:
            losses += objective.l2 / 2 * (params @ params)
            gradients += objective.l2 * params
        return losses, gradients


def cut(
    clients: Sequence[Samples], weight: Callable[[int], float], put: Callable[[Any], Any]
) -> Pieces:
    """Cut all clients; ``weight`` gives a sample's share of so many, ``put`` moves arrays."""
    length = min(PIECE_LENGTH, max(len(client.labels) for client in clients))
    sizes, dtype = [len(client.labels) for client in clients], clients[0].features.dtype
    counts = [-(-size // length) for size in sizes]
    starts = [length * piece for piece in accumulate([0, *counts[:-1]])]
    spans = zip(starts, sizes, strict=True)
    places = np.concatenate([np.arange(start, start + size) for start, size in spans])

    def tabled(parts: Iterable[NDArray[Any]]) -> Any:
        joined = np.concatenate(list(parts))
        table = np.zeros((sum(counts), length, *joined.shape[1:]), joined.dtype)
        table.reshape(-1, *joined.shape[1:])[places] = joined
        return put(table)

    features, labels = map(tabled, zip(*clients, strict=True))
    weights = tabled(np.full(size, weight(size), dtype) for size in sizes)
    owners = np.repeat(np.eye(len(clients), dtype=dtype), counts, axis=1)
    return Pieces(features, labels, weights, put(owners), starts)
