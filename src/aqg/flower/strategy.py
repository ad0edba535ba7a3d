"""Our own strategy: the simulator's server, as a strategy of Flower.

It works on the same grid as ``Compressed(...)`` does, and makes the model itself: clients send
updates against mirrors that the server holds, and the server publishes its steps
(`aqg.channel.stepping`). So a client that skips, is late or drops out still counts with its mirror,
and the run ends with the simulator's model.

Its settings are Flower's flat run-config, checked. The table of them is
`aqg.settings.FlowerSettings`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result, Strategy

from aqg.core.downlink import AUTO, make_downlink, resolve_downlink
from aqg.core.optimizers import make_optimizer
from aqg.core.recipe import Recipe, kind_of_updates, require_memory
from aqg.core.recipes import make_recipe
from aqg.core.step_sizes import Fixed, StepRule, make_step, resolve_step
from aqg.core.types import FloatArray
from aqg.errors import ConfigError
from aqg.flower.envelope import logger, record_of
from aqg.flower.grid import CompressedGrid
from aqg.flower.journal import Journal, RunLogger
from aqg.flower.rounds import Run
from aqg.flower.task import ServerModel, is_module, make_model
from aqg.settings import FlowerSettings, check_bounds, table, typed
from aqg.sim.training import Training

if TYPE_CHECKING:
    import torch

    from aqg.flower.rounds import Measure

    Start = FloatArray | torch.nn.Module | ArrayRecord
    Evaluate = Callable[[Any], float | Mapping[str, float] | None]
    EvaluateRound = Callable[[int, ArrayRecord], MetricRecord | None]

_LIKELY_MISSPELLED = 0.9
KEYS = {name: row.key or name.replace("_", "-") for name, row in table(FlowerSettings).items()}
"""How a run-config calls each setting."""


@dataclass(frozen=True, kw_only=True)
class Settings(FlowerSettings):
    """What a run-config can set."""

    def __post_init__(self) -> None:
        check_bounds(self, KEYS)
        if 0 < self.max_share < 1 / self.num_clients:
            raise ConfigError(
                f"max-share is {self.max_share}; it must be at least {1 / self.num_clients:.3g}, "
                "a fair share"
            )
        if self.min_clients > self.num_clients:
            raise ConfigError(
                f"min-clients is {self.min_clients}; it must be at most {self.num_clients}, the "
                "number of clients"
            )
        if self.recipe:
            recipe = make_recipe(self.recipe, self.bits, self.max_staleness)
            recipe = recipe.for_updates(self.updates)
            resolve_downlink(self.downlink, recipe)
            require_memory(self.memory, recipe)
        elif self.downlink != AUTO:
            make_downlink(self.downlink)
        if self.step != AUTO:
            make_step(self.step)
        num_sampled = self.training().num_sampled(self.num_clients)
        if num_sampled < self.min_clients:
            raise ConfigError(
                f"min-clients is {self.min_clients}, but with fraction-train {self.participation} "
                f"only {num_sampled} of {self.num_clients} clients are sampled in a round"
            )
        if self.tensorboard and not self.run_dir:
            raise ConfigError("tensorboard is true, but run-dir is empty; name a directory")

    @property
    def terms(self) -> dict[str, Any]:
        """What a run that goes on must have kept as it was, beside recipe, model and seed."""
        names = "num_clients", "alpha", "optimizer", "weighting", "participation", "dropout"
        terms = {KEYS[name]: getattr(self, name) for name in (*names, "memory")}
        return terms if self.weighting == "equal" else terms | {"max-share": self.largest_share}

    @property
    def step_size(self) -> float:
        return self.alpha or 1.0 / self.num_clients

    @property
    def needed_clients(self) -> int:
        """The fewest valid replies with which the model takes a step."""
        return self.min_clients or 1

    @property
    def updates(self) -> str:
        return kind_of_updates(self.exact, self.participation, self.memory == "none")

    def make_step(self, recipe: Recipe) -> StepRule:
        if self.step == AUTO and self.alpha:
            return Fixed()
        return resolve_step(self.step, recipe, self.exact, make_optimizer(self.optimizer))

    def training(self) -> Training:
        return Training(
            optimizer=make_optimizer(self.optimizer),
            weighting=self.weighting,
            participation=self.participation,
        )

    @property
    def largest_share(self) -> float:
        return self.max_share or min(1.0, max(0.5, 1.8 / self.num_clients))


def read_settings(
    run_config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> Settings:
    """Read the settings of a run; keys that are not ours belong to the user's own app.

    >>> settings = read_settings({"num-clients": 3, "num-server-rounds": 5, "batch-size": 32})
    >>> settings.num_clients, settings.recipe, settings.step_size
    (3, 'auto', 0.3333333333333333)
    >>> read_settings({"num-clients": 3, "num-server-rounds": "five"})
    Traceback (most recent call last):
    aqg.errors.ConfigError: num-server-rounds is 'five'; it must be a whole number
    """
    merged = {**(defaults or {}), **run_config}
    names = {key: name for name, key in KEYS.items()}
    chosen: dict[str, Any] = {}
    for key, value in merged.items():
        if key in names:
            chosen[names[key]] = typed(FlowerSettings, names[key], value, key)
        else:
            close = get_close_matches(key, names, n=1, cutoff=_LIKELY_MISSPELLED)
            if close:
                logger.warning("run-config has %r, which is ignored; %r is meant?", key, close[0])
    for name in ("num_clients", "rounds"):
        if name not in chosen:
            raise ConfigError(
                f"run-config has no {KEYS[name]}; add it under [tool.flwr.app.config]"
            )
    return Settings(**chosen)


_METRIC_POINTS = 50
_ROUNDS = 3
"""Flower's default."""


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
        settings: all others of `aqg.flower.strategy.Settings`, by name, such as ``run_dir``.

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
            run = Run(grid, settings, model, journal, self._recipe, configs, measure)
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
