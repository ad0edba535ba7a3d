"""One trial without the command line: for machines that have PyTorch and NumPy, and little else.

from aqg.studies.contest.headless import run_trial
outcome = run_trial("digits-local", "auto", seed=0)
Records(DIRECTORY / "trials.jsonl").add(outcome.to_json())    # aqg.runs.files.Records
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

from aqg.runs.directory import read_summary
from aqg.runs.loop import create_run, run
from aqg.runs.setup import build_problem, find_minimum
from aqg.runs.stopping import Target
from aqg.studies.contest.plan import Outcome, Trial, make_config
from aqg.studies.contest.search import Setting, default_setting
from aqg.studies.contest.tasks import select_tasks


def run_trial(
    task: str,
    recipe: str,
    setting: Setting | None = None,
    seed: int = 0,
    device: str = "cpu",
    data_dir: Path | None = None,
    target: Target | None = None,
    rounds: int | None = None,
) -> Outcome:
    """Run one trial of a comparison, and return what came of it.

    Args:
        task: its name.
        recipe: its name.
        setting: the recipe as it is by default; ``Setting("fedavg", multiplier=SELF_SETTING)`` is
            federated averaging with our step.
        seed: of the run.
        device: where to compute the larger tasks; the small ones always run on the CPU.
        data_dir: where datasets are kept.
        target: with which the run ends; without one it goes to the task's last round, as those of
            federated averaging and `auto` do. A task with a fixed target has its own.
        rounds: fewer than the task has, to try it out.

    >>> outcome = run_trial("digits-local", "fedavg", rounds=2)
    >>> outcome.ending, outcome.curve.num_rounds
    ('rounds', 2)

    """
    (chosen,) = select_tasks([task])
    trial = Trial(task, recipe, setting or default_setting(recipe, chosen), seed)
    config = make_config(trial, chosen, target, device=device)
    if rounds is not None:
        config = replace(config, rounds=rounds, eval_every=1)
    problem = build_problem(config, data_dir)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        create_run(directory, config)
        minimum = find_minimum(config, problem) if chosen.goal.kind == "residual" else None
        run(config, problem, minimum, directory, keeps_models=False)
        summary = read_summary(directory)
    assert summary is not None, "a run that is over leaves a summary"
    return Outcome.of_run(trial, summary, time.monotonic() - started)
