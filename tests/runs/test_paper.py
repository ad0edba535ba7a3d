"""The paper's logistic setting on its own data: the benchmark's numbers, kept from drifting."""

import pytest

from aqg.runs.config import resolve
from aqg.runs.setup import build_problem, find_minimum, make_simulation


@pytest.mark.soak
@pytest.mark.parametrize(("split", "low", "high"), [("iid", 0.3, 0.5), ("source", 0.3, 0.55)])
def test_two_level_saves_of_laq_bits(split, low, high, data_dir):
    settings = {"dataset": "heterogeneous", "scaling": "sum", "partition": split}
    bits = {}
    for config in resolve({**settings, "recipe": "laq,aqg-2", "eval_every": 500}):
        problem = build_problem(config, data_dir)
        simulation = make_simulation(config, problem)
        records = [simulation.run_round(evaluate=False) for _ in range(config.rounds)]
        bits[config.recipe] = sum(record.bits_per_param for record in records)
        assert simulation.loss() - find_minimum(config, problem) < 1e-9
    assert low < 1 - bits["aqg-2"] / bits["laq"] < high
