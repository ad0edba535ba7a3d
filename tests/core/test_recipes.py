"""One contract for every recipe in the table, ties and edges by hand, and a stage of one's own."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from aqg.cli.app import run_app
from aqg.core.kernels import Innovation
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
from aqg.runs import loop
from aqg.sim.engine import FastSimulation
from aqg.sim.reference import ReferenceSimulation
from aqg.sim.training import Dropout, LocalTraining, Training

from tests.commands import shown_on
from tests.problems import SOME_RECIPES, check_engines, check_torch, tiny_problem

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


@pytest.fixture
def code():
    found = shown_on("how-to/own-recipe.md", "clipped.py")
    assert len(found.splitlines()) <= 35
    return found


@pytest.fixture
def recipe(code):
    exec(compile(code, "clipped.py", "exec", dont_inherit=True), {"__name__": "clipped"})
    return make_recipe("clipped:factor=0.9")


ARGUMENTS = {"dropout": Dropout(0.3, seed=2), "seed": 3}
TRAINING = Training(LocalTraining(batch_size=8, steps=3, rate=0.05), participation=0.7)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_reference_engine_and_resume(recipe, dtype):
    problem = tiny_problem(dtype, num_clients=5, unequal=True)
    options = {"training": TRAINING, **ARGUMENTS}
    reference, fast = check_engines(problem, recipe, 0.05, **options, rounds=30)
    assert reference.state().to_arrays()["clients/stages/clip/usual"].all()
    plain = FastSimulation(problem, make_recipe("lean"), 0.05, training=TRAINING, **ARGUMENTS)
    list(plain.run_rounds(30))
    assert not np.array_equal(plain.parameters, fast.parameters)  # it does clip


def test_torch(recipe):
    problem = tiny_problem(num_clients=5, unequal=True)
    check_torch(problem, recipe, 0.05, training=TRAINING, **ARGUMENTS, rounds=20)


def test_command_line_and_resume(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "_SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    monkeypatch.setattr(loop, "_LARGEST_SHARE_OF_CHECKPOINTS", 1e9)
    Path("clipped.py").write_text(code)
    arguments = ["--recipe", "clipped:factor=0.9", "--set", 'plugins=["clipped.py"]']
    assert run_app(["run", *arguments, "--rounds", "9", "--out", "whole"]) == 0

    def run_until_crash(simulation, evaluate=True, run_round=FastSimulation.run_round):
        if simulation.next_round == 6:
            raise Crash
        return run_round(simulation, evaluate)

    with monkeypatch.context() as broken:
        broken.setattr(FastSimulation, "run_round", run_until_crash)
        with pytest.raises(Crash):
            run_app(["run", *arguments, "--rounds", "9", "--out", "cut"])
    assert run_app(["run", "--resume", "cut", "--allow-code"]) == 0
    (whole,), (cut,) = (list(Path(name).rglob("rounds.jsonl")) for name in ("whole", "cut"))
    assert len(whole.read_text().splitlines()) == 9
    assert cut.read_text() == whole.read_text()


class Crash(BaseException):
    """Stands for a process that dies."""


def test_flower(recipe, tmp_path):
    from aqg.flower import make_client_app

    from tests.flower.federation import ALPHA, PROBLEM, Federation, task_of

    federation = Federation(tmp_path, rounds=8)
    federation.grid.client_app = make_client_app(task_of, recipe=recipe)
    final = federation.run(recipe=recipe)
    reference = ReferenceSimulation(PROBLEM, recipe, ALPHA)
    list(reference.run_rounds(8))
    assert np.array_equal(final, reference.parameters)
    assert federation.agree()
