"""Which trial comes next, whatever is finished, under way, or has failed."""

from __future__ import annotations

import math
import random

import pytest

from aqg.errors import RunError
from aqg.studies.compare.ledger import Ledger
from aqg.studies.compare.plan import Comparison
from aqg.studies.compare.schedule import Schedule
from aqg.studies.compare.search import pending_settings
from aqg.studies.compare.tasks import select_tasks
from aqg.studies.compare.trial import Outcome, Setting

SOFTMAX, LOCAL = select_tasks(["digits-softmax", "digits-local"])
BOTH = (SOFTMAX, LOCAL)


def finish(schedule, ledger, trial, upload_bytes=100, ending="reached"):
    ledger.add(Outcome(trial, ending, 1, 1, upload_bytes, 0.5, 1.0))
    schedule.end(trial)


def hand_out(schedule, most=1000):
    """Take trials until the schedule has to wait."""
    trials = []
    while len(trials) < most and (trial := schedule.next_trial()) is not None:
        trials.append(trial)
    return trials


def test_settings_found_before_are_used_for_all_seeds(tmp_path):
    comparison = Comparison(BOTH, ("stc", "gd"), seeds=2)
    best = Setting("stc:keep=0.1", multiplier=2)
    ledger = Ledger(tmp_path)
    schedule = Schedule(comparison, ledger, {LOCAL.name: {"stc": best}})
    assert schedule.most_left() == 8
    trials = hand_out(schedule)
    assert len(trials) == 8
    assert {t.setting for t in trials if (t.task, t.recipe) == (LOCAL.name, "stc")} == {best}
    assert {t.setting for t in trials if (t.task, t.recipe) == (SOFTMAX.name, "stc")} == {
        Setting("stc")
    }
    for trial in trials[:3]:
        finish(schedule, ledger, trial)
    again = Schedule(comparison, ledger, {LOCAL.name: {"stc": best}})
    assert set(hand_out(again)) == set(trials[3:])


def test_recipes_in_order_and_tasks_in_turns(tmp_path):
    comparison = Comparison(BOTH, ("auto", "stc"), seeds=1, search=True)
    trials = hand_out(Schedule(comparison, Ledger(tmp_path), {}))
    assert [t.task for t in trials[:4]] == [SOFTMAX.name, LOCAL.name] * 2
    assert [t.recipe for t in trials] == ["auto"] * 9 + ["stc"] * 9
    first = [t.setting for t in trials if (t.recipe, t.task) == ("stc", LOCAL.name)]
    assert first == pending_settings("stc", LOCAL, {})[0]


def test_no_one_waits_for_the_slowest(tmp_path):
    """One trial that does not end holds up its own recipe on its own task, and nothing else."""
    comparison = Comparison(BOTH, ("auto", "stc"), seeds=2, search=True)
    ledger = Ledger(tmp_path)
    schedule = Schedule(comparison, ledger, {})
    slow = schedule.next_trial()
    ended = []
    while (trial := schedule.next_trial()) is not None:
        finish(schedule, ledger, trial)
        ended.append(trial)
    stuck = [t for t in ended if (t.recipe, t.task) == (slow.recipe, slow.task)]
    assert {t.seed for t in stuck} == {0}
    others = {(t.recipe, t.task) for t in ended if t.seed == 1}
    assert others == {(r, t.name) for r, t in comparison.pairs()} - {(slow.recipe, slow.task)}
    finish(schedule, ledger, slow)
    assert {t.seed for t in hand_out(schedule)} == {1}


def test_other_seeds_follow_the_winner_where_it_arrives(tmp_path):
    comparison = Comparison((LOCAL,), ("stc", "gd"), seeds=3, search=True)
    ledger = Ledger(tmp_path)
    schedule = Schedule(comparison, ledger, {})
    costs = {}
    later = []
    while (trial := schedule.next_trial()) is not None:
        if trial.seed:
            later.append(trial)
        costs[trial] = 100 + 7 * len(costs) % 11
        finish(
            schedule, ledger, trial, costs[trial], "too slow" if trial.recipe == "gd" else "reached"
        )
    searched = [t for t in costs if t.seed == 0 and t.recipe == "stc"]
    best = min(searched, key=lambda t: (costs[t], str(t.setting)))
    assert [(t.recipe, t.setting, t.seed) for t in later[:2]] == [
        ("stc", best.setting, s) for s in (1, 2)
    ]
    assert schedule.most_left() == 0


def test_a_contender_has_a_final_with_the_steps_beside(tmp_path):
    """It measures in full what the search abandoned; who is far behind has none."""
    comparison = Comparison((LOCAL,), ("auto", "gd"), seeds=3, search=True)
    ledger = Ledger(tmp_path)
    schedule = Schedule(comparison, ledger, {})
    later = []
    while (trial := schedule.next_trial()) is not None:
        is_first = trial not in ledger.outcomes()
        if trial.seed or not is_first:
            later.append((trial.recipe, trial.setting.multiplier, trial.seed))
        if trial.recipe == "auto" and trial.setting.multiplier == 2 and is_first and not trial.seed:
            finish(schedule, ledger, trial, 50, "costlier")
            assert ledger.limits(trial).own == math.inf
        else:
            cost = abs(trial.setting.multiplier - 4) + (100 if trial.recipe == "auto" else 151)
            finish(schedule, ledger, trial, cost)
    assert later == [
        *(("auto", 4, seed) for seed in (1, 2, 3, 4)),
        *(("auto", 2, seed) for seed in (0, 1, 2, 3, 4)),
        *(("auto", 8, seed) for seed in (1, 2, 3, 4)),
        *(("gd", 4, seed) for seed in (1, 2)),
    ]
    assert schedule.most_left() == 0


def test_one_seed_has_no_final(tmp_path):
    comparison = Comparison((LOCAL,), ("auto",), seeds=1, search=True)
    ledger = Ledger(tmp_path)
    schedule = Schedule(comparison, ledger, {})
    for number, trial in enumerate(hand_out(schedule)):
        finish(schedule, ledger, trial, 100 + number, "costlier" if number else "reached")
    assert schedule.next_trial() is None


def test_a_winner_beyond_the_ceiling_gets_no_other_seeds(tmp_path):
    comparison = Comparison((LOCAL,), ("auto", "gd"), seeds=2, search=True)
    ledger = Ledger(tmp_path)
    schedule = Schedule(comparison, ledger, {})
    seeds = {"auto": set(), "gd": set()}
    while (trial := schedule.next_trial()) is not None:
        seeds[trial.recipe].add(trial.seed)
        finish(schedule, ledger, trial, 100 if trial.recipe == "auto" else 2001)
    assert seeds == {"auto": {0, 1, 2, 3}, "gd": {0}}


@pytest.mark.parametrize("jobs", [1, 16])
def test_the_counter_never_exceeds_its_total(tmp_path, jobs):
    """The bound falls by at least one with every trial, and ends at zero."""
    comparison = Comparison(BOTH, ("auto", "lean", "stc", "qsgd"), seeds=3, search=True)
    ledger = Ledger(tmp_path)
    schedule = Schedule(comparison, ledger, {})
    draw = random.Random(jobs)
    under_way = hand_out(schedule, jobs)
    left = schedule.most_left()
    while under_way:
        trial = under_way.pop(draw.randrange(len(under_way)))
        before = ledger.outcomes().get(trial)
        assert before is None or before.ending == "costlier"
        is_search = trial.seed == 0 and before is None
        endings = ["reached", "reached", "too slow", *["costlier"] * is_search]
        # What was abandoned needs more than the best: it was abandoned for that.
        cost = draw.randrange(100, 300) + (300 if before else 0)
        finish(schedule, ledger, trial, cost, draw.choice(endings))
        assert schedule.most_left() <= left - 1
        left = schedule.most_left()
        under_way += hand_out(schedule, jobs - len(under_way))
    assert left == 0


def test_an_outcome_that_was_written_but_not_told_yet_is_still_counted(tmp_path):
    comparison = Comparison((LOCAL,), ("auto",), seeds=1, search=True)
    ledger = Ledger(tmp_path)
    schedule = Schedule(comparison, ledger, {})
    trial = schedule.next_trial()
    ledger.add(Outcome(trial, "reached", 1, 1, 100, 0.5, 1.0))
    assert schedule.most_left() == 5
    schedule.end(trial)
    assert schedule.most_left() == 4


def test_what_failed_is_not_tried_twice_and_stops_its_own_search_only(tmp_path):
    comparison = Comparison((LOCAL,), ("stc", "gd"), seeds=2, search=True)
    ledger = Ledger(tmp_path)
    schedule = Schedule(comparison, ledger, {})
    failed = schedule.next_trial()
    schedule.end(failed, RunError("out of memory"))
    seen = []
    while (trial := schedule.next_trial()) is not None:
        seen.append(trial)
        finish(schedule, ledger, trial)
    assert failed not in seen
    assert {t.seed for t in seen if t.recipe == "stc"} == {0}
    assert {t.seed for t in seen if t.recipe == "gd"} == {0, 1, 2, 3}
    assert list(schedule.failures) == [failed]
    assert schedule.most_left() == 0
    again = Schedule(comparison, ledger, {})
    assert again.next_trial() == failed
