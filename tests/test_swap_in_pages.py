"""The tables of README and of the pages on swapping in are those of the stored runs."""

import sys
from pathlib import Path

import pytest

from aqg.errors import DataError
from aqg.runs.files import Records
from aqg.runs.setup import build_problem
from aqg.studies.contest.plan import Outcome, Trial, read_outcomes
from aqg.studies.contest.search import FEDAVG, FORMER_STEP, SELF_SETTING, Setting
from aqg.studies.contest.tasks import TASKS

from tests.studies.contest.trials import run_trial

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import readme  # noqa: E402

FORMER_DEFAULT = ROOT / "results/former-default.jsonl"


@pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_runs(page):
    text = page.read_text(encoding="utf-8")
    assert "<!-- table: " in text
    assert readme.refreshed(page) == text


def test_the_readme_has_one_table_with_every_task_that_was_run():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("<!-- table: ") == 1
    names = [row[0].partition(":")[0] for row in readme.field_table().rows]
    measured = [task for task in TASKS.values() if task.goal.target is None]
    assert {task.name for task in measured if not task.is_hold_out} <= set(names)
    assert set(readme.NUM_PARAMS) == {task.name for task in measured}


def test_the_best_of_the_field_is_the_cheapest_that_several_seeds_show():
    from tests.studies.contest.test_plan import averaging, cells_of, outcome

    found = averaging()
    for recipe, size, seeds in (("stc", 2, 1), ("qsgd", 3, 3), ("topk", 5, 3), ("auto", 1, 3)):
        setting = Setting(recipe, multiplier=0.0)
        found += [outcome(recipe, setting, seed, 4, size=size) for seed in range(seeds)]
    best = readme.best_of_the_field(cells_of(found, "stc,qsgd,topk,auto").values())
    assert best is not None
    assert best.recipe == "qsgd"


@pytest.mark.parametrize("name", ["digits-local", "heart", "watch", "unseen-synthetic"])
def test_the_readme_counts_parameters_as_they_are(name, data_dir):
    try:
        problem = build_problem(TASKS[name].config, data_dir)
    except DataError as error:
        pytest.skip(str(error))
    assert len(problem.initial_params) == readme.NUM_PARAMS[name]


def test_stored_bytes_are_those_of_a_run_today():
    stored = read_outcomes(readme.SMALL)[Trial("digits-local", FEDAVG, Setting(FEDAVG), 0)]
    fresh = run_trial("digits-local", FEDAVG, Setting(FEDAVG), rounds=3)
    assert fresh.curve.total_bytes == pytest.approx(stored.curve.total_bytes[:4], rel=0.01)


@pytest.mark.soak
def test_a_stored_result_comes_out_again():
    """The whole run, as stored: what it learns and what it sends, on another processor as well."""
    trial = Trial("digits-local", "auto", Setting("auto", multiplier=SELF_SETTING), 0)
    stored = read_outcomes(readme.SMALL)[trial].curve
    fresh = run_trial(trial.task, trial.recipe, trial.setting).curve
    assert fresh.total_bytes == pytest.approx(stored.total_bytes, rel=0.01)
    assert fresh.values == pytest.approx(stored.values, abs=0.02)


def test_runs_of_the_former_default_are_kept_apart():
    former = [Outcome.from_json(row) for row in Records(FORMER_DEFAULT).read()]
    assert {one.trial.recipe for one in former} == {"auto"}
    assert len({(one.trial.task, one.trial.seed) for one in former}) == len(former) == 65
    for folder in (readme.SMALL, readme.MNIST, readme.LARGE):
        for trial in read_outcomes(folder):
            is_former = trial.setting.multiplier == FORMER_STEP
            assert not (is_former and trial.recipe in (FEDAVG, "auto"))
