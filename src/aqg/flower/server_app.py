"""The ServerApp of a deployment that is described by its run-config alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from flwr.serverapp import Grid, ServerApp

from aqg.flower.models import is_module
from aqg.flower.strategy import AQG

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from flwr.app import ArrayRecord, Context

    from aqg.core.recipe import Recipe
    from aqg.core.types import FloatArray
    from aqg.flower.loggers import RunLogger

Start: TypeAlias = "FloatArray | torch.nn.Module | ArrayRecord"
"""A model to start from."""


def make_server_app(
    initial: Start | Callable[[Context], Start],
    *,
    recipe: Recipe | None = None,
    evaluate: Callable[[Any], float | Mapping[str, float] | None] | None = None,
    on_finish: Callable[[Any], None] | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    statistics: str = "average",
    settings: Mapping[str, Any] | None = None,
    describe: Mapping[str, Any] | None = None,
    loggers: Sequence[RunLogger] = (),
) -> ServerApp:
    """Make a ServerApp that runs the strategy `AQG` with the settings of the run-config.

    Args:
        initial: the model to start from, or what makes it: a torch module, an ArrayRecord, or
            parameters as a flat float32 or float64 vector. A vector will not do where the model
            has statistics, such as those of batch normalization; clients whose module is another
            are told so.
        recipe: in place of the one that the run-config names; clients must have an equal one.
        evaluate: the accuracy of a model on the server's own test data, or several metrics by
            name; None where there is none. It is called before some rounds, see ``metrics_every``
            of `Settings`, and after the last; NaN is recorded as null. It is given a module where
            ``initial`` is one, ready for use, and an ArrayRecord or a flat vector otherwise.
        on_finish: is given the final model, in the same way, once the run is over.
        include: name patterns of the module's parameters that travel; as the clients have them.
        exclude: name patterns of tensors that stay out; as the clients have them.
        statistics: the policy for the module's statistics; as the clients have it.
        settings: values for keys that the run-config does not have; see `Settings`.
        describe: more keys for ``config.toml``, such as ``dataset`` or ``model``.
        loggers: are told about every round, beside the run directory.

    Where the run-config names a ``run-dir``, the run leaves its final and its best model there (see
    `aqg.load_model`), under the module's own names; a vector without a module is one tensor called
    ``parameters``. Where the directory holds a checkpoint, the run goes on from there.

    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = AQG.from_run_config(
            context.run_config,
            settings,
            recipe=recipe,
            evaluate=evaluate,
            include=include,
            exclude=exclude,
            statistics=statistics,
            describe=describe,
            loggers=loggers,
        )
        start: Any = initial
        if callable(initial) and not is_module(initial):
            start = initial(context)
        strategy.start(grid, start)
        if on_finish is not None:
            on_finish(strategy.final)

    return app
