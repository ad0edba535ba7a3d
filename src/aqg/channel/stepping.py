"""Our own server's end for one model: it makes the model from the updates, and says its steps.

What differs from `aqg.channel.server` is where entries come from. There a strategy makes a model,
and an entry says what the public copy lacks of it. Here the round's uploads go into
`aqg.core.server`, whose step moves the copy itself, and every round has one entry. Tensors beside
the vector, such as running statistics, are averaged with the weights of the updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aqg.channel.server import Channel, Phase, Taken
from aqg.channel.settings import Settings
from aqg.channel.tensors import Kind, Kinds, PublicCopy, Tensor, Values, tensor_digest, unflatten
from aqg.core.downlink import Full, lies_on_grid
from aqg.core.server import Peer, Step
from aqg.core.step_sizes import share_of_newest
from aqg.core.types import Float64Array
from aqg.errors import ConfigError, MessageError
from aqg.protocol.log import ModelLog
from aqg.protocol.server import MirrorBook
from aqg.wire.entry import encode_entry, known_velocity
from aqg.wire.varint import write_varint


class Travel(NamedTuple):
    """How tensors travel."""

    kinds: Kinds  # of each
    own: frozenset[str] = frozenset()  # those that clients keep to themselves
    # second names of tensors, such as those of tied weights, and the first ones
    aliases: Mapping[str, str] = {}


class SteppingChannel(Channel):
    """One model of a run, which is made here from clients' updates with a ``step``.

    ``members`` are how many clients there are, and what says which of them a node is.
    """

    makes_model = True

    def __init__(
        self,
        run: str,
        values: Values,
        settings: Settings,
        members: tuple[int, Callable[[int], int | None]],
        step: Step,
        travel: Travel,
    ) -> None:
        if settings.forgets and travel.own:
            raise ConfigError("memory is 'none' with statistics that clients keep to themselves")
        super().__init__(run, values, settings, travel.kinds)
        self._is_open = False
        (num_clients, self._client_of), self._how = members, step
        self._own, self._aliases = travel.own, travel.aliases
        self._replies: dict[int, Taken] = {}
        weights = np.ones(num_clients)
        self.book = MirrorBook.first(self._recipe, self._copy.vector, weights, step)
        self.book.publisher = None  # the log is the channel's
        self._copy = self._copy._replace(public=self.book.public)
        self._copy = self._copy.without(self._aliases).digested()
        self._log = ModelLog(merges=lies_on_grid(self._recipe, step.downlink))
        self._means: dict[str, Float64Array] = {}

    @property
    def taken(self) -> dict[int, Taken]:
        """The replies that were taken since the last step, by client."""
        return dict(sorted(self._replies.items()))

    def publish(
        self,
        given: Values,  # noqa: ARG002  (the model is made here)
        is_train: bool,
        as_it_is: bool = False,  # noqa: ARG002
    ) -> Phase:
        if is_train:
            self._replies = {}
        return Phase(self, False, self._named(dict(self.copied())), self._copy)

    def commit(self, taken: Taken) -> None:
        """Take note of a reply that was read; it counts in the next step."""
        self.note(taken.node, taken.phase)
        if taken.phase.version == self.version:
            self._replies[self._place(taken.node)] = taken

    @property
    def whole_bytes(self) -> int:
        _, velocity, direction = self._copy.public.vectors
        return self.num_bytes + int(velocity.nbytes + direction.nbytes)

    @property
    def holders(self) -> set[int]:
        """The clients that have had the model once."""
        return set(self._positions)

    def reweigh(self, weights: Float64Array) -> None:
        if not np.array_equal(weights, self.book.weights):
            self.book.reweigh(weights)

    def step(self, clients: set[int], is_step: bool) -> None:
        """Take in these clients' replies, in their order, and take a step, or none."""
        book = self.book
        taken = {client: t for client, t in self.taken.items() if client in clients}
        self._replies = {}
        for client, reply in taken.items():
            if reply.peer is not None:
                book.take(client, reply.peer, reply.message, reply.reply.restarted)
        before = book.public
        entry = book.step() if is_step else book.skip_step()
        copy = self._averaged_beside(taken if is_step else {})
        self._log.append(encode_entry(entry, known_velocity(before)))
        public = book.public
        public = public.marked_after(self._copy.public.mark, entry)
        copy = copy._replace(public=public).digested()
        beside = {name: self._values[name] for name in self._travels()}  # before any rounding
        self._copy, self._values = copy, {**copy.values(self.schema), **beside}
        if isinstance(self._how.downlink, Full):
            self._log = ModelLog(copy.version)
        self._cut()

    def averaged(self) -> dict[str, Tensor]:
        """Return what is measured and kept: where steps adapt, the mean of the last models."""
        specs = self.schema.chosen(self._copy.layout)
        means = {n: m.astype(self._values[n].dtype) for n, m in self._means.items()}
        found = {**self._values, **means, **unflatten(self.book.state.averaged, specs)}
        return self._named({spec.name: found[spec.name] for spec in self.schema.specs})

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return all that a server needs to go on, as named arrays that a file can hold."""
        copy = self._copy
        positions = [self._positions.get(c, 0) for c in range(len(self.book.weights))]
        beside = {f"kept {name}": tensor for name, tensor in copy.kept.items()}
        beside |= {f"value {name}": self._values[name] for name in self._travels()}
        beside |= {f"mean {name}": mean for name, mean in self._means.items()}
        log = self._log
        return {
            **self.book.to_arrays(),
            **beside,
            "copy_digest": np.frombuffer(copy.digest, np.uint8),
            "log_start": np.array(log.first, np.int64),
            "log_sizes": np.array([len(entry) for entry in log.entries], np.int64),
            "log_bytes": np.frombuffer(b"".join(log.entries), np.uint8),
            "changed": np.array([self._changed.get(name, 0) for name in copy.kept], np.int64),
            "positions": np.array(positions, np.int64),
        }

    def restore(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Go on from what `to_arrays` returned."""
        self.book = MirrorBook.from_arrays(arrays, self._recipe, self._how, None)
        named = {
            kind: {n.partition(" ")[2]: a for n, a in arrays.items() if n.startswith(f"{kind} ")}
            for kind in ("kept", "value", "mean")
        }
        kept = {name: named["kept"][name] for name in self._copy.kept}
        digests = {name: tensor_digest(tensor) for name, tensor in kept.items()}
        self._copy = PublicCopy(self._copy.layout, self.book.public.marked(), kept, digests)
        self._copy = self._copy.without(self._aliases).digested()
        self._values = {**self._copy.values(self.schema), **named["value"]}
        self._means = named["mean"]
        data, ends = arrays["log_bytes"].tobytes(), np.cumsum(arrays["log_sizes"]).tolist()
        entries = [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        merges = lies_on_grid(self._recipe, self._how.downlink)
        self._log = ModelLog(int(arrays["log_start"]), entries, merges=merges)
        self._changed = dict(zip(kept, arrays["changed"].tolist(), strict=True))
        self._positions = {c: p for c, p in enumerate(arrays["positions"].tolist()) if p}

    def _place(self, node: int) -> int:
        client = self._client_of(node)
        if client is None:
            raise MessageError(f"node {node} is no client")
        return client

    def _number(self, place: int) -> int:
        return place

    @property
    def _noise(self) -> float:
        return self.book.state.model.budget.noise

    def _beside(self) -> bytes:
        places = self.schema.places
        pairs = [(places[name], places[first]) for name, first in self._aliases.items()]
        bitmaps = self.schema.bitmap(self._travels()) + self.schema.bitmap(self._own)
        return bitmaps + b"".join(write_varint(place) for pair in pairs for place in pair)

    def _peer(self, place: int, layout: bytes) -> Peer:
        if self._settings.forgets:
            return super()._peer(place, layout)
        return self.book.state.peers[place]

    def _named(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors, with those of second names as they are under the first."""
        return values | {name: values[first] for name, first in self._aliases.items()}

    def _travels(self) -> list[str]:
        """Return the tensors that travel beside the vector."""
        return [name for name, k in self._kinds.items() if k in (Kind.HALF, Kind.EXACT)]

    def _averaged_beside(self, taken: dict[int, Taken]) -> PublicCopy:
        """Average the tensors beside the vector; return the copy with them."""
        copy, names = self._copy, self._travels()
        if not taken or not names:
            return copy
        weights = self.book.weights[list(taken)]
        shares = weights / weights.sum() if weights.any() else np.full(len(taken), 1 / len(taken))
        for name in names:
            held = copy.kept[name]
            if not any(name in reply.kept for reply in taken.values()):
                continue
            mean = np.zeros(held.shape)
            for share, reply in zip(shares.tolist(), taken.values(), strict=True):
                mean += share * reply.kept.get(name, held).astype(np.float64)
            whole = np.rint(mean) if held.dtype.kind in "iub" else mean
            self._values = {**self._values, name: whole.astype(held.dtype)}
        average = self._how.rule.average
        floats = [name for name in names if self._values[name].dtype.kind == "f"]
        for name in floats if average else []:
            newest = self._values[name].astype(np.float64)
            old = self._means.get(name, newest)
            self._means[name] = old + share_of_newest(average, self.version) * (newest - old)
        return self._with_kept(copy)
