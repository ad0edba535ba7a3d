"""The ServerApp: starts a run or goes on with one, and brings it to its end."""

from __future__ import annotations

import logging
import math
import secrets
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.serverapp import Grid, ServerApp

from aqg.errors import ConfigError, RunError
from aqg.experiments.summary import summarize
from aqg.flower.checkpoint import Checkpoint, load_checkpoint, locked, save_checkpoint
from aqg.flower.coordinator import Coordinator
from aqg.flower.exchange import Exchange
from aqg.flower.loggers import RunDirectory, RunLogger, TensorBoard, config_of
from aqg.flower.presence import Presence
from aqg.flower.protocol import MirrorBook, fingerprint
from aqg.flower.reports import summarize_reports
from aqg.flower.roster import Roster
from aqg.flower.settings import Settings, read_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from flwr.app import Context

    from aqg.core.recipe import Recipe
    from aqg.core.types import FloatArray
    from aqg.experiments.rundir import Line
    from aqg.flower.reports import RoundReport

_logger = logging.getLogger("flwr.aqg")

_ACCURACY_POINTS = 50


def make_server_app(
    initial_params: FloatArray | Callable[[Context], FloatArray],
    *,
    recipe: Recipe | None = None,
    evaluate: Callable[[FloatArray], float | None] | None = None,
    on_finish: Callable[[FloatArray], None] | None = None,
    settings: Mapping[str, Any] | None = None,
    describe: Mapping[str, Any] | None = None,
    loggers: Sequence[RunLogger] = (),
) -> ServerApp:
    """Make the ServerApp of a deployment.

    Args:
        initial_params: the model to start from, flat, float32 or float64; or what makes it.
        recipe: in place of the one that the run-config names; clients must have an equal one.
        evaluate: the accuracy of a model on the server's own test data; None where there is none.
        on_finish: is given the final model.
        settings: values for keys that the run-config does not have; see `Settings`.
        describe: more keys for ``config.toml``, such as ``dataset`` or ``model``.
        loggers: are told about every round, beside the run directory.

    Where the run-config names a ``run-dir`` that holds a checkpoint, the run goes on from there.

    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        chosen = read_settings(context.run_config, settings)
        if recipe is not None:
            chosen = replace(chosen, recipe="")
        params = initial_params(context) if callable(initial_params) else initial_params
        run = _Run(grid, chosen, _checked(params), recipe or chosen.make_recipe(), evaluate)
        with ExitStack() as stack:
            final = run.go(stack, describe or {}, loggers)
        if on_finish is not None:
            on_finish(final)

    return app


class _Run:
    """One run, from its first round or its checkpoint to its last round."""

    def __init__(
        self,
        grid: Grid,
        settings: Settings,
        params: FloatArray,
        recipe: Recipe,
        evaluate: Callable[[FloatArray], float | None] | None,
    ) -> None:
        self.settings = settings
        self.recipe = recipe
        self.params = params
        self.evaluate = evaluate
        self.exchange = Exchange(grid)
        self.directory = Path(settings.run_dir).expanduser() if settings.run_dir else None

    def go(
        self, stack: ExitStack, describe: Mapping[str, Any], loggers: Sequence[RunLogger]
    ) -> FloatArray:
        """Run to the end and return the model."""
        settings = self.settings
        if self.directory is not None:
            stack.enter_context(locked(self.directory))
        coordinator, presence, run, incarnation = self._start()
        writers = [stack.enter_context(closing(w)) for w in (*self._own_loggers(), *loggers)]
        config = config_of(settings, describe, str(self.params.dtype))
        lines = self._earlier_lines(coordinator.book)
        for writer in writers:
            writer.start(config, coordinator.book.round)

        def save() -> None:
            if self.directory is not None:
                checkpoint = Checkpoint(
                    run=run,
                    fingerprint=coordinator.fingerprint,
                    incarnation=incarnation,
                    book=coordinator.book,
                    nodes=presence.roster.nodes,
                    num_samples=presence.roster.num_samples,
                    terms=settings.terms,
                )
                save_checkpoint(self.directory, checkpoint)

        save()  # the incarnation must be on disk before the first order goes out
        reports: list[RoundReport] = []
        failed = 0
        while coordinator.book.round <= settings.rounds:
            number = coordinator.book.round
            report = coordinator.run_round(self._accuracy(coordinator.book, number))
            lines.append(report.line)
            reports.append(report)
            for writer in writers:
                writer.round(report)
            last = coordinator.book.round > settings.rounds
            if last or number % settings.checkpoint_every == 0:
                save()
            failed = 0 if report.stepped else failed + 1
            if failed > settings.max_failed_rounds:
                raise RunError(
                    f"{failed} rounds in a row had fewer than {settings.needed_clients} valid "
                    "replies; lower min-clients, raise round-timeout, or look at the clients' logs"
                )
            if report.diverged:
                _logger.warning("the loss left all use in round %d; stopping", number)
                save()
                break
        summary = self._summary(coordinator, lines, reports)
        for writer in writers:
            writer.finish(summary)
        _logger.info("done: %s", {key: summary[key] for key in ("final_loss", "upload_bytes")})
        return coordinator.book.parameters

    def _start(self) -> tuple[Coordinator, Presence, str, int]:
        """Wait for the clients; begin, or go on from the checkpoint."""
        settings = self.settings
        saved = None
        if self.directory is not None:
            saved = load_checkpoint(self.directory, self.recipe)
        run, incarnation = secrets.token_hex(8), time.time_ns() // 1_000_000
        if saved is None:
            roster = Roster(settings.num_clients, settings.trust_partition_id)
        else:
            self._check_same_run(saved)
            run, incarnation = saved.run, max(incarnation, saved.incarnation + 1)
            roster = Roster(
                settings.num_clients, settings.trust_partition_id, saved.nodes, saved.num_samples
            )
        presence = Presence(self.exchange, roster, settings)
        if not presence.wait_for(settings.num_clients, settings.start_timeout):
            _logger.warning(
                "%d of %d clients are connected; starting without the others",
                len(roster.present),
                settings.num_clients,
            )
        if saved is None:
            weights = settings.client_weights(roster.num_samples)
            optimizer = settings.training().optimizer
            book = MirrorBook.first(self.recipe, self.params, weights, optimizer)
        else:
            book = saved.book
            _logger.info("going on with run %s at round %d", run, book.round)
        spec = settings.recipe
        coordinator = Coordinator(settings, self.exchange, presence, book, run, incarnation, spec)
        return coordinator, presence, run, incarnation

    def _check_same_run(self, saved: Checkpoint) -> None:
        wanted = fingerprint(
            self.recipe, len(self.params), str(self.params.dtype), self.settings.seed
        )
        if saved.fingerprint != wanted:
            raise ConfigError(
                f"run-dir {self.settings.run_dir!r} holds a run with another recipe, seed or "
                "model; give it a new directory"
            )
        for name, value in self.settings.terms.items():
            if saved.terms[name] != value:
                raise ConfigError(
                    f"run-dir {self.settings.run_dir!r} holds a run with {name} "
                    f"{saved.terms[name]}, and {name} is {value}; set it back, or give it a new "
                    "directory"
                )

    def _own_loggers(self) -> list[RunLogger]:
        own: list[RunLogger] = []
        if self.directory is not None:
            own.append(RunDirectory(self.directory))
            if self.settings.tensorboard:
                own.append(TensorBoard(self.directory / "tensorboard"))
        return own

    def _earlier_lines(self, book: MirrorBook) -> list[Line]:
        if self.directory is None or book.round == 1:
            return []
        return RunDirectory(self.directory).lines(book.round)

    def _accuracy(self, book: MirrorBook, number: int) -> float | None:
        every = max(1, self.settings.rounds // _ACCURACY_POINTS)
        if self.evaluate is None or (number - 1) % every:
            return None
        return self.evaluate(book.parameters)

    def _summary(
        self, coordinator: Coordinator, lines: list[Line], reports: list[RoundReport]
    ) -> dict[str, Any]:
        final_loss = coordinator.final_loss()
        if final_loss is None:  # tasks that cannot evaluate: the last loss that training reported
            known = [line.record.loss for line in lines if line.record.loss is not None]
            final_loss = known[-1] if known else math.nan
        accuracy = None
        if self.evaluate is not None:
            accuracy = self.evaluate(coordinator.book.parameters)
        recipe = self.settings.recipe or "custom"
        summary = summarize(recipe, lines, final_loss, accuracy, None, None).to_json()
        return summary | {"deployment": summarize_reports(reports)}


def _checked(params: FloatArray) -> FloatArray:
    if params.ndim != 1 or params.dtype not in (np.float32, np.float64) or not len(params):
        raise ConfigError(
            f"initial parameters are {params.ndim}-d {params.dtype} of {params.size} values; "
            "they must be a flat float32 or float64 vector"
        )
    if not np.isfinite(params).all():
        raise ConfigError("initial parameters hold NaN or infinity")
    return params
