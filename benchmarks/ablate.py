"""What every number of the default is worth: training without it, on tasks of the contest.

    python benchmarks/ablate.py [--tasks digits-local,watch,…] [--rows first,ratio,…] [--seeds 3]
                                [--device cpu] [--out FILE.jsonl]

A row is the default with one number removed: set to 0, 1 or infinity, whichever means that it is
not there. For each task and seed it is run for all of federated averaging's rounds. Printed are its
rounds and bytes until federated averaging's plateau less one point (every byte counted, as in
``aqg compare``), over those of the default, and the difference of the plateaus in points.
A number stays in the default if removing it costs more than 5 % of rounds or bytes on two tasks.

A task named ``digits-local@60`` begins with the model of 60 rounds of federated averaging, as one
does that was trained before.

Targets come from the stored runs of federated averaging in ``results/``. FILE gets a line per run,
and runs that are there already are not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from aqg.core import auto, downlink
from aqg.runs.cost import Meter, running_totals
from aqg.runs.setup import build_problem, follow_target, make_simulation
from aqg.sim.engine import FastSimulation
from aqg.start import pack, unpack
from aqg.studies.contest.measure import PLATEAU, Curve, make_reference, plateau_of
from aqg.studies.contest.plan import read_outcomes
from aqg.studies.contest.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Iterator

RESULTS = Path(__file__).parents[1] / "results"
STORED = ("swap-in-compare", "swap-in-mnist", "swap-in-large", "swap-in-unseen")
TASKS_HERE = ("digits-local", "heart", "watch", "local-dirichlet", "sampled-dirichlet")
STEP = {"average": auto.AVERAGE, "first": auto.FIRST, "widest": auto.LONGEST_FIRST}


@dataclass(frozen=True)
class Row:
    """One number, removed: options of the step and the downlink, or constants of modules."""

    what: str
    step: dict[str, float] = field(default_factory=dict)
    downlink: str = auto.DOWNLINK
    recipe: str = "auto"
    constants: tuple[tuple[Any, str, Any], ...] = ()


def approximate(bits: int) -> tuple[tuple[Any, str, Any], ...]:
    """Let every sampled client train from a rounded model, where it is shorter than the exact one.

    What travels is the difference to the copy that the client has from before.
    """
    deliver, held = FastSimulation._deliver, {}

    def _deliver(self: Any, present: Any) -> Any:
        params, layout = self.parameters, self.problem.objective.layout
        positions = self.log.positions.copy()
        found, received = deliver(self, present)
        if self.next_round == 1:
            held.clear()
        for m in present.tolist():
            before = held.get(m, self.log.start)
            frame = pack(params - before, layout, "rounded", bits=bits)
            held[m] = params
            if len(frame) < received[m]:
                held[m] = before + unpack(frame, len(params), params.dtype)
                received[m], self.log.positions[m] = len(frame), positions[m]
        return found, received

    def _train(self: Any, block: Any) -> Any:
        found = [
            self.space.local_updates(
                self.training.local, held[m], np.array([m]), [(self.seed, m, self.next_round)]
            )
            for m in block.tolist()
        ]
        return tuple(np.concatenate(part) for part in zip(*found, strict=True))

    return ((FastSimulation, "_deliver", _deliver), (FastSimulation, "_train", _train))


ROWS = {
    "default": Row("as it is"),
    "draws": Row("draws from clients that are always there, too", recipe="auto:share=0"),
    "share": Row("signs of all coordinates, and the rest of each is kept", recipe="auto:share=1"),
    "most-of-it": Row("nine tenths of the energy, not three quarters", recipe="auto:share=0.9"),
    "half": Row("half of the energy", recipe="auto:share=0.5"),
    "walk": Row(
        "what is not sent is kept, even where the model gets nowhere",
        constants=((auto.Budget, "while_steady", lambda *_: auto.Budget()),),
    ),
    "noise": Row("ν = 4: less is sent, with four times the noise", recipe="auto:noise=4"),
    "agreement": Row(
        "b = 1 in every round, however much uploads agree",
        constants=((auto.Budget, "after", lambda self, *_: self),),
    ),
    "first": Row("first step not bounded by the model's length", {"first": 1e9}),
    "widest": Row("first step not bounded by averaging's", {"widest": 1e9}),
    "start": Row("first step is averaging's", {"first": 1e9, "widest": 1.0}),
    "average": Row("no mean over the last models", {"average": 0.0}),
    "ratio": Row("entries as long as a mean upload", downlink="condensed:ratio=1:away=0.5"),
    "away": Row("entries as long, however few are asked", downlink="condensed:ratio=0.5"),
    "fewest": Row(
        "no least number of coordinates in an entry", constants=((downlink, "_FEWEST", 1),)
    ),
    "whole": Row(
        "one magnitude for all coordinates of an entry, however many",
        constants=((downlink, "_MANY", math.inf),),
    ),
    "rounded-2": Row(
        "sampled clients train from a model in 2 bits, where that is shorter",
        constants=approximate(2),
    ),
    "rounded-4": Row("likewise in 4 bits", constants=approximate(4)),
    "rounded-2-long": Row(
        "likewise in 2 bits, with entries as long, however few are asked",
        downlink="condensed:ratio=0.5",
        constants=approximate(2),
    ),
    "lean": Row("the other regime: mirrors and tolerance for noisy updates", recipe="lean"),
}


@contextmanager
def patched(row: Row) -> Iterator[None]:
    """Set constants for as long as the context is open."""
    before = [(place, name, getattr(place, name)) for place, name, _ in row.constants]
    for place, name, value in row.constants:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


def run(task: str, row: Row, seed: int, device: str, data_dir: Path | None) -> Curve:
    """Train for all rounds of a task, and return the curve on its validation set."""
    task, _, before = task.partition("@")
    config = TASKS[task].config
    step = ":".join(["dog", *(f"{name}={value}" for name, value in {**STEP, **row.step}.items())])
    is_auto = row.recipe.startswith("auto")
    config = replace(
        config,
        recipe=row.recipe,
        seed=seed,
        device=device,
        step=step if is_auto else "auto",
        downlink=row.downlink if is_auto else "auto",
    )
    problem = build_problem(config, data_dir)
    if before:
        averaging = make_simulation(replace(TASKS[task].config, seed=seed), problem)
        for _ in range(int(before)):
            averaging.run_round(evaluate=False)
        problem = replace(problem, initial_params=averaging.parameters)
    with patched(row):
        simulation = make_simulation(config, problem)
        validate = follow_target(config, simulation)
        values, records = [validate()], []
        meter = Meter(problem.start_bytes, config.training())
        for _ in range(config.rounds):
            records.append(meter.charge(simulation.run_round(evaluate=False)))
            values.append(validate())
    return Curve(tuple(values), tuple(running_totals(records)))


def goal_of(task: str, seed: int) -> tuple[Any, float]:
    """Return federated averaging's target on a task and seed, and its plateau."""
    task = task.partition("@")[0]
    curves = [
        outcome.curve
        for folder in STORED
        for trial, outcome in read_outcomes(RESULTS / folder).items()
        if (trial.task, trial.recipe, trial.seed) == (task, "fedavg", seed)
    ]
    reference = make_reference(TASKS[task].goal, curves)
    if reference is None or reference.plateau is None:
        raise SystemExit(f"no run of federated averaging on {task} with seed {seed} is stored")
    return reference.targets[PLATEAU], reference.plateau


def ratio(ours: float | None, theirs: float | None) -> str:
    """Write how much more one takes than another."""
    if theirs is None or ours is None:
        return "-" if theirs is None else "never"
    return f"{ours / theirs:.2f}"


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--tasks", default="digits-local,heart,watch,local-dirichlet,sampled-dirichlet"
    )
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("AQG_DATA_DIR"))
    parser.add_argument("--out", type=Path, default=RESULTS / "ablation.jsonl")
    options = parser.parse_args()
    stored: dict[tuple[str, str, int], Curve] = {}
    if options.out.exists():
        for line in options.out.read_text().splitlines():
            found = json.loads(line)
            stored[found["task"], found["row"], found["seed"]] = Curve.from_json(found["curve"])
    for task in options.tasks.split(","):
        print(f"\n{task}: rounds and bytes over the default's, plateau in points")
        for name in dict.fromkeys(["default", *options.rows.split(",")]):
            cells = []
            for seed in range(options.seeds):
                key = task, name, seed
                if key not in stored:
                    curve = run(task, ROWS[name], seed, options.device, options.data_dir)
                    curve = replace(curve, values=tuple(float(f"{v:.6g}") for v in curve.values))
                    stored[key] = curve
                    row = {"task": task, "row": name, "seed": seed, "curve": curve.to_json()}
                    with options.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                goal, plateau = goal_of(task, seed)
                ours, base = (stored[task, n, seed].reach(goal) for n in (name, "default"))
                rounds = TASKS[task.partition("@")[0]].config.rounds
                cells.append(
                    f"{ratio(ours and ours.rounds, base and base.rounds)} "
                    f"{ratio(ours and ours.total_bytes, base and base.total_bytes)} "
                    f"{100 * (plateau_of(stored[key], rounds) - plateau):+.1f}"
                )
            print(f"  {name:10} {ROWS[name].what:58} {' | '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
