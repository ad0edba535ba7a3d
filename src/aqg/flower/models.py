"""The model that a run of our own server starts from, and the shape in which users get it.

A run starts from a torch module, from an ArrayRecord, or from a flat vector; what a user's function
is given back is the same kind of thing. Which tensors travel is said by one
`aqg.objectives.layout.ModelLayout`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from aqg.channel.stepping import Travel
from aqg.channel.tensors import Kind, Schema, Tensor, Values, is_finite
from aqg.errors import ConfigError
from aqg.flower.envelope import is_readable, record_of, values_of
from aqg.objectives.layout import ModelLayout
from aqg.weights import as_numpy

if TYPE_CHECKING:
    import torch
    from torch import nn

VECTOR = "parameters"
"""The name of the one tensor of a model that is nothing but a flat vector."""
_PRECISIONS = ("float32", "float64")


class ServerModel:
    """What a run starts from: all tensors, which of them travel, and what the user gave."""

    def __init__(
        self, values: Values, layout: ModelLayout, aliases: Mapping[str, str], start: Any
    ) -> None:
        for spec in layout.parameters:
            if not is_finite(values[spec.name]):
                raise ConfigError(f"tensor {spec.name!r} to start from holds NaN or infinity")
        self.layout = layout
        self.record = record_of(values.items())
        self.schema = Schema.of(values)
        self._start = start
        own, kinds = frozenset[str](), dict.fromkeys(values, Kind.STILL)
        kinds |= {spec.name: Kind.VECTOR for spec in layout.parameters}
        beside = (*layout.statistics, *layout.counters)
        if layout.policy == "local":
            own = frozenset(spec.name for spec in beside)
        elif layout.policy == "average":
            for place, (spec, is_tracked) in enumerate(zip(beside, layout.tracked, strict=True)):
                is_half = is_tracked and place < len(layout.statistics)
                kinds[spec.name] = Kind.HALF if is_half else Kind.EXACT
        self.travel = Travel(kinds, own, dict(aliases))

    @property
    def can_be_measured(self) -> bool:
        """Whether the server has the statistics that its model is to be used with."""
        return self.layout.policy != "local" or not any(self.layout.tracked)

    def filled(self, values: Values) -> Any:
        if is_module(self._start):
            return filled(self._start, values).eval()
        if isinstance(self._start, ArrayRecord) and list(self._start) != [VECTOR]:
            return record_of(values.items())
        return np.array(values[VECTOR])

    def tensors(self, values: Values) -> dict[str, Any]:
        """Return copies of all tensors, by name, in the types of a module where there is one."""
        if is_module(self._start):
            state = filled(self._start, values).state_dict()
            return {name: tensor.detach().clone() for name, tensor in state.items()}
        return {name: np.array(value) for name, value in values.items()}


def filled(module: nn.Module, values: Values) -> nn.Module:
    import torch

    tensors = {name: torch.from_numpy(np.array(value)) for name, value in values.items()}
    module.load_state_dict(tensors, strict=False)
    return module


def make_model(
    start: object,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    statistics: str = "average",
) -> ServerModel:
    """Return the server's model that starts from a module, an ArrayRecord or a flat vector."""
    if is_module(start):
        layout = ModelLayout.of(start, include=include, exclude=exclude, statistics=statistics)
        return ServerModel(values_in(start), layout, _aliases(start, layout), start)
    if isinstance(start, Strategy):
        raise ConfigError(
            f"the model to start from is a strategy, {type(start).__name__}: to keep that, write "
            f"Compressed({type(start).__name__}(...)) in its place"
        )
    if isinstance(start, ArrayRecord):
        if not is_readable(start):
            raise ConfigError("an array of the model to start from is not a numpy.ndarray")
        values = values_of(start)
    elif isinstance(start, np.ndarray):
        values = {VECTOR: start}
    else:
        raise ConfigError(
            f"the model to start from is a {type(start).__name__}; it must be a torch module, an "
            "ArrayRecord or a flat vector"
        )
    flat = values.get(VECTOR) if len(values) == 1 else None
    if flat is not None and (flat.ndim != 1 or str(flat.dtype) not in _PRECISIONS or not len(flat)):
        raise ConfigError(
            f"initial parameters are {flat.ndim}-d {flat.dtype} of {flat.size} values; they must "
            "be a flat float32 or float64 vector"
        )
    rows = [(name, tensor.shape, str(tensor.dtype)) for name, tensor in values.items()]
    layout = ModelLayout.of_arrays(rows, include, exclude, statistics)
    return ServerModel(values, layout, {}, start)


def is_module(start: object) -> TypeGuard[torch.nn.Module]:
    """Tell whether this is a torch module; where torch was never imported, nothing is."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(start, torch.nn.Module)


def values_in(module: nn.Module) -> dict[str, Tensor]:
    state = {name: t for name, t in module.state_dict().items() if hasattr(t, "detach")}
    return {name: np.array(as_numpy(tensor)) for name, tensor in state.items()}


def _aliases(module: nn.Module, layout: ModelLayout) -> dict[str, str]:
    """Return the second names of tensors, such as those of tied weights, and the first ones."""
    state = module.state_dict(keep_vars=True)
    first = {id(state[spec.name]): spec.name for spec in layout.parameters if spec.name in state}
    found = {name: first.get(id(tensor), name) for name, tensor in state.items()}
    return {name: other for name, other in found.items() if name != other}
