"""Which tensors of a module travel, and where each lies in the flat vector.

A `ModelLayout` is made once from a module and used by the simulator and by Flower alike:

* *parameters* that require a gradient make up the flat ``θ``, each once: weights that several
  layers share (tied weights) have one place, under their first name;
* *buffers* that belong to the module's saved state, such as the running statistics of batch
  normalization, are carried beside ``θ`` and never compressed (see `aqg.objectives.statistics`);
* frozen parameters, and everything else, stay where they are.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from aqg.core.types import Float64Array, FloatArray, IntArray, to_numpy
from aqg.errors import ConfigError
from aqg.settings import require_choice

if TYPE_CHECKING:
    from torch import Tensor, nn

POLICIES = ("average", "local", "frozen")
"""What becomes of statistics: averaged by the server, kept by each client, or left as they are."""
_TRACKED = ("running_mean", "running_var", "num_batches_tracked")
"""How the buffers of normalization layers are called, where there is no module to look at."""
_FLOATS = ("float16", "bfloat16", "float32", "float64")

Row = tuple[str, Sequence[int], str]
"""Name, shape and dtype of a tensor."""


class Buffers(NamedTuple):
    values: Float64Array  # of all floating-point buffers, ``(num_statistics,)``
    counts: IntArray  # of all integer and boolean buffers, ``(num_counters,)``


@dataclass(frozen=True)
class ModelLayout:
    """The tensors of a module that travel."""

    model: str  # the name of the module's class, for messages
    parameters: tuple[TensorSpec, ...]  # the tensors of ``θ``
    # floating-point buffers of the module's state, offsets in `Buffers.values`
    statistics: tuple[TensorSpec, ...]
    counters: tuple[TensorSpec, ...]  # integer and boolean ones, offsets in `Buffers.counts`
    # whether each of the statistics, then of the counters, belongs to a normalization layer, which
    # changes it for certain; others travel once training has changed them
    tracked: tuple[bool, ...]
    policy: str = "average"  # ``"average"``, ``"local"`` or ``"frozen"``
    left_out: tuple[str, ...] = ()  # trainable parameters that the patterns leave out

    @classmethod
    def of(
        cls,
        module: nn.Module,
        *,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        statistics: str = "average",
    ) -> Self:
        """Describe a module.

        ``include`` and ``exclude`` are name patterns such as ``"*.lora_*"``: parameters that match
        none of the former stay out, and so do parameters and buffers that match one of the latter.
        """
        import torch  # here and below, so that a server without modules needs none

        if not isinstance(module, torch.nn.Module):
            raise ConfigError(f"module is a {type(module).__name__}, not a torch.nn.Module")
        for name, value in tensors_of(module).items():
            if torch.nn.parameter.is_lazy(value) or value.is_meta:
                raise ConfigError(
                    f"parameter {name!r} has no values yet; call the module once before"
                )
        trainable = {k: v for k, v in module.named_parameters() if v.requires_grad}
        model = type(module).__name__
        if not trainable:
            raise ConfigError(f"{model} has 0 parameters that require a gradient")
        state = module.state_dict(keep_vars=True)
        buffers = {name: value for name, value in module.named_buffers() if name in state}
        tracked = {
            f"{path}.{name}".removeprefix(".")
            for path, layer in module.named_modules()
            if getattr(layer, "track_running_stats", False)
            for name, _ in layer.named_buffers(recurse=False)
        }
        chosen = include, exclude, statistics
        layout = cls._of_rows(model, _rows(trainable), _rows(buffers), tracked, *chosen)
        owners: dict[int, str] = {}
        for spec in layout.parameters:
            value = trainable[spec.name]
            first = owners.setdefault(value.data_ptr(), spec.name) if spec.size else spec.name
            if first != spec.name:
                raise ConfigError(
                    f"parameters {first!r} and {spec.name!r} share their memory but are two "
                    "parameters; tie them by assigning one nn.Parameter to both"
                )
        return layout

    @classmethod
    def of_arrays(
        cls,
        rows: Iterable[Row],
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        statistics: str = "average",
    ) -> Self:
        """Describe a model that is given as names, shapes and dtypes of NumPy arrays.

        Floating-point arrays are parameters, but for the running statistics of normalization
        layers, which are known by their names; patterns choose among them as in `of`.
        """
        trainable, buffers = [], []
        for row in rows:
            name, _, dtype = row
            if dtype in _FLOATS and name.rpartition(".")[2] not in _TRACKED:
                trainable.append(row)
            elif dtype in _FLOATS or dtype.startswith(("int", "uint", "bool")):
                buffers.append(row)
        tracked = {name for name, _, _ in buffers if name.rpartition(".")[2] in _TRACKED}
        return cls._of_rows("the model", trainable, buffers, tracked, include, exclude, statistics)

    @classmethod
    def _of_rows(
        cls,
        model: str,
        trainable: Sequence[Row],
        buffers: Sequence[Row],
        tracked: Container[str],
        include: str | Sequence[str] | None,
        exclude: str | Sequence[str] | None,
        policy: str,
    ) -> Self:
        require_choice("statistics", policy, POLICIES)
        names = [name for name, _, _ in trainable]
        wanted = _patterns("include", include, names) or ("*",)
        known = names + [name for name, _, _ in buffers]
        unwanted = _patterns("exclude", exclude, known)
        left = [row for row in trainable if not _matches(row[0], unwanted)]
        chosen = [row for row in left if _matches(row[0], wanted)]
        if not chosen:
            raise ConfigError(
                f"include {list(wanted)} and exclude {list(unwanted)} leave 0 of the "
                f"{len(trainable)} trainable parameters of {model}"
            )
        for name, _, dtype in chosen:
            if dtype not in _FLOATS:
                raise ConfigError(
                    f"parameter {name!r} is {dtype}; it must be one of {', '.join(_FLOATS)}"
                )
        carried = [row for row in buffers if not _matches(row[0], unwanted)]
        for name, _, dtype in carried:
            if dtype.startswith("complex"):
                raise ConfigError(f"buffer {name!r} is {dtype}; exclude it")
        floats = [row for row in carried if "float" in row[2]]
        integers = [row for row in carried if "float" not in row[2]]
        is_tracked = tuple(name in tracked for name, _, _ in (*floats, *integers))
        left_out = tuple(sorted(set(names) - {name for name, _, _ in chosen}))
        specs = read_specs(chosen), read_specs(floats), read_specs(integers)
        return cls(model, *specs, is_tracked, policy, left_out)

    @property
    def num_params(self) -> int:
        return sum(spec.size for spec in self.parameters)

    @property
    def num_statistics(self) -> int:
        return sum(spec.size for spec in self.statistics)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The precision of ``θ``: float64 where a parameter is, otherwise float32.

        Parameters in half precision have float32 values in ``θ``, so that small steps are not
        lost; they are rounded when they are written into the module.
        """
        return np.dtype("float64" if any(s.dtype == "float64" for s in self.parameters) else "f4")

    @property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple((spec.name, spec.shape) for spec in self.parameters)

    @property
    def carries_buffers(self) -> bool:
        """Whether there are buffers that training may change and that are not left alone."""
        return self.policy != "frozen" and bool(self.statistics or self.counters)

    def check(self, module: nn.Module) -> None:
        """Raise unless every tensor of the layout is in the module, with its shape and dtype."""
        tensors = tensors_of(module)
        for spec in (*self.parameters, *self.statistics, *self.counters):
            tensor = tensors.get(spec.name)
            if tensor is None:
                raise ConfigError(
                    f"{type(module).__name__} has no tensor {spec.name!r}, which {self.model} has"
                )
            found = (tuple(tensor.shape), dtype_name(tensor))
            if found != (spec.shape, spec.dtype):
                raise ConfigError(
                    f"tensor {spec.name!r} of {type(module).__name__} is {found[0]} {found[1]}; "
                    f"the layout of {self.model} has {spec.shape} {spec.dtype}"
                )
        known = {spec.name for spec in self.parameters}
        for name, value in module.named_parameters():
            if value.requires_grad and name not in known and name not in self.left_out:
                raise ConfigError(
                    f"parameter {name!r} of {type(module).__name__} is trainable, but the layout "
                    f"of {self.model} does not have it"
                )

    def flatten(self, module: nn.Module, *, finite: bool = True) -> FloatArray:
        self.check(module)
        tensors = tensors_of(module)
        flat = np.empty(self.num_params, self.dtype)
        for spec in self.parameters:
            flat[spec.place] = to_numpy(tensors[spec.name]).reshape(-1)
        for spec in self.parameters if finite else ():
            if bad := int(np.count_nonzero(~np.isfinite(flat[spec.place]))):
                raise ConfigError(
                    f"parameter {spec.name!r} {spec.shape} holds NaN or infinity in {bad} of "
                    f"{spec.size} values"
                )
        return flat

    def load(self, module: nn.Module, params: FloatArray) -> None:
        if params.shape != (self.num_params,):
            raise ConfigError(
                f"parameters have shape {params.shape}; {self.model} needs ({self.num_params},)"
            )
        self.check(module)
        write_tensors(module, self.parameters, params)

    def read_buffers(self, module: nn.Module) -> Buffers:
        return self.buffers_of(tensors_of(module))

    def buffers_of(self, tensors: Mapping[str, Tensor]) -> Buffers:
        values = np.empty(self.num_statistics)
        counts = np.empty(sum(spec.size for spec in self.counters), np.int64)
        for target, specs in ((values, self.statistics), (counts, self.counters)):
            for spec in specs:
                tensor = tensors.get(spec.name)
                shape = None if tensor is None else tuple(tensor.shape)
                if tensor is None or shape != spec.shape:
                    raise ConfigError(
                        f"buffer {spec.name!r} of {self.model} has shape {shape} now and had "
                        f"{spec.shape}; exclude it, or keep its shape"
                    )
                target[spec.place] = to_numpy(tensor).reshape(-1)
        return Buffers(values, counts)

    def write_buffers(self, module: nn.Module, buffers: Buffers) -> None:
        write_tensors(module, self.statistics, buffers.values)
        write_tensors(module, self.counters, buffers.counts)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _patterns(
    option: str, given: str | Sequence[str] | None, names: Sequence[str]
) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else tuple(given or ())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"{option} pattern {pattern!r} matches none of the {len(names)} tensors, "
                f"such as {', '.join(names[:3])}"
            )
    return patterns


class TensorSpec(NamedTuple):
    name: str  # as in ``named_parameters`` or ``named_buffers``
    shape: tuple[int, ...]  # of the tensor
    dtype: str  # of the module's own tensor, such as ``"float32"``
    offset: int  # where its first value lies in the flat vector

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def place(self) -> slice:
        return slice(self.offset, self.offset + self.size)

    def __str__(self) -> str:
        return f"{self.name!r} {self.shape} {self.dtype}"


def _rows(tensors: Mapping[str, Tensor]) -> list[Row]:
    return [(name, tuple(value.shape), dtype_name(value)) for name, value in tensors.items()]


def read_specs(rows: Iterable[Any]) -> tuple[TensorSpec, ...]:
    specs: list[TensorSpec] = []
    offset = 0
    for name, shape, dtype in rows:
        if not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError(f"shape {shape!r} of {name!r}")
        specs.append(TensorSpec(str(name), tuple(shape), str(dtype), offset))
        offset += specs[-1].size
    return tuple(specs)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def write_tensors(module: nn.Module, specs: Iterable[TensorSpec], flat: NDArray[Any]) -> None:
    import torch

    tensors = tensors_of(module)
    with torch.no_grad():
        for spec in specs:
            part = np.array(flat[spec.place]).reshape(spec.shape)  # torch wants it writable
            tensors[spec.name].copy_(torch.from_numpy(part))
