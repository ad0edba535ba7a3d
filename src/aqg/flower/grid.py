"""A grid between a strategy and Flower's: arrays go in and come out, compressed parts travel.

Strategies see what they would see without it. A reply that cannot be used becomes an error reply
with the reason, which strategies report and leave out; it is counted, and changes nothing. A node
that lacks part of the model is sent the whole of it, in the same round.
"""

from __future__ import annotations

import math
import operator
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, Error, Message, RecordDict
from flwr.serverapp import Grid

from aqg.channel.server import Channel, Phase, Taken
from aqg.channel.settings import Settings
from aqg.channel.tensors import Values, is_finite, is_same
from aqg.errors import AqgError, ConfigError, MessageError
from aqg.flower.envelope import (
    RECORD,
    Envelope,
    is_readable,
    logger,
    num_bytes,
    plain,
    record_of,
    tensor_of,
    values_of,
)
from aqg.flower.private import OuterGrid, answer_to, kind_of, name_message, replies_to
from aqg.protocol.log import LostError

_KINDS = ("train", "evaluate")
_MOST_REPEATS = 2
_UNKNOWN = 0
_LONGEST = 300
_FAREWELL_SECONDS = 15.0
"""How long the end of a run waits for nodes to forget it."""


class _Sent(NamedTuple):
    """A message on its way, as the strategy wrote it."""

    message: Message
    phases: dict[str, Phase]
    identifier: str
    repeats: int = 0

    @property
    def node(self) -> int:
        return self.message.metadata.dst_node_id


@dataclass
class Traffic:
    """What went to and from nodes, in bytes handed to Flower."""

    down: int = 0  # to nodes
    up: int = 0  # from nodes
    plain_down: int = 0  # what it would have been without compression
    plain_up: int = 0  # likewise

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(*map(operator.sub, astuple(self), astuple(other)))

    def __str__(self) -> str:
        sizes = self.up, self.plain_up, self.down, self.plain_down
        return "{} up (of {}), {} down (of {})".format(*(f"{n / 1000:.1f} kB" for n in sizes))


@dataclass
class NodeCounts:
    """What happened with one node."""

    train: Traffic = field(default_factory=Traffic)
    evaluate: Traffic = field(default_factory=Traffic)
    refused: int = 0  # its replies that were refused
    lost: int = 0  # how often it had to be sent the whole model again

    @property
    def whole(self) -> Traffic:
        return self.train + self.evaluate


@dataclass
class Counts:
    """What happened in a run so far, with each node and in all."""

    nodes: dict[int, NodeCounts] = field(default_factory=lambda: defaultdict(NodeCounts))

    @property
    def train(self) -> Traffic:
        return sum((counts.train for counts in self.nodes.values()), Traffic())

    @property
    def evaluate(self) -> Traffic:
        return sum((counts.evaluate for counts in self.nodes.values()), Traffic())

    def of(self, node: int, kind: str) -> Traffic:
        counts = self.nodes[node]
        return counts.train if kind == "train" else counts.evaluate

    @property
    def refused(self) -> Counter[int]:
        return Counter({n: counts.refused for n, counts in self.nodes.items() if counts.refused})

    @property
    def lost(self) -> int:
        return sum(counts.lost for counts in self.nodes.values())


class Checks:
    """Says of replies whether what they hold besides the update can be used; here, always."""

    def check(self, content: RecordDict, is_train: bool) -> None:
        """Raise `MessageError` where a reply will not do."""

    def compare(self, contents: Mapping[str, RecordDict]) -> dict[str, str]:  # noqa: ARG002
        """Return which replies of a round will not do beside the others, and why."""
        return {}


class CompressedGrid(OuterGrid):
    """Compresses what passes through another grid.

    ``checks`` are of what replies hold beside updates; without a ``run_name`` one is drawn.
    """

    def __init__(
        self, grid: Grid, settings: Settings, checks: Checks | None = None, run_name: str = ""
    ) -> None:
        super().__init__(grid)
        self.checks = checks or Checks()
        self.channels: dict[str, Channel] = {}  # by the names of records
        self._prepared: Channel | None = None
        self._settings = settings
        self._run_name = run_name or secrets.token_hex(8)
        self._numbers = count()
        self._whole: dict[str, tuple[int, ArrayRecord]] = {}  # public copies, and their versions
        self._open: dict[str, _Sent] = {}
        self._renamed: dict[str, str] = {}
        self._warned: set[str] = set()
        self._equipped: set[int] = set()
        self._plain: set[int] = set()
        self._remembering: dict[int, str] = {}
        self.counts = Counts()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages, asked, phases = list(messages), set[int](), dict[int, dict[str, Phase]]()
        published: dict[str, tuple[ArrayRecord, Phase]] = {}
        for place, message in enumerate(messages):
            node = message.metadata.dst_node_id
            if kind_of(message) in _KINDS and message.has_content() and node not in asked:
                asked.add(node)
                phases[place] = self._publish(message, published)
        sent = list(messages)
        for place, found in phases.items():  # all are published before the first is written
            sent[place] = self._compress(messages[place], found)
        identifiers = list(self.inner.push_messages(sent))
        now, taken = time.time(), set(identifiers)
        self._open = {i: s for i, s in self._open.items() if _expiry(s.message) > now}
        for place, found in phases.items():
            identifier = sent[place].metadata.message_id
            if identifier in taken:
                name_message(messages[place], identifier)
                self._open[identifier] = _Sent(messages[place], found, identifier)
        return identifiers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = {self._renamed.get(identifier, identifier) for identifier in message_ids}
        replies = []
        for reply in self.inner.pull_messages(wanted):
            identifier = reply.metadata.reply_to_message_id
            sent = self._open.pop(identifier, None)
            whole = reply if sent is None else self._restore(sent, reply)
            if whole is not None:
                self._renamed.pop(whole.metadata.reply_to_message_id, None)
                replies.append(whole)
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and return their replies, once all are there or the time is over."""
        before = self.counts.train + self.counts.evaluate
        identifiers = set(self.push_messages(messages))
        sent = {i: self._open[i].message for i in identifiers if i in self._open}
        replies = [
            r for found in replies_to(self.pull_messages, identifiers, timeout) for r in found
        ]
        for identifier in identifiers - {*map(_answers, replies)}:  # what comes now finds nobody
            self._open.pop(self._renamed.pop(identifier, identifier), None)
        moved = self.counts.train + self.counts.evaluate - before
        if moved.up or moved.down:
            logger.info("aqg: %s", moved)
        return self.compared(replies, sent)

    def compared(self, replies: list[Message], sent: Mapping[str, Message]) -> list[Message]:
        """Return a round's replies, with errors for those that will not do beside the others.

        ``sent`` has the messages, by the identifiers that replies name.
        """
        answered = {_answers(r): r for r in replies if not r.has_error() and _answers(r) in sent}
        reasons = self.checks.compare({i: reply.content for i, reply in answered.items()})
        for i, why in reasons.items():
            replies[replies.index(answered[i])] = self._refused(sent[i], why)
        return replies

    def prepare(self, record: ArrayRecord) -> ArrayRecord:
        """Begin with the model that a strategy starts from; return it as nodes will have it."""
        if not record or not is_readable(record):
            return record
        values = values_of(record)
        try:
            self._prepared = self._make_channel(values, self._settings)
        except ConfigError:  # said when it is sent
            return record
        copied = self._prepared.copied()
        is_exact = all(is_same(tensor, copied[name]) for name, tensor in values.items())
        return record if is_exact else record_of(copied.items())

    def finish(self, nodes: Iterable[int] = ()) -> None:
        """Let nodes forget what they keep of the run on disk, and log what it took.

        Those are asked that have said so, and others that are named.
        """
        self._remembering = dict.fromkeys(nodes, "train") | self._remembering
        content = RecordDict({RECORD: Envelope([(self._run_name, Envelope.ENDED, None)]).pack()})
        messages = [
            Message(content, node, message_type, ttl=_FAREWELL_SECONDS, group_id="0")
            for node, message_type in self._remembering.items()
        ]
        if messages:
            self._remembering = {}
            identifiers = set(self.inner.push_messages(messages))
            list(replies_to(self.inner.pull_messages, identifiers, _FAREWELL_SECONDS))
        logger.info("aqg: training took %s", self.counts.train)
        logger.info("aqg: evaluation took %s", self.counts.evaluate)

    def _publish(
        self, message: Message, published: dict[str, tuple[ArrayRecord, Phase]]
    ) -> dict[str, Phase]:
        """Bring the public copies up to date; return what is sent of the models of a message."""
        phases = {}
        for name, record in message.content.array_records.items():
            if name not in published:
                phase = self._phase(name, record, message)
                if phase is None:
                    continue
                published[name] = record, phase
            first, phase = published[name]
            if record is not first and not _is_equal(record, first):
                self._warn(f"{name!r} is not the same for all nodes; it is sent as it is")
                continue
            phases[name] = phase
        return phases

    def _phase(self, name: str, record: ArrayRecord, message: Message) -> Phase | None:
        """Bring a model's public copy up to date; None where the model cannot be compressed."""
        if not record or not is_readable(record):
            self._warn(f"{name!r} holds nothing that can be compressed; it is sent as it is")
            return None
        values = values_of(record)
        channel = self.channels.get(name)
        if channel is not None and not channel.schema.fits(values):
            logger.warning("%r has other tensors or shapes from here on: it is sent anew", name)
            channel = None
        if channel is None:
            try:
                channel = self._channel_of(values)
            except ConfigError as error:
                has_floats = any(tensor.dtype.kind == "f" for tensor in values.values())
                if has_floats and len(message.content.array_records) == 1 and not self.channels:
                    raise
                self.channels.pop(name, None)
                self._warn(f"{name!r} is sent as it is: {error}")
                return None
            self.channels[name] = channel
            self._whole[name] = channel.version, record  # at first the copy is the model
            if channel.odd:
                odd = ", ".join(channel.odd[:3])
                self._warn(f"{name!r} holds NaN or infinity in {odd}: never changed on nodes")
        is_plain = bool(self._plain) and not self._equipped
        phase = channel.publish(values, kind_of(message) == "train", as_it_is=is_plain)
        if name in self._whole and self._whole[name][0] != phase.version:
            del self._whole[name]
        if channel.fault:
            logger.error("the strategy's model %r is not sent: %s", name, channel.fault)
        return phase

    def _channel_of(self, values: Values) -> Channel:
        """Return a channel for a model that is sent for the first time."""
        ready, self._prepared = self._prepared, None
        if ready is not None and ready.schema.fits(values):
            own = ready.copied()
            if all(is_same(tensor, own[name]) for name, tensor in values.items()):
                return ready
        # a strategy goes on from what it has: what nodes start from must not be another model
        start = "digest" if self._settings.start == "digest" else "exact"
        return self._make_channel(values, replace(self._settings, start=start))

    def _make_channel(self, values: Values, settings: Settings) -> Channel:
        return Channel(f"{self._run_name}{next(self._numbers)}", values, settings)

    def _compress(self, message: Message, phases: dict[str, Phase]) -> Message:
        kind, node = kind_of(message), message.metadata.dst_node_id
        traffic = self.counts.of(node, kind)
        traffic.plain_down += num_bytes(message.content)
        if not phases:
            traffic.down += num_bytes(message.content)
            return message
        envelope, beside = Envelope(), dict[str, Any]()
        for name, record in message.content.items():
            if name in phases:
                channel = phases[name].channel
                order, is_full = channel.order(node, kind == "evaluate")
                envelope.add(name, Envelope.FULL if is_full else Envelope.COMPRESSED, order)
                if is_full:
                    beside[name] = self._copied(name, channel)
            elif isinstance(record, ArrayRecord):
                envelope.add(name, Envelope.BESIDE)
                beside[name] = record
            else:
                envelope.add_small(name, record)
                if node not in self._equipped:  # it may lack the mod, and must still understand
                    beside[name] = record
        envelope.says_version = node not in self._equipped
        content = RecordDict({**beside, RECORD: envelope.pack()})
        traffic.down += num_bytes(content)
        about, ttl = message.metadata, max(_expiry(message) - time.time(), 1.0)
        return Message(content, node, about.message_type, ttl=ttl, group_id=about.group_id)

    def _copied(self, name: str, channel: Channel) -> ArrayRecord:
        if name not in self._whole:
            self._whole[name] = channel.version, record_of(channel.copied().items())
        return self._whole[name][1]

    def _restore(self, sent: _Sent, reply: Message) -> Message | None:
        """Return a reply as the strategy expects it; None where the node was sent more."""
        node = sent.node
        if reply.has_error():
            is_compact = any(phase.channel.is_compact(node) for phase in sent.phases.values())
            if is_compact and node not in self._equipped and not sent.repeats:  # lacks the mod?
                return self._send_again(sent, "it answers with an error")
            answer_to(reply, sent.identifier)  # even if that had to be sent again
            return reply
        traffic = self.counts.of(node, kind_of(sent.message))
        try:
            traffic.up += num_bytes(reply.content)
            content, taken = self._unpack(sent, reply.content)
            self._check(sent, content)
        except LostError as error:
            return self._send_again(sent, str(error))
        except AqgError as error:
            return self._refused(sent.message, str(error))
        except Exception as error:  # whatever a node sends, the run goes on
            why = f"its reply cannot be read: {type(error).__name__}: {error}"
            return self._refused(sent.message, why)
        for part in taken:  # nothing has changed before
            part.commit()
        made = sum(part.channel.num_bytes for part in taken if part.channel.makes_model)
        traffic.plain_up += num_bytes(content) + made
        reply.content = content
        answer_to(reply, sent.identifier)
        return reply

    def _unpack(self, sent: _Sent, content: RecordDict) -> tuple[RecordDict, list[Taken]]:
        """Return a reply's records, and what is to be noted once they have been checked."""
        if not sent.phases:
            return content, []
        if RECORD not in content:
            return self._unpack_plain(sent, content), []
        envelope, node = Envelope.unpack(content), sent.node
        records, taken = dict[str, Any](), []
        for name, kind, given in envelope.records:
            if kind == Envelope.COMPRESSED:
                phase = sent.phases.get(name)
                if phase is None:
                    raise MessageError(f"it sent a model {name!r}, for which it was not asked")
                taken.append(phase.channel.take(node, phase, given))
                if not phase.channel.makes_model:  # else the reply itself is what counts
                    records[name] = record_of(taken[-1].tensors())
            elif kind == Envelope.BESIDE:
                record = content.get(name)
                if not isinstance(record, ArrayRecord):
                    raise MessageError(f"its reply has no arrays {name!r}, which it announces")
                records[name] = record
            elif kind == Envelope.ON_DISK:
                self._remembering[node] = sent.message.metadata.message_type
            elif kind in (Envelope.FULL, Envelope.ENDED):
                raise MessageError(f"it sent an order for {name!r}")
            else:
                records[name] = envelope.small(kind, given)
        self._equipped.add(node)
        for phase in sent.phases.values():
            phase.channel.note(node, phase)
        return RecordDict(records), taken

    def _unpack_plain(self, sent: _Sent, content: RecordDict) -> RecordDict:
        """Return the reply of a node without the mod, which holds whole models."""
        node = sent.node
        if node in self._equipped or any(p.channel.makes_model for p in sent.phases.values()):
            before = ", with which it answered before" if node in self._equipped else ""
            raise MessageError(
                f"it answers without the mod{before}; write ClientApp(mods=[aqg_mod]) in its app"
            )
        if not self._plain:
            self._warn(
                f"node {node} answers without the mod, with whole models, which are taken as they "
                "are, and so are those of other nodes like it; write ClientApp(mods=[aqg_mod]) in "
                "its app"
            )
        self._plain.add(node)
        records = dict[str, Any](content)
        for name, phase in sent.phases.items():
            record = records.get(name)
            if isinstance(record, ArrayRecord) and is_readable(record):
                values = values_of(record)
                if phase.channel.schema.fits(values):
                    records[name] = record_of(phase.channel.take_whole(phase, values))
        return RecordDict(records)

    def _check(self, sent: _Sent, content: RecordDict) -> None:
        """Raise `MessageError` where a reply would end a strategy, or ruin its model."""
        for name, record in content.items():
            if isinstance(record, ArrayRecord):
                self._check_arrays(sent, name, record)
                continue
            for key, value in record.items():
                if not all(map(_is_usable, value if isinstance(value, list) else [value])):
                    raise MessageError(f"{key!r} of its record {name!r} is {value!r:.80}")
        self.checks.check(content, kind_of(sent.message) == "train")

    def _check_arrays(self, sent: _Sent, name: str, record: ArrayRecord) -> None:
        known = sent.message.content.get(name)
        for key, array in record.items():
            if array.stype != "numpy.ndarray" or is_finite(tensor_of(array)):
                continue
            first = known.get(key) if isinstance(known, ArrayRecord) else None
            if first is None or is_finite(tensor_of(first)):
                raise MessageError(f"tensor {key!r} of its record {name!r} holds NaN or infinity")

    def _send_again(self, sent: _Sent, why: str) -> Message | None:
        """Send a node the whole model, in the place of what it could not follow."""
        for phase in sent.phases.values():
            phase.channel.forget(sent.node)
        self.counts.nodes[sent.node].lost += 1
        is_late = any(p.channel.version != p.version for p in sent.phases.values())
        if sent.repeats >= _MOST_REPEATS or is_late or _expiry(sent.message) <= time.time():
            return self._refused(sent.message, f"it cannot follow the model: {why}")
        again = self._compress(sent.message, sent.phases)
        taken = list(self.inner.push_messages([again]))
        if not taken or taken[0] is None:
            return self._refused(sent.message, "the whole model could not be sent to it")
        self._open[taken[0]] = sent._replace(repeats=sent.repeats + 1)
        self._renamed[sent.identifier] = taken[0]
        return None

    def _refused(self, message: Message, reason: str) -> Message:
        """Return the error in place of a reply to a message."""
        node = message.metadata.dst_node_id
        self.counts.nodes[node].refused += 1
        text = f"node {node}: {plain(reason, _LONGEST)}"
        logger.warning("%s", text)
        return Message(Error(_UNKNOWN, f"aqg: {text}"), reply_to=message)

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("%s", text)


def _is_usable(value: object) -> bool:
    """Tell whether a value is no number beyond all use: Flower's own records have 64 bits."""
    if isinstance(value, int):
        return -(2**63) <= value < 2**64
    return not isinstance(value, float) or math.isfinite(value)


def _expiry(message: Message) -> float:
    return message.metadata.created_at + message.metadata.ttl


def _answers(reply: Message) -> str:
    return reply.metadata.reply_to_message_id


def _is_equal(one: ArrayRecord, other: ArrayRecord) -> bool:
    return list(one) == list(other) and all(
        one[name] is other[name] or one[name].data == other[name].data for name in one
    )
