"""Groups of runs: who belongs together, what they are called, how they look."""

from __future__ import annotations

import pytest

from aqg.core.recipes import RECIPES
from aqg.report.curves import result_of
from aqg.report.runs import COLORS, assign_colors, compare, read_runs
from aqg.report.write import facts, headline, title
from aqg.runs.directory import CONFIG


@pytest.fixture(scope="module")
def comparison(make_run, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for recipe, decay in (("lean", 0.08), ("gd", 0.05)):
        for dropout in (0.0, 0.5):
            for seed in (0, 1, 10):
                name = root / f"{recipe}-{dropout}-{seed}"
                make_run(name, recipe, seed, decay=decay, dropout=dropout)
    return compare(read_runs([root]))


def test_runs_that_differ_in_the_seed_only_are_one_group(comparison):
    assert len(comparison.groups) == 4
    for group in comparison.groups:
        assert [run.seed for run in group.runs] == [0, 1, 10]
    assert comparison.recipes == ("gd", "lean")
    assert len(comparison.runs) == 12


def test_labels_name_what_differs_and_nothing_else(comparison):
    assert comparison.telling == ("dropout",)
    labels = [group.label for group in comparison.groups]
    assert labels == [
        "gd · dropout 0",
        "gd · dropout 0.5",
        "lean · dropout 0",
        "lean · dropout 0.5",
    ]


def test_a_recipe_has_one_color_and_a_setting_one_line_style(comparison):
    looks = {group.label: (group.color, group.dash) for group in comparison.groups}
    assert len(set(looks.values())) == 4
    assert looks["gd · dropout 0"][0] == looks["gd · dropout 0.5"][0]
    assert looks["gd · dropout 0"][1] == looks["lean · dropout 0"][1]


def test_settings_that_change_together_count_once(make_run, tmp_path):
    make_run(tmp_path / "a", dataset="digits", rounds=2)
    make_run(tmp_path / "b", dataset="mnist", rounds=2)
    comparison = compare(read_runs([tmp_path]))
    assert comparison.telling == ("dataset",)
    assert title(comparison) == "lean on digits and mnist"


def test_colors_differ_until_all_are_taken():
    names = list(RECIPES)
    some = assign_colors(names[: len(COLORS)])
    assert len(set(some.values())) == len(some)
    many = assign_colors([f"own-{i}" for i in range(40)])
    assert set(many.values()) == set(range(len(COLORS)))
    assert assign_colors(["own", "gd", "lean"])["gd"] == assign_colors(["gd"])["gd"]


def test_words(comparison):
    assert title(comparison) == "gd and lean on digits"
    assert facts(comparison)[:3] == ["12 runs", "softmax", "10 clients"]
    assert "40 rounds" in facts(comparison)


def test_a_deployment_need_not_say_what_it_trains(make_run, tmp_path):
    config = make_run(tmp_path / "run", rounds=2) / CONFIG
    config.write_text('recipe = "lean"\ndataset = "custom"\nmodel = "custom"\nclients = 10\n')
    comparison = compare(read_runs([tmp_path]))
    assert title(comparison) == "lean"
    assert facts(comparison) == ["1 run", "10 clients", "2 rounds"]


def test_the_headline_compares_equal_settings(comparison):
    costs = {}
    for group in comparison.groups:
        costs[group.label] = sorted(result_of(run).target_total_bytes for run in group.runs)[1]
    savings = [
        costs[f"gd · dropout {dropout}"] / costs[f"lean · dropout {dropout}"]
        for dropout in ("0", "0.5")
    ]
    sentence = headline(comparison)
    assert sentence.startswith("lean came within 0.5 of the minimum after ")
    assert f"{min(savings):.3g}" in sentence
    assert " up and down, " in sentence
    assert sentence.endswith("than gd.")


def test_no_headline_without_a_target_or_a_rival(make_run, tmp_path):
    make_run(tmp_path / "lean", rounds=2)
    assert headline(compare(read_runs([tmp_path]))) is None
    make_run(tmp_path / "gd", "gd", rounds=2, finished=False)
    assert headline(compare(read_runs([tmp_path]))) is None
