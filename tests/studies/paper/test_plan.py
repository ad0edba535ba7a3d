"""The plan covers the paper: every row, every rate, at its lengths."""

from collections import Counter

import numpy as np
import pytest

from aqg.errors import ConfigError
from aqg.runs import loop
from aqg.runs.config import resolve
from aqg.runs.directory import read_lines, read_summary
from aqg.runs.setup import build_problem, find_minimum, perturb
from aqg.studies.paper.outcomes import Perturbed, Results, key_of, read_results, write_results
from aqg.studies.paper.plan import BLOCKS, FULL, QUICK, TABLE_2, make_plan, parse_sections


def test_table_two_is_the_papers():
    rows = TABLE_2
    assert len(rows) == 16
    assert Counter(row.setting for row in rows) == dict.fromkeys(BLOCKS, 4)
    for row in rows:
        assert row.uploads <= row.bits <= 32 * row.uploads
    # The column "Transmission Reduction" is 1 - bits / LAQ's bits, to the paper's rounding.
    laq = {row.setting: row.bits for row in rows if row.recipe == "laq"}
    for row in rows:
        if row.saving:
            assert row.saving == pytest.approx(1 - row.bits / laq[row.setting], abs=0.011)


@pytest.mark.parametrize("scale", [FULL, QUICK], ids=["full", "quick"])
def test_every_row_of_table_two_is_run(scale):
    plan = make_plan(scale)
    runs = {(p.section, p.config.partition, p.config.recipe) for p in plan}
    for row in TABLE_2:
        assert (*BLOCKS[row.setting], row.recipe) in runs
    for section, partition in BLOCKS.values():
        assert {(section, partition, "lean"), (section, partition, "auto")} <= runs
    names = [p.name for p in plan]
    assert len(set(names)) == len(names)
    assert scale["notes"]


def test_the_full_plan_has_the_papers_settings():
    plan, by_section = make_plan(FULL, device="cuda"), {}
    for one in plan:
        by_section.setdefault(one.section, []).append(one.config)

    def fewest(section, *names):
        counts = Counter(tuple(getattr(c, name) for name in names) for c in by_section[section])
        return min(counts.values()), set(counts)

    softmax, dropouts, logistic = (by_section[s] for s in ("softmax", "dropouts", "logistic"))
    lengths = {(c.rounds, c.alpha, c.bits, c.clients, c.dtype) for c in softmax}
    assert lengths == {(4000, 0.02, 4, 10, "float64")}
    assert fewest("softmax", "partition", "recipe")[0] >= 5
    assert {(c.rounds, c.clients, c.device) for c in logistic} == {(500, 18, "cpu")}
    assert {("mean", 0.008), ("sum", 0.008)} < {(c.scaling, c.alpha) for c in logistic}
    assert fewest("logistic", "partition", "recipe", "scaling", "alpha")[0] >= 10
    lengths = {(c.rounds, c.dtype, c.alpha, c.device) for c in dropouts}
    assert lengths == {(4000, "float64", 0.02, "cuda")}
    assert fewest("dropouts", "partition", "dropout", "recipe")[0] >= 10
    rates = {(p, rate) for p in ("iid", "label") for rate in (0.2, 0.5, 0.7, 0.8, 0.9)}
    assert fewest("dropouts", "partition", "dropout")[1] == rates
    # Of the runs on perturbed data, one is on the data itself.
    draws = Counter(key_of(config)[:3] for config in by_section["rounding"])
    assert set(draws.values()) == {FULL["perturbations"] + 1}
    assert {config.seed for config in by_section["rounding"]} == {0}


def test_parts_can_be_chosen():
    assert parse_sections(None) == ("logistic", "rounding", "softmax", "dropouts", "network")
    assert parse_sections("network, logistic") == ("logistic", "network")
    assert parse_sections("table2") == ("logistic", "softmax")
    assert {p.section for p in make_plan(QUICK, sections=("network",))} == {"network"}
    with pytest.raises(ConfigError, match="unknown part 'figures'"):
        parse_sections("figures")


def test_features_move_by_one_unit_in_the_last_place():
    features = np.random.default_rng(0).standard_normal((50, 8))
    features[3] = 0.0
    moved = perturb(features, 1)
    units = np.abs(moved - features) / np.spacing(np.abs(features))
    assert set(np.unique(units.round(3))) <= {0.0, 0.5, 1.0}  # half a unit down from a power of 2
    assert 0.5 < np.mean(moved != features) < 0.75
    assert not moved[3].any()
    assert np.array_equal(moved, perturb(features, 1))
    assert not np.array_equal(moved, perturb(features, 2))
    assert perturb(features, 0) is features


def test_a_run_on_moved_data_is_an_ordinary_run(tmp_path, data_dir):
    settings = {"dataset": "heterogeneous", "scaling": "sum", "recipe": "laq", "rounds": 20}
    rows = []
    for draw in (0, 1):
        (config,) = resolve({**settings, "perturbation": draw})
        problem = build_problem(config, data_dir)
        minimum = find_minimum(config, build_problem(resolve(settings)[0], data_dir))
        directory = tmp_path / str(draw)
        loop.create_run(directory, config)
        loop.run(config, problem, minimum, directory)
        rows.append(Perturbed.of(config, read_lines(directory), read_summary(directory)))
    plain, moved = rows
    assert (plain.draw, moved.draw) == (0, 1)
    assert plain.uploads == plain.uploads_before > 0
    # Twenty rounds are too few for the last bit to grow.
    assert abs(plain.residual - moved.residual) < 1e-9
    on_itself = build_problem(resolve(settings)[0], data_dir)
    assert (problem.clients[0].features != on_itself.clients[0].features).any()
    write_results(tmp_path, Results((), {}, {}, perturbed=(plain, moved)))
    assert read_results(tmp_path).perturbed == (plain, moved)
