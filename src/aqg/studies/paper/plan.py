"""Which runs settle the paper's claims, at its own lengths or shortened for a laptop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aqg.errors import ConfigError
from aqg.runs.config import resolve
from aqg.runs.plan import Job

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

SECTIONS = ("logistic", "rounding", "softmax", "dropouts", "network")
CHOICES = {
    "table2": ("logistic", "softmax"),
    **{section: (section,) for section in SECTIONS},
}
"""What ``--only`` takes, and the sections it stands for."""

TABLE_RECIPES = ("aqg-2", "aqg", "laq", "qgd", "gd", "lean", "auto")
DROPOUT_RECIPES = ("laq", "aqg-2", "aqg-augmented", "lean")
NETWORK_RECIPES = ("gd", "qgd", "laq", "aqg-2", "aqg", "lean", "auto")
ALWAYS_SEND = ("qgd", "gd")
ONE_SEED = ("qgd",)
"""Recipes that are run on 784-200-10 with one seed: every round sizes ten long frames."""
PERTURBED_RECIPES = ("laq", "aqg-2", "aqg", "lean")
"""Recipes whose logistic runs are repeated with data that differ in the last bit."""
BY_SOURCE = "source:shuffled"
"""The split of the logistic runs by source: random, so that there are several of them."""


@dataclass(frozen=True)
class Scale:
    """How long and how often everything is run.

    Attributes:
        readings: loss scaling and step size of the logistic runs.
        logistic_rounds: their length.
        logistic_seeds: how many seeds; a seed is a way to deal the samples to the clients.
        perturbed_alphas: step sizes at which logistic runs are repeated with perturbed data.
        perturbations: how many times each.
        dtype: the precision of runs on MNIST.
        softmax_rounds: length of the runs behind the network rows of the paper's table.
        softmax_residual: the residual that those rows are measured at.
        softmax_seeds: how many seeds; a seed is a start and, IID, a way to deal the samples.
        dropout_rounds: length of the runs with dropouts.
        dropout_residual: the residual that dropouts are compared at.
        dropout_rates: ``p``, for each split that is run with dropouts.
        dropout_seeds: how many seeds.
        dropout_eval_every: rounds between two looks at the loss.
        network_rounds: length of the 784-200-10 runs.
        network_splits: the splits of the 784-200-10 runs.
        network_seeds: how many seeds, those of `ONE_SEED` aside.
        notes: what was shortened, in words.

    """

    readings: tuple[tuple[str, float], ...]
    logistic_seeds: int
    perturbed_alphas: tuple[float, ...]
    perturbations: int
    dtype: str
    softmax_rounds: int
    softmax_residual: float
    softmax_seeds: int
    dropout_rounds: int
    dropout_residual: float
    dropout_rates: tuple[tuple[str, tuple[float, ...]], ...]
    dropout_seeds: int
    dropout_eval_every: int
    network_rounds: int
    network_splits: tuple[str, ...]
    network_seeds: int
    logistic_rounds: int = 500
    notes: tuple[str, ...] = ()


_PAPER_RATES = (0.2, 0.5, 0.7, 0.8, 0.9)
FULL = Scale(
    readings=(
        ("mean", 0.008),
        ("sum", 0.0015),
        ("sum", 0.0018),
        ("sum", 0.0019),
        ("sum", 0.002),
        ("sum", 0.0021),
        ("sum", 0.0022),
        ("sum", 0.0025),
        ("sum", 0.008),
    ),
    logistic_seeds=10,
    perturbed_alphas=(0.0019, 0.002, 0.0021),
    perturbations=10,
    dtype="float64",
    softmax_rounds=4000,
    softmax_residual=1e-6,
    softmax_seeds=5,
    dropout_rounds=4000,
    dropout_residual=1e-3,
    dropout_rates=(("iid", _PAPER_RATES), ("label", _PAPER_RATES)),
    dropout_seeds=10,
    dropout_eval_every=10,
    network_rounds=1500,
    network_splits=("iid", "label"),
    network_seeds=5,
    notes=("784-200-10: 1500 rounds, not 4000, and one seed for qgd",),
)
QUICK = Scale(
    readings=(("mean", 0.008), ("sum", 0.002)),
    logistic_seeds=3,
    perturbed_alphas=(0.002,),
    perturbations=2,
    dtype="float32",
    softmax_rounds=200,
    softmax_residual=0.1,
    softmax_seeds=1,
    dropout_rounds=200,
    dropout_residual=0.1,
    dropout_rates=(("iid", (0.5, 0.9)),),
    dropout_seeds=2,
    dropout_eval_every=5,
    network_rounds=30,
    network_splits=("iid",),
    network_seeds=1,
    notes=(
        "MNIST runs take 200 of 4000 rounds, in float32, and are measured at a residual of 0.1, "
        "not 1e-6: costs there do not compare with the paper's",
        "dropouts: p = 0.5 and 0.9 IID with 2 seeds, not five rates, two splits and 10 seeds",
        "784-200-10: 30 of 1500 rounds, IID only, one seed",
        "logistic regression has its full length, at 2 of 9 step sizes, with 3 of 10 seeds",
    ),
)


@dataclass(frozen=True)
class PlannedRun:
    """A run and the section of the results that it belongs to."""

    section: str
    run: Job


def parse_sections(text: str | None) -> tuple[str, ...]:
    """Return the sections that ``--only`` names; all without it.

    >>> parse_sections("table2,dropouts")
    ('logistic', 'softmax', 'dropouts')
    >>> parse_sections("table1")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    aqg.errors.ConfigError: unknown part 'table1'; choose from table2, logistic, rounding, ...
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
        "dropouts": _dropouts(scale, device),
        "logistic": _logistic(scale, scale.logistic_seeds, scale.readings),
        "rounding": _rounding(scale),
    }
    runs = [
        _planned(section, settings)
        for section, maker in makers.items()
        if section in sections
        for settings in maker
    ]
    return tuple(runs)


def _planned(section: str, settings: dict[str, Any]) -> PlannedRun:
    (config,) = resolve({"downlink": "full", **settings})
    name = f"{section}_{config.partition.replace(':', '-')}"
    if section in ("logistic", "rounding"):
        name += f"_{config.scaling}-{config.alpha:g}"
    if section == "dropouts":
        name += f"_p{config.dropout:g}"
    name += f"_{config.recipe}_seed{config.seed}"
    if section == "rounding":
        name += f"_draw{config.perturbation}"
    return PlannedRun(section, Job(name, config))


def _logistic(
    scale: Scale, num_seeds: int, readings: Iterable[tuple[str, float]]
) -> Iterator[dict[str, Any]]:
    readings = tuple(readings)
    for seed in range(num_seeds):
        for partition in ("iid", BY_SOURCE):
            for scaling, alpha in readings:
                for recipe in TABLE_RECIPES:
                    yield {
                        "dataset": "heterogeneous",
                        "partition": partition,
                        "recipe": recipe,
                        "seed": seed,
                        "scaling": scaling,
                        "alpha": alpha,
                        "rounds": scale.logistic_rounds,
                    }


def _rounding(scale: Scale) -> Iterator[dict[str, Any]]:
    """Yield the logistic runs on perturbed data, and for each the one on the data itself."""
    for settings in _logistic(scale, 1, (("sum", alpha) for alpha in scale.perturbed_alphas)):
        if settings["recipe"] in PERTURBED_RECIPES:
            for draw in range(scale.perturbations + 1):
                yield {**settings, "perturbation": draw}


def _softmax(scale: Scale, device: str) -> Iterator[dict[str, Any]]:
    for seed in range(scale.softmax_seeds):
        for partition in ("iid", "label"):
            for recipe in TABLE_RECIPES:
                yield {
                    **_mnist(scale, device, partition, recipe, seed),
                    "rounds": scale.softmax_rounds,
                }


def _dropouts(scale: Scale, device: str) -> Iterator[dict[str, Any]]:
    for seed in range(scale.dropout_seeds):
        for partition, rates in scale.dropout_rates:
            for rate in rates:
                for recipe in DROPOUT_RECIPES:
                    yield {
                        **_mnist(scale, device, partition, recipe, seed),
                        "rounds": scale.dropout_rounds,
                        "dropout": rate,
                        "eval_every": scale.dropout_eval_every,
                    }


def _network(scale: Scale, device: str) -> Iterator[dict[str, Any]]:
    for seed in range(scale.network_seeds):
        for partition in scale.network_splits:
            for recipe in NETWORK_RECIPES:
                if seed == 0 or recipe not in ONE_SEED:
                    yield {
                        **_mnist(scale, device, partition, recipe, seed),
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
