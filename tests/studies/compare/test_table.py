"""From outcomes to cells, tables and the picture."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from aqg.cli.compare_display import comparison_tables
from aqg.studies.compare.comparison import PLAN, Comparison, open_comparison
from aqg.studies.compare.picture import draw
from aqg.studies.compare.plan import TRIALS
from aqg.studies.compare.results import TABLES, write_results
from aqg.studies.compare.search import pending_settings
from aqg.studies.compare.table import as_tables, cell_text, make_cells, settings_table, summary
from aqg.studies.compare.tasks import select_tasks
from aqg.studies.compare.trial import CEILING, Outcome, Setting, Trial

SOFTMAX, LOCAL = select_tasks(["digits-softmax", "digits-local"])
COMPARISON = Comparison((SOFTMAX, LOCAL), ("auto", "lean", "stc", "gd"), seeds=5)
FAST, SLOW = Setting("stc:keep=0.1"), Setting("stc:keep=0.01")


def outcomes_of(recipe, costs, task=LOCAL, setting=None, value=0.91, failure="rounds"):
    """Return an outcome per seed; without a cost, or below zero, the target was not reached."""
    result = {}
    for seed, cost in enumerate(costs):
        trial = Trial(task.name, recipe, setting or Setting(recipe), seed)
        ending = failure if cost is None or cost < 0 else "reached"
        result[trial] = Outcome(trial, ending, 10 * (seed + 1), 5, abs(cost or 7), value, 1.0)
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
    assert cell_text(two_of_three, LOCAL) == ("1 kB ×1.00", "900 B–1 kB 2/3")
    one_of_three = cell_of(outcomes_of("stc", [900, None, None]), "stc")
    assert one_of_three.median_bytes is None
    assert one_of_three.ratio is None
    assert cell_text(one_of_three, LOCAL) == ("– (91.0%)", "1/3")


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


def test_who_was_stopped_at_the_ceiling_is_said_to_be_above_it():
    outcomes = outcomes_of("stc", [100]) | outcomes_of("gd", [-2003], failure="beyond", value=0.5)
    cell = cell_of(outcomes, "gd")
    assert (cell.median_bytes, cell.ratio, cell.beyond_bytes, cell.ratio_above) == (
        None,
        None,
        2003,
        CEILING,
    )
    assert cell_text(cell, LOCAL) == (f"> ×{CEILING}", "")
    # One setting stopped there is enough, whatever became of the others that did not arrive.
    outcomes |= outcomes_of("gd", [None], setting=FAST, value=0.89)
    assert cell_text(cell_of(outcomes, "gd"), LOCAL) == (f"> ×{CEILING}", "")
    # One that arrived is worth more.
    outcomes |= outcomes_of("gd", [2500], setting=SLOW)
    assert cell_text(cell_of(outcomes, "gd"), LOCAL) == ("2.5 kB ×25.00", "")


def test_a_ceiling_that_has_moved_since_says_less():
    """The recipe that set it was measured anew, and needs more now."""
    outcomes = outcomes_of("stc", [300]) | outcomes_of("gd", [-2003], failure="beyond", value=0.5)
    assert cell_text(cell_of(outcomes, "gd"), LOCAL) == ("> ×6", "")
    alone = outcomes_of("gd", [-2003], failure="beyond", value=0.5)
    assert cell_text(cell_of(alone, "gd"), LOCAL) == ("– (50.0%)", "")


def test_seeds_stopped_at_the_ceiling():
    outcomes = outcomes_of("stc", [100]) | outcomes_of("gd", [1900, -2001, -2001], failure="beyond")
    assert cell_text(cell_of(outcomes, "gd"), LOCAL) == (f"> ×{CEILING}", "1/3")
    outcomes = outcomes_of("stc", [100]) | outcomes_of("gd", [1900, 1950, -2001], failure="beyond")
    assert cell_text(cell_of(outcomes, "gd"), LOCAL) == ("1.95 kB ×19.50", "1.9 kB–1.95 kB 2/3")


def test_a_search_that_is_not_finished_is_marked():
    comparison = Comparison((LOCAL,), ("stc",), seeds=1, search=True)
    outcomes = {}
    tried = 0
    while settings := pending_settings("stc", LOCAL, {t.setting: o for t, o in outcomes.items()})[
        0
    ]:
        for setting in settings:
            (cell,) = make_cells(comparison, outcomes) or [None]
            assert cell is None or cell_text(cell, LOCAL)[0] == "1 B ×1.00†"
            tried += 1
            outcomes |= outcomes_of("stc", [tried], setting=setting)
    (cell,) = make_cells(comparison, outcomes)
    assert cell_text(cell, LOCAL)[0] == "1 B ×1.00"
    assert tried == 8  # of 20: the first value of the parameter stays best


def test_a_final_that_is_not_finished_is_marked():
    comparison = Comparison((LOCAL,), ("auto", "gd"), seeds=2, search=True)
    outcomes = {}
    for recipe, costs in (("auto", [100, 100]), ("gd", [151, 151])):
        for setting in pending_settings(recipe, LOCAL, {})[0]:
            cost = costs if setting.multiplier == 4 else [2 * costs[0]]
            outcomes |= outcomes_of(recipe, cost, setting=setting)
    auto, gd = make_cells(comparison, outcomes)
    assert (auto.is_partial, gd.is_partial) == (True, False)  # the second is too far behind
    for multiplier, cost in ((4, 100), (2, 101), (8, 102)):
        setting = Setting("auto:keep=0", multiplier=multiplier)
        outcomes |= outcomes_of("auto", [cost] * 4, setting=setting)
        (auto, _) = make_cells(comparison, outcomes)
        assert auto.is_partial == (multiplier != 8)
    assert (auto.setting.multiplier, auto.num_seeds) == (4, 4)


def test_a_line_says_how_the_default_compares():
    assert summary(make_cells(COMPARISON, outcomes_of("stc", [100]))) == ""
    assert summary(make_cells(COMPARISON, outcomes_of("auto", [None]))) == ""
    outcomes = outcomes_of("stc", [1000]) | outcomes_of("auto", [1100])
    outcomes |= outcomes_of("lean", [1000], SOFTMAX) | outcomes_of("auto", [1500], SOFTMAX)
    assert summary(make_cells(COMPARISON, outcomes)) == (
        "auto is within 10% of the best on 1 of 2 tasks; at worst it needs ×1.50, on "
        "digits-softmax."
    )
    outcomes |= outcomes_of("auto", [None], SOFTMAX)
    assert summary(make_cells(COMPARISON, outcomes)) == (
        "auto is within 10% of the best on 1 of 2 tasks; at worst it needs ×1.10, on "
        "digits-local; it does not reach the target on digits-softmax."
    )


def test_tables_have_a_row_per_recipe_and_a_column_per_task():
    outcomes = outcomes_of("stc", [1000, 2000, 3000]) | outcomes_of("lean", [50_000], SOFTMAX)
    cells = make_cells(COMPARISON, outcomes)
    (full_batch, _), (local, line) = as_tables(COMPARISON, cells)
    assert line == ""  # no result of the default
    assert full_batch.header == ("recipe", "digits-softmax<br>residual 0.001")
    assert full_batch.rows == (("`lean`", "50 kB ×1.00"),)  # what was not run is left out
    assert local.rows == (("`stc`", "2 kB ×1.00<br>1 kB–3 kB"),)
    settings = settings_table(make_cells(COMPARISON, outcomes_of("stc", [1], setting=FAST)))
    assert settings.rows == (("`stc`", "keep=0.1"),)


def with_downloads(outcomes):
    """Return the outcomes with as many bytes down as up, times nine."""
    return {t: replace(o, download_bytes=9 * o.upload_bytes) for t, o in outcomes.items()}


def test_the_cost_is_both_directions_and_uploads_have_a_column():
    outcomes = outcomes_of("stc", [1000, 2000, 3000]) | outcomes_of("gd", [None])
    cells = make_cells(COMPARISON, with_downloads(outcomes))
    stc, gd = cells
    assert (stc.median_bytes, stc.counted) == (20_000, "total_bytes")
    assert (stc.median_upload_bytes, stc.median_download_bytes) == (2000, 18_000)
    assert stc.to_json()["median_upload_bytes"] == 2000
    assert gd.median_upload_bytes is None
    ((local, _),) = as_tables(COMPARISON, cells)
    assert local.header == ("recipe", "digits-local<br>accuracy 90.0%", "of it uploaded")
    assert local.rows == (
        ("`stc`", "20 kB ×1.00<br>10 kB–30 kB", "2 kB"),
        ("`gd`", "– (91.0%)", ""),
    )
    assert local.note.startswith("Bytes uploaded and downloaded by all clients until the target")
    (table,) = (t.to_terminal() for t in comparison_tables(COMPARISON, cells, 200))
    columns = [list(column.cells) for column in table.columns if "uploaded" in column.header]
    assert ["2 kB", ""] in columns


def test_a_comparison_without_downloads_counts_uploads_and_says_so():
    cells = make_cells(COMPARISON, outcomes_of("stc", [1000]))
    assert [cell.counted for cell in cells] == ["upload_bytes"]
    ((local, _),) = as_tables(COMPARISON, cells)
    assert local.header == ("recipe", "digits-local<br>accuracy 90.0%")
    assert local.note.startswith("Bytes uploaded by all clients until the target")


def test_the_published_tables_stay_as_they_are(tmp_path):
    published = Path(__file__).parents[3] / "results" / "compare"
    for name in (PLAN, TRIALS):
        shutil.copy(published / name, tmp_path)
    cells = write_results(open_comparison(tmp_path), tmp_path)
    assert {cell.counted for cell in cells} == {"upload_bytes"}
    assert (tmp_path / TABLES).read_text() == (published / TABLES).read_text()


def test_the_picture_is_a_picture():
    outcomes = outcomes_of("stc", [1000, 2000]) | outcomes_of("gd", [None, None])
    outcomes |= outcomes_of("lean", [-90_000], failure="beyond") | outcomes_of("auto", [5], SOFTMAX)
    for some in (outcomes, outcomes_of("gd", [None]), {}):
        assert draw(COMPARISON, make_cells(COMPARISON, some)).startswith(b"\x89PNG")
