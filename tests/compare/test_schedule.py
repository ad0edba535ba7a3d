"""The order of trials, and what is left of them after a crash."""

from __future__ import annotations

import math

import pytest

from aqg.compare.ledger import Ledger
from aqg.compare.schedule import Comparison, create_comparison, open_comparison, waves
from aqg.compare.search import settings_to_try
from aqg.compare.tasks import select_tasks
from aqg.compare.trial import Outcome, Setting, Trial
from aqg.errors import ConfigError, RunError

SOFTMAX, LOCAL = select_tasks(["digits-softmax", "digits-local"])


def finish(ledger, trial, upload_bytes=100, ending="reached"):
    ledger.add(Outcome(trial, ending, 1, 1, upload_bytes, 0.5, 1.0))


def test_settings_found_before_are_used_for_all_seeds(tmp_path):
    comparison = Comparison((SOFTMAX, LOCAL), ("stc", "gd"), seeds=2)
    best = Setting("stc:keep=0.1", multiplier=2)
    ledger = Ledger(tmp_path)
    (wave,) = waves(comparison, ledger, {LOCAL.name: {"stc": best}})
    assert len(wave) == comparison.num_trials == 8
    assert {t.setting for t in wave if (t.task, t.recipe) == (LOCAL.name, "stc")} == {best}
    assert {t.setting for t in wave if (t.task, t.recipe) == (SOFTMAX.name, "stc")} == {
        Setting("stc")
    }
    for trial in wave[:3]:
        finish(ledger, trial)
    (rest,) = waves(comparison, ledger, {LOCAL.name: {"stc": best}})
    assert rest == wave[3:]


def test_a_search_comes_before_the_other_seeds(tmp_path):
    comparison = Comparison((LOCAL,), ("stc", "gd"), seeds=3, search=True)
    ledger = Ledger(tmp_path)
    steps = waves(comparison, ledger, {})
    first = next(steps)
    assert [t.setting for t in first] == settings_to_try("stc", LOCAL)
    assert {t.seed for t in first} == {0}
    for cost, trial in enumerate(first):
        finish(ledger, trial, upload_bytes=abs(cost - 5) + 1)
    second = next(steps)
    best = first[5].setting
    assert second[:2] == [Trial(LOCAL.name, "stc", best, seed) for seed in (1, 2)]
    assert {t.recipe for t in second[2:]} == {"gd"}
    for trial in second:
        finish(ledger, trial, ending="reached" if trial.recipe == "stc" else "diverged")
    assert list(steps) == [[]]  # nothing to repeat where no setting of gd arrived
    assert comparison.num_trials == len(first) + len(second) + 2


def test_tasks_are_searched_side_by_side(tmp_path):
    comparison = Comparison((SOFTMAX, LOCAL), ("stc",), seeds=1, search=True)
    wave = next(waves(comparison, Ledger(tmp_path), {}))
    assert [trial.task for trial in wave[:4]] == [SOFTMAX.name, LOCAL.name] * 2
    for task in (SOFTMAX, LOCAL):
        own = [trial.setting for trial in wave if trial.task == task.name]
        assert own == settings_to_try("stc", task)


def test_one_seed_makes_one_wave(tmp_path):
    comparison = Comparison((SOFTMAX, LOCAL), ("stc", "lean", "gd"), seeds=1, search=True)
    first, rest = waves(comparison, Ledger(tmp_path), {})
    assert len(first) == comparison.num_trials
    assert [t.recipe for t in first] == sorted(
        (t.recipe for t in first), key=comparison.recipes.index
    )
    assert rest == []


def test_a_plan_survives_its_directory(tmp_path):
    comparison = Comparison(
        (SOFTMAX, LOCAL), ("stc", "lean:xi=3"), seeds=4, search=True, quick=True
    )
    create_comparison(tmp_path / "c", comparison)
    assert open_comparison(tmp_path / "c") == comparison
    with pytest.raises(RunError, match="is not empty"):
        create_comparison(tmp_path / "c", comparison)
    (tmp_path / "c" / "compare.json").write_text("{}")
    with pytest.raises(RunError, match=r"compare\.json' is damaged"):
        open_comparison(tmp_path / "c")
    with pytest.raises(RunError, match=r"is not a comparison's directory: it has no compare\.json"):
        open_comparison(tmp_path)


def test_a_comparison_can_grow():
    comparison = Comparison((LOCAL,), ("lean", "gd"), seeds=2, search=True)
    grown = comparison.extended([SOFTMAX, LOCAL], ["stc", "gd"], seeds=5)
    assert grown == Comparison((SOFTMAX, LOCAL), ("stc", "lean", "gd"), seeds=5, search=True)
    assert comparison.extended((), (), None) == comparison


def test_seeds_must_be_some():
    with pytest.raises(ConfigError, match="seeds is 0; it must be at least 1"):
        Comparison((LOCAL,), ("gd",), seeds=0)


def test_a_ledger_reads_on_where_it_stopped(tmp_path):
    reader, writer = Ledger(tmp_path), Ledger(tmp_path)
    trials = [Trial("t", "stc", Setting("stc", multiplier=m), 0) for m in (1, 2, 4)]
    assert reader.outcomes() == {}
    assert reader.fewest_bytes(trials[0]) == math.inf
    for cost, trial in zip((300, 200, 100), trials, strict=True):
        finish(writer, trial, cost, "diverged" if cost == 100 else "reached")
        assert trial in reader.outcomes()
    assert reader.fewest_bytes(trials[2]) == 200
    assert reader.fewest_bytes(Trial("t", "stc", Setting("stc"), 1)) == math.inf


def test_a_line_cut_short_is_run_again(tmp_path):
    ledger = Ledger(tmp_path)
    first, second, third = (Trial("t", "gd", Setting("gd"), seed) for seed in range(3))
    finish(ledger, first)
    finish(ledger, second)
    content = ledger.path.read_bytes()
    ledger.path.write_bytes(content[:-20])
    assert list(Ledger(tmp_path).outcomes()) == [first]
    ledger = Ledger(tmp_path)
    ledger.repair()
    finish(ledger, third)
    assert list(Ledger(tmp_path).outcomes()) == [first, third]


def test_a_line_of_nonsense_is_named(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.path.write_text('{"task": 1}\n')
    with pytest.raises(RunError, match=r"has a damaged line, '\{\"task\": 1\}'"):
        ledger.outcomes()
