"""What runs next: federated averaging first, then everyone else against it, and nothing twice."""

import json
import math
import random
from dataclasses import replace

import pytest

from aqg.errors import ConfigError, RunError
from aqg.runs.directory import SUMMARY
from aqg.runs.files import seal, to_json
from aqg.studies.contest.measure import Curve
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
    Setting,
    default_setting,
    parse_recipes,
)
from aqg.studies.contest.table import as_tables, make_cells, versus_text, write_results
from aqg.studies.contest.tasks import select_tasks

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
    return summary(
        half, size, job.config.rounds, ending="rounds" if recipe == "qsgd" else "reached"
    )


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
    assert comparison.extended((), (), None) == grown.narrowed([local], ["gd", "lean"]).extended(
        (), (), 2
    )
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
