"""Which trial comes next, whatever is finished, under way, or has failed."""

from __future__ import annotations

import json
import math
import random

import pytest

from aqg.errors import RunError
from aqg.runs.directory import SUMMARY
from aqg.runs.files import to_json
from aqg.runs.stopping import Limits
from aqg.studies.compare.comparison import Comparison
from aqg.studies.compare.plan import TRIALS, ComparePlan, forget, read_outcomes
from aqg.studies.compare.search import pending_settings
from aqg.studies.compare.tasks import select_tasks
from aqg.studies.compare.trial import CEILING, Outcome, Setting, Trial

SOFTMAX, LOCAL = select_tasks(["digits-softmax", "digits-local"])
BOTH = (SOFTMAX, LOCAL)


class Plan(ComparePlan):
    """Hands out trials, for tests that are about these."""

    def next(self):
        job = super().next()
        if job is None:
            return None
        self.jobs = {**getattr(self, "jobs", {}), job.trial: job}
        return job.trial


def result(total_bytes=100, ending="reached"):
    row = {"rounds": 1, "uploads": 1, "value": 0.5, "ending": ending}
    sizes = {"upload_bytes": total_bytes // 10, "download_bytes": total_bytes - total_bytes // 10}
    return {"outcome": {**row, **sizes}}


def finish(plan, trial, total_bytes=100, ending="reached"):
    plan.take(plan.jobs[trial], result(total_bytes, ending))


def hand_out(plan, most=1000):
    """Take trials until the plan has to wait."""
    trials = []
    while len(trials) < most and (trial := plan.next()) is not None:
        trials.append(trial)
    return trials


def test_settings_found_before_are_used_for_all_seeds(tmp_path):
    comparison = Comparison(BOTH, ("stc", "gd"), seeds=2)
    best = Setting("stc:keep=0.1", multiplier=2)
    plan = Plan(comparison, tmp_path, {LOCAL.name: {"stc": best}})
    assert plan.most_left() == 8
    trials = hand_out(plan)
    assert len(trials) == 8
    assert {t.setting for t in trials if (t.task, t.recipe) == (LOCAL.name, "stc")} == {best}
    assert {t.setting for t in trials if (t.task, t.recipe) == (SOFTMAX.name, "stc")} == {
        Setting("stc")
    }
    for trial in trials[:3]:
        finish(plan, trial)
    again = Plan(comparison, tmp_path, {LOCAL.name: {"stc": best}})
    assert set(hand_out(again)) == set(trials[3:])


def test_recipes_in_order_and_tasks_in_turns(tmp_path):
    comparison = Comparison(BOTH, ("auto", "stc"), seeds=1, search=True)
    trials = hand_out(Plan(comparison, tmp_path, {}))
    assert [t.task for t in trials[:4]] == [SOFTMAX.name, LOCAL.name] * 2
    assert [t.recipe for t in trials] == ["auto"] * 9 + ["stc"] * 9
    first = [t.setting for t in trials if (t.recipe, t.task) == ("stc", LOCAL.name)]
    assert first == pending_settings("stc", LOCAL, {})[0]


def test_no_one_waits_for_the_slowest(tmp_path):
    """One trial that does not end holds up its own recipe on its own task, and nothing else."""
    comparison = Comparison(BOTH, ("auto", "stc"), seeds=2, search=True)
    plan = Plan(comparison, tmp_path, {})
    slow = plan.next()
    ended = []
    while (trial := plan.next()) is not None:
        finish(plan, trial)
        ended.append(trial)
    stuck = [t for t in ended if (t.recipe, t.task) == (slow.recipe, slow.task)]
    assert {t.seed for t in stuck} == {0}
    others = {(t.recipe, t.task) for t in ended if t.seed == 1}
    assert others == {(r, t.name) for r, t in comparison.pairs()} - {(slow.recipe, slow.task)}
    finish(plan, slow)
    assert {t.seed for t in hand_out(plan)} == {1}


def test_other_seeds_follow_the_winner_where_it_arrives(tmp_path):
    comparison = Comparison((LOCAL,), ("stc", "gd"), seeds=3, search=True)
    plan = Plan(comparison, tmp_path, {})
    costs = {}
    later = []
    while (trial := plan.next()) is not None:
        if trial.seed:
            later.append(trial)
        costs[trial] = 100 + 7 * len(costs) % 11
        finish(plan, trial, costs[trial], "hopeless" if trial.recipe == "gd" else "reached")
    searched = [t for t in costs if t.seed == 0 and t.recipe == "stc"]
    best = min(searched, key=lambda t: (costs[t], str(t.setting)))
    assert [(t.recipe, t.setting, t.seed) for t in later[:2]] == [
        ("stc", best.setting, s) for s in (1, 2)
    ]
    assert plan.most_left() == 0


def test_a_contender_has_a_final_with_the_steps_beside(tmp_path):
    """It measures in full what the search abandoned; who is far behind has none."""
    comparison = Comparison((LOCAL,), ("auto", "gd"), seeds=3, search=True)
    plan = Plan(comparison, tmp_path, {})
    later = []
    while (trial := plan.next()) is not None:
        is_first = trial not in read_outcomes(tmp_path)
        if trial.seed or not is_first:
            later.append((trial.recipe, trial.setting.multiplier, trial.seed))
        if trial.recipe == "auto" and trial.setting.multiplier == 2 and is_first and not trial.seed:
            finish(plan, trial, 50, "costlier")
            assert plan.limits(trial).own == math.inf
        else:
            cost = abs(trial.setting.multiplier - 4) + (100 if trial.recipe == "auto" else 151)
            finish(plan, trial, cost)
    assert later == [
        *(("auto", 4, seed) for seed in (1, 2, 3, 4)),
        *(("auto", 2, seed) for seed in (0, 1, 2, 3, 4)),
        *(("auto", 8, seed) for seed in (1, 2, 3, 4)),
        *(("gd", 4, seed) for seed in (1, 2)),
    ]
    assert plan.most_left() == 0


def test_one_seed_has_no_final(tmp_path):
    comparison = Comparison((LOCAL,), ("auto",), seeds=1, search=True)
    plan = Plan(comparison, tmp_path, {})
    for number, trial in enumerate(hand_out(plan)):
        finish(plan, trial, 100 + number, "costlier" if number else "reached")
    assert plan.next() is None


def test_a_winner_beyond_the_ceiling_gets_no_other_seeds(tmp_path):
    comparison = Comparison((LOCAL,), ("auto", "gd"), seeds=2, search=True)
    plan = Plan(comparison, tmp_path, {})
    seeds = {"auto": set(), "gd": set()}
    while (trial := plan.next()) is not None:
        seeds[trial.recipe].add(trial.seed)
        finish(plan, trial, 100 if trial.recipe == "auto" else 2001)
    assert seeds == {"auto": {0, 1, 2, 3}, "gd": {0}}


@pytest.mark.parametrize("jobs", [1, 16])
def test_the_counter_never_exceeds_its_total(tmp_path, jobs):
    """The bound falls by at least one with every trial, and ends at zero."""
    comparison = Comparison(BOTH, ("auto", "lean", "stc", "qsgd"), seeds=3, search=True)
    plan = Plan(comparison, tmp_path, {})
    draw = random.Random(jobs)
    under_way = hand_out(plan, jobs)
    left = plan.most_left()
    while under_way:
        trial = under_way.pop(draw.randrange(len(under_way)))
        before = read_outcomes(tmp_path).get(trial)
        assert before is None or before.ending == "costlier"
        is_search = trial.seed == 0 and before is None
        endings = ["reached", "reached", "hopeless", *["costlier"] * is_search]
        # What was abandoned needs more than the best: it was abandoned for that.
        cost = draw.randrange(100, 300) + (300 if before else 0)
        finish(plan, trial, cost, draw.choice(endings))
        assert plan.most_left() <= left - 1
        left = plan.most_left()
        under_way += hand_out(plan, jobs - len(under_way))
    assert left == 0


def test_a_run_that_ended_before_its_record_was_written_is_not_run_again(tmp_path):
    """The command was killed in between: the run's directory has its results."""
    comparison = Comparison((LOCAL,), ("auto",), seeds=1, search=True)
    trial = Plan(comparison, tmp_path, {}).next()
    (tmp_path / trial.directory).mkdir(parents=True)
    (tmp_path / trial.directory / SUMMARY).write_text(to_json(result(70)))
    plan = Plan(comparison, tmp_path, {})
    assert plan.most_left() == 5
    assert plan.next() != trial
    assert read_outcomes(tmp_path)[trial].total_bytes == 70
    assert plan.most_left() == 4


def test_what_failed_is_not_tried_twice_and_stops_its_own_search_only(tmp_path):
    comparison = Comparison((LOCAL,), ("stc", "gd"), seeds=2, search=True)
    plan = Plan(comparison, tmp_path, {})
    failed = plan.next()
    plan.take(plan.jobs[failed], RunError("out of memory"))
    seen = []
    while (trial := plan.next()) is not None:
        seen.append(trial)
        finish(plan, trial)
    assert failed not in seen
    assert {t.seed for t in seen if t.recipe == "stc"} == {0}
    assert {t.seed for t in seen if t.recipe == "gd"} == {0, 1, 2, 3}
    assert list(plan.failures) == [failed.directory]
    assert plan.most_left() == 0
    again = Plan(comparison, tmp_path, {})
    assert again.next() == failed


def trial(recipe="stc", multiplier=1, seed=0, task=LOCAL.name):
    return Trial(task, recipe, Setting(recipe, multiplier=multiplier), seed)


def write(directory, *outcomes):
    """Write outcomes as versions did that had no checksums."""
    rows = [outcome.to_json() for outcome in outcomes]
    for row in rows:
        if row["download_bytes"] is None:
            del row["download_bytes"]
    (directory / TRIALS).write_text("".join(json.dumps(row) + "\n" for row in rows))


def outcome(trial, total_bytes=100, ending="reached"):
    uploads = total_bytes // 10
    return Outcome(trial, ending, 1, 1, uploads, 0.5, 1.0, total_bytes - uploads)


def make_plan(directory, search=True):
    return Plan(Comparison(BOTH, ("stc", "gd", "lean"), seeds=2, search=search), directory, {})


def test_limits_are_those_of_seed_zero(tmp_path):
    assert make_plan(tmp_path).limits(trial()) == Limits()
    write(
        tmp_path,
        outcome(trial(multiplier=1), 300),
        outcome(trial(multiplier=2), 200),
        outcome(trial(multiplier=4), 100, "diverged"),
        outcome(trial("gd"), 150),
        outcome(trial("gd", seed=1), 10),
        outcome(trial("gd", task="u"), 10),
    )
    plan = make_plan(tmp_path)
    assert plan.limits(trial(multiplier=8)) == Limits(200, CEILING * 150)
    assert plan.limits(trial("lean")) == Limits(math.inf, CEILING * 150)
    # Another seed has no rival of its own recipe, but the same ceiling.
    assert plan.limits(trial(multiplier=2, seed=1)) == Limits(math.inf, CEILING * 150)
    assert plan.limits(trial(task="v")) == Limits()


def test_where_downloads_are_not_on_record_uploads_count_for_all(tmp_path):
    old = Outcome(trial("lean"), "reached", 1, 1, 70, 0.5, 1.0)
    write(tmp_path, outcome(trial("gd"), 1000), old)
    plan = make_plan(tmp_path)
    assert plan.limits(trial("lean", 2)) == Limits(70, CEILING * 70, uploads_only=True)
    # What is on record stays there: without the old trial, both directions count again.
    assert forget(tmp_path, ["lean"], [LOCAL.name]) == 1
    assert make_plan(tmp_path).limits(trial()) == Limits(math.inf, CEILING * 1000)


def test_a_line_of_nonsense_is_named(tmp_path):
    (tmp_path / TRIALS).write_text('{"task": 1}\n')
    with pytest.raises(RunError, match="line 1 is not a trial"):
        read_outcomes(tmp_path)


def test_a_record_cut_short_is_run_again(tmp_path):
    plan = make_plan(tmp_path, search=False)
    first, second = hand_out(plan, 2)
    finish(plan, first)
    finish(plan, second)
    content = (tmp_path / TRIALS).read_bytes()
    (tmp_path / TRIALS).write_bytes(content[:-20])
    plan = make_plan(tmp_path, search=False)
    assert list(read_outcomes(tmp_path)) == [first]
    assert second in hand_out(plan)


def test_records_of_two_directories_one_after_the_other_make_one(tmp_path):
    texts = []
    for name, recipe, cost in (("a", "stc", 100), ("b", "gd", 200)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, outcome(trial(recipe), cost), outcome(trial("lean"), cost))
        texts.append((tmp_path / name / TRIALS).read_text())
    (tmp_path / TRIALS).write_text("".join(texts))
    costs = {t.recipe: outcome.cost for t, outcome in read_outcomes(tmp_path).items()}
    assert costs == {"stc": 100, "gd": 200, "lean": 200}  # of one trial, the last counts


def test_what_is_forgotten_is_gone_and_nothing_else(tmp_path):
    trials = [trial(name, task=task) for name in ("auto", "stc") for task in ("t", "u")]
    write(tmp_path, *map(outcome, trials))
    for one in trials:
        (tmp_path / one.directory).mkdir(parents=True)
    assert forget(tmp_path, ["auto"], ["u", "v"]) == 1
    assert list(read_outcomes(tmp_path)) == [trials[0], *trials[2:]]
    assert [(tmp_path / one.directory).exists() for one in trials] == [True, False, True, True]
    before = (tmp_path / TRIALS).read_bytes()
    assert forget(tmp_path, ["gd"], ["t"]) == 0
    assert (tmp_path / TRIALS).read_bytes() == before
