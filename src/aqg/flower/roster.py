"""Which node is which client.

The server never takes an identity from a reply: it knows to which node it sent the message. How a
node gets the index ``m`` of a client is decided here, once, and holds as long as the node lives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aqg.core.types import Float64Array


class Roster:
    """Binds nodes to client indices ``0..num_clients-1``.

    By default a client is a node: nodes take free indices in the order of their ids, and an index
    is free when its node has gone. With node authentication a node keeps its id, and so its index,
    as long as it keeps its key.

    With ``trust_partition_id`` a client is the ``partition-id`` that a node reports. A second node
    that reports the same one is refused while the first is connected and answers.

    Args:
        num_clients: ``M``.
        trust_partition_id: know clients by what nodes report.
        nodes: the node of each client from an earlier time, 0 for none.
        num_samples: of each client from an earlier time, 0 for unknown.

    """

    def __init__(
        self,
        num_clients: int,
        trust_partition_id: bool,
        nodes: Iterable[int] = (),
        num_samples: Float64Array | None = None,
    ) -> None:
        self.num_clients = num_clients
        self.trust_partition_id = trust_partition_id
        self.num_samples = np.zeros(num_clients) if num_samples is None else num_samples.copy()
        self._nodes = {client: node for client, node in enumerate(nodes) if node}
        self._clients = {node: client for client, node in self._nodes.items()}
        self._online: set[int] = set()
        self._claims: dict[int, tuple[int, int]] = {}
        self._reported = {n for n, client in self._clients.items() if self.num_samples[client]}
        self._silent: set[int] = set()
        self._refused: dict[int, str] = {}
        self._unfit: set[int] = set()
        self._plain: set[int] = set()

    @property
    def nodes(self) -> list[int]:
        """The node of each client, 0 for none."""
        return [self._nodes.get(client, 0) for client in range(self.num_clients)]

    @property
    def present(self) -> list[int]:
        """The clients whose node is connected, in order."""
        return [c for c in range(self.num_clients) if self._nodes.get(c) in self._online]

    def node_of(self, client: int) -> int:
        """Return the node of a present client."""
        return self._nodes[client]

    def client_of(self, node: int) -> int | None:
        """Return the client that a node is, if it is one."""
        return self._clients.get(node)

    def is_plain(self, node: int) -> bool:
        """Tell whether a node has a handler of Flower's kind, and no task and model of ours."""
        return node in self._plain

    def strangers(self) -> list[int]:
        """Return connected nodes that have not reported yet."""
        return sorted(self._online - self._reported)

    def update(self, online: set[int]) -> None:
        """Take note of who is connected, and give indices to newcomers."""
        self._online = online
        self._claims = {node: claim for node, claim in self._claims.items() if node in online}
        self._reported &= online | self._clients.keys()
        self._refused = {node: why for node, why in self._refused.items() if node in online}
        self._unfit &= online
        if self.trust_partition_id:
            for node in sorted(self._claims):
                self._bind_claim(node)
            return
        newcomers = sorted(online - self._clients.keys() - self._unfit)
        free = self._free_indices() if newcomers else []
        for client, node in zip(free, newcomers, strict=False):
            self._bind(client, node)
        for node in newcomers[len(free) :]:
            self._refused.setdefault(node, f"all {self.num_clients} clients are there already")

    def introduce(
        self, node: int, partition: int, num_samples: int, is_plain: bool = False
    ) -> None:
        """Take note of what a node reports about itself."""
        if is_plain:
            self._plain.add(node)
        self._claims[node] = partition, num_samples
        self._reported.add(node)
        if self.trust_partition_id:
            self._bind_claim(node)
        client = self.client_of(node)
        if client is not None:
            self.num_samples[client] = num_samples

    def refuse(self, node: int, why: str) -> None:
        """Make a node no client, as long as it is connected; its place is free for others."""
        self._unfit.add(node)
        self._reported.add(node)
        self._claims.pop(node, None)
        client = self._clients.pop(node, None)
        if client is not None:
            del self._nodes[client]
        self._refused.setdefault(node, why)

    def heard(self, node: int, answered: bool) -> None:
        """Take note of whether a node answered its last order."""
        if answered:
            self._silent.discard(node)
        else:
            self._silent.add(node)

    def take_refusals(self) -> list[tuple[int, str]]:
        """Return the nodes refused since the last call, and why."""
        news = [(node, why) for node, why in self._refused.items() if why]
        self._refused = dict.fromkeys(self._refused, "")
        return news

    def _free_indices(self) -> list[int]:
        """Return the indices that no connected node has; first those that none ever had."""
        free = [c for c in range(self.num_clients) if self._nodes.get(c) not in self._online]
        return sorted(free, key=lambda client: client in self._nodes)

    def _bind_claim(self, node: int) -> None:
        partition, num_samples = self._claims[node]
        holder = self._nodes.get(partition)
        if holder == node:
            return
        if not 0 <= partition < self.num_clients:
            bound = f"0 to {self.num_clients - 1} are expected"
            self._refused.setdefault(node, f"node {node} reports partition {partition}; {bound}")
        elif holder in self._online and holder not in self._silent:
            why = f"node {node} reports partition {partition}, which is node {holder}"
            self._refused.setdefault(node, why)
        else:
            self._bind(partition, node)
            self.num_samples[partition] = num_samples

    def _bind(self, client: int, node: int) -> None:
        former = self._nodes.get(client, 0)
        self._silent.discard(former)
        self._clients.pop(former, None)
        self._nodes[client] = node
        self._clients[node] = client
        self._refused.pop(node, None)
