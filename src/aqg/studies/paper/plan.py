"""The paper's Table 2, and the runs that repeat it: at its lengths, or shortened for a laptop."""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
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


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


_PLAN = tomllib.loads(resources.files(__package__).joinpath("plan.toml").read_text("utf-8"))
TABLE_2 = tuple(PaperRow(*row) for row in _PLAN["table_2"])
FULL, QUICK = (
    Scale(**{name: _tuples(value) for name, value in _PLAN[scale].items()})
    for scale in ("full", "quick")
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
    plan = []
    for section in (*_ON_MNIST, "logistic", "rounding"):
        for settings in _settings(scale, section) if section in sections else ():
            if section in _ON_MNIST:
                settings |= {"dataset": "mnist", "dtype": scale.dtype, "device": device}
            (config,) = resolve({"downlink": "full", "start": "digest", **settings})
            name = f"{section}_{config.partition.replace(':', '-')}"
            if section not in _ON_MNIST:
                name += f"_{config.scaling}-{config.alpha:g}"
            if section == "dropouts":
                name += f"_p{config.dropout:g}"
            name += f"_{config.recipe}_seed{config.seed}"
            if section == "rounding":
                name += f"_draw{config.perturbation}"
            plan.append(PlannedRun(section, Job(name, config)))
    return tuple(plan)


_ON_MNIST = ("softmax", "network", "dropouts")


def _settings(scale: Scale, section: str) -> Iterator[dict[str, Any]]:
    both: list[dict[str, Any]] = [{"partition": "iid"}, {"partition": "label"}]
    recipes: tuple[str, ...] = TABLE_RECIPES
    draws = 1
    match section:
        case "softmax":
            seeds, cells = scale.softmax_seeds, both
            fixed: dict[str, Any] = {"rounds": scale.softmax_rounds}
        case "network":
            seeds, recipes = scale.network_seeds, NETWORK_RECIPES
            cells = [{"partition": partition} for partition in scale.network_splits]
            fixed = {"model": "mlp:200", "rounds": scale.network_rounds}
        case "dropouts":
            seeds, recipes = scale.dropout_seeds, DROPOUT_RECIPES
            pairs = [(split, rate) for split, rates in scale.dropout_rates for rate in rates]
            cells = [{"partition": split, "dropout": rate} for split, rate in pairs]
            fixed = {"rounds": scale.dropout_rounds, "eval_every": scale.dropout_eval_every}
        case _:
            seeds, readings = scale.logistic_seeds, scale.readings
            if section == "rounding":
                seeds, recipes, draws = 1, PERTURBED_RECIPES, scale.perturbations + 1
                readings = tuple(("sum", alpha) for alpha in scale.perturbed_alphas)
            cells = [
                {"partition": partition, "scaling": scaling, "alpha": alpha}
                for partition in ("iid", BY_SOURCE)
                for scaling, alpha in readings
            ]
            fixed = {"dataset": "heterogeneous", "rounds": scale.logistic_rounds}
    for seed, cell, recipe in product(range(seeds), cells, recipes):
        if section == "network" and seed and recipe in ONE_SEED:
            continue
        for draw in range(draws):  # the first is on the data itself
            yield {**cell, **fixed, "recipe": recipe, "seed": seed, "perturbation": draw}
