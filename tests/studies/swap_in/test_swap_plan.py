"""Federated averaging first, then everyone else against it, and nothing twice."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from aqg.errors import ConfigError, DataError, RunError
from aqg.studies.compare.ladders import Ladder, next_points
from aqg.studies.compare.trial import SELF_SETTING, Setting
from aqg.studies.swap_in.comparison import (
    SwapIn,
    create_swap_in,
    is_swap_in,
    open_swap_in,
)
from aqg.studies.swap_in.plan import TARGETS, SwapPlan, forget, read_outcomes
from aqg.studies.swap_in.results import write_results
from aqg.studies.swap_in.search import FEDAVG, ladders_of, make_setting, parse_swap_recipes
from aqg.studies.swap_in.table import make_cells
from aqg.studies.swap_in.tasks import (
    SWAP_TASKS,
    available,
    parse_swap_tasks,
    select_swap_tasks,
)

TASK = select_swap_tasks(["digits-local"])[0]
TASK = replace(TASK, config=replace(TASK.config, rounds=40))


def summary(half, size, rounds=50, top=0.9, ending="reached"):
    """What a run of so many rounds leaves, which has half of its way behind after ``half``."""
    values = [top * (1 - 0.5 ** (k / half)) for k in range(rounds + 1)]
    curve = {"values": values, "bytes": [size * k for k in range(rounds + 1)], "tests": []}
    return {"curve": curve, "outcome": {"ending": ending}, "diverged": False}


def answer(job):
    """Federated averaging is best at four times its step; others cost and take what they like."""
    setting = job.trial.setting
    if job.trial.recipe == FEDAVG:
        top = 0.9 - 0.02 * abs(setting.multiplier - 4)
        return summary(8 / setting.multiplier, 1000, job.config.rounds, top=top)
    half = {"stc": 2.0, "qsgd": 8.0}.get(job.trial.recipe, 2.2)
    return summary(half, 3 if "0.003" in setting.spec else 5, job.config.rounds)


def run_all(plan):
    jobs = []
    while (job := plan.next()) is not None:
        jobs.append(job)
        plan.take(job, answer(job))
    return jobs


def test_federated_averaging_comes_first_and_its_search_goes_on(tmp_path):
    comparison = SwapIn((TASK,), parse_swap_recipes("stc,auto"), seeds=2, search=True)
    plan = SwapPlan(comparison, tmp_path)
    first = [plan.next() for _ in range(3)]
    assert [str(job.trial.setting) for job in first] == [
        "fedavg",
        "fedavg, step ×2",
        "fedavg, step ×4",
    ]
    assert plan.next() is None  # its target is not known yet
    assert all(job.config.target is None and job.config.rounds == 40 for job in first)
    assert plan.note(first[0]).ceiling == float("inf")
    for job in first:
        plan.take(job, answer(job))
    further = plan.next()
    assert further.trial.setting == Setting(FEDAVG, multiplier=8)  # four times was the edge
    plan.take(further, answer(further))
    later = run_all(plan)
    recipes = [job.trial.recipe for job in later]
    assert recipes.index("auto") > max(k for k, name in enumerate(recipes) if name == FEDAVG)
    written = json.loads((tmp_path / TARGETS).read_text())[TASK.name]
    ours = next(job for job in later if job.trial.recipe == "auto" and job.trial.seed == 1)
    goals = written["seed 1"]["goals"]
    assert ours.config.target == max(goal["accuracy"] for goal in goals.values())
    assert ours.config.rounds == 50
    assert ours.config.step == "auto"
    assert ours.trial.setting.multiplier == SELF_SETTING
    assert plan.most_left() == 0


def test_its_search_goes_on_while_the_longest_step_gets_there_first(tmp_path):
    def best_at_twice(job):
        """The best plateau is inside what was tried, and all steps but 32 reach it, the faster."""
        multiplier = job.trial.setting.multiplier
        top = {2: 0.9, 32: 0.5}.get(multiplier, 0.895)
        return summary(8 / multiplier, 1000, job.config.rounds, top=top)

    comparison = SwapIn((TASK,), parse_swap_recipes("auto"), seeds=2)
    plan, averaging = SwapPlan(comparison, tmp_path), []
    while (job := plan.next()) is not None and job.trial.recipe == FEDAVG:
        averaging.append((job.trial.seed, job.trial.setting.multiplier))
        plan.take(job, best_at_twice(job))
    assert averaging == [(0, 1), (0, 2), (0, 4), (0, 8), (0, 16), (0, 32), (1, 2), (1, 16)]
    assert job.trial.recipe == "auto"


def test_it_goes_on_where_it_stopped(tmp_path):
    comparison = SwapIn((TASK,), parse_swap_recipes("stc,qsgd"), seeds=2, search=True)
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = {job.name for job in run_all(SwapPlan(comparison, tmp_path / "whole"))}
    stopped = SwapPlan(comparison, tmp_path / "parts")
    done = []
    for _ in range(9):
        job = stopped.next()
        stopped.take(job, answer(job))
        done.append(job.name)
    rest = [job.name for job in run_all(SwapPlan(comparison, tmp_path / "parts"))]
    assert len(done) + len(rest) == len(whole)
    assert {*done, *rest} == whole


def test_cells_say_who_is_a_swap_in(tmp_path):
    comparison = SwapIn((TASK,), parse_swap_recipes("stc,qsgd,auto,fedpaq"), seeds=2, search=True)
    create_swap_in(tmp_path / "all", comparison)
    run_all(SwapPlan(comparison, tmp_path / "all"))
    assert is_swap_in(tmp_path / "all")
    again = replace(open_swap_in(tmp_path / "all"), tasks=(TASK,))
    assert again == comparison
    cells = {
        cell.recipe: cell
        for cell in make_cells(comparison, read_outcomes(tmp_path / "all"))
        if cell.goal == "plateau"
    }
    assert cells["fedavg"].delay.value == 1
    assert cells["stc"].is_swap_in
    assert "keep=0.003" in cells["stc"].setting.spec
    assert cells["stc"].savings.value == pytest.approx(1000 / 3 / cells["stc"].delay.value)
    assert not cells["qsgd"].is_swap_in
    assert cells["qsgd"].delay is None or cells["qsgd"].delay.value > 1.25
    assert cells["fedpaq"].same_as == "auto"
    shown = write_results(comparison, tmp_path / "all")
    assert {cell.recipe for cell in shown} == set(comparison.recipes)
    text = (tmp_path / "all" / "tables.md").read_text()
    assert "the same as `auto`, to the byte" in text
    assert "| **yes** |" in text
    assert (tmp_path / "all" / "frontier.png").read_bytes()[:4] == b"\x89PNG"


def test_without_a_search_everyone_is_run_as_it_is(tmp_path):
    comparison = SwapIn((TASK,), parse_swap_recipes("stc,laq"), seeds=1)
    jobs = run_all(SwapPlan(comparison, tmp_path))
    settings = [job.trial.setting for job in jobs if job.trial.recipe != FEDAVG]
    assert settings == [Setting("stc", multiplier=SELF_SETTING), Setting("laq")]


def test_who_runs_federated_averaging_anew_runs_everyone_anew(tmp_path):
    comparison = SwapIn((TASK,), parse_swap_recipes("stc"), seeds=1)
    num_runs = len(run_all(SwapPlan(comparison, tmp_path)))
    assert forget(tmp_path, ("stc",), (TASK.name,)) == 1
    assert forget(tmp_path, (FEDAVG,), (TASK.name,)) == num_runs - 1
    assert not read_outcomes(tmp_path)


def test_every_recipe_has_settings_that_can_be_run():
    for recipe in parse_swap_recipes(None):
        ladders = ladders_of(recipe)
        tried = {}
        while points := next_points(ladders, tried.get):
            tried |= dict.fromkeys(points, 0)
        for point in tried:
            setting = make_setting(recipe, ladders, point)
            replace(TASK.config, recipe=setting.spec, bits=setting.bits)


def test_a_search_ends_in_the_middle_or_at_the_end_of_its_ladder():
    steps = Ladder("step", tuple(2.0**k for k in range(-3, 8)), (1.0, 2.0, 4.0))
    for best in (0.125, 0.5, 2.0, 32.0, 128.0):
        tried = {}
        while points := next_points([steps], tried.get):
            assert not set(points) & set(tried)
            tried |= {point: abs(point[0] - best) for point in points}
        assert min(tried, key=tried.get) == (best,)


def test_tasks_whose_files_are_missing_are_left_out(tmp_path):
    tasks = parse_swap_tasks(None)
    assert not any(task.is_hold_out for task in tasks)
    kept, lines = available(tasks, tmp_path)
    assert "cifar10" not in {task.name for task in kept}
    assert any("task cifar10 is left out:" in line and "cifar10.npz" in line for line in lines)
    with pytest.raises(DataError, match="task heart is left out"):
        available(select_swap_tasks(["heart"]), tmp_path)
    with pytest.raises(ConfigError, match="unknown task 'mnist'"):
        parse_swap_tasks("mnist")
    assert {task.name for task in SWAP_TASKS.values() if task.is_hold_out} == {
        "hold-out-cnn",
        "hold-out-plays",
    }


def test_damage_is_named(tmp_path):
    comparison = SwapIn((TASK,), parse_swap_recipes("stc"), seeds=1)
    create_swap_in(tmp_path / "c", comparison)
    (tmp_path / "c" / "compare.json").write_text('{"measure": "swap-in"}')
    with pytest.raises(RunError, match="is damaged"):
        open_swap_in(tmp_path / "c")
    with pytest.raises(ConfigError, match="seeds is 0"):
        SwapIn((TASK,), ("fedavg",), seeds=0)
