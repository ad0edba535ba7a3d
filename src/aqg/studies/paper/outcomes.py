"""What came of the runs: a row of numbers and a thinned curve each, kept as CSV files.

``results/README.md`` says what is in them. Tables and figures need nothing else.
"""

from __future__ import annotations

import csv
import json
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from aqg import __version__
from aqg.errors import RunError
from aqg.report.curves import thin_indices
from aqg.runs.config import RunConfig
from aqg.runs.cost import Cost
from aqg.runs.directory import CONFIG, Line, read_config, read_lines, read_summary
from aqg.runs.files import write_atomically
from aqg.runs.setup import minimum_key
from aqg.runs.stopping import Target, Trace, has_diverged
from aqg.runs.table import records_to_csv
from aqg.studies.paper.plan import BLOCKS, PlannedRun, Scale

RUN_DIRECTORY = "runs"
RUNS = "runs.csv"
CURVES = "curves.csv"
META = "about.json"
OTHER_MACHINES = "other-machines"
PERTURBED = "rounding.csv"
ROUNDING_SECTION = "rounding"
ROUNDING = 1e-12
"""A residual that is hardly more than the rounding of a loss of about 70."""
RESIDUALS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
CONVERGED = 1e-6
CURVE_POINTS = 48
_COST_FIELDS = ("rounds", "uploads", "bits_per_param", "upload_bytes", "download_bytes")
"""Columns of results; those of some runs have no downloads."""


@dataclass(frozen=True)
class Outcome:
    """One run's numbers; ``reached`` has what it cost to stay within a residual."""

    name: str
    section: str
    recipe: str
    partition: str
    scaling: str
    machine: str  # the kind of processor
    device: str
    alpha: float
    dropout: float
    seed: int
    minimum: float | None  # None where it is unknown
    start_loss: float
    final_loss: float  # infinity where the run diverged
    peak_loss: float  # the largest along the way
    test_accuracy: float | None
    total: Cost
    reached: Mapping[float, Cost] = field(default_factory=dict)

    @property
    def diverged(self) -> bool:
        return has_diverged(self.final_loss)

    @property
    def ran_away(self) -> bool:
        return not self.final_loss <= self.start_loss

    @property
    def converged(self) -> bool:
        return self.residual < CONVERGED

    @property
    def residual(self) -> float:
        return np.nan if self.minimum is None else self.final_loss - self.minimum


@dataclass(frozen=True)
class Perturbed:
    """A logistic run whose features differ in the last bit; ``draw`` 0 is the data as it is.

    It stands in for a machine that rounds sums in another order. The last bit can decide who
    uploads once the loss is as close to its minimum as rounding lets it; ``uploads_before`` counts
    until then.
    """

    partition: str
    recipe: str
    alpha: float
    draw: int
    uploads: int
    uploads_before: int
    bits_per_param: int
    residual: float

    @property
    def key(self) -> tuple[str, str, float, int]:
        return self.partition, self.recipe, self.alpha, self.draw

    @staticmethod
    def of(config: RunConfig, lines: Sequence[Line], summary: Mapping[str, Any]) -> Perturbed:
        residual = np.inf if summary["diverged"] else summary["residual"]
        minimum = -np.inf if summary["diverged"] else summary["final_loss"] - residual
        count = 0
        for record in (line.record for line in lines):
            if record.loss is not None and record.loss - minimum <= ROUNDING:
                break
            count += record.num_uploads
        uploads, bits = summary["uploads"], summary["bits_per_param"]
        return Perturbed(*key_of(config), uploads, count, bits, float(residual))


def key_of(config: RunConfig) -> tuple[str, str, float, int]:
    return config.partition, config.recipe, config.alpha, config.perturbation


@dataclass(frozen=True)
class Results:
    """All outcomes, and the curves that figures show; ``elsewhere`` has other processors'."""

    outcomes: tuple[Outcome, ...]
    curves: Mapping[str, Trace]  # thinned
    about: Mapping[str, Any]
    elsewhere: Mapping[str, tuple[Outcome, ...]] = field(default_factory=dict)
    perturbed: tuple[Perturbed, ...] = ()

    def select(self, **settings: object) -> list[Outcome]:
        wanted = settings.items()
        return [o for o in self.outcomes if all(getattr(o, k) == value for k, value in wanted)]

    @property
    def reading(self) -> tuple[str, float] | None:
        return main_reading(self.outcomes)

    def of_setting(self, setting: str, recipe: str) -> list[Outcome]:
        section, partition = BLOCKS[setting]
        found = self.select(section=section, partition=partition, recipe=recipe)
        if section == "logistic":
            shown = self.reading
            found = [o for o in found if (o.scaling, o.alpha) == shown]
        return found

    def cost_of(self, outcome: Outcome) -> Cost | None:
        """Return what the paper counts: all 500 rounds, or those until the residual is reached."""
        if outcome.section in ("logistic", "network"):
            return outcome.total
        kind = "dropout" if outcome.section == "dropouts" else "softmax"
        return outcome.reached.get(self.about[f"{kind}_residual"])

    def cost_to_the_end(self, outcome: Outcome) -> Cost | None:
        """Return `cost_of` runs that converge or reach their target; None for the others."""
        is_lost = outcome.diverged or (outcome.section == "logistic" and not outcome.converged)
        return None if is_lost else self.cost_of(outcome)


def collect(plan: Sequence[PlannedRun], directory: Path, about: Mapping[str, Any]) -> Results:
    """Read the finished runs of ``plan`` below ``directory``; the others are left out."""

    def loss_of(config: RunConfig) -> str:
        return json.dumps(minimum_key(config))

    summaries = [(run, read_summary(directory / run.name)) for run in plan]
    finished = [(run, summary) for run, summary in summaries if summary is not None]
    minima = {
        loss_of(run.config): summary["final_loss"] - summary["residual"]
        for run, summary in finished
        if summary["residual"] is not None
    }
    outcomes, curves, perturbed = [], {}, []
    versions: dict[str, dict[str, set[str]]] = {}
    for run, summary in finished:
        section, config, lines = run.section, run.config, read_lines(directory / run.name)
        if section == ROUNDING_SECTION:
            perturbed.append(Perturbed.of(config, lines, summary))
            continue
        final = np.inf if summary["diverged"] else summary["final_loss"]
        trace, minimum = Trace.of(lines, final), minima.get(loss_of(config))
        costs = {r: trace.cost_to(Target("residual", r), minimum) for r in RESIDUALS}
        made_by = dict(summary["versions"])
        machine = made_by.pop("machine")
        outcome = Outcome(
            name=run.name,
            section=section,
            **{key: getattr(config, key) for key in _OF_THE_CONFIG},
            machine=machine,
            minimum=minimum,
            start_loss=trace.losses[0],
            final_loss=final,
            peak_loss=max(trace.losses),
            test_accuracy=summary["test_accuracy"],
            total=trace.costs[-1],
            reached={residual: cost for residual, cost in costs.items() if cost is not None},
        )
        outcomes.append(outcome)
        curves[run.name] = thin(trace)
        place = versions.setdefault(f"{section}: {machine}", {})
        for library, version in made_by.items():
            place.setdefault(library, set()).add(version)
    shown = main_reading(outcomes)
    for o in outcomes:
        if o.section == "logistic" and (o.scaling, o.alpha) != shown:
            del curves[o.name]
    joined = {
        place: {library: " and ".join(sorted(several)) for library, several in rows.items()}
        for place, rows in versions.items()
    }
    about = {**about, "versions": joined}
    return Results(tuple(outcomes), curves, about, perturbed=tuple(perturbed))


_OF_THE_CONFIG = ("recipe", "partition", "scaling", "alpha", "dropout", "seed", "device")


def main_reading(outcomes: Sequence[Outcome]) -> tuple[str, float] | None:
    """Return the loss and ``α`` of the logistic runs that the paper's table is compared with.

    The paper names ``α = 0.008`` but not the loss's scaling, and its counts are those of runs near
    the edge of stability: with summed losses, the largest ``α`` at which QGD and LAQ converge on
    every seed and both splits, or else the smallest. None without logistic runs.
    """
    runs = [o for o in outcomes if o.section == "logistic"]
    alphas = sorted({o.alpha for o in runs if o.scaling == "sum"})
    if not alphas:
        return (runs[0].scaling, runs[0].alpha) if runs else None
    pair = [o for o in runs if o.scaling == "sum" and o.recipe in ("qgd", "laq")]
    lost = {o.alpha for o in pair if not o.converged}
    return "sum", max((alpha for alpha in alphas if alpha not in lost), default=alphas[0])


def thin(trace: Trace) -> Trace:
    losses = np.array(trace.losses, np.float64)
    kept = thin_indices(np.arange(len(losses), dtype=np.float64), losses, CURVE_POINTS)
    return Trace(tuple(trace.costs[i] for i in kept), tuple(losses[kept].tolist()), ())


def write_results(directory: Path, results: Results) -> None:
    rows: dict[str, Iterable[Mapping[str, Any]]] = {RUNS: map(_flat, results.outcomes)}
    if results.perturbed:
        rows[PERTURBED] = map(asdict, results.perturbed)
    for machine, outcomes in results.elsewhere.items():
        rows[f"{OTHER_MACHINES}/{machine}.csv"] = map(_flat, outcomes)
        (directory / OTHER_MACHINES).mkdir(exist_ok=True)
    rows[CURVES] = (
        {"name": name, **_columns(cost), "loss": f"{loss:.10g}"}
        for name, curve in results.curves.items()
        for cost, loss in zip(curve.costs, curve.losses, strict=True)
    )
    texts = {file: records_to_csv(list(own)) for file, own in rows.items()}
    texts[META] = json.dumps(results.about, indent=2, ensure_ascii=False) + "\n"
    for file, text in texts.items():
        write_atomically(directory / file, text.encode())


def read_results(directory: Path) -> Results:
    try:
        about = json.loads((directory / META).read_text(encoding="utf-8"))
        outcomes = _outcomes(directory / RUNS)
        points: dict[str, list[tuple[Cost, float]]] = {}
        for row in _rows(directory / CURVES):
            points.setdefault(row["name"], []).append((_cost(row), float(row["loss"])))
        others = sorted((directory / OTHER_MACHINES).glob("*.csv"))
        elsewhere = {path.stem: _outcomes(path) for path in others}
        rows = _rows(directory / PERTURBED) if (directory / PERTURBED).exists() else []
        perturbed = tuple(Perturbed(**_typed(Perturbed, row)) for row in rows)
    except OSError as error:
        raise RunError(
            f"{str(directory)!r} holds no results of aqg reproduce: {error.strerror} "
            f"({error.filename})"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"the results in {str(directory)!r} are damaged: {error}") from None
    curves = {
        name: Trace(tuple(cost for cost, _ in own), tuple(loss for _, loss in own), ())
        for name, own in points.items()
    }
    return Results(outcomes, curves, about, elsewhere, perturbed)


_COSTS = ("total", "reached")


def _flat(outcome: Outcome) -> dict[str, Any]:
    row = {key: value for key, value in vars(outcome).items() if key not in _COSTS}
    row |= _columns(outcome.total)
    for residual in RESIDUALS:
        row |= _columns(outcome.reached.get(residual), f"_to_{residual:g}")
    return row


def _columns(cost: Cost | None, suffix: str = "") -> dict[str, Any]:
    return {name + suffix: cost and getattr(cost, name) for name in _COST_FIELDS}


def _outcomes(path: Path) -> tuple[Outcome, ...]:
    found = []
    for row in _rows(path):
        ends = {residual: f"_to_{residual:g}" for residual in RESIDUALS}
        reached = {r: _cost(row, end) for r, end in ends.items() if row[f"rounds{end}"]}
        found.append(Outcome(**_typed(Outcome, row), total=_cost(row), reached=reached))
    return tuple(found)


def _typed(made: type, row: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a class, but for costs, from a row of texts."""
    readers: dict[object, Callable[[str], Any]] = {"str": str, "int": int}
    plain = [one for one in fields(made) if one.name not in _COSTS]
    return {one.name: readers.get(one.type, _number)(row[one.name]) for one in plain}


def _number(text: str) -> float | None:
    return float(text) if text else None


def _cost(row: Mapping[str, str], suffix: str = "") -> Cost:
    known = {name: row.get(name + suffix) for name in _COST_FIELDS}
    return Cost(**{name: int(text) for name, text in known.items() if text})


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def paired_ratios(
    ours: Sequence[Outcome],
    other: Sequence[Outcome],
    cost_of: Callable[[Outcome], Cost | None],
    name: str = "bits_per_param",
) -> list[float]:
    """Return our cost over the other's, seed by seed, where both have one."""
    by_seed = {outcome.seed: cost_of(outcome) for outcome in other}
    ratios = []
    for outcome in ours:
        left, right = cost_of(outcome), by_seed.get(outcome.seed)
        if left is not None and right is not None:
            ratios.append(getattr(left, name) / getattr(right, name))
    return ratios


def adopt_devices(plan: Sequence[PlannedRun], directory: Path) -> tuple[PlannedRun, ...]:
    """Let runs that were begun go on where they ran before."""

    def adopted(run: PlannedRun) -> PlannedRun:
        place = directory / RUN_DIRECTORY / run.name
        if not (place / CONFIG).exists():
            return run
        device = read_config(place).get("device", "cpu")
        return replace(run, config=replace(run.config, device=device))

    return tuple(map(adopted, plan))


def count_runs(plan: Sequence[PlannedRun], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return how many runs of each section are finished, of how many, and what made them."""
    planned = Counter(run.section for run in plan if run.section != ROUNDING_SECTION)
    finished = Counter(outcome.section for outcome in outcomes)
    return {
        "finished": {section: [finished[section], planned[section]] for section in planned},
        "made_on": sorted({f"{o.section}: {o.machine}, {o.device}" for o in outcomes}),
    }


def keep(plan: Sequence[PlannedRun], scale: Scale, directory: Path) -> Results:
    plan = adopt_devices(plan, directory)
    devices = sorted({run.config.device for run in plan})
    versions = {"aqg": __version__, "python": platform.python_version(), "numpy": np.__version__}
    about = versions | {"devices": devices, **scale}
    results = collect(plan, directory / RUN_DIRECTORY, about)
    results = replace(results, about={**results.about, **count_runs(plan, results.outcomes)})
    write_results(directory, results)
    return results


def missing_from(directory: Path, plan: Sequence[PlannedRun]) -> tuple[PlannedRun, ...]:
    results = read_results(directory)
    here = {outcome.name for outcome in results.outcomes} | {one.key for one in results.perturbed}

    def key(run: PlannedRun) -> object:
        return key_of(run.config) if run.section == ROUNDING_SECTION else run.name

    return tuple(run for run in plan if key(run) not in here)
