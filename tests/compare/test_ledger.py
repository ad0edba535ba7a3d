"""The file of outcomes: read while others write, cut short, joined, and thinned out."""

from __future__ import annotations

import json
import math

import pytest

from aqg.compare.ledger import Ledger
from aqg.compare.trial import CEILING, Limits, Outcome, Setting, Trial
from aqg.errors import RunError


def trial(recipe="stc", multiplier=1, seed=0, task="t"):
    return Trial(task, recipe, Setting(recipe, multiplier=multiplier), seed)


def finish(ledger, trial, total_bytes=100, ending="reached"):
    upload_bytes = total_bytes // 10
    downloads = total_bytes - upload_bytes
    ledger.add(Outcome(trial, ending, 1, 1, upload_bytes, 0.5, 1.0, downloads))


def finish_as_before(ledger, trial, upload_bytes):
    """Write the outcome as versions did that did not count downloads."""
    row = Outcome(trial, "reached", 1, 1, upload_bytes, 0.5, 1.0).to_json()
    del row["download_bytes"]
    with ledger.path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_it_reads_on_where_it_stopped(tmp_path):
    reader, writer = Ledger(tmp_path), Ledger(tmp_path)
    assert reader.outcomes() == {}
    for multiplier in (1, 2, 4):
        finish(writer, trial(multiplier=multiplier))
        assert trial(multiplier=multiplier) in reader.outcomes()


def test_limits_are_those_of_seed_zero(tmp_path):
    ledger = Ledger(tmp_path)
    assert ledger.limits(trial()) == Limits()
    finish(ledger, trial(multiplier=1), 300)
    finish(ledger, trial(multiplier=2), 200)
    finish(ledger, trial(multiplier=4), 100, "diverged")
    finish(ledger, trial("gd"), 150)
    finish(ledger, trial("gd", seed=1), 10)
    finish(ledger, trial("gd", task="u"), 10)
    assert ledger.limits(trial(multiplier=8)) == Limits(200, CEILING * 150)
    assert ledger.limits(trial("lean")) == Limits(math.inf, CEILING * 150)
    # Another seed has no rival of its own recipe, but the same ceiling.
    assert ledger.limits(trial(multiplier=2, seed=1)) == Limits(math.inf, CEILING * 150)
    assert ledger.limits(trial(task="v")) == Limits()


def test_where_downloads_are_not_on_record_uploads_count_for_all(tmp_path):
    ledger = Ledger(tmp_path)
    finish(ledger, trial("gd"), 1000)
    assert ledger.outcomes()[trial("gd")].cost == 1000
    assert not ledger.limits(trial()).uploads_only
    finish_as_before(ledger, trial("lean"), 70)
    costs = {t.recipe: (o.cost, o.total_bytes) for t, o in ledger.outcomes().items()}
    assert costs == {"gd": (100, None), "lean": (70, None)}
    assert ledger.limits(trial("lean", 2)) == Limits(70, CEILING * 70, uploads_only=True)
    # What is on record stays there: without the old trial, both directions count again.
    assert ledger.forget(["lean"], ["t"]) == 1
    assert ledger.outcomes()[trial("gd")].cost == 1000


def test_a_line_cut_short_is_run_again(tmp_path):
    ledger = Ledger(tmp_path)
    finish(ledger, trial(seed=0))
    finish(ledger, trial(seed=1))
    content = ledger.path.read_bytes()
    ledger.path.write_bytes(content[:-20])
    assert list(Ledger(tmp_path).outcomes()) == [trial(seed=0)]
    ledger = Ledger(tmp_path)
    ledger.repair()
    finish(ledger, trial(seed=2))
    assert list(Ledger(tmp_path).outcomes()) == [trial(seed=0), trial(seed=2)]


def test_a_line_of_nonsense_is_named(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.path.write_text('{"task": 1}\n')
    with pytest.raises(RunError, match=r"has a damaged line, '\{\"task\": 1\}'"):
        ledger.outcomes()


def test_two_ledgers_one_after_the_other_make_one(tmp_path):
    for name, recipe, cost in (("a", "stc", 100), ("b", "gd", 200)):
        (tmp_path / name).mkdir()
        finish(Ledger(tmp_path / name), trial(recipe), cost)
        finish(Ledger(tmp_path / name), trial("auto"), cost)
    a, b = Ledger(tmp_path / "a"), Ledger(tmp_path / "b")
    a.path.write_bytes(a.path.read_bytes() + b.path.read_bytes())
    costs = {t.recipe: outcome.cost for t, outcome in a.outcomes().items()}
    assert costs == {"stc": 100, "gd": 200, "auto": 200}  # of one trial, the last counts


def test_what_is_forgotten_is_gone_and_nothing_else(tmp_path):
    ledger = Ledger(tmp_path)
    for name in ("auto", "stc", "auto:slack=2"):
        for task in ("t", "u"):
            finish(ledger, trial(name, task=task))
    before = ledger.path.read_text().splitlines()
    assert ledger.forget(["auto"], ["u", "v"]) == 1
    assert ledger.path.read_text().splitlines() == [before[0], *before[2:]]
    assert trial("auto", task="u") not in ledger.outcomes()
    assert trial("auto", task="t") in ledger.outcomes()
    assert ledger.forget(["gd"], ["t"]) == 0
    finish(ledger, trial("auto", task="u"), 7)
    assert ledger.outcomes()[trial("auto", task="u")].total_bytes == 7
    assert {path.name for path in tmp_path.iterdir()} == {"trials.jsonl"}


def test_nothing_is_forgotten_where_nothing_was_run(tmp_path):
    assert Ledger(tmp_path).forget(["auto"], ["t"]) == 0
    assert list(tmp_path.iterdir()) == []
