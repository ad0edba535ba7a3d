"""A grid between a strategy and Flower's: arrays go in and come out, compressed parts travel.

Strategies see what they would see without it. A reply that cannot be used becomes an error reply
with the reason, which strategies report and leave out; it is counted, and changes nothing. A node
that lacks part of the model is sent the whole of it, in the same round.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from flwr.app import ArrayRecord, Error, Message, RecordDict
from flwr.serverapp import Grid

from aqg.errors import AqgError, MessageError
from aqg.flower.dropin.channel import Channel, LostError, Settings
from aqg.flower.dropin.tensors import Schema
from aqg.flower.envelope import (
    BESIDE,
    COMPRESSED,
    FULL,
    RECORD,
    Envelope,
    num_bytes,
    pack,
    unpack,
)
from aqg.flower.exchange import pause_after
from aqg.flower.private import answer_to, bounded_pulls, name_message
from aqg.flower.records import plain

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flwr.supercore.run import Run

    from aqg.flower.dropin.channel import Phase

_logger = logging.getLogger("flwr.aqg")

_KINDS = ("train", "evaluate")
_MOST_REPEATS = 2
_FOREVER = 1e9
_UNKNOWN = 0
_LONGEST = 300


class _Sent(NamedTuple):
    """A message on its way, as the strategy wrote it."""

    message: Message
    phases: dict[str, Phase]
    identifier: str
    repeats: int = 0


@dataclass
class Traffic:
    """What went to and from nodes, in bytes handed to Flower.

    Attributes:
        down: to nodes.
        up: from nodes.
        plain_down: what it would have been without compression.
        plain_up: likewise.

    """

    down: int = 0
    up: int = 0
    plain_down: int = 0
    plain_up: int = 0


@dataclass
class Counts:
    """What happened in a run so far.

    Attributes:
        train: bytes of training.
        evaluate: bytes of evaluation.
        refused: replies that were refused, by node.
        lost: how often a node had to be sent the whole model again.

    """

    train: Traffic = field(default_factory=Traffic)
    evaluate: Traffic = field(default_factory=Traffic)
    refused: Counter[int] = field(default_factory=Counter)
    lost: int = 0

    def of(self, kind: str) -> Traffic:
        """Return the bytes of one kind of message."""
        return self.train if kind == "train" else self.evaluate


class CompressedGrid(Grid):
    """Compresses what passes through another grid.

    Args:
        grid: Flower's.
        settings: what the user chose.

    """

    def __init__(self, grid: Grid, settings: Settings) -> None:
        self._grid = grid
        self._settings = settings
        self._run_name = secrets.token_hex(8)
        self._channels: dict[str, Channel] = {}
        self._open: dict[str, _Sent] = {}
        self._renamed: dict[str, str] = {}
        self._warned: set[str] = set()
        self._speakers: set[int] = set()
        self.counts = Counts()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def set_run(self, run: Run) -> None:
        """Tell the grid which run it is for."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """The run."""
        return self._grid.run

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        """Make a message, as Flower's grid does."""
        return self._grid.create_message(*arguments, **options)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are connected."""
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        """Return what is known of the nodes that are connected."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, compressed; return their identifiers."""
        messages = list(messages)
        phases = self._publish(messages)
        sent = [self._compress(m, p) for m, p in zip(messages, phases, strict=True)]
        identifiers = list(self._grid.push_messages(sent))
        now = time.time()
        self._open = {i: s for i, s in self._open.items() if _expiry(s.message) > now}
        taken = set(identifiers)
        for message, own, phase in zip(sent, messages, phases, strict=True):
            identifier = message.metadata.message_id
            if phase is not None and identifier in taken:
                name_message(own, identifier)
                self._open[identifier] = _Sent(own, phase, identifier)
        return identifiers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there, with whole models."""
        wanted = {self._renamed.get(identifier, identifier) for identifier in message_ids}
        replies = []
        for reply in self._grid.pull_messages(wanted):
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
        before = _totals(self.counts)
        identifiers = set(self.push_messages(messages))
        started, replies = time.monotonic(), list[Message]()
        seconds = _FOREVER if timeout is None else timeout
        while identifiers:
            waited = time.monotonic() - started
            with bounded_pulls(max(0.0, seconds - waited)):
                found = list(self.pull_messages(identifiers))
            replies += found
            identifiers -= {reply.metadata.reply_to_message_id for reply in found}
            waited = time.monotonic() - started
            if not identifiers or waited >= seconds:
                break
            time.sleep(pause_after(waited, seconds))
        for identifier in identifiers:  # what comes for them now finds nobody
            self._open.pop(self._renamed.pop(identifier, identifier), None)
        _log_traffic(before, _totals(self.counts))
        return replies

    def _publish(self, messages: list[Message]) -> list[dict[str, Phase] | None]:
        """Bring the public copies up to date; return what is sent of the models of each message."""
        phases: list[dict[str, Phase] | None] = []
        published: dict[str, tuple[ArrayRecord, Phase]] = {}
        asked: set[int] = set()
        for message in messages:
            phases.append(None)
            kind, node = _kind_of(message), message.metadata.dst_node_id
            if kind not in _KINDS or not message.has_content() or node in asked:
                continue
            own = {}
            for name, record in message.content.items():
                if not isinstance(record, ArrayRecord):
                    continue
                if name not in published:
                    phase = self._phase(name, record, kind == "train")
                    if phase is None:
                        continue
                    published[name] = record, phase
                first, phase = published[name]
                if record is not first and not _is_equal(record, first):
                    self._warn(f"{name!r} is not the same for all nodes; it is sent as it is")
                    continue
                own[name] = phase
            if own:
                phases[-1] = own
                asked.add(node)
        return phases

    def _phase(self, name: str, record: ArrayRecord, is_train: bool) -> Phase | None:
        try:
            if name not in self._channels:
                schema = Schema.of(record)
                if schema is None:
                    return None
                run = f"{self._run_name}{len(self._channels)}"
                self._channels[name] = Channel(run, record, schema, self._settings)
            return self._channels[name].publish(record, is_train)
        except MessageError as error:
            self._warn(f"{name!r} is sent as it is: {error}")
            return None

    def _compress(self, message: Message, phases: dict[str, Phase] | None) -> Message:
        """Return the message that travels in place of the strategy's."""
        if phases is None:
            return message
        kind, node = _kind_of(message), message.metadata.dst_node_id
        envelope, beside = Envelope(), dict[str, Any]()
        for name, record in message.content.items():
            if name in phases:
                order, whole = self._channels[name].order(node, kind == "evaluate")
                envelope.add_model(name, COMPRESSED if whole is None else FULL, order)
                if whole is not None:
                    beside[name] = whole
            elif isinstance(record, ArrayRecord):
                envelope.records.append((name, BESIDE, None))
                beside[name] = record
            else:
                envelope.add(name, record)
                if node not in self._speakers:  # it may lack the mod, and must still understand
                    beside[name] = record
        content = RecordDict({RECORD: pack(envelope), **beside})
        traffic = self.counts.of(kind)
        traffic.down += num_bytes(content)
        traffic.plain_down += num_bytes(message.content)
        metadata = message.metadata
        return Message(
            content,
            node,
            metadata.message_type,
            ttl=max(_expiry(message) - time.time(), 1.0),
            group_id=metadata.group_id,
        )

    def _restore(self, sent: _Sent, reply: Message) -> Message | None:
        """Return a reply as the strategy expects it; None where the node was sent more."""
        metadata = sent.message.metadata
        node, kind = metadata.dst_node_id, _kind_of(sent.message)
        if reply.has_error():
            return _replaced(sent, reply)
        try:
            if RECORD not in reply.content:
                raise MessageError(
                    "it answers without the mod; write ClientApp(mods=[aqg_mod]) in its app"
                )
            traffic = self.counts.of(kind)
            traffic.up += num_bytes(reply.content)
            content = self._unpack(sent, reply.content, node)
        except LostError as error:
            return self._send_again(sent, str(error))
        except AqgError as error:
            return self._refused(sent, plain(str(error), _LONGEST))
        except Exception as error:  # whatever a node sends, the run goes on
            reason = f"its reply cannot be read: {type(error).__name__}: {error}"
            return self._refused(sent, plain(reason, _LONGEST))
        self._speakers.add(node)
        traffic.plain_up += num_bytes(content)
        reply.content = content
        return _replaced(sent, reply)

    def _unpack(self, sent: _Sent, content: RecordDict, node: int) -> RecordDict:
        envelope = unpack(content)
        parts, records = iter(envelope.parts), dict[str, Any]()
        for name, kind, values in envelope.records:
            if kind == COMPRESSED:
                if name not in sent.phases:
                    raise MessageError(f"it sent a model {name!r}, for which it was not asked")
                records[name] = self._channels[name].take(node, sent.phases[name], next(parts))
            elif kind == BESIDE:
                record = content.get(name)
                if not isinstance(record, ArrayRecord):
                    raise MessageError(f"its reply has no arrays {name!r}, which it announces")
                records[name] = record
            elif kind == FULL:
                raise MessageError(f"it sent an order for {name!r}")
            else:
                records[name] = envelope.small(kind, values)
        for name, phase in sent.phases.items():
            self._channels[name].note(node, phase)
        return RecordDict(records)

    def _send_again(self, sent: _Sent, why: str) -> Message | None:
        """Send a node the whole model, in the place of what it could not follow."""
        node = sent.message.metadata.dst_node_id
        for name in sent.phases:
            self._channels[name].forget(node)
        self.counts.lost += 1
        is_late = any(self._channels[n].version != p.version for n, p in sent.phases.items())
        if sent.repeats >= _MOST_REPEATS or is_late or _expiry(sent.message) <= time.time():
            return self._refused(sent, f"it cannot follow the model: {plain(why, _LONGEST)}")
        again = self._compress(sent.message, sent.phases)
        taken = list(self._grid.push_messages([again]))
        if not taken or taken[0] is None:
            return self._refused(sent, "the whole model could not be sent to it")
        self._open[taken[0]] = sent._replace(repeats=sent.repeats + 1)
        self._renamed[sent.identifier] = taken[0]
        return None

    def _refused(self, sent: _Sent, reason: str) -> Message:
        node = sent.message.metadata.dst_node_id
        self.counts.refused[node] += 1
        text = f"node {node}: {reason}"
        _logger.warning("%s", text)
        return Message(Error(_UNKNOWN, f"aqg: {text}"), reply_to=sent.message)

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _logger.warning("%s", text)


def _kind_of(message: Message) -> str:
    return message.metadata.message_type.partition(".")[0]


def _expiry(message: Message) -> float:
    return message.metadata.created_at + message.metadata.ttl


def _is_equal(one: ArrayRecord, other: ArrayRecord) -> bool:
    return list(one) == list(other) and all(
        one[name] is other[name] or one[name].data == other[name].data for name in one
    )


def _replaced(sent: _Sent, reply: Message) -> Message:
    """Return a reply that answers the strategy's message, even if it had to be sent again."""
    if reply.metadata.reply_to_message_id != sent.identifier:
        answer_to(reply, sent.identifier)
    return reply


def _totals(counts: Counts) -> tuple[int, int, int, int]:
    both = counts.train, counts.evaluate
    return (
        sum(t.up for t in both),
        sum(t.down for t in both),
        sum(t.plain_up for t in both),
        sum(t.plain_down for t in both),
    )


def _log_traffic(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    up, down, plain_up, plain_down = (b - a for a, b in zip(before, after, strict=True))
    if up or down:
        _logger.info(
            "aqg: %s up (of %s), %s down (of %s)",
            *(f"{size / 1000:.1f} kB" for size in (up, plain_up, down, plain_down)),
        )
