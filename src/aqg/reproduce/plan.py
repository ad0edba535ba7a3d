"""Which runs settle the paper's claims, at its own lengths or shortened for a laptop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aqg.errors import ConfigError
from aqg.experiments.config import resolve
from aqg.experiments.sweep import SweepRun

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SECTIONS = ("logistic", "softmax", "dropouts", "network")
CHOICES = {
    "table1": ("logistic", "softmax"),
    **{section: (section,) for section in SECTIONS},
}
"""What ``--only`` takes, and the sections it stands for."""

TABLE_RECIPES = ("aqg-2", "aqg", "laq", "qgd", "gd", "lean")
DROPOUT_RECIPES = ("laq", "aqg-2", "aqg-augmented", "lean")
NETWORK_RECIPES = ("gd", "laq", "aqg-2", "aqg", "lean")
ALWAYS_SEND = ("qgd", "gd")
"""Recipes whose costs hardly depend on the seed; one seed is enough."""


@dataclass(frozen=True)
class Scale:
    """How long and how often everything is run.

    Attributes:
        readings: loss scaling and step size of the logistic runs.
        logistic_rounds: their length.
        dtype: the precision of runs on MNIST.
        softmax_rounds: length of Table 1's network runs.
        softmax_residual: the residual that Table 1's network rows are measured at.
        dropout_dtype: the precision of runs with dropouts, compared at a coarser residual.
        dropout_rounds: their length.
        dropout_residual: the residual that dropouts are compared at.
        dropout_rates: ``p``, for each split that is run with dropouts.
        dropout_seeds: how many seeds.
        dropout_eval_every: rounds between two looks at the loss.
        softmax_seeds: how many seeds for recipes that choose when to speak.
        network_rounds: length of the 784-200-10 runs.
        network_splits: the splits of the 784-200-10 runs.
        notes: what was shortened, in words.

    """

    readings: tuple[tuple[str, float], ...]
    dtype: str
    softmax_rounds: int
    softmax_residual: float
    softmax_seeds: int
    dropout_dtype: str
    dropout_rounds: int
    dropout_residual: float
    dropout_rates: tuple[tuple[str, tuple[float, ...]], ...]
    dropout_seeds: int
    dropout_eval_every: int
    network_rounds: int
    network_splits: tuple[str, ...]
    logistic_rounds: int = 500
    notes: tuple[str, ...] = ()


FULL = Scale(
    readings=(
        ("mean", 0.008),
        ("sum", 0.0015),
        ("sum", 0.002),
        ("sum", 0.0021),
        ("sum", 0.0025),
    ),
    dtype="float64",
    softmax_rounds=4000,
    softmax_residual=1e-6,
    softmax_seeds=1,
    dropout_dtype="float32",
    dropout_rounds=1500,
    dropout_residual=1e-3,
    dropout_rates=(("iid", (0.2, 0.5, 0.7, 0.8, 0.9)), ("label", (0.5, 0.8, 0.9))),
    dropout_seeds=5,
    dropout_eval_every=10,
    network_rounds=1500,
    network_splits=("iid", "label"),
    notes=(
        "dropouts: 1500 of the paper's 4000 rounds, in float32, compared at a residual of 0.001; "
        "one digit per client at three of the five rates",
    ),
)
QUICK = Scale(
    readings=(("mean", 0.008), ("sum", 0.002)),
    dtype="float32",
    softmax_rounds=200,
    softmax_residual=0.1,
    softmax_seeds=1,
    dropout_dtype="float32",
    dropout_rounds=200,
    dropout_residual=0.1,
    dropout_rates=(("iid", (0.5, 0.9)),),
    dropout_seeds=2,
    dropout_eval_every=5,
    network_rounds=30,
    network_splits=("iid",),
    notes=(
        "MNIST runs take 200 of 4000 rounds, in float32, and are measured at a residual of 0.1, "
        "not 1e-6: costs there do not compare with the paper's",
        "dropouts: p = 0.5 and 0.9 IID with 2 seeds, not five rates, two splits and 5 seeds",
        "784-200-10: 30 of 1500 rounds, IID only",
        "logistic regression has its full length, at 2 of 5 step sizes",
    ),
)
MAIN_READING = ("sum", 0.002)
"""The logistic reading that Table 1 is compared with: the largest α where LAQ and QGD converge."""


@dataclass(frozen=True)
class PlannedRun:
    """A run and the section of the results that it belongs to."""

    section: str
    run: SweepRun


def parse_sections(text: str | None) -> tuple[str, ...]:
    """Return the sections that ``--only`` names; all without it.

    >>> parse_sections("table1,dropouts")
    ('logistic', 'softmax', 'dropouts')
    >>> parse_sections("table2")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    aqg.errors.ConfigError: unknown part 'table2'; choose from table1, logistic, softmax, ...
    """
    if text is None:
        return SECTIONS
    chosen: set[str] = set()
    for name in text.split(","):
        if name.strip() not in CHOICES:
            raise ConfigError(f"unknown part {name.strip()!r}; choose from {', '.join(CHOICES)}")
        chosen.update(CHOICES[name.strip()])
    return tuple(section for section in SECTIONS if section in chosen)


def make_plan(
    scale: Scale, device: str = "cpu", sections: Sequence[str] = SECTIONS
) -> tuple[PlannedRun, ...]:
    """Return every run, long ones first; logistic runs are always on the CPU."""
    makers = {
        "softmax": _softmax(scale, device),
        "network": _network(scale, device),
        "logistic": _logistic(scale),
        "dropouts": _dropouts(scale, device),
    }
    runs = [
        _planned(section, settings)
        for section, maker in makers.items()
        if section in sections
        for settings in maker
    ]
    return tuple(runs)


def _planned(section: str, settings: dict[str, Any]) -> PlannedRun:
    (config,) = resolve(settings)
    name = f"{section}_{config.partition}"
    if section == "logistic":
        name += f"_{config.scaling}-{config.alpha:g}"
    if section == "dropouts":
        name += f"_p{config.dropout:g}"
    return PlannedRun(section, SweepRun(f"{name}_{config.recipe}_seed{config.seed}", config))


def _logistic(scale: Scale) -> Iterator[dict[str, Any]]:
    for scaling, alpha in scale.readings:
        for partition in ("iid", "source"):
            for recipe in TABLE_RECIPES:
                yield {
                    "dataset": "heterogeneous",
                    "partition": partition,
                    "recipe": recipe,
                    "scaling": scaling,
                    "alpha": alpha,
                    "rounds": scale.logistic_rounds,
                }


def _softmax(scale: Scale, device: str) -> Iterator[dict[str, Any]]:
    for seed in range(scale.softmax_seeds):
        for partition in ("iid", "label"):
            for recipe in TABLE_RECIPES:
                if seed == 0 or recipe not in ALWAYS_SEND:
                    yield {
                        **_mnist(scale, device, partition, recipe, seed),
                        "rounds": scale.softmax_rounds,
                    }


def _dropouts(scale: Scale, device: str) -> Iterator[dict[str, Any]]:
    for partition, rates in scale.dropout_rates:
        for seed in range(scale.dropout_seeds):
            for rate in rates:
                for recipe in DROPOUT_RECIPES:
                    yield {
                        **_mnist(scale, device, partition, recipe, seed),
                        "dtype": scale.dropout_dtype,
                        "rounds": scale.dropout_rounds,
                        "dropout": rate,
                        "eval_every": scale.dropout_eval_every,
                    }


def _network(scale: Scale, device: str) -> Iterator[dict[str, Any]]:
    for partition in scale.network_splits:
        for recipe in NETWORK_RECIPES:
            yield {
                **_mnist(scale, device, partition, recipe, 0),
                "model": "mlp:200",
                "rounds": scale.network_rounds,
            }


def _mnist(scale: Scale, device: str, partition: str, recipe: str, seed: int) -> dict[str, Any]:
    return {
        "dataset": "mnist",
        "partition": partition,
        "recipe": recipe,
        "seed": seed,
        "dtype": scale.dtype,
        "device": device,
    }
