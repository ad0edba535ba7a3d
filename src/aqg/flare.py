"""NVIDIA FLARE: one line in a job or recipe, ``compress(recipe)``, and both directions are small.

It adds two filters to a job: `ServerFilter` puts orders in place of models and makes weights of
updates again, `ClientFilter` does the reverse. Trainers, controllers and aggregators see what they
see without them. A broadcast task has one object of data for all clients: it is read, and never
written to. A client keeps its copy of the model in the job's folder, and says with every request
which version that is; one that holds none is sent the whole model.
"""

from __future__ import annotations

import json
import secrets
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import Filter, FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_copy
from nvflare.job_config.defs import FilterType

from aqg import __version__
from aqg.channel.client import Held, Memory, OutOfReachError, receive, reply_to
from aqg.channel.server import Channel, Phase
from aqg.channel.settings import make_settings
from aqg.channel.tensors import Tensor, Values
from aqg.errors import AqgError, ConfigError, MessageError
from aqg.protocol.store import DirectoryVault
from aqg.weights import as_numpy, read_tensors

_PART, _WHOLE, _KIND, _VERSION, _TORCH = "aqg", "whole", "kind", "version", "torch"
"""What data in place of a model hold: the frame; what kind of data it was; and where the model is
needed this, the version of aqg, and the types of tensors that are torch's."""
_HELD = "aqg_held"
"""The property by which a client says which version of the model it holds."""
_END = "aqg_end"
_WEIGHTS = (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF)
_making = threading.Lock()


def compress(
    job: Any, *, tasks: Sequence[str] = ("train",), first: str = "", **settings: Any
) -> None:
    """Compress the models of a job in both directions.

    Args:
        job: a recipe of ``nvflare.recipe`` and its like, or a ``FedJob``. Filters that work on
            weights, such as those for privacy, are added before this call.
        tasks: whose data are the model to train, and whose results are trained models.
        first: of `ClientFilter`.
        settings: of `ServerFilter`.
    """
    names = list(tasks)
    server, client = ServerFilter(**settings), ClientFilter(first)
    if hasattr(job, "add_client_input_filter"):
        job.add_server_output_filter(server, names)
        job.add_server_input_filter(server, names)
        job.add_client_input_filter(client, names)
        job.add_client_output_filter(client, names)
        job = job._job
    elif hasattr(job, "to_clients"):
        for kind in (FilterType.TASK_DATA, FilterType.TASK_RESULT):
            job.to_server(server, filter_type=kind, tasks=names)
            job.to_clients(client, filter_type=kind, tasks=names)
    else:
        raise ConfigError(f"job is a {type(job).__name__}; it must be a Recipe or a FedJob")
    # aqg is installed at the sites: its files are not copied into the job
    job.set_app_packages(sorted({*job.job.app_packages, "aqg"}))


class _ModelFilter(Filter):  # type: ignore[misc]  # nvflare has no types
    """Hands models to the end of the channel that a site's filters share."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return a task's data or a result with something else in place of the model."""
        if shareable.get_return_code() != ReturnCode.OK:
            return shareable
        try:
            dxo = from_shareable(shareable)
        except ValueError:
            return shareable
        end = self._end(fl_ctx)
        is_data = self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN
        with end.lock:
            made = (end.task_data if is_data else end.result)(dxo, fl_ctx)
        return shareable if made is None else made.update_shareable(make_copy(shareable))

    def _end(self, fl_ctx: FLContext) -> Any:
        """Return what the filters of this site share in a run."""
        with _making:
            end = fl_ctx.get_prop(_END)
            if end is None:
                end = self._make_end(fl_ctx)
                fl_ctx.set_prop(_END, end, private=True, sticky=True)
            return end


class ServerFilter(_ModelFilter):
    """The server's filter, for the data of tasks and for results.

    Args:
        recipe: the compressor, one of ``aqg recipes``. ``auto`` suits aggregators that take a mean;
            ``auto:noise=0.1`` server optimizers that divide by the root of past squares; ``lean``
            aggregators that look at single results, as medians do.
        bits, max_staleness, include, exclude, downlink, seed: as of `aqg.flower.Compressed`.
        start: how the first model travels: ``"exact"``; ``"rounded"`` to 8 bits; ``"seed"``, drawn
            on both sides, with which training starts from another fresh model than the job's; or
            ``"digest"``, where sites have it in a file (see `ClientFilter`).
    """

    def __init__(
        self,
        recipe: str = "auto",
        bits: int = 4,
        max_staleness: int = 100,
        include: str | Sequence[str] = (),
        exclude: str | Sequence[str] = (),
        downlink: str | None = None,
        seed: int = 0,
        start: str = "exact",
    ) -> None:
        super().__init__()
        # FLARE reads them from attributes when it writes the job
        self.recipe, self.bits, self.max_staleness = recipe, bits, max_staleness
        self.include = [include] if isinstance(include, str) else list(include)
        self.exclude = [exclude] if isinstance(exclude, str) else list(exclude)
        self.downlink, self.seed, self.start = downlink, seed, start
        self._settings()  # what is wrong is said where the job is written

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Log at the end what all messages took."""
        end = fl_ctx.get_prop(_END) if event_type == EventType.END_RUN else None
        if end is not None and end.down:
            ways = (
                f"{end.up:,} bytes up (of {end.plain_up:,})",
                f"{end.down:,} down (of {end.plain_down:,})",
            )
            self.log_info(fl_ctx, f"aqg: models took {', '.join(ways)}")
            end.down = 0  # the other half of the filter need not say it again

    def _settings(self) -> Any:
        names = "bits", "max_staleness", "include", "exclude", "downlink", "seed", "start"
        return make_settings(self.recipe, **{name: getattr(self, name) for name in names})

    def _make_end(self, fl_ctx: FLContext) -> _Server:  # noqa: ARG002
        return _Server(self)


class ClientFilter(_ModelFilter):
    """A client's filter, for the data of tasks and for results.

    Args:
        first: a file at the site with the model that training starts from: safetensors, or a saved
            ``state_dict``.
    """

    def __init__(self, first: str = "") -> None:
        super().__init__()
        self.first = first

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Say from the start which model is held, should this be a process of a run under way."""
        if event_type == EventType.START_RUN:
            self._end(fl_ctx).announce(fl_ctx)

    def _make_end(self, fl_ctx: FLContext) -> _Client:
        folder = fl_ctx.get_engine().get_workspace().get_run_dir(fl_ctx.get_job_id())
        return _Client(self, Path(folder) / "aqg")


class _Server:
    """The server's end: a channel, and what every client was asked last."""

    def __init__(self, own: ServerFilter) -> None:
        self.lock = threading.Lock()
        self.up = self.down = self.plain_up = self.plain_down = 0
        self._own = own
        self._name = secrets.token_hex(8)
        self._num_channels = 0
        self._channel: Channel | None = None
        self._phase: Phase | None = None
        self._given: Mapping[str, Any] = {}
        self._answered: set[int] = set()
        self._nodes: dict[str, int] = {}
        self._open: dict[int, Phase] = {}

    def task_data(self, dxo: DXO, fl_ctx: FLContext) -> DXO | None:
        """Return a client's order; None where the data are no model that can be compressed."""
        if dxo.data_kind != DataKind.WEIGHTS:
            return None
        peer = fl_ctx.get_peer_context()
        node = self._nodes.setdefault(peer.get_identity_name(), len(self._nodes))
        if dxo.data is not self._given or node in self._answered:
            self._publish(dxo.data, fl_ctx)
        if self._phase is None or self._channel is None:
            return None
        self._open[node] = self._phase
        run, _, version = str(peer.get_prop(_HELD, "")).rpartition(" ")
        if run != self._channel.run or not version.isdecimal():
            self._channel.forget(node)
        is_new = self._channel.is_new(node)
        order, is_full = self._channel.order(node, evaluate=False)
        data: dict[str, Any] = {_PART: order}
        self.down += len(order)
        if is_new:
            data |= {_VERSION: __version__, _TORCH: _torch_types(dxo.data)}
        if is_full:
            data[_WHOLE] = whole = dict(self._channel.copied())
            self.down += _size(whole)
        self.plain_down += _size(dxo.data)
        return DXO(DataKind.APP_DEFINED, data, dict(dxo.meta))

    def _publish(self, given: Mapping[str, Any], fl_ctx: FLContext) -> None:
        """Bring the public copy nearer to the model of a task."""
        self._given, self._phase = given, None
        self._answered.clear()
        values = _arrays(given)
        if values is None:
            self._own.log_warning(fl_ctx, "aqg: the model holds no arrays; it is sent as it is")
            return
        # some controllers write to the arrays of one task for the next
        values = {name: tensor.copy() for name, tensor in values.items()}
        if self._channel is None or not self._channel.schema.fits(values):
            run = f"{self._name}{self._num_channels}"
            try:
                self._channel = Channel(run, values, self._own._settings())
            except ConfigError as error:
                self._channel = None
                self._own.log_warning(fl_ctx, f"aqg: the model is sent as it is: {error}")
                return
            self._num_channels += 1
        self._phase = self._channel.publish(values, is_train=True)
        if self._channel.fault:
            self._own.log_error(fl_ctx, f"aqg: the model is not sent: {self._channel.fault}")

    def result(self, dxo: DXO, fl_ctx: FLContext) -> DXO | None:
        name = fl_ctx.get_peer_context().get_identity_name()
        node = self._nodes.get(name, -1)
        phase = self._open.pop(node, None)
        if phase is None:
            if dxo.data_kind == DataKind.APP_DEFINED and _PART in dxo.data:
                raise MessageError(f"{name} was not asked for a model")
            return None
        self._answered.add(node)
        if dxo.data_kind == DataKind.WEIGHTS:
            return self._take_whole(phase, dxo)
        if dxo.data_kind != DataKind.APP_DEFINED or _PART not in dxo.data:
            return None
        part, kind = dxo.data[_PART], dxo.data.get(_KIND)
        try:
            if not isinstance(part, bytes) or kind not in _WEIGHTS:
                raise MessageError(f"its reply holds {type(part).__name__} for {kind!r:.40}")
            self.up += len(part)
            self.plain_up += _size(self._given)
            taken = phase.channel.take(node, phase, part)
            values = dict(taken.tensors())
        except AqgError as error:
            phase.channel.forget(node)
            raise MessageError(f"aqg: {name}: {error}") from None
        taken.commit()
        phase.channel.note(node, phase)
        if kind == DataKind.WEIGHT_DIFF:
            own = _arrays(self._given) if phase.version == 1 else None  # the job's first model
            base = phase.values if own is None else phase.channel.schema.cast(own)
            values = {n: np.subtract(tensor, base[n]) for n, tensor in values.items()}
        return DXO(kind, _like(values, _torch_types(self._given)), dict(dxo.meta))

    def _take_whole(self, phase: Phase, dxo: DXO) -> DXO | None:
        """Return whole weights from a client that could not compress them."""
        values = _arrays(dxo.data)
        if values is None or not phase.channel.schema.fits(values):
            return None
        self.up += _size(dxo.data)
        self.plain_up += _size(dxo.data)
        shown = dict(phase.channel.take_whole(phase, values))
        return DXO(dxo.data_kind, _like(shown, _torch_types(dxo.data)), dict(dxo.meta))


class _Client:
    """A client's end: its memory, and the model that it was given last."""

    def __init__(self, own: ClientFilter, folder: Path) -> None:
        self.lock = threading.Lock()
        self._own = own
        self._memory = _Memory(folder)
        self._held: Held | None = None

    def announce(self, fl_ctx: FLContext) -> None:
        fl_ctx.set_prop(_HELD, self._memory.held(), private=False, sticky=True)

    def task_data(self, dxo: DXO, fl_ctx: FLContext) -> DXO | None:
        self._held = None
        if dxo.data_kind != DataKind.APP_DEFINED or _PART not in dxo.data:
            return None
        version = dxo.data.get(_VERSION, __version__)
        if version != __version__:
            raise MessageError(
                f"the server has aqg {version}, this site {__version__}; both need the same version"
            )
        first, whole = self._own.first, dxo.data.get(_WHOLE)
        own = (lambda: _arrays(read_tensors(Path(first)))) if first else (lambda: None)
        try:
            self._held = receive(dxo.data[_PART], whole, self._memory, version, None, own)
        except OutOfReachError as error:
            self._memory.forget()
            raise MessageError(f"{error}; the next task brings the whole model") from None
        finally:
            if self._held is not None:
                self._memory.note(self._held, dxo.data.get(_TORCH))
            self.announce(fl_ctx)
        values = {name: tensor.copy() for name, tensor in self._held.values.items()}
        return DXO(DataKind.WEIGHTS, _like(values, self._memory.torch_types()), dict(dxo.meta))

    def result(self, dxo: DXO, fl_ctx: FLContext) -> DXO | None:
        """Return what stands for a trained model; None where it is not like the one given."""
        held, self._held = self._held, None
        if held is None or dxo.data_kind not in _WEIGHTS:
            return None
        values = _arrays(dxo.data)
        if values is None or not held.schema.fits(values):
            self._own.log_warning(fl_ctx, "aqg: the result has other tensors: it is sent as it is")
            return None
        if dxo.data_kind == DataKind.WEIGHT_DIFF:
            values = {name: held.values[name] + change for name, change in values.items()}
        part = reply_to(held, held.schema.cast(values), self._memory)
        return DXO(DataKind.APP_DEFINED, {_PART: part, _KIND: dxo.data_kind}, dict(dxo.meta))


class _Memory(Memory):
    """A client's memory in the job's folder, which a new process of the job finds again."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._note, self._types = folder, folder / "held", folder / "torch.json"

    def runs(self) -> list[str]:
        return [file.parent.name for file in self._folder.glob("*/state.json")]

    def vault(self, run: str, name: str) -> DirectoryVault:  # noqa: ARG002
        return DirectoryVault(self._folder / name)

    def held(self) -> str:
        """Return the run and the version of the model that is held, if any."""
        return self._note.read_text() if self._note.exists() else ""

    def torch_types(self) -> dict[str, str]:
        return dict(json.loads(self._types.read_text())) if self._types.exists() else {}

    def note(self, held: Held, types: Mapping[str, str] | None) -> None:
        """Take note of the model that is held, and of its types; forget all others."""
        if types is not None:
            self._types.write_text(json.dumps(types))
        run = held.order.run
        if not self.held().startswith(run):
            for found in self._folder.iterdir():
                if found.is_dir() and not found.name.startswith(run):
                    shutil.rmtree(found)
        self._note.write_text(f"{run} {held.order.round}")

    def forget(self) -> None:
        self._note.unlink(missing_ok=True)


def _arrays(data: Mapping[str, Any]) -> Values | None:
    """Return tensors as arrays, bfloat16 as float32; None where there is anything else."""
    others = [v for v in data.values() if not isinstance(v, np.ndarray | np.generic)]
    is_tensor = all(type(value).__module__.partition(".")[0] == "torch" for value in others)
    return {name: as_numpy(value) for name, value in data.items()} if data and is_tensor else None


def _size(data: Mapping[str, Any]) -> int:
    return sum(value.nbytes for value in data.values())


def _torch_types(data: Mapping[str, Any]) -> dict[str, str]:
    """Return the types of tensors that are torch's; arrays are left out."""
    return {
        name: str(value.dtype).removeprefix("torch.")
        for name, value in data.items()
        if not isinstance(value, np.ndarray | np.generic)
    }


def _like(values: Mapping[str, Tensor], types: Mapping[str, str]) -> dict[str, Any]:
    if not types:
        return dict(values)
    import torch

    return {
        name: torch.tensor(value, dtype=getattr(torch, types[name])) if name in types else value
        for name, value in values.items()
    }
