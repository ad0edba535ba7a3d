"""The server's end of the protocol: orders out, replies in, a step, and a checkpoint.

A reply is checked as a whole before anything changes. One that is damaged, late, doubled, or of
another mirror is refused with a reason, and costs that client's part of the round alone.
"""

import logging
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from aqg.core.downlink import Downlink, Exact, Full, describe_downlink, resolve_downlink
from aqg.core.optimizers import make_optimizer
from aqg.core.recipe import Recipe, kind_of_updates, require_memory
from aqg.core.recipes import make_recipe
from aqg.core.server import Step, check_client
from aqg.core.step_sizes import Fixed, resolve_step
from aqg.core.types import Float64Array, FloatArray, is_number, is_whole
from aqg.errors import ConfigError, MessageError, RunError, WireError
from aqg.protocol.book import (
    MirrorBook,
    as_array,
    book_from_arrays,
    book_to_arrays,
    check_book,
)
from aqg.protocol.messages import NO_TERMS, reply_from_bytes, to_bytes
from aqg.protocol.mirrors import fingerprint, max_frame_bytes
from aqg.protocol.store import make_directory, read_arrays, write_arrays
from aqg.start import require_way, settle

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
        self._step = Step(
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
        self._fingerprint = fingerprint(self.recipe, len(first), str(first.dtype), seed)
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
        check_client(self._book.state, client)
        run = {"run": self._run, "incarnation": self._incarnation}
        order = self._book.order(client, fingerprint=self._fingerprint, **run, **self._terms)
        order = replace(order, movement=0.0)  # clients have it from the log
        return to_bytes(order, order if client in self._informed else None)

    def take(self, client: int, reply: object) -> Receipt:
        """Take in a client's reply, or say why not; one that is not taken changes nothing.

        The sum of a round is the same to the last bit only if replies are taken in the same order.
        """
        check_client(self._book.state, client)
        if not isinstance(reply, bytes | bytearray | memoryview):
            kind = type(reply).__name__
            return Receipt(False, problem=f"the reply is {kind}; it must be bytes")
        reply = bytes(reply)
        most = max_frame_bytes(len(self.parameters)) + _HEAD_BYTES
        if len(reply) > most:
            return Receipt(False, problem=f"the reply has {len(reply)} bytes; {most} are the most")
        try:
            read = reply_from_bytes(reply, self._book.state.peers[client].held.stamp)
        except (WireError, MessageError) as error:
            return Receipt(False, problem=str(error))
        if read.stale:
            return Receipt(False, problem="the client has answered a later order already")
        if read.lost == NO_TERMS:
            self._informed.discard(client)
        if (read.incarnation, read.round) == (self._incarnation, self.round):
            if read.lost != NO_TERMS and not self._forgets:
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
            **book_to_arrays(self._book),
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
            book = book_from_arrays(arrays, self.recipe, self._step, start)
            self._first_message = arrays["first_message"].tobytes()
            if book.publisher is not None:
                book.publisher.first_message = self._first_message
            self._run, self._incarnation = str(arrays["run"]), int(arrays["incarnation"]) + 1
        except KeyError as error:
            raise RunError(f"{str(file)!r} has no {error}; it is not a session's") from None
        check_book(book, file)
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
