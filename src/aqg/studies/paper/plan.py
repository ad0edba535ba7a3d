"""The paper's Table 2, and the runs that repeat it: at its lengths, or shortened for a laptop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from aqg.errors import ConfigError
from aqg.runs.config import resolve
from aqg.runs.plan import Job

SECTIONS = ("logistic", "rounding", "softmax", "dropouts", "network")
CHOICES = {"table2": ("logistic", "softmax"), **{section: (section,) for section in SECTIONS}}
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

BLOCKS = {
    "logistic-iid": ("logistic", "iid"),
    "logistic-noniid": ("logistic", BY_SOURCE),
    "network-iid": ("softmax", "iid"),
    "network-noniid": ("softmax", "label"),
}
"""The four blocks of Table 2, "Performance comparison", and the section and split of our runs for
each. The paper's Table 1 is its notation."""
PAPER_RESIDUAL = 1e-6
"""Where the paper counts the costs of its network rows; the logistic ones are of 500 rounds."""


class PaperRow(NamedTuple):
    """A row of Table 2: "Iteration #", "Communication #", "Bit #", "Transmission Reduction".

    Bits are bits per parameter over all uploads, and the reduction is against LAQ.
    """

    setting: str
    recipe: str
    rounds: int
    uploads: int
    bits: int
    saving: float | None = None


TABLE_2 = (
    PaperRow("logistic-iid", "aqg-2", 500, 3933, 7952, 0.41),
    PaperRow("logistic-iid", "aqg", 500, 4372, 8372, 0.38),
    PaperRow("logistic-iid", "laq", 500, 3354, 13400, 0.0),
    PaperRow("logistic-iid", "qgd", 500, 9000, 36000),
    PaperRow("logistic-noniid", "aqg-2", 500, 4870, 15400, 0.51),
    PaperRow("logistic-noniid", "aqg", 500, 8273, 17800, 0.43),
    PaperRow("logistic-noniid", "laq", 500, 7842, 31400, 0.0),
    PaperRow("logistic-noniid", "gd", 500, 9000, 288000),
    PaperRow("network-iid", "aqg-2", 2713, 854, 1708, 0.34),
    PaperRow("network-iid", "aqg", 2881, 974, 1928, 0.25),
    PaperRow("network-iid", "laq", 2784, 643, 2572, 0.0),
    PaperRow("network-iid", "qgd", 2890, 28900, 116000),
    PaperRow("network-noniid", "aqg-2", 1319, 1030, 2060, 0.44),
    PaperRow("network-noniid", "aqg", 1702, 977, 1845, 0.49),
    PaperRow("network-noniid", "laq", 2219, 921, 3684, 0.0),
    PaperRow("network-noniid", "qgd", 1251, 12510, 50040),
)


@dataclass(frozen=True)
class Scale:
    """How long and how often everything is run."""

    readings: tuple[tuple[str, float], ...]  # loss scaling and step size of the logistic runs
    logistic_seeds: int  # a seed is a way to deal the samples to the clients
    perturbed_alphas: tuple[float, ...]  # of logistic runs that are repeated with perturbed data
    perturbations: int
    dtype: str  # of runs on MNIST
    softmax_rounds: int  # of the runs behind the network rows of the paper's table
    softmax_residual: float  # where these are measured
    softmax_seeds: int  # a seed is a start and, IID, a way to deal the samples
    dropout_rounds: int
    dropout_residual: float
    dropout_rates: tuple[tuple[str, tuple[float, ...]], ...]  # for each split
    dropout_seeds: int
    dropout_eval_every: int
    network_rounds: int  # of the 784-200-10 runs
    network_splits: tuple[str, ...]
    network_seeds: int  # of all but `ONE_SEED`
    logistic_rounds: int = 500
    notes: tuple[str, ...] = ()  # what was shortened, in words


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


class PlannedRun(NamedTuple):
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
    mnist = {"dataset": "mnist", "dtype": scale.dtype, "device": device}
    return tuple(
        _planned(section, (mnist if section in _ON_MNIST else {}) | settings)
        for section in (*_ON_MNIST, "logistic", "rounding")
        if section in sections
        for settings in _settings(scale, section)
    )


_ON_MNIST = ("softmax", "network", "dropouts")


def _planned(section: str, settings: dict[str, Any]) -> PlannedRun:
    (config,) = resolve({"downlink": "full", "start": "digest", **settings})
    name = f"{section}_{config.partition.replace(':', '-')}"
    if section not in _ON_MNIST:
        name += f"_{config.scaling}-{config.alpha:g}"
    if section == "dropouts":
        name += f"_p{config.dropout:g}"
    name += f"_{config.recipe}_seed{config.seed}"
    if section == "rounding":
        name += f"_draw{config.perturbation}"
    return PlannedRun(section, Job(name, config))


def _settings(scale: Scale, section: str) -> Iterator[dict[str, Any]]:
    both: tuple[dict[str, Any], ...] = ({"partition": "iid"}, {"partition": "label"})
    recipes: tuple[str, ...] = TABLE_RECIPES
    match section:
        case "softmax":
            seeds, cells = scale.softmax_seeds, both
            fixed: dict[str, Any] = {"rounds": scale.softmax_rounds}
        case "network":
            seeds, recipes = scale.network_seeds, NETWORK_RECIPES
            cells = tuple({"partition": partition} for partition in scale.network_splits)
            fixed = {"model": "mlp:200", "rounds": scale.network_rounds}
        case "dropouts":
            seeds, recipes = scale.dropout_seeds, DROPOUT_RECIPES
            cells = tuple(
                {"partition": partition, "dropout": rate}
                for partition, rates in scale.dropout_rates
                for rate in rates
            )
            fixed = {"rounds": scale.dropout_rounds, "eval_every": scale.dropout_eval_every}
        case _:
            is_moved = section == "rounding"
            seeds = 1 if is_moved else scale.logistic_seeds
            recipes = PERTURBED_RECIPES if is_moved else TABLE_RECIPES
            moved = tuple(("sum", alpha) for alpha in scale.perturbed_alphas)
            cells = tuple(
                {"partition": partition, "scaling": scaling, "alpha": alpha}
                for partition in ("iid", BY_SOURCE)
                for scaling, alpha in (moved if is_moved else scale.readings)
            )
            fixed = {"dataset": "heterogeneous", "rounds": scale.logistic_rounds}
    for seed, cell, recipe in product(range(seeds), cells, recipes):
        if section == "network" and seed and recipe in ONE_SEED:
            continue
        # Of moved data, the first run is on the data itself.
        for draw in range(scale.perturbations + 1 if section == "rounding" else 1):
            yield {**cell, **fixed, "recipe": recipe, "seed": seed, "perturbation": draw}
