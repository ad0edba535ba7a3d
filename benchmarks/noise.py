"""How noisy are updates, task by task: the ratio ν that the default recipe goes by.

    python benchmarks/noise.py [--rounds 40] [TASK …]

prints, for every task of ``aqg compare`` with local training, the smallest and the largest ν of
its clients after 10 rounds and at the end, and how many of them count as noisy then. Exact
gradients are not measured: they hold no noise.
"""

from __future__ import annotations

import argparse

import numpy as np

from aqg.core.dropouts import BernoulliDropout
from aqg.core.recipes import make_recipe
from aqg.runs.setup import build_problem
from aqg.sim.engine import FastSimulation
from aqg.studies.compare.tasks import TASKS, select_tasks


def notes_of(simulation):
    """Return what each client's meter has noted."""
    return simulation.state().clients.stages["noise"]["notes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    local = [name for name, task in TASKS.items() if task.is_local]
    parser.add_argument("tasks", nargs="*", default=local, metavar="TASK")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    recipe = make_recipe("auto")
    assert recipe.switch is not None
    meter = recipe.switch.meter
    print(f"{'task':26}{'ν after 10 rounds':>22}{f'after {options.rounds}':>22}   noisy")
    for task in select_tasks(options.tasks):
        if not task.is_local:
            parser.error(f"{task.name} has exact gradients, which are not measured")
        simulation = FastSimulation(
            build_problem(task.config),
            recipe,
            task.config.alpha,
            BernoulliDropout(task.dropout, seed=0),
            training=task.config.training(),
        )
        columns = []
        for number in range(1, options.rounds + 1):
            simulation.run_round(evaluate=False)
            if number in (10, options.rounds):
                ratios = [meter.ratio(notes) for notes in notes_of(simulation)]
                columns.append(f"{min(ratios):.2g} – {max(ratios):.2g}")
        noisy = np.mean([meter.is_noisy(notes) for notes in notes_of(simulation)])
        print(f"{task.name:26}{columns[0]:>22}{columns[-1]:>22}   {noisy:.0%}", flush=True)


if __name__ == "__main__":
    main()
