"""Federated averaging first, then everyone else against it, and nothing twice."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from aqg.errors import ConfigError, DataError, RunError
from aqg.studies.compare.ladders import Ladder, next_points
from aqg.studies.compare.trial import FORMER_STEP, SELF_SETTING, Setting, Trial
from aqg.studies.swap_in.comparison import (
    SwapIn,
    create_swap_in,
    is_swap_in,
    open_swap_in,
)
from aqg.studies.swap_in.measure import Curve
from aqg.studies.swap_in.plan import (
    TARGETS,
    Findings,
    Outcome,
    SwapPlan,
    forget,
    make_config,
    pending_trials,
    read_outcomes,
)
from aqg.studies.swap_in.results import write_results
from aqg.studies.swap_in.search import (
    FEDAVG,
    default_setting,
    ladders_of,
    make_setting,
    parse_swap_recipes,
    pending_settings,
)
from aqg.studies.swap_in.table import as_tables, make_cells, versus_text
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
        return summary(8 / (setting.multiplier or 1), 1000, job.config.rounds, top=top)
    half = {"stc": 2.0, "qsgd": 8.0}.get(job.trial.recipe, 2.2)
    size = 3 if "0.003" in setting.spec else 5
    ending = "rounds" if job.trial.recipe == "qsgd" else "reached"
    return summary(half, size, job.config.rounds, ending=ending)


def run_all(plan):
    jobs = []
    while (job := plan.next()) is not None:
        jobs.append(job)
        plan.take(job, answer(job))
    return jobs


def test_federated_averaging_comes_first_and_its_search_goes_on(tmp_path):
    comparison = SwapIn((TASK,), parse_swap_recipes("stc,auto"), seeds=2, search=True)
    plan = SwapPlan(comparison, tmp_path)
    first = [plan.next() for _ in range(4)]
    assert [str(job.trial.setting) for job in first] == [
        "fedavg",
        "fedavg, step ×2",
        "fedavg, step ×4",
        "fedavg, step of its own",
    ]
    assert [job.config.step for job in first] == ["fixed"] * 3 + ["dog"]
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
    assert (ours.config.target, ours.config.rounds) == (None, 40)  # it goes to the last round
    assert ours.config.step == "auto"
    assert ours.trial.setting.multiplier == SELF_SETTING
    other = next(job for job in later if job.trial.recipe == "stc" and job.trial.seed == 1)
    assert other.config.target == max(goal["accuracy"] for goal in goals.values())
    assert other.config.rounds == 50
    assert plan.most_left() == 0


def test_its_search_goes_on_while_the_longest_step_gets_there_first(tmp_path):
    def best_at_twice(job):
        """The best plateau is inside what was tried, and all steps but 32 reach it, the faster."""
        multiplier = job.trial.setting.multiplier
        top = {2: 0.9, 32: 0.5, SELF_SETTING: 0.5}.get(multiplier, 0.895)
        return summary(8 / (multiplier or 1), 1000, job.config.rounds, top=top)

    comparison = SwapIn((TASK,), parse_swap_recipes("auto"), seeds=2)
    plan, averaging = SwapPlan(comparison, tmp_path), []
    while (job := plan.next()) is not None and job.trial.recipe == FEDAVG:
        averaging.append((job.trial.seed, job.trial.setting.multiplier))
        plan.take(job, best_at_twice(job))
    fixed = [(0, 1), (0, 2), (0, 4), (0, 8), (0, 16), (0, 32)]
    assert averaging == [*fixed, (0, SELF_SETTING), (1, 2), (1, 16)]
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
    comparison = SwapIn(
        (TASK,), parse_swap_recipes("stc,qsgd,auto,eden,fedpaq"), seeds=2, search=True
    )
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
    assert cells["fedpaq"].same_as == "eden"
    shown = write_results(comparison, tmp_path / "all")
    assert {cell.recipe for cell in shown} == set(comparison.recipes)
    text = (tmp_path / "all" / "tables.md").read_text()
    assert "the same as `eden`, to the byte" in text
    assert "| tried |" in text
    assert "| plateau |" in text
    assert "| **yes** |" in text
    assert (tmp_path / "all" / "frontier.png").read_bytes()[:4] == b"\x89PNG"


def test_without_a_search_everyone_is_run_as_it_is(tmp_path):
    comparison = SwapIn((TASK,), parse_swap_recipes("stc,laq"), seeds=1)
    jobs = run_all(SwapPlan(comparison, tmp_path))
    others = [job for job in jobs if job.trial.recipe != FEDAVG]
    settings = [job.trial.setting for job in others]
    assert settings == [Setting("stc", multiplier=SELF_SETTING), Setting("laq")]
    assert [job.config.step for job in others] == ["dog", "fixed"]


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
            make_config(Trial(TASK.name, recipe, setting, 0), TASK, None)


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
    assert {"hold-out-cnn", "hold-out-plays"} < {task.name for task in tasks}  # tuning data now
    assert [task.name for task in SWAP_TASKS.values() if task.is_hold_out] == [
        "unseen-synthetic",
        "unseen-arms",
        "unseen-many",
        "unseen-vit",
        "unseen-lstm",
    ]


def test_damage_is_named(tmp_path):
    comparison = SwapIn((TASK,), parse_swap_recipes("stc"), seeds=1)
    create_swap_in(tmp_path / "c", comparison)
    (tmp_path / "c" / "compare.json").write_text('{"measure": "swap-in"}')
    with pytest.raises(RunError, match="is damaged"):
        open_swap_in(tmp_path / "c")
    with pytest.raises(ConfigError, match="seeds is 0"):
        SwapIn((TASK,), ("fedavg",), seeds=0)


def outcome(recipe, setting, seed, half, top=0.9, size=10, rounds=40, ending="rounds"):
    row = summary(half, size, rounds, top, ending)["curve"]
    return Outcome(Trial(TASK.name, recipe, setting, seed), ending, Curve.from_json(row), 0.0)


def averaging(seeds=3, adaptive=True, top=0.9):
    """Federated averaging, whose search is over, best at twice its step."""
    steps = {1: 8, 2: 4, 4: 6}
    found = [
        outcome(FEDAVG, Setting(FEDAVG, multiplier=step), seed, half, top - 0.02 * (step != 2))
        for step, half in steps.items()
        for seed in range(seeds)
    ]
    if adaptive:
        own = Setting(FEDAVG, multiplier=SELF_SETTING)
        found.append(outcome(FEDAVG, own, 0, 9, top - 0.05))
    return found


def by_trial(outcomes):
    return {one.trial: one for one in outcomes}


def cells_of(outcomes, recipes="auto,stc,qsgd", seeds=3):
    comparison = SwapIn((TASK,), parse_swap_recipes(recipes), seeds=seeds)
    cells = make_cells(comparison, by_trial(outcomes))
    return {cell.recipe: cell for cell in cells if cell.goal == "plateau"}


def test_federated_averaging_may_take_our_step():
    own = Setting(FEDAVG, multiplier=SELF_SETTING)
    comparison = SwapIn((TASK,), parse_swap_recipes("auto"), seeds=3)
    found = averaging(adaptive=False)
    trials, _ = pending_trials(comparison, FEDAVG, TASK, Findings(comparison, by_trial(found)))
    assert trials == [Trial(TASK.name, FEDAVG, own, 0)]  # though the fixed steps are done
    assert pending_trials(comparison, "auto", TASK, Findings(comparison, by_trial(found)))[0] == []
    better = [*found, outcome(FEDAVG, own, 0, 3, 0.93)]
    findings = Findings(comparison, by_trial(better))
    assert findings.references[TASK.name, 0].plateau > 0.92
    trials, _ = pending_trials(comparison, FEDAVG, TASK, findings)
    assert trials == [Trial(TASK.name, FEDAVG, own, seed) for seed in (1, 2)]
    worse = [*found, outcome(FEDAVG, own, 0, 9, 0.8)]
    findings = Findings(comparison, by_trial(worse))
    assert pending_trials(comparison, FEDAVG, TASK, findings)[0] == []


def test_a_better_step_of_its_own_does_not_end_the_search_of_fixed_ones():
    """The longest fixed step tried is the best of them, so the next one is tried."""
    found = [
        outcome(FEDAVG, Setting(FEDAVG, multiplier=step), 0, 10 / step, 0.8 + step / 100)
        for step in (1, 2, 4)
    ]
    found.append(outcome(FEDAVG, Setting(FEDAVG, multiplier=SELF_SETTING), 0, 2, 0.95))
    comparison = SwapIn((TASK,), parse_swap_recipes("auto"), seeds=1)
    findings = Findings(comparison, by_trial(found))
    assert findings.pending_fedavg(TASK)[0] == [Setting(FEDAVG, multiplier=8)]


def test_plateaus_are_compared_in_points_and_paired_by_seed():
    found = averaging()
    tops = (0.91, 0.92, 0.93)
    found += [outcome("auto", default_setting("auto"), s, 4, top) for s, top in enumerate(tops)]
    stc = default_setting("stc")
    found += [outcome("stc", stc, s, 4, rounds=36, ending="reached") for s in range(3)]
    cells = cells_of(found)
    plateau = cells["auto"].plateau
    assert plateau.value == pytest.approx(2.0, abs=0.05)
    assert plateau.low == pytest.approx(2.0 - 4.303 / 3**0.5, abs=0.1)
    assert cells["fedavg"].level == pytest.approx(0.899, abs=2e-3)
    assert cells["stc"].plateau is None  # its runs ended at the goal
    assert cells["auto"].to_json()["plateau"]["value"] == plateau.value
    assert cells["stc"].to_json()["plateau"] is None
    comparison = SwapIn((TASK,), parse_swap_recipes("auto,stc"), seeds=3)
    overview, table, _ = as_tables(comparison, list(cells.values()))
    assert "+2.0" in next(row for row in overview.rows if "auto" in row[0])[1]
    column = table.header.index("plateau")
    assert [row[column][:4] for row in table.rows] == ["89.9", "+2.0", ""]


def test_what_seeds_do_not_tell_apart_is_as_good():
    auto, stc = default_setting("auto"), default_setting("stc")
    found = averaging() + [outcome("auto", auto, s, 4, size=100) for s in range(3)]
    cells = {}
    for name, sizes in {"noise": (80, 125, 104), "costly": (149, 151, 150)}.items():
        own = [outcome("stc", stc, s, 4, size=size) for s, size in enumerate(sizes)]
        cells[name] = cells_of([*found, *own])["stc"]
    assert versus_text(cells["noise"]).startswith("as good as (0.")
    assert versus_text(cells["costly"]).startswith("1.50× (1.4")
    one = cells_of([*found, outcome("stc", stc, 0, 4, size=150)])["stc"]
    assert versus_text(one) == "1.50× (one seed)"
    assert versus_text(cells_of(found)["auto"]) == ""


def test_tables_say_how_many_settings_were_tried():
    specs = ("stc:keep=0.01", "stc:keep=0.003", "stc:keep=0.03")
    found = averaging() + [outcome("stc", Setting(spec), 0, 4) for spec in specs]
    cells = cells_of(found)
    assert cells["stc"].num_settings == 3
    assert cells["fedavg"].num_settings == 4


def test_former_steps_are_ranked_and_never_run_again():
    former = Setting("stc:keep=0.01", multiplier=FORMER_STEP)
    comparison = SwapIn((TASK,), parse_swap_recipes("stc"), seeds=3)
    found = averaging()
    for setting, size in ((former, 1), (default_setting("stc"), 5)):
        found.append(outcome("stc", setting, 0, 4, size=size))
    findings = Findings(comparison, by_trial(found))
    assert findings.best("stc", TASK) == former
    trials, _ = pending_trials(comparison, "stc", TASK, findings)
    assert {trial.setting for trial in trials} == {default_setting("stc")}
    cells = cells_of(found, "stc")
    assert cells["stc"].setting == former
    assert str(former) == "stc:keep=0.01, former adaptive step"
    with pytest.raises(ConfigError, match="no longer there"):
        make_config(Trial(TASK.name, "stc", former, 0), TASK, None)


def test_a_run_that_ended_at_an_easier_goal_is_made_anew():
    comparison = SwapIn((TASK,), parse_swap_recipes("stc"), seeds=1)
    stc = default_setting("stc")
    cut = outcome("stc", stc, 0, 4, top=0.88, rounds=30, ending="reached")
    easier = Findings(comparison, by_trial([*averaging(1, top=0.85), cut]))
    assert pending_trials(comparison, "stc", TASK, easier)[0] == []
    harder = Findings(comparison, by_trial([*averaging(1, top=0.95), cut]))
    assert pending_trials(comparison, "stc", TASK, harder)[0] == [cut.trial]
    assert "stc" not in cells_of([*averaging(1, top=0.95), cut], "stc", seeds=1)


def test_the_downlink_is_searched_after_the_parameters():
    """The best is the longest entry; it is tried with the best of all other axes only."""
    tried = {}
    while needed := pending_settings("stc", tried)[0]:
        tried |= {
            s: (
                0,
                (s.multiplier - 2) ** 2 - 5 * ("ratio=3" in s.downlink) + ("0.007" not in s.spec),
            )
            for s in needed
        }
    best = min(tried, key=tried.get)
    assert best == Setting("stc:keep=0.007", 4, 2, "condensed:ratio=3")
    others = {setting for setting in tried if setting.downlink != "auto"}
    assert {setting.spec for setting in others} == {"stc:keep=0.007"}
    assert {s.downlink for s in others} >= {f"condensed:ratio={r}" for r in ("0.3", "3", "10")}
    config = make_config(Trial(TASK.name, "stc", best, 0), TASK, None)
    assert config.training().downlink.ratio == 3
    row = Outcome(Trial(TASK.name, "stc", best, 0), "rounds", Curve((0.1,), (0,)), 0.0).to_json()
    assert row["downlink"] == "condensed:ratio=3"
    assert Outcome.from_json(row).trial.setting == best
    del row["downlink"]
    assert Outcome.from_json(row).trial.setting.downlink == "auto"
    assert "downlink" not in Setting("stc").to_json()


def test_our_step_is_tried_with_every_recipe():
    for recipe in ("qsgd", "eden", "stc", "laq"):
        settings, _ = pending_settings(recipe, {})
        assert [s.multiplier for s in settings] == [1, 2, 4, SELF_SETTING]
        trial = Trial(TASK.name, recipe, settings[-1], 0)
        assert make_config(trial, TASK, None).step == "dog"


def test_a_step_of_its_own_hides_no_shorter_one():
    steps = Ladder("step", (0.25, 0.5, 1, 2), (1, 2, SELF_SETTING))
    tried = {}
    while points := next_points([steps], tried.get):
        tried |= {point: point[0] if point[0] else 9 for point in points}
    assert min(tried, key=tried.get) == (0.25,)
