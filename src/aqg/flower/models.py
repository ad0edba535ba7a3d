"""The server's model: what it is made from, its statistics, and the shape in which users get it.

A run starts from a torch module, from an ArrayRecord, or from a flat vector; what a user's function
is given back is the same kind of thing.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from aqg.errors import ConfigError
from aqg.flower.forms import VECTOR, Form, digest_of, record_of, values_of
from aqg.flower.statistics import signature
from aqg.objectives.layout import Buffers, ModelLayout
from aqg.objectives.statistics import SharedStatistics
from aqg.protocol.files import read_arrays, write_arrays

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch
    from numpy.typing import NDArray
    from torch import nn

    from aqg.core.types import FloatArray
    from aqg.wire.statistics import StatisticsMessage

    Values = Mapping[str, NDArray[Any]]


class ServerModel:
    """A model on the server: its form, its statistics, and what never travels of it.

    This one is made from an ArrayRecord, and users get an ArrayRecord.

    Args:
        form: which of the tensors travel.
        initial: ``θ`` at the start.
        buffers: at the start.
        constants: the tensors that never travel.
        digest: of those, where clients make it of their own.

    Attributes:
        signature: by which clients with a module of their own find out whether it is the same.
        constants_digest: of what never travels.

    """

    def __init__(
        self,
        form: Form,
        initial: FloatArray,
        buffers: Buffers,
        constants: Values,
        digest: bytes | None = None,
    ) -> None:
        self.form = form
        self.layout = form.layout
        self.initial = initial
        self.signature = signature(form.layout)
        self.constants_digest = digest_of(constants) if digest is None else digest
        self._constants = constants
        self._buffers = buffers
        self._shared = SharedStatistics.first(form.layout, buffers)
        self._averages = form.layout.policy == "average" and form.layout.carries_buffers

    @property
    def can_be_measured(self) -> bool:
        """Whether the server has the statistics that its model is to be used with."""
        return self.layout.policy != "local" or not any(self.layout.tracked)

    def start_record(self) -> ArrayRecord:
        """Return all tensors at the start, for clients that do not have them."""
        return record_of(self.form.fill(self._constants, self.initial, self._buffers))

    def record(self, params: FloatArray) -> ArrayRecord:
        """Return all tensors with these parameters, and the statistics that go with their mean."""
        return record_of(self._filled(params))

    def with_params(self, params: FloatArray) -> Any:
        """Return the model as users' functions are given it."""
        return self.record(params)

    def tensors(self, params: FloatArray) -> dict[str, Any]:
        """Return copies of all tensors, by name."""
        return {name: np.array(value) for name, value in self._filled(params).items()}

    def set_statistics(self, *, fine: bool, average: float) -> None:
        """Choose whether statistics are sent in half precision, and the mean of them (``γ``)."""
        self._shared = self._shared._replace(fine=fine, average=average)

    def broadcast(self) -> bytes:
        """Return the frame that goes to every client that trains, with the model."""
        return self._shared.broadcast() if self._averages else b""

    def broadcast_fine(self) -> bytes:
        """Return the frame that goes to every client that measures the model."""
        return self._shared.broadcast_fine() if self._averages else b""

    def read(self, frame: bytes) -> StatisticsMessage:
        """Return what a client's frame says; raise `WireError` where it cannot be used."""
        return self._shared.read(frame)

    def step(self, messages: Sequence[tuple[float, StatisticsMessage]]) -> None:
        """Average what clients sent."""
        if self._averages:
            self._shared = self._shared.step(messages)

    def save(self, directory: Path, round_number: int) -> None:
        """Write the statistics that belong to a round; those written before are kept, too."""
        if not self._averages:
            return
        shared = self._shared
        arrays: dict[str, NDArray[Any]] = {
            "fingerprint": np.frombuffer(self.layout.fingerprint, np.uint8),
            "values": shared.buffers.values,
            "counts": shared.buffers.counts,
            "travels": shared.travels,
            "moves": shared.moves,
            "residual": shared.residual,
        }
        if shared.mean is not None:
            arrays |= {"mean": shared.mean, "num_rounds": np.array(shared.num_rounds)}
        write_arrays(directory / f"statistics-{round_number}.npz", arrays)
        found = {int(file.stem.split("-")[1]): file for file in directory.glob("statistics-*.npz")}
        for number in sorted(found)[:-2]:
            found[number].unlink(missing_ok=True)

    def restore(self, directory: Path, round_number: int) -> None:
        """Go on from the statistics of a round."""
        if not self._averages:
            return
        file = directory / f"statistics-{round_number}.npz"
        arrays = read_arrays(file)
        if arrays["fingerprint"].tobytes() != self.layout.fingerprint:
            raise ConfigError(
                f"run-dir {str(directory)!r} holds a run with another model; give it a new "
                "directory"
            )
        buffers = Buffers(arrays["values"], arrays["counts"])
        self._shared = self._shared._replace(
            buffers=buffers,
            travels=arrays["travels"],
            moves=arrays.get("moves", self._shared.moves),
            residual=arrays.get("residual", self._shared.residual),
            mean=arrays.get("mean"),
            num_rounds=int(arrays.get("num_rounds", 0)),
        )

    def _filled(self, params: FloatArray) -> dict[str, NDArray[Any]]:
        return self.form.fill(self._constants, params, self._shared.averaged)


class VectorModel(ServerModel):
    """A model that is nothing but a flat vector: clients are not told what is in it."""

    def __init__(self, params: FloatArray) -> None:
        form = Form.of_vector(params)
        super().__init__(form, params, Buffers(np.empty(0), np.empty(0, np.int64)), {}, b"")
        self.signature = b""

    def with_params(self, params: FloatArray) -> Any:
        """Return the vector."""
        return params


class ModuleModel(ServerModel):
    """A torch module: the parameters that require a gradient travel.

    Args:
        module: to start from; it takes other values whenever it is measured.
        layout: which of its tensors travel.

    """

    def __init__(self, module: nn.Module, layout: ModelLayout) -> None:
        state = _tensors_of(module)
        form = Form(layout, tuple(state), _aliases(state, layout))
        constants = {name: _as_array(tensor) for name, tensor in form.constants(state).items()}
        digest = layout.constants_digest(module)
        theta, buffers = layout.flatten(module), layout.read_buffers(module)
        super().__init__(form, theta, buffers, constants, digest)
        self._module = module

    def with_params(self, params: FloatArray) -> Any:
        """Return the module with these parameters and the mean's statistics, ready for use."""
        self.layout.load(self._module, params)
        self.layout.write_buffers(self._module, self._shared.averaged)
        return self._module.eval()

    def tensors(self, params: FloatArray) -> dict[str, Any]:
        """Return copies of all tensors, by name."""
        state = self.with_params(params).state_dict()
        return {name: tensor.detach().clone() for name, tensor in state.items()}


def make_model(
    start: object,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    statistics: str = "average",
) -> ServerModel:
    """Return the server's model that starts from a module, an ArrayRecord or a flat vector."""
    if is_module(start):
        layout = ModelLayout.of(start, include=include, exclude=exclude, statistics=statistics)
        return ModuleModel(start, layout)
    if isinstance(start, ArrayRecord):
        if list(start) == [VECTOR] and len(start[VECTOR].shape) == 1:
            return VectorModel(_checked(start[VECTOR].numpy()))
        form = Form.of(start, include, exclude, statistics)
        values = values_of(start)
        initial = form.flatten(values)
        form.layout.require_finite(initial)
        return ServerModel(form, initial, form.buffers(values), form.constants(values))
    if isinstance(start, Strategy):
        raise ConfigError(
            f"the model to start from is a strategy, {type(start).__name__}: to keep that, write "
            f"Compressed({type(start).__name__}(...)) in its place"
        )
    if not isinstance(start, np.ndarray):
        raise ConfigError(
            f"the model to start from is a {type(start).__name__}; it must be a torch module, an "
            "ArrayRecord or a flat vector"
        )
    return VectorModel(_checked(start))


def is_module(start: object) -> TypeGuard[torch.nn.Module]:
    """Tell whether this is a torch module; where torch was never imported, nothing is."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(start, torch.nn.Module)


def _checked(params: FloatArray) -> FloatArray:
    if params.ndim != 1 or params.dtype not in (np.float32, np.float64) or not len(params):
        raise ConfigError(
            f"initial parameters are {params.ndim}-d {params.dtype} of {params.size} values; "
            "they must be a flat float32 or float64 vector"
        )
    if not np.isfinite(params).all():
        raise ConfigError("initial parameters hold NaN or infinity")
    return params


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    import torch

    state = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}


def _as_array(tensor: torch.Tensor) -> NDArray[Any]:
    found = tensor.detach().cpu()
    if str(found.dtype) == "torch.bfloat16":  # NumPy has none
        found = found.float()
    array: NDArray[Any] = found.numpy()
    return array


def _aliases(state: Mapping[str, torch.Tensor], layout: ModelLayout) -> dict[str, str]:
    """Return the second names of tensors, such as those of tied weights, and the first ones."""
    first = {id(state[spec.name]): spec.name for spec in layout.parameters if spec.name in state}
    found = {name: first.get(id(tensor), name) for name, tensor in state.items()}
    return {name: other for name, other in found.items() if name != other}
