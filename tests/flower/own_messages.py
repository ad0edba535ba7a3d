"""What is in messages of our own app, to look at or to change; and what a run has on disk."""

from dataclasses import replace

import numpy as np
from flwr.app import ConfigRecord

from aqg.channel.client import CopyStore
from aqg.core.downlink import resolve_downlink
from aqg.core.server import Step
from aqg.errors import AqgError
from aqg.flower.envelope import RECORD, Envelope
from aqg.protocol.messages import Order, Reply, Stamp
from aqg.protocol.server import MirrorBook
from aqg.protocol.store import ClientStore, DirectoryVault, read_arrays

KNOWN = {}
"""Orders that said the terms of a run, by the run and the client."""
ANY = Stamp(0, 0, bytes(4))
"""Stands for the state of a mirror that a reply leaves out, when it is read and written again."""


def learn(message):
    """Take note of what an order says, which later messages leave out."""
    try:
        order = order_in(message)
    except (AqgError, KeyError, IndexError, TypeError, AttributeError):  # not ours, or damaged
        return
    KNOWN[f"{order.run} {order.client} {order.layout.hex()}"] = order


def envelope_of(message):
    record = message.content[RECORD]
    value = record["bytes"]
    return Envelope.from_bytes(value if isinstance(record, ConfigRecord) else value.data)


def parts_of(message):
    """Return the bytes of orders or replies."""
    return [found for *_, found in envelope_of(message).records if isinstance(found, bytes)]


def order_in(message):
    return Order.from_bytes(parts_of(message)[0], reversed(KNOWN.values()))


def reply_in(message):
    return Reply.from_bytes(parts_of(message)[0], ANY)


def put(message, part, place=0):
    """Replace an order or a reply, or its bytes, in an envelope that is in order."""
    if not isinstance(part, bytes):
        part = part.to_bytes(ANY if isinstance(part, Reply) else None)
    envelope = envelope_of(message)
    places = [k for k, (*_, found) in enumerate(envelope.records) if isinstance(found, bytes)]
    name, kind, _ = envelope.records[places[place]]
    envelope.records[places[place]] = name, kind, part
    message.content[RECORD] = envelope.pack()


def change_reply(message, **fields):
    put(message, replace(reply_in(message), **fields))


def change_order(message, **fields):
    put(message, replace(order_in(message), **fields))


def flipped(data, bit=4):
    """Return bytes with one bit in their middle flipped."""
    damaged = bytearray(data)
    damaged[len(data) // 2] ^= bit
    return bytes(damaged)


def change_metrics(message, **metrics):
    """Change what a node measured, with checksums that fit."""
    envelope = envelope_of(message)
    for name, kind, values in envelope.records:
        if name == "metrics" and kind == "m":
            values.update(metrics)
    message.content[RECORD] = envelope.pack()


class Saved:
    def __init__(self, directory, recipe, downlink="auto"):
        arrays = read_arrays(directory / "checkpoint.npz")
        how = Step(0.0, downlink=resolve_downlink(downlink, recipe))
        self.book = MirrorBook.from_arrays(arrays, recipe, how, None)
        self.digest = arrays["copy_digest"].tobytes()
        self._run = f"{arrays['run']}0"

    def mirrors(self, place):
        """Return the mirrors that a client has in a directory."""
        (path,) = place.glob(f"{self._run}-*")
        return ClientStore(DirectoryVault(path), path.name).load()

    def model(self, place):
        """Return the model that a client has in a directory."""
        held = CopyStore(DirectoryVault(place / self._run), self._run).load()
        return None if held is None else held[0]

    def has_mirror(self, client, snapshot):
        """Whether a mirror is the server's of a client, bit for bit."""
        if snapshot is None or snapshot.stamp != self.book.entries[client].stamp:
            return False
        position = snapshot.state.track.position[0]
        return np.array_equal(position, self.book.state.mirror(client))

    def agrees(self, client, place):
        """Whether a client's mirror and model are the server's."""
        mirrors, model = self.mirrors(place), self.model(place)
        assert mirrors is not None
        assert model is not None
        is_model = np.array_equal(model.vector, self.book.parameters)
        return is_model and model.digest == self.digest and self.has_mirror(client, mirrors.current)
