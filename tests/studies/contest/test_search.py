"""The grid, the search along it, and the file that holds what it found."""

import pytest

from aqg.core.recipes import RECIPES
from aqg.errors import ConfigError
from aqg.studies.contest.measure import Curve
from aqg.studies.contest.plan import Outcome, Trial, make_config
from aqg.studies.contest.search import (
    FEDAVG,
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
from aqg.studies.contest.tasks import TASKS

from tests.problems import SOME_RECIPES

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
    with pytest.raises(ConfigError, match="unknown recipe 'zip'"):
        parse_recipes("lean,zip")
    with pytest.raises(ConfigError, match="'lean' is named twice in lean,gd,lean"):
        parse_recipes("lean,gd,lean")


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
