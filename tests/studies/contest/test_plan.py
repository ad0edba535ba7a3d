"""What runs next and nothing twice; the search along the grid; plateaus, goals, cost and delay."""

import json
import math
import random
from dataclasses import replace

import pytest

from aqg.core.recipes import RECIPES
from aqg.errors import ConfigError, RunError
from aqg.runs.directory import SUMMARY
from aqg.runs.files import seal, to_json
from aqg.runs.stopping import Target
from aqg.studies.contest.measure import (
    FIXED as AT_TARGET,
)
from aqg.studies.contest.measure import (
    MOST_DELAY,
    PLATEAU,
    Crossing,
    Curve,
    Goal,
    arithmetic_mean,
    geometric_mean,
    make_reference,
    plateau_of,
    points_above,
    rank,
    score,
)
from aqg.studies.contest.plan import (
    TARGETS,
    TRIALS,
    Comparison,
    ContestPlan,
    Findings,
    Outcome,
    Trial,
    forget,
    make_config,
    pending_trials,
    read_outcomes,
)
from aqg.studies.contest.search import (
    FEDAVG,
    FORMER_STEP,
    SELF_SETTING,
    Ladder,
    Setting,
    default_setting,
    is_ours,
    ladders_of,
    make_setting,
    next_points,
    parse_recipes,
    pending_settings,
    read_grid,
    read_tuned,
    write_tuned,
)
from aqg.studies.contest.table import as_tables, make_cells, versus_text, write_results
from aqg.studies.contest.tasks import TASKS, select_tasks

from tests.problems import SOME_RECIPES

FIXED, TASK = select_tasks(["digits-softmax", "digits-local"])
TASK = replace(TASK, config=replace(TASK.config, rounds=40))


def compared(recipes, *tasks, seeds=3, **options):
    return Comparison(tasks or (TASK,), parse_recipes(recipes), seeds, **options)


def summary(half, size, rounds=50, top=0.9, ending="reached"):
    """What a run of so many rounds leaves, which has half of its way behind after ``half``."""
    values = [top * (1 - 0.5 ** (k / half)) for k in range(rounds + 1)]
    curve = {"values": values, "bytes": [size * k for k in range(rounds + 1)], "tests": []}
    return {"curve": curve, "outcome": {"ending": ending}, "diverged": False}


def falling(cost, ending="reached", rounds=1):
    """What a run leaves that is at a fixed target after so many rounds and bytes, and stays."""
    later = 0.0001 if ending == "reached" else 0.5
    values, sizes = [*[0.7] * rounds, *[later] * 20], [*range(rounds), *[cost] * 20]
    curve = {"values": values, "bytes": sizes, "tests": []}
    found = {"ending": ending, "upload_bytes": cost // 10}
    return {"curve": curve, "outcome": found, "diverged": False}


def answer(job):
    """Federated averaging is best at four times its step; others cost and take what they like."""
    setting, recipe = job.trial.setting, job.trial.recipe
    if job.trial.task == FIXED.name:
        return falling(1000 if recipe == FEDAVG else 100 + abs(round(setting.multiplier) - 4))
    if recipe == FEDAVG:
        top = 0.9 - 0.02 * abs(setting.multiplier - 4)
        return summary(8 / (setting.multiplier or 1), 1000, job.config.rounds, top=top)
    half = {"stc": 2.0, "qsgd": 8.0}.get(recipe, 2.2)
    size = 3 if "0.003" in setting.spec else 5
    ending = "rounds" if recipe == "qsgd" else "reached"
    return summary(half, size, job.config.rounds, ending=ending)


def run_all(plan, reply=answer):
    jobs = []
    while (job := plan.next()) is not None:
        jobs.append(job)
        plan.take(job, reply(job))
    return jobs


def hand_out(plan, most=1000):
    """Take jobs until the plan has to wait."""
    jobs = []
    while len(jobs) < most and (job := plan.next()) is not None:
        jobs.append(job)
    return jobs


def test_federated_averaging_comes_first_and_its_search_goes_on(tmp_path):
    plan = ContestPlan(compared("stc,auto", seeds=2, search=True), tmp_path)
    first = hand_out(plan)  # and then its target has to be known
    assert [str(job.trial.setting) for job in first] == [
        *("fedavg", "fedavg, step ×2", "fedavg, step ×4", "fedavg, step of its own")
    ]
    assert [job.config.step for job in first] == ["fixed"] * 3 + ["dog"]
    assert all(job.config.target is None and job.config.rounds == 40 for job in first)
    assert first[0].ceiling == math.inf
    for job in first:
        plan.take(job, answer(job))
    further = plan.next()
    assert further.trial.setting == Setting(FEDAVG, multiplier=8)  # four times was the edge
    plan.take(further, answer(further))
    later = run_all(plan)
    recipes = [job.trial.recipe for job in later]
    assert recipes.index("auto") > max(k for k, name in enumerate(recipes) if name == FEDAVG)
    goals = json.loads((tmp_path / TARGETS).read_text())[TASK.name]["seed 1"]["goals"]
    ours = next(job for job in later if job.trial.recipe == "auto" and job.trial.seed == 1)
    assert (ours.config.target, ours.config.rounds) == (None, 40)  # it goes to the last round
    assert (ours.config.step, ours.trial.setting.multiplier) == ("auto", SELF_SETTING)
    other = next(job for job in later if job.trial.recipe == "stc" and job.trial.seed == 1)
    assert other.config.target == max(goal["accuracy"] for goal in goals.values())
    assert other.config.rounds == 50
    assert other.ceiling == 40_000
    assert plan.most_left() == 0


def test_its_search_goes_on_while_the_longest_step_gets_there_first(tmp_path):
    def best_at_twice(job):
        """The best plateau is inside what was tried, and all steps but 32 reach it, the faster."""
        multiplier = job.trial.setting.multiplier
        top = {2: 0.9, 32: 0.5, SELF_SETTING: 0.5}.get(multiplier, 0.895)
        return summary(8 / (multiplier or 1), 1000, job.config.rounds, top=top)

    plan = ContestPlan(compared("auto", seeds=2), tmp_path)
    made = [(job.trial.seed, job.trial.setting.multiplier) for job in run_all(plan, best_at_twice)]
    fixed = [(0, 1), (0, 2), (0, 4), (0, 8), (0, 16), (0, 32)]
    assert made[:9] == [*fixed, (0, SELF_SETTING), (1, 2), (1, 16)]


def test_where_the_target_is_fixed_nobody_waits(tmp_path):
    """Federated averaging is searched like the others, and a slow run holds up nobody else's."""
    comparison = compared("auto,stc", FIXED, TASK, seeds=2, search=True)
    plan = ContestPlan(comparison, tmp_path)
    slow = plan.next()
    assert (slow.trial.recipe, slow.trial.task) == (FEDAVG, FIXED.name)
    assert slow.config.target == FIXED.config.target == 1e-3
    ended = run_all(plan)
    stuck = [job.trial for job in ended if job.trial.task == FIXED.name]
    assert {t.seed for t in stuck if t.recipe == FEDAVG} == {0}
    assert {t.recipe for t in stuck if t.seed == 1} == {"auto", "stc"}
    others = {job.trial.recipe for job in ended if job.trial.task == TASK.name}
    assert others == {FEDAVG, "auto", "stc"}
    plan.take(slow, falling(800))
    assert {job.trial.seed for job in run_all(plan)} >= {1}
    ours = next(job for job in ended if job.trial.recipe == "auto" and job.trial.task == FIXED.name)
    stc = next(job for job in ended if job.trial.recipe == "stc" and job.trial.task == FIXED.name)
    assert plan._job(stc.trial).ceiling == plan._job(ours.trial).ceiling == 1600
    assert ours.config.step == "fixed"  # with exact gradients it has a step to find
    searched = {t.setting.multiplier for t in stuck if t.recipe == "auto"}
    assert searched >= {0.5, 1, 2, 4, 8}


def test_all_seeds_for_who_is_close_and_fewer_for_who_is_far(tmp_path):
    def reply(job):
        cost = {FEDAVG: 9000, "auto": 100, "stc": 149, "qsgd": 151}.get(job.trial.recipe, 5)
        return falling(cost, "rounds" if job.trial.recipe == "topk" else "reached")

    comparison = compared("auto,stc,qsgd,topk", FIXED, seeds=5, search=True)
    made = [job.trial for job in run_all(ContestPlan(comparison, tmp_path), reply)]
    seeds = {name: len({t.seed for t in made if t.recipe == name}) for name in comparison.recipes}
    assert seeds == {FEDAVG: 5, "auto": 5, "stc": 5, "qsgd": 3, "topk": 3}


def test_it_goes_on_where_it_stopped(tmp_path):
    comparison = compared("stc,qsgd", FIXED, TASK, seeds=2, search=True)
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = {job.name for job in run_all(ContestPlan(comparison, tmp_path / "whole"))}
    stopped, done = ContestPlan(comparison, tmp_path / "parts"), []
    for _ in range(15):
        done.append(stopped.next())
        stopped.take(done[-1], answer(done[-1]))
    names = [job.name for job in done + run_all(ContestPlan(comparison, tmp_path / "parts"))]
    assert (len(names), set(names)) == (len(whole), whole)


@pytest.mark.parametrize("jobs", [1, 16])
def test_the_counter_comes_to_zero(tmp_path, jobs):
    """Whatever comes of the runs, and in whatever order."""
    comparison = compared("auto,lean,stc,qsgd", FIXED, seeds=3, search=True)
    plan, draw = ContestPlan(comparison, tmp_path), random.Random(jobs)
    under_way, made = hand_out(plan, jobs), set()
    while under_way:
        job = under_way.pop(draw.randrange(len(under_way)))
        assert job.name not in made
        made.add(job.name)
        ending = draw.choice(["reached", "reached", "hopeless", "beyond"])
        plan.take(job, falling(draw.randrange(100, 300), ending))
        assert plan.most_left() >= len(under_way)
        under_way += hand_out(plan, jobs - len(under_way))
    assert plan.most_left() == 0


def test_a_run_that_ended_before_its_record_was_written_is_not_run_again(tmp_path):
    comparison = compared("auto", FIXED, seeds=1)
    first, second = hand_out(ContestPlan(comparison, tmp_path))
    (tmp_path / first.name).mkdir(parents=True)
    (tmp_path / first.name / SUMMARY).write_text(to_json(falling(70)))
    plan = ContestPlan(comparison, tmp_path)
    assert (plan.most_left(), plan.next().trial, plan.most_left()) == (2, second.trial, 1)
    assert read_outcomes(tmp_path)[first.trial].upload_bytes == 7


def test_what_failed_is_not_tried_twice_and_stops_its_own_search_only(tmp_path):
    comparison = compared("stc,gd", FIXED, seeds=2, search=True)
    plan = ContestPlan(comparison, tmp_path)
    while (failed := plan.next()).trial.recipe != "stc":
        plan.take(failed, answer(failed))
    plan.take(failed, RunError("out of memory"))
    seen = [job.trial for job in run_all(plan)]
    assert failed.trial not in seen
    assert {t.seed for t in seen if t.recipe == "stc"} == {0}
    assert {t.seed for t in seen if t.recipe == "gd"} == {0, 1}
    assert list(plan.failures) == [failed.name]
    assert plan.most_left() == 0
    assert ContestPlan(comparison, tmp_path).next().trial == failed.trial


def test_without_a_search_everyone_is_run_as_it_is_or_as_was_found(tmp_path):
    jobs = run_all(ContestPlan(compared("stc,laq", seeds=1), tmp_path))
    others = [job for job in jobs if job.trial.recipe != FEDAVG]
    settings = [job.trial.setting for job in others]
    assert settings == [Setting("stc", multiplier=SELF_SETTING), Setting("laq")]
    assert [job.config.step for job in others] == ["dog", "fixed"]
    found = {FIXED.name: {"stc": Setting("stc:keep=0.1", multiplier=2)}}
    plan = ContestPlan(compared("stc", FIXED, seeds=2), tmp_path, found)
    assert plan.most_left() == 4
    trials = {job.trial for job in run_all(plan)}
    assert {(t.setting, t.seed) for t in trials if t.recipe == "stc"} == {
        (found[FIXED.name]["stc"], seed) for seed in (0, 1)
    }


def test_records_of_runs(tmp_path):
    """One cut short is run again, two directories' make one, and nonsense is named."""
    comparison = compared("stc", FIXED, seeds=1)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        run_all(ContestPlan(comparison, tmp_path / name), lambda _, n=name: falling(ord(n)))
    whole = [(tmp_path / name / TRIALS).read_text() for name in ("a", "b")]
    (tmp_path / TRIALS).write_text("".join(whole))
    assert {o.upload_bytes for o in read_outcomes(tmp_path).values()} == {ord("b") // 10}
    (tmp_path / TRIALS).write_text(whole[0][:-20])
    (again,) = hand_out(ContestPlan(comparison, tmp_path))
    assert again.trial.recipe == "stc"
    (tmp_path / TRIALS).write_text(seal('{"task": 1}') + "\n")
    with pytest.raises(RunError, match="line 1 is not a trial"):
        read_outcomes(tmp_path)


def test_what_is_forgotten_is_gone_and_nothing_else(tmp_path):
    """Where federated averaging's plateau is the goal, all runs are against it."""
    comparison = compared("stc,auto", FIXED, TASK, seeds=1)
    trials = [job.trial for job in run_all(ContestPlan(comparison, tmp_path))]
    for trial in trials:
        (tmp_path / trial.directory).mkdir(parents=True)
    assert forget(tmp_path, ["stc"], [FIXED]) == 1
    gone = {t for t in trials if (t.recipe, t.task) == ("stc", FIXED.name)}
    assert set(read_outcomes(tmp_path)) == set(trials) - gone
    assert {t for t in trials if not (tmp_path / t.directory).exists()} == gone
    assert forget(tmp_path, [FEDAVG], [FIXED]) == 1
    before = (tmp_path / TRIALS).read_bytes()
    assert forget(tmp_path, ["gd"], [TASK]) == 0
    assert (tmp_path / TRIALS).read_bytes() == before
    assert forget(tmp_path, [FEDAVG], [TASK]) == sum(t.task == TASK.name for t in trials)
    assert {t.recipe for t in read_outcomes(tmp_path)} == {"auto"}
    assert not (tmp_path / TASK.name).exists()


def test_a_comparison_survives_its_directory(tmp_path):
    comparison = Comparison((FIXED,), (FEDAVG, "lean:xi=3"), 4, search=True, quick=True)
    comparison.write(tmp_path / "c", is_new=True)
    assert Comparison.open(tmp_path / "c") == comparison
    with pytest.raises(RunError, match="is not empty"):
        comparison.write(tmp_path / "c", is_new=True)
    (tmp_path / "c" / "compare.json").write_text("{}")
    with pytest.raises(RunError, match=r"compare\.json' is damaged"):
        Comparison.open(tmp_path / "c")


def test_a_comparison_grows_and_has_parts():
    local = select_tasks(["digits-local"])[0]
    comparison = compared("lean,gd", local, seeds=2, search=True)
    grown = comparison.extended([FIXED, local], ["stc", "gd"], seeds=5)
    assert grown == compared("lean,stc,gd", FIXED, local, seeds=5, search=True)
    narrow = grown.narrowed([local], ["gd", "lean"])
    assert comparison.extended((), (), None) == narrow.extended((), (), 2)
    dropouts = select_tasks(["softmax-label-dropout"])[0]
    pairs = set(compared("aqg-augmented", FIXED, dropouts).pairs())
    assert ("aqg-augmented", dropouts) in pairs
    assert ("aqg-augmented", FIXED) not in pairs  # without dropouts it is another recipe


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
    own = Setting(FEDAVG, multiplier=SELF_SETTING)
    return found + [outcome(FEDAVG, own, 0, 9, top - 0.05)] * adaptive


def pending(comparison, recipe, outcomes):
    findings = Findings(TASK, comparison.seeds, outcomes)
    return pending_trials(comparison, recipe, findings, {})[0]


def cells_of(outcomes, recipes="auto,stc,qsgd", seeds=3):
    comparison = compared(recipes, seeds=seeds)
    cells = make_cells(comparison, {one.trial: one for one in outcomes})
    return {cell.recipe: cell for cell in cells if cell.is_main}


def test_federated_averaging_may_take_our_step():
    own, comparison = Setting(FEDAVG, multiplier=SELF_SETTING), compared("auto")
    found = averaging(adaptive=False)
    # Though the fixed steps are done.
    assert pending(comparison, FEDAVG, found) == [Trial(TASK.name, FEDAVG, own, 0)]
    assert pending(comparison, "auto", found) == []
    better = [*found, outcome(FEDAVG, own, 0, 3, 0.93)]
    assert Findings(TASK, comparison.seeds, better).references[0].plateau > 0.92
    trials = pending(comparison, FEDAVG, better)
    assert trials == [Trial(TASK.name, FEDAVG, own, seed) for seed in (1, 2)]
    assert pending(comparison, FEDAVG, [*found, outcome(FEDAVG, own, 0, 9, 0.8)]) == []
    # A better step of its own does not end the search of fixed ones, whose best is at the edge.
    steps = {1: 0.81, 2: 0.82, 4: 0.84, SELF_SETTING: 0.95}
    found = [
        outcome(FEDAVG, Setting(FEDAVG, multiplier=step), 0, 10 / (step or 5), top)
        for step, top in steps.items()
    ]
    wanted = Trial(TASK.name, FEDAVG, Setting(FEDAVG, multiplier=8), 0)
    assert pending(compared("auto", seeds=1), FEDAVG, found) == [wanted]


def test_former_steps_are_ranked_and_never_run_again():
    former = Setting("stc:keep=0.01", multiplier=FORMER_STEP)
    stc = default_setting("stc", TASK)
    found = averaging()
    found += [outcome("stc", setting, 0, 4, size=s) for setting, s in ((former, 1), (stc, 5))]
    assert {t.setting for t in pending(compared("stc"), "stc", found)} == {stc}
    assert cells_of(found, "stc")["stc"].setting == former
    with pytest.raises(ConfigError, match="former adaptive step cannot be run"):
        make_config(Trial(TASK.name, "stc", former, 0), TASK, None)


def test_a_run_that_ended_at_an_easier_target_is_made_anew():
    comparison = compared("stc", seeds=1)
    cut = outcome("stc", default_setting("stc", TASK), 0, 4, top=0.88, rounds=30, ending="reached")
    assert pending(comparison, "stc", [*averaging(1, top=0.85), cut]) == []
    assert pending(comparison, "stc", [*averaging(1, top=0.95), cut]) == [cut.trial]
    assert "stc" not in cells_of([*averaging(1, top=0.95), cut], "stc", seeds=1)


def test_cells_say_who_is_a_swap_in(tmp_path):
    comparison = compared("stc,qsgd,auto,eden,fedpaq", seeds=2, search=True)
    run_all(ContestPlan(comparison, tmp_path))
    cells = {cell.recipe: cell for cell in write_results(comparison, tmp_path) if cell.is_main}
    assert set(cells) == set(comparison.recipes)
    assert cells["fedavg"].delay.value == 1
    assert cells["stc"].is_swap_in
    assert "keep=0.003" in cells["stc"].setting.spec
    assert cells["stc"].savings.value == pytest.approx(1000 / 3 / cells["stc"].delay.value)
    assert not cells["qsgd"].is_swap_in
    assert cells["qsgd"].delay is None or cells["qsgd"].delay.value > 1.25
    assert cells["fedpaq"].same_as == "eden"
    text = (tmp_path / "tables.md").read_text()
    for part in ("the same as `eden`, to the byte", "| tried |", "| plateau |", "| **yes** |"):
        assert part in text
    assert (tmp_path / "frontier.png").read_bytes()[:4] == b"\x89PNG"
    tuned = json.loads((tmp_path / "tuned.json").read_text())[TASK.name]
    assert Setting.from_json(tuned["stc"]) == cells["stc"].setting


@pytest.mark.parametrize("averages", [True, False])
def test_a_fixed_target_has_bytes_rounds_and_uploads(tmp_path, averages):
    """Savings and delay as well, if federated averaging gets there."""

    def reply(job):
        recipe = job.trial.recipe
        if recipe == FEDAVG:
            return falling(9000, "reached" if averages else "hopeless", rounds=4)
        if recipe == "lean":
            return falling(300 + job.trial.seed, rounds=8)
        return falling(200, "beyond" if recipe == "gd" or job.trial.seed else "reached", rounds=4)

    comparison = compared("auto,lean,gd", FIXED, seeds=2)
    run_all(ContestPlan(comparison, tmp_path), reply)
    cells = {cell.recipe: cell for cell in write_results(comparison, tmp_path)}
    auto, lean = cells["auto"], cells["lean"]
    assert (auto.num_reached, auto.num_seeds, auto.is_swap_in) == (1, 2, False)
    assert (lean.rounds, lean.upload_bytes, lean.is_swap_in) == (8, 30, False)
    assert lean.cost.value == pytest.approx(300.5, rel=1e-4)
    assert cells["gd"].cost is None
    overview, table = as_tables(comparison, list(cells.values()))
    assert table.header[6] == "uploaded"
    assert overview.header == ("recipe", "digits-softmax<br>residual 0.001")
    rows = {row[0]: row for row in table.rows}
    assert list(rows) == ["`fedavg`", "`auto`", "`lean`", "`gd`"]
    assert rows["`gd`"][3] == "– (0.5)"
    assert (lean.delay and lean.delay.value) == (2 if averages else None)
    assert dict(overview.rows)["`auto`"] == ("45×, 1.00 (1/2)" if averages else "200 B")
    assert rows["`lean`"][8] == "1.50× (one seed)"


def test_plateaus_are_compared_in_points_and_paired_by_seed():
    found, auto, stc = averaging(), default_setting("auto", TASK), default_setting("stc", TASK)
    found += [outcome("auto", auto, s, 4, top) for s, top in enumerate((0.91, 0.92, 0.93))]
    found += [outcome("stc", stc, s, 4, rounds=36, ending="reached") for s in range(3)]
    cells = cells_of(found)
    plateau = cells["auto"].plateau
    assert plateau.value == pytest.approx(2.0, abs=0.05)
    assert plateau.low == pytest.approx(2.0 - 4.303 / 3**0.5, abs=0.1)
    assert cells["fedavg"].level == pytest.approx(0.899, abs=2e-3)
    assert cells["stc"].plateau is None  # its runs ended at the target
    assert cells["auto"].to_json()["plateau"]["value"] == plateau.value
    overview, table = as_tables(compared("auto,stc"), list(cells.values()))
    assert "+2.0" in dict(overview.rows)["`auto`"]
    column = table.header.index("plateau")
    assert [row[column][:4] for row in table.rows] == ["89.9", "+2.0", ""]


def test_what_seeds_do_not_tell_apart_is_as_good():
    auto, stc = default_setting("auto", TASK), default_setting("stc", TASK)
    found = averaging() + [outcome("auto", auto, s, 4, size=100) for s in range(3)]
    cells = {}
    for name, sizes in {"noise": (80, 125, 104), "costly": (149, 151, 150), "one": (150,)}.items():
        own = [outcome("stc", stc, s, 4, size=size) for s, size in enumerate(sizes)]
        cells[name] = cells_of([*found, *own])["stc"]
    assert versus_text(cells["noise"]).startswith("as good as (0.")
    assert versus_text(cells["costly"]).startswith("1.50× (1.4")
    assert versus_text(cells["one"]) == "1.50× (one seed)"
    assert cells["one"].is_partial
    assert versus_text(cells_of(found)["auto"]) == ""
    specs = ("stc:keep=0.01", "stc:keep=0.003", "stc:keep=0.03")
    tried = cells_of(found + [outcome("stc", Setting(spec), 0, 4) for spec in specs])
    assert (tried["stc"].num_settings, tried["fedavg"].num_settings) == (3, 4)


def test_a_diverged_run_is_no_number():
    curve = Curve((math.nan, math.nan), (0, 10))
    broken = Outcome(Trial(TASK.name, "stc", default_setting("stc", TASK), 0), "diverged", curve, 0)
    (cell,) = [c for c in cells_of([*averaging(), broken]).values() if c.recipe == "stc"]
    assert (cell.cost, cell.best_value) == (None, None)
    assert "diverged" in as_tables(compared("stc"), [cell])[1].rows[0][3]


EXACT, LOCAL = TASKS["softmax-iid"], TASKS["digits-local"]


def search(recipe, task, rank, quick=False):
    """Search, and return what was tried, stage by stage."""
    tried, stages = {}, []
    while needed := pending_settings(recipe, task, tried, quick)[0]:
        assert not set(needed) & set(tried)
        stages.append(needed)
        tried |= {setting: rank(setting) for setting in needed}
    return stages, tried


def test_the_grid_names_recipes_that_exist_and_gives_all_the_same():
    grid = read_grid()
    assert set(grid["order"]) | set(grid["local"]["parameters"]) <= set(RECIPES)
    exact, local = (grid[regime]["parameters"] for regime in ("full-batch", "local"))
    assert set(exact) == set(local)
    for recipe, parameters in exact.items():
        assert set(parameters) == set(local[recipe]) - {"ratio"}
    for name, values in grid["ladders"].items():
        assert values == sorted(set(values)), name


@pytest.mark.parametrize("recipe", SOME_RECIPES)
def test_every_recipe_has_settings_that_can_be_run(recipe):
    for task in (EXACT, LOCAL):
        ladders, tried = ladders_of(recipe, task), {}
        while points := next_points(ladders, tried.get):
            tried |= dict.fromkeys(points, 0)
        for point in tried:
            setting = make_setting(recipe, ladders, point)
            make_config(Trial(task.name, recipe, setting, 0), task, None)
        assert make_setting(recipe, ladders, (1,) * len(ladders)).spec.startswith(recipe)


def test_our_step_is_tried_with_every_recipe_and_ours_has_nothing_to_set():
    for recipe in ("qsgd", "stc:keep=0.05", "laq"):
        (first, *_), _ = search(recipe, LOCAL, lambda _: 1)
        assert [s.multiplier for s in first] == [1, 2, 4, SELF_SETTING]
        assert {s.spec.partition(":xi")[0].partition(":b")[0] for s in first} == {recipe}
        trial = Trial(LOCAL.name, recipe, first[-1], 0)
        assert make_config(trial, LOCAL, None).step == "dog"
    stages, _ = search("auto:noise=4", LOCAL, lambda _: 1)
    assert stages == [[Setting("auto:noise=4", multiplier=SELF_SETTING)]]
    assert is_ours("auto:noise=4", LOCAL)
    assert not is_ours("auto", EXACT)  # there it has a step to find
    assert {s.multiplier for s in search("auto", EXACT, lambda _: 1)[0][0]} == {2, 1, 4, 0.5}
    # Without a search a recipe is run as it is.
    assert default_setting("stc", EXACT) == Setting("stc")
    assert default_setting("stc", LOCAL) == Setting("stc", multiplier=SELF_SETTING)
    assert default_setting("signsgd", EXACT).multiplier < 0.1


def test_steps_then_parameters_then_the_downlink_then_the_steps_beside():
    """The best is the longest entry; it is tried with the best of all other axes only."""

    def rank(setting):
        longest, closest = "ratio=3" in setting.downlink, "0.007" in setting.spec
        return (setting.multiplier - 2) ** 2 - 5 * longest - closest

    stages, tried = search("stc", LOCAL, rank)
    best = min(tried, key=tried.get)
    assert best == Setting("stc:keep=0.007", 4, 2, "condensed:ratio=3")
    others = {setting for setting in tried if setting.downlink != "auto"}
    assert {setting.spec for setting in others} == {"stc:keep=0.007"}
    assert {s.downlink for s in others} >= {f"condensed:ratio={r}" for r in ("0.3", "3", "10")}
    assert {s.multiplier for s in stages[-1]} == {1, 4}
    assert make_config(Trial("t", "stc", best, 0), LOCAL, None).training().downlink.ratio == 3
    row = Outcome(Trial("t", "stc", best, 0), "rounds", Curve((0.1,), (0,)), 0.0).to_json()
    assert Outcome.from_json(row).trial.setting == best
    assert "downlink" not in Setting("stc").to_json()


POWERS = Ladder("step", tuple(2.0**k for k in range(-3, 8)), (1.0, 2.0, 4.0))
WITH_ITS_OWN = Ladder("step", (0.25, 0.5, 1, 2), (1, 2, SELF_SETTING))


@pytest.mark.parametrize(
    ("steps", "best"),
    [*((POWERS, best) for best in (0.125, 0.5, 2.0, 32.0, 128.0)), (WITH_ITS_OWN, 0.25)],
)
def test_a_search_ends_in_the_middle_or_at_the_end_of_its_ladder(steps, best):
    """A step of its own, which is worse here than all others, hides no shorter one."""
    tried = {}
    while points := next_points([steps], tried.get):
        tried |= {(step,): abs(step - best) if step else 9 for (step,) in points}
    assert min(tried, key=tried.get) == (best,)


def test_a_quick_search_takes_the_first_two_of_each():
    stages, tried = search("stc", LOCAL, lambda s: -s.multiplier, quick=True)
    assert [s.multiplier for s in stages[0]] == [1, 2]
    assert {s.spec for s in tried} == {"stc:keep=0.01", "stc:keep=0.003"}
    assert len(tried) == 4
    first = search(FEDAVG, LOCAL, lambda s: s.multiplier, quick=True)[0][0]
    assert [s.multiplier for s in first] == [1, 2, 4]  # its plateau is everybody's goal


def test_recipes_by_name():
    assert parse_recipes("gd, ef21 ,auto") == (FEDAVG, "auto", "ef21", "gd")
    assert set(parse_recipes("all")) == set(RECIPES)
    assert parse_recipes("all")[:3] == (FEDAVG, "auto", "lean")
    assert parse_recipes(None)[:2] == (FEDAVG, "auto")


def test_settings_survive_a_file_and_those_of_the_package_can_be_run(tmp_path):
    tuned = {"t": {"stc": Setting("stc:keep=0.01", 4, 2), "gd": Setting("gd", 8, downlink="full")}}
    (tmp_path / "tuned.json").write_text(write_tuned(tuned))
    assert read_tuned(tmp_path / "tuned.json") == tuned
    for task, recipes in read_tuned().items():
        for recipe, setting in recipes.items():
            assert setting.spec.partition(":")[0] == recipe
            make_config(Trial(task, recipe, setting, 0), TASKS[task], None)


@pytest.mark.parametrize("text", ["[", "[1]", '{"t": {"stc": {"speed": 1}}}', '{"t": 3}'])
def test_damaged_settings(tmp_path, text):
    (tmp_path / "tuned.json").write_text(text)
    with pytest.raises(ConfigError, match=r"tuned\.json' are damaged"):
        read_tuned(tmp_path / "tuned.json")


ROUNDS = 40
ACCURACY, LOSS = Goal("accuracy", ROUNDS), Goal("loss", ROUNDS)


def rising(rounds, half, top=0.9, size=10):
    """A curve that has half of its way behind after ``half`` rounds."""
    values = tuple(top * (1 - 0.5 ** (k / half)) for k in range(rounds + 1))
    return Curve(values, tuple(size * k for k in range(rounds + 1)), ((0, 0.1), (rounds, 0.8)))


def declining(rounds, half, low=0.5, size=10):
    values = tuple(low + 0.5 ** (k / half) for k in range(rounds + 1))
    return Curve(values, tuple(size * k for k in range(rounds + 1)))


def test_the_reference_is_the_best_plateau_and_the_fewest_rounds():
    """One step ends highest, another is there first: the target comes from the first of them."""
    slow, fast = rising(ROUNDS, half=4, top=0.92), rising(ROUNDS, half=2, top=0.915)
    reference = make_reference(ACCURACY, [slow, fast])
    assert reference.plateau == plateau_of(slow, ROUNDS) == pytest.approx(0.919, abs=1e-3)
    goal = reference.targets[PLATEAU]
    assert goal.value == pytest.approx(reference.plateau - 0.01)
    assert reference.crossings[PLATEAU] == fast.reach(goal)
    assert slow.reach(goal).rounds > fast.reach(goal).rounds
    assert reference.hardest.value == max(goal.value for goal in reference.targets.values())
    # A run that was cut off makes none.
    assert make_reference(ACCURACY, [rising(ROUNDS - 1, half=2)]) is None
    assert make_reference(ACCURACY, []) is None
    diverged = Curve((0.1, math.nan), (0, 10))
    reference = make_reference(ACCURACY, [diverged, rising(ROUNDS, half=2)])
    assert reference.plateau == plateau_of(rising(ROUNDS, half=2), ROUNDS)


def test_losses_are_measured_the_other_way_round():
    reference = make_reference(LOSS, [declining(ROUNDS, half=2), declining(ROUNDS, half=6)])
    assert reference.plateau == pytest.approx(0.5, abs=1e-3)
    assert reference.targets[PLATEAU].value == pytest.approx(0.505, abs=1e-3)
    assert reference.targets["90%"].value == pytest.approx(0.55, abs=1e-3)
    later = score(declining(ROUNDS, half=3, size=1), reference, PLATEAU)
    assert later.delay == pytest.approx(1.5, abs=0.1)
    assert later.savings == pytest.approx(10 / later.delay)
    for goal in (ACCURACY, LOSS):  # they get harder
        values = [target.value for target in goal.targets(0.6).values()]
        assert values == sorted(values, reverse=goal == LOSS)


def test_cost_savings_and_delay():
    reference = make_reference(ACCURACY, [rising(ROUNDS, half=2)])
    theirs = reference.crossings[PLATEAU]
    ours = rising(50, half=3, size=1)
    found = score(ours, reference, PLATEAU)
    reached = ours.reach(reference.targets[PLATEAU])
    assert reached == Crossing(reached.rounds, reached.rounds, 0.8)
    assert found.total_bytes == reached.total_bytes
    assert found.delay == reached.rounds / theirs.rounds
    assert found.savings == theirs.total_bytes / reached.total_bytes
    assert score(rising(50, half=3, top=0.85), reference, PLATEAU) is None
    easier = score(rising(50, half=3, top=0.85, size=1), reference, "90%")
    assert easier.delay > 1


def test_a_fixed_target_needs_no_reference_and_takes_what_there_is():
    """Only bytes rank; savings and delay are there once federated averaging reaches the target."""
    goal = Goal("accuracy", ROUNDS, Target("accuracy", 0.8, 3))
    alone = make_reference(goal, [])
    slow, fast = rising(ROUNDS, half=6, size=1), rising(ROUNDS, half=2, size=5)
    found = score(slow, alone, AT_TARGET)
    assert (found.savings, found.delay, alone.ceiling) == (None, None, math.inf)
    assert score(rising(ROUNDS, half=2, top=0.7), alone, AT_TARGET) is None
    reference = make_reference(goal, [rising(ROUNDS, half=2)])
    assert reference.plateau is None
    assert reference.ceiling == 2 * reference.crossings[AT_TARGET].total_bytes
    assert score(slow, reference, AT_TARGET).delay > MOST_DELAY
    assert score(fast, reference, AT_TARGET).savings == 2
    assert rank(goal, slow, reference) < rank(goal, fast, reference)  # though it is later
    later = rising(60, half=6, size=1)
    assert rank(ACCURACY, later, make_reference(ACCURACY, [fast]))[0] == 1
    assert rank(goal, rising(9, half=9), reference)[0] == 2


def test_a_curve_is_read_as_it_was_written_and_its_plateau_is_that_of_the_tasks_rounds():
    curve = Curve((0.1, math.nan, 0.3), (0, 5, 9), ((0, 0.1), (2, 0.35)))
    again = Curve.from_json(curve.to_json())
    assert again.to_json() == curve.to_json()
    assert math.isnan(again.values[1])
    assert (again.test_after(1), again.test_after(3)) == (0.35, None)

    longer = Curve(tuple(k / 100 for k in range(51)), tuple(range(51)))
    assert plateau_of(longer, ROUNDS) == pytest.approx((0.37 + 0.38 + 0.39 + 0.40) / 4)
    assert math.isnan(plateau_of(longer, 60))
    assert points_above("accuracy", 0.5, 0.52) == pytest.approx(-2)
    assert points_above("loss", 0.55, 0.5) == pytest.approx(-10)


def test_intervals_are_students_for_any_number_of_seeds():
    mean = geometric_mean([3.0])
    assert (mean.value, mean.low, mean.high) == (pytest.approx(3.0), None, None)
    mean = arithmetic_mean([0.0, 2.0] * 10)
    spread = (20 / 19 / 20) ** 0.5
    assert mean.high - mean.value == pytest.approx(2.093 * spread, rel=1e-3)  # 19 degrees
    assert (mean.includes(1.2), mean.includes(2.0)) == (True, False)
    assert not geometric_mean([2.0, 2.0, 2.0]).includes(1)
