"""One contract for every recipe in the table."""

from functools import cache

import numpy as np
import pytest

from aqg.core.policies import Decision
from aqg.core.recipe import Recipe
from aqg.core.recipes import make_recipe, register
from aqg.errors import ConfigError
from aqg.sim.reference import ReferenceSimulation
from aqg.sim.training import Dropout

from tests.problems import SOME_RECIPES, some_recipes, tiny_problem

# Sign steps have a fixed length, so their step size sets how close they can come.
STEP_SIZES = {"signsgd": 0.002, "onebit": 0.02, "qsgd": 0.02}
# Clients that disagree make the sum of signs a biased direction: SignSGD only comes near.
GAPS = {"signsgd": 0.1}


def simulate(name):
    recipe, step_size = make_recipe(name), STEP_SIZES.get(name, 0.1)
    return ReferenceSimulation(tiny_problem(), recipe, step_size, seed=5)


def run(simulation, rounds):
    return [simulation.run_round() for _ in range(rounds)]


@cache
def loss_after(name, rounds=120):
    simulation = simulate(name)
    run(simulation, rounds)
    return simulation.loss()


@pytest.mark.parametrize("name", SOME_RECIPES)
def test_converges(name):
    gap, way = loss_after(name) - loss_after("gd"), loss_after(name, 0) - loss_after("gd")
    assert gap < GAPS.get(name, 0.05) * way


@pytest.mark.parametrize(("name", "dtype"), some_recipes("float32", "float64"))
def test_mirrors_agree_to_the_last_bit(name, dtype):
    """Long run, random drops, one client away for a while: both sides hold the same bits."""
    dropout = Dropout(0.4, seed=3, absences=((2, 20, 70),))
    problem, recipe = tiny_problem(dtype, unequal=True), make_recipe(name, max_staleness=20)
    simulation = ReferenceSimulation(problem, recipe, STEP_SIZES.get(name, 0.1), dropout)
    records = run(simulation, 110)
    server = simulation.server
    mirrors = [server.mirror(m) for m in range(server.num_clients)]
    for client, mirror in zip(simulation.clients, mirrors, strict=True):
        assert np.array_equal(client.track.position[0], mirror)
        assert client.track.position.dtype == dtype
    assert simulation.parameters.dtype == dtype
    if make_recipe(name).memory.keeps_mirror:
        total = np.sum([m.astype(np.float64) for m in mirrors], axis=0)
        assert server.model.total == pytest.approx(total, rel=1e-9, abs=1e-12)
    assert all(record.widths[2] == -1 for record in records[19:70])
    dropped = np.mean([[width == -1 for width in r.widths[:2]] for r in records])
    assert 0.3 < dropped < 0.5
    assert simulation.loss() < records[0].loss


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

    records = run(simulate("every-other"), 30)
    assert {w for record in records for w in record.widths} <= {0, 2}
    with pytest.raises(ConfigError, match="must be non-empty, without"):
        register("a,b", "bad name")
    with pytest.raises(ConfigError, match="'lean' exists already"):
        register("lean", "taken")(make)
