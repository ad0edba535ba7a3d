"""A run of our own strategy: its clients, its rounds, who counts for how much, what is reported.

The server never takes an identity from a reply: it knows to which node it sent the message. How a
node gets the index ``m`` of a client is decided by `Roster`, once, and holds as long as the node
lives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from aqg.channel.settings import Settings as ChannelSettings
from aqg.channel.stepping import SteppingChannel
from aqg.channel.tensors import Values
from aqg.core.downlink import describe_downlink, resolve_downlink
from aqg.core.messages import Skip
from aqg.core.recipe import Recipe
from aqg.core.server import Step
from aqg.core.types import Float64Array
from aqg.errors import AqgError, MessageError, RunError
from aqg.flower.envelope import (
    EVALUATED,
    EXAMPLES,
    RECORD,
    Envelope,
    as_metrics,
    logger,
    loss_in,
    numbers_in,
    plain,
    record_of,
    values_of,
)
from aqg.flower.grid import Checks, CompressedGrid
from aqg.flower.journal import Incident, Journal, RoundReport
from aqg.flower.private import bounded_pulls, pauses
from aqg.flower.task import ServerModel
from aqg.protocol.messages import fingerprint
from aqg.runs.directory import Line
from aqg.runs.stopping import has_diverged
from aqg.sim.record import DROPPED, RoundRecord

if TYPE_CHECKING:
    from aqg.flower.strategy import Settings

    Measure = Callable[[int, Values], float | Mapping[str, Any] | None]


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
            content = RecordDict({RECORD: Envelope([("", Envelope.HELLO, None)]).pack()})
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
                [(partition, kind, _)] = Envelope.unpack(reply.content).records
                if kind != Envelope.HELLO:
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


ARRAYS, CONFIG, ROUND = "arrays", "config", "server-round"
"""Names of records, and of the round, as FedAvg has them."""
_SAID = ("final_loss", "upload_bytes", "download_bytes", "total_bytes")
"""Of the results, what the log says at the end."""
_NO_HANDLER = "No evaluate function registered"
"""What Flower says of an app that does not evaluate."""
_MOST_SAMPLES = 2**53
"""Whole numbers up to here are exact as floats."""
_UNREACHABLE = (3, 4, 5)
"""Flower's codes: order expired, reply expired, node unavailable."""
_RAISED = 2
_LONGEST_ERROR = 200
_REFUSED = "aqg: "
"""Begins what the grid says of a reply that it refuses."""

Found = dict[int, dict[str, float]]
"""Metrics by client."""


class Run(Checks):
    """What belongs to one call of `AQG.start`."""

    def __init__(
        self,
        grid: Grid,
        settings: Settings,
        model: ServerModel,
        journal: Journal,
        own: Recipe | None,
        configs: tuple[ConfigRecord, ConfigRecord],
        measure: tuple[Measure | None, int],
    ) -> None:
        self.settings, self.model, self.journal = settings, model, journal
        self.result = Result()
        self._train_config, self._evaluate_config = configs
        self._measure, self._every = measure  # before which rounds
        self._incidents: list[Incident] = []
        self._capped: set[int] = set()
        self._lists: set[str] = set()  # metrics that were said to be lists
        self._seen: dict[int, tuple[int, int, int]] = {}  # of each node, at the end of a round
        names = ("recipe", "bits", "max_staleness", "seed", "updates", "start", "memory")
        chosen = ChannelSettings(**{name: getattr(settings, name) for name in names}, own=own)
        recipe, num_clients = chosen.make_recipe(), settings.num_clients
        downlink = resolve_downlink(settings.downlink, recipe)
        rule, training = settings.make_step(recipe), settings.training()
        sampled = training.num_sampled(num_clients) / num_clients
        how = settings.dropout, sampled, training.optimizer, rule, downlink
        step = Step(settings.step_size, *how)
        about = len(model.schema.specs), "float32", settings.seed, model.schema.fingerprint
        journal.open(
            settings.terms
            | {
                "model": fingerprint(recipe, *about).hex(),
                "downlink": describe_downlink(downlink),
                "step": ":".join([rule.name, *(f"{n}={v:g}" for n, v in asdict(rule).items())]),
            }
        )
        self.roster = Roster(num_clients, settings.trust_partition_id)
        values, members = values_of(model.record), (num_clients, self.roster.client_of)
        name = f"{journal.run}0"
        self.channel = SteppingChannel(name, values, chosen, members, step, model.travel)
        journal.restore(self.channel, self.roster)
        self.grid = CompressedGrid(grid, chosen, self, journal.run)
        self.grid.channels[ARRAYS] = self.channel

    def begin(self, describe: Mapping[str, Any]) -> None:
        """Wait for the clients; begin, or go on from the checkpoint."""
        num_clients, channel = self.settings.num_clients, self.channel
        if not self._wait_for(num_clients):
            text = "%d of %d clients are connected; starting without the others"
            logger.warning(text, len(self.roster.present), num_clients)
        self.journal.begin(channel.version, describe, str(channel.book.parameters.dtype))
        self.journal.save(channel, self.roster)  # the incarnation, before the first order

    def train(self) -> None:
        settings, num_failed = self.settings, 0
        while self.channel.version <= settings.rounds and not self.journal.ending:
            num_failed = 0 if self._run_round() else num_failed + 1
            if num_failed > settings.max_failed_rounds:
                raise RunError(
                    f"{num_failed} rounds in a row had fewer than {settings.needed_clients} "
                    "valid replies; lower min-clients, raise round-timeout, or look at the "
                    "clients' logs"
                )

    def finish(self) -> tuple[Any, dict[str, Any]]:
        """Let clients and server measure the final model; return it and the results."""
        (evaluated, loss), metrics = self._evaluate_on_clients(), self._measured()
        averaged = self.channel.averaged()
        self.result.arrays = record_of(averaged.items())
        make = partial(self.model.tensors, averaged)
        results = self.journal.finish(evaluated, loss, metrics, make)
        holders = [] if self.settings.memory == "none" else self.roster.present
        self.grid.finish(map(self.roster.node_of, holders))
        self.result.traffic = self.grid.counts  # type: ignore[attr-defined]
        logger.info("done: %s", {key: results[key] for key in _SAID})
        return self.model.filled(averaged), results

    def _run_round(self) -> bool:
        """Run the next round, and write it down; return whether the model took a step."""
        settings, number, before = self.settings, self.channel.version, self.channel.version - 1
        client_every = settings.client_eval_every
        evaluated, metrics, tensors = dict[str, float](), dict[str, float](), None
        if client_every and before and before % client_every == 0:
            evaluated, _ = self._evaluate_on_clients()
        if before % self._every == 0:
            metrics = self._measured()
            tensors = self.model.tensors(self.channel.averaged()) if settings.run_dir else None
        if not self._wait_for(settings.needed_clients):
            raise RunError(
                f"{len(self.roster.present)} clients are connected after "
                f"{settings.start_timeout:g} s, and {settings.needed_clients} are needed; start "
                "again with the same run-dir to go on"
            )
        started = time.monotonic()
        away = settings.training().unsampled(number, settings.num_clients, settings.seed)
        sampled = [client for client in self.roster.present if not away[client]]
        more = {"measure": False} if before % settings.eval_every else {}
        messages = self._messages(sampled, "train", {**self._train_config, ROUND: number, **more})
        found = self._read(messages, self._replies_to(messages))
        self.channel.reweigh(self._weights())
        seconds = time.monotonic() - started
        report = self._report(found, len(messages), metrics, evaluated, seconds)
        self.channel.step(set(found), report.stepped)
        if report.trained:
            self.result.train_metrics_clientapp[number] = MetricRecord(dict(report.trained))
        if report.evaluated:
            means = MetricRecord(dict(report.evaluated))
            self.result.evaluate_metrics_clientapp.setdefault(before, means)
        self.journal.note(report, tensors)
        over = number >= settings.rounds or self.journal.ending
        if over or number % settings.checkpoint_every == 0:
            self.journal.save(self.channel, self.roster)
        return report.stepped

    def check(self, content: RecordDict, is_train: bool) -> None:
        """Raise `MessageError` where a reply does not say how much it counts for."""
        if self.settings.weighting != "samples":
            return
        found = (r[EXAMPLES] for r in content.metric_records.values() if EXAMPLES in r)
        number: Any = next(found, 0)
        least = int(is_train)  # whoever evaluates may leave it out
        is_right = not isinstance(number, list) and (float(number).is_integer() or not is_train)
        if not (is_right and least <= number <= _MOST_SAMPLES):
            raise MessageError(
                f"its metrics have num-examples {number}; with weighting samples it must be "
                f"{least} to {_MOST_SAMPLES}"
            )

    def _read(self, messages: Mapping[int, Message], replies: Iterable[Message]) -> Found:
        """Return the metrics of the clients whose replies count; note what the others lack."""
        answered = {reply.metadata.reply_to_message_id: reply for reply in replies}
        found, taken = Found(), self.channel.taken
        for client, message in messages.items():
            reply = answered.get(message.metadata.message_id)
            error = reply.error if reply is not None and reply.has_error() else None
            is_missing = reply is None or (error is not None and error.code in _UNREACHABLE)
            self.roster.note_answer(self.roster.node_of(client), answered=not is_missing)
            if reply is None:
                self._note(client, "missing")
            elif error is not None:
                self._note(client, *self._described(client, error.code, error.reason or ""))
            elif client in taken:
                found[client] = self._numbers_in(reply.content)
                self.roster.num_samples[client] = found[client].get(EXAMPLES, 0.0)
        return found

    def _numbers_in(self, content: RecordDict) -> dict[str, float]:
        """Return the metrics of a reply; say once of a list that it is left out."""
        for record in content.metric_records.values():
            lists = {name for name, value in record.items() if isinstance(value, list)}
            for name in sorted(lists - self._lists):
                logger.warning("metric %r is a list, which AQG does not average", name)
            self._lists |= lists
        return numbers_in(content)

    def _described(self, client: int, code: int, reason: str) -> tuple[str, str]:
        """Return of what kind an error is, and what to say of it."""
        reason = plain(reason, _LONGEST_ERROR)
        if "made nothing that can be sent" in reason:
            return "fault", reason
        if reason.startswith(_REFUSED):
            return "rejected", reason
        never = client not in self.channel.holders and code == _RAISED
        advice = "; does its app have mods=[aqg_mod]?" if never else ""
        return "error", f"code {code}: {reason}{advice}"

    def _weights(self) -> Float64Array:
        """Return ``w_m``, of mean 1, by the numbers of samples that are known."""
        samples, share = self.roster.num_samples, self.settings.largest_share
        if self.settings.weighting == "equal":
            return np.ones(len(samples))
        has_said = samples > 0  # all others get the mean of these
        mean = samples[has_said].mean() if has_said.any() else 1.0
        known = np.where(has_said, samples, mean)
        counted = cap_shares(known, share)
        capped = set(np.flatnonzero(known > counted).tolist())
        for client in sorted(capped - self._capped):
            text = f"reports {samples[client]:.0f} samples; it counts for {share:g} of all"
            self._note(client, "capped", text)
        self._capped = capped
        weights: Float64Array = counted / counted.mean()
        return weights

    def _report(
        self,
        found: Found,
        num_sampled: int,
        metrics: Mapping[str, float],
        evaluated: Mapping[str, float],
        seconds: float,
    ) -> RoundReport:
        """Return what the round was like, before its step."""
        channel, num_clients = self.channel, self.settings.num_clients
        number, weights, taken = channel.version, channel.book.weights, channel.taken
        widths, faults, work = [DROPPED] * num_clients, [], 0.0
        for client in found:
            message, reply = taken[client].message, taken[client].reply
            widths[client] = message.width
            work = max(work, reply.work_seconds)
            if reply.restarted:
                self._note(client, "resync", "its mirror began from zero")
            if reply.rolled_back:
                self._note(client, "rollback", "its last upload was lost")
            if isinstance(message, Skip) and message.fault:
                faults.append((client, message.fault))
                self._note(client, "fault", message.fault)
        loss = CommonLoss.of(found, weights, num_sampled)
        for client in loss.absurd:
            self._note(client, "outlier", f"loss {loss_in(found[client]):g}")
        up, down = self._moved()
        record = RoundRecord(
            number,
            loss.mean,
            tuple(widths),
            sum(up),
            tuple(faults),
            download_bytes=sum(down),
            client_upload_bytes=tuple(up),
            client_download_bytes=tuple(down),
        )
        incidents, self._incidents = self._incidents, []
        incidents += [Incident(-1, n, "refused", why) for n, why in self.roster.take_refusals()]
        means = mean_metrics([(float(weights[c]), m) for c, m in found.items()])
        means.pop(EXAMPLES, None)
        of_model = {name: mean for name, mean in means.items() if name.startswith(EVALUATED)}
        return RoundReport(
            line=Line(record, metrics),
            staleness=tuple(number - entry.last_upload for entry in channel.book.entries),
            incidents=tuple(incidents),
            stepped=len(found) >= self.settings.needed_clients,
            work_seconds=work,
            round_seconds=seconds,
            diverged=loss.has_diverged,
            trained={name: mean for name, mean in means.items() if name not in of_model},
            evaluated={**of_model, **evaluated},
        )

    def _note(self, client: int, kind: str, text: str = "") -> None:
        self._incidents.append(Incident(client, self.roster.nodes[client], kind, text))

    def _moved(self) -> tuple[list[int], list[int]]:
        """Return what each client sent and received since the last round."""
        up, down = ([0] * self.settings.num_clients for _ in range(2))
        for node, counts in self.grid.counts.nodes.items():
            now = counts.whole.up, counts.whole.down, counts.lost
            before, self._seen[node] = self._seen.get(node, (0, 0, 0)), now
            client = self.roster.client_of(node)
            if client is None:
                continue
            up[client] += now[0] - before[0]
            down[client] += now[1] - before[1]
            for _ in range(now[2] - before[2]):
                self._note(client, "lost", "it was sent the whole model again")
        return up, down

    def _evaluate_on_clients(self) -> tuple[dict[str, float], float | None]:
        """Return the means of what clients measure, and of their losses.

        They are weighted by examples where clients say them.
        """
        number, found = self.channel.version - 1, Found()
        self.roster.update(set(self.grid.get_node_ids()))
        config = {**self._evaluate_config, ROUND: number}
        for reply in self._replies_to(self._messages(self.roster.present, "evaluate", config)):
            client = self.roster.client_of(reply.metadata.src_node_id)
            if reply.has_error():
                reason = plain(reply.error.reason or "")
                level = logging.INFO if _NO_HANDLER in reason else logging.WARNING
                logger.log(level, "a client could not evaluate: %s", reason)
            elif client is not None:
                found[client] = self._numbers_in(reply.content)
        if not found:
            return {}, None
        clients, settings = sorted(found), self.settings
        weights = self.channel.book.weights[clients]
        examples = np.array([found[client].pop(EXAMPLES, 0.0) for client in clients])
        if settings.weighting == "samples" and (examples > 0).all():
            weights = cap_shares(examples, settings.largest_share)
        loss = CommonLoss.of(found, self.channel.book.weights, len(clients))
        for client in loss.absurd:
            logger.warning("the loss of client %d is beyond all use, and left out", client)
        shares = zip(weights.tolist(), (found[client] for client in clients), strict=True)
        means = mean_metrics(list(shares))
        self.result.evaluate_metrics_clientapp[number] = MetricRecord(dict(means))
        return means, loss.mean

    def _measured(self) -> dict[str, float]:
        if self._measure is None:
            return {}
        if not self.model.can_be_measured:
            logger.warning("clients keep their own statistics; the server measures no metrics")
            return {}
        number = self.channel.version - 1
        metrics = as_metrics(self._measure(number, self.channel.averaged()), "accuracy")
        if metrics:
            self.result.evaluate_metrics_serverapp[number] = MetricRecord(dict(metrics))
        return metrics

    def _wait_for(self, num_clients: int) -> bool:
        patience = self.settings.start_timeout, self.settings.round_timeout
        return self.roster.wait_for(self.grid.inner, num_clients, *patience)

    def _messages(
        self, clients: list[int], kind: str, config: Mapping[str, Any]
    ) -> dict[int, Message]:
        """Return a message with the model for each of some clients."""
        content = RecordDict({ARRAYS: self.model.record, CONFIG: ConfigRecord({**config})})
        ttl, group = self.settings.round_timeout, str(self.channel.version)
        return {
            client: Message(content, self.roster.node_of(client), kind, ttl=ttl, group_id=group)
            for client in clients
        }

    def _replies_to(self, messages: Mapping[int, Message]) -> Iterable[Message]:
        return self.grid.send_and_receive(messages.values(), timeout=self.settings.round_timeout)


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
            return CommonLoss(float(np.mean(weights * losses)), diverged, absurd)
        known_weights = weights[measured]  # zeros where nobody has said how many samples it has
        shares = known_weights if known_weights.any() else None
        return CommonLoss(float(np.average(losses[measured], weights=shares)), diverged, absurd)


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
        weights, values = zip(*pairs, strict=True)
        means[name] = float(np.average(values, weights=weights if any(weights) else None))
    return means
