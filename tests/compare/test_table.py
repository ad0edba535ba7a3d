"""From outcomes to cells, tables and the picture."""

from __future__ import annotations

from aqg.compare.picture import draw
from aqg.compare.schedule import Comparison
from aqg.compare.search import settings_to_try
from aqg.compare.table import as_tables, cell_text, make_cells, settings_table
from aqg.compare.tasks import select_tasks
from aqg.compare.trial import Outcome, Setting, Trial

SOFTMAX, LOCAL = select_tasks(["digits-softmax", "digits-local"])
COMPARISON = Comparison((SOFTMAX, LOCAL), ("stc", "lean", "gd"), seeds=5)
FAST, SLOW = Setting("stc:keep=0.1"), Setting("stc:keep=0.01")


def outcomes_of(recipe, costs, task=LOCAL, setting=None, value=0.91):
    """Return an outcome per seed; a cost of None is a target that was not reached."""
    result = {}
    for seed, cost in enumerate(costs):
        trial = Trial(task.name, recipe, setting or Setting(recipe), seed)
        ending = "rounds" if cost is None else "reached"
        result[trial] = Outcome(trial, ending, 10 * (seed + 1), 5, cost or 7, value, 1.0)
    return result


def cell_of(outcomes, recipe, task=LOCAL):
    cells = make_cells(COMPARISON, outcomes)
    return next(cell for cell in cells if (cell.recipe, cell.task) == (recipe, task.name))


def test_median_spread_and_ratio():
    outcomes = outcomes_of("stc", [900, 1000, 1100]) | outcomes_of("lean", [3000, 2000, 9000, 4000])
    stc, lean = cell_of(outcomes, "stc"), cell_of(outcomes, "lean")
    assert (stc.median_bytes, stc.lowest_bytes, stc.highest_bytes, stc.ratio) == (
        1000,
        900,
        1100,
        1,
    )
    assert (lean.median_bytes, lean.ratio, lean.median_rounds) == (3500, 3.5, 25)
    assert cell_text(stc, LOCAL) == ("1 kB ×1.00", "900 B–1.1 kB")


def test_seeds_that_do_not_arrive_count_as_infinite():
    two_of_three = cell_of(outcomes_of("stc", [900, None, 1000]), "stc")
    assert (two_of_three.median_bytes, two_of_three.num_reached) == (1000, 2)
    assert cell_text(two_of_three, LOCAL) == ("1 kB ×1.00", "900 B–1 kB (2 of 3)")
    one_of_three = cell_of(outcomes_of("stc", [900, None, None]), "stc")
    assert one_of_three.median_bytes is None
    assert one_of_three.ratio is None
    assert cell_text(one_of_three, LOCAL) == ("– (91.0%)", "1 of 3 reached")


def test_the_winner_of_seed_zero_is_shown_for_all_seeds():
    outcomes = outcomes_of("stc", [500, 800, 800], setting=FAST)
    outcomes |= outcomes_of("stc", [600], setting=SLOW)
    cell = cell_of(outcomes, "stc")
    assert (cell.setting, cell.num_seeds, cell.median_bytes) == (FAST, 3, 800)


def test_without_a_winner_the_closest_is_shown():
    outcomes = outcomes_of("stc", [None], setting=FAST, value=0.6)
    outcomes |= outcomes_of("stc", [None], setting=SLOW, value=0.8)
    assert cell_of(outcomes, "stc").setting == SLOW
    outcomes = outcomes_of("stc", [None], SOFTMAX, FAST, value=0.6)
    outcomes |= outcomes_of("stc", [None], SOFTMAX, SLOW, value=0.8)
    assert cell_text(cell_of(outcomes, "stc", SOFTMAX), SOFTMAX) == ("– (0.6)", "")
    diverged = outcomes_of("gd", [None], SOFTMAX, value=None)
    assert cell_text(cell_of(diverged, "gd", SOFTMAX), SOFTMAX) == ("– (diverged)", "")


def test_a_search_that_was_cut_short_is_marked():
    comparison = Comparison((LOCAL,), ("stc",), seeds=1, search=True)
    settings = settings_to_try("stc", LOCAL)
    outcomes = {}
    for cost, setting in enumerate(settings, start=1):
        (cell,) = make_cells(comparison, outcomes) or [None]
        assert cell is None or cell_text(cell, LOCAL)[0] == "1 B ×1.00†"
        outcomes |= outcomes_of("stc", [cost], setting=setting)
    (cell,) = make_cells(comparison, outcomes)
    assert cell_text(cell, LOCAL)[0] == "1 B ×1.00"


def test_tables_have_a_row_per_recipe_and_a_column_per_task():
    outcomes = outcomes_of("stc", [1000, 2000, 3000]) | outcomes_of("lean", [50_000], SOFTMAX)
    cells = make_cells(COMPARISON, outcomes)
    full_batch, local = as_tables(COMPARISON, cells)
    assert full_batch.header == ("recipe", "digits-softmax<br>residual 0.001")
    assert full_batch.rows == (("`lean`", "50 kB ×1.00"),)  # what was not run is left out
    assert local.rows == (("`stc`", "2 kB ×1.00<br>1 kB–3 kB"),)
    settings = settings_table(make_cells(COMPARISON, outcomes_of("stc", [1], setting=FAST)))
    assert settings.rows == (("`stc`", "keep=0.1"),)


def test_the_picture_is_a_picture():
    outcomes = outcomes_of("stc", [1000, 2000]) | outcomes_of("gd", [None, None])
    assert draw(COMPARISON, make_cells(COMPARISON, outcomes)).startswith(b"\x89PNG")
