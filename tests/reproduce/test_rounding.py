"""Data that differ in the last bit, and the runs on them."""

from __future__ import annotations

import numpy as np

from aqg.reproduce.rounding import (
    JOURNAL,
    PerturbedRun,
    left_to_do,
    perturb,
    read_journal,
    run_perturbed,
)
from aqg.runs.config import resolve
from aqg.runs.processes import Workers


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


def test_runs_are_written_down_and_not_repeated(tmp_path, data_dir):
    (config,) = resolve(
        {"dataset": "heterogeneous", "scaling": "sum", "recipe": "laq", "rounds": 20}
    )
    tasks = [PerturbedRun(config, draw, data_dir) for draw in (0, 1)]
    with Workers(1) as workers:
        assert run_perturbed(workers, tasks[:1], tmp_path) == {}
    text = (tmp_path / JOURNAL).read_text()
    (tmp_path / JOURNAL).write_text(text + '{"partition": "so')  # a crash while writing
    assert left_to_do(tasks, tmp_path) == tasks[1:]
    with Workers(1) as workers:
        assert run_perturbed(workers, tasks[1:], tmp_path) == {}
    plain, moved = read_journal(tmp_path)
    assert (plain.draw, moved.draw) == (0, 1)
    assert plain.uploads > 0
    # Twenty rounds are too few for the last bit to grow.
    assert abs(plain.residual - moved.residual) < 1e-9
    assert left_to_do(tasks, tmp_path) == []
