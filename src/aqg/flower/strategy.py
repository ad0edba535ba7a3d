"""Our own strategy: the simulator's server, as a strategy of Flower.

It works on the same grid as ``Compressed(...)`` does, and makes the model itself: clients send
updates against mirrors that the server holds, and the server publishes its steps
(`aqg.channel.stepping`). So a client that skips, is late or drops out still counts with its mirror,
and the run ends with the simulator's model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result, Strategy

from aqg.channel.settings import Settings as ChannelSettings
from aqg.channel.stepping import Members, SteppingChannel
from aqg.channel.tensors import Values
from aqg.core.downlink import describe_downlink, resolve_downlink
from aqg.core.recipe import Recipe
from aqg.core.server import Step
from aqg.core.types import FloatArray
from aqg.errors import ConfigError, RunError
from aqg.flower.claims import CommonLoss, Roster, cap_shares, mean_metrics
from aqg.flower.envelope import (
    EXAMPLES,
    as_metrics,
    logger,
    numbers_in,
    plain,
    record_of,
    values_of,
)
from aqg.flower.grid import CompressedGrid
from aqg.flower.journal import Journal, RunLogger
from aqg.flower.models import ServerModel, is_module, make_model
from aqg.flower.reports import Accounts, RoundReport
from aqg.flower.settings import KEYS, Settings, read_settings
from aqg.protocol.mirrors import fingerprint
from aqg.runs.directory import Line

if TYPE_CHECKING:
    import torch

    Start = FloatArray | torch.nn.Module | ArrayRecord
    Evaluate = Callable[[Any], float | Mapping[str, float] | None]
    EvaluateRound = Callable[[int, ArrayRecord], MetricRecord | None]
    Measure = Callable[[int, Values], float | Mapping[str, Any] | None]


_METRIC_POINTS = 50
_ROUNDS = 3
"""Flower's default."""
ARRAYS, CONFIG, ROUND = "arrays", "config", "server-round"
"""Names of records, and of the round, as FedAvg has them."""
_SAID = ("final_loss", "upload_bytes", "download_bytes", "total_bytes")
"""Of the results, what the log says at the end."""
_NO_HANDLER = "No evaluate function registered"
"""What Flower says of an app that does not evaluate."""


class AQG(Strategy):
    """Trains with the fewest bytes, and goes on whatever happens to clients and server.

    Clients are those of `make_client_app`, or any ClientApp with the mod:
    ``ClientApp(mods=[aqg_mod])``, whose handlers are as for FedAvg.

    Args:
        num_clients: how many clients there are, connected or not.
        recipe: name and options of the compressor, see ``aqg recipes``, or a recipe of your own,
            which clients must have as well.
        evaluate: the accuracy of a model on the server's own test data, or several metrics by
            name. It is given what training starts from, with the current model in it: a torch
            module, an ArrayRecord or a flat vector.
        include: name patterns of the parameters that travel, such as ``"*.lora_*"``.
        exclude: name patterns of tensors that stay out.
        statistics: what becomes of running statistics: ``"average"``, ``"local"``, ``"frozen"``.
        describe: more keys for ``config.toml``, such as ``dataset``.
        loggers: are told about every round, beside the run directory.
        settings: all others of `aqg.flower.settings.Settings`, by name, such as ``run_dir``.

    Attributes:
        settings: as they are.
        final: the final model, as ``evaluate`` is given it; None before the end of a run.
        results: what ``summary.json`` holds; empty before the end of a run.
    """

    def __init__(
        self,
        num_clients: int,
        *,
        recipe: str | Recipe = "auto",
        evaluate: Evaluate | None = None,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        statistics: str = "average",
        describe: Mapping[str, Any] | None = None,
        loggers: Sequence[RunLogger] = (),
        **settings: Any,
    ) -> None:
        for name in settings:
            if name not in KEYS:
                close = get_close_matches(name, KEYS, n=1)
                meant = f"; {close[0]!r} is meant?" if close else ""
                raise ConfigError(f"AQG has no setting {name!r}{meant}")
        spec = recipe if isinstance(recipe, str) else ""
        chosen = {"num_clients": num_clients, "rounds": _ROUNDS, "recipe": spec, **settings}
        self.settings = read_settings({KEYS[name]: value for name, value in chosen.items()})
        self.final: Any = None
        self.results: dict[str, Any] = {}
        self._recipe = None if isinstance(recipe, str) else recipe
        self._evaluate = evaluate
        self._choice = include, exclude, statistics
        self._describe = describe or {}
        self._loggers = loggers

    @staticmethod
    def from_run_config(
        run_config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None, **options: Any
    ) -> AQG:
        """Make the strategy that a run-config describes; keys that are not ours are left alone.

        ``defaults`` has values for keys that it does not have; ``options``, of `AQG`, come first.

        >>> AQG.from_run_config({"num-clients": 4, "num-server-rounds": 20}).settings.rounds
        20
        """
        given = {name: value for name, value in options.items() if value is not None}
        return AQG(**{**asdict(read_settings(run_config, defaults)), **given})

    def start(
        self,
        grid: Grid,
        initial_arrays: Start,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateRound | None = None,
    ) -> Result:
        """Run to the end, or go on with the run in ``run_dir``, and return what came of it.

        Arguments are those of any strategy; ``num_rounds`` and ``timeout`` are by default as in the
        settings. Of a torch module, the parameters that require a gradient travel; of an
        ArrayRecord, all of floating point that ``include`` and ``exclude`` leave; a flat vector is
        nothing but parameters. ``evaluate_fn`` is called with the model before the first round and
        after every one, or every ``metrics_every`` rounds where that is set.

        The results have the rounds of this start; those before a restart are in ``run_dir``; in
        ``traffic`` they have the bytes of each node. Where steps adapt, the final model, and what
        the server measures, is the mean over the last ones.
        """
        given = {"rounds": num_rounds, "round_timeout": timeout}
        changes: dict[str, Any] = {n: value for n, value in given.items() if value is not None}
        if isinstance(grid, CompressedGrid):
            raise ConfigError("AQG compresses by itself: write AQG(...), not Compressed(AQG(...))")
        settings = replace(self.settings, **changes)
        model = make_model(initial_arrays, *self._choice)
        self.summary()
        every = settings.metrics_every or 1
        if evaluate_fn is None and not settings.metrics_every:
            every = max(1, settings.rounds // _METRIC_POINTS)
        journal = Journal(settings, self._loggers)
        configs = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        measure = self._measure_by(evaluate_fn, model), every
        try:
            run = _Run(grid, settings, model, journal, self._recipe, configs, measure)
            run.begin(self._describe)
            run.train()
            self.final, self.results = run.finish()
        finally:
            journal.close()
        return run.result

    def configure_train(self, server_round: int, *_: Any, **__: Any) -> Any:
        raise ConfigError(
            f"round {server_round} is not AQG's own; it makes the model itself: call its start, "
            "and put no other strategy around it"
        )

    aggregate_train = configure_evaluate = aggregate_evaluate = configure_train

    def summary(self) -> None:
        settings = self.settings
        names = ("downlink", "step", "weighting", "participation")
        logger.info(
            "AQG: %d clients, recipe %s, %s, %s",
            settings.num_clients,
            settings.recipe or "one of your own",
            ", ".join(f"{name} {getattr(settings, name)}" for name in names),
            f"written to {settings.run_dir!r}" if settings.run_dir else "written nowhere",
        )

    def _measure_by(self, evaluate_fn: EvaluateRound | None, model: ServerModel) -> Measure | None:
        """Return what measures a model on the server."""
        evaluate = self._evaluate
        if evaluate_fn is None:
            return evaluate and (lambda _, values: evaluate(model.filled(values)))
        if evaluate is not None:
            raise ConfigError("AQG has an evaluate, and start an evaluate_fn; give one of them")
        return lambda number, values: evaluate_fn(number, record_of(values.items()))


class _Run:
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
        names = ("recipe", "bits", "max_staleness", "seed", "updates", "start", "memory")
        chosen = ChannelSettings(**{name: getattr(settings, name) for name in names}, own=own)
        recipe = chosen.make_recipe()
        downlink = resolve_downlink(settings.downlink, recipe)
        rule = settings.make_step(recipe)
        self.roster = Roster(settings.num_clients, settings.trust_partition_id)
        training = settings.training()
        sampled = training.num_sampled(settings.num_clients) / settings.num_clients
        how = settings.dropout, sampled, training.optimizer, rule, downlink
        step = Step(settings.step_size, *how)
        members = Members(settings.num_clients, self.roster.client_of)
        about = len(model.schema.specs), "float32", settings.seed, model.schema.fingerprint
        journal.open(
            settings.terms
            | {
                "model": fingerprint(recipe, *about).hex(),
                "downlink": describe_downlink(downlink),
                "step": ":".join([rule.name, *(f"{n}={v:g}" for n, v in asdict(rule).items())]),
            }
        )
        values, name = values_of(model.record), f"{journal.run}0"
        self.channel = SteppingChannel(name, values, chosen, members, step, model.travel)
        journal.restore(self.channel, self.roster)
        self.grid = CompressedGrid(grid, chosen, run_name=journal.run)
        self.grid.channels[ARRAYS] = self.channel
        self.accounts = Accounts(settings, self.roster, self.channel, self.grid.counts)
        self.grid.checks = self.accounts

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
        report = self._step(messages, self._replies_to(messages))
        report = replace(
            report,
            line=Line(report.line.record, metrics),
            round_seconds=time.monotonic() - started,
            evaluated={**report.evaluated, **evaluated},
        )
        if report.trained:
            self.result.train_metrics_clientapp[number] = MetricRecord(dict(report.trained))
        if report.evaluated:
            found = MetricRecord(dict(report.evaluated))
            self.result.evaluate_metrics_clientapp.setdefault(before, found)
        self.journal.note(report, tensors)
        over = number >= settings.rounds or self.journal.ending
        if over or number % settings.checkpoint_every == 0:
            self.journal.save(self.channel, self.roster)
        return report.stepped

    def _step(self, messages: Mapping[int, Message], replies: Iterable[Message]) -> RoundReport:
        """Take the step that the replies make."""
        answered = {reply.metadata.reply_to_message_id: reply for reply in replies}
        found, taken = dict[int, dict[str, float]](), self.channel.taken
        for client, message in messages.items():
            metrics = self.accounts.read(client, answered.get(message.metadata.message_id))
            if metrics is not None and client in taken:
                self.roster.num_samples[client] = metrics.get(EXAMPLES, 0.0)
                found[client] = metrics
        self.channel.reweigh(self.accounts.weights())
        report = self.accounts.report(found, len(messages))
        self.channel.step(set(found), report.stepped)
        return report

    def _evaluate_on_clients(self) -> tuple[dict[str, float], float | None]:
        """Return the means of what clients measure, and of their losses.

        They are weighted by examples where clients say them.
        """
        number, found = self.channel.version - 1, dict[int, dict[str, float]]()
        self.roster.update(set(self.grid.get_node_ids()))
        config = {**self._evaluate_config, ROUND: number}
        for reply in self._replies_to(self._messages(self.roster.present, "evaluate", config)):
            client = self.roster.client_of(reply.metadata.src_node_id)
            if reply.has_error():
                reason = plain(reply.error.reason or "")
                level = logging.INFO if _NO_HANDLER in reason else logging.WARNING
                logger.log(level, "a client could not evaluate: %s", reason)
            elif client is not None:
                found[client] = numbers_in(reply.content)
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
        timeout = self.settings.round_timeout
        return self.grid.send_and_receive(messages.values(), timeout=timeout)


def make_server_app(
    initial: Start | Callable[[Context], Start],
    *,
    settings: Mapping[str, Any] | None = None,
    on_finish: Callable[[Any], None] | None = None,
    **options: Any,
) -> ServerApp:
    """Make a ServerApp that runs the strategy `AQG` with the settings of the run-config.

    Args:
        initial: the model to start from, or what makes it: a torch module, an ArrayRecord, or
            parameters as a flat float32 or float64 vector, where the model has no statistics.
        settings: values for keys that the run-config does not have; see `Settings`.
        on_finish: is given the final model, as ``evaluate`` is given models, once the run is over.
        options: of `AQG`, in place of what the run-config says; ``include``, ``exclude`` and
            ``statistics`` are those that clients have.

    Where the run-config names a ``run-dir``, the run leaves its final and its best model there (see
    `aqg.load_model`), under the module's own names, or as one tensor called ``parameters``; where
    that holds a checkpoint, the run goes on from there.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = AQG.from_run_config(context.run_config, settings, **options)
        start: Any = initial
        if callable(initial) and not is_module(initial):
            start = initial(context)
        strategy.start(grid, start)
        if on_finish is not None:
            on_finish(strategy.final)

    return app
