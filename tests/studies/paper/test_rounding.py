"""Data that differ in the last bit, and the runs on them."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from aqg.runs import loop
from aqg.runs.config import resolve
from aqg.runs.directory import read_lines, read_summary
from aqg.runs.setup import build_problem, find_minimum, perturb
from aqg.studies.paper.rounding import Perturbed


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
    assert (
        problem.clients[0].features
        != build_problem(resolve(settings)[0], data_dir).clients[0].features
    ).any()
    assert plain == Perturbed.from_row({k: str(v) for k, v in asdict(plain).items()})
