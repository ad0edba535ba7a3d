"""Who the clients of our own server are.

The server never takes an identity from a reply: it knows to which node it sent the message. How a
node gets the index ``m`` of a client is decided here, once, and holds as long as the node lives.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from aqg.core.types import Float64Array
from aqg.errors import AqgError, MessageError
from aqg.flower.envelope import HELLO, RECORD, Envelope, logger, pack, plain, unpack
from aqg.flower.private import bounded_pulls, pauses


class Roster:
    """Binds nodes to client indices ``0..num_clients-1``.

    By default a client is a node: nodes take free indices in the order of their ids, and an index
    is free when its node has gone. With node authentication a node keeps its id, and so its index,
    as long as it keeps its key.

    With ``trust_partition_id`` a client is the ``partition-id`` that a node reports. A second node
    that reports the same one is refused while the first is connected and answers.
    """

    def __init__(self, num_clients: int, trust_partition_id: bool) -> None:
        self.num_clients = num_clients
        self.trust_partition_id = trust_partition_id
        self.num_samples = np.zeros(num_clients)  # 0 where unknown
        self._asked: dict[int, float] = {}  # until when each node has time to introduce itself
        self._pending: set[str] = set()  # the messages that ask for it
        self._nodes: dict[int, int] = {}
        self._clients: dict[int, int] = {}
        self._online: set[int] = set()
        self._claims: dict[int, int] = {}
        self._unreachable: set[int] = set()
        self._refused: set[int] = set()
        self._refusals: list[tuple[int, str]] = []

    def restore(self, nodes: Iterable[int], num_samples: Float64Array) -> None:
        """Go on from an earlier time: the node of each client, 0 for none, and its samples."""
        self.num_samples = num_samples.copy()
        self._nodes = {client: node for client, node in enumerate(nodes) if node}
        self._clients = {node: client for client, node in self._nodes.items()}

    @property
    def nodes(self) -> list[int]:
        return [self._nodes.get(client, 0) for client in range(self.num_clients)]

    @property
    def present(self) -> list[int]:
        return [c for c in range(self.num_clients) if self._nodes.get(c) in self._online]

    def node_of(self, client: int) -> int:
        return self._nodes[client]

    def client_of(self, node: int) -> int | None:
        return self._clients.get(node)

    def update(self, online: set[int]) -> None:
        """Take note of who is connected, and give indices to newcomers."""
        self._online = online
        self._claims = {node: claim for node, claim in self._claims.items() if node in online}
        self._refused &= online
        if self.trust_partition_id:
            for node, partition in sorted(self._claims.items()):
                self.introduce(node, partition)
            return
        newcomers = sorted(online - self._clients.keys())
        free = [c for c in range(self.num_clients) if self._nodes.get(c) not in online]
        free.sort(key=lambda client: client in self._nodes)  # first those that none ever had
        for client, node in zip(free, newcomers, strict=False):
            self._bind(client, node)
        for node in newcomers[len(free) :]:
            self._refuse(node, f"all {self.num_clients} clients are there already")

    def introduce(self, node: int, partition: int) -> None:
        """Take note of the partition that a node reports, and make it that client if it may be."""
        self._claims[node] = partition
        holder = self._nodes.get(partition)
        if holder == node:
            return
        said = f"node {node} reports partition {partition}"
        if not 0 <= partition < self.num_clients:
            self._refuse(node, f"{said}; 0 to {self.num_clients - 1} are expected")
        elif holder in self._online and holder not in self._unreachable:
            self._refuse(node, f"{said}, which is node {holder}")
        else:
            self._bind(partition, node)

    def note_answer(self, node: int, answered: bool) -> None:
        if answered:
            self._unreachable.discard(node)
        else:
            self._unreachable.add(node)

    def take_refusals(self) -> list[tuple[int, str]]:
        """Return the nodes refused since the last call, and why."""
        news, self._refusals = self._refusals, []
        return news

    def wait_for(self, grid: Grid, num_clients: int, seconds: float, patience: float) -> bool:
        """Wait until so many clients are there; return whether they came in time.

        A node that has not introduced itself for as long as ``patience`` is asked again.
        """
        for _ in pauses(seconds):
            self.update(set(grid.get_node_ids()))
            if self.trust_partition_id:
                self._ask(grid, patience)
            if len(self.present) >= num_clients:
                return True
        return False

    def _ask(self, grid: Grid, patience: float) -> None:
        """Ask nodes for their partitions: by a train message, for which every app has a handler."""
        now = time.monotonic()
        strangers = sorted(self._online - self._claims.keys() - self._clients.keys())
        nodes = [node for node in strangers if now >= self._asked.get(node, 0.0)]
        self._asked |= dict.fromkeys(nodes, now + patience)
        if nodes:
            content = RecordDict({RECORD: pack(Envelope([("", HELLO, None)]))})
            messages = [Message(content, n, "train", ttl=patience, group_id="0") for n in nodes]
            self._pending |= set(grid.push_messages(messages))
        if not self._pending:
            return
        with bounded_pulls(patience):
            replies = list(grid.pull_messages(self._pending))
        for reply in replies:
            self._pending.discard(reply.metadata.reply_to_message_id)
            node = reply.metadata.src_node_id
            try:
                if reply.has_error():
                    raise MessageError(plain(reply.error.reason or f"code {reply.error.code}"))
                [(partition, kind, _)] = unpack(reply.content).records
                if kind != HELLO:
                    raise MessageError("the reply is no introduction")
                self.introduce(node, int(partition))
            except (AqgError, ValueError) as error:
                advice = "does its app have mods=[aqg_mod]?"
                logger.warning("node %d could not introduce itself: %s; %s", node, error, advice)

    def _refuse(self, node: int, why: str) -> None:
        if node not in self._refused:
            self._refused.add(node)
            self._refusals.append((node, why))

    def _bind(self, client: int, node: int) -> None:
        former = self._nodes.get(client, 0)
        self._unreachable.discard(former)
        self._clients.pop(former, None)
        self._nodes[client] = node
        self._clients[node] = client
        if former:  # another node's samples are not this one's
            self.num_samples[client] = 0
        self._refused.discard(node)
