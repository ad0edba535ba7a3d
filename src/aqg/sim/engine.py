"""The fast simulator: many clients at once, on CPU or GPU.

Clients and server take the steps of `aqg.core.round` and `aqg.core.server`, as everywhere else.
What is done here is to hand clients over in blocks of consecutive ones, so that gradients never
take more memory than ``block_bytes``, whatever the number of clients; to keep the model, the
mirrors and the samples on one device; and to size frames in place of building them.

On the CPU in float64 every upload, width, byte and parameter equals the reference's bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aqg.core.messages import AnyUpload, Skip
from aqg.core.recipe import Recipe
from aqg.core.round import Clients, compress, settle
from aqg.core.server import Model, add_uploads, take_step
from aqg.core.space import Array, NumpySpace, as_index, with_rows
from aqg.core.track import Flow
from aqg.core.types import Float64Array, FloatArray, IntArray
from aqg.errors import ConfigError
from aqg.objectives.base import ClosedForm, Perceptron, Softmax
from aqg.sim.problem import Problem, Samples
from aqg.sim.record import DROPPED, SKIP_BYTES, RoundRecord, frame_sizes
from aqg.sim.simulation import Simulation
from aqg.sim.training import Keys, LocalTraining, Reply

if TYPE_CHECKING:  # needs torch
    from aqg.sim.torch_backend import TorchBackend

Backend: TypeAlias = "NumpyBackend | TorchBackend"
"""The space of a simulation's vectors, and what clients compute there."""


class FastSimulation(Simulation):
    """The same results as `ReferenceSimulation`, and the same arguments but for two.

    Args:
        device: ``"cpu"``, or a torch device such as ``"cuda"``.
        block_bytes: the most memory one block of gradients may take.
    """

    space: Backend
    _clients: Clients  # what the clients remember, in the space

    def __init__(
        self,
        problem: Problem,
        recipe: Recipe,
        *arguments: Any,
        device: str = "cpu",
        block_bytes: int = 1 << 25,
        **options: Any,
    ) -> None:
        super().__init__(problem, recipe, *arguments, **options)
        self.space = make_backend(self.problem, device)
        self._block_size = max(1, block_bytes // problem.initial_params.nbytes)
        self._load(self._initial_state())

    def run_round(self, evaluate: bool = True) -> RoundRecord:
        number, num_clients = self.next_round, len(self.everyone)
        present = self._present()
        widths = np.full(num_clients, DROPPED)
        widths[present] = 0
        losses = np.full(num_clients, np.nan)
        faults: list[tuple[int, str]] = []
        sent = np.zeros(num_clients, np.int64)
        sent[present] = SKIP_BYTES
        movement, noise = self.recipe.movement.of(self.model.history), self.model.budget.noise
        _, received = self._deliver(present)
        replies: dict[int, Reply] = {}
        shares = self._shares(present)
        for start in range(0, len(present), self._block_size):
            block = present
            if len(present) > self._block_size:
                block = present[start : start + self._block_size]
            block_losses, vectors = self._train(block)
            factors = None if self.level_factors is None else self.level_factors[block]
            terms = number, self.seed, 0, block_losses, factors, noise
            flow = Flow(vectors, movement, self.space, *terms)
            said = compress(self.recipe, self._clients, block, flow)
            faults += said.faults
            if len(said.senders):
                widths[said.senders] = [upload.width for upload in said.uploads]
                track, senders, uploads = self._clients.track, said.senders, said.uploads
                sent[senders] = frame_sizes(self.space, track, senders, uploads)
                if self.replies is None:
                    self._add(senders, uploads, shares)
            if self.replies is not None:
                messages = dict(zip(said.senders.tolist(), said.uploads, strict=True))
                replies |= {m: Reply(messages.get(m, Skip()), int(sent[m])) for m in block.tolist()}
            self._clients = settle(self.recipe, self._clients, said)
            if evaluate:  # last: a GPU need not be waited for
                losses = with_rows(losses, block, self.space.get(block_losses))
        loss = self._mean_loss(losses) if evaluate else None
        if self.replies is not None:
            closed = self._close(number, replies, received)
            widths, sent = closed.widths_and_sizes()
            senders, uploads = closed.uploads()
            if uploads:
                self._add(senders, uploads, self._shares(closed.clients) * closed.factors)
        before = self.model
        self.model, entry = take_step(self.space, self.recipe, before, self.step, num_clients)
        self._publish(entry, before)
        return self._record(number, loss, widths, faults, sent, received, present)

    def _add(self, senders: IntArray, uploads: Sequence[AnyUpload], shares: Float64Array) -> None:
        track, own = self._clients.track, shares[senders]
        self.model = add_uploads(self.space, self.recipe, self.model, track, senders, uploads, own)

    def _losses(self, clients: IntArray) -> Float64Array:
        return self.statistics.losses(self.space, self.model.parameters, clients)

    def _train(self, block: IntArray) -> tuple[Array, Array]:
        """Return each client's loss and the vector it would send: its (pseudo-)gradient."""
        local, params = self.training.local, self.model.parameters
        if local.is_one_gradient:
            return self.space.losses_and_gradients(params, block)
        keys = [(self.seed, client, self.next_round) for client in block.tolist()]
        return self.space.local_updates(local, params, block, keys)

    def _place(self, model: Model, clients: Clients) -> None:
        self.model, self._clients = model, clients

    def _clients_state(self) -> Clients:
        return self._clients


Group = tuple[slice | int, FloatArray, IntArray]


def check_device(device: str) -> None:
    """Raise `ConfigError` if ``device`` is not one that `make_backend` can use here."""
    if device == "cpu":
        return
    try:
        import torch
    except ImportError:
        raise ConfigError(
            f"device {device!r} needs torch; install with: pip install 'aqg[torch]'"
        ) from None
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device is {device!r}, but torch sees no GPU here; use cpu")
    try:
        torch.empty(1, device=device.removeprefix("torch:"))
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device {device!r} cannot be used: {reason}") from None


def make_backend(problem: Problem, device: str) -> Backend:
    """Return the backend for ``"cpu"`` (NumPy), ``"cuda"``, or ``"torch:DEVICE"``."""
    if device == "cpu":
        return NumpyBackend(problem)
    check_device(device)
    if device.startswith("cuda"):
        from aqg.contrib.cuda import CudaBackend

        return CudaBackend(problem, device)
    from aqg.sim.torch_backend import TorchBackend

    return TorchBackend(problem, device.removeprefix("torch:"))


class NumpyBackend(NumpySpace):
    """NumPy arrays, BLAS for the gradients, numba for the rest."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(in_place=True)
        self._objective = problem.objective
        self._clients = problem.clients
        self._stacks = stack_small_clients(problem)
        self._grouped: tuple[IntArray, list[Group]] = np.empty(0, np.int64), []

    def losses(self, params: FloatArray, clients: IntArray) -> Float64Array:
        result = np.empty(len(clients))
        for positions, features, labels in self._groups(clients):
            result[positions] = self._objective.losses(params, features, labels)
        return result

    def losses_and_gradients(
        self, params: FloatArray, clients: IntArray
    ) -> tuple[Float64Array, FloatArray]:
        if clients is not self._grouped[0]:  # the same again in every round where all take part
            self._grouped = clients, list(self._groups(clients))
        groups = self._grouped[1]
        if len(groups) == 1 and len(clients) > 1:  # the results as they are, without a copy
            alone, gradients = self._objective.losses_and_gradients(params, *groups[0][1:])
            return alone.astype(np.float64, copy=False), gradients
        losses = np.empty(len(clients))
        gradients = np.empty((len(clients), len(params)), params.dtype)
        for positions, features, labels in groups:
            losses[positions], gradients[positions] = self._objective.losses_and_gradients(
                params, features, labels
            )
        return losses, gradients

    def _groups(self, clients: IntArray) -> Iterator[Group]:
        """Split clients into stacks of equal size, and single ones where stacking gains nothing."""
        position = 0
        while position < len(clients):
            first = int(clients[position])
            stack = self._stacks.get(first)
            if stack is None:
                samples = self._clients[first]
                yield position, samples.features, samples.labels
                position += 1
                continue
            end = stack.first + len(stack.features)
            stop = len(clients)
            if clients[-1] >= end:
                stop = position + int(np.searchsorted(clients[position:], end))
            members = as_index(clients[position:stop] - stack.first)
            yield slice(position, stop), stack.features[members], stack.labels[members]
            position = stop

    def local_updates(
        self, local: LocalTraining, params: FloatArray, clients: IntArray, keys: Keys
    ) -> tuple[FloatArray, FloatArray]:
        """Return what `LocalTraining.update` gives for each client: losses and updates."""
        losses = np.empty(len(clients), params.dtype)
        updates = np.empty((len(clients), len(params)), params.dtype)
        objective, size = self._objective, max(1, _TOGETHER_BYTES // params.nbytes)
        groups: Iterable[Group] = ((i, *self._clients[m]) for i, m in enumerate(clients.tolist()))
        if isinstance(objective, Softmax | Perceptron):
            groups = self._groups(clients)
        for where, features, labels in groups:
            if isinstance(where, int):
                losses[where], updates[where] = local.update(
                    objective, params, features, labels, keys[where]
                )
                continue
            assert isinstance(objective, ClosedForm)
            flat, length = features.reshape(-1, features.shape[-1]), labels.shape[1]
            for first in range(0, len(labels), size):
                own = slice(where.start + first, min(where.start + first + size, where.stop))
                starts = range(0, labels.size, length)[first : first + size]
                spans = starts, [length] * len(starts)
                losses[own], updates[own] = local.update_many(
                    objective, params, flat, labels.ravel(), *spans, keys[own]
                )
        return losses, updates


STACK_BYTES = 1 << 20
"""Clients with more data than this gain nothing from a stack."""
_TOGETHER_BYTES = 1 << 19
"""Models that take local steps together: few enough to stay in a core's cache."""


class Stack(NamedTuple):
    """Clients ``first, first + 1, ...``: features ``(M, n, f)`` and labels ``(M, n)``."""

    first: int
    features: FloatArray
    labels: IntArray


def stack_small_clients(problem: Problem) -> dict[int, Stack]:
    """Return the stacks of consecutive clients of one size, for each client that is in one."""
    clients, stacks = problem.clients, dict[int, Stack]()
    if not problem.objective.stackable:
        return stacks
    starts = [m for m in range(len(clients)) if not (m and _goes_on(*clients[m - 1 : m + 1]))]
    for start, stop in pairwise([*starts, len(clients)]):
        if stop - start > 1 and clients[start].features.nbytes <= STACK_BYTES:
            features, labels = map(join, zip(*clients[start:stop], strict=True))
            stacks |= dict.fromkeys(range(start, stop), Stack(start, features, labels))
    return stacks


def _goes_on(one: Samples, other: Samples) -> bool:
    """Tell whether a client belongs into the stack of the one before it.

    Where a view of the clients' memory would have to jump back, a new stack begins: clients may
    share samples, and a stack must not multiply them.
    """
    shares = other.features.base is one.features.base
    jumps_back = shares and _address(other.features) <= _address(one.features)
    return len(other.labels) == len(one.labels) and not jumps_back


def join(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return arrays of one shape as the rows of one: a view if they lie side by side in memory."""
    first = arrays[0]
    base = first.base
    adjacent = isinstance(base, np.ndarray) and all(
        array.base is base
        and array.flags.c_contiguous
        and array.dtype == first.dtype
        and array.shape == first.shape
        and _address(array) == _address(first) + index * first.nbytes
        for index, array in enumerate(arrays)
    )
    if not adjacent:
        return np.stack(arrays)
    view = np.lib.stride_tricks.as_strided(
        first, (len(arrays), *first.shape), (first.nbytes, *first.strides), writeable=False
    )
    return view


def _address(array: NDArray[Any]) -> int:
    return array.__array_interface__["data"][0]
