"""Models as files: safetensors with the tensors' own names, and checkpoints to start from.

A run leaves ``model.safetensors``, the model after its last round, and ``best.safetensors``, the
best one it measured. Any program that reads safetensors can open them; `load_model` gives them
back. Checkpoints to start from are safetensors, or what ``torch.save(module.state_dict(), file)``
writes, which is read with ``weights_only=True``: no code in the file is run.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from aqg.errors import ConfigError, RunError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from numpy.typing import NDArray

    Module = TypeVar("Module", bound=torch.nn.Module)

FINAL = "model.safetensors"
BEST = "best.safetensors"
_FILES = {"final": FINAL, "best": BEST}
_SUFFIX = ".safetensors"
_NOTES = "aqg"
_CHECKSUM = "crc32"


@overload
def load_model(path: Path | str, *, which: str = ...) -> dict[str, NDArray[Any]]: ...
@overload
def load_model(path: Path | str, module: Module, *, which: str = ...) -> Module: ...
def load_model(path: Path | str, module: Any = None, *, which: str = "best") -> Any:
    """Load the model of a run, or of a safetensors file.

    Args:
        path: a run's directory, or the file.
        module: takes the tensors and is returned; its names and shapes must be the same. Without
            one, tensors are returned by name as NumPy arrays, bfloat16 as float32.
        which: ``"best"`` or ``"final"``, where ``path`` is a directory.
    """
    if which not in _FILES:
        raise ConfigError(f"which is {which!r}; choose from {', '.join(_FILES)}")
    file = Path(path)
    if file.is_dir():
        file = file / _FILES[which]
        if not file.exists():
            where = str(file.parent)
            raise RunError(f"{where!r} has no {file.name}: no finished run of one recipe")
    if module is None:
        return {name: as_numpy(value) for name, value in read_tensors(file).items()}
    fill_module(module, read_tensors(file), str(file))
    return module


def read_tensors(path: Path) -> dict[str, Any]:
    """Return the tensors in a file by name: of torch where it is installed, else of NumPy."""
    try:
        with path.open("rb") as file:
            start = file.read(1)
    except OSError as error:
        raise ConfigError(f"model {str(path)!r} cannot be read: {error.strerror}") from None
    if not start:
        raise ConfigError(f"model {str(path)!r} is empty")
    read = _read_safetensors if path.suffix == _SUFFIX else _read_state_dict
    return dict(sorted(read(path).items()))


def read_notes(path: Path) -> dict[str, Any]:
    """Return what a model's file says of it beside its tensors; empty where it says nothing.

    Raises:
        RunError: if the tensors or the notes do not fit their checksum.

    """
    import safetensors

    try:
        with safetensors.safe_open(path, "numpy") as file:
            notes = json.loads((file.metadata() or {}).get(_NOTES, "{}"))
        if not isinstance(notes, dict):
            return {}
        checksum = notes.pop(_CHECKSUM, None)
        if checksum is not None and checksum != _checksum(read_tensors(path), notes):
            raise ValueError("it does not fit its checksum")
    except (OSError, ValueError, ConfigError, safetensors.SafetensorError) as error:
        raise RunError(f"model {str(path)!r} is damaged: {error}; delete it") from None
    return notes


def _checksum(tensors: Mapping[str, Any], notes: Mapping[str, Any]) -> str:
    """Return the CRC-32 of notes and tensors: names, shapes, types and all numbers."""
    checksum = zlib.crc32(json.dumps(dict(notes)).encode())
    for name, value in sorted(tensors.items()):
        kind = str(value.dtype).removeprefix("torch.")
        checksum = zlib.crc32(f"{name} {kind} {tuple(value.shape)}".encode(), checksum)
        if not isinstance(value, np.ndarray):
            import torch

            value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        checksum = zlib.crc32(np.ascontiguousarray(value).tobytes(), checksum)
    return f"{checksum:08x}"


def to_bytes(tensors: Mapping[str, Any], notes: Mapping[str, Any]) -> bytes:
    """Return a safetensors file of torch tensors or NumPy arrays, with notes on the model."""
    # One text: the library writes several in an order of its own, and equal models shall be
    # equal files.
    texts = {_NOTES: json.dumps({**notes, _CHECKSUM: _checksum(tensors, notes)})}
    if any(not isinstance(value, np.ndarray) for value in tensors.values()):
        from safetensors.torch import save

        # Tied weights share memory, which the format does not know.
        copies = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
        return save(copies, texts)
    from safetensors.numpy import save as save_arrays

    return save_arrays({k: np.asarray(v, order="C") for k, v in tensors.items()}, texts)


def fill_module(module: torch.nn.Module, tensors: Mapping[str, Any], source: str) -> None:
    """Put tensors into a module whose state has the same names and shapes.

    The module stays as it was where a tensor is missing, unknown, of another shape, or not finite.
    """
    import torch

    state = module.state_dict()
    check_names({key: tuple(value.shape) for key, value in state.items()}, tensors, source)
    for name, value in tensors.items():
        trained = name in dict(module.named_parameters())
        if trained and not bool(torch.isfinite(torch.as_tensor(value)).all()):
            raise ConfigError(f"tensor {name!r} of {source!r} holds NaN or infinity")
    module.load_state_dict({key: torch.as_tensor(value) for key, value in tensors.items()})


def check_names(
    wanted: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Any], source: str
) -> None:
    """Raise unless these are the tensors that a model has, with their shapes."""
    for name, shape in wanted.items():
        if name not in tensors:
            raise ConfigError(
                f"{source!r} has no tensor {name!r}, which the model has; it holds {_some(tensors)}"
            )
        if tuple(tensors[name].shape) != shape:
            raise ConfigError(
                f"tensor {name!r} of {source!r} has shape {tuple(tensors[name].shape)}; the model "
                f"needs {shape}"
            )
    unknown = [name for name in tensors if name not in wanted]
    if unknown:
        raise ConfigError(
            f"{source!r} has a tensor {unknown[0]!r}, which the model does not have; it has "
            f"{_some(wanted)}"
        )


def _some(names: Mapping[str, Any]) -> str:
    shown = ", ".join(list(names)[:4]) or "nothing"
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def _read_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError

    try:
        try:
            from safetensors.torch import load_file
        except ImportError:
            from safetensors.numpy import load_file as load_arrays

            return load_arrays(path)
        tensors: dict[str, Any] = load_file(path)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ConfigError(f"model {str(path)!r} is no whole safetensors file: {error}") from None
    return tensors


def _read_state_dict(path: Path) -> dict[str, Any]:
    try:
        import torch
    except ImportError:
        raise ConfigError(
            f"model {str(path)!r} is not a {_SUFFIX} file; other files need torch: "
            "pip install 'aqg[torch]'"
        ) from None
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # it raises whatever the bytes make it raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"model {str(path)!r} is neither a {_SUFFIX} file nor a state_dict that can be read "
            f"without running code ({reason[0]}); save it with "
            "torch.save(module.state_dict(), file)"
        ) from None
    if isinstance(found, dict) and isinstance(found.get("state_dict"), dict):
        found = found["state_dict"]
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"model {str(path)!r} holds a {type(found).__name__}, not a state_dict")
    for name, value in found.items():
        if not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"model {str(path)!r} holds {name!r}, a {type(value).__name__} and no tensor; "
                "save it with torch.save(module.state_dict(), file)"
            )
    return dict(found)


def as_numpy(value: Any) -> NDArray[Any]:
    """Return an array, or a tensor of torch's; NumPy has no bfloat16, which becomes float32."""
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    tensor = value.detach().cpu()
    return (tensor.float() if "bfloat16" in str(tensor.dtype) else tensor).numpy()
