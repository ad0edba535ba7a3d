"""The grid and the search along it; plateaus, goals, cost and delay; the file of what was found."""

import math

import pytest

from aqg.core.recipes import RECIPES
from aqg.errors import ConfigError
from aqg.runs.stopping import Target
from aqg.studies.contest.measure import (
    FIXED,
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


def falling(rounds, half, low=0.5, size=10):
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
    reference = make_reference(LOSS, [falling(ROUNDS, half=2), falling(ROUNDS, half=6)])
    assert reference.plateau == pytest.approx(0.5, abs=1e-3)
    assert reference.targets[PLATEAU].value == pytest.approx(0.505, abs=1e-3)
    assert reference.targets["90%"].value == pytest.approx(0.55, abs=1e-3)
    later = score(falling(ROUNDS, half=3, size=1), reference, PLATEAU)
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
    found = score(slow, alone, FIXED)
    assert (found.savings, found.delay, alone.ceiling) == (None, None, math.inf)
    assert score(rising(ROUNDS, half=2, top=0.7), alone, FIXED) is None
    reference = make_reference(goal, [rising(ROUNDS, half=2)])
    assert reference.plateau is None
    assert reference.ceiling == 2 * reference.crossings[FIXED].total_bytes
    assert score(slow, reference, FIXED).delay > MOST_DELAY
    assert score(fast, reference, FIXED).savings == 2
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
