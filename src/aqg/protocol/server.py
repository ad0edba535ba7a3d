"""The server's end of the protocol: orders out, replies in, a step, and a checkpoint.

A reply is checked as a whole before anything changes. One that is damaged, late, doubled, or of
another mirror is refused with a reason, and costs that client's part of the round alone. The rules
are in `aqg.protocol.messages`; `MirrorBook` keeps the model, its log, and a mirror of every client.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from aqg.core import server
from aqg.core.downlink import (
    DIGEST_BYTES,
    Downlink,
    Entry,
    Exact,
    Full,
    Public,
    describe_downlink,
    lies_on_grid,
    resolve_downlink,
)
from aqg.core.messages import Message, Skip
from aqg.core.optimizers import make_optimizer
from aqg.core.recipe import Recipe, kind_of_updates, require_memory
from aqg.core.recipes import make_recipe
from aqg.core.step_sizes import Fixed, resolve_step
from aqg.core.track import Track, init_mirrors
from aqg.core.types import Float64Array, FloatArray, from_arrays, is_number, is_whole, to_arrays
from aqg.errors import ConfigError, MessageError, RunError, WireError
from aqg.protocol import messages
from aqg.protocol.log import LogState, Publisher, initial_state
from aqg.protocol.store import make_directory, read_arrays, write_arrays
from aqg.start import require_way, settle

_CLIENTS = {"mirrors": "held", "directions": "moved"}
"""Where it is written whose rows there are."""
_GROUP_BYTES = 64 << 20
"""Mirrors of many clients are written together, up to about this size."""


@dataclass(eq=False)
class MirrorBook:
    """The server's side: the model and its log, every ``ref_m`` with its stamp, and their sum.

    A reply that is not taken changes nothing. Taking one costs the same however many there are.
    """

    recipe: Recipe
    state: server.ServerState  # the model, all mirrors, and what is `Held` beside each
    weights: Float64Array  # ``w_m``
    how: server.Step  # how the server steps, and how the model is published
    publisher: Publisher | None = None  # keeps its log; None where clients receive the whole model

    @classmethod
    def first(
        cls, recipe: Recipe, parameters: FloatArray, weights: Float64Array, how: server.Step
    ) -> Self:
        """Return the book before the first round, with every ``ref_m`` zero."""
        held = messages.first_peer(recipe, len(parameters), str(parameters.dtype)).held
        state = server.init_server(recipe, parameters, len(weights), how, held)
        publisher = None
        if not isinstance(how.downlink, Full):
            log = initial_state(state.public, len(weights))
            publisher = Publisher(parameters, log, lies_on_grid(recipe, how.downlink))
        return cls(recipe, state, weights, how, publisher)

    @property
    def round(self) -> int:
        return self.state.round

    @property
    def parameters(self) -> FloatArray:
        return self.state.parameters

    @property
    def entries(self) -> list[messages.Held]:
        return [peer.held for peer in self.state.peers]

    @property
    def public(self) -> Public:
        return self.state.public

    def order(self, client: int, **terms: Any) -> messages.Order:
        """Return what a client is to be sent; ``terms`` are what the book does not know."""
        stamp = self.state.peers[client].held.stamp
        if self.publisher is not None:
            parcel = self.publisher.parcel(client, self.public)
            terms |= {"public": parcel.digest, "log": parcel.log, "snapshot": parcel.snapshot}
        return messages.Order(
            num_params=len(self.parameters),
            dtype=str(self.parameters.dtype),
            round=self.round,
            client=client,
            movement=self.recipe.movement.of(self.state.model.history),
            noise=self.state.model.budget.noise,
            **stamp._asdict(),
            **terms,
        )

    def note_holding(self, client: int, reply: messages.Reply) -> None:
        """Take note of the model that a client holds, by its reply to an order of this round."""
        if self.publisher is None or reply.round != self.round:
            return
        if reply.lost:
            self.publisher.lost(client, reply.holding)
        elif reply.held_round == self.round:
            self.publisher.followed(client)

    def accept(self, client: int, reply: messages.Reply, incarnation: int) -> Message | str:
        """Take client ``m``'s reply to this round's order and return its message, or why not."""
        params = self.parameters
        try:
            if (reply.incarnation, reply.round) != (incarnation, self.round):
                raise MessageError(
                    f"the reply is to round {reply.round} of incarnation {reply.incarnation}, "
                    f"not to round {self.round} of {incarnation}"
                )
            before = self.state.peers[client]
            peer, message = messages.take_reply(
                self.recipe, before, reply, len(params), str(params.dtype)
            )
            self.take(client, peer, message, reply.restarted)
        except (MessageError, WireError) as error:
            return str(error)
        return message

    def take(self, client: int, peer: server.Peer, message: Message, restarted: bool) -> None:
        """Take in what `take_reply` returned for a client's reply."""
        state, weight = self.state, float(self.weights[client])
        if restarted:
            state = server.forget(self.recipe, state, client, weight)
        state = server.take_message(self.recipe, state, client, message, weight)
        taken = state.peers[client]
        last_upload = taken.held.last_upload if isinstance(message, Skip) else self.round
        taken = taken._replace(held=peer.held._replace(last_upload=last_upload))
        self.state = state._replace(peers=state.peers.replaced(client, taken))

    def reweigh(self, weights: Float64Array) -> None:
        """Go on with other weights ``w_m``, and the sum that belongs to them."""
        total = np.zeros(len(self.parameters))
        for weight, peer in zip(weights, self.state.peers, strict=True):
            if peer.track.is_held[0]:
                total += weight * peer.track.position[0].astype(np.float64)
        if self.recipe.memory.keeps_mirror:
            model = self.state.model._replace(total=total, is_moved=True)
            self.state = self.state._replace(model=model)
        self.weights = weights

    def step(self) -> Entry:
        """Take ``θ^{k+1} = θ^k - α Σ_m ref_m`` and go to the next round."""
        before = self.public
        self.state, entry = server.publish_round(self.recipe, self.state, self.how)
        self._publish(entry, before)
        return entry

    def skip_step(self) -> Entry:
        """Go to the next round with the model as it is, because too few clients answered.

        What was sent with error feedback waits for the next step: it is in no residual any more.
        """
        model = self.state.model._replace(round=self.round + 1)
        if not (self.recipe.memory.keeps_mirror or self.recipe.keeps_residual):
            total = np.zeros_like(model.total)
            model = model._replace(total=total, num_sent=0, upload_energy=0.0)
        entry, before = Entry(self.round, is_step=False), self.public
        self.state = self.state._replace(model=model)
        self._publish(entry, before)
        return entry

    def _publish(self, entry: Entry, before: Public) -> None:
        if self.publisher is not None:
            self.publisher.publish(entry, before, self.public)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return named arrays; mirrors that no upload has moved are left out."""
        state, entries = self.state, self.entries
        held = [client for client, peer in enumerate(state.peers) if peer.track.is_held[0]]
        arrays: dict[str, NDArray[Any]] = {
            "weights": self.weights,
            **to_arrays(state.model),
            "epochs": np.array([entry.stamp.epoch for entry in entries], np.int64),
            "uploads": np.array([entry.stamp.uploads for entry in entries], np.int64),
            "last_uploads": np.array([entry.last_upload for entry in entries], np.int64),
            "digests": np.stack([as_array(entry.stamp.digest) for entry in entries]),
            "lineages": np.stack([as_array(entry.lineage) for entry in entries]),
            **dict.fromkeys(_CLIENTS.values(), np.array(held, np.int64)),
        }
        arrays |= _groups("mirrors", [state.peers[client].track.position for client in held])
        arrays |= _groups("directions", [state.peers[client].track.direction for client in held])
        if self.publisher is not None:
            arrays |= to_arrays(self.publisher.state(), "log/")
        return arrays

    @staticmethod
    def from_arrays(
        arrays: dict[str, NDArray[Any]], recipe: Recipe, how: server.Step, start: FloatArray | None
    ) -> MirrorBook:
        """Return the book that `to_arrays` wrote; ``start`` is the model that clients have."""
        model = from_arrays(server.Model, arrays)
        zero = init_mirrors(recipe.memory, len(model.parameters), model.parameters.dtype)
        mirrors, directions = _read_rows(arrays, "mirrors"), _read_rows(arrays, "directions")
        columns = ("epochs", "uploads", "digests", "lineages", "last_uploads")
        peers = []
        for client, row in enumerate(zip(*(arrays[name] for name in columns), strict=True)):
            epoch, uploads, digest, lineage, last_upload = row
            stamp = messages.Stamp(int(epoch), int(uploads), digest.tobytes())
            mirror, direction = mirrors.get(client), directions.get(client)
            track = Track(
                zero.position if mirror is None else mirror[None],
                zero.velocity,
                zero.direction if direction is None else direction[None],
                np.array([client in mirrors or client in directions]),
            )
            held = messages.Held(stamp, lineage.tobytes(), int(last_upload))
            peers.append(server.Peer(track, held=held))
        publisher = None
        if not isinstance(how.downlink, Full) and "log/first" in arrays:
            merges = lies_on_grid(recipe, how.downlink)
            publisher = Publisher(start, from_arrays(LogState, arrays, "log/"), merges)
        state = server.join_server(model, peers)
        return MirrorBook(recipe, state, arrays["weights"], how, publisher)

    def check(self, file: Path) -> None:
        """Raise `RunError` unless every mirror and the model have the digests that are noted."""
        zeros: dict[bytes, bytes] = {}  # digests by lineage: many clients share one mirror of zeros
        for client, peer in enumerate(self.state.peers):
            lineage, is_held = peer.held.lineage, peer.track.is_held[0]
            digest = None if is_held else zeros.get(lineage)
            digest = digest or messages.content_digest(lineage, peer.track)
            if not is_held:
                zeros[lineage] = digest
            if digest != peer.held.stamp.digest:
                raise RunError(f"checkpoint {str(file)!r} is damaged: mirror {client} has changed")
        publisher = self.publisher
        if publisher is not None and self.public.digest() != publisher.digest:
            raise RunError(f"checkpoint {str(file)!r} is damaged: the model has changed")


def _groups(name: str, rows: list[Any]) -> dict[str, NDArray[Any]]:
    size = max(1, _GROUP_BYTES // max(1, rows[0].nbytes)) if rows else 1
    groups = {f"{name}-{start}": rows[start : start + size] for start in range(0, len(rows), size)}
    return {n: g[0] if len(g) == 1 else np.concatenate(g) for n, g in groups.items()}


def _read_rows(arrays: dict[str, NDArray[Any]], name: str) -> dict[int, NDArray[Any]]:
    """Return the rows that `MirrorBook.to_arrays` wrote, by client."""
    starts = sorted(int(key.rpartition("-")[2]) for key in arrays if key.startswith(f"{name}-"))
    rows = [row for start in starts for row in arrays[f"{name}-{start}"]]
    return dict(zip(arrays[_CLIENTS[name]].tolist(), rows, strict=True))


def as_array(digest: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(digest[:DIGEST_BYTES], np.uint8)


CHECKPOINT, _START = "session.npz", "start.npz"
_HEAD_BYTES = 4096
"""More than a reply needs around its frame."""

_logger = logging.getLogger("aqg.protocol")


class Receipt(NamedTuple):
    """What became of a reply.

    Attributes:
        is_taken: whether it counts in this round.
        wants_order: whether the client lacks part of the model; send it `ServerSession.order` once
            more, in this round or in a later one.
        problem: why it was not taken; empty where it was.
        loss: what the client said, NaN where it did not.
        num_bytes: the length of the frame that it carried.
    """

    is_taken: bool
    wants_order: bool = False
    problem: str = ""
    loss: float = float("nan")
    num_bytes: int = 0


class ServerSession:
    """Holds the model and every client's mirror, and says to each client what it needs.

    Args:
        parameters: the model to start from, flat, float32 or float64. A session that goes on from
            ``path`` has its own.
        num_clients: ``M``. Clients are numbers below it; who is who is the transport's business.
        recipe: the compressor, by name or as a `Recipe`; clients must have an equal one.
        step_size: of ``θ ← θ - step_size·Σ_m w_m·update_m``; by default ``1/M``, which averages.
        step: how long steps are: ``"fixed"`` (``step_size`` in every round), or ``"dog"``, which
            finds it from the steps themselves. By default ``"fixed"``
            where ``step_size`` is given, and otherwise the recipe's own.
        weights: ``w_m``, by default 1 each.
        optimizer: of the server, by name.
        downlink: how the model travels: ``"exact"``, ``"condensed"``, or ``"auto"``.
        bits: ``b_max`` of a recipe named.
        max_staleness: of a recipe named.
        seed: of recipes that draw.
        sampled: the share of all clients that take part in a round.
        exact: whether clients' updates are gradients over all of their samples, without noise: a
            recipe may send them in another way.
        start: how a client gets the model to start from (`aqg.start`): ``"seed"``, ``"rounded"``,
            ``"exact"``; or ``"digest"`` where clients have it (see `ClientSession`), and snapshots
            are relative to it. ``"auto"`` is ``"seed"`` where ``layout`` is given, else
            ``"exact"``. With ``"seed"`` and ``"rounded"`` the session starts from the model as it
            arrives, which is `parameters`.
        layout: name and shape of each tensor in ``parameters``, for ``"seed"`` and ``"rounded"``.
        memory: what clients hold between rounds: the ``"model"`` and what the recipe keeps, or
            ``"none"`` of it: each order then begins with the starting model.
        path: a directory to which every step is written, and from which a session goes on that
            finds one there; None to remember in this process alone.
    """

    def __init__(
        self,
        parameters: FloatArray,
        num_clients: int,
        *,
        recipe: str | Recipe = "auto",
        step_size: float | None = None,
        step: str = "auto",
        weights: Sequence[float] | None = None,
        optimizer: str = "sgd",
        downlink: str = "auto",
        bits: int = 4,
        max_staleness: int = 100,
        seed: int = 0,
        sampled: float = 1.0,
        exact: bool = False,
        start: str = "auto",
        layout: Sequence[tuple[str, tuple[int, ...]]] | None = None,
        memory: str = "model",
        path: Path | str | None = None,
    ) -> None:
        first = _checked(parameters, num_clients)
        if start == "auto":
            start = "exact" if layout is None else "seed"
        require_way(start)
        self._first_message = b""
        if start in ("seed", "rounded"):
            tensors = layout or (("model", first.shape),)
            first, self._first_message = settle(first, tensors, start, seed=seed)
        for name, value in (("step_size", step_size), ("sampled", sampled)):
            if value is not None and not (is_number(value) and value > 0):
                raise ConfigError(f"{name} is {value!r}; it must be a finite number above 0")
        if sampled > 1:
            raise ConfigError(f"sampled is {sampled!r}; it must be at most 1")
        if not is_whole(seed) or seed < 0:
            raise ConfigError(f"seed is {seed!r}; it must be a whole number, at least 0")
        named = recipe if isinstance(recipe, str) else ""
        chosen = make_recipe(recipe, bits, max_staleness) if isinstance(recipe, str) else recipe
        updates = kind_of_updates(exact, sampled, memory == "none")
        self.recipe = chosen.for_updates(updates)
        require_memory(memory, self.recipe)
        self._forgets = memory == "none"
        self.step_size = 1.0 / num_clients if step_size is None else float(step_size)
        if step == "auto" and step_size is not None:
            step = "fixed"
        made = make_optimizer(optimizer)
        self._step = server.Step(
            self.step_size,
            sampled=sampled,
            optimizer=made,
            rule=resolve_step(step, self.recipe, exact, made),
            downlink=_resolve(downlink, self.recipe),
        )
        about = {"bits": bits, "max_staleness": max_staleness, "updates": updates}
        self._terms = {"recipe": named, "seed": seed, **about}
        self._optimizer = optimizer
        self._shares_start = start == "digest"
        self._path = None if path is None else Path(path)
        given = _weights(weights, num_clients)
        self._fingerprint = messages.fingerprint(self.recipe, len(first), str(first.dtype), seed)
        self._run, self._incarnation = secrets.token_hex(8), 1
        self._book = self._restored() or self._first(first, given)
        self._answered: set[int] = set()
        self._informed: set[int] = set()  # clients that have answered to the terms of this process
        self._save()  # the new incarnation: orders of the one before are older

    @property
    def round(self) -> int:
        """``k``, the round in progress, counted from 1."""
        return self._book.round

    @property
    def parameters(self) -> FloatArray:
        """The model of this round."""
        return self._book.parameters

    @property
    def averaged(self) -> FloatArray:
        """The mean of the last models where steps adapt, else the model: what to use in the end."""
        return self._book.state.averaged

    @property
    def num_clients(self) -> int:
        """``M``."""
        return len(self._book.weights)

    @property
    def answered(self) -> frozenset[int]:
        """The clients whose replies were taken in this round."""
        return frozenset(self._answered)

    def order(self, client: int) -> bytes:
        """Return what a client is to be sent in this round; it can be sent more than once."""
        server.check_client(self._book.state, client)
        run = {"run": self._run, "incarnation": self._incarnation}
        order = self._book.order(client, fingerprint=self._fingerprint, **run, **self._terms)
        order = replace(order, movement=0.0)  # clients have it from the log
        return order.to_bytes(order if client in self._informed else None)

    def take(self, client: int, reply: object) -> Receipt:
        """Take in a client's reply, or say why not; one that is not taken changes nothing.

        The sum of a round is the same to the last bit only if replies are taken in the same order.
        """
        server.check_client(self._book.state, client)
        if not isinstance(reply, bytes | bytearray | memoryview):
            kind = type(reply).__name__
            return Receipt(False, problem=f"the reply is {kind}; it must be bytes")
        reply = bytes(reply)
        most = messages.max_frame_bytes(len(self.parameters)) + _HEAD_BYTES
        if len(reply) > most:
            return Receipt(False, problem=f"the reply has {len(reply)} bytes; {most} are the most")
        try:
            read = messages.Reply.from_bytes(reply, self._book.state.peers[client].held.stamp)
        except (WireError, MessageError) as error:
            return Receipt(False, problem=str(error))
        if read.stale:
            return Receipt(False, problem="the client has answered a later order already")
        if read.lost == messages.NO_TERMS:
            self._informed.discard(client)
        if (read.incarnation, read.round) == (self._incarnation, self.round):
            if read.lost != messages.NO_TERMS and not self._forgets:
                self._informed.add(client)
            if client in self._answered:
                problem = f"client {client} was taken in round {self.round} already"
                return Receipt(False, problem=problem)
            if not self._forgets:
                self._book.note_holding(client, read)
        if read.lost:
            return Receipt(False, wants_order=True, problem=f"the client is lost: {read.lost}")
        taken = self._book.accept(client, read, self._incarnation)
        if isinstance(taken, str):
            return Receipt(False, problem=taken)
        self._answered.add(client)
        fault = "" if taken.width else read.fault
        return Receipt(True, problem=fault, loss=read.loss, num_bytes=len(read.frame))

    def step(self) -> None:
        """Take the server's step with what was taken in, and begin the next round.

        Where no reply was taken the model stays as it is.
        """
        if self._answered:
            self._book.step()
        else:
            self._book.skip_step()
        self._answered = set()
        self._save()

    def _first(self, parameters: FloatArray, weights: Float64Array) -> MirrorBook:
        book = MirrorBook.first(self.recipe, parameters, weights, self._step)
        if not self._shares_start and book.publisher is not None:
            book.publisher.start, book.publisher.first_message = None, self._first_message
            book.publisher.positions[:] = 0
        return book

    def _save(self) -> None:
        if self._path is None:
            return
        publisher, file = self._book.publisher, self._path / _START
        start = publisher.start if self._shares_start and publisher is not None else None
        if start is not None and (self.round == 1 or not file.exists()):
            write_arrays(file, {"parameters": start})
        arrays: dict[str, Any] = {
            "run": np.array(self._run),
            "fingerprint": as_array(self._fingerprint),
            "incarnation": np.array(self._incarnation, np.int64),
            "downlink": np.array(describe_downlink(self._step.downlink)),
            "optimizer": np.array(self._optimizer),
            "first_message": np.frombuffer(self._first_message, np.uint8),
            **self._book.to_arrays(),
        }
        write_arrays(self._path / CHECKPOINT, arrays)

    def _restored(self) -> MirrorBook | None:
        if self._path is None:
            return None
        make_directory(self._path)
        file = self._path / CHECKPOINT
        if not file.exists():
            return None
        arrays = read_arrays(file)
        start = _load_start(self._path / _START) if self._shares_start else None
        try:
            terms = str(arrays["downlink"]), str(arrays["optimizer"]), "step/start" in arrays
            is_fixed = isinstance(self._step.rule, Fixed)
            fitting = describe_downlink(self._step.downlink), self._optimizer, not is_fixed
            if arrays["fingerprint"].tobytes() != self._fingerprint or terms != fitting:
                raise RunError(
                    f"{str(file)!r} holds a session with another model, recipe, seed, downlink, "
                    "optimizer or step; name another directory"
                )
            book = MirrorBook.from_arrays(arrays, self.recipe, self._step, start)
            self._first_message = arrays["first_message"].tobytes()
            if book.publisher is not None:
                book.publisher.first_message = self._first_message
            self._run, self._incarnation = str(arrays["run"]), int(arrays["incarnation"]) + 1
        except KeyError as error:
            raise RunError(f"{str(file)!r} has no {error}; it is not a session's") from None
        book.check(file)
        return book


def _load_start(file: Path) -> FloatArray | None:
    try:
        return read_arrays(file)["parameters"]
    except (RunError, KeyError) as error:
        _logger.warning("snapshots will be longer, the starting model is not there: %s", error)
        return None


def _resolve(spec: str, recipe: Recipe) -> Downlink:
    downlink = resolve_downlink(spec, recipe)
    if isinstance(downlink, Full):
        if spec != "auto":
            raise ConfigError("downlink is 'full'; a session has 'exact', 'condensed' or 'auto'")
        return Exact()
    return downlink


def _checked(parameters: object, num_clients: Any) -> FloatArray:
    if not is_whole(num_clients) or num_clients < 1:
        raise ConfigError(f"num_clients is {num_clients!r}; it must be a whole number above 0")
    start = np.array(parameters)
    if start.ndim != 1 or not len(start) or start.dtype.name not in ("float32", "float64"):
        raise ConfigError(
            f"parameters are {start.dtype}{start.shape}; they must be flat, float32 or float64"
        )
    num_bad = int(np.count_nonzero(~np.isfinite(start)))
    if num_bad:
        raise ConfigError(f"parameters have {num_bad} values that are not finite")
    return start


def _weights(weights: Sequence[float] | None, num_clients: int) -> Float64Array:
    try:
        given = np.ones(num_clients) if weights is None else np.array(weights, np.float64)
    except (TypeError, ValueError):
        given = np.zeros(0)
    if given.shape != (num_clients,) or not (np.isfinite(given).all() and (given >= 0).all()):
        raise ConfigError(f"weights must be {num_clients} finite numbers that are not negative")
    return given
