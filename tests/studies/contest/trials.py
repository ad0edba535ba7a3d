"""One run of the contest, without the command line."""

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
    """Run one trial without a comparison; it ends at ``target``, or where its task does."""
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
