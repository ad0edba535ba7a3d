"""The reference simulator against the paper's pseudocode, written out once more in plain NumPy."""

import numpy as np
import pytest

from aqg.core.grids import round_up_to_bfloat16
from aqg.core.recipes import make_recipe
from aqg.sim.reference import ReferenceSimulation

from tests.problems import tiny_problem

B_MAX, DEPTH, ALPHA = 4, 10, 0.08


def midrise(delta, width):
    step = round_up_to_bfloat16(2 * np.abs(delta).max() / (2**width - 1))
    return (np.floor(delta / step) + 0.5) * step


def midtread(delta, width):
    if width == 1:
        return np.where(delta >= 0, 1, -1) * round_up_to_bfloat16(np.abs(delta).mean())
    step = round_up_to_bfloat16(np.abs(delta).max() / (2 ** (width - 1) - 1))
    return np.rint(delta / step) * step


def choose_width(recipe, delta, errors, stored, thetas):
    """Return the width by the paper's equation 6, from the whole model history."""
    steps = [np.sum((a - b) ** 2) for a, b in zip(thetas[1:], thetas, strict=False)][::-1][:DEPTH]
    scale = 1 / (ALPHA**2 * stored["num_clients"] ** 2)
    if recipe == "lean":
        tolerance = scale * np.mean(steps) if steps else 0.0
        if delta @ delta <= tolerance:
            return 0
        good = [b for b in range(1, B_MAX + 1) if errors[b] <= 0.5 * tolerance]
        return good[0] if good else B_MAX
    quantized = midrise(delta, B_MAX)
    norm = quantized @ quantized

    def holds(b):
        c = B_MAX - b + 1
        return norm >= scale * sum(steps) / DEPTH + 3 * (stored["errors"].get(c, 0) + errors[c])

    if not holds(1):
        return 0
    if recipe == "laq":
        return B_MAX
    if recipe == "aqg-2":
        return B_MAX if holds(B_MAX) else B_MAX // 2
    return next(b for b in range(B_MAX, 0, -1) if holds(b))


def algorithm_1(problem, recipe, rounds):
    quantize = midtread if recipe == "lean" else midrise
    clients = range(problem.num_clients)
    references = [np.zeros_like(problem.initial_params) for _ in clients]
    stored = [{"errors": {}, "num_clients": problem.num_clients} for _ in clients]
    thetas = [problem.initial_params]
    widths = []
    for _ in range(rounds):
        row = []
        for m in clients:
            _, gradient = problem.objective.losses_and_gradients(thetas[-1], *problem.clients[m])
            delta = gradient - references[m]
            errors = {b: np.sum((quantize(delta, b) - delta) ** 2) for b in range(1, B_MAX + 1)}
            width = choose_width(recipe, delta, errors, stored[m], thetas)
            if width:
                references[m] = references[m] + quantize(delta, width)
                stored[m]["errors"] = errors
            row.append(width)
        thetas.append(thetas[-1] - ALPHA * np.sum(references, axis=0))
        widths.append(tuple(row))
    return widths, thetas[-1]


@pytest.mark.parametrize("recipe", ["laq", "aqg", "aqg-2", "lean"])
def test_follows_the_paper(recipe):
    problem = tiny_problem(num_clients=5)
    widths, theta = algorithm_1(problem, recipe, 70)
    simulation = ReferenceSimulation(problem, make_recipe(recipe, B_MAX), ALPHA)
    records = [simulation.run_round() for _ in range(70)]
    assert [record.widths for record in records] == widths
    assert simulation.parameters == pytest.approx(theta, rel=1e-10, abs=1e-12)
    assert len({width for row in widths for width in row}) > 1


def test_losses_are_those_of_the_model_that_was_broadcast():
    problem = tiny_problem(num_clients=3)
    simulation = ReferenceSimulation(problem, make_recipe("gd"), ALPHA)
    before = simulation.loss()
    record = simulation.run_round()
    assert record.loss == before
    assert simulation.run_round(evaluate=False).loss is None
    start = problem.initial_params
    exact = [problem.objective.losses(start, *client) for client in problem.clients]
    assert before == pytest.approx(np.mean(exact))


def test_a_client_with_nan_is_reported_and_the_others_go_on():
    problem = tiny_problem(num_clients=3)
    broken = problem.clients[1]
    broken.features[4, 2] = np.nan
    simulation = ReferenceSimulation(problem, make_recipe("lean"), ALPHA)
    for number in range(5):
        record = simulation.run_round()
        ((client, fault),) = record.faults
        assert client == 1
        assert "non-finite" in fault
        assert record.widths[1] == 0
        assert number > 0 or record.widths[0] > 0
    assert np.isfinite(simulation.parameters).all()
    assert not simulation.clients[1].track.position.any()
