"""The Lyapunov function of real runs, and the command that prints it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from aqg.cli.app import run_app
from aqg.core.recipes import make_recipe
from aqg.objectives.optimum import find_optimum
from aqg.sim.engine import FastSimulation
from aqg.studies.theory import lemma
from aqg.studies.theory.constants import global_constants
from aqg.studies.theory.lyapunov import step_weights, watch_run

from tests.problems import tiny_problem


@pytest.fixture(scope="module")
def problem():
    return tiny_problem()


@pytest.fixture(scope="module")
def minimum(problem):
    return find_optimum(problem.objective, problem.clients).value


def test_it_is_the_papers_formula(problem, minimum):
    recipe, alpha = make_recipe("laq"), 0.05
    trace = watch_run(
        FastSimulation(problem, recipe, alpha), 15, 4, minimum, recipe.movement.weights, alpha
    )
    simulation = FastSimulation(problem, recipe, alpha)
    models = [simulation.parameters.copy()]
    beta = step_weights(recipe.movement.weights, alpha)
    for k in range(15):
        loss = simulation.run_round().loss
        value = 4 * (loss - minimum)
        for d in range(1, len(beta) + 1):
            if k - d >= 0:
                value += beta[d - 1] * np.sum((models[k - d + 1] - models[k - d]) ** 2)
        models.append(simulation.parameters.copy())
        assert trace.values[k] == pytest.approx(value, rel=1e-12)


def test_lean_inside_its_region_always_descends_and_as_fast_as_promised(problem, minimum):
    constants = global_constants(problem, np.ones(4))
    recipe = make_recipe("lean:xi=0.5", bits=8)  # with 8 bits the tolerance is always met
    alpha = lemma.largest_step_size_within_tolerance(0.5, constants.smoothness)
    weights = recipe.movement.weights
    trace = watch_run(FastSimulation(problem, recipe, alpha), 400, 4, minimum, weights, alpha)
    assert trace.decrease_share == 1.0
    inside = 0.9 * alpha
    trace = watch_run(FastSimulation(problem, recipe, inside), 400, 4, minimum, weights, inside)
    promised = lemma.contraction_within_tolerance(
        inside, weights, constants.smoothness, constants.strong_convexity
    )
    assert trace.fitted_rate <= 1 - promised


def test_a_diverging_run_ends_the_trace(problem, minimum):
    recipe = make_recipe("gd")
    trace = watch_run(FastSimulation(problem, recipe, 50.0), 300, 4, minimum, (), 50.0)
    assert np.isfinite(trace.values).all()
    assert trace.decrease_share < 1 or len(trace.values) < 300


def test_the_command_on_settings_and_on_a_run(tmp_path, capsys):
    assert run_app(["theory", "--recipe", "lean,gd", "--json"]) == 0
    lean, gd = json.loads(capsys.readouterr().out)["theory"]
    assert lean["weight_sum"] == 1.0
    assert lean["largest_guaranteed_alpha"] == 0.0
    assert not lean["is_guaranteed"]
    assert gd["largest_guaranteed_alpha"] == pytest.approx(1 / (2 * gd["smoothness"]))

    run = tmp_path / "run"
    alpha = str(0.4 / lean["smoothness"])
    arguments = ["run", "--recipe", "lean:xi=0.5", "--alpha", alpha, "--rounds", "30"]
    assert run_app([*arguments, "--out", str(run)]) == 0
    capsys.readouterr()
    assert run_app(["theory", str(run / "lean_xi-0.5"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["theory"]
    assert row["is_guaranteed"]
    assert row["lyapunov"]["decrease_share"] == 1.0
    assert row["lyapunov"]["fitted_rate"] <= row["rate_bound"] < 1
    assert run_app(["theory", str(run)]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "is inside" in words
    assert "did not rise in 100.0%" in words


def test_the_command_says_that_a_run_diverges(tmp_path, capsys):
    run = tmp_path / "run"
    arguments = ["run", "--recipe", "gd", "--alpha", "50", "--rounds", "8", "--out", str(run)]
    assert run_app(arguments) == 0
    assert run_app(["theory", str(run / "gd")]) == 0
    assert "the run does not converge" in " ".join(capsys.readouterr().out.split())


def test_the_command_says_what_is_outside_the_theory(capsys):
    arguments = ["theory", "--model", "mlp:4", "--recipe", "aqg-2", "--set", "dropout=0.5"]
    assert run_app(arguments) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "not convex" in words
    assert "the paper's own setting, Σξ = 1, is outside its guarantee" in words
    assert "drop out with probability 0.5" in words
    assert run_app(["theory", "nowhere"]) == 2
    assert "not a run directory" in capsys.readouterr().err
