"""The paper's Table 2, and the runs that repeat it: at its lengths, or shortened for a laptop."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import product
from typing import Any, NamedTuple, TypeAlias

from aqg.errors import ConfigError
from aqg.runs.config import resolve
from aqg.runs.plan import Job

SECTIONS = ("logistic", "rounding", "softmax", "dropouts", "network")
CHOICES = {"table2": ("logistic", "softmax"), **{section: (section,) for section in SECTIONS}}
"""What ``--only`` takes, and the sections it stands for."""

TABLE_RECIPES: tuple[str, ...] = ("aqg-2", "aqg", "laq", "qgd", "gd", "lean", "auto")
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


Scale: TypeAlias = Mapping[str, Any]
"""How long and how often everything is run: a table of ``plan.toml``, kept with the results."""
_PLAN = tomllib.loads(resources.files(__package__).joinpath("plan.toml").read_text("utf-8"))
TABLE_2 = tuple(PaperRow(*row) for row in _PLAN["table_2"])
FULL, QUICK = _PLAN["full"], _PLAN["quick"]


@dataclass(frozen=True)
class PlannedRun(Job):
    section: str = field(kw_only=True)


def parse_sections(text: str | None) -> tuple[str, ...]:
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
                settings |= {"dataset": "mnist", "dtype": scale["dtype"], "device": device}
            (config,) = resolve({"downlink": "full", "start": "digest", **settings})
            name = f"{section}_{config.partition.replace(':', '-')}"
            if section not in _ON_MNIST:
                name += f"_{config.scaling}-{config.alpha:g}"
            if section == "dropouts":
                name += f"_p{config.dropout:g}"
            name += f"_{config.recipe}_seed{config.seed}"
            if section == "rounding":
                name += f"_draw{config.perturbation}"
            plan.append(PlannedRun(name, config, section=section))
    return tuple(plan)


_ON_MNIST = ("softmax", "network", "dropouts")


def _settings(scale: Scale, section: str) -> Iterator[dict[str, Any]]:
    kind = {"dropouts": "dropout", "rounding": "logistic"}.get(section, section)
    seeds, fixed = scale[f"{kind}_seeds"], {"rounds": scale[f"{kind}_rounds"]}
    recipes, draws = TABLE_RECIPES, 1
    cells: list[dict[str, Any]] = [{"partition": "iid"}, {"partition": "label"}]
    match section:
        case "network":
            recipes, fixed = NETWORK_RECIPES, fixed | {"model": "mlp:200"}
            cells = [{"partition": partition} for partition in scale["network_splits"]]
        case "dropouts":
            recipes, fixed = DROPOUT_RECIPES, fixed | {"eval_every": scale["dropout_eval_every"]}
            pairs = [(split, rate) for split, rates in scale["dropout_rates"] for rate in rates]
            cells = [{"partition": split, "dropout": rate} for split, rate in pairs]
        case "logistic" | "rounding":
            readings, fixed = scale["readings"], fixed | {"dataset": "heterogeneous"}
            if section == "rounding":
                seeds, recipes, draws = 1, PERTURBED_RECIPES, scale["perturbations"] + 1
                readings = [("sum", alpha) for alpha in scale["perturbed_alphas"]]
            cells = [
                {"partition": partition, "scaling": scaling, "alpha": alpha}
                for partition, (scaling, alpha) in product(("iid", BY_SOURCE), readings)
            ]
    for seed, cell, recipe in product(range(seeds), cells, recipes):
        if section == "network" and seed and recipe in ONE_SEED:
            continue
        for draw in range(draws):  # the first is on the data itself
            yield {**cell, **fixed, "recipe": recipe, "seed": seed, "perturbation": draw}
