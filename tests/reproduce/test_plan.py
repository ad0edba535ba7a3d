"""The plan covers the paper: every row, every rate, at its lengths."""

from __future__ import annotations

from collections import Counter

import pytest

from aqg.errors import ConfigError
from aqg.reproduce.paper import SETTINGS, table_one
from aqg.reproduce.plan import FULL, MAIN_READING, QUICK, make_plan, parse_sections

PARTITIONS = {
    "logistic-iid": ("logistic", "iid"),
    "logistic-noniid": ("logistic", "source"),
    "network-iid": ("softmax", "iid"),
    "network-noniid": ("softmax", "label"),
}


def test_table_one_is_the_papers():
    rows = table_one()
    assert len(rows) == 16
    assert Counter(row.setting for row in rows) == dict.fromkeys(SETTINGS, 4)
    for row in rows:
        assert row.uploads <= row.bits <= 32 * row.uploads
        assert "\n" not in row.why
    # The column "Transmission Reduction" is 1 - bits / LAQ's bits, to the paper's rounding.
    laq = {row.setting: row.bits for row in rows if row.recipe == "laq"}
    for row in rows:
        if row.saving:
            assert row.saving == pytest.approx(1 - row.bits / laq[row.setting], abs=0.011)


@pytest.mark.parametrize("scale", [FULL, QUICK], ids=["full", "quick"])
def test_every_row_of_table_one_is_run(scale):
    plan = make_plan(scale)
    runs = {
        (p.section, p.run.config.partition, p.run.config.recipe)
        for p in plan
        if p.section != "logistic" or (p.run.config.scaling, p.run.config.alpha) == MAIN_READING
    }
    for row in table_one():
        assert (*PARTITIONS[row.setting], row.recipe) in runs
    for section, partition in PARTITIONS.values():
        assert (section, partition, "lean") in runs
    names = [p.run.name for p in plan]
    assert len(set(names)) == len(names)
    assert scale.notes


def test_the_full_plan_has_the_papers_settings():
    plan = make_plan(FULL, device="cuda")
    softmax = [p.run.config for p in plan if p.section == "softmax"]
    assert {(c.rounds, c.alpha, c.bits, c.clients, c.dtype) for c in softmax} == {
        (4000, 0.02, 4, 10, "float64")
    }
    logistic = [p.run.config for p in plan if p.section == "logistic"]
    assert {(c.rounds, c.clients, c.device) for c in logistic} == {(500, 18, "cpu")}
    assert ("mean", 0.008) in {(c.scaling, c.alpha) for c in logistic}
    dropouts = [p.run.config for p in plan if p.section == "dropouts"]
    seeds = Counter((c.partition, c.dropout, c.recipe) for c in dropouts)
    assert {rate for _, rate, _ in seeds} == {0.2, 0.5, 0.7, 0.8, 0.9}
    assert min(seeds.values()) >= 5
    assert {c.device for c in dropouts} == {"cuda"}


def test_parts_can_be_chosen():
    assert parse_sections(None) == ("logistic", "softmax", "dropouts", "network")
    assert parse_sections("network, logistic") == ("logistic", "network")
    assert {p.section for p in make_plan(QUICK, sections=("network",))} == {"network"}
    with pytest.raises(ConfigError, match="unknown part 'figures'"):
        parse_sections("figures")
