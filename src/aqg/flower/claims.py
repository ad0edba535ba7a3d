"""What nodes say of themselves: who they are, how much they count, and their losses.

The server never takes an identity from a reply: it knows to which node it sent the message. How a
node gets the index ``m`` of a client is decided here, once, and holds as long as the node lives.
What else a node says is bounded before it weighs anything.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from aqg.core.types import Float64Array
from aqg.errors import AqgError, MessageError
from aqg.flower.envelope import HELLO, RECORD, Envelope, logger, loss_in, pack, plain, unpack
from aqg.flower.private import bounded_pulls, pauses
from aqg.runs.stopping import has_diverged

_MOST_EXAMPLES = 1e12
"""A node that says it has more examples is refused."""
_MOST_TIMES = 1e6
"""Likewise one that says it has so many times the examples of all others together."""


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


class Checks:
    """Says of replies whether what they hold besides the update can be used; here, always."""

    def check(self, content: RecordDict, is_train: bool) -> None:
        """Raise `MessageError` where a reply will not do."""

    def compare(self, contents: Mapping[str, RecordDict]) -> dict[str, str]:  # noqa: ARG002
        """Return which replies of a round will not do beside the others, and why."""
        return {}


class AverageChecks(Checks):
    """Refuses replies that Flower's FedAvg, and what is made from it, could not use.

    They end the run where a reply has more than one record of a kind, where replies have other
    metrics or arrays than the rest, and where all weights are zero; and a single node that says it
    has a million times the examples of all others would be the model.

    Args:
        key: the metric that says how many examples a node has.
    """

    def __init__(self, key: str) -> None:
        self._key = key

    def check(self, content: RecordDict, is_train: bool) -> None:
        metrics, arrays = list(content.metric_records.values()), content.array_records
        if len(metrics) != 1:
            raise MessageError(f"its reply has {len(metrics)} MetricRecords; it must have one")
        if is_train and len(arrays) != 1:
            raise MessageError(f"its reply has {len(arrays)} ArrayRecords; it must have one")
        key = self._key
        weight: Any = metrics[0].get(key)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise MessageError(f"its metric {key!r} is {weight!r}; it must be a number")
        if not 0 <= weight <= _MOST_EXAMPLES:
            raise MessageError(f"its metric {key!r} is {weight}; 0 to {_MOST_EXAMPLES:g} is taken")

    def compare(self, contents: Mapping[str, RecordDict]) -> dict[str, str]:
        key, reasons, weights = self._key, dict[str, str](), dict[str, float]()
        held = {answers: _names_in(content) for answers, content in contents.items()}
        most = Counter(held.values()).most_common(1)[0][0] if held else frozenset()
        for answers, content in contents.items():
            if held[answers] != most:
                odd = min(held[answers] ^ most)
                reasons[answers] = f"its reply differs from most others in {odd}"
            else:
                [metrics] = content.metric_records.values()
                weights[answers] = float(metrics[key])  # type: ignore[arg-type]
        total = sum(weights.values())
        for answers, weight in weights.items():
            if not total:
                reasons[answers] = f"its metric {key!r} is 0, as that of all others"
            elif len(weights) > 1 and weight > _MOST_TIMES * (total - weight):
                others = f"all others together have {total - weight:g}"
                reasons[answers] = f"its metric {key!r} is {weight:g}; {others}"
        return reasons


def _names_in(content: RecordDict) -> frozenset[str]:
    kinds = {"array": content.array_records, "metric": content.metric_records}
    return frozenset(
        f"{kind} {key!r} of {name!r}"
        for kind, records in kinds.items()
        for name, record in records.items()  # type: ignore[attr-defined]
        for key in record
    )


def cap_shares(amounts: Float64Array, share: float) -> Float64Array:
    """Lower the largest amounts until none is more than a share of all.

    Nothing is lowered for the sake of amounts of zero alone: somebody must have something.

    >>> cap_shares(np.array([10.0, 1e15, 30.0]), 0.6).tolist()
    [10.0, 60.0, 30.0]
    >>> cap_shares(np.array([10.0, 20.0, 30.0]), 0.6).tolist()
    [10.0, 20.0, 30.0]
    """
    descending = np.sort(amounts)[::-1]
    cap = descending[-1]
    for count, largest in enumerate(descending):  # so many are lowered
        free, rest = 1 - count * share, descending[count:].sum()
        if free <= 0 or rest <= 0:
            cap = descending[count - 1]
            break
        cap = share * rest / free
        if largest <= cap:
            break
    capped: Float64Array = np.minimum(amounts, cap)
    return capped


class CommonLoss(NamedTuple):
    """What the losses of clients say together."""

    mean: float | None  # the weighted mean over the clients that measured; None where none did
    # whether more than half of the sampled clients report a loss beyond all use; in a federation
    # of several, one client is never enough
    has_diverged: bool
    absurd: list[int]  # whose loss is beyond all use, of either sign, and left out of the mean

    @staticmethod
    def of(
        found: Mapping[int, Mapping[str, float]], weights: Float64Array, num_sampled: int
    ) -> CommonLoss:
        """Return the loss, by the metrics of some clients and the weights of all."""
        losses = np.full(len(weights), np.nan)
        losses[list(found)] = [loss_in(metrics) for metrics in found.values()]
        known = np.flatnonzero(~np.isnan(losses)).tolist()
        num_diverged = sum(has_diverged(losses[client]) for client in known)
        diverged = 2 * num_diverged > num_sampled and num_diverged >= min(2, len(losses))
        absurd = [c for c in known if not diverged and has_diverged(abs(losses[c]))]
        losses[absurd] = np.nan
        measured = ~np.isnan(losses)
        if not measured.any():
            return CommonLoss(None, diverged, absurd)
        if measured.all():
            mean = np.mean(weights * losses)
        elif not weights[measured].any():  # none of them has said how many samples it has
            mean = np.mean(losses[measured])
        else:
            mean = np.average(losses[measured], weights=weights[measured])
        return CommonLoss(float(mean), diverged, absurd)


def mean_metrics(found: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """Return the mean of every metric over the clients that sent it; NaN stays NaN.

    Args:
        found: the weight and the metrics of every client.

    >>> mean_metrics([(10.0, {"accuracy": 0.5}), (30.0, {"accuracy": 0.9, "own": 2.0})])
    {'accuracy': 0.8, 'own': 2.0}
    """
    means = {}
    for name in dict.fromkeys(name for _, metrics in found for name in metrics):
        pairs = [(weight, metrics[name]) for weight, metrics in found if name in metrics]
        total = sum(weight for weight, _ in pairs)
        if total > 0:
            means[name] = sum(weight * value for weight, value in pairs) / total
        else:
            means[name] = sum(value for _, value in pairs) / len(pairs)
    return means
