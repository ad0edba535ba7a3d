"""The form of a model: which of its tensors make the flat vector, and the way there and back.

A model is a mapping of names to arrays, as in an ArrayRecord. Of these, parameters make the flat
vector ``θ``, buffers that training changes travel beside it (`aqg.flower.statistics`), and all
others stay as they were at the start.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord

from aqg.errors import ConfigError, MessageError
from aqg.objectives.layout import DIGEST_BYTES, Buffers, ModelLayout, read_specs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from aqg.core.types import FloatArray

    Values = Mapping[str, NDArray[Any]]

Tensor = TypeVar("Tensor")

VECTOR = "parameters"
"""The name of the one tensor of a model that is nothing but a flat vector."""
_NUMPY = "numpy.ndarray"


class Form(NamedTuple):
    """What the tensors of a model are.

    Attributes:
        layout: the parameters and buffers that travel.
        names: of all tensors, in order.
        aliases: names of tensors that are another one under a second name, as tied weights are.

    """

    layout: ModelLayout
    names: tuple[str, ...]
    aliases: Mapping[str, str]

    @staticmethod
    def of(
        record: ArrayRecord,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        statistics: str = "average",
    ) -> Form:
        """Return the form of a record, by the types and names of its arrays.

        Floating-point arrays are parameters, but for the running statistics of normalization
        layers; ``include`` and ``exclude`` choose among them by name patterns.

        >>> arrays = {"conv.weight": np.zeros((2, 2), "f4"), "bn.running_mean": np.zeros(2, "f4")}
        >>> form = Form.of(ArrayRecord({name: Array(a) for name, a in arrays.items()}))
        >>> [spec.name for spec in form.layout.parameters], form.layout.statistics[0].name
        (['conv.weight'], 'bn.running_mean')
        """
        for name, array in record.items():
            if array.stype != _NUMPY:
                raise ConfigError(f"array {name!r} is {array.stype}; it must be {_NUMPY}")
        rows = ((name, array.shape, array.dtype) for name, array in record.items())
        layout = ModelLayout.of_arrays(rows, include, exclude, statistics)
        return Form(layout, tuple(record), {})

    @staticmethod
    def of_vector(params: FloatArray) -> Form:
        """Return the form of a model that is nothing but a flat vector."""
        specs = read_specs([(VECTOR, list(params.shape), str(params.dtype))])
        return Form(ModelLayout("the model", specs, (), (), ()), (VECTOR,), {})

    def flatten(self, values: Values) -> FloatArray:
        """Return ``θ``."""
        layout = self.layout
        flat = np.empty(layout.num_params, layout.dtype)
        for spec in layout.parameters:
            flat[spec.place] = values[spec.name].reshape(-1)
        return flat

    def buffers(self, values: Values) -> Buffers:
        """Return the buffers that travel beside ``θ``."""
        layout = self.layout
        floats, counts = np.empty(layout.num_statistics), np.empty(layout.num_counters, np.int64)
        for target, specs in ((floats, layout.statistics), (counts, layout.counters)):
            for spec in specs:
                target[spec.place] = values[spec.name].reshape(-1)
        return Buffers(floats, counts)

    def fill(
        self, constants: Values, params: FloatArray, buffers: Buffers
    ) -> dict[str, NDArray[Any]]:
        """Return all tensors of a model, in order; those that do not travel are ``constants``."""
        layout, values = self.layout, dict(constants)
        parts: tuple[tuple[Any, NDArray[Any]], ...] = (
            (layout.parameters, params),
            (layout.statistics, buffers.values),
            (layout.counters, buffers.counts),
        )
        for specs, flat in parts:
            for spec in specs:
                part = flat[spec.place].reshape(spec.shape)
                with np.errstate(over="ignore", invalid="ignore"):
                    values[spec.name] = part.astype(_as_numpy(spec.dtype), copy=False)
        return {name: values[self.aliases.get(name, name)] for name in self.names}

    def constants(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that do not travel."""
        layout = self.layout
        specs = (*layout.parameters, *layout.statistics, *layout.counters)
        others = {spec.name for spec in specs} | set(self.aliases)
        return {name: value for name, value in values.items() if name not in others}

    def check(self, record: ArrayRecord) -> None:
        """Raise `MessageError` unless a record has the tensors that travel, in their shapes."""
        layout = self.layout
        for spec in (*layout.parameters, *layout.statistics, *layout.counters):
            array = record.get(spec.name)
            if array is None:
                raise MessageError(f"the arrays have no {spec.name!r}, which the model has")
            found = tuple(array.shape), array.dtype
            if found != (spec.shape, _as_numpy(spec.dtype)):
                raise MessageError(
                    f"array {spec.name!r} is {found[0]} {found[1]}; the model has {spec.shape} "
                    f"{_as_numpy(spec.dtype)}"
                )

    def to_json(self) -> str:
        """Return the form as text."""
        return json.dumps([self.layout.to_json(), self.names, dict(self.aliases)])

    @staticmethod
    def from_json(text: str) -> Form:
        """Read what `to_json` wrote."""
        try:
            layout, names, aliases = json.loads(text)
            also = {str(name): str(first) for name, first in aliases.items()}
            return Form(ModelLayout.from_json(layout), tuple(map(str, names)), also)
        except (ValueError, TypeError, AttributeError) as error:
            raise MessageError(f"not the form of a model: {error!r}") from None


def digest_of(constants: Values) -> bytes:
    """Return a digest of tensors that do not travel; one byte longer than that of a module.

    Both ends need not compute it alike: who is sent the tensors keeps the digest that came.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name, tensor in sorted(constants.items()):
        digest.update(f"{name} {tensor.shape} {tensor.dtype};".encode())
        digest.update(np.ascontiguousarray(tensor).tobytes())
    return b"r" + digest.digest()


def record_of(values: Values) -> ArrayRecord:
    """Return tensors as Flower carries them."""
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in values.items()})


def values_of(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    """Return the tensors of a record."""
    return {name: array.numpy() for name, array in record.items()}


def _as_numpy(dtype: str) -> str:
    """Return a type that NumPy has: it has no bfloat16."""
    return "float32" if dtype == "bfloat16" else dtype
