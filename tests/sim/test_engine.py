"""The reference against the paper's pseudocode, written out once more in plain NumPy.

And the fast engine against the reference: uploads, widths, bytes and models; and its shortcuts.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from aqg.core.grids import Grid, measure, round_up_to_bfloat16
from aqg.core.recipes import make_recipe
from aqg.core.space import _PIECE_BYTES, num_threads
from aqg.errors import ConfigError
from aqg.objectives import make_objective
from aqg.sim.engine import FastSimulation, NumpyBackend, stack_small_clients
from aqg.sim.problem import Problem, Samples
from aqg.sim.reference import ReferenceSimulation
from aqg.sim.training import Dropout, LocalTraining

from tests.problems import (
    assert_same,
    check_engines,
    check_torch,
    in_setting,
    settings,
    tiny_problem,
)


@pytest.mark.parametrize(("recipe", "setting"), settings())
def test_equals_the_reference_bit_for_bit(recipe, setting):
    arguments, options = in_setting(recipe, setting)
    check_engines(*arguments, **options, rounds=20)


@pytest.mark.parametrize(
    ("recipe", "setting"),
    settings("dropouts", "minibatch steps", "everything", "condensed", "dog, exact"),
)
def test_torch_takes_the_same_decisions(recipe, setting):
    """The code that runs on a GPU, on torch's CPU device."""
    arguments, options = in_setting(recipe, setting)
    check_torch(*arguments, **options, rounds=20)


@pytest.mark.parametrize(("recipe", "setting"), settings("paper", "condensed", "dog, exact"))
def test_cuda_takes_the_same_decisions(recipe, setting):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    arguments, options = in_setting(recipe, setting)
    check_torch(*arguments, **options, rounds=60, device="cuda")


def wide_problem(num_clients, dtype="float64"):
    """Clients with large gradients."""
    random = np.random.default_rng(5)
    objective = make_objective("softmax", 3000, 8, 0.1, "mean")
    features = random.standard_normal((num_clients, 4, 3000)).astype(dtype)
    labels = random.integers(0, 8, (num_clients, 4))
    clients = tuple(Samples(*samples) for samples in zip(features, labels, strict=True))
    return Problem(objective, clients, objective.init_params(1).astype(dtype))


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("name", ["lean", "aqg-2", "onebit"])
def test_threads_are_as_many_as_blas_has_and_change_nothing(name, threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    assert num_threads() == max(1, threads)
    problem = wide_problem(num_clients=12)
    assert 12 * problem.initial_params.nbytes > _PIECE_BYTES
    arguments = (problem, make_recipe(name), 0.02)
    fast, reference = FastSimulation(*arguments), ReferenceSimulation(*arguments)
    assert_same(fast, reference, rounds=4)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", ["gd", "aqg", "lean"])
def test_logistic_equals_the_reference(name, dtype):
    """The compiled gradient serves both engines, also for features that are slices."""
    problem = tiny_problem(dtype, 6, l2=0.01, model="logistic", scaling="sum")
    wide = [np.repeat(samples.features, 2, axis=1) for samples in problem.clients]
    clients = [Samples(f[:, :6], s.labels) for f, s in zip(wide, problem.clients, strict=True)]
    arguments = (replace(problem, clients=tuple(clients)), make_recipe(name), 0.01)
    assert_same(FastSimulation(*arguments), ReferenceSimulation(*arguments), rounds=25)


def test_clients_that_share_samples_take_no_memory_of_their_own():
    few = wide_problem(num_clients=5)
    base = few.clients[0].features.base
    many = Problem(few.objective, few.clients * 3, few.initial_params)
    stacks = stack_small_clients(many)
    assert [stacks[m].first for m in range(15)] == [0] * 5 + [5] * 5 + [10] * 5
    assert all(np.shares_memory(stack.features, base) for stack in stacks.values())
    arguments = (many, make_recipe("lean"), 0.01)
    assert FastSimulation(*arguments).run_round() == ReferenceSimulation(*arguments).run_round()


@pytest.mark.parametrize("grid", list(Grid))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_torch_measures_the_same(grid, dtype):
    """Rows of all magnitudes, one of them zero and one with a NaN."""
    from aqg.sim.torch_backend import measure_rows

    random = np.random.default_rng(3)
    rows = random.standard_normal((5, 1000)) * 10.0 ** random.integers(-9, 9, (5, 1))
    rows[3], rows[4, 7] = 0, np.nan
    rows = rows.astype(dtype)
    expected, found = measure(rows, grid, 4), measure_rows(torch.tensor(rows), grid, 4)
    assert found.in_range.tolist() == expected.in_range.tolist() == [True] * 4 + [False]
    for name in ("steps", "errors", "squared_norm", "quantized_norm"):
        ours, theirs = getattr(expected, name)[:4], getattr(found, name)[:4]
        tolerance = 1e-5 if dtype == np.float32 else 1e-12
        assert theirs == pytest.approx(ours, rel=tolerance, abs=1e-300), name


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_steps_that_overflow_are_taken_without_a_word(dtype):
    """Warnings are errors here: a run that diverges must reach its end all the same."""
    backend = NumpyBackend(tiny_problem(num_clients=2))
    params = np.array([1.0, -2.0, 3.0, 4.0], dtype)
    direction = np.array([0.1, 1e300, -1e300, np.inf])
    stepped, squared_norm = backend.take_step(params, direction, direction, 1e10)
    with np.errstate(over="ignore"):
        expected = params - (1e10 * direction).astype(dtype)
    assert stepped.dtype == dtype
    assert np.array_equal(stepped, expected)
    assert np.isinf(squared_norm)


def test_the_loss_of_absent_clients_counts_too():
    problem = tiny_problem(num_clients=4)
    dropout = Dropout(absences=((1, 2, 3), (3, 1, 4)))
    simulation = FastSimulation(problem, make_recipe("aqg"), 0.05, dropout)
    for _ in range(5):
        expected = simulation.loss()
        assert simulation.run_round().loss == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("scaling", ["mean", "sum"])
def test_pieces_have_the_losses_and_gradients_of_whole_clients(scaling):
    from aqg.sim.torch_backend import cut

    random = np.random.default_rng(4)
    objective = make_objective("softmax", 7, 3, 0.2, scaling)
    clients = [
        Samples(random.standard_normal((size, 7)), random.integers(0, 3, size))
        for size in (1100, 512, 3, 700)
    ]
    params = random.standard_normal(objective.num_params)
    pieces = cut(clients, objective.sample_weight, torch.tensor)
    assert pieces.features.shape == (3 + 1 + 1 + 2, 512, 7)
    losses, gradients = pieces.losses_and_gradients(objective, torch.tensor(params))
    for client, samples in enumerate(clients):
        loss, gradient = objective.losses_and_gradients(params, *samples)
        assert losses[client].item() == pytest.approx(loss, rel=1e-12)
        assert gradients[client].numpy() == pytest.approx(gradient, rel=1e-10, abs=1e-12)


SIZES = (40, 7, 23, 16)
TRAININGS = {
    "steps": LocalTraining(8, steps=5, rate=0.3),
    "more steps than a pass": LocalTraining(16, steps=6, rate=0.3),
    "epochs": LocalTraining(8, epochs=2, rate=0.3),
    "batches larger than clients": LocalTraining(64, steps=3, rate=0.3),
}


@pytest.mark.parametrize("l2", [0.0, 0.2])
@pytest.mark.parametrize("model", ["softmax", "mlp:5"])
@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
def test_clients_of_any_size_step_together(training, model, l2):
    random = np.random.default_rng(5)
    objective = make_objective(model, 6, 3, l2, "mean")
    params = torch.tensor(objective.init_params(1))
    features = torch.tensor(random.standard_normal((sum(SIZES), 6)))
    labels = torch.tensor(random.integers(0, 3, sum(SIZES)))
    starts = np.cumsum([0, *SIZES[:-1]]).tolist()
    keys = [(3, client, 12) for client in range(len(SIZES))]
    losses, updates = training.update_many(objective, params, features, labels, starts, SIZES, keys)
    for m, (start, size) in enumerate(zip(starts, SIZES, strict=True)):
        own = slice(start, start + size)
        loss, update = training.update(objective, params, features[own], labels[own], keys[m])
        assert float(losses[m]) == pytest.approx(float(loss), rel=1e-12)
        np.testing.assert_allclose(updates[m], update, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("model", ["softmax", "mlp:5"])
@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
def test_clients_of_one_size_step_together_to_the_same_bits(training, model, dtype, monkeypatch):
    monkeypatch.setattr("aqg.sim.engine._TOGETHER_BYTES", 1000)  # so that it takes several pieces
    random = np.random.default_rng(5)
    objective = make_objective(model, 6, 3, 0.2, "mean")
    params = objective.init_params(1).astype(dtype)
    sizes = (20, 20, 7, 20, 20, 20, 20, 20)
    drawn = [(random.standard_normal((n, 6)), random.integers(0, 3, n)) for n in sizes]
    clients = tuple(Samples(features.astype(dtype), labels) for features, labels in drawn)
    backend = NumpyBackend(Problem(objective, clients, params))
    for present in (np.arange(8), np.array([0, 2, 3, 5, 7])):
        keys = [(3, client, 12) for client in present.tolist()]
        losses, updates = backend.local_updates(training, params, present, keys)
        for place, client in enumerate(present):
            loss, update = training.update(objective, params, *clients[client], keys[place])
            assert losses[place].tobytes() == loss.tobytes()
            assert updates[place].tobytes() == update.tobytes()


def test_models_must_fit_the_clients():
    objective = make_objective("softmax", 6, 3, 0.0, "mean")
    given = np.zeros((4, 5, 6)), np.zeros((4, 5), np.int64), np.ones((4, 5))
    with pytest.raises(ConfigError, match=r"\(3, 21\); features of shape \(4, 5, 6\)"):
        objective.weighted_losses_and_gradients(np.zeros((3, 21)), *given)


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


@pytest.mark.parametrize("device", ["cpu", "torch:cpu"])
@pytest.mark.parametrize("name", ["lean", "ef21-m"])
def test_a_client_with_nan_is_reported_and_the_others_go_on(name, device):
    """What is kept of it stays as it was, here the zeros of the start."""
    problem = tiny_problem(num_clients=3)
    problem.clients[1].features[4, 2] = np.nan
    simulation = FastSimulation(problem, make_recipe(name), ALPHA, device=device)
    for number in range(5):
        record = simulation.run_round()
        ((client, fault),) = record.faults
        assert (client, record.widths[1]) == (1, 0)
        assert "non-finite" in fault
        assert number > 0 or record.widths[0] > 0
    assert np.isfinite(simulation.parameters).all()
    clients = simulation.state().clients
    vectors = [clients.track.position, *(v for s in clients.stages.values() for v in s.values())]
    assert all(vector[0].any() for vector in vectors)
    assert not any(vector[1].any() for vector in vectors)
