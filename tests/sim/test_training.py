"""Practical federated training: local work, weights, sampling, server optimizers."""

import json
import tomllib
from contextlib import nullcontext
from itertools import chain

import numpy as np
import pytest

from aqg.cli.app import run_app
from aqg.core.downlink import Condensed
from aqg.core.optimizers import SGD, Adam, Momentum
from aqg.core.recipes import make_recipe
from aqg.core.server import broadcast
from aqg.runs.config import resolve, to_toml
from aqg.runs.directory import read_toml
from aqg.runs.setup import build_problem, find_minimum
from aqg.sim.engine import FastSimulation
from aqg.sim.record import DROPPED
from aqg.sim.reference import ReferenceSimulation
from aqg.sim.training import Dropout, LocalTraining, Training
from aqg.wire import decode

from tests.problems import SETTINGS, SOME_RECIPES, soak, tiny_problem


def simulate(kind, name, training, *, seed=4, dropout=None, step_size=0.05, **options):
    problem = tiny_problem(num_clients=6, unequal=True)
    recipe = make_recipe(name, max_staleness=15)
    return kind(problem, recipe, step_size, dropout, seed, training=training, **options)


@pytest.mark.parametrize("name", SOME_RECIPES)
def test_one_full_step_is_the_plain_gradient(name):
    if name == "auto":
        return  # it sends exact gradients in another way: see tests/core/test_auto.py
    plain = simulate(FastSimulation, name, None)
    # A batch that holds every sample goes the long way round.
    one_step = simulate(FastSimulation, name, Training(LocalTraining(batch_size=1000, rate=0.3)))
    for _ in range(10):
        assert one_step.run_round().widths == plain.run_round().widths
    assert one_step.parameters == pytest.approx(plain.parameters, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_pseudo_gradient_is_the_scaled_model_difference(dtype):
    problem = tiny_problem(dtype, unequal=True)
    samples = problem.clients[2]
    local = LocalTraining(steps=4, rate=0.2)
    loss, update = local.update(problem.objective, problem.initial_params, *samples, (0, 2, 1))
    params = problem.initial_params
    for _ in range(4):
        _, gradient = problem.objective.losses_and_gradients(params, *samples)
        params = params - 0.2 * gradient
    difference = (problem.initial_params - params) / (0.2 * 4)
    assert update.dtype == dtype
    assert update == pytest.approx(difference, rel=1e-4 if dtype == "float32" else 1e-12)
    assert loss == problem.objective.losses(problem.initial_params, *samples)


class Recorder:
    """Stands for an objective; notes which samples it was shown."""

    def __init__(self):
        self.batches = []

    def session(self, key):
        return nullcontext(self)

    def losses_and_gradients(self, params, features, labels):
        assert np.array_equal(features[:, 0], labels)
        self.batches.append(labels.tolist())
        return 0.0, np.zeros_like(params)


def batches_of(local, key, num_samples=10):
    recorder = Recorder()
    labels = np.arange(num_samples)
    local.update(recorder, np.zeros(3), labels[:, None].astype(float), labels, key)
    return recorder.batches


def test_batches_pass_over_all_samples_and_reshuffle():
    batches = batches_of(LocalTraining(batch_size=4, epochs=2), key=(7, 1, 3))
    assert [len(batch) for batch in batches] == [4, 4, 2] * 2
    first, second = list(chain(*batches[:3])), list(chain(*batches[3:]))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    # Counted steps go on through the same passes.
    assert batches_of(LocalTraining(batch_size=4, steps=5), key=(7, 1, 3)) == batches[:5]
    for other in ((8, 1, 3), (7, 2, 3), (7, 1, 4)):
        assert batches_of(LocalTraining(batch_size=4), key=other) != batches[:1]


def test_without_a_batch_size_every_step_sees_everything():
    assert batches_of(LocalTraining(steps=3), key=(0, 0, 1)) == [list(range(10))] * 3
    assert batches_of(LocalTraining(epochs=2), key=(0, 0, 1)) == [list(range(10))] * 2
    assert batches_of(LocalTraining(batch_size=99), key=(0, 0, 1)) == [list(range(10))]


DIRECTIONS = np.array([[1.0, -2.0], [0.5, 0.0], [-3.0, 4.0]])


def updates(optimizer):
    state = optimizer.init(2)
    steps = []
    for direction in DIRECTIONS:
        state, update = optimizer.step(state, direction)
        steps.append(update)
    return np.array(steps)


def test_momentum_by_hand():
    expected = [[1.0, -2.0], [0.5 + 0.8, -1.6], [-3 + 0.8 * 1.3, 4 - 0.8 * 1.6]]
    assert updates(Momentum(beta=0.8)) == pytest.approx(np.array(expected))
    assert updates(Momentum(beta=0.0)).tolist() == updates(SGD()).tolist() == DIRECTIONS.tolist()


def test_adam_by_hand():
    mean, square, expected = np.zeros(2), np.full(2, 0.01**2), []
    for direction in DIRECTIONS:
        mean = 0.6 * mean + 0.4 * direction
        square = 0.7 * square + 0.3 * direction**2
        expected.append(mean / (np.sqrt(square) + 0.01))
    assert updates(Adam(b1=0.6, b2=0.7, eps=0.01)) == pytest.approx(np.array(expected))


@pytest.mark.parametrize("feature", ["momentum", "adam"])
def test_server_steps_along_the_update_and_moves_by_the_fresh_share(feature):
    optimizer = SETTINGS[feature].training.optimizer
    simulation = simulate(ReferenceSimulation, "gd", SETTINGS[feature].training)
    state = optimizer.init(21)
    for _ in range(3):
        before = simulation.parameters
        simulation.run_round()
        server = simulation.server.model
        state, update = optimizer.step(state, server.total)
        assert simulation.parameters == pytest.approx(before - 0.05 * update, rel=1e-12)
        expected = 0.1 * server.total @ server.total / 6**2  # fresh share 1 - 0.9
        assert server.history[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["gd", "qsgd", "lean"])
def test_weights_by_hand(name):
    """Clients have 20, 27, .. 55 samples; each counts by its own in the sum and in the loss."""
    weights = np.array([20, 27, 34, 41, 48, 55]) / 37.5
    simulation = simulate(ReferenceSimulation, name, SETTINGS["weights"].training)
    problem, start = simulation.problem, simulation.parameters
    loss = simulation.loss()
    losses = [problem.objective.losses(start, *samples) for samples in problem.clients]
    assert loss == pytest.approx(np.mean(weights * losses))
    record = simulation.run_round()
    assert record.loss == loss
    server = simulation.server
    received = [server.mirror(m) for m in range(server.num_clients)]
    if name == "qsgd":  # keeps no mirrors: take the same uploads once more
        again = simulate(ReferenceSimulation, name, None)
        news = broadcast(again.recipe, again.server)
        messages = [decode(again._client(m, news)[0], 21) for m in range(6)]
        received = [message.values(np.float64) for message in messages]
    expected = start - 0.05 * np.sum(weights[:, None] * np.array(received), axis=0)
    assert simulation.parameters == pytest.approx(expected, rel=1e-12)


def test_weights_make_the_loss_that_of_all_samples():
    config = resolve({"recipe": "gd", "partition": "dirichlet:0.5", "weighting": "samples"})[0]
    problem = build_problem(config)
    features, labels = map(np.concatenate, zip(*problem.clients, strict=True))
    simulation = FastSimulation(problem, make_recipe("gd"), 0.1, training=config.training())
    pooled = problem.objective.losses(simulation.parameters, features, labels)
    assert simulation.loss() == pytest.approx(float(pooled), rel=1e-12)
    minimum = find_minimum(config, problem)
    for _ in range(60):
        simulation.run_round(evaluate=False)
    assert 0 < simulation.loss() - minimum < 0.05


@pytest.mark.parametrize(("fraction", "expected"), [(0.5, 3), (0.3, 2), (0.01, 1), (1.0, 6)])
def test_exactly_the_fraction_is_asked(fraction, expected):
    simulation = simulate(FastSimulation, "gd", Training(participation=fraction))
    seen = np.zeros(6)
    for _ in range(60):
        present = np.array(simulation.run_round().widths) != DROPPED
        assert present.sum() == expected
        seen += present
    assert seen.min() > 0  # everyone has a turn
    assert seen.sum() == 60 * expected


def test_without_memory_the_sampled_sum_estimates_the_full_one():
    """QSGD with 2 of 6 clients: three times their sum; over many draws, the sum of all."""

    def step(name, participation, seed):
        training = Training(participation=participation)
        simulation = simulate(FastSimulation, name, training, seed=seed, step_size=1.0)
        start = simulation.parameters.copy()
        simulation.run_round(evaluate=False)
        return start - simulation.parameters

    mean, total = sum(step("qsgd", 1 / 3, seed) for seed in range(400)) / 400, step("gd", 1.0, 0)
    assert np.linalg.norm(mean - total) < 0.15 * np.linalg.norm(total)


@pytest.mark.parametrize(
    "feature",
    ["weights", "sampling", "momentum", "adam", "everything"]
    + [soak(feature) for feature in ("minibatch steps", "epochs")],
)
def test_lean_converges_with_every_feature(feature):
    """Of the way that gradient descent goes in the same setting, it lacks at most 0.2 %."""
    options = {"training": SETTINGS[feature].training, "step_size": SETTINGS[feature].step}
    exact, lean = (simulate(FastSimulation, name, **options) for name in ("gd", "lean"))
    start = exact.loss()
    exact_bytes, lean_bytes = (
        sum(record.upload_bytes for record in one.run_rounds(90)) for one in (exact, lean)
    )
    assert exact.loss() < 0.8 * start
    assert lean.loss() - exact.loss() < 0.002 * (start - exact.loss())
    assert lean_bytes < exact_bytes / 3


OPTIONS = {
    "recipe": "lean",
    "partition": "dirichlet:0.5",
    "rounds": 6,
    "batch_size": 16,
    "local_epochs": 2,
    "local_rate": 0.05,
    "weighting": "samples",
    "participation": 0.5,
    "optimizer": "adam:b1=0.8",
}


def test_settings_reach_the_simulation_and_survive_toml():
    configs = resolve(OPTIONS)
    assert resolve(tomllib.loads(to_toml(configs))) == configs
    local = LocalTraining(batch_size=16, epochs=2, rate=0.05)
    expected = Training(local, Adam(b1=0.8), "samples", 0.5, downlink=Condensed())
    assert configs[0].training() == expected
    assert configs[0].alpha == 0.01 * 0.5  # Adam's own default, and half of the clients
    assert resolve({"optimizer": "momentum:beta=0.8"})[0].alpha == pytest.approx(0.1 * 0.2)
    assert resolve({"participation": 0.5})[0].alpha == 0.1
    assert resolve({"recipe": "lean"})[0].training() == Training(downlink=Condensed())
    for options in {"recipe": "gd"}, {"recipe": "lean", "downlink": "full"}:
        assert resolve(options)[0].training() == Training()


def test_command_line_has_every_option(tmp_path, capsys):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    assert run_app(["run", *flags, "--json", f"--out={tmp_path}/run"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["rounds"] == 6
    found = resolve(read_toml(tmp_path / "run" / "config.toml"))
    assert found == resolve({**OPTIONS, "step": "auto"})
    lines = (tmp_path / "run" / "lean" / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["widths"].count(DROPPED) for line in lines] == [5] * 6


@pytest.mark.parametrize("engine", [FastSimulation, ReferenceSimulation])
def test_fedavg_is_the_mean_of_those_who_took_part(engine):
    """Sampled, and away now and then: whatever their number, it is the mean of their updates."""
    problem, dropout, natural = tiny_problem(num_clients=10), Dropout(0.4, seed=3), 0.1 * 3 / 10
    training = Training(LocalTraining(batch_size=5, steps=3, rate=0.1), participation=0.5)
    simulation = engine(problem, make_recipe("fedavg"), natural, dropout, 1, training=training)
    counts = set()
    for number in range(1, 9):
        away = dropout.dropped(number, 10) | training.unsampled(number, 10, 1)
        present = np.flatnonzero(~away)
        counts.add(len(present))
        before = simulation.parameters.copy()
        updates = [
            training.local.update(problem.objective, before, *problem.clients[m], (1, m, number))[1]
            for m in present
        ]
        simulation.run_round()
        expected = before if not updates else before - 0.3 * np.mean(updates, axis=0)
        assert simulation.parameters == pytest.approx(expected, abs=1e-6)
    assert len(counts) > 2


def test_rate_is_met_and_rounds_differ():
    dropout = Dropout(0.3, seed=1)
    away = np.array([dropout.dropped(k, 50) for k in range(1, 201)])
    assert away.mean() == pytest.approx(0.3, abs=0.02)
    assert len({tuple(row) for row in away}) == 200


def test_a_round_does_not_depend_on_the_ones_before():
    dropout = Dropout(0.5, seed=4)
    late = dropout.dropped(90, 10)
    dropout.dropped(1, 10)
    assert np.array_equal(dropout.dropped(90, 10), late)
    assert not np.array_equal(Dropout(0.5, seed=5).dropped(90, 10), late)


def test_absences_add_to_chance():
    dropout = Dropout(0.2, seed=2, absences=((0, 5, 6), (9, 1, 99)))
    assert [bool(dropout.dropped(k, 4)[0]) for k in (5, 6)] == [True, True]
    assert np.array_equal(dropout.dropped(7, 4), Dropout(0.2, seed=2).dropped(7, 4))
