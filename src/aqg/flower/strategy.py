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
from typing import TYPE_CHECKING, Any, NamedTuple

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
from aqg.flower.reports import Accounts
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


class _Run(NamedTuple):
    """What belongs to one call of `AQG.start`."""

    settings: Settings
    model: ServerModel
    grid: CompressedGrid
    channel: SteppingChannel
    roster: Roster
    accounts: Accounts
    journal: Journal
    result: Result
    evaluate_config: ConfigRecord


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
        self._run: _Run | None = None
        self._measure: Measure | None = None
        self._sent: dict[int, Message] = {}
        self._loss: float | None = None

    @staticmethod
    def from_run_config(
        run_config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None, **options: Any
    ) -> AQG:
        """Make the strategy that a run-config describes; keys that are not ours are left alone.

        >>> AQG.from_run_config({"num-clients": 4, "num-server-rounds": 20}).settings.rounds
        20

        Args:
            run_config: Flower's, with names in hyphens.
            defaults: values for keys that it does not have.
            options: of `AQG`; they come first.
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

        Args:
            grid: Flower's.
            initial_arrays: the model to start from. Of a torch module, the parameters that require
                a gradient travel; of an ArrayRecord, all of floating point that ``include`` and
                ``exclude`` leave; a flat vector is nothing but parameters.
            num_rounds: by default as in the settings, and so is ``timeout``.
            timeout: seconds until a round goes on without those who have not answered.
            train_config: for handlers, beside ``server-round``.
            evaluate_config: likewise.
            evaluate_fn: is called with the model before the first round and after every one, or
                every ``metrics_every`` rounds where that is set.

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
        self._measure = self._measure_by(evaluate_fn, model)
        every = settings.metrics_every or 1
        if evaluate_fn is None and not settings.metrics_every:
            every = max(1, settings.rounds // _METRIC_POINTS)
        journal = Journal(settings, self._loggers)
        try:
            run = self._begin(grid, settings, model, journal, evaluate_config or ConfigRecord())
            self._run, num_failed = run, 0
            while run.channel.version <= settings.rounds and not journal.ending:
                stepped = self._run_round(run, every, train_config or ConfigRecord())
                num_failed = 0 if stepped else num_failed + 1
                if num_failed > settings.max_failed_rounds:
                    raise RunError(
                        f"{num_failed} rounds in a row had fewer than {settings.needed_clients} "
                        "valid replies; lower min-clients, raise round-timeout, or look at the "
                        "clients' logs"
                    )
            self._finish(run)
        finally:
            journal.close()
            self._run = None
        return run.result

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,  # noqa: ARG002
    ) -> Iterable[Message]:
        run = self._require_run(server_round)
        settings, number = run.settings, run.channel.version
        away = settings.training().unsampled(number, settings.num_clients, settings.seed)
        told = ConfigRecord({**config, ROUND: server_round})
        if (number - 1) % settings.eval_every:
            told["measure"] = False
        sampled = [client for client in run.roster.present if not away[client]]
        messages = self._messages(run, sampled, arrays, told, "train")
        self._sent = dict(zip(sampled, messages, strict=True))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take the step that the replies make."""
        run = self._require_run(server_round)
        answered = {reply.metadata.reply_to_message_id: reply for reply in replies}
        found, taken = dict[int, dict[str, float]](), run.channel.taken
        for client, message in self._sent.items():
            metrics = run.accounts.read(client, answered.get(message.metadata.message_id))
            if metrics is not None and client in taken:
                run.roster.num_samples[client] = metrics.get(EXAMPLES, 0.0)
                found[client] = metrics
        run.channel.reweigh(run.accounts.weights())
        self._report = run.accounts.report(found, len(self._sent))
        run.channel.step(set(found), self._report.stepped)
        trained = self._report.trained
        return None, MetricRecord(dict(trained)) if trained else None

    def configure_evaluate(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,  # noqa: ARG002
    ) -> Iterable[Message]:
        """Return messages that ask the clients to measure the model."""
        run = self._require_run(server_round)
        told = ConfigRecord({**config, ROUND: server_round})
        return self._messages(run, run.roster.present, arrays, told, "evaluate")

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the means of what clients measured, weighted by examples where they say them."""
        run, found = self._require_run(server_round), dict[int, dict[str, float]]()
        for reply in replies:
            client = run.roster.client_of(reply.metadata.src_node_id)
            if reply.has_error():
                reason = plain(reply.error.reason or "")
                level = logging.INFO if _NO_HANDLER in reason else logging.WARNING
                logger.log(level, "a client could not evaluate: %s", reason)
            elif client is not None:
                found[client] = numbers_in(reply.content)
        if not found:
            return None
        clients, settings = sorted(found), run.settings
        weights = run.channel.book.weights[clients]
        examples = np.array([found[client].pop(EXAMPLES, 0.0) for client in clients])
        if settings.weighting == "samples" and (examples > 0).all():
            weights = cap_shares(examples, settings.largest_share)
        loss = CommonLoss.of(found, run.channel.book.weights, len(clients))
        for client in loss.absurd:
            logger.warning("the loss of client %d is beyond all use, and left out", client)
        self._loss = loss.mean
        shares = zip(weights.tolist(), (found[client] for client in clients), strict=True)
        return MetricRecord(dict(mean_metrics(list(shares))))

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

    def _begin(
        self,
        grid: Grid,
        settings: Settings,
        model: ServerModel,
        journal: Journal,
        config: ConfigRecord,
    ) -> _Run:
        """Wait for the clients; begin, or go on from the checkpoint."""
        names = ("recipe", "bits", "max_staleness", "seed", "updates", "start", "memory")
        named = {name: getattr(settings, name) for name in names}
        chosen = ChannelSettings(**named, own=self._recipe)
        recipe = chosen.make_recipe()
        downlink = resolve_downlink(settings.downlink, recipe)
        rule = settings.make_step(recipe)
        roster = Roster(settings.num_clients, settings.trust_partition_id)
        training = settings.training()
        sampled = training.num_sampled(settings.num_clients) / settings.num_clients
        how = settings.dropout, sampled, training.optimizer, rule, downlink
        step = Step(settings.step_size, *how)
        members = Members(settings.num_clients, roster.client_of)
        tensors = model.schema.fingerprint
        about = len(model.schema.specs), "float32", settings.seed, tensors
        journal.open(
            settings.terms
            | {
                "model": fingerprint(recipe, *about).hex(),
                "downlink": describe_downlink(downlink),
                "step": ":".join([rule.name, *(f"{n}={v:g}" for n, v in asdict(rule).items())]),
            }
        )
        values = values_of(model.record)
        channel = SteppingChannel(f"{journal.run}0", values, chosen, members, step, model.travel)
        journal.restore(channel, roster)
        compressed = CompressedGrid(grid, chosen, run_name=journal.run)
        compressed.channels[ARRAYS] = channel
        accounts = Accounts(settings, roster, channel, compressed.counts)
        compressed.checks = accounts
        patience = settings.start_timeout, settings.round_timeout
        if not roster.wait_for(grid, settings.num_clients, *patience):
            logger.warning(
                "%d of %d clients are connected; starting without the others",
                len(roster.present),
                settings.num_clients,
            )
        journal.begin(channel.version, self._describe, str(channel.book.parameters.dtype))
        journal.save(channel, roster)  # the incarnation, before the first order
        parts = settings, model, compressed, channel, roster, accounts, journal
        return _Run(*parts, Result(), config)

    def _run_round(self, run: _Run, every: int, config: ConfigRecord) -> bool:
        """Run the next round, and write it down; return whether the model took a step."""
        settings, number, before = run.settings, run.channel.version, run.channel.version - 1
        client_every = settings.client_eval_every
        evaluated, metrics, tensors = dict[str, float](), dict[str, float](), None
        if client_every and before and before % client_every == 0:
            evaluated = self._evaluate_on_clients(run)
        if before % every == 0:
            metrics = self._measured(run)
            tensors = run.model.tensors(run.channel.averaged()) if settings.run_dir else None
        needed, patience = settings.needed_clients, (settings.start_timeout, settings.round_timeout)
        if not run.roster.wait_for(run.grid.inner, needed, *patience):
            raise RunError(
                f"{len(run.roster.present)} clients are connected after "
                f"{settings.start_timeout:g} s, and {needed} are needed; start again with the "
                "same run-dir to go on"
            )
        started = time.monotonic()
        messages = self.configure_train(number, run.model.record, config, run.grid)
        replies = run.grid.send_and_receive(messages, timeout=settings.round_timeout)
        _, trained = self.aggregate_train(number, replies)
        report = replace(
            self._report,
            line=Line(self._report.line.record, metrics),
            round_seconds=time.monotonic() - started,
            evaluated={**self._report.evaluated, **evaluated},
        )
        if trained is not None:
            run.result.train_metrics_clientapp[number] = trained
        if report.evaluated:
            found = MetricRecord(dict(report.evaluated))
            run.result.evaluate_metrics_clientapp.setdefault(before, found)
        run.journal.note(report, tensors)
        over = number >= settings.rounds or run.journal.ending
        if over or number % settings.checkpoint_every == 0:
            run.journal.save(run.channel, run.roster)
        return report.stepped

    def _finish(self, run: _Run) -> None:
        """Let clients and server measure the final model, and write the results."""
        self._loss = None
        evaluated, metrics = self._evaluate_on_clients(run), self._measured(run)
        averaged = run.channel.averaged()
        run.result.arrays = record_of(averaged.items())
        self.final = run.model.filled(averaged)
        make = partial(run.model.tensors, averaged)
        self.results = run.journal.finish(evaluated, self._loss, metrics, make)
        holders = [] if run.settings.memory == "none" else run.roster.present
        run.grid.finish(map(run.roster.node_of, holders))
        run.result.traffic = run.grid.counts  # type: ignore[attr-defined]
        logger.info("done: %s", {key: self.results[key] for key in _SAID})

    def _evaluate_on_clients(self, run: _Run) -> dict[str, float]:
        number, config = run.channel.version - 1, run.evaluate_config
        run.roster.update(set(run.grid.get_node_ids()))
        messages = self.configure_evaluate(number, run.model.record, config, run.grid)
        replies = run.grid.send_and_receive(messages, timeout=run.settings.round_timeout)
        found = self.aggregate_evaluate(number, replies)
        if found is None:
            return {}
        run.result.evaluate_metrics_clientapp[number] = found
        return {name: float(value) for name, value in found.items()}  # type: ignore[arg-type]

    def _measured(self, run: _Run) -> dict[str, float]:
        if self._measure is None:
            return {}
        if not run.model.can_be_measured:
            logger.warning("clients keep their own statistics; the server measures no metrics")
            return {}
        number = run.channel.version - 1
        metrics = as_metrics(self._measure(number, run.channel.averaged()), "accuracy")
        if metrics:
            run.result.evaluate_metrics_serverapp[number] = MetricRecord(dict(metrics))
        return metrics

    def _messages(
        self, run: _Run, clients: list[int], arrays: ArrayRecord, config: ConfigRecord, kind: str
    ) -> list[Message]:
        content, ttl = RecordDict({ARRAYS: arrays, CONFIG: config}), run.settings.round_timeout
        nodes, group = map(run.roster.node_of, clients), str(run.channel.version)
        return [Message(content, node, kind, ttl=ttl, group_id=group) for node in nodes]

    def _require_run(self, server_round: int) -> _Run:
        if self._run is None:
            raise ConfigError(
                f"round {server_round} is not AQG's own; it makes the model itself: call its "
                "start, and put no other strategy around it"
            )
        return self._run

    def _measure_by(self, evaluate_fn: EvaluateRound | None, model: ServerModel) -> Measure | None:
        """Return what measures a model on the server."""
        evaluate = self._evaluate
        if evaluate_fn is None:
            return evaluate and (lambda _, values: evaluate(model.filled(values)))
        if evaluate is not None:
            raise ConfigError("AQG has an evaluate, and start an evaluate_fn; give one of them")
        return lambda number, values: evaluate_fn(number, record_of(values.items()))


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
            parameters as a flat float32 or float64 vector. A vector will not do where the model
            has statistics, such as those of batch normalization; clients whose module is another
            are told so.
        settings: values for keys that the run-config does not have; see `Settings`.
        on_finish: is given the final model, as ``evaluate`` is given models, once the run is over.
        options: of `AQG`: ``recipe``, in place of the one that the run-config names, ``evaluate``,
            ``include``, ``exclude`` and ``statistics``, as clients have them, ``describe`` and
            ``loggers``.

    ``evaluate`` is called before some rounds, see ``metrics_every`` of `Settings`, and after the
    last; NaN is recorded as null. Where the run-config names a ``run-dir``, the run leaves its
    final and its best model there (see `aqg.load_model`), under the module's own names; a vector
    without a module is one tensor called ``parameters``. Where the directory holds a checkpoint,
    the run goes on from there.
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
