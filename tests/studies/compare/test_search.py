"""The grid, the winners, and the files that hold them."""

from __future__ import annotations

import pytest

from aqg.core.recipes import RECIPES, make_recipe
from aqg.errors import ConfigError
from aqg.studies.compare.search import (
    applies,
    axes_of,
    best_setting,
    collect_tuned,
    costs_by_setting,
    default_setting,
    finalists,
    leading_setting,
    parse_recipes,
    pending_settings,
    read_grid,
    read_tuned,
    write_tuned,
)
from aqg.studies.compare.tasks import TASKS
from aqg.studies.compare.trial import Outcome, Setting, Trial

LOCAL, FULL = TASKS["local-iid"], TASKS["softmax-iid"]


def outcome(setting, upload_bytes, ending="reached", seed=0, task="t", recipe="stc"):
    trial = Trial(task, recipe, setting, seed)
    return Outcome(trial, ending, 10, 10, upload_bytes, 0.5, 1.0)


def grid(recipe, task):
    """Return all settings that a search may come upon."""
    axes = axes_of(recipe, task)
    return [axes.setting(step, value) for step in axes.steps for value in axes.values]


def search(recipe, task, cost, quick=False):
    """Search with ``cost`` of a setting: bytes, or a string and a value where it does not arrive.

    Return what was tried, stage by stage.
    """
    tried, stages = {}, []
    bound = None
    while True:
        settings, most_later = pending_settings(recipe, task, tried, quick)
        assert bound is None or len(settings) <= bound
        bound = most_later
        if not settings:
            assert most_later == 0
            return stages
        stages.append(settings)
        for setting in settings:
            result = cost(setting)
            trial = Trial(task.name, recipe, setting, 0)
            if isinstance(result, tuple):
                tried[setting] = Outcome(trial, result[0], 9, 9, 1, result[1], 1.0)
            else:
                tried[setting] = Outcome(trial, "reached", 9, 9, result, 0.5, 1.0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_everyone_gets_the_same_search(recipe):
    for task, kind in ((LOCAL, "local"), (FULL, "full-batch")):
        steps = read_grid()[kind]["steps"]
        settings = grid(recipe, task)
        parameters = {(s.spec, s.bits) for s in settings}
        assert 1 <= len(settings) / len(steps) <= 4
        assert len(set(settings)) == len(settings)
        for setting in settings:
            make_recipe(setting.spec, setting.bits)
        if recipe != "signsgd":  # its factor multiplies the step
            assert {s.multiplier for s in settings} == set(steps)
            assert len(settings) == len(steps) * len(parameters)


def test_the_grid_names_recipes_that_exist():
    grid = read_grid()
    assert set(grid["order"]) <= set(RECIPES)
    assert set(grid["local"]["parameters"]) <= set(RECIPES)


def test_parameters_have_the_same_values_in_both_regimes():
    full_batch, local = (read_grid()[kind]["parameters"] for kind in ("full-batch", "local"))
    for recipe, parameters in full_batch.items():
        assert list(parameters) == list(local[recipe])
        for name, values in parameters.items():
            assert sorted(values) == sorted(local[recipe][name])
    assert set(local) == {*full_batch, "auto"}


def test_the_default_has_nothing_to_search_but_the_step():
    """By bytes alone, however many rounds they take, it sends as little as it can."""
    assert {s.spec for s in grid("auto", LOCAL)} == {"auto:keep=0"}


def test_a_recipe_with_options_keeps_them():
    settings = grid("stc:keep=0.05", LOCAL)
    assert {s.spec for s in settings} == {"stc:keep=0.05"}
    assert len(settings) == len(read_grid()["local"]["steps"])


def test_recipes_by_name():
    assert parse_recipes("gd, ef21 ,auto") == ("auto", "ef21", "gd")
    assert set(parse_recipes("all")) == set(RECIPES)
    assert parse_recipes("all")[:6] == ("auto", "lean", "stc", "ef21", "qsgd", "topk")
    assert "auto" in parse_recipes(None)
    with pytest.raises(ConfigError, match="unknown recipe 'zip'"):
        parse_recipes("lean,zip")
    with pytest.raises(ConfigError, match="'lean' is named twice in lean,gd,lean"):
        parse_recipes("lean,gd,lean")


def test_steps_then_the_parameter_then_the_steps_beside():
    def cost(setting):
        value = float(setting.spec.partition("keep=")[2])
        return round(1000 + 100 * abs(setting.multiplier - 3.9) + 1000 * abs(value - 1e-2))

    steps, values, beside = search("stc", LOCAL, cost)
    assert [s.multiplier for s in steps] == [4, 8, 2, 16, 1]
    assert {s.spec for s in steps} == {"stc:keep=0.0001"}
    assert [s.spec for s in values] == ["stc:keep=0.001", "stc:keep=0.01", "stc:keep=0.1"]
    assert {s.multiplier for s in values} == {4}
    assert beside == [Setting("stc:keep=0.01", multiplier=m) for m in (2, 8)]


def test_at_the_edge_there_is_one_step_beside():
    first_value = "stc:keep=0.0001"
    *_, beside = search("stc", LOCAL, lambda s: (s.spec == first_value) + round(20 - s.multiplier))
    assert [s.multiplier for s in beside] == [8]


def test_if_the_first_value_stays_best_nothing_is_beside():
    stages = search("stc", LOCAL, lambda s: 1 if s.spec == "stc:keep=0.0001" else 2)
    assert [len(stage) for stage in stages] == [5, 3]


def test_without_a_parameter_there_is_one_stage():
    assert [len(stage) for stage in search("auto", LOCAL, lambda _: 1)] == [5]
    assert [len(stage) for stage in search("stc", LOCAL, lambda _: 1, quick=True)] == [2, 1]


@pytest.mark.parametrize(("task", "closer", "farther"), [(LOCAL, 0.8, 0.6), (FULL, 0.6, 0.8)])
def test_where_no_one_arrives_the_search_follows_the_closest(task, closer, farther):
    def cost(setting):
        if setting.multiplier == 1:
            return "diverged", None
        return "hopeless", closer if setting.multiplier == 2 else farther

    _, values, *_ = search("lean", task, cost)
    assert {s.multiplier for s in values} == {2}


def test_whoever_arrives_is_ahead_of_whoever_does_not():
    a, b, c, d = (Setting(name) for name in "abcd")
    outcomes = [
        outcome(a, 1, "rounds"),
        outcome(b, 9000),
        outcome(c, 8000, "diverged"),
        outcome(d, 8000),
    ]
    assert leading_setting(outcomes, LOCAL) == d
    assert leading_setting(outcomes[:2], LOCAL) == b
    assert leading_setting(outcomes[:1], LOCAL) == a


def test_what_was_tried_before_counts():
    steps, _ = pending_settings("auto", LOCAL, {})
    tried = {setting: outcome(setting, 10) for setting in steps[:3]}
    assert pending_settings("auto", LOCAL, tried) == (steps[3:], 0)


def test_what_acts_on_dropouts_is_run_with_dropouts_only():
    assert not applies("aqg-augmented", FULL)
    assert applies("aqg-augmented", TASKS["softmax-label-dropout"])
    assert applies("aqg-2", FULL)


def test_the_fewest_bytes_win():
    a, b, c = Setting("a"), Setting("b"), Setting("c", 8, 2)
    outcomes = [outcome(a, 30), outcome(b, 5, "diverged"), outcome(c, 20)]
    assert best_setting(outcomes) == c
    assert best_setting(outcomes[1:2]) is None


def test_seeds_count_before_bytes_and_what_was_abandoned_does_not_count():
    a, b, c = Setting("a"), Setting("b"), Setting("c")
    outcomes = [
        *(outcome(a, 30, seed=seed) for seed in (0, 1)),
        outcome(b, 10),
        *(outcome(c, 20, ending, seed) for seed, ending in enumerate(["costlier", "reached"])),
    ]
    assert best_setting(outcomes) == a
    assert best_setting([*outcomes, outcome(c, 31)]) == c


def test_finalists_have_the_steps_beside():
    best = Setting("qsgd", bits=8, multiplier=16)
    assert finalists("qsgd", LOCAL, best) == [best, Setting("qsgd", bits=8, multiplier=8)]
    elsewhere = Setting("qsgd", bits=3, multiplier=4)
    assert finalists("qsgd", LOCAL, elsewhere) == [elsewhere]


def test_costs_are_of_settings_that_were_run_with_all_seeds():
    a, b = Setting("a"), Setting("b")
    outcomes = [
        *(outcome(a, cost, seed=seed) for seed, cost in enumerate([10, 30, 20, 99, 99])),
        *(outcome(b, cost, seed=seed) for seed, cost in enumerate([11, 12, 9])),
    ]
    assert costs_by_setting(outcomes) == {a: [10, 30, 20, 99, 99]}
    assert costs_by_setting(outcomes, 3) == {a: [10, 30, 20], b: [11, 12, 9]}
    assert costs_by_setting(outcomes, 6) == costs_by_setting([]) == {}


def test_what_always_arrives_is_ahead_of_what_is_cheap_when_it_does():
    safe, risky = Setting("a"), Setting("b")
    outcomes = [
        *(outcome(safe, 30, seed=seed) for seed in range(3)),
        *(outcome(risky, 10, seed=seed) for seed in range(2)),
        outcome(risky, 5, "diverged", seed=2),
    ]
    assert best_setting(outcomes) == safe
    assert best_setting(outcomes[3:]) == risky


def test_winners_have_the_lowest_median_and_survive_a_file(tmp_path):
    a, b = Setting("stc:keep=0.1"), Setting("stc:keep=0.01", 4, 2)
    gd = Setting("gd")
    outcomes = [
        *(outcome(a, cost, seed=seed) for seed, cost in enumerate([30, 50, 60])),
        *(outcome(b, cost, seed=seed) for seed, cost in enumerate([40, 40, 90])),
        outcome(a, 9, "rounds", task="u"),
        outcome(gd, 50, recipe="gd"),
        *(outcome(gd, 9, "rounds", seed=seed, recipe="gd") for seed in (1, 2)),
    ]
    tuned = collect_tuned(outcomes)
    assert tuned == {"t": {"stc": b, "gd": gd}}
    (tmp_path / "tuned.json").write_text(write_tuned(tuned))
    assert read_tuned(tmp_path / "tuned.json") == tuned


@pytest.mark.parametrize("text", ["[", "[1]", '{"t": {"stc": {"speed": 1}}}', '{"t": 3}'])
def test_damaged_settings(tmp_path, text):
    (tmp_path / "tuned.json").write_text(text)
    with pytest.raises(ConfigError, match=r"tuned\.json' are damaged"):
        read_tuned(tmp_path / "tuned.json")


def test_missing_settings(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json' cannot be read: No such file"):
        read_tuned(tmp_path / "none.json")


def test_the_settings_of_the_package_are_of_the_grid():
    for task, recipes in read_tuned().items():
        for recipe, setting in recipes.items():
            assert setting in grid(recipe, TASKS[task])


def test_without_a_search_a_recipe_is_run_as_it_is():
    assert default_setting("stc", LOCAL) == Setting("stc")
    assert default_setting("signsgd", LOCAL).multiplier < 0.1
