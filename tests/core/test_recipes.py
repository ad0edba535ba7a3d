"""One contract for every recipe in the table; ties and edges of the rules by hand."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aqg.core.grids import Innovation
from aqg.core.policies import (
    Always,
    Case,
    Decision,
    Lazy,
    LazyExact,
    Multilevel,
    Tolerance,
    TwoLevel,
)
from aqg.core.recipe import Recipe
from aqg.core.recipes import make_recipe, register
from aqg.errors import ConfigError
from aqg.sim.reference import ReferenceSimulation

from tests.problems import SOME_RECIPES, tiny_problem

# Sign steps have a fixed length, so their step size sets how close they can come.
STEP_SIZES = {"signsgd": 0.002, "onebit": 0.02, "qsgd": 0.02}
# Clients that disagree make the sum of signs a biased direction: SignSGD only comes near.
GAPS = {"signsgd": 0.1}


def simulate(name):
    recipe, step_size = make_recipe(name), STEP_SIZES.get(name, 0.1)
    return ReferenceSimulation(tiny_problem(), recipe, step_size, seed=5)


@cache
def losses_of(name):
    simulation = simulate(name)
    first, *_ = simulation.run_rounds(120)
    return first.loss, simulation.loss()


@pytest.mark.parametrize("name", SOME_RECIPES)
def test_converges(name):
    (start, end), (_, best) = losses_of(name), losses_of("gd")
    assert end - best < GAPS.get(name, 0.05) * (start - best)


def test_users_add_their_own():
    class EveryOther:
        """Sends two bits whenever the innovation is larger than the movement."""

        def decide(self, case):
            send = case.innovation.squared_norm > case.movement
            return Decision(send, np.full(np.shape(send), 2))

    @register("every-other", "a rule of my own")
    def make(bits):
        lean = make_recipe("lean", bits)
        return Recipe(memory=lean.memory, policy=EveryOther(), quantizer=lean.quantizer)

    records = list(simulate("every-other").run_rounds(30))
    assert {w for record in records for w in record.widths} <= {0, 2}
    with pytest.raises(ConfigError, match="must be non-empty, without"):
        register("a,b", "bad name")
    with pytest.raises(ConfigError, match="'lean' exists already"):
        register("lean", "taken")(make)


def innovation(quantized_norm, errors, squared_norm=1.0):
    squared_norm, errors, quantized_norm = map(np.float64, (squared_norm, errors, quantized_norm))
    return Innovation(np.bool_(True), squared_norm, np.zeros_like(errors), errors, quantized_norm)


ERRORS = [4.0, 1.0, 0.25, 0.0625]  # widths 1..4
STORED = np.array([0.4, 0.1, 0.02, 0.01])


def test_ties_send_and_two_level_rounds_half_up():
    stats = innovation(0.5, np.zeros(4))
    for policy in (Lazy(), TwoLevel(), Multilevel()):
        assert policy.decide(Case(stats, 0.5, np.zeros(4))).send
    assert LazyExact().decide(Case(innovation(0, [], squared_norm=2.0), 2.0, np.zeros(0))).send
    for bits, low in ((1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (8, 4)):
        case = Case(innovation(1.0, np.full(bits, 9.0)), 0.0, np.zeros(bits))
        assert TwoLevel().decide(case).width == low


@pytest.mark.parametrize(
    ("squared_norm", "movement", "expected"),
    [
        (1.0, 1.0, (False, 3)),  # at the tolerance: good enough already
        (1.1, 1.0, (True, 3)),  # 0.25 <= 0.5
        (9.0, 2.0, (True, 2)),  # 1 <= 1
        (9.0, 8.0, (True, 1)),
        (9.0, 0.1, (True, 4)),  # 0.0625 > 0.05: no width reaches it
        (9.0, 0.0, (True, 4)),
        (0.0, 0.0, (False, 4)),
    ],
)
def test_tolerance_sends_the_fewest_bits_that_do(squared_norm, movement, expected):
    decision = Tolerance(0.5).decide(Case(innovation(9.0, ERRORS, squared_norm), movement, STORED))
    assert (bool(decision.send), int(decision.width)) == expected


def some(*shape):
    return arrays(np.float64, shape, elements=st.floats(0, 1e6))


@given(some(5, 4), some(5, 4), some(5), some(5), some(5))
def test_many_clients_decide_as_one_would(errors, stored, norms, squared, movements):
    together = Innovation(np.ones(5, bool), squared, np.zeros((5, 4)), errors, norms)
    for policy in (Always(4), Lazy(), TwoLevel(), Multilevel(), Tolerance(), LazyExact()):
        batch = policy.decide(Case(together, movements, stored))
        for i in range(5):
            alone = Innovation(*(field[i] for field in together))
            single = policy.decide(Case(alone, movements[i], stored[i]))
            assert (batch.send[i], batch.width[i]) == (single.send, single.width)
