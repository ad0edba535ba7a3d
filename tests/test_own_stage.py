"""The stage of ``docs/how-to/own-recipe.md``, taken from the page, works everywhere."""

from pathlib import Path

import numpy as np
import pytest

from aqg import make_recipe
from aqg.cli.app import run_app
from aqg.runs import loop
from aqg.sim import FastSimulation, LocalTraining, ReferenceSimulation, Training
from aqg.sim.training import Dropout

from tests.commands import shown_on
from tests.problems import check_engines, check_torch, tiny_problem


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
    pytest.importorskip("torch")
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
    pytest.importorskip("flwr")
    from aqg.flower import make_client_app

    from tests.flower.federation import ALPHA, PROBLEM, Federation, task_of

    federation = Federation(tmp_path, rounds=8)
    federation.grid.client_app = make_client_app(task_of, recipe=recipe)
    final = federation.run(recipe=recipe)
    reference = ReferenceSimulation(PROBLEM, recipe, ALPHA)
    list(reference.run_rounds(8))
    assert np.array_equal(final, reference.parameters)
    assert federation.agree()
