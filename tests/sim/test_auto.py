"""The default in training: at any local rate, and with no decision that hangs on a last bit."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from aqg.core.recipes import make_recipe
from aqg.runs.config import resolve
from aqg.runs.setup import build_problem
from aqg.sim.engine import FastSimulation

SETTINGS = {"dataset": "digits", "clients": 10, "batch_size": 8, "l2": 0.0, "step": "auto"}


def simulate(recipe, device="cpu", factor=1.0, **settings):
    """Make a simulation; the model to start from is multiplied by a factor."""
    (config,) = resolve({"recipe": recipe, **SETTINGS, **settings})
    problem = build_problem(config)
    start = problem.initial_params * problem.dtype.type(factor)
    return FastSimulation(
        replace(problem, initial_params=start),
        make_recipe(recipe),
        config.alpha,
        seed=config.seed,
        device=device,
        training=config.training(),
    )


@pytest.mark.soak
@pytest.mark.parametrize("rate", [0.1, 0.3, 1.0, 3.0])
def test_one_label_per_client_is_learned_at_any_rate(rate):
    """The model itself, not the mean over the last ones; averaging is lost at the highest rate."""
    losses = {}
    for recipe in ("auto", "gd"):
        run = simulate(
            recipe,
            model="mlp:32",
            partition="label",
            local_steps=20,
            local_rate=rate,
            alpha=rate * 20 / 10,
        )
        first = run.loss()
        for _ in range(80):
            run.run_round(evaluate=False)
        losses[recipe] = run.loss()
    assert losses["auto"] < first + 0.05
    assert losses["auto"] < (losses["gd"] + 0.1 if rate < 1 else 0.5)


def play(device, factor=1.0):
    """Return what a short noisy training comes to, in single precision."""
    run = simulate(
        "auto",
        device,
        factor,
        model="mlp:16",
        partition="iid",
        local_steps=5,
        downlink="auto",
        dtype="float32",
    )
    steps, uploads = [], 0
    for _ in range(15):
        uploads += run.run_round(evaluate=False).num_uploads
        state = run.state().model.step
        steps.append(state.reach / state.energy**0.5)
    accuracy = run.problem.test_accuracy(run.averaged)
    return {"steps": steps, "uploads": uploads, "accuracy": accuracy}


def play_with(threads, device):
    names = ("OMP", "OPENBLAS", "MKL", "NUMBA")
    environment = os.environ | {f"{name}_NUM_THREADS": str(threads) for name in names}
    code = f"import json; from tests.sim.test_auto import play; print(json.dumps(play({device!r})))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.soak
def test_no_branch_hangs_on_the_last_bit_of_a_sum():
    """Threads and libraries that add in another order, and a start that differs by rounding."""
    pytest.importorskip("torch")
    expected = play("cpu")
    assert expected["uploads"] == 150
    for found in (
        play_with(1, "cpu"),
        play_with(2, "cpu"),
        play("torch:cpu"),
        play("cpu", factor=1 + 2**-22),
    ):
        assert found["uploads"] == expected["uploads"]
        assert found["steps"] == pytest.approx(expected["steps"], rel=0.02)
        assert found["accuracy"] == pytest.approx(expected["accuracy"], abs=0.03)
